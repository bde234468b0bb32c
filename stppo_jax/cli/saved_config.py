"""The config.json of a run's folder, which evaluation, export and serving use without a --config.

A folder may come from a stranger. Code, commands, addresses and folders to write to that its
config.json names are used with --trust_workdir only.
"""

from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import os
import re
from typing import Any

from stppo_jax import config as config_lib
from stppo_jax import types
from stppo_jax import validation
from stppo_jax.config import Config
from stppo_jax.monitoring import workdir as workdir_lib

_ADDRESSES = (
    'retriever.url',
    'rollout.engine',
    'teacher.address',
    'eval.address',
    'serve.host',
    'serve.hosts',
    'serve.weights_folder',
)
_WRITTEN_FOLDERS = ('rollout.engine_folder', 'eval.folder', 'retriever.embeddings')
_REGISTRIES = ('gem:', 'textarena:', 'reasoning_gym:')  # a name there is looked up, not imported
# The name of a module or host may have other characters than letters, such as a hyphen.
_CODE_OR_ADDRESS = re.compile(r'\S+:\S+|.*://.*', re.DOTALL)
_MAX_SHOWN = 200  # characters of a setting in an error


def exists(workdir: str) -> bool:
  """Returns whether a folder has a config.json."""
  return bool(workdir) and os.path.exists(os.path.join(workdir, 'config.json'))


def get_config(workdir: str) -> Config:
  """Returns the config in WORKDIR/config.json. UserError: another version has written it."""
  config = Config()
  values = config_lib.with_current_names(workdir_lib.read_config(workdir))
  settings = {name: value for name, value in values.items() if name not in workdir_lib.RECORDED}
  if unknown := _set_values(config, settings, ''):
    raise types.UserError(
        f'{workdir}/config.json has {", ".join(unknown)}, which this version does not have: give '
        'the --config of the run'
    )
  return config


def check_trust(
    workdir: str,
    config: Config,
    overridden: Collection[str],
    options: Mapping[str, Mapping[str, Any]],
) -> None:
  """Raises a UserError if the config.json of a folder names code, an address or a folder."""
  if names := untrusted(workdir, config, overridden, options):
    raise types.UserError(
        f'{workdir}/config.json names {", ".join(names)}: code, commands, addresses and folders to '
        'write to are taken from a folder with --trust_workdir only; add it if you trust the '
        'folder, or give your own --config'
    )


def untrusted(
    workdir: str,
    config: Config,
    overridden: Collection[str],
    options: Mapping[str, Mapping[str, Any]],
) -> list[str]:
  """Returns 'PATH=VALUE' of each setting of the folder's config.json that needs trust.

  Args:
    workdir: the folder. To write within it needs no trust.
    config: the result of `get_config`, with the overrides of the command line.
    overridden: paths of the settings that the command line sets. Those are the user's own.
    options: {PATH: {NAME: VALUE}} that the command line sets in dicts. They are the user's own.
  """
  defaults = {path: value for path, _, value in validation.fields(Config())}
  names = []
  for path, rules, value in validation.fields(config):
    if path in validation.FREE_DICTS:
      for name, option in value.items():
        is_own = name in options.get(path, ())
        if not is_own and any(map(_CODE_OR_ADDRESS.fullmatch, _texts(option))):
          names.append(f'{path}.{name}={option!r}'[:_MAX_SHOWN])
      continue
    if path in overridden:
      continue
    is_code = rules.plugin and any(
        ':' in text and not text.startswith(_REGISTRIES) for text in _texts(value)
    )
    is_address = path in _ADDRESSES and value != defaults[path]
    is_written = path in _WRITTEN_FOLDERS and not _is_within(workdir, value)
    if is_code or is_address or is_written:
      names.append(f'{path}={value!r}'[:_MAX_SHOWN])
  return names


def _is_within(folder: str, path: str) -> bool:
  """Returns whether a path is '' or in the folder. Links are followed."""
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


def _set_values(section: Any, values: dict[str, Any], prefix: str) -> list[str]:
  """Sets the fields of a section; returns the paths of those that it does not have."""
  unknown = []
  for name, value in values.items():
    current = getattr(section, name, None)
    is_section = dataclasses.is_dataclass(current)
    if not hasattr(section, name) or (is_section and not isinstance(value, dict)):
      unknown.append(prefix + name)
    elif is_section:
      unknown += _set_values(current, value, f'{prefix}{name}.')
    else:
      is_tuple = isinstance(value, list)  # JSON has no tuples
      setattr(section, name, tuple(value) if is_tuple else value)
  return unknown
