"""The learners of a run: models, objective and compiled functions, built from the config.

`Learners.update` trains the policy of a run on a batch of episodes, or the policy of each role on
its rows. With LoRA, actor and critic that start from the same folder share one base, loaded once.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax import config as config_lib
from stppo_jax import types
from stppo_jax.algorithms import variants
from stppo_jax.models import attention
from stppo_jax.models import decoder
from stppo_jax.models import lora
from stppo_jax.models import sharding
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import journal as journal_lib
from stppo_jax.monitoring import roles as roles_lib
from stppo_jax.monitoring import timing as timing_lib
from stppo_jax.rollout import batching
from stppo_jax.rollout import pipeline as pipeline_lib
from stppo_jax.rollout import prepare
from stppo_jax.training import objective
from stppo_jax.training import packing
from stppo_jax.training import state as state_lib
from stppo_jax.training import update as update_lib
from stppo_jax.training.state import TrainState

State = TrainState | dict[str, TrainState]  # one policy's, or one per role


class Models(typing.NamedTuple):
  """The models of a run: their shapes, the trained parameters of each, and the frozen ones."""

  model: decoder.ModelConfig
  critic_model: decoder.ModelConfig | None  # None without a separate critic, as is `critic`
  actor: dict
  critic: dict | None
  frozen: state_lib.Frozen


class PolicyUpdate(typing.NamedTuple):
  """What an update of one policy was computed from, and what it measured."""

  role: str  # that has this policy for itself; '': all rows share the policy
  episodes: list[types.Episode]  # in the order of the batch's rows
  batch: types.TurnBatch
  steps: list[packing.Step]
  metrics: dict[str, float]  # the batch's numbers
  seen: list[episodes_lib.StepMetrics]  # one per optimizer step

  @property
  def has_tokens(self) -> bool:
    """Whether anything was trained on: a role may never have moved."""
    return any(map(batching.trained_length, self.episodes))


@dataclasses.dataclass(frozen=True)
class Learned:
  """What an update did, policy by policy."""

  parts: list[PolicyUpdate]

  @property
  def steps(self) -> list[packing.Step]:
    """The optimizer steps of all policies."""
    return [step for part in self.parts for step in part.steps]

  @property
  def num_tokens(self) -> int:
    """Tokens of the batch."""
    return sum(packing.num_tokens(packing.first_epoch(part.steps)) for part in self.parts)

  def summarize(self) -> dict[str, float]:
    """Returns the metrics of the update: means over the policies, and those of each role."""
    counted = [part for part in self.parts if part.has_tokens] or self.parts
    metrics = journal_lib.means([part.metrics for part in counted])
    for part in counted:
      if part.role and part.has_tokens:
        steps = journal_lib.means([step.metrics for step in part.seen])
        metrics |= roles_lib.update_metrics(part.role, journal_lib.means([part.metrics]) | steps)
    episodes = [episode for part in self.parts for episode in part.episodes]
    seen = [step for part in counted for step in part.seen]
    return metrics | journal_lib.summarize(episodes, seen)


@dataclasses.dataclass(frozen=True)
class Learner:
  """The compiled functions of a policy's update, and what they read besides its state."""

  spec: state_lib.Spec
  frozen: state_lib.Frozen
  mesh: jax.sharding.Mesh
  functions: update_lib.Functions
  bins: packing.Bins

  def update(
      self,
      state: TrainState,
      episodes: Sequence[types.Episode],
      key: jax.Array,
      timing: timing_lib.Timing,
      role: str = '',
  ) -> tuple[TrainState, PolicyUpdate]:
    """Trains on a batch of episodes, whose rows `key` deals out to optimizer steps."""
    functions, frozen = self.functions, self.frozen
    with timing('old_log_prob'):
      rows = batching.by_length(episodes)
      batch, steps = packing.to_device(rows, self.bins, key)
      first_epoch = packing.stack(packing.first_epoch(steps))
      batch, gap_metrics = functions.annotate(state, frozen, batch, first_epoch)
      state, batch, advantage_metrics = functions.with_advantages(state, batch)
      metrics = jax.device_get(gap_metrics | advantage_metrics)
    with timing('update_actor'):
      seen = []
      for step in steps:
        state, measured, tokens = functions.update_step(state, frozen, batch, step)
        seen.append(episodes_lib.StepMetrics(step.rows, measured, tokens))
      seen = [dataclasses.replace(x, metrics=jax.device_get(x.metrics)) for x in seen]
    return state, PolicyUpdate(role, rows, batch, steps, metrics, seen)


