"""The results of a study: small records of finished runs, a JSON line each, to be committed.

A finished run's metrics in; FOLDER/GRID.jsonl out, one line per run, or per cell of the mechanism.
Numbers have four significant digits, and long series are thinned, so that a study takes some
hundred kilobytes and its page can be built from them alone. Lines are appended as runs end. If a
run has several lines, the last one that agrees with the grid counts.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from typing import Any

import numpy as np

from research.study import grid as grids
from research.study import measures
from stppo_jax.evaluation import statistics
from stppo_jax.types import UserError

MAX_POINTS = 64  # per series of a run
_SKIPPED = 'mechanism/nonfinite'  # steps in a row
MAX_POINTS_OF_MANY = 24  # per series of a cell of the mechanism, which has many seeds
_LISTED = ('name', 'grid', 'regime', 'cell', 'instrument', 'seeds', 'digest', 'status')


def finished(job: grids.Job, rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns 'done' or 'nonfinite' for the metrics of a run that has ended for good, else ''."""
  if not rows:
    return ''
  last = rows[-1]
  if int(last.get('actor/skipped') or 0) >= job.max_nonfinite:
    return 'nonfinite'
  if {'stppo/step_norm', 'critic/step_norm'} & set(last.get('nonfinite', ())):
    return 'nonfinite'
  scored = any(name.startswith('val-core/') for name in last)
  return 'done' if last['step'] >= job.updates and scored else ''


def of_run(
    job: grids.Job, rows: Sequence[Mapping[str, Any]], cost: Mapping[str, float]
) -> dict[str, Any]:
  """Returns the record of a finished run of the system, from the lines of its metrics.jsonl."""
  status = finished(job, rows)
  evaluated = [(row['step'], row[job.score]) for row in rows if row.get(job.score) is not None]
  if not evaluated and status == 'done':
    there = sorted({name for row in rows for name in row if name.startswith('val-core/all/')})
    raise UserError(
        f'{job.name} has no metric {job.score!r}: set score of the grid {job.grid!r} to one of '
        f'{", ".join(there)}'
    )
  updates = [row for row in rows if row['step'] > 0]
  steps = [row['step'] for row in updates]
  series = {
      name: np.array([_number(row.get(metric)) for row in updates])
      for name, metric in measures.SERIES.items()
      if any(metric in row for row in updates)
  }
  scores = np.array([score for _, score in evaluated], float)
  chosen = _thinned(len(steps), MAX_POINTS)
  has_died, when = status == 'nonfinite', [step for step, _ in evaluated]
  end = job.updates if has_died else None
  return _heading(job, status, cost) | {
      'measures': _tidy(measures.of_run(scores, series, has_died, when, end)),
      'score': {'steps': when, 'values': _tidy(scores.tolist())},
      'steps': [steps[i] for i in chosen],
      'series': {name: _tidy([float(x[i]) for i in chosen]) for name, x in series.items()},
  }


def of_cell(
    job: grids.Job, metrics: Mapping[str, np.ndarray], cost: Mapping[str, float]
) -> dict[str, Any]:
  """Returns the record of a cell of the mechanism, from arrays [seeds, updates].

  Scores are kept per seed, other series as their interquartile mean and 10% and 90% quantiles.
  """
  score = np.asarray(metrics[job.score], float)
  series = {
      name: np.asarray(metrics[metric], float)
      for name, metric in measures.SERIES.items()
      if metric in metrics
  }
  dead = ~np.isfinite(score)
  if _SKIPPED in metrics:
    dead[:, 1:] |= np.asarray(metrics[_SKIPPED]) >= job.max_nonfinite
  dead = np.logical_or.accumulate(dead, axis=1)
  alive_score = np.where(dead, 0, score)  # the rest of a dead run counts as 0
  nonfinite = dead[:, -1]
  per_seed = [
      measures.of_run(
          alive_score[i], {name: x[i] for name, x in series.items()}, bool(nonfinite[i])
      )
      for i in range(len(score))
  ]
  of_scores = _thinned(score.shape[1], MAX_POINTS_OF_MANY)
  some = next(iter(series.values()), score)
  chosen = _thinned(some.shape[1], MAX_POINTS_OF_MANY)
  bands = {}
  for name, x in series.items():
    columns = [x[:, i][np.isfinite(x[:, i])] for i in chosen]
    bands[name] = {
        'iqm': _tidy([float(statistics.iqm(column)) for column in columns]),
        'low': _tidy([_quantile(column, 0.1) for column in columns]),
        'high': _tidy([_quantile(column, 0.9) for column in columns]),
    }
  return _heading(job, 'done', cost) | {
      'measures': {name: _tidy([one[name] for one in per_seed]) for name in per_seed[0]},
      'score': {
          'steps': list(of_scores),
          'values': [[_tidy(float(row[i]), 3) for i in of_scores] for row in score],
      },
      'steps': [i + 1 for i in chosen],
      'series': bands,
  }


