"""The command line: trains, evaluates, exports, plans or reports.

  python run.py                                                  # the default: st_ppo_tiny
  python run.py --config=experiments/st_ppo_tiny.py:smoke --workdir=/tmp/smoke
  python run.py --config.algorithm.variant=ppo --config.seed=1 --workdir=runs/ppo_1
  python run.py --mode=eval --config.data.eval_split=test        # scores of the newest checkpoint
  python run.py --mode=export                                    # WORKDIR/export, for transformers
  python run.py --profile=2                                      # also traces two updates
  python run.py --mode=report                                    # writes report.html again
  python run.py --config=experiments/st_ppo_7b.py --mode=plan --topology=v5e:8x8   # does it fit?

The same command again resumes the run in its workdir. SIGTERM ends a run with exit code 0 and a
checkpoint: after the current update, or immediately while models are loaded, while episodes of
training or evaluation are played, or while the retriever is down. Ctrl-C ends it immediately with
exit code 130, and what came after the last checkpoint is lost. On several hosts give the same
command on each, with --distributed (TPU pod, SLURM), or with --coordinator=HOST:PORT
--num_processes=N --process_id=I.
"""

import ast
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import difflib
import errno
import functools
import json
import logging as std_logging
import os
import re
import signal
import sys
import threading
import traceback
from typing import Any
from typing import get_args

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax import validation
from stppo_jax.monitoring import report
from stppo_jax.runtime import hosts
from stppo_jax.runtime import huge_pages

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_SHIPPED = os.path.join(_PACKAGE, 'shipped')  # in a wheel; in a clone experiments/ is at the root
_HOME = _SHIPPED if os.path.isdir(_SHIPPED) else os.path.dirname(_PACKAGE)
_DEFAULT = os.path.join(_HOME, 'experiments', 'st_ppo_tiny.py')
_LONGEST_LINE = 4000  # characters of an error
_ENTRY = os.path.abspath(sys.argv[0])  # run.py, or the command

_WORKDIR = flags.DEFINE_string('workdir', '', 'folder of the run; default: runs/<config name>')
_TOPOLOGY = flags.DEFINE_string(
    'topology', '', 'for --mode=plan: v5e:8x8, v5p:4x4x4, h100:1x1x8, ..; empty: the devices here'
)
_DISTRIBUTED = flags.DEFINE_bool(
    'distributed', False, 'one of several processes, set up by TPU pod, SLURM or Open MPI'
)
_COORDINATOR = flags.DEFINE_string(
    'coordinator', '', 'one of several processes: HOST:PORT of process 0, with a free port'
)
_NUM_PROCESSES = flags.DEFINE_integer('num_processes', None, 'with --coordinator: how many')
_PROCESS_ID = flags.DEFINE_integer('process_id', None, 'with --coordinator: which one, from 0')
_PROFILE = flags.DEFINE_integer(
    'profile', 0, 'updates to trace, from the second on, into WORKDIR/profile', lower_bound=0
)


def main() -> None:
  """Runs the command `stppo`; run.py calls the same function."""
  huge_pages.restart()
  # Plug-ins come from the current folder. Experiments import each other as `experiments.NAME`.
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  if _HOME not in sys.path:
    sys.path.append(_HOME)
  app.run(_main, flags_parser=_parse)


def _train(config: schema.Config, workdir: str) -> None:
  from stppo_jax.training import loop

  with _stop_requested() as stop_requested:
    loop.train(config, workdir, stop_requested, _PROFILE.value)


def _eval(config: schema.Config, workdir: str) -> None:
  from stppo_jax.training import results

  scores = results.evaluate(config, workdir)
  if hosts.is_writer():
    for name, value in scores.items():
      print(f'{name:40s} {value:.4f}')


def _export(config: schema.Config, workdir: str) -> None:
  from stppo_jax.training import results

  print(results.export(config, workdir))


def _plan(config: schema.Config, workdir: str) -> int:
  del workdir
  import jax

  if _TOPOLOGY.value:
    # Accelerators of this machine stay free, and programs for absent devices cannot be cached.
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_enable_compilation_cache', False)
  from stppo_jax.planning import plan
  from stppo_jax.planning import table

  planned = plan.make(config, _TOPOLOGY.value)
  print(table.text(planned))
  return 0 if planned.fits else 1


def _report(config: schema.Config, workdir: str) -> None:
  del config
  print(report.build(workdir))


# Heavy modules are imported inside: a mistake on the command line is reported before JAX starts.
_MODES: dict[str, Callable[[schema.Config, str], int | None]] = {
    'train': _train,
    'eval': _eval,
    'export': _export,
    'plan': _plan,
    'report': _report,
}
_ONE_PROCESS = ('plan', 'report')
_MODE = flags.DEFINE_enum('mode', 'train', list(_MODES), 'what to do')


