"""The pages of a study: results in; Markdown and figures out.

A page is a jinja2 template, so that its text and the measurements cannot disagree. A method is
named GRID/METHOD, or GRID/CONDITION/METHOD if the grid has several conditions. A template has:

  {{ 'toy_reuse/st_ppo' | final }}                       a measure with its interval: .52 [.47, .58]
  {{ 'system_stale/ppo' | score_at(8) }}                 mean and range of a score: .5 (.4 to .6)
  {{ 'toy_reuse/st_ppo' | improvement }}                 P(better than the baseline)
  {{ 'toy_reuse/st_ppo' | p_final('turn_ppo') }}         compared with another method
  {{ verdict('st_ppo', 'toy_reuse', 'system_harsh') }}   by the protocol
  {{ verdict('st_ppo', 'toy_reuse', than='turn_ppo') }}  without the system
  {{ core_hours() }}  {{ progress() }}  {{ outcome() }}  {{ diagnostics() }}  {{ division() }}
  {{ figures() }}  {{ cost() }}
  {% if grid_is_complete('toy_reuse') %} .. {% endif %}  a section that needs a run of each method
  {% if has_runs('toy_reuse/ppo') %} .. {% endif %}

Measures are those of study/measures.py, and `runs`. Comparisons are `improvement`, `p_final` and
`p_collapsed`. p-values against the baseline are corrected over the planned methods of the grid and
condition, and so is every verdict. p-values against other methods are not corrected.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import difflib
import functools
import os
import pathlib
from typing import Any

import jinja2

from research import comparisons
from research.page import figures
from research.page import summary
from research.study import grid as grid_lib
from research.study import measures
from research.study import results
from stppo_jax.algorithms import variants
from stppo_jax.evaluation import statistics
from stppo_jax.types import UserError

NO_RUNS = '(no runs yet)'
FIGURES = 'study_figures'
TEMPLATE = """# Study

{{ progress() }}

## Outcome

{{ outcome() }}

## What the division did

{{ division() }}

## Diagnostics

{{ diagnostics() }}

## Figures

{{ figures() }}

## Cost

