"""TextArena's games: `env.kind='textarena:GuessTheNumber-v0'`, of one player or of two.

In a game of two, the option `opponent` names the other player: a function (observation, rng) ->
action, as `module:attribute`, or 'self'. With 'self' the policy plays both sides, as the roles
player_0 and player_1. `eval_opponent` names a function that plays against such a policy in held-out
games, so that their scores can be compared. `env.options` goes to the game's constructor, except
for the parameters of TextArenaEnv. A game pays each player at its end.

Choice: a player reads only the text that is new since its last turn. The package repeats the whole
history.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import random
from typing import Any

from stppo_jax import plugins
from stppo_jax import types
from stppo_jax.envs import packages
from stppo_jax.envs import protocol

SIDES = ('first', 'second', 'random')
SELF = 'self'  # as the opponent
ROLES = ('player_0', 'player_1')  # a policy that plays itself has these

_MAX_OPPONENT_MOVES = 100  # between two turns of the agent


def make(env_id: str) -> Callable[..., object]:
  """Returns a function that makes the game `env_id`. UserError: TextArena has no such ID."""
  construct = packages.registry_constructor('textarena', env_id)
  return packages.adapt(TextArenaEnv, construct, f'textarena:{env_id}', env_id)


class TextArenaEnv(packages.PackageEnv):
  """One game, played from one side or from both."""

  core_metrics = ('won',)  # 1 if the player's reward is 1, or above all others'

  @staticmethod
  def attributes(settings: Mapping[str, object]) -> dict[str, object]:
    """Returns the attributes that depend on the settings. There are roles in self-play only."""
    roles = ROLES if settings.get('opponent') == SELF else ()
    return {**packages.turn_attributes(settings), 'roles': roles}

  def __init__(
      self,
      task: types.Task,
      opponent: str = '',  # '': a game of one player; 'self': the policy
      eval_opponent: str = '',  # in games of other splits than 'train'; '': the same opponent
      side: str = 'first',  # the agent's side in a game of two; 'random': drawn from the seed
      frame: str = '',  # see `attributes`, as `stop_strings`
      stop_strings: Sequence[str] = (),
      **options: Any,
  ):
    if eval_opponent == SELF != opponent:
      raise types.UserError(
          "config.env.options.eval_opponent='self' needs two roles: set opponent='self', too"
      )
    if side not in SIDES:
      raise types.UserError(f'config.env.options.side={side!r}: allowed are {", ".join(SIDES)}')
    if eval_opponent and task.split != 'train':
      opponent = eval_opponent
    del frame, stop_strings
    self._side = side
    self._plays_itself = opponent == SELF
    self._opponent: Callable[[str, random.Random], str] | None = None
    if opponent and not self._plays_itself:
      self._opponent = plugins.load('env.options.opponent', opponent, {})
    self._env = self.construct(**options)
    # The game without its wrappers. Only wrappers of actions have an effect here.
    self._game = self._env
    while hasattr(self._game, 'env'):
      self._game = self._game.env

  def reset(self, seed: int | None = None) -> tuple[str, protocol.RoleResetInfo]:
    """Starts the game of a seed. A scripted opponent may move first."""
    self._rng = random.Random(seed)
    is_second = self._rng.random() < 0.5 if self._side == 'random' else self._side == 'second'
    self._player = int(is_second and self._opponent is not None)  # the policy's number
    self._turns = 0
    num_players = 2 if self._opponent or self._plays_itself else 1
    with packages.explain_errors(
        f'config.env.kind={self.kind!r} cannot be played by {num_players}',
        'a game of two needs --config.env.options.opponent=module:function or self, a game of one '
        'none; games of more are not supported',
    ):
      self._env.reset(num_players=num_players, seed=seed)
    return self._play_opponent() or '', {'role': ROLES[self._player]}

  def step(self, action: str) -> protocol.Step:
    """Plays one turn of the policy, then the moves of a scripted opponent."""
    self._turns += 1
    player = self._player
    errors = self._num_errors()
    is_over, info = self._env.step(action)
    is_invalid = self._num_errors() > errors
    observation = None if is_over else self._play_opponent()
    metrics = packages.numbers(info) | {'moves': float(self._turns)}
    if observation is not None:
      step_info: protocol.RoleStepInfo = {
          'role': ROLES[self._player],
          'action': 'invalid' if is_invalid else 'move',
          'metrics': {**metrics, 'won': 0.0},
      }
      return observation, 0.0, False, False, step_info
    rewards, infos = self._env.close()
    rewards = {number: float(reward) for number, reward in (rewards or {}).items()}
    is_invalid |= bool((infos.get(player) or {}).get('invalid_move'))
    step_info = {
        'action': 'invalid' if is_invalid else 'move',
        'metrics': {**metrics, **_final_metrics(rewards, infos, player)},
    }
    if self._plays_itself:
      other = 1 - player
      step_info['rewards'] = {ROLES[other]: rewards.get(other, 0.0)}
      step_info['role_metrics'] = {ROLES[other]: _final_metrics(rewards, infos, other)}
    return '', rewards.get(player, 0.0), True, False, step_info

  def _play_opponent(self):
    """Plays a scripted opponent until it is the policy's turn.

    Returns what the policy's player has not read yet, or None if the game is over.
    """
    for _ in range(_MAX_OPPONENT_MOVES):
      player, messages = self._game.get_observation()
      text = _as_text(messages, player)
      if player == self._player or self._opponent is None:
        self._player = player
        return text.strip()
      is_over, _ = self._env.step(self._opponent(text, self._rng))
      if is_over:
        return None
    raise RuntimeError(f'{_MAX_OPPONENT_MOVES} moves of the opponent, and none of the agent')

  def _num_errors(self):
    return getattr(self._game.state, 'error_count', 0)


def _final_metrics(rewards, infos, player):
  """Returns the metrics of a player at the end of a game."""
  reward = rewards.get(player, 0.0)
  others = [other for number, other in rewards.items() if number != player]
  has_won = reward >= 1 or bool(others) and reward > max(others)
  return packages.numbers(infos.get(player) or {}) | {'won': float(has_won)}


def _as_text(messages, player):
  """Returns new messages as text, without the player's own."""
  if isinstance(messages, str):
    return messages
  return '\n'.join(str(text).strip() for sender, text, _ in messages if sender != player)
