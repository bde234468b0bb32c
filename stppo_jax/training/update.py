"""The update: TrainState and TurnBatch in, TrainState and metrics out; runs on the devices.

Three pure functions, compiled by `compile_functions`: `annotate` (log-probs and values before the
update), `with_advantages`, and `update_step`, which is one optimizer step in four parts:

  _accumulate       sums g, the gradient of the objective, and the critic's over micro-batches
  _accumulate_bias  sums C, the gradient that clipping removed, over the bins with a share in it
  _divide           divides g by a function of ||C||, before or after the clip of the norm
  _apply            runs the optimizer; where something is not finite, only counts the step

Models compute bins of several rows each (see `packing`); everything else works on rows.
"""

import dataclasses
import functools
import types
import typing

import jax
import jax.numpy as jnp
import optax

from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import correction
from stppo_jax.algorithms import filters
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import off_policy
from stppo_jax.algorithms import variants
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.training import diagnostics
from stppo_jax.training import packing as packing_lib
from stppo_jax.training import state as train_state
from stppo_jax.training.state import Frozen
from stppo_jax.training.state import Spec
from stppo_jax.training.state import TrainState
from stppo_jax.types import TurnBatch

Metrics = dict[str, jax.Array]


class Functions(typing.NamedTuple):
  """The compiled functions of a run."""

  annotate: typing.Any  # (state, frozen, batch, steps) -> (batch, metrics)
  with_advantages: typing.Any  # (state, batch) -> (state, batch, metrics)
  update_step: typing.Any  # (state, frozen, batch, step) -> (state, metrics, seen)

  def num_compilations(self) -> int:
    """Programs compiled so far in this process: one per function and shape of batch."""
    return sum(function._cache_size() for function in self)


def compile_functions(
    spec: Spec, state: TrainState, frozen: Frozen, mesh: jax.sharding.Mesh
) -> Functions:
  """Jits the three functions over the mesh, with arrays or shapes where they are; donates states.

  Runs of one process whose settings and places are equal share their programs. Choice: not where
  the objective has a callable that is no plain function. Such an object may change between two
  runs, and the programs hold what it was when they were traced.
  """
  places, tree = jax.tree.flatten(jax.tree.map(lambda x: x.sharding, (state, frozen)))
  own = [getattr(spec.variant, column) for column in variants.BUILT_IN]
  fixed = all(isinstance(part, (str, types.FunctionType)) for part in own)
  make = _jitted if fixed else _jitted.__wrapped__
  return make(spec, mesh, tree, tuple(places))


@functools.lru_cache(maxsize=32)
def _jitted(spec, mesh, tree, places):  # a tree of shardings and its leaves
  state_sharding, frozen_sharding = jax.tree.unflatten(tree, places)
  rows, whole = sharding.rows(mesh), sharding.replicated(mesh)
  critic = spec.critic and dataclasses.replace(spec.critic, row_sharding=rows)
  spec = dataclasses.replace(
      spec, actor=dataclasses.replace(spec.actor, row_sharding=rows), critic=critic
  )

  def jit(function, ins, outs, donate=()):
    function = functools.partial(function, spec, mesh)
    return jax.jit(function, in_shardings=ins, out_shardings=outs, donate_argnums=donate)

  ins = (state_sharding, frozen_sharding, rows, whole)
  return Functions(
      annotate=jit(annotate, ins, (rows, whole)),
      with_advantages=jit(
          with_advantages, (state_sharding, rows), (state_sharding, rows, whole), donate=(0,)
      ),
      update_step=jit(update_step, ins, (state_sharding, whole, whole), donate=(0,)),
  )


