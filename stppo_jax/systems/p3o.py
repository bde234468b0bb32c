"""Pairwise PPO (Wu et al., arXiv 2310.00212): all pairs of a group.

Equation 6 was read in a review. The joint clip of P3O-V2 is second-hand.
"""

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import losses
from stppo_jax.algorithms import objectives
from stppo_jax.algorithms import segments
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import RowObjective
from stppo_jax.types import TurnBatch


def p3o(
    outputs: objectives.TokenOutputs, batch: TurnBatch, variant: BaseVariant
) -> tuple[jax.Array, jax.Array]:
  """Returns Pairwise PPO's terms (arXiv 2310.00212, eq. 6).

  mean over i, j of  sg(w_i w_j) min( d h, d clip(h, -clip_low, clip_high) )

  w_i = exp(l_i - o_i),   h = (log w_i - log w_j) / 2,   d = a_i - a_j

  The mean is over the other episodes j of the group of i, and then over i. At the old policy the
  gradient is that of RLOO. A number that is added to all scores of a group changes nothing. The KL
  to the reference is in the reward. Choice: log w_i, and log w_i w_j, are kept within +-20.
  """
  is_first, members, scores = objectives.groups(batch)
  log_ratio = objectives.episode_sums(outputs.logp - batch.old_logp, batch)
  log_w = segments.bounded(log_ratio)
  own = log_w[:, None]
  other = log_w[None, :]
  log_weight = segments.bounded(own + other)
  weight = jnp.exp(log_weight)
  weight = jax.lax.stop_gradient(weight)
  h = (own - other) / 2
  d = scores[:, None] - scores[None, :]
  free = d * h
  clipped_h = jnp.clip(h, -variant.clip_low, variant.clip_high)
  bounded = d * clipped_h
  value = weight * jnp.minimum(free, bounded)
  num_rows = len(scores)
  is_itself = jnp.eye(num_rows, dtype=bool)
  is_pair = members & is_first[:, None] & ~is_itself
  num_others = is_pair.sum(axis=1)
  num_others = jnp.maximum(num_others, 1)
  num_episodes = jnp.maximum(is_first.sum(), 1)
  value_of_pairs = jnp.where(is_pair, value, 0)
  row_values = value_of_pairs.sum(axis=1) / num_others / num_episodes
  clipped_pairs = is_pair & (bounded < free)
  # The first row of an episode stands for all of its rows.
  num_clipped = losses.episode_sums(clipped_pairs, batch.episode_ids)
  is_clipped = num_clipped[:, None] > 0
  return row_values, jnp.broadcast_to(is_clipped, outputs.logp.shape)


P3O = RowObjective(p3o, reads=('clip_low', 'clip_high'))
