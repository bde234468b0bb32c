"""The experiments of real models: their texts, how they differ, and a small run of each.

(That every experiment loads and validates, in both forms, is in config_test.)
"""

import dataclasses
import importlib
import os
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from stppo_jax.algorithms import variants
from stppo_jax.rollout import prepare
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.training import loop
from stppo_jax.types import UserError
from tests.support import tiny_run

FOLDER = pathlib.Path(__file__).parents[2] / 'experiments'

# Fields in which an experiment differs from ppo_7b.
ALGORITHM = {'algorithm.variant', 'algorithm.aggregation'}
GROUPS = ALGORITHM | {'rollout.group_size', 'train.episodes', 'train.mini_batch'}
MODEL = ALGORITHM | {'model.folder', 'model.chat_template_kwargs'}
DATA = ALGORITHM | {'data.source', 'data.corpus', 'data.eval_split'}
# File -> these fields, besides its name.
CHANGES = {
    'ppo_7b': set(),
    'turn_ppo_7b': ALGORITHM,
    's_ppo_7b': ALGORITHM,
    'st_ppo_7b': ALGORITHM,
    'grpo_7b': GROUPS,
    'so_grpo_7b': GROUPS,
    'st_ppo_qwen3_8b': MODEL,
    'st_ppo_qwen3_30b_a3b': MODEL | {'rollout.routing_replay'},
    'st_ppo_qwen3_5_4b': MODEL,
    'st_ppo_med_7b': DATA | {'retriever.kind', 'retriever.timeout_s', 'train.updates'},
}
SMALL = {'st_ppo_qwen3_5_0_8b'}  # it differs from st_ppo_smollm2


def load(name, mode=''):
  return importlib.import_module(f'experiments.{name}').get_config(mode)


def fields(config, prefix=''):
  """{'train.updates': 1005, ..}."""
  found = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      found |= fields(value, f'{prefix}{field.name}.')
    else:
      found[prefix + field.name] = value
  return found


class ExperimentsTest(parameterized.TestCase):

  def test_all_files_are_in_the_table(self):
    self.assertEqual({path.stem for path in FOLDER.glob('*[0-9]b.py')}, SMALL | set(CHANGES))

  @parameterized.parameters(*CHANGES)
  def test_experiment_differs_only_in_named_fields(self, name):
    config, base = validation.validate(load(name)), fields(load('ppo_7b'))
    changed = {path for path, value in fields(config).items() if value != base[path]}
    self.assertEqual(changed - {'name'}, CHANGES[name])
    self.assertEqual(config.name, name)
    self.assertIn(
        config.algorithm.variant, ('ppo', name.split('_7b')[0].split('_qwen')[0].split('_med')[0])
    )
    prepare.load_shape(config)  # a plan knows the model by its name

  @parameterized.parameters(*CHANGES)
  def test_its_objective_is_the_row_that_it_names(self, name):
    config = load(name)
    row = variants.VARIANTS[config.algorithm.variant]
    own = {'aggregation': 'token-mean'} if name == 'ppo_7b' else {}
    expected = dataclasses.replace(row, norm_length=config.rollout.max_total, **own)
    self.assertEqual(objective.make_variant(config), expected)

  @parameterized.parameters(*CHANGES)
  def test_it_opens_with_its_command_and_its_result(self, name):
    text = importlib.import_module(f'experiments.{name}').__doc__
    self.assertIn(f'python run.py --config=experiments/{name}.py', text)
    self.assertRegex(text, 'Not run yet|Seen')

  @parameterized.parameters(*CHANGES)
  def test_smallest_form_is_valid_and_keeps_algorithm(self, name):
    config, large = validation.validate(load(name, 'smoke')), load(name)
    self.assertEqual(config.name, f'{name}_smoke')
    self.assertEqual(config.algorithm, large.algorithm)
    self.assertEqual((config.model.folder, config.data.source), ('embedded', 'embedded'))
    self.assertEqual(config.train.updates, 2)
    self.assertEqual(config.train.micro_batch % 8, 0)  # eight devices can split it

  def test_another_form_is_refused(self):
    for name in [*CHANGES, 'st_ppo_smollm2']:
      with self.assertRaisesRegex(UserError, ':smoke'):
        load(name, 'somke')

  def test_the_settings_are_those_of_search_r1(self):
    config = load('ppo_7b')
    expected = {
        'train.updates': 1005,
        'train.episodes': 512,
        'train.mini_batch': 256,
        'train.epochs': 1,
        'rollout.group_size': 1,
        'rollout.temperature': 1.0,
        'rollout.top_p': 1.0,
        'rollout.max_prompt': 2048,
        'rollout.max_turn': 500,
        'rollout.max_observation': 500,
        'rollout.max_total': 4096,
        'actor.lr': 1e-6,
        'actor.warmup': 0.285,
        'critic.lr': 1e-5,
        'critic.warmup': 0.015,
        'actor.grad_clip': 1.0,
        'critic.grad_clip': 1.0,
        'env.max_searches': 4,
        'env.reward': 'em',
        'retriever.top_k': 3,
        'retriever.dialect': 'search_r1',
        'model.folder': 'models/Qwen2.5-7B',
    }
    self.assertEqual({path: validation.get(config, path) for path in expected}, expected)
    columns = {
        'advantage': 'token_gae',
        'ratio': 'token',
        'clip_low': 0.2,
        'clip_high': 0.2,
        'value_clip': 0.5,
        'entropy_coef': 0.001,
        'gamma': 1.0,
        'lam': 1.0,
        'whiten': True,
        'kl_in': 'reward',
        'kl_estimator': 'k1',
        'kl_coef': 0.001,
        'aggregation': 'token-mean',
    }
    self.assertContainsSubset(columns, objective.make_variant(config).described())

  def test_its_grpo_is_that_of_search_r1(self):
    columns = {
        'advantage': 'group_zscore',
        'ratio': 'token',
        'whiten': False,
        'kl_in': 'loss',
        'kl_estimator': 'k3',
        'kl_coef': 0.001,
    }
    self.assertContainsSubset(columns, objective.make_variant(load('grpo_7b')).described())

  @parameterized.parameters('', 'cpu', 'smoke')
  def test_smollm2_has_three_forms_of_one_algorithm(self, mode):
    config = validation.validate(load('st_ppo_smollm2', mode))
    self.assertEqual(config.name, '_'.join(filter(None, ['st_ppo_smollm2', mode])))
    self.assertEqual(config.algorithm.variant, 'st_ppo')
    self.assertEqual(config.retriever.kind, 'bm25')
    self.assertEqual((mode == ''), config.train.updates >= 100)

  @parameterized.parameters('st_ppo_7b', 'grpo_7b')
  @pytest.mark.slow
  def test_its_smallest_form_runs(self, name):
    with tempfile.TemporaryDirectory() as tmp, tiny_run.on_one_device():
      config = load(name, 'smoke')
      scores = loop.start(config, tmp)
      self.assertIn('val-core/all/em', scores)
      self.assertTrue(os.path.exists(os.path.join(tmp, 'report.html')))


if __name__ == '__main__':
  absltest.main()
