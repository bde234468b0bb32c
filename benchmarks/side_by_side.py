"""Two frameworks in two processes on the same CPUs, timed alternately; one JSON line per figure.

A benchmark starts one `Worker` per framework and thread setting, so that thread pools, allocators
and affinities are independent. `measure` alternates them, A B A B .., so that a temporary slowdown
of the machine affects both. This module and the benchmark scripts import no framework.
"""

import contextlib
import importlib
import importlib.metadata
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import platform
import re
import resource
import subprocess
import sys
import time
import traceback

from absl import flags
import numpy as np

from benchmarks import figures
from stppo_jax.distributed import malloc

SIZES = flags.DEFINE_list('sizes', ['0.94M', '2.9M'], 'of 0.94M, 2.9M, 20M, 47M, 135M')
THREADS = flags.DEFINE_list('threads', ['1', '2'], 'CPUs a framework may use')
REPEATS = flags.DEFINE_integer('repeats', 7, 'timed runs of each', lower_bound=1)
QUICK = flags.DEFINE_bool('quick', False, 'one size, one thread, few tokens: a smoke test')
MICRO_BATCHES = flags.DEFINE_list(
    'micro_batches',
    ['32', '16', '8', '4'],
    'rows computed at once in updates, at most all; each is tried',
)
flags.register_validator(
    MICRO_BATCHES,
    lambda sizes: sizes and all(size.isdecimal() and int(size) > 0 for size in sizes),
    'give whole numbers above 0, with commas between, such as 16,4',
)
PROFILE = flags.DEFINE_bool('profile', False, 'print the ops that take our time instead')
TUNIX_PYTHON = flags.DEFINE_string(
    'tunix_python', '', 'Python of the environment that has google-tunix; none: it is left out'
)

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ('jax', 'jaxlib', 'optax', 'torch', 'transformers', 'google-tunix', 'flax', 'numpy')


class Worker:
  """An object in a separate process that is limited to `threads` CPUs.

  Attributes:
    versions: {package: version} there.
    peak_mb: the most memory that the process has held so far, compilation included.
  """

  def __init__(self, threads, module, name, *args, python=sys.executable, root=ROOT):
    """Creates `module.name(*args)` in the process; `call` and `timed` call its methods.

    `python` may be that of another virtual environment, which has the peer installed. `root` may
    be another checkout of the project.
    """
    self._pipe, there = multiprocessing.Pipe()
    with _limited_to(threads):  # the child inherits CPUs and environment
      self._process = subprocess.Popen(
          [python, '-m', 'benchmarks.side_by_side', str(there.fileno())],
          pass_fds=(there.fileno(),),
          cwd=root,
      )
    there.close()
    self._pipe.send((module, name, args))
    self.versions, self.peak_mb = self._receive()

  def call(self, method, *args):
    """Returns the result of the method."""
    return self.timed(method, *args)[0]

  def timed(self, method, *args):
    """Returns [result, wall-clock seconds, CPU seconds], timed inside the process."""
    self._pipe.send((method, args))
    *reply, self.peak_mb = self._receive()
    return reply

  def close(self):
    """Ends the process."""
    self._pipe.close()
    self._process.wait()

  def _receive(self):
    try:
      failed, reply = self._pipe.recv()
    except EOFError as error:
      raise RuntimeError('a benchmark process died; its last words are above') from error
    if failed:
      raise RuntimeError('a benchmark process failed:\n' + failed)
    return reply


def run_all(run):
  """Calls `run(size, threads, quick, repeats)` for every size and thread setting of the flags."""
  print_machine()
  if QUICK.value:
    run('0.94M', 1, True, 2)
    return
  for size in SIZES.value:
    for threads in THREADS.value:
      run(size, int(threads), False, REPEATS.value)


def measure(jobs, num_tokens, repeats, warmups=2, settle=False):
  """Runs {name: (worker, method, *args)} in rotation; returns {name: figures}.

  The first call of each, with compilation, is reported as `first_call_s`. Neither it nor the other
  warm-up calls count. With `settle` an untimed call comes before each timed one: it brings back the
  memory that the system took from a process that waited.
  """
  seconds = {name: [] for name in jobs}
  cpu_seconds = {name: [] for name in jobs}
  for _ in range(warmups + repeats):
    for name, (worker, *call) in jobs.items():
      if settle:
        worker.call(*call)
      _, wall, cpu = worker.timed(*call)
      seconds[name].append(wall)
      cpu_seconds[name].append(cpu)
  return {
      name: {
          'first_call_s': seconds[name][0],
          'tokens_per_s': num_tokens / np.array(seconds[name][warmups:]),
          'tokens_per_cpu_s': num_tokens / np.array(cpu_seconds[name][warmups:]),
          'peak_mb': worker.peak_mb,
      }
      for name, (worker, *_) in jobs.items()
  }


