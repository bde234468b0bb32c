"""Objectives that compare rows: by hand, by identities, and as steps of a whole model."""

import dataclasses
import functools
import itertools
import os
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import correction
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import objectives
from stppo_jax.algorithms import variants
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.models import vocabulary
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import timing
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import loop
from stppo_jax.training import minibatches
from stppo_jax.training import state as train_state
from tests.support import tiny_run
from tests.training import update_test


def make_batch(log_ratios, scores, group_ids, lengths=None, **fields):
  """A batch in float64. Each row's log-ratio to old_logp and ref_logp is spread over its tokens.

  Returns (batch, outputs). What lies outside the agent's tokens is noise.
  """
  lengths = [1 + i % 3 for i in range(len(scores))] if lengths is None else lengths
  num_tokens = max(lengths) + 3
  rng = np.random.default_rng(0)
  mask = np.zeros((len(scores), num_tokens))
  for row, length in zip(mask, lengths):
    row[rng.permutation(np.arange(1, num_tokens))[:length]] = 1
  noise = rng.normal(size=mask.shape)
  old_logp = np.where(mask > 0, -1 - np.abs(noise), 5)
  share = mask * np.asarray(log_ratios)[:, None] / np.maximum(np.array(lengths), 1)[:, None]
  arrays = dict(
      tokens=mask.astype(int),
      action_mask=mask,
      turn_ids=mask.astype(int),
      rewards=mask,
      old_logp=old_logp,
      ref_logp=old_logp,
      old_values=noise,
      advantages=np.where(mask > 0, np.asarray(scores)[:, None], 7.0),
      returns=noise,
      group_ids=np.asarray(group_ids),
      old_uniform=noise,
  )
  batch = types.TurnBatch(**{name: jnp.asarray(x) for name, x in (arrays | fields).items()})
  logp = jnp.asarray(np.where(mask > 0, old_logp + share, noise))
  outputs = objectives.TokenOutputs(logp, jnp.asarray(noise), jnp.asarray(mask))
  return batch, outputs


# Compiled as one program: each operation on its own would be one.
cotangents = jax.jit(objectives.cotangents, static_argnums=2)
best_and_worst = jax.jit(objectives.best_and_worst)
surrogate_cotangents = jax.jit(correction.cotangents, static_argnums=2)


def row(name, **changes):
  return dataclasses.replace(variants.VARIANTS[name], **changes)


class ObjectiveTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))


