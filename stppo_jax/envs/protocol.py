"""The interface of an environment to the rollout: methods, random state and settings.

An environment is named by `config.env.kind`: a short name or a prefix of components.py (such as
'search', 'gem:ID'), or `module:attribute`. Its interface is that of GEM: `reset` and `step`. It may
also have these class attributes:

  stop_strings   texts that end a turn of the agent; the eos token always does.    Default: ()
  frame          where an observation goes: 'inline' appends its text to the agent's turn, 'user'
                 and 'tool' make it a turn of the chat template.                   Default: 'inline'
  core_metrics   those of `info['metrics']` that are scores, the main one first.   Default: ()
  uses_global_random   False means that Python's and NumPy's global random state are not used and
                 need no isolation.                                                Default: True
  roles          names of the agents that move in turn, where there are several.   Default: ()
  load_tasks     a function split -> list of Task, of an environment that brings its own: they are
                 played where `config.data.source` is left at 'embedded'.          Default: None
  attributes     a function of the settings (constructor's arguments by keyword) -> dict of those of
                 the above that depend on them.                                    Default: none

`step` may return in `info`: `metrics` (a dict of numbers, of which the last value of an episode
counts), `action` (the kind of action, 'invalid' where there was none), `prefix` and `suffix` (text
around the observation), `retrieval_failed` (masks the episode out of the update). Rewards stay on
their turn.

An exception in the environment's code ends its episode, which is masked out of the update and
counted. `config.rollout.max_failed` says in how many episodes of a batch that may happen.

With `roles`, `info['role']` of `reset` and of each `step` names the role that moves next, and the
observation is what that role reads: all that it may know of what happened since its last turn. Its
first one is its prompt. No role reads what another one read. `step` returns the reward of the role
that has moved, and `info['rewards']`, {role: reward}, adds to the last turn of each role that it
names; a role that has not moved yet has none. `metrics` are those of every role, and
`info['role_metrics']`, {role: {name: number}}, those of one. A limit that one role reaches ends the
episode of all.

The constructor is called with the task, then by keyword with all of `config.env.options`, and with
those of `retriever`, `top_k`, `max_searches` (or `max_turns`), `prompt`, `reward` and, where config.env.tools names
some, `tools` for which it has a parameter of that name. Options win over these.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import difflib
import importlib
import inspect
import logging
import math
import random
import reprlib
import threading
import traceback
from typing import Any
from typing import Protocol
from typing import runtime_checkable
import zlib

from absl import logging as absl_logging
import numpy as np

from stppo_jax import plugins
from stppo_jax import types

FRAMES = ('inline', 'user', 'tool')
Step = tuple[str, float, bool, bool, dict[str, Any]]

_BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
_GLOBAL_RANDOM = threading.RLock()  # held while the global random state is that of an environment


@runtime_checkable
class Env(Protocol):
  """Plays one episode at a time. Terminated and truncated may both be true: a limit ended it."""

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Starts an episode: (first observation, info)."""
    ...

  def step(self, action: str) -> Step:
    """Takes the agent's text: (observation, reward, terminated, truncated, info)."""
    ...


@dataclasses.dataclass(frozen=True)
class Kind:
  """An environment class with its settings; called with (task, seed) to make one environment."""

  make: Callable[..., Env]
  settings: Mapping[str, Any]  # keyword arguments
  stop_strings: tuple[str, ...]
  frame: str
  core_metrics: tuple[str, ...]
  uses_global_random: bool
  load_tasks: Callable[[str], list[types.Task]] | None = None
  roles: tuple[str, ...] = ()

  @property
  def num_roles(self) -> int:
    """Rows per episode."""
    return max(1, len(self.roles))

  def __call__(self, task: types.Task, seed: int) -> Env:
    make = lambda: self.make(task, **self.settings)
    try:
      env = Isolated(make, seed) if self.uses_global_random else make()
    except _EXPECTED:
      raise
    except Exception as error:  # the environment's code may raise anything
      return _Unmade(getattr(self.make, '__qualname__', type(self.make).__name__), error)
    for name in ('stop_strings', 'frame', 'core_metrics', 'roles'):  # read before there is one
      ours, theirs = getattr(self, name), getattr(env, name, None)
      if name == 'frame' and theirs not in FRAMES:  # of a video, say
        continue
      if name == 'roles' and not (ours or isinstance(theirs, tuple)):  # another package's
        continue
      theirs = tuple(theirs) if isinstance(theirs, list) else theirs
      if theirs is not None and theirs != ours:
        raise types.UserError(
            f'the environment has {name}={theirs!r}, and what config.env.kind names has {ours!r}: '
            f'set {name} on the class, or on the function that makes it'
        )
    return env


