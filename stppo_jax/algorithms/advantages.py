"""Advantages: one number per agent token, from rewards and values, or from scores alone.

A batch and a variant come in, and the batch with advantages and returns comes out. Every estimator
uses agent tokens only and skips observation tokens, which are no actions and get no reward. So
gamma and lambda count decisions, not retrieved words.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import TYPE_CHECKING

import chex
import jax
import jax.numpy as jnp

from stppo_jax import types
from stppo_jax.algorithms import segments
from stppo_jax.types import TurnBatch

if TYPE_CHECKING:
  from stppo_jax.algorithms.variants import Variant


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
  ones = jnp.ones_like(mask)
  return _gae(rewards, values, mask, gamma * ones, lam * ones)


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
  last_column = jnp.ones_like(turn_ids[:, :1], bool)
  is_end = jnp.concatenate([turn_ids[:, :-1] != turn_ids[:, 1:], last_column], axis=1)
  return _gae(rewards, values, mask, jnp.where(is_end, gamma, 1.0), jnp.where(is_end, lam, 1.0))


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
  mask = (turn_ids > 0).astype(values.dtype)
  is_new = turn_ids[:, 1:] != turn_ids[:, :-1]
  starts = (turn_ids[:, 1:] > 0) & is_new
  is_first = jnp.concatenate([turn_ids[:, :1] > 0, starts], axis=1)

  def sum_turns(x):  # [B,T] -> [B,K]
    return segments.segment_sum(x, turn_ids, num_turns + 1)[:, 1:]

  turn_mask = (sum_turns(mask) > 0).astype(values.dtype)
  turn_rewards = sum_turns(rewards * mask)
  turn_values = sum_turns(values * is_first)
  ones = jnp.ones_like(turn_mask)
  advantages, returns = _gae(turn_rewards, turn_values, turn_mask, gamma * ones, lam * ones)
  return _to_tokens(advantages, turn_ids), _to_tokens(returns, turn_ids)


def turn_returns(
    rewards: jax.Array, turn_ids: jax.Array, num_turns: int, gamma: float
) -> jax.Array:
  """Returns each turn's discounted return to go on its tokens [B,T]: G_k = R_k + gamma G_{k+1}."""
  returns, _ = turn_gae(rewards, jnp.zeros_like(rewards), turn_ids, num_turns, gamma, 1.0)
  return returns


def _gae(rewards, values, mask, gammas, lams):
  """Runs the recursion over the columns where the mask is 1. All arguments are [B,T]."""

  def step(carry, column):
    next_value, next_advantage = carry
    reward, value, active, gamma, lam = column
    advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
    next_value = jnp.where(active > 0, value, next_value)
    next_advantage = jnp.where(active > 0, advantage, next_advantage)
    return (next_value, next_advantage), jnp.where(active > 0, advantage, 0)

  zeros = jnp.zeros_like(values[:, 0])
  columns = tuple(x.T for x in (rewards, values, mask, gammas, lams))
  _, advantages = jax.lax.scan(step, (zeros, zeros), columns, reverse=True)
  advantages = advantages.T
  return advantages, jnp.where(mask > 0, advantages + values, 0)


def _to_tokens(x: jax.Array, turn_ids: jax.Array) -> jax.Array:
  """Returns x [B,K] of turns 1..K on their tokens [B,T]; 0 outside turns."""
  padded = jnp.pad(x, ((0, 0), (1, 0)))
  return jnp.take_along_axis(padded, turn_ids, axis=1)


# --- Scores compared within a group: (scores [B], group_ids [B]) -> advantages [B] ----------------


