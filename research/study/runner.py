"""Runs the jobs of a study: several processes at once, each an ordinary run in a folder of its own.

Jobs in; WORKDIR/runs/NAME/, WORKDIR/study.json and a line in the results per finished job out. The
same command goes on where it was: a finished job is not started again, an interrupted run resumes
from its checkpoint, and a failed one is tried once more. One failed job never stops the others.
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

from research.study import grid as grids
from research.study import results
from research.study import worker
from stppo_jax import types
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import workdir as workdirs

LOG, STATE = 'log.txt', 'study.json'
DEVICES = ('cpu', 'gpu', 'tpu')
_POLL_S = 0.2
_LONGEST_ERROR = 500  # characters
_PACKAGE_ROOT = str(pathlib.Path(__file__).parents[2])


@dataclasses.dataclass(frozen=True)
class Slot:
  """The share of the machine that one job has: CPU cores, and an accelerator or none."""

  cores: tuple[int, ...]
  environment: Mapping[str, str]


@dataclasses.dataclass
class _Process:
  """A job in progress."""

  job: grids.Job
  slot: Slot
  child: subprocess.Popen
  started: float


def make_slots(num_jobs: int, devices: str = 'cpu') -> list[Slot]:
  """Returns the slots of `num_jobs` jobs at once; 0: one per core, or one on an accelerator.

  Each slot has cores of its own, as far as they go; XLA and the tokenizer start a thread per core.
  Slot i has GPU i or TPU chip i, as far as the job sees.
  """
  cores = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []
  if devices not in DEVICES:
    raise types.UserError(f'--devices={devices}: allowed are {", ".join(DEVICES)}')
  if num_jobs < 0:
    raise types.UserError(f'--jobs={num_jobs}: must be at least 0, which is one per core')
  num_jobs = num_jobs or (max(len(cores), 1) if devices == 'cpu' else 1)
  slots = []
  for i in range(num_jobs):
    own = tuple(cores[i::num_jobs]) or tuple(cores[i % max(len(cores), 1) :][:1])
    environment = {'OMP_NUM_THREADS': str(len(own) or 1)}
    if devices == 'cpu':
      environment['JAX_PLATFORMS'] = 'cpu'
    elif devices == 'gpu':
      environment['CUDA_VISIBLE_DEVICES'] = str(i)
    else:
      environment |= {
          'TPU_VISIBLE_CHIPS': str(i),
          'TPU_CHIPS_PER_PROCESS_BOUNDS': '1,1,1',
          'TPU_PROCESS_BOUNDS': '1,1,1',
      }
    slots.append(Slot(own, environment))
  return slots


class Runner:
  """Runs jobs, and keeps what became of each.

  Args:
    workdir: the folder of the study.
    study: where results are kept, and whether checkpoints are.
    command: of a run, to which --workdir and overrides are added.
    slots: as from `make_slots`.
    of_mechanism: the command of a job of the mechanism, to which its folder is added.
  """

  def __init__(
      self,
      workdir: str,
      study: grids.Study,
      jobs: Sequence[grids.Job],
      command: Sequence[str],
      slots: Sequence[Slot],
      of_mechanism: Sequence[str] = (sys.executable, '-m', 'research.study.worker'),
  ):
    self._workdir, self._study, self._jobs = workdir, study, list(jobs)
    self._command, self._slots, self._of_mechanism = command, slots, of_mechanism
    self.results = results.folder(study.results, workdir)
    self._state = read_state(workdir)
    self._running: list[_Process] = []

  def run(self, stop_requested: Callable[[], bool] = lambda: False) -> None:
    """Runs what is left; ends the jobs in progress gracefully when it is asked to stop.

    A run ends by SIGTERM after its update and saves; the same command goes on with it.
    """
    with workdirs.lock(self._workdir):
      self._state = read_state(self._workdir)
      self._collect_ended()
      waiting = [job for job in self._jobs if self.status(job) != 'done']
      self._save()
      print(self.table(), flush=True)
      free = list(self._slots)
      with self._ended_at_last():
        while (waiting or self._running) and not stop_requested():
          while waiting and free:
            self._start(waiting.pop(0), free.pop(0))
          free += self._settle_ended()
          time.sleep(_POLL_S)

  def status(self, job: grids.Job) -> str:
    """Returns 'done', 'running', 'failed' or 'left'."""
    return self._entry(job).get('status', 'left')

  def records(self) -> dict[str, dict[str, Any]]:
    """Returns the results of the jobs that are done, by name."""
    return results.unchanged(self._jobs, results.read(self.results))

  def counts(self) -> dict[str, int]:
    """Returns how many jobs are done, running, left and failed."""
    states = [self.status(job) for job in self._jobs]
    return {name: states.count(name) for name in ('done', 'running', 'left', 'failed')}

  def core_hours(self) -> float:
    """Returns the processor time of the jobs, those in progress not counted."""
    records = self.records()
    of_done = sum(record['cost']['core_s'] for record in records.values())
    others = [self._entry(job) for job in self._jobs if job.name not in records]
    return (of_done + sum(entry.get('core_s', 0.0) for entry in others)) / 3600

  def table(self) -> str:
    """Returns a table of what is done, running, left and failed, cell by cell."""
    records, cells = self.records(), {}
    for job in self._jobs:
      cells.setdefault(job.group, []).append(job)
    width = max(map(len, cells))
    titles = (*self.counts(), 'final', 'collapsed')
    lines = [f'{"cell":{width}}  ' + '  '.join(f'{title:>9}' for title in titles)]
    for group, jobs in cells.items():
      states = [self.status(job) for job in jobs]
      numbers = [str(states.count(title) or '-') for title in self.counts()]
      done = [records[job.name]['measures'] for job in jobs if job.name in records]
      for measure in ('final', 'collapsed'):
        values = np.array([x for one in done for x in np.atleast_1d(one[measure])], float)
        values = values[np.isfinite(values)]
        numbers.append(f'{values.mean():.3f}' if len(values) else '-')
      lines.append(f'{group:{width}}  ' + '  '.join(f'{x:>9}' for x in numbers))
    for job in self._jobs:
      if self.status(job) == 'failed':
        lines.append(f'failed: {job.name}: {self._entry(job).get("error", "")}')
    lines.append(self.summary())
    return '\n'.join(lines)

  def summary(self) -> str:
    """Returns a line: '12 done, 2 running, 26 left, 0 failed; 3.1 core-hours'."""
    counts = ', '.join(f'{number} {name}' for name, number in self.counts().items())
    return f'{counts}; {self.core_hours():.2f} core-hours'

  def _collect_ended(self) -> None:
    """Brings the state up to date with the results, and with folders of runs that had ended."""
    records = self.records()
    for job in self._jobs:
      entry = self._entry(job)
      if job.name in records:
        self._note(job, status='done')
      else:
        if entry.get('digest', job.digest) != job.digest:
          self._state.pop(job.name)
        self._note(job, status='done' if self._collect(job) else 'left')

  def _start(self, job: grids.Job, slot: Slot) -> None:
    folder = self._make_folder(job)
    if job.instrument == 'mechanism':
      command = [*self._of_mechanism, folder]
    else:
      command = [*self._command, f'--workdir={folder}', *job.arguments]
    paths = [_PACKAGE_ROOT, *filter(None, [os.environ.get('PYTHONPATH')])]
    environment = {**os.environ, **slot.environment, 'PYTHONPATH': os.pathsep.join(paths)}
    with open(os.path.join(folder, LOG), 'ab') as log, _on_cores(slot.cores):
      # In a session of its own: Ctrl-C reaches this process alone, which ends the runs gracefully.
      child = subprocess.Popen(
          command,
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=subprocess.STDOUT,
          env=environment,
          start_new_session=True,
      )
    self._running.append(_Process(job, slot, child, time.monotonic()))
    self._note(job, status='running')
    self._save()
    logging.info('started %s', job.name)

  def _settle_ended(self) -> list[Slot]:
    """Settles the processes that have ended; returns their slots."""
    free = []
    for process in list(self._running):
      pid, status, usage = os.wait4(process.child.pid, os.WNOHANG)
      if pid:
        process.child.returncode = os.waitstatus_to_exitcode(status)
        self._running.remove(process)
        self._settle(process, usage.ru_utime + usage.ru_stime)
        free.append(process.slot)
    return free

  def _settle(self, process: _Process, core_s: float) -> None:
    """Notes how a process ended; writes the record of a finished job."""
    job, code, entry = process.job, process.child.returncode, self._entry(process.job)
    seconds = time.monotonic() - process.started
    self._note(
        job,
        core_s=round(entry.get('core_s', 0.0) + core_s, 2),
        wall_s=round(entry.get('wall_s', 0.0) + seconds, 2),
    )
    if self._collect(job):
      self._note(job, status='done')
    elif code in (0, -signal.SIGTERM) and self._stopping:
      self._note(job, status='left')
    else:
      error = _last_line(os.path.join(self._folder(job), LOG))
      self._note(job, status='failed', error=f'{error} (exit code {code})')
    self._save()
    logging.info('%s %s in %.0f s; %s', job.name, self.status(job), seconds, self.summary())

  _stopping = False

  @contextlib.contextmanager
  def _ended_at_last(self) -> Iterator[None]:
    """On the way out ends what still runs: gracefully, and by force after another Ctrl-C."""
    try:
      yield
    finally:
      self._stopping = True
      if self._running:
        logging.info('ending %d runs: each saves after its update', len(self._running))
      try:
        for process in self._running:
          os.kill(process.child.pid, signal.SIGTERM)  # Popen's own would lose the times it used
        while self._running:
          self._settle_ended()
          time.sleep(_POLL_S)
      finally:
        for process in self._running:
          with contextlib.suppress(ProcessLookupError):
            os.killpg(process.child.pid, signal.SIGKILL)
        for process in self._running:
          self._note(process.job, status='left')
        self._save()

  def _collect(self, job: grids.Job) -> bool:
    """Appends the record of a job that has finished to the results; whether it has."""
    folder, entry = self._folder(job), self._entry(job)
    if _read_job(folder).get('digest') != job.digest:
      return False
    if job.instrument == 'mechanism':
      path = os.path.join(folder, worker.METRICS)
      if not os.path.exists(path):
        return False
      with np.load(path) as arrays:
        record = results.of_cell(job, dict(arrays), entry)
    else:
      rows = metrics_lib.read_metrics(folder)
      if not results.finished(job, rows):
        return False
      record = results.of_run(job, rows, entry)
    record |= _read_job(folder).get('origin', {})  # where and by what it was started
    results.append(self.results, record)
    if not self._study.keep_checkpoints:
      shutil.rmtree(os.path.join(folder, 'checkpoints'), ignore_errors=True)
    return True

  def _make_folder(self, job: grids.Job) -> str:
    """Makes the folder of a job. One of another job of that name, of a grid before, is kept."""
    folder, task = self._folder(job), {
        'digest': job.digest,
        'overrides': dict(job.overrides),
        'seeds': list(job.seeds),
        'origin': results.origin(),
    }
    before = _read_job(folder).get('digest', job.digest)
    if before != job.digest:
      logging.warning(
          'the cell, or what it names, has changed: %s is kept as %s.%s', folder, folder, before
      )
      os.replace(folder, f'{folder}.{before}')
    os.makedirs(folder, exist_ok=True)
    workdirs.write_whole(os.path.join(folder, worker.JOB), json.dumps(task))
    return folder

  def _folder(self, job: grids.Job) -> str:
    return os.path.join(self._workdir, 'runs', job.name)

  def _entry(self, job: grids.Job) -> dict[str, Any]:
    return self._state.get(job.name, {})

  def _note(self, job: grids.Job, **values: Any) -> None:
    entry = self._state.setdefault(job.name, {'digest': job.digest})
    entry |= values
    if values.get('status', 'failed') != 'failed':
      entry.pop('error', None)

  def _save(self) -> None:
    """Writes WORKDIR/study.json: what became of each job, and the sums."""
    text = json.dumps({'counts': self.counts(), 'jobs': self._state}, indent=1)
    workdirs.write_whole(os.path.join(self._workdir, STATE), text)


def read_state(workdir: str) -> dict[str, dict[str, Any]]:
  """Returns {name of a job: what became of it} of WORKDIR/study.json; {} without one."""
  path = os.path.join(workdir, STATE)
  if not os.path.exists(path):
    return {}
  try:
    with open(path, encoding='utf-8') as file:
      return json.load(file)['jobs']
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise types.UserError(
        f'{path} cannot be read ({error}): delete it; finished runs are found again'
    ) from error


@contextlib.contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
  """A process that is started within inherits these cores: XLA makes a thread for each."""
  if not cores or not hasattr(os, 'sched_setaffinity'):
    yield
    return
  before = os.sched_getaffinity(0)
  os.sched_setaffinity(0, cores)  # of this thread alone
  try:
    yield
  finally:
    os.sched_setaffinity(0, before)


def _read_job(folder: str) -> dict[str, Any]:
  """Returns what `_make_folder` wrote; {} without it."""
  with contextlib.suppress(OSError, ValueError):
    with open(os.path.join(folder, worker.JOB), encoding='utf-8') as file:
      return json.load(file)
  return {}


def _last_line(path: str) -> str:
  """Returns the last line of a log with a text; one line of an error says what to do."""
  with open(path, 'rb') as file:
    file.seek(0, os.SEEK_END)
    file.seek(max(file.tell() - 20_000, 0))
    lines = file.read().decode('utf-8', 'replace').splitlines()
  lines = [line.strip() for line in lines if line.strip()]
  return lines[-1][:_LONGEST_ERROR] if lines else 'it said nothing'
