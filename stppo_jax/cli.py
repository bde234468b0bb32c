"""The command line: trains, evaluates, exports, plans, or reports.

  python run.py                                                    # the default: st_ppo_tiny
  python run.py --config=experiments/st_ppo_tiny.py:smoke --workdir=/tmp/smoke
  python run.py --config=experiments/ppo_tiny.py --config.seed=1 --config.train.updates=40
  python run.py --mode=eval --config.data.eval_split=test          # of the newest checkpoint
  python run.py --mode=export                                      # to WORKDIR/export, for transformers
  python run.py --profile=2                                        # and a trace of two updates
  python run.py --mode=report                                      # report.html, made anew
  python run.py --config=experiments/st_ppo_7b.py --mode=plan --topology=v5e:8x8    # does it fit?

The same command again resumes the run in its workdir. SIGTERM ends it, saved and with exit code 0,
once the update under way is trained; at once while its episodes are played or the retriever is down.
Ctrl-C (130) ends it at once, and what came after the last checkpoint is repeated.
On several machines: the same command on each, with --distributed (TPU pod, SLURM), or
--coordinator=HOST:PORT --num_processes=N --process_id=I.
"""

import contextlib
import dataclasses
import difflib
import errno
import functools
import logging as std_logging
import os
import re
import signal
import sys
import threading
import traceback

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.monitoring import report
from stppo_jax.runtime import hosts
from stppo_jax.runtime import huge_pages

_DEFAULT = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'experiments', 'st_ppo_tiny.py'
)
_WORKDIR = flags.DEFINE_string('workdir', '', 'folder of the run; default: runs/<config name>')
_MODE = flags.DEFINE_enum(
    'mode', 'train', ['train', 'eval', 'export', 'plan', 'report'], 'what to do'
)
_TOPOLOGY = flags.DEFINE_string(
    'topology', '', 'for --mode=plan: v5e:8x8, v5p:4x4x4, h100:1x1x8, ..; empty: the devices here'
)
_DISTRIBUTED = flags.DEFINE_bool(
    'distributed', False, 'one of many processes, as the environment says: TPU pod, SLURM, Open MPI'
)
_COORDINATOR = flags.DEFINE_string(
    'coordinator', '', 'one of many processes: HOST:PORT of process 0, a port that is free there'
)
_NUM_PROCESSES = flags.DEFINE_integer('num_processes', None, 'with --coordinator: how many')
_PROCESS_ID = flags.DEFINE_integer('process_id', None, 'with --coordinator: which one, from 0')
_PROFILE = flags.DEFINE_integer(
    'profile', 0, 'updates to trace, from the second on, into WORKDIR/profile', lower_bound=0
)


def main():
  """The command `stppo`, and what run.py calls."""
  huge_pages.restart()
  app.run(_main, flags_parser=_parse)


def _run(unused_argv):
  _quiet_libraries()
  config = flags.FLAGS.config
  workdir = _WORKDIR.value or os.path.join('runs', config.name)
  many = dict(
      coordinator=_COORDINATOR.value,
      num_processes=_NUM_PROCESSES.value,
      process_id=_PROCESS_ID.value,
      cluster=_DISTRIBUTED.value,
  )
  if _MODE.value in ('plan', 'report') and any(many.values()):
    raise types.UserError(
        f'--mode={_MODE.value} is for one process: leave out --distributed and '
        '--coordinator; --mode=train and --mode=eval take them'
    )
  if _MODE.value == 'report':
    print(report.build(workdir))
    return
  if _MODE.value == 'plan':
    import jax

    if _TOPOLOGY.value:  # accelerators that may be here are to be left alone
      jax.config.update('jax_platforms', 'cpu')
      jax.config.update('jax_enable_compilation_cache', False)  # such programs cannot be read back
    from stppo_jax.planning import plan

    planned = plan.make(config, _TOPOLOGY.value)
    print(plan.table(planned))
    return 0 if planned.fits else 1
  # Imported here: a mistake on the command line is told before JAX has started.
  import jax

  hosts.initialize(**many)
  from stppo_jax.training import loop  # after the above: bm25s runs JAX when it is imported
  from stppo_jax.training import results

  if not hosts.is_writer():
    logging.set_verbosity(logging.WARNING)
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR') or os.path.expanduser('~/.cache/stppo_jax')
  jax.config.update('jax_compilation_cache_dir', cache)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)  # the small ones are many
  if _MODE.value == 'eval':
    scores = results.evaluate(config, workdir)
    if hosts.is_writer():
      for name, value in scores.items():
        print(f'{name:40s} {value:.4f}')
  elif _MODE.value == 'export':
    print(results.export(config, workdir))
  else:
    with _stop_requested() as stop_requested:
      loop.train(config, workdir, stop_requested, _PROFILE.value)
  hosts.finish()


