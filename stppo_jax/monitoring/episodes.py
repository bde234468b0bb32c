"""What a run says of its episodes: metrics of a batch, and every episode with what training saw of it."""

import json
import os

import jax
import numpy as np

from stppo_jax.monitoring import metrics
from stppo_jax.rollout import batching
from stppo_jax.runtime import hosts


def summarize(episodes):
  """What the episodes were like: scores, lengths, turns, failures."""
  of = lambda name: [episode.metrics.get(name, 0.0) for episode in episodes]
  agent_tokens = [sum(len(turn.tokens) for turn in episode.turns) for episode in episodes]
  num_turns = max(sum(len(episode.turns) for episode in episodes), 1)
  return {
      **metrics.summarize('critic/score', [episode.score for episode in episodes]),
      **metrics.summarize('response_length', agent_tokens),
      **metrics.summarize('prompt_length', [len(episode.prompt) for episode in episodes]),
      **metrics.summarize('num_turns', [len(episode.turns) for episode in episodes]),
      'em/mean': float(np.mean(of('em'))),
      'f1/mean': float(np.mean(of('f1'))),
      'env/searches/mean': float(np.mean(of('searches'))),
      'env/invalid/mean': float(np.mean(of('invalid'))),
      **{
          f'env/{name}_share': sum(of(name)) / num_turns
          for name in ('invalid', 'repeated', 'empty', 'cut')
      },
      'env/truncated': float(np.mean([episode.truncated for episode in episodes])),
      'env/retrieval_failed': float(np.mean([episode.failed for episode in episodes])),
  }


def with_tokens(episodes, tokenizer, batch, seen, n, has_values):
  """The episodes with what training saw of each token; ratios are those of the last epoch."""
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


def write(workdir, kind, n, records):
  """Writes episodes/<kind>_<n>.jsonl, where this process is the one that writes."""
  if not hosts.is_writer():
    return
  folder = os.path.join(workdir, 'episodes')
  os.makedirs(folder, exist_ok=True)
  with open(os.path.join(folder, f'{kind}_{n:06d}.jsonl'), 'w', encoding='utf-8') as file:
    file.writelines(json.dumps(record) + '\n' for record in records)
