"""The page of a study: results in; study.md, study.html and the figures' files out.

The page is a text with placeholders, so that what it says and what was measured cannot disagree. A
template may hold any text around them:

  {{system/harsh/st_ppo final}}                 a measure of a cell: .52 [.47, .58]
  {{system/harsh/st_ppo vs turn_ppo p_final}}   a comparison: improvement, p_final, p_collapsed
  {{verdict st_ppo vs turn_ppo on mechanism_reuse/reuse system/harsh}}     by the protocol
  {{verdict st_ppo on mechanism_reuse/reuse system/harsh}}     against the baseline, corrected
  {{verdict st_ppo on mechanism_reuse/reuse}}   without runs of the system: 'held on the toy task'
  {{system core_hours}}  {{study core_hours}}   of a grid; of the whole study
  {{progress}} {{outcome}} {{diagnostics}} {{division}} {{figures}} {{cost}}    on their own lines

p-values against the baseline are corrected over the planned cells of the grid and regime, and so is
every verdict; p-values of other comparisons are not.
"""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import difflib
import html
import os
import re
from typing import Any

from research.page import figures
from research.page import markup
from research.page import summary
from stppo_jax.algorithms import variants
from stppo_jax.evaluation import statistics
from stppo_jax.types import UserError

NOTHING = '(no runs yet)'
TEMPLATE = """# Study

{{progress}}

## Outcome

{{outcome}}

## What the division did

{{division}}

## Diagnostics

{{diagnostics}}

## Figures

{{figures}}

## Cost

{{cost}}
"""
_PLACEHOLDER = re.compile(r'\{\{([^{}]+)\}\}')
_COMPARED = ('improvement', 'p_final', 'p_collapsed')
_DIAGNOSTICS = {
    'clip': 'clipped',
    'ess': 'ESS',
    'spikes': 'spikes',
    'grad_norm': '‖g‖',
    'bias_norm': '‖C‖',
    'cos': 'cos(g, C)',
    'step': 'step',
    'path': 'path',
    'ratio_token': 'ratio std',
    'entropy': 'last entropy',
    'explained': 'explained variance',
}
_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1160px;padding:12px;color:#111}
h1,h2,h3{line-height:1.2}.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13.5px}
th,td{padding:3px 9px;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}
th.text,td.text{text-align:left}
th:first-child,td:first-child{position:sticky;left:0;background:#fff}
td:first-child{font-weight:600}
.interval{color:#666;font-size:.82em;white-space:nowrap}td:not(.long) .interval{display:block}
th,td.long{white-space:normal}td.long,th.long{min-width:12em}
code{background:#f3f3f3;padding:0 3px}pre{overflow-x:auto}
figure{margin:12px 0}figcaption{font-size:14px;color:#444}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(175px,1fr));gap:6px}
.panels svg{width:100%;height:auto}
@media(max-width:600px){td:first-child{white-space:normal;max-width:9em}}
"""


class Page:
  """The cells of a study and what is said of them."""

  def __init__(self, planned: Sequence[summary.Planned], records: Mapping[str, Mapping[str, Any]]):
    self._records = records
    self.cells = summary.make_cells(planned, records)
    self._regimes = summary.by_regime(self.cells)
    self._num_planned = collections.Counter((x.grid, x.regime) for x in planned)
    self._against = {}
    for regime, cells in self._regimes.items():
      self._against |= summary.compare_with_baseline(cells, self._num_planned[regime])
    self._drawn: dict[str, list[str]] = {}  # path of a sheet -> its panels

  def markdown(self, template: str = TEMPLATE) -> str:
    """Returns the text with its placeholders filled; a UserError names one that cannot be."""
    blocks = {
        'progress': self._progress,
        'outcome': self._outcome,
        'diagnostics': self._diagnostics,
        'division': self._division,
        'figures': self._figures,
        'cost': self._cost,
    }

    def fill(match):
      words = match[1].strip()
      return blocks[words]() if words in blocks else self._number(words)

    return _PLACEHOLDER.sub(fill, template)

  def drawings(self) -> dict[str, list[str]]:
    """Returns {path of a figure's file: its panels} of the text that was made last."""
    return self._drawn

  def _number(self, words: str) -> str:
    """Returns what a placeholder stands for."""
    group, _, rest = words.partition(' ')
    if rest == 'core_hours':
      names = {cell.planned.grid for cell in self.cells.values()} | {'study'}
      if group not in names:
        raise UserError(f'{{{{{words}}}}}: no such grid; give one of {", ".join(sorted(names))}')
      chosen = [r for r in self._records.values() if group in ('study', r['grid'])]
      return f'{summary.core_hours(chosen):.1f}'
    if match := re.fullmatch(r'verdict (\S+)(?: vs (\S+))? on (\S+)(?: (\S+))?', words):
      return self._verdict(match[1], match[2] or '', match[3], match[4] or '')
    other = ''
    if match := re.fullmatch(r'vs (\S+) (\S+)', rest):
      other, rest = match[1], match[2]
    cell = self._cell(group)
    if rest in _COMPARED:
      made = self._compared(group, other)
      return NOTHING if made is None else _shown(getattr(made, rest))
    if rest == 'runs':
      return str(cell.num_runs)
    known = {name for one in self.cells.values() for name in one.measures}
    if known and rest not in known:
      near = difflib.get_close_matches(rest, [*known, *_COMPARED, 'runs'], n=3)
      raise UserError(f'{{{{{words}}}}}: there is no measure {rest!r}; {_hint(near, known)}')
    return _estimate(cell, rest)

  def _verdict(self, name: str, other: str, mechanism: str, system: str) -> str:
    """Returns the verdict on a cell in two regimes; one that is not planned is not tested.

    Without a regime of the system the verdict is on the toy task.
    """
    regimes = list(filter(None, (mechanism, system)))
    for regime in regimes:
      if not any(group.startswith(regime + '/') for group in self.cells):
        self._cell(regime)  # which raises
    for cell in filter(None, (name, other)):
      if not any(group.endswith('/' + cell) for group in self.cells):
        self._cell(f'{regimes[-1]}/{cell}')
    groups = [f'{regime}/{name}' for regime in regimes]
    compared = [self._corrected(g, other) if g in self.cells else None for g in groups]
    return summary.verdict(*compared) if system else summary.toy_verdict(*compared)

  def _corrected(self, group: str, other: str) -> summary.Comparison | None:
    """Returns a comparison with corrected p-values: of two other cells by Bonferroni."""
    made = self._compared(group, other)
    if made is None or not other:
      return made
    planned = self.cells[group].planned
    number = self._num_planned[planned.grid, planned.regime] - 1
    return dataclasses.replace(
        made,
        p_final=min(1.0, number * made.p_final),
        p_collapsed=min(1.0, number * made.p_collapsed),
    )

  def _compared(self, group: str, other: str) -> summary.Comparison | None:
    """Returns the comparison of a cell with another of its regime, or with the baseline."""
    if not other:
      return self._against.get(group)
    beside = f'{group.rpartition("/")[0]}/{other}'
    return summary.compare(self._cell(group), self._cell(beside))

  def _cell(self, group: str) -> summary.Cell:
    if group in self.cells:
      return self.cells[group]
    near = difflib.get_close_matches(group, self.cells, n=3)
    raise UserError(f'{{{{{group} ..}}}}: the study has no such cell; {_hint(near, self.cells)}')

  def _progress(self) -> str:
    planned = sum(cell.planned.num_runs for cell in self.cells.values())
    done = sum(cell.num_runs for cell in self.cells.values())
    hours = summary.core_hours(self._records.values())
    return f'{done:,} of {planned:,} planned runs are done, in {hours:.1f} core-hours.'

  def _outcome(self) -> str:
    return self._tables(
        (
            'cell',
            'runs',
            'collapsed',
            'final',
            'best',
            'area',
            'P(better)',
            'p final',
            'p collapse',
        ),
        self._outcome_row,
        'Share of runs that collapsed (Clopper-Pearson), interquartile means of final and best '
        'success and of the area under the curve (bootstrap), probability that a run is better '
        'than one of the baseline, all with 95% intervals; p-values (Mann-Whitney of final, Fisher '
        'of collapse) by Holm over the planned cells of the grid and regime.',
    )

  def _outcome_row(self, cell: summary.Cell) -> list[str]:
    against = self._against.get(cell.group)
    compared = ['–'] * 3
    if against is not None:
      compared = [_shown(getattr(against, name)) for name in _COMPARED]
    measured = [_estimate(cell, name) for name in ('collapsed', 'final', 'best', 'auc')]
    return [str(cell.num_runs), *measured, *compared]

  def _diagnostics(self) -> str:
    return self._tables(
        ('cell', *_DIAGNOSTICS.values()),
        lambda cell: [_middle(cell, name) for name in _DIAGNOSTICS],
        'Interquartile means over runs, of means over updates. Step: norm of the parameter change '
        'per optimizer step. Path: sum over updates of their means. ESS: effective share of the '
        'episodes, by the ratio of the trained to the sampling policy; –: not measured.',
    )

  def _division(self) -> str:
    def column(cell, name):
      overrides = cell.records[0]['overrides']
      row = variants.VARIANTS.get(overrides.get('algorithm.variant', ''))
      return str(overrides.get(f'algorithm.{name}') or getattr(row, name, '?'))

    def row(cell):
      return [
          column(cell, 'divisor'),
          column(cell, 'divide'),
          *(
              _middle(cell, name)
              for name in ('entering', 'factor', 'factor_changed', 'factor_twofold')
          ),
      ]

    return self._tables(
        ('cell', 'divisor', 'divides', 'on entry', 'on the step', 'changed', 'twofold'),
        row,
        'On entry: factor by which the division changed the norm of the gradient that enters the '
        'optimizer. On the step: norm of the applied step over that of the step which the same '
        'optimizer state makes of the undivided gradient. Means over updates; share of updates in '
        'which the step changed by more than 1%; and by more than 2 times, up or down. –: not '
        'measured in that run.',
        lambda cell: column(cell, 'divisor') not in ('none', '?'),
    )

  def _figures(self) -> str:
    self._drawn, parts = {}, []
    for (grid, regime), cells in self._regimes.items():
      parts.append(f'### {grid}, {regime}')
      for figure in figures.FIGURES:
        panels = figures.panels(figure, cells)
        if panels:
          path = f'study_figures/{grid}_{regime}_{figure.name}.svg'
          self._drawn[path] = panels
          parts += [f'**{figure.title}.** {figure.note}', f'![{figure.title}]({path})']
    note = 'Thin: every run. Thick: their interquartile mean. Grey: that of the baseline.'
    return '\n\n'.join([note, *parts]) if parts else NOTHING

  def _cost(self) -> str:
    grids: dict[str, list[Mapping[str, Any]]] = {}
    for record in self._records.values():
      grids.setdefault(record['grid'], []).append(record)
    rows = []
    for grid, records in grids.items():
      sets = (sorted({record[name] for record in records}) for name in ('machine', 'versions'))
      runs = sum(len(record['seeds']) for record in records)
      hours = summary.core_hours(records)
      commits = sorted({record['commit'] for record in records})
      few = ', '.join(commits[:3]) + (f' and {len(commits) - 3} more' if commits[3:] else '')
      rows.append([grid, str(runs), f'{hours:.2f}', *('; '.join(each) for each in sets), few])
    titles = ('grid', 'runs', 'core-hours', 'machine', 'versions', 'commits')
    return _table(titles, rows) if rows else NOTHING

  def _tables(self, titles, row, note, chosen=lambda cell: True) -> str:
    """Returns a table per regime, with a note before them."""
    parts = []
    for (grid, regime), cells in self._regimes.items():
      rows = [[cell.planned.name, *row(cell)] for cell in cells if chosen(cell)]
      if rows:
        parts += [f'### {grid}, {regime}', _table(titles, rows)]
    return '\n\n'.join([note, *parts]) if parts else NOTHING


def read_template(path: str) -> str:
  """Returns the text of a page before its placeholders are filled; that of `TEMPLATE` for ''."""
  if not path:
    return TEMPLATE
  try:
    with open(path, encoding='utf-8') as file:
      return file.read()
  except OSError as error:
    raise UserError(f'{path} cannot be read ({error.strerror}): see study.claims') from error


def build(
    planned: Sequence[summary.Planned],
    records: Mapping[str, Mapping[str, Any]],
    folder: str,
    template_path: str = '',
) -> str:
  """Writes study.md, study.html and study_figures/*.svg into `folder`; returns the page's path."""
  page = Page(planned, records)
  text = page.markdown(read_template(template_path))
  drawings = page.drawings()
  os.makedirs(folder, exist_ok=True)
  for path, panels in drawings.items():
    _write(os.path.join(folder, path), figures.sheet(panels))
  _write(os.path.join(folder, 'study.md'), text)

  def image(caption, path):
    if path not in drawings:
      return f'<figure><img src="{html.escape(path)}" alt="{html.escape(caption)}"></figure>'
    return f'<figure><div class="panels">{"".join(drawings[path])}</div></figure>'

  body = markup.to_html(text, image)
  title = re.search(r'^# (.*)', text, re.MULTILINE)
  path = os.path.join(folder, 'study.html')
  _write(
      path,
      '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
      f'content="width=device-width,initial-scale=1"><title>'
      f'{html.escape(title[1]) if title else "Study"}</title><style>{_STYLE}</style>'
      f'<body>{body}</body></html>\n',
  )
  return path


def beside(
    planned: Sequence[summary.Planned],
    made: Mapping[str, Mapping[str, Any]],
    published: Mapping[str, Mapping[str, Any]],
) -> str:
  """Returns a table of a repeat beside the published results, of cells that both have.

  A cell agrees if either final score lies within the other's interval.
  """
  here, there = summary.make_cells(planned, made), summary.make_cells(planned, published)
  rows, number = [], 0
  for group, cell in here.items():
    of_both = cell, there[group]
    ours, theirs = (one.estimate('final') for one in of_both)
    if ours is None or theirs is None:
      continue
    agrees = theirs.covers(ours.value) or ours.covers(theirs.value)
    number += agrees
    shown = [_estimate(one, name) for name in ('collapsed', 'final') for one in of_both]
    rows.append([group, *shown, 'yes' if agrees else 'no'])
  titles = ('cell', 'collapsed', 'published', 'final', 'published', 'agrees')
  return f'{_table(titles, rows)}\n\n{number} of {len(rows)} cells agree with the published ones.'


def _write(path: str, text: str) -> None:
  os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
  with open(path + '.part', 'w', encoding='utf-8') as file:
    file.write(text)
  os.replace(path + '.part', path)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [titles, ['---', *['--:'] * (len(titles) - 1)], *rows]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def _estimate(cell: summary.Cell, measure: str) -> str:
  """Returns a measure with its interval; of collapse also the count."""
  made = cell.estimate(measure)
  if made is None:
    return NOTHING if not cell.num_runs else '–'
  if measure == 'collapsed':
    return f'{int(cell.values(measure).sum())} of {cell.num_runs}{_interval(made)}'
  return _shown(made)


def _middle(cell: summary.Cell, measure: str) -> str:
  values = cell.values(measure)
  return _decimal(float(statistics.iqm(values))) if len(values) else '–'


def _shown(value: statistics.Estimate | float) -> str:
  if isinstance(value, statistics.Estimate):
    return f'{_decimal(value.value)}{_interval(value)}'
  return '<.001' if value < 0.001 else _decimal(value)


def _interval(estimate: statistics.Estimate) -> str:
  if estimate.low is None or estimate.high is None:
    return ''
  return f' [{_decimal(estimate.low)}, {_decimal(estimate.high)}]'


def _decimal(value: float) -> str:
  """Returns three digits, as .527, 1.04 or 12.3; small numbers as <.001, large ones as 2.1e+05."""
  if 0 < value < 0.001:
    return '<.001'
  if abs(value) >= 1000:
    return f'{value:.1e}'
  digits = 3 if abs(value) < 0.9995 else 2 if abs(value) < 9.995 else 1
  text = f'{value:.{digits}f}'
  return text.replace('0.', '.', 1) if text.lstrip('-').startswith('0.') else text


def _hint(near, known) -> str:
  return f'did you mean {" or ".join(near)}?' if near else f'there are {", ".join(sorted(known))}'
