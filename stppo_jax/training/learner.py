"""The learners of a run: the states of its policies, and the functions that update them.

One policy is trained on all rows, or each policy is trained on the rows of its role. With LoRA,
actor and critic that start from the same folder share one base, loaded once.
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import typing

from absl import logging
import jax
import jax.numpy as jnp

from stppo_jax import types
from stppo_jax.algorithms.variants import Variant
from stppo_jax.config import Config
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.rollout import batching
from stppo_jax.rollout import sequences
from stppo_jax.settings import objective
from stppo_jax.stop_signal import StopSignal
from stppo_jax.training import ahead
from stppo_jax.training import minibatches
from stppo_jax.training import packing
from stppo_jax.training import state as state_lib
from stppo_jax.training import summary
from stppo_jax.training import update as update_lib
from stppo_jax.training.state import TrainState

LOGGED_TURNS = 16  # with metrics of their own. Each is a pass over the tokens of every step

# Context manager of the seconds of a phase, see `timing.Timing`.
Timing = Callable[[str], contextlib.AbstractContextManager]


# The state of a run: that of its only policy, or {role: the state of its policy}.
States = TrainState | dict[str, TrainState]


class Teacher(typing.Protocol):
  """Scores tokens for on-policy distillation, see `teacher.TeacherServer`."""

  stop_signal: StopSignal

  def batch_logp(
      self,
      episodes: Sequence[types.Episode],
      batch: types.TurnBatch,
      sharding: jax.sharding.Sharding | None,
  ) -> types.TurnBatch:
    """Returns the batch with `teacher_logp` [B,T]. Its first rows are those of the episodes."""


class Models(typing.NamedTuple):
  """The models of a run: their shapes, the trained parameters of each, and the frozen ones."""

  model: decoder.ModelConfig
  critic_model: decoder.ModelConfig | None  # None without a separate critic, as is `critic`
  actor: dict
  critic: dict | None
  frozen: state_lib.Frozen


class SplitRows(typing.NamedTuple):
  """The rows of a policy, moved to the devices, and their optimizer steps."""

  episodes: list[types.Episode]  # in the order of the batch's rows
  batch: types.TurnBatch
  steps: list[packing.OptimizerStep]


@dataclasses.dataclass
class Learners:
  """The policies of a run in training, by their names (see `EnvFactory.policies`).

  The policies have the same shapes. They share the compiled functions and what is frozen.

  Three trees are called parameters. The `actor` is what is trained: all of the policy's parameters,
  or its adapters. `policy(actor)` adds the frozen parameters, and is what a model takes.
  `Batches.copy(actor)` is a copy of the policy in the layout for sampling, which training does not
  overwrite.

  Attributes:
    spec: what is static about an update.
    frozen: parameters that no step changes.
    mesh: the devices.
    functions: the compiled functions of an update.
    bins: how a batch is split into optimizer steps.
    states: {'': the state that is trained on all rows}, or {role: the state of its rows}.
    seed: the seed of the run.
    teacher: the `teacher.TeacherServer` that scores the tokens; None: there is none.
    compilation: compiles the functions ahead of the first update; None: nothing does.
  """

  spec: state_lib.Spec
  frozen: state_lib.Frozen
  mesh: jax.sharding.Mesh
  functions: update_lib.Functions
  bins: minibatches.Bins
  states: dict[str, TrainState]
  seed: int
  teacher: Teacher | None = None
  compilation: ahead.Compilation | None = None

  @property
  def state(self) -> States:
    """The state as a checkpoint holds it: a TrainState, or {role: TrainState}."""
    return self.states[''] if '' in self.states else self.states

  @property
  def num_bytes(self) -> int:
    """The size of the state."""
    leaves = jax.tree.leaves(self.states)
    return sum(leaf.nbytes for leaf in leaves)

  @property
  def actor(self) -> sequences.PolicyParams:
    """The trained parameters of the policy. Several policies give a list, in order."""
    actors = [state.actor for state in self.states.values()]
    return _one_or_list(actors)

  @property
  def start_actor(self) -> sequences.PolicyParams:
    """The parameters of `actor` as they sample, and as the next update starts from them."""
    actors = [self.start_state(name).actor for name in self.states]
    return _one_or_list(actors)

  def start_state(self, name: str) -> TrainState:
    """Returns the state that the next update of a policy starts from."""
    state = self.states[name]
    return state_lib.extrapolated(state, self.spec.variant.extrapolation)

  def policy(self, actor: sequences.PolicyParams) -> sequences.PolicyParams:
    """Returns the policies' parameters: trained ones, as in `actor`, combined with frozen ones."""
    combine = self.frozen.policy
    if isinstance(actor, list):
      return list(map(combine, actor))
    return combine(actor)

  def restore(self, read: Callable[[States], States]) -> None:
    """Replaces the state by read(shapes with shardings). Frees the old one first, to make room."""
    shapes = sharding.shapes(self.state)
    names = list(self.states)
    self.states.clear()
    state = read(shapes)
    for name in names:
      self.states[name] = state[name] if isinstance(state, dict) else state

  def forget_skipped_steps(self) -> None:
    """Sets the count of skipped steps in a row to 0, as after a rollback."""
    for name, state in self.states.items():
      skipped = jnp.zeros_like(state.skipped)
      self.states[name] = dataclasses.replace(state, skipped=skipped)

  def compile_ahead(self, num_episodes: int, group_size: int, roles: Sequence[str]) -> None:
    """Begins to compile the functions for a batch of `num_episodes` episodes, in threads.

    An environment with `roles` gives an episode one row for each of them.
    """
    if '' not in self.states:
      roles = ()  # each policy has the rows of one role
    routed_model = self.spec.actor if self.spec.routing_replay == 'sampling' else None
    batch, step = minibatches.shapes(self.bins, num_episodes, group_size, roles, routed_model)
    if self.teacher is not None:
      batch = dataclasses.replace(batch, teacher_logp=batch.old_logp)
    place = self.bins.sharding

    def on_devices(shape):
      return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

    (rows_per_step,) = step.rows.shape
    steps_per_epoch = num_episodes // self.bins.mini_batch
    state = next(iter(self.states.values()))
    self.compilation = ahead.Compilation(
        functions=self.functions,
        state=sharding.shapes(state),
        frozen=sharding.shapes(self.frozen),
        batch=jax.tree.map(on_devices, batch),
        first_epoch=packing.step_shapes(
            step.packing.num_tokens, self.bins.share_prefixes, steps_per_epoch, rows_per_step
        ),
        step=step,
    )

  def update(self, sampled: batching.Sampled, timing: Timing) -> list[summary.PolicyUpdate]:
    """Trains each policy on its rows of the batch.

    The result depends on the states, the batch and the seed alone, so a resumed run repeats it.
    """
    _, key = batching.batch_keys(self.seed, sampled.number)
    if self.compilation is not None:
      with timing('compile'):
        self.compilation.wait()
      self.compilation = None
    split = {}
    with timing('old_log_prob'):
      for name in self.states:
        rows = [episode for episode in sampled.episodes if name in ('', episode.role)]
        split[name] = self._split(rows, key)
    # All states are whole up to here: if a teacher's server fails, the run saves them.
    states = {}
    updates = []
    for name, split_rows in split.items():
      states[name], policy_update = self._train(name, split_rows, timing)
      updates.append(policy_update)
    # All at once: after an error, the run saves the state only if it belongs to one update.
    self.states = states
    return updates

  def _split(self, rows, key):
    """Moves rows to the devices, and splits them into optimizer steps by `key`.

    A teacher's server scores their tokens. RunError: it failed.
    """
    # Keep the sampled order if the variant prefers the first of equal scores.
    if not self.spec.variant.breaks_ties:
      rows = batching.by_length(rows)
    batch, steps = minibatches.to_device(rows, self.bins, key)
    if self.teacher is not None:
      batch = self.teacher.batch_logp(rows, batch, self.bins.sharding)
    return SplitRows(rows, batch, steps)

  def _train(self, name, split_rows, timing):
    """Trains a policy on its batch: returns (new state, PolicyUpdate).

    The buffers of the old state are reused. If no step moves an extrapolated policy, the policy
    returns to where it was before.
    """
    rows, batch, steps = split_rows
    functions = self.functions
    frozen = self.frozen
    state = self.start_state(name)
    with timing('old_log_prob'):
      steps_per_epoch = len(steps) // self.bins.epochs
      first_epoch = packing.stack(steps[:steps_per_epoch])
      batch, gap_metrics = functions.annotate(state, frozen, batch, first_epoch)
      state, batch, advantage_metrics = functions.with_advantages(state, batch)
      metrics = jax.device_get(gap_metrics | advantage_metrics)
    measured = []
    with timing('update_actor'):
      for step in steps:
        state, step_metrics, tokens = functions.update_step(state, frozen, batch, step)
        one_step = types.StepMetrics(step.rows, step_metrics, tokens)
        measured.append(one_step)
      for i, one_step in enumerate(measured):
        host_metrics = jax.device_get(one_step.metrics)
        measured[i] = dataclasses.replace(one_step, metrics=host_metrics)
    if self.spec.variant.extrapolation:
      is_moved = any(one_step.metrics['stppo/step_norm'] > 0 for one_step in measured)
      if not is_moved:
        # The policy before the extrapolation. The buffers of its old state are reused.
        previous_actor = self.states[name].previous_actor
        state = dataclasses.replace(
            state, actor=state.previous_actor, previous_actor=previous_actor
        )
    return state, summary.PolicyUpdate(name, rows, batch, steps, metrics, measured)


