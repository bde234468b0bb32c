"""Runs a grid of runs and writes its pages.

  python -m research.study --config=research/study_stability.py --workdir=runs/study --jobs=2
  python -m research.study --config=research/study_stability.py:quick --workdir=runs/quick

The same command continues after a stop. Finished runs are not repeated. SIGTERM and Ctrl-C stop the
runs in progress, each with a checkpoint.
"""

import argparse
from collections.abc import Callable
import logging as std_logging
import os
import signal
import sys
import threading

from absl import logging

from research.page import build
from research.study import grid as grid_lib
from research.study import results
from research.study import runner
from stppo_jax.types import UserError


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
  os.environ['JAX_PLATFORMS'] = 'cpu'  # The accelerators belong to the runs.
  logging.set_verbosity(logging.INFO)
  formatter = std_logging.Formatter('%(asctime)s  %(message)s', '%H:%M:%S')
  logging.get_absl_handler().setFormatter(formatter)
  stop = threading.Event()
  signal.signal(signal.SIGTERM, lambda *_: stop.set())
  try:
    return run_study(args, stop.is_set)
  except UserError as error:
    print(f'{parser.prog}: {error}', file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130


def run_study(args: argparse.Namespace, stop_requested: Callable[[], bool]) -> int:
  """Runs what is left of a study and writes its page; returns 1 if a job failed, else 0."""
  study, config = grid_lib.load(args.config)
  only = [pattern for pattern in args.only.split(',') if pattern]
  jobs = grid_lib.plan(study, config, only)
  build.read_templates(study.templates)  # A missing file is reported before the runs start.
  command = [sys.executable, str(runner.ROOT / 'run.py'), f'--config={args.config}']
  slots = runner.make_slots(args.jobs, args.devices)
  study_runner = runner.Runner(args.workdir, study, jobs, command, slots)
  study_runner.run(stop_requested)
  print(study_runner.table())
  if study.published:
    published = results.planned(jobs, results.read(study.published))
    print(build.repeat_table(study, jobs, study_runner.records(), published))
  print(build.write_pages(args.config, args.workdir))
  return 1 if study_runner.counts()['failed'] else 0


if __name__ == '__main__':
  sys.exit(main())
