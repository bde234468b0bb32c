"""Does it stabilise? Token, turn and sequence ratios, divided or not, where training is off-policy.

  python -m research.study --config=research/study_stability.py --workdir=runs/study
  python -m research.study --config=research/study_stability.py:quick --workdir=runs/quick

The first command runs what has no committed result: ordinary runs with the embedded model, and the
toy task of study_toy.py. The second one repeats a quarter of it in about an hour on two cores, and
prints its results next to the published ones. What is measured was fixed before the runs, in
docs/dev/notes/study_protocol.md. Results are in research/results. The pages are docs/study.md
and its appendices, which `python -m research.page --config=research/study_stability.py` writes.
"""

from experiments import st_ppo_tiny
from research import study_drawings
from research import study_toy
from research.study import grid
from stppo_jax.settings import validation
from stppo_jax.types import UserError

RESULTS = study_toy.RESULTS
# How far a policy moves from the policy that sampled.
CONDITIONS = {
    'calm': {'actor.lr': 2e-4},
    'harsh': {'actor.lr': 6e-4},
    'stale': {'actor.lr': 2e-4, 'pipeline.staleness': 8},  # calm, on batches of an older policy
}
# Controls at a lower rate: for token PPO the one that should give it a divided method's mean step.
TOKEN, ST_PPO = study_toy.TOKEN, {'algorithm.variant': 'st_ppo'}
LOWER_RATE = {
    'calm': {
        'ppo+step_of.relative.step': TOKEN | {'actor.lr': 1e-4},
        'st_ppo+lr.0.0001': ST_PPO | {'actor.lr': 1e-4},
    },
    'harsh': {
        'ppo+step_of.relative.step': TOKEN | {'actor.lr': 2.4e-4},
        'st_ppo+lr.0.00024': ST_PPO | {'actor.lr': 2.4e-4},
    },
}
SCALED_RATE = 4.5e-4  # token PPO's in harsh, with the mean step of its floor rule (seeds 0 to 2)
PAPER_AND_OURS = ('ppo', 'turn_ppo', 's_ppo', 'st_ppo', 'ppo+relative.step')
# A larger model, of 5.1 M parameters; scripts/sft_tiny.py says how it was made.
# Its critic is the embedded model, as in the other grids. A run costs four times as much, hence
# fewer updates, and ||C|| only where it divides.
LARGER = {
    'model.folder': 'research/model_5m',
    'model.critic_folder': 'stppo_jax/assets/tiny',
    'train.updates': 12,
    'algorithm.log_bias': False,
}
# At one rate Adam's step grows as the root of the number of parameters. The second rate is calm's
# times the root of .9/5.1, so that the step is as long as the embedded model's in calm.
LARGER_CONDITIONS = {'calm': CONDITIONS['calm'], 'calm_step': {'actor.lr': 8.4e-5}}

# The default run: each rule at each rate on two seeds, then five other seeds at its best rate.
RULES = ('ppo', 'turn_ppo', 's_ppo', 'st_ppo', 'rs_ppo')
RATES = (5e-5, 1e-4, 2e-4)
SEARCH_SEEDS = (100, 101)
BEST_RATES = {'ppo': 1e-4, 'turn_ppo': 5e-5, 's_ppo': 1e-4, 'st_ppo': 5e-5, 'rs_ppo': 2e-4}
# The default run on younger batches, and for twice as long. Rates are searched again, on one seed.
VARIED = {
    'age_0': {'pipeline.staleness': 0},
    'age_2': {'pipeline.staleness': 2},
    'age_4': {'pipeline.staleness': 4},
    'long': {'train.updates': 48},
}
VARIED_RULES = ('ppo', 'st_ppo')
VARIED_RATES: dict[str, dict[str, float]] = {  # {name: {rule: best rate}}
    'age_0': {'ppo': 5e-5, 'st_ppo': 5e-5},
    'age_2': {'ppo': 5e-5, 'st_ppo': 5e-5},
    'age_4': {'ppo': 1e-4, 'st_ppo': 5e-5},
    'long': {'ppo': 5e-5, 'st_ppo': 5e-5},
}
VARIED_SEARCH_SEEDS = (100,)


def get_config(mode=''):
  if mode not in ('', 'quick', 'smoke'):
    raise UserError(f'{mode!r} is not a form of this study: give :quick, :smoke, or nothing')
  config = st_ppo_tiny.base()
  config.name = 'study_stability'
  config.actor.final_lr = 1.0  # a constant rate: no decay hides a collapse
  config.train.updates = 16
  config.train.episodes = 64
  config.train.mini_batch = 16
  config.train.epochs = 4
  config.train.checkpoint_every = 8
  config.train.keep_checkpoints = 1
  config.eval.every = 2
  config.eval.episodes = 86
  config.log.episodes = False
  config.log.tensorboard = False
  if mode == 'smoke':
    config.train.updates = 2
    config.train.episodes = 32
    config.eval.episodes = 32
  return config