def _one_or_list(values):
  return values[0] if len(values) == 1 else values


def build(
    config: Config,
    variant: Variant,
    load_policy: Callable,
    policies: Sequence[str] = ('',),
    pad_id: int = 0,
    teacher: Teacher | None = None,
) -> Learners:
  """Loads the weights; returns the learners of these policies. Compiles nothing.

  All policies start from the same weights. `load_policy` is `prepare.load_policy`, and `teacher` is
  a `teacher.TeacherServer`, if there is one.
  """
  mesh = sharding.mesh_of(config.mesh)
  config = with_micro_batch(config, mesh)
  offloaded = on_host(config, mesh)

  def place(memory_kind=None):
    # Straight into their shards: no host ever holds a whole model.
    return functools.partial(sharding.tree_shardings, mesh=mesh, memory_kind=memory_kind)

  def load_model(config, head, folder=None, memory_kind=None):
    shardings = place(memory_kind)
    return load_policy(config, head, folder, shardings, variant.value_labels)

  def make(function):
    shapes = jax.eval_shape(function)
    shardings = place()
    make_sharded = jax.jit(function, out_shardings=shardings(shapes))
    return make_sharded()

  def copy(params, memory_kind):  # the state takes the buffers of `params`
    shardings = place(memory_kind)
    return jax.device_put(params, shardings(params), may_alias=False)

  models = load(config, variant, load_model, make)
  spec, frozen = complete(config, variant, models, mesh, load_model, copy)
  state = state_lib.create_sharded(spec, models.actor, models.critic, mesh, offloaded)
  compiled = update_lib.compile_functions(spec, state, frozen, mesh)
  bins = minibatches.Bins(
      mini_batch=config.train.mini_batch,
      epochs=config.train.epochs,
      micro_batch=config.train.micro_batch,
      length_buckets=spec.length_buckets,
      pad_id=pad_id,
      sharding=sharding.rows(mesh),
      shared=spec.shared_bins,
      share_prefixes=spec.share_prefixes,
      whole_groups=variant.compares_rows,
      marks_demonstrations=bool(config.rollout.demonstrations),
  )
  states = {policies[0]: state}
  for name in policies[1:]:
    states[name] = jax.tree.map(jnp.copy, state)
  seed = config.seed
  return Learners(spec, frozen, mesh, compiled, bins, states, seed, teacher)


