"""The update: TrainState and TurnBatch in, TrainState and metrics out; what runs on the accelerators.

Three pure functions, compiled by `compile_functions`: `annotate` (log-probs and values of the policy
that sampled), `with_advantages`, and `update_step`. The step accumulates the policy's gradient g and
the clipping bias C over micro-batches, divides g once, then runs the optimizer.

Rows come sorted by length, and each micro-batch is computed on as few columns as hold its longest row,
so that padding costs little; see `_at_own_length`.
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
from stppo_jax.models import decoder
from stppo_jax.training import diagnostics
from stppo_jax.training import sharding
from stppo_jax.training.state import Frozen
from stppo_jax.training.state import Learner
from stppo_jax.training.state import TrainState
from stppo_jax.types import TurnBatch


class Functions(typing.NamedTuple):
  """The compiled functions of a run."""

  annotate: typing.Callable  # (state, frozen, batch) -> (batch, metrics)
  with_advantages: typing.Callable  # (state, batch) -> (state, batch, metrics)
  update_step: typing.Callable  # (state, frozen, batch, rows) -> (state, metrics, seen)

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
  learner = dataclasses.replace(
      learner, actor=spread(learner.actor), critic=spread(learner.critic))
  jit = lambda function, ins, outs, donate=(): jax.jit(
      functools.partial(function, learner, mesh), in_shardings=ins, out_shardings=outs,
      donate_argnums=donate)
  return Functions(
      annotate=jit(annotate, (state_sharding, frozen_sharding, rows), (rows, whole)),
      with_advantages=jit(
          with_advantages, (state_sharding, rows), (state_sharding, rows, whole), donate=(0,)),
      update_step=jit(
          update_step, (state_sharding, frozen_sharding, rows, whole),
          (state_sharding, whole, whole), donate=(0,)))


def annotate(learner: Learner, mesh, state: TrainState, frozen: Frozen, batch: TurnBatch):
  """Fills in old_logp, ref_logp and old_values [B,T]; also the gap between sampler and trainer.

  Computed by the very functions that `update_step` differentiates, so the first mini-batch's ratio is
  exactly 1 (with old_logp 'trainer').
  """
  policy, reference = frozen.policy(state.actor), sharding.to_device(frozen.reference_policy())
  critic = state.critic and sharding.to_device(frozen.value_model(state.critic))

  def one(micro):
    logp, _, values = _policy(learner, policy, micro)
    if learner.critic is not None:
      values = _critic(learner, critic, micro)
    ref_logp = logp if learner.kl_in == 'none' else _policy(learner, reference, micro)[0]
    return (), (logp, ref_logp, values)

  micros = _split(batch, learner.micro_batch, mesh)
  _, per_token = jax.lax.map(
      lambda micro: _at_own_length(one, learner.lengths, micro, micro.action_mask), micros)
  logp, ref_logp, values = jax.tree.map(_join, per_token)
  mask = batch.action_mask.astype(jnp.float32)
  metrics = diagnostics.sampler_gap(logp, batch.behaviour_logp, mask)
  old_logp = batch.behaviour_logp if learner.old_logp == 'sampler' else logp
  return batch.replace(
      old_logp=old_logp * mask, ref_logp=ref_logp * mask, old_values=values * mask), metrics


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
      state = state.replace(kl_coef=losses.adaptive_kl(
          state.kl_coef, mean_kl, learner.kl_target, learner.kl_horizon, episodes))
  batch = advantages.estimate(batch, learner.variant, learner.gamma, learner.lam)
  return state, batch, metrics | diagnostics.batch_summary(batch, mask, learner.has_values)


def update_step(learner: Learner, mesh, state: TrainState, frozen: Frozen, batch: TurnBatch, rows):
  """One optimizer step of actor and critic on the given rows [b] of the batch.

  g = grad J_clipped-surrogate + bonuses and C = grad J_clipped (arXiv 2511.20718, Lemma 4.2) are summed
  over micro-batches with weights of the whole mini-batch, so the split does not change the result.
  Then g / divisor goes into the optimizer. A step whose gradients are not finite changes nothing but
  the counters.

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
  measure_bias = variant.ratio != 'none' and (
      learner.log_bias or (variant.divisor != 'none' and variant.norm_of == 'gradient'))
  # Gradients live where their parameters do; left alone, XLA keeps the larger ones on every device.
  placed = lambda tree: jax.lax.with_sharding_constraint(tree, sharding.tree_shardings(tree, mesh))

  def gradients(micro_and_weights):
    micro, weight, value_weight = micro_and_weights
    (logp, entropy, values), pull = jax.vjp(
        lambda p: _policy(learner, frozen.policy(p), micro), state.actor)
    d_logp, d_bias, aux = correction.cotangents(
        logp, micro, variant, variant.clip_low, variant.clip_high, weight, learner.dual_clip)
    if learner.kl_in == 'loss':
      kl_of = lambda x: losses.kl(x, micro.ref_logp, learner.kl_estimator)
      kl_values, pull_kl = jax.vjp(kl_of, logp)
      d_logp += pull_kl(state.kl_coef * weight)[0]
      aux['kl'] = kl_values
    d_entropy = -learner.entropy_coef * weight
    zero = jnp.zeros_like(logp)
    added = {'actor': pull((d_logp, d_entropy, zero))[0]}
    if measure_bias:
      added['bias'] = jax.lax.cond(
          aux['clipped'].any(), lambda: placed(pull((d_bias, zero, zero))[0]),
          lambda: placed(jax.tree.map(jnp.zeros_like, state.actor)))
    if learner.has_values:
      value_loss = lambda v: losses.value_loss(
          v, micro.old_values, micro.returns, learner.value_clip)
      if learner.shared_trunk:
        _, pull_loss = jax.vjp(value_loss, values)
        d_values = learner.value_coef * pull_loss(value_weight)[0]
        added['value'] = pull((zero, zero, d_values))[0]
      else:
        values, pull_values = jax.vjp(
            lambda p: _critic(learner, frozen.value_model(p), micro), state.critic)
        _, pull_loss = jax.vjp(value_loss, values)
        added['value'] = pull_values(pull_loss(value_weight)[0])[0]
    sums = dict(pg_loss=aux.pop('pg_loss'), clipped_objective=aux.pop('clipped_objective'))
    return placed(dict(added, sums=sums)), dict(logp=logp, entropy=entropy, values=values, **aux)

  def accumulate(total, micro_and_weights):
    added, seen = _at_own_length(
        gradients, learner.lengths, micro_and_weights, micro_and_weights[0].action_mask)
    return jax.tree.map(jnp.add, total, added), seen

  zeros = {'actor': jax.tree.map(jnp.zeros_like, state.actor),
           'sums': {'pg_loss': jnp.zeros(()), 'clipped_objective': jnp.zeros(())}}
  if measure_bias:
    zeros['bias'] = zeros['actor']
  if learner.has_values:
    zeros['value'] = jax.tree.map(
        jnp.zeros_like, state.actor if learner.shared_trunk else state.critic)
  micros = _split((batch, weights, value_weights), learner.micro_batch, mesh)
  grads, seen = jax.lax.scan(accumulate, placed(zeros), micros)
  seen = jax.tree.map(_join, seen) | grads['sums']
  seen['ratio'] = jnp.where(mask > 0, seen['ratio'], 1)  # cut-off columns came back as 0

  g, bias = grads['actor'], grads.get('bias')
  g_norm = optax.tree.norm(g)
  bias_norm = optax.tree.norm(bias) if measure_bias else jnp.zeros(())
  c_norm = bias_norm if variant.norm_of == 'gradient' else jnp.abs(seen['clipped_objective'])
  divisor = correction.divisor(variant.divisor, g_norm, c_norm, seen['clipped'].any())
  g = jax.tree.map(lambda x: x / divisor, g)
  if learner.shared_trunk:
    g = jax.tree.map(jnp.add, g, grads['value'])

  finite = jnp.isfinite(g_norm) & jnp.isfinite(c_norm)
  if learner.has_values:
    value_norm = optax.tree.norm(grads['value'])
    finite &= jnp.isfinite(value_norm)
  train_actor = finite & (state.step >= learner.critic_warmup)
  actor, actor_opt, step_norm = _apply(
      learner.actor_optimizer, g, state.actor, state.actor_opt, train_actor)
  state_after = state.replace(
      step=state.step + 1, actor=actor, actor_opt=actor_opt,
      skipped=jnp.where(finite, 0, state.skipped + 1))
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
    dot = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(grads['actor']), jax.tree.leaves(bias)))
    metrics |= {
        'stppo/bias_norm': bias_norm,
        'stppo/cos_g_c': -dot / jnp.maximum(g_norm * bias_norm, 1e-30)}
  if learner.has_values:
    metrics |= {'critic/grad_norm': value_norm, 'critic/lr': learner.critic_lr(state.step)}
  if learner.critic is not None:
    critic, critic_opt, _ = _apply(
        learner.critic_optimizer, grads['value'], state.critic, state.critic_opt, finite)
    state_after = state_after.replace(critic=critic, critic_opt=critic_opt)
  metrics |= diagnostics.step_summary(learner, batch, weights, seen)
  return state_after, metrics, {'ratio': seen['ratio'], 'clipped': seen['clipped']}


