"""The flags of the command line, and how the arguments are read."""

import ast
from collections.abc import Sequence
import dataclasses
import difflib
import json
import os
import re
import types as types_lib
from typing import Any
from typing import get_args
from typing import NamedTuple

from stppo_jax import types
from stppo_jax.config import Config
from stppo_jax.settings import validation
from stppo_jax.types import Section
from stppo_jax.types import setting
from stppo_jax.types import UserError

_HELP = ('help', 'h')
_FLAG = re.compile(r'--?([A-Za-z][\w.]*)(?:=(.*))?', re.DOTALL)
_BOOLEANS = {'true': True, 't': True, '1': True, 'false': False, 'f': False, '0': False}
_DICT = dict[str, Any]


@dataclasses.dataclass
class Flags(Section):
  """The flags that are not settings of the config."""

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
  port: int = setting(
      8080, 'for serve, env-server and watch; 0: any free port', at_least=0, at_most=65535
  )
  sessions: int = setting(2048, 'for env-server: most sessions at once', at_least=1)
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
  overrides: dict[str, Any]  # {path of a setting, or of an item of a dict: value}
  help: str | None  # '': --help; a section: --help=SECTION
  operands: list[str]  # words after the command's name


def parse(arguments: Sequence[str]) -> Arguments:
  """Reads the arguments of a command. UserError: one of them is not understood.

  A flag is --NAME=VALUE or --NAME VALUE. A bool also is --NAME. Without --mode, the first of the
  other words is the mode.
  """
  flags = Flags()
  overrides: dict[str, Any] = {}
  section = None
  operands = []
  kinds = validation.kinds(Flags)
  kinds |= {f'config.{path}': kind for path, kind in validation.kinds().items()}
  rest = list(arguments)
  while rest:
    argument = rest.pop(0)
    match = _FLAG.fullmatch(argument)
    if match is None:
      operands.append(argument)
      continue
    name, text = match.groups()
    if name in _HELP:
      section = text or ''
      continue

    is_option = kinds.get(name.rpartition('.')[0]) == _DICT
    kind = Any if is_option else kinds.get(name)
    if kind is None:
      raise UserError(f'--{name}: there is no such flag; {_advice(name, list(kinds))}')
    if text is None:
      if bool in (kind, *get_args(kind)):
        text = 'true'
      elif rest and not _FLAG.fullmatch(rest[0]):  # an empty variable of a shell is no value
        text = rest.pop(0)
      else:
        raise UserError(f'{argument}: give a value, as in {argument}=VALUE')
    if text.startswith('~/'):  # shells expand it only where a word begins
      text = os.path.expanduser(text)
    value = _parse_value(name, text, kind)
    path = name.removeprefix('config.')
    if kind == _DICT and not value:
      overrides[path] = {}  # none of those that the config file sets
    elif kind == _DICT:
      overrides |= {f'{path}.{option}': item for option, item in value.items()}
    elif path == name:
      setattr(flags, name, value)
    else:
      overrides[path] = value
  validation.check_section('--', flags)
  if not flags.mode:
    flags.mode = operands.pop(0) if operands else 'train'
  return Arguments(flags, overrides, section, operands)


def _advice(name: str, names: Sequence[str]) -> str:
  """Returns existing names that are similar to a wrong one."""
  inside = [other for other in names if other.startswith(name + '.')]
  if inside:
    return f'give one of its settings, such as {", ".join(inside[:3])}'
  last = name.split('.')[-1]
  near = [other for other in names if other.endswith('.' + last)]
  near = near or difflib.get_close_matches(name, names, n=1)
  if not near:
    return 'see --help'
  return f'did you mean --{" or --".join(near[:3])}?'


def _parse_value(name: str, text: str, kind: object) -> Any:
  """Returns the value of a flag. The config's own rules check it later."""
  if text == 'None' and type(None) in get_args(kind):
    return None
  if isinstance(kind, types_lib.UnionType):
    kind = get_args(kind)[0]
  try:
    if kind is bool:
      return _BOOLEANS[text.lower()]
    if kind in (str, int, float):
      return kind(text)
  except (ValueError, KeyError):
    meaning = _meanings()[name]
    raise UserError(
        f'--{name}={text}: must be {types.described(kind)}; it means: {meaning}'
    ) from None
  value = _literal(text)
  if kind is Any:
    return value
  if kind != _DICT:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
  if not isinstance(value, dict) or not all(str(key).isidentifier() for key in value):
    raise UserError(
        f'--{name}={text}: give a dict of Python names, as in --{name}=\'{{"low": 1}}\', '
        f'or one option, as in --{name}.low=1'
    )
  return value


def _literal(text: str) -> object:
  """Returns the value that a text has in JSON or Python. Any other text is a string."""
  for read in (json.loads, ast.literal_eval):
    try:
      return read(text)
    except (ValueError, SyntaxError):
      continue
  return text


def _meanings() -> dict[str, str]:
  """Returns {name of a flag: its meaning}."""
  meanings = {path: rules.meaning for path, rules, _ in validation.fields(Flags())}
  for path, rules, _ in validation.fields(Config()):
    meanings[f'config.{path}'] = rules.meaning
  return meanings
