"""The results of an evaluation as tables, in Markdown that also reads well in a terminal."""

from collections.abc import Sequence

from stppo_jax.evaluation import estimates
from stppo_jax.evaluation import statistics


def text(title: str, groups: Sequence[estimates.Group], remarks: str) -> str:
  """Returns title, remarks, a table of scores and, with samples, one of pass@k and pass^k."""
  metrics = list(dict.fromkeys(name for group in groups for name in group.estimates))
  passing = [name for name in metrics if name.startswith(('pass@', 'pass^'))]
  passing.sort(key=lambda name: (name[:5], int(name[5:])))
  scores = [name for name in metrics if name not in passing]
  parts = [title, remarks, _table(groups, scores)]
  if passing:
    parts.append(_table([x for x in groups if not x.estimates.keys().isdisjoint(passing)], passing))
  level = f'{statistics.LEVEL:.0%}'
  parts.append(f'In brackets: {level} intervals of a bootstrap over the questions.')
  return '\n\n'.join(parts) + '\n'


def _table(groups, names) -> str:
  rows = [['', 'questions', 'episodes', *names]]
  for group in groups:
    cells = [_cell(group.estimates.get(name)) for name in names]
    rows.append([group.name, str(group.questions), str(group.episodes), *cells])
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = [
      ' | '.join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(*x)))
      for x in ((row, widths) for row in rows)
  ]
  rule = '|'.join(('-' * (w + 1) + ':' if i else ':' + '-' * (w + 1)) for i, w in enumerate(widths))
  return '\n'.join([f'| {lines[0]} |', f'|{rule}|', *(f'| {line} |' for line in lines[1:])])


def _cell(estimate: statistics.Estimate | None) -> str:
  if estimate is None:  # groups of fewer samples have another k
    return ''
  if estimate.low is None or estimate.high is None:  # of one question
    return _short(estimate.value)
  return f'{_short(estimate.value)} [{_short(estimate.low)}, {_short(estimate.high)}]'


def _short(x: float) -> str:
  """Returns three decimals, without a leading zero: .907, -.5 is -.500, 1.000."""
  return f'{x:.3f}'.replace('0.', '.', 1) if abs(x) < 1 else f'{x:.3f}'