def annotate(
    spec: Spec,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    frozen: Frozen,
    batch: TurnBatch,
    steps: packing_lib.Step,
) -> tuple[TurnBatch, Metrics]:
  """Fills in old_logp, ref_logp and old_values [B,T]; measures the gap of sampler and trainer.

  `steps` are the first epoch's, stacked: in their bins no sum is rounded otherwise than in those
  steps, so that the first ratio is exactly 1 on CPUs (with old_logp 'trainer'). On GPUs it is 1 up
  to rounding: the products of two programs may be computed by different kernels.
  """
  del mesh
  variant = spec.variant
  actor, reference = frozen.policy(state.actor), sharding.to_device(frozen.reference_policy())
  critic = state.critic and sharding.to_device(frozen.value_model(state.critic))

  def one_step(step):
    tokens = batch.tokens[step.rows]
    replayed = None if batch.routes is None else batch.routes[step.rows]

    def per_token(layout):
      (logp, _, values), routing = _policy(spec, actor, tokens, layout, replayed)
      if spec.critic is not None:
        values = _critic(spec, critic, tokens, layout)
      if variant.kl_in == 'none':
        ref_logp = logp
      else:
        ref_logp = _policy(spec, reference, tokens, layout)[0][0]
      found = jax.tree.map(layout.unpack, (logp, ref_logp, values))
      return found, *diagnostics.routing(spec, layout, routing)

    zeros = jnp.zeros(tokens.shape)
    total = (zeros, zeros, zeros), *diagnostics.no_routing(spec, tokens.shape)
    return packing_lib.sum_over(
        per_token, step.packing, spec.micro_batch, spec.lengths, tokens.shape[1], total
    )

  def in_order(x):
    rows, of_row = steps.rows.reshape(-1), x.shape[2:]
    return jnp.zeros((len(batch.tokens), *of_row), x.dtype).at[rows].set(x.reshape(-1, *of_row))

  found, routes, load = jax.lax.map(one_step, steps)
  logp, ref_logp, values = jax.tree.map(in_order, found)
  mask = batch.action_mask.astype(jnp.float32)
  assert batch.behaviour_logp is not None
  gap = (logp, batch.behaviour_logp, mask, batch.turn_ids)
  bounds = (variant.rollout_is_threshold, variant.rollout_is_low)
  metrics = diagnostics.sampler_gap(*gap, variant.rollout_is, *bounds)
  metrics |= diagnostics.routing_summary(spec, load)
  old_logp = batch.behaviour_logp if variant.old_logp == 'sampler' else logp
  batch = dataclasses.replace(batch, old_logp=old_logp * mask, ref_logp=ref_logp * mask)
  routes = batch.routes if routes is None else in_order(routes)
  return dataclasses.replace(batch, old_values=values * mask, routes=routes), metrics


def with_advantages(
    spec: Spec, mesh: jax.sharding.Mesh, state: TrainState, batch: TurnBatch
) -> tuple[TrainState, TurnBatch, Metrics]:
  """Fills in advantages and returns, and what the policy's loss makes of each token.

  Adds the KL penalty to the reward and adapts its coefficient.
  """
  del mesh
  variant, mask = spec.variant, batch.action_mask.astype(jnp.float32)
  metrics = {}
  if variant.kl_in != 'none':
    kl = losses.kl(batch.old_logp, batch.ref_logp, variant.kl_estimator) * mask
    # Over sequences, as in verl.
    mean_kl = losses.aggregate(kl, mask, 'seq-mean-token-mean', episode_ids=batch.episode_ids)
    if variant.kl_in == 'reward':
      metrics = {'actor/reward_kl_penalty': mean_kl, 'actor/reward_kl_penalty_coeff': state.kl_coef}
      batch = dataclasses.replace(batch, rewards=batch.rewards - state.kl_coef * kl)
    if variant.kl_target:
      num_episodes = losses.count_episodes(mask, batch.episode_ids)
      state = train_state.adapt_kl(state, variant, mean_kl, num_episodes)
    if variant.kl_in == 'loss':
      metrics = {'actor/kl_coef': state.kl_coef}  # of the steps to come
  if callable(variant.ratio):
    batch = dataclasses.replace(batch, labels=variant.ratio(batch, variant))
  batch = filters.apply(advantages.estimate(batch, variant), variant)
  if batch.loss_mask is not None:
    metrics['stppo/dropped_tokens'] = 1 - batch.loss_mask.sum() / jnp.maximum(mask.sum(), 1)
  return state, batch, metrics | diagnostics.batch_summary(batch, mask, spec)


