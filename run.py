"""The command line: trains, evaluates, or reports.

  python run.py                                                    # the default: st_ppo_tiny
  python run.py --config=experiments/st_ppo_tiny.py:smoke --workdir=/tmp/smoke
  python run.py --config=experiments/ppo_tiny.py --config.seed=1 --config.train.updates=40
  python run.py --mode=eval --config.data.eval_split=test          # of the newest checkpoint
  python run.py --mode=report                                      # report.html, made anew

The same command again resumes the run in its workdir.
"""

import logging as std_logging
import os
import sys

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from stppo_jax import report
from stppo_jax import types

_HERE = os.path.dirname(os.path.abspath(__file__))
_CONFIG = config_flags.DEFINE_config_file(
    'config', os.path.join(_HERE, 'experiments', 'st_ppo_tiny.py'),
    'experiment file, or FILE:smoke for its smallest form; --config.a.b=c overrides a field')
_WORKDIR = flags.DEFINE_string('workdir', '', 'folder of the run; default: runs/<config name>')
_MODE = flags.DEFINE_enum('mode', 'train', ['train', 'eval', 'report'], 'what to do')


def main(unused_argv):
  _quiet_libraries()
  config = _CONFIG.value
  workdir = _WORKDIR.value or os.path.join('runs', config.name)
  if _MODE.value == 'report':
    print(report.build(workdir))
    return
  # Imported here: a mistake on the command line is told before JAX has started.
  import jax
  from stppo_jax.training import loop
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR') or os.path.expanduser('~/.cache/stppo_jax')
  jax.config.update('jax_compilation_cache_dir', cache)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  if _MODE.value == 'eval':
    for name, value in loop.evaluate(config, workdir).items():
      print(f'{name:40s} {value:.4f}')
  else:
    loop.train(config, workdir)


def _quiet_libraries():
  """Our own messages with the time; of libraries, warnings only."""
  logging.set_verbosity(logging.INFO)
  handler = logging.get_absl_handler()
  handler.setFormatter(std_logging.Formatter('%(asctime)s  %(message)s', '%H:%M:%S'))
  handler.addFilter(
      lambda record: record.levelno >= std_logging.WARNING or 'stppo_jax' in record.pathname)


def _parse(argv):
  """absl's flags, with every mistake as one line."""
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    message = str(error).splitlines()[0]
  except (KeyError, AttributeError) as error:  # ml_collections: an unknown field
    message = f'unknown field in an override: {error.args[0]}'
  except Exception as error:  # whatever an experiment file may raise
    message = f'cannot load the config: {" ".join(str(error).split())}'
  sys.exit(_fail(message, 2))


def _fail(message, code):
  print(f'run.py: {message}', file=sys.stderr)
  return code


def _main(argv):
  try:
    main(argv)
  except types.UserError as error:
    return _fail(error, 2)
  except types.RunError as error:
    return _fail(error, 1)
  except KeyboardInterrupt:
    return _fail('interrupted; the same command resumes from the last checkpoint', 130)


if __name__ == '__main__':
  app.run(_main, flags_parser=_parse)
