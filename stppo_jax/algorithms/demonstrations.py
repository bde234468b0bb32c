"""Demonstrations in a batch of reinforcement learning: rows that the policy did not sample.

`rollout/demonstrations.py` plays them. An imitation loss (`Variant.imitation`) raises the log-probs
of their agent tokens:

  L = -(1/n) sum of logp over the n agent tokens of the step's demonstrations

The mean is over demonstrations alone, so that it does not depend on the number of sampled rows. It
is the loss of `run.py sft` (training/sft.py) at temperature 1. The mean is over an optimizer step:
with several steps per update, a token weighs more in a step with few demonstrations. A step without
any has no imitation loss.
Choice: the log-probs are those at `rollout.temperature`, as everywhere else in the trainer.
"""

import dataclasses

import jax
import jax.numpy as jnp

from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.types import TurnBatch


def sampled_mask(batch: TurnBatch) -> jax.Array:
  """Returns 1 for the agent's tokens [B,T] that the policy sampled."""
  if batch.imitation_mask is None:
    return batch.action_mask
  return batch.action_mask * (1 - batch.imitation_mask)


def split(batch: TurnBatch, logp: jax.Array, variant: BaseVariant) -> TurnBatch:
  """Returns the batch with `imitation_mask`; demonstrations leave the policy gradient.

  They are then like padding to advantages, baselines, filters, the critic and all metrics of the
  policy, because no agent sampled them. If the advantages use demonstrations, the rows stay. Then
  their ratios start at 1: their `behaviour_logp` is the trainer's `logp` [B,T] before the update.
  """
  if batch.demonstrated is None:
    return batch
  assert batch.behaviour_logp is not None
  is_demonstrated = batch.demonstrated > 0
  is_imitated = is_demonstrated[:, None]
  batch = dataclasses.replace(
      batch,
      imitation_mask=jnp.where(is_imitated, batch.action_mask, 0),
      behaviour_logp=jnp.where(is_imitated, logp * batch.action_mask, batch.behaviour_logp),
  )
  if variant.uses_demonstrations:
    return batch
  own_group = -1 - jnp.arange(len(batch.group_ids))
  return dataclasses.replace(
      batch,
      action_mask=jnp.where(is_imitated, 0, batch.action_mask),
      turn_ids=jnp.where(is_imitated, 0, batch.turn_ids),
      rewards=jnp.where(is_imitated, 0, batch.rewards),
      group_ids=jnp.where(is_demonstrated, own_group, batch.group_ids),
  )
