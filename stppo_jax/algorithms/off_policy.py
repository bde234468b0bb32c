"""Importance weights for episodes that were sampled by another policy than the trainer's.

Two gaps add up: the sampler's arithmetic differs from the trainer's, and with a pipeline its
parameters are older. PPO's ratio starts at old_logp, the trainer's own; these weights bridge
behaviour_logp and old_logp. Levels 'token' and 'sequence' are verl's `rollout_is`, the threshold
its `rollout_is_threshold`.
"""

import chex
import jax
import jax.numpy as jnp

from stppo_jax.algorithms import segments

LEVELS = ('none', 'token', 'turn', 'sequence')


def truncated_weights(
    old_logp: jax.Array,
    behaviour_logp: jax.Array,
    action_mask: jax.Array,
    turn_ids: jax.Array,
    level: str,
    threshold: float,
) -> jax.Array:
  """Returns min(w, threshold) [B,T], 1 outside the agent's tokens; constant for differentiation.

  With d_t = old_logp_t - behaviour_logp_t, w_t is

  none      1
  token     exp(d_t): low variance; ignores how likely the context was
  turn      exp(mean of d over the turn): Turn-PPO's ratio (arXiv 2511.20718), for the same segments
  sequence  exp(sum of d over the row): unbiased but for the truncation, of high variance

  Choice: 'sequence' is the product, as verl has it, 'turn' the geometric mean, as the paper's
  ratio.
  """
  chex.assert_equal_shape([old_logp, behaviour_logp, action_mask, turn_ids])
  if level == 'none':
    return jnp.ones_like(old_logp)
  log_w = log_weights(old_logp, behaviour_logp, action_mask, turn_ids, level)
  # Truncated before exp: the product over a long sequence overflows.
  return jax.lax.stop_gradient(jnp.exp(jnp.minimum(log_w, jnp.log(threshold))))


def log_weights(
    old_logp: jax.Array,
    behaviour_logp: jax.Array,
    action_mask: jax.Array,
    turn_ids: jax.Array,
    level: str,
) -> jax.Array:
  """Returns log w [B,T] of `truncated_weights` before truncation; 0 outside the agent's tokens."""
  chex.assert_equal_shape([old_logp, behaviour_logp, action_mask, turn_ids])
  mask = action_mask.astype(old_logp.dtype)
  log_ratio = jnp.where(mask > 0, old_logp - behaviour_logp, 0)
  if level == 'token':
    return log_ratio
  ids, num_segments = segments.segment_ids(level, action_mask, turn_ids)
  if level == 'turn':
    return segments.segment_mean(log_ratio, ids, action_mask, num_segments)
  totals = segments.segment_sum(log_ratio, ids, num_segments)
  return jnp.take_along_axis(totals, ids, axis=1) * mask
