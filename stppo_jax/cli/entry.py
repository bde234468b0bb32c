"""Runs a command: reads its arguments, starts JAX, runs the mode, reports errors in one line."""

from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import errno
import functools
import logging as std_logging
import os
import sys
import threading
import time
import traceback

from absl import flags as absl_flags
from absl import logging

from stppo_jax.cli import config_file
from stppo_jax.cli import flags as flags_lib
from stppo_jax.cli import signals
from stppo_jax.cli.command import Command
from stppo_jax.cli.command import show
from stppo_jax.cli.flags import Flags
from stppo_jax.cli.modes import MODES
from stppo_jax.config import Config
from stppo_jax.distributed import hosts
from stppo_jax.envs import guard
from stppo_jax.net import calls
from stppo_jax.stop_signal import NEVER
from stppo_jax.types import hint
from stppo_jax.types import RunError
from stppo_jax.types import Stopped
from stppo_jax.types import UserError

_MAX_LINE = 4000  # characters of an error
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), '')
_EXIT_S = 1.5  # limit of the end of a process in which an environment or the compiler still works


def main() -> None:
  """Runs the command of this process and exits."""
  # Plug-ins come from the current folder. Experiments import each other as `experiments.NAME`.
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  if config_file.HOME not in sys.path:
    sys.path.append(config_file.HOME)
  configure_logging()
  code = run(sys.argv)
  threading.Thread(target=_end, args=[code or 0], daemon=True).start()
  sys.exit(code)


def _end(code):
  """Ends the process if threads of an environment or of the compiler keep it."""
  time.sleep(_EXIT_S)
  if guard.has_left_calls() or calls.is_running(calls.COMPILER):
    os._exit(code)


def run(argv: Sequence[str]) -> int | None:
  """Runs a command; returns its exit code. Expected errors become one line on stderr."""
  program = os.path.basename(argv[0])
  try:
    return _run(program, argv[1:])
  except UserError as error:
    return _fail(program, _with_page(error), 2)
  except RunError as error:
    return _fail(program, _with_page(error), 1)
  except OSError as error:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
      raise
    message = f'{error}: make room; the same command resumes from the last checkpoint'
    return _fail(program, message, 1)
  except Stopped:
    message = 'stopped on request, with nothing to save yet; the same command starts again'
    return _fail(program, message, 0)
  except KeyboardInterrupt:
    message = 'interrupted; a training resumes from its last checkpoint by the same command'
    return _fail(program, message, 130)
  except Exception as error:
    if not hosts.await_failure():
      raise
    traceback.print_exc()
    return _fail(program, f'{type(error).__name__}: {error}', 1)


def _run(program: str, arguments: Sequence[str]) -> int | None:
  parsed = flags_lib.parse(arguments)
  flags = parsed.flags
  if parsed.help == '':
    from stppo_jax.cli import help as help_lib

    show(help_lib.overview(program, [*MODES]))
    return 0
  _check_flags(flags)
  mode = MODES[flags.mode]
  if len(parsed.operands) != len(mode.operands):
    usage = ' '.join([program, flags.mode, *mode.operands])
    words = ' '.join(parsed.operands) or 'nothing'
    raise UserError(
        f'{flags.mode} is followed by {words}: give {usage}. Flags start with --, as in '
        '--config.train.updates=3'
    )
  config = config_file.load(parsed, mode.reads_run) if mode.reads_config else Config()
  if parsed.help is not None:
    from stppo_jax.cli import help as help_lib

    show(help_lib.section(parsed.help, config))
    return 0

  if mode.reads:
    _warn_of_unread(flags.mode, parsed.overrides)
  workdir = flags.workdir or os.path.join('runs', config.name + mode.suffix)
  if mode.starts_jax:
    if config.train.deterministic:
      from stppo_jax.distributed import determinism

      determinism.enable()  # before JAX starts the devices
    _start_jax(flags, workdir)
  handled = signals.handled() if mode.stops else contextlib.nullcontext(NEVER)
  with handled as stop_signal:
    code = mode.load()(Command(config, workdir, flags, parsed.operands, stop_signal, [*MODES]))
  hosts.finish()
  return code


