"""BAD (arXiv 2405.15821): GAE over tokens that discounts between turns and not inside them."""

import chex
import jax
import jax.numpy as jnp

from stppo_jax.algorithms import advantages


def bad_gae(
    rewards: jax.Array,
    values: jax.Array,
    turn_ids: jax.Array,
    action_mask: jax.Array,
    gamma: float,
    lam: float,
) -> tuple[jax.Array, jax.Array]:
  """Returns token GAE that discounts only at the ends of turns (BAD, arXiv 2405.15821).

  gamma and lambda apply at the last token of a turn. Inside a turn both are 1, so that credit does
  not depend on the number of tokens of an action.
  """
  chex.assert_equal_shape([rewards, values, turn_ids, action_mask])
  mask = action_mask.astype(values.dtype)
  changes = jnp.diff(turn_ids, axis=1, append=-1)
  is_end = changes != 0
  gammas = jnp.where(is_end, gamma, 1.0)
  lams = jnp.where(is_end, lam, 1.0)
  return advantages.gae(rewards, values, mask, gammas, lams)


def _bad_gae(batch, gamma, lam):
  rewards = batch.rewards
  turn_ids = batch.turn_ids
  mask = batch.action_mask
  return bad_gae(rewards, batch.old_values, turn_ids, mask, gamma, lam)


BAD_GAE = advantages.from_gae(_bad_gae)
