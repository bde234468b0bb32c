"""Advantages: from rewards and values (or scores alone) to one number per agent token.

Every estimator sees agent tokens only. Observation tokens are stepped over: they have no action, no
reward and no place in the recursion, so gamma and lambda count decisions, not retrieved words.
"""

import chex
import jax
import jax.numpy as jnp

from stppo_jax.algorithms import segments


def estimate(batch, variant, gamma, lam, whiten=None):
  """`batch` with `advantages` and `returns` filled in by the variant's estimator, and whitened if it asks.

  `returns` are the critic's targets; without a critic they are the advantages and nobody reads them.
  """
  mask = batch.action_mask.astype(batch.rewards.dtype)
  num_turns = mask.shape[1]
  if variant.advantage == 'token_gae':
    advantages, returns = token_gae(batch.rewards, batch.old_values, mask, gamma, lam)
  elif variant.advantage == 'turn_gae':
    advantages, returns = turn_gae(
        batch.rewards, batch.old_values, batch.turn_ids, num_turns, gamma, lam
    )
  elif variant.advantage == 'bad_gae':
    advantages, returns = bad_gae(batch.rewards, batch.old_values, batch.turn_ids, mask, gamma, lam)
  elif variant.advantage == 'turn_returns':
    advantages = turn_returns(batch.rewards, batch.turn_ids, num_turns, gamma)
    advantages = whiten_turns(advantages, batch.turn_ids, num_turns)
    returns = advantages
  elif variant.advantage in ('group_zscore', 'leave_one_out'):
    scores = (batch.rewards * mask).sum(axis=1)
    # A row without agent tokens (padding, a failed episode) is no member of its group.
    loners = -1 - jnp.arange(scores.shape[0])
    group_ids = jnp.where(mask.any(axis=1), batch.group_ids, loners)
    score_of = group_zscore if variant.advantage == 'group_zscore' else leave_one_out
    advantages = returns = score_of(scores, group_ids)[:, None] * mask
  else:
    raise ValueError(f'unknown advantage {variant.advantage!r}')
  if variant.whiten if whiten is None else whiten:
    advantages = whiten_tokens(advantages, mask)
  return batch.replace(advantages=advantages, returns=returns)


def token_gae(rewards, values, action_mask, gamma, lam):
  """Generalised advantages over agent tokens [B,T], and the returns A + V.

  delta_t = r_t + gamma V_t' - V_t,   A_t = delta_t + gamma lam A_t',   t' the row's next AGENT token
  (Schulman et al. 2016, eq. 16). V_t' = A_t' = 0 after the last one; both results are 0 elsewhere.
  """
  chex.assert_equal_shape([rewards, values, action_mask])
  mask = action_mask.astype(values.dtype)
  steps = jnp.ones_like(mask)
  return _gae(rewards, values, mask, gamma * steps, lam * steps)


def bad_gae(rewards, values, turn_ids, action_mask, gamma, lam):
  """Token GAE that discounts and bootstraps at the ends of turns only (BAD, arXiv 2405.15821).

  gamma and lambda apply at the last token of a turn; inside a turn both are 1, so credit does not
  depend on how many tokens an action is written with.
  """
  chex.assert_equal_shape([rewards, values, turn_ids, action_mask])
  mask = action_mask.astype(values.dtype)
  ends = jnp.concatenate(
      [turn_ids[:, :-1] != turn_ids[:, 1:], jnp.ones_like(turn_ids[:, :1], bool)], axis=1
  )
  return _gae(rewards, values, mask, jnp.where(ends, gamma, 1.0), jnp.where(ends, lam, 1.0))


