"""What an environment server and its client send each other beyond OpenEnv's messages.

  serving/env_server.py           plays a class of protocol.py for clients of OpenEnv
  adapters/openenv.py             plays the games of any OpenEnv server, and of this one

An action is {"text": ..}. An observation is {"text": .., "terminated": .., "truncated": ..,
"info": ..}. The reward stands beside it, as OpenEnv has it. If the environment raised an error, the
answer is OpenEnv's error message with the `info` that stepping.py makes of the error.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import math
from typing import Any

from stppo_jax import types
from stppo_jax.envs import factory as factory_lib

HEADER = 'stppo-environment'  # holds the description's digest, in the answer that opens a session
ENVIRONMENT_PATH = '/environment'  # the description
TASKS_PATH = '/tasks'  # ?split=..: the tasks of an environment that has its own


@dataclasses.dataclass(frozen=True)
class Description:
  """The environment class of a server. The client declares the same attributes."""

  name: str
  settings: Mapping[str, Any]  # config.env of the server
  has_tasks: bool  # whether the class has tasks of its own
  frame: str = 'inline'
  stop_strings: tuple[str, ...] = ()
  core_metrics: tuple[str, ...] = ()
  roles: tuple[str, ...] = ()
  stops_in_thoughts: bool = True

  @classmethod
  def of_factory(
      cls, name: str, factory: factory_lib.EnvFactory, settings: Mapping[str, Any]
  ) -> 'Description':
    """Returns the description of the class that a server plays."""
    has_tasks = factory.load_tasks is not None
    plain_settings = json.loads(json.dumps(settings, default=repr))
    attributes = {key: getattr(factory, key) for key in cls._attribute_names()}
    return cls(name, plain_settings, has_tasks, **attributes)

  @classmethod
  def from_dict(cls, fields: Mapping[str, Any]) -> 'Description':
    """Inverts dataclasses.asdict and JSON. Raises TypeError for other fields."""
    return cls(**{key: to_tuples(value) for key, value in fields.items()})

  @classmethod
  def _attribute_names(cls) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)[3:]]

  @property
  def attributes(self) -> dict[str, Any]:
    """The attributes of the class, see protocol.py."""
    return {name: getattr(self, name) for name in self._attribute_names()}

  @property
  def digest(self) -> str:
    """A short text that other descriptions do not have."""
    text = json.dumps(dataclasses.asdict(self), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_task(fields: object) -> types.Task:
  """Returns the task of a JSON object. Raises ValueError."""
  if not isinstance(fields, dict):
    raise ValueError('a task is an object')
  try:
    task = types.Task(**{key: to_tuples(value) for key, value in fields.items()})
  except TypeError as error:
    raise ValueError(str(error)) from None
  for field in dataclasses.fields(task):
    if not types.is_of(getattr(task, field.name), field.type):
      raise ValueError(f'{field.name} must be {types.described(field.type)}')
  return task


def to_tuples(value: Any) -> Any:
  """Replaces lists, which JSON has, by tuples. Objects stay as they are."""
  return tuple(map(to_tuples, value)) if isinstance(value, list) else value


def to_json(value: Any, name: str) -> Any:
  """Returns a value of JSON, from whose text json.loads restores `value` with lists for tuples.

  Raises ValueError: JSON cannot hold a part of it. The message calls the value `name`.
  """
  if value is None or isinstance(value, (str, bool, int)):
    return value
  if getattr(value, 'ndim', None) == 0:  # a number of NumPy or JAX
    value = value.item()
    return value if isinstance(value, (bool, int)) else to_json(float(value), name)
  if isinstance(value, float) and math.isfinite(value):
    return value
  if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
    return {key: to_json(item, f'{name}[{key!r}]') for key, item in value.items()}
  if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
    return [to_json(item, f'{name}[{i}]') for i, item in enumerate(value)]
  raise ValueError(f'{name} is {types.shown(value)}, which JSON cannot hold')
