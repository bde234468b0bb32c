"""REINFORCE++ (arXiv 2501.03262): each token's advantage is its discounted return to go."""

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import advantages
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import Estimator
from stppo_jax.types import TurnBatch


def token_returns(batch: TurnBatch, variant: BaseVariant) -> tuple[jax.Array, jax.Array]:
  """Returns each token's discounted return to go [B,T], twice.

  G_t = r_t + gamma G_t',   t' the next AGENT token of the episode, in any turn.

  Choice: the final reward reaches every turn, as in the paper. verl (b178a3cd) sets the return to 0
  at each token that is not the agent's, so that a reward reaches only the tokens of its own turn.
  With one turn both are the same.
  """
  mask = batch.action_mask
  rewards = batch.rewards * mask
  values = jnp.zeros_like(rewards)
  gamma = variant.gamma
  returns, _ = advantages.token_gae(rewards, values, mask, gamma, 1.0)
  return returns, returns


TOKEN_RETURNS = Estimator(token_returns)
