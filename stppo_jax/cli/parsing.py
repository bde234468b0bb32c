"""The command line as it is read: arguments to flags and config, each mistake in one line."""

import ast
import contextlib
import dataclasses
import difflib
import json
import os
import re
import sys
import traceback
from typing import Any
from typing import get_args

from absl import flags
from ml_collections import config_flags

from stppo_jax import config as schema
from stppo_jax import plugins
from stppo_jax import types
from stppo_jax import validation
from stppo_jax.algorithms import variants
from stppo_jax.cli import saved_config

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SHIPPED = os.path.join(_PACKAGE, 'shipped')  # in a wheel; in a clone experiments/ is at the root
HOME = _SHIPPED if os.path.isdir(_SHIPPED) else os.path.dirname(_PACKAGE)
DEFAULT = os.path.join(HOME, 'experiments', 'st_ppo_tiny.py')
_ENTRY = os.path.abspath(sys.argv[0])  # run.py, or the command

TRUST = flags.DEFINE_bool(
    'trust_workdir',
    False,
    'without --config: use the code, commands, addresses and folders to write to that '
    'WORKDIR/config.json names',
)


def parse(argv: list[str], usage: str, own_flags: list[str]) -> list[str]:
  """Parses absl's flags, or prints help and exits; every mistake becomes a UserError.

  Args:
    argv: the program and its arguments.
    usage: the text that --help prints above the flags.
    own_flags: names of the flags that --help lists.

  Returns:
    What absl.app gets: the program alone.
  """
  section, arguments = _take_help(argv[1:])
  if section == '':
    _print(_help(os.path.basename(argv[0]), usage, own_flags))
    sys.exit(0)
  config = _read(argv[0], arguments)
  if section:
    _print(_section_help(section, config))
    sys.exit(0)
  return argv[:1]


def _read(program: str, arguments: list[str]) -> schema.Config:
  """Parses the flags; returns the config that they name and change."""
  try:
    arguments = _with_current_names(_with_shipped_experiment(arguments))
    arguments, options = _take_options(arguments)
    arguments, unset = _take_nones(arguments)
    _check_arguments(arguments)
    # Defined here and not at import: the definition reads the overrides and may reject them.
    config_flags.DEFINE_config_file(
        'config',
        saved_config.find(arguments) or DEFAULT,
        'experiment file, or FILE:smoke for its smallest form',
        sys_argv=[program, *arguments],
    )
    positional = flags.FLAGS([program, *arguments])[1:]
    if positional:
      raise types.UserError(
          f'unexpected argument {positional[0]!r}: flags start with --, as in '
          '--config.train.updates=3'
      )
    config = flags.FLAGS.config
    # A file that could not be read raises when a setting is looked up.
    if not hasattr(config, 'env') or not isinstance(config, schema.Config):
      raise types.UserError(
          f'get_config() of the experiment file returned {config!r}: return a '
          'stppo_jax.config.Config'
      )
    for path, values in options.items():
      validation.get(config, path).update(values)
    for path in unset:
      *parents, name = path.split('.')
      setattr(validation.get(config, '.'.join(parents)), name, None)
    has_own_source = (
        'config.data.source' in flags.FLAGS and config.data.source != schema.Data().source
    )
    if has_own_source and 'config.data.datasets' not in flags.FLAGS:
      config.data.datasets = ()  # the experiment's are those of its own source
    file, _, workdir = config_flags.get_config_filename(flags.FLAGS['config']).partition(':')
    if file == saved_config.__file__ and not TRUST.value:
      overridden = {
          name.removeprefix('config.') for name in flags.FLAGS if flags.FLAGS[name].present
      }
      saved_config.check_trust(workdir, config, overridden, options)
    return config
  except (flags.Error, types.UserError) as error:
    lines = str(error).splitlines()  # the lines in between may be a traceback
    message = ' '.join(lines[:1] + lines[1:][-1:]) + _meaning(lines[0]) + _place(error)
  except SystemExit as error:
    message = f'cannot load the config: the experiment file exits with {error.code!r}'
    message += f'{_place(error)}: let get_config() return a stppo_jax.config.Config'
  except Exception as error:  # whatever an experiment file may raise
    lines = str(error).splitlines()
    message = f'cannot load the config: {type(error).__name__}: {"".join(lines[-1:])}'
    message += _place(error)
  raise types.UserError(message)


