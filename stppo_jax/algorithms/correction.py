"""Clipping-bias correction: the two cotangents of a policy objective, and the divisor made of them.

The trainer runs `logp, pull = jax.vjp(model_logp, params)`. `cotangents` returns two arrays [B,T]
to pull back: one for the gradient g of the loss, and one for the clipping bias C, the gradient that
the clip removed. `optimizer_step.take_step` says when each is pulled back. S-PPO and ST-PPO divide
g by a function of ||C|| (arXiv 2511.20718, section 4). `divide` does that before the gradient clip,
after it, or outside the optimizer.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
import optax

from stppo_jax.algorithms import losses
from stppo_jax.algorithms import segments
from stppo_jax.algorithms import variant as variant_lib
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.types import TurnBatch

Tree = TypeVar('Tree')  # a tree of arrays


class Cotangents(NamedTuple):
  """The results of `cotangents`. Advantages and weights are constants."""

  loss: jax.Array  # d(-J)/dlogp [B,T]
  bias: jax.Array  # the cotangent of C [B,T]
  # 'ratio' [B,T], 'clipped' [B,T] bool, 'pg_loss' -J, 'row_losses' [B] its terms by row, and
  # 'clipped_objective' J_c.
  aux: dict[str, jax.Array]


def cotangents(
    logp: jax.Array, batch: TurnBatch, variant: BaseVariant, weights: jax.Array | None = None
) -> Cotangents:
  """Returns the cotangents of logp [B,T] for the policy's loss and the clipping bias, and aux.

  J   = sum_t weight_t s_t,   s_t the surrogate; for 'clip' min(w_t A_t, clip(w_t) A_t)
  J_c = sum_{t clipped} weight_t w_t A_t,   w_t the ratio of the segment of t
  C   = grad sum_{t clipped} weight_t (w_t A_t - s_t), the gradient that clipping removed

  For 'clip' the clipped s_t are constant, so that C = grad J_c (Lemma 4.2). It is also the gradient
  of a KL penalty sum_{t clipped} sg(-weight_t w_t A_t) (log pi_old - log pi) (KLip-PPO, arXiv
  2606.23932). With the ratio 'none', J = sum weight_t A_t logp_t, and nothing is clipped.

  With variant.min_advantage='token' the sign of each A_t decides about its clip (the paper's
  reading), so that tokens of the harmless sign stay active in a turn that is out of range. With
  'turn' the mean advantage of the segment decides, and a segment is clipped as a unit.

  Args:
    logp: [B,T] log-probs of the current policy.
    batch: old_logp, advantages, action_mask and turn_ids are read, and labels if the ratio is a
      function (`update.with_advantages` has called it).
    variant: its ratio, surrogate and clip are used.
    weights: [B,T] of `losses.aggregation_weights` over the whole mini-batch. The default is the
      seq-mean-token-mean of this batch, the paper's 1/|y|.

  Choice: tokens that `dual_clip` stops count as clipped, because C is all the gradient that
  clipping removed.
  """
  chex.assert_equal_shape([logp, batch.old_logp, batch.advantages, batch.action_mask])
  if weights is None:
    weights = losses.aggregation_weights(batch.action_mask, 'seq-mean-token-mean')
  weights = weights.astype(logp.dtype)
  advantages = advantages_in_min(batch, variant)
  ids, num_segments, is_product = _segments(batch, variant)

  def ratio_of(logp):
    return segments.importance_ratio(
        logp, batch.old_logp, batch.action_mask, ids, num_segments, is_product
    )

  def surrogate_of(logp):
    return losses.surrogate(ratio_of(logp), logp, advantages, variant)

  ratio, pull_ratio = jax.vjp(ratio_of, logp)
  surrogate, pull_surrogate, clipped = jax.vjp(surrogate_of, logp, has_aux=True)
  (loss_cotangent,) = pull_surrogate(-weights)

  # C is the gradient of weight (w A - s) over the clipped tokens. For 'clip' that of s is 0.
  pressure = weights * advantages  # d(weight w A)/dw
  clipped_pressure = jnp.where(clipped, pressure, 0)
  clipped_weights = jnp.where(clipped, weights, 0)
  (ratio_cotangent,) = pull_ratio(clipped_pressure)
  (surrogate_cotangent,) = pull_surrogate(-clipped_weights)
  bias_cotangent = ratio_cotangent + surrogate_cotangent

  objective = weights * surrogate
  aux = {
      'ratio': ratio,
      'clipped': clipped,
      'pg_loss': -objective.sum(),
      'row_losses': -objective.sum(axis=1),
      'clipped_objective': jnp.sum(jnp.where(clipped, pressure * ratio, 0)),
  }
  return Cotangents(loss_cotangent, bias_cotangent, aux)


def advantages_in_min(batch: TurnBatch, variant: BaseVariant) -> jax.Array:
  """Returns the advantages [B,T] that the surrogate receives; 0 outside the agent's tokens."""
  is_agent = batch.action_mask > 0
  advantages = jnp.where(is_agent, batch.advantages, 0)
  if variant.ratio == 'none' or variant.min_advantage != 'turn':
    return advantages
  ids, num_segments, _ = _segments(batch, variant)
  return segments.segment_mean(advantages, ids, batch.action_mask, num_segments)


