"""SuperHF (Mukobi et al., arXiv 2310.16763): cross-entropy of the best episode of each group."""

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import losses


def group_best(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns 1 for the best episode of each group and 0 for the others, [B] (SuperHF, 2310.16763).

  Among equal scores the episode that was sampled first is the best (authors' code,
  openfeedback/superhf `filtering.py`, top 1). A group of bad episodes also has a best one. The
  paper's number is second-hand.
  """
  same = losses.is_same(group_ids)
  best = advantages.over_groups(jnp.argmax, scores, same, -jnp.inf)
  rows = jnp.arange(len(scores))
  is_best = best == rows
  return is_best.astype(scores.dtype)


GROUP_BEST = advantages.from_groups(group_best, breaks_ties=True)