{{ cost() }}
"""
_COMPARISONS = ('improvement', 'p_final', 'p_collapsed')
_OUTCOME = (
    'Collapsed: share of runs (Clopper-Pearson). Final, best, area: interquartile means of the '
    'final success, the best success and the area under the curve (bootstrap). P(better): '
    'probability that a run is better than a run of the baseline. Intervals are 95%. The p-values '
    '(Mann-Whitney of final, Fisher of collapse) are corrected by Holm over the planned methods of '
    'the grid and condition.'
)
_DIVISION = (
    'On entry: factor by which the division changed the norm of the gradient that enters the '
    'optimizer. On the step: norm of the applied step over the norm of the step that the same '
    'optimizer state makes of the undivided gradient. Both are means over updates. Changed: share '
    'of updates in which the step changed by more than 1%. Twofold: by more than 2 times, up or '
    'down. –: not measured.'
)
_DIAGNOSTICS_NOTE = (
    'Interquartile means over runs, of means over updates. Step: norm of the parameter change per '
    'optimizer step. Path: sum of the mean steps of the updates. ESS: effective share of the '
    'episodes, by the ratio of the trained to the sampling policy. –: not measured.'
)
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


class Page:
  """The text of a page, from planned jobs and their records."""

  def __init__(
      self,
      study: grid_lib.Study,
      jobs: Iterable[grid_lib.Job],
      records: Mapping[str, Mapping[str, Any]],
  ):
    self.study = study
    self.methods = summary.make_methods(study, jobs, records)
    self._records = [record for one in self.methods.values() for record in one.records]
    self._conditions = summary.by_condition(self.methods)

  def markdown(self, template: str = TEMPLATE) -> str:
    """Returns the text of a template; a UserError names a measure or method that is unknown."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters['runs'] = lambda name: str(self.find(name).num_runs)
    for measure in measures.NAMES:
      environment.filters[measure] = functools.partial(self._measure, measure)
    environment.filters['score_at'] = self._score_at
    for comparison in _COMPARISONS:
      environment.filters[comparison] = functools.partial(self._compared, comparison)
    parts = (self.progress, self.outcome, self.diagnostics, self.division, self.figures, self.cost)
    environment.globals.update({part.__name__: part for part in parts})
    environment.globals.update(
        verdict=self.verdict,
        core_hours=self.core_hours,
        grid_is_complete=self.grid_is_complete,
        has_runs=self.has_runs,
    )
    try:
      return environment.from_string(template).render()
    except jinja2.TemplateError as error:
      raise UserError(f'the template of the page: {error}') from error

  def find(self, name: str) -> summary.MethodRuns:
    """Returns the runs of GRID/CONDITION/METHOD; the condition is optional if there is one only."""
    group = self._full_name(name)
    if group in self.methods:
      return self.methods[group]
    near = difflib.get_close_matches(name, self.methods, n=3)
    raise UserError(f'{name!r} on the page: the study has no such method; near are {near}')

  def has_runs(self, name: str) -> bool:
    """Whether a method is on the page and has a run."""
    group = self._full_name(name)
    return group in self.methods and self.methods[group].num_runs > 0

  def _full_name(self, name: str) -> str:
    """Adds the condition to GRID/METHOD if the grid has one condition."""
    grid, _, method = name.partition('/')
    conditions = [condition for own_grid, condition in self._conditions if own_grid == grid]
    if name not in self.methods and len(conditions) == 1:
      return f'{grid}/{conditions[0]}/{method}'
    return name

  def verdict(self, method: str, toy: str, system: str = '', than: str = '') -> str:
    """Returns the verdict on the claim that a method is better than the baseline, or `than`.

    Args:
      method: of both grids.
      toy: a grid of the toy task.
      system: a grid of the system; without it the verdict is on the toy task.
      than: another method.
    """
    on_toy = self._corrected(f'{toy}/{method}', than)
    if not system:
      return summary.toy_verdict(on_toy)
    return summary.verdict(on_toy, self._corrected(f'{system}/{method}', than))

  def grid_is_complete(self, grid: str) -> bool:
    """Whether a grid is on the page with a run of each method."""
    methods = [one for one in self.methods.values() if one.grid == grid]
    return bool(methods) and all(one.num_runs for one in methods)

  def core_hours(self) -> str:
    """Returns the processor time of the runs on the page."""
    return f'{summary.core_hours(self._records):.1f}'

  def progress(self) -> str:
    """Returns a sentence with the number of runs."""
    planned = sum(one.num_planned for one in self.methods.values())
    done = sum(one.num_runs for one in self.methods.values())
    hours = self.core_hours()
    return f'{done:,} of {planned:,} planned runs are done, in {hours} core-hours.'

  def outcome(self) -> str:
    """Returns the tables of scores and tests."""
    titles = ['runs', 'collapsed', 'final', 'best', 'area', 'P(better)', 'p final', 'p collapse']

    def row(one: summary.MethodRuns) -> list[str]:
      estimates = [_estimate(one, name) for name in ('collapsed', 'final', 'best', 'auc')]
      comparison = self._against_baseline(one)
      if comparison is None:
        compared = ['–', '–', '–']
      else:
        compared = [_shown(value) for value in comparison]
      return [str(one.num_runs), *estimates, *compared]

    return self._tables(_OUTCOME, titles, row)

  def diagnostics(self) -> str:
    """Returns the tables of what the runs measured besides scores."""
    return self._tables(
        _DIAGNOSTICS_NOTE,
        list(_DIAGNOSTICS.values()),
        lambda one: [_middle(one, name) for name in _DIAGNOSTICS],
    )

  def division(self) -> str:
    """Returns the tables of how the division changed gradients and steps."""
    titles = ['divisor', 'divides', 'on entry', 'on the step', 'changed', 'twofold']
    measured = ('entering', 'factor', 'factor_changed', 'factor_twofold')

    def row(one: summary.MethodRuns) -> list[str]:
      divisor = _variant_column(one, 'divisor')
      if divisor in ('none', '?'):
        return []
      return [divisor, _variant_column(one, 'divide'), *(_middle(one, name) for name in measured)]

    return self._tables(_DIVISION, titles, row)

  def figures(self) -> str:
    """Returns the links to the figures."""
    parts = ['Thick: interquartile means. Thin: single runs. Toy task: a band of 80% of the runs.']
    for (grid, condition), methods in self.drawn().items():
      names = ', '.join(f'`{one.method}`' for one in methods)
      parts.append(f'### {grid}, {condition}')
      parts.append(f'![{grid}, {condition}: {names}]({FIGURES}/{grid}_{condition}.png)')
    return '\n\n'.join(parts)

  def drawn(self) -> dict[tuple[str, str], list[summary.MethodRuns]]:
    """Returns {(grid, condition): methods} of the figures."""
    figure_methods = {}
    for (grid, condition), methods in self._conditions.items():
      names = self.study.grids[grid].drawn
      available = [one for one in methods if one.num_runs]
      if names is None:
        chosen = available[: figures.DEFAULT_NUMBER]
      else:
        by_name = {one.method: one for one in available}
        chosen = [by_name[name] for name in names if name in by_name]
      if chosen:
        figure_methods[grid, condition] = chosen
    return figure_methods

  def cost(self) -> str:
    """Returns the table of processor time, machines and versions."""
    grids: dict[str, list[Mapping[str, Any]]] = {}
    for record in self._records:
      grids.setdefault(record['grid'], []).append(record)
    rows = []
    for grid, records in grids.items():
      runs = sum(len(record['seeds']) for record in records)
      machines = '; '.join(sorted({record['machine'] for record in records}))
      versions = '; '.join(sorted({record['versions'] for record in records}))
      commits = sorted({record['commit'] for record in records})
      hours = f'{summary.core_hours(records):.2f}'
      rows.append([grid, str(runs), hours, machines, versions, ', '.join(commits)])
    titles = ['grid', 'runs', 'core-hours', 'machine', 'versions', 'commits']
    return _table(titles, rows, num_texts=3) if rows else NO_RUNS

  def _measure(self, measure: str, name: str) -> str:
    return _estimate(self.find(name), measure)

  def _score_at(self, name: str, step: int) -> str:
    """Returns the mean over runs of the held-out score at an update, with the range."""
    curve = self.find(name).curve('score')
    if curve is None or step not in curve.steps:
      return NO_RUNS
    values = curve.runs[:, list(curve.steps).index(step)]
    low, high = float(values.min()), float(values.max())
    shown = decimal(float(values.mean()))
    return shown if low == high else f'{shown} ({decimal(low)} to {decimal(high)})'

  def _compared(self, comparison: str, name: str, than: str = '') -> str:
    compared = self._comparison(name, than)
    return NO_RUNS if compared is None else _shown(getattr(compared, comparison))

  def _comparison(self, name: str, than: str) -> summary.Comparison | None:
    """Returns the comparison with `than`, uncorrected, or with the baseline, corrected."""
    one = self.find(name)
    if not than:
      return self._against_baseline(one)
    return summary.compare(one, self.find(f'{one.grid}/{one.condition}/{than}'))

  def _against_baseline(self, one: summary.MethodRuns) -> summary.Comparison | None:
    key = one.grid, one.condition
    return self._baseline_comparisons[key].get(one.group)

  @functools.cached_property
  def _baseline_comparisons(self) -> dict[tuple[str, str], dict[str, summary.Comparison]]:
    return {
        key: summary.compare_with_baseline(methods) for key, methods in self._conditions.items()
    }

  def _corrected(self, name: str, than: str) -> summary.Comparison | None:
    """Returns a comparison with corrected p-values: with `than` by Bonferroni's method."""
    compared = self._comparison(name, than)
    if compared is None or not than:
      return compared
    one = self.find(name)
    number = len(self._conditions[one.grid, one.condition]) - 1
    return compared._replace(
        p_final=min(1.0, number * compared.p_final),
        p_collapsed=min(1.0, number * compared.p_collapsed),
    )

  def _tables(
      self, note: str, titles: Sequence[str], row: Callable[[summary.MethodRuns], list[str]]
  ) -> str:
    """Returns a table per grid and condition after a note. An empty row is left out."""
    parts = [note]
    for (grid, condition), methods in self._conditions.items():
      rows = []
      for one in methods:
        columns = row(one) if one.num_runs else []
        if columns:
          rows.append([one.method, *columns])
      if rows:
        parts += [f'### {grid}, {condition}', _table(['method', *titles], rows)]
    return '\n\n'.join(parts) if len(parts) > 1 else NO_RUNS