def get_study(mode=''):
  toy_grids = study_toy.get_study(mode).grids
  methods = study_toy.divided_methods(
      divisors=('paper', 'relative'), orders=('before_clip', 'step')
  )
  if mode == 'smoke':
    chosen = {name: methods[name] for name in ('ppo', 'st_ppo')}
    return grid.Study({'system': grid.Grid(chosen, seeds=(0,))} | toy_grids)
  if mode == 'quick':
    chosen = {name: methods[name] for name in ('ppo', 'turn_ppo', 'st_ppo', 'ppo+relative.step')}
    harsh = grid.Grid(chosen, _condition('harsh'), seeds=(0, 1, 2))
    return grid.Study({'system_harsh': harsh} | toy_grids, published=RESULTS)
  rates = {f'lr.{rate:g}': {'actor.lr': rate} for rate in RATES}
  rules = {rule: default_method(rule) for rule in RULES}
  grids = {
      f'system_{name}': grid.Grid(methods | lower, _condition(name), drawn=study_toy.DRAWN)
      for name, lower in LOWER_RATE.items()
  }
  chosen = {name: methods[name] for name in PAPER_AND_OURS}
  grids['system_5m'] = grid.Grid(chosen, LARGER_CONDITIONS, LARGER)
  grids['default_search'] = grid.Grid(rules, rates, default_run(), seeds=SEARCH_SEEDS, drawn=())
  at_best = {rule: rules[rule] | {'actor.lr': rate} for rule, rate in BEST_RATES.items()}
  grids['default_run'] = grid.Grid(at_best, {'best_rate': {}}, default_run())
  for name, change in VARIED.items():
    base = default_run() | change
    chosen = {rule: rules[rule] for rule in VARIED_RULES}
    grids[f'default_{name}_search'] = grid.Grid(
        chosen, rates, base, seeds=VARIED_SEARCH_SEEDS, drawn=(), only_complete=True
    )
    if name in VARIED_RATES:
      at_best = {rule: rules[rule] | {'actor.lr': VARIED_RATES[name][rule]} for rule in chosen}
      grids[f'default_{name}'] = grid.Grid(
          at_best, {'best_rate': {}}, base, drawn=(), only_complete=True
      )
  grids['system_stale'] = grid.Grid(
      _stale_methods(methods), _condition('stale'), only_complete=True
  )
  scaled = grid.Grid(
      _scaled_methods(),
      _condition('harsh'),
      baseline='ppo+step_of.floor.step',
      drawn=(),
      only_complete=True,
  )
  grids['system_harsh_scaled'] = scaled
  clips = {
      f'ppo+clip.{bound}': rules['ppo']
      | {'algorithm.clip_low': bound, 'algorithm.clip_high': bound}
      for bound in (0.4, 0.8)
  }
  grids['default_clip'] = grid.Grid(
      clips,
      {'lr.0.0001': rates['lr.0.0001']},
      default_run(),
      seeds=SEARCH_SEEDS,
      baseline='ppo+clip.0.4',
      only_complete=True,
  )
  return grid.Study(
      grids | toy_grids,
      results=RESULTS,
      page='docs',
      templates='research/templates',
      draw=study_drawings.draw,
  )


def default_run():
  """Returns the settings in which the default run differs from the other runs of this study."""
  ours = {path: value for path, _, value in validation.fields(get_config())}
  default = validation.fields(st_ppo_tiny.get_config())
  return {
      path: value
      for path, _, value in default
      if value != ours[path] and not path.startswith('log.')
  }


def default_method(rule):
  """Returns the overrides of a rule. ||C|| is measured only where the rule divides by it."""
  return {'algorithm.variant': rule, 'algorithm.log_bias': rule not in ('ppo', 'turn_ppo')}


def _stale_methods(methods):
  """Returns the paper's rows, from either's log-probs, our step and the control of a lower rate."""
  lower = 'ppo+step_of.relative.step'
  corrections = study_toy.of_staleness()
  from_sampler = {name: corrections[name] for name in corrections if name.endswith('+sampler')}
  return (
      {name: methods[name] for name in PAPER_AND_OURS}
      | {lower: LOWER_RATE['calm'][lower]}
      | from_sampler
  )


def _scaled_methods():
  """Returns objectives that are K times as large, and the rate with the mean step of K = 1."""
  methods = {'ppo+floor.step': TOKEN | {'algorithm.divisor': 'floor', 'algorithm.divide': 'step'}}
  for k in (3, 10):
    methods[f'ppo+floor.step.K{k}'] = study_toy.scaled(TOKEN, k)
  methods['turn_ppo+floor.step.K10'] = study_toy.scaled(study_toy.TURN, 10)
  methods['ppo+step_of.floor.step'] = TOKEN | {'actor.lr': SCALED_RATE}
  return methods


def _condition(name):
  return {name: CONDITIONS[name]}
