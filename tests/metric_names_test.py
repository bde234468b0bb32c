"""The table of metrics describes the names that the code gives. Real runs: readme_test."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from stppo_jax.models import moe
from stppo_jax.monitoring import health
from stppo_jax.training import diagnostics
from tests.support import metric_meanings


class MetricNamesTest(parameterized.TestCase):

  @parameterized.parameters(
      ('val-core/all/em', 'Mean of a score over all held-out questions.'),
      ('val-core/macro/em', 'Mean over the data sets, each with the same weight.'),
      ('val-core/nq/em', 'Mean of a score over the questions of one data set.'),
      ('val-core/all/em_hops2', 'The main score of questions that combine n facts.'),
      ('role/first/absent', 'Share of episodes in which the role never moved.'),
      ('actor/unknown', ''),
  )
  def test_the_most_specific_name_counts(self, name, meaning):
    self.assertEqual(metric_meanings.meaning(name), meaning)

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
