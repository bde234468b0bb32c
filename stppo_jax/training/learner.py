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

from absl import logging
import jax
import jax.numpy as jnp

from stppo_jax import config as config_lib
from stppo_jax import plugins
from stppo_jax import types
from stppo_jax import validation
from stppo_jax.algorithms import checks
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
from stppo_jax.training import packing
from stppo_jax.training import state as state_lib
from stppo_jax.training import update as update_lib
from stppo_jax.training.state import TrainState

State = TrainState | dict[str, TrainState]  # of one policy, or of the policy of each role


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
  metrics: dict[str, float]  # of the batch
  seen: list[episodes_lib.StepMetrics]  # of each optimizer step

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
      batch, gap = functions.annotate(state, frozen, batch, first_epoch)
      state, batch, credit = functions.with_advantages(state, batch)
      metrics = jax.device_get(gap | credit)
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
    learner: of each policy.
    state: a TrainState, or that of each role by its name.
    seed: of the run.
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


def build(config: config_lib.Config, roles: Sequence[str] = (), pad_id: int = 0) -> Learners:
  """Loads the weights; returns the learners of an environment with these roles. Compiles nothing.

  All states start from the same weights.
  """
  variant = make_variant(config)
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
    frozen = dataclasses.replace(
        frozen,
        reference=(
            jax.device_put(actor, sharding.tree_shardings(actor, mesh, sharding.HOST))
            if 'reference' in offloaded
            else jax.tree.map(jnp.copy, actor)
        ),
    )
  spec = make_spec(config, variant, model, critic_model, mesh.devices.flat[0])
  are_apart = config.model.role_parameters == 'own'
  if not are_apart:
    spec = dataclasses.replace(spec, roles=tuple(roles))
  state = state_lib.create_sharded(spec, actor, critic, mesh, offloaded)
  functions = update_lib.compile_functions(spec, state, frozen, mesh)
  learner = Learner(spec, frozen, mesh, functions, make_bins(config, spec, mesh, pad_id))
  if not are_apart:
    return Learners(learner, state, config.seed)
  copies = [state, *(jax.tree.map(jnp.copy, state) for _ in roles[1:])]
  return Learners(learner, dict(zip(roles, copies)), config.seed)


def make_variant(config: config_lib.Config) -> variants.Variant:
  """Resolves and checks the objective that the config names, with the columns it overrides."""
  algorithm = config.algorithm
  variant = plugins.load('algorithm.variant', algorithm.variant, variants.VARIANTS)
  if not isinstance(variant, variants.Variant):
    raise types.UserError(
        f'config.algorithm.variant={algorithm.variant!r} is a {type(variant).__name__}: '
        'give the name of a stppo_jax.algorithms.variants.Variant'
    )
  variant = dataclasses.replace(variant, **_overrides(algorithm, variant))
  _check_hashable(algorithm.variant, variant)
  functions = {}
  for column, names in variants.BUILT_IN.items():
    given = getattr(variant, column)
    if isinstance(given, str) and given not in names:
      given = functions[column] = plugins.load(f'algorithm.{column}', given, dict.fromkeys(names))
    if not isinstance(given, str) and not callable(given):
      raise types.UserError(
          f'config.algorithm.{column}={getattr(variant, column)!r}: must name a function, see '
          'stppo_jax/algorithms/variants.py'
      )
  named = variant
  variant = dataclasses.replace(variant, **functions)
  validation.check_variant(config, variant)
  for column in variants.BUILT_IN:
    function = getattr(variant, column)
    if not callable(function):
      continue
    if wrong := checks.check(column, function, variant, config.rollout.group_size):
      where = f'config.algorithm.{column}={getattr(named, column)!r}'
      if column not in functions:
        where = f'config.algorithm.variant={algorithm.variant!r}, its {column}'
      raise types.UserError(f'{where}: {wrong}')
  return dataclasses.replace(variant, norm_length=variant.norm_length or config.rollout.max_total)


def _check_hashable(name: str, variant: variants.Variant) -> None:
  """Refuses a field that cannot be a static part of a compiled function."""
  for field in vars(variant).keys() - variants.BUILT_IN.keys():  # functions may be any objects
    try:
      hash(getattr(variant, field))
    except TypeError:
      kind = type(getattr(variant, field)).__name__
      raise types.UserError(
          f'config.algorithm.variant={name!r}: its field {field} holds a {kind}, which cannot be '
          'hashed: make it a tuple, a number or a text'
      ) from None


def _overrides(
    algorithm: config_lib.AlgorithmSettings, variant: variants.Variant
) -> dict[str, Any]:
  """Returns the columns of the variant that the config sets."""
  columns = [field.name for field in dataclasses.fields(variants.Variant)]
  own = {field.name for field in dataclasses.fields(variant)} - set(columns)
  for name, value in algorithm.options.items():
    if name not in own:
      raise types.UserError(
          f'config.algorithm.options.{name}: the fields that {algorithm.variant!r} adds to a '
          f'Variant are {", ".join(sorted(own)) or "none"}'
      )
    if not isinstance(value, (bool, int, float, str, type(None))):
      raise types.UserError(
          f'config.algorithm.options.{name}={value!r}: give a number, a text, true, false or null'
      )
  given = {name: getattr(algorithm, name) for name in columns}
  return {k: v for k, v in given.items() if v is not None} | algorithm.options


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
  if not options.lora_rank:
    model, actor = load_model(head)
    critic_model, critic = (
        load_model(critic_head, folder, memory_kind) if critic_head else (None, None)
    )
    return Models(model, critic_model, actor, critic, state_lib.Frozen())

  one_base = critic_head and not folder
  model, params = load_model('both' if one_base else head)
  base, value_head = lora.split(params)
  frozen, critic_model, critic = state_lib.Frozen(actor=base), None, None
  actor_key, critic_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 0))

  def adapters(key, base):
    return make(functools.partial(lora.init, key, base, options.lora_rank, options.lora_targets))

  actor = adapters(actor_key, base)
  if one_base:
    model, critic_model = (dataclasses.replace(model, head=h) for h in (head, critic_head))
    critic = adapters(critic_key, base) | value_head
  elif critic_head:
    critic_model, params = load_model(critic_head, folder, memory_kind)
    base, value_head = lora.split(params)
    frozen, critic = (
        dataclasses.replace(frozen, critic=base),
        adapters(critic_key, base) | value_head,
    )
  else:
    actor |= value_head  # of a shared trunk
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

  _warn(config, variant)

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


