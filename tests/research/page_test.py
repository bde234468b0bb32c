"""The page of a study: made from results alone, with the numbers that they give."""

import json
import pathlib
import re
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

from research.page import build
from research.page import summary
from research.study import grid
from research.study import results
from stppo_jax import config as schema
from stppo_jax.evaluation import statistics
from stppo_jax.types import UserError

SEEDS = (0, 1, 2, 3, 4)
METHODS = {
    'ppo': {'algorithm.variant': 'ppo'},
    'st_ppo': {'algorithm.variant': 'st_ppo'},
    'st_ppo.step': {'algorithm.variant': 'st_ppo', 'algorithm.divisor': 'paper'},
}


def rows(method, seed):
  """metrics.jsonl of a run of four updates: ppo loses all but with seed 4, the others rise."""
  falls = method == 'ppo' and seed != 4
  scores = (0.4, 0.6, 0.0, 0.0, 0.0) if falls else (0.4, 0.5, 0.6, 0.6, 0.6 + 0.01 * seed)
  made = []
  for n, score in enumerate(scores):
    row = {'step': n, 'val-core/all/em': score, 'actor/skipped': 0}
    if n:
      row |= {
          'stppo/grad_norm': 10.0**-n,
          'stppo/bias_norm': 0.01,
          'actor/pg_clipfrac': 0.1,
          'stppo/applied_factor': 0.25 if n < 3 else 1.0,
          'stppo/grad_factor': 0.5,
      }
    made.append(row)
  return made


def make_study(folder):
  """A small study of the system and the toy task, its jobs, and records that survived a file."""
  base = {'train.updates': 4}
  study = grid.Study({
      'system': grid.Grid(METHODS, {'harsh': {}}, base, seeds=SEEDS),
      'toy': grid.Grid(METHODS, {'harsh': {}}, base, seeds=tuple(range(64)), task='toy'),
  })  # fmt: skip
  jobs = grid.plan(study, schema.Config())
  generator = np.random.default_rng(0)
  for job in jobs:
    if job.task == 'system':
      record = results.system_record(job, rows(job.method, job.seeds[0]), {'core_s': 720.0})
    else:
      top = 0.1 if job.method == 'ppo' else 0.8
      score = np.linspace(0.4, top, 5) + generator.normal(0, 0.01, (64, 5))
      record = results.toy_record(
          job, {job.score: score, 'stppo/grad_norm': np.ones((64, 4))}, {'core_s': 1800.0}
      )
    results.append(folder, record)
  return study, jobs, results.planned(jobs, results.read(folder))


ROOT = pathlib.Path(__file__).parents[2]


class PageTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tmp = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.study, cls.jobs, cls.records = make_study(cls.tmp)
    cls.page = build.Page(cls.study, cls.jobs, cls.records)
    cls.text = cls.page.markdown()

  def row(self, section, grid_name, method):
    """The columns of a row of a table."""
    part = self.text.partition(f'## {section}\n')[2].partition(f'### {grid_name}, harsh')[2]
    line = re.search(rf'^\| {re.escape(method)} \|(.*)\|$', part, re.MULTILINE)
    return [x.strip() for x in line[1].split('|')]

  def test_outcomes_by_hand(self):
    # Final of ppo: 0, 0, 0, 0, .6 + .04 / 3; without the extremes 0. Four of five collapse.
    runs, collapsed, final, best, *_ = self.row('Outcome', 'system', 'ppo')
    self.assertEqual((runs, collapsed[:6]), ('5', '4 of 5'))
    self.assertStartsWith(final, '.000 [')
    self.assertStartsWith(best, '.600 [')
    columns = self.row('Outcome', 'system', 'st_ppo')
    runs, collapsed, final, *_, improvement, p_final, p_collapsed = columns
    self.assertEqual(collapsed, '0 of 5 [.000, .522]')
    self.assertStartsWith(final, '.607 [')  # (.6 + .6 + .6 + .01 s) / 3 for s = 1, 2, 3
    # Of 25 pairs one is a tie and four are losses, those with the run of ppo that holds.
    self.assertStartsWith(improvement, '.820 [')
    # Fisher of 4 of 5 against 0 of 5: (5 + 5) / 210 = .0476; twice by Holm.
    self.assertEqual(p_collapsed, '.095')
    self.assertGreater(float(p_final), 0.05)
    self.assertEqual(self.row('Outcome', 'toy', 'st_ppo')[-2:], ['<.001', '<.001'])

  def test_division_by_hand(self):
    # On entry a half; of the step two of four updates at a quarter, the others at 1.
    row = self.row('What the division did', 'system', 'st_ppo.step')
    self.assertEqual(row[2:], ['.500', '.625', '.500', '.500'])
    self.assertNotIn('| ppo |', self.text.partition('## What the')[2].partition('## Diag')[0])

  def test_cost_is_the_sum_of_the_runs(self):
    self.assertIn('207 of 207 planned runs are done, in 4.5 core-hours', self.text)
    self.assertRegex(self.text, r'\| system \| 15 \| 3.00 \|')  # 15 runs of .2 hours

  def test_p_values_count_methods_without_runs(self):
    def p_of(methods):
      return summary.compare_with_baseline(methods)['system/harsh/st_ppo'].p_final

    methods = [one for one in self.page.methods.values() if one.grid == 'system']
    later = [summary.MethodRuns('system', 'harsh', f'later_{i}', 'ppo', 5, []) for i in range(2)]
    self.assertAlmostEqual(p_of([*methods, *later]) / p_of(methods), 4 / 2)

  def test_verdict_on_two_methods_counts_all_methods(self):
    plain = self.page._comparison('system/st_ppo', 'ppo')
    corrected = self.page._corrected('system/st_ppo', 'ppo')
    self.assertBetween(plain.p_final, 0.01, 0.5)
    self.assertAlmostEqual(corrected.p_final, 2 * plain.p_final)
    self.assertAlmostEqual(corrected.p_collapsed, 2 * plain.p_collapsed)

  @parameterized.parameters(
      ("{{ 'system/ppo' | collapsed }}", r'^4 of 5 \[\.284, \.995\]$'),
      ("{{ 'system/harsh/ppo' | runs }} runs", r'^5 runs$'),
      ("{{ 'system/st_ppo' | clip }}", r'^\.100 \[\.100, \.100\]$'),
      ("{{ 'system/st_ppo' | improvement }}", r'^\.820 \['),
      ("{{ 'system/st_ppo' | score_at(4) }}", r'^\.620 \(\.600 to \.640\)$'),  # .6 + .01 s
      ("{{ 'system/st_ppo' | score_at(0) }}", r'^\.400$'),
      ("{{ 'system/st_ppo' | improvement('st_ppo.step') }}", r'^\.500 \['),
      ("{{ 'toy/st_ppo' | p_final }}", '^<.001$'),
      ('{{ core_hours() }}', r'^4\.5$'),
      ("{{ verdict('st_ppo', 'toy', 'system') }}", '^held$'),
      ("{{ verdict('st_ppo', 'toy', 'system', than='st_ppo.step') }}", '^not decided$'),
      ("{{ verdict('st_ppo', 'toy') }}", '^held on the toy task$'),
  )
  def test_template(self, template, expected):
    self.assertRegex(self.page.markdown(template), expected)

  @parameterized.parameters(
      ("{{ 'system/sppo' | final }}", "'system/sppo' on the page: .*no such method.*harsh/ppo"),
      ("{{ verdict('sppo', 'toy') }}", 'no such method'),
      ("{{ 'system/ppo' | finale }}", "No filter named 'finale'"),
      ('{{ outcomes() }}', "'outcomes' is undefined"),
  )
  def test_template_error(self, template, words):
    with self.assertRaisesRegex(UserError, words):
      self.page.markdown(template)

  def test_grids_without_results_are_left_out(self):
    only_system = {name: one for name, one in self.records.items() if one['grid'] == 'system'}
    page = build.Page(self.study, self.jobs, only_system)
    self.assertIn('15 of 15 planned runs', page.markdown())
    self.assertIn('0 of 0 planned runs', build.Page(self.study, self.jobs, {}).markdown())

  def test_repeat_compared_with_published_results(self):
    args = self.study, self.jobs
    agrees = build.repeat_table(*args, self.records, self.records)
    self.assertIn('6 of 6 methods agree', agrees)
    # In the repeat ppo does not fall. A method is not published.
    repeated = dict(self.records)
    for name, record in self.records.items():
      if name.startswith('system/harsh/ppo'):
        changes = {'collapsed': 0.0, 'final': 0.9}
        repeated[name] = record | {'measures': record['measures'] | changes}
    published = {name: r for name, r in self.records.items() if r['method'] != 'st_ppo.step'}
    text = build.repeat_table(*args, repeated, published)
    self.assertIn('3 of 4 methods agree', text)
    self.assertRegex(
        text, r'\| system/harsh/ppo \| 0 of 5 .* \| 4 of 5 .* \| \.900 .* \| \.000 .* \| no \|'
    )

  def test_figures_have_a_file_and_a_link_each(self):
    with tempfile.TemporaryDirectory() as folder:
      with mock.patch.object(build, 'load', return_value=(self.page, {'study.md': self.text})):
        path = build.write_pages('study.py', folder)
      self.assertEqual(pathlib.Path(path).read_text(encoding='utf-8'), self.text)
      files = [path.name for path in pathlib.Path(folder, build.FIGURES).iterdir()]
    self.assertCountEqual(files, ['system_harsh.png', 'toy_harsh.png'])
    links = re.findall(r'\(study_figures/(.*)\)', self.text)
    self.assertCountEqual(links, files)


class ResultsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())

  def plan(self, methods, **options):
    study = grid.Study({'system': grid.Grid(methods, base={'train.updates': 4}, **options)})
    return grid.plan(study, schema.Config())

  def test_score_that_no_run_has_is_an_error(self):
    job = self.plan(METHODS, seeds=(0,), score='val-core/all/won')[0]
    with self.assertRaisesRegex(UserError, "no metric 'val-core/all/won'.*one of val-core/all/em$"):
      results.system_record(job, rows('ppo', 0), {'core_s': 1.0})

  def test_toy_run_ends_after_three_skips(self):
    study = grid.Study({'toy': grid.Grid(METHODS, seeds=(0, 1), task='toy')})
    job = grid.plan(study, schema.Config())[0]
    skipped = np.array([[0, 2, 2], [1, 2, 3]])
    metrics = {job.score: np.full((2, 4), 0.5), 'toy/nonfinite': skipped}
    made = results.toy_record(job, metrics, {})['measures']
    self.assertEqual((made['collapsed'], made['final']), ([0, 1], [0.5, 0]))
    # Trapezoids of .5 .5 .5 .5, and of .5 .5 .5 0: the rest of the dead run counts as 0.
    np.testing.assert_allclose(made['auc'], [0.5, 1.25 / 3], rtol=1e-3)

  def test_newest_record_at_the_planned_rate_counts(self):
    lines = []
    for cost, rate in enumerate((1e-4, 5e-5, 5e-5, 2e-4)):
      (job,) = self.plan({'ppo': METHODS['ppo'] | {'actor.lr': rate}}, seeds=(0,))
      record = results.system_record(job, rows('ppo', 0), {'core_s': float(cost)})
      lines.append(json.dumps(record))
    torn = lines[0][:50]
    pathlib.Path(self.folder, 'system.jsonl').write_text('\n'.join([*lines, torn]))
    jobs = self.plan({'ppo': METHODS['ppo'] | {'actor.lr': 5e-5}}, seeds=(0,))
    for choose in (results.planned, results.unchanged):
      (record,) = choose(jobs, results.read(self.folder)).values()
      self.assertEqual(record['cost']['core_s'], 2.0)

  def test_old_names_are_read(self):
    old = {
        'name': 'mechanism_stale_knobs/stale/ppo',
        'grid': 'mechanism_stale_knobs',
        'regime': 'stale',
        'cell': 'ppo',
        'instrument': 'mechanism',
        'seeds': [0, 1],
        'digest': 'x',
        'status': 'done',
        'overrides': {'mechanism.rewards': 'turn', 'model.folder': 'docs/study/model_5m'},
    }
    pathlib.Path(self.folder, 'old.jsonl').write_text(json.dumps(old))
    (record,) = results.read(self.folder)
    self.assertEqual(record['name'], 'toy_stale_sweep/stale/ppo')
    self.assertEqual((record['grid'], record['method']), ('toy_stale_sweep', 'ppo'))
    self.assertEqual((record['condition'], record['task']), ('stale', 'toy'))
    self.assertEqual(
        record['overrides'], {'toy.rewards': 'turn', 'model.folder': 'research/model_5m'}
    )


class CommittedPageTest(parameterized.TestCase):

  @parameterized.parameters(('study_stability.py', 4), ('study_rows.py', 1))
  @pytest.mark.slow
  def test_committed_pages_are_those_of_the_committed_results(self, file, num_pages):
    _, texts = build.load(str(ROOT / 'research' / file), '')
    self.assertLen(texts, num_pages)
    for name, text in texts.items():
      self.assertEqual((ROOT / 'docs' / name).read_text(encoding='utf-8'), text, name)
      self.assertNotIn(build.NO_RUNS, text, name)

  def test_study_is_short_and_shows_three_figures(self):
    text = (ROOT / 'docs/study.md').read_text(encoding='utf-8')
    self.assertLessEqual(len(text.split()), 2500)
    figures = re.findall(r'!\[.+\]\(study_figures/(.+)\)', text)
    self.assertEqual(figures, ['setup.png', 'scores.png', 'rates.png', 'curves.png'])


class VerdictTest(parameterized.TestCase):

  def compared(self, value, low, high, p):
    return summary.Comparison(statistics.Estimate(value, low, high), p, 1.0)

  @parameterized.parameters(
      ((0.8, 0.7, 0.9, 0.01), (0.6, 0.2, 0.9, 1.0), 'held'),
      ((0.8, 0.7, 0.9, 0.01), (0.4, 0.2, 0.9, 1.0), 'not decided'),  # the system points elsewhere
      ((0.2, 0.1, 0.3, 0.01), (0.6, 0.2, 0.9, 1.0), 'did not hold'),
      ((0.51, 0.45, 0.57, 0.8), (0.6, 0.2, 0.9, 1.0), 'did not hold'),  # no effect to speak of
      ((0.6, 0.45, 0.7, 0.2), (0.6, 0.2, 0.9, 1.0), 'not decided'),
      ((0.8, 0.7, 0.9, 0.01), None, 'held on the toy task'),
      ((0.51, 0.45, 0.57, 0.8), None, 'did not hold on the toy task'),
  )
  def test_verdict_follows_the_protocol(self, toy, system, expected):
    if system is None:
      self.assertEqual(summary.toy_verdict(self.compared(*toy)), expected)
    else:
      made = summary.verdict(self.compared(*toy), self.compared(*system))
      self.assertEqual(made, expected)


if __name__ == '__main__':
  absltest.main()
