"""The compiled update: exact accumulation, the right gradient, equal results on 1 and 8 devices."""

import dataclasses
import functools
import gc
import itertools
import math
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stppo_jax.algorithms import correction
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import variants
from stppo_jax.models import attention
from stppo_jax.models import attention_kernels
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.training import optimizer_step
from stppo_jax.training import packing
from stppo_jax.training import state as train_state
from stppo_jax.training import update
from stppo_jax.types import TurnBatch

MODEL = decoder.ModelConfig(
    vocab_size=32,
    d_model=16,
    num_layers=1,
    scan_layers=False,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=32,
    tie_embeddings=True,
    qkv_bias=True,
)
CRITIC = dataclasses.replace(MODEL, head='value')
# As runs have it. One layer that is not scanned compiles in half of the time.
DEEP = dataclasses.replace(MODEL, num_layers=2, scan_layers=True)
ALL_ROWS = np.arange(8)
NOTHING = train_state.Frozen()  # frozen: nothing


# Plain descent: its step is linear in the gradient. Adam's first step is its sign, which turns the
# rounding of a gradient near 0 into a step of full size.
DESCENT, LR = optax.sgd(1.0), optax.constant_schedule(1.0)
PLAIN = dict(entropy_coef=0.0, kl_in='none', kl_coef=0.1)  # no terms but those of policy and critic


def make_spec(variant='st_ppo', critic=CRITIC, actor=MODEL, **options):
  """A Spec; options are fields of it, or columns of its variant."""
  row = dataclasses.replace(options.pop('row', variants.VARIANTS[variant]), **PLAIN)
  columns = {field.name for field in dataclasses.fields(row)}
  row = dataclasses.replace(row, **{k: v for k, v in options.items() if k in columns})
  options = {k: v for k, v in options.items() if k not in columns}
  if not row.needs_critic:
    critic = None
  return train_state.Spec(
      variant=row,
      actor=actor,
      critic=critic,
      actor_optimizer=DESCENT,
      critic_optimizer=DESCENT,
      actor_lr=LR,
      critic_lr=LR,
      **{
          'micro_batch': 8,
          'length_buckets': (24,),
          'temperature': 1.0,
          'logp_chunk': None,
          'critic_warmup': 0,
          'num_logged_turns': 5,
          **options,
      },
  )


@functools.cache
def first_state(spec, mesh):
  """The state before the first step, for all tests; never donate it."""
  actor = decoder.init(jax.random.key(1), spec.actor)
  critic = None if spec.critic is None else decoder.init(jax.random.key(2), spec.critic)
  return train_state.create_sharded(spec, actor, critic, mesh)


def make_state(spec, mesh):
  """A copy of the state before the first step, to be donated."""
  return copied(first_state(spec, mesh))


@jax.jit
def copied(state):
  return jax.tree.map(jnp.copy, state)


@functools.cache
def functions_of(spec, mesh, frozen_reference=False):
  """The functions of a spec, compiled once for all tests."""
  state = first_state(spec, mesh)
  frozen = train_state.Frozen(reference=state.actor) if frozen_reference else NOTHING
  return update.compile_functions(spec, state, frozen, mesh)


def one_device():
  return sharding.make_mesh(1, 1, 1, jax.devices()[:1])


def make_batch(rows=8, length=24, seed=0):
  """Ragged episodes of 1 to 3 turns; the last row is padding."""
  rng = np.random.default_rng(seed)
  turn_ids = np.zeros((rows, length), np.int32)
  rewards = np.zeros((rows, length), np.float32)
  for b in range(rows - 1):
    t = rng.integers(1, 4)
    for k in range(1, rng.integers(1, 4) + 1):
      n = rng.integers(1, 5)
      turn_ids[b, t : t + n] = k
      t += n + rng.integers(1, 3)
    rewards[b, np.flatnonzero(turn_ids[b])[-1]] = rng.integers(0, 2)
  mask = (turn_ids > 0).astype(np.float32)
  zeros = np.zeros((rows, length), np.float32)
  return TurnBatch(
      tokens=rng.integers(0, 32, (rows, length)).astype(np.int32),
      action_mask=mask,
      turn_ids=turn_ids,
      rewards=rewards,
      old_logp=zeros,
      ref_logp=zeros,
      old_values=zeros,
      advantages=zeros,
      returns=zeros,
      group_ids=np.arange(rows, dtype=np.int32) // 4,
      behaviour_logp=-3 * mask,
  )


def one_step(spec, batch, rows):
  """The packing.OptimizerStep of the given rows of a batch."""
  rows = rows.astype(np.int32)
  ends = (np.asarray(batch.action_mask) > 0) * np.arange(1, batch.tokens.shape[1] + 1)
  lengths = ends.max(axis=1)[rows]
  tokens = np.asarray(batch.tokens)[rows] if spec.share_prefixes else None
  num_tokens = batch.tokens.shape[1]
  options = (spec.micro_batch, spec.length_buckets, spec.shared_bins)
  bins = packing.pack(lengths, *options, tokens, num_tokens)
  return packing.OptimizerStep(rows, bins)


def annotate(functions, spec, state, batch, rows=ALL_ROWS, frozen=NOTHING):
  """The batch with log-probs and values, computed in the bins of one step on `rows`."""
  steps = packing.stack([one_step(spec, batch, rows)])
  return functions.annotate(state, frozen, batch, steps)[0]


def step(functions, spec, state, batch, rows=ALL_ROWS, frozen=NOTHING):
  """One optimizer step on `rows`."""
  return functions.update_step(state, frozen, batch, one_step(spec, batch, rows))


