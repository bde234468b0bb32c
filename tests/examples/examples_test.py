"""Every folder of examples/ loads, and its smoke form trains."""

import ast
import importlib
import importlib.util
import json
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import pytest

from examples.cispo import algorithm as cispo
from examples.max_rl import algorithm as max_rl
from stppo_jax import types
from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import correction
from stppo_jax.assembly import components
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.training import loop
from tests.support import client_envs
from tests.support import env_server
from tests.support import tiny_run

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'
# Folder -> the settings that name its own code.
FOLDERS = {
    'agent_program': {'env.kind'},
    'calculator': {'data.source'},
    'cispo': {'algorithm.variant'},
    'countdown': {'data.source', 'env.kind', 'env.reward'},
    'gem_guess': set(),
    'gem_sudoku': set(),
    'guess_number': {'data.source', 'env.kind'},
    'maze': {'data.source', 'env.kind'},
    'max_rl': {'algorithm.variant'},
    'mix': {'env.mix[1].data.source'},
    'openenv_guess': set(),
    'reasoning_gym_sums': set(),
    'signals': {'data.source', 'env.kind'},
    'textarena_nim': set(),
    'verifiers_search': set(),
}
# Folder -> the package that it needs.
PACKAGES = {
    'agent_program': 'openai',
    'gem_guess': 'gem',
    'gem_sudoku': 'gem',
    'openenv_guess': 'openenv',
    'reasoning_gym_sums': 'reasoning_gym',
    'textarena_nim': 'textarena',
}
# Folder -> its environment's core metric, and another.
METRICS = {
    'countdown': ('right', 'legal'),
    'gem_guess': ('success', 'moves'),
    'gem_sudoku': ('success', 'moves'),
    'guess_number': ('found', 'guesses'),
    'maze': ('return', 'solved'),
    'reasoning_gym_sums': ('solved', 'answered'),
    'signals': ('understood', 'as_sender'),
    'textarena_nim': ('won', 'moves'),
}


def load(folder, mode='smoke'):
  return importlib.import_module(f'examples.{folder}.config').get_config(mode)


class FolderTest(parameterized.TestCase):

  @parameterized.parameters(*FOLDERS)
  def test_both_forms_are_valid(self, folder):
    for mode in ('', 'smoke'):
      config = validation.validate(load(folder, mode))
      objective.make_variant(config)
      self.assertEqual(config.name, '_'.join(filter(None, [folder, mode])))
      self.assertContainsSubset(FOLDERS[folder], components.plugin_names(config))

  @parameterized.parameters(*FOLDERS)
  def test_readme_has_command_and_result(self, folder):
    command = f'python run.py --config=examples/{folder}/config.py'
    text = (EXAMPLES / folder / 'README.md').read_text(encoding='utf-8')
    for words in (command, f'{command}:smoke', 'one machine'):
      self.assertIn(words, text)
    config = (EXAMPLES / folder / 'config.py').read_text(encoding='utf-8')
    self.assertIn(command, ast.get_docstring(ast.parse(config)))

  @parameterized.parameters(*FOLDERS)
  @pytest.mark.slow
  def test_smoke_form_trains(self, folder):
    if folder in PACKAGES and not importlib.util.find_spec(PACKAGES[folder]):
      self.skipTest(f'{PACKAGES[folder]} is not installed')
    config = load(folder)
    if folder == 'openenv_guess':
      url = env_server.start(self.addCleanup, EXAMPLES / folder / 'server.py')
      config.env.kind = f'openenv:{url}'
    if folder == 'verifiers_search':
      config.env.options['python'] = client_envs.find('verifiers/bin/python')
      environment = {'PYTHONPATH': str(EXAMPLES / folder)}
      self.enterContext(mock.patch.dict(os.environ, environment))
    config.log.tensorboard = False
    # One update and one compiled shape: the folder's parts are the same. There are enough episodes
    # for rewards that differ, without which the step is 0.
    config.train.updates = 1
    config.train.episodes = config.train.mini_batch = 64
    config.train.micro_batch = 16
    config.train.length_buckets = config.train.length_buckets[-1:]
    config.eval.episodes = config.eval.rows = 8
    self.enterContext(tiny_run.on_one_device())
    with tempfile.TemporaryDirectory() as workdir:
      loop.start(config, workdir)
      rows = metrics_lib.read_metrics(workdir)
      self.assertEqual([row['step'] for row in rows], [0, 1])
      self.assertGreater(rows[1]['stppo/step_norm'], 0)
      with open(os.path.join(workdir, 'report.html'), encoding='utf-8') as file:
        page = file.read()
      with open(os.path.join(workdir, 'config.json'), encoding='utf-8') as file:
        self.assertContainsSubset(FOLDERS[folder], json.load(file).get('plugins', {}))
    self.check(folder, rows[1:], page)

  def check(self, folder, rows, page):
    """Checks the metrics and the report of one folder."""
    if folder in METRICS:
      core, other = METRICS[folder]
      wanted = (f'{core}/mean', f'env/{other}/mean', f'val-core/all/{core}', f'val-aux/all/{other}')
      self.assertContainsSubset([*wanted, 'val-core/all/score'], rows[-1])
      self.assertNoCommonElements(rows[-1], ('em/mean', 'f1/mean', 'env/searches/mean'))
      self.assertIn(f'"score":"{core}"', page)  # the report's table
    if folder in ('cispo', 'max_rl'):  # neither has a critic
      for row in rows:
        self.assertNoCommonElements(row, ('critic/vf_loss', 'critic/lr'))


