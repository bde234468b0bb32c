"""The config of a command: an experiment file or a run's folder, and overrides."""

from collections.abc import Mapping
import importlib.util
import os
import traceback

from absl import logging

from stppo_jax import plugins
from stppo_jax.cli.flags import Arguments
from stppo_jax.config import Config
from stppo_jax.config import DataSettings
from stppo_jax.settings import validation
from stppo_jax.types import UserError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SHIPPED = os.path.join(_PACKAGE, 'shipped')  # in a wheel; in a clone experiments/ is at the root
HOME = _SHIPPED if os.path.isdir(_SHIPPED) else os.path.dirname(_PACKAGE)
DEFAULT = os.path.join(HOME, 'experiments', 'st_ppo_tiny.py')


def load(arguments: Arguments, reads_run: bool) -> Config:
  """Returns the config of a command. UserError: it cannot be loaded.

  A mode that reads a run uses the config.json of its folder if no --config is given.
  """
  flags = arguments.flags
  if reads_run and not flags.config and _has_config(flags.workdir):
    from stppo_jax.cli import saved_config

    logging.info('the settings are those of %s/config.json', flags.workdir)
    config = saved_config.get_config(flags.workdir)
    apply(config, arguments.overrides)
    if not flags.trust_workdir:
      saved_config.check_trust(flags.workdir, config, arguments.overrides)
    return config

  file, _, mode = flags.config.partition(':')
  path = find(file)
  if path.startswith(HOME) and path != DEFAULT and path != os.path.abspath(file):
    logging.info('config file: %s', path)
  config = _run_file(path, mode)
  kind = config.env.kind
  apply(config, arguments.overrides)
  has_own_options = any(name.startswith('env.options') for name in arguments.overrides)
  if config.env.kind != kind and config.env.options and not has_own_options:
    logging.warning(
        'config.env.options=%r are those of %s for its environment %r: --config.env.options="{}" '
        'leaves them out',
        config.env.options,
        path,
        kind,
    )
  return config


def _has_config(workdir: str) -> bool:
  return bool(workdir) and os.path.exists(os.path.join(workdir, 'config.json'))


def find(file: str) -> str:
  """Returns the path of an experiment file, in this folder or else in the package."""
  if not file:
    return DEFAULT
  shipped = os.path.join(HOME, file)
  if not os.path.isfile(file) and file.startswith('experiments/') and os.path.isfile(shipped):
    return shipped
  if not os.path.isfile(file):
    raise UserError(f'--config={file}: no such file; give one such as experiments/st_ppo_tiny.py')
  return file


def apply(config: Config, overrides: Mapping[str, object]) -> None:
  """Sets the values of the command line."""
  for path, value in overrides.items():
    parent, _, name = path.rpartition('.')
    section = validation.get(config, parent) if parent else config
    if isinstance(section, dict):
      section[name] = value
    else:
      setattr(section, name, value)
  has_own_source = overrides.get('data.source', DataSettings().source) != DataSettings().source
  (packages,) = (
      rules.prefixes for path, rules, _ in validation.fields(config) if path == 'env.kind'
  )
  package, _, name = str(overrides.get('env.kind', '')).partition(':')
  has_own_source |= name != '' and package in packages
  for name in ('datasets', 'max_hops'):  # the experiment's choice belongs to its own source
    if has_own_source and f'data.{name}' not in overrides:
      setattr(config.data, name, getattr(DataSettings(), name))
  if has_own_source and not any(path.startswith('data.columns') for path in overrides):
    config.data.columns = {}


def _run_file(path: str, mode: str) -> Config:
  """Runs an experiment file; returns the result of its get_config."""
  spec = importlib.util.spec_from_file_location('experiment_file', path)
  if spec is None or spec.loader is None:
    raise UserError(f'--config={path}: a Python file is needed, such as experiments/st_ppo_tiny.py')
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    config = module.get_config(mode) if mode else module.get_config()
  except SystemExit as error:
    raise UserError(
        f'cannot load the config: the experiment file exits with {error.code!r}{_place(error)}: '
        'let get_config() return a stppo_jax.config.Config'
    ) from error
  except UserError as error:
    raise UserError(f'{error}{_place(error)}') from error
  except Exception as error:  # an experiment file may raise anything
    message = ' '.join(str(error).split())
    raise UserError(
        f'cannot load the config: {type(error).__name__}: {message}{_place(error)}'
    ) from error
  if not isinstance(config, Config):
    raise UserError(f'get_config() of {path} returned {config!r}: return a stppo_jax.config.Config')
  return config


def _place(error: BaseException) -> str:
  """Returns ' (FILE:LINE)' of the user's code that raised an error, or ''."""
  if isinstance(error, SyntaxError):
    return f' ({error.filename}:{error.lineno})'
  line = plugins.user_line(traceback.extract_tb(error.__traceback__))
  return f' ({line})' if line else ''