def log_probs(spec, params, batch):
  """(logp, entropy) [B,T] of the rows as they are."""
  x, _ = decoder.trunk(params, spec.actor, batch.tokens, None)
  return decoder.token_logp(params, spec.actor, x, batch.tokens)


def off_policy_batch(spec, mesh):
  """An annotated batch whose old_logp is pushed away, so that some ratios are clipped."""
  return _off_policy_batch(for_batch(spec), mesh)


def for_batch(spec):
  """The spec without what does not change the batch, so that many tests share its programs."""
  variant = dataclasses.replace(
      spec.variant,
      divisor='none',
      norm_of='gradient',
      divide='before_clip',
      step_scale='none',
      entropy_coef=0.0,
      kl_in='none' if spec.variant.kl_in == 'loss' else spec.variant.kl_in,
      aggregation='seq-mean-token-mean',
      norm_length=None,
      dual_clip=None,
      log_bias=True,
  )
  return dataclasses.replace(
      spec,
      variant=variant,
      actor_optimizer=DESCENT,
      critic_optimizer=DESCENT,
      actor_lr=LR,
      critic_lr=LR,
      critic_warmup=0,
      actor_clip=math.inf,
      micro_batch=8,
      length_buckets=(24,),
  )


@functools.cache
def _off_policy_batch(spec, mesh):
  state, functions = make_state(spec, mesh), functions_of(spec, mesh, True)
  reference = train_state.Frozen(reference=first_state(spec, mesh).actor)
  batch = jax.device_put(make_batch(), sharding.rows(mesh))
  batch = annotate(functions, spec, state, batch, frozen=reference)
  noise = jax.random.normal(jax.random.key(3), batch.old_logp.shape)
  batch = batch.replace(
      old_logp=batch.old_logp + 0.5 * noise * batch.action_mask,
      ref_logp=batch.ref_logp + 0.3 * noise * batch.action_mask,
  )
  return functions.with_advantages(state, batch)[1]


def run_step(spec, mesh):
  batch = off_policy_batch(spec, mesh)
  return jax.device_get(step(functions_of(spec, mesh), spec, make_state(spec, mesh), batch))


def above_the_mean(batch, variant):
  """Labels that depend on all rows."""
  mask = batch.action_mask
  mean = (batch.old_logp * mask).sum() / mask.sum()
  return (batch.old_logp > mean).astype(jnp.int32)


# Settings of programs that several tests share, because each program compiles for seconds.
OFTEN = dict(kl_in='loss', kl_estimator='k3', entropy_coef=0.01, ratio=above_the_mean)
BASE = dict(micro_batch=2, entropy_coef=0.01)
ADAPTIVE = dict(kl_target=0.32, kl_horizon=100.0)
ADAMW = optax.adamw(1e-2, weight_decay=0.1)
# k1 = logp - ref_logp has the derivative 1 wherever the reference stands, at -inf too.
K1 = dict(kl_in='loss', kl_estimator='k1', kl_ratio=False, log_bias=False)


def adamw_spec():
  spec = make_spec('ppo', aggregation='seq-mean-token-sum', **K1)
  return dataclasses.replace(spec, actor_optimizer=ADAMW, critic_optimizer=ADAMW)