def _check_flags(flags: Flags) -> None:
  """Raises a UserError for an unknown mode, and for a flag that the mode does not read."""
  if flags.mode not in MODES:
    raise UserError(
        f'{flags.mode}: there is no such mode. Allowed are {", ".join(MODES)}. Flags start with '
        f'--, as in --config.train.updates=3{hint(flags.mode, MODES)}'
    )
  default = Flags()
  for name in dict.fromkeys(name for mode in MODES.values() for name in mode.flags):
    value = getattr(flags, name)
    if name not in MODES[flags.mode].flags and value != getattr(default, name):
      modes = [other for other, mode in MODES.items() if name in mode.flags]
      raise UserError(
          f'--{name}={value} is for {" and ".join(modes)}, and this is {flags.mode}: leave it out'
      )
  is_distributed = flags.distributed or flags.coordinator or flags.num_processes is not None
  if is_distributed and not MODES[flags.mode].starts_jax:
    raise UserError(
        f'{flags.mode} is for one process: leave out --distributed and --coordinator; train and '
        'eval take them'
    )


def _warn_of_unread(name: str, overrides: Iterable[str]) -> None:
  """Logs the settings of the command line that a mode does not read."""
  reads = tuple(f'{path}.' for path in MODES[name].reads)
  unread = [f'config.{path}' for path in overrides if not f'{path}.'.startswith(reads)]
  if unread:
    logging.warning('%s does not read %s: no effect', name, ', '.join(unread))


def _start_jax(flags: Flags, workdir: str) -> None:
  """Joins the other processes and sets the compilation cache."""
  import jax

  if 'xla_force_host_platform_device_count' in os.environ.get('XLA_FLAGS', ''):
    # With a thread per simulated device, XLA's default, programs in flight can wait forever.
    os.environ.setdefault('NPROC', '64')
  hosts.initialize(  # before any program runs
      coordinator=flags.coordinator,
      num_processes=flags.num_processes,
      process_id=flags.process_id,
      cluster=flags.distributed,
  )
  if not hosts.is_writer():
    logging.set_verbosity(logging.WARNING)
  folder = os.path.expanduser('~/.cache/stppo_jax')
  if jax.process_count() > 1:
    # Only process 0 writes the cache, so it has to be in a folder that all processes read.
    folder = os.path.join(workdir, '.jax_cache')
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR') or folder
  jax.config.update('jax_compilation_cache_dir', cache)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)  # many programs are small


def configure_logging() -> None:
  """Logs this package's messages with the time, and only warnings of libraries."""
  # Without torch, which nothing here needs, transformers would advise to install it.
  os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
  absl_flags.FLAGS.mark_as_parsed()
  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO)
  handler = logging.get_absl_handler()
  handler.setFormatter(std_logging.Formatter('%(asctime)s  %(message)s', '%H:%M:%S'))
  handler.addFilter(_is_shown)
  sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)


def _is_shown(record: std_logging.LogRecord) -> bool:
  if record.pathname.startswith(_PACKAGE):  # a clone may be named like the package, too
    return True
  # Orbax prints a traceback for errors that `Checkpoints` reports in one line.
  return record.levelno >= std_logging.WARNING and 'orbax' not in record.pathname


def _report_unraisable(report, unraisable) -> None:
  """Reports an error, unless it is one that TensorStore's threads repeat after a failed save."""
  if str(unraisable.exc_value) != 'Event loop is closed':
    report(unraisable)


def _with_page(error: Exception) -> str:
  """Returns the message with the page of the documentation that explains it."""
  from stppo_jax.cli import doc_pages

  return doc_pages.with_page(str(error))


def _fail(program: str, message: object, code: int) -> int:
  """Prints one line to stderr, also on the other processes; returns the exit code."""
  # A message may hold the text of a file, which may be long or have control codes of a terminal.
  line = ' '.join([f'{program}:', *str(message).split()])[:_MAX_LINE]
  line = ''.join(c if c.isprintable() else repr(c)[1:-1] for c in line)
  hosts.leave(line, code)
  print(line, file=sys.stderr)
  return code
