"""Advantages: from rewards and values (or scores alone) to one number per agent token.

TurnBatch and Variant in, TurnBatch with advantages and returns out. Every estimator sees agent
tokens only. Observation tokens are skipped, since they are no actions and get no reward. So gamma
and lambda count decisions, not retrieved words.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from stppo_jax import types
from stppo_jax.algorithms import segments


@dataclasses.dataclass(frozen=True)
class Estimator:
  """A credit assignment, and what it needs from a run."""

  function: Callable  # (batch, variant) -> (advantages [B,T], returns [B,T])
  needs_critic: bool = False
  needs_groups: bool = False  # several episodes per question

  @property
  def __name__(self) -> str:
    """The function's name, for config.json."""
    return getattr(self.function, '__name__', type(self.function).__name__)

  def __call__(self, batch: Any, variant: Any) -> tuple[jax.Array, jax.Array]:
    return self.function(batch, variant)


def from_values(function: Callable) -> Estimator:
  """Estimator from a function (batch, variant) -> (advantages, returns) that reads old_values."""
  return Estimator(function, needs_critic=True)


def from_groups(function: Callable) -> Estimator:
  """Estimator from a function (scores [B], group_ids [B]) -> advantages [B], one per episode.

  An episode's score is the sum of its rewards, and equal where the scores of a group differ by
  rounding alone. An episode without agent tokens (padding, or a failed one) is a group of its own,
  so that the others' baseline does not count it. An episode of several rows counts once, with the
  rewards of all rows and its `score_offsets`, and each of its rows has its advantage.
  """

  @functools.wraps(function)
  def estimate_rows(batch, variant):
    del variant
    mask = batch.action_mask.astype(batch.rewards.dtype)
    rewards = batch.rewards * mask
    scores, sizes = rewards.sum(axis=1), jnp.abs(rewards).sum(axis=1)
    rows = jnp.arange(scores.shape[0])
    counts = mask.any(axis=1)
    first = rows
    if batch.episode_ids is not None:
      same = (batch.episode_ids[:, None] == batch.episode_ids[None, :]) & counts[None, :]
      first = jnp.where(counts, jnp.argmax(same, axis=1), rows)
      scores = _over_group(jnp.sum, scores, same, 0)
      sizes = _over_group(jnp.sum, sizes, same, 0)
      if batch.score_offsets is not None:
        scores += batch.score_offsets
      counts = counts & (first == rows)
    group_ids = jnp.where(counts, batch.group_ids, -1 - rows)
    scores = _without_rounding(scores, sizes, group_ids)
    result = function(scores, group_ids)[first][:, None] * mask
    return result, result

  return Estimator(estimate_rows, needs_groups=True)


def estimator(advantage: str | Callable) -> Estimator:
  """The Estimator of a variant's column `advantage`: a name of ESTIMATORS, or a function."""
  if isinstance(advantage, Estimator):
    return advantage
  if callable(advantage):
    needs_critic = getattr(advantage, 'needs_critic', False)
    needs_groups = getattr(advantage, 'needs_groups', False)
    return Estimator(advantage, needs_critic, needs_groups)
  if advantage not in ESTIMATORS:
    raise ValueError(f'unknown advantage {advantage!r}; ESTIMATORS has {", ".join(ESTIMATORS)}')
  return ESTIMATORS[advantage]


def estimate(batch: Any, variant: Any) -> Any:
  """Fills in `advantages` and `returns` by the variant's estimator; whitens if `variant.whiten`.

  `returns` are the critic's targets; without a critic they are the advantages and nothing reads
  them.
  """
  advantages, returns = estimator(variant.advantage)(batch, variant)
  if variant.whiten and variant.whiten_over == 'turns':
    advantages = over_roles(
        batch, lambda _, turn_ids: whiten_turns(advantages, turn_ids, turn_ids.shape[1])
    )
  elif variant.whiten:
    advantages = over_roles(batch, lambda mask, _: whiten_tokens(advantages, mask))
  return batch.replace(advantages=advantages, returns=returns)


def over_roles(batch: Any, function: Callable) -> jax.Array:
  """Returns function(action_mask, turn_ids) [B,T] of the rows of each role, put together.

  `function` gives 0 where the mask is 0. Choice: what is subtracted from or divides advantages is
  each role's own, as in SPIRAL (arXiv 2506.24119) and Dr. MAS (arXiv 2602.08847): roles earn
  different rewards, and a common mean would push one role up and the other down.
  """
  mask = batch.action_mask.astype(batch.rewards.dtype)
  if batch.roles is None:
    return function(mask, batch.turn_ids)
  columns = [batch.roles[:, r, None] for r in range(batch.roles.shape[1])]
  return sum(function(mask * of, jnp.where(of > 0, batch.turn_ids, 0)) for of in columns)


