"""Saved batches: a folder of train_000001.jsonl, .. in; the episodes, exactly as sampled, out.

A run writes such a folder (WORKDIR/episodes), and so do --mode=sample and --mode=import_atif. With
config.rollout.replay a run trains on a folder. A run that replays its own batches from the same
start repeats every number.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import re
from typing import Any
import zlib

from absl import logging
import numpy as np

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.envs import factory
from stppo_jax.rollout import batching
from stppo_jax.text import tokenizer as tokenizer_lib

KINDS = ('train', 'eval', 'nonfinite')  # a run writes KIND_000001.jsonl, ..
_NAME = re.compile(r'train_(\d{6,})\.jsonl')


def path_of(folder: str, number: int) -> str:
  """Returns the path of batch `number`, from 1."""
  return os.path.join(folder, f'train_{number:06d}.jsonl')


def has_batches(folder: str) -> bool:
  """Returns whether a path is a folder of saved batches."""
  return os.path.isdir(folder) and any(map(_NAME.fullmatch, os.listdir(folder)))


def numbers(folder: str) -> list[int]:
  """Returns the numbers of the batches in a folder, rising. UserError: there are none."""
  try:
    names = os.listdir(folder)
  except OSError as error:
    raise types.UserError(
        f'{folder!r} cannot be read ({error.strerror}): give a folder of saved batches, such as '
        '`episodes` of a run'
    ) from error
  matches = [_NAME.fullmatch(name) for name in names]
  batches = sorted(int(match[1]) for match in matches if match)
  if not batches:
    raise types.UserError(
        f'{folder!r} holds no saved batches (train_000001.jsonl, ..): give the folder `episodes` '
        'of a run, or one that --mode=sample or --mode=import_atif wrote'
    )
  return batches


def check_has(folder: str, updates: int) -> None:
  """Raises a UserError unless the folder has batches 1 to `updates`."""
  missing = sorted(set(range(1, updates + 1)) - set(numbers(folder)))
  if missing:
    name = os.path.basename(path_of('', missing[0]))
    advice = 'give a folder with batch 1'
    if missing[0] > 1:
      advice = f'set --config.train.updates={missing[0] - 1}'
    raise types.UserError(
        f'config.rollout.replay={folder!r} has no {name}, and config.train.updates={updates}: '
        f'{advice}'
    )


def read(path: str, tokenizer: tokenizer_lib.Tokenizer) -> batching.Sampled:
  """Reads a batch. UserError: another format, or ids of another tokenizer."""
  records = read_records(path)
  try:
    episodes = [types.Episode.from_dict(record) for record in records]
    first = records[0]
    number = first.get('batch', first['step'])
    for record in records:
      if tokenizer.pieces(record['tokens']) != record['pieces']:
        raise types.UserError(
            f'{path} holds token ids of another tokenizer than that of {tokenizer.folder!r}: give '
            'the model that they were sampled from, or one of its family'
        )
  except types.UserError:
    raise
  except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
    raise types.UserError(
        f'{path} does not hold the episodes of a batch ({type(error).__name__}: {error}): give the '
        'folder `episodes` of a run of this version'
    ) from error
  return batching.Sampled(number, first.get('staleness', 0), episodes, measured={})


def read_records(path: str) -> list[dict[str, Any]]:
  """Reads the lines of a file of episodes. UserError: it is not JSON lines."""
  try:
    with open(path, encoding='utf-8') as file:
      return [json.loads(line) for line in file]
  except OSError as error:
    raise types.UserError(f'{path} cannot be read ({error.strerror})') from error
  except (ValueError, RecursionError) as error:
    raise types.UserError(f'{path} is not JSON lines ({error}): replace it') from error


@dataclasses.dataclass(frozen=True)
class Replay:
  """Batch n of a run, read from a folder instead of sampled; checks that it can be trained on."""

  folder: str
  tokenizer: tokenizer_lib.Tokenizer
  mini_batch: int  # has to divide the number of episodes
  longest: int  # the largest number of tokens of an episode
  num_episodes: int  # by which the schedules of the run count its optimizer steps
  env: factory.EnvFactory
  needs_groups: bool = False  # the objective compares the episodes of a group
  needs_routes: bool = False  # the update replays the experts that the sampler chose

  def __call__(self, number: int) -> batching.Sampled:
    """Returns batch `number`."""
    path = path_of(self.folder, number)
    sampled = read(path, self.tokenizer)
    ids = [zlib.crc32(episode.unroll()[0].tobytes()) for episode in sampled.episodes]
    hosts.require_same(path, ids, 'give a folder that all processes share')
    self._check(path, sampled.episodes)
    return sampled

  def _check(self, path: str, episodes: Sequence[types.Episode]) -> None:
    if not self.env.has_rows_of(episodes):
      raise types.UserError(
          f'{path} has episodes with other agents than the environment: give batches that were '
          'sampled with this config.env.kind'
      )
    rows_by_episode = batching.rows_by_episode(episodes)
    num_episodes = len(rows_by_episode)
    if num_episodes % self.mini_batch:
      raise types.UserError(
          f'{path} has {num_episodes} episodes, which config.train.mini_batch={self.mini_batch} '
          'does not divide: choose a divisor'
      )
    if num_episodes != self.num_episodes:
      logging.log_first_n(
          logging.WARNING,
          '%s has %d episodes. Warm-up and decay count optimizer steps of batches of '
          'config.train.episodes=%d: set --config.train.episodes=%d, unless the sizes differ',
          1,
          path,
          num_episodes,
          self.num_episodes,
          num_episodes,
      )
    lengths = [batching.trained_length(episode) for episode in episodes]
    if max(lengths) > self.longest:
      raise types.UserError(
          f'{path} has an episode of {max(lengths)} tokens, and config.train.length_buckets end at '
          f'{self.longest}: add a bucket'
      )
    trained = [episode for episode in episodes if not (episode.failed or episode.demonstrated)]
    turns = [turn for episode in trained for turn in episode.turns]
    if not all(np.isfinite(turn.logp).all() for turn in turns):
      raise types.UserError(
          f'{path} has turns without log-probs, so that no policy of this run sampled them, and '
          'a policy gradient on them would have no objective. Imitate them first: '
          'python run.py sft'
      )
    turns = [turn for episode in episodes for turn in episode.turns]
    if self.needs_routes and any(turn.routes is None for turn in turns):
      raise types.UserError(
          f'{path} has turns without the experts that the sampler chose, which '
          "config.rollout.routing_replay='sampling' reuses: set it to 'old_policy' or 'none'"
      )
    groups = [{episodes[b].group for b in rows} for rows in rows_by_episode]
    if self.needs_groups and len(set().union(*groups)) == sum(map(len, groups)) > 1:
      raise types.UserError(
          f'{path}: no two episodes are of one group, and config.algorithm.variant compares the '
          'episodes of a group: give batches with groups, or another variant'
      )
