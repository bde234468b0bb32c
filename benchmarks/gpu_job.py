"""Runs the parts of benchmarks/gpu.sh, each under its own time limit; results after each part.

The parts and their order are in `plan`. A part that exceeds its limit is ended and recorded as cut,
and the next part begins. The next call with the same store runs the parts that failed or were left
out, and continues the runs that were cut. Other parts that were cut are not run again. The module
needs the standard library alone, because the packages arrive with the parcels.
"""

import argparse
from collections.abc import Iterable
from collections.abc import Mapping
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from typing import Any
from typing import NamedTuple

from benchmarks import parcels

ROOT = pathlib.Path(__file__).parent.parent
TOTAL_S = 480.0  # seconds of one call
# Seconds of each group of parts in one call. The quick form has more, because CPUs are slower.
GROUPS = {'runs': 100.0, 'figures': 100.0, 'padding': 60.0, 'model': 200.0}
QUICK_FACTOR = 20
GRACE_S = 10.0  # between SIGTERM and SIGKILL. A run saves a checkpoint in it.
GGUF = 'SmolLM2-135M-Instruct.Q4_1.gguf'
EXPERIMENT = 'experiments/st_ppo_smollm2.py'
TESTS = ['tests/models/attention_test.py', 'tests/rollout/sampler_test.py']
TESTS_OF_UPDATES = ['tests/training/update_test.py']  # they compile for long
# Tests of several devices, and those that run a kernel in float32, which only CPUs can. The part
# `kernel` is in the place of the latter.
NOT_ON_A_GPU = 'not BackendsTest and not ShardingTest and not eight_devices and not cudnn'
PLATFORMS = 'cuda,cpu'
# JAX takes the CPU if it finds no GPU, or no library of CUDA, and the figures would be the CPU's.
CHECK = """
import importlib.metadata
import json
import jax
device = jax.devices()[0]
found = importlib.metadata.distributions()
versions = {x.name: x.version for x in found if (x.name or '').startswith(('jax', 'nvidia'))}
print(json.dumps({'device': device.device_kind, 'versions': versions}))
if device.platform != 'gpu':
  raise SystemExit('JAX finds no GPU')
"""
CHECK_S = 120.0
# Products of matrices are those of cuBLAS. By default XLA compiles a kernel per product in each of
# many tilings and measures all of them, which may take longer than the limits.
XLA_FLAGS = '--xla_gpu_enable_triton_gemm=false'
# The folder of the tests sets flags for CPUs, unless they are given. The processes share the GPU.
ON_A_GPU = [
    f'XLA_FLAGS={XLA_FLAGS} --xla_gpu_autotune_level=0 --xla_backend_optimization_level=3',
    'JAX_DEFAULT_MATMUL_PRECISION=highest',
    'XLA_PYTHON_CLIENT_PREALLOCATE=false',
]


class Part(NamedTuple):
  """A part of the job.

  Attributes:
    name: it names the log, too.
    group: of GROUPS, whose seconds the parts share.
    limit_s: seconds until the part is ended.
    command: it prints figures as lines of JSON.
    needs: files without which the part is left out.
    runs: workdirs of runs. Their metrics are results, and the same command resumes them.
  """

  name: str
  group: str
  limit_s: float
  command: list[str]
  needs: tuple[pathlib.Path, ...] = ()
  runs: tuple[pathlib.Path, ...] = ()


