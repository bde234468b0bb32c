"""OSPO (arXiv 2507.15351): each turn is compared with the same turn of the group's episodes."""

import jax
import jax.numpy as jnp

from stppo_jax import types
from stppo_jax.algorithms import advantages as advantages_lib
from stppo_jax.algorithms import losses
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import Estimator
from stppo_jax.types import TurnBatch


def turn_zscore(batch: TurnBatch, variant: BaseVariant) -> tuple[jax.Array, jax.Array]:
  """Returns each turn's own reward as a z-score over the group's episodes at the same turn [B,T].

  A_k = (R_k - mean R_k) / std R_k,   R_k the sum of the rewards of turn k, without later rewards

  (authors' code, RS2002/OSPO `Worker.py`). The fleet of OSPO is a group: with several roles all
  rows of an episode are compared with each other, at turns of the same number.
  Choice: the standard deviation of `group_zscore`. Rewards that differ by rounding only get 0.
  Choice: sums over a group are matrix products. A sum under a mask would have [B,B,T] terms.
  """
  del variant
  num_roles = len(batch.roles or ('',))
  same = losses.is_same(batch.group_ids // num_roles)
  num_turns = batch.turn_ids.shape[1]
  rewards = batch.rewards * batch.action_mask
  rewards = advantages_lib.sum_turns(rewards, batch.turn_ids, num_turns)
  num_tokens = advantages_lib.sum_turns(batch.action_mask, batch.turn_ids, num_turns)
  has_turn = num_tokens > 0

  def over_group(x):
    return jnp.matmul(same.astype(x.dtype), x, precision='highest')

  counts = over_group(has_turn.astype(rewards.dtype))
  counts = jnp.maximum(counts, 1)
  mean = over_group(rewards) / counts
  centred = jnp.where(has_turn, rewards - mean, 0)
  squares = over_group(jnp.square(centred))
  std = jnp.sqrt(squares / jnp.maximum(counts - 1, 1))
  size = over_group(jnp.abs(rewards)) / counts
  has_spread = std > types.ROUNDING * size
  z_scores = jnp.where(has_spread, centred / (std + 1e-6), 0)
  advantages = advantages_lib.to_tokens(z_scores, batch.turn_ids)
  return advantages, advantages


TURN_ZSCORE = Estimator(turn_zscore, needs_groups=True, compares_scores=False)
