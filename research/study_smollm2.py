"""Does a language model learn here? ST-PPO and token PPO on SmolLM2-135M, on a CPU.

  python -m research.study_smollm2 --workdir=runs/smollm2

The runs start from runs/sft_smollm2/model, see experiments/st_ppo_smollm2.py. There are two
designs. In `smollm2_old` batches are four updates old and are cut into four optimizer steps, and 2%
to 3% of the tokens are clipped. In `smollm2_older` they are eight updates old and cut into eight
steps. In each design a method is tried at two rates for 25 updates with one seed, and then runs 50
updates at its better rate with three other seeds. A result is appended to research/results as soon
as its run has ended. The same command continues after a stop, and a run that has a result is not
repeated. The runs compute in bfloat16, which takes half the time on a CPU with AMX and a JAX of at
least 0.12.

Weights of the warm start that another machine has trained differ in their last digits, and count as
another model. There this command makes single runs:

  python -m research.study --config=research/study_smollm2.py --workdir=.. --only='*/seed_2'

The grid `smollm2_search` is an earlier design, of which only records are left: 50 updates, batches
that are two updates old, and two optimizer steps. At most 5% of an update's tokens are clipped.
"""

import argparse
import signal
import sys
import threading

from absl import logging

from experiments import st_ppo_smollm2
from research.study import grid
from research.study import results
from research.study import runner
from stppo_jax import config as schema

FILE = 'research/study_smollm2.py'
RESULTS = 'research/results'
DESIGNS = {  # name of the grid of seeds -> overrides; its search has the same ones
    'smollm2_old': {},
    'smollm2_older': {'pipeline.staleness': 8, 'train.mini_batch': 2},
}
FIRST_DESIGN = 'smollm2_search'  # a grid
METHODS = {name: {'algorithm.variant': name} for name in ('st_ppo', 'ppo')}
RATES = (3e-4, 1e-4)
SEARCH_SEEDS = (100,)
SEARCH_UPDATES = 25
SEEDS = (0, 1, 2)


def get_config(mode: str = '') -> schema.Config:
  """Returns the settings that all runs share."""
  config = st_ppo_smollm2.get_config(mode or 'cpu')
  config.name = 'smollm2'
  config.model.folder = 'runs/sft_smollm2/model'
  config.model.dtype = 'bfloat16'
  config.pipeline.staleness = 4
  config.train.mini_batch = 4
  config.log.tensorboard = False
  return config


def search_of(design: str) -> str:
  """Returns the name of the grid that searches the rates of a design."""
  return f'{design}_search'


def get_study(mode: str = '') -> grid.Study:
  """Returns the searches, and the methods whose search is complete at their better rate."""
  del mode
  rates = {f'lr.{rate:g}': {'actor.lr': rate} for rate in RATES}
  grids = {}
  for design, base in DESIGNS.items():
    short = {**base, 'train.updates': SEARCH_UPDATES}
    search = grid.Grid(METHODS, rates, base=short, seeds=SEARCH_SEEDS, drawn=())
    grids[search_of(design)] = search
    jobs = grid.plan(grid.Study({search_of(design): search}), get_config())
    if best := results.best_rates(jobs, RESULTS):
      at_best = {name: METHODS[name] | {'actor.lr': rate} for name, rate in best.items()}
      grids[design] = grid.Grid(
          at_best,
          {'best_rate': {}},
          base=base,
          seeds=SEEDS,
          baseline='ppo' if 'ppo' in best else next(iter(best)),
          drawn=(),
      )
  return grid.Study(grids, results=RESULTS)


def main() -> int:
  """Reads the command line and runs what has no result."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--workdir', required=True, help='folder of the runs')
  parser.add_argument('--jobs', type=int, default=0, help='runs at the same time; 0: one per core')
  args = parser.parse_args()
  if args.jobs < 0:
    parser.error(f'--jobs={args.jobs}: must be at least 0, which is one per core')
  logging.set_verbosity(logging.INFO)
  stop = threading.Event()
  signal.signal(signal.SIGTERM, lambda *_: stop.set())
  command = [sys.executable, str(runner.ROOT / 'run.py'), f'--config={FILE}']
  failed = 0
  for name in [name for design in DESIGNS for name in (search_of(design), design)]:
    study = get_study()
    if name not in study.grids:
      break  # the search was stopped, or a run of it failed
    jobs = grid.plan(study, get_config(), [f'{name}/*'])
    part = runner.Runner(args.workdir, study, jobs, command, runner.make_slots(args.jobs))
    part.run(stop.is_set)
    print(part.table(), flush=True)
    failed += part.counts()['failed']
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