def make_kind(name: str, make: Any, offered: Mapping[str, Any], options: Mapping[str, Any]) -> Kind:
  """Checks the class `make`, called `name`; chooses its settings from `offered` and `options`."""
  if not callable(make):
    raise types.UserError(f'config.env.kind={name!r}: a class is needed, not {make!r}')
  parameters = list(inspect.signature(make).parameters.values())
  if not parameters or parameters[0].kind in _BY_KEYWORD:
    raise types.UserError(
        f'config.env.kind={name!r}: its constructor takes no task: let its first argument be `task`'
    )
  parameters = parameters[1:]  # without the task
  named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
  if not takes_any and (unknown := sorted(set(options) - set(named))):
    raise types.UserError(
        f'config.env.options names {", ".join(unknown)}: {name} takes {", ".join(named) or "none"}'
    )
  settings = {key: value for key, value in offered.items() if key in named} | dict(options)
  missing = [
      p.name
      for p in parameters
      if p.default is p.empty
      and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
      and p.name not in settings
  ]
  if missing:
    raise types.UserError(
        f'config.env.kind={name!r} needs {", ".join(missing)}: set '
        f'--config.env.options.{missing[0]}=..'
    )
  depend = make.attributes(settings) if hasattr(make, 'attributes') else {}
  attribute: Callable[[str, Any], Any] = lambda key, default: depend.get(
      key, getattr(make, key, default)
  )
  kind = Kind(
      make,
      settings,
      _texts(name, 'stop_strings', attribute('stop_strings', ())),
      attribute('frame', 'inline'),
      _texts(name, 'core_metrics', attribute('core_metrics', ())),
      bool(attribute('uses_global_random', True)),
      attribute('load_tasks', None),
      _texts(name, 'roles', attribute('roles', ())),
  )
  _check_roles(name, kind.roles)
  if kind.frame not in FRAMES:
    raise types.UserError(
        f'config.env.kind={name!r}: its frame is {kind.frame!r}; allowed are {", ".join(FRAMES)}'
    )
  return kind


class Isolated:
  """An environment with a Python and NumPy global random state of its own, kept between its calls.

  The state starts from the episode's seed. So an environment that draws from the global state
  without seeding it plays another game in each episode, and the same games in a repeated run. One
  that seeds it changes nothing for others. A lock makes this hold with threads: the calls of such
  environments do not overlap.
  """

  def __init__(self, make: Callable[[], Env], seed: int):
    self._state = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()
    self._env = self._run(make)

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Calls the environment's `reset` in its own random state."""
    return self._run(self._env.reset, seed=seed)

  def step(self, action: str, **kwargs: Any) -> Step:
    """Calls the environment's `step` in its own random state."""
    return self._run(self._env.step, action, **kwargs)

  def __getattr__(self, name: str) -> Any:
    if name == '_env':  # not made yet
      raise AttributeError(name)
    return getattr(self._env, name)

  def _run(self, function, *args, **kwargs):
    with _GLOBAL_RANDOM:
      outer = random.getstate(), np.random.get_state()
      try:
        _set_global_random(self._state)
        return function(*args, **kwargs)
      finally:
        self._state = random.getstate(), np.random.get_state()
        _set_global_random(outer)


_EXPECTED = (types.UserError, types.RunError, types.Stopped)  # end or stop a run as they are


class _Unmade:
  """Stands for an environment whose constructor raised an error, which `reset` raises again."""

  def __init__(self, name: str, error: Exception):
    self.name, self._error = name, error

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    del seed
    raise self._error

  def step(self, action: str) -> Step:
    raise AssertionError(f'{self.name} was not made, and got {action!r}')