def load(path: str, workdir: str) -> tuple[Page, dict[str, str]]:
  """Returns the page of an experiment file FILE[:MODE] and its texts {name of a file: text}."""
  study, config = grid_lib.load(path)
  jobs = grid_lib.plan(study, config)
  records = results.planned(jobs, results.read(results.folder(study.results, workdir)))
  page = Page(study, jobs, records)
  templates = read_templates(study.templates)
  return page, {name: page.markdown(template) for name, template in templates.items()}


def write_pages(path: str, workdir: str) -> str:
  """Writes the pages and figures of an experiment file; returns the path of the first page."""
  page, texts = load(path, workdir)
  folder = page.study.page or workdir
  figure_folder = os.path.join(folder, FIGURES)
  os.makedirs(figure_folder, exist_ok=True)
  for (grid, condition), methods in page.drawn().items():
    figures.draw(os.path.join(figure_folder, f'{grid}_{condition}.png'), methods)
  if page.study.draw is not None:
    page.study.draw(page.methods, figure_folder)
  for name, text in texts.items():
    pathlib.Path(folder, name).write_text(text, encoding='utf-8')
  return os.path.join(folder, next(iter(texts)))


def read_templates(folder: str) -> dict[str, str]:
  """Returns {name of the page: template} of a study; `TEMPLATE` if it has none."""
  if not folder:
    return {'study.md': TEMPLATE}
  paths = sorted(pathlib.Path(folder).glob('*.md'))
  if not paths:
    raise UserError(f'study.templates={folder!r}: the folder has no file *.md')
  return {path.name: path.read_text(encoding='utf-8') for path in paths}


