"""The results of an evaluation as tables, in Markdown that also reads well in a terminal."""

from collections.abc import Sequence

from stppo_jax.evaluation import estimates
from stppo_jax.evaluation import statistics


def text(title: str, groups: Sequence[estimates.Group], remarks: str) -> str:
  """Returns title, remarks, a table of scores and, with samples, one of pass@k and pass^k."""
  scores = []
  passes = []
  for name in dict.fromkeys(name for group in groups for name in group.estimates):
    is_pass = name.startswith(('pass@', 'pass^'))
    names = passes if is_pass else scores
    names.append(name)
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
    row = [group.name, str(group.questions), str(group.episodes)]
    row += [cell(group.estimates.get(name)) for name in names]
    rows.append(row)
  return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
  """Returns rows as a Markdown table of right-aligned columns. The first row is the heading."""
  first, *others = [max(map(len, column)) for column in zip(*rows)]
  rule = ['-' * (width + 1) + ':' for width in others]
  lines = []
  for name, *values in rows:
    texts = [name.ljust(first)]
    for value, width in zip(values, others):
      texts.append(value.rjust(width))
    lines.append(f'| {" | ".join(texts)} |')
  lines.insert(1, f'|:{"-" * (first + 1)}|{"|".join(rule)}|')
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
  if abs(x) >= 1:
    return text
  return text.replace('0.', '.', 1)
