"""Clipping-bias correction: g and C of Lemmas 4.1 and 4.2 as full gradients of a small policy."""

import dataclasses
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types
from stppo_jax.algorithms import correction
from stppo_jax.algorithms import filters
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import variant as variant_lib
from stppo_jax.algorithms import variants
from stppo_jax.training import optimizer_step
from stppo_jax.training import state as train_state
from tests.support import oracle

LEVELS = ('token', 'turn', 'sequence')
NO_CLIP = dict(clip_low=1e9, clip_high=1e9)
# As large as the spread of the test batch allows, so that something is clipped at every level.
CLIP = dict(clip_low=0.1, clip_high=0.15)


def _assert_close(got, expected, atol):
  """An absolute bound alone: chex and NumPy would add a relative 1e-6 or 1e-7 by default."""
  chex.assert_trees_all_close(got, expected, rtol=0, atol=atol)


def _row(level, min_advantage='token'):
  return dataclasses.replace(variants.VARIANTS['ppo'], ratio=level, min_advantage=min_advantage)


def _turn_batch(batch, **changes):
  zeros = np.zeros_like(batch.values)
  fields = dict(
      tokens=batch.tokens,
      action_mask=batch.action_mask,
      turn_ids=batch.turn_ids,
      rewards=batch.rewards,
      old_logp=batch.old_logp,
      ref_logp=zeros,
      old_values=batch.values,
      advantages=batch.advantages,
      returns=zeros,
      group_ids=np.arange(len(batch.tokens)),
  )
  return types.TurnBatch(**{k: jnp.asarray(v) for k, v in (fields | changes).items()})


def _logp(weights, batch):
  logits = jnp.einsum('BTF,FV->BTV', batch.features, weights)
  return jnp.take_along_axis(
      jax.nn.log_softmax(logits), jnp.asarray(batch.tokens)[..., None], axis=-1
  )[..., 0]


# Compiled as one program: each operation on its own would be one.
_compiled = jax.jit(correction.cotangents, static_argnums=2)


def _cotangents(logp, batch, variant, weights=None, **fields):
  """The cotangents of a variant with some of its fields replaced."""
  fields = {name: value for name, value in fields.items() if value is not None}
  return _compiled(logp, batch, dataclasses.replace(variant, **fields), weights)


def _gradients(batch, variant, turn_batch=None, **options):
  """(grad J, C, aux) with respect to W: the two pull-backs that the update makes."""
  logp, pull = jax.vjp(lambda w: _logp(w, batch), jnp.asarray(batch.weights))
  to_loss, to_bias, aux = _cotangents(
      logp, _turn_batch(batch) if turn_batch is None else turn_batch, variant, **options
  )
  return -pull(to_loss)[0], pull(to_bias)[0], aux


class OracleTest(chex.TestCase):
  """The oracle itself: its hand-derived gradients against finite differences of J."""

  @parameterized.product(
      level=LEVELS, min_advantage=('token', 'turn'), dual_clip=(None, 1.5), seed=(2, 9)
  )
  def test_gradients_are_finite_differences(self, level, min_advantage, dual_clip, seed):
    batch = oracle.random_batch(seed)
    direction = np.random.default_rng(seed).normal(size=batch.weights.shape)
    options = dict(min_advantage=min_advantage, dual_clip=dual_clip, **CLIP)
    expected = oracle.objective(batch, level, **options)
    j = oracle.finite_difference(
        lambda w: oracle.objective(batch, level, weights=w, **options).j, batch.weights, direction
    )
    np.testing.assert_allclose(np.sum(expected.g * direction), j, rtol=0, atol=1e-7)
    c = oracle.finite_difference(
        lambda w: oracle.objective(batch, level, weights=w, **options).j_clipped,
        batch.weights,
        direction,
    )
    np.testing.assert_allclose(np.sum(expected.c * direction), c, rtol=0, atol=1e-7)
    self.assertGreater(np.linalg.norm(expected.c), 1e-2)  # the batch does exercise the clip


class ClipAsKlTest(parameterized.TestCase):
  """KLip-PPO (arXiv 2606.23932): a clip is a per-sample KL penalty on the clipped samples.

  loss       = -mean min(w A, clip(w) A)              unclipped = -mean w A
  grad loss  = grad unclipped + grad mean_{clipped} sg(-w A) (log pi_old - log pi)

  The last term is C. Written out with jax.grad on a softmax policy, without the package's losses.
  """

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))

  @parameterized.product(level=('token', 'turn'), seed=(2, 9))
  def test_clipping_bias_is_the_gradient_of_the_kl(self, level, seed):
    batch = oracle.random_batch(seed)
    agent = batch.turn_ids > 0
    lengths = agent.sum(axis=1, keepdims=True)
    mean_weights = agent / np.maximum(lengths, 1) / (lengths > 0).sum()  # 1/|y|, then 1/B
    low, high = 1 - CLIP['clip_low'], 1 + CLIP['clip_high']

    def log_ratio(weights):
      """Returns log(pi / pi_old) of each token, or the mean of its turn, [B,T]."""
      gap = _logp(weights, batch) - batch.old_logp
      if level == 'token':
        return gap
      means = jnp.zeros_like(gap)
      for turn in range(1, batch.turn_ids.max() + 1):
        chosen = batch.turn_ids == turn
        length = np.maximum(chosen.sum(axis=1, keepdims=True), 1)
        mean = jnp.sum(jnp.where(chosen, gap, 0), axis=1, keepdims=True) / length
        means = jnp.where(chosen, mean, means)
      return means

    weights = jnp.asarray(batch.weights)
    ratio = np.exp(log_ratio(weights))
    positive = (batch.advantages > 0) & (ratio > high)
    negative = (batch.advantages < 0) & (ratio < low)
    clipped = agent & (positive | negative)
    self.assertTrue(clipped.any() and not clipped[agent].all())

    def loss(w):
      terms = jnp.exp(log_ratio(w))
      bounded = jnp.clip(terms, low, high) * batch.advantages
      return -jnp.sum(mean_weights * jnp.minimum(terms * batch.advantages, bounded))

    def unclipped(w):
      return -jnp.sum(mean_weights * jnp.exp(log_ratio(w)) * batch.advantages)

    def kl(w):
      coefficients = np.where(clipped, -ratio * batch.advantages, 0)  # constants
      return jnp.sum(mean_weights * coefficients * -log_ratio(w))

    ours, bias, _ = _gradients(batch, _row(level), **CLIP)
    expected = jax.grad(kl)(weights)
    self.assertGreater(np.linalg.norm(expected), 1e-3)
    _assert_close(bias, expected, atol=1e-12)
    _assert_close(-ours, jax.grad(loss)(weights), atol=1e-12)
    _assert_close(jax.grad(loss)(weights), jax.grad(unclipped)(weights) + bias, atol=1e-12)


class CotangentsTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    self.enter_context(jax.numpy_rank_promotion('raise'))

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.product(level=LEVELS, min_advantage=('token', 'turn'), seed=(2, 9))
  def test_gradient_and_bias_against_the_oracle(self, level, min_advantage, seed):
    batch = oracle.random_batch(seed)
    expected = oracle.objective(batch, level, min_advantage=min_advantage, **CLIP)
    g, c, aux = self.variant(lambda tb: _gradients(batch, _row(level, min_advantage), tb, **CLIP))(
        _turn_batch(batch)
    )
    _assert_close(g, expected.g, atol=1e-10)
    _assert_close(c, expected.c, atol=1e-10)
    _assert_close(aux['pg_loss'], -expected.j, atol=1e-10)
    _assert_close(aux['clipped_objective'], expected.j_clipped, atol=1e-10)
    logp = oracle.token_logp(batch.features, batch.weights, batch.tokens)
    chex.assert_trees_all_close(
        aux['ratio'], oracle.ratio(logp, batch.old_logp, batch.turn_ids, level), rtol=1e-10
    )
    agent = batch.action_mask > 0
    np.testing.assert_array_equal(np.asarray(aux['clipped'])[agent], expected.clipped[agent])
    self.assertTrue(expected.clipped.any())

  @parameterized.product(level=LEVELS, dual_clip=(1.2, 3.0))
  def test_dual_clip_against_the_oracle(self, level, dual_clip):
    batch = oracle.random_batch(3, spread=0.8)
    expected = oracle.objective(batch, level, dual_clip=dual_clip, **CLIP)
    g, c, aux = _gradients(batch, _row(level), dual_clip=dual_clip, **CLIP)
    _assert_close(g, expected.g, atol=1e-10)
    _assert_close(c, expected.c, atol=1e-10)
    _assert_close(aux['pg_loss'], -expected.j, atol=1e-10)

  @parameterized.product(level=LEVELS + ('none',), min_advantage=('token', 'turn'))
  def test_cotangents_are_the_gradients_of_what_is_reported(self, level, min_advantage):
    batch = oracle.random_batch(9)
    logp, turn_batch = _logp(batch.weights, batch), _turn_batch(batch)

    def report(name):
      return lambda x: _cotangents(
          x, turn_batch, _row(level, min_advantage), dual_clip=1.5, **CLIP
      )[2][name]

    to_loss, to_bias, _ = _cotangents(
        logp, turn_batch, _row(level, min_advantage), dual_clip=1.5, **CLIP
    )
    _assert_close(jax.grad(report('pg_loss'))(logp), to_loss, atol=1e-12)
    _assert_close(jax.grad(report('clipped_objective'))(logp), to_bias, atol=1e-12)

  @parameterized.product(level=LEVELS, min_advantage=('token', 'turn'), seed=(2, 9))
  def test_lemma_4_2_unclipped_is_clipped_plus_bias(self, level, min_advantage, seed):
    """grad J without clip = grad J with clip + C, whatever is clipped: an identity, not a bound."""
    batch = oracle.random_batch(seed)
    row = _row(level, min_advantage)
    g, c, _ = _gradients(batch, row, **CLIP)
    unclipped, nothing, _ = _gradients(batch, row, **NO_CLIP)
    _assert_close(unclipped, g + c, atol=1e-12)
    np.testing.assert_array_equal(nothing, np.zeros_like(nothing))
    self.assertGreater(float(jnp.linalg.norm(c)), 1e-2)

  @parameterized.parameters(0, 1)
  def test_lemma_4_1_where_nothing_is_clipped(self, seed):
    batch = oracle.random_batch(seed)
    g, _, aux = _gradients(batch, _row('turn'), **NO_CLIP)
    _assert_close(g, oracle.lemma_4_1(batch), atol=1e-10)
    self.assertFalse(bool(jnp.any(aux['clipped'])))
    # The mean credit of Lemma 4.1 is what the min sees with min_advantage 'turn'; unclipped, no
    # gradient can tell.
    _assert_close(_gradients(batch, _row('turn', 'turn'), **NO_CLIP)[0], g, atol=1e-12)

  def test_the_gradient_is_not_that_of_gspo_token(self):
    """GSPO-token has the same loss value: only a gradient tells a stopped mean from a real one."""
    batch = oracle.random_batch(2)
    g, _, aux = _gradients(batch, _row('turn'), **NO_CLIP)
    other = oracle.gspo_token_gradient(batch)
    self.assertGreater(float(jnp.max(jnp.abs(g - other))), 1e-2)
    # Equal advantages inside a turn make the two forms one: no test with them can tell.
    flat = dataclasses.replace(
        batch, advantages=oracle.segment_mean(batch.advantages, batch.turn_ids, 'turn')
    )
    _assert_close(
        _gradients(flat, _row('turn'), **NO_CLIP)[0], oracle.gspo_token_gradient(flat), atol=1e-10
    )
    _assert_close(
        _gradients(flat, _row('turn'), **NO_CLIP)[2]['pg_loss'], aux['pg_loss'], atol=1e-10
    )

  @parameterized.parameters(0, 1)
  def test_no_ratio_is_the_plain_policy_gradient(self, seed):
    """RLOO, REINFORCE: (1/|y|) sum A_t grad logp_t, no ratio, no clip, no bias, no old_logp."""
    batch = oracle.random_batch(seed)
    g, c, aux = _gradients(batch, _row('none'), **CLIP)
    _assert_close(g, oracle.objective(batch, 'none').g, atol=1e-10)
    np.testing.assert_array_equal(c, np.zeros_like(c))
    self.assertFalse(bool(jnp.any(aux['clipped'])))
    moved = _turn_batch(batch, old_logp=batch.old_logp + 0.7)
    _assert_close(_gradients(batch, _row('none'), moved, **CLIP)[0], g, atol=1e-12)

  @parameterized.product(min_advantage=('token', 'turn'))
  def test_labels_that_are_turns_are_turn_ppo(self, min_advantage):
    batch = oracle.random_batch(5)
    labelled = _turn_batch(batch, labels=1000 - 7 * batch.turn_ids)
    ours = _gradients(batch, _row(lambda batch, variant: 1 / 0, min_advantage), labelled, **CLIP)
    turn = _gradients(batch, _row('turn', min_advantage), **CLIP)
    chex.assert_trees_all_equal(ours, turn)

  @parameterized.product(min_advantage=('token', 'turn'))
  def test_one_token_turns_are_token_ppo(self, min_advantage):
    batch = oracle.random_batch(5)
    turn_ids = np.cumsum(batch.action_mask, axis=1).astype(int) * (batch.turn_ids > 0)
    turn = _gradients(
        batch, _row('turn', min_advantage), _turn_batch(batch, turn_ids=turn_ids), **CLIP
    )
    token = _gradients(batch, _row('token'), **CLIP)
    for got, expected in zip(turn[:2], token[:2]):
      _assert_close(got, expected, atol=1e-12)
    _assert_close(turn[2]['pg_loss'], token[2]['pg_loss'], atol=1e-12)
    chex.assert_trees_all_close(turn[2]['ratio'], token[2]['ratio'], rtol=1e-12)
    agent = batch.action_mask > 0
    np.testing.assert_array_equal(
        np.asarray(turn[2]['clipped'])[agent], np.asarray(token[2]['clipped'])[agent]
    )

  def test_one_turn_episodes_are_gspo(self):
    batch = oracle.random_batch(6)
    one_turn = _turn_batch(batch, turn_ids=(batch.turn_ids > 0).astype(int))
    turn = _gradients(batch, _row('turn'), one_turn, **CLIP)
    sequence = _gradients(batch, _row('sequence'), **CLIP)
    for got, expected in zip(turn[:2], sequence[:2]):
      _assert_close(got, expected, atol=1e-12)
    chex.assert_trees_all_close(turn[2]['ratio'], sequence[2]['ratio'], rtol=1e-12)

  @parameterized.product(level=LEVELS, dtype=(jnp.float32, jnp.float64))
  def test_first_mini_batch(self, level, dtype):
    """old_logp of the trainer's own function: ratio exactly 1, nothing clipped, C exactly 0, and
    the gradient is the plain policy gradient with the segment's mean credit."""
    batch = oracle.random_batch(7)
    logp = _logp(batch.weights, batch).astype(dtype)
    turn_batch = jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        _turn_batch(batch, old_logp=logp),
    )
    to_loss, to_bias, aux = _cotangents(
        logp, turn_batch, _row(level), clip_low=3e-4, clip_high=4e-4
    )
    np.testing.assert_array_equal(aux['ratio'], np.ones(logp.shape))
    self.assertFalse(bool(jnp.any(aux['clipped'])))
    np.testing.assert_array_equal(to_bias, np.zeros(logp.shape))
    credit = oracle.segment_mean(batch.advantages, batch.turn_ids, level)
    weights = np.asarray(losses.aggregation_weights(batch.action_mask, 'seq-mean-token-mean'))
    _assert_close(
        to_loss,
        (-weights * credit).astype(to_loss.dtype),
        atol=1e-7 if dtype == jnp.float32 else 1e-12,
    )

  @parameterized.parameters(*LEVELS)
  def test_observations_and_padding_are_never_read(self, level):
    batch = oracle.random_batch(8)
    agent = batch.action_mask > 0
    loud = dict(
        old_logp=np.where(agent, batch.old_logp, 50.0),
        advantages=np.where(agent, batch.advantages, 50.0),
    )
    logp = _logp(batch.weights, batch)
    quiet = _cotangents(logp, _turn_batch(batch), _row(level), **CLIP)
    noisy = _cotangents(
        jnp.where(agent, logp, -90.0), _turn_batch(batch, **loud), _row(level), **CLIP
    )
    for name in 'pg_loss', 'clipped_objective':
      chex.assert_trees_all_close(quiet[2][name], noisy[2][name], rtol=1e-12)
    for got, expected in zip(noisy[:2], quiet[:2]):
      _assert_close(got, expected, atol=1e-12)
      np.testing.assert_array_equal(np.asarray(got)[~agent], 0.0)
    self.assertFalse(np.asarray(noisy[2]['clipped'])[~agent].any())

  @parameterized.parameters(*LEVELS)
  def test_token_at_the_bound_keeps_its_gradient(self, level):
    """Two rows of one token with w = 1.25 and 0.75 exactly: nothing is in C, Lemma 4.2 included."""
    ones = np.ones((2, 1))
    batch = types.TurnBatch(
        tokens=ones.astype(int),
        action_mask=ones,
        turn_ids=ones.astype(int),
        rewards=ones,
        old_logp=-np.log([[1.25], [0.75]]),
        ref_logp=ones,
        old_values=ones,
        advantages=np.array([[1.0], [-1.0]]),
        returns=ones,
        group_ids=np.arange(2),
    )
    w = np.asarray(jnp.exp(-batch.old_logp))
    clip = dict(clip_low=1 - w[1, 0], clip_high=w[0, 0] - 1)
    self.assertEqual((1 - clip['clip_low'], 1 + clip['clip_high']), (w[1, 0], w[0, 0]))
    to_loss, to_bias, aux = _cotangents(jnp.zeros((2, 1)), batch, _row(level), **clip)
    self.assertFalse(bool(jnp.any(aux['clipped'])))
    chex.assert_trees_all_close(to_loss, -w * np.array([[1.0], [-1.0]]) / 2, rtol=1e-12)
    np.testing.assert_array_equal(to_bias, np.zeros((2, 1)))

  @parameterized.parameters(*LEVELS)
  def test_micro_batches_add_up(self, level):
    """With the mini-batch's weights, the parts' cotangents are the whole's rows, the losses add."""
    batch = oracle.random_batch(9)
    logp, turn_batch = _logp(batch.weights, batch), _turn_batch(batch)
    weights = losses.aggregation_weights(turn_batch.action_mask, 'seq-mean-token-mean')
    whole = _cotangents(logp, turn_batch, _row(level), **CLIP)
    parts = []
    for rows in slice(0, 1), slice(1, 4), slice(4, 6):
      parts.append(
          _cotangents(
              logp[rows],
              jax.tree.map(lambda x, rows=rows: x[rows], turn_batch),
              _row(level),
              weights=weights[rows],
              **CLIP,
          )
      )
    for i in range(2):
      _assert_close(jnp.concatenate([part[i] for part in parts]), whole[i], atol=1e-12)
    for name in 'pg_loss', 'clipped_objective':
      _assert_close(sum(part[2][name] for part in parts), whole[2][name], atol=1e-12)

  @parameterized.parameters('token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm')
  def test_other_aggregations(self, mode):
    """The weights alone change: the loss is the aggregate of the clipped surrogate."""
    batch = oracle.random_batch(10)
    logp, turn_batch = _logp(batch.weights, batch), _turn_batch(batch)
    weights = losses.aggregation_weights(turn_batch.action_mask, mode)
    _, _, aux = _cotangents(logp, turn_batch, _row('turn'), weights=weights, **CLIP)
    w = oracle.ratio(np.asarray(logp), batch.old_logp, batch.turn_ids, 'turn')
    x = np.vectorize(oracle.surrogate)(w, batch.advantages, CLIP['clip_low'], CLIP['clip_high'])
    chex.assert_trees_all_close(
        aux['pg_loss'], -oracle.aggregate(x, batch.action_mask, mode), rtol=1e-11
    )

  def test_constant_advantages_clip_turns_as_units(self):
    """SO-GRPO has one sign per row: a turn is clipped whole or not at all, and both readings of min
    agree. With token advantages of both signs a turn is clipped in part.
    """
    batch = oracle.random_batch(1)
    flat = dataclasses.replace(
        batch, advantages=np.repeat(batch.advantages[:, :1], batch.tokens.shape[1], axis=1)
    )

    def clipped_share(which, min_advantage):
      aux = _gradients(which, _row('turn', min_advantage), **CLIP)[2]
      share = oracle.segment_mean(np.asarray(aux['clipped'], float), batch.turn_ids, 'turn')
      return share[batch.action_mask > 0]

    self.assertSetEqual(set(clipped_share(flat, 'token')), {0.0, 1.0})
    self.assertSetEqual(set(clipped_share(batch, 'turn')), {0.0, 1.0})
    self.assertNotEmpty(set(clipped_share(batch, 'token')) - {0.0, 1.0})
    by_token, by_turn = (_gradients(flat, _row('turn', m), **CLIP)[:2] for m in ('token', 'turn'))
    _assert_close(by_token, by_turn, atol=1e-12)

  @parameterized.parameters(*LEVELS)
  def test_advantages_scale_gradients_and_zero_moves_nothing(self, level):
    batch = oracle.random_batch(11)
    g, c, aux = _gradients(batch, _row(level), **CLIP)
    doubled = dataclasses.replace(batch, advantages=2 * batch.advantages)
    for got, expected in zip(_gradients(doubled, _row(level), **CLIP)[:2], (g, c)):
      _assert_close(got, 2 * expected, atol=1e-12)
    nothing = dataclasses.replace(batch, advantages=0 * batch.advantages)
    for got in _gradients(nothing, _row(level), **CLIP)[:2]:
      np.testing.assert_array_equal(got, np.zeros_like(got))
    # The ratio sees only the difference of the two log-probs.
    shifted = _cotangents(
        _logp(batch.weights, batch) + 0.5,
        _turn_batch(batch, old_logp=batch.old_logp + 0.5),
        _row(level),
        **CLIP,
    )
    chex.assert_trees_all_close(shifted[2]['pg_loss'], aux['pg_loss'], rtol=1e-12)

  @parameterized.parameters(*LEVELS)
  def test_a_batch_of_empty_rows_is_all_zeros(self, level):
    batch = oracle.random_batch(12)
    empty = _turn_batch(batch, action_mask=0 * batch.action_mask, turn_ids=0 * batch.turn_ids)
    g, c, aux = _gradients(batch, _row(level), empty, **CLIP)
    for got in g, c, aux['pg_loss'], aux['clipped_objective']:
      np.testing.assert_array_equal(got, np.zeros_like(got))


