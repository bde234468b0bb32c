"""The sampling layout on eight simulated devices: the numbers of one device, and what is sent."""

import dataclasses
import math

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import decoder
from stppo_jax.models import lora
from stppo_jax.models import presets
from stppo_jax.models import sharding
from stppo_jax.rollout import engine
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.rollout import sampling_mesh
from stppo_jax.types import UserError
from tests.support import collectives

LAYERS, VOCAB, EOS = 2, 700, 3  # 700 ids are 5.5 blocks
CONFIG = decoder.ModelConfig(
    vocab_size=VOCAB,
    d_model=32,
    num_layers=LAYERS,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    d_ff=64,
    qkv_bias=True,
    qk_norm=True,
)


def training_mesh(devices=8):
  return sharding.make_mesh(1, -1, 1, jax.devices()[:devices])


def make_params(config=CONFIG):
  """Random weights, large enough that no distribution is uniform, in the shards of training."""
  params = decoder.init(jax.random.key(0), config)
  enlarge = lambda path, w: w if path[-1].key == 'scale' else 6.0 * w
  params = jax.tree_util.tree_map_with_path(enlarge, params)
  return jax.device_put(params, sharding.tree_shardings(params, training_mesh()))


def make_sampler(split, config=CONFIG, **settings):
  rows = None
  if split is not None:
    mesh = training_mesh(split[0] * split[1])
    rows = sharding.rows(sampling_mesh.make_mesh(mesh, config, split))
  settings = dict(rows=8, slot_buckets=(32,), chunk_buckets=(4,), steps=8) | settings
  config = dataclasses.replace(config, row_sharding=rows)
  stops = np.zeros((2, config.vocab_size - 5), np.int32)  # five ids are not the tokenizer's
  draw = sampling.Distribution(*settings.pop('draw', ()))
  sizes = sampling.Sizes(32, **settings)
  return sampler_lib.Sampler(config, stops, (EOS,), sizes, draw, rows)


def play(sampler, params):
  """Two turns of 8 rows; the second prompt is two tokens. Returns (tokens, logp) of each row."""
  said = [([], []) for _ in range(8)]

  def respond(completions):
    prompts = []
    for completion in completions:
      tokens, logp = said[completion.index]
      again = not tokens
      tokens.extend(completion.turn.tokens.tolist())
      logp.extend(completion.turn.logp.tolist())
      prompts.append(engine.Prompt([9, 2], 6) if again else engine.Prompt((), 0))
    return prompts

  prompts = [engine.Prompt([5 + i, 6, 600 - i][: 1 + i % 3], 8) for i in range(8)]
  keys = jax.random.split(jax.random.key(1), 8)
  engine.run(sampler, sampler.copy(params), prompts, keys, respond)
  return [tokens for tokens, _ in said], [logp for _, logp in said]


class NumbersTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.params = make_params()
    cls.on_one = jax.device_put(cls.params, jax.devices()[0])
    cls.alone = {}

  def one_device(self, **settings):
    key = tuple(settings.items())
    if key not in self.alone:
      self.alone[key] = play(make_sampler(None, **settings), self.on_one)
    return self.alone[key]

  @parameterized.parameters(((2, 4), False), ((4, 2), True), ((8, 1), False))
  def test_tokens_and_logp_equal_one_device(self, split, greedy):
    settings = dict(draw=(0.0,)) if greedy else {}
    tokens, logp = play(make_sampler(split, **settings), self.params)
    wanted, wanted_logp = self.one_device(**settings)
    self.assertGreater(len({t for row in wanted for t in row}), 20)  # tokens of all shards
    self.assertEqual(tokens, wanted)
    for ours, theirs in zip(logp, wanted_logp):
      np.testing.assert_allclose(ours, theirs, atol=2e-5)

  def test_top_p_too(self):
    settings = dict(draw=(0.8, 50, 0.9))
    self.assertEqual(
        play(make_sampler((2, 4), **settings), self.params)[0], self.one_device(**settings)[0]
    )

  def test_rows_are_rounded_up_to_devices(self):
    sampler = make_sampler((4, 2), rows=6)
    self.assertEqual((sampler.width, sampler.num_groups), (8, 1))

  @parameterized.parameters((1, 4), (2, 4))
  def test_moved_rows_keep_their_layout(self, *split):
    """Another layout would be another argument, and each program would be compiled again."""
    sampler = make_sampler(split)
    layout_of = lambda context: [array.sharding for array in jax.tree.leaves(context)]
    context = sampler.empty(sampler.width, 32)
    wanted = layout_of(context)
    for _ in range(3):
      taken = sampler.take(context, [0, 1])
      self.assertEqual(layout_of(taken), wanted)
      context = sampler.put(context, taken, [2, 3], [0, 1])
      self.assertEqual(layout_of(context), wanted)
    self.assertEqual((sampler._take._cache_size(), sampler._put._cache_size()), (1, 1))

  def test_greedy_evaluation_shares_the_programs(self):
    sampler = make_sampler((2, 4))
    play(sampler, self.params)
    compiled = sampler.compiled_variants()
    tokens, _ = play(sampler.greedy(3), self.params)
    self.assertEqual(tokens, self.one_device(draw=(0.0,))[0])
    self.assertEqual(sampler.compiled_variants(), compiled)


