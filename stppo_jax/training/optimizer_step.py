"""The optimizer step: the gradient of the loss, the clipping bias, the division and the optimizers.

`take_step` knows no model: `StepInputs` has the functions that run the policy and the critic. A
step has these phases:

  _compare_rows   computes the cotangents of an objective that compares rows, if there is one
  _sum_gradients  sums g, the gradient of the policy's loss, and the critic's over micro-batches
  _sum_bias       sums C, the gradient that clipping removed, over the bins that have clipped tokens
  _divide         divides g by a function of ||C||, before or after the clip of its norm
  _apply          runs the optimizer; if something is not finite, only counts the step

Signs: the optimizer subtracts its gradient. g is the gradient of the loss -J, so the step follows
-g. C is the gradient of a part of the objective J, with the sign of an ascent. The step of an
objective without a clip would follow -g + C. `stppo/cos_g_c` is the cosine of -g and C.
"""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import NamedTuple
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from stppo_jax.algorithms import correction
from stppo_jax.algorithms import filters
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import variant as variant_lib
from stppo_jax.models import sharding
from stppo_jax.training import diagnostics
from stppo_jax.training import packing as packing_lib
from stppo_jax.training import results
from stppo_jax.training.state import Spec
from stppo_jax.training.state import TrainState
from stppo_jax.types import TurnBatch

Tree = TypeVar('Tree')  # a tree of arrays
AnyLayout = packing_lib.Layout | packing_lib.RowLayout
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class StepInputs:
  """What one optimizer step is computed from: models, rows [b,T] in their bins, their weights."""

  spec: Spec
  state: TrainState
  batch: TurnBatch  # the rows of this step
  weights: filters.LossWeights  # weights of its tokens [b,T] in the sums
  policy: Callable  # (state.actor, Layout) -> TokenOutputs [R,P]
  values: Callable  # (state.critic, Layout) -> outputs of the separate critic [R,P,..]
  # The bins of the rows. None: the models compute the rows [b,T] as they are, all at once.
  packing: packing_lib.Packing | None = None
  mesh: jax.sharding.Mesh | None = None  # where gradients are kept; None: wherever they are

  def placed(self, grads: Tree) -> Tree:
    """Keeps gradients where their parameters are. Otherwise XLA replicates the larger ones."""
    if self.mesh is None:
      return grads
    places = sharding.tree_shardings(grads, self.mesh)
    return jax.lax.with_sharding_constraint(grads, places)

  def sum_micro_batches(
      self, function: Callable[[AnyLayout], Tree], packing: packing_lib.Packing | None
  ) -> Tree:
    """Returns the sum of function(layout) over all micro-batches.

    The sum also joins arrays [b,T] of the micro-batches. Each token belongs to one micro-batch, and
    the array of another one is 0 there.
    """
    spec = self.spec
    if packing is None:
      return function(packing_lib.RowLayout(self.batch.tokens.shape))
    return packing_lib.sum_over(
        function, packing, spec.micro_batch, spec.length_buckets, spec.context_shards
    )