class AdvantagesInMinTest(absltest.TestCase):

  def test_those_of_a_turn_are_their_mean(self):
    batch = mock.Mock(
        action_mask=jnp.array([[1.0, 1.0, 0.0, 1.0]]),
        turn_ids=jnp.array([[1, 1, 0, 2]]),
        advantages=jnp.array([[1.0, -3.0, 5.0, 2.0]]),
    )
    for level, unit, want in (('turn', 'turn', [-1, -1, 0, 2]), ('turn', 'token', [1, -3, 0, 2])):
      got = correction.advantages_in_min(batch, _row(level, unit))
      np.testing.assert_allclose(got, [want])


class DivisorTest(chex.TestCase):
  """The number that g is divided by."""

  def test_one_that_is_not_positive_is_none(self):
    for value in (0.0, -1.0, np.nan):
      got = correction.divisor(lambda g, c, any_clipped: value, 1.0, 1.0, True)
      self.assertTrue(np.isnan(got), value)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
      ('none', 3.0, 0.5, 1.0),
      ('none', 3.0, 4.0, 1.0),
      ('paper', 3.0, 4.0, 4.0),
      ('paper', 3.0, 0.5, 0.5),
      ('floor', 3.0, 4.0, 4.0),
      ('floor', 3.0, 0.5, 1.0),
      # g * 3 / (3 + 4): divide by 7/3
      ('relative', 3.0, 4.0, 7 / 3),
      ('relative', 3.0, 0.5, 3.5 / 3),
  )
  def test_by_hand(self, rule, g_norm, c_norm, expected):
    got = self.variant(lambda *args: correction.divisor(rule, *args))(
        jnp.float32(g_norm), jnp.float32(c_norm), jnp.array(True)
    )
    chex.assert_shape(got, ())
    chex.assert_trees_all_close(got, jnp.float32(expected), rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters('none', 'paper', 'floor', 'relative')
  def test_is_one_when_nothing_is_clipped(self, rule):
    for g_norm in 0.0, 3.0:
      got = self.variant(lambda *args: correction.divisor(rule, *args))(
          jnp.float32(g_norm), jnp.float32(0.0), jnp.array(False)
      )
      self.assertEqual(float(got), 1.0)

  def test_only_the_papers_division_amplifies(self):
    """The rarer the clip, the larger the step of the paper's rule."""
    for c_norm in 0.01, 0.1, 0.9:
      paper = correction.divisor('paper', jnp.float32(1), jnp.float32(c_norm), jnp.array(True))
      self.assertGreater(float(1 / paper), 1.1)
    for rule in 'none', 'floor', 'relative':
      for g_norm in 1e-6, 0.1, 1.0, 1e6:
        for c_norm in 0.0, 1e-6, 0.1, 1.0, 1e6:
          got = correction.divisor(rule, jnp.float32(g_norm), jnp.float32(c_norm), jnp.array(True))
          self.assertGreaterEqual(float(got), 1.0)

  def test_relative_is_scale_free(self):
    for scale in 1e-3, 1e3:
      got = correction.divisor(
          'relative', jnp.float32(3 * scale), jnp.float32(4 * scale), jnp.array(True)
      )
      self.assertAlmostEqual(float(got), 7 / 3, places=5)

  @parameterized.parameters('none', 'paper', 'floor', 'relative')
  def test_the_corrected_gradient_is_finite_in_extreme_cases(self, rule):
    """A token of advantage 0 outside the range may count as clipped while C is 0; g may be 0."""
    for g_norm, c_norm, clipped in (0, 0, False), (0, 0, True), (1, 0, True), (0, 1, True):
      got = correction.divisor(rule, jnp.float32(g_norm), jnp.float32(c_norm), jnp.array(clipped))
      step = jnp.float32(g_norm) / got
      self.assertTrue(bool(jnp.isfinite(step)), f'{rule} {g_norm} {c_norm} {clipped}: {got}')
      if c_norm == 0:
        self.assertEqual(float(step), float(g_norm))

  def test_an_unknown_rule_is_refused(self):
    with self.assertRaises(ValueError):
      correction.divisor('sqrt', jnp.float32(1), jnp.float32(1), jnp.array(True))


def _own_clip(ratio, logp, advantages, variant):
  """PPO's surrogate as a user would write it."""
  del logp
  low, high = 1 - variant.clip_low, 1 + variant.clip_high
  surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)
  return surrogate, surrogate != ratio * advantages


