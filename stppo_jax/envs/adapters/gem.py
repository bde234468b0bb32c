"""GEM's environments: `env.kind='gem:game:GuessTheNumber-v0-easy'`, any ID of its registry.

`env.options` goes to the environment's constructor, except for `frame` and `stop_strings`.
Choice: no wrapper that repeats the history, because the agent's context contains it.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from absl import logging

from stppo_jax import types
from stppo_jax.envs import packages
from stppo_jax.envs import protocol

_SHARED = (
    'env.kind=%r draws the questions of all splits from one data set: held-out scores are those of '
    'questions that are trained on, too'
)


def make(env_id: str) -> Callable[..., object]:
  """Returns a function that makes the environment `env_id`. UserError: GEM has no such ID."""
  construct = packages.registry_constructor('gem', env_id)
  dataset = env_id.replace('/', '_')
  return packages.adapt(GemEnv, construct, f'gem:{env_id}', dataset)


class GemEnv(packages.PackageEnv):
  """One of GEM's environments. Metrics: `success`, `moves` and the numbers in GEM's info.

  GEM also pays for some lost games: a last guess close to the number has a reward of up to .98.
  `success` counts the games that are won.
  """

  core_metrics = ('success',)  # 1 if the rewards of an episode add up to 1, as in a won game
  attributes = staticmethod(packages.turn_attributes)

  def __init__(
      self, task: types.Task, frame: str = '', stop_strings: Sequence[str] = (), **options: Any
  ):
    del task, frame, stop_strings  # `reset` gets the seed, and `attributes` reads the other two
    self._env = self.construct(**options)
    constants = packages.import_package(self.kind, 'gem.utils.constants', 'gem')
    self._terminal_state = constants.TERMINAL_STATE
    if hasattr(self._env, 'dataset') or hasattr(self._env, 'ds'):
      logging.log_first_n(logging.WARNING, _SHARED, 1, self.kind)

  def reset(self, seed: int | None = None) -> tuple[str, protocol.ResetInfo]:
    """Starts the game of a seed."""
    self._total_reward = 0.0
    self._moves = 0
    return self._env.reset(seed=seed)

  def step(self, action: str) -> protocol.Step:
    """Plays one turn. GEM's games answer a text without a move with a negative reward."""
    observation, reward, terminated, truncated, info = self._env.step(action)
    reward = float(reward)
    terminated = bool(terminated)
    self._moves += 1
    self._total_reward += reward
    has_won = terminated and self._total_reward > 1 - 1e-6
    # Questions of one turn set both flags, whatever the answer. Games do at their limit of turns.
    is_cut = bool(truncated) and observation != self._terminal_state
    metrics = packages.numbers(info)
    metrics['moves'] = float(self._moves)
    metrics['success'] = float(has_won)
    action = 'invalid' if reward < 0 else 'move'
    info = info | {'metrics': metrics, 'action': action}
    return observation, reward, terminated, is_cut, info