def token_gae(
    rewards: jax.Array, values: jax.Array, action_mask: jax.Array, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array]:
  """Returns generalised advantages over agent tokens [B,T], and the returns A + V.

  delta_t = r_t + gamma V_t' - V_t,   A_t = delta_t + gamma lam A_t',   t' the next AGENT token
  (Schulman et al. 2016, eq. 16). V_t' = A_t' = 0 after the last one; both results are 0 elsewhere.
  """
  chex.assert_equal_shape([rewards, values, action_mask])
  mask = action_mask.astype(values.dtype)
  steps = jnp.ones_like(mask)
  return _gae(rewards, values, mask, gamma * steps, lam * steps)


def bad_gae(
    rewards: jax.Array,
    values: jax.Array,
    turn_ids: jax.Array,
    action_mask: jax.Array,
    gamma: float,
    lam: float,
) -> tuple[jax.Array, jax.Array]:
  """Returns token GAE that discounts at the ends of turns only (BAD, arXiv 2405.15821).

  gamma and lambda apply at the last token of a turn; inside a turn both are 1, so credit does not
  depend on how many tokens an action is written with.
  """
  chex.assert_equal_shape([rewards, values, turn_ids, action_mask])
  mask = action_mask.astype(values.dtype)
  ends = jnp.concatenate(
      [turn_ids[:, :-1] != turn_ids[:, 1:], jnp.ones_like(turn_ids[:, :1], bool)], axis=1
  )
  return _gae(rewards, values, mask, jnp.where(ends, gamma, 1.0), jnp.where(ends, lam, 1.0))


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
  first = jnp.concatenate(
      [turn_ids[:, :1] > 0, (turn_ids[:, 1:] != turn_ids[:, :-1]) & (turn_ids[:, 1:] > 0)], axis=1
  )

  def per_turn(x):  # [B,T] -> [B,K]
    return segments.segment_sum(x, turn_ids, num_turns + 1)[:, 1:]

  present = (per_turn(mask) > 0).astype(values.dtype)
  steps = jnp.ones_like(present)
  advantages, returns = _gae(
      per_turn(rewards * mask), per_turn(values * first), present, gamma * steps, lam * steps
  )
  return _to_tokens(advantages, turn_ids), _to_tokens(returns, turn_ids)


def turn_returns(
    rewards: jax.Array, turn_ids: jax.Array, num_turns: int, gamma: float
) -> jax.Array:
  """Returns each turn's discounted return to go on its tokens [B,T]: G_k = R_k + gamma G_{k+1}."""
  returns, _ = turn_gae(rewards, jnp.zeros_like(rewards), turn_ids, num_turns, gamma, 1.0)
  return returns


