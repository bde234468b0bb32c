"""Segments: ids, means and importance ratios of tokens, turns and sequences."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.algorithms import segments
from tests.support import oracle

LEVELS = ('token', 'turn', 'sequence')


def _assert_close(got, expected, atol):
  """An absolute bound alone: chex and NumPy would add a relative 1e-6 or 1e-7 by default."""
  chex.assert_trees_all_close(got, expected, rtol=0, atol=atol)


def _mean(x, mask, turn_ids, level):
  ids, num_segments = segments.segment_ids(level, mask, turn_ids)
  return segments.segment_mean(x, ids, mask, num_segments)


def _ratio(logp, old_logp, mask, turn_ids, level):
  ids, num_segments = segments.segment_ids(level, mask, turn_ids)
  return segments.importance_ratio(logp, old_logp, mask, ids, num_segments)


class SegmentsTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    self.enter_context(jax.numpy_rank_promotion('raise'))

  @chex.variants(with_jit=True, without_jit=True)
  def test_mean_by_hand(self):
    # row 0: segment 1 holds 2, 4 -> 3; the masked-out 100 is not counted; segment 0 holds 5
    # row 1: the segments of another row are other segments: segment 1 holds 8, segment 0 holds 1, 2
    x = jnp.array([[2.0, 100.0, 4.0, 5.0], [8.0, 1.0, 2.0, 7.0]])
    ids = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0]])
    mask = jnp.array([[1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    got = self.variant(lambda *args: segments.segment_mean(*args, 2))(x, ids, mask)
    chex.assert_trees_all_close(got, jnp.array([[3.0, 0.0, 3.0, 5.0], [8.0, 1.5, 1.5, 0.0]]))

  @chex.variants(with_jit=True, without_jit=True)
  def test_ratio_by_hand(self):
    # log ratios of turn 1: ln 4, 0 -> geometric mean 2 (the arithmetic mean would be 2.5);
    # turn 2: ln 3; the sequence: (ln 4 + 0 + ln 3) / 3 -> 12^(1/3)
    turn_ids = jnp.array([[0, 1, 1, 0, 2]])
    mask = (turn_ids > 0).astype(jnp.float64)
    gap = jnp.log(jnp.array([[9.0, 4.0, 1.0, 9.0, 3.0]]))
    expected = {
        'token': [[1.0, 4.0, 1.0, 1.0, 3.0]],
        'turn': [[1.0, 2.0, 2.0, 1.0, 3.0]],
        'sequence': [[1.0, 12 ** (1 / 3), 12 ** (1 / 3), 1.0, 12 ** (1 / 3)]],
    }
    for level in LEVELS:
      got = self.variant(lambda a, m, k, level=level: _ratio(a, jnp.zeros_like(a), m, k, level))(
          gap, mask, turn_ids
      )
      chex.assert_trees_all_close(got, jnp.array(expected[level]), rtol=1e-12)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.product(level=LEVELS, seed=(0, 1))
  def test_against_the_oracle(self, level, seed):
    batch = oracle.random_batch(seed)
    logp = oracle.token_logp(batch.features, batch.weights, batch.tokens)
    got = self.variant(lambda *args: _mean(*args, level))(logp, batch.action_mask, batch.turn_ids)
    _assert_close(got, oracle.segment_mean(logp, batch.turn_ids, level), atol=1e-12)
    got = self.variant(lambda *args: _ratio(*args, level))(
        logp, batch.old_logp, batch.action_mask, batch.turn_ids
    )
    chex.assert_trees_all_close(
        got, oracle.ratio(logp, batch.old_logp, batch.turn_ids, level), rtol=1e-11
    )

  @parameterized.parameters(*LEVELS)
  def test_gradient_goes_through_the_mean(self, level):
    """d w^k / d logp_s = w^k / |y^k| for every s of the turn; 0 for the others."""
    batch = oracle.random_batch(2)
    logp = oracle.token_logp(batch.features, batch.weights, batch.tokens)
    w = oracle.ratio(logp, batch.old_logp, batch.turn_ids, level)
    expected = np.zeros(logp.shape + logp.shape)
    for b, row in enumerate(oracle.segments(batch.turn_ids, level)):
      for segment in row:
        for t in segment:
          expected[b, t, b, segment] = w[b, t] / len(segment)
    got = jax.jacobian(
        lambda x: _ratio(x, batch.old_logp, batch.action_mask, batch.turn_ids, level)
    )(logp)
    _assert_close(got, expected, atol=1e-11)

  def test_levels_agree_in_limiting_cases(self):
    batch = oracle.random_batch(3)
    logp = oracle.token_logp(batch.features, batch.weights, batch.tokens)
    one_token_turns = np.cumsum(batch.action_mask, axis=1).astype(int) * (batch.turn_ids > 0)
    one_turn = (batch.turn_ids > 0).astype(int)
    args = logp, batch.old_logp, batch.action_mask
    chex.assert_trees_all_close(
        _ratio(*args, one_token_turns, 'turn'), _ratio(*args, batch.turn_ids, 'token'), rtol=1e-12
    )
    chex.assert_trees_all_close(
        _ratio(*args, one_turn, 'turn'), _ratio(*args, batch.turn_ids, 'sequence'), rtol=1e-12
    )

  def test_chunks_count_agent_tokens_of_any_turn(self):
    turn_ids = jnp.array([[0, 1, 1, 0, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0, 0, 0]])
    mask = (turn_ids > 0).astype(jnp.float64)
    ids = lambda length: segments.segment_ids('chunk', mask, turn_ids, length)[0]
    np.testing.assert_array_equal(ids(2)[0], [0, 1, 1, 0, 2, 2, 3, 0])
    np.testing.assert_array_equal(ids(3)[0], [0, 1, 1, 0, 1, 2, 2, 0])
    np.testing.assert_array_equal(ids(3)[1], [1, 0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(ids(8), segments.segment_ids('sequence', mask, turn_ids)[0])

  @chex.variants(with_jit=True, without_jit=True)
  def test_equal_labels_of_a_row_are_a_segment(self):
    labels = jnp.array([[7, -2, 7, 100, -2, 5], [3, 3, 3, 3, 3, 3]])
    mask = jnp.array([[1.0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 0, 1]])
    ids = self.variant(lambda *args: segments.from_labels(*args)[0])(labels, mask)
    np.testing.assert_array_equal(ids, [[3, 1, 3, 0, 1, 2], [0, 1, 1, 0, 0, 1]])
    self.assertEqual(segments.from_labels(labels, mask)[1], 7)

  def test_product_is_ratio_of_segment_probabilities(self):
    """Turns (2, .5, 4) and (.5): products 4 and .5; the gradient of each token is the ratio."""
    turn_ids = jnp.array([[1, 0, 1, 1, 2]])
    log_ratio = jnp.log(jnp.array([[2.0, 9.0, 0.5, 4.0, 0.5]]))
    mask = (turn_ids > 0) * 1.0

    def total(x):
      ids, count = segments.segment_ids('turn', mask, turn_ids)
      ratio = segments.importance_ratio(x, 0 * x, mask, ids, count, product=True)
      return ratio.sum(), ratio

    gradient, ratio = jax.grad(total, has_aux=True)(log_ratio)
    _assert_close(ratio, jnp.array([[4.0, 1.0, 4.0, 4.0, 0.5]]), atol=1e-9)
    _assert_close(gradient, jnp.array([[12.0, 0.0, 12.0, 12.0, 0.5]]), atol=1e-9)

  @parameterized.product(level=LEVELS, dtype=(np.float32, np.float64))
  def test_first_mini_batch_has_ratio_exactly_one(self, level, dtype):
    batch = oracle.random_batch(4)
    logp = oracle.token_logp(batch.features, batch.weights, batch.tokens).astype(dtype)
    got = _ratio(logp, logp, batch.action_mask.astype(dtype), batch.turn_ids, level)
    np.testing.assert_array_equal(got, np.ones_like(logp))

  @parameterized.parameters(*LEVELS)
  def test_masked_tokens_never_leak(self, level):
    """Padding may hold anything, -inf included, without reaching a ratio or a gradient."""
    batch = oracle.random_batch(5)
    logp = oracle.token_logp(batch.features, batch.weights, batch.tokens)
    dirty = np.where(batch.action_mask > 0, logp, -np.inf)

    def total(x):
      return jnp.sum(_ratio(x, batch.old_logp, batch.action_mask, batch.turn_ids, level))

    chex.assert_trees_all_close(total(jnp.array(dirty)), total(jnp.array(logp)), rtol=1e-12)
    gradient = jax.grad(total)(jnp.array(dirty))
    chex.assert_tree_all_finite(gradient)
    np.testing.assert_array_equal(np.asarray(gradient)[batch.action_mask == 0], 0.0)


if __name__ == '__main__':
  absltest.main()
