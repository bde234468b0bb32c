"""The config.json of a run's folder, which evaluation, export and serving use without a --config.

A folder may come from a stranger. Its config.json may only name code, commands, addresses and
output folders with --trust_workdir.
"""

from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import os
import re
from typing import Any

from stppo_jax import types
from stppo_jax.config import Config
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.settings import validation

# Setting -> prefixes of names that a package looks up in its registry, and does not import.
# Choice: of GEM's environments only the games. Others run the programs that the model writes, or
# load a data set that an option names.
_REGISTRIES = {'env.kind': ('gem:game:', 'textarena:', 'reasoning_gym:')}
# An option of these kinds may name code in any form: an interpreter, a harness, a judge.
_OPTIONS_ARE_CODE = ('verifiers:',)
# The name of a module or host may have other characters than letters, such as a hyphen.
_CODE_OR_ADDRESS = re.compile(r'\S+:\S+|.*://.*', re.DOTALL)
_MAX_SHOWN = 200  # characters of a setting in an error


def get_config(workdir: str) -> Config:
  """Returns the config in WORKDIR/config.json. UserError: another version has written it."""
  config = Config()
  settings = workdir_lib.read_settings(workdir)
  try:
    _set_values(config, settings)
  except (types.UserError, AttributeError) as error:
    raise types.UserError(
        f'{workdir}/config.json does not fit this version ({error}): give the --config of the run'
    ) from error
  return config


def check_trust(workdir: str, config: Config, overridden: Collection[str]) -> None:
  """Raises a UserError if the config.json of a folder names code, an address or a folder."""
  if names := untrusted(workdir, config, overridden):
    raise types.UserError(
        f'{workdir}/config.json names {", ".join(names)}: code, commands, addresses and folders to '
        'write to are taken from a folder with --trust_workdir only; add it if you trust the '
        'folder, or give your own --config'
    )


def untrusted(workdir: str, config: Config, overridden: Collection[str]) -> list[str]:
  """Returns 'PATH=VALUE' of each setting of the folder's config.json that needs trust.

  Args:
    workdir: the folder. To write within it needs no trust.
    config: the result of `get_config`, with the overrides of the command line.
    overridden: paths of the settings that the command line sets. Those are the user's own.
  """
  defaults = {path: value for path, _, value in validation.fields(Config())}
  needs_trust = {}
  for path, rules, value in validation.fields(config):
    if path in validation.FREE_DICTS and isinstance(value, dict):
      is_code = path == 'env.options' and config.env.kind.startswith(_OPTIONS_ARE_CODE)
      for name, option in value.items():
        if is_code or any(map(_CODE_OR_ADDRESS.fullmatch, _texts(option))):
          needs_trust[f'{path}.{name}'] = option
      continue
    registries = _REGISTRIES.get(path, ())
    is_code = rules.plugin and any(
        ':' in text and not text.startswith(registries) for text in _texts(value)
    )
    is_address = rules.needs_trust and value != defaults[path]
    is_written = rules.written and not _is_within(workdir, value)
    if is_code or is_address or is_written:
      needs_trust[path] = value
  return [
      f'{path}={value!r}'[:_MAX_SHOWN]
      for path, value in needs_trust.items()
      if path not in overridden
  ]


def _is_within(folder: str, path: Any) -> bool:
  """Returns whether a path is '' or in the folder. Links are followed."""
  if not path:
    return True
  root = os.path.realpath(folder)
  try:
    return os.path.commonpath([root, os.path.realpath(path)]) == root
  except (TypeError, ValueError):  # no path; `validate` reports it
    return False


def _texts(value: object) -> Iterator[str]:
  """Yields the texts in a value of JSON."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict):
    for name, item in value.items():
      yield from _texts(name)
      yield from _texts(item)
  elif isinstance(value, (list, tuple)):
    for item in value:
      yield from _texts(item)


def _set_values(section: object, values: Mapping[str, Any]) -> None:
  """Sets the fields of a section."""
  for name, value in values.items():
    current = vars(section).get(name)
    if dataclasses.is_dataclass(current):
      _set_values(current, value)
    elif isinstance(value, list):  # JSON has no tuples
      setattr(section, name, tuple(value))
    else:
      setattr(section, name, value)