def _run() -> int | None:
  """Runs the mode that the flags name; returns the exit code."""
  _quiet_libraries()
  file = config_flags.get_config_filename(flags.FLAGS['config'])
  if file.startswith(_HOME) and file != _DEFAULT:
    logging.info('config file: %s', file)
  config, mode = flags.FLAGS.config, _MODE.value
  workdir = _WORKDIR.value or os.path.join('runs', config.name)
  processes = dict(
      coordinator=_COORDINATOR.value,
      num_processes=_NUM_PROCESSES.value,
      process_id=_PROCESS_ID.value,
      cluster=_DISTRIBUTED.value,
  )
  if mode in _ONE_PROCESS:
    if any(processes.values()):
      raise types.UserError(
          f'--mode={mode} is for one process: leave out --distributed and '
          '--coordinator; --mode=train and --mode=eval take them'
      )
    return _MODES[mode](config, workdir)
  _start_jax(processes)
  code = _MODES[mode](config, workdir)
  hosts.finish()
  return code


def _start_jax(processes: dict[str, Any]) -> None:
  """Joins the other processes and sets the compilation cache."""
  import jax

  if 'xla_force_host_platform_device_count' in os.environ.get('XLA_FLAGS', ''):
    # With a thread per simulated device, XLA's default, programs in flight can wait for ever.
    os.environ.setdefault('NPROC', '64')
  hosts.initialize(**processes)  # before loop is imported: bm25s runs JAX on import
  if not hosts.is_writer():
    logging.set_verbosity(logging.WARNING)
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR') or os.path.expanduser('~/.cache/stppo_jax')
  jax.config.update('jax_compilation_cache_dir', cache)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)  # many programs are small


@contextlib.contextmanager
def _stop_requested() -> Iterator[Callable[[], bool]]:
  """Yields a function that tells whether SIGTERM was received.

  The function raises KeyboardInterrupt after a Ctrl-C. Python raises it in whatever code is
  running, which may be a library's callback that ignores exceptions. Until the function is called
  for the first time there is nothing to save, and SIGTERM raises Stopped in the same way.
  """
  asked, interrupted, polled = threading.Event(), threading.Event(), threading.Event()

  def terminate(*unused):
    asked.set()
    if not polled.is_set():
      raise types.Stopped

  def interrupt(*unused):
    interrupted.set()
    raise KeyboardInterrupt

  def stop_requested():
    polled.set()
    if interrupted.is_set():
      raise KeyboardInterrupt
    return asked.is_set()

  handlers = {signal.SIGTERM: terminate, signal.SIGINT: interrupt}
  before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
  try:
    yield stop_requested
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _quiet_libraries() -> None:
  """Logs this package's messages with the time, and only warnings of libraries."""
  logging.set_verbosity(logging.INFO)
  handler = logging.get_absl_handler()
  handler.setFormatter(std_logging.Formatter('%(asctime)s  %(message)s', '%H:%M:%S'))
  handler.addFilter(
      lambda record: 'stppo_jax' in record.pathname
      or (
          # Orbax prints a traceback for errors that `Checkpoints` reports in one line.
          record.levelno >= std_logging.WARNING
          and 'orbax' not in record.pathname
      )
  )
  sys.unraisablehook = functools.partial(_tell_unraisable, sys.unraisablehook)


def _tell_unraisable(tell: Callable[[Any], Any], unraisable: Any) -> None:
  """Calls `tell`, the previous sys.unraisablehook, except for one repeated error.

  After a failed save TensorStore's threads raise it hundreds of times.
  """
  if str(unraisable.exc_value) != 'Event loop is closed':
    tell(unraisable)


def _parse(argv: list[str]) -> list[str]:
  """Parses absl's flags; reports every mistake as one line."""
  program, arguments = os.path.basename(argv[0]), argv[1:]
  try:
    for argument in arguments:
      if match := re.fullmatch(r'-h|--?help(?:short|full)?(?:=(.*))?', argument):
        print(_help(program, match[1] or ''))
        sys.exit(0)
    arguments, options = _take_options(_with_shipped_experiment(arguments))
    arguments, unset = _take_nones(arguments)
    _check_arguments(arguments)
    # Defined here and not at import: the definition reads the overrides and may reject them.
    config_flags.DEFINE_config_file(
        'config',
        _DEFAULT,
        'experiment file, or FILE:smoke for its smallest form',
        sys_argv=[argv[0], *arguments],
    )
    positional = flags.FLAGS([argv[0], *arguments])[1:]
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
    config.env.options.update(options)
    for path in unset:
      *parents, name = path.split('.')
      setattr(validation.get(config, '.'.join(parents)), name, None)
    return argv[:1]
  except (flags.Error, types.UserError) as error:
    lines = str(error).splitlines()  # the lines in between may be a traceback
    message = ' '.join(lines[:1] + lines[1:][-1:]) + _meaning(lines[0]) + _place(error)
  except Exception as error:  # whatever an experiment file may raise
    lines = str(error).splitlines()
    message = f'cannot load the config: {type(error).__name__}: {"".join(lines[-1:])}'
    message += _place(error)
  sys.exit(_fail(program, message, 2))


