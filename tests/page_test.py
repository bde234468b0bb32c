"""The page of a study: made from results alone, with the numbers that they give."""

import html.parser
import json
import pathlib
import re
import tempfile
from xml.etree import ElementTree

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

from research.page import figures
from research.page import markup
from research.page import page
from research.page import summary
from research.study import command
from research.study import grid
from research.study import results
from stppo_jax import config as schema
from stppo_jax.types import UserError

SEEDS = (0, 1, 2, 3, 4)
CELLS = {
    'ppo': {'algorithm.variant': 'ppo'},
    'st_ppo': {'algorithm.variant': 'st_ppo'},
    'st_ppo.step': {'algorithm.variant': 'st_ppo', 'algorithm.divisor': 'paper'},
}


def rows(cell, seed):
  """metrics.jsonl of a run of four updates: ppo loses all but with seed 4, the others rise."""
  falls = cell == 'ppo' and seed != 4
  scores = (0.4, 0.6, 0.0, 0.0, 0.0) if falls else (0.4, 0.5, 0.6, 0.6, 0.6 + 0.01 * seed)
  made = []
  for n, score in enumerate(scores):
    row = {'step': n, 'val-core/all/em': score, 'actor/skipped': 0}
    if n:
      row |= {
          'stppo/grad_norm': 10.0**-n,  # log10 falls on a line
          'stppo/bias_norm': 0.01,
          'actor/pg_clipfrac': 0.1,
          'stppo/applied_factor': 0.25 if n < 3 else 1.0,
          'stppo/entering_factor': 0.5,
      }
    made.append(row)
  return made


def make(tmp, cells=CELLS):
  """Planned cells and records of a study of the system and of the mechanism."""
  grids = {
      'system': grid.Grid(cells, {'harsh': {}}, seeds=SEEDS),
      'mechanism': grid.Grid(cells, {'harsh': {}}, seeds=tuple(range(64)), instrument='mechanism'),
  }
  config = schema.Config()
  config.train.updates = 4
  jobs = grid.plan(grid.Study(grids), config)
  generator = np.random.default_rng(0)
  for job in jobs:
    if job.instrument == 'system':
      record = results.of_run(job, rows(job.cell, job.seeds[0]), {'core_s': 720.0})
    else:
      top = 0.1 if job.cell == 'ppo' else 0.8
      score = np.linspace(0.4, top, 5) + generator.normal(0, 0.01, (64, 5))
      record = results.of_cell(
          job, {job.score: score, 'stppo/grad_norm': np.ones((64, 4))}, {'core_s': 1800.0}
      )
    results.append(str(tmp), record)
  planned = [
      summary.Planned(name, 'harsh', cell, 'ppo', len(grids[name].seeds))
      for name in grids
      for cell in cells
  ]
  return planned, results.of_jobs(jobs, results.read(str(tmp)))


class PageTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tmp = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.planned, cls.records = make(cls.tmp / 'results')
    cls.page = page.Page(cls.planned, cls.records)
    page.build(cls.planned, cls.records, str(cls.tmp / 'docs'))
    cls.text = (cls.tmp / 'docs/study.md').read_text(encoding='utf-8')

  def row(self, section, grid_name, cell):
    """The cells of a row of a table."""
    part = self.text.partition(f'## {section}\n')[2].partition(f'### {grid_name}, harsh')[2]
    line = re.search(rf'^\| {re.escape(cell)} \|(.*)\|$', part, re.MULTILINE)
    return [x.strip() for x in line[1].split('|')]

  def test_a_result_survives_its_file(self):
    record = self.records['system/harsh/ppo/seed_0']
    self.assertEqual(record['score'], {'steps': [0, 1, 2, 3, 4], 'values': [0.4, 0.6, 0, 0, 0]})
    self.assertEqual(record['series']['grad_norm'], [0.1, 0.01, 0.001, 0.0001])
    self.assertEqual(record['overrides'], {'algorithm.variant': 'ppo'})
    self.assertTrue(record['machine'] and 'jax' in record['versions'])

  def test_a_grid_whose_score_no_run_has_is_told(self):
    grids = {'own': grid.Grid(CELLS, {'harsh': {}}, seeds=(0,), score='val-core/all/won')}
    config = schema.Config()
    config.train.updates = 4
    job = grid.plan(grid.Study(grids), config)[0]
    with self.assertRaisesRegex(UserError, "no metric 'val-core/all/won'.*one of val-core/all/em$"):
      results.of_run(job, rows('ppo', 0), {'core_s': 1.0})

  def test_a_torn_line_is_left_out(self):
    folder = self.tmp / 'torn'
    folder.mkdir()
    whole = json.dumps(self.records['system/harsh/ppo/seed_0'])
    (folder / 'system.jsonl').write_text(whole + '\n' + whole[:50], encoding='utf-8')
    self.assertLen(results.read(str(folder)), 1)

  def test_the_table_of_outcomes_has_the_numbers(self):
    # Final of ppo: 0, 0, 0, 0, .6 + .04 / 3; without the extremes 0. Four of five collapse.
    runs, collapsed, final, best, *_ = self.row('Outcome', 'system', 'ppo')
    self.assertEqual((runs, collapsed[:6]), ('5', '4 of 5'))
    self.assertStartsWith(final, '.000 [')
    self.assertStartsWith(best, '.600 [')
    runs, collapsed, final, *_, improvement, p_final, p_collapsed = self.row(
        'Outcome', 'system', 'st_ppo'
    )
    self.assertEqual(collapsed, '0 of 5 [.000, .522]')
    self.assertStartsWith(final, '.607 [')  # (.6 + .6 + .6 + .01 s) / 3 for s = 1, 2, 3
    # Of 25 pairs one is a tie and four are losses, those with the run of ppo that holds.
    self.assertStartsWith(improvement, '.820 [')
    # Fisher of 4 of 5 against 0 of 5: (5 + 5) / 210 = .0476; twice by Holm.
    self.assertEqual(p_collapsed, '.095')
    self.assertGreater(float(p_final), 0.05)
    p_on_the_mechanism = self.row('Outcome', 'mechanism', 'st_ppo')[-2:]
    self.assertEqual(p_on_the_mechanism, ['<.001', '<.001'])

  def test_p_values_count_cells_that_have_not_run(self):
    def p_of(cells):
      return page.Page(cells, self.records)._compared('system/harsh/st_ppo', '').p_final

    more = [summary.Planned('system', 'harsh', f'later_{i}', 'ppo', 5) for i in range(2)]
    run = len({cell.name for cell in self.planned}) - 1  # besides the baseline
    self.assertAlmostEqual(p_of([*self.planned, *more]) / p_of(self.planned), (run + 2) / run)

  def test_a_verdict_on_two_cells_counts_all_cells(self):
    plain = self.page._compared('system/harsh/st_ppo', 'ppo')
    corrected = self.page._corrected('system/harsh/st_ppo', 'ppo')
    self.assertBetween(plain.p_final, 0.01, 0.5)
    self.assertAlmostEqual(corrected.p_final, 2 * plain.p_final)
    self.assertAlmostEqual(corrected.p_collapsed, 2 * plain.p_collapsed)

  def test_a_cell_of_the_mechanism_ends_where_a_run_does(self):
    """After three skipped steps in a row, however many updates they are in."""
    job = grid.plan(
        grid.Study({'m': grid.Grid(CELLS, seeds=(0, 1), instrument='mechanism')}), schema.Config()
    )[0]
    skipped = np.array([[0, 2, 2], [1, 2, 3]])
    metrics = {job.score: np.full((2, 4), 0.5), 'mechanism/nonfinite': skipped}
    made = results.of_cell(job, metrics, {})['measures']
    self.assertEqual((made['collapsed'], made['final']), ([0, 1], [0.5, 0]))
    # Trapezoids of .5 .5 .5 .5, and of .5 .5 .5 0: the rest of the dead run counts as 0.
    np.testing.assert_allclose(made['auc'], [0.5, 1.25 / 3], rtol=1e-3)

  def test_the_table_of_the_division(self):
    # On entry a half; of the step two of four updates at a quarter, the others at 1.
    self.assertEqual(
        self.row('What the division did', 'system', 'st_ppo.step')[2:],
        ['.500', '.625', '.500', '.500'],
    )
    self.assertNotIn('| ppo |', self.text.partition('## What the')[2].partition('## Diag')[0])

  def test_cost_is_the_sum_of_the_runs(self):
    self.assertIn('207 of 207 planned runs are done, in 4.5 core-hours', self.text)
    self.assertRegex(self.text, r'\| system \| 15 \| 3.00 \|')  # 15 runs of .2 hours

  @parameterized.parameters(
      ('{{system/harsh/ppo collapsed}}', r'^4 of 5 \[\.284, \.995\]$'),
      ('{{system/harsh/ppo runs}} runs', r'^5 runs$'),
      ('{{system/harsh/st_ppo clip}}', r'^\.100 \[\.100, \.100\]$'),
      ('{{system/harsh/st_ppo improvement}}', r'^\.820 \['),
      ('{{system/harsh/st_ppo vs st_ppo.step improvement}}', r'^\.500 \['),
      ('{{mechanism/harsh/st_ppo p_final}}', '^<.001$'),
      ('{{system core_hours}} of {{study core_hours}}', r'^3\.0 of 4\.5$'),
      ('{{verdict st_ppo on mechanism/harsh system/harsh}}', '^held$'),
      ('{{verdict st_ppo vs st_ppo.step on mechanism/harsh system/harsh}}', '^not decided$'),
      ('{{verdict st_ppo on mechanism/harsh}}', '^held on the toy task$'),
  )
  def test_a_placeholder_becomes_its_number(self, text, expected):
    self.assertRegex(self.page.markdown(text), expected)

  @parameterized.parameters(
      ('{{system/harsh/sppo final}}', 'no such cell; did you mean system/harsh/ppo'),
      ('{{verdict sppo on mechanism/harsh system/harsh}}', 'no such cell; did you mean'),
      ('{{verdict ppo on mechanism/harsh system/calm}}', 'no such cell'),
      ('{{system/harsh/ppo finale}}', "no measure 'finale'; did you mean final"),
      ('{{sistem core_hours}}', 'no such grid; give one of mechanism, study, system'),
  )
  def test_a_placeholder_that_means_nothing_is_an_error(self, text, words):
    with self.assertRaisesRegex(UserError, words):
      self.page.markdown(text)

  def test_a_study_without_runs_has_a_page(self):
    empty = page.Page(self.planned, {})
    self.assertIn('0 of 207 planned runs', empty.markdown())
    self.assertEqual(empty.markdown('{{system/harsh/ppo final}}'), page.NOTHING)
    verdict = '{{verdict st_ppo on mechanism/harsh system/harsh}}'
    self.assertEqual(empty.markdown(verdict), 'not tested here')

  def test_a_repeat_beside_the_published_results(self):
    agrees = page.beside(self.planned, self.records, self.records)
    self.assertIn('6 of 6 cells agree', agrees)
    # A repeat in which ppo does not fall, and a publication that lacks a cell.
    made = {
        name: record | {'measures': record['measures'] | {'collapsed': 0.0, 'final': 0.9}}
        if record['cell'] == 'ppo' and record['grid'] == 'system'
        else record
        for name, record in self.records.items()
    }
    published = {
        name: record for name, record in self.records.items() if record['cell'] != 'st_ppo.step'
    }
    text = page.beside(self.planned, made, published)
    self.assertIn('3 of 4 cells agree', text)
    row = next(line for line in text.splitlines() if line.startswith('| system/harsh/ppo '))
    columns = [column.strip() for column in row.strip('|').split('|')]
    self.assertEqual(columns[1][:6], '0 of 5')
    self.assertEqual(columns[2][:6], '4 of 5')
    self.assertEqual(columns[3][:4], '.900')
    self.assertEqual(columns[5], 'no')

  def test_every_cell_is_in_every_figure(self):
    for path in (self.tmp / 'docs/study_figures').iterdir():
      titles = [x.text for x in ElementTree.parse(path).iter() if x.tag.endswith('title')]
      names = [title.partition(':')[0].split('/')[-1] for title in titles]
      self.assertEqual(names, list(CELLS), path.name)
      self.assertIn(f'(study_figures/{path.name})', self.text)

  def test_the_trend_and_its_fit_are_drawn(self):
    (panel,) = [
        panel
        for path, panels in self.page_drawings().items()
        for panel in panels
        if path == 'study_figures/system_harsh_norms.svg' and 'harsh/st_ppo:' in panel
    ]
    self.assertIn('‖g‖ R² 1.00', panel)  # 10^-n is a line in its logarithm

  def page_drawings(self):
    self.page.markdown('{{figures}}')
    return self.page.drawings()

  def test_all_runs_of_the_system_are_drawn(self):
    cell = self.page.cells['system/harsh/ppo']
    panel, *_ = figures.panels(figures.FIGURES[0], [cell])
    thin = re.search(r'<path d="([^"]*)"[^>]*stroke-opacity', panel)[1]
    self.assertEqual(thin.count('M'), len(SEEDS))

  def test_the_html_is_whole_and_holds_the_same_numbers(self):
    text = (self.tmp / 'docs/study.html').read_text(encoding='utf-8')
    open_tags = []

    class Checker(html.parser.HTMLParser):

      def handle_starttag(self, tag, attributes):
        if tag not in ('meta', 'path', 'rect', 'img', 'wbr'):
          open_tags.append(tag)

      def handle_endtag(self, tag):
        if tag not in ('path', 'rect', 'polygon'):
          assert open_tags.pop() == tag, tag
        elif tag in open_tags:
          open_tags.remove(tag)

    Checker().feed(text)
    self.assertEmpty(open_tags)
    self.assertIn('0 of 5 <span class="interval">[.000, .522]</span>', text)
    self.assertNotIn('{{', text)
    self.assertEqual(text.count('<svg '), sum(map(len, self.page_drawings().values())))


