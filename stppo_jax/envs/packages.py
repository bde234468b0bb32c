"""Helpers for environments and tools of other packages."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import difflib
import functools
import importlib
import logging
import math
import types as types_lib
from typing import Any
from typing import ClassVar
import zlib

import numpy as np

from stppo_jax import types

NUM_TRAIN_SEEDS = 10_000
NUM_SEEDS = 256  # in any split other than 'train'


def import_package(given: str, module: str, extra: str) -> types_lib.ModuleType:
  """Imports a module that the setting `given` needs. UserError: the extra is not installed.

  Handlers that the package adds to the root logger are removed.
  """
  handlers = list(logging.root.handlers)
  level = logging.root.level
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise types.UserError(
        f'{given} needs the package {module} ({error}): pip install ".[{extra}]"'
    ) from error
  finally:
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def check_name(kind: str, name: str, names: Iterable[str]) -> None:
  """Raises a UserError with similar names unless `name` is one of the package's `names`."""
  names = sorted(names)
  if name not in names:
    shown = difflib.get_close_matches(name, names, n=4, cutoff=0.4) or names[:8]
    raise types.UserError(
        f'config.env.kind={kind!r}: there is no {name!r} among its {len(names)} environments, such '
        f'as {", ".join(shown)}'
    )


def registry_constructor(package: str, env_id: str) -> Callable[..., object]:
  """Returns the constructor of an environment in a package's registry. UserError: it has none.

  The constructor turns the package's errors into a UserError.
  """
  kind = f'{package}:{env_id}'
  given = f'config.env.kind={kind!r}'
  make = import_package(given, package, package).make
  registration = import_package(given, f'{package}.envs.registration', package)
  check_name(kind, env_id, registration.ENV_REGISTRY)

  def construct(**options: Any) -> object:
    with explain_errors(
        f'{given} with options {options!r} cannot be made',
        'change the options; environments over a data set need it on this machine',
    ):
      return make(env_id, **options)

  return construct


class PackageEnv:
  """The base of other packages' environments. Its tasks are seeds."""

  construct: ClassVar[Callable[..., Any]]  # makes the package's environment
  kind: ClassVar[str]  # the value of `config.env.kind`


def adapt(
    env_class: type[PackageEnv], construct: Callable[..., object], kind: str, dataset: str
) -> type[PackageEnv]:
  """Returns the subclass of `env_class` for one of the package's environments."""
  attributes = {
      'construct': staticmethod(construct),
      'kind': kind,
      'load_tasks': functools.partial(seed_tasks, dataset),
  }
  return type(env_class.__name__, (env_class,), attributes)


def turn_attributes(settings: Mapping[str, Any]) -> dict[str, object]:
  """Returns frame and stop strings; by default observations are user turns of the template."""
  return {
      'frame': settings.get('frame', 'user'),
      'stop_strings': tuple(settings.get('stop_strings', ())),
  }


def seed_tasks(dataset: str, split: str) -> list[types.Task]:
  """Returns the tasks of a procedural environment. A task is a seed, and splits share no seed.

  Splits may still share an instance if a game has few.
  """
  seeds = range(NUM_TRAIN_SEEDS)
  if split != 'train':
    start = NUM_TRAIN_SEEDS + zlib.crc32(split.encode()) % 2**30
    seeds = range(start, start + NUM_SEEDS)
  return [types.Task(f'{split}-{seed}', dataset=dataset, split=split, seed=seed) for seed in seeds]


def numbers(info: Mapping[str, object]) -> dict[str, float]:
  """Returns the finite numbers of another package's `info`; they become metrics."""
  return {
      str(name): float(value)
      for name, value in info.items()
      if isinstance(value, bool | int | float | np.number) and math.isfinite(value)
  }


@contextlib.contextmanager
def explain_errors(problem: str, advice: str) -> Iterator[None]:
  """Turns any error of another package into a UserError: `problem` (the error): `advice`."""
  try:
    yield
  except Exception as error:  # the package may raise anything
    raise types.UserError(f'{problem} ({describe(error)}): {advice}') from error


def describe(error: Exception) -> str:
  """Returns an error of another package on one line, for a message."""
  return f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'
