"""Estimates of an evaluation: episodes in, scores with intervals out, in groups and over all.

A question is the unit. Its samples are averaged first, and the intervals are those of a bootstrap
that resamples questions within each data set.
"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

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
    name = '1 turn' if turns == 1 else f'{turns} turns'
    result.append(_group(name, part, is_pooled=True))
  return result


Questions = Sequence[Sequence[types.Episode]]  # the samples of each question


def _split(questions: Questions, key: Callable[[types.Task], Any]) -> dict[Any, Questions]:
  """Returns the questions by a property of their tasks, in its order."""
  parts = collections.defaultdict(list)
  for episodes in questions:
    parts[key(episodes[0].task)].append(episodes)
  return dict(sorted(parts.items()))


def _group(
    name: str, questions: Questions, weigh_datasets: bool = False, is_pooled: bool = False
) -> Group:
  """Returns the estimates of some questions: core metrics, total reward, pass@k and pass^k.

  Each question has the same weight. If `is_pooled`, each episode has, and there is no pass@k.
  """
  by_dataset = list(_split(questions, lambda task: task.dataset).values())
  questions = [episodes for part in by_dataset for episodes in part]
  ends = np.cumsum([len(part) for part in by_dataset])[:-1]
  counts = np.array([len(samples) for samples in questions])
  weights = counts if is_pooled else np.ones(len(questions))

  def mean(column, at):
    """Returns the mean of the questions with the numbers `at` [.., questions]."""
    at = at.astype(int)
    parts = np.split(at, ends, axis=-1) if weigh_datasets else [at]
    means = []
    for part in parts:
      total = (weights * column)[part].sum(axis=-1)
      means.append(total / weights[part].sum(axis=-1))
    return np.mean(means, axis=0)

  strata = np.split(np.arange(len(questions)), ends)
  estimates = {}
  for metric, column in _values(questions, has_passes=not is_pooled).items():
    estimate = functools.partial(mean, column)
    estimates[metric] = statistics.bootstrap(estimate, [strata], reps=REPS)
  return Group(name, len(questions), int(counts.sum()), estimates)


def _values(questions: Questions, has_passes: bool) -> dict[str, np.ndarray]:
  """Returns one value per question of each metric: the mean over its samples, or pass@k."""
  episodes = [episode for samples in questions for episode in samples]
  values = {}
  for name in dict.fromkeys(name for episode in episodes for name in episode.core_metrics):
    values[name] = _means(questions, lambda episode: episode.metrics.get(name, 0.0))
  values['score'] = _means(questions, lambda episode: episode.score)
  fewest = min(map(len, questions))
  if not has_passes or fewest == 1:
    return values
  sizes = [len(samples) for samples in questions]
  passed = []
  for samples in questions:
    passed.append(sum(episode.main_score >= PASSING for episode in samples))
  for label, function in (('pass@', pass_at_k), ('pass^', pass_hat_k)):
    for k in ks(fewest):
      shares = [function(n, c, k) for n, c in zip(sizes, passed)]
      values[f'{label}{k}'] = np.array(shares)
  return values


def _means(questions: Questions, value: Callable[[types.Episode], float]) -> np.ndarray:
  """Returns the mean of a value over the samples of each question."""
  means = []
  for samples in questions:
    means.append(np.mean([value(episode) for episode in samples]))
  return np.array(means)
