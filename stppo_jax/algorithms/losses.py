"""Losses as pure functions of log-probs and values. They see no model and no parameters.

Each function returns a number per token [B,T], and only `aggregate` reduces them. Every aggregation
is linear, so it is an array of weights. The weights are computed once over a mini-batch, which
makes any split into micro-batches exact.
"""

import chex
import jax
import jax.numpy as jnp

from stppo_jax.algorithms import segments
from stppo_jax.algorithms.variant import AGGREGATIONS
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import KL_ESTIMATORS
from stppo_jax.algorithms.variant import ValueHead
from stppo_jax.types import TurnBatch

MAX_K3 = 10.0  # per token, as in verl
MAX_KL_RATIO = 100.0


def clipped_surrogate(
    ratio: jax.Array,
    advantages: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Returns PPO's pessimistic surrogate and where its clip removed the gradient, both [B,T].

  min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)                    (Schulman et al. 2017, eq. 7)

  `clipped` is the complement of the paper's set B: A > 0 and w > 1 + clip_high, or A < 0 and
  w < 1 - clip_low. With `dual_clip` = c > 1, tokens with A < 0 and w > c are clipped to c A as well
  (Ye et al. 2020). 0 turns it off.
  Choice: a token exactly on a bound is not clipped and keeps its whole gradient.
  Choice: a token with advantage 0 has no gradient to remove and is not clipped, as in verl.
  """
  chex.assert_equal_shape([ratio, advantages])
  too_high = (advantages > 0) & (ratio > 1 + clip_high)
  too_low = (advantages < 0) & (ratio < 1 - clip_low)
  clipped = too_high | too_low
  bound = jnp.where(too_high, 1 + clip_high, ratio)
  bound = jnp.where(too_low, 1 - clip_low, bound)
  if dual_clip:
    too_far = (advantages < 0) & (ratio > dual_clip)
    clipped = clipped | too_far
    bound = jnp.where(too_far, dual_clip, bound)
  return bound * advantages, clipped


def value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, clip: float = 0.0
) -> jax.Array:
  """Returns half the squared error of the critic [B,T], pessimistic within `clip` of old values.

  With a `clip` of 0 there is no bound.

  0.5 max( (v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2 )       (PPO's reference implementation)
  """
  chex.assert_equal_shape([values, old_values, returns])
  error = jnp.square(values - returns)
  if clip:
    clipped_values = jnp.clip(values, old_values - clip, old_values + clip)
    error = jnp.maximum(error, jnp.square(clipped_values - returns))
  return 0.5 * error


def kl(logp: jax.Array, ref_logp: jax.Array, estimator: str) -> jax.Array:
  """Returns an estimate of KL(policy || reference) for each token that the policy sampled [B,T].

  k1 = logp - ref_logp,  k2 = k1^2 / 2,  k3 = exp(-k1) - 1 + k1      (Schulman 2020)

  Choice: in k3, k1 is kept within +-20 and the result is at most 10, as in verl. Beyond these
  bounds k3 has no gradient.
  """
  chex.assert_equal_shape([logp, ref_logp])
  k1 = logp - ref_logp
  if estimator == 'k1':
    return k1
  if estimator == 'k2':
    return 0.5 * jnp.square(k1)
  if estimator == 'k3':
    k1 = segments.bounded(k1)
    k3 = jnp.expm1(-k1) + k1
    return jnp.minimum(k3, MAX_K3)
  raise ValueError(f'KL estimator {estimator!r} is none of {", ".join(KL_ESTIMATORS)}')


def kl_penalty(
    logp: jax.Array, ref_logp: jax.Array, estimator: str, sampler_logp: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the KL penalty of each token, and its derivative with respect to logp, both [B,T].

  A token x is sampled from mu, and sampler_logp is log mu(x). With the ratio w = pi(x) / mu(x) the
  penalty is w k. Its mean over mu has the gradient of KL(policy || reference), on- and off-policy:

    k1  d(w k1)    = w (k1 + 1)      the 1 adds noise, whose mean is 0
    k2  sg(w) d k2 = w k1
    k3  d(w k3)    = w k1

  Without `sampler_logp` it is k, whose gradient is that of KL(reference || policy) for k3 and 0 for
  k1 on-policy (arXiv 2512.21852). k2 has the gradient of KL(policy || reference) on-policy.
  Choice: the ratio is that of single tokens to the policy that sampled them, whatever `ratio` and
  `old_logp` the surrogate has. A penalty of tokens is an expectation over the next token, and the
  ratio of a turn or sequence would multiply it by the ratios of other tokens. A ratio to the
  trainer's old_logp would leave out the age of the batch.
  Choice: w is a constant for k2, because w k2 with its whole gradient has another mean.
  Choice: the bound of k3's value does not bound its derivative with the ratio, w k1. Otherwise a
  token far below the reference would be pushed further down.
  Choice: w is at most 100, so that a wrong log-prob of a sampler cannot dominate a step.
  """
  if sampler_logp is None:

    def kl_of(logp):
      return kl(logp, ref_logp, estimator)

    value, pull = jax.vjp(kl_of, logp)
    (derivative,) = pull(jnp.ones_like(value))
    return value, derivative
  chex.assert_equal_shape([logp, ref_logp, sampler_logp])
  log_ratio = segments.bounded(logp - sampler_logp)
  ratio = jnp.minimum(jnp.exp(log_ratio), MAX_KL_RATIO)
  score = logp - ref_logp
  if estimator == 'k1':
    score += 1
  return ratio * kl(logp, ref_logp, estimator), ratio * score


def adaptive_kl(
    coefficient: jax.Array,
    measured_kl: jax.Array,
    target: float,
    horizon: float,
    episodes: jax.Array,
) -> jax.Array:
  """Returns the next KL coefficient. It rises if the measured KL is above the target.

  coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * min(episodes / horizon, 1))

  (Ziegler et al. 2019, section 2.2). Choices: a batch counts as one horizon at most, or the
  coefficient could become 0, which it would stay. A measured KL that is not finite changes nothing,
  because it would spoil the rest of the run.
  """
  error = jnp.clip(measured_kl / target - 1, -0.2, 0.2)
  factor = 1 + error * jnp.minimum(episodes / horizon, 1)
  return jnp.where(jnp.isfinite(measured_kl), coefficient * factor, coefficient)


def aggregate(
    x: jax.Array,
    mask: jax.Array,
    mode: str,
    norm_length: int = 0,
    turn_ids: jax.Array | None = None,
    episode_ids: jax.Array | None = None,
) -> jax.Array:
  """Returns x [B,T] reduced over the masked tokens to a scalar, by one of AGGREGATIONS."""
  chex.assert_equal_shape([x, mask])
  weights = aggregation_weights(mask, mode, norm_length, turn_ids, episode_ids)
  masked = jnp.where(mask.astype(bool), x, 0)
  return jnp.sum(weights * masked)


def aggregation_weights(
    mask: jax.Array,
    mode: str,
    norm_length: int = 0,
    turn_ids: jax.Array | None = None,
    episode_ids: jax.Array | None = None,
) -> jax.Array:
  """Returns weights [B,T] such that sum(weights * x) is x reduced by `mode`.

  The first four are verl's `loss_agg_mode` (0.9.1):

  token-mean                sum over all masked tokens / their number
  seq-mean-token-sum        mean over episodes of the sum over tokens
  seq-mean-token-mean       mean over episodes of the mean over tokens (the paper's 1/|y|)
  seq-mean-token-sum-norm   mean over episodes of the sum over tokens / norm_length (0: T)
  turn-mean-token-mean      mean over all turns of the mean over tokens, needs `turn_ids`
  seq-mean-turn-mean        mean over episodes of the mean over turns of the mean over tokens

  Choice: an episode without any masked token is not counted.
  Choice: rows with the same `episode_ids` [B] are parts of one sequence, so that an episode has the
  same weight however many rows it was recorded in. verl (0.9.1) counts each of its rows.
  """
  chex.assert_rank(mask, 2)
  mask = mask.astype(jnp.result_type(float))
  num_episodes = first_rows(mask, episode_ids).sum()
  num_episodes = jnp.maximum(num_episodes, 1)
  if mode == 'token-mean':
    return mask / jnp.maximum(mask.sum(), 1)
  if mode == 'seq-mean-token-sum':
    return mask / num_episodes
  if mode == 'seq-mean-token-mean':
    lengths = episode_sums(mask, episode_ids)[:, None]
    return mask / (jnp.maximum(lengths, 1) * num_episodes)
  if mode == 'seq-mean-token-sum-norm':
    length = norm_length or mask.shape[1]
    return mask / (num_episodes * length)
  if mode not in AGGREGATIONS:
    raise ValueError(f'aggregation {mode!r} is none of {", ".join(AGGREGATIONS)}')

  if turn_ids is None:
    raise ValueError(f'aggregation {mode!r} needs turn_ids')
  chex.assert_equal_shape([mask, turn_ids])
  turn_lengths = segments.segment_sum(mask, turn_ids, mask.shape[1] + 1)  # [B,T+1]
  own_lengths = jnp.take_along_axis(turn_lengths, turn_ids, axis=1)
  token_weights = mask / jnp.maximum(own_lengths, 1)
  is_turn = turn_lengths > 0
  if mode == 'turn-mean-token-mean':
    return token_weights / jnp.maximum(is_turn.sum(), 1)
  num_turns = episode_sums(is_turn, episode_ids)[:, None]
  return token_weights / (jnp.maximum(num_turns, 1) * num_episodes)


def variant_weights(mask: jax.Array, batch: TurnBatch, variant: BaseVariant) -> jax.Array:
  """Returns the weights [B,T] of the masked tokens by the variant's aggregation."""
  return aggregation_weights(
      mask, variant.aggregation, variant.norm_length, batch.turn_ids, batch.episode_ids
  )


def first_rows(mask: jax.Array, episode_ids: jax.Array | None = None) -> jax.Array:
  """Returns which rows [B] bool are the first of their episode with a masked token [B,T]."""
  has_tokens = mask.any(axis=1)
  if episode_ids is None:
    return has_tokens
  same = is_same(episode_ids) & has_tokens[None, :]
  first = jnp.argmax(same, axis=1)
  return has_tokens & (first == jnp.arange(len(first)))


def episode_sums(x: jax.Array, episode_ids: jax.Array | None) -> jax.Array:
  """Returns the sum of x [B,N] over all rows of each row's episode [B]."""
  totals = x.sum(axis=1)
  if episode_ids is None:
    return totals
  return jnp.where(is_same(episode_ids), totals, 0).sum(axis=1)


def is_same(ids: jax.Array) -> jax.Array:
  """Returns whether two rows have the same id, [B,B] bool for ids [B]."""
  return ids[:, None] == ids[None, :]


# --- The surrogates of a variant: (ratio, logp, advantages, variant) -> (objective, clipped) ------


def surrogate(
    ratio: jax.Array, logp: jax.Array, advantages: jax.Array, variant: BaseVariant
) -> tuple[jax.Array, jax.Array]:
  """Returns the variant's objective of each token, and where clipping changed its gradient [B,T].

  `variant.surrogate` is the name of a built-in, or a function with this function's signature. With
  the ratio 'none' the surrogate is A logp, and nothing is clipped.
  """
  if variant.ratio == 'none':
    return advantages * logp, jnp.zeros(logp.shape, bool)
  function = variant.function('surrogate')
  objective, clipped = function(ratio, logp, advantages, variant)
  chex.assert_equal_shape([ratio, objective, clipped])
  return objective, clipped


def clip(
    ratio: jax.Array, logp: jax.Array, advantages: jax.Array, variant: BaseVariant
) -> tuple[jax.Array, jax.Array]:
  """Returns PPO's surrogate with the variant's bounds, and where it was clipped."""
  del logp
  return clipped_surrogate(
      ratio, advantages, variant.clip_low, variant.clip_high, variant.dual_clip
  )


def _value_labels(variant):
  del variant
  return ('value',)


def _own_values(outputs, variant):
  del variant
  return outputs


def _squared_error(outputs, old_values, returns, variant):
  return value_loss(outputs, old_values, returns, variant.value_clip)


SQUARED_ERROR = ValueHead(_value_labels, _own_values, _squared_error)