def plan(store: pathlib.Path, variant: str, quick: bool, attention: str = 'auto') -> list[Part]:
  """Returns the parts in the order of what is learned per second.

  The second command, for `ppo`, has the parts of the language model alone. `attention` is that of
  its training.
  """
  python = [sys.executable, '-m']
  speed = ['--quick', '--repeats=1'] if quick else ['--repeats=3']
  figure = [*python, 'benchmarks.gpu', *speed]
  pytest = [*python, 'pytest', '-v', '-p', 'no:cacheprovider']
  tests = ['env', *ON_A_GPU, *pytest, '-n', '8', '-k', NOT_ON_A_GPU]
  if quick:
    tests = [*pytest, '-k', 'MaskTest or ShardingTest']
  parts = []
  if variant != 'ppo':
    parts = [
        Part('kernel', 'runs', 60, [*figure, '--part=kernel']),
        Part('first_updates', 'runs', 90, [*figure, '--part=first_updates']),
        Part('tests', 'runs', 45, [*tests, *TESTS]),
    ]
    for size in ['135M'] if quick else ['135M', '1.5B', '7B']:
      flag = f'--size={size}'
      parts.append(Part(f'update_{size}', 'figures', 70, [*figure, '--part=update', flag]))
      parts.append(Part(f'rollout_{size}', 'figures', 60, [*figure, '--part=rollout', flag]))
    parts.append(Part('padding', 'padding', 60, [*figure, '--part=padding']))
    parts.append(Part('update_tests', 'runs', 60, [*tests, *TESTS_OF_UPDATES]))
  return parts + language_model(store, variant, quick, figure, attention)


def language_model(
    store: pathlib.Path, variant: str, quick: bool, figure: list[str], attention: str
) -> list[Part]:
  """Returns the parts of SmolLM2. The quick form has the embedded model in its place."""
  gguf = store / 'cargo' / GGUF
  model = store / 'model'
  settings = [f'--config={EXPERIMENT}:cpu', '--config.model.dtype=bfloat16']
  settings += ['--config.eval.every=10', '--config.log.tensorboard=False']
  # One program each, where a CPU has several: a GPU would compile them for longer than they save.
  settings += ['--config.train.length_buckets=(320,)', '--config.rollout.slot_buckets=(320,)']
  settings += ['--config.rollout.chunks=(128,)', f'--config.model.attention={attention}']
  if quick:
    model = ROOT / 'stppo_jax/assets/tiny'
    settings = [f'--config={EXPERIMENT}:smoke', '--config.sft.epochs=1']
    settings.append("--config.data.datasets=('elements',)")
  start = [*settings, f'--config.model.folder={model}']
  demonstrations = store / 'demonstrations'
  sft = store / 'sft'
  workdir = store / variant

  python = [sys.executable, '-m']
  make_folder = [*python, 'scripts.smollm2_folder', f'--gguf={gguf}', f'--out={model}']
  compare_dtypes = [*figure, '--part=numerics', f'--model={model}']
  demonstrate = [*python, 'scripts.search_trajectories', *start, f'--workdir={demonstrations}']
  # Of another data set than that of the run, as in docs/models.md: the warm start teaches how to
  # search, and not the answers.
  demonstrate += ["--config.data.datasets=('elements',)", '--config.data.max_hops=0']

  episodes = demonstrations / 'episodes'
  run = [sys.executable, 'run.py']
  warm_start = [*run, 'sft', *start, f'--config.data.source={episodes}', f'--workdir={sft}']
  train = [*run, *settings, f'--config.model.folder={sft / "model"}', f'--workdir={workdir}']
  train.append(f'--config.algorithm.variant={variant}')

  folder = model / 'tokenizer_config.json'  # the last file that is written
  policy = sft / 'model/model.safetensors'
  parts = [
      Part('model', 'model', 40, make_folder, needs=(gguf,)),
      Part('numerics', 'model', 40, compare_dtypes, needs=(folder,)),
      Part('demonstrations', 'model', 60, demonstrate, needs=(folder,)),
      Part('sft', 'model', 90, warm_start, needs=(folder, episodes), runs=(sft,)),
      Part(variant, 'model', 180, train, needs=(policy,), runs=(workdir,)),
  ]
  return parts[1:] if quick else parts