class PairTest(ObjectiveTest):
  """Group 0 has the scores 1, 3, 0 and 3, group 1 has equal ones, group 2 has 0 and 1."""

  scores = (1.0, 3.0, 2.0, 0.0, 3.0, 2.0, 0.0, 1.0)
  group_ids = (0, 0, 1, 0, 0, 1, 2, 2)
  log_ratios = (0.3, -0.2, 0.9, 0.4, 0.5, -0.9, -0.1, 0.7)
  # h: row 1 against row 3, and row 7 against row 6.
  h = np.array([-0.2 - 0.4, 0.7 + 0.1])

  def check(self, variant, value, slope):
    """`value` and `slope` are those of each pair."""
    batch, outputs = make_batch(self.log_ratios, self.scores, self.group_ids)
    got = cotangents(outputs, batch, variant)
    expected = np.zeros(8)
    expected[[1, 7]] = slope / 2
    expected[[3, 6]] = -slope / 2
    np.testing.assert_allclose(got.outputs.logp, -expected[:, None] * batch.action_mask, atol=1e-12)
    self.assertAlmostEqual(float(got.pg_loss), -np.mean(value))
    self.assertAlmostEqual(float(got.row_losses.sum()), -np.mean(value))
    self.assertFalse(got.clipped.any())

  @parameterized.parameters('dpo', 'iterative_dpo')
  def test_dpo_by_hand(self, objective):
    sigmoid = 1 / (1 + np.exp(-0.1 * self.h))
    self.check(row('dpo', objective=objective), np.log(sigmoid), 0.1 * (1 - sigmoid))

  @parameterized.parameters('ipo', 'iterative_ipo')
  def test_ipo_by_hand(self, objective):
    variant = row('ipo', objective=objective, beta=0.25)
    self.check(variant, -((self.h - 2) ** 2), -2 * (self.h - 2))

  def test_each_starts_from_its_own_log_probs(self):
    """dpo reads ref_logp and iterative_dpo old_logp; nothing else of the two."""
    batch, outputs = make_batch(self.log_ratios, self.scores, self.group_ids)
    expected = cotangents(outputs, batch, row('dpo')).outputs.logp
    moved = batch.replace(old_logp=batch.old_logp + batch.advantages)
    got = cotangents(outputs, moved, row('dpo')).outputs.logp
    np.testing.assert_array_equal(got, expected)
    moved = batch.replace(ref_logp=batch.ref_logp + batch.advantages)
    got = cotangents(outputs, moved, row('apo')).outputs.logp
    np.testing.assert_allclose(got, expected, atol=1e-15)
    got = cotangents(outputs, moved, row('dpo')).outputs.logp
    self.assertGreater(np.abs(got - expected).max(), 1e-3)

  def test_first_pair_gradient_is_half_of_beta(self):
    batch, outputs = make_batch(np.zeros(8), self.scores, self.group_ids)
    got = np.asarray(cotangents(outputs, batch, row('dpo')).outputs.logp)
    slopes = np.abs(got)[np.asarray(batch.action_mask) > 0]
    np.testing.assert_allclose(np.unique(slopes), [0, 0.1 / 2 / 2], atol=1e-15)  # two pairs

  def test_dropped_episodes_are_in_no_pair(self):
    """Without rows 1 and 6, row 4 is the best of group 0, and group 2 has no pair."""
    batch, outputs = make_batch(self.log_ratios, self.scores, self.group_ids)
    kept = ~np.isin(np.arange(8), (1, 6))[:, None]
    batch = batch.replace(loss_mask=batch.action_mask * kept)
    got = np.asarray(cotangents(outputs, batch, row('dpo')).outputs.logp)
    np.testing.assert_array_equal(np.flatnonzero(got.any(axis=1)), [3, 4])
    sigmoid = 1 / (1 + np.exp(-0.1 * (0.5 - 0.4)))
    self.assertAlmostEqual(-float(got[4].min()), 0.1 * (1 - sigmoid))

  def test_without_any_pair_there_is_no_gradient(self):
    batch, outputs = make_batch(self.log_ratios, np.ones(8), self.group_ids)
    for name in ('dpo', 'ipo', 'tdpo', 'p3o'):
      got = cotangents(outputs, batch, row(name))
      chex.assert_trees_all_equal(got.outputs, jax.tree.map(jnp.zeros_like, outputs))
      self.assertEqual(got.pg_loss, 0)

  @parameterized.parameters('dpo', 'ipo', 'tdpo', 'p3o')
  def test_an_episode_of_several_rows_counts_once(self, name):
    """The episodes of group 0 are cut in two rows, which stand among others. p3o clips two."""
    lengths = [4, 4, 4]
    batch, outputs = make_batch((0.3, 1.2, 0.4), (1.0, 3.0, 0.0), (0, 0, 0), lengths)
    expected = cotangents(outputs, batch, row(name))
    order = np.array([0, 1, 2, 1, 0, 2])
    cut = lambda x: x[order]
    first = np.cumsum(batch.action_mask, axis=1) <= 2
    half = np.where(np.array([1, 1, 1, 0, 0, 0])[:, None], first[order], ~first[order])
    rows, row_outputs = jax.tree.map(cut, (batch, outputs))
    rows = rows.replace(action_mask=rows.action_mask * half, episode_ids=jnp.asarray(order))
    got = cotangents(row_outputs, rows, row(name))
    np.testing.assert_allclose(got.pg_loss, expected.pg_loss, atol=1e-12)
    mask = np.asarray(rows.action_mask) > 0
    whole = np.asarray(expected.outputs.logp)[order]
    np.testing.assert_allclose(got.outputs.logp, np.where(mask, whole, 0), atol=1e-12)
    clipped = np.asarray(expected.clipped)[order]
    self.assertEqual(clipped.any(), name == 'p3o')
    np.testing.assert_array_equal(np.asarray(got.clipped)[mask], clipped[mask])

  def test_equal_scores_of_unequal_lengths_are_no_pair(self):
    """The mean of n times -1/3 is not always -1/3 in float32."""
    score = np.float32(-1 / 3)
    sizes = list(range(1, 41))
    batch, outputs = make_batch(np.zeros(40), [score] * 40, [0] * 40, sizes)
    batch = batch.replace(advantages=batch.advantages.astype(jnp.float32))
    pairs = best_and_worst(batch)
    self.assertFalse(pairs.is_counted.any())
    np.testing.assert_array_equal(pairs.best, 0)
    np.testing.assert_array_equal(pairs.worst, 0)
    np.testing.assert_array_equal(objectives.groups(batch).scores, score)


