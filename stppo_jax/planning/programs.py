"""The programs of a run, traced from shapes and shardings: what an update runs, and how often."""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

import jax

from stppo_jax.config import Config
from stppo_jax.models import decoder
from stppo_jax.planning import flops
from stppo_jax.planning import hlo
from stppo_jax.rollout import batching
from stppo_jax.rollout import sampling_sharding
from stppo_jax.training import packing
from stppo_jax.training import state as state_lib
from stppo_jax.training import update


@dataclasses.dataclass
class CompiledProgram:
  """One compiled function, with figures per call and device unless stated otherwise.

  Attributes:
    name: name of the function.
    unit: description of one call.
    runs: calls per update, at most.
    resident: bytes that other parts of the run hold meanwhile.
    trace: traces the function. Called once, when the program is compiled.
    trips: iterations of its loops without a known trip count.
    flops: floating-point operations of the matrix products, on all devices together.
    arguments: bytes of the arguments.
    temporaries: bytes of temporaries, of results that reuse no argument's memory, and of code.
    collectives: collectives of one call.
    seconds: time of one call, a lower bound. None: unknown.
    note: remark of the compiler.
  """

  name: str
  unit: str
  runs: int
  resident: int
  trace: Callable[[], jax.stages.Traced] | None = None
  trips: int = 1
  flops: float = 0.0
  arguments: int = 0
  temporaries: int = 0
  collectives: tuple[hlo.Collective, ...] = ()
  seconds: float | None = None
  note: str = ''

  @functools.cached_property
  def traced(self) -> jax.stages.Traced:
    """The traced function."""
    assert self.trace is not None
    return self.trace()

  def count_flops(self) -> None:
    """Fills in `flops`."""
    self.flops = flops.matmul_flops(self.traced.jaxpr, self.trips)

  @property
  def peak(self) -> int:
    """Bytes per device while it runs."""
    return self.resident + self.arguments + self.temporaries


def training(
    plan: Any, spec: state_lib.Spec, state: state_lib.TrainState, frozen: state_lib.Frozen
) -> Iterator[CompiledProgram]:
  """Yields the programs of an optimizer step and of the annotation of a batch."""
  train = plan.config.train
  held = plan.held_per_device
  longest = train.length_buckets[-1]
  sampling_bytes = bytes_ahead(plan)
  if plan.config.pipeline.staleness:
    sampling_bytes += held['KV cache']
  functions = update.compile_functions(spec, state, frozen, plan.mesh)
  model = spec.actor
  replayed_model = model if spec.routing_replay == 'sampling' else None
  micro = f'in micro-batches of {train.micro_batch}, {longest} tokens each'
  num_steps = train.episodes // train.mini_batch
  trips = plan.rows_per_step // train.micro_batch
  # The policy before the last update is kept until this one has ended (Learners._train).
  previous = held.get('previous policy', 0)
  kept = held['teacher'] + previous + sampling_bytes
  reads_reference = 'reference_kl' in spec.variant.needs  # an argument then

  @functools.cache
  def trace_annotate():
    batch = batching.batch_shapes(plan.num_rows, longest, replayed_model)
    steps = packing.step_shapes(longest, spec.share_prefixes, num_steps, plan.rows_per_step)
    return functions.annotate.trace(state, frozen, batch, steps)

  def trace_update():
    batch, _ = trace_annotate().out_info
    step = packing.step_shapes(longest, spec.share_prefixes, plan.rows_per_step)
    return functions.update_step.trace(state, frozen, batch, step)

  yield CompiledProgram(
      name='update',
      unit=f'an optimizer step on {plan.rows_per_step} rows {micro}',
      runs=train.epochs * num_steps,
      resident=kept + (0 if reads_reference else held['reference policy']),
      trace=trace_update,
      trips=trips,
  )
  yield CompiledProgram(
      name='annotate',
      unit=f'log-probs and values of {plan.num_rows} rows {micro}',
      runs=1,
      resident=held['optimizers'] + 2 * previous + sampling_bytes,
      trace=trace_annotate,
      trips=trips,
  )


def sampling(plan: Any, params: decoder.Params) -> Iterator[CompiledProgram]:
  """Yields the programs of a rollout, in which all slot groups are full."""
  config = plan.config
  held = plan.held_per_device
  sampler = plan.sampler
  lengths = config.rollout
  traced = functools.cache(lambda: sampler.trace(params, lengths.max_total))
  decodes = -(-plan.num_rows // sampler.width)
  prefills = -(-plan.num_rows // sampler.prefill_rows)
  chunk = sampler.chunk_buckets[-1]
  observation_chunks = -(-lengths.max_observation // chunk)
  turns = config.env.turn_limit
  if turns is None:  # Choice: all turns and observations are as long as allowed.
    turns = -(-lengths.max_total // (lengths.max_turn + lengths.max_observation))
  chunks = -(-lengths.max_prompt // chunk) + (turns - 1) * observation_chunks
  cache = held['KV cache']  # all slot groups; one of them is an argument of the program
  other_groups = cache * (sampler.num_groups - 1) // sampler.num_groups
  training_state = held['critic'] + held['optimizers'] + held.get('previous policy', 0)
  training_state += bytes_ahead(plan)
  training_state += held['reference policy'] + held['teacher']
  others = training_state + held['policy']
  axes = (
      f'{axis} {sampling_sharding.num_shards(sampler.row_sharding, axis)}'
      for axis in ('data', 'tensor')
  )
  yield CompiledProgram(
      name='copy',
      unit=f'the policy in {sampler.config.dtype}, over {" x ".join(axes)}',
      runs=1,
      resident=training_state + cache * bool(config.pipeline.staleness),
      trace=lambda: traced()['copy'],
  )
  yield CompiledProgram(
      name='prefill',
      unit=f'{chunk} tokens of {sampler.prefill_rows} rows',
      runs=prefills * chunks,
      resident=others + (other_groups if sampler.in_place else cache),
      trace=lambda: traced()['prefill'],
  )
  yield CompiledProgram(
      name='decode',
      unit=f'1 token of {sampler.width} rows of {lengths.max_total} slots',
      runs=decodes * tokens_per_episode(config),
      resident=others + other_groups,
      trace=lambda: traced()['decode'],
  )
  yield CompiledProgram(
      name='grow',
      unit='the last growth of a KV cache, which copies it',
      runs=decodes * (len(sampler.slot_buckets) - 1),
      resident=others + held['sampling copy'] + other_groups,
      trace=lambda: traced()['grow'],
  )


def bytes_ahead(plan: Any) -> int:
  """Returns the bytes per device of the copies held for batches that are sampled ahead.

  With staleness s these are the copies of the last s updates: see `pipeline.Pipeline.take`.
  """
  return plan.held_per_device['sampling copy'] * plan.config.pipeline.staleness


def tokens_per_episode(config: Config) -> int:
  """Returns the number of tokens that an episode samples, at most."""
  rollout = config.rollout
  if config.env.turn_limit is None:
    return rollout.max_total
  return min(config.env.turn_limit * rollout.max_turn, rollout.max_total)