@contextlib.contextmanager
def _stop_requested():
  """Gives a function that says whether a SIGTERM came.

  It raises KeyboardInterrupt where a Ctrl-C was lost: the interpreter raises it wherever it is, which
  may be a library's callback that ignores exceptions.
  """
  asked, interrupted = threading.Event(), threading.Event()

  def interrupt(*unused):
    interrupted.set()
    raise KeyboardInterrupt

  def stop_requested():
    if interrupted.is_set():
      raise KeyboardInterrupt
    return asked.is_set()

  handlers = {signal.SIGTERM: lambda *unused: asked.set(), signal.SIGINT: interrupt}
  before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
  try:
    yield stop_requested
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _quiet_libraries():
  """Our own messages with the time; of libraries, warnings only."""
  logging.set_verbosity(logging.INFO)
  handler = logging.get_absl_handler()
  handler.setFormatter(std_logging.Formatter('%(asctime)s  %(message)s', '%H:%M:%S'))
  handler.addFilter(
      lambda record: 'stppo_jax' in record.pathname
      or (
          # Orbax prints a traceback for what `Checkpoints` tells in one line.
          record.levelno >= std_logging.WARNING
          and 'orbax' not in record.pathname
      )
  )
  sys.unraisablehook = functools.partial(_tell_unraisable, sys.unraisablehook)


def _tell_unraisable(tell, said):
  """sys.unraisablehook, but for what TensorStore's threads say a hundredfold after a save that failed."""
  if str(said.exc_value) != 'Event loop is closed':
    tell(said)


def _parse(argv):
  """absl's flags, with every mistake as one line."""
  try:
    _check_arguments(argv[1:])
    # Defined here and not above: the definition reads the overrides, and may complain about them.
    config_flags.DEFINE_config_file(
        'config',
        _DEFAULT,
        'experiment file, or FILE:smoke for its smallest form; ' '--config.a.b=c overrides a field',
        sys_argv=argv,
    )
    positional = flags.FLAGS(argv)[1:]
    if positional:
      raise types.UserError(
          f'unexpected argument {positional[0]!r}: flags start with --, as in '
          '--config.train.updates=3'
      )
    flags.FLAGS.config.name  # a file that could not be read raises here
    return [argv[0]]
  except (flags.Error, types.UserError) as error:
    lines = str(error).splitlines()  # of several, those between may be a traceback
    message = ' '.join(lines[:1] + lines[1:][-1:])
  except Exception as error:  # whatever an experiment file may raise
    lines = str(error).splitlines()
    message = f'cannot load the config: {type(error).__name__}: {"".join(lines[-1:])}'
  sys.exit(_fail(message, 2))


def _check_arguments(arguments):
  """Refuses an experiment file that is not there, and overrides of fields that are not."""
  for argument in arguments:
    if match := re.match(r'--?config=([^:]*)', argument):
      if not os.path.isfile(match[1]):
        raise types.UserError(
            f'--config={match[1]}: no such file; give one such as ' 'experiments/st_ppo_tiny.py'
        )
    if match := re.match(r'--?(?:no)?config\.([^=]+)', argument):
      path, known = match[1], list(_field_paths(schema.Config()))
      if path not in known:
        last = path.split('.')[-1]
        near = [name for name in known if name.startswith(path + '.') or name.endswith('.' + last)]
        near = near or difflib.get_close_matches(path, known, n=3)
        hint = f'did you mean {" or ".join(near[:3])}?' if near else 'see stppo_jax/config.py'
        raise types.UserError(f'--config.{path}: there is no such field; {hint}')


def _field_paths(config, prefix=''):
  """'seed', 'data.source', .. of everything that an override can set."""
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      yield from _field_paths(value, f'{prefix}{field.name}.')
    else:
      yield prefix + field.name


def _fail(message, code):
  line = ' '.join(['run.py:', *str(message).split()])  # one line, whatever the message
  hosts.leave(line, code)
  print(line, file=sys.stderr)
  return code


def _main(argv):
  try:
    return _run(argv)
  except types.UserError as error:
    return _fail(error, 2)
  except types.RunError as error:
    return _fail(error, 1)
  except OSError as error:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
      raise
    return _fail(f'{error}: make room; the same command resumes from the last checkpoint', 1)
  except KeyboardInterrupt:
    return _fail('interrupted; the same command resumes from the last checkpoint', 130)
  except Exception as error:
    if not hosts.await_news():
      raise
    traceback.print_exc()
    return _fail(f'{type(error).__name__}: {error}', 1)
