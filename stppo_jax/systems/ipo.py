"""IPO (Azar et al., arXiv 2310.12036, paper): a regression of the log-ratios of pairs.

The pairs are those of dpo.py.
"""

import jax
import jax.numpy as jnp

from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.systems import dpo


def square(h: jax.Array, variant: BaseVariant) -> jax.Array:
  """Returns -(h - 1 / (2 beta))^2 of the pairs' log-ratios (arXiv 2310.12036, eq. 17)."""
  target = 1 / (2 * variant.beta)
  return -jnp.square(h - target)


IPO = dpo.pair_objective(square, 'ref_logp')
ITERATIVE_IPO = dpo.pair_objective(square, 'old_logp')