def _raised(env: Any, error: Exception) -> dict[str, str]:
  """Returns the `info` of an environment that raised an error: a line, and the traceback."""
  line = ' '.join(f'{_class_of(env)} raised {type(error).__name__}: {error}'.split())
  return {
      'environment_error': f'the environment {line[:500]} ({plugins.raised_at(error)})',
      'traceback': ''.join(traceback.format_exception(error)),
  }


def reset(env: Any, seed: int) -> tuple[str, Any]:
  """Resets an environment. UserError: it returned something else than (observation, info).

  If it raises, `info` has 'environment_error', a line, and 'traceback'.
  """
  try:
    found = env.reset(seed=seed)
  except _EXPECTED:
    raise
  except Exception as error:  # the environment's code may raise anything
    return '', _raised(env, error)
  if isinstance(found, tuple) and len(found) == 2:
    observation, info = found
    if isinstance(observation, str) and isinstance(info, Mapping):
      return found
  raise types.UserError(
      f'reset of {_class_of(env)} returned {reprlib.repr(found)}: needed are '
      '(observation, info), a text and a dict'
  )


def step(env: Any, action: str, **passages: Any) -> Step:
  """Steps an environment. UserError: it returned something else than GEM's five.

  If it raises, its episode ends, and `info` has 'environment_error', a line, and 'traceback'.
  """
  try:
    found = env.step(action, **passages)
  except _EXPECTED:
    raise
  except Exception as error:  # the environment's code may raise anything, on a model's text
    return '', 0.0, True, False, {'action': 'error', **_raised(env, error)}
  if isinstance(found, tuple) and len(found) == 5:
    observation, _, terminated, truncated, info = found
    over = terminated in (True, False) and truncated in (True, False)
    if over and isinstance(observation, str) and isinstance(info, Mapping):
      return found
  raise types.UserError(
      f'step of {_class_of(env)} returned {reprlib.repr(found)}: needed are (observation, '
      'reward, terminated, truncated, info), a text, a number, two booleans and a dict'
  )


def _class_of(env):
  if isinstance(env, _Unmade):
    return env.name
  return type(env._env if isinstance(env, Isolated) else env).__qualname__


def step_all(
    envs: Sequence[Any], actions: Sequence[str], map_all: Callable[..., Iterable] = map
) -> list[Step]:
  """Steps every environment once, with one search per (retriever, top_k) for all of them.

  An environment takes part in the shared search if it has `query(action) -> str | None`,
  `retriever`, `top_k`, and a `step` that accepts `passages`. The others are stepped by `map_all`:
  one by one, or that of a pool of threads.
  """
  if len(envs) != len(actions):
    raise AssertionError(f'{len(envs)} environments but {len(actions)} actions')
  rounds: dict[tuple[int, int], list[tuple[int, str]]] = {}
  for row, (env, action) in enumerate(zip(envs, actions)):
    query = _query(env, action) if _shares_search(env) else None
    if query is not None:
      rounds.setdefault((id(env.retriever), env.top_k), []).append((row, query))
  fetched = {}
  for (_, top_k), wanted in rounds.items():
    rows, queries = zip(*wanted)
    found = envs[rows[0]].retriever.search(list(queries), top_k)
    _check_found(found, len(rows))
    fetched.update(zip(rows, found))
  alone = [row for row in range(len(envs)) if row not in fetched]
  steps = dict(zip(alone, map_all(lambda row: step(envs[row], actions[row]), alone)))
  for row, passages in fetched.items():
    steps[row] = step(envs[row], actions[row], passages=passages)
  return [steps[row] for row in range(len(envs))]


def _query(env, action):
  """Returns what the environment wants to search; None where it raises, as its `step` then may."""
  try:
    return env.query(action)
  except _EXPECTED:
    raise
  except Exception:
    return None


def _check_found(found, number):
  """Refuses results that are not a list of passages, or None, for each query."""
  whole = isinstance(found, list | tuple) and len(found) == number
  if not whole or not all(_is_passages(of_query) for of_query in found if of_query is not None):
    raise types.UserError(
        f'the retriever returned {reprlib.repr(found)} for {number} queries: needed is for each a '
        'list of stppo_jax.types.Passage, or None where its search failed'
    )


