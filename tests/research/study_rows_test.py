"""The runs of rows and examples: what is planned, and which rate a row gets."""

import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
import pytest

from research import study_rows
from research.page import build
from research.study import grid
from research.study import results
from stppo_jax.algorithms import variants


def record_of(job, score):
  """The record of a run that stays at one score."""
  steps = range(0, job.updates + 1, 2)
  rows = [{'step': step, job.score: score, 'actor/skipped': 0} for step in steps]
  return results.system_record(job, rows, {})


class StudyRowsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())
    self.enterContext(mock.patch.object(study_rows, 'RESULTS', self.folder))

  def add_search(self, scores):
    """Adds records of a search, {row: scores in the order of the rates}."""
    for job in self.plan():
      by_rate = dict(zip(study_rows.RATES, scores.get(job.method, ())))
      score = by_rate.get(job.overrides.get('actor.lr'))
      if job.grid == study_rows.SEARCH and score is not None:
        results.append(self.folder, record_of(job, score))

  def plan(self):
    return grid.plan(study_rows.get_study(), study_rows.get_config())

  def test_search_has_one_seed_at_each_rate(self):
    search = [job for job in self.plan() if job.grid == study_rows.SEARCH]
    self.assertLen(search, 11 * 3)
    self.assertEqual({job.seeds for job in search}, {(100,)})
    self.assertEqual({job.updates for job in search}, {12})
    for job in search:
      compares = variants.VARIANTS[job.method].needs_groups
      self.assertEqual(job.overrides.get('rollout.group_size', 1), 8 if compares else 1, job.name)
      demonstrates = job.method in ('grao', 'ppo_max')
      self.assertEqual('rollout.demonstrations' in job.overrides, demonstrates, job.name)

  def test_row_runs_at_its_best_rate(self):
    self.assertNotIn(study_rows.ROWS, study_rows.get_study().grids)
    self.add_search({'ppo': (0.5, 0.7, 0.6), 'apo': (0.8, 0.7, 0.6), 'dpo': (0.1, 0.2)})
    rows = [job for job in self.plan() if job.grid == study_rows.ROWS]
    rates = {job.method: job.overrides['actor.lr'] for job in rows}
    self.assertEqual(rates, {'ppo': study_rows.RATES[1], 'apo': study_rows.RATES[0]})
    self.assertCountEqual([job.seeds for job in rows], [(0,), (1,), (2,)] * 2)

  def test_page_shows_what_has_run(self):
    self.add_search({'ppo': (0.5, 0.7, 0.6), 'apo': (0.5, 0.7, 0.6)})
    for job in self.plan():
      is_example = job.name == 'examples/committed/creators/seed_1'
      if job.grid == study_rows.ROWS or is_example:
        results.append(self.folder, record_of(job, 0.75))
    study = study_rows.get_study()
    jobs = self.plan()
    page = build.Page(study, jobs, results.planned(jobs, results.read(self.folder)))
    text = page.markdown(build.read_templates(study.templates)['rows.md'])
    row = r'\| `apo` \| \.500[^|]* \| \.700[^|]* \| \.600[^|]* \| 3 \| \.750 \| \.750 \| \.750 \|'
    self.assertRegex(text, row)
    self.assertIn('| `dpo` | not run | not run | not run | 0 | | | |', text)
    self.assertIn('| `creators` | 1 | .750 |', text)
    study.draw(page.methods, self.folder)
    self.assertTrue(pathlib.Path(self.folder, 'rows.png').exists())

  def test_examples_run_with_their_configs(self):
    jobs = {job.name: job for job in self.plan() if job.grid == study_rows.EXAMPLES}
    self.assertLen(jobs, 2 * len(study_rows.get_study().grids[study_rows.EXAMPLES].methods))
    job = jobs['examples/committed/creators/seed_2']
    self.assertEqual(job.score, 'val-core/all/clicks')  # the first core metric of the environment
    self.assertEqual((job.updates, job.overrides['actor.lr']), (30, 6e-4))
    self.assertEqual(job.overrides['model.folder'], 'examples/creators/model')

  @pytest.mark.slow
  def test_runs_end_with_the_examples(self):
    started = []
    runner = mock.MagicMock()
    runner.return_value.counts.return_value = {'failed': 0}
    runner.side_effect = (
        lambda workdir, study, jobs, *_: started.append(jobs) or runner.return_value
    )
    with mock.patch.object(study_rows.runner, 'Runner', runner):
      self.assertEqual(study_rows.run_all(self.folder, lambda: False), 0)
    names = [{job.method for job in jobs} for jobs in started]
    self.assertEqual(names[:2], [{'ppo'}, {'dr_grpo'}])
    self.assertEqual(names[-1], {'plans'})


if __name__ == '__main__':
  absltest.main()
