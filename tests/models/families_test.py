"""Families of models: equal to transformers in rows, in the cache, packed and exported."""

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from stppo_jax import config as schema
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import families
from stppo_jax.models import hf_config
from stppo_jax.models import hf_export
from stppo_jax.models import layers
from stppo_jax.models import vocabulary
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.training import loop
from stppo_jax.types import UserError
from tests.support import tiny_run

pytestmark = pytest.mark.guests(
    what='Model families of transformers',
    version='transformers==5.24.0',
    date='2026-11-26',
    touches='models/families models/hf_config.py models/hf_weights.py models/hf_export.py',
)

HAS_TORCH = importlib.util.find_spec('torch') is not None
SIZES = {
    'vocab_size': 60,
    'hidden_size': 32,
    'intermediate_size': 40,
    'num_hidden_layers': 4,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 128,
    'pad_token_id': 0,
    'bos_token_id': 1,
    'eos_token_id': 2,
}
YARN = {
    'rope_type': 'yarn',
    'rope_theta': 1e4,
    'factor': 4.0,
    'original_max_position_embeddings': 32,
}
PLAIN = {'rope_type': 'default', 'rope_theta': 500_000.0}
# Windows are shorter than the rows of 90 tokens.
MODELS = {
    'qwen2 with windows': (
        'qwen2',
        {'use_sliding_window': True, 'sliding_window': 9, 'max_window_layers': 2},
    ),
    'qwen2 with yarn': ('qwen2', {'num_hidden_layers': 2, 'rope_parameters': YARN}),
    'qwen3 with yarn': (
        'qwen3',
        {'num_hidden_layers': 2, 'head_dim': 16, 'rope_parameters': YARN | {'truncate': False}},
    ),
    'mistral': ('mistral', {'num_hidden_layers': 2, 'head_dim': 12, 'sliding_window': 11}),
    'smollm3': ('smollm3', {'no_rope_layer_interval': 2, 'tie_word_embeddings': False}),
    'smollm3 with windows': (
        'smollm3',
        {'no_rope_layer_interval': 2, 'use_sliding_window': True, 'sliding_window': 7},
    ),
    'olmo2': ('olmo2', {'num_hidden_layers': 2}),
    'olmo3': (
        'olmo3',
        {
            'sliding_window': 9,
            'rope_parameters': {'full_attention': YARN, 'sliding_attention': PLAIN},
        },
    ),
    'gemma2': (
        'gemma2',
        {
            'head_dim': 16,
            'sliding_window': 9,
            'query_pre_attn_scalar': 40,
            'attn_logit_softcapping': 2.0,
            'final_logit_softcapping': 3.0,
        },
    ),
    'gemma3': (
        'gemma3_text',
        {
            'head_dim': 16,
            'num_hidden_layers': 5,
            'sliding_window': 9,
            'layer_types': ['sliding_attention', 'full_attention'] * 2 + ['sliding_attention'],
            'rope_parameters': {
                'full_attention': {'rope_type': 'linear', 'rope_theta': 1e6, 'factor': 8.0},
                'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
            },
        },
    ),
    'qwen3.5': (
        'qwen3_5_text',
        {
            'head_dim': 16,
            'layer_types': ['linear_attention', 'full_attention'] * 2,
            'linear_num_key_heads': 2,
            'linear_num_value_heads': 4,
            'linear_key_head_dim': 8,
            'linear_value_head_dim': 12,
        },
    ),
    'qwen3.5 with experts': (
        'qwen3_5_moe_text',
        {
            'num_hidden_layers': 2,
            'head_dim': 16,
            'layer_types': ['linear_attention', 'full_attention'],
            'linear_num_key_heads': 2,
            'linear_num_value_heads': 2,
            'linear_key_head_dim': 8,
            'linear_value_head_dim': 8,
            'num_experts': 4,
            'num_experts_per_tok': 2,
            'moe_intermediate_size': 12,
            'shared_expert_intermediate_size': 20,
        },
    ),
}
CHUNKS = (37, 1, 26, 26)

forward = jax.jit(decoder.forward, static_argnums=1)