class MaxRlTest(absltest.TestCase):

  def test_by_hand(self):
    """Means 1/4, 1 and 0: a success in four is worth 3, one among successes 0."""
    scores = jnp.array([1.0, 0, 0, 0, 1, 1, 0, 0])
    groups = jnp.array([0, 0, 0, 0, 1, 1, 2, 2])
    np.testing.assert_allclose(max_rl.over_mean(scores, groups), [3, -1, -1, -1, 0, 0, 0, 0])

  def test_tokens_share_their_episodes_advantage(self):
    turn_ids = jnp.array([[0, 1, 0, 2], [0, 1, 1, 0]])
    zeros = jnp.zeros(turn_ids.shape)
    batch = make_batch(turn_ids, rewards=zeros.at[0, 3].set(1.0))
    got = advantages.estimate(batch, max_rl.MAX_RL).advantages
    # Scores 1 and 0, mean 1/2: (1 - .5) / .5 = 1 and -1.
    np.testing.assert_allclose(got, [[0, 1, 0, 1], [0, -1, -1, 0]])


class CispoTest(absltest.TestCase):

  def test_by_hand(self):
    """Ratios 1.5, .5 and 1, advantages 2: the first weight is 1.2, no other is clipped."""
    logp = jnp.log(jnp.array([[1.5, 0.5, 1.0]])) - 1
    batch = make_batch(
        jnp.ones((1, 3), jnp.int32), old_logp=-jnp.ones((1, 3)), advantages=jnp.full((1, 3), 2.0)
    )
    weights = jnp.ones((1, 3))
    to_loss, to_bias, aux = correction.cotangents(logp, batch, cispo.CISPO, weights=weights)
    # d(-J)/dlogp = -clip(w) A: no token loses its gradient; C = (w - clip(w)) A = .3 * 2.
    np.testing.assert_allclose(to_loss, [[-2.4, -1.0, -2.0]], rtol=1e-6)
    np.testing.assert_allclose(to_bias, [[0.6, 0.0, 0.0]], atol=1e-6)
    np.testing.assert_array_equal(aux['clipped'], [[True, False, False]])

  def test_on_policy_gradient(self):
    batch = make_batch(jnp.ones((1, 2), jnp.int32), advantages=jnp.array([[2.0, -1.0]]))
    weights = jnp.ones((1, 2))
    got = correction.cotangents(jnp.zeros((1, 2)), batch, cispo.CISPO, weights=weights)
    np.testing.assert_allclose(got[0], [[-2.0, 1.0]])
    np.testing.assert_array_equal(got[1], np.zeros((1, 2)))


def make_batch(turn_ids, **fields):
  """A TurnBatch of one group."""
  zeros = jnp.zeros(turn_ids.shape)
  names = 'rewards old_logp ref_logp old_values advantages returns'.split()
  return types.TurnBatch(
      tokens=turn_ids,
      action_mask=(turn_ids > 0).astype(jnp.float32),
      turn_ids=turn_ids,
      group_ids=jnp.zeros(len(turn_ids), jnp.int32),
      **{name: fields.get(name, zeros) for name in names},
  )


if __name__ == '__main__':
  absltest.main()
