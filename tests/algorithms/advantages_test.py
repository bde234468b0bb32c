"""Advantages: worked by hand, against the float64 oracle, and special cases that coincide."""

import dataclasses
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types
from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import variants
from stppo_jax.rollout import batching
from stppo_jax.systems import bad
from tests.support import oracle

QUICK = hypothesis.settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)

# One row: prompt, turn 1 of two tokens, an observation of two, turn 2 of one token, padding. The
# values 99 and 77 of observation tokens must not be read.
TURN_IDS = np.array([[0, 1, 1, 0, 0, 2, 0]])
MASK = (TURN_IDS > 0).astype(np.float64)
REWARDS = np.array([[0.0, 0.0, 0.5, 0.0, 0.0, 1.0, 0.0]])
VALUES = np.array([[5.0, 0.2, 0.4, 99.0, 77.0, 0.6, 3.0]])


def _assert_close(got, expected, atol):
  """An absolute bound alone: chex and NumPy would add a relative 1e-6 or 1e-7 by default."""
  chex.assert_trees_all_close(got, expected, rtol=0, atol=atol)


@jax.jit
def _every_estimator(rewards, values, turn_ids, mask, gamma, lam):
  num_turns = mask.shape[1]
  return (
      advantages.token_gae(rewards, values, mask, gamma, lam),
      advantages.turn_gae(rewards, values, turn_ids, num_turns, gamma, lam),
      bad.bad_gae(rewards, values, turn_ids, mask, gamma, lam),
      turn_returns(rewards, turn_ids, num_turns, gamma),
  )


def turn_returns(rewards, turn_ids, num_turns, gamma):
  """Returns to go of turns: GAE with lambda 1 and values of 0."""
  values = jnp.zeros_like(rewards)
  return advantages.turn_gae(rewards, values, turn_ids, num_turns, gamma, 1.0)[0]


class GaeTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    self.enter_context(jax.numpy_rank_promotion('raise'))

  @chex.variants(with_jit=True, without_jit=True)
  def test_token_gae_by_hand_across_observations(self):
    # gamma 0.5, lambda 0.5; agent tokens a, b | c with values .2 .4 .6 and rewards 0 .5 1
    # delta_c = 1 - 0.6 = 0.4                       A_c = 0.4
    # delta_b = 0.5 + 0.5*0.6 - 0.4 = 0.4           A_b = 0.4 + 0.25*0.4 = 0.5
    # delta_a = 0 + 0.5*0.4 - 0.2 = 0               A_a = 0 + 0.25*0.5 = 0.125
    # returns = A + V: 0.325, 0.9, 1.0
    got = self.variant(lambda *args: advantages.token_gae(*args, 0.5, 0.5))(REWARDS, VALUES, MASK)
    _assert_close(
        got,
        (jnp.array([[0, 0.125, 0.5, 0, 0, 0.4, 0]]), jnp.array([[0, 0.325, 0.9, 0, 0, 1.0, 0]])),
        atol=1e-12,
    )

  @chex.variants(with_jit=True, without_jit=True)
  def test_turn_gae_by_hand(self):
    # turn 1: reward 0.5, value 0.2 (its first token); turn 2: reward 1, value 0.6
    # A^2 = 1 - 0.6 = 0.4;  A^1 = 0.5 + 0.5*0.6 - 0.2 + 0.25*0.4 = 0.7
    # returns 0.9 and 1.0
    got = self.variant(lambda *args: advantages.turn_gae(*args, 3, 0.5, 0.5))(
        REWARDS, VALUES, TURN_IDS
    )
    _assert_close(
        got,
        (jnp.array([[0, 0.7, 0.7, 0, 0, 0.4, 0]]), jnp.array([[0, 0.9, 0.9, 0, 0, 1.0, 0]])),
        atol=1e-12,
    )

  @chex.variants(with_jit=True, without_jit=True)
  def test_bad_gae_by_hand(self):
    # c ends turn 2: A_c = 1 - 0.6 = 0.4
    # b ends turn 1: A_b = 0.5 + 0.5*0.6 - 0.4 + 0.25*0.4 = 0.5
    # a is inside turn 1, factors 1: A_a = 0 + 0.4 - 0.2 + 0.5 = 0.7
    got = self.variant(lambda *args: bad.bad_gae(*args, 0.5, 0.5))(REWARDS, VALUES, TURN_IDS, MASK)
    _assert_close(
        got,
        (jnp.array([[0, 0.7, 0.5, 0, 0, 0.4, 0]]), jnp.array([[0, 0.9, 0.9, 0, 0, 1.0, 0]])),
        atol=1e-12,
    )

  @parameterized.product(gamma=(1.0, 0.9), lam=(1.0, 0.7, 0.0))
  def test_against_the_oracle(self, gamma, lam):
    batch = oracle.random_batch(0)
    r, v, k, m = batch.rewards, batch.values, batch.turn_ids, batch.action_mask
    expected = (
        oracle.token_gae(r, v, m, gamma, lam),
        oracle.turn_gae(r, v, k, gamma, lam),
        oracle.bad_gae(r, v, k, gamma, lam),
        oracle.turn_returns(r, k, gamma),
    )
    _assert_close(_every_estimator(r, v, k, m, gamma, lam), expected, atol=1e-11)

  @QUICK
  @hypothesis.given(seed=st.integers(0, 10**6), gamma=st.floats(0.0, 1.0), lam=st.floats(0.0, 1.0))
  def test_any_layout_against_the_quadratic_sum(self, seed, gamma, lam):
    """Masks without any structure: turns cut anywhere, rows full or empty."""
    rng = np.random.default_rng(seed)
    shape = 3, 9
    agent = rng.random(shape) < rng.random()
    # A new turn begins with an agent token after another token, and sometimes right after a turn:
    # the observation between them is empty.
    starts = agent & (~np.pad(agent, ((0, 0), (1, 0)))[:, :-1] | (rng.random(shape) < 0.3))
    turn_ids = np.cumsum(starts, axis=1) * agent
    r, v, m = rng.normal(size=shape) * agent, rng.normal(size=shape), agent.astype(np.float64)
    got = _every_estimator(r, v, turn_ids, m, gamma, lam)
    expected = (
        oracle.token_gae(r, v, m, gamma, lam),
        oracle.turn_gae(r, v, turn_ids, gamma, lam),
        oracle.bad_gae(r, v, turn_ids, gamma, lam),
        oracle.turn_returns(r, turn_ids, gamma),
    )
    _assert_close(got, expected, atol=1e-10)

  @parameterized.parameters((1.0, True), (0.9, False))
  def test_observation_tokens_matter_only_below_lambda_one(self, lam, same):
    """Observations as steps of GAE: harmless at gamma = lambda = 1, and only there."""
    batch = oracle.random_batch(1)
    masked, _ = advantages.token_gae(batch.rewards, batch.values, batch.action_mask, 1.0, lam)
    every_token = np.ones_like(batch.action_mask)
    # Padding after the last token is no step in either: give it no value.
    last = np.cumsum(batch.action_mask[:, ::-1], axis=1)[:, ::-1] > 0
    unmasked, _ = advantages.token_gae(batch.rewards, batch.values * last, every_token, 1.0, lam)
    gap = np.max(np.abs((masked - unmasked) * batch.action_mask))
    if same:
      self.assertLess(gap, 1e-12)
    else:
      self.assertGreater(gap, 1e-2)

  @parameterized.parameters((1.0, 1.0), (0.9, 0.5))
  def test_one_turn(self, gamma, lam):
    """Turn GAE of one turn is reward minus value; BAD is the undiscounted rest minus the value."""
    batch = oracle.random_batch(2, layout=(((0, 2), (1, 5), (0, 2)), ((1, 1), (0, 8))))
    total = np.sum(batch.rewards, axis=1, keepdims=True)
    first = np.array([[batch.values[0, 2]], [batch.values[1, 0]]])
    m = batch.action_mask
    got, returns = advantages.turn_gae(batch.rewards, batch.values, batch.turn_ids, 1, gamma, lam)
    _assert_close(got, (total - first) * m, atol=1e-12)
    _assert_close(returns, total * m, atol=1e-12)
    rest = np.cumsum(batch.rewards[:, ::-1], axis=1)[:, ::-1]
    got, returns = bad.bad_gae(batch.rewards, batch.values, batch.turn_ids, m, gamma, lam)
    _assert_close(got, (rest - batch.values) * m, atol=1e-12)
    _assert_close(returns, rest * m, atol=1e-12)

  def test_one_token_turns_make_all_three_equal(self):
    batch = oracle.random_batch(3)
    turn_ids = np.cumsum(batch.action_mask, axis=1).astype(int) * (batch.turn_ids > 0)
    r, v, m = batch.rewards, batch.values, batch.action_mask
    token = advantages.token_gae(r, v, m, 0.9, 0.8)
    _assert_close(advantages.turn_gae(r, v, turn_ids, 16, 0.9, 0.8), token, atol=1e-12)
    _assert_close(bad.bad_gae(r, v, turn_ids, m, 0.9, 0.8), token, atol=1e-12)

  def test_bad_gae_mixes_token_and_turn_gae(self):
    batch = oracle.random_batch(4)
    r, v, k, m = batch.rewards, batch.values, batch.turn_ids, batch.action_mask
    _assert_close(
        bad.bad_gae(r, v, k, m, 1.0, 1.0), advantages.token_gae(r, v, m, 1.0, 1.0), atol=1e-12
    )
    first = (k > 0) & (k != np.pad(k, ((0, 0), (1, 0)))[:, :-1])
    own = bad.bad_gae(r, v, k, m, 0.9, 0.6)
    turn = advantages.turn_gae(r, v, k, oracle.NUM_TURNS, 0.9, 0.6)
    for x, y in zip(own, turn):
      _assert_close(x * first, y * first, atol=1e-12)
    self.assertGreater(np.max(np.abs(own[0] - advantages.token_gae(r, v, m, 0.9, 0.6)[0])), 1e-2)

  def test_terminal_reward_reaches_every_agent_token_undiscounted(self):
    """gamma = lambda = 1: the return of each agent token is the episode's score, whatever V is."""
    batch = oracle.random_batch(5)
    rewards = np.zeros_like(batch.rewards)
    has_agent = batch.action_mask.any(axis=1)
    last = batch.action_mask.shape[1] - 1 - np.argmax(batch.action_mask[:, ::-1], axis=1)
    rewards[has_agent, last[has_agent]] = 1.0
    _, returns = advantages.token_gae(rewards, batch.values, batch.action_mask, 1.0, 1.0)
    _assert_close(returns, batch.action_mask, atol=1e-12)

  def test_turn_returns_by_hand(self):
    # R = 0.5, 1 and gamma 0.5: G^2 = 1, G^1 = 0.5 + 0.5 * 1 = 1
    # R = 0.5, 1 and gamma 0.1: G^1 = 0.6
    for gamma, first in (0.5, 1.0), (0.1, 0.6):
      got = turn_returns(REWARDS, TURN_IDS, 2, gamma)
      _assert_close(got, jnp.array([[0, first, first, 0, 0, 1.0, 0]]), atol=1e-12)

  def test_more_turn_slots_than_turns_change_nothing(self):
    batch = oracle.random_batch(6)
    args = batch.rewards, batch.values, batch.turn_ids
    _assert_close(
        advantages.turn_gae(*args, oracle.NUM_TURNS, 0.9, 0.8),
        advantages.turn_gae(*args, oracle.NUM_TURNS + 4, 0.9, 0.8),
        atol=1e-12,
    )


class GroupTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    self.enter_context(jax.numpy_rank_promotion('raise'))

  @chex.variants(with_jit=True, without_jit=True)
  def test_zscore_by_hand(self):
    # group 0: scores 1, 0, 1, 0: mean 1/2, sample variance 4 * 1/4 / 3 = 1/3, std 0.57735
    # group 2: one member -> 0; group 1: no spread -> 0
    scores = jnp.array([1.0, 0.3, 0.0, 7.0, 1.0, 0.3, 0.0])
    groups = jnp.array([0, 1, 0, 2, 0, 1, 0])
    z = 0.5 / (3**-0.5 + 1e-6)
    got = self.variant(advantages.group_zscore)(scores, groups)
    _assert_close(got, jnp.array([z, 0.0, -z, 0.0, z, 0.0, -z]), atol=1e-12)

  @chex.variants(with_jit=True, without_jit=True)
  def test_leave_one_out_by_hand(self):
    # group 0: 1 - (0 + 0)/2 = 1;  0 - (1 + 0)/2 = -1/2, twice; the lone row gets 0
    scores, groups = jnp.array([1.0, 5.0, 0.0, 0.0]), jnp.array([0, 1, 0, 0])
    got = self.variant(advantages.leave_one_out)(scores, groups)
    _assert_close(got, jnp.array([1.0, 0.0, -0.5, -0.5]), atol=1e-12)

  @parameterized.parameters(0, 1, 2)
  def test_against_the_oracle(self, seed):
    rng = np.random.default_rng(seed)
    scores, groups = rng.normal(size=11), rng.integers(5, size=11)
    _assert_close(
        advantages.group_zscore(scores, groups), oracle.group_zscore(scores, groups), atol=1e-11
    )
    _assert_close(
        advantages.leave_one_out(scores, groups), oracle.leave_one_out(scores, groups), atol=1e-11
    )

  @parameterized.parameters('group_zscore', 'leave_one_out', 'group_centred')
  def test_equal_scores_give_exactly_nothing(self, name):
    for score, number in ((0.1, 3), (0.7, 8), (0.3, 1)):  # means of these are off by rounding
      scores = np.full(number, score, np.float32)
      made = getattr(advantages, name)(scores, np.zeros(number, np.int32))
      self.assertEqual(np.abs(made).max(), 0.0)

  def test_numbers_of_groups_are_only_names(self):
    """A batch cut from a larger one keeps its group numbers; they may exceed the number of rows."""
    scores = np.array([1.0, 0.0, 2.0, 5.0])
    for fn in advantages.group_zscore, advantages.leave_one_out:
      _assert_close(
          fn(scores, np.array([900, 900, 17, 17])), fn(scores, np.array([0, 0, 1, 1])), atol=1e-12
      )

  def test_shift_and_scale(self):
    scores, groups = np.random.default_rng(3).normal(size=8), np.array([0, 0, 0, 1, 1, 2, 2, 2])
    for fn in advantages.group_zscore, advantages.leave_one_out:
      _assert_close(fn(scores + 3.0, groups), fn(scores, groups), atol=1e-10)
      for g in range(3):
        self.assertLess(abs(np.sum(np.asarray(fn(scores, groups))[groups == g])), 1e-10)
    # The eps of 1e-6 is the only thing that sees the scale.
    _assert_close(
        advantages.group_zscore(10 * scores, groups),
        advantages.group_zscore(scores, groups),
        atol=1e-4,
    )
    _assert_close(
        advantages.leave_one_out(10 * scores, groups),
        10 * advantages.leave_one_out(scores, groups),
        atol=1e-10,
    )

  @parameterized.parameters(0.1, 0.2, 0.7, 1.0)
  def test_no_spread_is_exactly_zero_in_float32(self, score):
    """The float32 mean of seven scores of 0.7 is one ulp off, which divided by 1e-6 is 0.056."""
    for size in 5, 7:
      scores = np.full(size, score, np.float32)
      got = advantages.group_zscore(scores, np.zeros(size, np.int32))
      np.testing.assert_array_equal(got, np.zeros(size))

  @chex.variants(with_jit=True, without_jit=True)
  def test_whiten_by_hand(self):
    # masked 1, 2, 3: mean 2, unbiased variance (1 + 0 + 1) / 2 = 1 -> -1, 0, 1
    x = jnp.array([[1.0, 50.0, 2.0], [3.0, -9.0, 4.0]])
    mask = jnp.array([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    got = np.asarray(self.variant(advantages.whiten_tokens)(x, mask))
    np.testing.assert_allclose(got[np.asarray(mask) > 0], [-1.0, 0.0, 1.0], rtol=0, atol=1e-7)

  def test_whiten_properties(self):
    batch = oracle.random_batch(7)
    x, m = batch.advantages, batch.action_mask
    got = np.asarray(advantages.whiten_tokens(x, m))
    np.testing.assert_allclose(got[m > 0], oracle.whiten(x, m), rtol=0, atol=1e-11)
    np.testing.assert_allclose(np.mean(got[m > 0]), 0.0, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.var(got[m > 0], ddof=1), 1.0, rtol=0, atol=1e-6)
    # Neither a shift nor a positive scale of the advantages is visible afterwards.
    np.testing.assert_allclose(
        np.asarray(advantages.whiten_tokens(4 * x + 2, m))[m > 0], got[m > 0], rtol=0, atol=1e-6
    )
    # What stands on observation tokens is not part of the statistics.
    np.testing.assert_allclose(
        np.asarray(advantages.whiten_tokens(np.where(m > 0, x, 1e3), m))[m > 0],
        got[m > 0],
        rtol=0,
        atol=1e-12,
    )

  def test_whiten_of_zero_or_one_token_is_finite(self):
    x = np.array([[2.0, 3.0]])
    for mask in ([[0.0, 0.0]], [[1.0, 0.0]], [[1.0, 1.0]]):
      chex.assert_tree_all_finite(advantages.whiten_tokens(x, np.array(mask)))
    chex.assert_tree_all_finite(advantages.whiten_tokens(np.full((1, 2), 0.3), np.ones((1, 2))))

  @parameterized.parameters((0.95,), (57.3,), (1000.7,))
  def test_whiten_of_equal_advantages_is_zero(self, advantage):
    mask = np.random.default_rng(0).random((8, 100)) < 0.6
    x = np.where(mask, advantage, 0).astype(np.float32)
    whiten = jax.jit(advantages.whiten_tokens)
    np.testing.assert_array_equal(whiten(x, mask), 0)
    x[0, np.argmax(mask[0])] *= 1.001
    self.assertGreater(whiten(x, mask).max(), 0.1)
    for value in (np.nan, np.inf):  # a step that is not finite must be seen and skipped
      x[0, np.argmax(mask[0])] = value
      self.assertFalse(np.isfinite(whiten(x, mask)).all())

  def test_whiten_turns_by_hand(self):
    # Three turns of 1, 2 and 1 tokens worth 1, 2, 3: each counts once, so mean 2, variance 1
    # (over tokens the mean of 1, 2, 2, 3 would be the same, the variance 2/3).
    x = np.array([[1.0, 9.0, 2.0, 2.0], [3.0, 9.0, 9.0, 9.0]])
    ids = np.array([[1, 0, 2, 2], [1, 0, 0, 0]])
    batch = mock.Mock(action_mask=ids > 0, turn_ids=ids, roles=None)
    got = advantages.whiten(x, batch, 'turns')
    _assert_close(got, jnp.array([[-1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]), atol=1e-7)


class EstimateTest(chex.TestCase):
  """The estimators named in the table."""

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    self.enter_context(jax.numpy_rank_promotion('raise'))
    batch = oracle.random_batch(8)
    self.batch = types.TurnBatch(
        tokens=batch.tokens,
        action_mask=jnp.asarray(batch.action_mask),
        turn_ids=jnp.asarray(batch.turn_ids),
        rewards=jnp.asarray(batch.rewards),
        old_logp=batch.old_logp,
        ref_logp=batch.old_logp,
        old_values=jnp.asarray(batch.values),
        advantages=batch.values * 0,
        returns=batch.values * 0,
        group_ids=jnp.array([0, 0, 1, 1, 0, 1]),
    )
    self.args = batch.rewards, batch.values, batch.turn_ids

  def _estimate(self, name, **changes):
    row = dataclasses.replace(
        variants.VARIANTS['ppo'], advantage=name, whiten=False, gamma=0.9, lam=0.8, **changes
    )
    return advantages.estimate(self.batch, row)

  def test_estimators_with_a_critic(self):
    r, v, k = self.args
    expected = {
        'token_gae': oracle.token_gae(r, v, k > 0, 0.9, 0.8),
        'turn_gae': oracle.turn_gae(r, v, k, 0.9, 0.8),
        'bad_gae': oracle.bad_gae(r, v, k, 0.9, 0.8),
    }
    for name, (a, returns) in expected.items():
      got = self._estimate(name)
      _assert_close((got.advantages, got.returns), (a, returns), atol=1e-11)

  def test_whitening_touches_the_advantages_only(self):
    r, v, k = self.args
    a, returns = oracle.token_gae(r, v, k > 0, 0.9, 0.8)
    row = dataclasses.replace(variants.VARIANTS['ppo'], whiten=True, gamma=0.9, lam=0.8)
    got = advantages.estimate(self.batch, row)
    np.testing.assert_allclose(
        np.asarray(got.advantages)[k > 0], oracle.whiten(a, k > 0), rtol=0, atol=1e-11
    )
    np.testing.assert_array_equal(np.asarray(got.advantages)[k == 0], 0.0)
    _assert_close(got.returns, returns, atol=1e-11)

  @parameterized.parameters('group_zscore', 'leave_one_out')
  def test_groups(self, name):
    """Every agent token has its row's number. Row 3, without agent tokens, is in no group."""
    r, _, k = self.args
    rows = np.array([0, 1, 2, 4, 5])
    expected = np.zeros(6)
    expected[rows] = getattr(oracle, name)(r.sum(axis=1)[rows], [0, 0, 1, 0, 1])
    _assert_close(self._estimate(name).advantages, expected[:, None] * (k > 0), atol=1e-10)

  def test_turn_returns_are_normalised_over_turns(self):
    r, _, k = self.args
    returns = oracle.turn_returns(r, k, 0.9)
    each = np.array(
        [returns[b, turn[0]] for b, row in enumerate(oracle.segments(k, 'turn')) for turn in row]
    )
    expected = (returns - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8) * (k > 0)
    _assert_close(self._estimate('turn_returns').advantages, expected, atol=1e-10)

  def test_an_unknown_name_is_refused(self):
    with self.assertRaises(ValueError):
      self._estimate('gae')


class RewardsPerTurnTest(chex.TestCase):
  """Rewards on several turns: each counts at its turn's last token and for what came before."""

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    # Two turns of two tokens: rewards .5 and 1, values .1 .2 | .3 .4; an observation between them.
    self.turn_ids = jnp.array([[0, 1, 1, 0, 2, 2]])
    self.rewards = jnp.array([[0.0, 0.0, 0.5, 0.0, 0.0, 1.0]])
    self.values = jnp.array([[9.0, 0.1, 0.2, 9.0, 0.3, 0.4]])

  def estimate(self, name, **changes):
    zeros = jnp.zeros_like(self.rewards)
    batch = types.TurnBatch(
        tokens=self.turn_ids,
        action_mask=(self.turn_ids > 0).astype(float),
        turn_ids=self.turn_ids,
        rewards=self.rewards,
        old_logp=zeros,
        ref_logp=zeros,
        old_values=self.values,
        advantages=zeros,
        returns=zeros,
        group_ids=jnp.arange(len(self.turn_ids)),
    )
    row = variants.Variant(name, 'token', gamma=0.5, lam=0.5)
    return advantages.estimate(batch.replace(**changes), row)

  def test_decoupled_gae_has_two_lambdas(self):
    for name in ('token_gae', 'turn_gae', 'bad_gae'):
      plain = self.estimate(name)
      row = variants.Variant(name, 'token', gamma=0.5, lam=0.5, lam_critic=1.0)
      both = advantages.estimate(plain, row)
      critic = advantages.estimate(plain, dataclasses.replace(row, lam=1.0, lam_critic=None))
      _assert_close(both.advantages, plain.advantages, atol=1e-12)
      _assert_close(both.returns, critic.returns, atol=1e-12)
      self.assertGreater(float(jnp.abs(both.returns - plain.returns).max()), 1e-3)

  def test_whitening_over_turns_by_hand(self):
    # Returns to go (gamma 1) of the tokens: turn 1 of one token has 2, turn 2 of three has 1, 1, 0.
    # Each turn counts once: mean (2 + 2/3) / 2 = 4/3; variance, over 2 - 1 turns:
    # (2/3)^2 + ((1/3)^2 + (1/3)^2 + (4/3)^2) / 3 = 4/9 + 18/27 = 10/9.
    row = variants.Variant('token_returns', 'token', whiten=True, whiten_over='turns')
    batch = self.estimate('token_gae', turn_ids=jnp.array([[1, 0, 2, 2, 2]]))
    rewards = jnp.array([[1.0, 0, 0, 1, 0]])
    turn_ids = jnp.array([[1, 0, 2, 2, 2]])
    batch = batch.replace(rewards=rewards, action_mask=(turn_ids > 0) * 1.0, turn_ids=turn_ids)
    expected = np.array([[2 - 4 / 3, 0, 1 - 4 / 3, 1 - 4 / 3, -4 / 3]]) / np.sqrt(10 / 9)
    expected[0, 1] = 0
    _assert_close(advantages.estimate(batch, row).advantages, expected, atol=1e-6)

  def test_token_gae(self):
    # delta: 0 + .5*.2 - .1 = 0 | .5 + .5*.3 - .2 = .45 | 0 + .5*.4 - .3 = -.1 | 1 - .4 = .6
    # A:     0 + .25*.4625 = .115625 | .45 + .25*.05 = .4625 | -.1 + .25*.6 = .05 | .6
    got = self.estimate('token_gae')
    _assert_close(got.advantages, jnp.array([[0, 0.115625, 0.4625, 0, 0.05, 0.6]]), atol=1e-12)
    _assert_close(got.returns, jnp.array([[0, 0.215625, 0.6625, 0, 0.35, 1.0]]), atol=1e-12)

  def test_turn_gae(self):
    # Turns: R = .5, 1; V = .1, .3.  A_2 = 1 - .3 = .7;  A_1 = .5 + .5*.3 - .1 + .25*.7 = .725
    got = self.estimate('turn_gae')
    _assert_close(got.advantages, jnp.array([[0, 0.725, 0.725, 0, 0.7, 0.7]]), atol=1e-12)
    _assert_close(got.returns, jnp.array([[0, 0.825, 0.825, 0, 1.0, 1.0]]), atol=1e-12)

  def test_bad_gae(self):
    # Only at ends of turns gamma = lambda = .5; inside both are 1. A: .6 | (0 + .4 - .3) + .6 = .7
    # | (.5 + .5*.3 - .2) + .25*.7 = .625 | (0 + .2 - .1) + .625 = .725
    got = self.estimate('bad_gae')
    _assert_close(got.advantages, jnp.array([[0, 0.725, 0.625, 0, 0.7, 0.6]]), atol=1e-12)

  @parameterized.parameters(
      (1.0, (0.233, 0.122, 0.011, -0.1)), (0.9, (0.22791, 0.1299, 0.021, -0.1))
  )
  def test_turn_returns_of_gems_sudoku(self, gamma, expected):
    """Three legal moves worth 1/9 and an illegal one: a move is credited with what follows it."""
    # gamma .9: -.1 | .111 - .09 = .021 | .111 + .0189 = .1299 | .111 + .11691 = .22791
    rewards = (0.111, 0.111, 0.111, -0.1)
    turns = [
        types.Turn(np.arange(2), np.zeros(2), np.zeros(1, np.int32), reward=reward)
        for reward in rewards
    ]
    episode = types.Episode(types.Task('id', '', ()), 0, np.zeros(3, np.int32), turns)
    batch = batching.to_turn_batch([episode], (16,))
    got = turn_returns(batch.rewards, batch.turn_ids, 16, gamma)
    for turn, value in enumerate(expected, start=1):
      _assert_close(got[batch.turn_ids == turn], jnp.full(2, value), atol=1e-6)
    self.assertAlmostEqual(episode.score, 0.233)

  def test_group_scores_are_sums_over_turns(self):
    # Scores .5 + 1 = 1.5 and .5 + 0 = .5 in one group: leave one out gives 1 and -1.
    twice = lambda x: jnp.concatenate([x, x])
    got = self.estimate(
        'leave_one_out',
        turn_ids=twice(self.turn_ids),
        action_mask=twice(self.turn_ids > 0).astype(float),
        rewards=twice(self.rewards).at[1, 5].set(0.0),
        group_ids=jnp.zeros(2, jnp.int32),
    )
    expected = jnp.array([[1.0], [-1.0]]) * twice(self.turn_ids > 0)
    _assert_close(got.advantages, expected, atol=1e-12)


class GroupScoresTest(parameterized.TestCase):
  """Scores as the estimators sum them, from rewards in float32 at any columns."""

  def estimate(self, name, rewards, group_ids, **changes):
    mask = jnp.ones(rewards.shape, jnp.float32)
    batch = types.TurnBatch(
        *[mask] * 3,
        jnp.asarray(rewards, jnp.float32),
        *[mask] * 5,
        jnp.asarray(group_ids),
        **changes,
    )
    row = dataclasses.replace(variants.VARIANTS['grpo'], advantage=name)
    return np.asarray(advantages.estimate(batch, row).advantages[:, 0])

  @parameterized.product(
      name=('group_zscore', 'group_centred'),
      earned=((0.1,) * 8 + (1.0,), (-0.1,) * 20 + (10.0,), (0.3, -0.7, 0.11, 1.9, -1.61)),
  )
  def test_equal_totals_at_other_columns_have_no_spread(self, name, earned):
    rng = np.random.default_rng(0)
    rewards = np.zeros((60, 257), np.float32)
    for row in rewards:
      row[rng.choice(257, len(earned), replace=False)] = rng.permutation(earned)
    got = self.estimate(name, rewards, np.arange(60) // 5)
    np.testing.assert_array_equal(got, 0)
    rewards[0, 0] += 0.001  # a difference that is none of rounding
    self.assertGreater(self.estimate(name, rewards, np.arange(60) // 5)[0], 0)

  @parameterized.parameters(
      ('leave_one_out', (1.0, -1 / 3, -1 / 3, -1 / 3)),
      ('group_zscore', (1.5, -0.5, -0.5, -0.5)),
      ('group_centred', (0.75, -0.25, -0.25, -0.25)),
  )
  def test_an_episode_of_several_rows_counts_once(self, name, expected):
    """Scores 1, 0, 0, 0; the first episode has five rows, of which two stand among the others'."""
    episode_ids = np.array([0, 1, 0, 2, 0, 0, 3, 0])
    rewards = np.where(episode_ids == 0, 1.0, 0.0)[:, None]
    offsets = jnp.where(episode_ids == 0, -4.0, 0.0)
    ids = jnp.asarray(episode_ids)
    got = self.estimate(name, rewards, [0] * 8, episode_ids=ids, score_offsets=offsets)
    np.testing.assert_allclose(got, np.array(expected)[episode_ids], rtol=1e-5)

  def test_score_counts_only_rows_with_agent_tokens(self):
    rewards = np.array([[9.0], [1.0], [3.0], [1.0]])  # the first row has no agent tokens
    mask = jnp.array([[0.0], [1.0], [1.0], [1.0]])
    several = dict(episode_ids=jnp.array([0, 0, 0, 1]), score_offsets=jnp.array([0.0, -2, -2, 0]))
    got = self.estimate('leave_one_out', rewards, [0] * 4, **several)  # all rows: 9 + 1 + 3 - 0 - 1
    np.testing.assert_allclose(got, [12.0] * 3 + [-12.0], rtol=1e-6)
    batch = types.TurnBatch(
        mask,
        mask,
        mask.astype(int),
        jnp.asarray(rewards, jnp.float32),
        *[mask] * 5,
        jnp.zeros(4, int),
        **several,
    )
    row = dataclasses.replace(variants.VARIANTS['grpo'], advantage='leave_one_out')
    got = advantages.estimate(batch, row).advantages[:, 0]
    np.testing.assert_allclose(got, [0, 1, 1, -1], rtol=1e-6)  # 1 + 3 - 2 and 1

  @parameterized.parameters(
      ('group_wins', (1 / 3, -1 / 6, -1 / 6)),  # it beats 2 1/2, 1 and 1 of 3
      ('group_best', (1.0, 0.0, 0.0)),
  )
  def test_comparisons_by_hand(self, name, expected):
    rewards = np.array([[5.0], [1.0], [0.0], [5.0], [0.0], [2.0]])
    got = self.estimate(name, rewards, [1, 0, 0, 1, 0, 1])
    np.testing.assert_allclose(got[[1, 2, 4]], expected, atol=1e-6)
    # Two are equally good. Each beats 1 1/2 + 1/2 of 3, and the first one counts as the best.
    ties = {'group_wins': (1 / 6, 1 / 6, -1 / 3), 'group_best': (1.0, 0.0, 0.0)}
    np.testing.assert_allclose(got[[0, 3, 5]], ties[name], atol=1e-6)

  def test_equal_scores_have_a_best_but_no_winner(self):
    rewards = np.zeros((4, 1))
    got = self.estimate('group_best', rewards, [0, 0, 1, 1])
    np.testing.assert_array_equal(got, [1, 0, 1, 0])
    np.testing.assert_array_equal(self.estimate('group_wins', rewards, [0, 0, 1, 1]), 0)


class TurnZscoreTest(parameterized.TestCase):
  """The z-score of a turn's own reward: rows of a group are compared at the same turn."""

  def estimate(self, rewards, turn_ids, group_ids, roles=None):
    mask = jnp.asarray(turn_ids > 0, jnp.float32)
    batch = types.TurnBatch(
        mask,
        mask,
        jnp.asarray(turn_ids),
        jnp.asarray(rewards, jnp.float32),
        *[mask] * 5,
        jnp.asarray(group_ids),
        roles=roles,
    )
    row = variants.VARIANTS['ospo']
    self.assertTrue(row.needs_groups)
    return np.asarray(advantages.estimate(batch, row).advantages)

  def test_by_hand(self):
    """Turn 1 earns 3, 1 and 2, turn 2 earns 5 and 5, and only one row has a turn 3."""
    turn_ids = np.array([[1, 0, 2, 2], [1, 1, 2, 0], [0, 1, 0, 0], [1, 2, 3, 0]])
    rewards = np.array([[3, 9, 0, 5], [0, 1, 5, 0], [9, 2, 0, 0], [4, 4, 4, 4.0]])
    got = self.estimate(rewards, turn_ids, np.array([0, 0, 0, 1]))
    expected = [[1, 0, 0, 0], [-1, -1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(got, expected, atol=1e-5)

  def test_with_one_turn_it_is_grpos(self):
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(12, 1)).astype(np.float32)
    group_ids = np.arange(12) // 4
    got = self.estimate(rewards, np.ones((12, 1), int), group_ids)[:, 0]
    expected = advantages.group_zscore(rewards[:, 0], jnp.asarray(group_ids))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

  def test_the_roles_of_a_fleet_are_one_group(self):
    """Two vehicles in two copies of the fleet earn 1, 2, 3 and 6: mean 3, deviation 2.16."""
    rewards = np.array([[1.0], [2.0], [3.0], [6.0]])
    group_ids = np.array([0, 1, 0, 1])  # question times roles, plus the number of the role
    roles = {'a': jnp.array([1.0, 0, 1, 0]), 'b': jnp.array([0, 1.0, 0, 1])}
    got = self.estimate(rewards, np.ones((4, 1), int), group_ids, roles)[:, 0]
    np.testing.assert_allclose(got, (rewards[:, 0] - 3) / np.sqrt(14 / 3), rtol=1e-5)


class OwnEstimatorTest(absltest.TestCase):

  def test_a_plain_function_fills_in_advantages_and_returns(self):
    row = variants.Variant(lambda batch, variant: (batch.rewards * variant.gamma,) * 2, 'token')
    zeros = jnp.zeros((1, 2))
    columns = {field.name: zeros for field in dataclasses.fields(types.TurnBatch)}
    batch = types.TurnBatch(**columns | {'rewards': jnp.ones((1, 2))})
    batch = advantages.estimate(batch, dataclasses.replace(row, gamma=0.5))
    np.testing.assert_array_equal(batch.advantages, [[0.5, 0.5]])
    np.testing.assert_array_equal(batch.returns, [[0.5, 0.5]])
    self.assertFalse(row.needs_critic or row.needs_groups)

  def test_wrapped_functions_state_what_they_need(self):
    of_groups = variants.Variant(advantages.from_groups(advantages.leave_one_out), 'token')
    self.assertTrue(of_groups.needs_groups)
    self.assertFalse(of_groups.needs_critic)
    of_values = variants.Variant(advantages.from_values(lambda batch, variant: None), 'token')
    self.assertTrue(of_values.needs_critic)
    self.assertFalse(of_values.needs_groups)


if __name__ == '__main__':
  absltest.main()