def micro_batches(rows):
  """Returns micro-batch sizes to try for a number of rows: two with --quick, one with --profile."""
  wanted = [rows, rows // 2] if QUICK.value else map(int, MICRO_BATCHES.value)
  sizes = sorted({min(size, rows) for size in wanted}, reverse=True)
  return sizes[-1:] if PROFILE.value else sizes


def print_machine():
  """Prints a line about the machine. With a load above 0 the figures are not valid."""
  line = {
      'machine': _cpu_name(),
      'cpus': _num_cpus(),
      'system': platform.platform(terse=True),
      'python': platform.python_version(),
      'load_1min': round(os.getloadavg()[0], 2),
      'date': time.strftime('%Y-%m-%d'),
  }
  figures.print_line(line)


def print_setting(size, threads, model, workers):
  """Prints a line about what the following figures share; workers: {name: Worker}."""
  versions = {name: worker.versions for name, worker in workers.items()}
  figures.print_line({'size': size, 'threads': threads, 'model': model, 'versions': versions})


def tunix_left_out(benchmark):
  """Whether no Python with tunix was given; prints a line if so."""
  if not TUNIX_PYTHON.value:
    figures.print_line(
        {'benchmark': benchmark, 'peer': 'tunix', 'left_out': 'no --tunix_python=PATH given'}
    )
  return not TUNIX_PYTHON.value


def peak_mb(usage=None):
  """Returns the peak memory of a process from its resource usage; this process by default."""
  usage = usage or resource.getrusage(resource.RUSAGE_SELF)
  return usage.ru_maxrss / (
      2**20 if sys.platform == 'darwin' else 2**10
  )  # bytes on macOS, otherwise KiB


def print_ops(ops, top=30):
  """Prints [(source, ms per call, runs per call)] as a table, longest first."""
  total = sum(ms for _, ms, _ in ops)
  print(f'{total:9.2f} ms per call from {len(ops)} sources')
  for name, ms, count in ops[:top]:
    print(f'{ms:9.2f} ms {ms / total:6.1%} {count:8.1f} x  {name}', flush=True)


def _serve(pipe):
  """Runs in the Worker's process and serves its calls."""
  try:
    module, name, args = pipe.recv()
    target = getattr(importlib.import_module(module), name)(*args)
    pipe.send((None, (_versions(), peak_mb())))
    while True:
      method, args = pipe.recv()
      wall, cpu = time.perf_counter(), time.process_time()
      result = getattr(target, method)(*args)
      times = time.perf_counter() - wall, time.process_time() - cpu
      pipe.send((None, (result, *times, peak_mb())))
  except (EOFError, KeyboardInterrupt):
    return  # the benchmark is over
  except Exception:  # handed to the benchmark, which raises it  # pylint: disable=broad-except
    pipe.send((traceback.format_exc(), None))


@contextlib.contextmanager
def _limited_to(threads):
  """Context manager that limits this process and its children to `threads` CPUs.

  XLA and OpenMP size their pools by the CPU affinity. On systems without it (macOS) only
  environment variables are left, with which XLA can be limited to one thread but not to another
  number.
  """
  before = dict(os.environ)
  os.environ |= {name: str(threads) for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS')}
  os.environ |= {'JAX_PLATFORMS': 'cpu', 'HF_HUB_OFFLINE': '1', 'TRANSFORMERS_VERBOSITY': 'error'}
  # The same for all peers, as docs/scaling.md recommends on a CPU.
  os.environ.setdefault(malloc.VARIABLE, malloc.VALUE)
  os.environ.pop('JAX_COMPILATION_CACHE_DIR', None)  # so that the first call compiles
  if threads == 1:
    os.environ['XLA_FLAGS'] = (
        os.environ.get('XLA_FLAGS', '') + ' --xla_cpu_multi_thread_eigen=false'
    )
  cpus = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else None
  if cpus is not None:
    if threads > len(cpus):
      raise ValueError(f'{threads} threads on {len(cpus)} CPUs: choose fewer')
    os.sched_setaffinity(0, sorted(cpus)[:threads])
  try:
    yield
  finally:
    os.environ.clear()
    os.environ |= before
    if cpus is not None:
      os.sched_setaffinity(0, cpus)


def _versions():
  found = {dist.metadata['Name'].lower() for dist in importlib.metadata.distributions()}
  return {name: importlib.metadata.version(name) for name in PACKAGES if name in found}


def _num_cpus():
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def _cpu_name():
  if os.path.exists('/proc/cpuinfo'):
    with open('/proc/cpuinfo', encoding='utf-8') as file:
      if found := re.search(r'model name\s*: (.*)', file.read()):
        return found[1]
  return platform.processor() or platform.machine()


if __name__ == '__main__':
  _serve(multiprocessing.connection.Connection(int(sys.argv[1])))
  os._exit(0)  # Python would wait for a peer's idle threads forever
