"""The divisor max(1, K ||C||), which is the floor rule for an objective that is multiplied by K.

The norm of C has the units of the objective. An objective that is K times as large has a norm that
is K times as large, so a rule with a constant in it depends on K. The grids
`scaled` use these functions. A study identifies a custom function by its source file, so nothing
else belongs into this file.
"""

import jax.numpy as jnp


def floor_3(g_norm, c_norm, any_clipped):
  """Returns max(1, 3 ||C||)."""
  del g_norm, any_clipped
  return jnp.maximum(1.0, 3.0 * c_norm)


def floor_10(g_norm, c_norm, any_clipped):
  """Returns max(1, 10 ||C||)."""
  del g_norm, any_clipped
  return jnp.maximum(1.0, 10.0 * c_norm)