def take_step(inputs: StepInputs) -> tuple[TrainState, Metrics, dict[str, jax.Array]]:
  """Takes the optimizer step of `update.update_step`, whatever models the inputs have.

  The step needs the gradient g of the loss and the clipping bias C (arXiv 2511.20718, Lemma 4.2):

    g = sum_t dlogp_t d(-J)/dlogp_t      C = sum_t dlogp_t dJ_c/dlogp_t
    step = optimizer(clip(g / D)),       D = divisor(||g||, ||C||)

  Both are sums over tokens of the model's gradient dlogp_t times a number per token, the cotangent
  [b,T]. `_sum_gradients` computes both cotangents from the same log-probs, bin by bin, and pulls
  that of g back through the model. It could pull that of C back, too, but then each bin would cost
  a second pull-back. Few bins have a clipped token, and these bins are known after the loop. So
  `_sum_bias` packs them together, repeats their forward pass and pulls the cotangent of C back.

  The cotangents of an objective that compares rows depend on log-probs of other bins. So
  `_compare_rows` runs the forward pass of all bins first. Such an objective has no C.
  """
  spec = inputs.spec
  row_cotangents = None
  if spec.variant.compares_rows:
    row_cotangents = _compare_rows(inputs)
  summed = _sum_gradients(inputs, row_cotangents)
  bias = None  # C, a tree with the shapes of the actor
  if spec.variant.measures_bias:
    bias = _sum_bias(inputs, summed.tokens.bias_cotangent)
  metrics = diagnostics.step_summary(spec, inputs.batch, inputs.weights, summed)
  divided, division_metrics = _divide(inputs, summed, bias)
  metrics |= division_metrics
  step_scale: jax.Array | float = 1.0
  if spec.variant.step_scale != 'none':
    step_scale = jnp.sqrt(metrics['stppo/ess_share'])  # VCPO's rule for Adam
    metrics['stppo/step_scale'] = step_scale
  if spec.has_values:
    metrics['critic/grad_norm'] = correction.norm(summed.critic)
  is_finite = diagnostics.is_finite(metrics)
  # If all tokens are clipped, the gradient is 0, and the optimizer's moments still take a step.
  # Some surrogates count tokens without an advantage as clipped, as verl does.
  is_clipped = summed.tokens.clipped & (inputs.weights.policy != 0)
  is_clipped &= inputs.batch.advantages != 0
  has_gradient = (summed.sums.num_nonzero > 0) | is_clipped.any()
  state, applied_metrics = _apply(
      inputs, divided, summed.critic, is_finite, has_gradient, step_scale
  )
  metrics |= applied_metrics
  logged_tokens = {'ratio': summed.tokens.ratio, 'clipped': summed.tokens.clipped}
  return state, metrics, logged_tokens


def _compare_rows(inputs):
  """Returns the RowCotangents of the step, from a forward pass of all bins."""
  from stppo_jax.algorithms import objectives

  def one_micro_batch(layout):
    outputs, _ = _policy_vjp(inputs, layout)
    read = outputs._replace(entropy=None, value_outputs=None)
    return jax.tree.map(layout.unpack, read)

  outputs = inputs.sum_micro_batches(one_micro_batch, inputs.packing)
  variant = inputs.spec.variant
  return objectives.cotangents(outputs, inputs.batch, variant)


def _policy_vjp(inputs, layout):
  """Returns the policy's outputs [R,P], and the function that pulls cotangents back."""

  def outputs(actor):
    return inputs.policy(actor, layout)

  return jax.vjp(outputs, inputs.state.actor)


def _sum_gradients(inputs, row_cotangents):
  """Sums the gradients of the losses over micro-batches, and joins their numbers per token.

  Returns a PolicyStep. `row_cotangents` are those of an objective that compares rows; else None.
  """
  spec = inputs.spec

  def policy_of_micro_batch(layout):
    outputs, pull = _policy_vjp(inputs, layout)
    zeros = jax.tree.map(jnp.zeros_like, outputs)
    d_tokens, tokens, sums = _policy_cotangents(inputs, layout, outputs, row_cotangents)
    d_outputs = _filled(jax.tree.map(layout.add_up, d_tokens), zeros)
    (actor_grad,) = pull(d_outputs)
    critic_grad = None
    value_tokens = None
    if spec.shared_trunk:
      value_tokens, d_values = _value_loss(inputs, layout, outputs.value_outputs)
      d_values = spec.variant.value_coef * d_values
      d_outputs = zeros._replace(value_outputs=d_values)
      (critic_grad,) = pull(d_outputs)
      critic_grad = inputs.placed(critic_grad)
    actor_grad = inputs.placed(actor_grad)
    return results.PolicyStep(actor_grad, critic_grad, tokens, sums, value_tokens)

  def critic_of_micro_batch(layout):
    value_outputs, pull = _values_vjp(inputs, layout)
    value_tokens, d_values = _value_loss(inputs, layout, value_outputs)
    (critic_grad,) = pull(d_values)
    return inputs.placed(critic_grad), value_tokens

  # Two loops, so that the activations of policy and critic are not in memory together.
  summed = inputs.sum_micro_batches(policy_of_micro_batch, inputs.packing)
  if spec.critic is not None:
    critic_grad, value_tokens = inputs.sum_micro_batches(critic_of_micro_batch, inputs.packing)
    summed = summed._replace(critic=critic_grad, values=value_tokens)
  tokens = summed.tokens
  if row_cotangents is not None:
    tokens = tokens._replace(ratio=row_cotangents.ratio, clipped=row_cotangents.clipped)
    sums = summed.sums._replace(
        pg_loss=row_cotangents.pg_loss,
        row_losses=row_cotangents.row_losses,
        clipped_objective=jnp.zeros(()),  # such an objective has no C
        num_pairs=row_cotangents.num_pairs,
    )
    return summed._replace(tokens=tokens, sums=sums)
  is_counted = inputs.weights.mask > 0
  ratio = jnp.where(is_counted, tokens.ratio, 1)
  # Summing over micro-batches turned booleans into numbers.
  clipped = tokens.clipped > 0
  return summed._replace(tokens=tokens._replace(ratio=ratio, clipped=clipped))