class Job:
  """Runs parts and keeps their records.

  Args:
    store: folder that stays between calls.
    out: folder of the results, which has at most eight files.
    factor: of all limits.
    total_s: seconds of this call.
  """

  def __init__(
      self, store: pathlib.Path, out: pathlib.Path, factor: float = 1.0, total_s: float = TOTAL_S
  ):
    self._store = store
    self._out = out
    self._end = time.monotonic() + factor * total_s
    self._left_s = {group: factor * seconds for group, seconds in GROUPS.items()}
    self._factor = factor
    self._logs = store / 'logs'
    self._logs.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)

  def run(self, parts: Iterable[Part]) -> None:
    """Runs what a former call has left, and writes the results after each part.

    Parts that failed come last, so that what has not run yet has its seconds. Those that others may
    wait for, which need files themselves, keep their place.
    """
    results = {record['part']: record['result'] for record in self.records()}
    is_late = lambda part: results.get(part.name) == 'failed' and not part.needs
    for part in sorted(parts, key=is_late):
      result = results.get(part.name)
      if result == 'done' or (result == 'cut' and not part.runs):
        continue
      self._record(part, **self._run_part(part))
      self._write_results()
    self._write_results()

  def records(self) -> list[dict[str, Any]]:
    """Returns the records of all calls with this store, oldest first."""
    path = self._store / 'progress.jsonl'
    lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]

  def attention(self) -> str:
    """Returns config.model.attention: plain after a call in which the kernel of `auto` failed."""
    results = [record['result'] for record in self.records() if record['part'] == 'kernel']
    return 'plain' if results[-1:] == ['failed'] else 'auto'

  def _run_part(self, part: Part) -> dict[str, Any]:
    missing = [path for path in part.needs if not path.exists()]
    if missing:
      return {'result': 'left out', 'why': f'{missing[0].name} is not there'}
    started = time.monotonic()
    left_s = min(self._end - GRACE_S - started, self._left_s[part.group])
    if left_s < 1:
      return {'result': 'left out', 'why': f'no time is left for {part.group}'}
    limit_s = min(self._factor * part.limit_s, left_s)
    with (self._logs / f'{part.name}.log').open('wb') as log:
      code = run_limited(part.command, limit_s, log)
    seconds = time.monotonic() - started
    self._left_s[part.group] -= seconds
    result = {0: 'done', None: 'cut'}.get(code, 'failed')
    record = {'result': result, 'seconds': round(seconds, 1), 'limit_s': round(limit_s, 1)}
    return record if result != 'failed' else record | {'exit_code': code}

  def _record(self, part: Part, **fields: Any) -> None:
    line = json.dumps({'part': part.name} | fields)
    print(line, flush=True)
    with (self._store / 'progress.jsonl').open('a', encoding='utf-8') as file:
      file.write(line + '\n')
    figures = list(read_figures(self._logs / f'{part.name}.log'))
    for workdir in part.runs:
      figures += summarize(workdir)
    with (self._store / 'figures.jsonl').open('a', encoding='utf-8') as file:
      for figure in figures:
        file.write(json.dumps(dict(figure) | {'part': part.name}) + '\n')

  def _write_results(self) -> None:
    for name in ('progress.jsonl', 'figures.jsonl'):
      if (self._store / name).exists():
        shutil.copyfile(self._store / name, self._out / name)
    for path in self._store.glob('*/metrics.jsonl'):
      shutil.copyfile(path, self._out / f'{path.parent.name}_metrics.jsonl')
    with tarfile.open(self._out / 'logs.tar.gz', 'w:gz') as archive:
      archive.add(self._logs, 'logs')


def run_limited(command: list[str], limit_s: float, log: Any) -> int | None:
  """Runs a command in a process group of its own; returns its exit code, None if it was cut.

  After `limit_s` the group gets SIGTERM, and SIGKILL after GRACE_S more. If this process is ended,
  the group gets SIGKILL.
  """
  process = subprocess.Popen(
      command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
  )
  try:
    return process.wait(limit_s)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGTERM)
    try:
      process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
      pass
    return None
  finally:
    try:
      os.killpg(process.pid, signal.SIGKILL)  # what the command has left running, too
    except ProcessLookupError:
      pass
    process.wait()


