"""The objective that a config names: built-in or plugged in, overridden, and checked."""

import dataclasses
import functools
import json
import os
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from stppo_jax import config as schema
from stppo_jax.algorithms import objectives
from stppo_jax.algorithms import variants
from stppo_jax.algorithms.variant import RowObjective
from stppo_jax.distributed import hosts
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.models import presets
from stppo_jax.models import sharding
from stppo_jax.models import vocabulary
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.rollout import prepare
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.training import learner
from stppo_jax.training import recovery
from stppo_jax.training import run as run_lib
from stppo_jax.types import UserError
from tests.support import micro_run

OWN = """
import dataclasses
import jax.numpy as jnp
from stppo_jax.algorithms import advantages
from stppo_jax.algorithms.variants import Variant

@advantages.from_groups
def centred(scores, group_ids):
  return scores - scores.mean()

def constant(batch, variant):
  return batch.rewards, batch.rewards

def surrogate(ratio, logp, advantages, variant):
  return ratio * advantages, jnp.zeros_like(ratio, bool)

def normalised(ratio, logp, advantages, variant):
  centred = advantages - advantages.mean()
  return ratio * centred, jnp.zeros_like(ratio, bool)

def objective(outputs, batch, variant):
  return outputs.logp.sum(axis=1), jnp.zeros_like(outputs.logp, bool)

def undeclared(outputs, batch, variant):
  return (outputs.logp - outputs.uniform).sum(axis=1), jnp.zeros_like(outputs.logp, bool)

def divisor(g_norm, c_norm, any_clipped):
  return 1 + c_norm

GROUPED = Variant(centred, 'token', gamma=0.5)
PLAIN = Variant(constant, 'turn', surrogate=surrogate, divisor=divisor)
VALUED = Variant(advantages.from_values(constant), 'token')
NO_RATIO = Variant(constant, 'none', surrogate=surrogate)
NEGATIVE = Variant(constant, 'token', clip_low=-1.0)
LEVELLESS = Variant(constant, 'word')
NUMBER = 7

def reads_values(batch, variant):
  return batch.rewards - batch.old_values, batch.rewards

def one_array(batch, variant):
  return batch.rewards

def per_row(batch, variant):
  return batch.rewards.sum(axis=1), batch.rewards

def branches(g_norm, c_norm, any_clipped):
  return c_norm if any_clipped else 1.0

def vector(g_norm, c_norm, any_clipped):
  return jnp.stack([g_norm, c_norm])

def nothing(*args):
  pass

def two_arguments(ratio, advantages):
  return ratio, ratio

BAD = Variant(reads_values, 'token')

@advantages.from_groups
def of_four(scores, group_ids):
  return (scores.reshape(-1, 4) - scores.reshape(-1, 4).mean(1, keepdims=True)).reshape(-1)

def not_a_number(batch, variant):
  return batch.rewards / 0 - batch.rewards / 0, batch.rewards

@dataclasses.dataclass(frozen=True)
class Pieces(Variant):
  length: int = 3

def pieces(batch, variant):
  return jnp.cumsum(batch.turn_ids > 0, axis=1) // variant.length

PIECES = Pieces('token_gae', pieces)

@dataclasses.dataclass(frozen=True)
class Tabled(Variant):
  table: dict = dataclasses.field(default_factory=dict)

TABLED = Tabled('token_gae', 'token')

@dataclasses.dataclass(frozen=True)
class Named(Variant):
  options: int = 3

NAMED = Named('token_gae', 'token')

def fractions(batch, variant):
  return batch.turn_ids / 2
"""


SPPO = {'algorithm.variant': 'sppo', 'rollout.group_size': 4}
P3O = {'algorithm.variant': 'p3o', 'rollout.group_size': 4}
DPO = {'algorithm.variant': 'dpo', 'rollout.group_size': 4}
ROVER = {'algorithm.variant': 'rover', 'rollout.group_size': 4}
DISTILLATION = {'algorithm.variant': 'distillation', 'teacher.folder': 'a'}
OWN_OBJECTIVE = P3O | {'algorithm.objective': 'own_rl:objective'}


class MakeVariantTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    (self.folder / 'own_rl.py').write_text(OWN, encoding='utf-8')
    sys.path.insert(0, str(self.folder))
    self.addCleanup(sys.path.remove, str(self.folder))
    self.addCleanup(sys.modules.pop, 'own_rl', None)

  def make(self, **values):
    config = schema.Config()
    for path, value in values.items():
      *parents, name = path.split('.')
      setattr(functools.reduce(getattr, parents, config), name, value)
    return objective.make_variant(validation.validate(config))

  def refused(self, *words, **values):
    with self.assertRaises(UserError) as caught:
      self.make(**values)
    message = str(caught.exception)
    self.assertNotIn('\n', message)
    for word in words:
      self.assertIn(word, message)

  @parameterized.parameters(*variants.VARIANTS)
  def test_a_row_without_overrides_is_unchanged(self, name):
    row = variants.VARIANTS[name]
    values = {'algorithm.variant': name, 'rollout.group_size': 4}
    if row.advantage == 'none':
      values['teacher.folder'] = 'teacher'
    made = self.make(**values)
    self.assertEqual(dataclasses.replace(row, norm_length=schema.Config().rollout.max_total), made)

  def test_columns_are_overridden_also_by_0(self):
    made = self.make(
        **{
            'algorithm.variant': 'ppo',
            'algorithm.ratio': 'turn',
            'algorithm.value_clip': 0.0,
            'algorithm.whiten': False,
        }
    )
    self.assertEqual((made.ratio, made.value_clip, made.whiten), ('turn', 0.0, False))

  def test_custom_variant_brings_columns_and_needs(self):
    config = schema.Config()
    plain = self.make(**{'algorithm.variant': 'own_rl:PLAIN'})
    self.assertFalse(plain.needs_critic)
    self.assertEqual(learner.model_heads(config, plain), ('tokens', None))
    valued = self.make(**{'algorithm.variant': 'own_rl:VALUED'})
    self.assertEqual(learner.model_heads(config, valued), ('tokens', 'value'))
    grouped = self.make(**{'algorithm.variant': 'own_rl:GROUPED', 'rollout.group_size': 4})
    self.assertEqual(grouped.gamma, 0.5)
    over = {'rollout.group_size': 4, 'algorithm.gamma': 0.9}
    self.assertEqual(self.make(**{'algorithm.variant': 'own_rl:GROUPED', **over}).gamma, 0.9)

  def test_custom_group_algorithm_needs_groups(self):
    words = ("variant='own_rl:GROUPED'", 'group_size=1', 'group_size=4')
    self.refused(*words, **{'algorithm.variant': 'own_rl:GROUPED'})
    self.refused('group_size=1', **{'algorithm.advantage': 'own_rl:centred'})

  def test_functions_are_named_by_the_config(self):
    made = self.make(
        **{
            'algorithm.variant': 'ppo',
            'algorithm.advantage': 'own_rl:constant',
            'algorithm.surrogate': 'own_rl:surrogate',
            'algorithm.divisor': 'own_rl:divisor',
        }
    )
    own = sys.modules['own_rl']
    self.assertEqual(
        (made.advantage, made.surrogate, made.divisor), (own.constant, own.surrogate, own.divisor)
    )
    self.assertFalse(made.needs_critic)
    self.assertTrue(dataclasses.replace(made, log_bias=False).measures_bias)

  @parameterized.parameters(
      ({'algorithm.variant': 'st_pro'}, ("variant='st_pro'", 'did you mean st_ppo?')),
      ({'algorithm.advantage': 'token_gea'}, ("advantage='token_gea'", 'did you mean token_gae?')),
      ({'algorithm.ratio': 'trun'}, ("ratio='trun'", 'turn_product', 'module:attribute')),
      ({'algorithm.surrogate': 'clop'}, ("surrogate='clop'", 'did you mean clip?')),
      ({'algorithm.divisor': 'papers'}, ("divisor='papers'", 'did you mean paper?')),
      ({'algorithm.variant': 'own_rl:NUMBER'}, ('own_rl:NUMBER', 'is a int', 'Variant')),
      ({'algorithm.divisor': 'own_rl:NUMBER'}, ('own_rl:NUMBER', 'function')),
      ({'algorithm.variant': 'own_rl:NONE'}, ("no 'NONE'",)),
      ({'algorithm.variant': 'own_rl:NEGATIVE'}, ('clip_low=-1.0', 'at least 0')),
      ({'algorithm.variant': 'own_rl:LEVELLESS'}, ("ratio='word'", 'sequence')),
      ({'algorithm.variant': 'own_rl:NO_RATIO'}, ('surrogate that needs a ratio', 'ratio=token')),
      ({'algorithm.variant': 'rloo', 'rollout.group_size': 4, 'train.critic_warmup': 1}, ('rloo',)),
      ({'model.critic': 'shared', 'train.critic_warmup': 2}, ('critic_warmup=2', 'trunk')),
      (ROVER | {'algorithm.old_logp': 'sampler'}, ("old_logp='sampler'", 'old_logp=trainer')),
      (SPPO | {'algorithm.whiten': True}, ("surrogate='square'", 'whiten=False')),
      ({'model.critic': 'shared', 'model.critic_folder': 'a'}, ("critic_folder='a'", 'separate')),
  )
  def test_contradictions_are_refused_in_one_line(self, values, words):
    self.refused(*words, **values)

  @parameterized.parameters(
      ({'algorithm.advantage': 'token_gae'}, ("objective='dpo'", 'advantage=group_centred')),
      ({'algorithm.advantage': 'turn_zscore'}, ('one advantage per episode', 'group_centred')),
      ({'algorithm.whiten': True}, ('whiten=True', 'whiten=False')),
      ({'algorithm.divisor': 'paper'}, ("divisor='paper'", 'divisor=none')),
      ({'algorithm.dual_clip': 3.0}, ('dual_clip=3.0', 'dual_clip=0.0')),
      ({'algorithm.rollout_is': 'turn'}, ("rollout_is='turn'", 'rollout_is=none')),
      ({'algorithm.rollout_rs': 'token'}, ("rollout_rs='token'", 'rollout_rs=none')),
      ({'train.mini_batch': 2, 'train.micro_batch': 2}, ('mini_batch=2', 'group_size=4')),
      ({'algorithm.objective': 'own_rl:constant'}, ('objective=', 'raised TypeError')),
      ({'algorithm.objective': 'dpp'}, ('did you mean dpo?',)),
      ({'algorithm.objective': 'own_rl:undeclared'}, ('objective=', 'raised TypeError')),
  )
  def test_settings_without_row_objective_meaning_are_refused(self, values, words):
    dpo = {'algorithm.variant': 'dpo', 'rollout.group_size': 4}
    self.make(**dpo)
    self.refused(*words, **dpo, **values)

  def test_misspelt_need_is_refused(self):
    with self.assertRaisesRegex(UserError, "needs has 'refernce'; allowed are reference, uniform"):
      RowObjective(objectives.nothing_clipped, needs=('refernce',))

  def test_segments_of_ones_own_and_their_settings(self):
    own = {'algorithm.variant': 'own_rl:PIECES'}
    made = self.make(**own)
    self.assertEqual((made.ratio, made.length), (sys.modules['own_rl'].pieces, 3))
    self.assertEqual((made.described()['ratio'], made.described()['length']), ('pieces', 3))
    self.assertEqual(self.make(**own, **{'algorithm.options': {'length': 5}}).length, 5)
    named = self.make(**own, **{'algorithm.ratio': 'turn'})
    self.assertEqual(named.ratio, 'turn')
    self.refused('options.size', 'length', **own, **{'algorithm.options': {'size': 5}})
    self.refused('options.length=[1]', **own, **{'algorithm.options': {'length': [1]}})
    self.refused('options.tau', 'none', **{'algorithm.options': {'tau': 1}})
    self.assertEqual(self.make(**{'algorithm.variant': 'own_rl:NAMED'}).options, 3)
    self.refused('field table holds a dict', **{'algorithm.variant': 'own_rl:TABLED'})
    self.refused('dppo_tv', "ratio='pieces'", **own, **{'algorithm.surrogate': 'dppo_tv'})

  def test_function_on_whole_groups_passes_the_trial(self):
    of_four = {'algorithm.advantage': 'own_rl:of_four', 'rollout.group_size': 4}
    self.assertTrue(self.make(**of_four).needs_groups)
    self.make(**{'algorithm.advantage': 'own_rl:not_a_number'})

  @parameterized.parameters(
      ({'advantage': 'reads_values'}, ('old_values', 'advantages.from_values')),
      ({'variant': 'BAD'}, ("variant='own_rl:BAD', its advantage", 'advantages.from_values')),
      ({'advantage': 'one_array'}, ('(advantages, returns)', 'returned float32 [2, 3]')),
      (
          {'advantage': 'per_row'},
          ('each [B,T]', '(float32 [2], float32 [2, 3]) for [B,T] = [2, 3]'),
      ),
      ({'advantage': 'nothing'}, ('returned NoneType',)),
      ({'ratio': 'fractions'}, ('integers [B,T]', 'float32 [2, 3]')),
      ({'ratio': 'nothing'}, ('integers [B,T]', 'NoneType')),
      ({'ratio': 'pieces'}, ("'Variant' object has no attribute 'length'", 'own_rl.py:')),
      ({'surrogate': 'constant'}, ('raised TypeError', 'takes 2 positional arguments')),
      ({'surrogate': 'two_arguments'}, ('raised TypeError', 'own_rl:two_arguments')),
      ({'surrogate': 'normalised'}, ('depends on other tokens', 'normalise in the advantage')),
      ({'divisor': 'branches'}, ('raised TracerBoolConversionError', 'own_rl.py:')),
      ({'divisor': 'vector'}, ('one number', 'returned float32 [2]')),
      ({'divisor': 'nothing'}, ('one number', 'NoneType')),
  )
  def test_function_is_tried_on_shapes_before_weights(self, columns, words):
    values = {f'algorithm.{column}': f'own_rl:{name}' for column, name in columns.items()}
    self.refused(*words, **values)

  @parameterized.parameters(
      ({'pipeline.staleness': 1}, ('staleness=1', 'older policy', 'old_logp=sampler')),
      (
          {'algorithm.variant': 'rloo', 'rollout.group_size': 4, 'train.mini_batch': 512}
          | {'pipeline.staleness': 1},
          ('set --config.algorithm.rollout_is=turn',),
      ),
      (ROVER | {'pipeline.staleness': 1}, ('set --config.pipeline.staleness=0',)),
      ({'pipeline.staleness': 1, 'algorithm.rollout_is': 'token'}, ()),
      ({'pipeline.staleness': 1, 'algorithm.rollout_rs': 'sequence'}, ()),
      ({'pipeline.staleness': 1, 'algorithm.old_logp': 'sampler'}, ()),
      ({'algorithm.divide': 'step'}, ("divide='step'", "divisor='paper'", 'floor')),
      ({'algorithm.divide': 'step', 'algorithm.divisor': 'relative'}, ()),
      ({'algorithm.variant': 'reinforce'}, ('reinforce has no importance ratio', 'mini_batch=512')),
      ({'algorithm.chunk_length': 4}, ('chunk_length has no effect without ratio=chunk',)),
      ({'algorithm.chunk_length': 4, 'algorithm.ratio': 'chunk'}, ()),
      ({'algorithm.beta': 0.2}, ('beta has no effect without surrogate=square',)),
      (SPPO | {'algorithm.beta': 0.2}, ()),
      (SPPO | {'algorithm.divisor': 'paper'}, ('divisor has no effect without a clipped ratio',)),
      (SPPO | {'algorithm.clip_low': 0.1}, ('clip_low has no effect without a clipped ratio',)),
      (P3O | {'algorithm.clip_low': 0.1}, ()),
      (P3O | {'algorithm.beta': 0.2}, ('beta has no effect',)),
      (OWN_OBJECTIVE | dict.fromkeys(('algorithm.alpha', 'algorithm.clip_low'), 0.1), ()),
      ({'algorithm.rollout_is_threshold': 3.0}, ('has no effect without rollout_is',)),
      ({'algorithm.rollout_is_threshold': 3.0, 'algorithm.rollout_is': 'turn'}, ()),
      ({'algorithm.variant': 'ppo', 'algorithm.norm_of': 'loss'}, ('without a divisor',)),
      ({'algorithm.kl_in': 'none', 'algorithm.kl_coef': 0.1}, ('kl_coef has no effect',)),
      ({'algorithm.kl_in': 'none', 'algorithm.kl_estimator': 'k3'}, ('kl_estimator has no',)),
      ({'algorithm.kl_in': 'none', 'algorithm.kl_target': 0.1}, ('kl_target has no effect',)),
      ({'algorithm.kl_ratio': True}, ('kl_ratio has no effect without kl_in=loss',)),
      (DPO | {'algorithm.aggregation': 'token-mean'}, ('aggregation has no effect',)),
      (DPO | {'algorithm.norm_length': 9}, ('norm_length has no effect',)),
      (DPO | {'algorithm.aggregation': 'token-mean', 'algorithm.entropy_coef': 0.1}, ()),
      (DPO | {'algorithm.beta': 0.2}, ()),
      (ROVER | {'algorithm.aggregation': 'token-mean', 'algorithm.alpha': 0.2}, ()),
      (DISTILLATION | {'algorithm.whiten': True}, ('whiten has no effect',)),
      (DISTILLATION | {'algorithm.gamma': 0.9}, ('gamma has no effect',)),
      ({'algorithm.value_coef': 0.1}, ('value_coef has no effect without model.critic=shared',)),
      ({'rollout.first_rows': 3}, ('rollout.first_rows has no effect without rollout.alloc',)),
      ({'rollout.max_group': 9}, ('rollout.max_group has no effect',)),
      ({'rollout.demonstrated': 2}, ('rollout.demonstrated has no effect without rollout.dem',)),
      ({'rollout.demonstrate_every': 2}, ('rollout.demonstrate_every has no effect',)),
      ({'rollout.engine_kind': 'sglang'}, ('rollout.engine_kind has no effect',)),
      ({'teacher.coef': 0.5}, ('teacher.coef has no effect without teacher.folder',)),
      (SPPO | {'model.critic_folder': 'a'}, ('critic_folder has no effect without a critic',)),
      (SPPO | {'placement.critic': 'host'}, ('placement.critic has no effect',)),
      (SPPO | {'placement.reference': 'host'}, ('placement.reference has no effect',)),
      ({'model.lora_alpha': 8.0}, ('model.lora_alpha has no effect without model.lora_rank',)),
      ({'retriever.encoder': 'e5'}, ('retriever.encoder has no effect',)),
      ({'retriever.timeout_s': 1.0}, ('retriever.timeout_s has no effect',)),
      ({'retriever.kind': 'http', 'data.corpus': 'a'}, ('data.corpus has no effect',)),
      ({'env.tool_max_chars': 9}, ('env.tool_max_chars has no effect without env.tools',)),
      ({'serve.on_crash': 'zero'}, ('serve.on_crash has no effect',)),
      ({'log.tracker': 'trackio'}, ('log.tracker has no effect without log.project',)),
      ({'rollout.routing_replay': 'old_policy'}, ('routing_replay has no effect',)),
      (
          {'rollout.replay': 'folder', 'pipeline.staleness': 1, 'algorithm.old_logp': 'sampler'},
          ('pipeline.staleness has no effect without sampling',),
      ),
      (
          {'rollout.replay': 'folder'},
          ("config.rollout.replay='folder' trains on", 'set --config.algorithm.old_logp=sampler'),
      ),
      (ROVER | {'rollout.replay': 'folder'}, ('the policy that sampled them', 'sample new ones')),
      ({'rollout.replay': 'folder', 'algorithm.rollout_is': 'turn'}, ()),
      (
          {'rollout.top_p': 0.8, 'algorithm.old_logp': 'sampler'},
          ('top_p=0.8, top_k=0', 'starts below 1', 'rollout.top_p=1', 'temperature'),
      ),
      ({'rollout.top_k': 5, 'algorithm.old_logp': 'sampler'}, ('top_k=5', 'rollout.top_k=0')),
      (
          {'algorithm.variant': 'grpo', 'rollout.group_size': 4, 'algorithm.lam': 0.9},
          ('lam has no effect without a critic',),
      ),
      (
          {
              'algorithm.variant': 'grpo',
              'rollout.group_size': 4,
              'algorithm.mask_zero_advantage': True,
          },
          ('mask_zero_advantage=True with kl_in=loss and 2 optimizer steps', '2604.06159'),
      ),
      (
          {
              'algorithm.variant': 'grpo',
              'rollout.group_size': 4,
              'algorithm.mask_zero_advantage': True,
              'train.mini_batch': 512,
          },
          (),
      ),
      (
          {
              'algorithm.variant': 'rloo',
              'algorithm.dual_clip': 3.0,
              'rollout.group_size': 4,
              'train.mini_batch': 512,
          },
          ('dual_clip has no effect without a clipped ratio',),
      ),
      (
          {
              'algorithm.variant': 'rloo',
              'algorithm.dual_clip': 3.0,
              'algorithm.ratio': 'token',
              'algorithm.surrogate': 'clip',
              'rollout.group_size': 4,
              'train.mini_batch': 512,
          },
          (),
      ),
      ({'algorithm.gamma': 0.9, 'algorithm.lam': 0.9, 'algorithm.value_clip': 0.1}, ()),
      ({}, ()),
  )
  def test_settings_seldom_meant_are_warned_of(self, values, words):
    config = schema.Config()
    for path, value in values.items():
      *parents, name = path.split('.')
      setattr(functools.reduce(getattr, parents, config), name, value)
    variant = objective.make_variant(validation.validate(config))
    arguments = config, variant, presets.PRESETS['qwen2.5-7b'], None, sharding.make_mesh(1, 1, 1)
    context = self.assertLogs if words else self.assertNoLogs
    with context('absl', 'WARNING') as logs:
      learner.make_spec(*arguments)
    for word in words:
      self.assertIn(word, logs.output[0])

  def test_models_of_a_run_have_one_attention(self):
    """They share bins, so a kernel that one of them cannot use is used by none."""
    config = schema.Config()
    narrow = dataclasses.replace(presets.PRESETS['qwen2.5-7b'], head_dim=128, dtype='bfloat16')
    wide = dataclasses.replace(narrow, head_dim=256)
    capped = dataclasses.replace(narrow, attention_softcap=50.0)

    def gpu(capability):
      device = mock.Mock(platform='gpu', device_kind='a gpu', compute_capability=capability)
      return mock.Mock(devices=np.array([device]), shape={'context': 1})

    cases = (
        ('9.0', (narrow, wide), 'cudnn'),
        ('8.0', (narrow, wide), 'plain'),
        ('8.0', (narrow, None), 'cudnn'),
        ('9.0', (narrow, None, capped), 'plain'),
        ('9.0', (wide, narrow, wide), 'cudnn'),
    )
    for capability, models, expected in cases:
      with self.subTest(capability=capability, expected=expected):
        given = learner._with_attention(config, gpu(capability), models)
        self.assertEqual({model.attention for model in given if model}, {expected})
        self.assertEqual([model is None for model in given], [m is None for m in models])
    config.model.attention = 'cudnn'
    with self.assertRaisesRegex(UserError, "attention='cudnn' needs heads of at most 128 channels"):
      learner._with_attention(config, gpu('8.0'), (narrow, wide))

  @parameterized.parameters(
      ('auto', ('plain', 'plain'), True, ''),
      ('auto', ('splash',), False, "from memory, which config.train.share_prefixes='always'"),
      ('auto', ('cudnn',), False, 'cudnn attention takes no paths'),
      ('always', ('plain',), True, ''),
      ('always', ('splash', 'splash'), True, ''),
      ('never', ('plain',), False, ''),
  )
  def test_rows_share_prefixes_where_attention_can(self, setting, attentions, expected, reason):
    base = presets.PRESETS['qwen2.5-7b']
    models = [dataclasses.replace(base, attention=attention) for attention in attentions]
    context = self.assertLogs if reason else self.assertNoLogs
    with context('absl', 'INFO') as logs:
      self.assertEqual(learner.shares_prefixes(setting, models), expected)
    if reason:
      self.assertIn(reason, logs.output[0])

  def test_prefixes_that_no_model_can_share_are_refused(self):
    plain = dataclasses.replace(presets.PRESETS['qwen2.5-7b'], attention='plain')
    delta = dataclasses.replace(plain, num_layers=2, layer_types=('delta', 'full'))
    cudnn = dataclasses.replace(plain, attention='cudnn')
    for model, reason in ((cudnn, 'cudnn attention takes no paths'), (delta, 'gated delta nets')):
      with self.assertRaisesRegex(UserError, f"'always': .*{reason}.*share_prefixes=auto"):
        learner.shares_prefixes('always', [plain, model])

  def test_metrics_of_turns_are_bounded(self):
    config = schema.Config()
    variant = objective.make_variant(validation.validate(config))
    environments = (
        ({'max_searches': 3}, 4),
        ({'max_searches': 200}, 16),
        ({'kind': 'guess:Guess'}, 16),  # a class may play more turns than the search environment
        ({'options': {'max_turns': 9}, 'kind': 'tools'}, 16),
        ({'mix': ({'kind': 'search'}, {'kind': 'guess:Guess'})}, 16),
    )
    for settings, expected in environments:
      config.env = schema.EnvSettings(**settings)
      spec = learner.make_spec(
          config, variant, presets.PRESETS['qwen2.5-7b'], None, sharding.make_mesh(1, 1, 1)
      )
      self.assertEqual(spec.num_logged_turns, expected)

  def test_micro_batch_follows_the_devices(self):
    mesh = sharding.make_mesh(2, 2, 2)
    config = schema.Config()
    self.assertEqual(learner.with_micro_batch(config, mesh).train.micro_batch, 4)
    config.train.micro_batch = 8
    self.assertEqual(learner.with_micro_batch(config, mesh).train.micro_batch, 8)
    config.train.micro_batch, config.train.mini_batch = 0, 6
    with self.assertRaisesRegex(UserError, 'train.mini_batch=6 rows.*a multiple of 4'):
      learner.with_micro_batch(config, mesh)

  def test_capped_logits_are_refused_before_weights(self):
    capped = dataclasses.replace(presets.PRESETS['qwen2.5-7b'], logit_softcap=30.0)
    with self.assertRaisesRegex(UserError, 'mean log-prob over the vocabulary.*caps its logits'):
      vocabulary.check_linear(capped)
    parts = mock.Mock(config=schema.Config(), tasks=[], held_out=[])
    variant = mock.Mock(needs=('uniform',))
    with mock.patch.object(prepare, 'load_shape', return_value=capped):
      with self.assertRaisesRegex(UserError, 'choose another objective or model'):
        run_lib.load_inputs(parts, variant)

  def test_actor_rate_decays_over_actor_steps(self):
    config = schema.Config()
    config.train.updates, config.train.critic_warmup = 100, 40  # two steps each
    config.actor = config.critic = schema.OptimizerSettings(lr=1.0, warmup=0.0, final_lr=0.2)
    variant = objective.make_variant(validation.validate(config))
    spec = learner.make_spec(
        config, variant, presets.PRESETS['qwen2.5-7b'], None, sharding.make_mesh(1, 1, 1)
    )
    for schedule, steps in ((spec.actor_lr, 120), (spec.critic_lr, 200)):
      self.assertAlmostEqual(float(schedule(0)), 1.0)
      self.assertGreater(float(schedule(steps - 2)), 0.2)
      self.assertAlmostEqual(float(schedule(steps - 1)), 0.2, places=6)

  def test_a_changed_source_is_refused_on_resumption(self):
    micro_run.write_knowledge(str(self.folder))
    values = {'algorithm.variant': 'own_rl:PLAIN', 'train.updates': 1}
    config = micro_run.make_config(str(self.folder), **values)
    workdir = os.path.join(self.folder, 'run')
    micro_run.train(config, workdir)
    with open(os.path.join(workdir, 'config.json'), encoding='utf-8') as file:
      objective = json.load(file)['objective']
    self.assertEqual(objective['surrogate'], 'surrogate')
    self.assertEqual(objective['advantage'], 'constant')
    self.assertEqual(objective['gamma'], 1.0)
    config.train.updates = 2
    micro_run.train(config, workdir)
    self.assertEqual(metrics_lib.read_metrics(workdir)[-1]['step'], 2)
    with open(self.folder / 'own_rl.py', 'a', encoding='utf-8') as file:
      file.write('# another\n')
    with self.assertRaisesRegex(
        UserError, r"^[^\n]*algorithm.variant='own_rl:PLAIN' names has changed[^\n]*$"
    ):
      micro_run.train(config, workdir)
    self.enterContext(mock.patch.object(prepare, 'check_prompts'))
    self.enterContext(mock.patch.object(policy_lib, '_trained'))  # a micro run has no weights
    with self.assertLogs('absl', 'WARNING') as logs:
      policy_lib.load(config, workdir)
    self.assertIn('what config.algorithm.variant names has changed', logs.output[0])

  def test_all_processes_need_the_same_sources(self):
    config = micro_run.make_config(str(self.folder), **{'algorithm.variant': 'own_rl:PLAIN'})
    variant = objective.make_variant(config)
    with mock.patch.object(hosts, 'require_same') as require_same:
      recovery.claim(config, variant, str(self.folder))
    ((what, (digests, described)),) = [call.args for call in require_same.call_args_list]
    self.assertEqual(what, 'plug-ins and models')
    self.assertEqual(set(digests), {'algorithm.variant', 'model.folder'})
    self.assertEqual(described, variant.described())


if __name__ == '__main__':
  absltest.main()
