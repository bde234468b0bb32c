"""What a run's models are made of: config in; what is trained, what stands still, and where it waits out.

With LoRA, actor and critic that start from the same folder stand on one base, loaded once.
"""

import dataclasses
import functools
import typing

from absl import logging
import jax
import jax.numpy as jnp

from stppo_jax.algorithms import variants
from stppo_jax.models import attention
from stppo_jax.models import decoder
from stppo_jax.models import lora
from stppo_jax.models import sharding
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.training import state as train_state


class Parts(typing.NamedTuple):
  """The models of a run: their shapes, what is trained of each, and what stands still."""

  model: decoder.ModelConfig
  critic_model: decoder.ModelConfig | None  # None without a separate critic, as is `critic`
  actor: dict
  critic: dict | None
  frozen: train_state.Frozen


def build(config):
  """(Learner, TrainState before the first update, Frozen, mesh): weights loaded, nothing compiled."""
  mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
  sharding.check_rows(mesh, micro_batch=config.train.micro_batch)
  waits_on_host = on_host(config, mesh)
  variant = make_variant(config.algorithm)

  def load_model(head, folder=None, memory_kind=None):
    # Straight into their shards: the host never holds a model.
    shardings = functools.partial(sharding.tree_shardings, mesh=mesh, memory_kind=memory_kind)
    return agent_lib.load_policy(config, head, folder, shardings)

  def make(function):
    shardings = sharding.tree_shardings(jax.eval_shape(function), mesh)
    return jax.jit(function, out_shardings=shardings)()

  model, critic_model, actor, critic, frozen = load(config, variant, load_model, make)
  if needs_reference(config):  # a copy: the state takes the actor's own buffers
    frozen = frozen.replace(
        reference=(
            jax.device_put(actor, sharding.tree_shardings(actor, mesh, sharding.HOST))
            if 'reference' in waits_on_host
            else jax.tree.map(jnp.copy, actor)
        )
    )
  learner = make_learner(config, variant, model, critic_model, mesh.devices.flat[0])
  state = train_state.create_sharded(
      learner, actor, critic, config.algorithm.kl_coef, mesh, waits_on_host
  )
  return learner, state, frozen, mesh


def load(config, variant, load_model, make) -> Parts:
  """The Parts of a run, but for a reference of its own (see `needs_reference`).

  `load_model(head, folder, memory_kind)` gives a ModelConfig and parameters, `make(function)` a tree from a
  function that makes one; both give shapes where a run is only planned.
  """
  options = config.model
  head, critic_head = model_heads(config, variant)
  folder = options.critic_folder or None
  memory_kind = sharding.HOST if config.placement.critic == 'host' else None
  if not options.lora_rank:
    model, actor = load_model(head)
    critic_model, critic = (
        load_model(critic_head, folder, memory_kind) if critic_head else (None, None)
    )
    return Parts(model, critic_model, actor, critic, train_state.Frozen())

  one_base = critic_head and not folder
  model, params = load_model('both' if one_base else head)
  base, value_head = lora.split(params)
  frozen, critic_model, critic = train_state.Frozen(actor=base), None, None
  actor_key, critic_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 0))
  adapters = lambda key, base: make(
      functools.partial(lora.init, key, base, options.lora_rank, options.lora_targets)
  )
  actor = adapters(actor_key, base)
  if one_base:
    model, critic_model = (dataclasses.replace(model, head=h) for h in (head, critic_head))
    critic = adapters(critic_key, base) | value_head
  elif critic_head:
    critic_model, params = load_model(critic_head, folder, memory_kind)
    base, value_head = lora.split(params)
    frozen, critic = frozen.replace(critic=base), adapters(critic_key, base) | value_head
  else:
    actor |= value_head  # of a shared trunk
  return Parts(model, critic_model, actor, critic, frozen)


def needs_reference(config):
  """Whether the policy at the start has to be kept: adapters leave it as it was."""
  return config.algorithm.kl_in != 'none' and not config.model.lora_rank


def on_host(config, mesh):
  """Names of what waits in the host's memory, if this mesh's devices can use it."""
  names = [name for name, place in dataclasses.asdict(config.placement).items() if place == 'host']
  if names:
    sharding.check_host_memory(mesh)
  return names


def model_heads(config, variant):
  """(head of the policy, head of the separate critic or None): see ModelConfig.head."""
  if not variant.needs_critic:
    return 'tokens', None
  return ('both', None) if config.model.critic == 'shared' else ('tokens', 'value')


def make_variant(algorithm) -> variants.Variant:
  """The row of the table that the config names, with the columns that it overrides."""
  row = variants.VARIANTS[algorithm.variant]
  columns = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(row)}
  return dataclasses.replace(row, **{k: v for k, v in columns.items() if v is not None})


def make_learner(config, variant, model, critic_model, device) -> train_state.Learner:
  """The static part of the compiled functions, from the config and the kind of device they run on."""
  train, algorithm = config.train, config.algorithm
  backend = attention.choose(
      config.model.attention, device, model.dtype, model.head_dim, train.length_buckets
  )
  model = dataclasses.replace(model, attention=backend)
  critic_model = critic_model and dataclasses.replace(critic_model, attention=backend)
  steps_an_update = train.epochs * train.episodes // train.mini_batch
  if variant.ratio == 'none' and steps_an_update > 1:
    logging.warning(
        '%s has no importance ratio, and only the first of its %d optimizer steps an update is '
        'on-policy: set --config.train.mini_batch=%d --config.train.epochs=1',
        algorithm.variant,
        steps_an_update,
        train.episodes,
    )

  def optimizer(options):
    return train_state.make_optimizer(
        options.lr,
        round(options.warmup * train.updates * steps_an_update),
        options.betas,
        options.eps,
        options.weight_decay,
        options.grad_clip,
    )

  actor_optimizer, actor_lr = optimizer(config.actor)
  critic_optimizer, critic_lr = optimizer(config.critic)
  return train_state.Learner(
      actor=model,
      critic=critic_model,
      variant=variant,
      actor_optimizer=actor_optimizer,
      critic_optimizer=critic_optimizer,
      actor_lr=actor_lr,
      critic_lr=critic_lr,
      micro_batch=train.micro_batch,
      lengths=tuple(train.length_buckets),
      temperature=config.rollout.temperature,
      logp_chunk=config.model.logp_chunk or None,
      gamma=algorithm.gamma,
      lam=algorithm.lam,
      aggregation=algorithm.aggregation,
      norm_length=algorithm.norm_length or config.rollout.max_total,
      dual_clip=algorithm.dual_clip or None,
      entropy_coef=algorithm.entropy_coef,
      kl_in=algorithm.kl_in,
      kl_estimator=algorithm.kl_estimator,
      kl_target=algorithm.kl_target or None,
      kl_horizon=algorithm.kl_horizon,
      value_clip=algorithm.value_clip or None,
      value_coef=algorithm.value_coef,
      old_logp=algorithm.old_logp,
      is_correction=algorithm.is_correction,
      is_threshold=algorithm.is_threshold,
      log_bias=algorithm.log_bias,
      critic_warmup=train.critic_warmup * steps_an_update,
      num_turns=config.env.max_turns + 1,
  )
