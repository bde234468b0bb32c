"""Does a run fit, and how long does an update take? Config in, Plan out, without accelerators.

The programs of a run are compiled for a topology whose devices may be absent, from shapes and
shardings alone. Memory is as the compiler reports it per program. FLOPs and collectives are counted
(hlo.py). Times are a roofline, so they are lower bounds.
"""

import dataclasses
import functools
import math
import re
import time

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax import validation
from stppo_jax.models import decoder
from stppo_jax.models import moe
from stppo_jax.models import sharding
from stppo_jax.planning import hlo
from stppo_jax.planning import roofline
from stppo_jax.planning import sampling
from stppo_jax.planning import topologies
from stppo_jax.planning.topologies import GIB
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import layout
from stppo_jax.rollout import prepare
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import packing
from stppo_jax.training import state as train_state
from stppo_jax.training import update

HEADROOM = 0.1  # share of a chip's memory that a plan leaves free
LIMIT_FLAG = '--xla_tpu_max_hbm_size_mib'
NUM_STOP_STATES = 32  # assumed size of the stop automaton, which depends on the tokenizer


@dataclasses.dataclass
class Program:
  """One compiled function, with figures per call and device unless stated otherwise."""

  name: str
  unit: str  # what one call does
  runs: int  # calls per update, at most
  flops: float  # on all devices together
  resident: int  # bytes that other parts of the run hold meanwhile
  trips: int  # of its loops without a known trip count
  arguments: int = 0
  temporaries: int = 0  # with results that do not reuse an argument's memory, and code
  collectives: tuple[hlo.Collective, ...] = ()
  compile_s: float = 0.0
  seconds: float | None = None  # a lower bound
  note: str = ''

  @property
  def peak(self) -> int:
    """Bytes per device while it runs."""
    return self.resident + self.arguments + self.temporaries


@dataclasses.dataclass
class Plan:
  """The result of `make`."""

  config: schema.Config
  topology: str
  chip: topologies.Chip
  mesh: jax.sharding.Mesh
  attention: str  # the backend in training
  num_params: dict[str, int]  # per model
  held: dict[str, tuple[int, int]]  # bytes (in total, per device) by what is held
  sampler: sampler_lib.Sampler
  token: roofline.Token | None = None  # a decoded one
  rollout: roofline.Rollout | None = None  # None without the chip's figures
  programs: list[Program] = dataclasses.field(default_factory=list)
  largest_micro_batch: int = 0  # that fits; 0: none does
  largest_rows: int = 0

  @property
  def held_per_device(self) -> dict[str, int]:
    """Bytes per device, by what is held."""
    return {name: each for name, (_, each) in self.held.items()}

  @property
  def limit(self) -> int:
    """Bytes that a device may use."""
    return int(self.chip.memory * (1 - HEADROOM))

  @property
  def tpu_limit_mib(self) -> int:
    """Memory limit for the TPU compiler, which otherwise uses all memory; 0 on other platforms."""
    if self.mesh.devices.flat[0].platform != 'tpu':
      return 0
    return (self.limit - self.held['reference policy'][1]) // 2**20

  @property
  def num_programs(self) -> dict[str, int]:
    """Programs that a run compiles, at most, by function."""
    return {'update': 1, 'annotate': 1, 'advantages': 1} | self.sampler.num_programs()

  @property
  def fits(self) -> bool:
    """Whether every program leaves the headroom free."""
    return all(program.peak <= self.limit for program in self.programs)


