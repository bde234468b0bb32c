"""Does a run fit, and how long does an update take? Config in, Plan out, without accelerators.

The programs of a run are compiled for a topology whose devices may be absent, from shapes and
shardings alone. Memory is as the compiler reports it per program. FLOPs and collectives are
counted (flops.py, hlo.py). Times are a roofline, so they are lower bounds.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import math
import re

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.config import Config
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.planning import hlo
from stppo_jax.planning import programs
from stppo_jax.planning import roofline
from stppo_jax.planning import topologies
from stppo_jax.planning.programs import CompiledProgram
from stppo_jax.planning.topologies import GIB
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import prepare
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling_sharding
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import state as state_lib

HEADROOM = 0.1  # share of a chip's memory that a plan leaves free
LIMIT_FLAG = '--xla_tpu_max_hbm_size_mib'
# What the TPU compiler writes of a program that needs too much memory: older and newer libtpu.
_TOO_LARGE = r'Used ([\d.]+)([MG]) of|\(([\d.]+)([MG])\) exceeds available HBM'
NUM_STOP_STATES = 32  # assumed size of the stop automaton, which depends on the tokenizer


@dataclasses.dataclass
class Plan:
  """The result of `make`.

  Attributes:
    config: the run.
    topology: name of the topology.
    chip: figures of one device.
    mesh: the devices.
    attention: backend of attention in training.
    num_params: number of parameters of each model.
    held: (bytes in total, bytes per device) by the name of what a run holds.
    sampler: the sampler of the run.
    rows_per_episode: the number of the environment's agents, each of which has rows of its own.
    token: work of a decoded token.
    rollout: time of a rollout. None without the chip's figures.
    programs: the compiled programs.
    largest_micro_batch: the largest that fits. 0: none does.
    largest_rows: the largest number of rows per decode call that fits. 0: none does.
  """

  config: Config
  topology: str
  chip: topologies.Chip
  mesh: jax.sharding.Mesh
  attention: str
  num_params: dict[str, int]
  held: dict[str, tuple[int, int]]
  sampler: sampler_lib.Sampler
  rows_per_episode: int = 1
  token: roofline.Token | None = None
  rollout: roofline.Rollout | None = None
  programs: list[CompiledProgram] = dataclasses.field(default_factory=list)
  largest_micro_batch: int = 0
  largest_rows: int = 0

  @property
  def held_per_device(self) -> dict[str, int]:
    """Bytes per device, by what is held."""
    return {name: each for name, (_, each) in self.held.items()}

  @property
  def num_rows(self) -> int:
    """Rows of a batch."""
    return self.rows_per_episode * self.config.train.episodes

  @property
  def rows_per_step(self) -> int:
    """Rows of an optimizer step."""
    return self.rows_per_episode * self.config.train.mini_batch

  @property
  def engine_devices(self) -> int:
    """Devices of the engines in other processes that sample, other than those of the trainer."""
    rollout = self.config.rollout
    if rollout.engine_shares_devices:
      return 0
    num_engines = len(rollout.engine.split(',')) if rollout.engine else 0
    return num_engines * rollout.engine_devices

  @property
  def limit(self) -> int:
    """Bytes that a device may use."""
    return int(self.chip.memory * (1 - HEADROOM))

  @property
  def tpu_limit_mib(self) -> int:
    """Memory limit for the TPU compiler, which otherwise uses all memory; 0 on other platforms."""
    if self.mesh.devices.flat[0].platform != 'tpu':
      return 0
    held = self.held_per_device
    return (self.limit - held['reference policy'] - held['teacher']) // 2**20

  @property
  def update_seconds(self) -> float | None:
    """Time of an update with its rollout, a lower bound. None: unknown."""
    training = _named(self, 'update', 'annotate')
    if not all(program.seconds for program in self.programs):
      return None
    total = sum(program.runs * program.seconds for program in training)
    return total + (self.rollout.seconds if self.rollout else 0.0)

  @property
  def sent_between_slices(self) -> int:
    """Bytes that each device sends to other slices of TPUs in an update; 0 in one slice."""
    total = 0
    for program in self.programs:
      sent = [c.bytes for c in program.collectives if c.kind == hlo.BETWEEN_SLICES]
      total += program.runs * sum(sent)
    return total

  @property
  def fits(self) -> bool:
    """Whether every program leaves the headroom free."""
    return all(program.peak <= self.limit for program in self.programs)


def make(
    config: Config,
    topology: str = '',
    devices: tuple[Sequence[jax.Device], topologies.Chip] | None = None,
    compiler: Callable[[CompiledProgram, Plan], None] | None = None,
    rows_per_episode: int = 1,
) -> Plan:
  """Compiles a run's programs for `topology` ('' means the attached devices), as the loop would.

  `devices` and `compiler` replace `topologies.devices_of` and `compile_program`. For
  `rows_per_episode` see `EnvFactory`.

  Choice: every row fills a bin of the longest bucket, and every step clips something in each
  bin. Shorter bins are branches of the same program that need less. Fewer bins take fewer
  iterations.

  UserError: an impossible topology, mesh or model. RunError: a compiler failed.
  """
  validation.validate(config)
  validation.check_one_policy(config)
  found, chip = devices or topologies.devices_of(topology)
  mesh = sharding.mesh_of(config.mesh, found)
  config = learner_lib.with_micro_batch(config, mesh)
  on_host = learner_lib.on_host(config, mesh)
  absent_gpu = topology.partition(':')[0] in topologies.GPUS
  if absent_gpu:  # tracing cuDNN's attention queries the GPU
    options = dataclasses.replace(config.model, attention='plain')
    train = dataclasses.replace(config.train, share_prefixes='never')  # as cuDNN
    config = dataclasses.replace(config, model=options, train=train)
  variant = objective.make_variant(config)

  def on_mesh(shapes, memory_kind=None):
    return sharding.placed(shapes, sharding.tree_shardings(shapes, mesh, memory_kind))

  def load(config, head, folder=None, memory_kind=None):
    model = prepare.load_shape(config, head, folder, variant.value_labels)
    return model, on_mesh(decoder.shapes(model), memory_kind)

  def make_shapes(function):
    return on_mesh(jax.eval_shape(function))

  models = learner_lib.load(config, variant, load, make_shapes)
  model = models.model
  spec, frozen = learner_lib.complete(config, variant, models, mesh, load, on_mesh)
  spec = dataclasses.replace(spec, length_buckets=config.train.length_buckets[-1:])
  create = functools.partial(state_lib.create, spec)
  state = jax.eval_shape(create, models.actor, models.critic)
  state = sharding.placed(state, state_lib.shardings(state, mesh, on_host))
  stop_table = np.zeros((NUM_STOP_STATES, model.vocab_size), np.int32)
  sampler = agent_lib.make_sampler(
      config, model, stop_table, (0,), mesh, rows_per_episode, memory=chip.memory
  )
  evaluated_at_once = agent_lib.fitting_episodes(
      config.eval.rows, config, model, mesh, rows_per_episode, chip.memory
  )
  # Before and after a run at least.
  evaluated = sampler.greedy(evaluated_at_once * rows_per_episode).num_groups
  sampler.num_groups = max(sampler.num_groups, evaluated)  # each has a cache
  attention = spec.actor.attention
  if absent_gpu:
    attention += ' (cuDNN cannot be traced without a GPU)'
  plan = Plan(
      config=config,
      topology=topology or 'the devices here',
      chip=chip,
      mesh=mesh,
      attention=attention,
      num_params=_num_params(models, state),
      held=_held(config, sampler, state, frozen),
      sampler=sampler,
      rows_per_episode=rows_per_episode,
  )
  for program in _programs(plan, spec, state, frozen):
    (compiler or compile_program)(program, plan)
    plan.programs.append(program)
    _estimate(program, plan)
  if config.pipeline.staleness and not config.rollout.engine:
    _add_concurrent(plan)
  plan.rollout = estimate_rollout(plan)
  # Sums over micro-batches: g and C of the actor, and the critic's.
  gradients = 2 * _sizes(state.actor)[1] + _sizes(state.critic)[1]
  _find_largest(plan, gradients)
  return plan


def _sizes(tree):
  """Returns (bytes in total, bytes per device) of ShapeDtypeStructs; without a sharding: on one."""
  total = 0
  per_device = 0
  for leaf in jax.tree.leaves(tree):
    part = leaf.shape
    if leaf.sharding is not None:
      part = leaf.sharding.shard_shape(leaf.shape)
    itemsize = leaf.dtype.itemsize
    total += leaf.size * itemsize
    per_device += math.prod(part) * itemsize
  return total, per_device


def _num_params(models, state):
  """Returns the number of parameters of each model, and with adapters that of the trained ones."""
  counts = {'policy': decoder.num_params(models.model)}
  if models.critic_model is not None:
    counts['critic'] = decoder.num_params(models.critic_model)
  if models.frozen.actor:
    trained = jax.tree.leaves((state.actor, state.critic))
    counts['trained'] = sum(x.size for x in trained)
  return counts


def _held(config, sampler, state, frozen):
  """Returns {name: (bytes in total, bytes per device)} that a run holds, with its KV cache."""
  policy = frozen.policy(state.actor)
  trees = {
      'policy': policy,
      'critic': (frozen.critic, state.critic),
      'optimizers': (state.actor_opt, state.critic_opt),
      'reference policy': frozen.reference,
      'teacher': frozen.teacher,
  }
  if state.previous_actor is not None:
    trees['previous policy'] = state.previous_actor
  held = {}
  held_on_host = {}
  for name, tree in trees.items():
    parts: dict[bool, list] = {True: [], False: []}
    for leaf in jax.tree.leaves(tree):
      is_on_host = leaf.sharding.memory_kind == sharding.HOST
      parts[is_on_host].append(leaf)
    held[name] = _sizes(parts[False])
    held_on_host[f'{name}, on the host'] = _sizes(parts[True])
  if config.rollout.engine:
    held |= {'sampling copy': (0, 0), 'KV cache': (0, 0)}
  else:
    rows = sampler.width * sampler.num_groups
    context = sampler.empty.eval_shape(rows, sampler.slot_buckets[-1])
    held['sampling copy'] = _sizes(sampler.shapes_of_copy(policy))
    held['KV cache'] = _sizes((context.k, context.v))
  return held | held_on_host


def _programs(plan, spec, state, frozen):
  """Yields each program that an update runs."""
  yield from programs.training(plan, spec, state, frozen)
  if not plan.config.rollout.engine:
    yield from programs.sampling(plan, frozen.policy(state.actor))


def compile_program(program: CompiledProgram, plan: Plan) -> None:
  """Compiles the program and fills in its FLOPs, memory and collectives."""
  logging.info('compiling %s for %s', program.name, plan.topology)
  options = None
  if plan.tpu_limit_mib:
    options = {LIMIT_FLAG.lstrip('-'): plan.tpu_limit_mib}
  program.count_flops()
  lowered = program.traced.lower()
  try:
    compiled = lowered.compile(options)
  except jax.errors.JaxRuntimeError as error:
    used = re.search(_TOO_LARGE, str(error))
    if not used:
      raise topologies.explained(error, plan.topology) from error
    # The compiler rejects a program that does not fit. Its figure includes the arguments.
    size, unit = used[1] or used[3], used[2] or used[4]
    program.temporaries = int(float(size) * {'M': 2**20, 'G': GIB}[unit])
    program.note = ', rejected by the compiler for its size'
    return
  memory = compiled.memory_analysis()
  new_results = memory.output_size_in_bytes - memory.alias_size_in_bytes
  code = memory.generated_code_size_in_bytes
  program.arguments = memory.argument_size_in_bytes
  program.temporaries = memory.temp_size_in_bytes + new_results + code
  program.collectives = hlo.collectives(compiled.as_text(), program.trips)


def _estimate(program, plan):
  """Fills in the roofline's time: the slowest of compute, memory and links, if they overlapped.

  Memory traffic is everything that the program holds, once. A decoded token has its own formula in
  roofline.py. An all-reduce sends its bytes twice. The network between slices has no figures, and
  does not count.
  """
  chip = plan.chip
  if program.name == 'decode':
    plan.token = _decoded_token(program, plan)
  if not chip.flops or program.note:
    return
  if program.name == 'decode':
    program.seconds = plan.token.seconds(plan.sampler.slot_buckets[-1], chip)
    return
  compute_s = program.flops / (plan.mesh.size * chip.flops)
  memory_s = (program.arguments + program.temporaries) / chip.bandwidth
  sent = 0
  for collective in program.collectives:
    if collective.kind == hlo.BETWEEN_SLICES:
      continue
    times = 2 if collective.kind == 'all-reduce' else 1
    sent += times * collective.bytes
  program.seconds = max(compute_s, memory_s, sent / chip.link)


def _decoded_token(program, plan):
  """Returns what a decoded token reads and sends. It reads a few rows of an untied embedding."""
  sampler = plan.sampler
  model = sampler.config
  weights = plan.held['sampling copy'][1]
  if not model.tie_embeddings:
    parts = sampling_sharding.num_shards(sampler.row_sharding, 'tensor')
    embedding = model.vocab_size * model.d_model // parts
    weights -= embedding * jnp.dtype(model.dtype).itemsize
  rows_and_slots = sampler.num_groups * sampler.slot_buckets[-1]
  return roofline.Token(
      weights=weights,
      cache=plan.held['KV cache'][1] // rows_and_slots,
      flops=program.flops / plan.mesh.size,
      sent=sum(c.bytes for c in program.collectives),
      collectives=sum(c.count for c in program.collectives),
  )


def estimate_rollout(plan: Plan) -> roofline.Rollout | None:
  """Returns the time of a rollout from its programs' times; None without the chip's figures."""
  seconds = {program.name: program.seconds or 0.0 for program in plan.programs}
  runs = {program.name: program.runs for program in plan.programs}
  is_known = all(seconds.get(name) for name in ('copy', 'prefill', 'decode'))
  if plan.token is None or not plan.chip.flops or not is_known:
    return None
  config = plan.config
  lengths = config.rollout
  steps = programs.tokens_per_episode(config)
  longest_prompt = min(lengths.max_prompt, lengths.max_total - steps)
  decode_s = roofline.decode_seconds(
      plan.token,
      steps,
      max(longest_prompt, 0),
      lengths.max_total,
      plan.sampler.slot_buckets,
      plan.chip,
  )
  other_s = sum(runs[name] * seconds[name] for name in ('copy', 'prefill', 'grow'))
  calls = runs['decode'] // steps
  return roofline.Rollout(decode_s * calls, other_s, plan.num_rows * steps)


def _add_concurrent(plan):
  """Counts the temporaries of training while a batch is sampled, and the other way round.

  With staleness a thread samples during the update, so that programs of both are in flight. The
  copy is made by the thread that trains.
  """
  training = _named(plan, 'update', 'annotate', 'copy')
  sampling = _named(plan, 'prefill', 'decode', 'grow')
  largest_in_training = max(program.temporaries for program in training)
  largest_in_sampling = max(program.temporaries for program in sampling)
  for program in training:
    program.resident += largest_in_sampling
  for program in sampling:
    program.resident += largest_in_training


def _named(plan, *names):
  return [program for program in plan.programs if program.name in names]


def _find_largest(plan, gradients):
  """Fills in the largest micro-batch that divides the mini-batch, and the largest slot group."""
  train = plan.config.train
  step = sharding.num_row_shards(plan.mesh)
  row_step = sampling_sharding.num_shards(plan.sampler.row_sharding, 'data')
  sizes = range(step, train.mini_batch + 1, step)
  divisors = [size for size in sizes if train.mini_batch % size == 0]
  training = _named(plan, 'update', 'annotate')
  sampling = _named(plan, 'prefill', 'decode', 'grow')
  plan.largest_micro_batch = _largest(plan.limit, training, train.micro_batch, gradients, divisors)
  row_counts = range(row_step, plan.num_rows + 1, row_step)
  plan.largest_rows = _largest(plan.limit, sampling, plan.sampler.width, 0, row_counts)


def _largest(limit, programs, rows, fixed, allowed):
  """Returns the largest of the `allowed` numbers of rows that fits, else 0; `programs` have `rows`.

  Of a program's temporaries `fixed` bytes are assumed constant and the rest proportional to the
  rows, which is conservative above `rows`.
  """

  def peak(program, count):
    constant = min(fixed, program.temporaries)
    scaled = (program.temporaries - constant) * count / rows
    return program.resident + program.arguments + constant + scaled

  largest = 0
  for count in allowed:
    peaks = [peak(program, count) for program in programs]
    if max(peaks, default=0) <= limit:
      largest = max(largest, count)
  return largest
