"""Metrics of a batch of episodes, and records of the episodes with per-token numbers."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import json
import os
import queue
import threading
from typing import Any

from absl import logging
import jax
import numpy as np

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.rollout import batches
from stppo_jax.rollout import batching
from stppo_jax.text import tokenizer as tokenizer_lib

_TURN_SHARES = ('invalid', 'repeated', 'empty', 'cut')
_OTHER_COUNTS = (*_TURN_SHARES, 'prompt_too_long', 'program_failed')


def summarize_update(episodes: Sequence[types.Episode]) -> dict[str, float]:
  """Returns `summarize` of the sampled rows; number and mean score of the demonstrations."""
  demonstrations = [episode for episode in episodes if episode.demonstrated]
  if not demonstrations:
    return summarize(episodes)
  sampled = [episode for episode in episodes if not episode.demonstrated]
  metrics = summarize(sampled)
  trained = [episode for episode in demonstrations if batching.trained_length(episode)]
  metrics['demonstrations/rows'] = len(trained)
  if trained:
    scores = [episode.score for episode in trained]
    metrics['demonstrations/score/mean'] = _mean(scores)
  return metrics


def turn_ages(episodes: Sequence[types.Episode], update: int) -> dict[str, float]:
  """Returns the updates between the weights that sampled a turn and those that update n trains.

  {} where turns do not record the version of their weights.
  """
  turns = [turn for episode in episodes for turn in episode.turns]
  ages = [update - 1 - turn.version for turn in turns if turn.version is not None]
  return metrics_lib.summarize('engine/turn_age', ages) if ages else {}


def summarize(episodes: Sequence[types.Episode]) -> dict[str, float]:
  """Returns scores, lengths, turns, failures, and the mean of each metric of the environment.

  Core metrics are <name>/mean, the others env/<name>/mean, and the counts of an agent program
  program/<name>/mean. An episode that never reported a metric counts as 0, if another episode of
  its environment did. Scores and metrics are means over episodes, of which an agent program's may
  have several rows. The other numbers are means over rows. The environments of a mix have
  mix/<environment>/.., as roles have role/<role>/...
  """
  rows = [episode for episode in episodes if not episode.absent]
  groups: Any = np.arange(len(rows))[:, None]
  if any(row.is_segment for row in rows):
    groups = batching.rows_by_episode(rows)

  def by_episode(values):
    """Returns the mean of the rows' values in each episode of an agent program; others are rows."""
    values = np.array(values, np.float64)
    return [values[group].mean() for group in groups]

  def counts(name):
    return [row.counts.get(name, 0.0) for row in rows]

  scores = [row.score if row.whole_score is None else row.whole_score for row in rows]
  lengths = {
      'response_length': [row.response_length for row in rows],
      'prompt_length': [len(row.prompt) for row in rows],
      'num_turns': [row.num_messages for row in rows],
      'stppo/agent_tokens': [_num_tokens(row) for row in rows],
      'stppo/agent_turns': [len(row.turns) for row in rows],
  }
  metrics = metrics_lib.summarize('critic/score', by_episode(scores))
  for name, values in lengths.items():
    metrics |= metrics_lib.summarize(name, values)
  core = dict.fromkeys(name for row in rows for name in row.core_metrics)
  reported = dict.fromkeys(name for row in rows for name in row.metrics)
  reported_by = reported_metrics(rows)
  for name in core | reported:
    prefix = '' if name in core else 'env/'
    values = []
    for row in rows:
      if name in row.core_metrics or name in reported_by[row.task.environment]:
        values.append(row.metrics.get(name, 0.0))
    if len(values) == len(rows):  # else the rows are those of a mix, which has no agent programs
      values = by_episode(values)
    metrics[f'{prefix}{name}/mean'] = _mean(values)
  for name, values in program_counts(rows).items():
    metrics[f'program/{name}/mean'] = _mean(by_episode(values))
  num_turns = max(sum(lengths['stppo/agent_turns']), 1)
  for name in _TURN_SHARES:
    metrics[f'env/{name}_share'] = sum(counts(name)) / num_turns
  truncated = [row.truncated for row in rows]
  metrics['env/truncated'] = _mean(truncated)
  metrics['env/retrieval_failed'] = batches.failed_share(rows)
  metrics['env/environment_failed'] = batches.environment_failed_share(rows)
  metrics['env/prompt_too_long'] = _mean(counts('prompt_too_long'))
  num_tokens = max(sum(lengths['stppo/agent_tokens']), 1)
  parts: dict[str, list[types.Episode]] = {}
  for episode in episodes:
    if episode.role:
      parts.setdefault(f'role/{episode.role}', []).append(episode)
    if episode.task.environment:
      parts.setdefault(f'mix/{episode.task.environment}', []).append(episode)
  for part, part_episodes in parts.items():
    for name, number in _part_metrics(part_episodes, num_tokens).items():
      metrics[f'{part}/{name}'] = number
  return metrics