def repeat_table(
    study: grid_lib.Study,
    jobs: Sequence[grid_lib.Job],
    records: Mapping[str, Mapping[str, Any]],
    published: Mapping[str, Mapping[str, Any]],
) -> str:
  """Returns a table of a repeat next to the published results, of methods that both have.

  A method agrees if either final score lies within the other's interval.
  """
  repeated = summary.make_methods(study, jobs, records)
  originals = summary.make_methods(study, jobs, published)
  rows = []
  number = 0
  for group, one in repeated.items():
    original = originals.get(group)
    final = one.estimate('final')
    original_final = original.estimate('final') if original is not None else None
    if original is None or final is None or original_final is None:
      continue
    agrees = original_final.covers(final.value) or final.covers(original_final.value)
    number += agrees
    shown = [_estimate(part, name) for name in ('collapsed', 'final') for part in (one, original)]
    rows.append([group, *shown, 'yes' if agrees else 'no'])
  titles = ['method', 'collapsed', 'published', 'final', 'published', 'agrees']
  return f'{_table(titles, rows)}\n\n{number} of {len(rows)} methods agree with the published ones.'


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int = 0) -> str:
  """Returns a table whose first column and last `num_texts` columns are left-aligned."""
  marks = ['---', *['--:'] * (len(titles) - 1 - num_texts), *['---'] * num_texts]
  return '\n'.join('| ' + ' | '.join(row) + ' |' for row in [titles, marks, *rows])


def _variant_column(one: summary.MethodRuns, name: str) -> str:
  overrides = one.records[0]['overrides']
  row = variants.VARIANTS.get(overrides.get('algorithm.variant', ''))
  return str(overrides.get(f'algorithm.{name}') or getattr(row, name, '?'))


def _estimate(one: summary.MethodRuns, measure: str) -> str:
  """Returns a measure with its interval; `collapsed` also has the count."""
  estimate = one.estimate(measure)
  if estimate is None:
    return '–' if one.num_runs else NO_RUNS
  if measure == 'collapsed':
    return f'{int(one.values(measure).sum())} of {one.num_runs}{_interval(estimate)}'
  return _shown(estimate)


def _middle(one: summary.MethodRuns, measure: str) -> str:
  values = one.values(measure)
  return decimal(float(comparisons.iqm(values))) if len(values) else '–'


def _shown(value: statistics.Estimate | float) -> str:
  if isinstance(value, statistics.Estimate):
    return f'{decimal(value.value)}{_interval(value)}'
  return '<.001' if value < 0.001 else decimal(value)


def _interval(estimate: statistics.Estimate) -> str:
  if estimate.low is None or estimate.high is None:
    return ''
  return f' [{decimal(estimate.low)}, {decimal(estimate.high)}]'


def decimal(value: float) -> str:
  """Returns three digits, as .527, 1.04 or 12.3; small numbers as <.001, large ones as 2.1e+05."""
  if 0 < value < 0.001:
    return '<.001'
  if abs(value) >= 1000:
    return f'{value:.1e}'
  digits = 1
  if abs(value) < 9.995:
    digits = 2
  if abs(value) < 0.9995:
    digits = 3
  text = f'{value:.{digits}f}'
  return text.replace('0.', '.', 1) if text.lstrip('-').startswith('0.') else text
