"""Clipping-bias correction: the two cotangents of a policy objective, and the divisor made of them.

The trainer runs `logp, pull = jax.vjp(model_logp, params)` once. `cotangents` returns what to pull
back: one [B,T] array for the gradient g of the loss, one for the clipping bias C, the gradient that
the clip removed. S-PPO and ST-PPO then divide g by a function of ||C|| (arXiv 2511.20718, section
4). `divide` does that before the gradient clip, after it, or outside the optimizer.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from stppo_jax.algorithms import losses
from stppo_jax.algorithms import segments


def cotangents(
    logp: jax.Array,
    batch: Any,
    variant: Any,
    clip_low: float | None = None,
    clip_high: float | None = None,
    weights: jax.Array | None = None,
    dual_clip: float | None = None,
    min_advantage: str | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
  """Returns the cotangents of logp [B,T] for policy loss and clipping bias, and their parts.

  J   = sum_t weight_t s_t,   s_t the surrogate; for 'clip' min(w_t A_t, clip(w_t) A_t)
  J_c = sum_{t clipped} weight_t w_t A_t,   w_t the ratio of the segment that holds t
  C   = grad sum_{t clipped} weight_t (w_t A_t - s_t), what clipping removed. For 'clip' the clipped
        s_t are constant, so that C = grad J_c (Lemma 4.2). That is the gradient of a KL penalty
        sum_{t clipped} sg(-weight_t w_t A_t) (log pi_old - log pi) (KLip-PPO, arXiv 2606.23932).

  Args:
    logp: [B,T] log-probs of the current policy.
    batch: TurnBatch; old_logp, advantages, action_mask and turn_ids are read, and labels where the
      ratio is a function, which `update.with_advantages` has called.
    variant: its ratio and surrogate are used. With ratio 'none' J = sum weight_t A_t logp_t and
      nothing is clipped.
    clip_low, clip_high, dual_clip, min_advantage: in place of the variant's. With min_advantage
      'token' the sign of each A_t decides (the paper's reading), so in an out-of-range turn tokens
      of the harmless sign stay active; with 'turn' the segment's mean advantage decides, and a
      segment is clipped as a unit.
    weights: [B,T] of `losses.aggregation_weights` over the whole mini-batch; by default this
      batch's seq-mean-token-mean, the paper's 1/|y|.

  Returns:
    d(-J)/dlogp [B,T]; C's cotangent [B,T]; a dict of ratio [B,T], clipped [B,T] bool, pg_loss = -J
    and clipped_objective = J_c. Both cotangents treat advantages and weights as constants.

  Choice: tokens that `dual_clip` stops count as clipped: C is all the gradient that clipping
  removed.
  """
  chex.assert_equal_shape([logp, batch.old_logp, batch.advantages, batch.action_mask])
  given = dict(
      clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, min_advantage=min_advantage
  )
  variant = dataclasses.replace(variant, **{k: v for k, v in given.items() if v is not None})
  if weights is None:
    weights = losses.aggregation_weights(batch.action_mask, 'seq-mean-token-mean')
  weights = weights.astype(logp.dtype)
  ids, num_segments, product = _segments(batch, variant)

  def ratio_of(x):
    return segments.importance_ratio(
        x, batch.old_logp, batch.action_mask, ids, num_segments, product
    )

  advantages = advantages_in_min(batch, variant)
  if variant.ratio == 'none':
    return _policy_gradient(logp, ratio_of(logp), weights, advantages)
  return _surrogate_gradients(logp, ratio_of, weights, advantages, variant)


def advantages_in_min(batch: Any, variant: Any) -> jax.Array:
  """Returns the advantages [B,T] that the surrogate is given, 0 outside the agent's tokens."""
  advantages = jnp.where(batch.action_mask > 0, batch.advantages, 0)
  if variant.ratio == 'none' or variant.min_advantage != 'turn':
    return advantages
  ids, num_segments, _ = _segments(batch, variant)
  return segments.segment_mean(advantages, ids, batch.action_mask, num_segments)


def divisor(
    rule: str | Callable, g_norm: jax.Array, c_norm: jax.Array, any_clipped: jax.Array
) -> jax.Array:
  """Returns the scalar that divides the gradient in S-PPO and ST-PPO; a constant when
  differentiated.

  `rule` is a name of DIVISORS, or a function (g_norm, c_norm, any_clipped) -> number. Where that is
  not positive, the divisor is NaN and the step is not taken.
  """
  if not callable(rule) and rule not in DIVISORS:
    raise ValueError(f'divisor rule {rule!r} is none of {", ".join(DIVISORS)}')
  rule = rule if callable(rule) else DIVISORS[rule]
  value = rule(jnp.asarray(g_norm), jnp.asarray(c_norm), jnp.asarray(any_clipped))
  return jax.lax.stop_gradient(jnp.where(value > 0, value, jnp.nan))


def divide(
    order: str, g: Any, rest: Any, divisor: jax.Array, max_norm: float
) -> tuple[Any, Any, jax.Array | None, dict[str, jax.Array]]:
  """Divides the policy's gradient g by D at the place that `order` names.

  before_clip  the optimizer gets clip(g / D + rest). If ||g / D|| is above the clip, D is lost.
  after_clip   the optimizer gets s (g / D + rest), s the factor by which clip scales g + rest
  step         the optimizer gets clip(g + rest); the step that it makes is divided by D, decoupled
               weight decay included. Adam's moments never see D, so it cannot cancel it.

  Args:
    order: one of ORDERS.
    g: the policy's gradient, a tree.
    rest: the value gradient of a shared trunk, which is not divided; None without one. Choice: with
      'step' it is divided too, since one step serves both.
    divisor: D.
    max_norm: of the clip of the global norm.

  Returns:
    The gradient that the optimizer gets; what it would get without the division; what divides its
    step (None: nothing); and norms: `clip` of what is clipped, `entering` of what the optimizer
    gets, and `factor`, by which the division changed the latter (1 with 'step', or where g + rest
    is 0). What an optimizer with moments makes of that factor, `state.optimize` measures.
  """
  whole, quotient = _sum(g, rest), _sum(jax.tree.map(lambda x: x / divisor, g), rest)
  whole_norm = norm(whole)
  undivided, undivided_norm = _clip(whole, max_norm), jnp.minimum(whole_norm, max_norm)
  if order == 'before_clip':
    clip_norm = norm(quotient)
    entering, entering_norm = _clip(quotient, max_norm), jnp.minimum(clip_norm, max_norm)
  elif order == 'after_clip':
    clip_norm = whole_norm
    scale = jnp.where(whole_norm > max_norm, max_norm / whole_norm, 1)
    entering = jax.tree.map(lambda x: x * scale.astype(x.dtype), quotient)
    entering_norm = norm(entering)
  elif order == 'step':
    clip_norm, entering, entering_norm = whole_norm, undivided, undivided_norm
  else:
    raise ValueError(f'order {order!r} is none of {", ".join(ORDERS)}')
  by_step = divisor if order == 'step' else None
  changed = entering_norm / jnp.where(undivided_norm > 0, undivided_norm, 1)
  factor = jnp.where(undivided_norm > 0, changed, 1)
  return entering, undivided, by_step, dict(clip=clip_norm, entering=entering_norm, factor=factor)


def norm(tree: Any) -> jax.Array:
  """Returns the L2 norm of all leaves together, computed in float32."""
  return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))


