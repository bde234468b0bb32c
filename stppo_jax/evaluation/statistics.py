"""An estimate with its interval, by a bootstrap that resamples items within each stratum."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

import numpy as np

REPS = 5000
LEVEL = 0.95
_AT_ONCE = 500  # resamplings, for memory


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A number and its interval."""

  value: float
  low: float | None  # None: no interval
  high: float | None

  def covers(self, value: float) -> bool:
    """Returns whether a value lies in the interval."""
    if self.low is None or self.high is None:
      return False
    return self.low <= value <= self.high

  def is_within(self, low: float, high: float) -> bool:
    """Returns whether the interval lies in another."""
    if self.low is None or self.high is None:
      return False
    return low <= self.low and self.high <= high


def bootstrap(
    function: Callable[..., np.ndarray],
    samples: Sequence[Sequence[np.ndarray]],
    reps: int = REPS,
    level: float = LEVEL,
    seed: int = 0,
) -> Estimate:
  """Returns function(*pooled samples) with the percentile interval of a stratified bootstrap.

  There is no interval if a sample has one item. With few items the interval is too narrow. Strata
  of one item are resampled together, because resampling one of them alone never changes it.

  Args:
    function: takes an array [.., items] per sample and returns [..].
    samples: each a list of strata, arrays of items that are resampled among themselves.
    reps: resamplings.
    level: of the interval.
    seed: of the resampling.
  """
  generator = np.random.default_rng(seed)
  pooled = [np.concatenate(sample, dtype=float) for sample in samples]
  strata = [_places(list(map(len, sample))) for sample in samples]
  value = float(function(*pooled))
  if min(map(len, pooled)) < 2:
    return Estimate(value, None, None)

  drawn = []
  for first in range(0, reps, _AT_ONCE):
    n = min(_AT_ONCE, reps - first)
    samples_again = []
    for values, parts in zip(pooled, strata):
      again = np.empty((n, len(values)))
      for places in parts:
        size = len(places)
        numbers = generator.integers(size, size=(n, size))
        again[:, places] = values[places[numbers]]
      samples_again.append(again)
    drawn.append(function(*samples_again))
  tail = (1 - level) / 2
  low, high = np.quantile(np.concatenate(drawn), [tail, 1 - tail])
  return Estimate(value, float(low), float(high))


def _places(sizes: Sequence[int]) -> list[np.ndarray]:
  """Returns the places of items that are resampled among themselves, from the sizes of strata."""
  strata = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
  single = [places for places in strata if len(places) == 1]
  if not single:
    return strata
  others = [places for places in strata if len(places) != 1]
  return [np.concatenate(single), *others]