def _place(error: BaseException) -> str:
  """Returns ' (FILE:LINE)' of the last line of a user's own file in an error's traceback, or ''."""
  # config_flags puts the traceback of some errors into the text of another.
  text = ''.join(traceback.format_exception(error)) + str(error)
  places = re.findall(r'File "([^"]+)", line (\d+)', text)
  libraries = (_PACKAGE + os.sep, os.path.dirname(os.__file__) + os.sep, '<')
  own = [(file, line) for file, line in places if not file.startswith(libraries)]
  own = [(file, line) for file, line in own if 'site-packages' not in file and file != _ENTRY]
  return f' ({own[-1][0]}:{own[-1][1]})' if own else ''


def _print(text: str) -> None:
  """Prints a long text, of which `| head` may read a part."""
  try:
    print(text, flush=True)
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


def _take_help(arguments: list[str]) -> tuple[str | None, list[str]]:
  """Splits off --help or --help=SECTION: (None, '' or the section; the other arguments)."""
  pattern = r'-h|--?help(?:short|full)?(?:=(.*))?'
  asked = [match[1] or '' for x in arguments if (match := re.fullmatch(pattern, x))]
  others = [argument for argument in arguments if not re.fullmatch(pattern, argument)]
  return asked[0] if asked else None, others


def _help(program: str, usage: str, own_flags: list[str]) -> str:
  """Returns the text of --help."""
  sections = dict.fromkeys(path.split('.')[0] for path in validation.kinds())
  lines = [
      usage.replace('python run.py', 'stppo' if program == 'stppo' else 'python run.py'),
      '--config=FILE[:smoke]\n    experiment file, or its smallest form',
      *(f'--{name}\n    {flags.FLAGS[name].help}' for name in own_flags),
      '--config.FIELD=VALUE\n    overrides a setting, as in --config.train.updates=3',
      '--help=SECTION\n    lists the settings, their values in this run and what they mean: '
      + ', '.join(sections),
  ]
  return '\n'.join(lines)


def _section_help(section: str, config: schema.Config) -> str:
  """Returns the text of --help=SECTION: its settings as this command line sets them."""
  defaults = {path: value for path, _, value in validation.fields(schema.Config())}
  of_objective = section.partition('.')[0] == 'algorithm'
  row, own = _objective(config) if of_objective else ({}, {})
  lines = []
  for path, rules, value in validation.fields(config):
    if path != section and not path.startswith(section + '.'):
      continue
    line = f'--config.{path}={value!r}'
    if value is None and path in row:
      line += f'  ({config.algorithm.variant}: {row[path]!r})'
    elif value != defaults[path]:
      line += f'  (default {defaults[path]!r})'
    allowed = rules.allowed or rules.items
    either = [*map(str, allowed), *(['module:attribute'] if rules.plugin else [])]
    line += f'\n    {rules.meaning}'
    lines.append(line + (f'\n    [{" | ".join(either)}]' if either else ''))
  if not lines:
    raise types.UserError(f'--help={section}: there is no such section; see --help')
  lines += [f'--config.algorithm.options.{name}={value!r}' for name, value in own.items()]
  return '\n'.join(lines)


def _objective(config: schema.Config) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the variant's values by their paths, and the fields that a custom variant adds."""
  variant = plugins.load('algorithm.variant', config.algorithm.variant, variants.VARIANTS)
  if not isinstance(variant, variants.Variant):
    return {}, {}
  values = variant.described()
  names = [field.name for field in dataclasses.fields(variants.Variant)]
  row = {f'algorithm.{name}': values.pop(name) for name in names}
  return row, values


