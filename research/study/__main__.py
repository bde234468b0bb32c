"""Runs a grid of runs and writes its page.

  python -m research.study --config=research/study_stability.py --workdir=runs/study --jobs=2
  python -m research.study --config=research/study_stability.py:quick --workdir=runs/quick

The same command continues after a stop. Finished runs are not repeated. SIGTERM and Ctrl-C end the
runs in progress, each with a checkpoint.
"""

import argparse
import logging as std_logging
import os
import pathlib
import signal
import sys
import threading

from absl import logging

from research.study import command
from research.study import runner
from stppo_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]


def main() -> int:
  """Reads the command line, runs the study and returns the exit code."""
  parser = argparse.ArgumentParser(
      prog='python -m research.study',
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('--config', required=True, help='FILE or FILE:MODE with a get_study function')
  parser.add_argument('--workdir', required=True, help='folder of the runs')
  parser.add_argument('--jobs', type=int, default=0, help='runs at once; 0: one per core')
  parser.add_argument('--devices', default='cpu', choices=runner.DEVICES, help='of the runs')
  parser.add_argument('--only', default='', help="names, as in 'system/*/ppo,*/seed_0'")
  args = parser.parse_args()
  logging.set_verbosity(logging.INFO)
  formatter = std_logging.Formatter('%(asctime)s  %(message)s', '%H:%M:%S')
  logging.get_absl_handler().setFormatter(formatter)
  os.environ['JAX_PLATFORMS'] = 'cpu'  # The accelerators belong to the runs.
  stop = threading.Event()
  signal.signal(signal.SIGTERM, lambda *_: stop.set())
  only = [pattern for pattern in args.only.split(',') if pattern]
  run_command = [sys.executable, str(ROOT / 'run.py'), f'--config={args.config}']
  try:
    return command.run(
        args.config, args.workdir, run_command, args.jobs, args.devices, only, stop.is_set
    )
  except UserError as error:
    print(f'{parser.prog}: {error}', file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130


if __name__ == '__main__':
  sys.exit(main())
