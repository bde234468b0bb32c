"""Objectives that compare the rows of an optimizer step.

A surrogate is a sum over tokens, so that each micro-batch can compute its own part. An objective of
this file is a function of the current log-probs of several rows at once, such as the two rows of a
pair. `cotangents` differentiates it for a whole step. `update.take_step` computes the log-probs of
the step first, and then pulls the cotangents back, bin by bin, in the ordinary pass.

Notation: i and j are episodes of a group. l_i, o_i and f_i are the sums of logp, old_logp and
ref_logp over the agent's tokens of episode i, in all of its rows. a_i is its advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import NamedTuple
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import losses
from stppo_jax.algorithms import segments
from stppo_jax.types import TurnBatch

if TYPE_CHECKING:
  from stppo_jax.algorithms.variants import Variant


class TokenOutputs(NamedTuple):
  """What the policy computes of each token: [R,P] in bins, [b,T] in rows.

  An objective reads the first three, and its gradient runs through `logp` and `reference_kl`.
  """

  logp: jax.Array  # log-prob of the token
  # The mean log-prob over the vocabulary, a constant. It is computed for the need 'uniform'.
  uniform: jax.Array | None = None
  # KL(reference || policy) over the vocabulary. It is computed for the need 'reference_kl'.
  reference_kl: jax.Array | None = None
  entropy: jax.Array | None = None  # entropy of its distribution
  value_outputs: jax.Array | None = None  # outputs of a value head on the policy's trunk


# (outputs, batch, variant) -> (values [b], clipped [b,T])
Objective = Callable[[TokenOutputs, TurnBatch, Any], tuple[jax.Array, jax.Array]]


class RowCotangents(NamedTuple):
  """The derivatives of an objective J that compares rows, and its numbers per token."""

  outputs: TokenOutputs  # d(-J)/d outputs, [b,T]
  # 'ratio' and 'clipped' [b,T]. 'row_losses' [b] are the terms of -J by row. 'pg_loss' is -J, and
  # 'clipped_objective' is 0, because no clipping bias is computed. 'num_pairs' is the number of
  # groups whose scores differ.
  numbers: dict[str, jax.Array]


def needs(*names: str) -> Callable[[Objective], Objective]:
  """Declares what an objective reads besides log-probs: `function.needs`.

  'reference' is batch.ref_logp, 'uniform' is outputs.uniform and batch.old_uniform, and
  'reference_kl' is outputs.reference_kl.
  """

  def declare(function):
    function.__dict__['needs'] = names
    return function

  return declare


def cotangents(outputs: TokenOutputs, batch: TurnBatch, variant: Variant) -> RowCotangents:
  """Differentiates the variant's objective for all rows of a step, in layout [b,T]."""
  function = variant.function('objective')

  def loss_of(outputs):
    row_values, clipped = function(outputs, batch, variant)
    return -row_values.sum(), (row_values, clipped)

  differentiate = jax.value_and_grad(loss_of, has_aux=True)
  (loss, parts), d_outputs = differentiate(outputs)
  row_values, clipped = parts
  mask = batch.action_mask > 0
  log_ratio = outputs.logp - batch.old_logp
  log_ratio = jnp.where(mask, log_ratio, 0)
  log_ratio = segments.bounded(log_ratio)
  numbers = {
      'ratio': jnp.exp(log_ratio),
      'clipped': clipped & mask,
      'row_losses': -row_values,
      'pg_loss': loss,
      'clipped_objective': jnp.zeros(()),
      'num_pairs': best_and_worst(batch).is_counted.sum(),
  }
  return RowCotangents(d_outputs, numbers)


# --- The episodes of a step -----------------------------------------------------------------------


def _counted_tokens(batch):
  """Returns the tokens that an objective reads [b,T] bool: those that the policy's loss counts."""
  mask = batch.action_mask if batch.loss_mask is None else batch.loss_mask
  return mask > 0


def _episode_sums(x, batch):
  """Returns the sum of x [b,T] over the counted tokens of each row's episode [b]."""
  counted = jnp.where(_counted_tokens(batch), x, 0)
  return losses.episode_sums(counted, batch.episode_ids)


class Groups(NamedTuple):
  """The episodes of a step, each represented by its first row, and their groups."""

  is_first: jax.Array  # [b] bool, true for the first row of an episode that counts
  members: jax.Array  # [b,b] bool, true where the column is an episode of the row's group
  scores: jax.Array  # [b] advantage of each row's episode, which its tokens share


def groups(batch: TurnBatch) -> Groups:
  """Returns the groups of a step. Padding, failed and dropped episodes are in none."""
  is_counted = _counted_tokens(batch)
  is_first = losses.first_rows(is_counted, batch.episode_ids)
  same_group = losses.is_same(batch.group_ids)
  members = same_group & is_first[None, :]
  # All agent tokens of an episode have the same advantage. A mean of them would round it.
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

  The first sampled one of equals is chosen, see `Variant.breaks_ties`.
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


def _pair_objective(value_of, start):
  """Returns the objective mean over pairs of value_of(h, variant), h the pair's log-ratio.

  h = (l - b)_best - (l - b)_worst,   b the sum of batch.<start>: 'ref_logp' or 'old_logp'

  Groups whose scores are all equal have no pair.
  """

  def compare(outputs, batch, variant):
    pairs = best_and_worst(batch)
    start_logp = getattr(batch, start)
    log_ratio = _episode_sums(outputs.logp - start_logp, batch)
    h = log_ratio[pairs.best] - log_ratio[pairs.worst]
    values = value_of(h, variant)
    return pairs.terms(values), _nothing_clipped(outputs)

  if start == 'ref_logp':
    return needs('reference')(compare)
  return compare