def update_step(
    spec: Spec,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    frozen: Frozen,
    batch: TurnBatch,
    step: packing_lib.Step,
) -> tuple[TrainState, Metrics, dict[str, jax.Array]]:
  """Takes one optimizer step of actor and critic on the step's rows of the batch.

  g = grad of the objective (surrogate, entropy, KL) and C = the gradient that clipping removed
  (arXiv 2511.20718, Lemma 4.2) are summed over micro-batches with weights of the whole mini-batch,
  so the split does not change the result. Then g / divisor is clipped and goes into the optimizer,
  or in another order: see `correction.divide`.

  Returns the state, metrics (scalars), and per token what this step saw: ratio, clipped [b,T].
  """
  frozen = dataclasses.replace(frozen, critic=sharding.to_device(frozen.critic))
  state = dataclasses.replace(state, critic=sharding.to_device(state.critic))
  batch = jax.tree.map(lambda x: x[step.rows], batch)
  weights = filters.weights(batch, spec.variant)
  return take_step(Work(spec, state, batch, *weights, mesh, frozen, step.packing))


def take_step(work: 'Work') -> tuple[TrainState, Metrics, dict[str, jax.Array]]:
  """Takes the optimizer step of `update_step`, whatever models `work` has."""
  grads, seen = _accumulate(work)
  bias = _accumulate_bias(work, seen) if work.spec.variant.measures_bias else None
  divided, metrics, decisive = _divide(work, grads, bias, seen)
  state, applied = _apply(work, grads, divided, decisive)
  return state, metrics | applied, {'ratio': seen['ratio'], 'clipped': seen['clipped']}


@dataclasses.dataclass(frozen=True)
class Work:
  """What one optimizer step is computed from: models, rows [b,T] in their bins, their weights.

  A subclass may have other models: `mechanism/instrument.py` has small ones, without bins.
  """

  spec: Spec
  state: TrainState
  batch: TurnBatch  # the rows of this step
  mask: jax.Array  # [b,T] of the agent's tokens
  weights: jax.Array  # [b,T] of the aggregation over the mini-batch
  policy_weights: jax.Array  # [b,T] the same times the off-policy weights: of g and C alone
  value_weights: jax.Array  # [b,T] of the critic's loss
  mesh: jax.sharding.Mesh
  frozen: Frozen
  packing: packing_lib.Packing

  def policy(self, layout):
    """Returns (log-probs, entropies, values), and the function that pulls their cotangents back."""
    return jax.vjp(
        lambda actor: _policy(
            self.spec, self.frozen.policy(actor), self.batch.tokens, layout, self.batch.routes
        )[0],
        self.state.actor,
    )

  def values(self, layout):
    """Returns the separate critic's values, and the function that pulls their cotangents back."""
    return jax.vjp(
        lambda critic: _critic(
            self.spec, self.frozen.value_model(critic), self.batch.tokens, layout
        ),
        self.state.critic,
    )

  def placed(self, tree):
    """Keeps gradients where their parameters are; left alone, XLA replicates the larger ones."""
    return jax.lax.with_sharding_constraint(tree, sharding.tree_shardings(tree, self.mesh))

  def zeros(self, params):
    """Returns zero gradients to add to."""
    return self.placed(jax.tree.map(jnp.zeros_like, params))

  def sum(self, function, packing, total):
    """Returns `total` plus function(layout) of every micro-batch."""
    spec, num_tokens = self.spec, self.mask.shape[1]
    return packing_lib.sum_over(
        function, packing, spec.micro_batch, spec.lengths, num_tokens, total
    )


def _accumulate(work):
  """Sums gradients over micro-batches; returns ({'actor', 'value'}, per-token numbers)."""
  spec, mask = work.spec, work.mask

  def one_micro_batch(layout):
    outputs, pull = work.policy(layout)
    d_logp, d_entropy, seen, sums = _policy_cotangents(work, layout, outputs)
    zero = jnp.zeros_like(outputs[0])
    added = {'actor': pull((d_logp, d_entropy, zero))[0]}
    if spec.has_values:
      if not spec.shared_trunk:
        values, pull_values = work.values(layout)
        seen['values'] = layout.unpack(values)
      d_values = _value_cotangent(work, layout, seen['values'])
      if spec.shared_trunk:
        added['value'] = pull((zero, zero, spec.variant.value_coef * d_values))[0]
      else:
        added['value'] = pull_values(d_values)[0]
    return work.placed(dict(added, sums=sums)), seen

  total = {
      'actor': work.zeros(work.state.actor),
      'sums': {'pg_loss': jnp.zeros(()), 'clipped_objective': jnp.zeros(())},
  }
  if spec.has_values:
    total['value'] = work.zeros(work.state.actor if spec.shared_trunk else work.state.critic)
  names = ['logp', 'entropy', 'values', 'bias', 'ratio', 'clipped']
  names += ['kl'] if spec.variant.kl_in == 'loss' else []
  nothing = {name: jnp.zeros_like(mask) for name in names}
  grads, seen = work.sum(one_micro_batch, work.packing, (total, nothing))
  seen |= grads.pop('sums')
  seen |= {'ratio': jnp.where(mask > 0, seen['ratio'], 1), 'clipped': seen['clipped'] > 0}
  return grads, seen


