"""Evaluation: episodes in, scores out."""

import collections
from collections.abc import Callable
from collections.abc import Sequence

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.rollout import episode as episode_loop


def evaluate(
    agent,
    params,
    tasks: Sequence[types.Task],
    seed: int = 0,
    give_up: Callable[[], bool] | None = None,
    until_answered: Callable = lambda play: play(),
) -> tuple[dict[str, float], list[types.Episode]]:
  """Plays each task once, greedily; returns (metrics, episodes).

  Raises Stopped once `give_up()` is true. `until_answered(play)` may play again: it returns the
  episodes of a `play` in which retrieval worked.
  """
  keys = episode_loop.row_keys(jax.random.key(seed), tasks)
  play = lambda: agent.play(params, tasks, keys, greedy=True, give_up=give_up)
  episodes = until_answered(play)
  return scores(episodes), episodes


def scores(episodes: Sequence[types.Episode]) -> dict[str, float]:
  """Returns means over the episodes, per data set and over all.

  val-core/<dataset>/score   total reward
  val-core/<dataset>/<name>  an environment's core metrics; its other metrics go under val-aux
  val-core/macro/..            the mean of the data sets' means of each, where there are several
  val-core/all/<name>_hops<n>  the main one of them, where tasks have a number of hops
  val-role/<role>/..           score and core metrics of the rows of each role, where there are some

  An episode whose retrieval failed, or whose prompt was too long, counts as wrong, and is counted.
  One whose environment raised is counted, and has what it earned before.
  One that never reported a metric counts as 0. Means are over rows; those of a role that never
  moved are left out.
  """
  episodes = [episode for episode in episodes if not episode.absent]
  found, of_sets = collections.defaultdict(list), collections.defaultdict(dict)
  reported = {name for episode in episodes for name in episode.metrics}
  for episode in episodes:
    core = {name: episode.metrics.get(name, 0.0) for name in episode.core_metrics}
    other = {name: episode.metrics.get(name, 0.0) for name in reported - set(core)}
    for dataset in ('all', episode.task.dataset):
      for name, value in (core | {'score': episode.score}).items():
        found[f'val-core/{dataset}/{name}'].append(value)
        if dataset != 'all':
          of_sets[name].setdefault(dataset, []).append(value)
        if episode.role and dataset == 'all':
          found[f'val-role/{episode.role}/{name}'].append(value)
      for name, value in other.items():
        found[f'val-aux/{dataset}/{name}'].append(value)
    if episode.task.hops:
      main = episode.core_metrics[0] if episode.core_metrics else 'score'
      found[f'val-core/all/{main}_hops{episode.task.hops}'].append(episode.main_score)
    found['val-aux/num_turns/mean'].append(episode.num_messages)
    found['val-aux/agent_turns/mean'].append(len(episode.turns))
    found['val-aux/truncated'].append(float(episode.truncated))
    too_long = bool(episode.counts.get('prompt_too_long'))
    found['val-aux/retrieval_failed'].append(float(episode.search_failed))
    found['val-aux/environment_failed'].append(float(bool(episode.error)))
    found['val-aux/prompt_too_long'].append(float(too_long))
  for name, values in of_sets.items():
    if len(values) > 1:
      found[f'val-core/macro/{name}'] = [np.mean(of_set) for of_set in values.values()]
  return {name: float(np.mean(values)) for name, values in sorted(found.items())}