@functools.cache
def make_reference(name):
  """Returns (folder, tokens [2,90], logits, transformers' model) of a random model."""
  import torch
  import transformers

  kind, changes = MODELS[name]
  config = transformers.CONFIG_MAPPING[kind](**SIZES | changes)
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager')
  model = model.eval()
  with torch.no_grad():
    for parameter in model.parameters():
      first = parameter if parameter.ndim == 1 else 0  # norms are near their neutral values
      parameter.copy_(0.2 * torch.randn_like(parameter) + first)
  tokens = np.random.default_rng(0).integers(3, SIZES['vocab_size'], (2, sum(CHUNKS)))
  folder = tempfile.mkdtemp()
  model.save_pretrained(folder)
  return folder, tokens, torch_logits(model, tokens), model


def torch_logits(model, tokens):
  import torch

  with torch.no_grad():
    return model(torch.from_numpy(tokens)).logits.numpy()


def relative_error(actual, expected):
  return np.linalg.norm(np.asarray(actual) - expected) / np.linalg.norm(expected)


@absltest.skipUnless(HAS_TORCH, 'torch is not installed')
class TransformersTest(parameterized.TestCase):

  @parameterized.parameters(*MODELS)
  def test_rows_chunks_segments_and_export_are_equal(self, name):
    folder, tokens, expected, _ = make_reference(name)
    config, params = convert.load_hf(folder)
    self.assertGreater(np.std(expected), 0.5)  # the comparison means something
    self.assertLess(relative_error(forward(params, config, tokens, None)[0], expected), 1e-4)
    with self.subTest('through the cache'):
      tiles = dataclasses.replace(config, cache_tile=32)
      cache = decoder.init_cache(tiles, rows=2, slots=sum(CHUNKS))
      parts = []
      first = 0
      for size in CHUNKS:
        chunk = tokens[:, first : first + size]
        logits, cache = forward(params, config, chunk, None, cache)
        parts.append(logits)
        first += size
      self.assertLess(relative_error(np.concatenate(parts, 1), expected), 1e-4)
    with self.subTest('both rows packed into one, with a third episode'):
      packed = np.concatenate([tokens[0], tokens[1], tokens[0, :20]])[None]
      segments = np.repeat([[1, 2, 3]], [90, 90, 20], axis=1)
      positions = np.concatenate([np.arange(90), np.arange(90), np.arange(20)])[None]
      x, _ = jax.jit(decoder.trunk, static_argnums=1)(params, config, packed, positions, segments)
      logits = decoder.token_logits(params, config, x)[0]
      apart = np.concatenate([expected[0], expected[1], expected[0, :20]])
      self.assertLess(relative_error(logits, apart), 1e-4)
    with self.subTest('exported'):
      import transformers

      again = self.enterContext(tempfile.TemporaryDirectory())
      convert.save_hf(again, config, params)
      self.assertEqual(hf_config.load(again), config)
      model = transformers.AutoModelForCausalLM.from_pretrained(again, attn_implementation='eager')
      np.testing.assert_array_equal(torch_logits(model.eval(), tokens), expected)

  @parameterized.parameters('gemma3', 'gemma2', 'qwen3.5')
  def test_gradients_of_logp_equal_torch(self, name):
    import torch

    folder, tokens, _, model = make_reference(name)
    model = copy.deepcopy(model).double()  # torch's own float32 adds as much error as ours
    config, params = convert.load_hf(folder)
    config = dataclasses.replace(config, remat='full')
    weights = np.random.default_rng(1).normal(size=tokens.shape).astype(np.float32)

    @jax.jit
    def gradient(params):
      def loss(params):
        x, _ = decoder.trunk(params, config, tokens)
        logp, _ = decoder.token_logp(params, config, x, tokens, chunk=30)
        return jnp.sum(logp * weights)

      return jax.grad(loss)(params)

    logp = torch.log_softmax(model(torch.from_numpy(tokens)).logits[:, :-1], dim=-1)
    chosen = logp.gather(-1, torch.from_numpy(tokens[:, 1:, None]))[..., 0]
    model.zero_grad()
    (chosen * torch.from_numpy(weights[:, 1:])).sum().backward()
    expected = {key: p.grad.numpy() for key, p in model.named_parameters()}
    actual = jax.tree.map(np.asarray, gradient(params))
    for entry in hf_config.table(config):
      ours = hf_export._copy_out(actual, np.float32, entry)
      self.assertLess(relative_error(ours, expected[entry.name]), 1e-4, entry.name)

  def test_experts_in_one_tensor_load(self):
    """As published: the gates and ups of all experts of a layer are one tensor."""
    folder = pathlib.Path(make_reference('qwen3.5 with experts')[0])
    expected = convert.load_hf(folder)[1]
    tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
    for l in range(2):
      prefix = f'model.layers.{l}.mlp.experts'

      def of_all(kind, prefix=prefix):
        return np.stack([tensors.pop(f'{prefix}.{e}.{kind}_proj.weight') for e in range(4)])

      tensors[f'{prefix}.gate_up_proj'] = np.concatenate([of_all('gate'), of_all('up')], axis=1)
      tensors[f'{prefix}.down_proj'] = of_all('down')
    fused = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    (fused / 'config.json').write_bytes((folder / 'config.json').read_bytes())
    safetensors.numpy.save_file(tensors, fused / 'model.safetensors')
    jax.tree.map(np.testing.assert_array_equal, convert.load_hf(fused)[1], expected)

  def test_text_part_of_images_and_text_loads(self):
    folder, tokens, expected, _ = make_reference('gemma3')
    raw = json.loads(pathlib.Path(folder, 'config.json').read_text())
    both = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    text = safetensors.numpy.load_file(pathlib.Path(folder, 'model.safetensors'))
    vision = {'hidden_size': 8, 'model_type': 'siglip_vision_model'}
    config = {'model_type': 'gemma3', 'text_config': raw, 'vision_config': vision}
    for prefix in ('model.language_model.', 'language_model.model.'):
      tensors = {prefix + name.removeprefix('model.'): x for name, x in text.items()}
      tensors['vision_tower.encoder.weight'] = np.ones(3, np.float32)
      tensors['multi_modal_projector.mm_soft_emb_norm.weight'] = np.ones(3, np.float32)
      safetensors.numpy.save_file(tensors, both / 'model.safetensors')
      (both / 'config.json').write_text(json.dumps(config))
      with self.assertLogs('absl', 'INFO') as logs:
        loaded = convert.load_hf(both)
      self.assertIn('2 tensors beside the text model are left out', logs.output[-1])
      logits = forward(loaded[1], loaded[0], tokens, None)[0]
      self.assertLess(relative_error(logits, expected), 1e-4)