def group_zscore(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns (score - mean of its group) / std of its group, [B] (GRPO, arXiv 2402.03300).

  Choice: the sample standard deviation (n - 1) plus 1e-6, as in verl; a group of one, or one whose
  scores are all equal, gets 0.
  """
  chex.assert_rank([scores, group_ids], 1)
  same = group_ids[:, None] == group_ids[None, :]  # [B,B]
  count = same.sum(axis=1)
  mean = _over_group(jnp.sum, scores, same, 0) / count
  squares = jnp.sum(jnp.where(same, jnp.square(scores[None, :] - mean[:, None]), 0), axis=1)
  std = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
  return jnp.where(_differ(scores, same), (scores - mean) / (std + 1e-6), 0)


def leave_one_out(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns score - mean of the OTHERS of its group, [B] (RLOO, arXiv 2402.14740); 0 if alone."""
  chex.assert_rank([scores, group_ids], 1)
  same = group_ids[:, None] == group_ids[None, :]
  count = same.sum(axis=1)
  # A sum and not a matmul, which TPUs and GPUs would round to fewer bits.
  total = jnp.sum(jnp.where(same, scores[None, :], 0), axis=1)
  others = (total - scores) / jnp.maximum(count - 1, 1)
  return jnp.where(_differ(scores, same), scores - others, 0)


def group_centred(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns score - mean of its group, [B] (Dr. GRPO, arXiv 2503.20783); 0 if alone."""
  chex.assert_rank([scores, group_ids], 1)
  same = group_ids[:, None] == group_ids[None, :]
  centred = scores - _over_group(jnp.sum, scores, same, 0) / same.sum(axis=1)
  return jnp.where(_differ(scores, same), centred, 0)


def whiten_tokens(advantages: jax.Array, action_mask: jax.Array) -> jax.Array:
  """Scales advantages [B,T] to mean 0 and variance 1 over agent tokens; 0 elsewhere."""
  mask = action_mask.astype(advantages.dtype)
  return _standardise(advantages, mask)


def whiten_turns(advantages: jax.Array, turn_ids: jax.Array, num_turns: int) -> jax.Array:
  """Standardises advantages by statistics in which each turn counts once (GEM's ReBN).

  Of advantages that differ within a turn, each token has 1/|turn| of its turn's weight.
  """
  mask = (turn_ids > 0).astype(advantages.dtype)
  lengths = segments.segment_sum(mask, turn_ids, num_turns + 1)
  weights = mask / jnp.maximum(jnp.take_along_axis(lengths, turn_ids, axis=1), 1)
  return _standardise(advantages, weights)


def _standardise(x, weights):
  """Returns (x - mean) / std where weights are not 0, with unbiased variance as in verl."""
  total = jnp.maximum(weights.sum(), 1)
  mean = jnp.sum(x * weights) / total
  variance = jnp.sum(jnp.square(x - mean) * weights) / jnp.maximum(total - 1, 1)
  return jnp.where(weights > 0, (x - mean) * jax.lax.rsqrt(variance + 1e-8), 0)


def _gae(rewards, values, mask, gammas, lams):
  """Runs the recursion over columns where mask is 1; gammas and lams [B,T] are per step."""

  def step(carry, column):
    next_value, next_advantage = carry
    reward, value, active, gamma, lam = column
    advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
    carry = (
        jnp.where(active > 0, value, next_value),
        jnp.where(active > 0, advantage, next_advantage),
    )
    return carry, jnp.where(active > 0, advantage, 0)

  zeros = jnp.zeros_like(values[:, 0])
  columns = tuple(x.T for x in (rewards, values, mask, gammas, lams))
  _, advantages = jax.lax.scan(step, (zeros, zeros), columns, reverse=True)
  advantages = advantages.T
  return advantages, jnp.where(mask > 0, advantages + values, 0)


def _over_group(reduce, scores, same, outside):
  """Reduces the scores [B] of each episode's group; `same` [B,B] says who is in it."""
  return reduce(jnp.where(same, scores[None, :], outside), axis=1)


def _differ(scores, same):
  """Returns whether a group has unlike scores [B]; a mean of like ones is off by rounding."""
  highest = _over_group(jnp.max, scores, same, -jnp.inf)
  return highest > _over_group(jnp.min, scores, same, jnp.inf)


def _without_rounding(scores, sizes, group_ids):
  """Makes scores [B] of a group equal where they differ by less than their sums may be rounded.

  `sizes` [B] are the sums of absolute rewards. A standard deviation of rounding errors would
  otherwise divide them, and give episodes that did equally well strong advantages.
  """
  same = group_ids[:, None] == group_ids[None, :]
  highest = _over_group(jnp.max, scores, same, -jnp.inf)
  spread = highest - _over_group(jnp.min, scores, same, jnp.inf)
  rounding = types.ROUNDING * _over_group(jnp.max, sizes, same, 0)
  return jnp.where(spread <= rounding, highest, scores)


def _to_tokens(per_turn, turn_ids):
  """Spreads [B,K] of turns 1..K over their tokens [B,T]; 0 outside turns."""
  padded = jnp.pad(per_turn, ((0, 0), (1, 0)))
  return jnp.take_along_axis(padded, turn_ids, axis=1)


def _decoupled(gae, variant):
  """Returns (advantages, returns) of gae(lam); with `lam_critic` the returns have that lambda.

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
  fixed = (batch.rewards, batch.old_values, batch.turn_ids, batch.turn_ids.shape[1], variant.gamma)
  return _decoupled(lambda lam: turn_gae(*fixed, lam), variant)


@from_values
def _bad_gae(batch, variant):
  mask = batch.action_mask.astype(batch.rewards.dtype)
  fixed = (batch.rewards, batch.old_values, batch.turn_ids, mask, variant.gamma)
  return _decoupled(lambda lam: bad_gae(*fixed, lam), variant)


def _token_returns(batch, variant):
  """Returns each token's discounted return to go (REINFORCE++, arXiv 2501.03262).

  G_t = r_t + gamma G_t',   t' the next AGENT token of the episode, in whichever turn.

  Choice: the final reward reaches every turn, as the method means it. verl (b178a3cd) sets the
  return to 0 at each token that is not the agent's, so that in an episode of several turns a reward
  reaches the tokens of its own turn alone. With one turn both are the same.
  """
  mask = batch.action_mask.astype(batch.rewards.dtype)
  zeros = jnp.zeros_like(batch.rewards)
  result, _ = token_gae(batch.rewards * mask, zeros, mask, variant.gamma, 1.0)
  return result, result


def _turn_returns(batch, variant):
  num_turns = batch.turn_ids.shape[1]
  result = turn_returns(batch.rewards, batch.turn_ids, num_turns, variant.gamma)
  result = over_roles(batch, lambda _, turn_ids: whiten_turns(result, turn_ids, num_turns))
  return result, result


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
