"""Each health rule on a hand-made curve: silent on a good run, broken and new once on a bad one."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from stppo_jax import config as schema
from stppo_jax.monitoring import health

LIMITS = dataclasses.asdict(schema.HealthSettings())
GOOD = {
    'critic/score/mean': 0.5,
    'actor/entropy': 0.6,
    'stppo/ref_kl': 0.05,
    'actor/ppo_kl': 0.001,
    'rollout_corr/k3_kl': 1e-4,
    'env/invalid_share': 0.1,
    'env/repeated_share': 0.1,
    'env/empty_share': 0.0,
    'env/cut_share': 0.05,
    'env/truncated': 0.2,
    'env/retrieval_failed': 0.0,
    'env/prompt_too_long': 0.0,
}


def curve(metric, values):
  return [{**GOOD, metric: value} for value in values]


def alarms_along(rows, window=3, limits=LIMITS):
  """Returns [(number of the row, name, is_new)] of everything that is broken on the way."""
  return [
      (n, alarm.name, alarm.is_new)
      for n in range(1, len(rows) + 1)
      for alarm in health.check(rows[:n], limits, window)
  ]


class HealthTest(parameterized.TestCase):

  def test_rules_are_those_of_the_config(self):
    self.assertCountEqual(health.RULES, schema.HEALTH_RULES)

  def test_a_good_run_is_quiet(self):
    rng = np.random.default_rng(0)
    rows = [
        {name: value * rng.uniform(0.7, 1.3) for name, value in GOOD.items()} for _ in range(40)
    ]
    self.assertEmpty(alarms_along(rows))

  @parameterized.parameters(
      ('kl', 'stppo/ref_kl', 2.0),
      ('ppo_kl', 'actor/ppo_kl', 0.4),
      ('sampler_gap', 'rollout_corr/k3_kl', 0.05),
      ('invalid', 'env/invalid_share', 1.0),
      ('repeated', 'env/repeated_share', 1.0),
      ('empty', 'env/empty_share', 0.4),
      ('cut', 'env/cut_share', 0.8),
      ('truncated', 'env/truncated', 1.0),
      ('retrieval_failed', 'env/retrieval_failed', 0.5),
      ('prompt_too_long', 'env/prompt_too_long', 0.5),
      ('score_drop', 'critic/score/mean', 0.0),
      ('entropy_drop', 'actor/entropy', 0.0),
  )
  def test_rule_is_broken_by_its_metric(self, name, metric, bad):
    rows = curve(metric, [GOOD[metric]] * 5 + [bad] * 5 + [GOOD[metric]] * 5 + [bad] * 3)
    found = alarms_along(rows)
    self.assertEqual({alarm[1] for alarm in found}, {name})
    self.assertLen([alarm for alarm in found if alarm[2]], 2)  # it came, went, and came again
    self.assertIn((9, name, False), found)
    self.assertNotIn((13, name), [alarm[:2] for alarm in found])
    self.assertEmpty(alarms_along(rows, limits={**LIMITS, name: 0.0}))  # 0: off

  def test_means_over_the_window(self):
    rows = curve('env/invalid_share', [0.2, 0.5, 0.8, 0.9, 0.1])
    # Windows of 3: .5 is not above .5; (.5 + .8 + .9) / 3 = .733 is; (.8 + .9 + .1) / 3 = .6 is.
    self.assertEqual(alarms_along(rows), [(4, 'invalid', True), (5, 'invalid', False)])
    alarm = health.check(rows[:4], LIMITS, 3)[0]
    self.assertAlmostEqual(alarm.value, 2.2 / 3)
    self.assertEqual((alarm.metric, alarm.bound), ('env/invalid_share', 0.5))

  def test_score_uses_best_and_entropy_first_window(self):
    score = curve('critic/score/mean', [0.1, 0.1, 0.1, 0.8, 0.8, 0.8, 0.39, 0.39, 0.39])
    self.assertEqual(alarms_along(score), [(9, 'score_drop', True)])  # .39 < .5 * .8
    entropy = curve('actor/entropy', [1.0, 1.0, 1.0, 5.0, 5.0, 0.2, 0.2, 0.2, 0.05, 0.05, 0.05])
    self.assertEqual(alarms_along(entropy), [(11, 'entropy_drop', True)])  # .05 < .1 * 1

  def test_run_without_scores_breaks_no_rule(self):
    self.assertEmpty(alarms_along(curve('critic/score/mean', [0.0] * 6)))
    self.assertEmpty(alarms_along(curve('critic/score/mean', [-1.0] * 6 + [-2.0] * 6)))

  def test_gaps_and_missing_metrics(self):
    rows = curve('env/invalid_share', [1.0, None, float('nan'), 1.0])
    rows = [{'step': 0, 'val-core/all/em': 0.1}] + rows
    self.assertEmpty(alarms_along(rows))  # two values are no window of three
    rows += curve('env/invalid_share', [1.0, None])
    self.assertEqual(alarms_along(rows), [(6, 'invalid', True)])  # silent where there is no value
    self.assertEmpty(alarms_along([{'step': n} for n in range(9)]))

  def test_watched_metrics_suffice(self):
    rows = curve('env/empty_share', [1.0] * 4)
    watched = [health.watched_metrics({**row, 'other': 1.0}) for row in rows]
    self.assertEqual(alarms_along(watched), alarms_along(rows))
    row = {'other': 1.0, 'actor/entropy': 0.5}
    self.assertEqual(health.watched_metrics(row), {'actor/entropy': 0.5})

  def test_flags(self):
    found = health.check(curve('env/empty_share', [1.0] * 3), LIMITS, 3)
    flags = health.flags(found)
    self.assertLen(flags, len(health.RULES))
    self.assertEqual(flags['health/empty'], 1)
    self.assertEqual(sum(flags.values()), 1)

  def test_the_line_names_metric_values_and_limit(self):
    alarm = health.check(curve('env/empty_share', [0.25] * 3), LIMITS, 3)[0]
    self.assertEqual(
        alarm.line(3),
        'health: turns are empty: env/empty_share is 0.25 over the last '
        '3 updates, beyond 0.1 (config.health.empty); look at the episodes with --mode=watch',
    )


if __name__ == '__main__':
  absltest.main()
