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
  val-outcome/<outcome>        number of episodes, see monitoring/outcomes.py

  and the same scores of each agent, if there are several, see `episodes_lib.scores_by_agent`.

  An episode whose retrieval failed, or whose prompt was too long, counts as wrong. An episode whose
  environment raised keeps the rewards before. A metric that an episode never reported counts as 0.
  Means are over rows. Rows of an agent that never moved are left out.
  """
  outcome_counts = outcomes.count([_alone(episode) for episode in episodes])
  episodes = [episode for episode in episodes if not episode.absent]
  values: dict[str, list[float]] = collections.defaultdict(list)
  datasets = dict.fromkeys(episode.task.dataset for episode in episodes)
  core_names = dict.fromkeys(name for episode in episodes for name in episode.core_metrics)
  reported = {name for episode in episodes for name in episode.metrics}
  for episode in episodes:
    core = {name: episode.metrics.get(name, 0.0) for name in episode.core_metrics}
    core['score'] = episode.score
    others = {name: episode.metrics.get(name, 0.0) for name in reported - core_names.keys()}
    for part in ('all', episode.task.dataset):
      for name, value in core.items():
        values[f'val-core/{part}/{name}'].append(value)
      for name, value in others.items():
        values[f'val-aux/{part}/{name}'].append(value)
    if episode.task.hops:
      main = next(iter(core))
      values[f'val-core/all/{main}_hops{episode.task.hops}'].append(episode.main_score)
    values['val-aux/num_turns/mean'].append(episode.num_messages)
    values['val-aux/agent_turns/mean'].append(len(episode.turns))
    values['val-aux/truncated'].append(episode.truncated)
    values['val-aux/retrieval_failed'].append(episode.search_failed)
    values['val-aux/environment_failed'].append(bool(episode.error))
    values['val-aux/prompt_too_long'].append(bool(episode.counts.get('prompt_too_long')))
  means = {name: float(np.mean(x)) for name, x in values.items()}
  if len(datasets) > 1:
    for name in (*core_names, 'score'):
      columns = [f'val-core/{dataset}/{name}' for dataset in datasets]
      parts = [means[column] for column in columns if column in means]
      if len(parts) > 1:
        means[f'val-core/macro/{name}'] = float(np.mean(parts))
  for name, x in episodes_lib.scores_by_agent(episodes).items():
    means[name] = float(np.mean(x))
  means |= outcomes.as_metrics('val-outcome', outcome_counts)
  return dict(sorted(means.items()))


def _alone(episode: types.Episode) -> types.Episode:
  """Returns the row as an episode of its own, which that of an agent program is here."""
  return dataclasses.replace(episode, number=None) if episode.is_segment else episode