def make(config: schema.Config, topology: str = '') -> Plan:
  """Compiles a run's programs for `topology` ('' means the attached devices), as the loop would.

  Choice: every episode fills a bin of the longest bucket, and every step clips something in each
  bin. Shorter bins are branches of the same program that need less; fewer bins take fewer
  iterations.

  UserError: an impossible topology, mesh or model. RunError: a compiler failed.
  """
  _check(config)
  devices, chip = topologies.devices_of(topology)
  mesh = sharding.mesh_of(config.mesh, devices)
  sharding.check_rows(mesh, micro_batch=config.train.micro_batch)
  on_host = learner_lib.on_host(config, mesh)
  absent_gpu = bool(topology) and chip.name == topologies.CHIPS['h100'].name
  if absent_gpu:  # tracing cuDNN's attention queries the GPU
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention='plain'))

  def load(head, folder=None, memory_kind=None):
    shape = prepare.load_shape(config, head, folder)
    return shape, _on(mesh, _params(shape), memory_kind)

  variant = learner_lib.make_variant(config)
  model, critic_model, actor, critic, frozen = learner_lib.load(
      config, variant, load, lambda function: _on(mesh, jax.eval_shape(function))
  )
  if learner_lib.needs_reference(config, variant):
    frozen = dataclasses.replace(
        frozen, reference=_on(mesh, actor, sharding.HOST if 'reference' in on_host else None)
    )
  spec = dataclasses.replace(
      learner_lib.make_spec(config, variant, model, critic_model, devices[0]),
      lengths=config.train.length_buckets[-1:],
  )
  state = jax.eval_shape(functools.partial(train_state.create, spec), actor, critic)
  state = jax.tree.map(_shape, state, train_state.shardings(state, mesh, on_host))
  stop_table = np.zeros((NUM_STOP_STATES, model.vocab_size), np.int32)
  sampler = agent_lib.make_sampler(config, model, stop_table, (0,), mesh)
  evaluated = sampler.greedy(config.eval.rows).num_groups  # before and after a run at least
  sampler.num_groups = max(sampler.num_groups, evaluated)  # each has a cache
  plan = Plan(
      config=config,
      topology=topology or 'the devices here',
      chip=chip,
      mesh=mesh,
      attention=spec.actor.attention + (' (cuDNN cannot be traced without a GPU)' * absent_gpu),
      num_params=_num_params(config, model, critic_model, state),
      held=_held(sampler, state, frozen),
      sampler=sampler,
  )
  # Sums over micro-batches: g and C of the actor, and the critic's.
  gradients = 2 * _sizes(state.actor)[1] + _sizes(state.critic)[1]
  for program, traced in _programs(plan, spec, state, frozen):
    _compile(program, traced, plan)
    plan.programs.append(program)
    _estimate(program, plan)
  if config.pipeline.staleness:
    _add_concurrent(plan)
  plan.rollout = sampling.rollout(plan)
  _find_largest(plan, gradients)
  return plan


def _check(config):
  validation.validate(config)
  if config.model.role_parameters == 'own':
    raise types.UserError(
        "config.model.role_parameters='own': a plan is of one policy. Plan with 'shared', and "
        'count parameters and optimizers once per role'
    )


def turn_batch(
    rows: int, columns: int, experts_of: decoder.ModelConfig | None = None
) -> types.TurnBatch:
  """Returns the batch that `batching.to_turn_batch` makes, as ShapeDtypeStructs.

  With a mixture of experts in `experts_of` it has the experts of each token, to be replayed.
  """
  routes = None
  if experts_of is not None:
    axes = (rows, columns, experts_of.num_layers, experts_of.experts_per_token)
    routes = _shape_of(*axes, dtype=moe.route_dtype(experts_of.num_experts))
  real, whole = _shape_of(rows, columns), _shape_of(rows, columns, dtype=jnp.int32)
  return types.TurnBatch(
      tokens=whole,
      action_mask=real,
      turn_ids=whole,
      rewards=real,
      old_logp=real,
      ref_logp=real,
      old_values=real,
      advantages=real,
      returns=real,
      group_ids=_shape_of(rows, dtype=jnp.int32),
      behaviour_logp=real,
      routes=routes,
  )


def _params(model):
  return jax.eval_shape(functools.partial(decoder.init, config=model), jax.random.key(0))