@dataclasses.dataclass
class Learners:
  """The policies that a run trains: one for all rows, or one for the rows of each role.

  They have the same shapes, and share the compiled functions and what is frozen.

  Attributes:
    learner: the functions and frozen parameters, which all policies share.
    state: the TrainState, or a dict from the name of each role to its TrainState.
    seed: the seed of the run.
  """

  learner: Learner
  state: State
  seed: int

  @property
  def num_bytes(self) -> int:
    """The size of the state."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.state))

  @property
  def actor(self) -> Any:
    """What is trained of the policy; a list with that of each role, where they have their own."""
    if isinstance(self.state, dict):
      return [state.actor for state in self.state.values()]
    return self.state.actor

  def policy(self, actor: Any) -> Any:
    """Returns the policies' parameters: trained ones, as in `actor`, combined with frozen ones."""
    combine = self.learner.frozen.policy
    return list(map(combine, actor)) if isinstance(actor, list) else combine(actor)

  def forget_skipped_steps(self) -> None:
    """Sets the count of skipped steps in a row to 0, as after a rollback."""
    if isinstance(self.state, dict):
      self.state = {role: state.unskipped() for role, state in self.state.items()}
    else:
      self.state = self.state.unskipped()

  def update(self, sampled: pipeline_lib.Sampled, timing: timing_lib.Timing) -> Learned:
    """Trains each policy on its rows of the batch.

    A function of the states, the batch and the seed, so a resumed run repeats it.
    """
    _, key = pipeline_lib.batch_keys(self.seed, sampled.number)
    if not isinstance(self.state, dict):
      self.state, part = self.learner.update(self.state, sampled.episodes, key, timing)
      return Learned([part])
    states, parts = {}, []
    for role, state in self.state.items():
      rows = [episode for episode in sampled.episodes if episode.role == role]
      states[role], part = self.learner.update(state, rows, key, timing, role)
      parts.append(part)
    self.state = states
    return Learned(parts)


def build(config: config_lib.Config, policies: Sequence[str] = ('',), pad_id: int = 0) -> Learners:
  """Loads the weights; returns the learners of these policies. Compiles nothing.

  All states start from the same weights.
  """
  variant = objective.make_variant(config)
  mesh = sharding.mesh_of(config.mesh)
  sharding.check_rows(mesh, micro_batch=config.train.micro_batch)
  offloaded = on_host(config, mesh)

  def load_model(head, folder=None, memory_kind=None):
    # Straight into their shards: no host ever holds a whole model.
    shardings = functools.partial(sharding.tree_shardings, mesh=mesh, memory_kind=memory_kind)
    return prepare.load_policy(config, head, folder, shardings)

  def make(function):
    shardings = sharding.tree_shardings(jax.eval_shape(function), mesh)
    return jax.jit(function, out_shardings=shardings)()

  model, critic_model, actor, critic, frozen = load(config, variant, load_model, make)
  if needs_reference(config, variant):  # a copy: the state takes the actor's own buffers
    if 'reference' in offloaded:
      host = sharding.tree_shardings(actor, mesh, sharding.HOST)
      reference = jax.device_put(actor, host)
    else:
      reference = jax.tree.map(jnp.copy, actor)
    frozen = dataclasses.replace(frozen, reference=reference)
  spec = make_spec(config, variant, model, critic_model, mesh.devices.flat[0])
  state = state_lib.create_sharded(spec, actor, critic, mesh, offloaded)
  functions = update_lib.compile_functions(spec, state, frozen, mesh)
  learner = Learner(spec, frozen, mesh, functions, make_bins(config, spec, mesh, pad_id))
  if policies == ('',):
    return Learners(learner, state, config.seed)
  copies = [state, *(jax.tree.map(jnp.copy, state) for _ in policies[1:])]
  return Learners(learner, dict(zip(policies, copies)), config.seed)


