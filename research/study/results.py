"""The results of a study: one JSON line per finished run, to be committed.

FOLDER/GRID.jsonl has a line per run of the system, or per method of the toy task. Numbers have four
significant digits, and long series are thinned, so that a study takes some hundred kilobytes and
its page can be built from them alone. Lines are appended as runs end. If a run has several lines,
the last one that agrees with the grid counts.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
from typing import Any

import numpy as np

from research import comparisons
from research.study import grid as grid_lib
from research.study import measures
import stppo_jax
from stppo_jax.types import UserError

MAX_POINTS = 64  # per series of a run of the system
MAX_POINTS_TOY = 24  # per series of a method of the toy task, which has many seeds
_SKIPPED = 'toy/nonfinite'  # skipped steps in a row
_OLD_KEYS = {'regime': 'condition', 'cell': 'method', 'instrument': 'task'}
_REQUIRED = ('name', 'grid', 'condition', 'method', 'task', 'seeds', 'digest', 'status')


def finished(job: grid_lib.Job, rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns 'done' or 'nonfinite' for the metrics of a run that has ended for good, else ''."""
  if not rows:
    return ''
  last = rows[-1]
  if int(last.get('actor/skipped') or 0) >= job.max_nonfinite:
    return 'nonfinite'
  if {'stppo/step_norm', 'critic/step_norm'} & set(last.get('nonfinite', ())):
    return 'nonfinite'
  is_scored = any(name.startswith('val-core/') for name in last)
  return 'done' if last['step'] >= job.updates and is_scored else ''


def system_record(
    job: grid_lib.Job, rows: Sequence[Mapping[str, Any]], cost: Mapping[str, float]
) -> dict[str, Any]:
  """Returns the record of a finished run of the system, from the lines of its metrics.jsonl."""
  status = finished(job, rows)
  evaluations = [row for row in rows if row.get(job.score) is not None]
  if not evaluations and status == 'done':
    available = sorted({name for row in rows for name in row if name.startswith('val-core/all/')})
    raise UserError(
        f'{job.name} has no metric {job.score!r}: set score of the grid {job.grid!r} to one of '
        f'{", ".join(available)}'
    )
  updates = [row for row in rows if row['step'] > 0]
  series = {}
  for name, metric in measures.SERIES.items():
    if any(metric in row for row in updates):
      series[name] = np.array([row.get(metric) for row in updates], float)
  scores = np.array([row[job.score] for row in evaluations], float)
  score_steps = [row['step'] for row in evaluations]
  has_died = status == 'nonfinite'
  end = job.updates if has_died else None
  chosen = _thinned(len(updates), MAX_POINTS)
  return _heading(job, status, cost) | {
      'measures': _rounded(measures.of_run(scores, series, has_died, score_steps, end)),
      'score': {'steps': score_steps, 'values': _rounded(scores.tolist())},
      'steps': [updates[i]['step'] for i in chosen],
      'series': {name: _rounded(x[chosen].tolist()) for name, x in series.items()},
  }


def toy_record(
    job: grid_lib.Job, metrics: Mapping[str, np.ndarray], cost: Mapping[str, float]
) -> dict[str, Any]:
  """Returns the record of a method of the toy task, from arrays [seeds, updates].

  Scores are kept per seed, other series as their interquartile mean and 10% and 90% quantiles.
  """
  score = np.asarray(metrics[job.score], float)
  series = {
      name: np.asarray(metrics[metric], float)
      for name, metric in measures.SERIES.items()
      if metric in metrics
  }
  is_dead = ~np.isfinite(score)
  if _SKIPPED in metrics:
    is_dead[:, 1:] |= np.asarray(metrics[_SKIPPED]) >= job.max_nonfinite
  is_dead = np.logical_or.accumulate(is_dead, axis=1)
  alive_score = np.where(is_dead, 0, score)  # The rest of a dead run counts as 0.
  per_seed = []
  for i, has_died in enumerate(is_dead[:, -1]):
    seed_series = {name: x[i] for name, x in series.items()}
    per_seed.append(measures.of_run(alive_score[i], seed_series, bool(has_died)))
  score_columns = _thinned(score.shape[1], MAX_POINTS_TOY)
  any_series = next(iter(series.values()), score)
  chosen = _thinned(any_series.shape[1], MAX_POINTS_TOY)
  bands = {}
  for name, x in series.items():
    columns = [x[:, i][np.isfinite(x[:, i])] for i in chosen]
    bands[name] = {
        'iqm': _rounded([float(comparisons.iqm(column)) for column in columns]),
        'low': _rounded([_quantile(column, 0.1) for column in columns]),
        'high': _rounded([_quantile(column, 0.9) for column in columns]),
    }
  return _heading(job, 'done', cost) | {
      'measures': {name: _rounded([one[name] for one in per_seed]) for name in per_seed[0]},
      'score': {'steps': score_columns, 'values': _rounded(score[:, score_columns].tolist(), 3)},
      'steps': [i + 1 for i in chosen],
      'series': bands,
  }


def folder(results: str, workdir: str) -> str:
  """Returns the folder of the results of a study in `workdir`."""
  return results or os.path.join(workdir, 'results')


def append(folder: str, record: Mapping[str, Any]) -> None:
  """Appends a record to its grid's file in `folder`, and makes the folder."""
  os.makedirs(folder, exist_ok=True)
  line = json.dumps(record, allow_nan=False, separators=(',', ':')) + '\n'
  with open(os.path.join(folder, f'{record["grid"]}.jsonl'), 'a', encoding='utf-8') as file:
    file.write(line)
    file.flush()
    os.fsync(file.fileno())


