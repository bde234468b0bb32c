"""An agent program in place of an environment: a function that talks to the model by itself.

`env.kind='gateway:module:attribute'` names a function

  program(task: dict, base_url: str, model: str, **options) -> reward, or None

`task` has the fields of types.Task, `base_url` is that of an OpenAI client, and `model` its model.
What the client does at this address is the episode, see serving/rollouts.py.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

from stppo_jax import types
from stppo_jax.envs import protocol

PREFIX = 'gateway'  # of `env.kind`


@dataclasses.dataclass(frozen=True)
class Program:
  """Makes the environments of an agent program; they stand for it until it is started."""

  function: Callable[..., float | None]
  options: Mapping[str, Any]
  reward: Callable[..., float]  # (task, answer, transcript), where the program gives none

  def __call__(self, task: types.Task) -> '_Started':
    return _Started(task)

  def run(self, task: types.Task, base_url: str, model: str) -> float | None:
    """Runs one episode; raises whatever the program raises."""
    return self.function(dataclasses.asdict(task), base_url, model, **self.options)


class _Started:
  """What the checks before a run see of an episode: the question as its first observation."""

  def __init__(self, task: types.Task):
    self._task = task

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Returns the question, or the id of a task without one."""
    del seed
    return self._task.question or self._task.id, {}

  def step(self, action: str) -> protocol.Step:
    """Is never called."""
    raise AssertionError('an agent program takes its steps itself')


def make_kind(
    name: str, function: Any, options: Mapping[str, Any], reward: Callable
) -> protocol.Kind:
  """Returns the Kind of a program called `name`. UserError: it is not a function."""
  if not callable(function):
    raise types.UserError(f'config.env.kind={name!r}: a function is needed, not {function!r}')
  program = Program(function, dict(options), reward)
  return protocol.Kind(program, {}, (), 'inline', (), uses_global_random=False)
