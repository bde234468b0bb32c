"""The writer of metrics: scalars of an update in, a line of metrics.jsonl out.

TensorBoard, Weights & Biases and trackio get the same numbers if the config asks for them. None can
stop a run. The report and the tests read only metrics.jsonl.

Most metrics come from these files:

  training/diagnostics.py     batches and optimizer steps, from token arrays
  training/optimizer_step.py  gradients, divisor and applied step
  training/summary.py         means of an update
  training/transforms.py      what is computed of a batch before its steps
  models/moe.py               use of the experts of a mixture
  monitoring/episodes.py      episodes, with what the environment gives in `info['metrics']`
  monitoring/outcomes.py      numbers of episodes by how they ended
  monitoring/health.py        whether a limit of config.health is exceeded
  rollout/sequences.py        sampling of turns; batches.py that of batches
  training/run.py             time and throughput of an update
  scores.py                   held-out episodes

metric_names.py has the meaning of each metric.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import datetime
import itertools
import json
import math
import os
import resource
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from stppo_jax import types
from stppo_jax.monitoring import sinks

FILE_NAME = 'metrics.jsonl'


class MetricsWriter:
  """Appends one JSON line per call to `workdir`/metrics.jsonl.

  A non-finite number is written as null, and its name in that line's list "nonfinite".
  The writer first drops the lines of steps after `resume_step`, which a resumed run writes again;
  -1 starts a new file. After a rollback, and
  in a copy of a run's folder, a tracker gets a new run. Only process 0 may hold a writer.
  """

  def __init__(
      self,
      workdir: str,
      tensorboard: bool = False,
      project: str = '',
      tracker: str = 'wandb',
      run_name: str = '',
      config_json: str = '{}',
      resume_step: int = -1,
      is_rollback: bool = False,
  ):
    os.makedirs(workdir, exist_ok=True)
    path = os.path.join(workdir, FILE_NAME)
    kept, last_step = _truncate(path, resume_step)
    self._file = open(path, 'a', encoding='utf-8')
    self._sinks = sinks.Sinks()
    if tensorboard:
      self._sinks.add('TensorBoard', lambda: sinks.TensorBoard(workdir, resume_step + 1))
    if project:
      from stppo_jax.monitoring import tracker as tracker_lib

      is_continued = resume_step != -1 and not is_rollback

      def make_tracker():
        sink = tracker_lib.Tracker(tracker, workdir, project, run_name, config_json, is_continued)
        if sink.is_continued:
          sink.last_step = last_step
        else:
          for line in kept:
            sink.write(line['step'], _numbers(line))
        return sink

      self._sinks.add(tracker, make_tracker)
      if is_rollback:
        logging.info('%s: the rollback continues as a new run, with the steps before it', tracker)

  def write(self, step: int, scalars: Mapping[str, object]) -> None:
    """Writes one line; values are anything `float` takes, device scalars included."""
    reserved = {'step', 'time', 'nonfinite'} & set(scalars)
    assert not reserved, f'reserved metric names: {sorted(reserved)}'
    numbers = {name: _host_scalar(value) for name, value in scalars.items()}
    finite = {name: number for name, number in numbers.items() if math.isfinite(number)}
    line: dict[str, Any] = {'step': int(step), 'time': round(time.time(), 3)}
    line.update({name: finite.get(name) for name in numbers})
    if len(finite) < len(numbers):
      line['nonfinite'] = [name for name in numbers if name not in finite]
    self._file.write(json.dumps(line, allow_nan=False) + '\n')
    self._file.flush()
    # A later checkpoint must not survive a crash that loses this line.
    os.fsync(self._file.fileno())
    self._sinks.write(int(step), finite)

  def close(self) -> None:
    try:
      self._file.close()
    finally:
      self._sinks.close()

  def __enter__(self) -> 'MetricsWriter':
    return self

  def __exit__(self, *unused_error) -> None:
    self.close()


def read_metrics(workdir: str) -> list[dict[str, Any]]:
  """Returns the lines of `workdir`/metrics.jsonl in file order; [] if the file does not exist yet.

  An unreadable line (torn by a crash, or still being written) is left out.
  """
  if not os.path.isdir(workdir):
    raise types.UserError(
        f'workdir {workdir!r} is not a folder; give the --workdir of a run that has started.'
    )
  path = os.path.join(workdir, FILE_NAME)
  lines: list[dict[str, Any]] = []
  if not os.path.exists(path):
    return lines
  with open(path, 'rb') as file:
    for number, raw in enumerate(file, 1):
      try:
        line = json.loads(raw)
        if type(line['step']) is not int:
          raise ValueError
      except (ValueError, KeyError, TypeError):
        if raw.strip():
          logging.warning('%s:%d is not a whole metrics line; left out.', path, number)
        continue
      lines.append(line)
  return lines


def progress_line(
    step: int,
    total: int,
    scalars: Mapping[str, object],
    elapsed_s: float,
    first_step: int = 0,
    core_metrics: Sequence[str] = ('em',),
) -> str:
  """Returns a line: `update 12/60  reward 0.420  em 0.440  clip 0.031  1,890 tok/s  0:03:21 left`.

  `elapsed_s` is the time of updates `first_step`+1 .. `step`, because a resumed run counts its own.
  The line shows the first of the environment's `core_metrics`.
  """
  parts = [f'update {step}/{total}']
  values = {name: _host_scalar(x) for name, x in scalars.items() if x is not None}
  shown = {'reward': 'critic/score/mean'}
  shown |= {name: f'{name}/mean' for name in core_metrics[:1]}
  shown['clip'] = 'actor/pg_clipfrac'
  for label, name in shown.items():
    if name in values:
      parts.append(f'{label} {values[name]:.3f}')
  if values.get('actor/skipped'):
    parts.append(f'skipped {values["actor/skipped"]:.0f} in a row (not finite)')
  if values.get('env/environment_failed'):
    parts.append(f'environment raised in {values["env/environment_failed"]:.0%}')
  if 'perf/throughput' in values:
    parts.append(f'{values["perf/throughput"]:,.0f} tok/s')
  if step > first_step:
    left_s = elapsed_s / (step - first_step) * max(total - step, 0)
    parts.append(f'{datetime.timedelta(seconds=round(left_s))} left')
  return '  '.join(parts)


def summarize(prefix: str, array: object) -> dict[str, float]:
  """Returns {prefix/mean, prefix/max, prefix/min} of an array; {} of an empty one."""
  values = np.asarray(array, np.float64)
  if not values.size:
    return {}
  return {
      f'{prefix}/mean': float(values.mean()),
      f'{prefix}/max': float(values.max()),
      f'{prefix}/min': float(values.min()),
  }


def host_memory_gb() -> float:
  """Returns the resident memory of this process in GiB. Linux only."""
  with open('/proc/self/statm', encoding='ascii') as file:
    pages = int(file.read().split()[1])
  return pages * resource.getpagesize() / 2**30


def device_memory() -> dict[str, float]:
  """Returns {'perf/max_memory_allocated_gb': GiB}, the largest peak of this process's devices.

  As in verl since the start of the process. {} where devices do not report it, as CPUs do not.
  """
  stats = [device.memory_stats() for device in jax.local_devices()]
  peaks = [x['peak_bytes_in_use'] for x in stats if x and 'peak_bytes_in_use' in x]
  return {'perf/max_memory_allocated_gb': max(peaks) / 2**30} if peaks else {}


def _host_scalar(value):
  array = np.asarray(value)
  assert array.size == 1, f'a metric is one number, not an array of shape {array.shape}'
  number = array.item()
  return int(number) if array.dtype.kind in 'biu' else float(number)


def _truncate(path, resume_step):
  """Rewrites the file without unreadable lines and without steps after `resume_step`.

  Returns the lines that are left, and the last step of the file before; -1 if there was none.
  """
  lines = read_metrics(os.path.dirname(path))
  if resume_step < 0 and any(line['step'] for line in lines):
    old = _unused(path + '.old')
    os.replace(path, old)
    logging.warning(
        'no checkpoint: the run starts again; the %d lines of its metrics are now in %s',
        len(lines),
        old,
    )
    return [], -1
  kept = [line for line in lines if line['step'] <= resume_step]
  with open(path + '.tmp', 'w', encoding='utf-8') as file:
    for line in kept:
      file.write(json.dumps(line) + '\n')
  os.replace(path + '.tmp', path)
  return kept, max((line['step'] for line in lines), default=-1)


def _unused(path):
  """Returns a path, with a number at its end if there is such a file."""
  name = path
  for number in itertools.count(2):
    if not os.path.exists(name):
      return name
    name = f'{path}{number}'


def _numbers(line):
  """Returns the finite metrics of a line."""
  values = {name: x for name, x in line.items() if name not in ('step', 'time', 'nonfinite')}
  return {name: x for name, x in values.items() if x is not None}