class TdpoTest(ObjectiveTest):

  def inputs(self, kl=(0.5, 0.25, 2.0)):
    batch, outputs = make_batch((0.3, -0.2, 0.4), (1.0, 3.0, 0.0), (0, 0, 0), [1, 2, 4])
    share = np.array(kl)[:, None] / np.array([1, 2, 4])[:, None]
    return batch, outputs._replace(reference_kl=jnp.where(batch.action_mask > 0, share, 9.0))

  def test_by_hand(self):
    """h = -.2 - .4 - .5 (2 - .25): only the KL of the worst episode has a gradient."""
    batch, outputs = self.inputs()
    got = cotangents(outputs, batch, row('tdpo'))
    h = -0.6 - 0.5 * 1.75
    slope = 0.1 / (1 + np.exp(0.1 * h))
    self.assertAlmostEqual(float(got.pg_loss), np.log(1 + np.exp(-0.1 * h)))
    mask = np.asarray(batch.action_mask)
    expected = -slope * mask * np.array([[0], [1], [-1]])
    np.testing.assert_allclose(got.outputs.logp, expected, atol=1e-12)
    expected = slope * 0.5 * mask * np.array([[0], [0], [1]])
    np.testing.assert_allclose(got.outputs.reference_kl, expected, atol=1e-12)

  def test_without_alpha_or_kl_it_is_dpo(self):
    for variant, kl in ((row('tdpo', alpha=0.0), (0.5, 0.25, 2.0)), (row('tdpo'), (0, 0, 0))):
      batch, outputs = self.inputs(kl)
      got = cotangents(outputs, batch, variant)
      expected = cotangents(outputs, batch, row('dpo'))
      np.testing.assert_array_equal(got.outputs.logp, expected.outputs.logp)
      np.testing.assert_array_equal(got.pg_loss, expected.pg_loss)


class P3oTest(ObjectiveTest):

  scores = (0.0, 1.0, 1.0, 0.25)

  def test_at_the_old_policy_by_hand(self):
    batch, outputs = make_batch(np.zeros(4), self.scores, np.zeros(4, int))
    got = np.asarray(cotangents(outputs, batch, row('p3o')).outputs.logp)
    per_row = np.array([-0.1875, 0.1458333333, 0.1458333333, -0.1041666667])
    np.testing.assert_allclose(got, -per_row[:, None] * batch.action_mask, atol=1e-9)

  def test_at_the_old_policy_it_is_rloo(self):
    """Groups of two, three and one."""
    scores = np.array([0.5, 2.0, -1.0, 3.0, 0.0, 1.0])
    group_ids = np.array([0, 1, 1, 0, 1, 2])
    batch, outputs = make_batch(np.zeros(6), scores, group_ids)
    got = cotangents(outputs, batch, row('p3o'))
    rloo = advantages.leave_one_out(jnp.asarray(scores), batch.group_ids)
    batch = batch.replace(advantages=rloo[:, None] * batch.action_mask)
    weights = losses.aggregation_weights(batch.action_mask, 'seq-mean-token-sum')
    expected, _, _ = surrogate_cotangents(outputs.logp, batch, row('rloo'), weights)
    np.testing.assert_allclose(got.outputs.logp, expected, atol=1e-12)

  def test_a_shift_of_a_groups_scores_changes_nothing(self):
    log_ratios = (0.1, -0.3, 0.2, 0.05)
    batch, outputs = make_batch(log_ratios, self.scores, np.zeros(4, int))
    shifted = batch.replace(advantages=batch.advantages + 64.5)
    chex.assert_trees_all_equal(
        cotangents(outputs, batch, row('p3o')), cotangents(outputs, shifted, row('p3o'))
    )

  @parameterized.parameters((0.1, False), (0.5, True), (-0.5, False))
  def test_the_joint_clip_by_hand(self, half_gap, is_clipped):
    """Scores 1 and 0, log w = half_gap and -half_gap, so that h is half_gap and w w' is 1."""
    batch, outputs = make_batch((half_gap, -half_gap), (1.0, 0.0), (0, 0))
    got = cotangents(outputs, batch, row('p3o'))
    self.assertAlmostEqual(float(got.pg_loss), -min(half_gap, 0.2))
    slope = 0.0 if is_clipped else 0.5
    expected = -slope * np.array([[1], [-1]]) * batch.action_mask
    np.testing.assert_allclose(got.outputs.logp, expected, atol=1e-12)
    clipped = np.asarray(got.clipped)
    np.testing.assert_array_equal(clipped, is_clipped & (np.asarray(batch.action_mask) > 0))

  def test_both_ratios_weigh_a_pair(self):
    batch, outputs = make_batch((0.3, 0.1), (1.0, 0.0), (0, 0))
    got = cotangents(outputs, batch, row('p3o'))
    self.assertAlmostEqual(float(got.pg_loss), -np.exp(0.4) * 0.1)


