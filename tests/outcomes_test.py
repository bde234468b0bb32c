"""The table of episodes by outcome."""

from absl.testing import absltest
import numpy as np

from stppo_jax.evaluation import scores
from stppo_jax.monitoring import outcomes
from stppo_jax.types import Episode
from stppo_jax.types import Task
from stppo_jax.types import Turn


def episode(**fields):
  turn = Turn(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(0, np.int32))
  return Episode(Task('q'), 0, np.zeros(1, np.int32), [turn], **fields)


# One episode per outcome, and its number of rows.
EPISODES = {
    'answered': [episode()],
    'truncated': [episode(truncated=True)],
    'prompt_too_long': [episode(failed=True, counts={'prompt_too_long': 1.0})],
    'retrieval_failed': [episode(failed=True, truncated=True)],
    'program_failed': [
        episode(number=0, failed=True, counts={'program_failed': 1.0}),
        episode(number=0),
    ],
    'environment_failed': [
        episode(number=0, role='a', failed=True, error='ValueError: 1/0'),
        episode(number=0, role='b'),
    ],
}


class OutcomesTest(absltest.TestCase):

  def test_each_cause_is_counted_once(self):
    self.assertEqual(outcomes.MEANINGS.keys(), EPISODES.keys())
    for name, rows in EPISODES.items():
      expected = dict.fromkeys(outcomes.MEANINGS, 0) | {name: 1}
      self.assertEqual(outcomes.count(rows), expected)

  def test_program_that_raised_counts_with_a_reward_of_zero_too(self):
    crashed = episode(number=0, metrics={'crashed': 1.0})
    self.assertEqual(outcomes.count([crashed])['program_failed'], 1)
    alone = episode(metrics={'crashed': 1.0})  # a metric of an environment
    self.assertEqual(outcomes.count([alone])['answered'], 1)

  def test_rows_of_an_episode_count_once(self):
    rows = [episode(number=0, role='a'), episode(number=0, role='b', truncated=True)]
    self.assertEqual(sum(outcomes.count(rows).values()), 1)
    self.assertEqual(outcomes.count(rows)['truncated'], 1)

  def test_evaluation_counts_the_rows_of_programs_one_by_one(self):
    played = [episode(number=0), episode(number=0)]  # of two questions, in two batches
    metrics = scores.scores(played)
    self.assertEqual(metrics['val-outcome/answered'], 2)
    counts = outcomes.from_metrics('val-outcome', metrics)
    self.assertEqual(sum(counts.values()), 2)

  def test_report_sums_updates_and_takes_the_last_evaluation(self):
    first = outcomes.as_metrics('outcome', outcomes.count(EPISODES['answered']))
    second = outcomes.as_metrics('outcome', outcomes.count(EPISODES['truncated']))
    old = outcomes.as_metrics('val-outcome', outcomes.count(EPISODES['truncated']))
    new = outcomes.as_metrics('val-outcome', outcomes.count(EPISODES['answered']))
    tables = outcomes.of_run([old, first, {'step': 2} | second | new])
    self.assertEqual((tables['training']['answered'], tables['training']['truncated']), (1, 1))
    self.assertEqual(sum(tables['training'].values()), 2)
    self.assertEqual(tables['last evaluation'], outcomes.count(EPISODES['answered']))
    self.assertEqual(outcomes.of_run([{'step': 0}]), {})


if __name__ == '__main__':
  absltest.main()
