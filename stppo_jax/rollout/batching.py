"""Episodes in, TurnBatch out: the one place where training data moves from host to device.

A row is   prompt | turn 1 | observation 1 | turn 2 | .. | turn K | padding
turn_ids   0 .. 0 | 1 .. 1 | 0 ..        0 | 2 .. 2 | .. | K .. K | 0 .. 0
"""

import base64
from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any
import zlib

import chex
import jax
import numpy as np

from stppo_jax import tokenizer as chat
from stppo_jax import types
from stppo_jax.distributed import hosts

_MOST_EXPERTS = 1 << 14  # of a token, in all layers


def to_turn_batch(
    episodes: Sequence[types.Episode],
    length_buckets: Sequence[int],  # T is the smallest that holds the longest episode
    rows: int | None = None,  # B; None = len(episodes)
    pad_id: int = 0,
    sharding: jax.sharding.Sharding | None = None,  # of the row axis; None = the default device
    roles: Sequence[str] = (),  # of the episodes, in the order of their columns
) -> types.TurnBatch:
  """Pads the episodes to one length and moves them to the device.

  The reward of a turn stands on its last token. Failed episodes and padding rows have action_mask,
  turn_ids and rewards 0: they are in the batch, but in no sum. Choice: each of these rows is
  a group of its own, so that a group's baseline is that of its real scores.
  """
  rows = len(episodes) if rows is None else rows
  if not 0 < rows >= len(episodes):
    raise types.UserError(f'{len(episodes)} episodes do not fit in a batch of {rows} rows')
  unrolled = [unroll(episode) for episode in episodes]
  longest = max((len(tokens) for tokens, _, _ in unrolled), default=0)
  length = min((b for b in length_buckets if b >= longest), default=None)
  if length is None:
    raise types.UserError(
        f'an episode of {longest} tokens fits in none of the length buckets '
        f'{tuple(length_buckets)}: add one, or lower max_total_tokens'
    )
  tokens = np.full((rows, length), pad_id, np.int32)
  turn_ids = np.zeros((rows, length), np.int32)
  rewards, behaviour_logp = np.zeros((2, rows, length), np.float32)
  fresh = max((episode.group for episode in episodes), default=-1) + 1
  group_ids = np.arange(fresh, fresh + rows, dtype=np.int32)
  truncated = np.zeros(rows, np.float32)
  for b, (episode, (row_tokens, row_turn_ids, row_logp)) in enumerate(zip(episodes, unrolled)):
    tokens[b, : len(row_tokens)] = row_tokens
    if episode.failed or not row_turn_ids.any():
      continue
    turn_ids[b, : len(row_tokens)] = row_turn_ids
    behaviour_logp[b, : len(row_tokens)] = row_logp
    for turn, end in zip(episode.turns, _turn_ends(row_turn_ids), strict=True):
      rewards[b, end] = turn.reward
    group_ids[b], truncated[b] = episode.group, episode.truncated
  routes = _routes(episodes, (rows, length))
  empty = lambda: np.zeros((rows, length), np.float32)  # each its own: batches may be donated
  columns: dict[str, Any] = dict(  # NumPy arrays, until `put`
      tokens=tokens,
      action_mask=(turn_ids > 0).astype(np.float32),
      turn_ids=turn_ids,
      rewards=rewards,
      old_logp=empty(),
      ref_logp=empty(),
      old_values=empty(),
      advantages=empty(),
      returns=empty(),
      group_ids=group_ids,
      behaviour_logp=behaviour_logp,
      truncated=truncated,
      routes=routes,
      roles=_of_roles(episodes, rows, roles) if roles else None,
      episode_ids=_episode_ids(episodes, rows),
      score_offsets=_score_offsets(episodes, rows),
  )
  return hosts.put(types.TurnBatch(**columns), sharding)


def _of_roles(episodes, rows, roles):
  """Returns 1 for the role of each row [B,R]; 0 for padding rows."""
  columns = np.zeros((rows, len(roles)), np.float32)
  for b, episode in enumerate(episodes):
    columns[b, roles.index(episode.role)] = 1
  return columns


def _episode_ids(episodes, rows):
  """Returns the episode of each row [B] where programs played them, else None."""
  if not _have_rows(episodes):
    return None
  padding = range(-1, len(episodes) - rows - 1, -1)
  return np.array([*(episode.number for episode in episodes), *padding], np.int32)


def _have_rows(episodes):
  """Returns whether these are rows of episodes that may have several."""
  return all(episode.number is not None and not episode.role for episode in episodes)