def divisor(
    rule: str | Callable, g_norm: jax.Array, c_norm: jax.Array, any_clipped: jax.Array
) -> jax.Array:
  """Returns the scalar that divides the gradient. It is a constant for differentiation.

  `rule` is a name of DIVISORS, or a function (g_norm, c_norm, any_clipped) -> number. If
  the number is not positive or ||C|| is not finite, the divisor is NaN and the trainer skips the
  step.
  """
  if isinstance(rule, str) and rule not in DIVISORS:
    raise ValueError(f'divisor {rule!r} is none of {", ".join(DIVISORS)}')
  function = DIVISORS[rule] if isinstance(rule, str) else rule
  value = function(g_norm, c_norm, any_clipped)
  is_usable = (value > 0) & jnp.isfinite(c_norm)
  value = jnp.where(is_usable, value, jnp.nan)
  return jax.lax.stop_gradient(value)


class DividedGradient(NamedTuple):
  """The results of `divide`."""

  # Functions, so that XLA computes the scaled trees in the loops of the optimizer that reads them.
  gradient: Callable[[], Any]  # the gradient for the optimizer
  undivided: Callable[[], Any] | None  # without the division; None: nothing is divided
  step_divisor: jax.Array | float  # divides the optimizer's step
  norm_before_clip: jax.Array  # [] the norm that the clip bounds
  norm: jax.Array  # [] the norm of `gradient`
  # [] `norm` divided by the norm of `undivided`; 1 with 'step', and where g + rest is 0.
  factor: jax.Array


def divide(
    order: str, g: Tree, rest: Tree | None, divisor: jax.Array, max_norm: float
) -> DividedGradient:
  """Divides the policy's gradient g by the divisor D, at the place that `order` names.

  before_clip  the optimizer gets clip(g / D + rest). If ||g / D|| is above the clip, D is lost.
  after_clip   the optimizer gets s (g / D + rest), where s is the factor by which the clip scales
               g + rest
  step         the optimizer gets clip(g + rest), and its step is divided by D, decoupled weight
               decay included. Adam's moments never see D, so that Adam cannot cancel it.

  Args:
    order: one of variant.ORDERS.
    g: the policy's gradient, a tree.
    rest: the value gradient of a shared trunk, which is not divided; None without one. Choice: with
      'step' it is divided too, because one step serves both.
    divisor: D.
    max_norm: bound of the clip of the global norm.

  `optimizer_step.optimize` measures how an optimizer with moments changes the factor.
  """

  def whole():
    return _add(g, rest)

  def quotient():
    g_divided = jax.tree.map(lambda x: x / divisor, g)
    return _add(g_divided, rest)

  def undivided():
    return clip(whole(), whole_norm, max_norm)

  def divided():
    return clip(quotient(), norm_before_clip, max_norm)

  whole_norm = norm(whole())
  undivided_norm = jnp.minimum(whole_norm, max_norm)
  norm_before_clip = whole_norm
  gradient = divided
  step_divisor: jax.Array | float = 1.0
  if order == 'before_clip':
    norm_before_clip = norm(quotient())
    optimizer_norm = jnp.minimum(norm_before_clip, max_norm)
  elif order == 'after_clip':
    optimizer_norm = norm(divided())
  elif order == 'step':
    gradient = undivided
    optimizer_norm = undivided_norm
    step_divisor = divisor
  else:
    raise ValueError(f'order {order!r} is none of {", ".join(variant_lib.ORDERS)}')

  has_gradient = undivided_norm > 0
  change = optimizer_norm / jnp.where(has_gradient, undivided_norm, 1)
  factor = jnp.where(has_gradient, change, 1)
  return DividedGradient(
      gradient, undivided, step_divisor, norm_before_clip, optimizer_norm, factor
  )


