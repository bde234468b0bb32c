"""The writer of metrics: scalars of an update in, a line of metrics.jsonl out.

TensorBoard, Weights & Biases and trackio get the same numbers if the config asks for them. None can
stop a run. The report and the tests read only metrics.jsonl.

The metrics come from these files:

  training/diagnostics.py  batches and optimizer steps, from token arrays
  training/update.py       gradients, divisor and applied step
  models/moe.py            use of the experts of a mixture
  monitoring/episodes.py   episodes, with what the environment gives in `info['metrics']`
  monitoring/outcomes.py   numbers of episodes by how they ended
  monitoring/health.py     whether a limit of config.health is exceeded
  rollout/pipeline.py      sampling
  training/run.py          time and throughput of an update
  evaluation/scores.py     held-out episodes

metric_names.py has the meaning of each metric.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
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
  `resume_step=n` first drops the lines of later steps, which a resumed run writes again; n = -1
  starts a new file; None keeps every whole line. Only process 0 may hold a writer.
  """

  def __init__(
      self,
      workdir: str,
      tensorboard: bool = False,
      project: str = '',
      tracker: str = 'wandb',
      run_name: str = '',
      config_json: str = '{}',
      resume_step: int | None = None,
  ):
    os.makedirs(workdir, exist_ok=True)
    path = os.path.join(workdir, FILE_NAME)
    _truncate(path, resume_step)
    self._file = open(path, 'a', encoding='utf-8')
    self._sinks = sinks.Sinks()
    first = None if resume_step is None else resume_step + 1
    if tensorboard:
      self._sinks.add('TensorBoard', lambda: sinks.TensorBoard(workdir, first))
    if project:
      make = functools.partial(sinks.Tracker, tracker, workdir, project, run_name, config_json)
      self._sinks.add(tracker, functools.partial(make, resume_step != -1))

  def write(self, step: int, scalars: Mapping[str, Any]) -> None:
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
  return [line for line, _ in _whole_lines(os.path.join(workdir, FILE_NAME))]


def progress_line(
    step: int,
    total: int,
    scalars: Mapping[str, Any],
    elapsed_s: float,
    first_step: int = 0,
    core_metrics: Sequence[str] = ('em',),
) -> str:
  """Returns a line: `update 12/60  reward .42  em .44  clip .031  1.9k tok/s  3:21 left`.

  `elapsed_s` is the time of updates `first_step`+1 .. `step`, because a resumed run counts its own.
  The line shows the first of the environment's `core_metrics`.
  """
  parts = [f'update {step}/{total}']
  values = {name: _host_scalar(x) for name, x in scalars.items() if x is not None}
  shown = [('reward', 'critic/score/mean', 2)]
  shown += [(name, f'{name}/mean', 2) for name in core_metrics[:1]]
  shown.append(('clip', 'actor/pg_clipfrac', 3))
  for label, name, digits in shown:
    if name in values:
      parts.append(f'{label} {_short(values[name], digits)}')
  if values.get('actor/skipped'):
    parts.append(f'skipped {values["actor/skipped"]:.0f} in a row (not finite)')
  if values.get('env/environment_failed'):
    parts.append(f'environment raised in {values["env/environment_failed"]:.0%}')
  if 'perf/throughput' in values:
    parts.append(f'{_thousands(values["perf/throughput"])} tok/s')
  if step > first_step:
    left_s = elapsed_s / (step - first_step) * max(total - step, 0)
    parts.append(f'{_clock(left_s)} left')
  return '  '.join(parts)


def summarize(prefix: str, array: Any) -> dict[str, float]:
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


def _host_scalar(value: Any) -> int | float:
  array = np.asarray(value)
  assert array.size == 1, f'a metric is one number, not an array of shape {array.shape}'
  return int(array.item()) if array.dtype.kind in 'biu' else float(array.reshape(()))


def _whole_lines(path: str) -> list[tuple[dict[str, Any], bytes]]:
  """Returns (parsed, raw) of every readable line; a missing file has none."""
  if not os.path.exists(path):
    return []
  lines = []
  with open(path, 'rb') as file:
    for number, raw in enumerate(file, 1):
      try:
        line = json.loads(raw)
        int(line['step'])
      except (ValueError, KeyError, TypeError):
        if raw.strip():
          logging.warning('%s:%d is not a whole metrics line; left out.', path, number)
        continue
      lines.append((line, raw.rstrip(b'\n') + b'\n'))
  return lines


def _truncate(path: str, resume_step: int | None) -> None:
  """Rewrites the file without unreadable lines and without steps after `resume_step`."""
  if not os.path.exists(path):
    return
  lines = _whole_lines(path)
  if resume_step is not None and resume_step < 0 and any(line['step'] for line, _ in lines):
    os.replace(path, path + '.old')
    logging.warning(
        'no checkpoint: the run starts again; the %d lines of its metrics are now in %s.old',
        len(lines),
        path,
    )
    return
  with open(path + '.tmp', 'wb') as file:
    for line, raw in lines:
      if resume_step is None or line['step'] <= resume_step:
        file.write(raw)
  os.replace(path + '.tmp', path)


def _short(number: float, digits: int) -> str:
  """Writes 0.42 as .42, because people read progress lines."""
  if not math.isfinite(number):
    return 'NaN'
  text = f'{number:.{digits}f}'
  return text.replace('0.', '.', 1) if text.lstrip('-').startswith('0.') else text


def _thousands(number: float) -> str:
  if not math.isfinite(number):
    return 'NaN'
  for unit, name in ((1e6, 'M'), (1e3, 'k')):
    if number >= unit:
      return f'{number / unit:.1f}{name}'
  return f'{number:.0f}'


def _clock(seconds: float) -> str:
  minutes, seconds = divmod(int(round(seconds)), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02d}:{seconds:02d}' if hours else f'{minutes}:{seconds:02d}'
