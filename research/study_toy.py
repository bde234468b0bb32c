"""Does it stabilise on the toy task? The grids of the toy task, which study_stability.py includes.

  python -m research.study --config=research/study_toy.py --workdir=runs/toy
  python -m research.study --config=research/study_toy.py:quick --workdir=runs/quick

What is measured was fixed before the runs, in docs/dev/notes/study_protocol.md.
"""

import dataclasses
from typing import Any

from experiments import st_ppo_tiny
from research.study import grid
from stppo_jax.types import UserError

RESULTS = 'research/results'
# Chosen by the collapse share of token PPO alone, on seeds from 1000.
CONDITIONS = {
    # 2 mini-batches, 4 epochs.
    'calm': {'train.mini_batch': 16, 'train.epochs': 4, 'actor.lr': 1e-3},
    # Many steps on each batch: 4 mini-batches, 8 epochs, a higher rate.
    'reuse': {'train.mini_batch': 8, 'train.epochs': 8, 'actor.lr': 3.5e-3},
    # As calm with a higher rate, on batches of a policy that is 8 updates old.
    'stale': {'train.mini_batch': 16, 'train.epochs': 4, 'actor.lr': 3e-3, 'pipeline.staleness': 8},
}
TOKEN: dict[str, Any] = {'algorithm.variant': 'ppo'}
TURN = TOKEN | {'algorithm.ratio': 'turn'}
SEQUENCE = TOKEN | {'algorithm.ratio': 'sequence'}
PAPER = {'algorithm.divisor': 'paper'}
RELATIVE = {'algorithm.divisor': 'relative', 'algorithm.divide': 'step'}
# Controls, found by toy/calibration.py on seeds 1000 to 1015: plain clipping whose mean step
# is that of a divided method; bounds that clip as many tokens as token PPO's of .2.
MATCHED = {
    'calm': {
        'turn_ppo+clip_of_ppo': TURN | {'algorithm.clip_low': 0.181, 'algorithm.clip_high': 0.181},
        'ppo+step_of.relative.step': TOKEN | {'actor.lr': 6.59e-4},
    },
    'reuse': {
        'turn_ppo+clip_of_ppo': TURN | {'algorithm.clip_low': 0.376, 'algorithm.clip_high': 0.376},
        'sequence_ppo+clip_of_ppo': SEQUENCE
        | {'algorithm.clip_low': 0.425, 'algorithm.clip_high': 0.425},
        'ppo+step_of.relative.step': TOKEN | {'actor.lr': 1.63e-3},
        'ppo+step_of.paper.before_clip': TOKEN | {'actor.lr': 4.31e-3},
    },
    'stale': {
        'turn_ppo+clip_of_ppo': TURN | {'algorithm.clip_low': 0.48, 'algorithm.clip_high': 0.48},
        'ppo+step_of.relative.step': TOKEN | {'actor.lr': 1.28e-3},
    },
}
# Rates at which plain PPO has the mean step of an objective that is K times as large, found in the
# same way.
SCALED_RATES: dict[str, dict[str, dict[int, float]]] = {
    'reuse': {'ppo': {3: 3.01e-3, 10: 1.57e-3}, 'turn_ppo': {3: 3.001e-3, 10: 1.664e-3}},
    'stale': {'ppo': {3: 1.942e-3, 10: 9.37e-4}, 'turn_ppo': {3: 1.92e-3, 10: 1.071e-3}},
}
# One setting at a time is changed. The rates show whether a rule is better at its own best rate, or
# only shortens the step.
RATES = {'actor.lr': (5e-4, 1e-3, 2e-3)}
SWEEPS = {
    'reuse': RATES | {'train.epochs': (1, 2, 4), 'train.mini_batch': (16, 32)},
    'stale': RATES | {'pipeline.staleness': (0, 2, 4)},
}
LONG_RATE = 7e-3  # the rule that shortens the step has it
# The objective of the system: no KL penalty, entropy bonus or weight decay.
AS_SYSTEM = {
    'algorithm.kl_in': 'none',
    'algorithm.entropy_coef': 0.0,
    'actor.weight_decay': 0.0,
    'critic.weight_decay': 0.0,
}
# The paper's rows, our step, and the control of a lower rate.
MAIN = (
    'ppo',
    'turn_ppo',
    's_ppo',
    'st_ppo',
    'ppo+relative.step',
    'turn_ppo+relative.step',
    'ppo+step_of.relative.step',
)
DRAWN = ('ppo', 'turn_ppo', 's_ppo', 'st_ppo', 'ppo+relative.step', 'ppo+step_of.relative.step')
# The tokens that share a ratio.
RATIOS = {'ppo': 'token', 'turn_ppo': 'turn', 'sequence_ppo': 'sequence'}
PAIRS = {'': {}, '+paper.before_clip': PAPER, '+relative.step': RELATIVE}