def clip(tree: Tree, tree_norm: jax.Array, max_norm: float) -> Tree:
  """Returns the tree, scaled down if `tree_norm` [] (its own or another) is above the bound."""
  is_too_large = tree_norm > max_norm
  scale = jnp.where(is_too_large, max_norm / tree_norm, 1)
  return jax.tree.map(lambda x: x * scale.astype(x.dtype), tree)


def norm(tree: object) -> jax.Array:
  """Returns the L2 norm of all leaves together, computed in float32."""
  tree = optax.tree.cast(tree, jnp.float32)
  return optax.tree.norm(tree)


def cosine(a: object, b: object) -> jax.Array:
  """Returns the cosine of two trees of one shape; NaN where one of them is 0."""
  # Not vdot: it flattens, which gathers every shard.
  products = optax.tree.mul(a, b)
  dot = optax.tree.sum(products)
  return dot / (norm(a) * norm(b))


def _segments(batch, variant):
  """Returns segment ids [B,T], their number, and whether a segment's ratio is a product."""
  if callable(variant.ratio):
    ids, num_segments = segments.from_labels(batch.labels, batch.action_mask)
    return ids, num_segments, False
  ratio = 'token' if variant.ratio == 'none' else variant.ratio
  level, _, product = ratio.partition('_')
  ids, num_segments = segments.segment_ids(
      level, batch.action_mask, batch.turn_ids, variant.chunk_length
  )
  return ids, num_segments, product == 'product'


def _add(tree, rest):
  return tree if rest is None else optax.tree.add(tree, rest)


# --- The divisors of a variant: (g_norm, c_norm, any_clipped) -> number ---------------------------


def no_divisor(g_norm: jax.Array, c_norm: jax.Array, any_clipped: jax.Array) -> jax.Array:
  """Returns 1."""
  del g_norm, any_clipped
  return jnp.ones_like(c_norm)


def paper_divisor(g_norm: jax.Array, c_norm: jax.Array, any_clipped: jax.Array) -> jax.Array:
  """Returns ||C|| where something is clipped, else 1 (v2's "clipping-triggered normalization").

  A norm below 1 amplifies: the step is largest when clipping is rarest.
  Choice: 1 where ||C|| is exactly 0 (clipped tokens without an advantage).
  """
  del g_norm
  divides = any_clipped & (c_norm > 0)
  return jnp.where(divides, c_norm, 1)


def floor_divisor(g_norm: jax.Array, c_norm: jax.Array, any_clipped: jax.Array) -> jax.Array:
  """Returns max(1, ||C||)."""
  del g_norm, any_clipped
  return jnp.maximum(c_norm, 1)


def relative_divisor(g_norm: jax.Array, c_norm: jax.Array, any_clipped: jax.Array) -> jax.Array:
  """Returns (||g|| + ||C||) / ||g||: scale-free, never amplifies, 1 when nothing is clipped.

  Choice: 1 where ||g|| is 0.
  """
  del any_clipped
  has_gradient = g_norm > 0
  share = c_norm / jnp.where(has_gradient, g_norm, 1)
  return jnp.where(has_gradient, 1 + share, 1)


DIVISORS = {
    'none': no_divisor,
    'paper': paper_divisor,
    'floor': floor_divisor,
    'relative': relative_divisor,
}
