"""The table of metrics describes the names that the code gives. Real runs: readme_test."""

import itertools
import re

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from stppo_jax import types
from stppo_jax.envs import factory
from stppo_jax.models import moe
from stppo_jax.monitoring import health
from stppo_jax.monitoring import metric_names
from stppo_jax.training import diagnostics
from tests.support import metric_meanings


class MetricNamesTest(parameterized.TestCase):

  @parameterized.parameters(
      ('val-core/all/em', 'Mean of a score over all held-out questions.'),
      ('val-core/macro/em', 'Mean over the data sets, each with the same weight.'),
      (
          'val-core/nq/em',
          'Mean of a score over the questions of one data set, or of one environment of a mix.',
      ),
      ('val-core/all/em_hops2', 'The main score of questions that combine n facts.'),
      ('role/first/absent', 'Share of episodes in which the role never moved.'),
      ('actor/unknown', ''),
  )
  def test_the_most_specific_name_counts(self, name, meaning):
    self.assertEqual(metric_meanings.meaning(name), meaning)

  def test_core_metrics_take_no_name_of_the_run(self):
    names = {name for group in metric_names.GROUPS.values() for name in group}
    user = {'<name>/mean', 'env/<name>/mean', 'role/<role>/<name>/mean', 'role/<role>/<metric>'}
    for pattern in names - user:
      parts = re.split(r'\{(.*?)\}', re.sub(r'<\w+>', 'x', pattern))  # text, a,b, text, ..
      for words in itertools.product(*(part.split(',') for part in parts)):
        # `core`/mean would be the metric of the run, or its metric of a role.
        core = ''.join(words).removesuffix('/mean').removeprefix('role/x/')
        self.assertTrue(factory.is_reserved(core), core)

  def test_no_metric_of_the_run_is_in_the_table_of_the_user(self):
    names = {name for group in metric_names.GROUPS.values() for name in group}
    self.assertEmpty([n for n in names if re.fullmatch('env/[^<]*/mean', n)])
    self.assertEmpty([n for n in names if re.fullmatch('val-core/all/[^<]*', n)])

  @parameterized.parameters('score', 'num_turns', 'pass@2', 'em_hops2', 'critic/score', 'val-x')
  def test_reserved_core_metric_is_refused_at_start(self, name):
    class Game:
      core_metrics = (name,)

      def __init__(self, task):
        del task

    with self.assertRaisesRegex(types.UserError, f'core_metrics name {name}, as metrics of the'):
      factory.make_factory('mine:Game', Game, {}, {})
    Game.core_metrics = ('right', 'reward/acc', 'solved_2')
    factory.make_factory('mine:Game', Game, {}, {})

  def test_metrics_of_roles_rules_and_experts_are_described(self):
    sums = {'tokens': np.ones((1, 2)), 'entropy': np.ones(1), 'replaced': 0, 'changed': 0}
    names = [*diagnostics.ROLE_NAMES, *moe.load_metrics(sums, 1)]
    names += [f'role/a/{name}' for name in diagnostics.ROLE_NAMES.values()]
    names += [f'health/{name}' for name in health.RULES]
    names += [name for rule in health.RULES.values() for name in rule.metrics]
    for name in names:
      self.assertTrue(metric_meanings.meaning(name), name)


if __name__ == '__main__':
  absltest.main()