def _is_passages(found):
  return isinstance(found, list | tuple) and all(isinstance(x, types.Passage) for x in found)


def _shares_search(env):
  """Whether the environment has what `step_all` needs; names alone may mean something else."""
  has_retriever = getattr(env, 'retriever', None) is not None and hasattr(env, 'top_k')
  return has_retriever and callable(getattr(env, 'query', None))


def full_text(observation: str, info: Mapping[str, Any]) -> str:
  """Returns the observation between `info['prefix']` and `info['suffix']`, as GEM's wrappers show
  it.

  Inserts a line break where two of the three would meet without white space.
  """
  text = ''
  for part in (info.get('prefix') or '', observation, info.get('suffix') or ''):
    if text and part and not text[-1].isspace() and not part[0].isspace():
      text += '\n'
    text += part
  return text


def _set_global_random(state):
  python_state, numpy_state = state
  random.setstate(python_state)
  np.random.set_state(numpy_state)


def _texts(name, attribute, texts):
  """Returns an attribute that is a tuple of texts. UserError: anything else, a single text too."""
  if isinstance(texts, str) or not all(isinstance(text, str) and text for text in texts):
    raise types.UserError(
        f'config.env.kind={name!r}: its {attribute} is {texts!r}; a tuple of texts is needed'
    )
  return tuple(texts)


def _check_roles(name, roles):
  """UserError unless there are none, or two and more with names that metrics can have."""
  if roles and (len(set(roles)) < max(2, len(roles)) or not all(map(str.isidentifier, roles))):
    raise types.UserError(
        f'config.env.kind={name!r}: its roles are {roles!r}; two or more different names of '
        'letters, digits and _ are needed, or () for one agent'
    )


def import_peer(kind: str, module: str, extra: str) -> Any:
  """Imports the package of an adapter. UserError: it is not there; `extra` installs it.

  Handlers that it adds to the root logger are removed.
  """
  handlers, level = list(logging.root.handlers), logging.root.level
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise types.UserError(
        f'config.env.kind={kind!r} needs the package {module} ({error}): '
        f'pip install -r requirements-{extra}.txt'
    ) from error
  finally:
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> types.UserError:
  """Returns the error for an ID that a package does not have, with those that are like it."""
  known = sorted(known)
  lower = {other.lower(): other for other in known}
  near = difflib.get_close_matches(name.lower(), lower, n=4, cutoff=0.4)
  shown = ', '.join([lower[other] for other in near] or known[:8])
  return types.UserError(
      f'config.env.kind={kind!r}: there is no {name!r} among its {len(known)} environments; '
      f'{"close to it" if near else "there"} are {shown}'
  )


NUM_SEEDS = {'train': 10_000}  # and 256 of any other split


def seed_tasks(dataset: str, split: str) -> list[types.Task]:
  """Makes the tasks of a procedural environment: a task is its seed, and no two splits share one.

  They may still share an instance, where a game has few.
  """
  start = 0 if split == 'train' else NUM_SEEDS['train'] + zlib.crc32(split.encode()) % 2**30
  return [
      types.Task(f'{split}-{seed}', dataset=dataset, split=split, seed=seed)
      for seed in range(start, start + NUM_SEEDS.get(split, 256))
  ]


def numbers(info: Mapping[str, Any]) -> dict[str, float]:
  """Returns the finite numbers of an info dict: what an environment of another package logs."""
  found = {}
  for name, value in info.items():
    if isinstance(value, bool | int | float | np.number) and math.isfinite(value):
      found[str(name)] = float(value)
  return found


def failed_step(error: Exception, metrics: Mapping[str, float]) -> Step:
  """Returns the end of an episode whose remote environment failed: not trained on, and counted.

  As for a failed search, the batch is played again later if this happens in many episodes.
  """
  absl_logging.log_first_n(absl_logging.WARNING, 'an environment raised %r in a step', 3, error)
  info = {
      'action': 'error',
      'retrieval_failed': True,
      'metrics': {**metrics, 'environment_failed': 1.0},
  }
  return '', 0.0, True, True, info