def folder(results: str, workdir: str) -> str:
  """Returns where the results of a study in `workdir` are kept."""
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
  """Returns the records of all files in `folder`, oldest first; a torn line is left out."""
  found = []
  names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
  for name in (name for name in names if name.endswith('.jsonl')):
    with open(os.path.join(folder, name), encoding='utf-8') as file:
      for line in file:
        try:
          record = json.loads(line)
          found.append({key: record[key] for key in _LISTED} | record)
        except (ValueError, KeyError, TypeError):
          continue
  return found


def of_jobs(
    jobs: Iterable[grids.Job], records: Iterable[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
  """Returns {name: newest record} of jobs, for the page.

  A record belongs to a job if both have the same name and agree in every setting that both name.
  So a rule that was run again at another rate has the runs of the rate that is planned now.
  """
  by_name = {job.name: job for job in jobs}
  newest = {}
  for record in records:
    job = by_name.get(record['name'])
    if job is not None and _agree(record['overrides'], job.overrides):
      newest[job.name] = record
  return {name: newest[name] for name in by_name if name in newest}


def unchanged(
    jobs: Iterable[grids.Job], records: Iterable[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
  """Returns {name: newest record} of the jobs whose runs need not be repeated, for the runner."""
  newest = {(record['name'], record['digest']): record for record in records}
  return {
      job.name: newest[job.name, job.digest] for job in jobs if (job.name, job.digest) in newest
  }


def _agree(recorded: Mapping[str, Any], planned: Mapping[str, Any]) -> bool:
  """Whether two sets of overrides have the same values, as far as both have them."""
  recorded = {grids.NEW_NAMES.get(path, path): value for path, value in recorded.items()}
  common = recorded.keys() & planned.keys() - {'name'}
  for path in common:
    before = recorded[path]
    if isinstance(before, str):
      before = grids.NEW_FOLDERS.get(before, before)
    if before != json.loads(json.dumps(planned[path])):
      return False
  return True


def _heading(job: grids.Job, status: str, cost: Mapping[str, float]) -> dict[str, Any]:
  return {
      'name': job.name,
      'grid': job.grid,
      'regime': job.regime,
      'cell': job.cell,
      'instrument': job.instrument,
      'seeds': list(job.seeds),
      'digest': job.digest,
      'status': status,
      'overrides': dict(job.overrides),
      'cost': _tidy({'core_s': cost.get('core_s', 0.0), 'wall_s': cost.get('wall_s', 0.0)}),
      **origin(),
  }


def origin() -> dict[str, str]:
  """Returns the machine, the versions and the commit that numbers come from, if made now."""
  versions = {'python': platform.python_version()}
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
  """Returns the commit of the package's clone, with + where files differ from it; '' without."""
  folder = os.path.dirname(os.path.abspath(__file__))

  def git(*words):
    command = ['git', '-C', folder, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)

  try:
    commit = git('rev-parse', '--short=10', 'HEAD')
    if commit.returncode:
      return ''
    changed = git('status', '--porcelain', '--untracked-files=no', '--', '..')
  except OSError:
    return ''
  return commit.stdout.strip() + '+' * bool(changed.stdout.strip())


def _thinned(length: int, most: int) -> list[int]:
  """Returns at most `most` indices of `length`, evenly spread, with the first and the last."""
  if length <= most:
    return list(range(length))
  return sorted({round(i * (length - 1) / (most - 1)) for i in range(most)})


def _number(value: Any) -> float:
  return math.nan if value is None else float(value)


def _quantile(x: np.ndarray, q: float) -> float:
  return float(np.quantile(x, q)) if len(x) else math.nan


def _tidy(value: Any, digits: int = 4) -> Any:
  """Rounds to significant digits; numbers that are not finite become null."""
  if isinstance(value, float):
    return float(f'{value:.{digits}g}') if math.isfinite(value) else None
  if isinstance(value, dict):
    return {key: _tidy(item, digits) for key, item in value.items()}
  return [_tidy(item, digits) for item in value] if isinstance(value, (list, tuple)) else value
