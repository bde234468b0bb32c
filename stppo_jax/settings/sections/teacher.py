"""The rules of config.teacher: on-policy distillation."""

from stppo_jax.algorithms.variants import Variant
from stppo_jax.config import Config
from stppo_jax.types import UserError


def check(config: Config, variant: Variant) -> None:
  """Checks settings that do not work with a teacher."""
  teacher = config.teacher
  if variant.compares_rows:
    raise UserError(
        f'config.algorithm.variant={config.algorithm.variant!r} compares rows by their '
        "scores, and a teacher's advantages are those of tokens: leave config.teacher out, or "
        'choose another variant'
    )
  if config.rollout.is_cut:
    raise UserError(
        f'config.rollout.top_p={config.rollout.top_p:g}, top_k={config.rollout.top_k}: the '
        'log-probs of a teacher are those of the uncut distribution: set top_p=1 and top_k=0'
    )
  if variant.mask_zero_advantage:
    raise UserError(
        'config.algorithm.mask_zero_advantage=True would drop nothing, because a teacher gives '
        'every token an advantage: set it to False'
    )
  if variant.advantage == 'none' and variant.kl_in == 'reward':
    raise UserError(
        f"config.algorithm.kl_in='reward': {config.algorithm.variant!r} reads no rewards: set "
        '--config.algorithm.kl_in=loss or none'
    )
  if teacher.address and config.rollout.temperature != 1:
    raise UserError(
        f'config.rollout.temperature={config.rollout.temperature:g}: the server of '
        'config.teacher.address gives log-probs at temperature 1: set it to 1, or give '
        '--config.teacher.folder'
    )
