"""Filters: which of the agent's tokens the policy's loss counts, and with which weight.

TurnBatch and Variant in; `loss_mask` and `is_weights` of the batch out. A token that is filtered
out is in neither the sums nor the denominators of policy loss, entropy and KL. Choice: it stays in
the ratio of its turn, in the group's baseline and in the critic's loss, since what it says of the
environment is true.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import losses
from stppo_jax.algorithms import off_policy


def apply(batch: Any, variant: Any) -> Any:
  """Returns the batch with `loss_mask` and `is_weights` [B,T]; None where nothing changes."""
  gap = (batch.old_logp, batch.behaviour_logp, batch.action_mask, batch.turn_ids)
  weights = None
  if variant.rollout_is != 'none':
    weights = off_policy.truncated_weights(
        *gap, variant.rollout_is, variant.rollout_is_threshold, variant.rollout_is_low
    )
    if variant.rollout_is_normalize:
      weights = off_policy.normalised(weights, batch.action_mask, variant.rollout_is)
  return dataclasses.replace(batch, loss_mask=loss_mask(batch, variant), is_weights=weights)


def loss_mask(batch: Any, variant: Any) -> jax.Array | None:
  """Returns 1 for the tokens [B,T] that the policy's loss counts; None: all of the agent's.

  mask_truncated       drops episodes that ended at a limit: what they would have earned is unknown
  mask_zero_advantage  drops episodes without any advantage, as of a group with equal scores. They
                       add nothing to the surrogate's sum and count in its mean. They also carry
                       the KL penalty and the entropy bonus: without them nothing holds the policy
                       near its reference on these questions (arXiv 2604.06159)
  rollout_rs           drops what sampler and trainer disagree about, see `off_policy.accepted`
  """
  kept = []
  if variant.mask_truncated:
    kept.append(batch.truncated[:, None] == 0)
  if variant.mask_zero_advantage:
    has_any = (batch.advantages != 0) & (batch.action_mask > 0)
    kept.append(has_any.any(axis=1, keepdims=True))
  if variant.rollout_rs != 'none':
    gap = (batch.old_logp, batch.behaviour_logp, batch.action_mask, batch.turn_ids)
    bounds = (variant.rollout_rs_low, variant.rollout_rs_high)
    kept.append(off_policy.accepted(*gap, variant.rollout_rs, *bounds))
  if not kept:
    return None
  result = batch.action_mask > 0
  for condition in kept:
    result &= condition
  return result.astype(jnp.float32)


def weights(batch: Any, variant: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Returns a mini-batch's mask and the weights of its tokens in its sums, all [B,T].

  The weights are of entropy and KL, of the surrogate (the same times `is_weights`), and of the
  critic's loss.
  """
  mask = batch.action_mask.astype(jnp.float32)
  counted = mask if batch.loss_mask is None else batch.loss_mask
  of_tokens = losses.aggregation_weights(
      counted, variant.aggregation, variant.norm_length or None, batch.turn_ids, batch.episode_ids
  )
  of_policy = of_tokens if batch.is_weights is None else of_tokens * batch.is_weights
  return mask, of_tokens, of_policy, losses.aggregation_weights(mask, 'token-mean')
