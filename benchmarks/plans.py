"""The table of plans in docs/scaling.md, from what the compilers reported.

  python -m benchmarks.plans             # prints the table into the page; needs no compiler
  python -m benchmarks.plans --compile   # first compiles what has changed; a minute per program

plans.json has one record per run and topology: what a compiler reported of each program, what it
had been asked, and the versions. The rest of the table is computed by today's planner. The records
of programs that the planner would now compile in another form are refused. `--compile` needs the
extra `plan`.
"""

from collections.abc import Callable
import hashlib
import importlib.metadata
import json
import math
import pathlib
import re
from typing import Any
from typing import NamedTuple

from absl import app
from absl import flags
from absl import logging
import jax

from stppo_jax.cli import config_file
from stppo_jax.cli import flags as flags_lib
from stppo_jax.config import Config
from stppo_jax.planning import hlo
from stppo_jax.planning import plan as plan_lib
from stppo_jax.planning import topologies
from stppo_jax.planning.plan import Plan
from stppo_jax.planning.programs import CompiledProgram
from stppo_jax.types import UserError

_COMPILE = flags.DEFINE_bool('compile', False, 'compile the programs without a record')
ROOT = pathlib.Path(__file__).parent.parent
RECORDS = ROOT / 'benchmarks' / 'plans.json'
PAGE = ROOT / 'docs' / 'scaling.md'
TABLE = re.compile(r'(?<=\n\n)\| run, `--topology` \|.*?\n(?=\n)', re.DOTALL)
HEADER = (
    'run, `--topology`',
    'memory of a device, GiB',
    'most that is used, GiB',
    'share',
    'seconds per update, at least',
    'share of sampling',
)
VERSIONS = ('jax', 'jaxlib', 'libtpu', 'jax-cuda12-plugin', 'jax-cuda13-plugin')
# Every number that a compiler reports of a program.
REPORTED = ('flops', 'arguments', 'temporaries', 'note')


class Row(NamedTuple):
  """A run and the devices that it is planned for."""

  experiment: str
  topology: str
  settings: tuple[str, ...] = ()

  @property
  def name(self) -> str:
    """The first cell of the row."""
    cell = f'`{self.experiment}`; `{self.topology}`'
    return ', '.join([cell, *(f'`{setting}`' for setting in self.settings)])


ROWS = (
    Row('st_ppo_7b', 'v5e:8x8'),
    Row('st_ppo_7b', 'h100:1x1x8', ('train.micro_batch=8',)),
    Row('grpo_7b', 'v5e:8x8'),
    Row('grpo_7b', 'h100:1x1x8', ('train.micro_batch=8',)),
    Row('st_ppo_qwen3_8b', 'h100:1x1x8'),
)


class _Memory(str):
  """A kind of memory of an absent device. JAX wants the kind, or an object that has it."""

  @property
  def kind(self) -> str:
    """The kind."""
    return str(self)


class _Client:
  """What JAX asks of the client of an absent device."""

  platform_version = runtime_type = ''

  def process_index(self) -> int:
    """The process."""
    return 0


class AbsentDevice:
  """A device of a topology, of which shapes and shardings can be made. It compiles nothing."""

  client = _Client()
  process_index = core_on_chip = 0

  def __init__(self, number: int, platform: str, kind: str):
    self.id = self.local_hardware_id = number
    self.coords = (number, 0, 0)
    self.platform = platform
    self.device_kind = kind

  def addressable_memories(self) -> list[_Memory]:
    """The memories of a device."""
    return [_Memory('device'), _Memory('pinned_host')]

  def default_memory(self) -> _Memory:
    """The first of them."""
    return _Memory('device')


def absent_devices(topology: str) -> tuple[list[Any], topologies.Chip]:
  """Returns `topologies.devices_of` without a compiler."""
  name, _, shape = topology.partition(':')
  chip = topologies.CHIPS[name]
  platform = 'cuda' if name in topologies.GPUS else 'tpu'
  count = math.prod(int(size) for size in shape.split('x'))
  devices = [AbsentDevice(number, platform, chip.name) for number in range(count)]
  return devices, topologies.usable(chip) if platform == 'cuda' else chip


def load_config(row: Row) -> Config:
  """Returns the settings of a row's run."""
  arguments = [f'--config={ROOT}/experiments/{row.experiment}.py']
  arguments += [f'--config.{setting}' for setting in row.settings]
  return config_file.load(flags_lib.parse(arguments), reads_run=False)