def _with_shipped_experiment(arguments: list[str]) -> list[str]:
  """Takes `--config=experiments/NAME.py` from the package if this folder has no such file."""

  def resolve(argument: str) -> str:
    match = re.fullmatch(r'(--?config=)?(experiments/[^:]*)(:.*)?', argument)
    if match is None or os.path.exists(match[2]) or not os.path.isfile(f'{HOME}/{match[2]}'):
      return argument
    return f'{match[1] or ""}{os.path.join(HOME, match[2])}{match[3] or ""}'

  return [
      resolve(argument)
      if argument.startswith('-') or before in ('--config', '-config')
      else argument
      for before, argument in zip(['', *arguments], arguments)
  ]


def _with_current_names(arguments: list[str]) -> list[str]:
  """Replaces old names of settings in --config.PATH=VALUE."""
  current = []
  for argument in arguments:
    if match := re.fullmatch(r'(--?config\.)([^=]+)(.*)', argument, re.DOTALL):
      prefix, path, rest = match.groups()
      argument = prefix + schema.current_name(path) + rest
    current.append(argument)
  return current


def _take_options(arguments: list[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
  """Splits off --config.PATH.NAME=VALUE and --config.PATH={'NAME': VALUE, ..} of dicts.

  Returns (the other arguments, {PATH: {NAME: VALUE}}). The names belong to an environment or a
  template and are unknown to config_flags. Values are JSON or Python; any other value is a string.
  """
  others: list[str] = []
  options: dict[str, dict[str, Any]] = {path: {} for path in validation.FREE_DICTS}
  paths = '|'.join(map(re.escape, options))
  for argument in arguments:
    match = re.fullmatch(rf'--?config\.({paths})(?:\.(\w+))?=(.*)', argument, re.DOTALL)
    if not match:
      others.append(argument)
      continue
    path, name, text = match.groups()
    value: Any = text
    for parse in (json.loads, ast.literal_eval):
      with contextlib.suppress(ValueError, SyntaxError):
        value = parse(text)
        break
    if name is None and not isinstance(value, dict):
      raise types.UserError(
          f'{argument}: give a dict, as in --config.{path}=\'{{"low": 1}}\', or one option, '
          f'as in --config.{path}.low=1'
      )
    options[path] |= {name: value} if name else value
  return others, options


def _take_nones(arguments: list[str]) -> tuple[list[str], list[str]]:
  """Splits off --config.PATH=None where None is allowed, which config_flags cannot parse.

  Returns (the other arguments, paths).
  """
  optional = {path for path, kind in validation.kinds().items() if type(None) in get_args(kind)}
  path_of = lambda argument: re.sub('^--?config[.]', '', argument.partition('=')[0])
  is_none = lambda argument: path_of(argument) in optional and argument.endswith(
      f'config.{path_of(argument)}=None'
  )
  last = {path_of(argument): argument for argument in arguments}
  nones = [path for path, argument in last.items() if is_none(argument)]  # the last value counts
  return [argument for argument in arguments if not is_none(argument)], nones


def _check_arguments(arguments: list[str]) -> None:
  """Rejects a missing experiment file, and overrides of unknown fields."""
  for argument in arguments:
    if match := re.match(r'--?config=([^:]*)', argument):
      if not os.path.isfile(match[1]):
        raise types.UserError(
            f'--config={match[1]}: no such file; give one such as experiments/st_ppo_tiny.py'
        )
    if match := re.match(r'--?(?:no)?config\.([^=]+)', argument):
      path, known = match[1], [path for path, _, _ in validation.fields(schema.Config())]
      if path not in known:
        last = path.split('.')[-1]
        near = [name for name in known if name.startswith(path + '.') or name.endswith('.' + last)]
        near = near or difflib.get_close_matches(path, known, n=3)
        hint = f'did you mean {" or ".join(near[:3])}?' if near else 'see --help'
        raise types.UserError(f'--config.{path}: there is no such field; {hint}')


def _meaning(message: str) -> str:
  """Returns '; PATH is MEANING' for a message about --config.PATH=VALUE, else ''."""
  match = re.search(r'flag --config\.([\w.]+)=', message)
  meanings = {path: rules.meaning for path, rules, _ in validation.fields(schema.Config())}
  return f'; it means: {meanings[match[1]]}' if match and match[1] in meanings else ''
