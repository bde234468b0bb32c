"""Losses as pure functions of log-probs and values: nothing here sees a model or parameters.

Each returns numbers per token [B,T]; only `aggregate` reduces them. Every aggregation is linear, so
it is an array of weights. Computed once over a mini-batch, the weights make any split into
micro-batches exact.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from stppo_jax.algorithms import segments

AGGREGATIONS = (
    'token-mean',
    'seq-mean-token-sum',
    'seq-mean-token-mean',
    'seq-mean-token-sum-norm',
    'turn-mean-token-mean',
    'seq-mean-turn-mean',
)
DPPO_MAX_RATIO = 20.0  # as in verl
KL_ESTIMATORS = ('k1', 'k2', 'k3')
MAX_LOG_RATIO = segments.MAX_LOG_RATIO
MAX_K3 = 10.0  # per token, as in verl


def surrogate(
    ratio: jax.Array, logp: jax.Array, advantages: jax.Array, variant: Any
) -> tuple[jax.Array, jax.Array]:
  """Returns what the variant maximises per token, and where clipping changed its gradient, [B,T].

  The variant names one of SURROGATES, or holds a function of the same signature as this one.
  """
  chosen = variant.surrogate
  if not callable(chosen) and chosen not in SURROGATES:
    raise ValueError(f'surrogate {chosen!r} is none of {", ".join(SURROGATES)}')
  function = chosen if callable(chosen) else SURROGATES[chosen]
  objective, clipped = function(ratio, logp, advantages, variant)
  chex.assert_equal_shape([ratio, objective, clipped])
  return objective, clipped


def clipped_surrogate(
    ratio: jax.Array,
    advantages: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns PPO's pessimistic surrogate and where its clip removed the gradient, both [B,T].

  min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)                    (Schulman et al. 2017, eq. 7)

  `clipped` is the complement of the paper's set B: A > 0 and w > 1 + clip_high, or A < 0 and
  w < 1 - clip_low. With `dual_clip` = c > 1, tokens with A < 0 and w > c are clipped to c A as well
  (Ye et al. 2020). Choice: exactly on a bound a token is not clipped and keeps its whole gradient.
  Choice: a token without an advantage has no gradient to remove and is not clipped, as in verl.
  """
  chex.assert_equal_shape([ratio, advantages])
  positive, negative = advantages > 0, advantages < 0
  too_high = positive & (ratio > 1 + clip_high)
  too_low = negative & (ratio < 1 - clip_low)
  bound = jnp.where(too_high, 1 + clip_high, jnp.where(too_low, 1 - clip_low, ratio))
  clipped = too_high | too_low
  if dual_clip is not None:
    far = negative & (ratio > dual_clip)
    bound = jnp.where(far, dual_clip, bound)
    clipped = clipped | far
  return bound * advantages, clipped


def value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, clip: float | None = None
) -> jax.Array:
  """Returns half the squared error of the critic [B,T], pessimistic within `clip` of old values.

  0.5 max( (v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2 )       (PPO's reference implementation)
  """
  chex.assert_equal_shape([values, old_values, returns])
  error = jnp.square(values - returns)
  if clip is not None:
    near = jnp.clip(values, old_values - clip, old_values + clip)
    error = jnp.maximum(error, jnp.square(near - returns))
  return 0.5 * error


def kl(logp: jax.Array, ref_logp: jax.Array, estimator: str) -> jax.Array:
  """Returns an estimate of KL(policy || reference) per token of the policy's samples [B,T].

  k1 = logp - ref_logp,  k2 = k1^2 / 2,  k3 = exp(-k1) - 1 + k1      (Schulman 2020)

  Choice: as in verl, k3 takes k1 within +-20 and is at most 10; beyond it has no gradient.
  """
  chex.assert_equal_shape([logp, ref_logp])
  difference = logp - ref_logp
  if estimator == 'k1':
    return difference
  if estimator == 'k2':
    return 0.5 * jnp.square(difference)
  if estimator == 'k3':
    difference = jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.minimum(jnp.expm1(-difference) + difference, MAX_K3)
  raise ValueError(f'KL estimator {estimator!r} is none of {", ".join(KL_ESTIMATORS)}')


def adaptive_kl(
    coefficient: jax.Array,
    measured_kl: jax.Array,
    target: float,
    horizon: float,
    episodes: jax.Array,
) -> jax.Array:
  """Returns the next KL coefficient, larger if the measured KL is above target (Ziegler et al.
  2019, 2.2).

  coefficient * max(0, 1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon)
  """
  error = jnp.clip(measured_kl / target - 1, -0.2, 0.2)
  return coefficient * jnp.maximum(1 + error * episodes / horizon, 0)


