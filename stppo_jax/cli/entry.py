"""The command line: trains, evaluates, serves, exports, plans and reports.

  python run.py                                                  # the default: st_ppo_tiny
  python run.py --config=experiments/st_ppo_tiny.py:smoke --workdir=/tmp/smoke
  python run.py --config.algorithm.variant=ppo --config.seed=1 --workdir=runs/ppo_1
  python run.py --mode=eval --config.eval.samples=8              # scores, pass@k and pass^k
  python run.py --mode=export                                    # WORKDIR/export, for transformers
  python run.py --mode=serve --port=8080                         # OpenAI's interface to the policy
  python run.py --mode=chat                                      # ask it, and see its searches
  python run.py --mode=sample --batches=8                        # plays episodes, trains on none
  python run.py --mode=export_atif                               # trajectories for Harbor's viewer
  python run.py --mode=import_atif --input=DIR --workdir=runs/b  # runs/b/episodes, to train on
  python run.py --mode=report                                    # writes report.html again
  python run.py --config=experiments/st_ppo_7b.py --mode=plan --topology=v5e:8x8   # does it fit?

The same command again resumes the run in its workdir. SIGTERM ends a run with exit code 0 and a
checkpoint: after the current update, or immediately while it loads, plays episodes or waits for the
retriever. Ctrl-C ends it immediately with exit code 130 and without a checkpoint. On several hosts
add --distributed (TPU pod, SLURM) or --coordinator=HOST:PORT --num_processes=N --process_id=I.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import errno
import functools
import logging as std_logging
import os
import signal
import sys
import threading
import traceback
from typing import Any

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.cli import parsing
from stppo_jax.cli import saved_config
from stppo_jax.distributed import hosts
from stppo_jax.monitoring import report

_LONGEST_LINE = 4000  # characters of an error

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
_PORT = flags.DEFINE_integer(
    'port', 8080, 'for --mode=serve; 0: any free one', lower_bound=0, upper_bound=65535
)
_BATCHES = flags.DEFINE_integer(
    'batches', 1, 'for --mode=sample; 0: each question once', lower_bound=0
)
_INPUT = flags.DEFINE_string(
    'input',
    '',
    'for --mode=export_atif: saved episodes, a folder or a file; empty: WORKDIR/episodes. For '
    '--mode=import_atif: trajectories, a folder or a file',
)
_RETOKENIZE = flags.DEFINE_bool(
    'retokenize', False, 'for --mode=import_atif: encode the texts, although there are token ids'
)


def main() -> None:
  """Reads the command line and runs what it asks for."""
  # Plug-ins come from the current folder. Experiments import each other as `experiments.NAME`.
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  if parsing.HOME not in sys.path:
    sys.path.append(parsing.HOME)
  app.run(_main, flags_parser=_parse)


def _train(config: schema.Config, workdir: str) -> None:
  from stppo_jax.training import loop

  with _stop_requested() as stop_requested:
    loop.start(config, workdir, stop_requested, _PROFILE.value)


def _eval(config: schema.Config, workdir: str) -> None:
  import jax

  from stppo_jax.evaluation import job

  if config.eval.address:
    jax.config.update('jax_platforms', 'cpu')  # the accelerator is the server's
  with _stop_requested() as stop_requested:
    results = job.evaluate(config, workdir, stop_requested)
  if results is not None:
    print(results.table)
    logging.info('episodes and results are in %s', results.folder)


def _export(config: schema.Config, workdir: str) -> None:
  from stppo_jax.evaluation import policy

  print(policy.export(config, workdir))


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


def _serve(config: schema.Config, workdir: str) -> None:
  from stppo_jax.evaluation import policy
  from stppo_jax.serving import gateway

  with _stop_requested() as stop_requested:
    served = policy.policy(config, workdir)
    gateway.serve(
        config, served.model, served.params, served.description, _PORT.value, stop_requested
    )


def _export_atif(config: schema.Config, workdir: str) -> None:
  from stppo_jax.rollout import prepare
  from stppo_jax.trajectories import atif_writer

  source = _INPUT.value or os.path.join(workdir, 'episodes')
  folder = os.path.join(workdir, 'atif')
  tokenizer = prepare.load_tokenizer(config)
  form = config.serve.tool_form
  atif_writer.write_folder(source, folder, tokenizer, config.model.folder, form)
  print(folder)


def _import_atif(config: schema.Config, workdir: str) -> None:
  from stppo_jax.rollout import prepare
  from stppo_jax.trajectories import atif_reader

  reader = atif_reader.AtifReader(
      prepare.load_tokenizer(config),
      config.serve.tool_form,
      config.rollout.max_observation,
      _RETOKENIZE.value,
  )
  folder = os.path.join(workdir, 'episodes')
  atif_reader.read_folder(_INPUT.value, folder, reader, config.train.episodes)
  print(folder)


def _sample(config: schema.Config, workdir: str) -> None:
  from stppo_jax.evaluation import sample

  with _stop_requested() as stop_requested:
    print(sample.sample(config, workdir, _BATCHES.value, stop_requested))


def _chat(config: schema.Config, workdir: str) -> None:
  from stppo_jax.evaluation import chat
  from stppo_jax.evaluation import policy

  loaded = policy.policy(config, workdir)
  chat.chat(config, loaded.model, loaded.params, loaded.description)


# Heavy modules are imported inside: a mistake on the command line is reported before JAX starts.
_MODES: dict[str, Callable[[schema.Config, str], int | None]] = {
    'train': _train,
    'eval': _eval,
    'export': _export,
    'export_atif': _export_atif,
    'import_atif': _import_atif,
    'plan': _plan,
    'report': _report,
    'sample': _sample,
    'serve': _serve,
    'chat': _chat,
}
_ONE_PROCESS = ('export_atif', 'import_atif', 'plan', 'report')
_MODES_OF_FLAGS = {
    'topology': ('plan',),
    'profile': ('train',),
    'port': ('serve',),
    'batches': ('sample',),
    'input': ('export_atif', 'import_atif'),
    'retokenize': ('import_atif',),
}
_MODE = flags.DEFINE_enum('mode', 'train', list(_MODES), 'what to do')


def _run() -> int | None:
  """Runs the mode that the flags name; returns the exit code."""
  _quiet_libraries()
  file = config_flags.get_config_filename(flags.FLAGS['config'])
  if file.partition(':')[0] == saved_config.__file__:
    logging.info('the settings are those of %s/config.json', _WORKDIR.value)
  elif file.startswith(parsing.HOME) and file != parsing.DEFAULT:
    logging.info('config file: %s', file)
  config, mode = flags.FLAGS.config, _MODE.value
  _check_flags(mode)
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
  if config.train.deterministic:
    from stppo_jax.distributed import determinism

    determinism.enable()  # before JAX starts the devices
  _start_jax(processes, workdir)
  code = _MODES[mode](config, workdir)
  hosts.finish()
  return code


def _check_flags(mode: str) -> None:
  """Raises a UserError for a flag that `mode` does not read."""
  for name, modes in _MODES_OF_FLAGS.items():
    flag = flags.FLAGS[name]
    if mode not in modes and flag.value != flag.default:
      raise types.UserError(
          f'--{name}={flag.value} is for --mode={" and --mode=".join(modes)}, and this is '
          f'--mode={mode}: leave it out'
      )


def _start_jax(processes: dict[str, Any], workdir: str) -> None:
  """Joins the other processes and sets the compilation cache."""
  import jax

  if 'xla_force_host_platform_device_count' in os.environ.get('XLA_FLAGS', ''):
    # With a thread per simulated device, XLA's default, programs in flight can wait for ever.
    os.environ.setdefault('NPROC', '64')
  hosts.initialize(**processes)  # before any program runs
  if not hosts.is_writer():
    logging.set_verbosity(logging.WARNING)
  # Process 0 alone writes the cache: with several it has to be in a folder that all of them read.
  shared = jax.process_count() > 1
  folder = (
      os.path.join(workdir, '.jax_cache') if shared else os.path.expanduser('~/.cache/stppo_jax')
  )
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR') or folder
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

  def tell_unraisable(unraisable):
    if not isinstance(unraisable.exc_value, (KeyboardInterrupt, types.Stopped)):  # asked for again
      tell(unraisable)

  tell, sys.unraisablehook = sys.unraisablehook, tell_unraisable
  handlers = {signal.SIGTERM: terminate, signal.SIGINT: interrupt}
  before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
  try:
    yield stop_requested
  finally:
    sys.unraisablehook = tell
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
  """Parses the command line, or prints one line and exits."""
  own = [flag.name for flag in flags.FLAGS.get_flags_for_module(__name__)]
  own.append(parsing.TRUST.name)
  try:
    return parsing.parse(argv, __doc__, own)
  except types.UserError as error:
    sys.exit(_fail(os.path.basename(argv[0]), error, 2))


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
