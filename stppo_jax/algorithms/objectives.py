"""Objectives that compare the rows of an optimizer step.

A surrogate is a sum over tokens, so that each micro-batch can compute its own part. An objective
that compares rows is a function of the current log-probs of several rows at once, such as the two
rows of a pair. `cotangents` differentiates it for a whole step. `optimizer_step.take_step` computes
the log-probs of the step first, and then pulls the cotangents back, bin by bin, in the ordinary
pass.

Notation: i and j are episodes of a group. l_i, o_i and f_i are the sums of logp, old_logp and
ref_logp over the agent's tokens of episode i, in all of its rows. a_i is its advantage.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import losses
from stppo_jax.algorithms import segments
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import TokenOutputs
from stppo_jax.types import TurnBatch


class RowCotangents(NamedTuple):
  """The derivatives of an objective J that compares rows, and its numbers per token."""

  outputs: TokenOutputs  # d(-J)/d outputs, [b,T]
  ratio: jax.Array  # [b,T] ratios of the tokens, to the policy before the update
  clipped: jax.Array  # [b,T] bool
  row_losses: jax.Array  # [b] the terms of -J by row
  pg_loss: jax.Array  # [] -J
  num_pairs: jax.Array | None  # [] groups whose scores differ; None: tokens are compared


def cotangents(outputs: TokenOutputs, batch: TurnBatch, variant: BaseVariant) -> RowCotangents:
  """Differentiates the variant's objective for all rows of a step, in layout [b,T]."""
  function = variant.function('objective')

  def loss_of(outputs):
    row_values, clipped = function(outputs, batch, variant)
    return -row_values.sum(), (row_values, clipped)

  differentiate = jax.value_and_grad(loss_of, has_aux=True)
  (loss, aux), d_outputs = differentiate(outputs)
  row_values, clipped = aux
  mask = batch.action_mask > 0
  log_ratio = outputs.logp - batch.old_logp
  log_ratio = jnp.where(mask, log_ratio, 0)
  log_ratio = segments.bounded(log_ratio)
  num_pairs = None
  if variant.compares_episodes:
    num_pairs = best_and_worst(batch).is_counted.sum()
  return RowCotangents(
      outputs=d_outputs,
      ratio=jnp.exp(log_ratio),
      clipped=clipped & mask,
      row_losses=-row_values,
      pg_loss=loss,
      num_pairs=num_pairs,
  )


# --- The episodes of a step -----------------------------------------------------------------------


def counted_tokens(batch: TurnBatch) -> jax.Array:
  """Returns the tokens that an objective reads [b,T] bool: those that the policy's loss counts."""
  mask = batch.action_mask if batch.loss_mask is None else batch.loss_mask
  return mask > 0


def episode_sums(x: jax.Array, batch: TurnBatch) -> jax.Array:
  """Returns the sum of x [b,T] over the counted tokens of each row's episode [b]."""
  counted = jnp.where(counted_tokens(batch), x, 0)
  return losses.episode_sums(counted, batch.episode_ids)


class Groups(NamedTuple):
  """The episodes of a step, each represented by its first row, and their groups."""

  is_first: jax.Array  # [b] bool, true for the first row of an episode that counts
  members: jax.Array  # [b,b] bool, true where the column is an episode of the row's group
  scores: jax.Array  # [b] advantage of each row's episode, which its tokens share


def groups(batch: TurnBatch) -> Groups:
  """Returns the groups of a step. Padding, failed and dropped episodes are in none."""
  is_counted = counted_tokens(batch)
  is_first = losses.first_rows(is_counted, batch.episode_ids)
  same_group = losses.is_same(batch.group_ids)
  members = same_group & is_first[None, :]
  # The agent tokens of an episode have the same advantage, except in ROVER, which compares no
  # scores. A mean of them would round it.
  counted = jnp.where(is_counted, batch.advantages, -jnp.inf)
  has_tokens = is_counted.any(axis=1)
  scores = counted.max(axis=1)
  scores = jnp.where(has_tokens, scores, 0)
  return Groups(is_first, members, scores)


# --- Pairs of the best and the worst episode ------------------------------------------------------


class Pairs(NamedTuple):
  """The best and the worst episode of each group, as row numbers."""

  best: jax.Array  # [b]
  worst: jax.Array  # [b]
  is_counted: jax.Array  # [b] bool, true once for each group in which the scores differ

  def terms(self, values: jax.Array) -> jax.Array:
    """Returns the terms [b] of the mean over pairs, of the values [b] of each row's pair."""
    num_pairs = self.is_counted.sum()
    counted = jnp.where(self.is_counted, values, 0)
    return counted / jnp.maximum(num_pairs, 1)


def best_and_worst(batch: TurnBatch) -> Pairs:
  """Returns the pair of each group: its highest and its lowest score.

  Among equal scores the episode that was sampled first is chosen, see `Variant.breaks_ties`.
  """
  is_first, members, scores = groups(batch)
  from_above = jnp.where(members, scores, -jnp.inf)
  from_below = jnp.where(members, scores, jnp.inf)
  best = from_above.argmax(axis=1)
  worst = from_below.argmin(axis=1)
  has_spread = scores[best] > scores[worst]
  first_members = members.argmax(axis=1)
  rows = jnp.arange(len(scores))
  represents_group = is_first & (first_members == rows)
  return Pairs(best, worst, has_spread & represents_group)


def nothing_clipped(outputs: TokenOutputs) -> jax.Array:
  """Returns false for every token [b,T]."""
  return jnp.zeros(outputs.logp.shape, bool)
