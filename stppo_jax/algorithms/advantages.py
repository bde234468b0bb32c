"""Advantages: one number per agent token, from rewards and values, or from scores alone.

A batch and a variant come in, and the batch with advantages and returns comes out. Every estimator
uses agent tokens only and skips observation tokens, which are no actions and get no reward. So
gamma and lambda count decisions, not retrieved words.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import TYPE_CHECKING

import chex
import jax
import jax.numpy as jnp

from stppo_jax import types
from stppo_jax.algorithms import losses
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
  return _gae(rewards, values, mask, gamma, lam)


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
  return _gae(rewards, values, mask, gammas, lams)


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
  num_tokens = _sum_turns(mask, turn_ids, num_turns)
  is_turn = num_tokens > 0
  turn_mask = is_turn.astype(values.dtype)
  masked_rewards = rewards * mask
  turn_rewards = _sum_turns(masked_rewards, turn_ids, num_turns)
  first_values = values * mask * is_new
  turn_values = _sum_turns(first_values, turn_ids, num_turns)
  advantages, returns = _gae(turn_rewards, turn_values, turn_mask, gamma, lam)
  advantages = _to_tokens(advantages, turn_ids)
  returns = _to_tokens(returns, turn_ids)
  return advantages, returns


def _gae(rewards, values, mask, gammas, lams):
  """Runs the recursion over the columns where the mask is 1. gammas and lams may be numbers."""

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


def _sum_turns(x, turn_ids, num_turns):
  """Returns the sum of x [B,T] over each turn [B,K]."""
  sums = segments.segment_sum(x, turn_ids, num_turns + 1)
  return sums[:, 1:]


def _to_tokens(x: jax.Array, turn_ids: jax.Array) -> jax.Array:
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
  total = _over(jnp.sum, squares, group.same)
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


def group_wins(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns the share of its group that an episode beats, less 1/2, [B] (SPPO, arXiv 2405.00675).

  P_i - 1/2,   P_i = (1/G) sum_j P(i beats j);   a tie counts 1/2, and so does j = i

  The advantage of SPPO's regression, see the surrogate 'square' (C).
  Choice: P(i beats j) is 1, 1/2 or 0 by the scores. The authors take a preference model's
  probabilities, and train on the best and the worst of five samples (C). The paper's algorithm 1
  takes all samples, as here.
  """
  same = losses.is_same(group_ids)
  own = scores[:, None]
  gaps = own - scores[None, :]
  beats = jnp.sign(gaps) / 2
  sizes = same.sum(axis=1)
  return _over(jnp.sum, beats, same) / sizes


