"""Makes environments: checks the class and its settings once, then makes one per episode."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import inspect
import re
from typing import Any

from stppo_jax import types
from stppo_jax.envs import guard as guard_lib
from stppo_jax.envs import guarded
from stppo_jax.envs import protocol
from stppo_jax.text import thoughts
from stppo_jax.text import tokenizer

ENDS_RUN = (types.UserError, types.RunError, types.Stopped)  # other errors end one episode

# Names, and groups of names, of the run's own metrics. A core metric would take their place.
_OF_THE_RUN = frozenset(
    'absent actor advantages agent_tokens agent_turns critic demonstrations engine env health mix '
    'moe num_turns outcome perf pipeline program prompt_length response_length returns role '
    'rollout rollout_corr score stppo timing_s token_share train values'.split()
)
_LOOKS_LIKE_ANOTHER = re.compile(r'^pass[@^]|^val-|_hops\d+$')


@dataclasses.dataclass(frozen=True)
class EnvFactory:
  """An environment class with its settings. `factory(task, seed)` makes one environment."""

  make: Callable[..., protocol.Env]
  settings: Mapping[str, Any]  # keyword arguments of `make`
  stop_strings: tuple[str, ...] = ()
  frame: str = 'inline'
  core_metrics: tuple[str, ...] = ()
  roles: tuple[str, ...] = ()
  uses_global_random: bool = True
  stops_in_thoughts: bool = True
  load_tasks: Callable[[str], list[types.Task]] | None = None

  @property
  def rows_per_episode(self) -> int:
    """One row for each agent. A program's episode may have more."""
    return max(1, len(self.roles))

  @property
  def is_program(self) -> bool:
    """Whether an agent program plays the episodes, see program.py."""
    return getattr(self.make, 'is_program', False)

  @property
  def skips_thoughts(self) -> bool:
    """Whether a stop string in a thought ends no turn."""
    has_tags = thoughts.owns_tags(self.stop_strings)
    return bool(self.stop_strings) and has_tags and not self.stops_in_thoughts

  @property
  def frames(self) -> tuple[str, ...]:
    """The frames of its observations."""
    return (self.frame,)

  @property
  def turn_end(self) -> tokenizer.TurnEnd:
    """What ends a turn of the agent."""
    return self.stop_strings, self.skips_thoughts

  @property
  def turn_ends(self) -> tuple[tokenizer.TurnEnd, ...]:
    """What ends the turns of all episodes, see `tokenizer.joint_stop_automaton`."""
    return (self.turn_end,)

  def of(self, task: types.Task) -> 'EnvFactory':
    """Returns the factory that makes the environment of a task."""
    del task
    return self

  def first_state(self, task: types.Task) -> int:
    """Returns the state of the stop automaton in which the turns of a task begin."""
    index = self.turn_ends.index(self.of(task).turn_end)
    return tokenizer.first_states(self.turn_ends)[index]

  def policies(self, role_parameters: str) -> tuple[str, ...]:
    """Returns names of the policies that are trained: one per role, or '' for one that plays all.

    Args:
      role_parameters: config.model.role_parameters.
    """
    if role_parameters == 'shared':
      return ('',)
    if not self.roles:
      raise types.UserError(
          "config.model.role_parameters='own': the environment has one agent and no roles: set it "
          "to 'shared'"
      )
    return self.roles

  def has_rows_of(self, episodes: Sequence[types.Episode]) -> bool:
    """Returns whether each of these episodes has the rows that this environment gives."""
    names = self.roles or ('',)
    num_episodes = len(episodes) // len(names)
    return sorted(episode.role for episode in episodes) == sorted(names * num_episodes)

  def __call__(
      self, task: types.Task, seed: int, guard: guard_lib.Guard = guard_lib.IN_PLACE
  ) -> protocol.Env:
    """Makes the environment of one episode. If its constructor raises, its `reset` does."""
    make = lambda: self.make(task, **self.settings)
    env: Any
    try:
      if self.uses_global_random:
        from stppo_jax.envs import isolation

        env = isolation.IsolatedEnv(make, seed, guard)
      elif guard is guard_lib.IN_PLACE:
        env = make()
      else:
        env = guarded.GuardedEnv(make, guard)
    except ENDS_RUN:
      raise
    except Exception as error:  # the environment's code may raise anything
      return FailedEnv(getattr(self.make, '__qualname__', type(self.make).__name__), error)
    for name in ('stop_strings', 'frame', 'core_metrics', 'roles'):
      self._check_attribute(name, getattr(env, name, None))
    return env

  def _check_attribute(self, name, value):
    """Checks that an instance has the attributes of its class, from which sampling was set up."""
    declared = getattr(self, name)
    if isinstance(value, list):
      value = tuple(value)
    if value is None or value == declared:
      return
    # Another package's environments may use these names for something else.
    if name == 'frame' and value not in protocol.FRAMES:
      return
    if name == 'roles' and not declared and not isinstance(value, tuple):
      return
    raise types.UserError(
        f'the environment has {name}={value!r}, but the class that config.env.kind names has '
        f'{declared!r}: set {name} on the class, or on the function that makes it'
    )