class RoverTest(ObjectiveTest):

  def setUp(self):
    super().setUp()
    self.mask = np.array([[0.0, 1, 1, 0, 1], [0, 0, 1, 0, 0]])
    batch, outputs = make_batch((0.0, 0.0), (0.5, -0.5), (0, 0))
    arrays = dict(
        action_mask=self.mask,
        turn_ids=np.array([[0, 1, 1, 0, 2], [0, 0, 1, 0, 0]]),
        old_logp=np.array([[9, -1, -2, 9, -3], [9, 9, -1, 9, 9.0]]),
        old_uniform=np.array([[9, -2, -3, 9, -4], [9, 9, -2, 9, 9.0]]),
        advantages=np.array([[9, 0.5, 0.5, 9, 0.5], [9, 9, -0.5, 9, 9.0]]),
    )
    self.batch = batch.replace(**{name: jnp.asarray(x) for name, x in arrays.items()})
    self.outputs = objectives.TokenOutputs(self.batch.old_logp, self.batch.old_uniform)

  def test_by_hand(self):
    """beta 2, alpha .5: q is 2 (.1, 0, -.2). m moves by .3 at column 2 and by -.1 at column 4."""
    self.outputs = self.outputs._replace(
        logp=self.batch.old_logp + np.array([[5, 0.1, 0, 5, -0.2], [5, 5, 0.4, 5, 5]]),
        uniform=self.batch.old_uniform + np.array([[5, 7, 0.3, 5, -0.1], [5, 5, 7, 5, 5]]),
    )
    got = cotangents(self.outputs, self.batch, row('rover', beta=2.0, alpha=0.5))
    errors = np.array([[0, 0.2 - 0.5 - 0.3, -0.5 + 0.1, 0, -0.4 - 0.5], [0, 0, 0.8 + 0.5, 0, 0]])
    self.assertAlmostEqual(float(got.pg_loss), np.sum(errors**2) / 4)
    np.testing.assert_allclose(got.outputs.logp, 2 * 2 * errors / 4, atol=1e-12)
    np.testing.assert_array_equal(got.outputs.uniform, 0)
    self.assertIsNone(got.num_pairs)  # no episode has a score

  @parameterized.parameters(0.0, 1.0, 3.0)
  def test_gradient_at_old_policy_is_doubled(self, alpha):
    got = cotangents(self.outputs, self.batch, row('rover', alpha=alpha))
    expected = -2 * np.where(self.mask > 0, self.batch.advantages, 0) / 4
    np.testing.assert_allclose(got.outputs.logp, expected, atol=1e-12)

  def test_without_the_next_value_it_is_the_surrogate(self):
    moved = self.batch.old_logp + self.mask * np.array([[0.3], [-0.2]])
    outputs = self.outputs._replace(logp=moved, uniform=self.batch.old_uniform + 1)
    got = cotangents(outputs, self.batch, row('rover', alpha=0.0))
    weights = losses.aggregation_weights(self.batch.action_mask, 'token-mean')
    expected, _, parts = surrogate_cotangents(moved, self.batch, row('rover'), weights)
    np.testing.assert_allclose(got.outputs.logp, expected, atol=1e-12)
    self.assertAlmostEqual(float(got.pg_loss), float(parts['pg_loss']))


