"""CISPO (arXiv 2506.13585): the clipped ratio is a constant weight of each token's log-prob.

No token loses its gradient, because the clip bounds the weight and not the surrogate.
"""

import jax
import jax.numpy as jnp

from stppo_jax.algorithms.variant import BaseVariant


def cispo(
    ratio: jax.Array, logp: jax.Array, advantages: jax.Array, variant: BaseVariant
) -> tuple[jax.Array, jax.Array]:
  """Returns sg(clip(w)) A logp, and where the weight was clipped (arXiv 2506.13585)."""
  weight = jnp.clip(ratio, 1 - variant.clip_low, 1 + variant.clip_high)
  objective = jax.lax.stop_gradient(weight) * advantages * logp
  return objective, weight != ratio