def load(config: Config, variant: Variant, load_model: Callable, make: Callable) -> Models:
  """Loads the models that a run trains, and the bases of adapters.

  `load_model(config, head, folder, memory_kind)` returns a ModelConfig and parameters, and
  `make(function)` returns the tree that a function makes. `build` gives functions that return
  arrays. Those of `planning.plan` return shapes, and so do those of `evaluation.policy` for the
  parameters that a checkpoint holds.
  """
  options = config.model
  head, critic_head = model_heads(config, variant)
  folder = options.critic_folder or None
  memory_kind = None
  if config.placement.critic == 'host':
    memory_kind = sharding.HOST
  critic_model = None
  critic = None
  if not options.lora_rank:
    model, actor = load_model(config, head)
    if critic_head:
      critic_model, critic = load_model(config, critic_head, folder, memory_kind)
    return Models(model, critic_model, actor, critic, state_lib.Frozen())

  from stppo_jax.models import lora

  one_base = critic_head and not folder
  first_head = 'both' if one_base else head
  model, params = load_model(config, first_head)
  base, value_head = lora.split(params)
  frozen = state_lib.Frozen(actor=base)
  key = jax.random.key(config.seed)
  key = jax.random.fold_in(key, 0)
  actor_key, critic_key = jax.random.split(key)

  def adapters(key, base):
    rank = options.lora_rank
    init = functools.partial(lora.init, key, base, rank, options.lora_targets)
    return make(init)

  actor = adapters(actor_key, base)
  if one_base:
    critic_model = dataclasses.replace(model, head=critic_head)
    model = dataclasses.replace(model, head=head)
    critic = adapters(critic_key, base) | value_head
  elif critic_head:
    critic_model, params = load_model(config, critic_head, folder, memory_kind)
    base, value_head = lora.split(params)
    frozen = dataclasses.replace(frozen, critic=base)
    critic = adapters(critic_key, base) | value_head
  else:
    actor |= value_head  # on a shared trunk
  return Models(model, critic_model, actor, critic, frozen)


