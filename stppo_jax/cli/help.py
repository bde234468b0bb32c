"""The texts of --help, --help=SECTION, list and completion."""

import ast
from collections.abc import Sequence
import pathlib

from stppo_jax import plugins
from stppo_jax.algorithms import variants
from stppo_jax.cli import config_file
from stppo_jax.cli.flags import Flags
from stppo_jax.config import Config
from stppo_jax.settings import validation
from stppo_jax.types import UserError

_EXAMPLES = """The command trains, evaluates, serves, exports, plans and reports.

  python run.py                                                # train; the default: st_ppo_tiny
  python run.py --config=experiments/st_ppo_tiny.py:smoke --workdir=/tmp/smoke
  python run.py train --config.algorithm.variant=ppo --config.seed=1 --workdir=runs/ppo_1
  python run.py sft --config.data.source=chats.jsonl           # a warm start on conversations
  python run.py watch --workdir=runs                           # follows runs in a browser
  python run.py eval --config.eval.samples=8                   # scores, pass@k and pass^k
  python run.py compare runs/st_ppo_tiny runs/ppo_1            # settings and scores, with intervals
  python run.py chat                                           # ask it, and see its searches
  python run.py serve --port=8080                              # an OpenAI-compatible server
  python run.py env-server my_task:MyEnv --port=8000           # plays for trainers elsewhere
  python run.py export                                         # WORKDIR/export, for transformers
  python run.py sample --batches=8                             # plays episodes, trains on none
  python run.py export_atif                                    # trajectories for Harbor's viewer
  python run.py import_atif --input=DIR --workdir=runs/b       # runs/b/episodes, to train on
  python run.py report                                         # writes report.html again
  python run.py check-data questions.jsonl                     # how a file of data is read
  python run.py plan --config=experiments/st_ppo_7b.py --topology=v5e:8x8    # does it fit?
  python run.py new my_task                                    # a folder for a task of your own
  python run.py doctor                                         # devices, packages, what is missing
  python run.py list                                           # experiments and algorithms

The same command again resumes the run in its workdir. SIGTERM ends a run with exit code 0 and a
checkpoint: after the update, or within seconds while it loads, plays or waits for the retriever.
Ctrl-C ends it immediately with exit code 130 and without a checkpoint. On several hosts add
--distributed (TPU pod, SLURM) or --coordinator=HOST:PORT --num_processes=N --process_id=I.
"""


def overview(program: str, modes: Sequence[str]) -> str:
  """Returns the text of --help."""
  command = 'stppo' if program == 'stppo' else 'python run.py'
  lines = [_EXAMPLES.replace('python run.py', command)]
  for path, rules, _ in validation.fields(Flags()):
    allowed = f' [{" | ".join(modes)}]' if path == 'mode' else ''
    lines.append(f'--{path}\n    {rules.meaning}{allowed}')
  sections = dict.fromkeys(path.split('.')[0] for path in validation.kinds())
  lines.append('--config.FIELD=VALUE\n    overrides a setting, as in --config.train.updates=3')
  lines.append(
      '--help=SECTION\n    lists the settings, their values in this run and what they mean: '
      + ', '.join(sections)
  )
  return '\n'.join(lines)


def catalogue() -> str:
  """Returns a line for each experiment and each algorithm."""
  lines = ['Experiments, for --config=FILE:']
  for path in sorted(pathlib.Path(config_file.HOME, 'experiments').glob('[!_]*.py')):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
    first_line = docstring.partition('\n')[0]
    lines.append(f'  experiments/{path.name:25} {first_line}')
  lines += ['', 'Algorithms, for --config.algorithm.variant=NAME, and their settings:']
  defaults = variants.Variant().described()
  for name, variant in variants.VARIANTS.items():
    settings = [
        f'{field}={value}'
        for field, value in variant.described().items()
        if field in ('advantage', 'ratio') or value != defaults.get(field)
    ]
    lines.append(f'  {name:22} {" ".join(settings)}')
  return '\n'.join(lines)


def completion(shell: str, modes: Sequence[str]) -> str:
  """Returns the lines with which a shell completes modes, flags and settings."""
  if shell not in ('bash', 'zsh'):
    raise UserError(f'completion {shell}: allowed are bash and zsh')
  words = [*modes]
  words += [f'--{path}=' for path in validation.kinds(Flags)]
  words += [f'--config.{path}=' for path in validation.kinds()]
  start = ''
  if shell == 'zsh':  # its function `complete` needs compinit, which Debian does not run
    start = '(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }\n'
    start += 'autoload -U +X bashcompinit && bashcompinit\n'
  # A function, because zsh takes a word with = in the options of `complete` for another option.
  function = f"_stppo() {{ COMPREPLY=($(compgen -W '{' '.join(words)}' -- \"$2\")); }}"
  return f'{start}{function}\ncomplete -o default -o nospace -F _stppo stppo run.py'


def section(name: str, config: Config) -> str:
  """Returns the text of --help=SECTION: its settings, as this command line sets them."""
  defaults = {path: value for path, _, value in validation.fields(Config())}
  is_algorithm = name.partition('.')[0] == 'algorithm'
  variant_values = _variant_values(config) if is_algorithm else {}
  lines = []
  for path, rules, value in validation.fields(config):
    if path != name and not path.startswith(name + '.'):
      continue
    line = f'--config.{path}={value!r}'
    if value is None and path in variant_values:
      line += f'  ({config.algorithm.variant}: {variant_values[path]!r})'
    elif value != defaults[path]:
      line += f'  (default {defaults[path]!r})'
    lines.append(f'{line}\n    {rules.meaning}')
    choices = [*map(str, rules.allowed or rules.items)]
    if rules.plugin:
      choices.append('module:attribute')
    if choices:
      lines.append(f'    [{" | ".join(choices)}]')
  if not lines:
    raise UserError(f'--help={name}: there is no such section; see --help')
  for path, value in variant_values.items():
    if path not in defaults:  # a custom variant adds it
      name = path.removeprefix('algorithm.')
      lines.append(f'--config.algorithm.options.{name}={value!r}')
  return '\n'.join(lines)


def _variant_values(config: Config) -> dict[str, object]:
  """Returns the values of the config's variant, by the paths of their settings."""
  variant = plugins.load('algorithm.variant', config.algorithm.variant, variants.VARIANTS)
  if not isinstance(variant, variants.Variant):
    return {}
  return {f'algorithm.{name}': value for name, value in variant.described().items()}
