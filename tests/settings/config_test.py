"""The schema of a run: every rule of `validate`, every experiment, and the tables it names."""

import ast
import dataclasses
import importlib.util
import math
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from stppo_jax import config as schema
from stppo_jax.algorithms import segments
from stppo_jax.algorithms import variant as variant_lib
from stppo_jax.algorithms import variants
from stppo_jax.assembly import components
from stppo_jax.envs import rewards
from stppo_jax.envs import search
from stppo_jax.models import hf_config
from stppo_jax.models import lora
from stppo_jax.retrieval import http
from stppo_jax.retrieval import kinds
from stppo_jax.rollout import servers
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.text import tool_calls
from stppo_jax.types import UserError

PROGRAM = {
    'env.kind': 'gateway:a:b',
    'env.branch_credit': 'program',
    'retriever.kind': 'none',
    'pipeline.staleness': 0,
}
EXPERIMENTS = pathlib.Path(__file__).parents[2] / 'experiments'


def changed(**values):
  """The default config with fields replaced: changed(**{'train.updates': 3})."""
  config = schema.Config()
  for path, value in values.items():
    *parents, name = path.split('.')
    setattr(validation.get(config, '.'.join(parents)) if parents else config, name, value)
  return config


def resolve(config):
  """Validates the config, and the objective that it names."""
  return objective.make_variant(validation.validate(config))


RULES = {path: rules for path, rules, _ in validation.fields(schema.Config())}


