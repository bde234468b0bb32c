"""Evaluation: episodes in, scores out."""

import collections

import jax
import numpy as np


def evaluate(agent, params, tasks, greedy=True, seed=0):
  """Plays each task once, by default greedily: (metrics, episodes).

  Metrics: val-core/<dataset>/em and f1, val-core/all/em, and by number of hops. An episode whose
  retrieval failed counts as wrong, and is counted.
  """
  keys = jax.random.split(jax.random.key(seed), len(tasks))
  episodes = agent.play(params, tasks, keys, greedy=greedy)
  scores = collections.defaultdict(list)
  for episode in episodes:
    for name in ('em', 'f1'):
      value = episode.metrics.get(name, 0.0)
      scores[f'val-core/all/{name}'].append(value)
      scores[f'val-core/{episode.task.dataset}/{name}'].append(value)
    em = episode.metrics.get('em', 0.0)
    scores[f'val-core/all/em_hops{episode.task.hops}'].append(em)
    scores['val-aux/num_turns/mean'].append(len(episode.turns))
    scores['val-aux/truncated'].append(float(episode.truncated))
    scores['val-aux/retrieval_failed'].append(float(episode.failed))
  return {name: float(np.mean(values)) for name, values in sorted(scores.items())}, episodes
