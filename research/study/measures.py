"""The measures of a run: functions of its series of metrics, one number each.

They were fixed before the runs, in docs/dev/notes/study_protocol.md. A series is a float array, one
number per evaluation or per update, with NaN where the run wrote none.
"""

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np

LAST = 3  # evaluations whose mean is the final score
SPIKE = 5.0  # times the running median of the gradient's norm
WINDOW = 11  # updates of that running median
COLLAPSED_BELOW = 0.5  # share of the best score

# Series whose measure is the mean over updates.
MEANS = (
    'clip',
    'grad_norm',
    'bias_norm',
    'cos',
    'entering',
    'factor',
    'step',
    'ratio_token',
    'ratio_turn',
    'ratio_sequence',
    'ess',
    'explained',
)
# Name in the results -> name in metrics.jsonl, of the series that are kept.
SERIES = {
    'train_score': 'critic/score/mean',
    'clip': 'actor/pg_clipfrac',
    'grad_norm': 'stppo/grad_norm',
    'bias_norm': 'stppo/bias_norm',
    'cos': 'stppo/cos_g_c',
    'divisor': 'stppo/divisor',
    'factor': 'stppo/applied_factor',
    'factor_min': 'stppo/applied_factor_min',
    'factor_max': 'stppo/applied_factor_max',
    'entering': 'stppo/grad_factor',
    'step': 'stppo/step_norm',
    'entropy': 'actor/entropy',
    'kl': 'actor/ppo_kl',
    'ratio_token': 'stppo/ratio_std_token',
    'ratio_turn': 'stppo/ratio_std_turn',
    'ratio_sequence': 'stppo/ratio_std_sequence',
    'advantage_min': 'critic/advantages/min',
    'advantage_max': 'critic/advantages/max',
    'explained': 'critic/vf_explained_var',
    'ess': 'stppo/ess_share',
    'sampler_ess': 'rollout_corr/rollout_is_eff_sample_size',
}


def of_run(
    score: np.ndarray,
    series: Mapping[str, np.ndarray],
    nonfinite: bool = False,
    steps: Sequence[int] | None = None,
    end: int | None = None,
) -> dict[str, float]:
  """Returns the measures of one run; those whose series it lacks are NaN.

  Args:
    score: [evaluations] held-out scores, that of the untrained policy first.
    series: {name of SERIES: [updates]}.
    nonfinite: whether the run ended because gradients or parameters were not finite.
    steps: of the evaluations; None: at equal intervals.
    end: the planned number of updates, of a run that ended before.
  """
  get = lambda name: np.asarray(series.get(name, ()), float)
  step_norms = get('step')
  factor = get('factor')
  log_factor = np.abs(np.log(np.where(factor > 0, factor, np.nan)))
  return {
      'collapsed': float(collapsed(score, nonfinite)),
      'final': final(score, nonfinite),
      'best': _reduce(np.nanmax, score),
      'auc': area(score, steps, end),
      'first': float(score[0]) if len(score) else np.nan,
      'spikes': spikes(get('grad_norm')),
      # Shares of updates in which the division changed the mean step, by more than 1% and by 2.
      'factor_changed': _share(log_factor > 0.01, factor),
      'factor_twofold': _share(log_factor > np.log(2), factor),
      'path': float(np.nansum(step_norms)) if len(step_norms) else np.nan,
      'entropy': _last(get('entropy')),
      'advantage_range': _mean(get('advantage_max') - get('advantage_min')),
      **{name: _mean(get(name)) for name in MEANS},
  }


def final(score: np.ndarray, nonfinite: bool = False) -> float:
  """Returns the mean of the last evaluations of a run; 0 if it ended on numbers not finite.

  Choice: of the last three, which halves an evaluation's noise, and never of the untrained policy.
  """
  if nonfinite:
    return 0.0
  trained = np.asarray(score, float)[1:]
  return _mean(trained[-LAST:]) if len(trained) else _last(score)


def collapsed(score: np.ndarray, nonfinite: bool = False) -> bool:
  """Whether a run ended under half of its best score, or because numbers were not finite."""
  if nonfinite or not len(score):
    return True
  return bool(final(score) < COLLAPSED_BELOW * _reduce(np.nanmax, score))


def area(score: np.ndarray, steps: Sequence[int] | None = None, end: int | None = None) -> float:
  """Returns the mean height of the curve of scores, by trapezes: its area over its length.

  Args:
    score: [evaluations].
    steps: of the evaluations; None: at equal intervals.
    end: the planned length of a run that ended before, whose score is 0 from then on.
  """
  score = np.asarray(score, float)
  x = np.arange(len(score)) if steps is None else np.asarray(steps)
  is_finite = np.isfinite(score)
  x = x[is_finite]
  score = score[is_finite]
  if not len(score):
    return np.nan
  length = (x[-1] if end is None else end) - x[0]
  return float(np.trapezoid(score, x) / length) if length else _last(score)


def spikes(norms: np.ndarray) -> float:
  """Returns the share of updates whose gradient is a spike.

  Choice: a spike is above five times the median of the updates before it, at most eleven. The
  first three updates have no such median and are none. A norm that is not finite is a spike.
  """
  norms = np.asarray(norms, float)
  if not len(norms):
    return np.nan
  count = 0
  for i in range(3, len(norms)):
    before = norms[max(0, i - WINDOW) : i]
    before = before[np.isfinite(before)]
    count += not np.isfinite(norms[i]) or (len(before) > 0 and norms[i] > SPIKE * np.median(before))
  return count / len(norms)


def _mean(x):
  return _reduce(np.nanmean, x)


def _reduce(function, x):
  x = np.asarray(x, float)
  x = x[np.isfinite(x)]
  return float(function(x)) if len(x) else np.nan


def _last(x):
  x = np.asarray(x, float)
  x = x[np.isfinite(x)]
  return float(x[-1]) if len(x) else np.nan


def _share(hits, of):
  finite = np.isfinite(of)
  return float(hits[finite].mean()) if finite.any() else np.nan


NAMES = tuple(of_run(np.zeros(1), {}))
