"""Matched controls: the number of a cell at which a metric equals another cell's.

  bound, reached = matched(
      turn_ppo, 'algorithm.clip_low', 'actor/pg_clipfrac', target=mean(token_ppo, ..),
      low=1e-3, high=0.2, also=('algorithm.clip_high',))

So the clip bound of turn ratios is found at which as many tokens are clipped as with token ratios,
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

from research.toy import instrument

PILOT = 1000  # first seed of pilot runs; the study has those from 0 on


def mean(
    settings: Mapping[str, Any], metric: str, num_seeds: int = 16, first_seed: int = PILOT
) -> float:
  """Returns a metric's mean over pilot seeds and updates; NaN counts as missing."""
  return float(np.nanmean(instrument.run(settings, num_seeds, first_seed)[metric]))


def matched(
    settings: Mapping[str, Any],
    path: str,
    metric: str,
    target: float,
    low: float,
    high: float,
    also: Sequence[str] = (),
    rounds: int = 8,
    num_seeds: int = 16,
    first_seed: int = PILOT,
) -> tuple[float, float]:
  """Returns the value of `path` in [low, high] at which the metric is nearest to target, and it.

  Bisects logarithms, for a metric that rises or falls throughout. The paths in `also` get the same
  value. If the target is outside what the ends give, the nearer end is returned.
  """

  def measure(value):
    return mean({**settings, **dict.fromkeys((path, *also), value)}, metric, num_seeds, first_seed)

  tried = {value: measure(value) for value in (low, high)}
  rises = tried[high] > tried[low]
  for _ in range(rounds):
    middle = math.sqrt(low * high)
    tried[middle] = measure(middle)
    if (tried[middle] < target) == rises:
      low = middle
    else:
      high = middle
  best = min(tried, key=lambda value: abs(tried[value] - target))
  return best, tried[best]
