"""Surrogate, value loss, KL and the four aggregations: worked by hand and against the oracle."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.algorithms import filters
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import variants
from tests.support import oracle

MODES = ('token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm')


def _assert_close(got, expected, atol):
  """An absolute bound alone: chex and NumPy would add a relative 1e-6 or 1e-7 by default."""
  chex.assert_trees_all_close(got, expected, rtol=0, atol=atol)


class SurrogateTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    self.enter_context(jax.numpy_rank_promotion('raise'))

  @chex.variants(with_jit=True, without_jit=True)
  def test_by_hand(self):
    # clip to [0.8, 1.3]
    # A = 2:  w 0.5 -> min(1, 1.6) = 1         w 1.1 -> 2.2   w 1.5 -> min(3, 2.6) = 2.6, clipped
    # A = -2: w 0.5 -> min(-1, -1.6) = -1.6, clipped   w 1.1 -> -2.2   w 1.5 -> min(-3, -2.6) = -3
    ratio = jnp.array([[0.5, 1.1, 1.5], [0.5, 1.1, 1.5]])
    a = jnp.array([[2.0, 2.0, 2.0], [-2.0, -2.0, -2.0]])
    surrogate, clipped = self.variant(lambda w, a: losses.clipped_surrogate(w, a, 0.2, 0.3))(
        ratio, a
    )
    chex.assert_trees_all_close(surrogate, jnp.array([[1.0, 2.2, 2.6], [-1.6, -2.2, -3.0]]))
    np.testing.assert_array_equal(clipped, [[False, False, True], [True, False, False]])
    self.assertEqual(clipped.dtype, jnp.bool_)

  def test_a_token_without_an_advantage_is_not_clipped(self):
    ratio = jnp.array([[0.5, 1.0, 1.5, 9.0]])
    _, clipped = losses.clipped_surrogate(ratio, jnp.zeros((1, 4)), 0.2, 0.2, dual_clip=3.0)
    np.testing.assert_array_equal(clipped, np.zeros((1, 4), bool))

  @chex.variants(with_jit=True, without_jit=True)
  def test_gradient_is_the_advantage_where_not_clipped(self):
    ratio = jnp.array([[0.5, 1.1, 1.5], [0.5, 1.1, 1.5]])
    a = jnp.array([[2.0, 2.0, 2.0], [-2.0, -2.0, -2.0]])
    got = self.variant(jax.grad(lambda w: jnp.sum(losses.clipped_surrogate(w, a, 0.2, 0.3)[0])))(
        ratio
    )
    chex.assert_trees_all_close(got, jnp.array([[2.0, 2.0, 0.0], [0.0, -2.0, -2.0]]))

  def test_ratio_at_the_bound_is_not_clipped(self):
    """B holds w <= 1+eps and w >= 1-eps: at the bound the token is free, its gradient whole."""
    ratio = jnp.array([[1.0 + 0.2, 1.0 - 0.2, 1.0 + 0.2, 1.0 - 0.2]])
    a = jnp.array([[1.0, 1.0, -1.0, -1.0]])
    _, clipped = losses.clipped_surrogate(ratio, a, 0.2, 0.2)
    np.testing.assert_array_equal(clipped, np.zeros((1, 4), bool))
    got = jax.grad(lambda w: jnp.sum(losses.clipped_surrogate(w, a, 0.2, 0.2)[0]))(ratio)
    chex.assert_trees_all_close(got, a)

  @chex.variants(with_jit=True, without_jit=True)
  def test_dual_clip_by_hand(self):
    # dual clip 3, A = -1: w 4 -> min(-4, -1.2) = -4, not below 3 * -1 = -3;  w 2 -> -2, untouched;
    # w 0.5 -> min(-0.5, -0.8) = -0.8;  A = 1 is not affected: w 4 -> 1.2
    ratio, a = jnp.array([[4.0, 2.0, 0.5, 4.0]]), jnp.array([[-1.0, -1.0, -1.0, 1.0]])

    def surrogate(w):
      return losses.clipped_surrogate(w, a, 0.2, 0.2, dual_clip=3.0)[0]

    chex.assert_trees_all_close(
        self.variant(surrogate)(ratio), jnp.array([[-3.0, -2.0, -0.8, 1.2]])
    )
    gradient = self.variant(jax.grad(lambda w: jnp.sum(surrogate(w))))(ratio)
    chex.assert_trees_all_close(gradient, jnp.array([[0.0, -1.0, 0.0, 0.0]]))

  @parameterized.product(dual_clip=(None, 2.0), clip=((0.2, 0.2), (0.1, 0.4), (3e-4, 4e-4)))
  def test_against_the_oracle(self, dual_clip, clip):
    rng = np.random.default_rng(0)
    ratio, a = np.exp(rng.normal(size=(4, 9))), rng.normal(size=(4, 9))
    surrogate, clipped = losses.clipped_surrogate(ratio, a, *clip, dual_clip=dual_clip)
    expected = np.zeros_like(a)
    outside = np.zeros(a.shape, bool)
    for b, t in np.ndindex(*a.shape):
      expected[b, t] = oracle.surrogate(ratio[b, t], a[b, t], *clip, dual_clip)
      outside[b, t] = oracle.outside_b(ratio[b, t], a[b, t], *clip)
    _assert_close(surrogate, expected, atol=1e-12)
    if dual_clip is not None:  # what the dual clip stops counts as clipped
      outside |= (a < 0) & (ratio > dual_clip)
    np.testing.assert_array_equal(clipped, outside)
    self.assertTrue(outside.any())


class KlPenaltyTest(parameterized.TestCase):
  """Mean gradients of the KL penalty over all tokens of a softmax of three."""

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    self.logits = jnp.array([0.4, -0.3, 0.9])
    self.old_logits = jnp.array([1.0, -0.8, -0.2])
    self.ref_logp = jax.nn.log_softmax(jnp.array([1.5, 0.2, -1.0]))

  def mean_gradient(self, estimator, sampler_logits, has_ratio):
    """The mean over the sampler's tokens of the derivative times grad logp."""
    sampler_logp = jax.nn.log_softmax(sampler_logits)
    logp, pull = jax.vjp(jax.nn.log_softmax, self.logits)
    given = sampler_logp if has_ratio else None
    _, derivative = losses.kl_penalty(logp, self.ref_logp, estimator, given)
    return pull(jnp.exp(sampler_logp) * derivative)[0]

  def exact(self, is_reversed=False):
    def divergence(logits):
      logp = jax.nn.log_softmax(logits)
      if is_reversed:
        return jnp.sum(jnp.exp(self.ref_logp) * (self.ref_logp - logp))
      return jnp.sum(jnp.exp(logp) * (logp - self.ref_logp))

    return jax.grad(divergence)(self.logits)

  @parameterized.product(estimator=losses.KL_ESTIMATORS, is_on_policy=(True, False))
  def test_with_the_ratio_it_is_the_kl_s(self, estimator, is_on_policy):
    sampler = self.logits if is_on_policy else self.old_logits
    got = self.mean_gradient(estimator, sampler, True)
    np.testing.assert_allclose(got, self.exact(), rtol=1e-12, atol=1e-14)

  def test_without_it_each_estimator_pulls_elsewhere(self):
    plain = {k: self.mean_gradient(k, self.logits, False) for k in losses.KL_ESTIMATORS}
    np.testing.assert_allclose(plain['k1'], 0, atol=1e-12)
    np.testing.assert_allclose(plain['k2'], self.exact(), rtol=1e-12)
    np.testing.assert_allclose(plain['k3'], self.exact(is_reversed=True), rtol=1e-12)
    stale = self.mean_gradient('k2', self.old_logits, False)
    self.assertGreater(np.abs(stale - self.exact()).max(), 0.05)

  def test_bound_of_k3_keeps_gradient_direction(self):
    """A token at e^-9 of the reference has the value 10, and is still pulled up: w k1 = -9."""
    logp = jnp.array([-10.0, -10.0])
    reference = jnp.array([-1.0, -1.0])
    value, derivative = losses.kl_penalty(logp, reference, 'k3', logp - jnp.array([0, np.log(2)]))
    np.testing.assert_allclose(value, [10, 20])
    np.testing.assert_allclose(derivative, [-9, -18])

  def test_wrong_sampler_logprob_is_bounded(self):
    value, derivative = losses.kl_penalty(
        jnp.array(-1.0), jnp.array(-2.0), 'k2', jnp.array(-9999.0)
    )
    np.testing.assert_allclose([value, derivative], [50, 100])  # 100 k2, 100 k1


class AggregationTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    self.enter_context(jax.numpy_rank_promotion('raise'))

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
      # agent tokens: row 0 {1, 3}, row 1 {5}, row 2 none
      ('token-mean', None, (1 + 3 + 5) / 3),
      ('seq-mean-token-sum', None, ((1 + 3) + 5) / 2),
      ('seq-mean-token-mean', None, ((1 + 3) / 2 + 5) / 2),
      ('seq-mean-token-sum-norm', None, (1 + 3 + 5) / 2 / 4),  # T = 4
      ('seq-mean-token-sum-norm', 10, (1 + 3 + 5) / 2 / 10),
  )
  def test_by_hand(self, mode, norm_length, expected):
    x = jnp.array([[1.0, 70.0, 3.0, 80.0], [90.0, 5.0, 60.0, 50.0], [7.0, 8.0, 9.0, 6.0]])
    mask = jnp.array([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    got = self.variant(lambda x, m: losses.aggregate(x, m, mode, norm_length))(x, mask)
    chex.assert_shape(got, ())
    chex.assert_trees_all_close(got, jnp.array(expected), rtol=1e-12)

  @parameterized.parameters(*MODES)
  def test_against_the_oracle(self, mode):
    batch = oracle.random_batch(0)
    x, m = batch.values, batch.action_mask
    chex.assert_trees_all_close(
        losses.aggregate(x, m, mode), oracle.aggregate(x, m, mode), rtol=1e-12
    )
    chex.assert_trees_all_close(
        losses.aggregate(x, m, mode, 5), oracle.aggregate(x, m, mode, 5), rtol=1e-12
    )
    weights = losses.aggregation_weights(m, mode)
    chex.assert_trees_all_close(np.sum(weights * x), oracle.aggregate(x, m, mode), rtol=1e-12)
    np.testing.assert_array_equal(np.asarray(weights)[m == 0], 0.0)

  @parameterized.parameters(*MODES)
  def test_micro_batches_add_up_exactly(self, mode):
    """Weights of the whole mini-batch make a sum over any cut of the rows exact; a mean of the
    parts' means is another number, as rows differ in length and one is empty."""
    batch = oracle.random_batch(1)
    x, m = batch.values, batch.action_mask
    weights = losses.aggregation_weights(m, mode)
    whole = losses.aggregate(x, m, mode)
    for cut in ([0, 1, 6], [0, 2, 4, 6], [0, 3, 6]):
      parts = sum(jnp.sum(weights[i:j] * x[i:j]) for i, j in zip(cut, cut[1:]))
      chex.assert_trees_all_close(parts, whole, rtol=1e-12)
    if mode != 'seq-mean-token-sum-norm':
      means = (losses.aggregate(x[:1], m[:1], mode) + losses.aggregate(x[1:], m[1:], mode)) / 2
      self.assertGreater(abs(means - whole), 1e-3)

  @parameterized.parameters(*MODES)
  def test_a_batch_without_agent_tokens_weighs_nothing(self, mode):
    x, m = np.ones((2, 3)), np.zeros((2, 3))
    self.assertEqual(float(losses.aggregate(x, m, mode)), 0.0)
    gradient = jax.grad(lambda x: losses.aggregate(x, m, mode))(jnp.array(x))
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))

  def test_empty_rows_are_no_sequences(self):
    batch = oracle.random_batch(2)
    kept = batch.action_mask.any(axis=1)
    for mode in MODES:
      chex.assert_trees_all_close(
          losses.aggregate(batch.values, batch.action_mask, mode),
          losses.aggregate(batch.values[kept], batch.action_mask[kept], mode),
          rtol=1e-12,
      )

  @parameterized.parameters(
      # Turns of row 0: (1, 3) and (8); of row 1: (5). Their means are 2, 8 and 5.
      ('turn-mean-token-mean', (2 + 8 + 5) / 3),
      ('seq-mean-turn-mean', ((2 + 8) / 2 + 5) / 2),
  )
  def test_means_over_turns_by_hand(self, mode, expected):
    x = jnp.array([[1.0, 3.0, 70.0, 8.0], [90.0, 5.0, 60.0, 50.0], [7.0, 8.0, 9.0, 6.0]])
    turn_ids = jnp.array([[1, 1, 0, 2], [0, 1, 0, 0], [0, 0, 0, 0]])
    got = losses.aggregate(x, (turn_ids > 0) * 1.0, mode, turn_ids=turn_ids)
    chex.assert_trees_all_close(got, jnp.array(expected), rtol=1e-12)

  def test_turn_with_all_tokens_dropped_vanishes(self):
    x, turn_ids = jnp.array([[1.0, 3.0, 70.0, 8.0]]), jnp.array([[1, 1, 0, 2]])
    got = losses.aggregate(x, jnp.array([[1.0, 1.0, 0, 0]]), 'seq-mean-turn-mean', None, turn_ids)
    chex.assert_trees_all_close(got, jnp.array(2.0), rtol=1e-12)

  @parameterized.parameters(*losses.AGGREGATIONS)
  def test_episode_weight_is_independent_of_rows(self, mode):
    """Turns (1, 3), (8) and (5) of one episode against (7) and (9) of the other."""
    whole = jnp.array([[1.0, 3.0, 8.0, 5.0], [7.0, 0.0, 9.0, 0.0]])
    whole_ids = jnp.array([[1, 1, 2, 3], [1, 0, 2, 0]])
    parts = jnp.array([[1.0, 3, 0, 0], [7, 0, 9, 0], [0, 8, 0, 0], [5, 0, 0, 0], [0, 0, 0, 0]])
    part_ids = jnp.array([[1, 1, 0, 0], [1, 0, 2, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    episode_ids = jnp.array([4, 0, 4, 4, -1])  # and a row of padding
    expected = losses.aggregate(whole, whole_ids > 0, mode, turn_ids=whole_ids)
    mask = part_ids > 0
    got = losses.aggregate(parts, mask, mode, turn_ids=part_ids, episode_ids=episode_ids)
    chex.assert_trees_all_close(got, expected, rtol=1e-12)
    batch = mock.Mock(
        action_mask=mask,
        loss_mask=None,
        turn_ids=part_ids,
        is_weights=None,
        imitation_mask=None,
        row_weights=None,
        episode_ids=episode_ids,
    )
    variant = variants.Variant('token_gae', 'token', aggregation=mode)
    weights = filters.weights(batch, variant).token  # an optimizer step uses them
    chex.assert_trees_all_close(jnp.sum(weights * parts), expected, rtol=1e-6)
    self.assertEqual(int(losses.first_rows(mask, episode_ids).sum()), 2)

  @parameterized.parameters(*losses.AGGREGATIONS)
  def test_episodes_of_one_row_weigh_as_rows_do(self, mode):
    turn_ids = jnp.array([[1, 1, 0, 2], [0, 1, 0, 0], [0, 0, 0, 0], [1, 2, 3, 3]])
    weights = lambda ids: losses.aggregation_weights(turn_ids > 0, mode, None, turn_ids, ids)
    np.testing.assert_array_equal(weights(jnp.array([3, 1, 2, 0])), weights(None))

  def test_an_unknown_mode_is_refused(self):
    with self.assertRaises(ValueError):
      losses.aggregate(np.ones((1, 1)), np.ones((1, 1)), 'sum')


class ValueLossTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    self.enter_context(jax.numpy_rank_promotion('raise'))

  @chex.variants(with_jit=True, without_jit=True)
  def test_by_hand(self):
    # old value 1, clip 0.5 -> [0.5, 1.5]; return 2:
    # v 1.2: (0.8)^2 = 0.64 both ways                       -> 0.32
    # v 1.9: max((0.1)^2, (1.5 - 2)^2 = 0.25) = 0.25        -> 0.125, clipped
    # v 0.0: max(4, (0.5 - 2)^2 = 2.25) = 4                 -> 2, the max keeps the worse
    values = jnp.array([[1.2, 1.9, 0.0]])
    old, returns = jnp.ones((1, 3)), jnp.full((1, 3), 2.0)

    def clipped(v):
      return losses.value_loss(v, old, returns, 0.5)

    def plain(v):
      return losses.value_loss(v, old, returns, None)

    chex.assert_trees_all_close(self.variant(clipped)(values), jnp.array([[0.32, 0.125, 2.0]]))
    chex.assert_trees_all_close(self.variant(plain)(values), jnp.array([[0.32, 0.005, 2.0]]))
    # d/dv = v - R where the plain square is the larger, 0 where the clipped one is
    gradient = self.variant(jax.grad(lambda v: jnp.sum(clipped(v))))(values)
    chex.assert_trees_all_close(gradient, jnp.array([[-0.8, 0.0, -2.0]]))
    gradient = self.variant(jax.grad(lambda v: jnp.sum(plain(v))))(values)
    chex.assert_trees_all_close(gradient, jnp.array([[-0.8, -0.1, -2.0]]))

  def test_unmoved_values_get_the_whole_gradient(self):
    """The first mini-batch: v = old_v, both squares tie, and a tie must not halve the gradient."""
    values, returns = jnp.array([[0.3, -1.0]]), jnp.array([[1.0, 1.0]])
    got = jax.grad(lambda v: jnp.sum(losses.value_loss(v, values, returns, 0.5)))(values)
    chex.assert_trees_all_close(got, values - returns)

  def test_rounding_clips_nothing_within_range(self):
    rng = np.random.default_rng(0)
    old, values, returns = rng.normal(0, 0.05, (3, 1, 1000)).astype(np.float32)
    got = jax.jit(losses.value_loss, static_argnums=3)(values, old, returns, 0.5)
    self.assertEqual(got.dtype, np.float32)
    np.testing.assert_array_equal(got, losses.value_loss(values, old, returns))


class DppoTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_tokens_that_are_certain(self, jit):
    """In nats: 2 from p_old = 1 to e^-2; 5.9e-5 from 1 - 1e-5 to 1."""
    row = variants.Variant('token_gae', 'token', 'dppo_kl', clip_low=0.05, clip_high=0.05)
    stopped_at = lambda *arrays: losses.surrogate(*arrays, row)[1]
    logp, old_logp = jnp.array([-2.0, 0.0, 0.0]), jnp.array([0.0, -1e-5, 0.0])
    arrays = jnp.exp(logp - old_logp), logp, jnp.array([-1.0, 1.0, 1.0])
    stopped = (jax.jit(stopped_at) if jit else stopped_at)(*arrays)
    np.testing.assert_array_equal(stopped, [True, False, False])


class KlTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    self.enter_context(jax.numpy_rank_promotion('raise'))

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
      # logp - ref_logp = ln 2 and -ln 4
      ('k1', (np.log(2), -np.log(4))),
      ('k2', (0.5 * np.log(2) ** 2, 0.5 * np.log(4) ** 2)),
      # exp(-ln 2) + ln 2 - 1 = ln 2 - 1/2;  exp(ln 4) - ln 4 - 1 = 3 - ln 4
      ('k3', (np.log(2) - 0.5, 3 - np.log(4))),
  )
  def test_by_hand(self, estimator, expected):
    logp, ref_logp = jnp.log(jnp.array([[0.5, 0.1]])), jnp.log(jnp.array([[0.25, 0.4]]))
    got = self.variant(lambda x, y: losses.kl(x, y, estimator))(logp, ref_logp)
    chex.assert_trees_all_close(got, jnp.array([expected]), rtol=1e-12)

  def test_expectations(self):
    """Under p itself, k1 and k3 average to KL(p, q) exactly, and k3 is nowhere negative."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    exact = np.sum(p * np.log(p / q))
    for estimator in 'k1', 'k3':
      each = losses.kl(np.log(p)[None], np.log(q)[None], estimator)[0]
      chex.assert_trees_all_close(jnp.sum(p * each), exact, rtol=1e-12)
    gaps = np.linspace(-3, 3, 61)[None]
    k3 = losses.kl(gaps, np.zeros_like(gaps), 'k3')
    self.assertGreaterEqual(float(jnp.min(k3)), 0.0)
    self.assertGreater(float(jnp.min(jnp.where(jnp.abs(gaps) > 0.05, k3, 1.0))), 0.0)

  @parameterized.parameters('k1', 'k2', 'k3')
  def test_gradient(self, estimator):
    # k1: 1;  k2: the gap;  k3: 1 - exp(-gap)
    gap = np.array([[0.7, -0.3, 0.0]])
    expected = {'k1': np.ones_like(gap), 'k2': gap, 'k3': 1 - np.exp(-gap)}[estimator]
    got = jax.grad(lambda x: jnp.sum(losses.kl(x, np.zeros_like(gap), estimator)))(jnp.array(gap))
    _assert_close(got, expected, atol=1e-12)

  def test_adaptive_coefficient_by_hand(self):
    # target 0.1, horizon 100, 20 episodes: error clipped to +-0.2
    # kl 0.11: 0.5 * (1 + 0.1 * 20 / 100) = 0.51;  kl 9: 0.5 * 1.04;  kl 0: 0.5 * 0.96
    for measured, expected in (0.11, 0.51), (9.0, 0.52), (0.0, 0.48), (0.1, 0.5):
      got = losses.adaptive_kl(0.5, measured, target=0.1, horizon=100, episodes=20)
      self.assertAlmostEqual(float(got), expected, places=9)

  def test_adaptive_coefficient_never_becomes_0(self):
    for episodes in 500, 501, 10_000:  # at 500 of 100 the formula without a bound gives 0
      got = losses.adaptive_kl(0.5, 0.0, target=0.1, horizon=100, episodes=episodes)
      self.assertAlmostEqual(float(got), 0.4, places=9)


if __name__ == '__main__':
  absltest.main()