class VocabularyTest(parameterized.TestCase):
  """The mean log-prob and the KL over the vocabulary, against the whole distributions."""

  def setUp(self):
    super().setUp()
    self.tokens = np.random.default_rng(0).integers(0, 32, (3, 11)).astype(np.int32)

  def distributions(self, params, config, x, temperature):
    logits = decoder.token_logits(params, config, x)[:, :-1] / temperature
    return jax.nn.log_softmax(logits)

  @parameterized.product(tied=(True, False), temperature=(1.0, 0.7))
  def test_mean_log_prob(self, tied, temperature):
    config = dataclasses.replace(update_test.MODEL, tie_embeddings=tied)
    params = decoder.init(jax.random.key(0), config)
    params = jax.tree.map(lambda x: 3 * x, params)
    x, _ = decoder.trunk(params, config, self.tokens)
    logp, _ = decoder.token_logp(params, config, x, self.tokens, temperature)
    got = vocabulary.uniform_logp(params, config, x, self.tokens, logp, temperature)
    expected = self.distributions(params, config, x, temperature).mean(axis=-1)
    np.testing.assert_allclose(got[:, 1:], expected, rtol=1e-5)
    np.testing.assert_array_equal(got[:, 0], 0)

  @parameterized.product(tied=(True, False), chunk=(None, 4))
  def test_kl_and_its_gradient(self, tied, chunk):
    config = dataclasses.replace(update_test.MODEL, tie_embeddings=tied, vocab_size=31)
    tokens = self.tokens % 31
    params, reference = [decoder.init(jax.random.key(i), config) for i in range(2)]
    params = jax.tree.map(lambda x: 3 * x, params)
    weights = np.random.default_rng(1).normal(size=tokens.shape)

    def whole(params):
      x, _ = decoder.trunk(params, config, tokens)
      reference_x, _ = decoder.trunk(reference, config, tokens)
      logp = self.distributions(params, config, x, 0.8)
      reference_logp = self.distributions(reference, config, reference_x, 0.8)
      kl = jnp.sum(jnp.exp(reference_logp) * (reference_logp - logp), axis=-1)
      kl = jnp.pad(kl, ((0, 0), (1, 0)))
      return jnp.sum(weights * kl), kl

    def ours(params):
      x, _ = decoder.trunk(params, config, tokens)
      reference_x, _ = decoder.trunk(reference, config, tokens)
      kl = vocabulary.reference_kl(params, config, x, reference, reference_x, 0.8, chunk)
      return jnp.sum(weights * kl), kl

    gradient, kl = jax.jit(jax.grad(ours, has_aux=True))(params)
    expected_gradient, expected = jax.jit(jax.grad(whole, has_aux=True))(params)
    self.assertGreater(float(expected.max()), 0.1)
    np.testing.assert_allclose(kl, expected, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)

  def test_a_policy_has_no_kl_to_itself(self):
    params = decoder.init(jax.random.key(0), update_test.MODEL)
    x = np.random.default_rng(0).normal(size=(3, 11, 16)).astype(np.float32)

    def kl_of(policy, policy_x):
      kl = vocabulary.reference_kl(policy, update_test.MODEL, policy_x, params, x, chunk=4)
      return kl.sum()

    value, gradient = jax.jit(jax.value_and_grad(kl_of, argnums=(0, 1)))(params, x)
    self.assertAlmostEqual(float(value), 0, places=5)
    chex.assert_trees_all_close(gradient, jax.tree.map(jnp.zeros_like, gradient), atol=1e-6)


@functools.cache
def other_policy():
  return decoder.init(jax.random.key(7), update_test.MODEL)


def run_step(spec, mesh):
  """Takes a step of a policy that has left both its old policy and its reference."""
  reference = train_state.Frozen(
      reference=jax.device_put(other_policy(), sharding.replicated(mesh))
  )
  state = update_test.make_state(spec, mesh)
  functions = update_test.update.compile_functions(spec, state, reference, mesh)
  batch = jax.device_put(update_test.make_batch(seed=SEED), sharding.rows(mesh))
  old_state = dataclasses.replace(state, actor=jax.tree.map(lambda x: 1.3 * x, state.actor))
  batch = update_test.annotate(functions, spec, old_state, batch, frozen=reference)
  _, batch, _ = functions.with_advantages(update_test.make_state(spec, mesh), batch)
  taken = update_test.step(functions, spec, state, batch, frozen=reference)
  return batch, jax.device_get(taken)


SEED = 1  # scores differ in both groups
NAMES = ('dpo', 'ipo', 'tdpo', 'apo', 'p3o', 'rover')


