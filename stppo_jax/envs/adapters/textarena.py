"""TextArena's games: `env.kind='textarena:GuessTheNumber-v0'`, of one player or of two.

In a game of two the option `opponent` says who plays the other side: a function
(observation, rng) -> action, as `module:attribute`, or 'self'. Then the policy plays both sides, as
the roles player_0 and player_1. `eval_opponent` is a function against which the held-out games of
such a policy are played, so that their scores can be compared. `env.options` goes to the game's
constructor, except for the parameters of TextArenaEnv. A game pays at its end: each role its own
reward.

Choice: a player reads what is new since its last turn, and not the package's repeated history.
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
SELF = 'self'  # in place of an opponent
ROLES = ('player_0', 'player_1')  # of a policy that plays itself
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
  """Returns what depends on these settings; by default observations are turns of the template."""
  return {
      'frame': settings.get('frame', 'user'),
      'stop_strings': tuple(settings.get('stop_strings', ())),
      'roles': ROLES if settings.get('opponent') == SELF else (),
  }


class TextArenaEnv:
  """One game from the agent's side, or from both."""

  core_metrics = ('won',)  # the player's reward is 1, or above all others'

  def __init__(
      self,
      construct: Any,
      kind: str,
      task: types.Task,
      opponent: str = '',  # '': a game of one player; 'self': the policy
      eval_opponent: str = '',  # of games that are not of the split 'train'; '': the same
      side: str = 'first',  # of the agent in a game of two; 'random': drawn from the seed
      frame: str = 'user',
      stop_strings: tuple[str, ...] = (),
      **options: Any,
  ):
    if eval_opponent == SELF != opponent:
      raise types.UserError(
          "config.env.options.eval_opponent='self' needs two roles: set opponent='self', too"
      )
    opponent = eval_opponent if eval_opponent and task.split != 'train' else opponent
    if side not in SIDES:
      raise types.UserError(f'config.env.options.side={side!r}: allowed are {", ".join(SIDES)}')
    self.frame, self.stop_strings = frame, tuple(stop_strings)
    self._kind, self._side, self._plays_itself = kind, side, opponent == SELF
    self._opponent: Callable[[str, random.Random], str] | None = None
    if opponent and not self._plays_itself:
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
    self._agent = self._turns = 0  # the number of the player that the policy is now
    self._unread: list[str] = []

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Starts the game of a seed; a scripted opponent may move first."""
    self._rng = random.Random(seed)
    second = self._rng.random() < 0.5 if self._side == 'random' else self._side == 'second'
    self._agent, self._turns = int(second and self._opponent is not None), 0
    players = 1 if self._opponent is None and not self._plays_itself else 2
    try:
      self._env.reset(num_players=players, seed=seed)
    except Exception as error:  # another package's
      raise types.UserError(
          f'config.env.kind={self._kind!r} cannot be played by {players} '
          f'({type(error).__name__}: {" ".join(str(error).split())[:200]}): a game of two needs '
          '--config.env.options.opponent=module:function or self, a game of one none; games of '
          'more are not supported'
      ) from error
    self._unread = []
    self._let_others_move()
    return self._take_unread(), self._next_role()

  def step(self, action: str) -> protocol.Step:
    """Plays one turn of the policy, then the moves of a scripted opponent."""
    self._turns += 1
    mover, before = self._agent, self._invalid_moves()
    done, info = self._env.step(action)
    invalid = self._invalid_moves() > before
    done = done or self._let_others_move()
    metrics = protocol.numbers(info) | {'moves': float(self._turns)}
    kind: dict[str, Any] = {'action': 'invalid' if invalid else 'move'}
    if not done:
      kind |= self._next_role() | {'metrics': metrics | {'won': 0.0}}
      return self._take_unread(), 0.0, False, False, kind
    rewards, game_info = self._env.close()
    rewards = {player: float(x) for player, x in (rewards or {}).items()}
    own = dict(game_info.get(mover) or {})
    kind['action'] = 'invalid' if own.get('invalid_move') else kind['action']
    kind['metrics'] = metrics | protocol.numbers(own) | {'won': _won(rewards, mover)}
    if self._plays_itself:
      other = 1 - mover
      of_other = protocol.numbers(dict(game_info.get(other) or {})) | {'won': _won(rewards, other)}
      kind['rewards'] = {ROLES[other]: rewards.get(other, 0.0)}
      kind['role_metrics'] = {ROLES[other]: of_other}
    return '', rewards.get(mover, 0.0), True, False, kind

  def _let_others_move(self):
    """Plays a scripted opponent until it is the policy's turn. True: the game is over."""
    for _ in range(_MOST_MOVES):
      player, new = self._game.get_observation()
      text = _as_text(new, player)
      if player == self._agent or self._opponent is None:
        self._agent = player
        self._unread.append(text)
        return False
      done, _ = self._env.step(self._opponent(text, self._rng))
      if done:
        return True
    raise RuntimeError(f'{_MOST_MOVES} moves of the opponent, and none of the agent')

  def _next_role(self):
    """Returns the role that moves next for `info`, of which there are some in self-play."""
    return {'role': ROLES[self._agent]} if self._agent < len(ROLES) else {}

  def _take_unread(self):
    text, self._unread = '\n'.join(self._unread).strip(), []
    return text

  def _invalid_moves(self):
    return getattr(self._game.state, 'error_count', 0)


def _won(rewards, player):
  """Returns 1 where the player's reward is 1, or above all others'."""
  reward = rewards.get(player, 0.0)
  others = [other for number, other in rewards.items() if number != player]
  return float(reward >= 1 or bool(others) and reward > max(others))


def _as_text(messages, player) -> str:
  """Returns new messages as text, without what the player said itself."""
  if isinstance(messages, str):
    return messages
  return '\n'.join(str(text).strip() for sender, text, _ in messages if sender != player)