def make_factory(
    name: str, make: object, offered: Mapping[str, object], options: Mapping[str, object]
) -> EnvFactory:
  """Returns the factory of the class `make`, which `config.env.kind` calls `name`.

  The settings are those of `offered` that the constructor names, and all of `options`. UserError:
  the constructor does not accept them, or an attribute of the class is wrong.
  """
  given = f'config.env.kind={name!r}'
  if not callable(make):
    raise types.UserError(f'{given}: a class is needed, not {make!r}')
  signature = inspect.signature(make)
  settings = {key: value for key, value in offered.items() if key in signature.parameters}
  settings |= options
  try:
    signature.bind(None, **settings)
  except TypeError as error:
    raise types.UserError(
        f'{given} with config.env.options={dict(options)!r}: {error}. The constructor takes '
        f'({", ".join(signature.parameters)}): the first parameter is the task, and '
        '--config.env.options.NAME=VALUE sets the others'
    ) from error
  attributes = {
      field.name: getattr(make, field.name)
      for field in dataclasses.fields(EnvFactory)[2:]
      if hasattr(make, field.name)
  }
  if hasattr(make, 'attributes'):
    attributes |= make.attributes(settings)
  for key in ('stop_strings', 'core_metrics', 'roles'):
    values = attributes.get(key, ())
    if isinstance(values, str) or not all(isinstance(text, str) and text for text in values):
      raise types.UserError(f'{given}: its {key} is {values!r}; a tuple of strings is needed')
    attributes[key] = tuple(values)
  if 'load_tasks' in attributes and attributes['load_tasks'] is None:  # a task is a seed
    from stppo_jax.envs import packages  # few environments need it

    dataset = name.rpartition(':')[2]
    attributes['load_tasks'] = functools.partial(packages.seed_tasks, dataset)
  if reserved := list(filter(is_reserved, attributes['core_metrics'])):
    raise types.UserError(
        f'{given}: its core_metrics name {", ".join(reserved)}, as metrics of the run are called: '
        'give other names'
    )
  factory = EnvFactory(make, settings, **attributes)
  if factory.frame not in protocol.FRAMES:
    raise types.UserError(
        f'{given}: its frame is {factory.frame!r}; allowed are {", ".join(protocol.FRAMES)}'
    )
  roles = factory.roles
  are_names = all(role.isidentifier() for role in roles)  # parts of the names of metrics
  if roles and not (are_names and len(set(roles)) == len(roles) > 1):
    raise types.UserError(
        f'{given}: its roles are {roles!r}; two or more different names of letters, digits and _ '
        'are needed, or () for one agent'
    )
  return factory


def is_reserved(name: str) -> bool:
  """Returns whether a core metric cannot have this name, because the run writes one of its own."""
  is_of_the_run = name.partition('/')[0] in _OF_THE_RUN
  return is_of_the_run or _LOOKS_LIKE_ANOTHER.search(name) is not None


class FailedEnv:
  """Stands for an environment whose constructor raised an error. `reset` raises it again."""

  def __init__(self, name: str, error: Exception):
    self.name = name
    self._error = error

  def reset(self, seed: int | None = None) -> tuple[str, protocol.ResetInfo]:
    """Raises the constructor's error."""
    del seed
    raise self._error

  def step(self, action: str) -> protocol.Step:
    """Is never called."""
    raise AssertionError(f'{self.name} has no episode for {action!r}')


def class_name(env: object) -> str:
  """Returns the name of an environment's class for messages."""
  if isinstance(env, FailedEnv):
    return env.name
  inner = env.env if isinstance(env, guarded.GuardedEnv) else env
  return type(inner).__qualname__
