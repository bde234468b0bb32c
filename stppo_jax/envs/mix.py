"""The environments of config.env.mix as one factory: each task is played by its own environment."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from stppo_jax import types
from stppo_jax.envs import factory as factory_lib
from stppo_jax.envs import guard as guard_lib
from stppo_jax.envs import protocol
from stppo_jax.text import tokenizer


@dataclasses.dataclass(frozen=True)
class MixFactory(factory_lib.EnvFactory):
  """Several environments with the same roles. `combine` makes it.

  The attributes of an `EnvFactory` are those that all environments have in common. `of(task)` has
  those of one environment.
  """

  factories: Mapping[str, factory_lib.EnvFactory] = dataclasses.field(default_factory=dict)

  @property
  def frames(self) -> tuple[str, ...]:
    """The frames of all environments."""
    return tuple(dict.fromkeys(factory.frame for factory in self.factories.values()))

  @property
  def turn_ends(self) -> tuple[tokenizer.TurnEnd, ...]:
    """What ends the turns of all environments."""
    return tuple(dict.fromkeys(factory.turn_end for factory in self.factories.values()))

  def of(self, task: types.Task) -> factory_lib.EnvFactory:
    """Returns the factory that makes the environment of a task."""
    return self.factories[task.environment]

  def __call__(
      self, task: types.Task, seed: int, guard: guard_lib.Guard = guard_lib.IN_PLACE
  ) -> protocol.Env:
    """Makes the environment of one episode, which gets the task without the name of the mix."""
    assert isinstance(task, types.MixTask) and task.own is not None
    return self.of(task)(task.own, seed, guard)


def combine(factories: Mapping[str, factory_lib.EnvFactory]) -> MixFactory:
  """Returns the factory of the environments of a mix, by their names.

  UserError: their episodes have other roles, so that they cannot be rows of one batch.
  """
  by_roles: dict[tuple[str, ...], str] = {}
  for name, factory in factories.items():
    by_roles.setdefault(factory.roles, name)
  if len(by_roles) > 1:
    described = []
    for roles, name in by_roles.items():
      described.append(f'{name} has {", ".join(roles) or "one agent"}')
    raise types.UserError(
        f'config.env.mix: {", and ".join(described)}: the environments of a mix need the same '
        'roles, so train the others in a run of their own'
    )

  def common(name: str, default: Any) -> Any:
    """Returns the attribute of all environments, or the default where they differ."""
    values = [getattr(factory, name) for factory in factories.values()]
    return values[0] if values.count(values[0]) == len(values) else default

  never_called: Any = combine  # `MixFactory` calls those of the environments
  frames = [factory.frame for factory in factories.values()]
  stop_strings, _ = common('turn_end', ((), False))
  return MixFactory(
      make=never_called,
      settings={},
      # An engine that gets none samples on, and the stop automaton cuts its turn.
      stop_strings=stop_strings,
      # Which prompt the embedded model gets: one environment with turns needs its chat template.
      frame=next((frame for frame in frames if frame != 'inline'), 'inline'),
      core_metrics=common('core_metrics', ()),
      roles=common('roles', ()),
      uses_global_random=any(factory.uses_global_random for factory in factories.values()),
      stops_in_thoughts=common('stops_in_thoughts', True),
      factories=dict(factories),
  )