# Columns that change nothing without another: what that is, and whether a variant has it.
_NEEDED = {
    'gamma': ('an advantage that discounts', lambda variant: not variant.needs_groups),
    'lam': ('a critic', lambda variant: variant.needs_critic or callable(variant.advantage)),
    'lam_critic': ('a critic', lambda variant: variant.needs_critic),
    'value_clip': ('a critic', lambda variant: variant.needs_critic),
    'clip_low': ('a ratio', lambda variant: variant.ratio != 'none'),
    'clip_high': ('a ratio', lambda variant: variant.ratio != 'none'),
    'divisor': ('a ratio', lambda variant: variant.ratio != 'none' or variant.divisor == 'none'),
    'chunk_length': (
        'ratio=chunk',
        lambda variant: variant.ratio == 'chunk' or callable(variant.ratio),
    ),
    'divide': ('a divisor', lambda variant: variant.divisor != 'none'),
    'norm_of': ('a divisor', lambda variant: variant.divisor != 'none'),
    'whiten_over': ('whiten=True', lambda variant: variant.whiten),
    'norm_length': (
        'aggregation=seq-mean-token-sum-norm',
        lambda variant: variant.aggregation == 'seq-mean-token-sum-norm',
    ),
    'kl_coef': ('kl_in=reward or loss', lambda variant: variant.kl_in != 'none'),
    'kl_horizon': ('kl_target', lambda variant: variant.kl_target > 0),
    'rollout_is_threshold': ('rollout_is', lambda variant: variant.rollout_is != 'none'),
    'rollout_is_low': ('rollout_is', lambda variant: variant.rollout_is != 'none'),
    'rollout_is_normalize': ('rollout_is', lambda variant: variant.rollout_is != 'none'),
    'rollout_rs_low': ('rollout_rs', lambda variant: variant.rollout_rs != 'none'),
    'rollout_rs_high': ('rollout_rs', lambda variant: variant.rollout_rs != 'none'),
}


def _warn(config, variant):
  """Logs what is allowed and seldom meant."""
  train, name = config.train, config.algorithm.variant
  for column, (needed, has) in _NEEDED.items():
    if getattr(config.algorithm, column) is not None and not has(variant):
      logging.warning('config.algorithm.%s has no effect without %s', column, needed)
  steps_per_update = train.epochs * train.episodes // train.mini_batch
  if variant.ratio == 'none' and steps_per_update > 1:
    logging.warning(
        '%s has no importance ratio, and only the first of its %d optimizer steps per update is '
        'on-policy: set --config.train.mini_batch=%d --config.train.epochs=1',
        name,
        steps_per_update,
        train.episodes,
    )
  is_corrected = variant.rollout_is != 'none' or variant.rollout_rs != 'none'
  starts_at_sampler = variant.old_logp == 'sampler' and variant.ratio != 'none'
  if config.pipeline.staleness and not (is_corrected or starts_at_sampler):
    logging.warning(
        'config.pipeline.staleness=%d trains on episodes of an older policy, and %s treats them as '
        "the current one's: set --config.algorithm.old_logp=sampler (docs/study.md has what it "
        'prevents), or --config.algorithm.rollout_is=turn',
        config.pipeline.staleness,
        name,
    )
  if variant.needs_critic and config.model.critic == 'shared':
    logging.warning(
        'config.model.critic=shared: one optimizer, that of config.actor, trains policy and value '
        'head; config.critic has no effect'
    )
  if variant.advantage == 'group_zscore' and variant.kl_in == 'reward':
    logging.warning(
        'config.algorithm.kl_in=reward puts the KL into the scores that %s divides by their spread '
        'in a group: a group whose episodes all do equally well trains on the KL alone, at full '
        'strength. Set --config.algorithm.kl_in=loss --config.algorithm.kl_estimator=k3',
        name,
    )
  if variant.mask_zero_advantage and variant.kl_in == 'loss' and steps_per_update > 1:
    logging.warning(
        'config.algorithm.mask_zero_advantage=True with kl_in=loss and %d optimizer steps per '
        'update: episodes of equal scores have no surrogate, and their KL is what holds the policy '
        'where the other steps move it (arXiv 2604.06159 reports an error of .297 without them, '
        '.063 with them). Set --config.algorithm.mask_zero_advantage=False, or kl_in=none',
        steps_per_update,
    )
  if variant.divide == 'step' and variant.divisor == 'paper':
    logging.warning(
        "config.algorithm.divide='step' with divisor='paper' multiplies the learning rate by "
        '1 / ||C||, without a bound where little is clipped: --config.algorithm.divisor=floor or '
        'relative never exceeds the rate'
    )
