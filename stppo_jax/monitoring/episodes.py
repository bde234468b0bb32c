"""Metrics of a batch of episodes, and records of the episodes with per-token numbers."""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
from typing import Any

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.monitoring import metrics
from stppo_jax.rollout import batching
from stppo_jax.rollout import pipeline
from stppo_jax.runtime import hosts

_SHARES = ('invalid', 'repeated', 'empty', 'cut')  # of turns


def summarize(episodes: Sequence[types.Episode]) -> dict[str, float]:
  """Returns scores, lengths, turns, failures, and the mean of each metric of the environment.

  Core metrics are <name>/mean, the others env/<name>/mean. An episode that never reported a metric
  counts as 0.
  """
  of = lambda name: [episode.metrics.get(name, 0.0) for episode in episodes]
  mean = lambda name: float(np.mean(of(name)))
  count = lambda name: [episode.counts.get(name, 0.0) for episode in episodes]
  core = dict.fromkeys(name for episode in episodes for name in episode.core_metrics)
  reported = dict.fromkeys(name for episode in episodes for name in episode.metrics)
  agent_tokens = [sum(len(turn.tokens) for turn in episode.turns) for episode in episodes]
  all_turns = max(sum(len(episode.turns) for episode in episodes), 1)
  return {
      **metrics.summarize('critic/score', [episode.score for episode in episodes]),
      **metrics.summarize('response_length', agent_tokens),
      **metrics.summarize('prompt_length', [len(episode.prompt) for episode in episodes]),
      **metrics.summarize('num_turns', [len(episode.turns) for episode in episodes]),
      **{f'{name}/mean': mean(name) for name in core},
      **{f'env/{name}/mean': mean(name) for name in reported if name not in core},
      'env/invalid/mean': float(np.mean(count('invalid'))),
      **{f'env/{name}_share': sum(count(name)) / all_turns for name in _SHARES},
      'env/truncated': float(np.mean([episode.truncated for episode in episodes])),
      'env/retrieval_failed': pipeline.failed_share(episodes),
      'env/prompt_too_long': float(np.mean(count('prompt_too_long'))),
  }


def with_tokens(
    episodes: Sequence[types.Episode], tokenizer, batch, seen, n: int, has_values: bool
) -> list[dict]:
  """Returns the records of update n, with per-token numbers; ratios are those of the last epoch."""
  arrays = {'old_logp': batch.old_logp, 'advantages': batch.advantages}
  if has_values:
    arrays['values'] = batch.old_values
  arrays = hosts.fetch(arrays)
  arrays |= {
      'ratio': np.ones_like(arrays['old_logp']),
      'clipped': np.zeros_like(arrays['old_logp']),
  }
  for rows, step_seen in jax.device_get(seen).items():
    for name, x in step_seen.items():
      arrays[name][list(rows)] = x
  return batching.to_records(episodes, tokenizer, n, 'train', arrays)


def write(workdir: str, kind: str, n: int, records: Sequence[Mapping[str, Any]]) -> None:
  """Writes episodes/<kind>_<n>.jsonl, on the process that writes."""
  if not hosts.is_writer():
    return
  folder = os.path.join(workdir, 'episodes')
  os.makedirs(folder, exist_ok=True)
  with open(os.path.join(folder, f'{kind}_{n:06d}.jsonl'), 'w', encoding='utf-8') as file:
    file.writelines(json.dumps(record) + '\n' for record in records)
