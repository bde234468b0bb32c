"""Episodes in, TurnBatch out: the one place where training data moves from host to device.

A row is   prompt | turn 1 | observation 1 | turn 2 | .. | turn K | padding
turn_ids   0 .. 0 | 1 .. 1 | 0 ..        0 | 2 .. 2 | .. | K .. K | 0 .. 0
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.models import decoder


@dataclasses.dataclass
class Sampled:
  """A batch of episodes that has not been trained on yet."""

  number: int  # counts from 1; determines the questions and the random key
  staleness: int  # updates between the parameters that sampled it and those that it trains
  episodes: list[types.Episode]
  measured: dict[str, float]  # metrics of the sampling: timing_s/gen.., perf/..


@dataclasses.dataclass(frozen=True)
class Unsampled:
  """A batch ahead that is still to be sampled."""

  number: int
  staleness: int
  params: object  # a `copy` of the parameters that will sample it


def batch_keys(seed: int, number: int) -> tuple[jax.Array, jax.Array]:
  """Returns the random keys of a batch, on the CPU: (of sampling, of the mini-batches)."""
  key = jax.random.fold_in(hosts.random_key(seed), number)
  sampling_key, mini_batch_key = jax.random.split(key)
  return sampling_key, mini_batch_key


def to_turn_batch(
    episodes: Sequence[types.Episode],
    length_buckets: Sequence[int],  # T is the smallest that holds the longest episode
    rows: int | None = None,  # B; None = len(episodes)
    pad_id: int = 0,
    sharding: jax.sharding.Sharding | None = None,  # row axis; None: the default device
    marks_demonstrations: bool = False,  # also a batch without any has the field `demonstrated`
) -> types.TurnBatch:
  """Pads the episodes to one length and moves them to the device. `minibatches.to_device` calls it.

  A turn's reward is stored at its last token. Failed and padding rows have a mask of 0, so no sum
  includes them. Choice: each of these rows has its own group, so that the baseline of a group is
  computed from real scores alone.
  """
  rows = len(episodes) if rows is None else rows
  if rows < 1 or rows < len(episodes):
    raise types.UserError(f'{len(episodes)} episodes do not fit in a batch of {rows} rows')
  unrolled = [episode.unroll() for episode in episodes]
  lengths = [len(tokens) for tokens, _, _ in unrolled]
  longest = max(lengths, default=0)
  fitting = [bucket for bucket in length_buckets if bucket >= longest]
  if not fitting:
    raise types.UserError(
        f'an episode of {longest} tokens fits in none of the length buckets '
        f'{tuple(length_buckets)}: add one, or lower max_total_tokens'
    )
  length = min(fitting)
  shapes = batch_shapes(rows, length)
  zeros = lambda leaf: np.zeros(leaf.shape, leaf.dtype)
  batch: Any = jax.tree.map(zeros, shapes)
  batch.tokens[:] = pad_id
  groups = [episode.group for episode in episodes]
  first_unused = max(groups, default=-1) + 1
  batch.group_ids[:] = np.arange(first_unused, first_unused + rows)
  for b, episode in enumerate(episodes):
    row_tokens, row_turn_ids, row_logp = unrolled[b]
    row_length = len(row_tokens)
    batch.tokens[b, :row_length] = row_tokens
    if not trained_length(episode):
      continue
    batch.turn_ids[b, :row_length] = row_turn_ids
    if not episode.demonstrated:  # else there is none
      batch.behaviour_logp[b, :row_length] = row_logp
    batch.group_ids[b] = episode.group
    batch.truncated[b] = episode.truncated
    end = len(episode.prompt)
    for turn in episode.turns:
      end += len(turn.tokens)
      batch.rewards[b, end - 1] = turn.reward
      end += len(turn.observation)
  batch.action_mask[:] = batch.turn_ids > 0
  routes = sampled_routes(episodes, (rows, length))
  roles = _role_masks(episodes, rows)
  batch = batch.replace(routes=routes, roles=roles)
  are_demonstrated = [episode.demonstrated for episode in episodes]
  if marks_demonstrations or any(are_demonstrated):
    demonstrated = np.zeros(rows, np.float32)
    demonstrated[: len(episodes)] = are_demonstrated
    batch = batch.replace(demonstrated=demonstrated)
  weights = [episode.weight for episode in episodes]
  if any(weight != 1 for weight in weights):
    row_weights = np.ones(rows, np.float32)
    row_weights[: len(episodes)] = weights
    batch = batch.replace(row_weights=row_weights)
  if all(episode.is_segment for episode in episodes):
    numbers: Any = [episode.number for episode in episodes]
    episode_ids = -1 - np.arange(rows, dtype=np.int32)
    episode_ids[: len(episodes)] = numbers
    offsets = _score_offsets(episodes, rows)
    batch = batch.replace(episode_ids=episode_ids, score_offsets=offsets)
  return hosts.put(batch, sharding)


def _role_masks(episodes, rows):
  """Returns {role: [B] 1 for its rows}; None if all rows have the same role."""
  masks: dict[str, np.ndarray] = {}
  for b, episode in enumerate(episodes):
    if episode.role not in masks:
      masks[episode.role] = np.zeros(rows, np.float32)
    masks[episode.role][b] = 1
  return masks if len(masks) > 1 else None


def _score_offsets(episodes, rows):
  """Returns each episode's score less the rewards of its rows [B]."""
  offsets = np.zeros(rows, np.float32)
  for numbers in rows_by_episode(episodes):
    trained = [b for b in numbers if trained_length(episodes[b])]
    rewards = sum(episodes[b].score for b in trained)
    for b in trained:
      whole_score: Any = episodes[b].whole_score  # each segment has one
      offsets[b] = whole_score - rewards
  return offsets


