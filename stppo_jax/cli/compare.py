"""Compares two runs, or two evaluation folders: their settings, and their held-out scores.

The scores are paired: only questions that both have played count, and the interval is that of the
mean difference over these questions.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import glob
import json
from typing import Any

import numpy as np

from stppo_jax import types
from stppo_jax.evaluation import records
from stppo_jax.evaluation import statistics
from stppo_jax.evaluation import table
from stppo_jax.monitoring import outcomes
from stppo_jax.monitoring import provenance
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.types import UserError

Samples = Mapping[str, list[types.Episode]]  # id of a question -> its samples


def text(first: str, second: str) -> str:
  """Returns the differences between two folders as tables."""
  settings = _setting_rows(read_settings(first), read_settings(second))
  first_path = newest_episodes(first)
  second_path = newest_episodes(second)
  first_episodes = read_episodes(first_path)
  second_episodes = read_episodes(second_path)
  parts = [
      f'A: {first_path}\nB: {second_path}',
      table.aligned(settings) if len(settings) > 1 else 'The settings are the same.',
      table.aligned(_score_rows(first_episodes, second_episodes)),
      f'In brackets: {statistics.LEVEL:.0%} intervals of a bootstrap over the questions.',
      table.aligned(_outcome_rows(first_episodes, second_episodes)),
  ]
  return '\n\n'.join(parts)


def read_settings(folder: str) -> dict[str, Any]:
  """Returns the settings of a folder and its provenance, by their paths."""
  settings = workdir_lib.read_settings(folder)
  if not settings:
    raise UserError(f'{folder} has no config.json: give the workdir of a run')
  return workdir_lib.flatten(settings | {'provenance': provenance.newest(folder)})


def newest_episodes(folder: str) -> str:
  """Returns the file with the newest held-out episodes of a run or of an evaluation folder."""
  place = glob.escape(folder)
  paths = sorted(glob.glob(f'{place}/episodes/eval_*.jsonl')) + glob.glob(f'{place}/episodes.jsonl')
  if not paths:
    raise UserError(
        f'{folder} has no held-out episodes: give the workdir of a run, or an evaluation folder '
        'such as WORKDIR/eval/NAME'
    )
  return paths[-1]


def read_episodes(path: str) -> list[types.Episode]:
  """Returns the episodes of a file."""
  try:
    with open(path, encoding='utf-8') as lines:
      return [types.Episode.from_dict(json.loads(line)) for line in lines]
  except (OSError, ValueError, LookupError, TypeError) as error:
    raise UserError(f'{path} is not a file of episodes ({error})') from error


def paired(first: Samples, second: Samples, metric: str) -> list[statistics.Estimate]:
  """Returns a metric of A, of B, and B - A, over the questions that both have.

  Samples of a question are averaged first. Questions are resampled within each data set.
  """
  strata: dict[str, list[list[float]]] = {}
  for name in sorted(first.keys() & second.keys()):
    a = _mean(first[name], metric)
    b = _mean(second[name], metric)
    strata.setdefault(first[name][0].task.dataset, []).append([a, b, b - a])
  tables = [np.array(rows) for rows in strata.values()]
  estimates = []
  for column in range(3):
    values = [rows[:, column] for rows in tables]
    estimates.append(statistics.bootstrap(lambda x: x.mean(axis=-1), [values]))
  return estimates


def _mean(episodes: Sequence[types.Episode], metric: str) -> float:
  if metric == 'score':
    return float(np.mean([episode.score for episode in episodes]))
  return float(np.mean([episode.metrics.get(metric, 0.0) for episode in episodes]))


def _setting_rows(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Sequence[str]]:
  rows: list[Sequence[str]] = [('setting', 'A', 'B')]
  for name in sorted(first.keys() | second.keys()):
    if first.get(name) != second.get(name):
      rows.append((name, repr(first.get(name)), repr(second.get(name))))
  return rows


def _score_rows(
    first: Sequence[types.Episode], second: Sequence[types.Episode]
) -> list[Sequence[str]]:
  rows: list[Sequence[str]] = [('score', 'questions', 'A', 'B', 'B - A')]
  metrics = dict.fromkeys(name for episode in first for name in episode.core_metrics)
  others = records.samples_by_agent(second)
  for prefix, samples in records.samples_by_agent(first).items():
    shared = samples.keys() & others.get(prefix, {}).keys()
    if not shared:
      raise UserError('A and B have no question in common: evaluate them on the same split')
    for metric in [*metrics, 'score']:
      cells = map(table.cell, paired(samples, others[prefix], metric))
      rows.append((prefix + metric, str(len(shared)), *cells))
  return rows


def _outcome_rows(
    first: Sequence[types.Episode], second: Sequence[types.Episode]
) -> list[Sequence[str]]:
  rows: list[Sequence[str]] = [('outcome', 'A', 'B')]
  counts = outcomes.count(second)
  for name, number in outcomes.count(first).items():
    rows.append((name, str(number), str(counts[name])))
  return rows