def _weighted(ratio, logp, advantages, variant):
  """A bounded weight on every token's log-prob, as CISPO has it."""
  weight = jnp.clip(ratio, 1 - variant.clip_low, 1 + variant.clip_high)
  return jax.lax.stop_gradient(weight) * advantages * logp, weight != ratio


class OwnSurrogateTest(parameterized.TestCase):

  @parameterized.product(level=LEVELS, min_advantage=('token', 'turn'))
  def test_ppo_of_a_user_equals_the_builtin(self, level, min_advantage):
    """The same cotangents for g and for C, though the clip is inside the user's function."""
    batch = oracle.random_batch(3)
    row = _row(level, min_advantage)
    own = dataclasses.replace(row, surrogate=_own_clip)
    expected, got = (_gradients(batch, variant, **CLIP) for variant in (row, own))
    self.assertTrue(expected[2]['clipped'].any())
    np.testing.assert_array_equal(got[2]['clipped'], expected[2]['clipped'])
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-7)

  def test_a_weight_on_the_log_probs_by_hand(self):
    """Two tokens of one row, weight 1/2 each: ratios 1.5 (clipped to 1.2) and 1, advantages 2,
    -1."""
    turn_ids = np.ones((1, 2), np.int32)
    batch = _turn_batch(
        oracle.random_batch(0),
        tokens=turn_ids,
        action_mask=np.ones((1, 2)),
        turn_ids=turn_ids,
        old_logp=np.array([[-1.0, -1.0]]),
        advantages=np.array([[2.0, -1.0]]),
    )
    logp = jnp.array([[-1 + np.log(1.5), -1.0]], jnp.float32)
    row = dataclasses.replace(_row('token'), surrogate=_weighted)
    to_loss, to_bias, aux = _cotangents(logp, batch, row, clip_low=1.0, clip_high=0.2)
    # d(-J)/dlogp = -weight_t clip(w_t) A_t = -.5 * 1.2 * 2 | -.5 * 1 * -1
    _assert_close(to_loss, jnp.array([[-1.2, 0.5]]), atol=1e-6)
    # C: what the clip took from the clipped token, weight_t (w_t - clip(w_t)) A_t = .5 * .3 * 2
    _assert_close(to_bias, jnp.array([[0.3, 0.0]]), atol=1e-6)
    np.testing.assert_array_equal(aux['clipped'], [[True, False]])
    _assert_close(aux['pg_loss'], -0.5 * (1.2 * 2 * logp[0, 0] - logp[0, 1]), atol=1e-6)

  def test_unknown_names_are_refused(self):
    batch = oracle.random_batch(0)
    with self.assertRaisesRegex(ValueError, "surrogate 'clop' is none of clip"):
      _gradients(batch, dataclasses.replace(_row('token'), surrogate='clop'))

  def test_a_divisor_of_ones_own(self):
    rule = lambda g_norm, c_norm, any_clipped: jnp.where(any_clipped, 2 * c_norm + g_norm, 1)
    self.assertEqual(correction.divisor(rule, 3.0, 4.0, True), 11)
    self.assertEqual(correction.divisor(rule, 3.0, 4.0, False), 1)


