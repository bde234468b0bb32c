"""The results of an evaluation as tables, in Markdown that also reads well in a terminal."""

from collections.abc import Sequence

from stppo_jax.evaluation import estimates
from stppo_jax.evaluation import statistics

_PASSES = ('pass@', 'pass^')


def text(title: str, groups: Sequence[estimates.Group], remarks: str) -> str:
  """Returns title, remarks, a table of scores and, with samples, one of pass@k and pass^k."""
  metrics = dict.fromkeys(name for group in groups for name in group.estimates)
  scores = [name for name in metrics if not name.startswith(_PASSES)]
  passes = [name for name in metrics if name.startswith(_PASSES)]
  passes.sort(key=lambda name: (name[:5], int(name[5:])))
  parts = [title, remarks, _table(groups, scores)]
  if passes:
    sampled = [group for group in groups if group.estimates.keys() & set(passes)]
    parts.append(_table(sampled, passes))
  level = f'{statistics.LEVEL:.0%}'
  parts.append(f'In brackets: {level} intervals of a bootstrap over the questions.')
  return '\n\n'.join(parts) + '\n'


def _table(groups: Sequence[estimates.Group], names: Sequence[str]) -> str:
  rows = [['', 'questions', 'episodes', *names]]
  for group in groups:
    cells = [cell(group.estimates.get(name)) for name in names]
    rows.append([group.name, str(group.questions), str(group.episodes), *cells])
  return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
  """Returns rows as a Markdown table of right-aligned columns. The first row is the heading."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  rule = [':' + '-' * (widths[0] + 1)]
  rule += ['-' * (width + 1) + ':' for width in widths[1:]]
  lines = []
  for row in rows:
    texts = [row[0].ljust(widths[0])]
    texts += [value.rjust(width) for value, width in zip(row[1:], widths[1:])]
    lines.append(f'| {" | ".join(texts)} |')
  lines.insert(1, f'|{"|".join(rule)}|')
  return '\n'.join(lines)


def cell(estimate: statistics.Estimate | None) -> str:
  """Returns an estimate with its interval."""
  if estimate is None:  # a group with fewer samples has another k
    return ''
  value = _short(estimate.value)
  if estimate.low is None or estimate.high is None:  # there is one question
    return value
  return f'{value} [{_short(estimate.low)}, {_short(estimate.high)}]'


def _short(x: float) -> str:
  """Returns three decimals without a leading zero: .907, -.500, 1.000."""
  text = f'{x:.3f}'
  return text.replace('0.', '.', 1) if abs(x) < 1 else text