def load(
    config: config_lib.Config, variant: variants.Variant, load_model: Callable, make: Callable
) -> Models:
  """Loads the models of a run. `needs_reference` says whether one of them is a separate reference.

  `load_model(head, folder, memory_kind)` returns a ModelConfig and parameters, `make(function)` the
  tree that a function makes; both return shapes where a run is only planned.
  """
  options = config.model
  head, critic_head = model_heads(config, variant)
  folder = options.critic_folder or None
  memory_kind = sharding.HOST if config.placement.critic == 'host' else None
  critic_model = critic = None
  if not options.lora_rank:
    model, actor = load_model(head)
    if critic_head:
      critic_model, critic = load_model(critic_head, folder, memory_kind)
    return Models(model, critic_model, actor, critic, state_lib.Frozen())

  one_base = critic_head and not folder
  model, params = load_model('both' if one_base else head)
  base, value_head = lora.split(params)
  frozen = state_lib.Frozen(actor=base)
  actor_key, critic_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 0))

  def adapters(key, base):
    return make(functools.partial(lora.init, key, base, options.lora_rank, options.lora_targets))

  actor = adapters(actor_key, base)
  if one_base:
    critic_model = dataclasses.replace(model, head=critic_head)
    model = dataclasses.replace(model, head=head)
    critic = adapters(critic_key, base) | value_head
  elif critic_head:
    critic_model, params = load_model(critic_head, folder, memory_kind)
    base, value_head = lora.split(params)
    frozen = dataclasses.replace(frozen, critic=base)
    critic = adapters(critic_key, base) | value_head
  else:
    actor |= value_head  # on a shared trunk
  return Models(model, critic_model, actor, critic, frozen)


def needs_reference(config: config_lib.Config, variant: variants.Variant) -> bool:
  """Returns whether the initial policy has to be kept; adapters leave it unchanged."""
  return variant.kl_in != 'none' and not config.model.lora_rank


def on_host(config: config_lib.Config, mesh: jax.sharding.Mesh) -> list[str]:
  """Returns the names of what is offloaded to the host. UserError: the devices cannot do it."""
  names = [name for name, place in dataclasses.asdict(config.placement).items() if place == 'host']
  if names:
    sharding.check_host_memory(mesh)
  return names


def model_heads(config: config_lib.Config, variant: variants.Variant) -> tuple[str, str | None]:
  """Returns (head of the policy, head of the separate critic or None): see ModelConfig.head."""
  if not variant.needs_critic:
    return 'tokens', None
  return ('both', None) if config.model.critic == 'shared' else ('tokens', 'value')


def make_bins(
    config: config_lib.Config, spec: state_lib.Spec, mesh: jax.sharding.Mesh, pad_id: int
) -> packing.Bins:
  """Makes the Bins: how a batch is dealt out to optimizer steps."""
  train = config.train
  return packing.Bins(
      train.mini_batch,
      train.epochs,
      train.micro_batch,
      spec.lengths,
      pad_id,
      sharding.rows(mesh),
      spec.shared_bins,
  )


def make_spec(
    config: config_lib.Config,
    variant: variants.Variant,
    model: decoder.ModelConfig,
    critic_model: decoder.ModelConfig | None,
    device: jax.Device,
) -> state_lib.Spec:
  """Builds the static part of the compiled functions, for the kind of device that they run on."""
  train = config.train
  backend = attention.choose(
      config.model.attention, device, model.dtype, model.head_dim, train.length_buckets
  )
  steps_per_update = train.epochs * train.episodes // train.mini_batch

  objective.warn_of_settings(config, variant)

  def optimizer(options, later=0):
    num_steps = (train.schedule_updates or train.updates) * steps_per_update
    return state_lib.make_optimizer(
        options.lr,
        round(options.warmup * num_steps),
        options.betas,
        options.eps,
        options.weight_decay,
        options.final_lr,
        num_steps - later * steps_per_update,  # it counts its own steps
    )

  actor_optimizer, actor_lr = optimizer(config.actor, later=train.critic_warmup)
  critic_optimizer, critic_lr = optimizer(config.critic)
  return state_lib.Spec(
      variant=variant,
      actor=dataclasses.replace(model, attention=backend),
      critic=critic_model and dataclasses.replace(critic_model, attention=backend),
      actor_optimizer=actor_optimizer,
      critic_optimizer=critic_optimizer,
      actor_lr=actor_lr,
      critic_lr=critic_lr,
      micro_batch=train.micro_batch,
      lengths=tuple(train.length_buckets),
      temperature=config.rollout.temperature,
      logp_chunk=config.model.logp_chunk or None,
      critic_warmup=train.critic_warmup * steps_per_update,
      num_logged_turns=config.env.max_searches + 1,
      actor_clip=config.actor.grad_clip,
      critic_clip=config.critic.grad_clip,
      routing_replay=config.rollout.routing_replay if model.num_experts else 'none',
  )
