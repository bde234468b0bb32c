"""An agent program in place of an environment: a function that calls the model itself.

`env.kind='gateway:module:attribute'` names a function

  program(task: dict, base_url: str, model: str, **options) -> reward, or None

`task` has the fields of types.Task. `base_url` and `model` are for an OpenAI client. The client's
requests to this address are the episode, see serving/rollouts.py. The function may be `async`.
"""

import asyncio
from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import inspect
from typing import Any
from typing import ClassVar

from stppo_jax import types
from stppo_jax.envs import factory
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards


@dataclasses.dataclass(frozen=True)
class Result:
  """What a program gave that runs in another process."""

  reward: float | None
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Program:
  """An agent program. Called with a task, it makes a stand-in for the environment."""

  function: Callable[..., Any]  # returns a reward or None, or a coroutine of one
  options: Mapping[str, Any]
  reward: rewards.Reward  # scores the answer if the program returns None
  is_program: ClassVar[bool] = True
  scores_by_itself: ClassVar[bool] = False  # it always gives a reward

  def __call__(self, task: types.Task) -> 'ProgramEnv':
    return ProgramEnv(task)

  def run(self, task: types.Task, base_url: str, model: str) -> float | Result | None:
    """Runs one episode. Raises the program's errors."""
    result = self.function(dataclasses.asdict(task), base_url, model, **self.options)
    if inspect.isawaitable(result):
      return asyncio.run(_wait_for(result))
    return result


async def _wait_for(result: Awaitable[types.T]) -> types.T:
  return await result


class ProgramEnv:
  """Shows the question to the checks before a run. The program plays the episode."""

  def __init__(self, task: types.Task):
    self._task = task

  def reset(self, seed: int | None = None) -> tuple[str, protocol.ResetInfo]:
    """Returns the question, or the id of a task without one."""
    del seed
    return self._task.question or self._task.id, {}

  def step(self, action: str) -> protocol.Step:
    """Is never called."""
    raise AssertionError('an agent program takes its steps itself')


def make_factory(
    name: str, function: object, options: Mapping[str, object], reward: rewards.Reward
) -> factory.EnvFactory:
  """Returns the factory of a program called `name`. UserError: it is not a function."""
  if not callable(function):
    raise types.UserError(f'config.env.kind={name!r}: a function is needed, not {function!r}')
  program = Program(function, dict(options), reward)
  return factory.EnvFactory(program, {}, uses_global_random=False)