def _policy(learner, params, batch):
  """Log-probs, entropies and, from a shared trunk, values of a batch: three of [B,T]."""
  x, _ = decoder.hidden(params, learner.actor, batch.tokens, None)
  logp, entropy = decoder.token_logp(
      params, learner.actor, x, batch.tokens, learner.temperature, learner.logp_chunk)
  has_values = 'value_head' in params  # a shared trunk's policy has one, its reference may not
  values = decoder.state_values(params, x) if has_values else jnp.zeros_like(logp)
  return logp, entropy, values


def _critic(learner, params, batch):
  """Values [B,T] of the states before each token."""
  x, _ = decoder.hidden(params, learner.critic, batch.tokens, None)
  return decoder.state_values(params, x)


def _apply(optimizer, grads, params, opt_state, take):
  """Params and optimizer state after one step, or as they were; and the size of the step taken."""
  opt_state = sharding.to_device(opt_state)
  updates, new_opt_state = optimizer.update(grads, opt_state, params)
  keep = lambda new, old: jnp.where(take, new, old)
  new_params = jax.tree.map(keep, optax.apply_updates(params, updates), params)
  step_norm = jnp.where(take, optax.tree.norm(updates), 0)
  return new_params, jax.tree.map(keep, new_opt_state, opt_state), step_norm


