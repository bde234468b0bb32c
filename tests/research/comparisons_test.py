"""The statistics of a study: worked by hand, and beside numbers of package rliable 1.2.0."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
from scipy import stats

from research import comparisons
from stppo_jax.evaluation import statistics

# Scores of two algorithms, and what rliable 1.2.0 with arch 7.2.0 gives for them with 50,000
# resamplings: the interquartile means, the probability that X improves on Y, and the intervals.
X = np.array([0.5, 0.54, 0.21, 0.37, 0.43, 0.35, 0.51, 0.7, 0.43, 0.41])
Y = np.array([0.5, 0.47, 0.42, 0.21, 0.39, 0.54, 0.13, 0.31])
IQM_X, IQM_X_INTERVAL = 0.4416666666666666, (0.36833333, 0.52)
IQM_Y, IQM_Y_INTERVAL = 0.39749999999999996, (0.255, 0.485)
X_BEATS_Y, X_BEATS_Y_INTERVAL = 0.63125, (0.35, 0.875)
# Two tasks of different difficulty, which are strata.
TASKS = np.array(
    [[0.11, 0.57], [0.12, 0.68], [0.17, 0.73], [0.32, 0.68], [0.05, 0.65], [0.3, 0.71]]
)
IQM_TASKS, IQM_TASKS_INTERVAL = 0.44833333, (0.37666667, 0.49666667)


class PeerTest(parameterized.TestCase):
  """Beside rliable's stored numbers; quantiles of 5,000 resamplings are within .02 of them."""

  @parameterized.parameters((X, IQM_X, IQM_X_INTERVAL), (Y, IQM_Y, IQM_Y_INTERVAL))
  def test_interquartile_mean(self, scores, value, interval):
    made = comparisons.iqm_interval(scores)
    self.assertAlmostEqual(made.value, value, places=12)
    np.testing.assert_allclose([made.low, made.high], interval, atol=0.02)

  def test_probability_of_improvement(self):
    made = comparisons.improvement_interval(X, Y)
    self.assertAlmostEqual(made.value, X_BEATS_Y, places=12)
    np.testing.assert_allclose([made.low, made.high], X_BEATS_Y_INTERVAL, atol=0.02)

  def test_strata_are_resampled_among_themselves(self):
    made = statistics.bootstrap(comparisons.iqm, [list(TASKS.T)])
    self.assertAlmostEqual(made.value, IQM_TASKS, places=8)
    np.testing.assert_allclose([made.low, made.high], IQM_TASKS_INTERVAL, atol=0.02)
    # As one stratum the interval is several times as wide.
    pooled = statistics.bootstrap(comparisons.iqm, [[TASKS.ravel()]])
    self.assertGreater(pooled.high - pooled.low, 2 * (made.high - made.low))


class WorkedTest(parameterized.TestCase):

  def test_iqm_is_the_mean_of_the_middle_half(self):
    # Of eight, two are cut at each end: (3 + 4 + 5 + 6) / 4. Of five, one: (2 + 3 + 4) / 3.
    self.assertEqual(comparisons.iqm(np.array([9, 1, 2, 3, 4, 5, 6, 100])), 4.5)
    self.assertEqual(comparisons.iqm(np.array([1, 2, 3, 4, 100])), 3.0)
    self.assertTrue(np.isnan(comparisons.iqm(np.array([]))))

  def test_probability_of_improvement_counts_ties_half(self):
    # Pairs of (1, 3) with (1, 2): 1-1 tie, 1-2 loss, 3-1 and 3-2 wins: (2 + 1/2) / 4.
    self.assertEqual(comparisons.probability_of_improvement([1, 3], [1, 2]), 0.625)
    self.assertEqual(comparisons.probability_of_improvement([1, 3], [1, 3]), 0.5)
    u = stats.mannwhitneyu(X, Y).statistic
    self.assertAlmostEqual(comparisons.probability_of_improvement(X, Y), u / (len(X) * len(Y)))

  def test_share_interval_is_clopper_pearsons(self):
    # 0 of n: the upper end solves (1 - p)^n = .025. n of n is its mirror image.
    none = comparisons.share_interval(0, 5)
    self.assertEqual((none.value, none.low), (0.0, 0.0))
    self.assertAlmostEqual(none.high, 1 - 0.025**0.2, places=12)
    every = comparisons.share_interval(5, 5)
    self.assertAlmostEqual(every.low, 0.025**0.2, places=12)
    self.assertEqual(every.high, 1.0)
    # Its ends are where a binomial test has p = .025 on that side.
    some = comparisons.share_interval(3, 10)
    self.assertAlmostEqual(stats.binom.sf(2, 10, some.low), 0.025, places=9)
    self.assertAlmostEqual(stats.binom.cdf(3, 10, some.high), 0.025, places=9)

  def test_shares_differ_is_fishers(self):
    # 5 of 5 against 0 of 5: two tables of 10 choose 5 = 252 are as extreme.
    self.assertAlmostEqual(comparisons.shares_differ(5, 5, 0, 5), 2 / 252, places=12)
    self.assertEqual(comparisons.shares_differ(2, 5, 2, 5), 1.0)

  def test_scores_differ_is_exact_for_few_runs(self):
    # All of five above all of five: 2 of 252 orders.
    high, low = np.arange(5.0) + 10, np.arange(5.0)
    self.assertAlmostEqual(comparisons.scores_differ(high, low), 2 / 252, places=12)
    self.assertAlmostEqual(comparisons.scores_differ([9, 9, 9, 8, 7], low), 2 / 252)  # with ties
    self.assertAlmostEqual(comparisons.scores_differ([9], low), 2 / 6)  # first or last of six
    self.assertEqual(comparisons.scores_differ(np.ones(5), np.ones(5)), 1.0)

  def test_holm_by_hand(self):
    # Ordered .01 x 4, .02 x 3, .03 x 2, .5 x 1 = .04, .06, .06 (not below the one before), .5.
    given = {'c': 0.03, 'a': 0.01, 'd': 0.5, 'b': 0.02}
    made = comparisons.holm(given)
    self.assertEqual(list(made), list(given))
    for name, expected in {'a': 0.04, 'b': 0.06, 'c': 0.06, 'd': 0.5}.items():
      self.assertAlmostEqual(made[name], expected)
    self.assertEqual(comparisons.holm({'a': 0.9, 'b': 0.8}), {'a': 1.0, 'b': 1.0})
    self.assertEqual(comparisons.holm({}), {})
    # Of five planned, two have run: .01 x 5, .02 x 4.
    some = comparisons.holm({'a': 0.01, 'b': 0.02}, 5)
    np.testing.assert_allclose((some['a'], some['b']), (0.05, 0.08))

  def test_one_run_has_no_interval(self):
    self.assertIsNone(comparisons.iqm_interval([0.3]).low)
    one = comparisons.improvement_interval([0.3], [0.1, 0.2])
    self.assertEqual(one.value, 1.0)
    self.assertIsNone(one.high)
    self.assertFalse(one.covers(1.0) or one.is_within(0, 1))

  def test_the_bootstrap_is_repeatable_and_covers(self):
    self.assertEqual(comparisons.iqm_interval(X), comparisons.iqm_interval(X))
    generator = np.random.default_rng(0)
    hits, mean = 0, lambda x: x.mean(axis=-1)
    for i in range(200):
      made = statistics.bootstrap(mean, [[generator.normal(0, 1, 30)]], reps=300, seed=i)
      hits += made.low <= 0 <= made.high
    self.assertBetween(hits / 200, 0.88, 0.99)  # 95% wanted; the percentile interval has less


if __name__ == '__main__':
  absltest.main()
