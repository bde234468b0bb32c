"""The rules of algorithm.objective: an objective that compares rows."""

from stppo_jax.algorithms.variants import Variant
from stppo_jax.config import Config
from stppo_jax.types import UserError

# What acts on a token's advantage, ratio or weight, and its value without an effect.
_SURROGATE_ONLY = {
    'divisor': 'none',
    'whiten': False,
    'dual_clip': 0.0,
    'rollout_is': 'none',
    'rollout_rs': 'none',
}


def check(config: Config, variant: Variant) -> None:
  """Checks settings against an objective that compares rows."""
  name = variant.described()['objective']
  has_turns = variant.advantage == 'turn_zscore'
  if (has_turns and variant.compares_episodes) or not variant.needs_groups:
    raise UserError(
        f'config.algorithm.objective={name!r} reads one advantage per episode, compared within a '
        f'group, and advantage={variant.described()["advantage"]!r} has none: set '
        '--config.algorithm.advantage=group_centred'
    )
  for field, neutral in _SURROGATE_ONLY.items():
    value = getattr(variant, field)
    if value != neutral:
      raise UserError(
          f'config.algorithm.{field}={value!r} acts on the surrogate of a token, and '
          f'objective={name!r} has none: set --config.algorithm.{field}={neutral}'
      )
  if 'uniform' in variant.needs and variant.old_logp == 'sampler':
    raise UserError(
        f"config.algorithm.old_logp='sampler': objective={name!r} compares with the values of the "
        "trainer's policy before the update, and the ratio would start from another policy: set "
        '--config.algorithm.old_logp=trainer'
    )
  group_size = config.rollout.group_size
  if config.train.mini_batch % group_size:
    raise UserError(
        f'config.train.mini_batch={config.train.mini_batch} would split a group, and '
        f'config.algorithm.objective={name!r} compares its episodes: choose a multiple of '
        f'config.rollout.group_size={group_size}'
    )
