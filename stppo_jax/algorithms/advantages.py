"""Advantages: one number per agent token, from rewards and values, or from scores alone.

A batch and a variant come in, and the batch with advantages and returns comes out. Every estimator
uses agent tokens only and skips observation tokens, which are no actions and get no reward. So
gamma and lambda count decisions, not retrieved words.
"""

from collections.abc import Callable
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp

from stppo_jax import types
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import segments
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import Estimator
from stppo_jax.types import TurnBatch

# --- Generalised advantage estimation -------------------------------------------------------------


def token_gae(
    rewards: jax.Array, values: jax.Array, action_mask: jax.Array, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array]:
  """Returns generalised advantages over agent tokens [B,T], and the returns A + V.

  delta_t = r_t + gamma V_t' - V_t,   A_t = delta_t + gamma lam A_t',   t' the next AGENT token

  (Schulman et al. 2016, eq. 16). V_t' = A_t' = 0 after the last agent token. Both results are 0
  outside the agent's tokens.
  """
  chex.assert_equal_shape([rewards, values, action_mask])
  mask = action_mask.astype(values.dtype)
  return gae(rewards, values, mask, gamma, lam)


def turn_gae(
    rewards: jax.Array,
    values: jax.Array,
    turn_ids: jax.Array,
    num_turns: int,
    gamma: float,
    lam: float,
) -> tuple[jax.Array, jax.Array]:
  """Returns GAE whose steps are turns, broadcast to each turn's tokens [B,T] (arXiv 2512.17008).

  R_k = sum of the turn's rewards, V_k = the value at its first token,
  delta_k = R_k + gamma V_{k+1} - V_k,   A_k = delta_k + gamma lam A_{k+1};   returns A_k + V_k.
  """
  chex.assert_equal_shape([rewards, values, turn_ids])
  is_agent = turn_ids > 0
  mask = is_agent.astype(values.dtype)
  changes = jnp.diff(turn_ids, axis=1, prepend=0)
  is_new = changes != 0
  num_tokens = sum_turns(mask, turn_ids, num_turns)
  is_turn = num_tokens > 0
  turn_mask = is_turn.astype(values.dtype)
  masked_rewards = rewards * mask
  turn_rewards = sum_turns(masked_rewards, turn_ids, num_turns)
  first_values = values * mask * is_new
  turn_values = sum_turns(first_values, turn_ids, num_turns)
  advantages, returns = gae(turn_rewards, turn_values, turn_mask, gamma, lam)
  advantages = to_tokens(advantages, turn_ids)
  returns = to_tokens(returns, turn_ids)
  return advantages, returns


def gae(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    gammas: jax.Array | float,
    lams: jax.Array | float,
) -> tuple[jax.Array, jax.Array]:
  """Returns advantages and returns [B,T] of the columns where the mask is 1.

  `gammas` and `lams` are numbers, or one per column [B,T].
  """

  def step(carry, column):
    next_value, next_advantage = carry
    reward, value, active, gamma, lam = column
    delta = reward + gamma * next_value - value
    advantage = delta + gamma * lam * next_advantage
    is_active = active > 0
    next_value = jnp.where(is_active, value, next_value)
    next_advantage = jnp.where(is_active, advantage, next_advantage)
    advantage = jnp.where(is_active, advantage, 0)
    return (next_value, next_advantage), advantage

  gammas = jnp.broadcast_to(gammas, mask.shape)
  lams = jnp.broadcast_to(lams, mask.shape)
  columns = [x.T for x in (rewards, values, mask, gammas, lams)]
  zeros = jnp.zeros_like(values[:, 0])
  nothing = (zeros, zeros)
  _, transposed = jax.lax.scan(step, nothing, columns, reverse=True)
  advantages = transposed.T
  returns = advantages + values
  returns = jnp.where(mask > 0, returns, 0)
  return advantages, returns


def sum_turns(x: jax.Array, turn_ids: jax.Array, num_turns: int) -> jax.Array:
  """Returns the sum of x [B,T] over each turn [B,K]."""
  sums = segments.segment_sum(x, turn_ids, num_turns + 1)
  return sums[:, 1:]


def to_tokens(x: jax.Array, turn_ids: jax.Array) -> jax.Array:
  """Returns x [B,K] of turns 1..K on their tokens [B,T]; 0 outside turns."""
  no_turn = jnp.zeros_like(x[:, :1])
  parts = [no_turn, x]
  padded = jnp.concatenate(parts, axis=1)
  return jnp.take_along_axis(padded, turn_ids, axis=1)


# --- Scores compared within a group: (scores [B], group_ids [B]) -> advantages [B] ----------------


