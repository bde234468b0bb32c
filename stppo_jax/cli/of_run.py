"""The config in a run's folder, which modes that read a run take where no --config is given."""

import argparse
import dataclasses
import os
from typing import Any

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.monitoring import workdir as workdirs

_MODES = ('eval', 'export', 'sample', 'serve', 'chat')


def named(arguments: list[str]) -> str:
  """Returns FILE:WORKDIR for --config, if the command line reads a run's folder; else ''."""
  parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
  for name in ('config', 'mode', 'workdir'):
    parser.add_argument(f'--{name}', f'-{name}', default='')
  try:
    given = parser.parse_known_args(arguments)[0]
  except argparse.ArgumentError:  # absl says what is wrong
    return ''
  is_of_run = given.mode in _MODES and not given.config
  has_one = given.workdir and os.path.exists(os.path.join(given.workdir, 'config.json'))
  if not is_of_run or not has_one:
    return ''
  get_config(given.workdir)  # or an error, which config_flags would wrap in one of its own
  return f'{__file__}:{given.workdir}'


def get_config(workdir: str) -> schema.Config:
  """Returns the config in WORKDIR/config.json. UserError: it is of another version."""
  config, values = schema.Config(), workdirs.read_config(workdir)
  values = {name: value for name, value in values.items() if name not in workdirs.BESIDE}
  if unknown := _fill(config, values, ''):
    raise types.UserError(
        f'{workdir}/config.json has {", ".join(unknown)}, which this version does not know: give '
        'the --config of the run'
    )
  return config


def _fill(section: Any, values: dict[str, Any], prefix: str) -> list[str]:
  """Sets the fields of a section; returns the paths that it does not have."""
  unknown = []
  for name, value in values.items():
    inner = getattr(section, name, None)
    is_section = dataclasses.is_dataclass(inner)
    if not hasattr(section, name) or (is_section and not isinstance(value, dict)):
      unknown.append(prefix + name)
    elif is_section:
      unknown += _fill(inner, value, f'{prefix}{name}.')
    else:
      is_tuple = isinstance(value, list)  # JSON has no tuples
      setattr(section, name, tuple(value) if is_tuple else value)
  return unknown
