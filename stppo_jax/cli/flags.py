"""The flags of the command line, and how the arguments are read."""

import ast
from collections.abc import Sequence
import dataclasses
import difflib
import json
import re
from typing import Any
from typing import get_args
from typing import NamedTuple

from stppo_jax import config as config_lib
from stppo_jax import types
from stppo_jax import validation
from stppo_jax.config import Config
from stppo_jax.types import hint
from stppo_jax.types import Section
from stppo_jax.types import setting
from stppo_jax.types import UserError

_HELP = ('help', 'h', 'helpshort', 'helpfull')
_BOOLEANS = {'true': True, 't': True, '1': True, 'false': False, 'f': False, '0': False}


@dataclasses.dataclass
class Flags(Section):
  """The flags besides those of the config."""

  config: str = setting(
      '', 'experiment file; FILE:smoke is its smallest form; default: experiments/st_ppo_tiny.py'
  )
  mode: str = setting('', 'what to do, as the first word of the command is; default: train')
  workdir: str = setting('', 'folder of the run; default: runs/<config name>')
  trust_workdir: bool = setting(
      False,
      'without --config: use the code, commands, addresses and folders to write to that '
      'WORKDIR/config.json names',
  )
  topology: str = setting(
      '', 'for plan and doctor: v5e:8x8, v5p:4x4x4, h100:1x1x8, ..; default: the devices here'
  )
  profile: int = setting(
      0, 'updates to trace, from the second on, into WORKDIR/profile', at_least=0
  )
  port: int = setting(8080, 'for serve and watch; 0: any free port', at_least=0, at_most=65535)
  batches: int = setting(1, 'for sample; 0: each question once', at_least=0)
  input: str = setting(
      '',
      'for export_atif: saved episodes, a folder or a file; default: WORKDIR/episodes. For '
      'import_atif: trajectories, a folder or a file',
  )
  retokenize: bool = setting(False, 'for import_atif: encode the texts even if there are token ids')
  distributed: bool = setting(
      False, 'this is one of several processes, which TPU pod, SLURM or Open MPI started'
  )
  coordinator: str = setting(
      '', 'this is one of several processes: HOST:PORT of process 0, with a free port'
  )
  num_processes: int | None = setting(None, 'with --coordinator: number of processes')
  process_id: int | None = setting(None, 'with --coordinator: number of this process, from 0')


class Arguments(NamedTuple):
  """The arguments of a command."""

  flags: Flags
  overrides: dict[str, Any]  # {path of a setting: value}
  options: dict[str, dict[str, Any]]  # {path of a dict: {name: value}}
  help: str | None  # '': --help; a section: --help=SECTION
  operands: list[str]  # words after the command's name


def parse(arguments: Sequence[str]) -> Arguments:
  """Reads the arguments of a command. UserError: one of them is not understood.

  A flag is --NAME=VALUE or --NAME VALUE. A bool also is --NAME or --noNAME. Without --mode, the
  first of the other words is the mode.
  """
  parsed = Arguments(Flags(), {}, {path: {} for path in validation.FREE_DICTS}, None, [])
  flag_kinds = validation.kinds(Flags)
  setting_kinds = validation.kinds()
  rest = list(arguments)
  while rest:
    argument = rest.pop(0)
    match = re.fullmatch(r'--?([A-Za-z][\w.]*)(?:=(.*))?', argument, re.DOTALL)
    if match is None:
      parsed.operands.append(argument)
      continue
    name, text = match.groups()
    if name in _HELP:
      parsed = parsed._replace(help=text or '')
      continue

    is_negated = name.startswith('no') and name[2:] in flag_kinds
    is_negated |= name.startswith('noconfig.')
    name = name.removeprefix('no') if is_negated else name
    path = config_lib.current_name(name.removeprefix('config.'))
    is_setting = name.startswith('config.')
    option = _split_option(path) if is_setting else None
    if is_setting and option is None:
      _check_known(path, setting_kinds)
    if not is_setting and name not in flag_kinds:
      near = hint(name, flag_kinds) or '; see --help'
      raise UserError(f'{argument}: there is no such flag{near}')
    kind = Any if option else (setting_kinds[path] if is_setting else flag_kinds[name])

    if text is None:
      if kind is bool or bool in get_args(kind):
        text = str(not is_negated)
      elif rest:
        text = rest.pop(0)
      else:
        raise UserError(f'{argument}: give a value, as in {argument}=VALUE')
    shown = f'--{name}={text}'
    if option:
      dict_path, option_name = option
      parsed.options[dict_path][option_name] = _literal(text)
    elif path in parsed.options and is_setting:
      parsed.options[path].update(_parse_dict(shown, path, text))
    elif is_setting:
      parsed.overrides[path] = _parse_value(shown, text, kind, _meaning(path))
    else:
      setattr(parsed.flags, name, _parse_value(shown, text, kind, ''))
  validation.check_section('--', parsed.flags)
  if not parsed.flags.mode:
    parsed.flags.mode = parsed.operands.pop(0) if parsed.operands else 'train'
  return parsed


def _split_option(path: str) -> tuple[str, str] | None:
  """Returns (dict, name) of a path such as env.options.NAME; None for other paths."""
  parent, _, name = path.rpartition('.')
  return (parent, name) if parent in validation.FREE_DICTS else None


def _check_known(path: str, known: dict[str, Any]) -> None:
  if path in known:
    return
  last = path.split('.')[-1]
  inside = [name for name in known if name.startswith(path + '.')]
  if inside:
    raise UserError(f'--config.{path}: give one of its settings, such as {", ".join(inside[:3])}')
  near = [name for name in known if name.endswith('.' + last)]
  near = near or difflib.get_close_matches(path, known, n=3)
  hint = f'did you mean {" or ".join(near[:3])}?' if near else 'see --help'
  raise UserError(f'--config.{path}: there is no such field; {hint}')


def _parse_value(shown: str, text: str, kind: Any, meaning: str) -> Any:
  """Returns the value of a flag. The config's own rules check it later."""
  kinds = get_args(kind) if type(None) in get_args(kind) else (kind,)
  if text == 'None' and type(None) in kinds:
    return None
  kind = kinds[0]
  try:
    if kind is str:
      return text
    if kind is bool:
      return _BOOLEANS[text.lower()]
    if kind in (int, float):
      return kind(text)
    value = _literal(text)
    return value if isinstance(value, tuple) else (value,)
  except (ValueError, KeyError):
    raise UserError(f'{shown}: must be {types.described(kind)}{meaning}') from None


def _parse_dict(shown: str, path: str, text: str) -> dict[str, Any]:
  value = _literal(text)
  if not isinstance(value, dict):
    raise UserError(
        f'{shown}: give a dict, as in --config.{path}=\'{{"low": 1}}\', or one option, as in '
        f'--config.{path}.low=1'
    )
  return value


def _literal(text: str) -> Any:
  """Returns the value of a text of JSON or Python. Any other text is a string."""
  for read in (json.loads, ast.literal_eval):
    try:
      return read(text)
    except (ValueError, SyntaxError):
      continue
  return text


def _meaning(path: str) -> str:
  meanings = {name: rules.meaning for name, rules, _ in validation.fields(Config())}
  return f'; it means: {meanings[path]}'
