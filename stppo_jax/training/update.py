"""The update: TrainState and TurnBatch in, TrainState and metrics out; what runs on the accelerators.

Three pure functions, compiled by `compile_functions`: `annotate` (log-probs and values of the policy
that sampled), `with_advantages`, and `update_step`. The step accumulates the policy's gradient g over
micro-batches, then the clipping bias C over those bins alone in which something was clipped, divides g
once and runs the optimizer.

Models compute bins in which rows stand behind each other (see `packing`); all else thinks in rows.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import optax

from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import correction
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import off_policy
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.training import diagnostics
from stppo_jax.training import packing as packing_lib
from stppo_jax.training.state import Frozen
from stppo_jax.training.state import Learner
from stppo_jax.training.state import TrainState
from stppo_jax.types import TurnBatch


class Functions(typing.NamedTuple):
  """The compiled functions of a run."""

  annotate: typing.Callable  # (state, frozen, batch, rows, packings) -> (batch, metrics)
  with_advantages: typing.Callable  # (state, batch) -> (state, batch, metrics)
  update_step: typing.Callable  # (state, frozen, batch, rows, packing) -> (state, metrics, seen)

  def num_compilations(self) -> int:
    """Programs compiled so far: one a function and shape of batch."""
    return sum(function._cache_size() for function in self)


def compile_functions(learner, state, frozen, mesh) -> Functions:
  """`annotate`, `with_advantages` and `update_step`, jitted over the mesh; states are donated.

  State and frozen parameters (arrays or ShapeDtypeStructs) stay where they lie, on devices or on the host.
  """
  state_sharding, frozen_sharding = jax.tree.map(lambda x: x.sharding, (state, frozen))
  rows, whole = sharding.rows(mesh), sharding.replicated(mesh)
  spread = lambda model: model and dataclasses.replace(model, row_sharding=rows)
  learner = dataclasses.replace(learner, actor=spread(learner.actor), critic=spread(learner.critic))
  jit = lambda function, ins, outs, donate=(): jax.jit(
      functools.partial(function, learner, mesh),
      in_shardings=ins,
      out_shardings=outs,
      donate_argnums=donate,
  )
  return Functions(
      annotate=jit(annotate, (state_sharding, frozen_sharding, rows, whole, whole), (rows, whole)),
      with_advantages=jit(
          with_advantages, (state_sharding, rows), (state_sharding, rows, whole), donate=(0,)
      ),
      update_step=jit(
          update_step,
          (state_sharding, frozen_sharding, rows, whole, whole),
          (state_sharding, whole, whole),
          donate=(0,),
      ),
  )


def annotate(
    learner: Learner, mesh, state: TrainState, frozen: Frozen, batch: TurnBatch, rows, packings
):
  """Fills in old_logp, ref_logp and old_values [B,T]; also the gap between sampler and trainer.

  `rows` [S,b] deals the batch's rows out to the first S optimizer steps, and `packings` are theirs,
  stacked. So the same bins are computed here, by the same functions, as in those steps, and the first
  step's ratio is exactly 1 (with old_logp 'trainer'). In other bins a row's sums would be rounded
  otherwise.
  """
  del mesh
  actor, reference = frozen.policy(state.actor), sharding.to_device(frozen.reference_policy())
  critic = state.critic and sharding.to_device(frozen.value_model(state.critic))

  def one_step(rows_and_packing):
    tokens, packing = batch.tokens[rows_and_packing[0]], rows_and_packing[1]

    def per_token(layout):
      logp, _, values = _policy(learner, actor, tokens, layout)
      if learner.critic is not None:
        values = _critic(learner, critic, tokens, layout)
      ref_logp = logp if learner.kl_in == 'none' else _policy(learner, reference, tokens, layout)[0]
      return jax.tree.map(layout.unpack, (logp, ref_logp, values))

    zeros = jnp.zeros(tokens.shape)
    return _sum_over_micro_batches(
        per_token, learner, packing, tokens.shape[1], (zeros, zeros, zeros)
    )

  found = jax.lax.map(one_step, (rows, packings))
  in_order = (
      lambda x: jnp.zeros(batch.tokens.shape).at[rows.reshape(-1)].set(x.reshape(-1, x.shape[-1]))
  )
  logp, ref_logp, values = jax.tree.map(in_order, found)
  mask = batch.action_mask.astype(jnp.float32)
  metrics = diagnostics.sampler_gap(
      logp, batch.behaviour_logp, mask, batch.turn_ids, learner.is_correction, learner.is_threshold
  )
  old_logp = batch.behaviour_logp if learner.old_logp == 'sampler' else logp
  return (
      batch.replace(old_logp=old_logp * mask, ref_logp=ref_logp * mask, old_values=values * mask),
      metrics,
  )


def with_advantages(learner: Learner, mesh, state: TrainState, batch: TurnBatch):
  """Fills in advantages and returns; puts the KL penalty into the reward and adapts its coefficient."""
  del mesh
  mask = batch.action_mask.astype(jnp.float32)
  metrics = {}
  if learner.kl_in != 'none':
    kl = losses.kl(batch.old_logp, batch.ref_logp, learner.kl_estimator) * mask
    mean_kl = kl.sum() / jnp.maximum(mask.sum(), 1)
    metrics |= {'actor/reward_kl_penalty': mean_kl, 'actor/kl_coef': state.kl_coef}
    if learner.kl_in == 'reward':
      batch = batch.replace(rewards=batch.rewards - state.kl_coef * kl)
    if learner.kl_target is not None:
      episodes = mask.any(axis=1).sum()
      kl_coef = losses.adaptive_kl(
          state.kl_coef, mean_kl, learner.kl_target, learner.kl_horizon, episodes
      )
      # A KL that is not finite spoils its own batch; the coefficient would spoil all that follow.
      state = state.replace(kl_coef=jnp.where(jnp.isfinite(mean_kl), kl_coef, state.kl_coef))
  batch = advantages.estimate(batch, learner.variant, learner.gamma, learner.lam)
  return state, batch, metrics | diagnostics.batch_summary(batch, mask, learner.has_values)


def update_step(
    learner: Learner, mesh, state: TrainState, frozen: Frozen, batch: TurnBatch, rows, packing
):
  """One optimizer step of actor and critic on the given rows [b] of the batch, packed as told.

  g = grad J_clipped-surrogate + bonuses and C = grad J_clipped (arXiv 2511.20718, Lemma 4.2) are summed
  over micro-batches with weights of the whole mini-batch, so the split does not change the result.
  Then g / divisor goes into the optimizer. A step whose gradients or losses are not finite changes
  nothing but the counters. Importance weights of `rollout_correction` scale the policy term alone, so g and C.

  C has a pass of its own, over the bins in which something was clipped: its cotangent is 0 in all others.
  A forward pass is done twice for these bins, and none of the first one's results has to be kept for them.

  Choice: the divisor divides the actor's whole gradient, entropy and KL terms included, so their
  proportions stay; a shared trunk's value gradient is added undivided.

  Returns the state, metrics (scalars), and per token what this step saw: ratio, clipped [b,T].
  """
  variant = learner.variant
  frozen = frozen.replace(critic=sharding.to_device(frozen.critic))
  state = state.replace(critic=sharding.to_device(state.critic))
  batch = jax.tree.map(lambda x: x[rows], batch)
  mask = batch.action_mask.astype(jnp.float32)
  weights = losses.aggregation_weights(mask, learner.aggregation, learner.norm_length)
  value_weights = losses.aggregation_weights(mask, 'token-mean')
  policy_weights = weights
  if learner.is_correction != 'none':
    policy_weights *= off_policy.truncated_weights(
        batch.old_logp,
        batch.behaviour_logp,
        mask,
        batch.turn_ids,
        learner.is_correction,
        learner.is_threshold,
    )
  measure_bias = variant.ratio != 'none' and (
      learner.log_bias or (variant.divisor != 'none' and variant.norm_of == 'gradient')
  )
  # Gradients live where their parameters do; left alone, XLA keeps the larger ones on every device.
  placed = lambda tree: jax.lax.with_sharding_constraint(tree, sharding.tree_shardings(tree, mesh))
  policy = lambda layout: jax.vjp(
      lambda actor: _policy(learner, frozen.policy(actor), batch.tokens, layout), state.actor
  )
  zeros = lambda params: placed(jax.tree.map(jnp.zeros_like, params))

  def gradients(layout):
    (logp, entropy, values), pull = policy(layout)
    seen = dict(zip(('logp', 'entropy', 'values'), map(layout.unpack, (logp, entropy, values))))
    here = layout.mine.astype(jnp.float32)
    micro, weight = batch.replace(action_mask=mask * here), weights * here
    d_logp, d_bias, aux = correction.cotangents(
        seen['logp'],
        micro,
        variant,
        variant.clip_low,
        variant.clip_high,
        policy_weights * here,
        learner.dual_clip,
    )
    if learner.kl_in == 'loss':
      kl_of = lambda x: losses.kl(x, micro.ref_logp, learner.kl_estimator)
      kl_values, pull_kl = jax.vjp(kl_of, seen['logp'])
      d_logp += pull_kl(state.kl_coef * weight)[0]
      seen['kl'] = kl_values * here
    d_logp, d_entropy = map(layout.pack, (d_logp, -learner.entropy_coef * weight))
    zero = jnp.zeros_like(logp)
    added = {'actor': pull((d_logp, d_entropy, zero))[0]}
    if learner.has_values:
      if not learner.shared_trunk:
        values, pull_values = jax.vjp(
            lambda critic: _critic(learner, frozen.value_model(critic), batch.tokens, layout),
            state.critic,
        )
        seen['values'] = layout.unpack(values)
      _, pull_loss = jax.vjp(
          lambda v: losses.value_loss(v, batch.old_values, batch.returns, learner.value_clip),
          seen['values'],
      )
      d_values = layout.pack(pull_loss(value_weights * here)[0])
      if learner.shared_trunk:
        added['value'] = pull((zero, zero, learner.value_coef * d_values))[0]
      else:
        added['value'] = pull_values(d_values)[0]
    seen |= {'bias': d_bias, 'ratio': aux['ratio'] * here, 'clipped': aux['clipped'] * here}
    sums = {name: aux[name] for name in ('pg_loss', 'clipped_objective')}
    return placed(dict(added, sums=sums)), seen

  total = {
      'actor': zeros(state.actor),
      'sums': {'pg_loss': jnp.zeros(()), 'clipped_objective': jnp.zeros(())},
  }
  if learner.has_values:
    total['value'] = zeros(state.actor if learner.shared_trunk else state.critic)
  names = ['logp', 'entropy', 'values', 'bias', 'ratio', 'clipped']
  names += ['kl'] if learner.kl_in == 'loss' else []
  nothing = {name: jnp.zeros_like(mask) for name in names}
  num_tokens = mask.shape[1]
  grads, seen = _sum_over_micro_batches(gradients, learner, packing, num_tokens, (total, nothing))
  seen |= grads['sums']
  seen |= {'ratio': jnp.where(mask > 0, seen['ratio'], 1), 'clipped': seen['clipped'] > 0}
  if measure_bias:

    def bias_of(layout):
      (logp, _, _), pull = policy(layout)
      zero = jnp.zeros_like(logp)
      return placed(pull((layout.pack(seen['bias']), zero, zero))[0])

    clipped = packing_lib.only(packing, seen['clipped'].any(axis=1), learner.micro_batch)
    grads['bias'] = _sum_over_micro_batches(
        bias_of, learner, clipped, num_tokens, zeros(state.actor)
    )

  g, bias = grads['actor'], grads.get('bias')
  g_norm = optax.tree.norm(g)
  bias_norm = optax.tree.norm(bias) if measure_bias else jnp.zeros(())
  c_norm = bias_norm if variant.norm_of == 'gradient' else jnp.abs(seen['clipped_objective'])
  divisor = correction.divisor(variant.divisor, g_norm, c_norm, seen['clipped'].any())
  g = jax.tree.map(lambda x: x / divisor, g)
  if learner.shared_trunk:
    g = jax.tree.map(jnp.add, g, grads['value'])

  summary = diagnostics.step_summary(learner, batch, weights, seen)
  decisive = [g_norm, c_norm, *(value for name, value in summary.items() if name.endswith('_loss'))]
  if learner.has_values:
    value_norm = optax.tree.norm(grads['value'])
    decisive.append(value_norm)
  finite = jnp.isfinite(jnp.stack(decisive)).all()
  train_actor = finite & (state.step >= learner.critic_warmup)
  actor, actor_opt, step_norm = _apply(
      learner.actor_optimizer, g, state.actor, state.actor_opt, train_actor
  )
  state_after = state.replace(
      step=state.step + 1,
      actor=actor,
      actor_opt=actor_opt,
      skipped=jnp.where(finite, 0, state.skipped + 1),
  )
  metrics = {
      'actor/grad_norm': optax.tree.norm(g),
      'actor/lr': learner.actor_lr(state.step),
      'actor/skipped': state_after.skipped,
      'stppo/grad_norm': g_norm,
      'stppo/divisor': divisor,
      'stppo/step_norm': step_norm,
  }
  if measure_bias:
    # g descends and C ascends, hence the sign. Not vdot: it flattens, which gathers every shard.
    dot = sum(
        jnp.sum(a * b) for a, b in zip(jax.tree.leaves(grads['actor']), jax.tree.leaves(bias))
    )
    metrics |= {
        'stppo/bias_norm': bias_norm,
        'stppo/cos_g_c': -dot / jnp.maximum(g_norm * bias_norm, 1e-30),
    }
  if learner.has_values:
    metrics |= {'critic/grad_norm': value_norm, 'critic/lr': learner.critic_lr(state.step)}
  if learner.critic is not None:
    critic, critic_opt, _ = _apply(
        learner.critic_optimizer, grads['value'], state.critic, state.critic_opt, finite
    )
    state_after = state_after.replace(critic=critic, critic_opt=critic_opt)
  return state_after, metrics | summary, {'ratio': seen['ratio'], 'clipped': seen['clipped']}


def _sum_over_micro_batches(function, learner, packing, num_tokens, total):
  """`total` plus function(layout) of every micro-batch that holds anything, for rows of `num_tokens`.

  Choice: one program for all numbers of micro-batches, and a branch of it for each of `learner.lengths`:
  a micro-batch is computed on as few columns as hold its bins.
  """
  num_bins = learner.micro_batch

  def add(j, total):
    branches = [
        lambda j, columns=columns: function(
            packing_lib.layout(packing, j, num_bins, columns, num_tokens)
        )
        for columns in learner.lengths
    ]
    chosen = packing_lib.which_capacity(packing, j, num_bins, learner.lengths)
    return jax.tree.map(jnp.add, total, jax.lax.switch(chosen, branches, j))

  count = packing_lib.num_micro_batches(packing, num_bins)
  return jax.lax.fori_loop(0, count, add, total)


def _policy(learner, params, tokens, layout):
  """Log-probs, entropies and, from a shared trunk, values of tokens [b,T] in their bins: three of [R,P]."""
  tokens, x = _trunk(learner.actor, params, tokens, layout)
  logp, entropy = decoder.token_logp(
      params, learner.actor, x, tokens, learner.temperature, learner.logp_chunk
  )
  has_values = 'value_head' in params  # a shared trunk's policy has one, its reference may not
  values = decoder.state_values(params, x) if has_values else jnp.zeros_like(logp)
  return logp, entropy, values


def _critic(learner, params, tokens, layout):
  """Values [R,P] of the states before each token."""
  return decoder.state_values(params, _trunk(learner.critic, params, tokens, layout)[1])


def _trunk(model, params, tokens, layout):
  """Tokens [b,T] -> the tokens in their bins [R,P] and what the trunk makes of them [R,P,D]."""
  tokens = layout.pack(tokens)
  x, _ = decoder.hidden(params, model, tokens, None, segments=layout.segments)
  return tokens, x


def _apply(optimizer, grads, params, opt_state, take):
  """Params and optimizer state after one step, or as they were; and the size of the step taken."""
  opt_state = sharding.to_device(opt_state)
  updates, new_opt_state = optimizer.update(grads, opt_state, params)
  keep = lambda new, old: jnp.where(take, new, old)
  new_params = jax.tree.map(keep, optax.apply_updates(params, updates), params)
  step_norm = jnp.where(take, optax.tree.norm(updates), 0)
  return new_params, jax.tree.map(keep, new_opt_state, opt_state), step_norm
