"""Matched controls: the value of a setting at which a metric equals that of another config.

  bound, reached = matched(
      turn_ppo, 'algorithm.clip_low', 'actor/pg_clipfrac', target=mean(token_ppo, ..),
      low=1e-3, high=0.2, also=('algorithm.clip_high',))

For example, the clip bound at which turn ratios clip as many tokens as token ratios do,
or the learning rate at which plain gradient clipping takes steps of the same length.

Choice: calibrated once, by runs of other seeds than the study's, and then fixed. A bound that
adapts within a run would be another algorithm. Numbers share a program, so a round costs no
compilation.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from research.toy import training

PILOT = 1000  # first seed of pilot runs; the study has those from 0 on


def mean(
    settings: Mapping[str, Any], metric: str, num_seeds: int = 16, first_seed: int = PILOT
) -> float:
  """Returns a metric's mean over pilot seeds and updates; NaN counts as missing."""
  return float(np.nanmean(training.run(settings, num_seeds, first_seed)[metric]))


def matched(
    settings: Mapping[str, Any],
    path: str,
    metric: str,
    target: float,
    low: float,
    high: float,
    also: Sequence[str] = (),
    rounds: int = 4,
    num_seeds: int = 16,
    first_seed: int = PILOT,
) -> tuple[float, float]:
  """Returns the value of `path` in [low, high] at which the metric is nearest to target, and it.

  Interpolates between logarithms, for a metric that rises or falls throughout. The paths in `also`
  get the same value.
  """

  def measure(value):
    return mean({**settings, **dict.fromkeys((path, *also), value)}, metric, num_seeds, first_seed)

  tried = {value: measure(value) for value in (low, high)}
  for _ in range(rounds):
    points = sorted((math.log(reached), math.log(value)) for value, reached in tried.items())
    logs_reached, logs_value = zip(*points)
    value = math.exp(np.interp(math.log(target), logs_reached, logs_value))
    if value in tried:
      break
    tried[value] = measure(value)
  best = min(tried, key=lambda value: abs(tried[value] - target))
  return best, tried[best]
