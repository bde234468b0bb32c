"""What a run's models are made of: config in; what is trained, what stands still, and where it waits out.

With LoRA, actor and critic that start from the same folder stand on one base, loaded once.
"""

import dataclasses
import functools
import typing

import jax

from stppo_jax.models import decoder
from stppo_jax.models import lora
from stppo_jax.training import sharding
from stppo_jax.training import state as train_state


class Parts(typing.NamedTuple):
  """The models of a run: their shapes, what is trained of each, and what stands still."""

  model: decoder.ModelConfig
  critic_model: decoder.ModelConfig | None  # None without a separate critic, as is `critic`
  actor: dict
  critic: dict | None
  frozen: train_state.Frozen


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
    critic_model, critic = load_model(critic_head, folder, memory_kind) if critic_head else (None, None)
    return Parts(model, critic_model, actor, critic, train_state.Frozen())

  one_base = critic_head and not folder
  model, params = load_model('both' if one_base else head)
  base, value_head = lora.split(params)
  frozen, critic_model, critic = train_state.Frozen(actor=base), None, None
  actor_key, critic_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 0))
  adapters = lambda key, base: make(
      functools.partial(lora.init, key, base, options.lora_rank, options.lora_targets))
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