def _values_vjp(inputs, layout):
  """Returns the critic's outputs [R,P,..], and the function that pulls cotangents back."""

  def outputs(critic):
    return inputs.values(critic, layout)

  return jax.vjp(outputs, inputs.state.critic)


def _filled(outputs, others):
  """Returns TokenOutputs, with the fields of `others` where they are None."""
  given = {name: x for name, x in outputs._asdict().items() if x is not None}
  return others._replace(**given)


def _policy_cotangents(inputs, layout, outputs, row_cotangents):
  """Returns the cotangents of the policy's loss in a micro-batch, and its numbers.

  These are TokenOutputs [b,T] with the cotangents, PolicyTokens and PolicySums. Outside of the
  micro-batch all are 0.
  """
  variant = inputs.spec.variant
  is_here = layout.predicted.astype(jnp.float32)  # 1 for the tokens of this micro-batch
  action_mask = inputs.weights.mask * is_here
  batch = dataclasses.replace(inputs.batch, action_mask=action_mask)
  weights = inputs.weights.token * is_here
  logp = layout.unpack(outputs.logp)
  entropy = layout.unpack(outputs.entropy)
  tokens = results.PolicyTokens(logp, entropy)
  sums = results.PolicySums(jnp.zeros(()))
  d_reference_kl = None
  if row_cotangents is None:
    policy_weights = inputs.weights.policy * is_here
    d_logp, d_bias, aux = correction.cotangents(logp, batch, variant, weights=policy_weights)
    tokens = tokens._replace(
        bias_cotangent=d_bias, ratio=aux['ratio'] * is_here, clipped=aux['clipped'] * is_here
    )
    sums = sums._replace(
        pg_loss=aux['pg_loss'],
        row_losses=aux['row_losses'],
        clipped_objective=aux['clipped_objective'],
    )
  else:
    d_logp = row_cotangents.outputs.logp * is_here
    if row_cotangents.outputs.reference_kl is not None:
      d_reference_kl = row_cotangents.outputs.reference_kl * is_here
  if variant.kl_in == 'loss':
    sampler_logp = None
    if variant.kl_ratio:
      sampler_logp = batch.old_logp if batch.behaviour_logp is None else batch.behaviour_logp
    kl, d_kl = losses.kl_penalty(logp, batch.ref_logp, variant.kl_estimator, sampler_logp)
    d_logp += inputs.state.kl_coef * weights * d_kl
    tokens = tokens._replace(kl=kl * is_here)
  if inputs.weights.imitation is not None:
    imitation_weights = inputs.weights.imitation * is_here
    d_logp -= variant.imitation * imitation_weights
    imitated = imitation_weights * logp
    sums = sums._replace(imitation_loss=-jnp.sum(imitated))
  cotangents = variant_lib.TokenOutputs(
      logp=d_logp, reference_kl=d_reference_kl, entropy=-variant.entropy_coef * weights
  )
  num_nonzero: Any = sum(jnp.sum(x != 0) for x in jax.tree.leaves(cotangents))
  return cotangents, tokens, sums._replace(num_nonzero=num_nonzero)


