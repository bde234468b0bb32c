"""Rows that share the places of a prefix: log-probs, values, gradients and steps are as alone."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.models import attention
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.training import minibatches
from stppo_jax.training import packing
from stppo_jax.training import state as train_state
from stppo_jax.training import update
from tests.models import lora_test
from tests.systems import hl_gauss_test
from tests.training import update_test

ROWS, LENGTH = 8, 24
QUICK = hypothesis.settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def trie_tokens(rng, rows=ROWS, length=LENGTH, vocab=32):
  """Rows of which most begin like an earlier one, for a random number of tokens."""
  tokens = rng.integers(0, vocab, (rows, length)).astype(np.int32)
  for row in range(1, rows):
    if rng.random() < 0.8:
      common = rng.integers(1, length + 1)
      tokens[row, :common] = tokens[rng.integers(row), :common]
  return tokens


def packed(tokens, lengths, num_bins, length_buckets):
  return packing.pack(lengths, num_bins, length_buckets, True, tokens, tokens.shape[1])


@functools.partial(jax.jit, static_argnums=(1, 2))
def layout_of(places, num_bins, capacity):
  """The first micro-batch."""
  return packing.layout(places, 0, num_bins, capacity)


class PackTest(parameterized.TestCase):

  def test_forest_by_hand(self):
    """The rows of the module's picture, and one that has nothing in common with them."""
    rows = [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6, 7], [9, 8], []]
    tokens = np.zeros((5, 12), int)
    for row, numbers in enumerate(rows):
      tokens[row, : len(numbers)] = numbers
    found = packed(tokens, [4, 4, 5, 2, 0], 1, (12,))
    self.assertEqual(packing.num_places(found), 9)
    layout = packing.layout(found, 0, 1, 12)
    tree = [0, 0, 1, 2, 1, 4, 5, 7, 7]
    np.testing.assert_array_equal(layout.pack(tokens)[0], [1, 2, 3, 4, 5, 6, 7, 9, 8, 0, 0, 0])
    np.testing.assert_array_equal(layout.paths.parents[0], [*tree, 9, 10, 11])
    np.testing.assert_array_equal(layout.paths.ends[0], [7, 7, 4, 4, 7, 7, 7, 9, 9, 10, 11, 12])
    np.testing.assert_array_equal(layout.paths.depths[0, :9], [0, 1, 2, 3, 2, 3, 4, 0, 1])
    np.testing.assert_array_equal(layout.num_rows[0], [3, 3, 1, 1, 2, 2, 1, 1, 1, 0, 0, 0])
    added = layout.add_up(jnp.ones((5, 12)))[0]
    np.testing.assert_array_equal(added, [0, 3, 1, 1, 2, 2, 1, 0, 1, 0, 0, 0])

  @QUICK
  @hypothesis.given(
      seed=st.integers(0, 10**6),
      num_bins=st.sampled_from((1, 2, 3)),
      length_buckets=st.sampled_from(((24,), (24, 40), (12, 24, 100))),
  )
  def test_places_are_the_distinct_prefixes(self, seed, num_bins, length_buckets):
    rng = np.random.default_rng(seed)
    tokens = trie_tokens(rng, vocab=3)
    lengths = rng.integers(0, LENGTH + 1, ROWS)
    found = packed(tokens, lengths, num_bins, length_buckets)
    prefixes = {}  # by place
    for row, length in enumerate(lengths):
      columns = found.place[row, :length]
      self.assertTrue(np.all(np.diff(columns) > 0))
      for t, column in enumerate(columns):
        prefix = tuple(tokens[row, : t + 1])
        place = int(found.bin[row]), int(column)
        self.assertEqual(prefixes.setdefault(place, prefix), prefix)
    distinct = {(bin, prefix) for (bin, _), prefix in prefixes.items()}
    self.assertLen(distinct, len(prefixes))  # no prefix twice in a bin
    self.assertEqual(packing.num_places(found), len(prefixes))
    self.assertLessEqual(max((column for _, column in prefixes), default=0), length_buckets[-1] - 1)

  @QUICK
  @hypothesis.given(seed=st.integers(0, 10**6), window=st.sampled_from((0, 1, 3, 7)))
  def test_mask_is_the_path(self, seed, window):
    rng = np.random.default_rng(seed)
    tokens = trie_tokens(rng)
    lengths = rng.integers(1, LENGTH + 1, ROWS)
    layout = layout_of(packed(tokens, lengths, 1, (100,)), 1, 100)
    expected = np.zeros((100, 100), bool)
    for row in np.flatnonzero(layout.owned[:, 0]):
      places = np.asarray(layout.slot)[row, : lengths[row]]
      for t, place in enumerate(places):
        first = max(0, t + 1 - window) if window else 0
        expected[place, places[first : t + 1]] = True
    mask = attention.causal_mask(100, layout.paths, window=window)[0, 0, 0]
    live = np.asarray(layout.live[0])
    np.testing.assert_array_equal(mask[live], expected[live])
    self.assertTrue(np.asarray(mask).any(axis=1).all())  # also in padding: no softmax of nothing

  @QUICK
  @hypothesis.given(seed=st.integers(0, 10**6))
  def test_add_up_is_the_transpose_of_unpack(self, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, LENGTH + 1, ROWS)
    found = packed(trie_tokens(rng), lengths, 2, (LENGTH,))
    layout = layout_of(found, 2, LENGTH)
    rows = rng.normal(size=(ROWS, LENGTH, 2))
    bins = rng.normal(size=(2, LENGTH, 2))
    one_way = np.vdot(layout.add_up(jnp.asarray(rows)), bins)
    other_way = np.vdot(rows, layout.unpack(jnp.asarray(bins)))
    np.testing.assert_allclose(one_way, other_way, rtol=1e-5, atol=1e-5)

  def test_without_common_prefixes_bins_are_the_same(self):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 25, 40)
    tokens = np.tile(np.arange(40)[:, None], (1, 40))
    plain = packing.pack(lengths, 3, (24, 40))
    forest = packing.pack(lengths, 3, (24, 40), True, tokens)
    np.testing.assert_array_equal(plain.bin, forest.bin)

  def test_rows_of_a_group_share_a_bin(self):
    """Groups of four rows with a prompt of 16, in bins of 32: one group per bin."""
    tokens = np.random.default_rng(0).integers(0, 1000, (16, 32))
    tokens[:, :16] = np.repeat(tokens[::4, :16], 4, axis=0)
    found = packing.pack(np.full(16, 20), 2, (32,), True, tokens)
    np.testing.assert_array_equal(found.bin, np.repeat(found.bin[::4], 4))
    self.assertEqual(packing.num_places(found), 4 * 32)

  @parameterized.parameters((False, 8 + 6 + 6), (True, 3 + 11 + 11))
  def test_experts_of_a_sampler_tell_tokens_apart(self, has_routes, expected):
    """Two rows of 8 + 6 tokens. The second has another expert from its fourth token on."""
    rows = []
    for row in range(2):
      routes = np.zeros((14, 2, 1), np.uint8)
      routes[3:, 1] = row
      routes = routes if has_routes else None
      tokens = np.arange(6, dtype=np.int32) + 100 * row
      turn = types.Turn(tokens, np.zeros(6, np.float32), np.zeros(0, np.int32), routes=routes)
      prompt = np.arange(8, dtype=np.int32)
      rows.append(types.Episode(types.Task('t', 'q'), 0, prompt, [turn]))
    bins = minibatches.Bins(2, 1, 1, (32,), 0, None, share_prefixes=True)
    _, (step,) = minibatches.to_device(rows, bins, jax.random.key(0))
    self.assertEqual(packing.num_places(step.packing), expected)