def _on(mesh, tree, memory_kind=None):
  """Returns the same shapes with their shardings."""
  return jax.tree.map(_shape, tree, sharding.tree_shardings(tree, mesh, memory_kind))


def _shape(x, placed):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)


def _shape_of(*axes, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(axes, dtype)


def _sizes(tree):
  """Returns (bytes in total, bytes per device) of ShapeDtypeStructs; without a sharding: on one."""
  leaves = jax.tree.leaves(tree)
  parts = [x.shape if x.sharding is None else x.sharding.shard_shape(x.shape) for x in leaves]
  return (
      sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves),
      sum(math.prod(part) * x.dtype.itemsize for part, x in zip(parts, leaves)),
  )


def _num_params(config, model, critic_model, state):
  """Returns the number of parameters of each model, and with adapters that of the trained ones."""
  models = {'policy': model, 'critic': critic_model}
  counts = {name: decoder.num_params(shape) for name, shape in models.items() if shape}
  if config.model.lora_rank:
    counts['trained'] = sum(x.size for x in jax.tree.leaves((state.actor, state.critic)))
  return counts


def _held(sampler, state, frozen):
  """Returns {what: (bytes in total, bytes per device)} that a run holds, with its KV cache."""
  trees = {
      'policy': frozen.policy(state.actor),
      'critic': (frozen.critic, state.critic),
      'optimizers': (state.actor_opt, state.critic_opt),
      'reference policy': frozen.reference,
  }

  def keep(tree, on_host):
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if (x.sharding.memory_kind == sharding.HOST) == on_host]

  held = {name: _sizes(keep(tree, False)) for name, tree in trees.items()}
  held['sampling copy'] = _sizes(sampler.shapes_of_copy(trees['policy']))
  rows = sampler.width * sampler.num_groups
  context = sampler.shapes_of_context(rows, sampler.slot_buckets[-1])
  held['KV cache'] = _sizes((context.k, context.v))
  return held | {f'{name}, on the host': _sizes(keep(tree, True)) for name, tree in trees.items()}


def _programs(plan, spec, state, frozen):
  """Yields (Program, jax.stages.Traced) for each function that an update runs."""
  params = frozen.policy(state.actor)
  for name, unit, runs, trips, resident, traced in (
      *_training_programs(plan, spec, state, frozen),
      *sampling.programs(plan, params),
  ):
    yield Program(name, unit, runs, hlo.matmul_flops(traced.jaxpr, trips), resident, trips), traced