def _score_offsets(episodes, rows):
  """Returns each episode's score less the rewards of its rows [B]; None where a row is an episode.

  Choice: the score of rows that were saved without one (version 0.7) is their mean, as it was then.
  """
  if not _have_rows(episodes):
    return None
  earned: dict[int | None, list[float]] = {}
  for episode in episodes:
    if trained_length(episode):
      earned.setdefault(episode.number, []).append(episode.score)
  offsets = np.zeros(rows, np.float32)
  for b, episode in enumerate(episodes):
    if trained_length(episode):
      scores = earned[episode.number]
      whole = episode.whole_score
      offsets[b] = (sum(scores) / len(scores) if whole is None else whole) - sum(scores)
  return offsets


def rows_by_episode(episodes: Sequence[types.Episode], num_roles: int = 1) -> list[np.ndarray]:
  """Returns the row numbers [rows] of each episode, in the order of their first rows.

  The rows of an episode's roles follow each other. Those of a program's segments may be anywhere.
  """
  if num_roles > 1 or not _have_rows(episodes):
    return list(np.arange(len(episodes), dtype=np.int32).reshape(-1, num_roles))
  rows: dict[int | None, list[int]] = {}
  for b, episode in enumerate(episodes):
    rows.setdefault(episode.number, []).append(b)
  return [np.array(of_one, np.int32) for of_one in rows.values()]


def trained_length(episode: types.Episode) -> int:
  """Returns the tokens of the episode up to the last that is trained on; 0 for a failed one."""
  if episode.failed or not episode.turns:
    return 0
  turns = sum(len(turn.tokens) + len(turn.observation) for turn in episode.turns)
  return len(episode.prompt) + turns - len(episode.turns[-1].observation)


def unroll(episode: types.Episode) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns an episode as one row [length]: tokens, turn_ids int32 and behaviour_logp float32."""
  tokens, turn_ids, logp = [episode.prompt], [np.zeros(len(episode.prompt))], []
  logp.append(np.zeros(len(episode.prompt)))
  for k, turn in enumerate(episode.turns, start=1):
    chex.assert_equal_shape([turn.tokens, turn.logp])
    tokens += [turn.tokens, turn.observation]
    turn_ids += [np.full(len(turn.tokens), k), np.zeros(len(turn.observation))]
    logp += [turn.logp, np.zeros(len(turn.observation))]
  return (
      np.concatenate(tokens).astype(np.int32),
      np.concatenate(turn_ids).astype(np.int32),
      np.concatenate(logp).astype(np.float32),
  )


def _routes(episodes, shape):
  """Returns the sampler's experts of each token [B,T,L,A], None where they were not recorded."""
  recorded = [[turn.routes for turn in episode.turns] for episode in episodes]
  first = next((routes for turns in recorded for routes in turns), None)
  if first is None:
    return None
  whole = np.zeros((*shape, *first.shape[1:]), first.dtype)
  for b, turns in enumerate(recorded):
    if turns:
      row = np.concatenate(turns)  # the observation after the last turn was never read
      whole[b, : len(row)] = row
  return whole


def to_records(
    episodes: Sequence[types.Episode],
    tokenizer: chat.Tokenizer,
    step: int,
    kind: str,  # 'train' | 'eval'
    per_token: Mapping[str, np.ndarray] | None = None,  # name -> [B,T] as in the episodes' batch
) -> list[dict]:
  """Returns the lines of episodes/*.jsonl. Per-token numbers are listed for agent tokens only.

  `per_token` may hold old_logp, values, advantages, ratio, clipped. What is not finite is None.
  What `from_records` needs is exact; other numbers have six digits.
  """
  records = []
  for b, episode in enumerate(episodes):
    tokens, turn_ids, behaviour_logp = unroll(episode)
    columns = np.flatnonzero(turn_ids)
    record = {
        'step': step,
        'kind': kind,
        'task': episode.task.id,
        'dataset': episode.task.dataset,
        'hops': episode.task.hops,
        'question': episode.task.question,
        'answers': list(episode.task.answers),
        'group': int(episode.group),
        'score': _number(episode.score),
        'right': episode.main_score > 0,
        'metrics': {name: _exact(x) for name, x in episode.metrics.items()},
        'core_metrics': list(episode.core_metrics),
        'counts': {name: _exact(x) for name, x in episode.counts.items()},
        'failed': bool(episode.failed),
        'truncated': bool(episode.truncated),
        'tokens': tokens.tolist(),
        'pieces': tokenizer.pieces(tokens),
        'turn_ids': turn_ids.tolist(),
        'actions': [turn.action for turn in episode.turns],
        'rewards': [_exact(turn.reward) for turn in episode.turns],
        'behaviour_logp': [_exact(str(x)) for x in behaviour_logp[columns]],  # nine digits at most
    }
    if episode.role:
      record['role'] = episode.role
    if episode.number is not None:
      record['of_episode'] = episode.number
    if episode.whole_score is not None:
      record['whole_score'] = _exact(episode.whole_score)
    if episode.error:
      record['error'] = episode.error
    if any(turn.routes is not None for turn in episode.turns):
      record['routes'] = [packed(turn.routes) for turn in episode.turns]
    for name, array in (per_token or {}).items():
      row = np.asarray(array[b])[columns]
      record[name] = row.astype(int).tolist() if name == 'clipped' else [_number(x) for x in row]
    records.append(record)
  return records