class StepTest(parameterized.TestCase):
  """The optimizer steps of a model, which descend by SGD at a rate of 1."""

  @parameterized.parameters(*NAMES)
  @pytest.mark.slow_after(1)
  def test_step_is_gradient_of_whole_objective(self, name):
    spec = update_test.make_spec(name, micro_batch=2, length_buckets=(12, 24), beta=2.0)
    mesh = update_test.one_device()
    batch, (state, metrics, _) = run_step(spec, mesh)
    model = spec.actor

    def loss(params):
      x, _ = decoder.trunk(params, model, batch.tokens)
      logp, _ = decoder.token_logp(params, model, x, batch.tokens)
      reference_x, _ = decoder.trunk(other_policy(), model, batch.tokens)
      outputs = objectives.TokenOutputs(
          logp,
          vocabulary.uniform_logp(params, model, x, batch.tokens, logp),
          vocabulary.reference_kl(params, model, x, other_policy(), reference_x),
      )
      function = spec.variant.function('objective')
      return -function(outputs, batch, spec.variant)[0].sum()

    before = update_test.first_state(spec, mesh).actor
    value, expected = jax.jit(jax.value_and_grad(loss))(before)
    taken = jax.tree.map(lambda old, new: old - new, before, state.actor)
    self.assertGreater(float(metrics['stppo/step_norm']), 1e-3)
    np.testing.assert_allclose(metrics['actor/pg_loss'], value, rtol=1e-4)
    chex.assert_trees_all_close(taken, expected, rtol=1e-3, atol=2e-6)

  @parameterized.parameters('tdpo', 'rover', 'dpo', 'ipo', 'apo', 'p3o')
  @pytest.mark.slow
  def test_micro_batches_and_packing_change_nothing(self, name):
    options = dict(kl_in='loss', kl_estimator='k3', entropy_coef=0.01)
    mesh = update_test.one_device()
    _, whole = run_step(update_test.make_spec(name, **options), mesh)
    for length_buckets, micro_batch, logp_chunk in (((12, 24), 2, None), ((48,), 1, 8)):
      spec = update_test.make_spec(
          name,
          micro_batch=micro_batch,
          length_buckets=length_buckets,
          logp_chunk=logp_chunk,
          **options,
      )
      _, split = run_step(spec, mesh)
      chex.assert_trees_all_close(whole, split, rtol=1e-4, atol=1e-6)

  @parameterized.parameters(('tdpo', (2, 2, 2)), ('rover', (2, 2, 2)))
  @pytest.mark.slow
  def test_eight_devices_equal_one(self, name, shape):
    self.check_mesh(name, shape)

  @parameterized.parameters(('dpo', (1, 8, 1)), ('tdpo', (1, 4, 2)), ('p3o', (8, 1, 1)))
  @pytest.mark.slow
  def test_other_meshes_of_eight_devices_equal_one(self, name, shape):
    self.check_mesh(name, shape)

  def check_mesh(self, name, shape):
    spec = update_test.make_spec(name, logp_chunk=8)
    _, alone = run_step(spec, update_test.one_device())
    _, together = run_step(spec, sharding.make_mesh(*shape))
    chex.assert_trees_all_close(alone, together, rtol=1e-4, atol=1e-6)

  @parameterized.parameters(
      ('grpo', dict(kl_in='none', entropy_coef=0.0), True),
      ('apo', dict(entropy_coef=0.01), False),
      ('apo', {}, True),
  )
  @pytest.mark.slow_after(2)
  def test_without_a_signal_the_policy_stays(self, name, options, stays):
    """The second step has equal scores everywhere, and Adam has moments from the first."""
    adam, schedule = train_state.make_optimizer(0.01, 0, weight_decay=0.1)
    spec = update_test.make_spec(name, **options)
    spec = dataclasses.replace(spec, actor_optimizer=adam, actor_lr=schedule)
    mesh = update_test.one_device()
    functions = update_test.functions_of(spec, mesh)
    state = update_test.make_state(spec, mesh)
    rows = jax.device_put(update_test.make_batch(seed=SEED), sharding.rows(mesh))
    measured = []
    for factor in (1, 0):
      batch = rows.replace(rewards=factor * rows.rewards)
      batch = update_test.annotate(functions, spec, state, batch)
      state, batch, _ = functions.with_advantages(state, batch)
      before = jax.device_get(state)
      state, metrics, _ = jax.device_get(update_test.step(functions, spec, state, batch))
      measured.append(metrics)
    self.assertGreater(measured[0]['stppo/step_norm'], 0)
    self.assertEqual(measured[1]['stppo/step_norm'] == 0, stays)
    self.assertEqual(measured[1]['actor/skipped'], 0)
    if stays:
      chex.assert_trees_all_equal(state.actor, before.actor)
      chex.assert_trees_all_equal(state.actor_opt, before.actor_opt)
    if spec.variant.compares_rows:
      self.assertEqual([metrics['stppo/pairs'] for metrics in measured], [2, 0])

  def test_the_losses_of_roles_add_up(self):
    spec, mesh = update_test.make_spec('apo'), update_test.one_device()
    batch = update_test.off_policy_batch(spec, mesh)
    is_first = (batch.group_ids == 0).astype(jnp.float32)
    scores = batch.action_mask * np.arange(8)[:, None]  # no two episodes have equal ones
    batch = batch.replace(advantages=scores, roles={'a': is_first, 'b': 1 - is_first})
    functions = update_test.functions_of(spec, mesh)
    _, got, _ = update_test.step(functions, spec, update_test.make_state(spec, mesh), batch)
    parts = [float(got[f'role/{role}/pg_loss']) for role in 'ab']
    self.assertAlmostEqual(sum(parts), float(got['actor/pg_loss']), places=5)
    self.assertTrue(all(parts))


