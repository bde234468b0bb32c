"""The table of episodes by outcome."""

from absl.testing import absltest
import numpy as np

from stppo_jax import types
from stppo_jax.monitoring import outcomes
from stppo_jax.monitoring import scores
from stppo_jax.training import summary
from stppo_jax.types import Episode
from stppo_jax.types import Task
from stppo_jax.types import Turn


def episode(question='q', **fields):
  turn = Turn(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(0, np.int32))
  return Episode(Task(question), 0, np.zeros(1, np.int32), [turn], **fields)


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
    self.assertEqual(outcomes.MEANINGS.keys(), {'skipped', *EPISODES})
    for name, rows in EPISODES.items():
      expected = dict.fromkeys(outcomes.MEANINGS, 0) | {name: 1}
      self.assertEqual(outcomes.count(rows), expected)

  def test_crashed_program_counts_despite_reward_zero(self):
    crashed = episode(number=0, counts={'crashed': 1.0})
    self.assertEqual(outcomes.count([crashed])['program_failed'], 1)
    for number in (None, 0):
      own = episode(number=number, metrics={'crashed': 1.0})  # a metric of the user's
      self.assertEqual(outcomes.count([own])['answered'], 1)

  def test_skipped_is_what_no_step_has_used(self):
    # Two epochs. Row 0 is in two skipped steps, row 1 in one of two, rows 2 and 3 in none.
    steps = [np.array([0, 1]), np.array([2, 3]), np.array([0, 2]), np.array([1, 3])]
    skipped = outcomes.skipped_rows(steps, [1, 0, 1, 0])
    self.assertEqual(skipped, {0})
    rows = [episode(), episode(), episode(truncated=True), episode()]
    counts = outcomes.count(rows, skipped)
    self.assertEqual([counts[x] for x in ('answered', 'skipped', 'truncated')], [2, 1, 1])
    self.assertEmpty(outcomes.skipped_rows(steps, [0, 0, 0, 0]))

  def test_rows_of_two_policies_are_one_episode(self):
    # The only step of policy a is skipped, and that of policy b is not.
    parts = []
    for role, skipped in (('a', 1), ('b', 0)):
      step = types.StepMetrics(np.array([0]), {'actor/skipped': skipped}, {})
      parts.append(([episode(number=0, role=role)], [step]))
    self.assertEqual(sum(outcomes.count_update(parts).values()), 1)
    self.assertEqual(outcomes.count_update(parts)['skipped'], 1)
    self.assertEqual(outcomes.count_update(parts[1:])['answered'], 1)

  def test_rows_of_policies_with_other_orders_are_one_episode(self):
    """Each policy sorts its rows by length, and two rounds have numbered episodes from 0."""
    row = lambda question, role, **fields: episode(question=question, number=0, role=role, **fields)
    first = [row('q', 'a', truncated=True), row('r', 'a')]
    second = [row('r', 'b'), row('q', 'b', truncated=True)]
    counts = outcomes.count_update([(first, []), (second, [])])
    self.assertEqual([counts[name] for name in ('answered', 'truncated')], [1, 1])

  def test_extremes_of_policies_are_extremes(self):
    """Means of the largest numbers would be no largest number."""
    turn = types.Turn(np.zeros(1, np.int32), np.zeros(1, np.float32))
    row = types.Episode(types.Task('t'), 0, np.zeros(1, np.int32), [turn])
    step = types.StepMetrics(np.array([0]), {'actor/skipped': 0}, {})
    parts = []
    for policy, low, high in (('a', -1.0, 2.0), ('b', -3.0, 1.0)):
      measured = {'critic/score/min': low, 'critic/score/max': high, 'critic/score/mean': high}
      parts.append(summary.PolicyUpdate(policy, [row], None, [], measured, [step]))
    metrics = summary.update_summary(parts)
    names = ('critic/score/min', 'critic/score/max', 'critic/score/mean')
    self.assertEqual([metrics[name] for name in names], [-3.0, 2.0, 1.5])

  def test_steps_of_policies_are_counted_together(self):
    """Step n of the update is step n of each policy."""
    turn = types.Turn(np.zeros(1, np.int32), np.zeros(1, np.float32))
    row = types.Episode(types.Task('t'), 0, np.zeros(1, np.int32), [turn])
    name = 'stppo/applied_factor'
    parts = []
    for policy, factors in (('a', (1.0, 0.5)), ('b', (0.5, 0.25))):
      numbers = [{'actor/skipped': 0, name: factor} for factor in factors]
      steps = [types.StepMetrics(np.array([0]), one, {}) for one in numbers]
      parts.append(summary.PolicyUpdate(policy, [row], None, [], {}, steps))
    metrics = summary.update_summary(parts)
    found = {key: value for key, value in metrics.items() if key.startswith(name)}
    expected = {name: 0.5625, f'{name}_max': 1.0, f'{name}_min': 0.25}
    expected |= {f'{name}_step1': 0.75, f'{name}_step2': 0.375}
    self.assertEqual(found, expected)

  def test_failure_is_no_skipped_episode(self):
    counts = outcomes.count(EPISODES['retrieval_failed'], {0})
    self.assertEqual(counts['retrieval_failed'], 1)

  def test_evaluation_counts_program_rows_singly(self):
    played = [episode(number=0), episode(number=0)]  # two questions in two batches
    metrics = scores.scores(played)
    self.assertEqual(metrics['val-outcome/answered'], 2)
    counts = outcomes.from_metrics('val-outcome', metrics)
    self.assertEqual(sum(counts.values()), 2)

  def test_report_sums_updates_and_takes_the_last_evaluation(self):
    first = outcomes.as_metrics('outcome', outcomes.count(EPISODES['answered']))
    second = outcomes.as_metrics('outcome', outcomes.count(EPISODES['truncated']))
    old = outcomes.as_metrics('val-outcome', outcomes.count(EPISODES['truncated']))
    new = outcomes.as_metrics('val-outcome', outcomes.count(EPISODES['answered']))
    tables = outcomes.count_run([old, first, {'step': 2} | second | new])
    self.assertEqual((tables['training']['answered'], tables['training']['truncated']), (1, 1))
    self.assertEqual(sum(tables['training'].values()), 2)
    self.assertEqual(tables['last evaluation'], outcomes.count(EPISODES['answered']))
    self.assertEqual(outcomes.count_run([{'step': 0}]), {})


if __name__ == '__main__':
  absltest.main()
