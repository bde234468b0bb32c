"""Players of an evaluation: rows in, episodes with their texts out.

`LocalPlayer` plays a checkpoint with the run's own agent. `remote.RemotePlayer` asks a server.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax import types
from stppo_jax.assembly import agents
from stppo_jax.assembly.components import Components
from stppo_jax.config import Config
from stppo_jax.envs import factory
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.evaluation import records
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import batches
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.stop_signal import StopSignal
from stppo_jax.types import RunError
from stppo_jax.types import UserError

_ROUNDS = 4  # a batch holds this many times the episodes in progress at once


class Player:
  """Plays the questions of an evaluation."""

  tasks: Sequence[types.Task]
  rows_per_episode: int  # episodes that a row gives, one for each agent
  batch: int  # rows that are played together, and again as a whole; 0: rows are independent
  description: str  # for a reader: 'runs/x after 56 updates'
  label: str  # in the name of the folder: '000056'
  identity: Mapping[str, Any]  # distinguishes the player from others

  def play(self, rows: Sequence[records.Row]) -> Iterator[records.PlayedRow]:
    """Plays rows, in any order."""
    raise NotImplementedError


def temperature(config: Config) -> float:
  """Returns the temperature of an evaluation; 0 is greedy."""
  if config.eval.temperature is not None:
    return config.eval.temperature
  return 0.0 if config.eval.samples == 1 else config.rollout.temperature


def check_environment(config: Config, env: factory.EnvFactory) -> None:
  """Raises a UserError for an environment that a chat with one model cannot play."""
  name = config.env.kind
  if config.env.mix:
    raise UserError(
        'config.env.mix has several environments, and here one is played: set '
        '--config.env.mix="()" and --config.env.kind'
    )
  if env.is_program:
    raise UserError(
        f'config.env.kind={name!r}: an agent program calls the model itself: use --mode=serve, or '
        'call the program with your address'
    )
  if env.rows_per_episode > 1:
    raise UserError(
        f'config.env.kind={name!r} has several agents, and here one model plays: use --mode=eval '
        'without config.eval.address'
    )


def make_agent(
    config: Config, components: Components, model: decoder.ModelConfig
) -> agent_lib.Agent:
  """Returns the agent of an evaluation, with its temperature. No engines sample for it."""
  rollout = dataclasses.replace(config.rollout, engine='')
  if temperature(config):
    rollout = dataclasses.replace(rollout, temperature=temperature(config), rows=config.eval.rows)
  config = dataclasses.replace(config, rollout=rollout)
  return agents.make_agent(config, components, model, sharding.mesh_of(config.mesh))


def rows_of(tasks: Sequence[types.Task], samples: int) -> list[records.Row]:
  """Returns the rows of an evaluation; the samples of a question follow each other."""
  return [records.Row(task, i) for task in tasks for i in range(samples)]


def row_keys(config: Config, tasks: Sequence[types.Task]) -> dict[tuple, jax.Array]:
  """Returns the random key of each row, by the row's key."""
  rows = rows_of(tasks, config.eval.samples)
  keys = episode_lib.row_keys(jax.random.key(config.seed), [row.task for row in rows])
  return dict(zip((row.key for row in rows), keys))


def check_failures(config: Config, episodes: Sequence[types.Episode]) -> None:
  """Raises a RunError if retrieval or the environment failed in too many episodes."""
  share = batches.largest_share(batches.failed_share, episodes)
  if share > config.retriever.max_failed_share:
    raise RunError(
        f'retrieval failed in {share:.0%} of the held-out episodes: check the retriever, and '
        'give the same command again'
    )
  batches.check_environment(episodes, config.rollout.max_failed)


class LocalPlayer(Player):
  """A checkpoint of a run, or the model before training, played by the run's own agent."""

  def __init__(self, config: Config, workdir: str, stop_signal: StopSignal):
    policy, components = policy_lib.load(config, workdir)
    self.tasks = components.held_out
    self.batch = _ROUNDS * config.eval.rows
    self.description = policy.description
    self.label = f'{policy.updates:06d}' if policy.updates else 'untrained'
    self.identity = policy_lib.identity(components, workdir, policy.updates)

    self._config = config
    self._is_greedy = temperature(config) == 0
    self._stop_signal = stop_signal
    self._agent = make_agent(config, components, policy.model)
    self._agent.set_stop_signal(stop_signal)
    self._params = self._agent.sampler.copy(policy.params)
    self._keys = row_keys(config, self.tasks)
    self.rows_per_episode = self._agent.env.rows_per_episode

  def play(self, rows: Sequence[records.Row]) -> Iterator[records.PlayedRow]:
    """Plays rows together. RunError: see `check_failures`."""
    episodes = self._agent.play(
        self._params,
        [row.task for row in rows],
        jnp.stack([self._keys[row.key] for row in rows]),
        greedy=self._is_greedy,
        stop_signal=self._stop_signal,
    )
    check_failures(self._config, episodes)
    decode = self._agent.tokenizer.decode
    for i, episode in enumerate(episodes):
      row = rows[i // self.rows_per_episode]
      texts = [(decode(turn.tokens), decode(turn.observation)) for turn in episode.turns]
      yield records.PlayedRow(row, episode, texts)
