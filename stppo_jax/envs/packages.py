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
from typing import Any
import zlib

import numpy as np

from stppo_jax import types

NUM_TRAIN_SEEDS = 10_000
NUM_SEEDS = 256  # in any split other than 'train'


def import_package(given: str, module: str, extra: str) -> Any:
  """Imports a module that the setting `given` needs. UserError: the extra is not installed.

  Handlers that the package adds to the root logger are removed.
  """
  handlers = list(logging.root.handlers)
  level = logging.root.level
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise types.UserError(
        f'{given} needs the package {module} ({error}): ' f'pip install ".[{extra}]"'
    ) from error
  finally:
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def check_name(kind: str, name: str, names: Iterable[str]) -> None:
  """Raises a UserError with similar names unless `name` is one of the package's `names`."""
  names = sorted(names)
  if name in names:
    return
  by_lower_case = {other.lower(): other for other in names}
  close = difflib.get_close_matches(name.lower(), by_lower_case, n=4, cutoff=0.4)
  shown = [by_lower_case[lower] for lower in close] or names[:8]
  raise types.UserError(
      f'config.env.kind={kind!r}: there is no {name!r} among its {len(names)} environments; '
      f'{"close to it" if close else "there"} are {", ".join(shown)}'
  )


def registry_constructor(package: str, env_id: str) -> Callable[..., Any]:
  """Returns the constructor of an environment in a package's registry. UserError: it has none.

  The constructor turns the package's errors into a UserError.
  """
  kind = f'{package}:{env_id}'
  given = f'config.env.kind={kind!r}'
  make = import_package(given, package, package).make
  registration = import_package(given, f'{package}.envs.registration', package)
  check_name(kind, env_id, registration.ENV_REGISTRY)

  def construct(**options: Any) -> Any:
    with explain_errors(
        f'{given} with options {options!r} cannot be made',
        'change the options; environments over a data set need it on this machine',
    ):
      return make(env_id, **options)

  return construct


def adapt(
    env_class: Any, construct: Callable[..., Any], kind: str, dataset: str
) -> Callable[..., Any]:
  """Returns a maker of environments for `factory.make_factory`: (task, **settings) -> env.

  Its tasks are seeds. The class attributes are those of `env_class`, which is called with
  (construct, kind, task, **settings).
  """
  make: Any = functools.partial(env_class, construct, kind)
  make.attributes = env_class.attributes
  make.core_metrics = getattr(env_class, 'core_metrics', ())
  make.uses_global_random = getattr(env_class, 'uses_global_random', True)
  make.load_tasks = functools.partial(seed_tasks, dataset)
  return make


def turn_attributes(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns frame and stop strings; by default observations are user turns of the template."""
  return {
      'frame': settings.get('frame', 'user'),
      'stop_strings': tuple(settings.get('stop_strings', ())),
  }


def seed_tasks(dataset: str, split: str) -> list[types.Task]:
  """Returns the tasks of a procedural environment. A task is a seed, and splits share no seed.

  Splits may still share an instance if a game has few.
  """
  start, number = 0, NUM_TRAIN_SEEDS
  if split != 'train':
    start = NUM_TRAIN_SEEDS + zlib.crc32(split.encode()) % 2**30
    number = NUM_SEEDS
  return [
      types.Task(f'{split}-{seed}', dataset=dataset, split=split, seed=seed)
      for seed in range(start, start + number)
  ]


def numbers(info: Mapping[str, Any]) -> dict[str, float]:
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
