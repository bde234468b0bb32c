"""Scores of held-out episodes: episodes in, means under the names of metrics.jsonl out."""

import collections
from collections.abc import Sequence
import dataclasses

import numpy as np

from stppo_jax import types
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import outcomes


def scores(episodes: Sequence[types.Episode]) -> dict[str, float]:
  """Returns means over the episodes, per data set and over all.

  val-core/<dataset>/score     total reward
  val-core/<dataset>/<name>    core metrics of the environment; its other metrics go under val-aux
  val-core/macro/..            the mean of the data sets' means, if there are several
  val-core/all/<name>_hops<n>  the main score of the tasks with n hops
  val-program/<name>           counts of an agent program
  val-outcome/<outcome>        number of episodes, see monitoring/outcomes.py

  val-role/<role>/<name>       score and core metrics of the rows of a role, if there are roles

  The environments of a mix have val-core/<environment>/.. and val-aux/<environment>/.. as the data
  sets have.

  An episode whose retrieval failed counts with the score that it got without the passages, and
  val-aux/retrieval_failed is the share of such episodes. A prompt that is too long counts as wrong.
  An episode whose environment raised keeps the rewards before. A metric that an episode never
  reported counts as 0, if another episode of its environment did. Means are over rows. Rows of an
  agent that never moved are left out.
  """
  rows = list(map(alone, episodes))
  outcome_counts = outcomes.count(rows)
  episodes = [episode for episode in episodes if not episode.absent]
  datasets = dict.fromkeys(episode.task.dataset for episode in episodes)
  core_names = dict.fromkeys(name for episode in episodes for name in episode.core_metrics)
  reported = episodes_lib.reported_metrics(episodes)
  values: dict[str, list[float]] = collections.defaultdict(list)
  for episode in episodes:
    core = {name: episode.metrics.get(name, 0.0) for name in episode.core_metrics}
    core['score'] = episode.score
    task = episode.task
    labels = dict.fromkeys(('all', task.environment or 'all', task.dataset))
    for name, value in core.items():
      for label in labels:
        values[f'val-core/{label}/{name}'].append(value)
      if episode.role:
        values[f'val-role/{episode.role}/{name}'].append(value)
    for name in reported[task.environment].difference(episode.core_metrics):
      value = episode.metrics.get(name, 0.0)
      for label in labels:
        values[f'val-aux/{label}/{name}'].append(value)
    if episode.task.hops:
      main = next(iter(core))
      values[f'val-core/all/{main}_hops{episode.task.hops}'].append(episode.main_score)
    numbers = {
        'num_turns/mean': episode.num_messages,
        'agent_turns/mean': len(episode.turns),
        'truncated': episode.truncated,
        'retrieval_failed': episode.search_failed,
        'environment_failed': bool(episode.error),
        'prompt_too_long': bool(episode.counts.get('prompt_too_long')),
    }
    for name, number in numbers.items():
      values[f'val-aux/{name}'].append(number)

  for name, counted in episodes_lib.program_counts(episodes).items():
    values[f'val-program/{name}'] += counted
  means = {}
  for name, reported_values in values.items():
    means[name] = float(np.mean(reported_values))
  for name in (*core_names, 'score'):
    columns = [f'val-core/{dataset}/{name}' for dataset in datasets]
    parts = [means[column] for column in columns if column in means]
    if len(parts) > 1:
      means[f'val-core/macro/{name}'] = float(np.mean(parts))
  means |= outcomes.as_metrics('val-outcome', outcome_counts)
  return dict(sorted(means.items()))


def alone(episode: types.Episode) -> types.Episode:
  """Returns the row as a separate episode. Each row of an agent program counts as one here."""
  if not episode.is_segment:
    return episode
  return dataclasses.replace(episode, number=None)