def read_figures(log: pathlib.Path) -> Iterable[Mapping[str, Any]]:
  """Yields the JSON objects among the lines of a log."""
  if not log.exists():
    return
  for line in log.read_text(encoding='utf-8', errors='replace').splitlines():
    if line.startswith('{'):
      try:
        yield json.loads(line)
      except ValueError:
        continue


def summarize(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns a figure with the first and the last score of a run, and its held-out loss."""
  path = workdir / 'metrics.jsonl'
  if not path.exists():
    return []
  rows = [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]
  figures = []
  for name in ('val-core/all/em', 'sft/held_out_loss'):
    scored = [row for row in rows if row.get(name) is not None]
    if scored:
      first, last = scored[0], scored[-1]
      figures.append(
          {
              'what': f'{workdir.name}: {name}',
              'before': first[name],
              'after': last[name],
              'after_update': last['step'],
              'updates': rows[-1]['step'],
          }
      )
  return figures


def install(store: pathlib.Path, log: Any) -> None:
  """Installs the wheels that have arrived, without an index, for the parts that follow."""
  site = store / 'site'
  wheels = sorted(str(path) for path in (store / 'cargo').glob('*.whl'))
  if wheels and not site.exists():
    pip = [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-index', '--no-deps']
    partial = store / 'site.partial'
    command = [*pip, '--no-compile', f'--target={partial}', *wheels]
    subprocess.run(command, check=True, stdout=log, stderr=log)
    partial.rename(site)
  paths = [str(site), *filter(None, [os.environ.get('PYTHONPATH')])]
  os.environ['PYTHONPATH'] = os.pathsep.join(paths)


def check_gpu(log: Any) -> None:
  """Logs the device and the versions of its libraries. CalledProcessError: JAX finds no GPU."""
  command = [sys.executable, '-c', CHECK]
  subprocess.run(command, check=True, stdout=log, stderr=log, timeout=CHECK_S)


def set_environment(store: pathlib.Path, quick: bool) -> None:
  """Sets variables for the parts. Those that are set already stay as they are."""
  if not quick:
    os.environ.setdefault('JAX_PLATFORMS', PLATFORMS)
  os.environ.setdefault('XLA_FLAGS', XLA_FLAGS)
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(store / 'cache'))
  os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.92')
  os.environ['PYTHONUNBUFFERED'] = '1'


def main() -> None:
  """Takes in a parcel, and runs the parts."""
  parser = argparse.ArgumentParser(prog='benchmarks/gpu.sh')
  parser.add_argument('out', type=pathlib.Path, help='folder of the results')
  parser.add_argument('parcel', type=pathlib.Path, nargs='?', help='parcel that has just arrived')
  args = parser.parse_args()
  store = pathlib.Path(os.environ.get('STORE', ROOT / 'runs/gpu')).absolute()
  variant = os.environ.get('VARIANT', 'st_ppo')
  if variant not in ('st_ppo', 'ppo'):
    parser.error(f'VARIANT={variant}: give st_ppo or ppo')
  total_s = float(os.environ.get('LIMIT', TOTAL_S))
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the part, too
  quick = bool(os.environ.get('QUICK'))
  job = Job(store, args.out.absolute(), QUICK_FACTOR if quick else 1, total_s)
  try:
    if args.parcel:
      missing = parcels.receive(args.parcel, store / 'cargo')
      print(f'not complete yet: {missing}' if missing else 'all parcels are here', flush=True)
    set_environment(store, quick)
    log_path = store / 'logs/start.log'
    with log_path.open('wb') as log:
      install(store, log)
      if not quick:
        check_gpu(log)
  except (OSError, ValueError) as error:
    sys.exit(f'benchmarks/gpu.sh: {error}')
  except subprocess.SubprocessError as error:
    sys.exit(f'{log_path.read_text(errors="replace")}\nbenchmarks/gpu.sh: {error}')
  job.run(plan(store, variant, quick, job.attention()))


if __name__ == '__main__':
  main()