def _at_own_length(function, lengths, micro, mask):
  """`function(micro)` on the first of `lengths` columns that hold every agent token of `mask` [b,T].

  `function` returns (anything, arrays [b,columns]); the latter are padded back to T with zeros. What
  comes after a row's last agent token can influence nothing, so the result is the same. All lengths
  are compiled, as branches of one program; the longest row of the micro-batch chooses at run time.
  """
  total = mask.shape[1]
  lengths = sorted({length for length in lengths if length < total} | {total})
  columns = jnp.max(jnp.where(mask.any(axis=0), jnp.arange(1, total + 1), 0))

  def branch(length):
    def run(micro):
      cut = lambda x: x[:, :length] if x.ndim > 1 else x
      result, per_token = function(jax.tree.map(cut, micro))
      pad = lambda x: jnp.pad(x, ((0, 0), (0, total - length)))
      return result, jax.tree.map(pad, per_token)
    return run

  chosen = jnp.searchsorted(jnp.array(lengths), columns)
  return jax.lax.switch(chosen, [branch(length) for length in lengths], micro)


def _split(tree, micro_batch, mesh):
  """[B,..] -> [B / micro_batch, micro_batch, ..], each micro-batch spread over all devices."""
  spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, ('data', 'fsdp')))

  def split(x):
    return jax.lax.with_sharding_constraint(x.reshape(-1, micro_batch, *x.shape[1:]), spec)

  return jax.tree.map(split, tree)


def _join(x):
  """The inverse of `_split`."""
  return x.reshape(-1, *x.shape[2:])
