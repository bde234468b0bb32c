"""Summaries of a study: records of runs in; estimates, curves and comparisons of methods out."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import numpy as np

from research import comparisons
from research.study import grid as grid_lib
from stppo_jax.evaluation import statistics

SIGNIFICANT = 0.05
NO_EFFECT = (0.4, 0.6)  # A probability of improvement with its interval in here is no difference.


class Curve(NamedTuple):
  """A metric over updates."""

  steps: np.ndarray  # [P]
  middle: np.ndarray  # [P] interquartile mean
  runs: np.ndarray  # [R,P], or [0,P] if the runs were not kept
  low: np.ndarray | None = None  # [P] 10% quantile, in the toy task
  high: np.ndarray | None = None  # [P] 90% quantile, in the toy task


class Comparison(NamedTuple):
  """A method compared with another one: effect with interval, and p-values."""

  improvement: statistics.Estimate  # probability that a run's final score is above the other's
  p_final: float
  p_collapsed: float


@dataclasses.dataclass(frozen=True, eq=False)
class MethodRuns:
  """The runs of one method in one condition of a grid."""

  grid: str
  condition: str
  method: str
  baseline: str  # the method that it is compared with
  num_planned: int
  records: Sequence[Mapping[str, Any]]

  @property
  def group(self) -> str:
    """The full name: 'system_harsh/harsh/ppo'."""
    return f'{self.grid}/{self.condition}/{self.method}'

  @functools.cached_property
  def measures(self) -> dict[str, np.ndarray]:
    """Returns {measure: [runs]}, with NaN where a run has none."""
    names = {name for record in self.records for name in record['measures']}
    measures = {}
    for name in names:
      parts = [np.array(record['measures'].get(name), float) for record in self.records]
      measures[name] = np.concatenate([np.atleast_1d(part) for part in parts])
    return measures

  @property
  def num_runs(self) -> int:
    """The number of finished runs."""
    return len(self.measures.get('collapsed', ()))

  def values(self, measure: str) -> np.ndarray:
    """Returns the finite values of a measure."""
    values = self.measures.get(measure, np.zeros(0))
    return values[np.isfinite(values)]

  @functools.cache  # noqa: B019  (few objects, which live as long as the process)
  def estimate(self, measure: str) -> statistics.Estimate | None:
    """Returns the interquartile mean of a measure with its interval; for `collapsed` the share."""
    values = self.values(measure)
    if not len(values):
      return None
    if measure == 'collapsed':
      return comparisons.share_interval(int(values.sum()), len(values))
    return comparisons.iqm_interval(values)

  def curve(self, metric: str) -> Curve | None:
    """Returns a metric over updates. The metric 'score' is the held-out score."""
    points = []
    for record in self.records:
      if metric == 'score':
        points.append((record['score']['steps'], record['score']['values']))
      elif metric in record['series']:
        points.append((record['steps'], record['series'][metric]))
    if not points:
      return None
    steps = np.array(sorted({step for own_steps, _ in points for step in own_steps}))
    rows = []
    for own_steps, values in points:
      if isinstance(values, dict):  # the toy task: one record with a band
        band = {name: np.array(x, float) for name, x in values.items()}
        return Curve(steps, band['iqm'], np.zeros((0, len(steps))), band['low'], band['high'])
      for row in np.atleast_2d(np.array(values, float)):
        rows.append(np.full(len(steps), np.nan))
        rows[-1][np.searchsorted(steps, own_steps)] = row
    runs = np.array(rows)
    middle = [comparisons.iqm(column[np.isfinite(column)]) for column in runs.T]
    return Curve(steps, np.array(middle, float), runs)


def make_methods(
    study: grid_lib.Study, jobs: Iterable[grid_lib.Job], records: Mapping[str, Mapping[str, Any]]
) -> dict[str, MethodRuns]:
  """Returns {GRID/CONDITION/METHOD: MethodRuns} of the grids that are on the page.

  A grid without records is left out. Of the other grids, methods without runs are included.
  """
  jobs = list(jobs)
  has_records = {record['grid'] for record in records.values()}
  is_incomplete = {job.grid for job in jobs if job.name not in records}
  groups: dict[str, list[grid_lib.Job]] = {}
  for job in jobs:
    waits = study.grids[job.grid].only_complete and job.grid in is_incomplete
    if job.grid in has_records and not waits:
      groups.setdefault(job.group, []).append(job)
  methods = {}
  for group, own_jobs in groups.items():
    first = own_jobs[0]
    methods[group] = MethodRuns(
        first.grid,
        first.condition,
        first.method,
        study.grids[first.grid].baseline,
        sum(len(job.seeds) for job in own_jobs),
        [records[job.name] for job in own_jobs if job.name in records],
    )
  return methods


def by_condition(methods: Mapping[str, MethodRuns]) -> dict[tuple[str, str], list[MethodRuns]]:
  """Returns {(grid, condition): methods}, planned methods without runs included."""
  groups: dict[tuple[str, str], list[MethodRuns]] = {}
  for one in methods.values():
    groups.setdefault((one.grid, one.condition), []).append(one)
  return groups


@functools.cache
def compare(one: MethodRuns, other: MethodRuns) -> Comparison | None:
  """Returns the comparison of two methods, uncorrected; None if one has no runs."""
  x = one.values('final')
  y = other.values('final')
  if not len(x) or not len(y):
    return None
  hits = one.values('collapsed')
  other_hits = other.values('collapsed')
  return Comparison(
      comparisons.improvement_interval(x, y),
      comparisons.scores_differ(x, y),
      comparisons.shares_differ(int(hits.sum()), len(hits), int(other_hits.sum()), len(other_hits)),
  )


def compare_with_baseline(methods: Sequence[MethodRuns]) -> dict[str, Comparison]:
  """Returns {group: comparison with the baseline} of all planned methods of one condition.

  Holm's method corrects p-values, separately for final scores and collapses. Methods without runs
  count as tests, so that more runs cannot raise a p-value.
  """
  baseline = next(one for one in methods if one.method == one.baseline)
  uncorrected = {}
  for one in methods:
    comparison = compare(one, baseline)
    if one is not baseline and comparison is not None:
      uncorrected[one.group] = comparison
  number = len(methods) - 1
  final = comparisons.holm({group: x.p_final for group, x in uncorrected.items()}, number)
  collapsed = comparisons.holm({group: x.p_collapsed for group, x in uncorrected.items()}, number)
  return {
      group: x._replace(p_final=final[group], p_collapsed=collapsed[group])
      for group, x in uncorrected.items()
  }


def verdict(toy: Comparison | None, system: Comparison | None) -> str:
  """Returns the verdict on a claim that a method is better, by the rule of the protocol."""
  if toy is None or system is None:
    return 'not tested here'
  alone = toy_verdict(toy)
  if alone == 'held on the toy task':
    return 'held' if system.improvement.value > 0.5 else 'not decided'
  return alone.removesuffix(' on the toy task')


def toy_verdict(toy: Comparison | None) -> str:
  """Returns the verdict on a claim that a method is better if only the toy task was run."""
  if toy is None:
    return 'not tested here'
  is_decided = toy.p_final < SIGNIFICANT
  if is_decided and toy.improvement.value > 0.5:
    return 'held on the toy task'
  if is_decided or toy.improvement.is_within(*NO_EFFECT):
    return 'did not hold on the toy task'
  return 'not decided'


def core_hours(records: Iterable[Mapping[str, Any]]) -> float:
  """Returns the processor time of runs."""
  return sum(record['cost']['core_s'] for record in records) / 3600