def flat(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def advantages_of(batch, variant='st_ppo', **options):
  """What `with_advantages` returns, compiled."""
  spec, mesh = make_spec(variant, **options), one_device()
  return functions_of(spec, mesh).with_advantages(make_state(spec, mesh), batch)


class UpdateTest(parameterized.TestCase):

  @parameterized.parameters(
      ('st_ppo', (12, 24), 2, OFTEN),
      ('so_grpo', (24,), 2, dict(aggregation='seq-mean-token-sum-norm', norm_length=40)),
      ('st_ppo', (48,), 2, {}),
      ('s_ppo', (16, 24, 96), 1, dict(kl_in='loss', kl_estimator='k3', entropy_coef=0.01)),
      ('ppo', (24,), 2, dict(aggregation='token-mean', dual_clip=1.5)),
      ('rloo', (24,), 2, dict(aggregation='seq-mean-token-sum')),
  )
  @pytest.mark.slow_after(1)
  def test_packing_and_micro_batches_change_nothing(
      self, variant, length_buckets, micro_batch, options
  ):
    spec, mesh = make_spec(variant, **options), one_device()
    batch = off_policy_batch(spec, mesh)
    alone = packing.pack(np.full(8, 24), 1, (24,))  # every row in a bin of its own
    expected = functions_of(spec, mesh).update_step(
        make_state(spec, mesh),
        NOTHING,
        batch,
        packing.OptimizerStep(ALL_ROWS.astype(np.int32), alone),
    )
    self.assertGreater(float(expected[1]['stppo/step_norm']), 0)
    spec = make_spec(variant, length_buckets=length_buckets, micro_batch=micro_batch, **options)
    self.assertLess(
        one_step(spec, batch, ALL_ROWS).packing.bin.max(), 8 if length_buckets == (24,) else 6
    )
    got = step(functions_of(spec, mesh), spec, make_state(spec, mesh), batch)
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-6)

  def test_cudnn_has_a_bin_per_row(self):
    """A CPU runs jax.nn's own in its place. Regression: segments made all of them plain."""
    packed = run_step(make_spec(**BASE), one_device())
    models = (dataclasses.replace(model, attention='cudnn') for model in (MODEL, CRITIC))
    spec = make_spec(**BASE, **dict(zip(('actor', 'critic'), models)))
    for each in (spec, for_batch(spec)):  # one token at first: always plain
      first_state(each, one_device())
    count = lambda module, name: mock.patch.object(module, name, wraps=getattr(module, name))
    with count(attention_kernels, '_cudnn') as cudnn, count(attention, '_plain') as plain:
      alone = run_step(spec, one_device())
    self.assertEqual(plain.call_count, 0)
    # annotate: policy and critic; update_step: these and C.
    self.assertEqual(cudnn.call_count, 5)
    chex.assert_trees_all_close(alone, packed, rtol=1e-4, atol=1e-6)

  def test_bias_of_clipped_rows_equals_all_rows(self):
    """Only the bins with something clipped are pulled back; the others' share of C is 0."""
    spec = make_spec('st_ppo', length_buckets=(12, 24), micro_batch=2, **OFTEN)
    mesh = one_device()
    state = make_state(spec, mesh)
    functions, batch = functions_of(spec, mesh), off_policy_batch(spec, mesh)
    # All but rows 2 and 5 are as they were sampled.
    far = np.isin(np.arange(8), (2, 5))[:, None]
    logp = jax.jit(log_probs, static_argnums=0)(spec, state.actor, batch)[0] * batch.action_mask
    batch = batch.replace(old_logp=jnp.where(far, batch.old_logp, logp))

    def objective(params):
      logp = log_probs(spec, params, batch)[0]
      _, cotangent, _ = correction.cotangents(logp, batch, spec.variant)
      return jnp.sum(jax.lax.stop_gradient(cotangent) * logp)

    expected = jax.jit(lambda params: optax.tree.norm(jax.grad(objective)(params)))(state.actor)
    _, metrics, seen = step(functions, spec, state, batch)
    clipped = np.asarray(seen['clipped']).any(axis=1)
    self.assertTrue(clipped.any())
    self.assertFalse(clipped[~far[:, 0]].any())
    np.testing.assert_allclose(metrics['stppo/bias_norm'], expected, rtol=1e-4)

  def test_state_is_donated_and_stays_on_device(self):
    """The old state's buffers become the new one's, and a step does not wait for the host."""
    spec = make_spec('st_ppo', **BASE)
    mesh = one_device()
    state = make_state(spec, mesh)
    functions, batch = functions_of(spec, mesh), off_policy_batch(spec, mesh)
    args = jax.device_put(one_step(spec, batch, np.arange(8)), sharding.replicated(mesh))
    with jax.transfer_guard('disallow'):
      after, _, _ = functions.update_step(state, NOTHING, batch, args)
    for before in jax.tree.leaves(state):
      self.assertTrue(before.is_deleted())
    compiled = functions.update_step.lower(after, NOTHING, batch, args).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(after))
    self.assertGreaterEqual(compiled.memory_analysis().alias_size_in_bytes, size)

  def test_eight_devices_equal_one(self):
    self.check_mesh(2, 2, 2)

  @pytest.mark.slow
  def test_eight_shards_of_the_weights_equal_one(self):
    self.check_mesh(1, 8, 1)

  def check_mesh(self, *shape):
    critic = dataclasses.replace(DEEP, head='value')
    spec = make_spec('st_ppo', actor=DEEP, critic=critic, kl_in='loss', entropy_coef=0.01)
    alone = run_step(spec, one_device())
    together = run_step(spec, sharding.make_mesh(*shape))
    chex.assert_trees_all_close(alone, together, rtol=1e-4, atol=1e-6)

  @pytest.mark.slow
  def test_shared_trunk_on_eight_devices_equals_one(self):
    spec = make_spec(
        'st_ppo', critic=None, actor=dataclasses.replace(DEEP, head='both'), micro_batch=4
    )
    chex.assert_trees_all_close(
        run_step(spec, one_device()),
        run_step(spec, sharding.make_mesh(2, 2, 2)),
        rtol=1e-4,
        atol=1e-6,
    )

  @parameterized.parameters('turn', 'sequence')
  @pytest.mark.slow_after(1)
  def test_first_ratio_is_exactly_one(self, level):
    spec = make_spec('st_ppo', ratio=level, **BASE)
    mesh = one_device()
    state = make_state(spec, mesh)
    functions = functions_of(spec, mesh)
    rows = np.random.default_rng(0).permutation(8)
    batch = annotate(functions, spec, state, jax.device_put(make_batch()), rows)
    state, batch, _ = functions.with_advantages(state, batch)
    _, metrics, seen = step(functions, spec, state, batch, rows)
    np.testing.assert_array_equal(seen['ratio'], np.ones((8, 24), np.float32))
    self.assertEqual(float(metrics['actor/pg_clipfrac']), 0)
    self.assertEqual(float(metrics['stppo/bias_norm']), 0)
    self.assertEqual(float(metrics['stppo/divisor']), 1)

  @parameterized.parameters('paper', 'relative')
  @pytest.mark.slow_after(1)
  def test_reported_norms_are_end_to_end_norms(self, rule):
    """||g||, ||C|| and cos(g, C) against jax.grad of the written-out objectives of the
    parameters."""
    spec = make_spec('st_ppo', divisor=rule, **BASE)
    mesh = one_device()
    state = make_state(spec, mesh)
    functions, batch = functions_of(spec, mesh), off_policy_batch(spec, mesh)
    weights = losses.aggregation_weights(batch.action_mask, 'seq-mean-token-mean')

    def objective(params, part):
      logp, entropy = log_probs(spec, params, batch)
      _, _, aux = correction.cotangents(logp, batch, spec.variant)
      turn = jnp.where(batch.turn_ids[:, :, None] == jnp.arange(1, 24), 1.0, 0.0)  # [B,T,K]
      mean = jnp.einsum('btk,bt->bk', turn, logp - batch.old_logp) / jnp.maximum(turn.sum(1), 1)
      ratio = jnp.exp(jnp.einsum('btk,bk->bt', turn, mean))
      if part == 'bias':
        return jnp.sum(weights * aux['clipped'] * ratio * batch.advantages)
      surrogate = jnp.minimum(
          ratio * batch.advantages, jnp.clip(ratio, 0.8, 1.2) * batch.advantages
      )
      return jnp.sum(weights * surrogate) + 0.01 * jnp.sum(weights * entropy)

    @jax.jit
    def measure(params):
      g, c = (jax.grad(objective)(params, part) for part in ('loss', 'bias'))
      return optax.tree.norm(g), optax.tree.norm(c), optax.tree.vdot(g, c)

    g_norm, c_norm, dot = measure(state.actor)
    expected = dict(
        none=1.0, paper=c_norm, floor=max(c_norm, 1.0), relative=(g_norm + c_norm) / g_norm
    )[rule]
    _, metrics, _ = step(functions, spec, state, batch)
    self.assertGreater(float(c_norm), 0)
    np.testing.assert_allclose(metrics['stppo/grad_norm'], g_norm, rtol=1e-4)
    np.testing.assert_allclose(metrics['stppo/bias_norm'], c_norm, rtol=1e-4)
    np.testing.assert_allclose(metrics['stppo/cos_g_c'], dot / (g_norm * c_norm), rtol=1e-3)
    np.testing.assert_allclose(metrics['stppo/divisor'], expected, rtol=1e-4)
    np.testing.assert_allclose(metrics['actor/grad_norm'], g_norm / expected, rtol=1e-4)

  @parameterized.parameters(('before_clip', True), ('after_clip', True), ('step', False))
  @pytest.mark.slow
  def test_the_order_of_divisor_clip_and_optimizer(self, order, shared):
    """Two steps of AdamW, replayed outside from the gradients that plain descent shows."""
    options = dict(
        critic=None if shared else CRITIC,
        actor=dataclasses.replace(MODEL, head='both') if shared else MODEL,
        divide=order,
    )
    mesh = one_device()
    adam, schedule = train_state.make_optimizer(0.01, 0, weight_decay=0.1)
    spec = dataclasses.replace(
        make_spec('st_ppo', **options),
        actor_optimizer=adam,
        critic_optimizer=adam,
        actor_lr=schedule,
        critic_lr=schedule,
        actor_clip=0.5,
        critic_clip=0.5,
    )
    batch, state = off_policy_batch(make_spec('st_ppo', **options), mesh), make_state(spec, mesh)
    functions = update.compile_functions(spec, state, NOTHING, mesh)
    params = jax.tree.map(jnp.copy, state.actor)
    moments, rule = adam.init(params), spec.variant.divisor
    for _ in range(2):
      g, rest, c_norm = self.gradients(options, mesh, params, batch)
      divided = correction.divide(order, g, rest, c_norm, 0.5)
      expected, undivided, by_step = divided[:3]
      params, moments, step_norm, factor = optimizer_step.optimize(
          adam, expected, params, moments, jnp.asarray(True), by_step, undivided
      )
      state, metrics, _ = step(functions, spec, state, batch)
      self.assertEqual(rule, 'paper')
      np.testing.assert_allclose(metrics['stppo/divisor'], c_norm, rtol=1e-3)
      np.testing.assert_allclose(metrics['actor/grad_norm'], divided.norm_before_clip, rtol=1e-3)
      np.testing.assert_allclose(metrics['stppo/optimizer_grad_norm'], divided.norm, rtol=1e-3)
      np.testing.assert_allclose(metrics['stppo/grad_factor'], divided.factor, rtol=1e-3)
      np.testing.assert_allclose(metrics['stppo/applied_factor'], factor, rtol=1e-3)
      np.testing.assert_allclose(metrics['stppo/step_norm'], step_norm, rtol=1e-3)
    chex.assert_trees_all_close(state.actor_opt[0].nu, moments[0].nu, rtol=1e-2, atol=1e-9)

  def gradients(self, options, mesh, params, batch):
    """(g, value gradient of a shared trunk, ||C||) at `params`, from one step of descent each."""

    def moved(**columns):
      spec = make_spec('st_ppo', **{**options, 'divisor': 'none', **columns})
      state = make_state(spec, mesh)
      before = dataclasses.replace(state, actor=jax.tree.map(jnp.copy, params))
      after, metrics, _ = step(functions_of(spec, mesh), spec, before, batch)
      return jax.tree.map(lambda old, new: old - new, params, after.actor), metrics

    g, metrics = moved(**({} if options['critic'] else {'value_coef': 0.0}))
    rest = None
    if options['critic'] is None:
      rest = jax.tree.map(lambda a, b: a - b, moved()[0], g)
    return g, rest, metrics['stppo/bias_norm']

  @pytest.mark.slow
  def test_division_leaves_moments_unchanged(self):
    mesh = one_device()
    adam, schedule = train_state.make_optimizer(0.01, 0)
    both = []
    for rule in ('none', 'paper'):
      spec = dataclasses.replace(
          make_spec('st_ppo', divisor=rule, divide='step'),
          actor_optimizer=adam,
          actor_lr=schedule,
          actor_clip=1.0,
      )
      batch, before = off_policy_batch(make_spec('st_ppo'), mesh), make_state(spec, mesh)
      first = jax.device_get(before.actor)
      functions = update.compile_functions(spec, before, NOTHING, mesh)
      state, metrics, _ = jax.device_get(step(functions, spec, before, batch))
      change = jax.tree.map(lambda new, old: new - old, state.actor, first)
      both.append((state.actor_opt, change, metrics))
    (moments, change, _), (same, divided, metrics) = both
    chex.assert_trees_all_equal(moments, same)
    self.assertGreater(abs(np.log(metrics['stppo/divisor'])), 0.1)
    expected = jax.tree.map(lambda x: x / metrics['stppo/divisor'], change)
    chex.assert_trees_all_close(divided, expected, rtol=1e-3, atol=1e-7)

  def test_a_users_rule_divides_the_scaled_step(self):
    """VCPO: the root of ESS / B multiplies the step, and not the factor of the division.

    The rule forgets that nothing may be clipped: then it divides by zero, and the step is skipped.
    """
    rule = lambda g, c, any_clipped: c
    spec = make_spec('st_ppo', divisor=rule, norm_of='loss', step_scale='ess', divide='step')
    mesh = one_device()
    functions, batch = functions_of(spec, mesh), off_policy_batch(spec, mesh)
    logp, _ = jax.jit(log_probs, static_argnums=0)(spec, first_state(spec, mesh).actor, batch)
    cotangents = jax.jit(correction.cotangents, static_argnums=2)
    _, _, aux = cotangents(logp, batch, spec.variant)
    off = batch.replace(behaviour_logp=batch.old_logp)
    _, metrics, _ = jax.device_get(step(functions, spec, make_state(spec, mesh), off))
    share, divisor = metrics['stppo/ess_share'], abs(aux['clipped_objective'])
    self.assertBetween(share, 0.1, 0.95)
    np.testing.assert_allclose(metrics['stppo/divisor'], divisor, rtol=1e-4)
    np.testing.assert_allclose(metrics['stppo/step_scale'], share**0.5, rtol=1e-4)
    step_norm = metrics['stppo/grad_norm'] / divisor * share**0.5  # descent is linear
    np.testing.assert_allclose(metrics['stppo/step_norm'], step_norm, rtol=1e-4)
    np.testing.assert_allclose(metrics['stppo/applied_factor'], 1 / divisor, rtol=1e-4)
    base = make_spec('st_ppo', **BASE)
    _, plain, _ = step(functions_of(base, mesh), base, make_state(base, mesh), batch)
    self.assertNotIn('stppo/step_scale', plain)
    before = jax.device_get(first_state(spec, mesh))
    on = off.replace(old_logp=logp * batch.action_mask)
    state, metrics, _ = jax.device_get(step(functions, spec, make_state(spec, mesh), on))
    self.assertEqual(metrics['stppo/bias_norm'], 0)
    self.assertEqual(metrics['actor/skipped'], 1)
    chex.assert_trees_all_equal(state.actor, before.actor)

  def test_padding_rows_and_observations_have_no_influence(self):
    spec = make_spec('st_ppo', **BASE)
    mesh = one_device()

    def after(change):
      state = make_state(spec, mesh)
      functions, batch = functions_of(spec, mesh), off_policy_batch(spec, mesh)
      outside = 1 - batch.action_mask
      batch = batch.replace(
          advantages=batch.advantages + change * outside,
          returns=batch.returns + change * outside,
          old_logp=batch.old_logp - change * outside,
          old_values=batch.old_values + change * outside,
      )
      return step(functions, spec, state, batch)[0]

    chex.assert_trees_all_equal(after(0.0), after(5.0))

  def test_nonfinite_step_is_counted_and_skipped(self):
    spec = make_spec('st_ppo', **BASE)
    mesh = one_device()
    state = make_state(spec, mesh)
    functions, batch = functions_of(spec, mesh), off_policy_batch(spec, mesh)
    before = jax.device_get(state)
    bad = batch.replace(advantages=batch.advantages.at[0, 5].set(jnp.nan) + jnp.nan)
    state, metrics, _ = step(functions, spec, state, bad)
    chex.assert_trees_all_equal(jax.device_get(state.actor), before.actor)
    chex.assert_trees_all_equal(jax.device_get(state.critic), before.critic)
    chex.assert_trees_all_equal(jax.device_get(state.actor_opt), before.actor_opt)
    self.assertEqual(int(metrics['actor/skipped']), 1)
    state, metrics, _ = step(functions, spec, state, batch)
    self.assertEqual(int(metrics['actor/skipped']), 0)
    self.assertGreater(float(metrics['stppo/step_norm']), 0)

  def test_nonfinite_scale_or_quotient_skips_the_step(self):
    """The gradient is finite, and what multiplies or divides it is not."""
    mesh = one_device()
    scaled = make_spec('st_ppo', divisor='none', step_scale='ess', **BASE)
    rule = lambda g, c, any_clipped: jnp.full(g.shape, 1e-30)
    divided = make_spec('st_ppo', divisor=rule, divide='before_clip', actor_clip=1.0)
    for spec in (scaled, divided):
      functions, batch = functions_of(spec, mesh), off_policy_batch(spec, mesh)
      bad = batch.replace(behaviour_logp=batch.old_logp.at[0].set(jnp.nan))
      before = jax.device_get(first_state(spec, mesh))
      state, metrics, _ = jax.device_get(step(functions, spec, make_state(spec, mesh), bad))
      self.assertTrue(np.isfinite(metrics['stppo/grad_norm']))
      self.assertEqual(metrics['actor/skipped'], 1)
      chex.assert_trees_all_equal(state.actor, before.actor)

  def test_nonfinite_loss_skips_the_step(self):
    spec = adamw_spec()
    mesh = one_device()
    state = make_state(spec, mesh)
    functions, batch = functions_of(spec, mesh), off_policy_batch(spec, mesh)
    before = jax.device_get(state)
    _, metrics, _ = step(functions, spec, make_state(spec, mesh), batch)
    logp, _ = jax.jit(log_probs, static_argnums=0)(spec, before.actor, batch)
    kl = np.asarray(logp - batch.ref_logp) * np.asarray(batch.action_mask)
    num_rows = np.asarray(batch.action_mask).any(axis=1).sum()  # those with a token
    np.testing.assert_allclose(metrics['actor/kl_loss'], kl.sum() / num_rows, rtol=1e-4)
    np.testing.assert_allclose(
        metrics['stppo/ref_kl'], kl.sum() / np.asarray(batch.action_mask).sum(), rtol=1e-4
    )  # per token, as health watches it
    bad = batch.replace(ref_logp=jnp.where(batch.action_mask > 0, -jnp.inf, 0))
    state, metrics, _ = step(functions, spec, state, bad)
    self.assertTrue(np.isfinite(metrics['stppo/grad_norm']))
    self.assertEqual(metrics['actor/kl_loss'], np.inf)
    self.assertEqual(int(metrics['actor/skipped']), 1)
    chex.assert_trees_all_equal(jax.device_get(state.actor), before.actor)
    chex.assert_trees_all_equal(jax.device_get(state.critic), before.critic)

  def test_rate_rises_then_decays_to_share(self):
    # Warm-up of 2 of 7 steps: 1/2, 2/2; then from 1 to 0.2 in the 4 steps up to the last one.
    _, schedule = train_state.make_optimizer(1.0, 2, final_lr=0.2, num_steps=7)
    np.testing.assert_allclose(
        [schedule(step) for step in range(9)],
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2],
        rtol=1e-6,
    )
    _, constant = train_state.make_optimizer(1.0, 2, num_steps=7)
    np.testing.assert_allclose([constant(step) for step in (1, 6)], 1.0)

  @parameterized.parameters((2, [0.5, 0.5, 0.5]), (0, [0.5, 0.5, 1.0]))
  @pytest.mark.slow_after(1)
  def test_warmup_leaves_the_actor_and_its_rate(self, critic_warmup, rates):
    """Of three steps the first is not finite; a warm-up of two steps halves the first rate."""
    optimizer, schedule = train_state.make_optimizer(1.0, 2)
    spec = make_spec('st_ppo', critic_warmup=critic_warmup)
    spec = dataclasses.replace(
        spec,
        actor_optimizer=optimizer,
        critic_optimizer=optimizer,
        actor_lr=schedule,
        critic_lr=schedule,
    )
    mesh = one_device()
    state = make_state(spec, mesh)
    functions = update.compile_functions(spec, state, NOTHING, mesh)
    batch = off_policy_batch(make_spec('st_ppo'), mesh)
    told, actors, critics = [], [jax.device_get(state.actor)], [jax.device_get(state.critic)]
    for advantages in (batch.advantages * jnp.nan, batch.advantages, batch.advantages):
      state, metrics, _ = step(functions, spec, state, batch.replace(advantages=advantages))
      told.append((float(metrics['actor/lr']), float(metrics['critic/lr'])))
      actors.append(jax.device_get(state.actor))
      critics.append(jax.device_get(state.critic))
    self.assertEqual([actor for actor, _ in told], rates)
    self.assertEqual([critic for _, critic in told], [0.5, 0.5, 1.0])
    moves = lambda trees: [not np.array_equal(*x) for x in itertools.pairwise(map(flat, trees))]
    self.assertEqual(moves(actors), [False, not critic_warmup, True])
    self.assertEqual(moves(critics), [False, True, True])

  def test_kl_in_reward_and_the_adaptive_coefficient(self):
    """By hand: KL k1 of 0.4 per token; coefficient 0.1 becomes 0.1 (1 + 0.2 * 7 / 100)."""
    batch = make_batch()
    batch = batch.replace(old_logp=-1.0 * batch.action_mask, ref_logp=-1.4 * batch.action_mask)
    state, after, metrics = advantages_of(batch, **ADAPTIVE, kl_in='reward')
    np.testing.assert_allclose(metrics['actor/reward_kl_penalty'], 0.4, rtol=1e-5)
    np.testing.assert_allclose(state.kl_coef, 0.1 * (1 + 0.2 * 7 / 100), rtol=1e-6)
    np.testing.assert_allclose(
        after.rewards, batch.rewards - 0.1 * 0.4 * batch.action_mask, atol=1e-6
    )
    with self.subTest('it outlives a batch whose KL is not finite'):
      bad = batch.replace(old_logp=batch.old_logp * np.where(ALL_ROWS, 1, np.nan)[:, None])
      after_bad, _, _ = advantages_of(bad, **ADAPTIVE, kl_in='reward')
      self.assertEqual(after_bad.kl_coef, np.float32(0.1))

  def test_kl_is_that_of_the_policy_and_not_of_the_sampler(self):
    """With `top_p` the sampler's log-probs are higher. Here policy and reference are equal."""
    spec, mesh = make_spec('ppo', **ADAPTIVE, kl_in='reward', old_logp='sampler'), one_device()
    functions = functions_of(spec, mesh, frozen_reference=True)
    state = make_state(spec, mesh)
    frozen = train_state.Frozen(reference=first_state(spec, mesh).actor)
    batch = annotate(functions, spec, state, jax.device_put(make_batch()), frozen=frozen)
    cut = batch.replace(old_logp=(batch.policy_logp + 0.2) * batch.action_mask)
    state, after, metrics = functions.with_advantages(state, cut)
    np.testing.assert_allclose(metrics['actor/reward_kl_penalty'], 0, atol=1e-6)
    np.testing.assert_allclose(after.rewards, cut.rewards, atol=1e-6)
    self.assertLess(state.kl_coef, 0.1)
    self.assertIsNone(after.policy_logp)

  def test_adaptive_kl_averages_over_episodes(self):
    """KL of (.1, .3) and of (.5): .35 over episodes, as in verl, and .3 over tokens.

    The target is between them: 1 + (.35 / .32 - 1) * 2 / 100 raises the coefficient.
    """
    kl = np.zeros((8, 24), np.float32)
    kl[0, 1:3], kl[1, 4] = (0.1, 0.3), 0.5
    batch = make_batch().replace(
        action_mask=(kl > 0).astype(np.float32), turn_ids=(kl > 0).astype(np.int32)
    )
    batch = batch.replace(old_logp=kl - 1, ref_logp=0 * kl - 1)
    state, _, metrics = advantages_of(batch, **ADAPTIVE, kl_in='reward')
    np.testing.assert_allclose(metrics['actor/reward_kl_penalty'], 0.35, rtol=1e-5)
    np.testing.assert_allclose(metrics['actor/reward_kl_penalty_coeff'], 0.1, rtol=1e-6)
    np.testing.assert_allclose(state.kl_coef, 0.1 * (1 + (0.35 / 0.32 - 1) * 0.02), rtol=1e-6)

  def test_loss_uses_the_steps_kl_coefficient(self):
    state, _, metrics = advantages_of(make_batch(), 'ppo', **ADAPTIVE, kl_in='loss')
    np.testing.assert_allclose(state.kl_coef, 0.1 * (1 - 0.2 * 7 / 100), rtol=1e-6)
    self.assertEqual(metrics['actor/kl_coef'], state.kl_coef)

  def test_the_explained_variance_is_verl_s(self):
    rng = np.random.default_rng(0)
    batch = make_batch()
    values = 0.3 * rng.normal(size=batch.tokens.shape)
    batch = batch.replace(old_values=np.float32(values) * batch.action_mask)
    _, after, metrics = advantages_of(batch, 'ppo')
    mask = np.asarray(after.action_mask) > 0
    returns, values = np.asarray(after.returns)[mask], np.asarray(after.old_values)[mask]
    want = 1 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + 1e-5)
    np.testing.assert_allclose(metrics['critic/vf_explained_var'], want, rtol=1e-4)
    batch = batch.replace(rewards=0 * batch.rewards, old_values=0 * batch.old_values)
    _, _, metrics = advantages_of(batch, 'ppo')
    self.assertEqual(metrics['critic/vf_explained_var'], 1)

  def test_clip_fractions_count_tokens_of_the_loss(self):
    spec = adamw_spec()
    mesh = one_device()
    functions, batch = functions_of(spec, mesh), off_policy_batch(spec, mesh)
    counted = np.asarray(batch.action_mask) * (np.arange(8) < 4)[:, None]
    batch = batch.replace(loss_mask=jnp.asarray(counted, jnp.float32))
    _, metrics, seen = step(functions, spec, make_state(spec, mesh), batch)
    clipped = np.asarray(seen['clipped'])
    self.assertGreater((clipped & (counted == 0)).sum(), 0)
    want = (clipped * counted).sum() / counted.sum()
    np.testing.assert_allclose(metrics['actor/pg_clipfrac'], want, rtol=1e-5)

  def test_filtered_mini_batch_moves_no_policy(self):
    """Moments of the step before and the decay would; the critic, which is not filtered, moves."""
    spec = adamw_spec()
    mesh = one_device()
    functions, batch = functions_of(spec, mesh), off_policy_batch(spec, mesh)
    state, metrics, _ = step(functions, spec, make_state(spec, mesh), batch)
    self.assertGreater(float(metrics['stppo/step_norm']), 0)
    before = jax.device_get(state)
    empty = batch.replace(loss_mask=jnp.zeros(batch.action_mask.shape))
    after, metrics, _ = jax.device_get(step(functions, spec, state, empty))
    chex.assert_trees_all_equal(after.actor, before.actor)
    chex.assert_trees_all_equal(after.actor_opt, before.actor_opt)
    self.assertEqual([metrics['stppo/step_norm'], metrics['actor/skipped']], [0, 0])
    self.assertGreater(metrics['critic/step_norm'], 0)

  @parameterized.parameters(('cispo', 0.2), ('dppo', 1e-3))
  def test_batch_without_advantages_moves_no_policy(self, variant, clip):
    spec = make_spec(variant, kl_in='none', entropy_coef=0.0, clip_low=clip, clip_high=clip)
    spec = dataclasses.replace(spec, actor_optimizer=ADAMW)
    mesh = one_device()
    functions, batch = functions_of(spec, mesh), off_policy_batch(spec, mesh)
    state, metrics, _ = step(functions, spec, make_state(spec, mesh), batch)
    self.assertGreater(metrics['actor/pg_clipfrac'], 0)
    before = jax.device_get(state.actor)
    empty = batch.replace(advantages=jnp.zeros_like(batch.advantages))
    after, metrics, _ = jax.device_get(step(functions, spec, state, empty))
    chex.assert_trees_all_equal(after.actor, before)
    self.assertEqual(metrics['stppo/step_norm'], 0)

  def test_tokens_without_advantage_are_not_clipped(self):
    spec = make_spec('st_ppo', **BASE)
    mesh = one_device()
    functions, batch = functions_of(spec, mesh), off_policy_batch(spec, mesh)
    rows = (np.arange(8) < 4)[:, None]
    _, before, all_seen = step(functions, spec, make_state(spec, mesh), batch)
    batch = batch.replace(advantages=jnp.where(rows, batch.advantages, 0))
    _, metrics, seen = step(functions, spec, make_state(spec, mesh), batch)
    kept = np.asarray(all_seen['clipped']) & rows
    np.testing.assert_array_equal(seen['clipped'], kept)
    fraction = kept.sum() / np.asarray(batch.action_mask).sum()
    np.testing.assert_allclose(metrics['actor/pg_clipfrac'], fraction, rtol=1e-5)
    self.assertLess(metrics['actor/pg_clipfrac'], before['actor/pg_clipfrac'])

  @pytest.mark.slow
  def test_one_compilation_per_padded_length(self):
    spec = make_spec('ppo', length_buckets=(32,))
    mesh = one_device()
    state = make_state(spec, mesh)
    functions = update.compile_functions(spec, state, NOTHING, mesh)
    for length in (24, 32, 24, 32):
      batch = annotate(functions, spec, state, jax.device_put(make_batch(length=length)))
      state, batch, _ = functions.with_advantages(state, batch)
      state, _, _ = step(functions, spec, state, batch)
    self.assertEqual(functions.num_compilations(), 2 * 3)