def _value_loss(inputs, layout, outputs):
  """Returns the critic's ValueTokens [b,T], and the cotangent of its outputs [R,P,..]."""
  variant = inputs.spec.variant
  batch = inputs.batch
  outputs = layout.unpack(outputs)  # [b,T,..]: rows that share a place have their own returns

  def loss_of(outputs):
    return variant.value_head.loss(outputs, batch.old_values, batch.returns, variant)

  loss, pull = jax.vjp(loss_of, outputs)
  is_here = layout.predicted.astype(jnp.float32)
  (d_outputs,) = pull(inputs.weights.value * is_here)
  values = variant.value_head.values(outputs, variant)
  tokens = results.ValueTokens(values * is_here, loss * is_here)
  return tokens, layout.add_up(d_outputs)


def _sum_bias(inputs, cotangent):
  """Sums C over the bins in which its cotangent [b,T] is not 0 everywhere; see `take_step`."""

  def one_micro_batch(layout):
    outputs, pull = _policy_vjp(inputs, layout)
    zeros = jax.tree.map(jnp.zeros_like, outputs)
    d_logp = layout.add_up(cotangent)
    d_outputs = zeros._replace(logp=d_logp)
    (bias,) = pull(d_outputs)
    return inputs.placed(bias)

  is_clipped = (cotangent != 0).any(axis=1)
  num_bins = inputs.spec.micro_batch
  packing = inputs.packing
  if packing is not None:
    packing = packing_lib.only(packing, is_clipped, num_bins)
  return inputs.sum_micro_batches(one_micro_batch, packing)


def _divide(inputs, summed, bias):
  """Divides the actor's gradient g by a function of ||C||: returns (DividedGradient, metrics).

  Choice: the divisor divides the actor's whole gradient, with its entropy, KL and imitation terms,
  so their proportions stay.
  """
  spec = inputs.spec
  variant = spec.variant
  g = summed.actor
  g_norm = correction.norm(g)
  metrics = {'stppo/grad_norm': g_norm}
  c_norm = jnp.zeros(())
  if bias is not None:
    c_norm = correction.norm(bias)
    metrics['stppo/bias_norm'] = c_norm
    metrics['stppo/cos_g_c'] = -correction.cosine(g, bias)  # -g and C, see the signs above
  if variant.norm_of == 'loss':
    c_norm = jnp.abs(summed.sums.clipped_objective)
  is_counted = inputs.weights.policy != 0
  any_clipped = (summed.tokens.clipped & is_counted).any()
  divisor = correction.divisor(variant.function('divisor'), g_norm, c_norm, any_clipped)
  value_gradient = summed.critic if spec.shared_trunk else None
  order = variant.divide
  divided = correction.divide(order, g, value_gradient, divisor, spec.actor_clip)
  metrics['stppo/divisor'] = divisor
  metrics['actor/grad_norm'] = divided.norm_before_clip
  metrics['stppo/optimizer_grad_norm'] = divided.norm
  metrics['stppo/grad_factor'] = divided.factor
  if variant.divisor == 'none':
    divided = divided._replace(undivided=None)
  return divided, metrics


def _apply(inputs, divided, value_gradient, is_finite, has_gradient, step_scale):
  """Runs the optimizers. If something is not finite, only counts the step.

  Choice: an actor whose loss has no gradient at any token (`has_gradient`) stays where it is. The
  optimizer's moments and its weight decay alone would move it, and the batch says nothing: no
  token counts, no group has a pair, or all advantages are 0 without an entropy bonus and a KL.
  """
  spec = inputs.spec
  state = inputs.state
  has_tokens = is_finite & inputs.weights.mask.any()
  train_actor = is_finite & has_gradient
  if spec.shared_trunk:
    train_actor |= has_tokens  # the value loss moves the trunk
  train_actor &= state.step >= spec.critic_warmup
  actor = optimize(
      spec.actor_optimizer,
      divided.gradient,
      state.actor,
      state.actor_opt,
      train_actor,
      divided.step_divisor,
      divided.undivided,
      step_scale,
  )
  skipped = jnp.where(is_finite, 0, state.skipped + 1)
  next_step = state.step + 1
  after = dataclasses.replace(state, step=next_step, skipped=skipped)
  after = dataclasses.replace(after, actor=actor.params, actor_opt=actor.opt_state)
  num_steps = _steps_taken(state.actor_opt, state.step)
  metrics = {
      'actor/lr': spec.actor_lr(num_steps),
      'actor/skipped': skipped,
      'stppo/step_norm': actor.step_norm,
      'stppo/applied_factor': actor.factor,
  }
  if spec.critic is not None:
    norm = correction.norm(value_gradient)

    def gradient():
      return correction.clip(value_gradient, norm, spec.critic_clip)

    optimizer = spec.critic_optimizer
    critic = optimize(optimizer, gradient, state.critic, state.critic_opt, has_tokens)
    after = dataclasses.replace(after, critic=critic.params, critic_opt=critic.opt_state)
    num_steps = _steps_taken(state.critic_opt, state.step)
    metrics['critic/lr'] = spec.critic_lr(num_steps)
    metrics['critic/step_norm'] = critic.step_norm
  return after, metrics


