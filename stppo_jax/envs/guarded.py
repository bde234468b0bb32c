"""Environments whose methods are called through a guard."""

from collections.abc import Callable
import functools
from typing import Any

from stppo_jax.envs import guard as guard_lib
from stppo_jax.envs import protocol


class GuardedEnv:
  """An environment whose methods are called through a guard."""

  def __init__(self, make: Callable[[], protocol.Env], guard: guard_lib.Guard):
    self.guard = guard
    self.env = self._run('__init__', make)

  def reset(self, seed: int | None = None) -> tuple[str, protocol.ResetInfo]:
    """Calls the environment's `reset`."""
    return self._run('reset', self.env.reset, seed=seed)

  def step(self, action: str, **kwargs: Any) -> protocol.Step:
    """Calls the environment's `step`."""
    return self._run('step', self.env.step, action, **kwargs)

  def __getattr__(self, name: str) -> Any:
    if name == 'env':  # its constructor is still running
      raise AttributeError(name)
    value = getattr(self.env, name)
    if name == 'query' and callable(value):
      return functools.partial(self.guard.call, name, value)
    return value

  def _run(self, name, function, *args, **kwargs):
    return self.guard.call(name, function, *args, **kwargs)