def complete(
    config: Config,
    variant: Variant,
    models: Models,
    mesh: jax.sharding.Mesh,
    load_model: Callable,
    copy: Callable,
) -> tuple[state_lib.Spec, state_lib.Frozen]:
  """Adds the reference and the teacher to the frozen parameters; returns the Spec of all models.

  `load_model` is as in `load`, and `copy(params, memory_kind)` returns parameters in other buffers.
  """
  frozen = models.frozen
  memory_kind = sharding.HOST if config.placement.reference == 'host' else None
  if variant.needs_reference and not config.model.lora_rank:  # adapters leave their base unchanged
    reference = copy(models.actor, memory_kind)
    frozen = dataclasses.replace(frozen, reference=reference)
  critic_model = models.critic_model
  spec = make_spec(config, variant, models.model, critic_model, mesh)
  folder = config.teacher.folder
  if folder:
    # A frozen model loses nothing if it is stored in the dtype of the computation.
    dtype = config.model.dtype
    options = dataclasses.replace(config.model, param_dtype=dtype)
    config = dataclasses.replace(config, model=options)
    model, teacher = load_model(config, 'tokens', folder, memory_kind)
    frozen = dataclasses.replace(frozen, teacher=teacher)
    actor, critic, teacher = _with_attention(config, mesh, (spec.actor, spec.critic, model))
    spec = dataclasses.replace(spec, actor=actor, critic=critic, teacher=teacher)
  share = shares_prefixes(config.train.share_prefixes, spec.models)
  return dataclasses.replace(spec, share_prefixes=share), frozen


def shares_prefixes(setting: str, models: Sequence[decoder.ModelConfig]) -> bool:
  """Returns whether rows share prefixes by config.train.share_prefixes; the log says why not.

  UserError: the setting is 'always', and a model cannot.
  """
  if setting == 'never':
    return False
  reasons = [reason for reason in map(decoder.obstacle_to_paths, models) if reason]
  if setting == 'always':
    if reasons:
      raise types.UserError(
          f"config.train.share_prefixes='always': {reasons[0]}: set "
          '--config.train.share_prefixes=auto'
      )
    return True
  backends = {model.attention for model in models}
  if not reasons and 'splash' in backends:
    reasons.append(
        'splash attention would read its masks from memory, which config.train.share_prefixes='
        "'always' allows"
    )
  if reasons:
    logging.info('every row is computed from its first token, because %s', reasons[0])
  return not reasons


