"""Writes a plan as text: what a run holds, what each program needs and costs, and the verdict."""

from stppo_jax.planning import hlo
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
          f'sampling: {_sampler(plan)}, staleness {plan.config.pipeline.staleness}',
          '',
          *_memory(plan),
          '',
          *_work(plan),
          *_times(plan),
          *_sampling(plan),
          '',
          *(f'{program.name}: {program.unit}{program.note}' for program in plan.programs),
          verdict(plan),
      ]
  )


def _sampler(plan):
  """Returns a line about what samples."""
  if not plan.engine_devices:
    return f'{plan.sampler.width} rows per call, slots {plan.sampler.slot_buckets}'
  total = plan.mesh.size + plan.engine_devices
  return f'engines on {plan.engine_devices} other devices, which makes {total} (not planned)'


def _memory(plan):
  """Yields the rows about memory: what a run holds, and the peak of each program."""
  programs = plan.programs
  memory = plan.chip.memory
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


def _work(plan):
  """Yields the rows about one run of each program: FLOPs and collectives."""
  yield _row('one run of the program', *(program.name for program in plan.programs))
  yield _row('PFLOP, all devices', *(f'{program.flops / 1e15:.3g}' for program in plan.programs))
  for kind in hlo.KINDS:
    cells = []
    for program in plan.programs:
      cell = '-'
      for collective in program.collectives:
        if collective.kind == kind:
          cell = f'{collective.count} x, {collective.bytes / 1e9:.3g}'
      cells.append(cell)
    name = 'between slices' if kind == hlo.BETWEEN_SLICES else kind
    if set(cells) != {'-'}:
      yield _row(f'{name}, GB per device', *cells)
  if plan.sent_between_slices:
    each = plan.sent_between_slices
    yield (
        f'each device sends {each / 1e9:.3g} GB to other slices per update, all devices '
        f'{plan.mesh.size * each / 1e9:.3g} GB; the estimates of time leave this network out'
    )


def _times(plan):
  """Yields the rows about time; none without the chip's figures."""
  programs = plan.programs
  seconds = [program.seconds for program in programs]
  whole = plan.update_seconds
  if whole is None:
    return
  per_update = [program.runs * time for program, time in zip(programs, seconds)]
  yield _row('at least, s (estimate)', *(f'{time:.3g}' for time in seconds))
  yield _row('runs per update, at most', *(str(program.runs) for program in programs))
  yield _row('s per update (estimate)', *(f'{time:.3g}' for time in per_update))
  share = 'without sampling'
  if plan.rollout is not None:
    share = f'of which sampling {plan.rollout.seconds / whole:.0%}'
  yield (
      f'one update takes at least {whole:.0f} s, {share} (an estimate from below, by a roofline of '
      'full-length rows; nothing was run)'
  )


def _sampling(plan):
  """Yields the rows about sampling; none without the chip's figures."""
  token = plan.token
  rollout = plan.rollout
  chip = plan.chip
  if rollout is None:
    return
  full = plan.sampler.slot_buckets[-1] * token.cache
  yield (
      f'a decoded token reads {token.weights / 1e9:.3g} GB of weights and up to '
      f'{full / 1e9:.3g} GB of cache per device, and waits for {token.collectives} all-reduces of '
      f'{token.sent / 1e6:.3g} MB (estimate; {chip.latency * 1e6:g} us each are assumed)'
  )
  yield (
      f'a rollout takes at least {rollout.seconds:.0f} s: {rollout.tokens:,} tokens sampled at '
      f'{rollout.tokens_per_second:,.0f} tokens/s on all devices (estimate; without environments)'
  )


def verdict(plan: Plan) -> str:
  """Returns the largest sizes that fit, and 'FITS ..' or what to change."""
  largest = (
      'largest that fits (estimate, at least): '
      f'train.micro_batch {plan.largest_micro_batch or "none"}'
  )
  if not plan.engine_devices:
    setting, value = _largest_rows(plan)
    largest += f', {setting} {value or "none"}'
  largest += '\n'
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
  elif plan.rows_per_episode <= plan.largest_rows < plan.sampler.width:
    setting, value = _largest_rows(plan)
    changes.append(f'--config.{setting}={value}')
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


def _largest_rows(plan):
  """Returns (setting that bounds the rows that decode together, its largest value that fits)."""
  if plan.config.rollout.width:
    return 'rollout.width', plan.largest_rows
  return 'rollout.rows', plan.largest_rows // plan.rows_per_episode  # episodes


def _gib(size):
  return f'{size / GIB:.2f}'


def _row(title, *cells):
  return f'{title:26s}' + ''.join(f'{cell:>19s}' for cell in cells)
