"""The rows that the study does not compare, next to two that it does, and more seeds of examples.

  python -m research.study_rows --workdir=runs/rows

A row is tried at three rates with one seed. Then it runs at its best rate with three other seeds.
All rows have the embedded questions, the embedded model and twelve updates of 128 episodes. Rows
that compare episodes have groups of eight. After the rows, nine examples run with their committed
configs and two further seeds. A result is appended to research/results as soon as its run has
ended. The same command continues after a stop, and a run that has a result is not repeated.
`python -m research.page --config=research/study_rows.py` writes docs/rows.md from the results.
"""

import argparse
from collections.abc import Callable
from collections.abc import Mapping
import importlib
import importlib.util
import pathlib
import signal
import sys
import threading
from typing import Any

from absl import logging

from experiments import st_ppo_tiny
from research import study_drawings
from research.study import grid
from research.study import results
from research.study import runner
from stppo_jax import config as schema
from stppo_jax.algorithms import variants
from stppo_jax.settings import validation

FILE = 'research/study_rows.py'
RESULTS = 'research/results'
SEARCH, ROWS, EXAMPLES = 'rows_search', 'rows', 'examples'  # grids
RATES = (5e-5, 1.5e-4, 4.5e-4)
SEARCH_SEEDS = (100,)
SEEDS = (0, 1, 2)
READER = {'rollout.demonstrations': 'experiments.ppo_max:Reader'}
# What a row has besides its variant. The penalties are off, as in the default run, except where
# they are a part of the method.
METHODS: Mapping[str, Mapping[str, Any]] = {
    'ppo': {},
    'dr_grpo': {},
    'dpo': {},
    'ipo': {},
    'tdpo': {},
    'apo': {},
    'sppo': {},
    'superhf': {'algorithm.kl_in': 'loss'},
    'p3o': {'algorithm.kl_in': 'reward'},
    'grao': READER,
    'ppo_max': READER
    | {
        'rollout.demonstrate_every': 8,
        'algorithm.kl_in': 'reward',
        'algorithm.imitation': 0.05,
        'train.critic_warmup': 1,
    },
}
GROUP_SIZE = 8
EXAMPLE_NAMES = (
    'gem_guess', 'screens', 'messages', 'cory', 'dispatch', 'dhumbal', 'creators', 'airwaves',
    'plans',
)  # fmt: skip
EXAMPLE_SEEDS = (1, 2)  # seed 0 is in the folder of the example
# Settings that neither change a run's numbers nor belong to an example.
_OWN = ('name', 'log.', 'train.checkpoint_every', 'train.keep_checkpoints')


def get_config(mode: str = '') -> schema.Config:
  """Returns the settings that all runs of rows share."""
  config = st_ppo_tiny.base(mode)
  config.name = 'rows'
  config.actor.final_lr = 1.0
  config.train.updates = 12
  config.train.checkpoint_every = 6
  config.train.keep_checkpoints = 1
  config.eval.every = 2
  config.eval.episodes = 86
  config.log.episodes = False
  config.log.tensorboard = False
  return config


def get_study(mode: str = '') -> grid.Study:
  """Returns the search, the rows whose search is complete at their best rate, and the examples."""
  rates = {f'lr.{rate:g}': {'actor.lr': rate} for rate in RATES}
  methods = {name: method(name) for name in METHODS}
  grids = {SEARCH: grid.Grid(methods, rates, seeds=SEARCH_SEEDS, drawn=())}
  best = results.best_rates(grid.plan(grid.Study(grids), get_config(mode)), RESULTS)
  at_best = {name: methods[name] | {'actor.lr': rate} for name, rate in best.items()}
  if at_best:
    baseline = 'ppo' if 'ppo' in at_best else next(iter(at_best))
    grids[ROWS] = grid.Grid(at_best, {'best_rate': {}}, seeds=SEEDS, baseline=baseline, drawn=())
  has_gem = importlib.util.find_spec('gem') is not None  # a package that an example needs
  examples = {name: example(name) for name in EXAMPLE_NAMES if has_gem or name != 'gem_guess'}
  grids[EXAMPLES] = grid.Grid(
      examples, {'committed': {}}, seeds=EXAMPLE_SEEDS, baseline='plans', drawn=()
  )
  return grid.Study(
      grids,
      results=RESULTS,
      page='docs',
      templates='research/row_templates',
      draw=study_drawings.draw_rows,
  )


def method(name: str) -> dict[str, Any]:
  """Returns the overrides of a row."""
  compares = variants.VARIANTS[name].needs_groups
  groups = {'rollout.group_size': GROUP_SIZE} if compares else {}
  return {'algorithm.variant': name, 'algorithm.log_bias': False} | groups | dict(METHODS[name])


def example(name: str) -> dict[str, Any]:
  """Returns the settings in which the config of an example differs from that of the rows."""
  ours = {path: value for path, _, value in validation.fields(get_config())}
  config = importlib.import_module(f'examples.{name}.config').get_config()
  folder = pathlib.Path(config.model.folder).resolve()
  config.model.folder = str(folder.relative_to(runner.ROOT))
  return {
      path: value
      for path, _, value in validation.fields(config)
      if value != ours[path] and not path.startswith(_OWN)
  }


def run_all(workdir: str, stop_requested: Callable[[], bool]) -> int:
  """Runs row after row, and then the examples; returns the number of failed runs."""
  parts = [(grid_name, name) for name in METHODS for grid_name in (SEARCH, ROWS)]
  parts += [(EXAMPLES, name) for name in EXAMPLE_NAMES]
  command = [sys.executable, str(runner.ROOT / 'run.py'), f'--config={FILE}']
  failed = 0
  for grid_name, name in parts:
    study = get_study()
    if (
        stop_requested()
        or grid_name not in study.grids
        or name not in study.grids[grid_name].methods
    ):
      continue
    jobs = grid.plan(study, get_config(), [f'{grid_name}/*/{name}'])
    part = runner.Runner(workdir, study, jobs, command, runner.make_slots(1))
    part.run(stop_requested)
    print(part.table(), flush=True)
    failed += part.counts()['failed']
  return failed


def main() -> int:
  """Reads the command line and runs what has no result."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--workdir', required=True, help='folder of the runs')
  args = parser.parse_args()
  logging.set_verbosity(logging.INFO)
  stop = threading.Event()
  signal.signal(signal.SIGTERM, lambda *_: stop.set())
  return 1 if run_all(args.workdir, stop.is_set) else 0


if __name__ == '__main__':
  sys.exit(main())