def _with_attention(config, mesh, models):
  """Returns the models, of which some may be None, with the attention that all of them can run.

  They use the same bins, so a kernel that one of them cannot use is used by none.
  """
  chosen = {
      decoder.choose_attention(model, config.model.attention, mesh, config.train.length_buckets)
      for model in models
      if model is not None
  }
  backend = chosen.pop() if len(chosen) == 1 else 'plain'
  return [model and dataclasses.replace(model, attention=backend) for model in models]


def with_micro_batch(config: Config, mesh: jax.sharding.Mesh) -> Config:
  """Returns the config with a micro-batch. UserError: the devices cannot share one or its step."""
  train = config.train
  if not train.micro_batch:
    sharding.check_rows(mesh, mini_batch=train.mini_batch)
    train = dataclasses.replace(train, micro_batch=sharding.num_row_shards(mesh))
  sharding.check_rows(mesh, micro_batch=train.micro_batch)
  return dataclasses.replace(config, train=train)


def on_host(config: Config, mesh: jax.sharding.Mesh) -> list[str]:
  """Returns the names of what is offloaded to the host. UserError: the devices cannot do it."""
  places = dataclasses.asdict(config.placement)
  names = [name for name, place in places.items() if place == 'host']
  if names:
    sharding.check_host_memory(mesh)
  return names


def model_heads(config: Config, variant: Variant) -> tuple[str, str | None]:
  """Returns (head of the policy, head of the separate critic or None): see ModelConfig.head."""
  if not variant.needs_critic:
    return 'tokens', None
  if config.model.critic == 'shared':
    return 'both', None
  return 'tokens', 'value'


def make_spec(
    config: Config,
    variant: Variant,
    model: decoder.ModelConfig,
    critic_model: decoder.ModelConfig | None,
    mesh: jax.sharding.Mesh,
) -> state_lib.Spec:
  """Builds the static part of the compiled functions, for the devices that they run on."""
  train = config.train
  actor, critic = _with_attention(config, mesh, (model, critic_model))
  routing_replay = config.rollout.routing_replay
  if routing_replay != 'none' and not model.num_experts:
    routing_replay = 'none'
    logging.warning('config.rollout.routing_replay has no effect without a mixture of experts')
  objective.warn_of_settings(config, variant)
  steps_per_update = train.epochs * train.episodes // train.mini_batch
  num_updates = train.schedule_updates or train.updates

  def optimizer(options, later=0):
    num_steps = num_updates * steps_per_update
    own_steps = num_steps - later * steps_per_update  # the steps that it counts itself
    return state_lib.make_optimizer(
        options.lr,
        round(options.warmup * num_steps),
        options.betas,
        options.eps,
        options.weight_decay,
        options.final_lr,
        own_steps,
    )

  actor_optimizer, actor_lr = optimizer(config.actor, later=train.critic_warmup)
  critic_optimizer, critic_lr = optimizer(config.critic)
  return state_lib.Spec(
      variant=variant,
      actor=actor,
      critic=critic,
      actor_optimizer=actor_optimizer,
      critic_optimizer=critic_optimizer,
      actor_lr=actor_lr,
      critic_lr=critic_lr,
      micro_batch=train.micro_batch,
      length_buckets=tuple(train.length_buckets),
      temperature=config.rollout.temperature,
      logp_chunk=config.model.logp_chunk or None,
      critic_warmup=train.critic_warmup * steps_per_update,
      num_logged_turns=min(config.env.turn_limit or LOGGED_TURNS, LOGGED_TURNS),
      actor_clip=config.actor.grad_clip,
      critic_clip=config.critic.grad_clip,
      routing_replay=routing_replay,
      teacher_coef=config.teacher.coef,
  )
