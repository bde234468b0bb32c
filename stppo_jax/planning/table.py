"""Writes a plan as text: what a run holds, what each program needs and costs, and the verdict."""

from stppo_jax.planning.plan import HEADROOM
from stppo_jax.planning.plan import LIMIT_FLAG
from stppo_jax.planning.plan import Plan
from stppo_jax.planning.topologies import GIB


def text(plan: Plan) -> str:
  """Returns the whole table."""
  shape = ' x '.join(f'{axis} {size}' for axis, size in plan.mesh.shape.items())
  return '\n'.join(
      [
          f'{plan.config.name} on {plan.topology}: '
          f'{plan.mesh.size} x {plan.chip.name}, mesh {shape}',
          'parameters: ' + ', '.join(f'{name} {n:,}' for name, n in plan.num_params.items()),
          f'attention in training: {plan.attention}',
          f'sampling: {plan.sampler.width} rows per call, slots {plan.sampler.slot_buckets}, '
          f'staleness {plan.config.pipeline.staleness}',
          '',
          *_memory(plan),
          '',
          *_times(plan),
          '',
          *(f'{program.name}: {program.unit}{program.note}' for program in plan.programs),
          verdict(plan),
      ]
  )


def _memory(plan):
  """Yields the rows about memory: what a run holds, and the peak of each program."""
  programs, memory = plan.programs, plan.chip.memory
  yield _row('held during a run', 'GiB in total', 'GiB per device')
  for name, (total, each) in plan.held.items():
    if total:
      yield _row(name, _gib(total), _gib(each))
  yield ''
  yield _row('GiB per device', *(program.name for program in programs))
  yield _row('arguments', *(_gib(program.arguments) for program in programs))
  yield _row('temporaries', *(_gib(program.temporaries) for program in programs))
  yield _row('held by others', *(_gib(program.resident) for program in programs))
  yield _row('peak', *(_gib(program.peak) for program in programs))
  yield _row(f'of {_gib(memory)}', *(f'{program.peak / memory:.0%}' for program in programs))


def _times(plan):
  """Yields the rows about FLOPs and time. Times need the chip's figures."""
  programs = plan.programs
  yield _row('one run of the program', *(program.name for program in programs))
  yield _row('PFLOP, all devices', *(f'{program.flops / 1e15:.3g}' for program in programs))
  yield _row('runs per update, at most', *(str(program.runs) for program in programs))
  if not all(program.seconds for program in programs):
    return
  yield _row('s (estimate)', *(f'{program.seconds:.3g}' for program in programs))
  per_update = [program.runs * program.seconds for program in programs]
  yield _row('s per update (estimate)', *(f'{seconds:.3g}' for seconds in per_update))
  total = sum(per_update)
  share = sum(per_update[2:]) / total
  yield (
      f'one update takes about {total:.0f} s, of which sampling {share:.0%} (an estimate for rows '
      'of full length from FLOPs and bytes, without links and environments; nothing was run)'
  )


def verdict(plan: Plan) -> str:
  """Returns the largest sizes that fit, and 'FITS ..' or what to change."""
  largest = (
      'largest that fits (estimate, at least): '
      f'train.micro_batch {plan.largest_micro_batch or "none"}, '
      f'{_rows_field(plan)} {plan.largest_rows or "none"}\n'
  )
  if plan.fits:
    result = f'{largest}FITS, with at least {HEADROOM:.0%} of the memory free'
    if plan.tpu_limit_mib:
      result += f'; to hold the compiler to it: LIBTPU_INIT_ARGS={LIMIT_FLAG}={plan.tpu_limit_mib}'
    return result
  program = max(plan.programs, key=lambda program: program.peak)
  train = plan.config.train
  changes = []
  if program.name in ('update', 'annotate'):
    if plan.largest_micro_batch and plan.largest_micro_batch < train.micro_batch:
      changes.append(f'--config.train.micro_batch={plan.largest_micro_batch}')
    elif plan.config.model.remat != 'full':
      changes.append('--config.model.remat=full')
  elif plan.largest_rows and plan.largest_rows < plan.sampler.width:
    changes.append(f'--config.{_rows_field(plan)}={plan.largest_rows}')
  changes = changes or [
      'more devices',
      '--config.model.critic=shared',
      '--config.model.lora_rank=16 --config.model.param_dtype=bfloat16',
      'a smaller model',
  ]
  return (
      f'{largest}DOES NOT FIT: {program.name} needs {_gib(program.peak)} GiB per device, '
      f'{_gib(plan.limit)} may be used; try {" or ".join(changes)}'
  )


def _rows_field(plan):
  """Returns the setting that bounds the rows that decode together."""
  return 'rollout.width' if plan.config.rollout.width else 'rollout.rows'


def _gib(size):
  return f'{size / GIB:.2f}'


def _row(title, *cells):
  return f'{title:26s}' + ''.join(f'{cell:>19s}' for cell in cells)
