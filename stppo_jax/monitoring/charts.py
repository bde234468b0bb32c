"""The charts of the report: lines of metrics in, charts as plain data out.

page/charts.json names the series of each chart by patterns of metric names. Series that a run did
not write are left out, and so are charts without series. The other metrics come last, one chart
per name.
"""

import json
import pathlib
import re
from typing import Any

import numpy as np

MAX_POINTS = 600  # per series; thinning keeps the extremes of each bin
_PATH = pathlib.Path(__file__).parent / 'page' / 'charts.json'
CHARTS: list[dict[str, Any]] = json.loads(_PATH.read_text(encoding='utf-8'))
_NO_METRICS = ('step', 'time', 'nonfinite')

Column = dict[int, float | None]  # step -> value
Chart = dict[str, Any]  # the form that page.js draws


def charts(rows: list[dict[str, Any]]) -> list[Chart]:
  """Returns the charts that have data.

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
    chart = {'note': '', 'scale': 'linear', **chart}
    series = []
    for line in chart['series']:
      for name in names:
        if match := re.fullmatch(line['pattern'], name):
          used |= {name, *_limit_names(name)}
          one = _series(columns, name, line, chart['scale'])
          one['label'] = match.expand(line['label'])
          series.append(one)
    result.append(chart | {'series': _with_data(series)})
  for name in names:
    if name not in used:
      series = [_series(columns, name, {}, 'linear')]
      chart = {'section': 'Other series', 'title': name, 'unit': '', 'note': '', 'scale': 'linear'}
      result.append(chart | {'series': _with_data(series)})
  return [chart for chart in result if chart['series']]


def _with_data(series):
  """Returns the series that have data, with their hues and short labels."""
  series = [one for one in series if any(value is not None for value in one['y'])]
  datasets = {one['label'].split(' · ')[0] for one in series}
  for hue, one in enumerate(series):
    one['hue'] = hue
    if len(series) > 1 and len(datasets) == 1:  # the name of the only data set adds nothing
      one['label'] = one['label'].split(' · ')[-1]
  return series


def _series(
    columns: dict[str, Column], name: str, line: dict[str, object], scale: str
) -> dict[str, object]:
  column = columns[name]
  steps = _strided(column) if scale == 'stack' else _thinned(column)
  series = {
      'name': name,
      'label': name,
      'dashed': line.get('dashed', False),
      'x': steps,
      'y': [column[step] for step in steps],
  }
  low_name, high_name = _limit_names(name)
  if line.get('band') and low_name in columns and high_name in columns:
    series['low'] = [columns[low_name].get(step) for step in steps]
    series['high'] = [columns[high_name].get(step) for step in steps]
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
  for members in np.array_split(steps, MAX_POINTS // 2):
    values = np.array([column[step] for step in members], float)
    values = np.nan_to_num(values, nan=-np.inf)
    for index in (values.argmin(), values.argmax()):
      chosen.add(int(members[index]))
  return sorted(chosen)


def _strided(column: Column) -> list[int]:
  """Returns every n-th step. The step alone decides, so that the layers of a stack agree."""
  last = max(column)
  stride = last // MAX_POINTS + 1
  return [step for step in sorted(column) if step % stride == 0 or step == last]


def _natural(name: str) -> list[tuple[int, int, str]]:
  """Returns a sort key that puts turn10 after turn2."""
  key = []
  for part in re.split(r'(\d+)', name):
    if part.isdigit():
      key.append((0, int(part), ''))
    else:
      key.append((1, 0, part))
  return key