def aggregation_weights(
    mask: jax.Array,
    mode: str,
    norm_length: int | None = None,
    turn_ids: jax.Array | None = None,
    episode_ids: jax.Array | None = None,
) -> jax.Array:
  """Returns weights [B,T] such that sum(weights * x) is x reduced by `mode`.

  The first four are verl's `loss_agg_mode` (0.9.1):

  token-mean                sum over all masked tokens / their number
  seq-mean-token-sum        mean over episodes of each one's sum
  seq-mean-token-mean       mean over episodes of each one's mean (the paper's 1/|y|)
  seq-mean-token-sum-norm   mean over episodes of each one's sum / norm_length (default T)
  turn-mean-token-mean      mean over all turns of each one's mean; needs `turn_ids`
  seq-mean-turn-mean        mean over episodes of the mean over its turns of each one's mean

  Choice: an episode without any masked token is not counted among the episodes.
  Choice: rows with the same `episode_ids` [B] are parts of one sequence, so an episode has the same
  weight however many segments it was recorded in. verl (0.9.1) counts each of its rows.
  """
  chex.assert_rank(mask, 2)
  mask = mask.astype(jnp.result_type(float))
  lengths = _over_rows(mask.sum(axis=1, keepdims=True), episode_ids)  # [B,1]
  num_episodes = jnp.maximum(count_episodes(mask, episode_ids), 1)
  if mode == 'token-mean':
    return mask / jnp.maximum(mask.sum(), 1)
  if mode == 'seq-mean-token-sum':
    return mask / num_episodes
  if mode == 'seq-mean-token-mean':
    return mask / (jnp.maximum(lengths, 1) * num_episodes)
  if mode == 'seq-mean-token-sum-norm':
    return mask / (num_episodes * (mask.shape[1] if norm_length is None else norm_length))
  if mode in ('turn-mean-token-mean', 'seq-mean-turn-mean'):
    if turn_ids is None:
      raise ValueError(f'aggregation {mode!r} needs turn_ids')
    chex.assert_equal_shape([mask, turn_ids])
    counts = segments.segment_sum(mask, turn_ids, mask.shape[1] + 1)  # [B,T+1] of tokens per turn
    per_turn = mask / jnp.maximum(jnp.take_along_axis(counts, turn_ids, axis=1), 1)
    num_turns = (counts > 0).sum(axis=1, keepdims=True)
    if mode == 'turn-mean-token-mean':
      return per_turn / jnp.maximum(num_turns.sum(), 1)
    num_turns = _over_rows(num_turns, episode_ids)
    return per_turn / (jnp.maximum(num_turns, 1) * num_episodes)
  raise ValueError(f'aggregation {mode!r} is none of {", ".join(AGGREGATIONS)}')


def count_episodes(mask: jax.Array, episode_ids: jax.Array | None = None) -> jax.Array:
  """Returns the number of episodes with a masked token [B,T]; `episode_ids` as above."""
  counts = mask.any(axis=1)
  if episode_ids is None:
    return counts.sum()
  same = (episode_ids[:, None] == episode_ids[None, :]) & counts[None, :]
  is_first = jnp.argmax(same, axis=1) == jnp.arange(len(counts))
  return (counts & is_first).sum()


def _over_rows(x: jax.Array, episode_ids: jax.Array | None) -> jax.Array:
  """Sums x [B,1] over the rows of each episode."""
  if episode_ids is None:
    return x
  same = episode_ids[:, None] == episode_ids[None, :]
  return jnp.where(same, x[:, 0], 0).sum(axis=1, keepdims=True)


def aggregate(
    x: jax.Array,
    mask: jax.Array,
    mode: str,
    norm_length: int | None = None,
    turn_ids: jax.Array | None = None,
    episode_ids: jax.Array | None = None,
) -> jax.Array:
  """Reduces x [B,T] to a scalar over the masked tokens, by one of AGGREGATIONS."""
  chex.assert_equal_shape([x, mask])
  weights = aggregation_weights(mask, mode, norm_length, turn_ids, episode_ids)
  return jnp.sum(weights * jnp.where(mask.astype(bool), x, 0))


def _clip(ratio, logp, advantages, variant):
  del logp
  return clipped_surrogate(
      ratio, advantages, variant.clip_low, variant.clip_high, variant.dual_clip or None
  )


def _cispo(ratio, logp, advantages, variant):
  """Returns sg(clip(w)) A logp, and where the weight was clipped (arXiv 2506.13585)."""
  weight = jnp.clip(ratio, 1 - variant.clip_low, 1 + variant.clip_high)
  return jax.lax.stop_gradient(weight) * advantages * logp, weight != ratio


def _dppo_tv(ratio, logp, advantages, variant):
  """Returns DPPO's surrogate; the token's probability may move by clip_low or clip_high.

  sg(min(w, 20)) A logp where the change p - p_old is within its bound in the direction of A, else 0
  (arXiv 2602.04879, binary total variation). Ratios must be of tokens: p_old = p / w.
  """
  prob, old_prob = _probabilities(ratio, logp)
  up = prob - old_prob > variant.clip_high
  down = old_prob - prob > variant.clip_low
  return _dppo(ratio, logp, advantages, jnp.where(advantages > 0, up, down))


def _dppo_kl(ratio, logp, advantages, variant):
  """Returns DPPO's surrogate; the bounds are of the binary KL between p_old and p, in nats."""
  prob, old_prob = _probabilities(ratio, logp)
  # Not 1 - p + 1e-8: compiled, that is (1 + 1e-8) - p, where 1e-8 is lost.
  rest, old_rest = jnp.maximum(1 - prob, 1e-8), jnp.maximum(1 - old_prob, 1e-8)
  binary_kl = -old_prob * jnp.log(ratio) + old_rest * jnp.log(old_rest / rest)
  up = (binary_kl > variant.clip_high) & (prob > old_prob)
  down = (binary_kl > variant.clip_low) & (prob < old_prob)
  return _dppo(ratio, logp, advantages, jnp.where(advantages > 0, up, down))


def _probabilities(ratio, logp):
  """Returns (p, p_old) of the sampled tokens, as constants."""
  prob = jnp.exp(jax.lax.stop_gradient(logp))
  return prob, jnp.minimum(prob / jax.lax.stop_gradient(ratio), 1)


def _dppo(ratio, logp, advantages, stopped):
  weight = jax.lax.stop_gradient(jnp.minimum(ratio, DPPO_MAX_RATIO))
  return jnp.where(stopped, 0, weight * advantages * logp), stopped


SURROGATES = {'clip': _clip, 'cispo': _cispo, 'dppo_tv': _dppo_tv, 'dppo_kl': _dppo_kl}