def rows_by_episode(episodes: Sequence[types.Episode]) -> list[np.ndarray]:
  """Returns the row numbers [rows] of each episode, in the order of their first rows.

  An episode has a row for each role, or for each segment of an agent program. Each round of
  sampling numbers its episodes from 0, and so do demonstrations. So a second row of a role with the
  same number and question belongs to another episode.
  """
  by_episode: dict[Any, list[int]] = collections.defaultdict(list)
  repeats: collections.Counter[Any] = collections.Counter()
  for b, episode in enumerate(episodes):
    if episode.number is None:
      by_episode['row', b].append(b)
      continue
    played = episode.number, episode.task.id, episode.demonstrated
    label = *played, episode.role
    by_episode[*played, repeats[label]].append(b)
    repeats[label] += not episode.is_segment
  numbers = by_episode.values()
  return [np.array(rows, np.int32) for rows in numbers]


def by_length(episodes: Sequence[types.Episode]) -> list[types.Episode]:
  """Sorts rows by length, so that rows of similar length may share a bin.

  The rows of an episode with several roles stay together, in the same order. The longest one
  counts.
  """
  if not any(episode.role for episode in episodes):
    return sorted(episodes, key=trained_length)

  def longest(rows):
    return max(trained_length(episodes[b]) for b in rows)

  order = sorted(rows_by_episode(episodes), key=longest)
  return [episodes[b] for b in np.concatenate(order)]


def trained_length(episode: types.Episode) -> int:
  """Returns the tokens of the episode up to the last that is trained on; 0 for a failed one."""
  if episode.failed or not episode.turns:
    return 0
  return len(episode.prompt) + episode.response_length


def sampled_routes(episodes: Sequence[types.Episode], shape: tuple[int, int]) -> np.ndarray | None:
  """Returns the sampler's experts of each token [B,T,L,A]; None if any turn is without them."""
  routes = None
  for b, episode in enumerate(episodes):
    end = 0  # The last observation has none, because the sampler does not read it.
    for turn in episode.turns:
      if turn.routes is None:
        return None
      if routes is None:
        experts = turn.routes.shape[1:]
        routes = np.zeros(shape + experts, turn.routes.dtype)
      start = end
      end += len(turn.routes)
      routes[b, start:end] = turn.routes
  return routes


def batch_shapes(
    rows: int,
    length: int,
    routed_model: decoder.ModelConfig | None = None,
    roles: Sequence[str] = (),
    marks_demonstrations: bool = False,
) -> types.TurnBatch:
  """Returns the batch that `to_turn_batch` makes, as ShapeDtypeStructs.

  For a mixture of experts `routed_model` the batch has the experts of each token, to be replayed.
  """
  shape: Any = jax.ShapeDtypeStruct
  real = shape((rows, length), np.float32)
  whole = shape((rows, length), np.int32)
  of_rows = shape((rows,), np.float32)
  routes = None
  if routed_model is not None:
    from stppo_jax.models import moe

    no_routes = functools.partial(moe.no_routes, routed_model, rows, length)
    routes = jax.eval_shape(no_routes)
  return types.TurnBatch(
      tokens=whole,
      action_mask=real,
      turn_ids=whole,
      rewards=real,
      old_logp=real,
      ref_logp=real,
      old_values=real,
      advantages=real,
      returns=real,
      group_ids=shape((rows,), np.int32),
      behaviour_logp=real,
      truncated=of_rows,
      routes=routes,
      roles={role: of_rows for role in roles} if len(roles) > 1 else None,
      demonstrated=of_rows if marks_demonstrations else None,
  )