class DealTest(parameterized.TestCase):

  def episodes(self, groups):
    rows = []
    for number, group in enumerate(groups):
      turn = types.Turn(np.full(1 + number % 3, 5, np.int32), np.zeros(1 + number % 3, np.float32))
      rows.append(types.Episode(types.Task('t'), group, np.ones(2, np.int32), [turn]))
    return rows

  def deal(self, rows, mini_batch):
    bins = minibatches.Bins(mini_batch, 2, 2, (8,), 0, None, whole_groups=True)
    return minibatches.to_device(rows, bins, jax.random.key(0))

  def test_groups_are_not_torn_apart(self):
    rows = self.episodes([0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3])
    batch, steps = self.deal(rows, 6)
    self.assertLen(steps, 4)
    for step in steps:
      groups = np.asarray(batch.group_ids)[step.rows]
      np.testing.assert_array_equal(np.unique(groups, return_counts=True)[1], [3, 3])
    for epoch in (steps[:2], steps[2:]):
      together = np.concatenate([step.rows for step in epoch])
      np.testing.assert_array_equal(np.sort(together), np.arange(12))

  def test_groups_of_unequal_size_are_filled_up(self):
    rows = self.episodes([0, 0, 0, 1, 2, 2, 3, 3])
    batch, steps = self.deal(rows, 4)
    for step in steps:
      self.assertLen(step.rows, len(batch.tokens) // 2)
      own = step.rows[step.rows < 8]
      groups = {rows[i].group for i in own}
      self.assertLen(own, sum(row.group in groups for row in rows))

  def test_too_few_groups_are_refused(self):
    with self.assertRaisesRegex(types.UserError, '1 groups do not fill 2 optimizer steps'):
      self.deal(self.episodes([0] * 8), 4)


class LearnerTest(absltest.TestCase):
  """A learner whose optimizer steps are replaced, so that nothing is compiled."""

  actor = {'x': np.array([3.0, 1.0])}
  before = {'x': np.array([1.0, 2.0])}

  def learner(self, name, gain=0.0):
    """Each optimizer step adds `gain` to the parameters."""
    spec = update_test.make_spec(name)
    variant = spec.variant

    def add_advantages(state, batch):
      return state, advantages.estimate(batch, variant), {}

    def step(state, frozen, batch, step):
      del frozen, batch, step
      actor = {'x': state.actor['x'] + gain}
      return state.replace(actor=actor), {'stppo/step_norm': np.float32(abs(gain))}, {}

    annotate = lambda state, frozen, batch, steps: (batch, {})
    functions = update_test.update.Functions(annotate, add_advantages, step)
    state = self.state(name)
    previous = self.before if variant.extrapolation else None
    state = state.replace(actor=self.actor, previous_actor=previous)
    bins = minibatches.Bins(4, 2, 2, (16,), 0, None, whole_groups=variant.compares_rows)
    mesh = update_test.one_device()
    states = {'': state}
    return learner_lib.Learners(spec, update_test.NOTHING, mesh, functions, bins, states, seed=0)

  def state(self, name):
    return update_test.first_state(update_test.make_spec(name), update_test.one_device())

  def update(self, learner, lengths=(2, 3, 4, 5)):
    """An update on a group with the scores 1, 1, 0 and 0. Prompts number the samples."""
    rows = []
    for number, (length, reward) in enumerate(zip(lengths, (1.0, 1.0, 0.0, 0.0))):
      tokens = np.full(length, 5, np.int32)
      turn = types.Turn(tokens, np.zeros(length, np.float32), reward=reward)
      rows.append(types.Episode(types.Task('t'), 0, np.array([number], np.int32), [turn]))
    (policy_update,) = learner.update(mock.Mock(number=1, episodes=rows), timing.Timing())
    return learner.state, policy_update

  def test_first_sampled_of_equals_is_chosen(self):
    learners = [self.learner(name) for name in ('superhf', 'dpo')]
    for lengths in itertools.permutations((2, 3, 4, 5)):
      chosen = []
      for learner in learners:
        _, policy_update = self.update(learner, lengths)
        samples = np.array([int(row.prompt[0]) for row in policy_update.episodes])
        batch = policy_update.batch
        if learner.spec.variant.compares_rows:
          pairs = best_and_worst(batch)
          chosen += [samples[pairs.best[0]], samples[pairs.worst[0]]]
        else:
          is_best = np.asarray(batch.advantages).any(axis=1)
          chosen += list(samples[is_best[:4]])
      self.assertEqual(chosen, [0, 0, 2])

  def test_other_rows_are_sorted_by_length(self):
    _, policy_update = self.update(self.learner('grpo'), (4, 3, 5, 2))
    self.assertEqual([row.prompt[0] for row in policy_update.episodes], [3, 1, 0, 2])

  def test_without_any_step_an_extrapolated_policy_stays(self):
    learner = self.learner('apo')
    for _ in range(2):
      self.update(learner)
      chex.assert_trees_all_equal(learner.state.actor, self.actor)
      chex.assert_trees_all_equal(learner.state.previous_actor, self.before)

  def test_steps_start_from_the_extrapolated_policy(self):
    """Two epochs of one step: 3 + .3 (3 - 1) + 2 and 1 + .3 (1 - 2) + 2."""
    state, _ = self.update(self.learner('apo', gain=1.0))
    np.testing.assert_allclose(state.actor['x'], [5.6, 2.7], rtol=1e-6)
    chex.assert_trees_all_equal(state.previous_actor, self.actor)


class ExtrapolationTest(absltest.TestCase):

  def state(self, name):
    spec = update_test.make_spec(name)
    return update_test.first_state(spec, update_test.one_device())

  def test_by_hand(self):
    state = self.state('apo')
    state = state.replace(actor={'x': jnp.array([3.0, 1])}, previous_actor={'x': jnp.array([1, 2])})
    start = train_state.extrapolated(state, 0.5)
    np.testing.assert_array_equal(start.actor['x'], [4.0, 0.5])
    np.testing.assert_array_equal(start.previous_actor['x'], [3.0, 1])

  def test_exact_iterations_on_a_bandit(self):
    """Each iteration adds r / beta exactly. The outputs are 1, 2.3, 3.69 and 5.107 times that."""
    rewards = np.array([0.5, -0.25])
    logits = {'x': jnp.zeros(2)}
    state = self.state('apo').replace(actor=logits, previous_actor=logits)
    for expected in (1, 2.3, 3.69, 5.107):
      state = train_state.extrapolated(state, 0.3)
      state = state.replace(actor={'x': state.actor['x'] + rewards})
      np.testing.assert_allclose(state.actor['x'], expected * rewards, rtol=1e-5)

  def test_only_rows_that_extrapolate_keep_the_parameters_before(self):
    apo = self.state('apo')
    chex.assert_trees_all_equal(apo.previous_actor, apo.actor)
    dpo = self.state('dpo')
    self.assertIsNone(dpo.previous_actor)
    self.assertIs(train_state.extrapolated(dpo, 0.0), dpo)


class RunTest(absltest.TestCase):
  """A whole run of `apo`, whose updates start from an extrapolation."""

  @pytest.mark.slow
  def test_it_starts_from_the_extrapolation_and_resumes(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    tiny_run.write(folder)
    self.enterContext(tiny_run.on_one_device())
    values = {'algorithm__variant': 'apo', 'rollout__group_size': 4, 'env__reward': 'format'}
    starts = []
    update = learner_lib.Learners.update

    def recorded_update(own, *args):
      before = jax.device_get((own.state.actor, own.state.previous_actor))
      start = jax.device_get(own.start_actor)
      result = update(own, *args)
      starts.append((*before, start, jax.device_get(own.state.previous_actor)))
      return result

    def train(name, updates):
      workdir = os.path.join(folder, name)
      config = tiny_run.make_config(folder, train__updates=updates, **values)
      with mock.patch.object(learner_lib.Learners, 'update', recorded_update):
        loop.start(config, workdir)
      rows = metrics_lib.read_metrics(workdir)
      return [{k: v for k, v in row.items() if not k.startswith(('tim', 'perf'))} for row in rows]

    straight = train('straight', 3)
    actor, previous, start, previous_after = starts[2]
    chex.assert_trees_all_equal(previous_after, actor)
    expected = jax.tree.map(lambda x, before: x + 0.3 * (x - before), actor, previous)
    chex.assert_trees_all_close(start, expected, rtol=1e-5, atol=1e-7)
    gaps = jax.tree.map(lambda x, y: np.abs(x - y).max(), start, actor)
    self.assertGreater(max(jax.tree.leaves(gaps)), 1e-4)
    train('resumed', 2)
    self.assertEqual(train('resumed', 3), straight)


if __name__ == '__main__':
  absltest.main()