class Applied(NamedTuple):
  """What one step of an optimizer made."""

  params: dict
  opt_state: optax.OptState
  step_norm: jax.Array  # [] norm of the change that the parameters' dtype leaves
  factor: jax.Array  # [] by which the division changed the step


def optimize(
    optimizer: optax.GradientTransformation,
    gradient: Callable[[], dict],
    params: dict,
    opt_state: optax.OptState,
    take: jax.Array,
    step_divisor: jax.Array | float = 1.0,
    undivided: Callable[[], dict] | None = None,
    step_scale: jax.Array | float = 1.0,
) -> Applied:
  """Returns parameters and optimizer state after one step, or unchanged if `take` [] is false.

  `gradient` and `undivided` return gradients, inside of the branch that takes the step, so that XLA
  computes them in the optimizer's loops. `step_divisor` divides the step, and `step_scale`
  multiplies it. `factor` is the norm of the step, divided by the norm of the step without the
  division. The same optimizer state makes this other step of `undivided` (None: `gradient`), with
  the same scale. The factor is 1 if nothing is divided or taken, or if the other step is 0.
  """
  opt_state = sharding.to_device(opt_state)
  divisor = step_divisor / step_scale
  is_one = isinstance(divisor, float) and divisor == 1
  is_divided = undivided is not None or not is_one

  # A branch, and not a `where` of all arrays, for which XLA would keep copies of the old ones.
  # The norm has a branch of its own, so that both steps are not in memory together.
  other_norm = None
  if undivided is not None:
    other_gradient = undivided

    def undivided_norm():
      step, _ = optimizer.update(other_gradient(), opt_state, params)
      return correction.norm(step)

    other_norm = jax.lax.cond(take, undivided_norm, lambda: jnp.zeros(()))

  def taken():
    step, new_opt_state = optimizer.update(gradient(), opt_state, params)
    factor = jnp.ones(())
    if is_divided:
      own_norm = correction.norm(step) if other_norm is None else other_norm
      own_norm *= step_scale
      step = jax.tree.map(lambda x: x / divisor, step)
      is_positive = own_norm > 0
      share = correction.norm(step) / jnp.where(is_positive, own_norm, 1)
      factor = jnp.where(is_positive, share, 1)
    new_params = optax.apply_updates(params, step)
    before = optax.tree.cast(params, jnp.float32)
    after = jax.tree.map(_as_stored, new_params)
    change = optax.tree.sub(after, before)
    return Applied(new_params, new_opt_state, correction.norm(change), factor)

  def left():
    return Applied(params, opt_state, jnp.zeros(()), jnp.ones(()))

  return jax.lax.cond(take, taken, left)


def _as_stored(x):
  """Returns x in float32, rounded to its dtype: XLA may leave out the rounding of a cast."""
  if x.dtype == jnp.float32:
    return x
  info = jnp.finfo(x.dtype)
  return jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)


def _steps_taken(opt_state, step):
  """Returns the steps that an optimizer has taken, as its schedule counts; else `step`."""
  counts = optax.tree.get_all_with_path(opt_state, 'count')
  if not counts:
    return step
  _, count = counts[0]
  return sharding.to_device(count)
