"""Metrics of a batch of episodes, and records of the episodes with per-token numbers."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
import json
import os
import queue
import threading
from typing import Any

from absl import logging
import jax
import numpy as np

from stppo_jax import tokenizer as chat
from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.monitoring import metrics
from stppo_jax.rollout import pipeline

_SHARES = ('invalid', 'repeated', 'empty', 'cut')  # of turns


def summarize(episodes: Sequence[types.Episode]) -> dict[str, float]:
  """Returns scores, lengths, turns, failures, and the mean of each metric of the environment.

  Core metrics are <name>/mean, the others env/<name>/mean. An episode that never reported a metric
  counts as 0. Scores and metrics are means over episodes: an agent program's segments are rows of
  one. The other numbers are over rows. An environment with roles has a row per role: role/<name>/..
  are of its rows. Those of a role that never moved are counted, and are in no other number.
  """
  of_roles = _by_role(episodes)
  episodes = [episode for episode in episodes if not episode.absent]
  found = [episode.metrics for episode in episodes]
  per_episode = functools.partial(_per_episode, episodes)
  mean_of = lambda name: float(np.mean(per_episode(_values(found, name))))
  scores = [row.score if row.whole_score is None else row.whole_score for row in episodes]
  counts = [episode.counts for episode in episodes]
  core = dict.fromkeys(name for episode in episodes for name in episode.core_metrics)
  reported = dict.fromkeys(name for episode in episodes for name in episode.metrics)
  agent_tokens = [sum(len(turn.tokens) for turn in episode.turns) for episode in episodes]
  all_turns = max(sum(len(episode.turns) for episode in episodes), 1)
  return {
      **metrics.summarize('critic/score', per_episode(scores)),
      **metrics.summarize('response_length', [episode.response_length for episode in episodes]),
      **metrics.summarize('prompt_length', [len(episode.prompt) for episode in episodes]),
      **metrics.summarize('num_turns', [episode.num_messages for episode in episodes]),
      **metrics.summarize('stppo/agent_tokens', agent_tokens),
      **metrics.summarize('stppo/agent_turns', [len(episode.turns) for episode in episodes]),
      **{f'{name}/mean': mean_of(name) for name in core},
      **{f'env/{name}/mean': mean_of(name) for name in reported if name not in core},
      'env/invalid/mean': _mean(counts, 'invalid'),
      **{f'env/{name}_share': sum(_values(counts, name)) / all_turns for name in _SHARES},
      'env/truncated': float(np.mean([episode.truncated for episode in episodes])),
      'env/retrieval_failed': pipeline.failed_share(episodes),
      'env/environment_failed': pipeline.environment_failed_share(episodes),
      'env/prompt_too_long': _mean(counts, 'prompt_too_long'),
      **of_roles,
  }


def _by_role(episodes):
  """Returns score, turns, length and core metrics of each role; {} where there is one agent."""
  roles = dict.fromkeys(episode.role for episode in episodes if episode.role)
  metrics, all_tokens = {}, max(_num_tokens(episodes), 1)
  for role in roles:
    seats = [episode for episode in episodes if episode.role == role]
    rows = [episode for episode in seats if not episode.absent]
    metrics[f'role/{role}/absent'] = 1 - len(rows) / len(seats)
    metrics[f'role/{role}/token_share'] = _num_tokens(rows) / all_tokens
    if rows:
      means = {
          'score': np.mean([row.score for row in rows]),
          'agent_turns': np.mean([len(row.turns) for row in rows]),
          'agent_tokens': _num_tokens(rows) / len(rows),
      }
      means |= {name: _mean([row.metrics for row in rows], name) for name in rows[0].core_metrics}
      metrics |= {f'role/{role}/{name}/mean': float(x) for name, x in means.items()}
  return metrics


def _per_episode(episodes, values):
  """Returns the mean of `values` over the segments of each episode; a role's row stands alone."""
  parts = collections.defaultdict(list)
  for i, (episode, value) in enumerate(zip(episodes, values)):
    alone = episode.role or episode.number is None
    parts[('row', i) if alone else ('episode', episode.number)].append(value)
  return [float(np.mean(part)) for part in parts.values()]


def _num_tokens(episodes):
  return sum(len(turn.tokens) for episode in episodes for turn in episode.turns)


def _values(dicts, name):
  return [values.get(name, 0.0) for values in dicts]


def _mean(dicts, name):
  return float(np.mean(_values(dicts, name)))


class Records:
  """The records of a batch of episodes, made when they are first needed, by any thread."""

  def __init__(self, make: Callable[[], list[dict]] = list):
    self._make, self._lock = make, threading.Lock()
    self._made: list[dict] | None = None

  def get(self) -> list[dict]:
    """Returns one record per episode."""
    with self._lock:
      if self._made is None:
        self._made, self._make = self._make(), list
      return self._made


def joined(parts: Sequence[Records]) -> Records:
  """Returns the records of several policies, one after the other."""
  return parts[0] if len(parts) == 1 else Records(lambda: sum((part.get() for part in parts), []))


