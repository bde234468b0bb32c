"""The charts of the report: lines of metrics in, charts as plain data out.

page/charts.json names the series of each chart by patterns of metric names. Series that a run did
not write are left out, and so are charts without series. Metrics that no chart names come last, one
chart per name.
"""

import json
import math
import pathlib
import re
from typing import Any

MAX_POINTS = 600  # per series; thinning keeps the extremes of each bin
CHARTS: list[dict[str, Any]] = json.loads(
    (pathlib.Path(__file__).parent / 'page' / 'charts.json').read_text(encoding='utf-8')
)
_NO_METRICS = ('step', 'time', 'nonfinite')

Column = dict[int, float | None]  # step -> value


def charts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns the charts that have data, in the form that page.js draws.

  {section, title, unit, note, scale: 'linear' | 'log' | 'stack', series: [
    {name, label, hue, dashed, x: steps, y: values, low, high: limits of a band}]}
  """
  columns: dict[str, Column] = {}
  for row in rows:
    for name, value in row.items():
      if name not in _NO_METRICS:
        columns.setdefault(name, {})[row['step']] = value  # the later line of a step wins
  names = sorted(columns, key=_natural)
  used = {'timing_s/step'}
  result = []
  for chart in CHARTS:
    series = []
    for line in chart['series']:
      for name in names:
        match = re.fullmatch(line['pattern'], name)
        if match:
          used |= {name, *_limit_names(name)}
          scale = chart.get('scale', 'linear')
          label = match.expand(line['label'])
          series.append(_series(columns, name, line, scale) | {'label': label})
    result += _chart(chart, series)
  for name in names:
    if name not in used:
      other = {'section': 'Other series', 'title': name, 'unit': ''}
      result += _chart(other, [_series(columns, name, {}, 'linear')])
  return result


def _chart(chart: dict[str, Any], series: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns [the chart], or [] if it has no data."""
  series = [one for one in series if any(value is not None for value in one['y'])]
  if not series:
    return []
  prefixes = {one['label'].split(' · ')[0] for one in series}
  for hue, one in enumerate(series):
    one['hue'] = hue
    if len(series) > 1 and len(prefixes) == 1:  # the name of the only data set adds nothing
      one['label'] = one['label'].split(' · ')[-1]
  return [{'note': '', 'scale': 'linear', **chart, 'series': series}]


def _series(
    columns: dict[str, Column], name: str, line: dict[str, Any], scale: str
) -> dict[str, Any]:
  column = columns[name]
  steps = _strided(column) if scale == 'stack' else _thinned(column)
  series = {
      'name': name,
      'label': name,
      'dashed': line.get('dashed', False),
      'x': steps,
      'y': [column[step] for step in steps],
  }
  low, high = (columns.get(limit) for limit in _limit_names(name))
  if line.get('band') and low and high:
    series['low'] = [low.get(step) for step in steps]
    series['high'] = [high.get(step) for step in steps]
  return series


def _limit_names(name: str) -> tuple[str, str]:
  """Returns the names of the smallest and largest value that belong to a mean."""
  if not name.endswith('/mean'):
    return name, name
  stem = name.removesuffix('/mean')
  return f'{stem}/min', f'{stem}/max'


def _thinned(column: Column) -> list[int]:
  """Returns the steps to draw: all, or the extremes of each of MAX_POINTS / 2 bins."""
  steps = sorted(column)
  if len(steps) <= MAX_POINTS:
    return steps
  chosen = {steps[0], steps[-1]}
  bins = MAX_POINTS // 2
  for i in range(bins):
    members = steps[i * len(steps) // bins : (i + 1) * len(steps) // bins]
    members.sort(key=lambda step: _sortable(column[step]))
    chosen |= {members[0], members[-1]}
  return sorted(chosen)


def _sortable(value: float | None) -> float:
  return -math.inf if value is None else value


def _strided(column: Column) -> list[int]:
  """Returns every n-th step. The step alone decides, so that the layers of a stack agree."""
  stride = max(column) // MAX_POINTS + 1
  return [step for step in sorted(column) if step % stride == 0 or step == max(column)]


def _natural(name: str) -> list[tuple[int, int, str]]:
  """Returns a sort key that puts turn10 after turn2."""
  parts = re.split(r'(\d+)', name)
  return [(0, int(part), '') if part.isdigit() else (1, 0, part) for part in parts]
