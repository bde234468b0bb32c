"""Episodes in, TurnBatch out: the one place where training data moves from host to device.

A row is   prompt | turn 1 | observation 1 | turn 2 | .. | turn K | padding
turn_ids   0 .. 0 | 1 .. 1 | 0 ..        0 | 2 .. 2 | .. | K .. K | 0 .. 0
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.distributed import hosts


def to_turn_batch(
    episodes: Sequence[types.Episode],
    length_buckets: Sequence[int],  # T is the smallest that holds the longest episode
    rows: int | None = None,  # B; None = len(episodes)
    pad_id: int = 0,
    sharding: jax.sharding.Sharding | None = None,  # of the row axis; None = the default device
) -> types.TurnBatch:
  """Pads the episodes to one length and moves them to the device.

  The reward of a turn stands on its last token. Failed episodes and padding rows have action_mask,
  turn_ids and rewards 0: they are in the batch, but in no sum. Choice: each of these rows is
  a group of its own, so that a group's baseline is that of its real scores.
  """
  rows = len(episodes) if rows is None else rows
  if not 0 < rows >= len(episodes):
    raise types.UserError(f'{len(episodes)} episodes do not fit in a batch of {rows} rows')
  unrolled = [episode.unroll() for episode in episodes]
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
      roles=_role_columns(episodes, rows),
      episode_ids=_episode_ids(episodes, rows),
      score_offsets=_score_offsets(episodes, rows),
  )
  return hosts.put(types.TurnBatch(**columns), sharding)


def _role_columns(episodes, rows):
  """Returns 1 for the role of each row [B,R], 0 for padding rows; None if all have the same role.

  Roles are in the order of their first rows, which is that of the environment.
  """
  roles = list(dict.fromkeys(episode.role for episode in episodes))
  if len(roles) < 2:
    return None
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


def rows_by_episode(episodes: Sequence[types.Episode]) -> list[np.ndarray]:
  """Returns the row numbers [rows] of each episode, in the order of their first rows.

  An episode has a row for each of its roles, or for each segment that an agent program made of it.
  Rounds of sampling use a number again. Then a role's second row of that number is of another
  episode.
  """
  rows: dict[Any, list[int]] = collections.defaultdict(list)
  seen: collections.Counter[tuple[int, str]] = collections.Counter()
  for b, episode in enumerate(episodes):
    if episode.number is None:
      rows['row', b].append(b)
      continue
    label = episode.number, episode.role
    rows[episode.number, seen[label]].append(b)
    seen[label] += bool(episode.role)
  return [np.array(of_one, np.int32) for of_one in rows.values()]


def by_length(episodes: Sequence[types.Episode]) -> list[types.Episode]:
  """Sorts rows by length, so that rows of similar length may share a bin.

  The rows of an episode's roles stay together, in the order of the roles. The longest one counts.
  """
  if not any(episode.role for episode in episodes):
    return sorted(episodes, key=trained_length)
  whole = [[episodes[b] for b in rows] for rows in rows_by_episode(episodes)]
  whole.sort(key=lambda rows: max(map(trained_length, rows)))
  return [row for rows in whole for row in rows]


def trained_length(episode: types.Episode) -> int:
  """Returns the tokens of the episode up to the last that is trained on; 0 for a failed one."""
  if episode.failed or not episode.turns:
    return 0
  turns = sum(len(turn.tokens) + len(turn.observation) for turn in episode.turns)
  return len(episode.prompt) + turns - len(episode.turns[-1].observation)


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


def _turn_ends(turn_ids: np.ndarray) -> np.ndarray:
  """Returns the columns of the last token of each turn."""
  return np.flatnonzero((turn_ids > 0) & (turn_ids != np.append(turn_ids[1:], 0)))