class DivideTest(parameterized.TestCase):
  """||g|| = 5 throughout, the clip is 1: undivided, a gradient of norm 1 enters the optimizer."""

  @parameterized.parameters(
      # g / 10 has norm .5 and passes the clip: half of what would have entered.
      ('before_clip', 10.0, (0.3, 0.4), 0.5, 0.5),
      # g / 2 has norm 2.5, and the clip makes it 1: the divisor is lost.
      ('before_clip', 2.0, (0.6, 0.8), 2.5, 1.0),
      ('before_clip', 0.1, (0.6, 0.8), 50.0, 1.0),
      # clip(g) = (.6, .8), then divided.
      ('after_clip', 2.0, (0.3, 0.4), 5.0, 0.5),
      ('after_clip', 0.1, (6.0, 8.0), 5.0, 10.0),
      # The gradient enters as it is; the step is divided.
      ('step', 2.0, (0.6, 0.8), 5.0, 1.0),
      ('step', 0.1, (0.6, 0.8), 5.0, 1.0),
  )
  def test_by_hand(self, order, divisor, entering, clip_norm, factor):
    g = {'a': jnp.array([3.0]), 'b': {'c': jnp.array([4.0])}}
    divided = correction.divide(order, g, None, jnp.asarray(divisor), 1.0)
    got, undivided, by_step = divided.gradient(), divided.undivided(), divided.step_divisor
    np.testing.assert_allclose((got['a'][0], got['b']['c'][0]), entering, rtol=1e-6)
    np.testing.assert_allclose((undivided['a'][0], undivided['b']['c'][0]), (0.6, 0.8), rtol=1e-6)
    np.testing.assert_allclose(divided.norm_before_clip, clip_norm, rtol=1e-6)
    np.testing.assert_allclose(divided.norm, np.hypot(*entering), rtol=1e-6)
    np.testing.assert_allclose(divided.factor, factor, rtol=1e-6)
    self.assertEqual(by_step, divisor if order == 'step' else 1)

  @parameterized.parameters(
      # Of policy (3, 0) and value gradient (0, 4), D = 3 divides the first: (1, 4), norm sqrt(17).
      ('before_clip', (1 / 17**0.5, 4 / 17**0.5), 17**0.5, 1.0),
      # The clip scales (3, 4) by 1/5.
      ('after_clip', (0.2, 0.8), 5.0, 0.68**0.5),
      # One step for both heads: both are divided.
      ('step', (0.6, 0.8), 5.0, 1.0),
  )
  def test_a_shared_trunks_value_gradient_by_hand(self, order, entering, clip_norm, factor):
    divided = correction.divide(
        order, jnp.array([3.0, 0.0]), jnp.array([0.0, 4.0]), jnp.asarray(3.0), 1.0
    )
    np.testing.assert_allclose(divided.gradient(), entering, rtol=1e-6)
    np.testing.assert_allclose(divided.undivided(), (0.6, 0.8), rtol=1e-6)
    np.testing.assert_allclose(divided.norm_before_clip, clip_norm, rtol=1e-6)
    np.testing.assert_allclose(divided.factor, factor, rtol=1e-6)

  @parameterized.product(order=variant_lib.ORDERS, scale=(1.0, 0.1))
  def test_without_a_divisor_all_orders_are_one(self, order, scale):
    g, rest = scale * jnp.array([3.0, 0.0]), scale * jnp.array([0.0, 4.0])
    divided = correction.divide(order, g, rest, jnp.ones(()), 1.0)
    np.testing.assert_allclose(divided.gradient(), divided.undivided(), rtol=1e-6)
    np.testing.assert_allclose(
        divided.gradient(), np.array([0.6, 0.8]) * min(1, 5 * scale), rtol=1e-6
    )
    self.assertEqual(divided.factor, 1)

  def test_nothing_to_divide_is_a_factor_of_one(self):
    for order in ('before_clip', 'after_clip'):
      divided = correction.divide(order, jnp.zeros(2), None, jnp.asarray(3.0), 1.0)
      self.assertEqual(divided.factor, 1)

  def test_an_unknown_order_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'order .afterwards. is none of before_clip'):
      correction.divide('afterwards', jnp.ones(2), None, jnp.ones(()), 1.0)

  @parameterized.parameters(
      # Adam cancels a constant divisor of the gradient: both steps are the rate, .1. From the same
      # moments g = 1 makes the second step: m = .5625 and v = .515625, over 3/4 .75 and .6875.
      ('before_clip', (4.0, 4.0), (0.1, 0.1), (1.0, 0.6875**0.5 / 0.75)),
      ('after_clip', (4.0, 4.0), (0.1, 0.1), (1.0, 0.6875**0.5 / 0.75)),
      # D = 1, then 4, and g = 1: m = .5, .375 and v = .5, .28125; over 1/2 and 3/4 (bias) they are
      # 1, .5 and 1, .375; the second step is .1 * .5 / sqrt(.375), and .1 without the division.
      ('before_clip', (1.0, 4.0), (0.1, 0.05 / 0.375**0.5), (1.0, 0.5 / 0.375**0.5)),
      ('after_clip', (1.0, 4.0), (0.1, 0.05 / 0.375**0.5), (1.0, 0.5 / 0.375**0.5)),
      ('step', (4.0, 4.0), (0.025, 0.025), (0.25, 0.25)),
      ('step', (1.0, 4.0), (0.1, 0.025), (1.0, 0.25)),
  )
  def test_what_adam_leaves_of_it_by_hand(self, order, divisors, expected, factors):
    optimizer, _ = train_state.make_optimizer(0.1, 0, betas=(0.5, 0.5), eps=0.0)
    params = {'w': jnp.zeros(())}
    opt_state, steps, seen = optimizer.init(params), [], []
    for divisor in divisors:
      divided = correction.divide(order, {'w': jnp.ones(())}, None, jnp.asarray(divisor), 1.0)
      got, undivided, by_step = divided[:3]
      before = params['w']
      params, opt_state, step_norm, factor = optimizer_step.optimize(
          optimizer, got, params, opt_state, jnp.asarray(True), by_step, undivided
      )
      steps.append(before - params['w'])
      seen.append(factor)
      self.assertEqual(step_norm, jnp.abs(params['w'] - before))
    np.testing.assert_allclose(steps, expected, rtol=1e-5)
    np.testing.assert_allclose(seen, factors, rtol=1e-5)

  def test_the_cosine_of_two_trees(self):
    a = {'x': jnp.array([3.0, 0.0]), 'y': jnp.array(4.0)}
    b = {'x': jnp.array([0.0, 2.0]), 'y': jnp.array(2.0)}
    np.testing.assert_allclose(correction.cosine(a, b), 8 / (5 * 8**0.5), rtol=1e-6)
    self.assertTrue(jnp.isnan(correction.cosine(a, jax.tree.map(jnp.zeros_like, b))))

  def test_the_steps_weight_decay_is_divided_too(self):
    """At a gradient of 0: step = rate * decay * w / D = .1 * .5 * 2 / 4."""
    optimizer, _ = train_state.make_optimizer(0.1, 0, weight_decay=0.5)
    params = {'w': jnp.asarray(2.0)}
    after, *_ = optimizer_step.optimize(
        optimizer, lambda: {'w': jnp.zeros(())}, params, optimizer.init(params), True, 4.0
    )
    np.testing.assert_allclose(after['w'], 2 - 0.025, rtol=1e-6)

  def test_step_that_is_not_taken_leaves_all(self):
    optimizer, _ = train_state.make_optimizer(0.1, 0, weight_decay=0.5)
    params = {'w': jnp.asarray(2.0), 'v': jnp.ones(3, jnp.bfloat16)}
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    before = optimizer.init(params)
    after = optimizer_step.optimize(
        optimizer, lambda: nan, params, before, jnp.asarray(False), jnp.nan, lambda: nan
    )
    chex.assert_trees_all_equal(after, optimizer_step.Applied(params, before, 0.0, 1.0))
    chex.assert_trees_all_equal_dtypes(after.params, params)

  def test_compiled_step_keeps_no_copies_of_its_state(self):
    """Two trees of temporaries. With a `where` of new and old arrays there were 6.5."""
    optimizer, _ = train_state.make_optimizer(1e-3, 0, weight_decay=0.1)
    params = {f'w{i}': jnp.ones(2**16) for i in range(4)}

    def step(params, opt_state, gradient, undivided, take, divisor):
      return optimizer_step.optimize(
          optimizer, lambda: gradient, params, opt_state, take, divisor, lambda: undivided
      )

    arguments = params, optimizer.init(params), params, params, jnp.asarray(True), jnp.ones(())
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    num_bytes = sum(leaf.nbytes for leaf in params.values())
    self.assertLess(compiled.memory_analysis().temp_size_in_bytes, 3 * num_bytes)

  def test_norm_of_step_is_that_of_change(self):
    """A step of 1e-6 is lost on a bfloat16 of 1, whose neighbours are 2^-8 and 2^-7 away."""
    optimizer, _ = train_state.make_optimizer(1e-6, 0)
    for dtype, expected in (('bfloat16', 0.0), ('float32', 1e-6)):
      params = {'w': jnp.ones((), dtype)}
      _, _, step_norm, _ = optimizer_step.optimize(
          optimizer, lambda: params, params, optimizer.init(params), jnp.asarray(True)
      )
      np.testing.assert_allclose(step_norm, expected, rtol=0.1)

  def test_norms_are_computed_in_float32(self):
    """In bfloat16 the 300th one is lost in the sum: 256 + 1 is 256."""
    self.assertAlmostEqual(float(correction.norm([jnp.ones(300, jnp.bfloat16)])), 300**0.5, 4)


