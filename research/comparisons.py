"""Statistics of a study: estimates with intervals, and comparisons that are corrected for number.

The method is that of Agarwal et al., arXiv 2108.13264 (package rliable): interquartile means and
probabilities of improvement, with percentile intervals of a bootstrap that resamples runs within
each stratum. Choice: written on NumPy and SciPy; rliable's numbers are kept in a test.
"""

from collections.abc import Mapping
import math

import numpy as np
from scipy import stats

from stppo_jax.evaluation import statistics

_EXACT = 20_000  # permutations: two settings of eight runs have 12,870


def iqm(scores: np.ndarray) -> np.ndarray:
  """Returns the mean of the middle half of scores [.., runs], as [..]; NaN without any."""
  scores = np.sort(np.asarray(scores, float), axis=-1)
  cut = scores.shape[-1] // 4
  middle = scores[..., cut : scores.shape[-1] - cut]
  return middle.mean(axis=-1) if middle.shape[-1] else np.full(middle.shape[:-1], np.nan)


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Returns P(a run of x > a run of y) + P(equal) / 2 over all pairs: Mann-Whitney's U over mn.

  x [.., m] and y [.., n] give [..].
  """
  x, y = np.asarray(x, float)[..., :, None], np.asarray(y, float)[..., None, :]
  return (x > y).mean(axis=(-2, -1)) + (x == y).mean(axis=(-2, -1)) / 2


def iqm_interval(scores: np.ndarray, **options) -> statistics.Estimate:
  """Returns the interquartile mean of runs with its interval."""
  return statistics.bootstrap(iqm, [[scores]], **options)


def improvement_interval(x: np.ndarray, y: np.ndarray, **options) -> statistics.Estimate:
  """Returns the probability of improvement of x over y with its interval."""
  return statistics.bootstrap(probability_of_improvement, [[x], [y]], **options)


def share_interval(hits: int, of: int, level: float = statistics.LEVEL) -> statistics.Estimate:
  """Returns a share with its Clopper-Pearson interval, which covers at least `level`."""
  tail = (1 - level) / 2
  low = 0.0 if hits == 0 else float(stats.beta.ppf(tail, hits, of - hits + 1))
  high = 1.0 if hits == of else float(stats.beta.ppf(1 - tail, hits + 1, of - hits))
  return statistics.Estimate(hits / of, low, high)


def shares_differ(hits: int, of: int, other_hits: int, other_of: int) -> float:
  """Returns the two-sided p of Fisher's exact test that two shares are equal."""
  table = [[hits, of - hits], [other_hits, other_of - other_hits]]
  return float(stats.fisher_exact(table).pvalue)


def scores_differ(x: np.ndarray, y: np.ndarray) -> float:
  """Returns the two-sided p of Mann-Whitney's test, over all permutations where there are few."""
  x, y = np.asarray(x, float), np.asarray(y, float)
  if np.ptp(np.concatenate([x, y])) == 0:
    return 1.0
  few = min(len(x), len(y)) > 1 and math.comb(len(x) + len(y), len(x)) <= _EXACT
  method = stats.PermutationMethod(n_resamples=np.inf) if few else 'auto'
  return float(stats.mannwhitneyu(x, y, method=method).pvalue)


def holm(p_values: Mapping[str, float], number: int = 0) -> dict[str, float]:
  """Returns p-values corrected for their number, by Holm's step-down method.

  The k-th smallest of m is multiplied by m - k + 1 and is at least the one before; at most 1.
  `number` is m, where more tests are planned than made; 0: those that are given.
  """
  number = number or len(p_values)
  corrected, largest = {}, 0.0
  for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
    largest = max(largest, min(1.0, (number - rank) * p_values[name]))
    corrected[name] = largest
  return {name: corrected[name] for name in p_values}
