"""Metrics per role, for environments with several roles. All other metrics ignore the labels."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from stppo_jax import types

# Metrics of an update -> their names below role/<role>/.
UPDATE_METRICS = {
    'actor/pg_loss': 'pg_loss',
    'actor/pg_clipfrac': 'pg_clipfrac',
    'actor/ppo_kl': 'ppo_kl',
    'actor/entropy': 'entropy',
    'critic/vf_loss': 'vf_loss',
    'critic/vf_explained_var': 'vf_explained_var',
    'critic/advantages/mean': 'advantages/mean',
    'critic/returns/mean': 'returns/mean',
    'critic/values/mean': 'values/mean',
    'stppo/step_norm': 'step_norm',
    'stppo/grad_norm': 'grad_norm',
}


def episode_metrics(episodes: Sequence[types.Episode]) -> dict[str, float]:
  """Returns score, turns, length and core metrics of each role; {} if there is one agent.

  `role/<role>/absent` is the share of episodes in which the role never moved. The other numbers are
  over the rows in which it did.
  """
  metrics: dict[str, float] = {}
  num_tokens = max(_num_tokens(episodes), 1)
  for role in dict.fromkeys(episode.role for episode in episodes if episode.role):
    all_rows = [episode for episode in episodes if episode.role == role]
    rows = [episode for episode in all_rows if not episode.absent]
    metrics[f'role/{role}/absent'] = 1 - len(rows) / len(all_rows)
    metrics[f'role/{role}/token_share'] = _num_tokens(rows) / num_tokens
    if not rows:
      continue
    means: dict[str, Any] = {
        'score': np.mean([row.score for row in rows]),
        'agent_turns': np.mean([len(row.turns) for row in rows]),
        'agent_tokens': _num_tokens(rows) / len(rows),
    }
    for name in rows[0].core_metrics:
      means[name] = np.mean([row.metrics.get(name, 0.0) for row in rows])
    metrics |= {f'role/{role}/{name}/mean': float(x) for name, x in means.items()}
  return metrics


def held_out_scores(episodes: Sequence[types.Episode]) -> dict[str, float]:
  """Returns val-role/<role>/<name>, means of score and core metrics over the rows of each role."""
  values: dict[str, list[float]] = {}
  for episode in episodes:
    if episode.role:
      core = {name: episode.metrics.get(name, 0.0) for name in episode.core_metrics}
      for name, value in {**core, 'score': episode.score}.items():
        values.setdefault(f'val-role/{episode.role}/{name}', []).append(value)
  return {name: float(np.mean(x)) for name, x in values.items()}


def update_metrics(role: str, metrics: Mapping[str, Any]) -> dict[str, float]:
  """Returns the metrics of an update of one role's own policy, under the role's name."""
  return {
      f'role/{role}/{short}': float(metrics[name])
      for name, short in UPDATE_METRICS.items()
      if name in metrics
  }


def _num_tokens(episodes: Sequence[types.Episode]) -> int:
  return sum(len(turn.tokens) for episode in episodes for turn in episode.turns)