def _training_programs(plan, spec, state, frozen):
  """Returns (name, unit, runs per update, loop trips, bytes held by others, traced) of each."""
  train, held = plan.config.train, plan.held_per_device
  sampler = sampling.ahead(plan) + held['KV cache'] * bool(plan.config.pipeline.staleness)
  functions = update.compile_functions(spec, state, frozen, plan.mesh)
  size, replay = (train.episodes, train.length_buckets[-1]), spec.routing_replay
  sampled = turn_batch(*size, spec.actor if replay == 'sampling' else None)
  annotated = turn_batch(*size, None if replay == 'none' else spec.actor)
  micro_batches = train.mini_batch // train.micro_batch
  micro = f'in micro-batches of {train.micro_batch}, {train.length_buckets[-1]} tokens each'
  whole = functools.partial(_shape_of, dtype=jnp.int32)
  deal, first_deals = (train.mini_batch,), (train.episodes // train.mini_batch, train.mini_batch)

  def dealt(axes):
    return packing.Step(whole(*axes), packing.Packing(*(whole(*axes) for _ in range(3))))

  return (
      (
          'update',
          f'an optimizer step on {train.mini_batch} episodes {micro}',
          train.epochs * train.episodes // train.mini_batch,
          micro_batches,
          held['reference policy'] + sampler,
          functions.update_step.trace(state, frozen, annotated, dealt(deal)),
      ),
      (
          'annotate',
          f'log-probs and values of {train.episodes} episodes {micro}',
          1,
          micro_batches,
          held['optimizers'] + sampler,
          functions.annotate.trace(state, frozen, sampled, dealt(first_deals)),
      ),
  )


def _compile(program, traced, plan):
  """Compiles the program and fills in its memory and collectives."""
  started = time.perf_counter()
  logging.info('compiling %s for %s', program.name, plan.topology)
  try:
    compiled = traced.lower().compile(
        {LIMIT_FLAG.lstrip('-'): plan.tpu_limit_mib} if plan.tpu_limit_mib else None
    )
  except jax.errors.JaxRuntimeError as error:
    used = re.search(r'Used ([\d.]+)([MG]) of', str(error))
    if not used:
      raise topologies.explained(error, plan.topology) from error
    # The compiler rejects a program that does not fit; its figure includes the arguments.
    program.temporaries = int(float(used[1]) * {'M': 2**20, 'G': GIB}[used[2]])
    program.note = ', rejected by the compiler for its size'
  else:
    memory = compiled.memory_analysis()
    program.arguments = memory.argument_size_in_bytes
    program.temporaries = (
        memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    program.collectives = hlo.collectives(compiled.as_text(), program.trips)
  program.compile_s = time.perf_counter() - started


def _estimate(program, plan):
  """Fills in the roofline's time: the slowest of compute, memory and links, if they overlapped.

  Memory traffic is everything that the program holds, once; for a decoded token see `roofline`. An
  all-reduce sends its bytes twice.
  """
  chip = plan.chip
  if program.name == 'decode':
    plan.token = sampling.token(program, plan)
  if not chip.flops or program.note:
    return
  if program.name == 'decode':
    program.seconds = plan.token.seconds(plan.sampler.slot_buckets[-1], chip)
    return
  traffic = program.arguments + program.temporaries
  sent = sum(c.bytes * (2 if c.kind == 'all-reduce' else 1) for c in program.collectives)
  program.seconds = max(
      program.flops / (plan.mesh.size * chip.flops), traffic / chip.bandwidth, sent / chip.link
  )


def _add_concurrent(plan):
  """Counts the temporaries of training while a batch is sampled, and the other way round.

  With staleness a thread samples during the update, so that programs of both are in flight. The
  copy is made by the thread that trains.
  """
  training = [p for p in plan.programs if p.name in ('update', 'annotate', 'copy')]
  sampling_ahead = [p for p in plan.programs if p not in training]
  largest = lambda programs: max(program.temporaries for program in programs)
  in_training, in_sampling = largest(training), largest(sampling_ahead)
  for program in training:
    program.resident += in_sampling
  for program in sampling_ahead:
    program.resident += in_training


def _find_largest(plan, gradients):
  """Fills in the largest micro-batch that divides the mini-batch, and the largest slot group."""
  train, step = plan.config.train, sharding.num_row_shards(plan.mesh)
  row_step = layout.num_shards(plan.sampler.row_sharding, 'data')
  divisors = [n for n in range(step, train.mini_batch + 1, step) if train.mini_batch % n == 0]
  plan.largest_micro_batch = _largest(
      plan.limit, plan.programs[:2], train.micro_batch, gradients, divisors
  )
  plan.largest_rows = _largest(
      plan.limit,
      [program for program in plan.programs[2:] if program.name != 'copy'],
      plan.sampler.width,
      0,
      range(row_step, train.episodes + 1, row_step),
  )


def _largest(limit, programs, rows, fixed, allowed):
  """Returns the largest of the `allowed` numbers of rows that fits, else 0; `programs` have `rows`.

  Of a program's temporaries `fixed` bytes are assumed constant and the rest proportional to the
  rows, which is conservative above `rows`.
  """

  def peak(program, count):
    least = min(fixed, program.temporaries)
    return (
        program.resident + program.arguments + least + (program.temporaries - least) * count / rows
    )

  return max((n for n in allowed if all(peak(p, n) <= limit for p in programs)), default=0)