class ValidateTest(parameterized.TestCase):

  def refused(self, *words, **values):
    """Asserts that `validate` raises one line that contains each of the words."""
    with self.assertRaises(UserError) as caught:
      resolve(changed(**values))
    message = str(caught.exception)
    self.assertNotIn('\n', message)
    for word in words:
      self.assertIn(word, message)

  def test_defaults_are_valid(self):
    config = schema.Config()
    objective.make_variant(config)
    self.assertIs(validation.validate(config), config)

  @parameterized.parameters(*(path for path, rules in RULES.items() if rules.allowed))
  def test_rejected_choice_shows_allowed_values(self, path):
    for wrong in ('nonsense', 7):
      self.refused(f'config.{path}={wrong!r}', *map(str, RULES[path].allowed), **{path: wrong})

  @parameterized.parameters(*(path for path, rules in RULES.items() if rules.at_least is not None))
  def test_rejected_number_shows_lower_bound(self, path):
    least = RULES[path].at_least
    self.refused(f'config.{path}={least - 1}', f'at least {least}', **{path: least - 1})
    self.refused(f'config.{path}=nan', f'at least {least}', **{path: float('nan')})

  @parameterized.parameters(*(path for path, rules in RULES.items() if rules.above is not None))
  def test_open_lower_bound(self, path):
    bound = RULES[path].above
    self.refused(f'config.{path}={bound}', f'above {bound}', **{path: bound})
    self.refused(f'config.{path}=nan', **{path: float('nan')})

  @parameterized.parameters(*(path for path, rules in RULES.items() if rules.at_most is not None))
  def test_upper_bound(self, path):
    most = RULES[path].at_most
    self.refused(f'config.{path}={most + 1}', f'at most {most}', **{path: most + 1})

  @parameterized.parameters(
      ({'rollout.top_p': 0.0}, ('rollout.top_p=0.0', 'above 0')),
      ({'rollout.top_p': 1.5}, ('rollout.top_p=1.5', 'at most 1')),
      ({'rollout.top_p': 0.9}, ('top_p=0.9', 'old_logp=sampler', 'top_p=1')),
      (
          {
              'rollout.top_k': 5,
              'rollout.group_size': 4,
              'algorithm.variant': 'rloo',
              'algorithm.old_logp': 'sampler',
          },
          ('top_k=5', 'a ratio'),
      ),
      ({'rollout.top_k': 20}, ('top_k=20', 'old_logp=sampler', 'top_k=0')),
      ({'train.micro_batch': 48}, ('micro_batch=48', 'mini_batch=256', 'divisor')),
      ({'train.mini_batch': 192}, ('mini_batch=192', 'episodes=512', 'divisor')),
      ({'rollout.group_size': 3}, ('group_size=3', 'episodes=512', 'divisor')),
      ({'train.length_buckets': ()}, ('length_buckets=()', 'max_total=4096')),
      ({'train.length_buckets': (4096, 512)}, ('length_buckets=(4096, 512)', 'rise')),
      ({'train.length_buckets': (512, 512, 4096)}, ('length_buckets', 'rise')),
      ({'train.length_buckets': (512, 2048)}, ('length_buckets', 'max_total=4096')),
      ({'rollout.max_total': 2500}, ('max_total=2500', '2548')),
      ({'model.lora_targets': ('q_proj', 'lm_head')}, ("('q_proj', 'lm_head')", 'down_proj')),
      ({'model.lora_targets': ()}, ('lora_targets=()', 'one or more of q_proj')),
      (
          {'model.lora_rank': 8, 'placement.reference': 'host'},
          ('placement.reference', 'lora_rank', "'device'"),
      ),
      ({'model.critic': 'shared', 'placement.critic': 'host'}, ('placement.critic', "'separate'")),
      ({'model.lora_rank': 8, 'placement.critic': 'host'}, ('placement.critic', 'critic_folder')),
      (
          {'model.param_dtype': 'bfloat16'},
          ("param_dtype='bfloat16'", 'almost nothing', "'float32'", 'lora_rank=16'),
      ),
      (
          {'algorithm.min_advantage': 'turn', 'algorithm.ratio': 'token'},
          ("min_advantage='turn'", "ratio='token'", 'ratio=turn', 'min_advantage=token'),
      ),
      (
          {'algorithm.min_advantage': 'turn', 'algorithm.ratio': 'none'},
          ("min_advantage='turn'", "ratio='none'"),
      ),
      ({'algorithm.dual_clip': 0.5}, ('dual_clip=0.5', 'above 1', '0 for off')),
      ({'algorithm.dual_clip': -3.0}, ('dual_clip=-3.0', 'above 1')),
      ({'algorithm.variant': 'grpo'}, ("variant='grpo'", 'group_size=1', 'group_size=4')),
      (
          {'algorithm.kl_in': 'loss', 'algorithm.kl_ratio': False},
          ("kl_estimator='k1'", 'kl_ratio=True', 'kl_estimator=k3'),
      ),
      ({'algorithm.mask_zero_advantage': True}, ('mask_zero_advantage=True', 'kl_in=none')),
      ({'algorithm.mask_zero_advantage': True, 'algorithm.kl_in': 'none'}, ('whiten=False',)),
      (
          {
              'algorithm.mask_zero_advantage': True,
              'algorithm.kl_in': 'none',
              'algorithm.whiten': False,
          },
          ('compares no groups', 'mask_zero_advantage=False'),
      ),
      ({'algorithm.kl_target': 0.1, 'algorithm.kl_coef': 0.0}, ('kl_target=0.1', '0 stays 0')),
      (
          {'algorithm.variant': 'cispo', 'rollout.group_size': 4, 'algorithm.dual_clip': 3.0},
          ('dual_clip=3', "'cispo'", 'dual_clip=0'),
      ),
      ({'actor.warmup': 1.0, 'actor.final_lr': 0.1}, ('actor.final_lr=0.1', 'of 1005 updates')),
      (
          {'actor.warmup': 0.5, 'actor.final_lr': 0.1, 'train.critic_warmup': 600},
          ('actor.final_lr=0.1', 'critic_warmup=600'),
      ),
      ({'health.stop_on': ('entropy',)}, ("('entropy',)", 'one or more of', 'entropy_drop')),
      (
          {'health.stop_on': ('entropy_drop', 'sampler_gap'), 'health.sampler_gap': 0.0},
          ("stop_on names 'sampler_gap'", 'health.sampler_gap=0', 'leave it out'),
      ),
      (
          {'health.stop_on': ('kl',), 'algorithm.kl_in': 'none'},
          ("stop_on names 'kl'", "kl_in='none'"),
      ),
      ({'algorithm.advantage': 'leave_one_out'}, ('group_size=1',)),
      ({'algorithm.advantage': 'group_zscore'}, ('group_size=1',)),
      (
          {'algorithm.rollout_is': 'turn', 'algorithm.old_logp': 'sampler'},
          ("rollout_is='turn'", 'rollout_is=none', 'old_logp=trainer'),
      ),
      (
          {'algorithm.rollout_rs': 'token', 'algorithm.old_logp': 'sampler'},
          ("rollout_rs='token'", 'rollout_rs=none', 'old_logp=trainer'),
      ),
      (
          {'algorithm.variant': 'dppo', 'algorithm.ratio': 'turn', 'rollout.group_size': 4},
          ("surrogate='dppo_tv'", "ratio='turn'", 'ratio=token'),
      ),
      (
          {'rollout.max_num_gen_batches': 2, 'rollout.group_size': 2},
          ('max_num_gen_batches=2', "variant='st_ppo' compares no groups", 'variant=grpo'),
      ),
      (
          {
              'rollout.max_num_gen_batches': 2,
              'rollout.group_size': 2,
              'algorithm.variant': 'grpo',
              'algorithm.advantage': 'turn_zscore',
          },
          ("advantage='turn_zscore'", 'learns from such groups, too', 'set it to 1'),
      ),
      (
          {'train.on_nonfinite': 'rollback', 'train.checkpoint_every': 0},
          ("on_nonfinite='rollback'", 'checkpoint_every=1'),
      ),
  )
  def test_rules_that_span_settings(self, values, words):
    self.refused(*words, **values)

  @parameterized.parameters(
      ('actor.eps', math.nan, 'above 0'),
      ('actor.eps', 0.0, 'above 0'),
      ('actor.lr', math.inf, 'finite'),
      ('actor.grad_clip', math.inf, 'finite'),
      ('actor.betas', (1.0, 1.0), 'below 1'),
      ('actor.betas', (0.9, -0.1), 'at least 0'),
      ('actor.betas', (0.9,), 'a tuple of 2 float'),
      ('actor.betas', [0.9, 0.99], 'a tuple of 2 float'),
      ('algorithm.entropy_coef', math.nan, 'finite'),
      ('algorithm.dual_clip', math.nan, 'finite'),
      ('algorithm.clip_low', math.nan, 'at least 0'),
      ('algorithm.rollout_is_threshold', math.inf, 'finite'),
      ('train.length_buckets', (-8, 4096), 'at least 1'),
      ('train.length_buckets', (96.0, 4096), 'a tuple of int'),
      ('train.updates', '3', 'of type int, not str'),
      ('train.updates', None, 'of type int'),
      ('train.updates', 3.0, 'of type int'),
      ('train.updates', True, 'of type int'),
      ('actor.lr', np.float32(1e-3), 'of type float, not float32'),
      ('algorithm.whiten', 'yes', 'of type bool or None'),
      ('data.datasets', 'geo', 'a tuple of str'),
      ('data.datasets', (1, 2), 'a tuple of str'),
      ('rollout.chunks', (0, 64), 'at least 1'),
      ('model.lora_targets', 7, 'a tuple of str'),
      ('model.lora_targets', 'q_proj', 'a tuple of str'),
      ('model.lora_targets', (['q_proj'],), 'one or more of q_proj'),
      ('mesh.tensor', -2, 'at least -1'),
      ('seed', 2**63, 'at most 4294967295'),
      ('health.kl', math.inf, 'finite'),
  )
  def test_wrong_type_or_size_is_rejected(self, path, value, words):
    self.refused(f'config.{path}={value!r}', words, **{path: value})

  def test_long_value_is_truncated(self):
    with self.assertRaises(UserError) as caught:
      validation.validate(changed(**{'env.prompt': 'x' * 10_000_000}))
    self.assertLess(len(str(caught.exception)), 1000)

  def test_unknown_setting_is_rejected(self):
    config = schema.Config()
    with self.assertRaisesRegex(UserError, "no setting 'updaets'; did you mean updates?"):
      config.train.updaets = 3
    with self.assertRaisesRegex(UserError, "Config has no setting 'trian'; did you mean train?"):
      config.trian = schema.TrainSettings()

  def test_section_has_its_type(self):
    for value in ({'updates': 3}, schema.EvalSettings(), None):
      self.refused('config.train=', 'must be a TrainSettings', train=value)

  @parameterized.parameters(
      {'rollout.top_p': 0.9, 'rollout.top_k': 20, 'algorithm.old_logp': 'sampler'},
      {'actor.lr': 1},
      {'algorithm.variant': 'grpo', 'rollout.group_size': 4},
      {'algorithm.variant': 'grpo', 'algorithm.advantage': 'token_gae'},
      {'algorithm.variant': 'reinforce'},
      {'algorithm.dual_clip': 3.0},
      {'algorithm.min_advantage': 'turn'},
      {'model.param_dtype': 'bfloat16', 'model.lora_rank': 8},
      {'algorithm.clip_low': 0.1, 'algorithm.clip_high': 0.3},
      {'train.length_buckets': (4096,)},
      {'train.updates': 0},
  )
  def test_valid_combinations(self, **values):
    resolve(changed(**values))

  @parameterized.parameters('search', 'verifiers:a', 'a:b')
  def test_branch_credit_needs_program(self, kind):
    self.refused('branch_credit', 'gateway:', **PROGRAM | {'env.kind': kind})

  def test_branch_credit_needs_rewards_of_rows(self):
    for name, row in variants.VARIANTS.items():
      settings = {
          'algorithm.variant': name,
          'rollout.group_size': 4,
          'algorithm.score_norm': 'none',
      }
      if row.advantage == 'turn_zscore':
        self.refused('group_zscore', **PROGRAM | settings)  # with any program
      elif row.needs_groups:
        self.refused('branch_credit', 'st_ppo', **PROGRAM | settings)
      elif row.advantage != 'none':
        resolve(changed(**PROGRAM | settings))

  def test_group_variants_need_groups(self):
    for name, row in variants.VARIANTS.items():
      if row.needs_groups:
        self.refused('group_size=1', **{'algorithm.variant': name})
      elif row.advantage == 'none':
        resolve(changed(**{'algorithm.variant': name, 'teacher.folder': 'teacher'}))
      else:
        resolve(changed(**{'algorithm.variant': name}))


