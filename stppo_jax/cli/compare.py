"""Compares two runs, or two evaluation folders: their settings, and their held-out scores.

The scores are paired: they include only questions that both have played, and the interval is that
of the mean difference over these questions.
"""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import os
from typing import Any

import numpy as np

from stppo_jax import types
from stppo_jax.evaluation import records
from stppo_jax.evaluation import statistics
from stppo_jax.evaluation import table
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import outcomes
from stppo_jax.monitoring import provenance
from stppo_jax.monitoring import report
from stppo_jax.monitoring import scores
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.rollout import saved
from stppo_jax.types import UserError

Samples = Mapping[str, list[types.Episode]]  # id of a question -> its samples
Episodes = Sequence[types.Episode]
Settings = Mapping[str, Any]  # path -> value
Rows = list[Sequence[str]]  # the rows of a table


def text(first: str, second: str) -> str:
  """Returns the differences between two folders as tables."""
  first_settings = read_settings(first)
  second_settings = read_settings(second)
  settings = _setting_rows(first_settings, second_settings)
  table_of_settings = 'The settings are the same.'
  if len(settings) > 1:
    table_of_settings = table.aligned(settings)
  first_path = newest_episodes(first)
  second_path = newest_episodes(second)
  first_episodes = read_episodes(first_path)
  second_episodes = read_episodes(second_path)
  parts = [f'A: {first_path}\nB: {second_path}', table_of_settings]
  score_rows = _score_rows(first_episodes, second_episodes)
  if len(score_rows) > 1:
    parts += [
        table.aligned(score_rows),
        f'In brackets: {statistics.LEVEL:.0%} intervals of a bootstrap over the questions.',
    ]
  else:
    parts.append('A and B have no question in common: evaluate them on the same split for scores.')
  parts.append(table.aligned(_outcome_rows(first_episodes, second_episodes)))
  return '\n\n'.join(parts)


def read_settings(folder: str) -> dict[str, object]:
  """Returns the settings of a folder and its provenance, by their paths."""
  settings = workdir_lib.read_settings(folder)
  if not settings:
    raise UserError(f'{folder} has no config.json: give the workdir of a run')
  start = provenance.newest(folder)
  # The same repository may have another path on another machine.
  git = {os.path.basename(path): state for path, state in start.pop('git', {}).items()}
  settings['provenance'] = {**start, 'git': git}
  return workdir_lib.flatten(settings)


def newest_episodes(folder: str) -> str:
  """Returns the file with the newest held-out episodes of a run or of an evaluation folder."""
  files = report.episode_files(folder, metrics_lib.read_metrics(folder))
  updates = [update for kind, update in files if kind == 'eval']
  paths = [episodes_lib.record_path(folder, 'eval', update) for update in updates]
  path = os.path.join(folder, 'episodes.jsonl')  # an evaluation folder has it
  if os.path.exists(path):
    paths.append(path)
  if not paths:
    raise UserError(
        f'{folder} has no held-out episodes: give the workdir of a run, or an evaluation folder '
        'such as WORKDIR/eval/NAME'
    )
  return paths[-1]


def read_episodes(path: str) -> list[types.Episode]:
  """Returns the episodes of a file."""
  try:
    return [types.Episode.from_dict(record) for record in saved.read_records(path)]
  except (ValueError, LookupError, TypeError) as error:
    raise UserError(f'{path} is not a file of episodes ({error})') from error


def paired(first: Samples, second: Samples, metric: str) -> list[statistics.Estimate]:
  """Returns a metric of A, of B, and B - A, over the questions that both have.

  Samples of a question are averaged first. Questions are resampled within each data set.
  """
  strata = collections.defaultdict(list)
  for name in sorted(first.keys() & second.keys()):
    a = _mean(first[name], metric)
    b = _mean(second[name], metric)
    dataset = first[name][0].task.dataset
    strata[dataset].append((a, b, b - a))
  mean = lambda x: x.mean(axis=-1)
  estimates = []
  for column in range(3):
    values = [np.array(rows)[:, column] for rows in strata.values()]
    estimates.append(statistics.bootstrap(mean, [values]))
  return estimates


def _mean(episodes: Episodes, metric: str) -> float:
  values = [episode.score for episode in episodes]
  if metric != 'score':
    values = [episode.metrics.get(metric, 0.0) for episode in episodes]
  return float(np.mean(values))


def _setting_rows(first: Settings, second: Settings) -> Rows:
  rows: Rows = [('setting', 'A', 'B')]
  for name in sorted(first.keys() | second.keys()):
    a = first.get(name)
    b = second.get(name)
    if a != b:
      rows.append((name, repr(a), repr(b)))
  return rows


def _score_rows(first: Episodes, second: Episodes) -> Rows:
  rows: Rows = [('score', 'questions', 'A', 'B', 'B - A')]
  others = records.samples_by_agent(second)
  metrics = dict.fromkeys(name for episode in first for name in episode.core_metrics)
  for prefix, samples in records.samples_by_agent(first).items():
    for metric in [*metrics, 'score']:
      own = _with_metric(samples, metric)
      other = _with_metric(others.get(prefix, {}), metric)
      shared = [name for name in own.keys() & other.keys() if _is_same(own[name], other[name])]
      if shared:
        own = {name: own[name] for name in shared}
        cells = map(table.cell, paired(own, other, metric))
        rows.append((prefix + metric, str(len(shared)), *cells))
  return rows


def _with_metric(samples: Samples, metric: str) -> Samples:
  """Returns the questions whose environment has a metric, which may be one of a mix."""
  if metric == 'score':
    return samples
  names = set()
  for episodes in samples.values():
    names |= {episode.task.environment for episode in episodes if metric in episode.core_metrics}
  return {
      question: episodes
      for question, episodes in samples.items()
      if episodes[0].task.environment in names
  }


def _is_same(first: Episodes, second: Episodes) -> bool:
  """Returns whether samples have the same question: ids such as `test-1` are those of a file."""
  return first[0].task.question == second[0].task.question


def _outcome_rows(first: Episodes, second: Episodes) -> Rows:
  rows: Rows = [('outcome', 'A', 'B')]
  first_counts = outcomes.count(list(map(scores.alone, first)))
  second_counts = outcomes.count(list(map(scores.alone, second)))
  for name, number in first_counts.items():
    second_number = second_counts[name]
    rows.append((name, str(number), str(second_number)))
  return rows
