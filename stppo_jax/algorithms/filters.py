"""Filters: which of the agent's tokens the policy's loss counts, and with which weight.

A batch and a variant come in, and `loss_mask` and `is_weights` of the batch come out. A dropped
token is neither in the sums nor in the denominators of policy loss, entropy and KL. Choice: it
stays in the ratio of its turn, in the group's baseline and in the critic's loss, because it is
still a valid observation of the environment.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import losses
from stppo_jax.algorithms import off_policy
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.types import TurnBatch


def apply(batch: TurnBatch, variant: BaseVariant) -> TurnBatch:
  """Returns the batch with `loss_mask` and `is_weights` [B,T]; None where nothing changes."""
  weights = None
  if variant.rollout_is != 'none':
    log_w = _log_weights(batch, variant.rollout_is)
    weights = off_policy.truncated(log_w, variant.rollout_is_threshold, variant.rollout_is_low)
    if variant.rollout_is_normalize:
      weights = off_policy.normalised(weights, batch.action_mask, variant.rollout_is)
  return dataclasses.replace(batch, loss_mask=loss_mask(batch, variant), is_weights=weights)


def loss_mask(batch: TurnBatch, variant: BaseVariant) -> jax.Array | None:
  """Returns 1 for the tokens [B,T] that the policy's loss counts; None: all agent tokens.

  mask_truncated       drops episodes that ended at a limit, because their reward is unknown. A
                       program may go on after a cut turn, so that its other rows stay
  mask_zero_advantage  drops episodes without any advantage, such as those of a group with equal
                       scores. They add nothing to the surrogate, but they count in its mean. Their
                       KL penalty and entropy bonus are dropped too, so that nothing holds the
                       policy near its reference on these tasks (arXiv 2604.06159).
  rollout_rs           drops tokens on which sampler and trainer disagree, see `off_policy.accepted`
  """
  conditions = []
  if variant.mask_truncated:
    assert batch.truncated is not None
    conditions.append(batch.truncated[:, None] == 0)
  if variant.mask_zero_advantage:
    has_advantage = (batch.advantages != 0) & (batch.action_mask > 0)
    conditions.append(has_advantage.any(axis=1, keepdims=True))
  if variant.rollout_rs != 'none':
    log_w = _log_weights(batch, variant.rollout_rs)
    accepted = off_policy.accepted(log_w, variant.rollout_rs_low, variant.rollout_rs_high)
    conditions.append(accepted)
  if not conditions:
    return None
  mask = batch.action_mask > 0
  for condition in conditions:
    mask &= condition
  return mask.astype(jnp.float32)


def _log_weights(batch, level):
  """Returns log w [B,T] of the weights from the sampler to old_logp, see `off_policy`."""
  assert batch.behaviour_logp is not None
  return off_policy.log_weights(
      batch.old_logp, batch.behaviour_logp, batch.action_mask, batch.turn_ids, level
  )


class LossWeights(NamedTuple):
  """The agent tokens of a mini-batch, and the weights of its tokens in its sums. All are [B,T]."""

  mask: jax.Array  # 1 for agent tokens
  token: jax.Array  # weights of entropy and KL
  policy: jax.Array  # weights of the surrogate: `token` times the importance weights
  value: jax.Array  # weights of the critic's loss
  imitation: jax.Array | None = None  # weights of the imitation loss; None: no demonstrations


def weights(batch: TurnBatch, variant: BaseVariant) -> LossWeights:
  """Returns the weights of a mini-batch's tokens in its sums.

  `row_weights` multiply the terms of the policy's loss, and no denominator. So the gradient is the
  sum of the gradients of all rows without weights, each times its weight. Choice: the critic's loss
  has no such weights, because its targets do not depend on them.
  """
  mask = batch.action_mask.astype(jnp.float32)
  loss_mask = mask if batch.loss_mask is None else batch.loss_mask
  token = losses.variant_weights(loss_mask, batch, variant)
  if batch.row_weights is not None:
    token = token * batch.row_weights[:, None]
  policy = token if batch.is_weights is None else token * batch.is_weights
  value = losses.aggregation_weights(mask, 'token-mean')
  imitation = None
  if batch.imitation_mask is not None:
    imitation = losses.aggregation_weights(batch.imitation_mask, 'token-mean')
    if batch.row_weights is not None:
      imitation = imitation * batch.row_weights[:, None]
  return LossWeights(mask, token, policy, value, imitation)
