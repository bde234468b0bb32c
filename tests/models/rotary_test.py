"""Rotary positions: frequencies and a rotation by hand."""

from absl.testing import absltest
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import attention
from stppo_jax.models import rope_scaling


class RotaryTest(absltest.TestCase):

  def test_llama_3_frequencies_by_hand(self):
    # head_dim 4, theta 10^4: frequencies 1 and 0.01, wavelengths 6.28 and 628; original length 100.
    # 6.28 < 100 / 4 stays; 628 > 100 / 1 is stretched by 8: 0.01 / 8 = 0.00125.
    scaling = rope_scaling.Llama3Scaling(8.0, 1.0, 4.0, 100)
    radians = attention.frequencies(4, 10_000.0, scaling)
    np.testing.assert_allclose(radians, [1.0, 0.00125], rtol=1e-6)
    # original length 1256.6: 628.3 is half of it, 2 turns: (2-1)/(4-1) = 1/3 kept:
    # 0.01 * (1/3 + 2/3 / 8) = 0.0041667.
    scaling = rope_scaling.Llama3Scaling(8.0, 1.0, 4.0, 400 * np.pi)
    radians = attention.frequencies(4, 10_000.0, scaling)
    np.testing.assert_allclose(radians, [1.0, 0.01 * 5 / 12], rtol=1e-6)

  def test_a_quarter_turn_by_hand(self):
    # Two positions to a quarter turn: (1, 0) becomes (0, 1), then (-1, 0).
    rope = attention.angles(jnp.array([[0, 2, 4]]), np.array([np.pi / 4]))
    x = jnp.tile(jnp.array([1.0, 0.0]), (1, 3, 1, 1))
    np.testing.assert_allclose(
        attention.rotate(x, rope)[0, :, 0], [[1, 0], [0, 1], [-1, 0]], atol=1e-6
    )


if __name__ == '__main__':
  absltest.main()
