"""Which rule is best in the default run? Each rule at each rate, then five seeds at its best rate.

  python run.py --mode=study --config=experiments/study_default.py:search --workdir=runs/search
  python run.py --mode=study --config=experiments/study_default.py --workdir=runs/rivals

The search chooses a rate per rule on seeds that the comparison does not use, on dev. All else is
the default run of st_ppo_tiny.py. docs/default_run.md has the results.
"""

from experiments import st_ppo_tiny
from stppo_jax.study import grid
from stppo_jax.types import UserError

RESULTS = 'docs/study/results'
RULES = ('ppo', 'turn_ppo', 's_ppo', 'st_ppo', 'rs_ppo')
RATES = (5e-5, 1e-4, 2e-4, 4e-4)
SEARCH_SEEDS = (100, 101)


def get_config(mode=''):
  if mode not in ('', 'search'):
    raise UserError(f'{mode!r} is not a form of this study: give :search, or nothing')
  config = st_ppo_tiny.get_config()
  config.name = 'study_default'
  config.log.episodes = False
  config.log.tensorboard = False
  config.train.keep_checkpoints = 1
  return config


def get_study(mode=''):
  cells = {rule: _cell(rule) for rule in RULES}
  if mode == 'search':
    rates = {f'lr.{rate:g}': {'actor.lr': rate} for rate in RATES}
    return grid.Study(
        {'default_search': grid.Grid(cells, rates, seeds=SEARCH_SEEDS)}, results=RESULTS
    )
  raise UserError('the rates of the comparison are not chosen yet: give :search')


def _cell(rule):
  """Returns the overrides of a rule. ||C|| is measured only where a rule divides by it."""
  return {'algorithm.variant': rule, 'algorithm.log_bias': rule not in ('ppo', 'turn_ppo')}