MODELS = {
    'plain': {},
    'windows': dict(num_layers=3, layer_types=('window', 'full', 'window'), window=5),
    'softcap': dict(attention_softcap=5.0, logit_softcap=3.0),
    'chunks': dict(attention_chunk=12),
    'remat': dict(num_layers=2, scan_layers=True, remat='full'),
    'moe': dict(num_experts=4, experts_per_token=2),
    'window_rope': dict(
        num_layers=2, layer_types=('window', 'full'), window=5, window_rope=(5e3, None)
    ),
}


@functools.cache
def forward_functions(name, context_shards=None):
  """(alone, together): log-probs, entropies and values of rows [B,T], and their gradient."""
  model = dataclasses.replace(update_test.MODEL, head='both', **MODELS[name])
  if context_shards is not None:
    model = dataclasses.replace(model, row_sharding=sharding.context_rows(context_shards.mesh))
  params = decoder.init(jax.random.key(1), model)
  noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape)
  params = jax.tree.map(noise, params)
  weights = jax.random.normal(jax.random.key(3), (3, ROWS, LENGTH))

  def outputs(params, tokens, paths=None):
    x, _ = decoder.trunk(params, model, tokens, segments=paths)
    logp, entropy = decoder.token_logp(params, model, x, tokens, 0.7, 8, paths)
    return jnp.stack([logp, entropy, decoder.state_values(params, x, paths)])

  def masked(y, lengths):
    columns = jnp.arange(LENGTH)
    is_in_row = (columns < lengths[:, None]) & (columns > 0)
    return jnp.where(is_in_row, y, 0)

  def alone(params, tokens, lengths):
    y = masked(outputs(params, tokens), lengths)
    return jnp.sum(y * weights), y

  def together(params, tokens, places):
    y = 0
    for j in range(ROWS // 2):
      layout = packing.layout(places, j, 2, 2 * LENGTH, context_shards)
      parts = outputs(params, layout.pack(tokens), layout.paths)
      y += jnp.stack([layout.unpack(part) for part in parts])
    return jnp.sum(y * weights), y

  def compiled(function):
    return jax.jit(jax.value_and_grad(function, has_aux=True))

  return params, compiled(alone), compiled(together)


class ModelTest(parameterized.TestCase):

  @parameterized.parameters(*MODELS)
  @pytest.mark.slow_after(2)
  def test_outputs_and_gradients_equal_rows_alone(self, name):
    params, alone, together = forward_functions(name)
    shared = 0
    num_moved = 0  # rows with a gap between their places: they branch off
    for seed in range(3):
      rng = np.random.default_rng(seed)
      tokens = trie_tokens(rng)
      lengths = rng.integers(1, LENGTH + 1, ROWS)
      places = packed(tokens, lengths, 2, (2 * LENGTH,))
      shared += lengths.sum() - packing.num_places(places)
      num_moved += (places.place - places.place[:, :1] > np.arange(LENGTH)).any(axis=1).sum()
      (_, expected), expected_grad = alone(params, tokens, lengths)
      (_, got), grad = together(params, tokens, places)
      np.testing.assert_allclose(got, expected, atol=2e-5)
      chex.assert_trees_all_close(grad, expected_grad, rtol=1e-4, atol=1e-4)
    self.assertGreater(shared, 30)
    self.assertGreater(num_moved, 5)


def trie_batch():
  """Rows that share prefixes, with own masks and rewards. Row 2 failed, and the last is padding."""
  batch = update_test.make_batch(length=LENGTH)
  tokens = trie_tokens(np.random.default_rng(1))
  mask = batch.action_mask * (np.arange(ROWS) != 2)[:, None]
  turn_ids = batch.turn_ids * (mask > 0)
  rewards = batch.rewards * mask
  return batch.replace(tokens=tokens, action_mask=mask, turn_ids=turn_ids, rewards=rewards)


def take_step(spec, mesh, start=None):
  """(annotated batch, metrics, state after a step, its tokens), with some ratios clipped."""
  if start is None:
    state = update_test.make_state(spec, mesh)
    frozen = train_state.Frozen(reference=update_test.first_state(spec, mesh).actor)
  else:
    state, frozen = start(spec, mesh)
  functions = update.compile_functions(spec, state, frozen, mesh)
  batch = jax.device_put(trie_batch(), sharding.rows(mesh))
  steps = packing.stack([update_test.one_step(spec, batch, update_test.ALL_ROWS)])
  batch, gap = functions.annotate(state, frozen, batch, steps)
  noise = jax.random.normal(jax.random.key(3), batch.old_logp.shape) * batch.action_mask
  old_logp = batch.old_logp + 0.5 * noise
  batch = batch.replace(old_logp=old_logp, ref_logp=batch.ref_logp + 0.3 * noise)
  state, batch, metrics = functions.with_advantages(state, batch)
  step = update_test.one_step(spec, batch, update_test.ALL_ROWS)
  state, step_metrics, tokens = functions.update_step(state, frozen, batch, step)
  return jax.device_get((batch, gap | metrics | step_metrics, state, tokens))


EXPERTS = dataclasses.replace(
    update_test.MODEL, num_layers=2, num_experts=4, experts_per_token=2, scan_layers=True
)
KL = dict(kl_in='loss', kl_estimator='k3', entropy_coef=0.01)
HL_GAUSS = dict(row=hl_gauss_test.ROW, critic=hl_gauss_test.BINS)
SHARED_TRUNK = dict(actor=dataclasses.replace(update_test.MODEL, head='both'), critic=None)


class UpdateTest(parameterized.TestCase):

  @parameterized.parameters(
      ('st_ppo', (24, 48), 2, KL),
      ('ppo', (12, 24), 1, dict(aggregation='token-mean')),
      ('so_grpo', (100,), 4, {}),
      ('grpo', (24,), 2, dict(actor=EXPERTS, routing_replay='old_policy')),
      ('st_ppo', (24, 48), 2, SHARED_TRUNK),
      ('ppo', (48,), 2, HL_GAUSS),
  )
  @pytest.mark.slow_after(1)
  def test_step_equals_that_of_rows_alone(self, variant, length_buckets, micro_batch, options):
    mesh = update_test.one_device()
    alone = take_step(update_test.make_spec(variant, **options), mesh)
    options = dict(
        options, length_buckets=length_buckets, micro_batch=micro_batch, share_prefixes=True
    )
    spec = update_test.make_spec(variant, **options)
    step = update_test.one_step(spec, trie_batch(), update_test.ALL_ROWS)
    self.assertLess(packing.num_places(step.packing), 0.8 * step.packing.length.sum())
    self.check_equal(take_step(spec, mesh), alone)

  @pytest.mark.slow
  def test_kernel_of_tpus_takes_the_same_step(self):
    model = dataclasses.replace(update_test.MODEL, head_dim=64)
    critic = dataclasses.replace(model, head='value')
    alone = take_step(update_test.make_spec(actor=model, critic=critic), update_test.one_device())
    splash = {'attention': 'splash', 'row_sharding': sharding.rows(update_test.one_device())}
    spec = update_test.make_spec(
        actor=dataclasses.replace(model, **splash),
        critic=dataclasses.replace(critic, **splash),
        length_buckets=(128,),
        micro_batch=1,
        share_prefixes=True,
    )
    self.check_equal(take_step(spec, update_test.one_device()), alone)

  @pytest.mark.slow
  def test_adapters_take_the_same_step(self):
    mesh = update_test.one_device()
    alone = take_step(lora_test.make_spec(), mesh, lora_test.start)
    spec = lora_test.make_spec(micro_batch=2, length_buckets=(24, 48), share_prefixes=True)
    self.check_equal(take_step(spec, mesh, lora_test.start), alone)

  @pytest.mark.slow
  def test_eight_devices_take_the_same_step(self):
    alone = take_step(update_test.make_spec('st_ppo', **KL), update_test.one_device())
    spec = update_test.make_spec('st_ppo', length_buckets=(24, 48), share_prefixes=True, **KL)
    self.check_equal(take_step(spec, sharding.make_mesh(2, 2, 2)), alone)

  def test_first_ratio_is_exactly_one(self):
    mesh = update_test.one_device()
    spec = update_test.make_spec(
        'st_ppo', micro_batch=2, length_buckets=(24, 48), share_prefixes=True
    )
    state = update_test.make_state(spec, mesh)
    functions = update_test.functions_of(spec, mesh)
    batch = update_test.annotate(functions, spec, state, jax.device_put(trie_batch()))
    state, batch, _ = functions.with_advantages(state, batch)
    _, _, seen = update_test.step(functions, spec, state, batch)
    np.testing.assert_array_equal(seen['ratio'], np.ones((ROWS, LENGTH), np.float32))

  def check_equal(self, got, expected):
    self.assertGreater(float(expected[1]['stppo/step_norm']), 0)
    self.assertGreater(expected[3]['clipped'].sum(), 0)
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


if __name__ == '__main__':
  absltest.main()
