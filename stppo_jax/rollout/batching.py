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
    sharding: jax.sharding.Sharding | None = None,  # row axis; None: the default device
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
  rewards = np.zeros((rows, length), np.float32)
  behaviour_logp = np.zeros((rows, length), np.float32)
  first_unused = max((episode.group for episode in episodes), default=-1) + 1
  group_ids = np.arange(first_unused, first_unused + rows, dtype=np.int32)
  truncated = np.zeros(rows, np.float32)
  for b, (episode, unrolled_row) in enumerate(zip(episodes, unrolled)):
    row_tokens, row_turn_ids, row_logp = unrolled_row
    place = b, slice(len(row_tokens))
    tokens[place] = row_tokens
    if not trained_length(episode):
      continue
    turn_ids[place] = row_turn_ids
    behaviour_logp[place] = row_logp
    group_ids[b] = episode.group
    truncated[b] = episode.truncated
    end = len(episode.prompt)
    for turn in episode.turns:
      end += len(turn.tokens)
      rewards[b, end - 1] = turn.reward
      end += len(turn.observation)
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
      routes=_routes(episodes, (rows, length)),
      roles=_role_masks(episodes, rows),
  )
  if all(episode.is_segment for episode in episodes):
    padding = np.arange(-1, len(episodes) - rows - 1, -1)
    numbers = [episode.number for episode in episodes]
    columns['episode_ids'] = np.concatenate([numbers, padding]).astype(np.int32)
    columns['score_offsets'] = _score_offsets(episodes, rows)
  return hosts.put(types.TurnBatch(**columns), sharding)


def _role_masks(episodes, rows):
  """Returns {role: [B] 1 for its rows}; None if all rows have the same role."""
  masks: dict[str, np.ndarray] = {}
  for b, episode in enumerate(episodes):
    mask = masks.setdefault(episode.role, np.zeros(rows, np.float32))
    mask[b] = 1
  return masks if len(masks) > 1 else None


def _score_offsets(episodes, rows):
  """Returns each episode's score less the rewards of its rows [B].

  Choice: the score of rows that were saved without one (version 0.7) is their mean, as it was then.
  """
  offsets = np.zeros(rows, np.float32)
  for numbers in rows_by_episode(episodes):
    trained = [b for b in numbers if trained_length(episodes[b])]
    scores = [episodes[b].score for b in trained]
    for b in trained:
      score = episodes[b].whole_score
      if score is None:
        score = sum(scores) / len(scores)
      offsets[b] = score - sum(scores)
  return offsets


def rows_by_episode(episodes: Sequence[types.Episode]) -> list[np.ndarray]:
  """Returns the row numbers [rows] of each episode, in the order of their first rows.

  An episode has a row for each role, or for each segment that an agent program made of it. Rounds
  of sampling use a number again. So the second row of a role with that number belongs to another
  episode.
  """
  by_episode: dict[Any, list[int]] = collections.defaultdict(list)
  repeats: collections.Counter[tuple[int, str]] = collections.Counter()
  for b, episode in enumerate(episodes):
    if episode.number is None:
      by_episode['row', b].append(b)
      continue
    label = episode.number, episode.role
    by_episode[episode.number, repeats[label]].append(b)
    repeats[label] += not episode.is_segment
  return [np.array(rows, np.int32) for rows in by_episode.values()]


def by_length(episodes: Sequence[types.Episode]) -> list[types.Episode]:
  """Sorts rows by length, so that rows of similar length may share a bin.

  The rows of an episode with several roles stay together, in their order. The longest one counts.
  """
  if not any(episode.role for episode in episodes):
    return sorted(episodes, key=trained_length)
  longest = lambda rows: max(trained_length(episodes[b]) for b in rows)
  order = sorted(rows_by_episode(episodes), key=longest)
  return [episodes[b] for b in np.concatenate(order)]


def trained_length(episode: types.Episode) -> int:
  """Returns the tokens of the episode up to the last that is trained on; 0 for a failed one."""
  if episode.failed or not episode.turns:
    return 0
  length = len(episode.prompt) - len(episode.turns[-1].observation)
  for turn in episode.turns:
    length += len(turn.tokens) + len(turn.observation)
  return length


def _routes(episodes, shape):
  """Returns the sampler's experts of each token [B,T,L,A], None where they were not recorded."""
  routes = None
  for b, episode in enumerate(episodes):
    parts = [turn.routes for turn in episode.turns]
    if parts and parts[0] is not None:
      row = np.concatenate(parts)  # the observation after the last turn was never read
      if routes is None:
        routes = np.zeros((*shape, *row.shape[1:]), row.dtype)
      routes[b, : len(row)] = row
  return routes