def window_config(**changes):
  """A model with layers of three kinds, whose period does not divide their number."""
  config = decoder.ModelConfig(
      vocab_size=60,
      d_model=16,
      num_layers=5,
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      d_ff=24,
      layer_types=('window', 'full') * 2 + ('window',),
      rotary_layers=(True, False) * 2 + (True,),
      window=6,
      norm_after=True,
      norm_offset=True,
      attention_softcap=3.0,
      logit_softcap=4.0,
  )
  return dataclasses.replace(config, **changes)


class DecoderTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_scanned_periods_equal_unrolled_layers(self):
    tokens = np.random.default_rng(0).integers(0, 60, (2, 30))
    params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), window_config())
    noise = lambda w: w + 0.2 * jax.random.normal(jax.random.key(w.size), w.shape)
    params = jax.tree.map(noise, params)

    def loss(params, config):
      x, _ = decoder.trunk(params, config, tokens)
      logp, entropy = decoder.token_logp(params, config, x, tokens, 1.3, chunk=8)
      return jnp.sum(logp) + jnp.sum(entropy)

    grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected, expected_grad = grad(params, window_config(scan_layers=False))
    for changes in ({'remat': 'full'}, {'attention_chunk': 5, 'remat': 'dots'}):
      actual, actual_grad = grad(params, window_config(**changes))
      np.testing.assert_allclose(actual, expected, rtol=1e-5)
      for x, y in zip(jax.tree.leaves(actual_grad), jax.tree.leaves(expected_grad), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())

  def test_leftover_layers_copy_no_stack(self):
    """13 layers of a period of six take less memory than 18: XLA's temporaries of a gradient."""

    def temporaries(num_layers):
      layer_types = (('window',) * 5 + ('full',)) * 3
      config = window_config(
          num_layers=num_layers,
          d_model=64,
          d_ff=256,
          layer_types=layer_types[:num_layers],
          rotary_layers=(),
          remat='full',
          scan_layers=True,
      )

      def loss(params, tokens):
        x, _ = decoder.trunk(params, config, tokens)
        return jnp.sum(x.astype(jnp.float32) ** 2)

      def sum_grads(params, tokens):
        def add(i, total):
          return jax.tree.map(jnp.add, total, jax.grad(loss)(params, tokens[i]))

        return jax.lax.fori_loop(0, 3, add, jax.tree.map(jnp.zeros_like, params))

      tokens = jax.ShapeDtypeStruct((3, 1, 8), jnp.int32)
      compiled = jax.jit(sum_grads).lower(decoder.shapes(config), tokens).compile()
      return compiled.memory_analysis().temp_size_in_bytes

    self.assertLess(temporaries(13), temporaries(18))

  def test_one_rotation_for_two_kinds_of_layers_is_warned_of(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    raw = SIZES | {'model_type': 'olmo3', 'sliding_window': 9}
    raw['layer_types'] = ['sliding_attention', 'full_attention'] * (SIZES['num_hidden_layers'] // 2)
    other_key = {'type': 'linear', 'factor': 2.0}
    nested = {'full_attention': YARN, 'sliding_attention': PLAIN}
    for parameters, context in (
        (YARN, self.assertLogs),
        (other_key, self.assertLogs),
        (PLAIN, self.assertLogs),
        (nested, self.assertNoLogs),
        (None, self.assertNoLogs),
    ):
      rope = {'rope_parameters': parameters}
      (folder / 'config.json').write_text(json.dumps(raw | rope), encoding='utf-8')
      with context('absl', 'WARNING'):
        hf_config.load(folder)

  def test_flags_that_are_off_trace_nothing(self):
    """The program of a plain model is the same with the neutral values of all flags."""
    config = window_config(
        layer_types=('full',) * 5,
        rotary_layers=(True,) * 5,
        norm_after=False,
        norm_offset=False,
        attention_softcap=0.0,
        logit_softcap=0.0,
    )
    bare = dataclasses.replace(config, layer_types=(), rotary_layers=(), window=0)
    tokens = np.zeros((2, 30), np.int32)
    texts = []
    for shape in (config, bare):
      params = decoder.shapes(shape)
      texts.append(str(jax.make_jaxpr(lambda p, c=shape: decoder.trunk(p, c, tokens))(params)))
    self.assertEqual(*texts)
    self.assertNotIn('tanh', texts[0])

  def test_mean_logp_of_capped_logits_is_refused(self):
    config = window_config()
    x = jnp.zeros((1, 4, 16))
    with self.assertRaisesRegex(UserError, 'caps its logits.*choose another objective'):
      vocabulary.uniform_logp({}, config, x, np.zeros((1, 4), int), x[..., 0])

  @pytest.mark.slow
  def test_greedy_episode_equals_teacher_forcing(self):
    """Prompts of different lengths, in chunks; the window is shorter than all of them."""
    config = window_config(cache_tile=16)
    params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), config)
    params = jax.tree.map(
        lambda w: w + 0.3 * jax.random.normal(jax.random.key(w.size), w.shape), params
    )
    sizes = sampling.Sizes(rows=2, prefill_rows=2, max_slots=64, steps=12, chunk_buckets=(4, 8))
    sampler = sampler_lib.Sampler(config, np.zeros((2, 60), np.int32), (), sizes, sampling.GREEDY)
    policy = sampler.copy(params)
    prompts = [list(range(3, 22)), list(range(30, 41))]
    context = sampler.empty(2, sampler.slot_buckets[0])
    context, _ = sampler.prefill(policy, context, prompts, [0, 0])
    rows = sampler.idle_rows(2)
    rows.lengths[:] = [len(prompt) for prompt in prompts]
    rows.budgets[:] = 12
    _, result = sampler.decode(policy, context, rows, 12, 2)
    for row, prompt in enumerate(prompts):
      tokens = np.array([prompt + list(np.asarray(result.tokens[row]))])
      logits = forward(params, config, tokens, None)[0][0]
      likeliest = np.argmax(logits[len(prompt) - 1 : -1], axis=-1)
      np.testing.assert_array_equal(result.tokens[row], likeliest)