class ShardingTest(absltest.TestCase):

  def test_every_parameter_of_every_head_has_a_rule(self):
    mesh = sharding.make_mesh(2, 2, 2)
    for head in ('tokens', 'value', 'both'):
      config = dataclasses.replace(MODEL, head=head, qk_norm=True, tie_embeddings=False)
      params = jax.eval_shape(lambda c=config: decoder.init(jax.random.key(0), c))
      places = sharding.tree_shardings(params, mesh)
      self.assertLen(jax.tree.leaves(places), len(jax.tree.leaves(params)))

  def test_unknown_parameter_is_an_error(self):
    with self.assertRaisesRegex(ValueError, "no sharding rule for 'adapter'"):
      sharding.tree_shardings({'adapter': jnp.zeros((4, 4))}, sharding.make_mesh(8, 1, 1))

  def test_a_smaller_mesh_takes_the_first_devices(self):
    self.assertEqual(list(sharding.make_mesh(1, 2, 1).devices.flat), jax.devices()[:2])

  def test_a_smaller_mesh_over_several_processes_is_refused(self):
    """Also where they are only planned for: this process is alone."""
    devices = [mock.Mock(process_index=i // 4) for i in range(8)]
    with self.assertRaisesRegex(ValueError, 'does not fit 8 devices'):
      sharding.make_mesh(1, 4, 1, devices)

  def test_bad_meshes_are_refused_in_one_line(self):
    for sizes in ((3, 1, 3), (3, -1, 1), (-1, -1, 1), (0, 1, 1)):
      with self.assertRaisesRegex(ValueError, '^[^\n]* does not fit 8 devices[^\n]*$'):
        sharding.make_mesh(*sizes)
    with self.assertRaisesRegex(ValueError, 'micro_batch=6 rows cannot be split over .* 8 devices'):
      sharding.check_rows(sharding.make_mesh(8, 1, 1), micro_batch=6)


class Scaled:
  """An estimator that is no plain function, and that a user may change between two runs."""

  __hash__ = None

  def __init__(self):
    self.scale = 1.0

  def __call__(self, batch, variant):
    del variant
    return self.scale * batch.action_mask, batch.action_mask


class SharedProgramsTest(absltest.TestCase):
  """Runs of one process share what they compile, see `update.compile_functions`."""

  def compile(self, spec, mesh, shapes):
    return update.compile_functions(spec, shapes, NOTHING, mesh)

  def test_equal_settings_share_programs_and_others_do_not(self):
    mesh = one_device()
    spec = make_spec('ppo')
    shapes = first_state(spec, mesh)
    first = self.compile(spec, mesh, shapes)
    self.assertIs(self.compile(make_spec('ppo'), mesh, shapes), first)
    self.assertIsNot(self.compile(make_spec('ppo', clip_low=0.1), mesh, shapes), first)
    other = lambda ratio, logp, advantages, variant: (ratio * advantages, ratio < 0)
    self.assertIsNot(self.compile(make_spec('ppo', surrogate=other), mesh, shapes), first)

  def test_an_object_that_changed_is_traced_again(self):
    mesh, batch, estimator = one_device(), make_batch(), Scaled()
    state = first_state(make_spec('ppo'), mesh)
    for estimator.scale in (1.0, 3.0):
      spec = make_spec('ppo', advantage=estimator, whiten=False)
      functions = self.compile(spec, mesh, state)
      _, after, _ = functions.with_advantages(copied(state), batch)
      np.testing.assert_array_equal(after.advantages, estimator.scale * batch.action_mask)
    labels = functools.partial(above_the_mean)  # no plain function either
    specs = [make_spec('ppo', ratio=labels) for _ in range(2)]
    self.assertIsNot(*(self.compile(spec, mesh, state) for spec in specs))

  def test_programs_keep_no_arrays_of_a_run(self):
    mesh, spec = one_device(), make_spec('ppo')
    first_state(spec, mesh)
    gc.collect()
    before = len(jax.live_arrays())
    state = make_state(spec, mesh)
    found = self.compile(spec, mesh, state).with_advantages(state, make_batch())
    self.assertGreater(len(jax.live_arrays()), before)
    del state, found
    gc.collect()
    self.assertLen(jax.live_arrays(), before)


if __name__ == '__main__':
  absltest.main()
