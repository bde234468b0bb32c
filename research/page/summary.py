"""Summaries of a study: records of runs in; cells with estimates, curves and comparisons out."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from stppo_jax.evaluation import statistics

SIGNIFICANT = 0.05
NO_EFFECT = (0.4, 0.6)  # an interval of the probability of improvement inside means: no difference


@dataclasses.dataclass(frozen=True)
class Planned:
  """A cell as the grid has it."""

  grid: str
  regime: str
  name: str
  baseline: str  # the cell of its regime that it is compared with
  num_runs: int


@dataclasses.dataclass(frozen=True)
class Curve:
  """A metric over updates: its interquartile mean, and each run or a band."""

  steps: np.ndarray  # [P]
  middle: np.ndarray  # [P]
  runs: np.ndarray  # [R,P], or [0,P]
  low: np.ndarray | None = None  # [P] 10% quantile, where runs are not kept
  high: np.ndarray | None = None  # [P] 90% quantile


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
  """The runs of one cell."""

  planned: Planned
  records: Sequence[Mapping[str, Any]]

  @property
  def group(self) -> str:
    """'system/harsh/ppo'."""
    return f'{self.planned.grid}/{self.planned.regime}/{self.planned.name}'

  @functools.cached_property
  def measures(self) -> dict[str, np.ndarray]:
    """Returns {measure: [runs]}, with NaN where a run has none."""
    names = {name: None for record in self.records for name in record['measures']}
    return {
        name: np.concatenate([
            np.atleast_1d(np.array(record['measures'].get(name), float))
            for record in self.records
        ])
        for name in names
    }  # fmt: skip

  @property
  def num_runs(self) -> int:
    """How many runs there are."""
    return len(self.measures.get('collapsed', ()))

  def values(self, measure: str) -> np.ndarray:
    """Returns the finite values of a measure."""
    values = self.measures.get(measure, np.zeros(0))
    return values[np.isfinite(values)]

  @functools.cache  # noqa: B019  (few cells, which live as long as the process)
  def estimate(self, measure: str) -> statistics.Estimate | None:
    """Returns the interquartile mean of a measure with its interval; of collapse its share."""
    values = self.values(measure)
    if not len(values):
      return None
    if measure == 'collapsed':
      return statistics.share_interval(int(values.sum()), len(values))
    return statistics.iqm_interval(values)

  def curve(self, metric: str) -> Curve | None:
    """Returns a metric over updates; 'score' is the held-out one."""
    many = [one for record in self.records if (one := _points(record, metric)) is not None]
    if not many:
      return None
    steps = np.array(sorted({step for steps, _ in many for step in steps}))
    rows = []
    for of_steps, values in many:
      if isinstance(values, dict):  # a cell of the mechanism: one record with a band
        band = {name: np.array(x, float) for name, x in values.items()}
        return Curve(steps, band['iqm'], np.zeros((0, len(steps))), band['low'], band['high'])
      for row in np.atleast_2d(np.array(values, float)):
        rows.append(np.full(len(steps), np.nan))
        rows[-1][np.searchsorted(steps, of_steps)] = row
    runs = np.array(rows)
    middle = [statistics.iqm(column[np.isfinite(column)]) for column in runs.T]
    return Curve(steps, np.array(middle, float), runs)


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A cell against another: effects with intervals, and p-values."""

  improvement: statistics.Estimate  # probability that a run's final score is above the other's
  p_final: float
  p_collapsed: float


def make_cells(
    planned: Iterable[Planned], records: Mapping[str, Mapping[str, Any]]
) -> dict[str, Cell]:
  """Returns {GRID/REGIME/CELL: Cell} in the order of the plan, those without runs included."""
  of = {}
  for record in records.values():
    of.setdefault((record['grid'], record['regime'], record['cell']), []).append(record)
  cells = [Cell(one, tuple(of.get((one.grid, one.regime, one.name), ()))) for one in planned]
  return {cell.group: cell for cell in cells}


def by_regime(cells: Mapping[str, Cell]) -> dict[tuple[str, str], list[Cell]]:
  """Returns {(grid, regime): cells}, those with runs."""
  found = {}
  for cell in cells.values():
    if cell.num_runs:
      found.setdefault((cell.planned.grid, cell.planned.regime), []).append(cell)
  return found


def compare(cell: Cell, other: Cell) -> Comparison | None:
  """Returns the comparison of two cells, uncorrected; None where one has no runs."""
  x, y = cell.values('final'), other.values('final')
  if not len(x) or not len(y):
    return None

  def hits(one):
    collapsed = one.values('collapsed')
    return int(collapsed.sum()), len(collapsed)

  return Comparison(
      statistics.improvement_interval(x, y),
      statistics.scores_differ(x, y),
      statistics.shares_differ(*hits(cell), *hits(other)),
  )


def compare_with_baseline(cells: Sequence[Cell], num_planned: int) -> dict[str, Comparison]:
  """Returns {group: comparison with the baseline} of the cells of one regime.

  p-values are corrected by Holm over `num_planned` cells, final scores and collapses each by
  themselves: what is not run yet counts, so that more runs cannot raise a p-value.
  """
  baseline = [cell for cell in cells if cell.planned.name == cell.planned.baseline]
  if not baseline:
    return {}
  made = {cell.group: compare(cell, baseline[0]) for cell in cells if cell is not baseline[0]}
  found = {group: one for group, one in made.items() if one is not None}
  number = max(num_planned - 1, len(found))
  final = statistics.holm({group: one.p_final for group, one in found.items()}, number)
  collapsed = statistics.holm({group: one.p_collapsed for group, one in found.items()}, number)
  return {
      group: dataclasses.replace(one, p_final=final[group], p_collapsed=collapsed[group])
      for group, one in found.items()
  }


def verdict(on_mechanism: Comparison | None, on_system: Comparison | None) -> str:
  """Returns what becomes of a claim that a cell is better, by the rule of the protocol."""
  if on_mechanism is None or on_system is None:
    return 'not tested here'
  alone = toy_verdict(on_mechanism)
  if alone == 'held on the toy task':
    return 'held' if on_system.improvement.value > 0.5 else 'not decided'
  return alone.removesuffix(' on the toy task')


def toy_verdict(on_mechanism: Comparison | None) -> str:
  """Returns what becomes of a claim that a cell is better where only the toy task was run."""
  if on_mechanism is None:
    return 'not tested here'
  effect, decided = on_mechanism.improvement, on_mechanism.p_final < SIGNIFICANT
  if decided and effect.value > 0.5:
    return 'held on the toy task'
  inside = effect.is_within(*NO_EFFECT)
  return 'did not hold on the toy task' if decided or inside else 'not decided'


def core_hours(records: Iterable[Mapping[str, Any]]) -> float:
  """Returns the processor time of runs."""
  return sum(record['cost']['core_s'] for record in records) / 3600


def _points(record: Mapping[str, Any], metric: str) -> tuple[list[int], Any] | None:
  """Returns (steps, values) of a metric in a record: of each run, or of a band."""
  if metric == 'score':
    return record['score']['steps'], record['score']['values']
  if metric not in record['series']:
    return None
  return record['steps'], record['series'][metric]
