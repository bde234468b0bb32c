"""Masks drawn; attention against sums in float64; every backend against the plain one."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import attention


def make_inputs(rows=2, length=6, heads=4, kv_heads=2, width=8, seed=0):
  """q [B,T,N,H], k and v [B,T,M,H]."""
  keys = jax.random.split(jax.random.key(seed), 3)
  return tuple(jax.random.normal(key, (rows, length, n, width))
               for key, n in zip(keys, (heads, kv_heads, kv_heads)))


class MaskTest(absltest.TestCase):

  def test_masks_drawn(self):
    drawn = lambda *args: np.asarray(attention.causal_mask(*args))[:, 0, 0].astype(int).tolist()
    self.assertEqual(drawn(3), [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]])
    segments = jnp.array([[5, 5, 7], [1, 2, 2]])
    rows = [[[1, 0, 0], [1, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 1, 1]]]
    self.assertEqual(drawn(3, segments), rows)
    self.assertEqual(drawn(3, segments, 1, 2), [row[1:] for row in rows])

  def test_a_cache_drawn(self):
    slots = jnp.array([[1, 2], [0, 1]])  # two rows of lengths 1 and 0 read two tokens each
    np.testing.assert_array_equal(
        attention.cache_mask(slots, 4)[:, 0, 0],
        [[[1, 1, 0, 0], [1, 1, 1, 0]], [[1, 0, 0, 0], [1, 1, 0, 0]]])


class PlainTest(parameterized.TestCase):

  @parameterized.parameters(0, 2, 3)
  def test_equals_sums_in_float64(self, chunk):
    q, k, v = make_inputs()
    segments = np.array([[1, 1, 1, 2, 2, 3], [4, 4, 0, 0, 4, 4]])  # 4 comes back: one segment still
    actual = attention.causal(q, k, v, jnp.asarray(segments), chunk)
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    for b, t, n in np.ndindex(2, 6, 4):
      seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
      weights = np.exp([q[b, t, n] @ k[b, s, n // 2] / np.sqrt(8) for s in seen])
      expected = sum(w * v[b, s, n // 2] for w, s in zip(weights / weights.sum(), seen))
      np.testing.assert_allclose(actual[b, t, n], expected, atol=1e-6)


if __name__ == '__main__':
  absltest.main()
