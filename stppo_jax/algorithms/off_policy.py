"""Importance weights for episodes that another policy than the trainer's has sampled.

Two gaps add up. The sampler's arithmetic differs from the trainer's, and with a pipeline its
parameters are older. PPO's ratio starts from old_logp, the trainer's log-probs. The weights here
bridge behaviour_logp, the sampler's log-probs, and old_logp. The levels 'token' and 'sequence' are
verl's `rollout_is`, and 'sequence_geometric' is ROLL's granularity 'geometric'. All results are
constants for differentiation.
"""

import math

import chex
import jax
import jax.numpy as jnp

from stppo_jax.algorithms import losses
from stppo_jax.algorithms import segments
from stppo_jax.algorithms.variant import CORRECTION_LEVELS

_ROUNDING = 1e-6  # rounding error of a logarithm


def log_weights(
    old_logp: jax.Array,
    behaviour_logp: jax.Array,
    action_mask: jax.Array,
    turn_ids: jax.Array,
    level: str,
) -> jax.Array:
  """Returns the logarithms of the importance weights w [B,T]; 0 outside the agent's tokens.

  With d_t = old_logp_t - behaviour_logp_t, w_t is

  none                1
  token               exp(d_t): low variance, but it ignores how likely the context was
  turn                exp(mean of d over the turn): Turn-PPO's ratio (arXiv 2511.20718)
  sequence            exp(sum of d over the row): unbiased but for the truncation, of high variance.
                      It scales a whole batch down where most sums are negative.
  sequence_geometric  exp(mean of d over the row)
  sequence_mean       mean of exp(d) over the row

  Choice: 'sequence' is the product, as in verl, and 'turn' is the geometric mean, as in the paper.
  """
  chex.assert_equal_shape([old_logp, behaviour_logp, action_mask, turn_ids])
  if level not in CORRECTION_LEVELS:
    raise ValueError(f'level {level!r} is none of {", ".join(CORRECTION_LEVELS)}')
  if level == 'none':
    return jnp.zeros_like(old_logp)
  mask = action_mask > 0
  difference = old_logp - behaviour_logp
  log_ratio = jnp.where(mask, difference, 0)
  if level == 'token':
    return log_ratio
  segment_level = level.partition('_')[0]
  ids, num_segments = segments.segment_ids(segment_level, action_mask, turn_ids)
  if level == 'sequence':
    totals = segments.segment_sum(log_ratio, ids, num_segments)
    own_totals = jnp.take_along_axis(totals, ids, axis=1)
    return own_totals * mask
  if level == 'sequence_mean':
    ratio = jnp.exp(segments.bounded(log_ratio))
    mean = segments.segment_mean(ratio, ids, action_mask, num_segments)
    mean = jnp.where(mask, mean, 1)
    return jnp.log(mean)
  return segments.segment_mean(log_ratio, ids, action_mask, num_segments)


def truncated(log_w: jax.Array, threshold: float, low: float = 0.0) -> jax.Array:
  """Returns min(w, threshold) [B,T] from log w.

  With `low` above 0, weights outside [low, threshold] become 0 instead (IcePop).
  """
  # Truncated before exp, because the product over a long sequence overflows.
  max_log_w = min(math.log(threshold), segments.MAX_LOG_RATIO)
  log_w_below = jnp.minimum(log_w, max_log_w)
  weights = jnp.exp(log_w_below)
  if low:
    is_accepted = accepted(log_w, low, threshold)
    weights = jnp.where(is_accepted, weights, 0)
  return jax.lax.stop_gradient(weights)


def accepted(log_w: jax.Array, low: float, high: float) -> jax.Array:
  """Returns where w is within [low, high], [B,T] bool, with room for the rounding of a logarithm.

  verl's rejections 'token_k1', 'seq_sum_k1' and 'seq_mean_k1' are 'token', 'sequence' and
  'sequence_geometric' here. Its bounds are those of 1 / w.
  """
  is_above = log_w >= jnp.log(low) - _ROUNDING
  is_below = log_w <= jnp.log(high) + _ROUNDING
  return is_above & is_below


def normalised(weights: jax.Array, action_mask: jax.Array, level: str) -> jax.Array:
  """Returns the weights [B,T] divided by their mean over tokens; over rows for a sequence level.

  Choice: the mean is taken over the whole batch. If it is 0, nothing is divided.
  """
  unit = 'token-mean'
  if level.startswith('sequence'):
    unit = 'seq-mean-token-mean'
  mean = losses.aggregate(weights, action_mask, unit)
  is_agent = action_mask > 0
  has_mean = is_agent & (mean > 1e-8)
  quotient = weights / jnp.maximum(mean, 1e-8)
  return jnp.where(has_mean, quotient, weights)


def effective_share(
    logp: jax.Array, behaviour_logp: jax.Array, action_mask: jax.Array
) -> jax.Array:
  """Returns the effective sample size of the rows divided by their number, from 1/B to 1.

  ESS = (sum_i w_i)^2 / sum_i w_i^2,   w_i = exp(sum of logp - behaviour_logp over row i)

  (VCPO, arXiv 2602.17616). Rows without agent tokens do not count.
  Choice: w uses the current policy, so that it contains both the age of the batch and the steps
  taken on it. log w is kept within 20 of the largest.
  """
  chex.assert_equal_shape([logp, behaviour_logp, action_mask])
  mask = action_mask > 0
  has_tokens = mask.any(axis=1)
  difference = logp - behaviour_logp
  log_ratio = jnp.where(mask, difference, 0)
  log_w = log_ratio.sum(axis=1)
  log_w = jnp.where(has_tokens, log_w, -jnp.inf)
  log_w = jax.lax.stop_gradient(log_w)
  # Relative to the largest: a share does not depend on a common factor, and nothing overflows.
  any_tokens = has_tokens.any()
  largest = log_w.max()
  log_w -= jnp.where(any_tokens, largest, 0)
  log_w = jnp.maximum(log_w, -segments.MAX_LOG_RATIO)
  w = jnp.exp(log_w)
  w = jnp.where(has_tokens, w, 0)
  squares = jnp.square(w)
  num_rows = has_tokens.sum()
  most = squares.sum() * num_rows
  share = jnp.square(w.sum())
  share /= jnp.maximum(most, 1e-30)
  return jnp.where(any_tokens, share, 1)
