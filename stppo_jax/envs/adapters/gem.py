"""GEM's environments: `env.kind='gem:game:GuessTheNumber-v0-easy'`, any ID of its registry.

`env.options` goes to the environment's constructor, except for `frame` and `stop_strings`. Rewards
stay on their turns. Choice: no wrapper that repeats the history, which the agent's context has.
"""

from collections.abc import Mapping
import functools
from typing import Any

from stppo_jax import types
from stppo_jax.envs import protocol


def make(env_id: str) -> Any:
  """Returns what makes the environment `env_id` of a task. UserError: GEM has no such ID."""
  kind = f'gem:{env_id}'
  gem = protocol.import_peer(kind, 'gem', 'gem')
  registry = protocol.import_peer(kind, 'gem.envs.registration', 'gem').ENV_REGISTRY
  if env_id not in registry:
    raise protocol.unknown_name(kind, env_id, registry)
  made: Any = functools.partial(GemEnv, functools.partial(gem.make, env_id), kind)
  made.core_metrics = GemEnv.core_metrics
  made.attributes = attributes
  made.load_tasks = functools.partial(protocol.seed_tasks, env_id.replace('/', '_'))
  return made


def attributes(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the frame and stop strings of these settings: by default turns of the chat template."""
  return {
      'frame': settings.get('frame', 'user'),
      'stop_strings': tuple(settings.get('stop_strings', ())),
  }


class GemEnv:
  """One of GEM's environments. Metrics: `success`, `moves` and the numbers in GEM's info."""

  core_metrics = ('success',)  # 1 where the rewards of an episode reach 1, as GEM's games pay

  def __init__(
      self,
      construct: Any,
      kind: str,
      task: types.Task,
      frame: str = 'user',
      stop_strings: tuple[str, ...] = (),
      **options: Any,
  ):
    del task  # its seed comes with `reset`
    self.frame, self.stop_strings = frame, tuple(stop_strings)
    try:
      self._env = construct(**options)
    except Exception as error:  # another package's; some download a data set
      raise types.UserError(
          f'config.env.kind={kind!r} with options {options!r} cannot be made '
          f'({type(error).__name__}: {" ".join(str(error).split())[:200]}): change the options; '
          'environments over a data set need it on this machine'
      ) from error
    self._earned, self._moves = 0.0, 0

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Starts the game of a seed."""
    self._earned, self._moves = 0.0, 0
    return self._env.reset(seed=seed)

  def step(self, action: str) -> protocol.Step:
    """Plays one turn. A reward below 0 is GEM's for a text without a move: an invalid action."""
    observation, reward, terminated, truncated, info = self._env.step(action)
    reward, self._moves = float(reward), self._moves + 1
    self._earned += reward
    metrics = protocol.numbers(info) | {'moves': float(self._moves)}
    metrics['success'] = float(bool(terminated) and self._earned > 1 - 1e-6)
    info = {**info, 'metrics': metrics, 'action': 'invalid' if reward < 0 else 'move'}
    return observation, reward, bool(terminated), bool(truncated), info
