"""Demonstrations: episodes of a scripted player, or recorded ones, as rows of a batch.

A player is any object with `act(observation) -> action`, both texts. It plays the environment of
the run on the host, with the limits of a rollout. Its actions become the tokens of turns, and the
environment scores them. No log-probs are recorded, because nothing was sampled.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import json
import os
import random
from typing import Any
from typing import Protocol

from absl import logging
import jax
import numpy as np

from stppo_jax import plugins
from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.envs import factory
from stppo_jax.envs import guard as guard_lib
from stppo_jax.envs import protocol
from stppo_jax.envs import stepping
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.text import tokenizer as tokenizer_lib

SETTING = 'rollout.demonstrations'
_STREAM = 2**31  # folded into the key of a batch; rounds of sampling fold in small numbers


class ScriptedPlayer(Protocol):
  """Plays one episode, or one role of it.

  It may have `begin(task)`, which is called first, for a player that knows the answers. The task is
  the one that its environment gets, also in a mix.
  """

  def act(self, observation: str) -> str:
    """Returns the next action; an empty text ends the episode."""


MakePlayer = Callable[[random.Random], ScriptedPlayer]
Source = Callable[[types.Task], MakePlayer | None]  # None: the task has no demonstration


def load(name: str, tokenizer: tokenizer_lib.Tokenizer) -> Source:
  """Returns the demonstrations that a config names: `module:Player`, or a file of episodes.

  The player is made with a random.Random. For the lines of a file, see `read`.
  """
  if os.path.isfile(name):
    recordings = read(name, tokenizer)
    return lambda task: recordings.get(task.id)
  if ':' not in name:
    raise types.UserError(
        f'config.{SETTING}={name!r}: there is no such file: correct the path, or give module:Player'
    )
  player = plugins.load(SETTING, name, {})
  if not callable(getattr(player, 'act', None)):
    raise types.UserError(
        f'config.{SETTING}={name!r}: a class with act(observation) is needed, or an existing file'
    )
  return lambda task: functools.partial(begin, player, task)


def check_tasks(name: str, source: Source, env: factory.EnvFactory, tasks: Sequence[types.Task]):
  """Raises a UserError if demonstrations do not fit the tasks or the roles of the environment."""
  if not os.path.isfile(name):
    return
  if env.rows_per_episode > 1:
    raise types.UserError(
        f'config.{SETTING}={name!r}: recorded episodes have one role, and this environment has '
        'several: give module:Player'
    )
  count = sum(source(task) is not None for task in tasks)
  if not count:
    raise types.UserError(
        f'config.{SETTING}={name!r}: no line has the id of one of the {len(tasks)} training tasks, '
        f'such as {tasks[0].id!r}: correct "task" in its lines'
    )
  logging.info('%d of %d training tasks have recorded demonstrations', count, len(tasks))


def begin(make_player: MakePlayer, task: types.Task, rng: random.Random) -> ScriptedPlayer:
  """Returns a player of one episode of a task."""
  player = make_player(rng)
  if hasattr(player, 'begin'):
    own = task.own if isinstance(task, types.MixTask) else None
    player.begin(own or task)
  return player


def read(path: str, tokenizer: tokenizer_lib.Tokenizer) -> dict[str, MakePlayer]:
  """Reads recorded episodes, one JSON object per line; returns {task id: maker of players}.

  A line is {"task": id, "turns": [text, ..]}, or a line of episodes/*.jsonl of a run with this
  tokenizer. Of several episodes of a task, each player repeats one at random.
  """
  texts_by_task: dict[str, list[list[str]]] = {}
  with open(path, 'rb') as file:
    for number, line in enumerate(file, start=1):
      try:
        record = json.loads(line.decode('utf-8'))
        texts = _texts(record, tokenizer)
        texts_by_task.setdefault(str(record['task']), []).append(texts)
      except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise types.UserError(
            f'config.{SETTING}={path!r}, line {number} ({type(error).__name__}: {error}): give '
            'lines of {"task": id, "turns": [text, ..]}, or episodes of a run with this tokenizer'
        ) from error
  return {task: functools.partial(Recorded, texts) for task, texts in texts_by_task.items()}


def _texts(record, tokenizer):
  """Returns the texts of the turns of a record."""
  if 'turns' in record:
    texts = record['turns']
    if not types.is_of(texts, list[str]) or '' in texts:
      raise ValueError(f'turns={texts!r:.60}')
    return texts
  if tokenizer.pieces(record['tokens']) != record['pieces']:
    raise ValueError('token ids of another tokenizer')
  episode = types.Episode.from_dict(record)
  if episode.role:
    raise ValueError('episodes of several roles')
  return [episode_lib.action_text(tokenizer, turn.tokens) for turn in episode.turns]


class Recorded:
  """Repeats the turns of one of several recorded episodes and ignores the observations."""

  def __init__(self, recordings: Sequence[Sequence[str]], rng: random.Random):
    self._turns = iter(rng.choice(recordings))

  def act(self, observation: str) -> str:
    """Returns the next turn, and an empty text after the last one."""
    del observation
    return next(self._turns, '')


@dataclasses.dataclass(frozen=True)
class Demonstrator:
  """Plays the demonstrations of a run's batches."""

  source: Source
  env: factory.EnvFactory
  tokenizer: tokenizer_lib.Tokenizer
  limits: episode_lib.EpisodeLimits
  per_group: int  # rows of a group that are demonstrations
  every: int = 1  # the groups of every n-th question of a batch have them
  strict: bool = False  # raise a UserError where the code of an environment raises
  guard: guard_lib.Guard = guard_lib.IN_PLACE  # calls environments and players

  def count(self, position: int, task: types.Task) -> int:
    """Returns how many rows of the group at a position of the batch are demonstrations."""
    is_due = position % self.every == 0
    return self.per_group if is_due and self.source(task) else 0

  def play(
      self, key: jax.Array, tasks: Sequence[types.Task], groups: Sequence[int]
  ) -> list[types.Episode]:
    """Plays one episode per task; returns its rows, one per role, in the order of the tasks.

    The result depends on the key of the batch, and on the tasks. Process 0 plays. If the run stops
    while a player acts, all processes raise Stopped.
    """
    keys = episode_lib.row_keys(jax.random.fold_in(key, _STREAM), tasks)
    seeds = episode_lib.reset_seeds(keys, tasks)
    player_seeds = episode_lib.episode_seeds(keys)

    def play_all():
      rows = []
      for i, episode in enumerate(zip(tasks, groups, seeds, player_seeds)):
        rows += self._play(*episode, i)
      return [row.to_dict() for row in rows]

    records = hosts.by_writer(play_all)
    row_tasks = [task for task in tasks for _ in range(self.env.rows_per_episode)]
    return list(map(types.Episode.from_dict, records, row_tasks))

  def _play(self, task, group, seed, player_seed, number):
    """Plays one episode with a player for each role; returns its rows."""
    env = self.env(task, seed, self.guard)
    kind = self.env.of(task)
    framing = tokenizer_lib.make_framing(
        self.tokenizer, kind.frame, self.limits.max_observation_tokens
    )
    rules = episode_lib.EpisodeRules(self.env, self.limits, strict=self.strict)
    state = episode_lib.EpisodeState(task, framing, rules, group, number)
    # Not the seed itself: an environment may draw what is hidden from Random(seed).
    rng = random.Random(f'player {player_seed}')
    make_player: Any = self.source(task)
    players: dict[int, ScriptedPlayer] = {}
    info: protocol.ResetInfo | protocol.StepInfo
    observation, info = stepping.reset(env, seed)
    prompt = state.observe(observation, info)
    while prompt.budget > 0:
      role = state.active_role
      if role not in players:
        players[role] = self._call(make_player, random.Random(rng.random()))
      text = self._call(players[role].act, protocol.full_text(observation, info))
      if not text:
        state.end(truncated=True)
        break
      tokens = self._encode(text, state.opening, prompt.stop_state)[: prompt.budget]
      action = state.action_text(tokens)
      (outcome,) = stepping.step_all([env], [action])
      turn = types.Turn(tokens, np.full(len(tokens), np.nan, np.float32))
      prompt = state.record(turn, outcome)
      observation, _, _, _, info = outcome
    for row in state.episodes:
      row.demonstrated = True
    return state.episodes

  @functools.cached_property
  def _stop_table(self) -> np.ndarray:
    return tokenizer_lib.joint_stop_automaton(self.tokenizer.token_bytes, self.env.turn_ends)

  def _encode(self, text, opening, stop_state):
    """Returns the tokens of a turn, which ends where a sampled one does, or with the eos token.

    The tag of a thought that the prompt has opened is not repeated.
    """
    if not isinstance(text, str):
      raise types.UserError(f'config.{SETTING}: act returned {text!r:.60}: a text is needed')
    if opening:
      text = text.lstrip().removeprefix(opening.rstrip()).lstrip()
    ids = self.tokenizer.encode(text)
    length, has_ended = tokenizer_lib.turn_length(self._stop_table, ids, stop_state)
    end = [] if has_ended else self.tokenizer.eos_ids[:1]
    return np.array([*ids[:length], *end], np.int32)

  def _call(self, function, *args):
    """Calls the code of a player. UserError: it raised an error, or took too long."""
    try:
      return self.guard.call('the player', function, *args)
    except factory.ENDS_RUN:
      raise
    except guard_lib.StopSeen:  # `play` raises it on all processes
      raise types.Stopped from None
    except Exception as error:  # a player's code may raise anything
      message = ' '.join(f'{type(error).__name__}: {error}'.split())
      raise types.UserError(
          f'config.{SETTING}: the player raised {message} ({plugins.raised_at(error)}): correct it'
      ) from error