def tiny_shape(family):
  """Fields of a ModelConfig of one family, for `tiny_run.write_model`."""
  shape = dict(families.find(family).flags)
  shape |= {'family': family, 'qkv_bias': False, 'num_layers': 3, 'window': 20}
  shape['layer_types'] = ('window', 'window', 'full')
  if family == 'smollm3':
    shape['rotary_layers'] = (True, True, False)
  if family == 'mistral':
    shape['layer_types'] = ('window',) * 3
  if family == 'gemma3_text':
    shape['window_rope'] = (1e4, None)
    shape['rope_theta'] = 1e6
  if family.startswith('qwen3_5'):
    shape |= {'window': 0, 'layer_types': ('delta', 'delta', 'full'), 'rotary_share': 0.5}
    shape['delta'] = layers.DeltaShape(2, 4, 4, 4, 4)
  if 'moe' in family:
    shape |= {'num_experts': 4, 'experts_per_token': 2, 'norm_topk_prob': True, 'shared_d_ff': 8}
  return shape


class RunTest(parameterized.TestCase):

  def train(self, folder, workdir, devices=1, **values):
    config = tiny_run.make_config(folder, **values)
    place = tiny_run.on_one_device() if devices == 1 else contextlib.nullcontext()
    if devices > 1:
      config.mesh = schema.MeshSettings(data=1, fsdp=4, tensor=2)
    with place:
      loop.start(config, f'{folder}/{workdir}')
    return metrics_lib.read_metrics(f'{folder}/{workdir}')

  @parameterized.parameters(
      ('mistral', 8, 0),
      ('smollm3', 1, 2),
      ('olmo3', 1, 0),
      ('gemma3_text', 1, 0),
      ('gemma3_text', 8, 2),
      ('qwen3_5_text', 1, 0),
      ('qwen3_5_text', 8, 2),
      ('qwen3_5_moe_text', 1, 2),
  )
  @pytest.mark.slow
  def test_sampler_and_trainer_agree_in_runs(self, family, devices, rank):
    """Two updates, in full or of adapters."""
    folder = self.enterContext(tempfile.TemporaryDirectory())
    tiny_run.write(folder)
    model = f'{folder}/family'
    tiny_run.write_model(model, **tiny_shape(family))
    targets = ('q_proj', 'o_proj')
    if family.startswith('qwen3_5'):
      targets += ('in_proj_qkv', 'out_proj')
    rows = self.train(
        folder,
        'run',
        devices,
        model__folder=model,
        model__lora_rank=rank,
        model__lora_targets=targets,
    )
    updates = [row for row in rows if 'rollout_corr/kl' in row]
    self.assertLen(updates, 2)
    for row in updates:
      self.assertLess(abs(row['rollout_corr/kl']), 1e-4)
      self.assertGreater(row['actor/grad_norm'], 0)

  @pytest.mark.slow
  def test_run_with_delta_nets_resumes_bit_exactly(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    tiny_run.write(folder)
    model = f'{folder}/family'
    tiny_run.write_model(model, **tiny_shape('qwen3_5_text'))
    straight = self.train(folder, 'straight', model__folder=model)
    for updates in (1, 2):
      resumed = self.train(folder, 'resumed', model__folder=model, train__updates=updates)
    self.assertEqual(straight[-1]['actor/pg_loss'], resumed[-1]['actor/pg_loss'])


if __name__ == '__main__':
  absltest.main()