def with_tokens(
    sampled: pipeline.Sampled, tokenizer, batch, seen, n: int, has_values: bool
) -> Records:
  """Returns the records of update n, with per-token numbers; ratios are those of the last epoch.

  All processes call it: the numbers are gathered now.
  """
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
  return Records(lambda: of_batch(sampled, tokenizer, n, arrays))


def of_batch(
    sampled: pipeline.Sampled,
    tokenizer: chat.Tokenizer,
    n: int,
    per_token: Mapping[str, np.ndarray] | None = None,
) -> list[dict]:
  """Returns the records of a batch, which trajectories/saved.py reads."""
  origin = {'batch': sampled.number, 'staleness': sampled.staleness}
  records = to_records(sampled.episodes, tokenizer, n, 'train', per_token)
  return [record | origin for record in records]


def to_records(
    episodes: Sequence[types.Episode],
    tokenizer: chat.Tokenizer,
    step: int,
    kind: str,
    per_token: Mapping[str, np.ndarray] | None = None,
) -> list[dict]:
  """Returns the lines of episodes/*.jsonl: `Episode.to_dict`, texts, and numbers of the update.

  Args:
    episodes: a line each.
    tokenizer: gives the texts of the tokens.
    step: updates done.
    kind: 'train' | 'eval' | 'nonfinite'.
    per_token: arrays [B,T] of the episodes' batch: old_logp, values, advantages, ratio, clipped.
      The lines hold the agent's tokens, with six digits.
  """
  records = []
  for b, episode in enumerate(episodes):
    record = {'step': step, 'kind': kind, **episode.to_dict()}
    record['pieces'] = tokenizer.pieces(record['tokens'])
    columns = np.flatnonzero(record['turn_ids'])
    for name, array in (per_token or {}).items():
      row = np.asarray(array[b])[columns]
      record[name] = row.astype(int).tolist() if name == 'clipped' else [_rounded(x) for x in row]
    records.append(record)
  return records


def _rounded(x: float) -> float | None:
  """Returns a number with six digits; None if JSON cannot hold it."""
  return types.finite_or_none(f'{float(x):.6g}')


def write(workdir: str, kind: str, n: int, records: Records) -> str:
  """Writes episodes/<kind>_<n>.jsonl, whole or not at all; returns its path."""
  path = os.path.join(workdir, 'episodes', f'{kind}_{n:06d}.jsonl')
  write_file(path, records)
  return path


def write_file(path: str, records: Records) -> None:
  """Writes a line per record, whole or not at all."""
  os.makedirs(os.path.dirname(path), exist_ok=True)
  try:
    with open(path + '.part', 'w', encoding='utf-8') as file:
      file.writelines(json.dumps(record) + '\n' for record in records.get())
    os.replace(path + '.part', path)
  except OSError:
    with contextlib.suppress(OSError):
      os.remove(path + '.part')  # its space is needed
    raise


class Recorder:
  """Writes records in a thread, and never ends or stops a run; a context manager.

  A file that cannot be written is logged once and left out. Where the disk is too slow, waits for
  `put_s`, and then leaves records out.

  Args:
    workdir: the folder of the run.
    behind: batches that may wait to be written.
    put_s: time limit of waiting for a place in the queue.
    close_s: time limit of waiting for what is still to be written at the end.
  """

  def __init__(self, workdir: str, behind: int = 2, put_s: float = 5.0, close_s: float = 30.0):
    self._workdir, self._put_s, self._close_s = workdir, put_s, close_s
    self._queue: queue.Queue = queue.Queue(behind)
    self._told = self._is_slow = False
    self._thread = threading.Thread(target=self._run, daemon=True, name='episodes')
    self._thread.start()

  def put(self, kind: str, n: int, records: Records) -> None:
    """Hands over the records of episodes/<kind>_<n>.jsonl."""
    self._hand_over((kind, n, records), f'{kind}_{n:06d}.jsonl', self._put_s)

  def close(self) -> None:
    """Waits until all is written, or until the limit."""
    if self._hand_over(None, 'the last one', self._close_s):
      self._thread.join(self._close_s)

  def __enter__(self) -> 'Recorder':
    return self

  def __exit__(self, *unused_error: Any) -> None:
    self.close()

  def _hand_over(self, work, name, limit_s):
    try:
      # The end is waited for in any case: the last files are written before it.
      self._queue.put(work, timeout=0 if self._is_slow and work is not None else limit_s)
      self._is_slow = False
      return True
    except queue.Full:
      self._is_slow = True  # so that not every update waits
      self._tell(f'the disk is too slow: {name} waited for {limit_s:g} s')
      return False

  def _run(self):
    while work := self._queue.get():
      try:
        write(self._workdir, *work)
      except Exception as error:  # any: this thread must not end
        self._tell(f'{type(error).__name__}: {error}')

  def _tell(self, reason):
    if not self._told:
      logging.warning('records of episodes are left out (%s); training continues', reason)
    self._told = True