def read(folder: str) -> list[dict[str, Any]]:
  """Returns the records of all files in `folder`, oldest first.

  Torn lines and results of other programs are left out.
  """
  records = []
  for path in sorted(pathlib.Path(folder).glob('*.jsonl')):
    for line in path.read_text(encoding='utf-8').splitlines():
      try:
        record = json.loads(line)
      except ValueError:
        continue
      record = {_OLD_KEYS.get(key, key): value for key, value in record.items()}
      if all(key in record for key in _REQUIRED):
        records.append(_renamed(record))
  return records


def planned(
    jobs: Iterable[grid_lib.Job], records: Iterable[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
  """Returns {name: newest record} of jobs, for the page.

  A record belongs to a job if both have the same name and agree in every setting that both name. So
  if a method ran again at another rate, the page shows the runs of the rate that is planned now.
  """
  by_name = {job.name: job for job in jobs}
  newest = {}
  for record in records:
    job = by_name.get(record['name'])
    if job is not None and _agree(record['overrides'], job.overrides):
      newest[job.name] = record
  return {name: newest[name] for name in by_name if name in newest}


def unchanged(
    jobs: Iterable[grid_lib.Job], records: Iterable[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
  """Returns {name: newest record} of the jobs that the runner need not repeat."""
  newest = {(record['name'], record['digest']): record for record in records}
  keys = [(job.name, job.digest) for job in jobs]
  return {name: newest[name, digest] for name, digest in keys if (name, digest) in newest}


def best_rates(jobs: Sequence[grid_lib.Job], folder: str) -> dict[str, float]:
  """Returns {method: rate with the highest final score} of methods that ran at every rate."""
  records = planned(jobs, read(folder))
  best = {}
  for method in dict.fromkeys(job.method for job in jobs):
    own = [job for job in jobs if job.method == method]
    if all(job.name in records for job in own):
      score = lambda job: records[job.name]['measures']['final'] or 0.0
      best[method] = max(own, key=score).overrides['actor.lr']
  return best


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
  """Returns a record with the present names of its task, grid and settings."""
  record['task'] = {'mechanism': 'toy'}.get(record['task'], record['task'])
  for key in ('name', 'grid'):
    record[key] = record[key].replace('mechanism_', 'toy_').replace('_knobs', '_sweep')
  overrides = {}
  for path, value in record['overrides'].items():
    if isinstance(value, str):
      value = grid_lib.NEW_FOLDERS.get(value, value)
    overrides[grid_lib.NEW_NAMES.get(path, path)] = value
  record['overrides'] = overrides
  return record


def _agree(recorded: Mapping[str, Any], planned: Mapping[str, Any]) -> bool:
  """Whether two sets of overrides have the same values in the settings that both name."""
  common = recorded.keys() & planned.keys() - {'name'}
  as_json = json.loads(json.dumps({path: planned[path] for path in common}))
  return all(recorded[path] == as_json[path] for path in common)


def _heading(job: grid_lib.Job, status: str, cost: Mapping[str, float]) -> dict[str, Any]:
  return {
      'name': job.name,
      'grid': job.grid,
      'condition': job.condition,
      'method': job.method,
      'task': job.task,
      'seeds': list(job.seeds),
      'digest': job.digest,
      'status': status,
      'overrides': dict(job.overrides),
      'cost': _rounded({'core_s': cost.get('core_s', 0.0), 'wall_s': cost.get('wall_s', 0.0)}),
      **origin(),
  }


def origin() -> dict[str, str]:
  """Returns the machine, the versions and the commit of this process."""
  versions = {'python': platform.python_version(), 'stppo_jax': stppo_jax.__version__}
  for package in ('jax', 'numpy'):
    versions[package] = importlib.metadata.version(package)
  return {
      'machine': _processor(),
      'versions': ' '.join(f'{name} {version}' for name, version in versions.items()),
      'commit': _commit(),
  }


def _processor() -> str:
  if os.path.exists('/proc/cpuinfo'):
    with open('/proc/cpuinfo', encoding='utf-8') as file:
      for line in file:
        if line.startswith('model name'):
          return line.partition(':')[2].strip()
  return platform.processor() or platform.machine()


def _commit() -> str:
  """Returns the commit of the clone, with + if files differ from it; '' without git."""
  root = str(pathlib.Path(__file__).parents[2])

  def git(*words):
    command = ['git', '-C', root, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)

  try:
    commit = git('rev-parse', '--short=10', 'HEAD')
    if commit.returncode:
      return ''
    changed = git('status', '--porcelain', '--untracked-files=no', 'stppo_jax', 'research/toy')
  except OSError:
    return ''
  mark = '+' if changed.stdout.strip() else ''
  return commit.stdout.strip() + mark


def _thinned(length: int, most: int) -> list[int]:
  """Returns at most `most` indices of `length`, evenly spread, with the first and the last."""
  if length <= most:
    return list(range(length))
  return sorted({round(i * (length - 1) / (most - 1)) for i in range(most)})


def _quantile(x: np.ndarray, q: float) -> float:
  return float(np.quantile(x, q)) if len(x) else math.nan


def _rounded(value: Any, digits: int = 4) -> Any:
  """Rounds to significant digits. Numbers that are not finite become null."""
  if isinstance(value, float):
    return float(f'{value:.{digits}g}') if math.isfinite(value) else None
  if isinstance(value, dict):
    return {key: _rounded(item, digits) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_rounded(item, digits) for item in value]
  return value
