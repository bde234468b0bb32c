"""Rows over several devices: attention, log-probs, gradients and steps are those of one device."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import attention
from stppo_jax.models import context_parallel as pieces_lib
from stppo_jax.models import decoder
from stppo_jax.models import layers
from stppo_jax.models import sharding
from stppo_jax.training import packing
from stppo_jax.types import UserError
from tests.models import lora_test
from tests.training import prefixes_test
from tests.training import update_test


def make_pieces(context, data=1, tensor=1):
  size = data * tensor * context
  mesh = sharding.make_mesh(data, 1, tensor, jax.devices()[:size], context)
  return pieces_lib.DeviceShards(mesh)


def forest(rng, num_bins, num_columns):
  """Paths of random forests in bins [R,P], and of what is left behind them."""
  tokens = prefixes_test.trie_tokens(rng)
  lengths = rng.integers(1, 25, len(tokens))
  places = prefixes_test.packed(tokens, lengths, num_bins, (num_columns,))
  return prefixes_test.layout_of(places, num_bins, num_columns).paths


class CutTest(parameterized.TestCase):

  def test_pieces_by_hand(self):
    """Two devices share each of three bins of eight columns."""
    bins = np.arange(24).reshape(3, 8)
    cut = make_pieces(2).cut(bins)
    expected = [[0, 1, 6, 7], [8, 9, 14, 15], [16, 17, 22, 23]]
    expected += [[2, 3, 4, 5], [10, 11, 12, 13], [18, 19, 20, 21]]
    np.testing.assert_array_equal(cut, expected)

  @parameterized.parameters((2, 1), (2, 2), (4, 1), (4, 2), (8, 1))
  def test_every_device_has_pieces_of_its_bins(self, context, data):
    context_shards = make_pieces(context, data)
    bins = np.arange(4 * 32).reshape(4, 32)
    cut = context_shards.cut(bins)
    np.testing.assert_array_equal(context_shards.join(cut), bins)
    placed = jax.device_put(cut, sharding.context_rows(context_shards.mesh))
    for shard in placed.addressable_shards:
      block = np.argwhere(context_shards.mesh.devices == shard.device)[0][0]
      own = set(bins[block * 4 // data : (block + 1) * 4 // data].ravel())
      self.assertContainsSubset(np.ravel(shard.data), own)

  @parameterized.parameters((2, 0), (4, 0), (8, 3), (4, 2))
  def test_devices_compute_equally_many_blocks(self, context, chunk):
    blocks = pieces_lib._Blocks(context, chunk, 0, 0.0)
    pairs = blocks.pairs(24)  # an array: all lists have one length
    per_chunk = 12 // blocks.size(24)
    computed = {tuple(pair) for pair in pairs[:, :, 1:].reshape(-1, 2)}
    num_blocks = 2 * context * per_chunk
    expected = {(query, key) for query in range(num_blocks) for key in range(query + 1)}
    self.assertEqual(computed, expected)
    self.assertLen(expected, pairs.shape[0] * pairs.shape[1])  # none twice


class AttentionTest(parameterized.TestCase):

  @parameterized.parameters(
      (2, 1, 1, {}),
      (4, 1, 2, dict(chunk=4)),
      (2, 2, 2, dict(window=5, chunk=6)),
      (8, 1, 1, dict(softcap=2.0)),
      (2, 4, 1, dict(window=2, softcap=3.0, chunk=3)),
  )
  @pytest.mark.slow_after(2)
  def test_outputs_and_gradients_equal_plain_attention(self, context, data, tensor, options):
    rng = np.random.default_rng(context)
    num_bins, num_columns = 4, 96
    paths = forest(rng, num_bins, num_columns)
    q, k, v, d = (
        rng.normal(size=(num_bins, num_columns, heads, 8)).astype(np.float32)
        for heads in (4, 2, 2, 4)
    )
    whole = dict(options, chunk=0)

    @functools.partial(jax.jit, static_argnums=4)
    def plain(q, k, v, d, whole):
      y, pull = jax.vjp(lambda *x: attention.causal(*x, paths, **dict(whole)), q, k, v)
      return y, pull(d)

    context_shards = make_pieces(context, data, tensor)
    own = dataclasses.replace(paths, context_shards=context_shards)

    @jax.jit
    def in_pieces(*inputs):
      *inputs, d = map(context_shards.cut, inputs)
      y, pull = jax.vjp(lambda *x: attention.causal(*x, own, **options), *inputs)
      return jax.tree.map(context_shards.join, (y, pull(d)))

    expected = plain(q, k, v, d, tuple(whole.items()))
    self.assertGreater(float(jnp.abs(expected[1][1]).max()), 0.1)
    with jax.set_mesh(context_shards.mesh):
      actual = in_pieces(q, k, v, d)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-5)


class ModelTest(parameterized.TestCase):

  @parameterized.parameters(*prefixes_test.MODELS)
  @pytest.mark.slow_after(1)
  def test_outputs_and_gradients_equal_rows_alone(self, name):
    params, alone, _ = prefixes_test.forward_functions(name)
    context_shards = make_pieces(4)
    _, _, together = prefixes_test.forward_functions(name, context_shards)
    rng = np.random.default_rng(0)
    tokens = prefixes_test.trie_tokens(rng)
    lengths = rng.integers(1, prefixes_test.LENGTH + 1, prefixes_test.ROWS)
    (_, expected), expected_grad = alone(params, tokens, lengths)
    for shared in (tokens, None):  # rows that share places, and rows that do not
      places = packing.pack(lengths, 2, (2 * prefixes_test.LENGTH,), True, shared, tokens.shape[1])
      (_, got), grad = together(params, tokens, places)
      np.testing.assert_allclose(got, expected, atol=2e-5)
      chex.assert_trees_all_close(grad, expected_grad, rtol=1e-4, atol=1e-4)


MESHES = {  # (data, fsdp, tensor), context
    'two': ((1, 1, 1), 2),
    'four': ((1, 1, 1), 4),
    'eight': ((1, 1, 1), 8),
    'with_all': ((1, 2, 2), 2),
    'with_data': ((2, 1, 1), 4),
}


class UpdateTest(parameterized.TestCase):

  @parameterized.parameters(
      ('two', 'st_ppo', prefixes_test.KL),
      ('with_all', 'st_ppo', dict(prefixes_test.KL, logp_chunk=4)),
      ('four', 'ppo', dict(aggregation='token-mean')),
      ('eight', 'so_grpo', {}),
      ('with_data', 'grpo', dict(actor=prefixes_test.EXPERTS, routing_replay='old_policy')),
      ('with_all', 'st_ppo', prefixes_test.SHARED_TRUNK),
      ('four', 'ppo', prefixes_test.HL_GAUSS),
  )
  @pytest.mark.slow
  def test_step_equals_that_of_one_device(self, mesh, variant, options):
    """With rows that share places, and without."""
    alone = prefixes_test.take_step(
        update_test.make_spec(variant, **dict(options, logp_chunk=None)), update_test.one_device()
    )
    sizes, context = MESHES[mesh]
    mesh = sharding.make_mesh(
        *sizes, jax.devices()[: int(np.prod(sizes)) * context], context=context
    )
    for share in (True, False):
      spec = update_test.make_spec(
          variant, **options, micro_batch=2, length_buckets=(32, 64), share_prefixes=share
      )
      got = prefixes_test.take_step(spec, mesh)
      self.assertGreater(float(alone[1]['stppo/step_norm']), 0)
      self.assertGreater(alone[3]['clipped'].sum(), 0)
      chex.assert_trees_all_close(got, alone, rtol=1e-4, atol=1e-5)

  @pytest.mark.slow
  def test_adapters_take_the_same_step(self):
    alone = prefixes_test.take_step(
        lora_test.make_spec(), update_test.one_device(), lora_test.start
    )
    spec = lora_test.make_spec(micro_batch=2, length_buckets=(32, 64), share_prefixes=True)
    mesh = sharding.make_mesh(1, 2, 1, jax.devices()[:8], context=4)
    got = prefixes_test.take_step(spec, mesh, lora_test.start)
    chex.assert_trees_all_close(got, alone, rtol=1e-4, atol=1e-5)

  def test_context_splits_parameters_as_fsdp_does(self):
    mesh = sharding.make_mesh(1, 2, 1, jax.devices()[:8], context=4)
    for width, part in ((16, 2), (4, 2), (3, 3)):  # 4 is no multiple of 8, and 3 none of 2
      shape = (3, width, 8)
      places = sharding.tree_shardings({'mlp/up/kernel': jnp.zeros(shape)}, mesh)
      self.assertEqual(places['mlp/up/kernel'].shard_shape(shape), (3, part, 8))


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      ({}, 'splash', (64,), 'config.model.attention=auto'),
      ({}, 'auto', (64, 66), '66 of config.train.length_buckets is no multiple of 4'),
      (dict(delta=True), 'auto', (64,), 'config.mesh.context=1'),
  )
  def test_refuses_what_needs_whole_rows(self, model, backend, lengths, message):
    config = update_test.MODEL
    if model:
      shape = layers.DeltaShape(1, 1, 8, 8, 2)
      config = dataclasses.replace(config, num_layers=2, layer_types=('delta', 'full'), delta=shape)
    mesh = make_pieces(2).mesh
    with self.assertRaisesRegex(UserError, message):
      decoder.choose_attention(config, backend, mesh, lengths)
    self.assertEqual(decoder.choose_attention(update_test.MODEL, 'auto', mesh, (64,)), 'plain')


if __name__ == '__main__':
  absltest.main()