def _policy_cotangents(work, layout, outputs):
  """Returns cotangents [R,P] of log-probs and entropies, per-token numbers [b,T], and sums of
  losses.
  """
  variant = work.spec.variant
  seen = dict(zip(('logp', 'entropy', 'values'), map(layout.unpack, outputs)))
  mine = layout.mine.astype(jnp.float32)  # 1 for the tokens of this micro-batch
  micro, weight = dataclasses.replace(work.batch, action_mask=work.mask * mine), work.weights * mine
  d_logp, d_bias, aux = correction.cotangents(
      seen['logp'], micro, variant, weights=work.policy_weights * mine
  )
  if variant.kl_in == 'loss':
    kl_of = lambda x: losses.kl(x, micro.ref_logp, variant.kl_estimator)
    kl_values, pull_kl = jax.vjp(kl_of, seen['logp'])
    d_logp += pull_kl(work.state.kl_coef * weight)[0]
    seen['kl'] = kl_values * mine
  d_logp, d_entropy = map(layout.pack, (d_logp, -variant.entropy_coef * weight))
  seen |= {'bias': d_bias, 'ratio': aux['ratio'] * mine, 'clipped': aux['clipped'] * mine}
  sums = {name: aux[name] for name in ('pg_loss', 'clipped_objective')}
  return d_logp, d_entropy, seen, sums


def _value_cotangent(work, layout, values):
  """Returns the cotangent [R,P] of the values for the critic's loss."""
  batch, clip = work.batch, work.spec.variant.value_clip or None
  _, pull = jax.vjp(lambda v: losses.value_loss(v, batch.old_values, batch.returns, clip), values)
  return layout.pack(pull(work.value_weights * layout.mine.astype(jnp.float32))[0])


def _accumulate_bias(work, seen):
  """Sums C over the bins in which its cotangent is not 0 everywhere.

  These bins run forward a second time, so that nothing of the first pass has to be kept for them.
  """

  def one_micro_batch(layout):
    (logp, _, _), pull = work.policy(layout)
    zero = jnp.zeros_like(logp)
    return work.placed(pull((layout.pack(seen['bias']), zero, zero))[0])

  rows = (seen['bias'] != 0).any(axis=1)
  removed = packing_lib.only(work.packing, rows, work.spec.micro_batch)
  return work.sum(one_micro_batch, removed, work.zeros(work.state.actor))


def _divide(work, grads, bias, seen):
  """Divides the actor's gradient, see `correction.divide`.

  Returns what `state.optimize` is given, metrics, and the numbers that must be finite.

  Choice: the divisor divides the actor's whole gradient, entropy and KL terms included, so their
  proportions stay.
  """
  spec, variant, g = work.spec, work.spec.variant, grads['actor']
  g_norm = correction.norm(g)
  bias_norm = jnp.zeros(()) if bias is None else correction.norm(bias)
  c_norm = bias_norm if variant.norm_of == 'gradient' else jnp.abs(seen['clipped_objective'])
  any_clipped = (seen['clipped'] & (work.policy_weights != 0)).any()
  divisor = correction.divisor(variant.divisor, g_norm, c_norm, any_clipped)
  rest = grads['value'] if spec.shared_trunk else None
  gradient, undivided, by_step, norms = correction.divide(
      variant.divide, g, rest, divisor, spec.actor_clip
  )
  summary = diagnostics.step_summary(spec, work.batch, work.weights, work.policy_weights, seen)
  scale = off_policy.STEP_SCALES[variant.step_scale](summary['stppo/ess_share'])
  if variant.step_scale != 'none':
    by_step = (1 if by_step is None else by_step) / scale
  metrics = summary | {
      'actor/grad_norm': norms['clip'],
      'stppo/grad_norm': g_norm,
      'stppo/divisor': divisor,
      'stppo/entering_norm': norms['entering'],
      'stppo/entering_factor': norms['factor'],
  }
  if bias is not None:
    cos = -correction.cosine(g, bias)  # g descends and C ascends
    metrics |= {'stppo/bias_norm': bias_norm, 'stppo/cos_g_c': cos}
  decisive = [value for name, value in summary.items() if name.endswith('_loss')]
  decisive += [g_norm, c_norm, divisor, norms['factor']]
  undivided = None if variant.divisor == 'none' else undivided
  return dict(grads=gradient, divisor=by_step, undivided=undivided), metrics, decisive