class CommittedPageTest(absltest.TestCase):

  @pytest.mark.slow
  def test_the_committed_page_is_that_of_the_committed_results(self):
    root = pathlib.Path(__file__).parent.parent
    study, config = grid.load(str(root / 'research/study_stability.py'))
    jobs = grid.plan(study, config)
    records = results.of_jobs(jobs, results.read(str(root / study.results)))
    made = page.Page(command.planned_cells(study, jobs), records)
    text = made.markdown(page.read_template(str(root / study.claims)))
    self.assertEqual((root / 'docs/study.md').read_text(encoding='utf-8'), text)
    self.assertNotIn(page.NOTHING, text)


class VerdictTest(parameterized.TestCase):

  def compared(self, value, low, high, p):
    return summary.Comparison(summary.statistics.Estimate(value, low, high), p, 1.0)

  @parameterized.parameters(
      ((0.8, 0.7, 0.9, 0.01), (0.6, 0.2, 0.9, 1.0), 'held'),
      ((0.8, 0.7, 0.9, 0.01), (0.4, 0.2, 0.9, 1.0), 'not decided'),  # the system points elsewhere
      ((0.2, 0.1, 0.3, 0.01), (0.6, 0.2, 0.9, 1.0), 'did not hold'),
      ((0.51, 0.45, 0.57, 0.8), (0.6, 0.2, 0.9, 1.0), 'did not hold'),  # no effect to speak of
      ((0.6, 0.45, 0.7, 0.2), (0.6, 0.2, 0.9, 1.0), 'not decided'),
  )
  def test_it_follows_the_protocol(self, mechanism, system, expected):
    made = summary.verdict(self.compared(*mechanism), self.compared(*system))
    self.assertEqual(made, expected)

  def test_a_verdict_without_the_system_names_the_toy_task(self):
    better, no_effect = (0.8, 0.7, 0.9, 0.01), (0.51, 0.45, 0.57, 0.8)
    self.assertEqual(summary.toy_verdict(self.compared(*better)), 'held on the toy task')
    self.assertEqual(summary.toy_verdict(self.compared(*no_effect)), 'did not hold on the toy task')


