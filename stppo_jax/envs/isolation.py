"""Environments that draw from the global random generators, each with its own state of them."""

from collections.abc import Callable
import contextvars
import random
import threading

import numpy as np

from stppo_jax.envs import guard as guard_lib
from stppo_jax.envs import guarded
from stppo_jax.envs import protocol

_GLOBAL_RANDOM = threading.Lock()  # held while the global random state is an environment's
_HOLDS = contextvars.ContextVar('holds', default=False)  # whether this call is made under the lock


class IsolatedEnv(guarded.GuardedEnv):
  """An environment with its own state of Python's and NumPy's global random generators.

  The state starts from the episode's seed and is kept between calls. So an environment that draws
  from the global generators without seeding them plays a different game in each episode, and the
  same games in a repeated run. A lock keeps calls in different threads apart. A call that is
  left running loses the lock, and what it still draws is drawn from the process's state.
  """

  def __init__(
      self, make: Callable[[], protocol.Env], seed: int, guard: guard_lib.Guard = guard_lib.IN_PLACE
  ):
    self._state = (random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())
    super().__init__(make, guard)

  def _run(self, name, function, *args, **kwargs):
    holds_already = _HOLDS.get()  # an environment within an environment
    if not holds_already:
      self.guard.acquire(_GLOBAL_RANDOM)
    token = _HOLDS.set(True)
    outer = _global_random()
    try:
      _set_global_random(self._state)
      if holds_already:
        return function(*args, **kwargs)
      return self.guard.call(name, function, *args, **kwargs)
    finally:
      self._state = _global_random()
      _set_global_random(outer)
      _HOLDS.reset(token)
      if not holds_already:
        _GLOBAL_RANDOM.release()


def _global_random():
  return random.getstate(), np.random.get_state()


def _set_global_random(state):
  python_state, numpy_state = state
  random.setstate(python_state)
  np.random.set_state(numpy_state)