def _apply(work, grads, divided, decisive):
  """Runs the optimizers; where a gradient norm or a loss is not finite, only counts the step."""
  spec, state = work.spec, work.state
  if spec.has_values:
    value_norm = correction.norm(grads['value'])
    decisive = [*decisive, value_norm]
  finite = jnp.isfinite(jnp.stack(decisive)).all()
  # Moments alone would move a role that is absent, and a policy without any token left.
  take = finite & work.mask.any()
  counts = take if spec.shared_trunk else take & (work.weights != 0).any()
  train_actor = counts & (state.step >= spec.critic_warmup)
  before = dict(params=state.actor, opt_state=state.actor_opt, take=train_actor)
  actor, *changed = train_state.optimize(spec.actor_optimizer, **before, **divided)
  actor_opt, step_norm, factor = changed
  after = dataclasses.replace(
      state,
      step=state.step + 1,
      actor=actor,
      actor_opt=actor_opt,
      skipped=jnp.where(finite, 0, state.skipped + 1),
  )
  applied = {
      'actor/lr': spec.actor_lr(train_state.steps_taken(state.actor_opt, state.step)),
      'actor/skipped': after.skipped,
      'stppo/step_norm': step_norm,
      'stppo/applied_factor': factor,
  }
  if spec.has_values:
    applied['critic/grad_norm'] = value_norm
  if spec.critic is not None:
    applied['critic/lr'] = spec.critic_lr(train_state.steps_taken(state.critic_opt, state.step))
    clip = optax.clip_by_global_norm(spec.critic_clip)
    value_gradient = clip.update(grads['value'], optax.EmptyState())[0]
    critic, critic_opt, critic_norm, _ = train_state.optimize(
        spec.critic_optimizer, value_gradient, state.critic, state.critic_opt, take
    )
    after = dataclasses.replace(after, critic=critic, critic_opt=critic_opt)
    applied['critic/step_norm'] = critic_norm
  return after, applied


def _policy(spec, params, tokens, layout, routes=None):
  """Runs the policy on tokens [b,T] in their bins: (log-probs, entropies, values), each [R,P], and
  its Routing.

  Values come from a shared trunk's value head, and are 0 without one. `routes` [b,T,L,A] replays
  the experts of an earlier pass.
  """
  tokens, x, routing = _trunk(spec, spec.actor, params, tokens, layout, routes)
  logp, entropy = decoder.token_logp(
      params, spec.actor, x, tokens, spec.temperature, spec.logp_chunk
  )
  has_values = 'value_head' in params  # a shared trunk's policy has one, its reference may not
  values = decoder.state_values(params, x) if has_values else jnp.zeros_like(logp)
  return (logp, entropy, values), routing


def _critic(spec, params, tokens, layout):
  """Runs the critic on tokens [b,T] in their bins: values [R,P] of the states before each token."""
  return decoder.state_values(params, _trunk(spec, spec.critic, params, tokens, layout)[1])


def _trunk(spec, model, params, tokens, layout, routes=None):
  """Runs the trunk on tokens [b,T]: tokens in their bins [R,P], output [R,P,D], and Routing."""
  tokens = layout.pack(tokens)
  routes = None if routes is None else layout.pack_routes(routes)
  segments = layout.segments if spec.shared_bins else None
  x, routing = decoder.trunk(params, model, tokens, segments=segments, routes=routes)
  return tokens, x, routing