def group_zscore(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns (score - mean of its group) / std of its group, [B] (GRPO, arXiv 2402.03300).

  Choice: the sample standard deviation (n - 1) plus 1e-6, as in verl. A group of one episode, or
  with equal scores, gets 0.
  """
  group = _ScoreGroups(scores, group_ids)
  squares = jnp.square(group.centred)
  total = over_groups(jnp.sum, squares, group.same)
  variance = total / group.size_of_others
  std = jnp.sqrt(variance)
  return group.centred / (std + 1e-6)


def leave_one_out(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns score - mean of the other scores of its group, [B] (RLOO, arXiv 2402.14740).

  A group of one episode gets 0.
  """
  group = _ScoreGroups(scores, group_ids)
  return group.centred * group.size / group.size_of_others


def group_centred(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns score - mean of its group, [B] (Dr. GRPO, arXiv 2503.20783); 0 in a group of one."""
  return _ScoreGroups(scores, group_ids).centred


class _ScoreGroups:
  """The group of each row, and its scores."""

  def __init__(self, scores: jax.Array, group_ids: jax.Array):
    chex.assert_rank([scores, group_ids], 1)
    self.same = losses.is_same(group_ids)  # [B,B]
    self.size = self.same.sum(axis=1)  # [B], as the rest
    num_others = self.size - 1
    self.size_of_others = jnp.maximum(num_others, 1)
    self.highest = over_groups(jnp.max, scores, self.same, -jnp.inf)
    lowest = over_groups(jnp.min, scores, self.same, jnp.inf)
    self.spread = self.highest - lowest
    # A sum and not a matmul, which TPUs and GPUs would round to fewer bits.
    total = over_groups(jnp.sum, scores, self.same)
    mean = total / self.size
    centred = scores - mean
    has_spread = self.spread > 0  # the mean of equal scores is off by rounding
    self.centred = jnp.where(has_spread, centred, 0)


def over_groups(reduce: Callable, x: jax.Array, same: jax.Array, outside: float = 0.0) -> jax.Array:
  """Returns x [B] or [B,B] reduced over each row's group [B]. `same` [B,B] marks its members."""
  members = jnp.where(same, x, outside)
  return reduce(members, axis=1)


def _without_rounding(scores: jax.Array, sizes: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns the scores [B], equal in a group where they differ by less than their sums may round.

  `sizes` [B] are the sums of absolute rewards. A standard deviation of rounding errors would
  otherwise divide them, and give strong advantages to episodes that did equally well.
  """
  group = _ScoreGroups(scores, group_ids)
  largest = over_groups(jnp.max, sizes, group.same)
  rounding = types.ROUNDING * largest
  is_equal = group.spread <= rounding
  return jnp.where(is_equal, group.highest, scores)


# --- Whitening ------------------------------------------------------------------------------------


def whiten_tokens(advantages: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns advantages [B,T] scaled to mean 0 and variance 1; 0 where the weights are 0.

  `weights` [B,T] are those of the tokens in mean and variance: 1 for agent tokens, or 1 / |turn|.
  The variance is unbiased, as in verl. Advantages that differ by rounding alone become 0, because
  the rounding error of their mean would be scaled up.
  """
  weights = weights.astype(advantages.dtype)
  total = jnp.maximum(weights.sum(), 1)
  weighted = advantages * weights
  mean = weighted.sum() / total
  centred = advantages - mean
  squares = jnp.square(centred) * weights
  unbiased = jnp.maximum(total - 1, 1)
  variance = squares.sum() / unbiased
  inverse_std = jax.lax.rsqrt(variance + 1e-8)
  scaled = centred * inverse_std
  is_counted = weights > 0
  highest = jnp.where(is_counted, advantages, -jnp.inf).max()
  lowest = jnp.where(is_counted, advantages, jnp.inf).min()
  largest = jnp.maximum(jnp.abs(highest), jnp.abs(lowest))
  are_equal = highest - lowest <= types.ROUNDING * largest
  are_equal &= jnp.isfinite(largest)  # what is not finite is left for the step to skip
  return jnp.where(is_counted & ~are_equal, scaled, 0)


def whiten(advantages: jax.Array, batch: TurnBatch, over: str) -> jax.Array:
  """Returns advantages [B,T] standardised over the batch; 0 outside the agent's tokens.

  `over` is the unit that counts once: 'tokens', or 'turns' (GEM's ReBN).
  Choice: each role has its own mean and spread, as in SPIRAL (arXiv 2506.24119) and Dr. MAS (arXiv
  2602.08847). Roles earn different rewards, and a common mean would push one role up and another
  one down.
  """
  weights = batch.action_mask.astype(advantages.dtype)
  if over == 'turns':
    num_turns = batch.turn_ids.shape[1]
    lengths = sum_turns(weights, batch.turn_ids, num_turns)
    own_lengths = to_tokens(lengths, batch.turn_ids)
    weights /= jnp.maximum(own_lengths, 1)
  if batch.roles is None:
    return whiten_tokens(advantages, weights)
  total = jnp.zeros_like(advantages)
  for rows in batch.roles.values():
    is_role = rows[:, None]
    role_weights = weights * is_role
    total += whiten_tokens(advantages, role_weights)
  return total


# --- The estimators of a variant: (batch, variant) -> (advantages, returns) -----------------------


def from_values(function: Callable) -> Estimator:
  """Returns the estimator of a function (batch, variant) that reads batch.old_values."""
  return Estimator(function, needs_critic=True)


def from_groups(
    function: Callable[[jax.Array, jax.Array], jax.Array], breaks_ties: bool = False
) -> Estimator:
  """Returns an estimator from a function (scores [B], group_ids [B]) -> advantages [B].

  The score of an episode is the sum of its rewards. Scores of a group that differ by rounding alone
  are made equal. An episode without agent tokens (padding, or a failed one) has its own group,
  so that no baseline counts it. An episode of several rows counts once, with the rewards of all
  rows and its `score_offsets`, and each of its rows gets its advantage. With `breaks_ties` the
  function prefers the first of equal episodes.
  """

  @functools.wraps(function)
  def estimate_from_groups(batch, variant):
    del variant
    scores, group_ids, is_first = episode_scores(batch)
    episode_advantages = function(scores, group_ids)
    first_advantages = jnp.where(is_first, episode_advantages, 0)
    first_advantages = first_advantages[:, None]
    row_advantages = losses.episode_sums(first_advantages, batch.episode_ids)
    row_advantages = row_advantages[:, None]
    advantages = row_advantages * batch.action_mask
    return advantages, advantages

  return Estimator(estimate_from_groups, needs_groups=True, breaks_ties=breaks_ties)


def episode_scores(batch: TurnBatch) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns scores and group ids of the episodes [B], and the rows that represent them [B] bool."""
  rewards = batch.rewards * batch.action_mask
  scores = losses.episode_sums(rewards, batch.episode_ids)
  absolute = jnp.abs(rewards)
  sizes = losses.episode_sums(absolute, batch.episode_ids)
  if batch.score_offsets is not None:
    scores += batch.score_offsets
  is_first = losses.first_rows(batch.action_mask, batch.episode_ids)
  rows = jnp.arange(len(scores))
  own_group = -1 - rows
  group_ids = jnp.where(is_first, batch.group_ids, own_group)
  scores = _without_rounding(scores, sizes, group_ids)
  return scores, group_ids, is_first


def estimate(batch: TurnBatch, variant: BaseVariant) -> TurnBatch:
  """Returns the batch with `advantages` and `returns` by the variant's estimator.

  The advantages are standardised if `variant.whiten` is set. `returns` are the critic's targets.
  Without a critic they are the advantages, and nothing reads them.
  """
  estimate_advantages = variant.function('advantage')
  advantages, returns = estimate_advantages(batch, variant)
  if variant.whiten:
    advantages = whiten(advantages, batch, variant.whiten_over)
  return dataclasses.replace(batch, advantages=advantages, returns=returns)


def from_gae(function: Callable) -> Estimator:
  """Returns the estimator of a function (batch, gamma, lam) -> (advantages, returns).

  If `lam_critic` is set, the returns have that lambda. A critic learns from unbiased targets (1),
  while the policy's lambda is free (arXiv 2503.01491).
  """

  @from_values
  def estimate_from_gae(batch, variant):
    gamma = variant.gamma
    advantages, returns = function(batch, gamma, variant.lam)
    if variant.lam_critic is not None:
      _, returns = function(batch, gamma, variant.lam_critic)
    return advantages, returns

  return estimate_from_gae


def _token_gae(batch, gamma, lam):
  rewards = batch.rewards
  mask = batch.action_mask
  return token_gae(rewards, batch.old_values, mask, gamma, lam)


def _turn_gae(batch, gamma, lam):
  turn_ids = batch.turn_ids
  num_turns = turn_ids.shape[1]
  rewards = batch.rewards
  return turn_gae(rewards, batch.old_values, turn_ids, num_turns, gamma, lam)


TOKEN_GAE = from_gae(_token_gae)
TURN_GAE = from_gae(_turn_gae)
GROUP_ZSCORE = from_groups(group_zscore)
GROUP_CENTRED = from_groups(group_centred)
LEAVE_ONE_OUT = from_groups(leave_one_out)
