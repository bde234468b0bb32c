"""Clipping-bias correction: the two cotangents of a policy objective, and the divisor made of them.

The trainer runs `logp, pull = jax.vjp(model_logp, params)` once. `cotangents` gives what to pull back:
one [B,T] array for the gradient g of the loss, one for the clipping bias C, the gradient that the clip
removed. S-PPO and ST-PPO then divide g by a function of ||C|| (arXiv 2511.20718, section 4).
"""

import chex
import jax
import jax.numpy as jnp

from stppo_jax.algorithms import losses
from stppo_jax.algorithms import segments


def cotangents(
    logp,
    batch,
    variant,
    clip_low=0.2,
    clip_high=0.2,
    weights=None,
    dual_clip=None,
    min_advantage=None,
):
  """Cotangents of logp [B,T] for the policy loss and for the clipping bias, and the parts seen.

  J   = sum_t weight_t min(w_t A_t, clip(w_t) A_t),   w_t the ratio of the segment that holds t
  J_c = sum_{t clipped} weight_t w_t A_t,             so that C = grad J_c        (Lemma 4.2)

  Args:
    logp: [B,T] log-probs of the current policy.
    batch: TurnBatch; old_logp, advantages, action_mask and turn_ids are read.
    variant: a row of VARIANTS; its ratio level is used. With ratio 'none' J = sum weight_t A_t logp_t
      and nothing is clipped.
    clip_low, clip_high: the ratio is held within [1 - clip_low, 1 + clip_high]. A variant's own
      (GSPO's are narrow) are given by the caller.
    weights: [B,T] of `losses.aggregation_weights` over the whole mini-batch; by default this batch's
      seq-mean-token-mean, the paper's 1/|y|.
    dual_clip: see `losses.clipped_surrogate`.
    min_advantage: 'token': the sign of each A_t decides (the paper's reading), so in an out-of-range
      turn tokens of the harmless sign stay active; 'turn': the segment's mean advantage decides, and
      a segment is clipped as a unit. Default: the variant's.

  Returns:
    d(-J)/dlogp [B,T]; dJ_c/dlogp [B,T]; a dict of ratio [B,T], clipped [B,T] bool, pg_loss = -J and
    clipped_objective = J_c. Both cotangents treat advantages and weights as constants.

  Choice: tokens that `dual_clip` stops count as clipped: C is all the gradient that clipping removed.
  """
  chex.assert_equal_shape([logp, batch.old_logp, batch.advantages, batch.action_mask])
  if weights is None:
    weights = losses.aggregation_weights(batch.action_mask, 'seq-mean-token-mean')
  ids, num_segments = segments.segment_ids(
      'token' if variant.ratio == 'none' else variant.ratio, batch.action_mask, batch.turn_ids
  )
  ratio, pull_ratio = jax.vjp(
      lambda x: segments.importance_ratio(x, batch.old_logp, batch.action_mask, ids, num_segments),
      logp,
  )
  weights = weights.astype(logp.dtype)
  advantages = jnp.where(batch.action_mask > 0, batch.advantages, 0)

  if variant.ratio == 'none':
    aux = dict(
        ratio=ratio,
        clipped=jnp.zeros(logp.shape, bool),
        pg_loss=-jnp.sum(weights * advantages * logp),
        clipped_objective=jnp.zeros(()),
    )
    return -weights * advantages, jnp.zeros_like(logp), aux

  if (min_advantage or variant.min_advantage) == 'turn':
    advantages = segments.segment_mean(advantages, ids, batch.action_mask, num_segments)
  surrogate, clipped = losses.clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)
  pressure = weights * advantages  # d(weight w A)/dw
  (loss_cotangent,) = pull_ratio(-jnp.where(clipped, 0, pressure))
  (bias_cotangent,) = pull_ratio(jnp.where(clipped, pressure, 0))
  aux = dict(
      ratio=ratio,
      clipped=clipped,
      pg_loss=-jnp.sum(weights * surrogate),
      clipped_objective=jnp.sum(jnp.where(clipped, pressure * ratio, 0)),
  )
  return loss_cotangent, bias_cotangent, aux


def divisor(rule, g_norm, c_norm, any_clipped):
  """What S-PPO and ST-PPO divide the gradient by; a scalar, constant for differentiation.

  none      1
  paper     ||C|| where something is clipped, else 1. Below 1 it amplifies: the step is largest when
            clipping is rarest (v2's "clipping-triggered normalization")
  floor     max(1, ||C||)
  relative  (||g|| + ||C||) / ||g||: scale-free, never amplifies, 1 when nothing is clipped

  Choice: where ||C|| is exactly 0 (clipped tokens of no advantage), `paper` divides by 1; where ||g||
  is 0, `relative` does.
  """
  g_norm, c_norm = jnp.asarray(g_norm), jnp.asarray(c_norm)
  if rule == 'none':
    value = jnp.ones_like(c_norm)
  elif rule == 'paper':
    value = jnp.where(jnp.asarray(any_clipped) & (c_norm > 0), c_norm, 1)
  elif rule == 'floor':
    value = jnp.maximum(c_norm, 1)
  elif rule == 'relative':
    value = jnp.where(g_norm > 0, 1 + c_norm / jnp.where(g_norm > 0, g_norm, 1), 1)
  else:
    raise ValueError(f'divisor rule {rule!r} is none of none, paper, floor, relative')
  return jax.lax.stop_gradient(value)
