"""Estimates of an evaluation: episodes in, scores with intervals out, in groups and over all.

A question is the unit. Its samples are averaged first, and the intervals are those of a bootstrap
that resamples questions within each data set.
"""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
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
  num_subsets = math.comb(n, k)
  return 1 - math.comb(n - passed, k) / num_subsets


def pass_hat_k(n: int, passed: int, k: int) -> float:
  """Returns the probability that all of k samples pass, of n of which `passed` did.

  C(c, k) / C(n, k): the share of subsets of size k that passed as a whole. Yao et al. (tau-bench),
  arXiv 2406.12045, section 3.
  """
  num_subsets = math.comb(n, k)
  return math.comb(passed, k) / num_subsets


def ks(n: int) -> list[int]:
  """Returns the k of pass@k for n samples: powers of two below n, and n."""
  powers = {2**i for i in range(n.bit_length())}
  return sorted(powers | {n})


def groups(samples: Samples) -> list[Group]:
  """Returns estimates over all questions, by environment of a mix, data set, hops and turns.

  Choice: a sample passes if its main score is 1 or more. By turns, a group holds the samples with
  that many turns, and has no pass@k, because turns are no property of a question. The mean of the
  data sets gives each the same weight.
  """
  questions = list(samples.values())
  by_environment = _split(questions, lambda task: task.environment)
  by_dataset = _split(questions, lambda task: task.dataset)
  by_hops = _split(questions, lambda task: task.hops)
  result = [_group('all', questions)]
  for name, part in by_environment.items():
    if name:
      result.append(_group(f'environment {name}', part))
  if len(by_dataset) > 1:
    result.append(_group('mean of the data sets', questions, weigh_datasets=True))
    for name, part in by_dataset.items():
      result.append(_group(f'data set {name}', part))
  if any(by_hops):
    names = {0: 'hops unknown', 1: '1 hop'}
    for hops, part in by_hops.items():
      result.append(_group(names.get(hops, f'{hops} hops'), part))
  by_turns: dict[int, dict[str, list[types.Episode]]] = collections.defaultdict(dict)
  for question, episodes in samples.items():
    for episode in episodes:
      part = by_turns[len(episode.turns)]
      part.setdefault(question, []).append(episode)
  for turns in sorted(by_turns):
    name = '1 turn' if turns == 1 else f'{turns} turns'
    result.append(_group(name, list(by_turns[turns].values()), has_passes=False))
  return result


def _split(questions, key):
  """Returns the questions, lists of their samples, by a property of their tasks, in its order."""
  parts = collections.defaultdict(list)
  for samples in questions:
    parts[key(samples[0].task)].append(samples)
  return dict(sorted(parts.items()))


def _group(name, questions, weigh_datasets=False, has_passes=True):
  """Returns the estimates of some questions: core metrics, total reward, pass@k and pass^k.

  Each question has the same weight, or each data set.
  """
  by_dataset = _split(questions, lambda task: task.dataset).values()
  questions = [samples for part in by_dataset for samples in part]
  sizes = [len(part) for part in by_dataset]
  ends = np.cumsum(sizes)[:-1]

  def mean(values):
    """Returns the mean of values [.., questions]."""
    if not weigh_datasets:
      return values.mean(axis=-1)
    parts = np.split(values, ends, axis=-1)
    means = [part.mean(axis=-1) for part in parts]
    return np.mean(means, axis=0)

  columns = _scores(questions)
  if has_passes:
    columns |= _passes(questions)
  estimates = {}
  for metric, column in columns.items():
    strata = np.split(np.array(column), ends)
    estimates[metric] = statistics.bootstrap(mean, [strata], reps=REPS)
  num_episodes = sum(map(len, questions))
  return Group(name, len(questions), num_episodes, estimates)


def _scores(questions):
  """Returns one value per question of each metric: the mean over its samples.

  The metrics are those that all environments of a mix have in common.
  """
  columns = collections.defaultdict(list)
  episodes = [episode for samples in questions for episode in samples]
  by_environment: dict[str, dict[str, None]] = collections.defaultdict(dict)
  for episode in episodes:
    by_environment[episode.task.environment] |= dict.fromkeys(episode.core_metrics)
  first, *others = by_environment.values()
  names = [name for name in first if all(name in other for other in others)]
  for samples in questions:
    for name in names:
      values = [episode.metrics.get(name, 0.0) for episode in samples]
      columns[name].append(np.mean(values))
    scores = [episode.score for episode in samples]
    columns['score'].append(np.mean(scores))
  return columns


def _passes(questions):
  """Returns pass@k and pass^k of each question, if all have several samples."""
  fewest = min(map(len, questions))
  columns = {}
  if fewest == 1:
    return columns
  counts = []
  for samples in questions:
    passed = sum(episode.main_score >= PASSING for episode in samples)
    counts.append((len(samples), passed))
  for k in ks(fewest):
    for label, function in (('pass@', pass_at_k), ('pass^', pass_hat_k)):
      columns[f'{label}{k}'] = [function(n, passed, k) for n, passed in counts]
  return columns
