"""Loads plug-ins by name: the short name of a built-in, or `module:attribute`."""

from collections.abc import Mapping
import importlib
import os
import sys
import sysconfig
import traceback
import types
from typing import Any

from stppo_jax.types import hint
from stppo_jax.types import UserError


def load(field: str, name: str, built_in: Mapping[str, Any], prefix: str = '') -> Any:
  """Returns the object of `config.<field>=<name>`: load('env.kind', 'm:Countdown', ENVIRONMENTS).

  `built_in` holds objects, or their 'module:attribute', which is imported when it is named. A
  `prefix` of the setting is not a part of the name, and errors show it.
  UserError: the name is neither a short name nor the name of an object that can be imported.
  """
  if name in built_in:
    value = built_in[name]
    return resolve(value) if isinstance(value, str) else value

  setting = f'config.{field}={prefix + name!r}'
  module_name, _, attribute = name.partition(':')
  has_space = name != ''.join(name.split())
  # Checked before the import, which runs the module. `saved_config` knows names of this form.
  if not (module_name and attribute) or has_space:
    short_names = f'{", ".join(built_in)}, or ' if built_in else ''
    raise UserError(
        f'{setting}: allowed are {short_names}{prefix}module:attribute{hint(name, built_in)}'
    )

  value = import_module(setting, module_name)
  for part in attribute.split('.'):
    if not hasattr(value, part):
      raise UserError(f'{setting}: {module_name} has no {attribute!r}; give one of its names')
    value = getattr(value, part)
  return value


def resolve(path: str) -> Any:
  """Returns the object 'module:attribute' of this package."""
  module_name, _, attribute = path.partition(':')
  return getattr(importlib.import_module(module_name), attribute)


def import_module(setting: str, module_name: str) -> types.ModuleType:
  """Imports a user's module. Any exception becomes a UserError that shows the setting."""
  if os.getcwd() not in sys.path:  # an installed command starts without it
    sys.path.append(os.getcwd())
  try:
    return importlib.import_module(module_name)
  except Exception as error:  # a user's module may raise anything
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = ' '.join(str(error).split())
    raise UserError(
        f'{setting}: cannot import {module_name} ({type(error).__name__}: {message}; '
        f'{frame.filename}:{frame.lineno}); start from the folder that holds it, or install it'
    ) from error


def raised_at(error: BaseException) -> str:
  """Returns FILE:LINE of the user's code that raised an error; else of the last code that ran."""
  frames = traceback.extract_tb(error.__traceback__)
  return user_line(frames) or _line(frames[-1])


def user_line(frames: traceback.StackSummary) -> str:
  """Returns FILE:LINE of the last frame outside this package and its libraries; '' if none is."""
  folders = ('site-packages', sysconfig.get_path('stdlib'), os.path.dirname(__file__))
  libraries = [folder + os.sep for folder in folders]
  user_frames = [
      frame for frame in frames if not any(folder in frame.filename for folder in libraries)
  ]
  return _line(user_frames[-1]) if user_frames else ''


def _line(frame: traceback.FrameSummary) -> str:
  return f'{frame.filename}:{frame.lineno}'
