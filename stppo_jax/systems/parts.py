"""The built-in parts of a `Variant` by their names."""

from typing import Any

from stppo_jax import plugins
from stppo_jax.algorithms.variant import RATIOS

# Field -> {name: 'module:attribute'}. A run imports the modules of its own parts.
BUILT_IN: dict[str, dict[str, str | None]] = {
    'advantage': {
        'none': 'stppo_jax.systems.distillation:NO_ADVANTAGE',
        'token_gae': 'stppo_jax.algorithms.advantages:TOKEN_GAE',
        'turn_gae': 'stppo_jax.algorithms.advantages:TURN_GAE',
        'bad_gae': 'stppo_jax.systems.bad:BAD_GAE',
        'group_zscore': 'stppo_jax.algorithms.advantages:GROUP_ZSCORE',
        'group_centred': 'stppo_jax.algorithms.advantages:GROUP_CENTRED',
        'leave_one_out': 'stppo_jax.algorithms.advantages:LEAVE_ONE_OUT',
        'group_wins': 'stppo_jax.systems.sppo:GROUP_WINS',
        'group_best': 'stppo_jax.systems.superhf:GROUP_BEST',
        'token_returns': 'stppo_jax.systems.reinforce_plus_plus:TOKEN_RETURNS',
        'turn_returns': 'stppo_jax.systems.gem:TURN_RETURNS',
        'turn_zscore': 'stppo_jax.systems.ospo:TURN_ZSCORE',
        'grao': 'stppo_jax.systems.grao:GRAO',
    },
    'ratio': dict.fromkeys(RATIOS),  # names of segments, see segments.py
    'surrogate': {
        'clip': 'stppo_jax.algorithms.losses:clip',
        'cispo': 'stppo_jax.systems.cispo:cispo',
        'dppo_tv': 'stppo_jax.systems.dppo:dppo_tv',
        'dppo_kl': 'stppo_jax.systems.dppo:dppo_kl',
        'square': 'stppo_jax.systems.sppo:square',
    },
    'objective': {
        'surrogate': None,
        'dpo': 'stppo_jax.systems.dpo:DPO',
        'iterative_dpo': 'stppo_jax.systems.dpo:ITERATIVE_DPO',
        'ipo': 'stppo_jax.systems.ipo:IPO',
        'iterative_ipo': 'stppo_jax.systems.ipo:ITERATIVE_IPO',
        'tdpo': 'stppo_jax.systems.tdpo:TDPO',
        'p3o': 'stppo_jax.systems.p3o:P3O',
        'rover': 'stppo_jax.systems.rover:ROVER',
    },
    'divisor': {
        'none': 'stppo_jax.algorithms.correction:no_divisor',
        'paper': 'stppo_jax.algorithms.correction:paper_divisor',
        'floor': 'stppo_jax.algorithms.correction:floor_divisor',
        'relative': 'stppo_jax.algorithms.correction:relative_divisor',
    },
    'value_loss': {
        'mse': 'stppo_jax.algorithms.losses:SQUARED_ERROR',
        'hl_gauss': 'stppo_jax.systems.hl_gauss:BINS',
    },
}


def find(field: str, name: str) -> Any:
  """Returns the built-in part of a field, or None for a name that needs none.

  ValueError: the field has no part of this name.
  """
  names = BUILT_IN[field]
  if name not in names:
    raise ValueError(f'{field} {name!r} is none of {", ".join(names)}')
  path = names[name]
  return plugins.resolve(path) if path else None