def _dpo(h, variant):
  """Returns log sigmoid(beta h) of the pairs' log-ratios (Rafailov et al., arXiv 2305.18290, P).

  Accelerated Preference Optimization (arXiv 2410.06293, example 3.1, P) uses it with b = o and
  `extrapolation`. Length is not normalised.
  """
  return jax.nn.log_sigmoid(variant.beta * h)


def _ipo(h, variant):
  """Returns -(h - 1 / (2 beta))^2 of the pairs' log-ratios (arXiv 2310.12036, eq. 17, P)."""
  target = 1 / (2 * variant.beta)
  return -jnp.square(h - target)


@needs('reference', 'reference_kl')
def _tdpo(outputs, batch, variant):
  """Returns TDPO2's terms (arXiv 2404.11999, `trainers.py` `tdpo_loss`, C).

  mean log sigmoid( beta [ (l - f)_w - (l - f)_l - alpha (K_l - sg K_w) ] )

  w and l are the best and the worst episode of a group. K sums KL(reference || policy), taken over
  the vocabulary, over the tokens of an episode, and has a gradient. With alpha 0 this is DPO.
  Choice: the authors train on given pairs, and these pairs are sampled.
  """
  pairs = best_and_worst(batch)
  log_ratio = _episode_sums(outputs.logp - batch.ref_logp, batch)
  kl = variant.alpha * _episode_sums(outputs.reference_kl, batch)
  best_terms = log_ratio + jax.lax.stop_gradient(kl)
  worst_terms = log_ratio + kl
  h = best_terms[pairs.best] - worst_terms[pairs.worst]
  values = _dpo(h, variant)
  return pairs.terms(values), _nothing_clipped(outputs)


def _nothing_clipped(outputs):
  return jnp.zeros(outputs.logp.shape, bool)


# --- All pairs of a group -------------------------------------------------------------------------


def _p3o(outputs, batch, variant):
  """Returns Pairwise PPO's terms (arXiv 2310.00212, eq. 6, R; the joint clip of P3O-V2 is S).

  mean over i, j of  sg(w_i w_j) min( d h, d clip(h, -clip_low, clip_high) )

  w_i = exp(l_i - o_i),   h = (log w_i - log w_j) / 2,   d = a_i - a_j

  The mean is over the other episodes j of the group of i, and then over i. At the old policy the
  gradient is that of RLOO. A number that is added to all scores of a group changes nothing. The KL
  to the reference is in the reward. Choice: log w_i, and log w_i w_j, are kept within +-20.
  """
  is_first, members, scores = groups(batch)
  log_ratio = _episode_sums(outputs.logp - batch.old_logp, batch)
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
  is_clipped = clipped_pairs.any(axis=1, keepdims=True)
  return row_values, jnp.broadcast_to(is_clipped, outputs.logp.shape)


# --- Values of the uniform policy -----------------------------------------------------------------


@needs('uniform')
def _rover(outputs, batch, variant):
  """Returns ROVER's terms, a regression of each token's value (arXiv 2509.24981, C).

  -mean over tokens of ( q_t - sg[ a + alpha beta (m_t' - m_old_t') ] )^2,
  q_t = beta (logp_t - old_logp_t),   m_t = mean over the vocabulary of log pi(. | s_t)

  (tinnerhrhe/ROVER `compute_rover_loss`, where beta is `rover_t` and alpha is
  `next_q_scale_factor`). q is the value of an action, and the mean of q over the vocabulary is that
  of a state for the uniform policy. t' is the next agent token of the row. After the last one the
  value is 0. `aggregation` is the mean.
  Choice: t' may be in the next turn, as in GAE.
  """
  mask = _counted_tokens(batch)
  drift = outputs.uniform - batch.old_uniform
  drift = jax.lax.stop_gradient(drift)
  next_drift = _at_next_token(drift, mask)
  target = batch.advantages + variant.alpha * variant.beta * next_drift
  log_ratio = outputs.logp - batch.old_logp
  q = variant.beta * log_ratio
  error = jnp.where(mask, q - target, 0)
  weights = losses.variant_weights(mask, batch, variant)
  token_losses = weights * jnp.square(error)
  row_values = -token_losses.sum(axis=1)
  return row_values, _nothing_clipped(outputs)


def _at_next_token(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns x [b,T] at the next token of `mask` in the row; 0 where there is none."""

  def step(value_after, column):
    value, is_in_mask = column
    value_here = jnp.where(is_in_mask, value, value_after)
    return value_here, value_after

  nothing = jnp.zeros_like(x[:, 0])
  columns = (x.T, mask.T)
  _, values_after = jax.lax.scan(step, nothing, columns, reverse=True)
  return values_after.T


OBJECTIVES: dict[str, Objective | None] = {
    'surrogate': None,
    'dpo': _pair_objective(_dpo, 'ref_logp'),
    'iterative_dpo': _pair_objective(_dpo, 'old_logp'),
    'ipo': _pair_objective(_ipo, 'ref_logp'),
    'iterative_ipo': _pair_objective(_ipo, 'old_logp'),
    'tdpo': _tdpo,
    'p3o': _p3o,
    'rover': _rover,
}
