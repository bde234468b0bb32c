"""The config in a run's folder, which modes that read a run take where no --config is given.

A folder may come from a stranger. Code, commands, addresses and folders to write to that its
config.json names are used with --trust_workdir only.
"""

import argparse
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import os
import re
from typing import Any

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax import validation
from stppo_jax.monitoring import workdir as workdirs

_ADDRESSES = ('retriever.url', 'eval.address', 'serve.host', 'serve.hosts')
_WRITTEN = ('eval.folder', 'retriever.embeddings')  # folders; one within the run's is its own
_REGISTRIES = ('gem:', 'textarena:', 'reasoning_gym:')  # such a name is looked up, not imported
# The name of a module or host may have other characters than letters, such as a hyphen.
_CODE_OR_ADDRESS = re.compile(r'\S+:\S+|.*://.*', re.DOTALL)
_MAX_SHOWN = 200  # characters of a setting in an error

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


def check_trust(
    workdir: str, config: schema.Config, options: Mapping[str, Mapping[str, Any]]
) -> None:
  """Raises a UserError if the config.json of a folder names what `untrusted` finds."""
  if found := untrusted(workdir, config, options):
    raise types.UserError(
        f'{workdir}/config.json names {", ".join(found)}: code, commands, addresses and folders to '
        'write to are taken from a folder with --trust_workdir only; add it if you trust the '
        'folder, or give your own --config'
    )


def untrusted(
    workdir: str, config: schema.Config, options: Mapping[str, Mapping[str, Any]]
) -> list[str]:
  """Returns 'PATH=VALUE' of each setting of the folder's config.json that needs trust.

  Args:
    workdir: the folder. To write within it needs no trust.
    config: as `get_config` gives it, with the overrides of the command line.
    options: {PATH: {NAME: VALUE}} that the command line sets in dicts. They are the user's own.
  """
  defaults = {path: value for path, _, value in validation.fields(schema.Config())}
  found = []
  for path, rules, value in validation.fields(config):
    if path in validation.FREE_DICTS:
      for name, option in value.items():
        given_by_user = name in options.get(path, ())
        if not given_by_user and any(map(_CODE_OR_ADDRESS.fullmatch, _texts(option))):
          found.append(f'{path}.{name}={option!r}'[:_MAX_SHOWN])
      continue
    *parents, name = path.split('.')
    section = validation.get(config, '.'.join(parents)) if parents else config
    is_of_folder = section.place(name).rpartition(':')[0] == __file__
    is_own_code = rules.plugin and any(
        ':' in text and not text.startswith(_REGISTRIES) for text in _texts(value)
    )
    is_address = path in _ADDRESSES and value != defaults[path]
    is_written = path in _WRITTEN and not _is_within(workdir, value)
    if is_of_folder and (is_own_code or is_address or is_written):
      found.append(f'{path}={value!r}'[:_MAX_SHOWN])
  return found


def _is_within(folder: str, path: Any) -> bool:
  """Returns whether a path is '' or in the folder, links followed."""
  root = os.path.realpath(folder)
  return not path or os.path.commonpath([root, os.path.realpath(path)]) == root


def _texts(value: Any) -> Iterator[str]:
  """Yields the texts in a value of JSON."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict):
    for item in value.values():
      yield from _texts(item)
  elif isinstance(value, (list, tuple)):
    for item in value:
      yield from _texts(item)


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