def group_best(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns 1 for the best episode of each group and 0 for the others, [B] (SuperHF, 2310.16763).

  The first sampled one of equals is the best (openfeedback/superhf `filtering.py`, top 1, C). A
  group whose episodes are all bad has a best one, too. The paper's number is second-hand (S).
  """
  same = losses.is_same(group_ids)
  best = _over(jnp.argmax, scores, same, -jnp.inf)
  rows = jnp.arange(len(scores))
  is_best = best == rows
  return is_best.astype(scores.dtype)


group_best.__dict__['breaks_ties'] = True


class _ScoreGroups:
  """The group of each row, and its scores."""

  def __init__(self, scores: jax.Array, group_ids: jax.Array):
    chex.assert_rank([scores, group_ids], 1)
    self.same = losses.is_same(group_ids)  # [B,B]
    self.size = self.same.sum(axis=1)  # [B], as the rest
    num_others = self.size - 1
    self.size_of_others = jnp.maximum(num_others, 1)
    self.highest = _over(jnp.max, scores, self.same, -jnp.inf)
    lowest = _over(jnp.min, scores, self.same, jnp.inf)
    self.spread = self.highest - lowest
    # A sum and not a matmul, which TPUs and GPUs would round to fewer bits.
    total = _over(jnp.sum, scores, self.same)
    mean = total / self.size
    centred = scores - mean
    has_spread = self.spread > 0  # the mean of equal scores is off by rounding
    self.centred = jnp.where(has_spread, centred, 0)


def _over(reduce, x, same, outside=0.0):
  """Returns x [B] or [B,B] reduced over each row's group [B]. `same` [B,B] marks its members."""
  members = jnp.where(same, x, outside)
  return reduce(members, axis=1)


def _without_rounding(scores: jax.Array, sizes: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns the scores [B], equal in a group where they differ by less than their sums may round.

  `sizes` [B] are the sums of absolute rewards. A standard deviation of rounding errors would
  otherwise divide them, and give strong advantages to episodes that did equally well.
  """
  group = _ScoreGroups(scores, group_ids)
  largest = _over(jnp.max, sizes, group.same)
  rounding = types.ROUNDING * largest
  is_equal = group.spread <= rounding
  return jnp.where(is_equal, group.highest, scores)


# --- Whitening ------------------------------------------------------------------------------------


def whiten_tokens(advantages: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns advantages [B,T] scaled to mean 0 and variance 1; 0 where the weights are 0.

  `weights` [B,T] are those of the tokens in mean and variance: 1 for agent tokens, or 1 / |turn|.
  The variance is unbiased, as in verl.
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
  return jnp.where(weights > 0, scaled, 0)


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
    lengths = _sum_turns(weights, batch.turn_ids, num_turns)
    own_lengths = _to_tokens(lengths, batch.turn_ids)
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

Estimator = Callable[[TurnBatch, Any], tuple[jax.Array, jax.Array]]


def from_values(function: Estimator) -> Estimator:
  """Declares that a function (batch, variant) reads batch.old_values, so that a critic is trained.

  The result has the attribute `needs_critic`, which a function may also set itself.
  """

  @functools.wraps(function)
  def estimate_from_values(batch, variant):
    return function(batch, variant)

  estimate_from_values.__dict__['needs_critic'] = True
  return estimate_from_values


def from_groups(function: Callable[[jax.Array, jax.Array], jax.Array]) -> Estimator:
  """Returns an estimator from a function (scores [B], group_ids [B]) -> advantages [B].

  The score of an episode is the sum of its rewards. Scores of a group that differ by rounding alone
  are made equal. An episode without agent tokens (padding, or a failed one) is a group of its own,
  so that no baseline counts it. An episode of several rows counts once, with the rewards of all
  rows and its `score_offsets`, and each of its rows gets its advantage. The result has the
  attribute `needs_groups`.
  """

  @functools.wraps(function)
  def estimate_from_groups(batch, variant):
    del variant
    scores, group_ids, is_first = _scores(batch)
    episode_advantages = function(scores, group_ids)
    first_advantages = jnp.where(is_first, episode_advantages, 0)
    first_advantages = first_advantages[:, None]
    row_advantages = losses.episode_sums(first_advantages, batch.episode_ids)
    row_advantages = row_advantages[:, None]
    advantages = row_advantages * batch.action_mask
    return advantages, advantages

  estimate_from_groups.__dict__['needs_groups'] = True
  return estimate_from_groups


def _scores(batch):
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


def grao(batch: TurnBatch, variant: Any) -> tuple[jax.Array, jax.Array]:
  """Returns the weights of log-probs in GRAO (arXiv 2508.07750, eq. 3; P), for a GraoVariant.

  With e_i and m the mean log-probs of sample i of G and of the reference answer y, a demonstration,

    J = (1/G) sum_i A_i e_i + beta A_y m + lambda (1/G) sum_i A_i (e_i - m)
      = (1/G) sum_i (1 + lambda) A_i e_i + (beta A_y - lambda mean_i A_i) m

  These are the weights of rows with ratio 'none' and aggregation 'seq-mean-token-mean', times the
  rows of the group over G, or over its number of references. Without a reference, the weights are
  (1 + lambda) times the z-scores.

  Choice: one z-score over the samples and the reference, as the text says. Eq. 4 has the samples
  alone, and gives a group of equal scores no spread to divide by. Choice: m is the mean over
  several references. The list of components in the paper disagrees with eq. 3. The gradient in its
  proof agrees with it.
  """
  scores, group_ids, _ = _scores(batch)
  z_scores = group_zscore(scores, group_ids)
  is_reference = jnp.zeros(len(scores), bool)
  if batch.demonstrated is not None:
    is_reference = batch.demonstrated > 0
  same = losses.is_same(group_ids)
  is_sample = same & ~is_reference[None, :]
  num_rows = same.sum(axis=1)
  num_samples = is_sample.sum(axis=1)
  num_references = num_rows - num_samples
  num_samples = jnp.maximum(num_samples, 1)
  total = _over(jnp.sum, z_scores, is_sample)
  mean = total / num_samples
  sample_weights = (1 + variant.grao_lambda) * z_scores
  sample_weights /= num_samples
  reference_weights = variant.grao_beta * z_scores - variant.grao_lambda * mean
  reference_weights /= jnp.maximum(num_references, 1)
  weights = jnp.where(is_reference, reference_weights, sample_weights)
  weights *= num_rows
  weights = weights[:, None]
  weights = weights * batch.action_mask
  return weights, weights


grao.__dict__['needs_groups'] = True
grao.__dict__['uses_demonstrations'] = True


def estimate(batch: TurnBatch, variant: Variant) -> TurnBatch:
  """Returns the batch with `advantages` and `returns` by the variant's estimator.

  The advantages are standardised if `variant.whiten` is set. `returns` are the critic's targets.
  Without a critic they are the advantages, and nothing reads them.
  """
  estimate_advantages = variant.function('advantage')
  advantages, returns = estimate_advantages(batch, variant)
  if variant.whiten:
    advantages = whiten(advantages, batch, variant.whiten_over)
  return dataclasses.replace(batch, advantages=advantages, returns=returns)


def _from_gae(gae: Callable) -> Estimator:
  """Returns the estimator of a function (batch, gamma, lam) -> (advantages, returns).

  If `lam_critic` is set, the returns have that lambda. A critic learns from unbiased targets (1),
  while the policy's lambda is free (arXiv 2503.01491).
  """

  @from_values
  def estimate_from_gae(batch, variant):
    gamma = variant.gamma
    advantages, returns = gae(batch, gamma, variant.lam)
    if variant.lam_critic is not None:
      _, returns = gae(batch, gamma, variant.lam_critic)
    return advantages, returns

  return estimate_from_gae


@_from_gae
def _token_gae(batch, gamma, lam):
  rewards = batch.rewards
  mask = batch.action_mask
  return token_gae(rewards, batch.old_values, mask, gamma, lam)


@_from_gae
def _turn_gae(batch, gamma, lam):
  turn_ids = batch.turn_ids
  num_turns = turn_ids.shape[1]
  rewards = batch.rewards
  return turn_gae(rewards, batch.old_values, turn_ids, num_turns, gamma, lam)


@_from_gae
def _bad_gae(batch, gamma, lam):
  rewards = batch.rewards
  turn_ids = batch.turn_ids
  mask = batch.action_mask
  return bad_gae(rewards, batch.old_values, turn_ids, mask, gamma, lam)


def _token_returns(batch, variant):
  """Returns each token's discounted return to go (REINFORCE++, arXiv 2501.03262).

  G_t = r_t + gamma G_t',   t' the next AGENT token of the episode, in any turn.

  Choice: the final reward reaches every turn, as in the paper. verl (b178a3cd) sets the return to 0
  at each token that is not the agent's, so that a reward reaches only the tokens of its own turn.
  With one turn both are the same.
  """
  mask = batch.action_mask
  rewards = batch.rewards * mask
  values = jnp.zeros_like(rewards)
  gamma = variant.gamma
  returns, _ = token_gae(rewards, values, mask, gamma, 1.0)
  return returns, returns


def _turn_returns(batch, variant):
  """Returns the return to go of each turn, whitened over the batch (GEM, arXiv 2510.01051)."""
  rewards = batch.rewards
  values = jnp.zeros_like(rewards)
  turn_ids = batch.turn_ids
  num_turns = turn_ids.shape[1]
  gamma = variant.gamma
  returns, _ = turn_gae(rewards, values, turn_ids, num_turns, gamma, 1.0)
  advantages = whiten(returns, batch, 'turns')
  return advantages, advantages


def _turn_zscore(batch, variant):
  """Returns each turn's own reward as a z-score over the group's episodes at the same turn [B,T].

  A_k = (R_k - mean R_k) / std R_k,   R_k the sum of the rewards of turn k, without later rewards

  (OSPO, arXiv 2507.15351, RS2002/OSPO `Worker.py`, C). The fleet of OSPO is a group: with several
  roles all rows of an episode are compared with each other, at turns of the same number.
  Choice: the standard deviation of `group_zscore`. Rewards that differ by rounding only get 0.
  Choice: sums over a group are matrix products. A sum under a mask would have [B,B,T] terms.
  """
  del variant
  num_roles = len(batch.roles or ('',))
  same = losses.is_same(batch.group_ids // num_roles)
  num_turns = batch.turn_ids.shape[1]
  rewards = batch.rewards * batch.action_mask
  rewards = _sum_turns(rewards, batch.turn_ids, num_turns)
  num_tokens = _sum_turns(batch.action_mask, batch.turn_ids, num_turns)
  has_turn = num_tokens > 0

  def over_group(x):
    return jnp.matmul(same.astype(x.dtype), x, precision='highest')

  counts = over_group(has_turn.astype(rewards.dtype))
  counts = jnp.maximum(counts, 1)
  mean = over_group(rewards) / counts
  centred = jnp.where(has_turn, rewards - mean, 0)
  squares = over_group(jnp.square(centred))
  std = jnp.sqrt(squares / jnp.maximum(counts - 1, 1))
  size = over_group(jnp.abs(rewards)) / counts
  has_spread = std > types.ROUNDING * size
  z_scores = jnp.where(has_spread, centred / (std + 1e-6), 0)
  advantages = _to_tokens(z_scores, batch.turn_ids)
  return advantages, advantages


_turn_zscore.__dict__['needs_groups'] = True


def _no_advantage(batch, unused_variant):
  """Returns 0 for all tokens, for runs whose advantages come from a teacher alone."""
  if batch.teacher_logp is None:
    raise ValueError("advantage 'none' needs batch.teacher_logp: the batch has no teacher")
  zeros = jnp.zeros_like(batch.rewards)
  return zeros, zeros


ESTIMATORS: dict[str, Estimator] = {
    'none': _no_advantage,
    'token_gae': _token_gae,
    'turn_gae': _turn_gae,
    'bad_gae': _bad_gae,
    'group_zscore': from_groups(group_zscore),
    'group_centred': from_groups(group_centred),
    'leave_one_out': from_groups(leave_one_out),
    'group_wins': from_groups(group_wins),
    'group_best': from_groups(group_best),
    'token_returns': _token_returns,
    'turn_returns': _turn_returns,
    'turn_zscore': _turn_zscore,
}