def reported_metrics(episodes: Sequence[types.Episode]) -> dict[str, set[str]]:
  """Returns the names of the metrics that the episodes of each environment reported."""
  names: dict[str, set[str]] = collections.defaultdict(set)
  for episode in episodes:
    names[episode.task.environment].update(episode.metrics)
  return names


def program_counts(rows: Sequence[types.Episode]) -> dict[str, list[float]]:
  """Returns what was counted in the episodes of an agent program, by name, with a value per row."""
  names = dict.fromkeys(name for row in rows for name in row.counts if name not in _OTHER_COUNTS)
  return {name: [row.counts.get(name, 0.0) for row in rows] for name in names}


def _part_metrics(episodes, num_tokens):
  """Returns share of the tokens, score, turns, length and core metrics of a role or environment.

  `absent` is the share of rows whose role never moved. The other numbers are over the other rows.
  """
  rows = [episode for episode in episodes if not episode.absent]
  own_tokens = sum(map(_num_tokens, rows))
  metrics = {}
  if episodes[0].role:
    metrics['absent'] = 1 - len(rows) / len(episodes)
  metrics['token_share'] = own_tokens / num_tokens
  if rows:
    scores = [row.score for row in rows]
    num_turns = [len(row.turns) for row in rows]
    metrics['score/mean'] = _mean(scores)
    metrics['agent_turns/mean'] = _mean(num_turns)
    metrics['agent_tokens/mean'] = own_tokens / len(rows)
    for name in dict.fromkeys(name for row in rows for name in row.core_metrics):
      values = [row.metrics.get(name, 0.0) for row in rows if name in row.core_metrics]
      metrics[f'{name}/mean'] = _mean(values)
  return metrics


def _mean(values):
  return float(np.mean(values))


def _num_tokens(row):
  """Returns the number of tokens that the agent sampled."""
  return sum(len(turn.tokens) for turn in row.turns)


Records = Callable[[], list[dict]]  # makes the records of a batch, one per episode, by any thread


def join_records(parts: Sequence[Records]) -> Records:
  """Returns the records of several policies, one after the other."""
  if len(parts) == 1:
    return parts[0]
  return lambda: [record for part in parts for record in part()]


def update_records(
    sampled: batching.Sampled,
    tokenizer: tokenizer_lib.Tokenizer,
    batch: types.TurnBatch,
    steps: Sequence[types.StepMetrics],
    n: int,
    has_values: bool,
) -> Records:
  """Returns the records of update n, with per-token numbers; ratios are those of the last epoch.

  All processes call it, because it gathers the numbers from the devices now.
  """
  arrays = {'old_logp': batch.old_logp, 'advantages': batch.advantages}
  if has_values:
    arrays['values'] = batch.old_values
  per_token = dict(hosts.fetch(arrays))
  per_token['ratio'] = np.ones_like(per_token['old_logp'])
  per_token['clipped'] = np.zeros_like(per_token['old_logp'])
  for step in steps:  # a later epoch replaces an earlier one
    rows = np.asarray(step.rows)
    tokens = jax.device_get(dict(step.tokens))
    for name, x in tokens.items():
      per_token[name][rows] = x
  return functools.cache(lambda: batch_records(sampled, tokenizer, n, per_token=per_token))


