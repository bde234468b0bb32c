"""Who plays the questions of an evaluation: rows in, episodes with their texts out.

Here a checkpoint, by the run's own agent; `remote` asks a server in its place.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import Protocol

import jax
import jax.numpy as jnp

from stppo_jax import components
from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.evaluation import policy as results_lib
from stppo_jax.evaluation import records
from stppo_jax.models import hf_config
from stppo_jax.models import sharding
from stppo_jax.rollout import episode as episode_loop
from stppo_jax.rollout import pipeline
from stppo_jax.rollout import prepare
from stppo_jax.training import checkpoint
from stppo_jax.types import RunError

_ROUNDS = 4  # a batch holds this many times the episodes in progress at once


class Player(Protocol):
  """Who plays the questions."""

  @property
  def said(self) -> str:
    """Who it is, for a reader: 'runs/x after 56 updates'."""
    ...

  @property
  def label(self) -> str:
    """Who it is, in the name of a folder: '000056'."""
    ...

  @property
  def identity(self) -> Mapping[str, Any]:
    """What tells it from others."""
    ...

  @property
  def batch(self) -> int:
    """Number of rows that are played together, and again as a whole; 0: each alone."""
    ...

  @property
  def roles(self) -> Sequence[str]:
    """Names of those who have an episode each; ('',): one agent."""
    ...

  @property
  def tasks(self) -> Sequence[types.Task]:
    """The questions."""
    ...

  def play(self, rows: Sequence[records.Row]) -> Iterator[records.Played]:
    """Plays rows, in any order."""
    ...


def temperature(config: schema.Config) -> float:
  """Returns the temperature that config.eval asks for; 0 is greedy."""
  if config.eval.temperature is not None:
    return config.eval.temperature
  return 0.0 if config.eval.samples == 1 else config.rollout.temperature


def rows_of(tasks: Sequence[types.Task], samples: int) -> list[records.Row]:
  """Returns what is to be played; the samples of a question follow each other."""
  return [records.Row(task, i) for task in tasks for i in range(samples)]


class Trained:
  """A checkpoint of a run, or the model before training: the run's own agent."""

  def __init__(self, config: schema.Config, workdir: str, stop_requested: Callable[[], bool]):
    policy, prepared, self.tasks = results_lib.load(config, workdir)
    self._is_greedy, self._stop_requested = temperature(config) == 0, stop_requested
    self.batch = _ROUNDS * config.eval.rows
    self._max_failed_share = config.retriever.max_failed_share
    self._max_failed = config.rollout.max_failed
    playing = config if self._is_greedy else _sampling(config)
    mesh = sharding.mesh_of(config.mesh)
    self._agent = components.make_agent(playing, policy.model, mesh, prepared)
    self._params = self._agent.sampler.copy(policy.params)
    self.roles = tuple(self._agent.env.roles) or ('',)
    if hasattr(self._agent.retriever, 'give_up'):
      self._agent.retriever.give_up = stop_requested
    rows = rows_of(self.tasks, config.eval.samples)
    keys = episode_loop.row_keys(jax.random.key(config.seed), [row.task for row in rows])
    self._keys = dict(zip((row.key for row in rows), keys))
    self.said, updates = policy.said, policy.updates or None
    self.label = f'{updates:06d}' if updates else 'untrained'
    saved = hosts.by_writer(checkpoint.fingerprint, workdir, updates) if updates else ''
    base = hosts.by_writer(hf_config.fingerprint, prepare.model_folder(config))
    self.identity = {'updates': updates, 'weights': saved, 'folder': base}

  def play(self, rows: Sequence[records.Row]) -> Iterator[records.Played]:
    """Plays rows together. RunError: the retriever fails in too many of them."""
    episodes = self._agent.play(
        self._params,
        [row.task for row in rows],
        jnp.stack([self._keys[row.key] for row in rows]),
        greedy=self._is_greedy,
        give_up=self._stop_requested,
    )
    if (share := pipeline.failed_share(episodes)) > self._max_failed_share:
      raise RunError(
          f'retrieval failed in {share:.0%} of the held-out episodes: check the retriever, and '
          'give the same command again'
      )
    pipeline.check_environment(episodes, self._max_failed)
    for i, episode in enumerate(episodes):  # a row's roles follow each other
      yield records.Played(rows[i // len(self.roles)], episode, self._texts(episode))

  def _texts(self, episode):
    """Returns (said, read) of each turn."""
    decode = self._agent.tokenizer.decode
    return [(decode(turn.tokens), decode(turn.observation)) for turn in episode.turns]


def _sampling(config: schema.Config) -> schema.Config:
  """Returns the config with the temperature and the rows of the evaluation."""
  rollout = dataclasses.replace(
      config.rollout, temperature=temperature(config), rows=config.eval.rows
  )
  return dataclasses.replace(config, rollout=rollout)