class TablesTest(absltest.TestCase):

  def test_choices_match_the_tables(self):
    tables = {
        'env.prompt': set(search._INVALID),
        'env.kind': set(components.ENVIRONMENTS),
        'env.reward': set(rewards.REWARDS),
        'env.branch_credit': {'episode', 'program'},
        'retriever.kind': set(kinds.RETRIEVERS),
        'retriever.dialect': set(http.CONCURRENCY),
        'model.critic': {'separate', 'shared'},
        'train.share_prefixes': {'auto', 'always', 'never'},
        'model.role_parameters': {'shared', 'own'},
        'model.dtype': set(hf_config.DTYPES),
        'model.param_dtype': set(hf_config.DTYPES),
        'model.remat': {'none', 'dots', 'full'},
        'model.attention': {'auto', 'plain', 'cudnn', 'splash'},
        'eval.checkpoint': {'newest', 'best'},
        'serve.on_crash': {'mask', 'zero'},
        'serve.forced_choice': {'refuse', 'auto'},
        'serve.thoughts': {'keep', 'client'},
        'serve.logprobs_mode': {'raw_logprobs', 'processed_logprobs'},
        'serve.tool_form': {tool_calls.AUTO, *tool_calls.FORMS},
        'rollout.allocation': {'even', 'dars_et', 'dars_hw'},
        'rollout.routing_replay': {'none', 'old_policy', 'sampling'},
        'rollout.engine_kind': set(servers.APIS),
        'rollout.engine_push': {'turn', 'batch'},
        'log.tracker': {'wandb', 'trackio'},
        'train.on_save_error': {'continue', 'stop'},
        'train.on_nonfinite': {'stop', 'rollback'},
        **{
            f'placement.{part}': {'device', 'host'} for part in ('optimizer', 'critic', 'reference')
        },
    }
    allowed = {
        path: {*rules.allowed}
        for path, rules in RULES.items()
        if rules.allowed and not path.startswith('algorithm.')  # declared next to their tables
    }
    self.assertEqual(allowed, tables)
    self.assertEqual(schema.LORA_TARGETS, tuple(lora.TARGETS))
    self.assertEqual(schema.DELTA_TARGETS, tuple(lora.DELTA_TARGETS))
    self.assertEqual(
        set(variant_lib.RATIOS),
        {'none', *segments.LEVELS, 'chunk', 'turn_product', 'sequence_product'},
    )

  def test_every_setting_has_a_meaning(self):
    for path, rules in RULES.items():
      self.assertNotEmpty(rules.meaning, path)

  def test_algorithm_overrides_every_field_of_a_variant(self):
    fields = {field.name for field in dataclasses.fields(schema.AlgorithmSettings)}
    columns = {field.name for field in dataclasses.fields(variants.Variant)}
    self.assertContainsSubset(columns, fields)
    for name in columns:
      self.assertIsNone(validation.get(schema.Config(), f'algorithm.{name}'), name)


class ExperimentsTest(absltest.TestCase):

  def test_every_experiment_is_valid(self):
    paths = [path for path in EXPERIMENTS.glob('*.py') if has_get_config(path)]
    self.assertNotEmpty(paths)
    for path in paths:
      spec = importlib.util.spec_from_file_location(path.stem, path)
      module = importlib.util.module_from_spec(spec)
      spec.loader.exec_module(module)
      for mode in ((), ('smoke',)):
        with self.subTest(path.stem + ''.join(f':{m}' for m in mode)):
          config = module.get_config(*mode)
          resolve(config)
          self.assertStartsWith(config.name, path.stem)
          if mode:
            self.assertBetween(config.train.updates, 1, 5)
          self.assertIsNot(module.get_config(*mode), config)  # a new one each time


def has_get_config(path):
  tree = ast.parse(path.read_text(encoding='utf-8'))
  return any(isinstance(node, ast.FunctionDef) and node.name == 'get_config' for node in tree.body)


if __name__ == '__main__':
  absltest.main()