class CopyTest(parameterized.TestCase):

  def test_copy_survives_donation_of_the_policy(self):
    for split in (None, (1, 1), (2, 4)):
      params = make_params() if split == (2, 4) else decoder.init(jax.random.key(0), CONFIG)
      wanted = jax.device_get(params)
      copied = make_sampler(None if split == (1, 1) else split).copy(params)
      jax.tree.map(lambda x: x.delete(), params)
      np.testing.assert_array_equal(copied['final_norm']['scale'], wanted['final_norm']['scale'])
      np.testing.assert_array_equal(copied['embed']['embedding'], wanted['embed']['embedding'])
      for l, layer in enumerate(copied['layers']):
        chex.assert_trees_all_equal(layer, jax.tree.map(lambda w: w[l], wanted['layers']))

  def test_heads_feed_forward_and_vocabulary_are_split(self):
    config = dataclasses.replace(CONFIG, dtype='bfloat16', head='both')
    copied = make_sampler((2, 4), config).copy(make_params(config))
    self.assertNotIn('value_head', copied)
    layer = copied['layers'][1]
    shards = {
        'query': (layer['attention']['query']['kernel'], (32, 2, 8)),
        'key': (layer['attention']['key']['kernel'], (32, 1, 8)),
        'bias': (layer['attention']['key']['bias'], (1, 8)),
        'out': (layer['attention']['out']['kernel'], (2, 8, 32)),
        'gate': (layer['mlp']['gate']['kernel'], (32, 16)),
        'down': (layer['mlp']['down']['kernel'], (16, 32)),
        'embed': (copied['embed']['embedding'], (VOCAB // 4, 32)),
        'lm_head': (copied['lm_head']['kernel'], (32, VOCAB // 4)),
    }
    for name, (array, shape) in shards.items():
      self.assertEqual(array.sharding.shard_shape(array.shape), shape, name)
      self.assertEqual(array.dtype, jnp.bfloat16, name)
    self.assertEqual(layer['mlp_norm']['scale'].dtype, jnp.float32)
    context = make_sampler((2, 4), config).empty(8, 32)
    shard = lambda x: x.sharding.shard_shape(x.shape)
    self.assertEqual(shard(context.k[0]), (4, 1, 1, 8, 32))
    self.assertEqual(shard(context.v[1]), (4, 1, 32, 8))
    self.assertEqual(shard(context.logits), (4, VOCAB))

  @parameterized.parameters((None,), ((2, 4),))
  def test_adapters_are_merged(self, split):
    base = make_params() if split else decoder.init(jax.random.key(0), CONFIG)
    adapters = lora.init(jax.random.key(1), base, 2, ['q_proj', 'o_proj', 'down_proj'])
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape)
    adapters = jax.tree.map(noise, adapters)
    if split:
      adapters = jax.device_put(adapters, sharding.tree_shardings(adapters, training_mesh()))
    config = dataclasses.replace(CONFIG, lora_scale=0.5)
    copied = make_sampler(split, config).copy(lora.combine(base, adapters))
    merged = make_sampler(split, config).copy(lora.merge(base, adapters, 0.5))
    chex.assert_trees_all_close(copied, merged, atol=1e-6)


class SentTest(parameterized.TestCase):

  @parameterized.parameters((2, 4), (8, 1))
  def test_collectives_of_a_decoded_token(self, data, tensor):
    """Two sums of activations per layer, one of embeddings; only the logits are gathered.

    The sum that tells whether a row continues is in the condition of the loop.
    """
    sampler = make_sampler((data, tensor))
    text = sampler.trace(policy_shapes(), 32)['decode'].lower().compile().as_text()
    sent = collectives.collectives(collectives.largest_loop(text))
    rows = 8 // data
    if tensor == 1:
      self.assertEmpty(sent)
      return
    activations = [('all-reduce', rows * 32)] * (2 * LAYERS + 1)
    logits = [('all-gather', rows * VOCAB)]
    self.assertCountEqual(sent, activations + logits)

  def test_what_the_other_programs_gather(self):
    """The copy its own bytes over `data`, never whole parameters; prefill and growth nothing."""
    sampler = make_sampler((2, 4), slot_buckets=(16, 32))
    copied = jax.tree.leaves(sampler.shapes_of_copy(policy_shapes()))
    size = sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in copied)
    for name, traced in sampler.trace(policy_shapes(), 32).items():
      text = '' if name == 'decode' else traced.lower().compile().as_text()
      sent = collectives.collectives(text)
      gathered = sum(count for op, count in sent if op == 'all-gather')
      swapped = sum(count for op, count in sent if op != 'all-gather')
      if name == 'copy':
        self.assertLessEqual(4 * gathered, size)
        self.assertLessEqual(4 * swapped, size)  # between the two meshes
      else:
        logits = 4 * VOCAB if name == 'prefill' else 0  # 4 rows per device
        self.assertLessEqual(gathered, logits + 8, f'{name} {sent}')


class MeshTest(parameterized.TestCase):

  @parameterized.parameters(
      ('tiny', 64, (64, 1)),
      ('qwen2.5-1.5b', 64, (64, 1)),
      ('qwen2.5-3b', 64, (32, 2)),  # 2 key heads
      ('qwen2.5-7b', 64, (16, 4)),  # 14.2 GiB of bfloat16, 4 key heads
      ('qwen2.5-7b', 8, (2, 4)),
      ('qwen2.5-7b', 1, (1, 1)),
      ('qwen3-8b', 64, (16, 4)),
      ('smollm2-135m', 9, (9, 1)),
  )
  def test_the_default_by_the_size_of_the_copy(self, name, devices, wanted):
    model = dataclasses.replace(presets.PRESETS[name], dtype='bfloat16')
    found = sampling_mesh._smallest_tensor(devices, model)
    self.assertEqual((devices // found, found), wanted)

  @parameterized.parameters((((8, -1)), (8, 1)), ((-1, 4), (2, 4)), ((2, 4), (2, 4)), ((), (8, 1)))
  def test_sizes(self, sizes, wanted):
    mesh = sampling_mesh.make_mesh(training_mesh(), CONFIG, sizes)
    self.assertEqual(mesh.devices.shape, (wanted[0], 1, 1, wanted[1]))
    self.assertEqual(list(mesh.devices.flat), list(training_mesh().devices.flat))

  @parameterized.parameters((3, 2), (-1, 3), (4, 4), (16, 1), (-1, -1), (0, 8), (8,))
  def test_sizes_that_are_not_the_devices(self, *sizes):
    with self.assertRaisesRegex(UserError, r'^config.rollout.mesh=[^\n]* 8 devices[^\n]*$'):
      sampling_mesh.make_mesh(training_mesh(), CONFIG, sizes)

  def test_key_heads_that_do_not_divide(self):
    with self.assertRaisesRegex(UserError, r'^[^\n]*tensor=8 [^\n]* 4 key heads[^\n]*1, 2, 4$'):
      sampling_mesh.make_mesh(training_mesh(), CONFIG, (1, 8))


def policy_shapes():
  params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), CONFIG))
  places = sharding.tree_shardings(params, training_mesh())
  return jax.tree.map(lambda x, place: x.update(sharding=place), params, places)


if __name__ == '__main__':
  absltest.main()