class SquareTest(parameterized.TestCase):
  """The surrogate of SPPO and ROVER: a regression of the log-ratio, by hand."""

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    # Two episodes of three and one agent tokens.
    self.mask = np.array([[0.0, 1, 1, 0, 1], [0, 0, 1, 0, 0]])
    self.old_logp = np.array([[0.0, -1, -2, 0, -3], [0, 0, -1, 0, 0]])
    self.advantages = self.mask * np.array([[1 / 3], [-1 / 6]])

  def gradient(self, name, logp):
    """Returns d loss / d logp and the loss; the log-probs of observations are noise."""
    zeros = np.zeros_like(self.mask)
    turn_ids = self.mask.astype(int)
    batch = types.TurnBatch(
        *[jnp.asarray(x) for x in (turn_ids, self.mask, turn_ids, zeros, self.old_logp, zeros)],
        *[jnp.asarray(x) for x in (zeros, self.advantages, zeros, np.zeros(2, int))],
    )
    row = variants.VARIANTS[name]
    noise = np.where(self.mask > 0, 0, 7)
    batch = filters.apply(batch, row)
    weights = filters.weights(batch, row).policy
    d_logp, bias, parts = correction.cotangents(jnp.asarray(logp + noise), batch, row, weights)
    np.testing.assert_array_equal(bias, 0)
    self.assertFalse(parts['clipped'].any())
    return np.asarray(d_logp), float(parts['pg_loss'])

  def test_sppo_by_hand(self):
    """beta .1: the targets are 10/3 and -5/3, the log-ratios of the episodes .5 and -.25."""
    moved = self.old_logp + np.array([[0, 0.5, -0.25, 0, 0.25], [0, 0, -0.25, 0, 0]])
    errors = np.array([0.5 - 10 / 3, -0.25 + 5 / 3])
    d_logp, loss = self.gradient('sppo', moved)
    self.assertAlmostEqual(loss, np.mean(errors**2))
    np.testing.assert_allclose(d_logp, errors[:, None] * self.mask, atol=1e-12)  # 2 error / 2

  def test_sppo_goes_from_policy_gradient_to_target(self):
    d_logp, _ = self.gradient('sppo', self.old_logp)
    np.testing.assert_allclose(d_logp, -2 * 10 * self.advantages / 2, atol=1e-12)
    share = np.array([[1 / 3], [1.0]])  # a token's share of the episode's log-ratio
    d_logp, loss = self.gradient('sppo', self.old_logp + 10 * self.advantages * share)
    np.testing.assert_allclose(d_logp, 0, atol=1e-12)
    self.assertAlmostEqual(loss, 0)

  def test_rover_starts_as_twice_the_centred_policy_gradient(self):
    d_logp, loss = self.gradient('rover', self.old_logp)
    np.testing.assert_allclose(d_logp, -2 * self.advantages / 4, atol=1e-12)  # 4 tokens
    self.assertAlmostEqual(loss, np.sum(self.advantages**2) / 4)

  def test_the_best_of_one_is_imitated(self):
    """SuperHF: cross-entropy of the tokens of the best episode. Its mean is over them alone."""
    self.advantages = self.mask * np.array([[1.0], [0.0]])
    d_logp, loss = self.gradient('superhf', self.old_logp)
    np.testing.assert_allclose(d_logp, -self.advantages / 3, atol=1e-12)
    self.assertAlmostEqual(loss, (1 + 2 + 3) / 3)


if __name__ == '__main__':
  absltest.main()
