"""Loads plug-ins by their names in the config: a built-in's short name or `module:attribute`."""

from collections.abc import Mapping
import difflib
import hashlib
import importlib
import os
import pathlib
import sys
import sysconfig
import traceback
from typing import Any

from stppo_jax import validation
from stppo_jax.types import UserError


def raised_at(error: BaseException) -> str:
  """Returns FILE:LINE of the user's code that raised an error; else of the last code that ran."""
  frames = traceback.extract_tb(error.__traceback__)
  folders = ('site-packages', sysconfig.get_path('stdlib'), os.path.dirname(__file__))
  others = [folder + os.sep for folder in folders]
  own = [frame for frame in frames if not any(part in frame.filename for part in others)]
  frame = (own or frames)[-1]
  return f'{frame.filename}:{frame.lineno}'


def load(field: str, name: str, built_in: Mapping[str, Any]) -> Any:
  """Returns the object of `config.<field>=<name>`: load('env.kind', 'm:Countdown', ENVIRONMENTS).

  UserError: neither a short name nor something that can be imported.
  """
  given = f'config.{field}={name!r}'
  if name in built_in:
    return built_in[name]
  module_name, colon, attribute = name.partition(':')
  if not colon or module_name != ''.join(module_name.split()):
    near = difflib.get_close_matches(name, built_in, n=1)
    hint = f'; did you mean {near[0]}?' if near else ''
    raise UserError(f'{given}: allowed are {", ".join(built_in)}, or module:attribute{hint}')
  found = _import(given, module_name)
  for part in attribute.split('.'):
    if not hasattr(found, part):
      raise UserError(f'{given}: {module_name} has no {attribute!r}; give one of its names')
    found = getattr(found, part)
  return found


def named(config: Any) -> dict[str, str]:
  """Returns {field: name} of the fields of the config that hold a `module:attribute`.

  Of a field with several, as env.tools, {'env.tools[0]': name, ..}.
  """
  found = {}
  for path, rules, value in validation.fields(config):
    if not rules.plugin:
      continue
    several = isinstance(value, tuple)
    for i, name in enumerate(value if several else (value,)):
      if not isinstance(name, str) or ':' not in name:
        continue
      is_file = path == 'data.source' and os.path.exists(name)  # which is read, not imported
      if not is_file and name.partition(':')[0] not in rules.prefixes:
        field = f'{path}[{i}]' if several else path
        found[field] = name.removeprefix('gateway:')  # an agent program: envs/program.py
  return found


def digests(names: Mapping[str, str]) -> dict[str, str]:
  """Returns {field: digest of the source file} for the names that are `module:attribute`.

  The work folder keeps them, so that a run is not resumed with another plug-in unnoticed. Choice:
  the module's own file alone. What it imports or reads is not covered. UserError as from `load`.
  """
  modules = {
      field: _import(f'config.{field}={name!r}', name.partition(':')[0])
      for field, name in names.items()
      if ':' in name
  }
  sources = {field: getattr(module, '__file__', None) for field, module in modules.items()}
  return {
      field: hashlib.sha256(pathlib.Path(source).read_bytes()).hexdigest()[:16]
      for field, source in sources.items()
      if source
  }


def _import(given, module_name):
  """Imports the module of a name that was `given`; whatever it raises is one line."""
  if os.getcwd() not in sys.path:  # an installed command starts without it
    sys.path.append(os.getcwd())
  try:
    return importlib.import_module(module_name)
  except Exception as error:  # whatever a user's module may raise
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = ' '.join(str(error).split())
    raise UserError(
        f'{given}: cannot import {module_name} ({type(error).__name__}: {message}; '
        f'{frame.filename}:{frame.lineno}); start from the folder that holds it, or install it'
    ) from error