def _place(error: Exception) -> str:
  """Returns ' (FILE:LINE)' of the last line of a user's own file in an error's traceback, or ''."""
  # config_flags puts the traceback of some errors into the text of another.
  text = ''.join(traceback.format_exception(error)) + str(error)
  places = re.findall(r'File "([^"]+)", line (\d+)', text)
  libraries = (_PACKAGE + os.sep, os.path.dirname(os.__file__) + os.sep, '<')
  own = [(file, line) for file, line in places if not file.startswith(libraries)]
  own = [(file, line) for file, line in own if 'site-packages' not in file and file != _ENTRY]
  return f' ({own[-1][0]}:{own[-1][1]})' if own else ''


def _help(program: str, section: str) -> str:
  """Returns the text of --help, or of --help=SECTION: the settings of one section of the config."""
  settings = {path: (rules, value) for path, rules, value in validation.fields(schema.Config())}
  if section:
    chosen = [path for path in settings if path == section or path.startswith(section + '.')]
    if not chosen:
      raise types.UserError(f'--help={section}: there is no such section; see --help')
    return '\n'.join(
        f'--config.{path}={settings[path][1]!r}\n    {settings[path][0].meaning}' for path in chosen
    )
  sections = dict.fromkeys(path.split('.')[0] for path in settings)
  own = [flag.name for flag in flags.FLAGS.get_flags_for_module(__name__)]
  lines = [
      __doc__.replace('python run.py', 'stppo' if program == 'stppo' else 'python run.py'),
      '--config=FILE[:smoke]\n    experiment file, or its smallest form',
      *(f'--{name}\n    {flags.FLAGS[name].help}' for name in own if name != 'config'),
      '--config.FIELD=VALUE\n    overrides a setting, as in --config.train.updates=3',
      f'--help=SECTION\n    lists settings, defaults and meanings of: {", ".join(sections)}',
  ]
  return '\n'.join(lines)


def _with_shipped_experiment(arguments: list[str]) -> list[str]:
  """Takes `--config=experiments/NAME.py` from the package if this folder has no such file."""

  def resolve(argument: str) -> str:
    match = re.fullmatch(r'(--?config=)?(experiments/[^:]*)(:.*)?', argument)
    if match is None or os.path.exists(match[2]) or not os.path.isfile(f'{_HOME}/{match[2]}'):
      return argument
    return f'{match[1] or ""}{os.path.join(_HOME, match[2])}{match[3] or ""}'

  return [
      resolve(argument)
      if argument.startswith('-') or before in ('--config', '-config')
      else argument
      for before, argument in zip(['', *arguments], arguments)
  ]


def _take_options(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
  """Splits off --config.env.options.NAME=VALUE and --config.env.options={'NAME': VALUE, ..}.

  Returns (the other arguments, {NAME: VALUE}). The names belong to the environment and are unknown
  to config_flags. Values are JSON or Python; any other value is a string.
  """
  others, options = [], {}
  for argument in arguments:
    match = re.fullmatch(r'--?config\.env\.options(?:\.(\w+))?=(.*)', argument, re.DOTALL)
    if not match:
      others.append(argument)
      continue
    value: Any = match[2]
    for parse in (json.loads, ast.literal_eval):
      with contextlib.suppress(ValueError, SyntaxError):
        value = parse(match[2])
        break
    if match[1] is None and not isinstance(value, dict):
      raise types.UserError(
          f'{argument}: give a dict, as in --config.env.options=\'{{"low": 1}}\', or one option, '
          'as in --config.env.options.low=1'
      )
    options |= {match[1]: value} if match[1] else value
  return others, options


def _take_nones(arguments: list[str]) -> tuple[list[str], list[str]]:
  """Splits off --config.PATH=None where None is allowed, which config_flags cannot parse.

  Returns (the other arguments, paths).
  """
  optional = {path for path, kind in validation.kinds().items() if type(None) in get_args(kind)}
  nones = {f'{dashes}config.{path}=None': path for path in optional for dashes in ('-', '--')}
  others = [argument for argument in arguments if argument not in nones]
  return others, [nones[argument] for argument in arguments if argument in nones]


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


def _fail(program: str, message: object, code: int) -> int:
  """Prints one line to stderr, also on the other processes; returns the exit code."""
  # One line, whatever the message: a file's text may be long, or have a terminal's control codes.
  line = ' '.join([f'{program}:', *str(message).split()])[:_LONGEST_LINE]
  line = ''.join(c if c.isprintable() else repr(c)[1:-1] for c in line)
  hosts.leave(line, code)
  print(line, file=sys.stderr)
  return code


def _main(argv: list[str]) -> int | None:
  """Runs the command; turns expected errors into one line and an exit code."""
  fail = functools.partial(_fail, os.path.basename(argv[0]))
  try:
    return _run()
  except types.UserError as error:
    return fail(error, 2)
  except types.RunError as error:
    return fail(error, 1)
  except OSError as error:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
      raise
    return fail(f'{error}: make room; the same command resumes from the last checkpoint', 1)
  except types.Stopped:
    return fail('stopped on request, with nothing to save yet; the same command starts again', 0)
  except KeyboardInterrupt:
    return fail('interrupted; the same command resumes from the last checkpoint', 130)
  except Exception as error:
    if not hosts.await_news():
      raise
    traceback.print_exc()
    return fail(f'{type(error).__name__}: {error}', 1)