def cosine(a: Any, b: Any) -> jax.Array:
  """Returns the cosine of two trees of one shape; NaN where one of them is 0."""
  # Not vdot: it flattens, which gathers every shard.
  dot = sum(jnp.sum(x * y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
  return dot / (norm(a) * norm(b))


def _segments(batch, variant):
  """Returns the segments whose tokens share a ratio: ids [B,T], their number, and whether the ratio
  is a product.
  """
  if callable(variant.ratio):
    return *segments.from_labels(batch.labels, batch.action_mask), False
  level, _, product = ('token' if variant.ratio == 'none' else variant.ratio).partition('_')
  ids = segments.segment_ids(level, batch.action_mask, batch.turn_ids, variant.chunk_length)
  return *ids, product == 'product'


def _sum(tree, rest):
  return tree if rest is None else jax.tree.map(jnp.add, tree, rest)


def _clip(tree, max_norm):
  return optax.clip_by_global_norm(max_norm).update(tree, optax.EmptyState())[0]


def _policy_gradient(logp, ratio, weights, advantages):
  """Returns the cotangents of J = sum weight A logp, where nothing is clipped."""
  aux = dict(
      ratio=ratio,
      clipped=jnp.zeros(logp.shape, bool),
      pg_loss=-jnp.sum(weights * advantages * logp),
      clipped_objective=jnp.zeros(()),
  )
  return -weights * advantages, jnp.zeros_like(logp), aux


def _surrogate_gradients(logp, ratio_of, weights, advantages, variant):
  """Returns the cotangents of J = sum weight s, and of what its clip removed."""
  ratio, pull_ratio = jax.vjp(ratio_of, logp)
  surrogate, pull, clipped = jax.vjp(
      lambda x: losses.surrogate(ratio_of(x), x, advantages, variant), logp, has_aux=True
  )
  pressure = weights * advantages  # d(weight w A)/dw
  (loss_cotangent,) = pull(-weights)
  # C over the clipped tokens: grad of weight w A, minus grad of weight s, which is 0 for 'clip'.
  (of_ratio,) = pull_ratio(jnp.where(clipped, pressure, 0))
  (minus_surrogate,) = pull(-jnp.where(clipped, weights, 0))
  aux = dict(
      ratio=ratio,
      clipped=clipped,
      pg_loss=-jnp.sum(weights * surrogate),
      clipped_objective=jnp.sum(jnp.where(clipped, pressure * ratio, 0)),
  )
  return loss_cotangent, of_ratio + minus_surrogate, aux


def _none(g_norm, c_norm, any_clipped):
  """Returns 1."""
  del g_norm, any_clipped
  return jnp.ones_like(c_norm)


def _paper(g_norm, c_norm, any_clipped):
  """Returns ||C|| where something is clipped, else 1 (v2's "clipping-triggered normalization").

  Below 1 it amplifies: the step is largest when clipping is rarest. Choice: where ||C|| is exactly
  0 (clipped tokens without an advantage), 1.
  """
  del g_norm
  return jnp.where(any_clipped & (c_norm > 0), c_norm, 1)


def _floor(g_norm, c_norm, any_clipped):
  """Returns max(1, ||C||)."""
  del g_norm, any_clipped
  return jnp.maximum(c_norm, 1)


def _relative(g_norm, c_norm, any_clipped):
  """Returns (||g|| + ||C||) / ||g||: scale-free, never amplifies, 1 when nothing is clipped.

  Choice: where ||g|| is 0, 1.
  """
  del any_clipped
  return jnp.where(g_norm > 0, 1 + c_norm / jnp.where(g_norm > 0, g_norm, 1), 1)


DIVISORS = {'none': _none, 'paper': _paper, 'floor': _floor, 'relative': _relative}
ORDERS = ('before_clip', 'after_clip', 'step')
