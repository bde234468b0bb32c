"""The tasks of several environments, and how many of each are in a batch (config.env.mix)."""

import collections
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import zlib

from stppo_jax import types
from stppo_jax.data import tasks as tasks_lib


def tag(name: str, tasks: Sequence[types.Task]) -> list[types.Task]:
  """Returns the tasks of an environment, with its name before their ids and data sets.

  So neither ids nor scores of two environments can be confused. A data set without a name of its
  own has that of the environment.
  """
  tagged: list[types.Task] = []
  for task in tasks:
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(types.Task)}
    fields['id'] = f'{name}.{task.id}'
    has_own_name = task.dataset not in ('unnamed', name)
    fields['dataset'] = f'{name}.{task.dataset}' if has_own_name else name
    tagged.append(types.MixTask(**fields, environment=name, own=task))
  return tagged


class MixStream(tasks_lib.TaskStream):
  """An endless order of the questions of several environments, each with a fixed number per batch.

  The questions of an environment have an order of their own, which depends on the seed and its
  name alone. It stays the same if other environments are added, or have other shares.

  Args:
    tasks: of all environments.
    counts: questions of each environment in a batch, by its name.
    seed: the seed of the run.
  """

  def __init__(self, tasks: list[types.Task], counts: Mapping[str, int], seed: int):
    super().__init__(tasks, sum(counts.values()), seed)
    self._streams = {}
    for name, count in counts.items():
      own = [task for task in tasks if task.environment == name]
      own_seed = zlib.crc32(f'{seed} {name}'.encode())
      self._streams[name] = tasks_lib.TaskStream(own, count, own_seed)

  def take(self, update: int) -> list[types.Task]:
    """Returns the questions of update `update`, counted from 0, one environment after the other."""
    taken = []
    for stream in self._streams.values():
      taken += stream.take(update)
    return taken

  def further(
      self, update: int, attempt: int, replaced: Sequence[types.Task], used: Collection[str]
  ) -> list[types.Task]:
    """Returns a question of the same environment for each of `replaced`, see `TaskStream`."""
    by_environment = collections.defaultdict(list)
    for task in replaced:
      by_environment[task.environment].append(task)
    fresh = {}
    for name, own in by_environment.items():
      further = self._streams[name].further(update, attempt, own, used)
      fresh[name] = iter(further)
    return [next(fresh[task.environment]) for task in replaced]