class MarkupTest(parameterized.TestCase):

  @parameterized.parameters(
      ('# A **b**', '<h1 id="a-b">A <strong>b</strong></h1>'),
      ('one\ntwo', '<p>one two</p>'),
      ('- a\n- b\n  more', '<ul><li>a</li><li>b more</li></ul>'),
      ('1. a\n2. b', '<ol><li>a</li><li>b</li></ol>'),
      ('a < b `<x>`', '<p>a &lt; b <code>&lt;x&gt;</code></p>'),
      ('[t](u.md) *e*', '<p><a href="u.md">t</a> <em>e</em></p>'),
      ('.5 [<.001, 1.2e+03]', '<p>.5 <span class="interval">[&lt;.001, 1.2e+03]</span></p>'),
      ('[seed, 3] [3, x]', '<p>[seed, 3] [3, x]</p>'),  # no intervals
      ('```\n<a>\n```', '<pre>&lt;a&gt;</pre>'),
      ('![c](p)', 'c at p'),
  )
  def test_a_line(self, text, expected):
    self.assertEqual(markup.to_html(text, lambda caption, path: f'{caption} at {path}'), expected)

  def test_a_table(self):
    made = markup.to_html('| a | b |\n| --- | --: |\n| 1 | - |', lambda *_: '')
    self.assertEqual(made.count('<tr>'), 2)
    self.assertIn('<td class="text">1</td><td>-</td>', made)  # a column of numbers has its mark


if __name__ == '__main__':
  absltest.main()