def group_zscore(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns (score - mean of its group) / std of its group, [B] (GRPO, arXiv 2402.03300).

  Choice: the sample standard deviation (n - 1) plus 1e-6, as in verl. A group of one episode, or
  with equal scores, gets 0.
  """
  chex.assert_rank([scores, group_ids], 1)
  same = _same(group_ids)
  count = same.sum(axis=1)
  mean = _over_group(jnp.sum, scores, same, 0) / count
  squares = jnp.sum(jnp.where(same, jnp.square(scores[None, :] - mean[:, None]), 0), axis=1)
  std = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
  return jnp.where(_has_spread(scores, same), (scores - mean) / (std + 1e-6), 0)


def leave_one_out(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns score - mean of the other scores of its group, [B] (RLOO, arXiv 2402.14740).

  A group of one episode gets 0.
  """
  chex.assert_rank([scores, group_ids], 1)
  same = _same(group_ids)
  count = same.sum(axis=1)
  # A sum and not a matmul, which TPUs and GPUs would round to fewer bits.
  total = _over_group(jnp.sum, scores, same, 0)
  mean_of_others = (total - scores) / jnp.maximum(count - 1, 1)
  return jnp.where(_has_spread(scores, same), scores - mean_of_others, 0)


def group_centred(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns score - mean of its group, [B] (Dr. GRPO, arXiv 2503.20783); 0 in a group of one."""
  chex.assert_rank([scores, group_ids], 1)
  same = _same(group_ids)
  mean = _over_group(jnp.sum, scores, same, 0) / same.sum(axis=1)
  return jnp.where(_has_spread(scores, same), scores - mean, 0)


def _same(ids: jax.Array) -> jax.Array:
  """Returns whether two rows have the same id, [B,B]."""
  return ids[:, None] == ids[None, :]


def _over_group(reduce: Callable, scores: jax.Array, same: jax.Array, outside: float) -> jax.Array:
  """Returns the scores reduced over each row's group [B]. `same` [B,B] marks its members."""
  return reduce(jnp.where(same, scores[None, :], outside), axis=1)


def _spread(scores: jax.Array, same: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the lowest and the highest score of each row's group [B]."""
  lowest = _over_group(jnp.min, scores, same, jnp.inf)
  highest = _over_group(jnp.max, scores, same, -jnp.inf)
  return lowest, highest


def _has_spread(scores: jax.Array, same: jax.Array) -> jax.Array:
  """Returns whether a group has unequal scores [B]. The mean of equal ones is off by rounding."""
  lowest, highest = _spread(scores, same)
  return highest > lowest


def _without_rounding(scores: jax.Array, sizes: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns the scores [B], equal in a group where they differ by less than their sums may round.

  `sizes` [B] are the sums of absolute rewards. A standard deviation of rounding errors would
  otherwise divide them, and give strong advantages to episodes that did equally well.
  """
  same = _same(group_ids)
  lowest, highest = _spread(scores, same)
  rounding = types.ROUNDING * _over_group(jnp.max, sizes, same, 0)
  return jnp.where(highest - lowest <= rounding, highest, scores)


# --- Whitening ------------------------------------------------------------------------------------


def whiten_tokens(advantages: jax.Array, action_mask: jax.Array) -> jax.Array:
  """Returns advantages [B,T] scaled to mean 0 and variance 1 over agent tokens; 0 elsewhere."""
  mask = action_mask.astype(advantages.dtype)
  return _standardise(advantages, mask)


def whiten_turns(advantages: jax.Array, turn_ids: jax.Array, num_turns: int) -> jax.Array:
  """Returns advantages standardised by statistics in which each turn counts once (GEM's ReBN).

  Each token has the weight 1 / |turn| in these statistics.
  """
  mask = (turn_ids > 0).astype(advantages.dtype)
  lengths = segments.segment_sum(mask, turn_ids, num_turns + 1)
  weights = mask / jnp.maximum(jnp.take_along_axis(lengths, turn_ids, axis=1), 1)
  return _standardise(advantages, weights)


def over_roles(
    batch: TurnBatch, function: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
  """Returns function(action_mask, turn_ids) [B,T], computed for the rows of each role separately.

  The function returns 0 where the mask is 0.
  Choice: each role has its own mean and spread, as in SPIRAL (arXiv 2506.24119) and Dr. MAS (arXiv
  2602.08847). Roles earn different rewards, and a common mean would push one role up and another
  one down.
  """
  mask = batch.action_mask.astype(batch.rewards.dtype)
  if batch.roles is None:
    return function(mask, batch.turn_ids)
  total = jnp.zeros_like(mask)
  for rows in batch.roles.values():
    is_role = rows[:, None]
    turn_ids = jnp.where(is_role > 0, batch.turn_ids, 0)
    total += function(mask * is_role, turn_ids)
  return total


def _standardise(x: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns (x - mean) / std where weights are not 0, with unbiased variance as in verl."""
  total = jnp.maximum(weights.sum(), 1)
  mean = jnp.sum(x * weights) / total
  variance = jnp.sum(jnp.square(x - mean) * weights) / jnp.maximum(total - 1, 1)
  return jnp.where(weights > 0, (x - mean) * jax.lax.rsqrt(variance + 1e-8), 0)


# --- The estimators of a variant: (batch, variant) -> (advantages, returns) -----------------------


@dataclasses.dataclass(frozen=True)
class Estimator:
  """A credit assignment, and what it needs from a run."""

  function: Callable  # (batch, variant) -> (advantages [B,T], returns [B,T])
  needs_critic: bool = False
  needs_groups: bool = False  # several episodes per task

  @property
  def __name__(self) -> str:
    """The function's name, for config.json."""
    return getattr(self.function, '__name__', type(self.function).__name__)

  def __call__(self, batch: TurnBatch, variant: Variant) -> tuple[jax.Array, jax.Array]:
    return self.function(batch, variant)


def from_values(function: Callable) -> Estimator:
  """Returns an estimator from a function (batch, variant) that reads batch.old_values."""
  return Estimator(function, needs_critic=True)


def from_groups(function: Callable[[jax.Array, jax.Array], jax.Array]) -> Estimator:
  """Returns an estimator from a function (scores [B], group_ids [B]) -> advantages [B].

  The score of an episode is the sum of its rewards. Scores of a group that differ by rounding alone
  are made equal. An episode without agent tokens (padding, or a failed one) is a group of its own,
  so that no baseline counts it. An episode of several rows counts once, with the rewards of all
  rows and its `score_offsets`, and each of its rows gets its advantage.
  """

  @functools.wraps(function)
  def estimate_rows(batch, variant):
    del variant
    mask = batch.action_mask.astype(batch.rewards.dtype)
    rewards = batch.rewards * mask
    scores = rewards.sum(axis=1)
    sizes = jnp.abs(rewards).sum(axis=1)
    rows = jnp.arange(scores.shape[0])
    counts = mask.any(axis=1)
    first_rows = rows
    if batch.episode_ids is not None:
      same = _same(batch.episode_ids) & counts[None, :]
      first_rows = jnp.where(counts, jnp.argmax(same, axis=1), rows)
      scores = _over_group(jnp.sum, scores, same, 0)
      sizes = _over_group(jnp.sum, sizes, same, 0)
      if batch.score_offsets is not None:
        scores += batch.score_offsets
      counts = counts & (first_rows == rows)
    group_ids = jnp.where(counts, batch.group_ids, -1 - rows)
    scores = _without_rounding(scores, sizes, group_ids)
    advantages = function(scores, group_ids)[first_rows][:, None] * mask
    return advantages, advantages

  return Estimator(estimate_rows, needs_groups=True)


def estimator(advantage: str | Callable) -> Estimator:
  """Returns the Estimator of `variant.advantage`: a name of ESTIMATORS, or a function.

  A function may have the attributes `needs_critic` and `needs_groups`.
  """
  if isinstance(advantage, Estimator):
    return advantage
  if callable(advantage):
    needs_critic = getattr(advantage, 'needs_critic', False)
    needs_groups = getattr(advantage, 'needs_groups', False)
    return Estimator(advantage, needs_critic, needs_groups)
  if advantage not in ESTIMATORS:
    raise ValueError(f'unknown advantage {advantage!r}; ESTIMATORS has {", ".join(ESTIMATORS)}')
  return ESTIMATORS[advantage]


def estimate(batch: TurnBatch, variant: Variant) -> TurnBatch:
  """Returns the batch with `advantages` and `returns` by the variant's estimator.

  The advantages are standardised if `variant.whiten` is set. `returns` are the critic's targets.
  Without a critic they are the advantages, and nothing reads them.
  """
  advantages, returns = estimator(variant.advantage)(batch, variant)
  if variant.whiten and variant.whiten_over == 'turns':
    whiten = lambda _, turn_ids: whiten_turns(advantages, turn_ids, turn_ids.shape[1])
    advantages = over_roles(batch, whiten)
  elif variant.whiten:
    advantages = over_roles(batch, lambda mask, _: whiten_tokens(advantages, mask))
  return dataclasses.replace(batch, advantages=advantages, returns=returns)


def _decoupled(gae: Callable, variant: Variant) -> tuple[jax.Array, jax.Array]:
  """Returns the results of gae(lam). If `lam_critic` is set, the returns have that lambda.

  A critic learns from unbiased targets (1), while the policy's lambda is free (arXiv 2503.01491).
  """
  advantages, returns = gae(variant.lam)
  if variant.lam_critic is not None:
    _, returns = gae(variant.lam_critic)
  return advantages, returns


@from_values
def _token_gae(batch, variant):
  mask = batch.action_mask.astype(batch.rewards.dtype)
  gae = lambda lam: token_gae(batch.rewards, batch.old_values, mask, variant.gamma, lam)
  return _decoupled(gae, variant)


@from_values
def _turn_gae(batch, variant):
  num_turns = batch.turn_ids.shape[1]
  gae = lambda lam: turn_gae(
      batch.rewards, batch.old_values, batch.turn_ids, num_turns, variant.gamma, lam
  )
  return _decoupled(gae, variant)


@from_values
def _bad_gae(batch, variant):
  mask = batch.action_mask.astype(batch.rewards.dtype)
  gae = lambda lam: bad_gae(
      batch.rewards, batch.old_values, batch.turn_ids, mask, variant.gamma, lam
  )
  return _decoupled(gae, variant)


def _token_returns(batch, variant):
  """Returns each token's discounted return to go (REINFORCE++, arXiv 2501.03262).

  G_t = r_t + gamma G_t',   t' the next AGENT token of the episode, in any turn.

  Choice: the final reward reaches every turn, as in the paper. verl (b178a3cd) sets the return to 0
  at each token that is not the agent's, so that a reward reaches only the tokens of its own turn.
  With one turn both are the same.
  """
  mask = batch.action_mask.astype(batch.rewards.dtype)
  zeros = jnp.zeros_like(batch.rewards)
  returns, _ = token_gae(batch.rewards * mask, zeros, mask, variant.gamma, 1.0)
  return returns, returns


def _turn_returns(batch, variant):
  num_turns = batch.turn_ids.shape[1]
  returns = turn_returns(batch.rewards, batch.turn_ids, num_turns, variant.gamma)
  whiten = lambda _, turn_ids: whiten_turns(returns, turn_ids, num_turns)
  advantages = over_roles(batch, whiten)
  return advantages, advantages


ESTIMATORS = {
    'token_gae': _token_gae,
    'turn_gae': _turn_gae,
    'bad_gae': _bad_gae,
    'group_zscore': from_groups(group_zscore),
    'group_centred': from_groups(group_centred),
    'leave_one_out': from_groups(leave_one_out),
    'token_returns': Estimator(_token_returns),
    'turn_returns': Estimator(_turn_returns),
}