def get_config(mode=''):
  if mode not in ('', 'quick', 'smoke'):
    raise UserError(f'{mode!r} is not a form of this study: give :quick, :smoke, or nothing')
  config = st_ppo_tiny.base(mode='smoke' if mode == 'smoke' else '')
  config.name = f'study_toy_{mode}'.rstrip('_')
  return config


def get_study(mode=''):
  if mode == 'smoke':
    small = {'train.updates': 4, 'toy.warm_steps': 20}
    return grid.Study({'toy_calm': _grid('calm', {'ppo': TOKEN}, small, seeds=2)})
  if mode == 'quick':
    return grid.Study(quick_grids(), published=RESULTS)
  return grid.Study(all_grids(), results=RESULTS)


def all_grids():
  """Returns the grids of every condition."""
  grids = {}
  for name in CONDITIONS:
    methods = divided() | controls() | MATCHED[name] | group() | rivals()
    if name == 'stale':
      methods |= of_staleness()
    grids[f'toy_{name}'] = _grid(name, methods)
    per_turn = {'toy.rewards': 'turn'}
    grids[f'toy_{name}_turn_rewards'] = _grid(name, rewarded_per_turn(), per_turn)
    if name in SWEEPS:
      grids[f'toy_{name}_sweep'] = _grid(
          name, swept(SWEEPS[name]), baseline='ppo+lr.0.001', drawn=()
      )
      main = {method: methods[method] for method in MAIN}
      grids[f'toy_{name}_as_system'] = _grid(name, main, AS_SYSTEM, drawn=())
      scaled_grid = _grid(name, scaled_methods(name), drawn=())
      grids[f'toy_{name}_scaled'] = dataclasses.replace(scaled_grid, only_complete=True)
  return grids


def quick_grids():
  """Returns the main methods of every grid, the rates, and where the ratio starts."""
  return {
      name: dataclasses.replace(
          whole,
          methods={
              method: overrides
              for method, overrides in whole.methods.items()
              if method in MAIN or '+lr.' in method or method.endswith('+sampler')
          },
      )
      for name, whole in all_grids().items()
      if not name.endswith(('_as_system', '_scaled', 'calm_turn_rewards'))  # to save time
  }


def divided():
  """Returns three ratios without a divisor, and with each divisor in each order."""
  return divided_methods(
      divisors=('paper', 'floor', 'relative'), orders=('before_clip', 'after_clip', 'step')
  )


def divided_methods(divisors, orders):
  """Returns every ratio without a divisor, and with each divisor in each order."""
  methods = {}
  for row, ratio in RATIOS.items():
    undivided = {'algorithm.variant': 'ppo', 'algorithm.ratio': ratio}
    methods[row] = undivided
    for divisor in divisors:
      for order in orders:
        divided = undivided | {'algorithm.divisor': divisor, 'algorithm.divide': order}
        methods[method_name(row, divisor, order)] = divided
  return methods


def method_name(row, divisor, order):
  """Returns the paper's name of a method where it has one, else as in 'turn_ppo+relative.step'."""
  own = {'ppo': 's_ppo', 'turn_ppo': 'st_ppo'}
  if divisor == 'paper' and order == 'before_clip' and row in own:
    return own[row]
  return f'{row}+{divisor}.{order}'


def controls():
  """Returns what tells apart the parts of the paper's recipe."""
  loss = PAPER | {'algorithm.norm_of': 'loss'}
  unit = TURN | {'algorithm.min_advantage': 'turn'}
  chunk = TOKEN | {'algorithm.ratio': 'chunk', 'algorithm.chunk_length': 3}
  methods = {'s_ppo.loss': TOKEN | loss, 'st_ppo.loss': TURN | loss}
  methods |= {f'turn_unit_ppo{name}': unit | columns for name, columns in PAIRS.items()}
  methods |= {f'chunk_ppo{name}': chunk | columns for name, columns in PAIRS.items()}
  return methods | {'turn_product_ppo': TOKEN | {'algorithm.ratio': 'turn_product'}}