def from_records(records: Sequence[Mapping[str, Any]]) -> list[types.Episode]:
  """Inverts `to_records`, exactly, but for what a task holds besides its question and answers.

  A log-prob that is None becomes NaN.
  """
  ids = lambda values: np.array(values, np.int32)
  episodes = []
  for record in records:
    tokens, turn_ids = ids(record['tokens']), ids(record['turn_ids'])
    logp = np.full(tokens.shape, np.nan, np.float32)
    logp[turn_ids > 0] = np.array(record['behaviour_logp'], np.float32)
    num_turns = int(turn_ids.max(initial=0))
    if num_turns > len(record['actions']):
      raise ValueError(f'turn {num_turns} of {len(record["actions"])}')
    starts = [int(np.argmax(turn_ids == k)) for k in range(1, num_turns + 1)]
    routes = record.get('routes', [None] * len(starts))
    turns = []
    for k, (start, end) in enumerate(zip(starts, [*starts[1:], len(tokens)]), start=1):
      stop = start + int(np.sum(turn_ids == k))
      turns.append(
          types.Turn(
              tokens[start:stop],
              logp[start:stop],
              tokens[stop:end],
              record['actions'][k - 1],
              record['rewards'][k - 1],
              unpacked(routes[k - 1], len(tokens)),
          )
      )
    task = types.Task(
        record['task'],
        record['question'],
        tuple(record['answers']),
        record['dataset'],
        hops=record['hops'],
    )
    episodes.append(
        types.Episode(
            task,
            record['group'],
            tokens[: starts[0] if starts else len(tokens)],
            turns,
            record['truncated'],
            record['failed'],
            dict(record['metrics']),
            dict(record['counts']),
            tuple(record['core_metrics']),
            record.get('role', ''),
            record.get('of_episode'),
            record.get('whole_score'),
            record.get('error', ''),
        )
    )
  return episodes


def packed(array: np.ndarray | None) -> list | None:
  """Returns an array of small whole numbers as JSON values: compressed, in base64."""
  if array is None:
    return None
  text = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 1)).decode('ascii')
  return [array.dtype.name, list(array.shape), text]


def unpacked(record: list | None, most_tokens: float = math.inf) -> np.ndarray | None:
  """Inverts `packed`, of the experts [n,L,A] of at most `most_tokens`.

  ValueError: the record is of another shape. A few bytes may claim to hold any number of experts,
  of which no more than the shape says are unpacked.
  """
  if record is None:
    return None
  name, shape, text = record
  dtype = np.dtype(name)
  fits = len(shape) == 3 and 0 <= shape[0] <= most_tokens
  if not fits or not 0 <= shape[1] * shape[2] <= _MOST_EXPERTS:
    raise ValueError(f'routes of shape {shape!r:.60}, of {most_tokens} tokens')
  if dtype.kind not in 'iu':
    raise ValueError(f'{name!r}: whole numbers are needed')
  size = math.prod(shape) * dtype.itemsize
  data = zlib.decompressobj().decompress(base64.b64decode(text), size + 1)
  return np.frombuffer(data, dtype).reshape(shape)


def _turn_ends(turn_ids: np.ndarray) -> np.ndarray:
  """Returns the columns of the last token of each turn."""
  return np.flatnonzero((turn_ids > 0) & (turn_ids != np.append(turn_ids[1:], 0)))


def _exact(x) -> float | None:
  """Returns a number as it is; None for what JSON cannot hold."""
  return float(x) if math.isfinite(float(x)) else None


def _number(x) -> float | None:
  """Rounds to six digits; returns None for what JSON cannot hold."""
  return float(f'{float(x):.6g}') if math.isfinite(x) else None
