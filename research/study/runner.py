"""Runs the jobs of a study: several processes at once, each in a folder of its own.

The runner writes WORKDIR/runs/NAME/ and appends a line to the results per finished job. The same
command continues after a stop: it repeats no finished job, resumes an interrupted run from its
checkpoint, and tries a failed job once more. One failed job never stops the others.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from absl import logging
import numpy as np

from research.study import grid as grid_lib
from research.study import results
from stppo_jax import types
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import workdir as workdir_lib

LOG = 'log.txt'
JOB = 'job.json'  # what a folder is for, and the processor time that it took so far
TOY_METRICS = 'metrics.npz'
DEVICES = ('cpu', 'gpu', 'tpu')
ROOT = pathlib.Path(__file__).parents[2]
_POLL_S = 0.2
_LONGEST_ERROR = 500  # characters


@dataclasses.dataclass(frozen=True)
class Slot:
  """The share of the machine that one job has: CPU cores, and an accelerator or none."""

  cores: tuple[int, ...]
  environment: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class RunningJob:
  """A job in progress."""

  job: grid_lib.Job
  slot: Slot
  child: subprocess.Popen
  start_time: float


def make_slots(num_jobs: int, devices: str = 'cpu') -> list[Slot]:
  """Returns the slots of `num_jobs` jobs at once; 0: one per core, or one on an accelerator.

  Each slot has cores of its own as long as there are enough, because XLA and the tokenizer start a
  thread per core. Slot i has GPU i or TPU chip i.
  """
  if num_jobs < 0:
    raise types.UserError(f'--jobs={num_jobs}: must be at least 0, which is one per core')
  cores = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []
  if num_jobs == 0:
    num_jobs = max(len(cores), 1) if devices == 'cpu' else 1
  slots = []
  for i in range(num_jobs):
    own = tuple(cores[i::num_jobs])
    if cores and not own:
      own = (cores[i % len(cores)],)
    environment = {'OMP_NUM_THREADS': str(len(own) or 1)}
    if devices == 'cpu':
      environment['JAX_PLATFORMS'] = 'cpu'
    elif devices == 'gpu':
      environment['CUDA_VISIBLE_DEVICES'] = str(i)
    else:
      environment['TPU_VISIBLE_CHIPS'] = str(i)
      environment['TPU_CHIPS_PER_PROCESS_BOUNDS'] = '1,1,1'
      environment['TPU_PROCESS_BOUNDS'] = '1,1,1'
    slots.append(Slot(own, environment))
  return slots


class Runner:
  """Runs jobs and keeps the status of each: 'done', 'running', 'left' or 'failed'.

  Args:
    workdir: the folder of the study.
    study: says where results are kept, and whether checkpoints are.
    jobs: from `grid.plan`.
    command: starts a run of the system, with --workdir and overrides added.
    slots: from `make_slots`.
    toy_command: starts a job of the toy task, with its folder added.
  """

  def __init__(
      self,
      workdir: str,
      study: grid_lib.Study,
      jobs: Sequence[grid_lib.Job],
      command: Sequence[str],
      slots: Sequence[Slot],
      toy_command: Sequence[str] = (sys.executable, '-m', 'research.toy'),
  ):
    self._workdir = workdir
    self._study = study
    self._jobs = list(jobs)
    self._command = command
    self._slots = slots
    self._toy_command = toy_command
    self._running: list[RunningJob] = []
    self._is_ending = False
    self._errors: dict[str, str] = {}
    self.results = results.folder(study.results, workdir)
    self.status = {job.name: 'left' for job in jobs}

  def run(self, stop_requested: Callable[[], bool] = lambda: False) -> None:
    """Runs the jobs that are left; stops the jobs in progress gracefully on request.

    A run stops on SIGTERM after its update and saves. The same command resumes it.
    """
    with workdir_lib.lock(self._workdir):
      self._find_done()
      waiting = [job for job in self._jobs if self.status[job.name] != 'done']
      print(self.table(), flush=True)
      free = list(self._slots)
      try:
        while (waiting or self._running) and not stop_requested():
          while waiting and free:
            self._start(waiting.pop(0), free.pop(0))
          free += self._settle_ended()
          time.sleep(_POLL_S)
      finally:
        self._end_all()

  def records(self) -> dict[str, dict[str, Any]]:
    """Returns the results of the jobs that are done, by name."""
    return results.unchanged(self._jobs, results.read(self.results))

  def counts(self) -> dict[str, int]:
    """Returns how many jobs are done, running, left and failed."""
    states = list(self.status.values())
    return {name: states.count(name) for name in ('done', 'running', 'left', 'failed')}

  def table(self) -> str:
    """Returns a table with a line per method and condition."""
    records = self.records()
    groups: dict[str, list[grid_lib.Job]] = {}
    for job in self._jobs:
      groups.setdefault(job.group, []).append(job)
    width = max(map(len, groups))
    titles = (*self.counts(), 'final', 'collapsed')
    lines = [f'{"method":{width}}  ' + '  '.join(f'{title:>9}' for title in titles)]
    for group, jobs in groups.items():
      states = [self.status[job.name] for job in jobs]
      columns = [str(states.count(title) or '-') for title in self.counts()]
      done = [records[job.name]['measures'] for job in jobs if job.name in records]
      for measure in ('final', 'collapsed'):
        values = [x for one in done for x in np.atleast_1d(one[measure]) if x is not None]
        columns.append(f'{np.mean(values):.3f}' if values else '-')
      lines.append(f'{group:{width}}  ' + '  '.join(f'{x:>9}' for x in columns))
    lines += [f'failed: {name}: {error}' for name, error in self._errors.items()]
    counts = ', '.join(f'{number} {name}' for name, number in self.counts().items())
    hours = sum(record['cost']['core_s'] for record in records.values()) / 3600
    lines.append(f'{counts}; {hours:.2f} core-hours')
    return '\n'.join(lines)

  def _find_done(self) -> None:
    """Finds the jobs with a record, and writes records of folders of finished runs."""
    records = self.records()
    for job in self._jobs:
      if job.name in records or self._collect(job):
        self.status[job.name] = 'done'

  def _start(self, job: grid_lib.Job, slot: Slot) -> None:
    folder = self._make_folder(job)
    if job.task == 'toy':
      command = [*self._toy_command, folder]
    else:
      command = [*self._command, f'--workdir={folder}', *job.arguments]
    paths = [str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
    environment = {**os.environ, **slot.environment, 'PYTHONPATH': os.pathsep.join(paths)}
    with open(os.path.join(folder, LOG), 'ab') as log, _on_cores(slot.cores):
      # The job has a session of its own. Ctrl-C reaches this process only, which stops the jobs.
      child = subprocess.Popen(
          command,
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=subprocess.STDOUT,
          env=environment,
          start_new_session=True,
      )
    self._running.append(RunningJob(job, slot, child, time.monotonic()))
    self.status[job.name] = 'running'
    logging.info('started %s', job.name)

  def _settle_ended(self) -> list[Slot]:
    """Settles the processes that have ended; returns their slots."""
    free = []
    for running in list(self._running):
      pid, status, usage = os.wait4(running.child.pid, os.WNOHANG)  # Popen does not tell the time.
      if pid:
        running.child.returncode = os.waitstatus_to_exitcode(status)
        self._running.remove(running)
        self._settle(running, usage.ru_utime + usage.ru_stime)
        free.append(running.slot)
    return free

  def _settle(self, running: RunningJob, core_s: float) -> None:
    """Adds the cost of a process that has ended, and writes the record of a finished job."""
    job = running.job
    folder = self._folder(job)
    wall_s = time.monotonic() - running.start_time
    content = _read_job(folder)
    content['core_s'] = round(content.get('core_s', 0.0) + core_s, 2)
    content['wall_s'] = round(content.get('wall_s', 0.0) + wall_s, 2)
    _write_job(folder, content)
    code = running.child.returncode
    if self._collect(job):
      self.status[job.name] = 'done'
    elif code in (0, -signal.SIGTERM) and self._is_ending:
      self.status[job.name] = 'left'
    else:
      self.status[job.name] = 'failed'
      self._errors[job.name] = f'{_last_line(os.path.join(folder, LOG))} (exit code {code})'
    logging.info('%s %s in %.0f s', job.name, self.status[job.name], wall_s)

  def _end_all(self) -> None:
    """Stops the jobs in progress: gracefully, and by force after another Ctrl-C."""
    self._is_ending = True
    if self._running:
      logging.info('stopping %d runs: each saves after its update', len(self._running))
    try:
      for running in self._running:
        os.kill(running.child.pid, signal.SIGTERM)  # Popen.terminate would lose the usage.
      while self._running:
        self._settle_ended()
        time.sleep(_POLL_S)
    finally:
      for running in self._running:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(running.child.pid, signal.SIGKILL)
        self.status[running.job.name] = 'left'

  def _collect(self, job: grid_lib.Job) -> bool:
    """Appends the record of a job that has finished to the results; returns whether it has."""
    folder = self._folder(job)
    content = _read_job(folder)
    if content.get('digest') != job.digest:
      return False
    if job.task == 'toy':
      path = os.path.join(folder, TOY_METRICS)
      if not os.path.exists(path):
        return False
      with np.load(path) as arrays:
        record = results.toy_record(job, dict(arrays), content)
    else:
      rows = metrics_lib.read_metrics(folder)
      if not results.finished(job, rows):
        return False
      record = results.system_record(job, rows, content)
    record |= content['origin']  # The machine and the commit with which the job started.
    results.append(self.results, record)
    if not self._study.keep_checkpoints:
      shutil.rmtree(os.path.join(folder, 'checkpoints'), ignore_errors=True)
    return True

  def _make_folder(self, job: grid_lib.Job) -> str:
    """Makes the folder of a job. A folder with the same name but other settings is renamed."""
    folder = self._folder(job)
    content = _read_job(folder)
    digest = content.get('digest', job.digest)
    if digest != job.digest:
      logging.warning('the settings have changed: %s is now %s.%s', folder, folder, digest)
      os.replace(folder, f'{folder}.{digest}')
      content = {}
    os.makedirs(folder, exist_ok=True)
    content |= {
        'digest': job.digest,
        'overrides': dict(job.overrides),
        'seeds': list(job.seeds),
        'origin': results.origin(),
    }
    _write_job(folder, content)
    return folder

  def _folder(self, job: grid_lib.Job) -> str:
    return os.path.join(self._workdir, 'runs', job.name)


@contextlib.contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
  """Gives these cores to a process that starts within."""
  if not cores or not hasattr(os, 'sched_setaffinity'):
    yield
    return
  before = os.sched_getaffinity(0)
  os.sched_setaffinity(0, cores)  # changes this thread only
  try:
    yield
  finally:
    os.sched_setaffinity(0, before)


def _read_job(folder: str) -> dict[str, Any]:
  """Returns the content of job.json; {} without it."""
  with contextlib.suppress(OSError, ValueError):
    with open(os.path.join(folder, JOB), encoding='utf-8') as file:
      return json.load(file)
  return {}


def _write_job(folder: str, content: Mapping[str, Any]) -> None:
  workdir_lib.write_whole(os.path.join(folder, JOB), json.dumps(content))


def _last_line(path: str) -> str:
  """Returns the last line of a log, which is the error in one line."""
  text = pathlib.Path(path).read_text(encoding='utf-8', errors='replace')
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  return lines[-1][:_LONGEST_ERROR] if lines else 'the log is empty'