def read() -> dict[str, Any]:
  """Returns the records by the names of their rows."""
  return json.loads(RECORDS.read_text(encoding='utf-8')) if RECORDS.exists() else {}


def asked(program: CompiledProgram, plan: Plan) -> str:
  """Returns a digest of what a plan wants of a program: sizes of the run, and of one call.

  It needs no trace. `traced` is the digest of the program's own shapes.
  """
  wanted = (
      plan.topology,
      plan.attention,
      sorted((axis, plan.mesh.shape[axis]) for axis in ('data', 'fsdp', 'tensor')),
      sorted(plan.num_params.items()),
      sorted(plan.held.items()),
      plan.tpu_limit_mib,
      program.name,
      program.unit,
      program.trips,
  )
  return _digest(wanted)


def traced(program: CompiledProgram) -> str:
  """Returns a digest of the shapes that go into a program and come out of it."""
  shapes = program.traced.jaxpr.in_avals, program.traced.jaxpr.out_avals
  return _digest([[aval.str_short() for aval in avals] for avals in shapes])


def _digest(value):
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def recorded(records: dict[str, Any], row: Row) -> Plan:
  """Returns the plan of a row from its record. UserError: the planner asks for something else."""
  known = records[row.name]['programs']

  def fill_in(program, plan):
    record = known.get(program.name, {})
    if record.get('asked') != asked(program, plan):
      raise UserError(
          f'{RECORDS.name} has no record of {program.name} of {row.name} as the planner now wants '
          'it: run python -m benchmarks.plans --compile'
      )
    for name in REPORTED:
      setattr(program, name, record[name])
    program.collectives = tuple(hlo.Collective(*each) for each in record['collectives'])

  return _make(row, absent_devices(row.topology), fill_in)


def compile_row(records: dict[str, Any], row: Row) -> None:
  """Compiles what has no record of these versions, and writes each record at once."""
  versions = {}
  for package in VERSIONS:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  record = records.get(row.name, {})
  if record.get('versions') != versions:
    record = {'versions': versions, 'programs': {}}
  records[row.name] = record

  def compile_program(program, plan):
    wanted = {'asked': asked(program, plan), 'traced': traced(program)}
    known = record['programs'].get(program.name, {})
    if known.items() >= wanted.items():
      return
    plan_lib.compile_program(program, plan)
    collectives = [[each.kind, each.count, each.bytes] for each in program.collectives]
    reported = {name: getattr(program, name) for name in REPORTED}
    record['programs'][program.name] = wanted | reported | {'collectives': collectives}
    RECORDS.write_text(json.dumps(records, indent=1) + '\n', encoding='utf-8')
    logging.info('%s, %s: recorded', row.name, program.name)

  _make(row, topologies.devices_of(row.topology), compile_program)


def _make(row: Row, devices: Any, compiler: Callable[[CompiledProgram, Plan], None]) -> Plan:
  return plan_lib.make(load_config(row), row.topology, devices, compiler)


def cells(row: Row, plan: Plan) -> list[str]:
  """Returns a row of the table."""
  memory = plan.chip.memory
  largest = max(plan.programs, key=lambda program: program.peak)
  fits = 'fits' if plan.fits else 'does not fit'
  total = plan.update_seconds
  return [
      row.name,
      f'{memory / topologies.GIB:.2f}',
      f'{largest.peak / topologies.GIB:.2f} ({largest.name})',
      f'{largest.peak / memory:.0%}, {fits}',
      f'{total:.0f}',
      f'{plan.rollout.seconds / total:.0%}',
  ]


def table(records: dict[str, Any]) -> str:
  """Returns the table of the page."""
  lines = [HEADER, ['---'] * len(HEADER)]
  lines += [cells(row, recorded(records, row)) for row in ROWS if row.name in records]
  return ''.join('| ' + ' | '.join(line) + ' |\n' for line in lines).replace(' --- ', '---')


def main(unused_argv):
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_enable_compilation_cache', False)
  records = read()
  if _COMPILE.value:
    logging.set_verbosity(logging.INFO)
    for row in ROWS:
      compile_row(records, row)
  page = PAGE.read_text(encoding='utf-8')
  PAGE.write_text(TABLE.sub(lambda unused: table(records), page), encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