def batch_records(
    sampled: batching.Sampled,
    tokenizer: tokenizer_lib.Tokenizer,
    n: int,
    kind: str = 'train',
    per_token: Mapping[str, np.ndarray] | None = None,
) -> list[dict]:
  """Returns the records of a batch, which rollout/saved.py reads."""
  origin = {'batch': sampled.number, 'staleness': sampled.staleness}
  records = to_records(sampled.episodes, tokenizer, n, kind, per_token)
  return [record | origin for record in records]


def to_records(
    episodes: Sequence[types.Episode],
    tokenizer: tokenizer_lib.Tokenizer,
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
      if name == 'clipped':
        record[name] = row.astype(int).tolist()
      else:
        digits = [f'{x:.6g}' for x in row.astype(float)]
        record[name] = list(map(types.finite_or_none, digits))
    records.append(record)
  return records


def record_path(workdir: str, kind: str, n: int) -> str:
  """Returns the path of episodes/<kind>_<n>.jsonl."""
  return os.path.join(workdir, 'episodes', f'{kind}_{n:06d}.jsonl')


def write_lines(path: str, records: Sequence[dict]) -> None:
  """Writes one line per record. A reader sees the whole file or none."""
  os.makedirs(os.path.dirname(path), exist_ok=True)
  lines = (json.dumps(record) + '\n' for record in records)
  workdir_lib.write_parts(path, lines)


class Recorder:
  """Writes records in a thread, and never stops a run. A context manager.

  If a file cannot be written, the recorder logs it once and leaves the file out. If the disk is too
  slow, the recorder waits for `put_s`, and then leaves files out.

  Args:
    workdir: the folder of the run.
    behind: batches that may wait to be written.
    put_s: time limit of waiting for a place in the queue.
    close_s: time limit of waiting for the remaining files at the end.
  """

  def __init__(self, workdir: str, behind: int = 2, put_s: float = 5.0, close_s: float = 30.0):
    self._workdir = workdir
    self._put_s = put_s
    self._close_s = close_s
    self._queue: queue.Queue[tuple[str, Records] | None] = queue.Queue(behind)
    self._has_warned = False
    self._is_slow = False
    self._thread = threading.Thread(target=self._run, daemon=True, name='episodes')
    self._thread.start()

  def put(self, kind: str, n: int, records: Records) -> None:
    """Queues the records of episodes/<kind>_<n>.jsonl."""
    path = record_path(self._workdir, kind, n)
    limit_s = 0.0 if self._is_slow else self._put_s  # so that not every update waits
    work = (path, records)
    self._is_slow = not self._enqueue(work, limit_s)

  def close(self) -> None:
    """Waits until all files are written, or until the time limit."""
    if self._enqueue(None, self._close_s):
      self._thread.join(self._close_s)

  def __enter__(self) -> 'Recorder':
    return self

  def __exit__(self, *unused_error: Any) -> None:
    self.close()

  def _enqueue(self, work, limit_s):
    """Returns whether the work found a place in time. None ends the thread."""
    try:
      self._queue.put(work, timeout=limit_s)
      return True
    except queue.Full:
      name = os.path.basename(work[0]) if work else 'the last one'
      self._warn(f'the disk is too slow: {name} waited for {limit_s:g} s')
      return False

  def _run(self) -> None:
    while work := self._queue.get():
      path, records = work
      try:
        write_lines(path, records())
      except Exception as error:  # the thread must not end
        self._warn(f'{type(error).__name__}: {error}')

  def _warn(self, reason: str) -> None:
    if not self._has_warned:
      logging.warning('records of episodes are left out (%s); training continues', reason)
    self._has_warned = True
