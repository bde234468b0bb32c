"""Mini-batches: splits the rows of a batch into optimizer steps and moves them to the devices.

Episodes in, TurnBatch and OptimizerSteps out, on the host. packing.py has the bins of a step.
"""

import collections
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.models import decoder
from stppo_jax.rollout import batching
from stppo_jax.training import packing
from stppo_jax.training.packing import OptimizerStep


@dataclasses.dataclass(frozen=True)
class Bins:
  """How a batch of episodes is split into optimizer steps and packed."""

  mini_batch: int  # episodes per optimizer step, with all of their rows
  epochs: int  # passes over the batch
  micro_batch: int  # bins computed together
  length_buckets: tuple[int, ...]  # tokens per bin, rising; the last holds every row
  pad_id: int
  sharding: jax.sharding.Sharding  # the layout of the batch's rows
  shared: bool = True  # whether a bin may hold several rows
  share_prefixes: bool = False  # whether its rows may share places
  whole_groups: bool = False  # whether all episodes of a group go to the same step
  # Whether all batches have the field `demonstrated`, so that one program is compiled for them.
  marks_demonstrations: bool = False

  def padding(self, steps: Sequence[OptimizerStep]) -> float:
    """The share of padding among the tokens that a model computes in these steps."""
    computed = 0
    for step in steps:
      computed += packing.num_computed(step.packing, self.micro_batch, self.length_buckets)
    share = sum(packing.num_places(step.packing) for step in steps) / max(computed, 1)
    return 1 - share


def to_device(
    episodes: Sequence[types.Episode], bins: Bins, key: jax.Array
) -> tuple[types.TurnBatch, list[OptimizerStep]]:
  """Moves a batch of rows to the devices, and splits it into optimizer steps by `key`.

  All rows of an episode go to the same step. All steps have the same number of rows. Rows of
  padding fill up the shorter ones.
  """
  rows_by_episode = batching.rows_by_episode(episodes)
  num_episodes = len(rows_by_episode)
  fewest_rows = min(map(len, rows_by_episode))
  steps_per_epoch = num_episodes // bins.mini_batch
  units = rows_by_episode  # the rows of a unit go to the same step
  if bins.whole_groups:
    units = _rows_by_group(episodes, rows_by_episode)
    if len(units) < steps_per_epoch:
      raise types.UserError(
          f'the objective compares the episodes of a group, and {len(units)} groups do not fill '
          f'{steps_per_epoch} optimizer steps: raise --config.train.mini_batch'
      )
  rows_of_steps: list[np.ndarray] = []  # the rows of each step
  for numbers in minibatches(key, len(units), steps_per_epoch, bins.epochs):
    parts = [units[number] for number in numbers]
    rows = np.concatenate(parts)
    rows = np.sort(rows)
    rows_of_steps.append(rows)
  most_rows = max(map(len, rows_of_steps))
  rows_per_step = _rows_per_step(bins.mini_batch * fewest_rows, most_rows)
  num_rows = rows_per_step * steps_per_epoch
  lengths = np.zeros(num_rows, np.int32)
  for row, episode in enumerate(episodes):
    lengths[row] = batching.trained_length(episode)
  largest_bucket = bins.length_buckets[-1:]
  batch = batching.to_turn_batch(
      episodes, largest_bucket, num_rows, bins.pad_id, bins.sharding, bins.marks_demonstrations
  )
  identities = None
  if bins.share_prefixes:
    identities = _identities(episodes, (num_rows, bins.length_buckets[-1]))
  steps = []
  for i, rows in enumerate(rows_of_steps):
    is_first_of_epoch = i % steps_per_epoch == 0
    if is_first_of_epoch:  # its steps have each row of padding once
      padding = np.arange(len(episodes), num_rows)
    num_padding = rows_per_step - len(rows)
    rows = np.concatenate([rows, padding[:num_padding]])
    padding = padding[num_padding:]
    tokens = None if identities is None else identities[rows]
    places = packing.pack(lengths[rows], bins.micro_batch, bins.length_buckets, bins.shared, tokens)
    step = OptimizerStep(rows.astype(np.int32), places)
    steps.append(step)
  return batch, steps


def shapes(
    bins: Bins,
    num_episodes: int,
    group_size: int,
    roles: Sequence[str] = (),
    routed_model: decoder.ModelConfig | None = None,
) -> tuple[types.TurnBatch, OptimizerStep]:
  """Returns the shapes of what `to_device` makes: the batch, and one step.

  Each episode has one row, or one for each of the `roles`. For a mixture of experts `routed_model`
  the batch has the experts of each token, to be replayed.
  """
  rows_per_episode = max(1, len(roles))
  steps_per_epoch = num_episodes // bins.mini_batch
  most_episodes = bins.mini_batch
  if bins.whole_groups:
    num_groups = num_episodes // group_size
    groups_per_step = -(-num_groups // steps_per_epoch)
    most_episodes = groups_per_step * group_size
  rows_per_step = _rows_per_step(
      bins.mini_batch * rows_per_episode, most_episodes * rows_per_episode
  )
  num_rows = rows_per_step * steps_per_epoch
  length = bins.length_buckets[-1]
  batch = batching.batch_shapes(num_rows, length, routed_model, roles, bins.marks_demonstrations)
  return batch, packing.step_shapes(length, bins.share_prefixes, rows_per_step)


def _identities(episodes, shape):
  """Returns numbers [B,T] int64 that tell tokens apart: their ids, with a hash of their experts.

  Rows whose sampler chose other experts for the same tokens may replay them, and share nothing.
  """
  identities = np.zeros(shape, np.int64)
  _, num_tokens = shape
  for row, episode in enumerate(episodes):
    ids, _, _ = episode.unroll()
    identities[row, : len(ids)] = ids
    routes = batching.sampled_routes([episode], (1, num_tokens))
    if routes is not None:
      experts = routes.reshape(num_tokens, -1).astype(np.int64)
      factors = np.random.default_rng(0).integers(1 << 62, size=experts.shape[1])
      identities[row] += (experts * factors).sum(axis=1)
  return identities


def _rows_by_group(episodes, rows_by_episode):
  """Returns the row numbers of each group. Each role of an episode has its own group."""
  by_group = collections.defaultdict(list)
  for rows in rows_by_episode:
    group = min(episodes[row].group for row in rows)
    by_group[group].extend(rows)
  return list(by_group.values())


def _rows_per_step(least: int, needed: int) -> int:
  """Returns the first of least, 2 least, 4 least, .. that is large enough.

  A program is compiled for each number of rows, and agent programs record another number in each
  update. The bins hold no padding rows, so they cost little.
  """
  size = least
  while size < needed:
    size *= 2
  return size


def minibatches(
    key: jax.Array, num_units: int, num_steps: int, epochs: int
) -> Iterator[np.ndarray]:
  """Yields the rising unit numbers of each step; each epoch shuffles all units again.

  The steps of an epoch have equally many units, or the first ones have one more.
  """
  for epoch_key in jax.random.split(key, epochs):
    shuffled = jax.random.permutation(epoch_key, num_units)
    order = np.asarray(shuffled, np.int32)
    for numbers in np.array_split(order, num_steps):
      yield np.sort(numbers)
