"""The study of SmolLM2: the search of rates comes first, and the seeds run at the better rate."""

import tempfile
from unittest import mock

from absl.testing import absltest

from research import study_smollm2
from research.study import grid
from research.study import results


class StudyTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp()
    self.enterContext(mock.patch.object(study_smollm2, 'RESULTS', self.folder))

  def plan(self):
    return grid.plan(study_smollm2.get_study(), study_smollm2.get_config())

  def finish(self, jobs, scores):
    for job, score in zip(jobs, scores, strict=True):
      heading = results._heading(job, 'done', {})
      results.append(self.folder, heading | {'measures': {'final': score}})

  def test_search_decides_the_rate_of_its_design(self):
    for design, overrides in study_smollm2.DESIGNS.items():
      search = [job for job in self.plan() if job.grid == study_smollm2.search_of(design)]
      self.assertEqual(
          [(job.method, job.overrides['actor.lr']) for job in search],
          [('st_ppo', 3e-4), ('ppo', 3e-4), ('st_ppo', 1e-4), ('ppo', 1e-4)],
      )
      self.assertNotIn(design, {job.grid for job in self.plan()})
      self.finish(search, [0.5, 0.4, 0.3, 0.6])
      runs = [job for job in self.plan() if job.grid == design]
      self.assertEqual({job.seeds[0] for job in runs}, {0, 1, 2})
      self.assertEqual(
          {(job.method, job.overrides['actor.lr']) for job in runs},
          {('st_ppo', 3e-4), ('ppo', 1e-4)},
      )
      for job in search + runs:
        self.assertEqual({path: job.overrides.get(path) for path in overrides}, overrides)

  def test_method_waits_for_all_its_rates(self):
    search = self.plan()
    st_ppo = [job for job in search if job.method == 'st_ppo']
    self.finish(st_ppo[:1], [0.9])
    self.assertLen(self.plan(), len(search))

  def test_search_that_was_stopped_is_no_error(self):
    stopped = mock.Mock(**{'counts.return_value': {'failed': 0}})
    with (
        mock.patch.object(study_smollm2.runner, 'Runner', return_value=stopped) as make_runner,
        mock.patch.object(study_smollm2.signal, 'signal'),
        mock.patch('sys.argv', ['study_smollm2', f'--workdir={self.folder}']),
    ):
      self.assertEqual(study_smollm2.main(), 0)
    self.assertEqual(make_runner.call_count, 1)  # the seeds are not planned


if __name__ == '__main__':
  absltest.main()
