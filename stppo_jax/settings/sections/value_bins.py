"""The rules of algorithm.value_loss='hl_gauss': a critic with bins."""

from stppo_jax.algorithms.variants import Variant
from stppo_jax.config import Config
from stppo_jax.settings.sections import mix
from stppo_jax.systems import hl_gauss
from stppo_jax.types import UserError


def check(config: Config, variant: Variant) -> None:
  """Checks that the critic's bins exceed the returns, where these are known.

  Built-in rewards of an answer are from 0 to 1. `critic/outside_bins` measures other returns.
  """
  if variant.value_clip:
    raise UserError(
        f'config.algorithm.value_clip={variant.value_clip:g} bounds the change of a value, and '
        "value_loss='hl_gauss' trains the logits of bins: set --config.algorithm.value_clip=0"
    )
  given = (
      f'config.algorithm.value_low={variant.value_low:g}, value_high={variant.value_high:g}, '
      f'value_bins={variant.value_bins}'
  )
  if not variant.value_low < variant.value_high:
    raise UserError(f'{given}: value_low must be below value_high')
  low, high = hl_gauss.inner_support(variant)
  clip = variant.score_clip
  if variant.score_norm != 'none' and not (clip and low <= -clip and clip <= high):
    raise UserError(
        f'{given}: these bins represent returns from {low:g} to {high:g}, and normalised scores '
        f'are within +-score_clip={clip:g} (0: any size): set --config.algorithm.score_clip=1, '
        'value_low=-2 and value_high=2'
    )
  environments = [member.config.env for member in mix.environments(config)] or [config.env]
  for env in environments:
    has_known_reward = env.kind in ('search', 'tools') and ':' not in env.reward
    if has_known_reward and not low <= 0 <= 1 <= high:
      raise UserError(
          f'{given}: these bins represent returns from {low:g} to {high:g}, and the rewards of '
          f'{env.reward!r} are from 0 to 1: lower value_low, and raise value_high'
      )
