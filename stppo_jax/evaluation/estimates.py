"""Estimates of an evaluation: episodes in, scores with intervals out, in groups and over all.

A question is the unit. Its samples are averaged first, and the intervals are those of a bootstrap
that resamples questions within each data set.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math

import numpy as np

from stppo_jax import types
from stppo_jax.evaluation import statistics

REPS = 2000  # resamplings
PASSING = 1 - 1e-6  # a main score that passes; rewards of 1 may be sums of fractions

Samples = Mapping[str, Sequence[types.Episode]]  # id of a question -> its samples


@dataclasses.dataclass(frozen=True)
class Group:
  """A subset of the questions, and their estimates by name."""

  name: str
  questions: int
  episodes: int
  estimates: Mapping[str, statistics.Estimate]


def pass_at_k(n: int, passed: int, k: int) -> float:
  """Returns the probability that one of k samples passes, of n of which `passed` did.

  1 - C(n - c, k) / C(n, k): the share of subsets of size k with at least one that passed, an
  unbiased estimate. Chen et al., arXiv 2107.03374, eq. 1.
  """
  return 1 - math.comb(n - passed, k) / math.comb(n, k)


def pass_hat_k(n: int, passed: int, k: int) -> float:
  """Returns the probability that all of k samples pass, of n of which `passed` did.

  C(c, k) / C(n, k): the share of subsets of size k that passed as a whole. Yao et al. (tau-bench),
  arXiv 2406.12045, section 3.
  """
  return math.comb(passed, k) / math.comb(n, k)


def ks(n: int) -> list[int]:
  """Returns the k of pass@k for n samples: powers of two below n, and n."""
  powers = {2**i for i in range(n.bit_length())}
  return sorted(k for k in powers | {n} if k <= n)


def groups(samples: Samples) -> list[Group]:
  """Returns estimates over all questions, by data set, by hops, and by number of turns.

  Choice: a sample passes if its main score is 1 or more. By turns, a group holds the episodes with
  that many turns, and has no pass@k, because turns are no property of a question. The mean of the
  data sets gives each the same weight.
  """
  questions = list(samples.values())
  by_dataset = _split(questions, lambda task: task.dataset)
  by_hops = _split(questions, lambda task: task.hops)
  result = [_group('all', questions)]
  if len(by_dataset) > 1:
    result.append(_group('mean of the data sets', questions, weigh_datasets=True))
    result += [_group(f'data set {name}', part) for name, part in by_dataset.items()]
  if any(by_hops):
    names = {0: 'hops unknown', 1: '1 hop'}
    for hops, part in by_hops.items():
      result.append(_group(names.get(hops, f'{hops} hops'), part))
  for turns in sorted({len(episode.turns) for part in questions for episode in part}):
    part = [[x for x in episodes if len(x.turns) == turns] for episodes in questions]
    part = [episodes for episodes in part if episodes]
    plural = 's' * (turns != 1)
    result.append(_group(f'{turns} turn{plural}', part, is_pooled=True))
  return result


Questions = Sequence[Sequence[types.Episode]]  # the samples of each question


def _split(questions: Questions, key: Callable[[types.Task], object]) -> dict:
  """Returns the questions by a property of their tasks, in its order."""
  parts: dict = {}
  for episodes in questions:
    parts.setdefault(key(episodes[0].task), []).append(episodes)
  return dict(sorted(parts.items()))


def _group(
    name: str, questions: Questions, weigh_datasets: bool = False, is_pooled: bool = False
) -> Group:
  """Returns the estimates of some questions: core metrics, total reward, pass@k and pass^k.

  Each question has the same weight. If `is_pooled`, each episode has, and there is no pass@k.
  """
  counts = np.array([len(episodes) for episodes in questions])
  weights = counts if is_pooled else np.ones(len(questions))
  values: dict[str, np.ndarray] = {}  # one value per question
  core = dict.fromkeys(metric for part in questions for x in part for metric in x.core_metrics)
  for metric in core:
    means = [np.mean([x.metrics.get(metric, 0.0) for x in part]) for part in questions]
    values[metric] = np.array(means)
  values['score'] = np.array([np.mean([x.score for x in part]) for part in questions])
  fewest = int(counts.min())
  if fewest > 1 and not is_pooled:
    passed = [sum(x.main_score >= PASSING for x in part) for part in questions]
    for label, function in (('pass@', pass_at_k), ('pass^', pass_hat_k)):
      for k in ks(fewest):
        shares = [function(len(part), c, k) for part, c in zip(questions, passed)]
        values[f'{label}{k}'] = np.array(shares)

  labels = np.array([episodes[0].task.dataset for episodes in questions])
  strata = [np.flatnonzero(labels == label) for label in sorted(set(labels))]
  ends = np.cumsum([len(stratum) for stratum in strata])[:-1]

  def mean(column, at):
    """Returns the mean [..] over the questions with the numbers `at` [.., questions]."""
    at = at.astype(int)
    parts = np.split(at, ends, axis=-1) if weigh_datasets else [at]
    means = [(weights * column)[part].sum(axis=-1) / weights[part].sum(axis=-1) for part in parts]
    return np.mean(means, axis=0)

  results = {}
  for metric, column in values.items():
    estimate = functools.partial(mean, column)
    results[metric] = statistics.bootstrap(estimate, [strata], reps=REPS)
  return Group(name, len(questions), int(counts.sum()), results)
