"""TextArena's games: `env.kind='textarena:GuessTheNumber-v0'`, of one player or of two.

In a game of two a scripted opponent plays the other side: the option `opponent` names a function
(observation, rng) -> action, as `module:attribute`. `env.options` goes to the game's constructor,
except for the parameters of TextArenaEnv. A game pays at its end: the agent's own reward.

Choice: the agent reads what is new since its last turn, and not the package's repeated history.
"""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import random
from typing import Any

from stppo_jax import plugins
from stppo_jax import types
from stppo_jax.envs import protocol

SIDES = ('first', 'second', 'random')
_MOST_MOVES = 100  # of the opponent between two turns of the agent


def make(env_id: str) -> Any:
  """Returns what makes the game `env_id` of a task. UserError: TextArena has no such ID."""
  kind = f'textarena:{env_id}'
  package = protocol.import_peer(kind, 'textarena', 'textarena')
  registry = protocol.import_peer(kind, 'textarena.envs.registration', 'textarena').ENV_REGISTRY
  if env_id not in registry:
    raise protocol.unknown_name(kind, env_id, registry)
  made: Any = functools.partial(TextArenaEnv, functools.partial(package.make, env_id), kind)
  made.core_metrics = TextArenaEnv.core_metrics
  made.attributes = attributes
  made.load_tasks = functools.partial(protocol.seed_tasks, env_id)
  return made


def attributes(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the frame and stop strings of these settings: by default turns of the chat template."""
  return {
      'frame': settings.get('frame', 'user'),
      'stop_strings': tuple(settings.get('stop_strings', ())),
  }


class TextArenaEnv:
  """One game from the agent's side."""

  core_metrics = ('won',)  # the agent's reward is 1, or above all others'

  def __init__(
      self,
      construct: Any,
      kind: str,
      task: types.Task,
      opponent: str = '',  # '': a game of one player
      side: str = 'first',  # of the agent in a game of two; 'random': drawn from the seed
      frame: str = 'user',
      stop_strings: tuple[str, ...] = (),
      **options: Any,
  ):
    del task
    if side not in SIDES:
      raise types.UserError(f'config.env.options.side={side!r}: allowed are {", ".join(SIDES)}')
    self.frame, self.stop_strings = frame, tuple(stop_strings)
    self._kind, self._side = kind, side
    self._opponent: Callable[[str, random.Random], str] | None = None
    if opponent:
      self._opponent = plugins.load('env.options.opponent', opponent, {})
    try:
      self._env = construct(**options)
    except Exception as error:  # another package's
      raise types.UserError(
          f'config.env.kind={kind!r} with options {options!r} cannot be made '
          f'({type(error).__name__}: {" ".join(str(error).split())[:200]}): change the options'
      ) from error
    self._game = self._env  # under the wrappers, of which only those of actions have an effect
    while hasattr(self._game, 'env'):
      self._game = self._game.env
    self._rng = random.Random(0)
    self._agent = self._turns = 0
    self._unread: list[str] = []

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Starts the game of a seed; the opponent may move first."""
    self._rng = random.Random(seed)
    second = self._rng.random() < 0.5 if self._side == 'random' else self._side == 'second'
    self._agent, self._turns = int(second and self._opponent is not None), 0
    players = 1 if self._opponent is None else 2
    try:
      self._env.reset(num_players=players, seed=seed)
    except Exception as error:  # another package's
      raise types.UserError(
          f'config.env.kind={self._kind!r} cannot be played by {players} '
          f'({type(error).__name__}: {" ".join(str(error).split())[:200]}): a game of two needs '
          '--config.env.options.opponent=module:function, a game of one none; games of more are '
          'not supported'
      ) from error
    self._unread = []
    self._let_others_move()
    return self._take_unread(), {}

  def step(self, action: str) -> protocol.Step:
    """Plays one turn of the agent, then the opponent's moves."""
    self._turns += 1
    before = self._invalid_moves()
    try:
      done, info = self._env.step(action)
      invalid = self._invalid_moves() > before
      done = done or self._let_others_move()
    except Exception as error:  # another package's, on a text of the model
      return protocol.failed_step(error, {'won': 0.0})
    metrics = protocol.numbers(info) | {'moves': float(self._turns)}
    kind = {'action': 'invalid' if invalid else 'move'}
    if not done:
      return self._take_unread(), 0.0, False, False, kind | {'metrics': metrics | {'won': 0.0}}
    rewards, game_info = self._env.close()
    rewards = {} if rewards is None else dict(rewards)
    reward = float(rewards.pop(self._agent, 0.0))
    own = dict(game_info.get(self._agent) or {})
    won = reward >= 1 or bool(rewards) and reward > max(map(float, rewards.values()))
    metrics |= protocol.numbers(own) | {'won': float(won)}
    kind['action'] = 'invalid' if own.get('invalid_move') else kind['action']
    return '', reward, True, False, kind | {'metrics': metrics}

  def _let_others_move(self):
    """Plays the opponent until it is the agent's turn. True: the game is over."""
    for _ in range(_MOST_MOVES):
      player, new = self._game.get_observation()
      text = _as_text(new, player)
      if player == self._agent or self._opponent is None:
        self._unread.append(text)
        return False
      done, _ = self._env.step(self._opponent(text, self._rng))
      if done:
        return True
    raise RuntimeError(f'{_MOST_MOVES} moves of the opponent, and none of the agent')

  def _take_unread(self):
    text, self._unread = '\n'.join(self._unread).strip(), []
    return text

  def _invalid_moves(self):
    return getattr(self._game.state, 'error_count', 0)


def _as_text(messages, player) -> str:
  """Returns new messages as text, without what the player said itself."""
  if isinstance(messages, str):
    return messages
  return '\n'.join(str(text).strip() for sender, text, _ in messages if sender != player)
