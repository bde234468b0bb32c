"""Estimates of an evaluation: episodes in, scores with intervals out, in groups and over all.

A question is the unit: its samples are averaged first, and intervals are those of a bootstrap that
resamples questions within each data set.
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
  """Some of the questions, and their estimates by name."""

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
  return sorted({2**i for i in range(n.bit_length()) if 2**i < n} | {n})


def groups(samples: Samples) -> list[Group]:
  """Returns estimates over all questions, by data set, by hops, and by number of turns.

  Choice: a sample passes if its main score is 1 or more. By turns, a group holds the episodes with
  that many turns, and has no pass@k: turns are no property of a question. The mean of the data sets
  gives each the same weight.
  """
  questions = list(samples.values())
  datasets = [episodes[0].task.dataset for episodes in questions]
  hops = [episodes[0].task.hops for episodes in questions]
  of = functools.partial(_of_questions, questions, datasets)
  found = [of('all', range(len(questions)))]
  if len(names := sorted(set(datasets))) > 1:
    found.append(of('mean of the data sets', range(len(questions)), weighs_sets=True))
    found += [of(f'data set {name}', _where(datasets, name)) for name in names]
  if any(hops):
    named = {0: 'hops unknown', 1: '1 hop'}
    found += [of(named.get(n, f'{n} hops'), _where(hops, n)) for n in sorted(set(hops))]
  return found + _by_turns(questions, datasets)


def _of_questions(questions, datasets, name, chosen, weighs_sets=False) -> Group:
  """Returns the estimates of the questions with the numbers `chosen`."""
  part, labels = [questions[i] for i in chosen], [datasets[i] for i in chosen]
  measured = {
      metric: np.array([np.mean([value(episode) for episode in episodes]) for episodes in part])
      for metric, value in _scores(part).items()
  }
  num = min(map(len, part))
  counts = [(len(x), sum(episode.main_score >= PASSING for episode in x)) for x in part]
  if num > 1:
    for label, estimate in (('pass@', pass_at_k), ('pass^', pass_hat_k)):
      measured |= {f'{label}{k}': np.array([estimate(*x, k) for x in counts]) for k in ks(num)}
  strata = [_where(labels, label) for label in sorted(set(labels))]
  mean = functools.partial(_mean_of_means, ends=np.cumsum(list(map(len, strata)))[:-1])
  estimates = {
      metric: _estimate(
          functools.partial(mean, values) if weighs_sets else lambda at: values[at].mean(axis=-1),
          strata,
      )
      for metric, values in measured.items()
  }
  return Group(name, len(part), sum(map(len, part)), estimates)


def _by_turns(questions, datasets) -> list[Group]:
  """Returns the estimates of the episodes of each number of turns."""
  found = []
  for turns in sorted({len(episode.turns) for episodes in questions for episode in episodes}):
    part = [[x for x in episodes if len(x.turns) == turns] for episodes in questions]
    labels = [label for label, episodes in zip(datasets, part) if episodes]
    part = [episodes for episodes in part if episodes]
    count = np.array(list(map(len, part)), float)
    strata = [_where(labels, label) for label in sorted(set(labels))]
    estimates = {}
    for metric, value in _scores(part).items():
      total = np.array([sum(value(episode) for episode in episodes) for episodes in part], float)
      ratio = lambda at: total[at].sum(axis=-1) / count[at].sum(axis=-1)
      estimates[metric] = _estimate(ratio, strata)
    name = f'{turns} turn{"s" * (turns != 1)}'
    found.append(Group(name, len(part), int(count.sum()), estimates))
  return found


def _scores(questions) -> dict[str, Callable[[types.Episode], float]]:
  """Returns {metric: function of an episode}: the core metrics, then the total reward."""
  core = dict.fromkeys(name for x in questions for episode in x for name in episode.core_metrics)
  metric = lambda name, episode: episode.metrics.get(name, 0.0)
  found: dict[str, Callable] = {name: functools.partial(metric, name) for name in core}
  return found | {'score': lambda episode: episode.score}


def _estimate(function, strata) -> statistics.Estimate:
  """Returns the estimate of a function of question numbers [.., questions] -> [..]."""
  return statistics.bootstrap(lambda at: function(at.astype(int)), [strata], reps=REPS)


def _mean_of_means(values, at, ends):
  return np.mean([values[part].mean(axis=-1) for part in np.split(at, ends, axis=-1)], axis=0)


def _where(labels, label) -> np.ndarray:
  return np.array([i for i, other in enumerate(labels) if other == label], int)
