"""GEM (arXiv 2510.01051): the return to go of each turn, normalised over the batch (ReBN)."""

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import advantages as advantages_lib
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import Estimator
from stppo_jax.types import TurnBatch


def turn_returns(batch: TurnBatch, variant: BaseVariant) -> tuple[jax.Array, jax.Array]:
  """Returns the return to go of each turn, whitened over the batch [B,T], twice."""
  rewards = batch.rewards
  values = jnp.zeros_like(rewards)
  turn_ids = batch.turn_ids
  num_turns = turn_ids.shape[1]
  gamma = variant.gamma
  returns, _ = advantages_lib.turn_gae(rewards, values, turn_ids, num_turns, gamma, 1.0)
  advantages = advantages_lib.whiten(returns, batch, 'turns')
  return advantages, advantages


TURN_RETURNS = Estimator(turn_returns)