def turn_gae(rewards, values, turn_ids, num_turns, gamma, lam):
  """GAE whose steps are turns, broadcast to each turn's tokens [B,T] (arXiv 2512.17008).

  R_k = sum of the turn's rewards, V_k = the value at its first token,
  delta_k = R_k + gamma V_{k+1} - V_k,   A_k = delta_k + gamma lam A_{k+1};   returns A_k + V_k.
  """
  chex.assert_equal_shape([rewards, values, turn_ids])
  mask = (turn_ids > 0).astype(values.dtype)
  first = jnp.concatenate(
      [turn_ids[:, :1] > 0, (turn_ids[:, 1:] != turn_ids[:, :-1]) & (turn_ids[:, 1:] > 0)], axis=1
  )
  per_turn = lambda x: segments.segment_sum(x, turn_ids, num_turns + 1)[:, 1:]  # [B,K]
  present = (per_turn(mask) > 0).astype(values.dtype)
  steps = jnp.ones_like(present)
  advantages, returns = _gae(
      per_turn(rewards * mask), per_turn(values * first), present, gamma * steps, lam * steps
  )
  return _to_tokens(advantages, turn_ids), _to_tokens(returns, turn_ids)


def turn_returns(rewards, turn_ids, num_turns, gamma):
  """Discounted return to go of each turn, broadcast to its tokens [B,T]: G_k = R_k + gamma G_{k+1}."""
  returns, _ = turn_gae(rewards, jnp.zeros_like(rewards), turn_ids, num_turns, gamma, 1.0)
  return returns


def group_zscore(scores, group_ids):
  """(score - mean of its group) / std of its group, [B] (GRPO, arXiv 2402.03300).

  Choice: the sample standard deviation (n - 1) plus 1e-6, as verl has it; a group of one, or one whose
  scores are all equal, says nothing and gets 0.
  """
  chex.assert_rank([scores, group_ids], 1)
  same = group_ids[:, None] == group_ids[None, :]  # [B,B]
  over_group = lambda reduce, outside: reduce(jnp.where(same, scores[None, :], outside), axis=1)
  count = same.sum(axis=1)
  mean = over_group(jnp.sum, 0) / count
  squares = jnp.sum(jnp.where(same, jnp.square(scores[None, :] - mean[:, None]), 0), axis=1)
  std = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
  # Rounding alone gives equal scores a little spread, and 1e-6 would blow it up.
  spread = over_group(jnp.max, -jnp.inf) > over_group(jnp.min, jnp.inf)
  return jnp.where(spread, (scores - mean) / (std + 1e-6), 0)


def leave_one_out(scores, group_ids):
  """score - mean of the OTHERS of its group, [B] (RLOO, arXiv 2402.14740); 0 in a group of one."""
  chex.assert_rank([scores, group_ids], 1)
  same = group_ids[:, None] == group_ids[None, :]
  count = same.sum(axis=1)
  # A sum and not a matmul, which TPUs and GPUs would round to fewer bits.
  total = jnp.sum(jnp.where(same, scores[None, :], 0), axis=1)
  others = (total - scores) / jnp.maximum(count - 1, 1)
  return jnp.where(count > 1, scores - others, 0)


def whiten_tokens(advantages, action_mask):
  """Advantages [B,T] with mean 0 and variance 1 over agent tokens; 0 elsewhere."""
  mask = action_mask.astype(advantages.dtype)
  return _standardise(advantages, mask)


def whiten_turns(advantages, turn_ids, num_turns):
  """Advantages that are constant in a turn, standardised so that each turn counts once (GEM's ReBN)."""
  mask = (turn_ids > 0).astype(advantages.dtype)
  lengths = segments.segment_sum(mask, turn_ids, num_turns + 1)
  weights = mask / jnp.maximum(jnp.take_along_axis(lengths, turn_ids, axis=1), 1)
  return _standardise(advantages, weights)


def _standardise(x, weights):
  """(x - mean) / std where weights are not 0; the variance is unbiased, as verl's masked_whiten."""
  total = jnp.maximum(weights.sum(), 1)
  mean = jnp.sum(x * weights) / total
  variance = jnp.sum(jnp.square(x - mean) * weights) / jnp.maximum(total - 1, 1)
  return jnp.where(weights > 0, (x - mean) * jax.lax.rsqrt(variance + 1e-8), 0)


def _gae(rewards, values, mask, gammas, lams):
  """The recursion over the columns where mask is 1; gammas and lams [B,T] are those of that step."""

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


def _to_tokens(per_turn, turn_ids):
  """[B,K] of turns 1..K -> [B,T]; 0 outside turns."""
  padded = jnp.pad(per_turn, ((0, 0), (1, 0)))
  return jnp.take_along_axis(padded, turn_ids, axis=1)