def scaled(ratio, k):
  """Returns the overrides of an objective that is K times as large.

  The step is divided by max(1, K ||C||). Adam does not see the factor K itself, once `eps` and the
  bound of the gradient's norm are in the same units. K = 1 is the divisor `floor`.
  """
  return ratio | {
      'algorithm.divide': 'step',
      'algorithm.divisor': f'research.toy.divisors:floor_{k}',
      'actor.grad_clip': 1 / k,
      'actor.eps': 1e-8 / k,
  }


def scaled_methods(condition):
  """Returns token and turn PPO, each with scaled objectives and at the rates that match them."""
  methods = {}
  for row, ratio in {'ppo': TOKEN, 'turn_ppo': TURN}.items():
    methods[row] = ratio
    for k in (3, 10):
      methods[f'{row}+floor.step.K{k}'] = scaled(ratio, k)
    for k, rate in SCALED_RATES[condition][row].items():
      methods[f'{row}+step_of.floor.step.K{k}'] = ratio | {'actor.lr': rate}
  return methods


def group():
  """Returns the ratios with group advantages."""
  of_four = {'algorithm.variant': 'grpo', 'rollout.group_size': 4}
  methods = {}
  for name, ratio in (('grpo', 'token'), ('turn_grpo', 'turn'), ('sequence_grpo', 'sequence')):
    for end, columns in PAIRS.items():
      methods[name + end] = of_four | {'algorithm.ratio': ratio} | columns
  in_reward = {'algorithm.kl_in': 'reward', 'algorithm.kl_estimator': 'k1'}
  return methods | {'grpo+kl_in.reward': of_four | in_reward}


def rivals():
  """Returns others' rows."""
  names = ('gspo', 'cispo', 'dppo', 'rloo')
  methods = {name: {'algorithm.variant': name, 'rollout.group_size': 4} for name in names}
  return methods | {
      'reinforce': {'algorithm.variant': 'reinforce'},
      'reinforce_gae': TOKEN | {'algorithm.ratio': 'none'},
      'ppo+ess': TOKEN | {'algorithm.step_scale': 'ess'},
      'turn_ppo+ess': TURN | {'algorithm.step_scale': 'ess'},
  }


def of_staleness():
  """Returns off-policy corrections, which change nothing on a fresh batch."""
  truncated = {'algorithm.rollout_is': 'sequence', 'algorithm.rollout_is_threshold': 8.0}
  masked = {'algorithm.rollout_is': 'sequence_geometric', 'algorithm.rollout_is_low': 0.5}
  rejected = {
      'algorithm.rollout_rs': 'sequence_geometric',
      'algorithm.rollout_rs_low': 0.99,
      'algorithm.rollout_rs_high': 1.01,
  }
  sampler = {'algorithm.old_logp': 'sampler'}
  return {
      'ppo+truncated_sequence': TOKEN | truncated,
      'ppo+masked_sequence': TOKEN | masked,
      'ppo+rejected_sequence': TOKEN | rejected,
      'ppo+truncated_sequence.ess': TOKEN | truncated | {'algorithm.step_scale': 'ess'},
      'ppo+sampler': TOKEN | sampler,
      'turn_ppo+sampler': TURN | sampler,
      's_ppo+sampler': TOKEN | PAPER | sampler,
      'st_ppo+sampler': TURN | PAPER | sampler,
  }


def rewarded_per_turn():
  """Returns the paper's four rows and our step."""
  rows = {'ppo': TOKEN, 'turn_ppo': TURN, 's_ppo': TOKEN | PAPER, 'st_ppo': TURN | PAPER}
  return rows | {'ppo+relative.step': TOKEN | RELATIVE, 'turn_ppo+relative.step': TURN | RELATIVE}


def swept(sweeps):
  """Returns token PPO, the paper's turn rows and our step at each value of each setting."""
  rows = {'ppo': TOKEN, 'turn_ppo': TURN, 'st_ppo': TURN | PAPER}
  rows['ppo+relative.step'] = TOKEN | RELATIVE
  methods = {
      f'{row}+{path.partition(".")[2]}.{value}': columns | {path: value}
      for path, values in sweeps.items()
      for value in values
      for row, columns in rows.items()
  }
  long = TOKEN | RELATIVE | {'actor.lr': LONG_RATE}
  return methods | {f'ppo+relative.step+lr.{LONG_RATE}': long}


def _grid(condition, methods, base=None, seeds=64, baseline='ppo', drawn=DRAWN):
  return grid.Grid(
      methods,
      {condition: CONDITIONS[condition]},
      base or {},
      seeds=tuple(range(seeds)),
      task='toy',
      baseline=baseline,
      drawn=tuple(method for method in drawn if method in methods),
  )
