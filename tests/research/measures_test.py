"""The measures of a run, each worked by hand."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from research.study import measures

NAN = float('nan')


class MeasuresTest(parameterized.TestCase):

  @parameterized.parameters(
      ([0.4, 0.5, 0.6, 0.2, 0.4], 0.4),  # the last three: (.6 + .2 + .4) / 3
      ([0.4, 0.5, 0.7], 0.6),  # only two after training
      ([0.4], 0.4),  # never trained
      ([0.4, 0.5, NAN, 0.7], 0.6),
  )
  def test_final_is_mean_of_three_evaluations(self, score, expected):
    self.assertAlmostEqual(measures.final(np.array(score)), expected)
    self.assertEqual(measures.final(np.array(score), nonfinite=True), 0.0)

  @parameterized.parameters(
      ([0.4, 0.8, 0.39, 0.39, 0.39], True),  # .39 < .8 / 2
      ([0.4, 0.8, 0.41, 0.41, 0.41], False),
      ([0.9, 0.4, 0.4, 0.4], True),  # the best may be that of the untrained policy
      ([0.0, 0.0, 0.0, 0.0], False),  # nothing was learnt, so nothing was lost
  )
  def test_collapse_ends_below_half_of_best(self, score, expected):
    self.assertEqual(measures.collapsed(np.array(score)), expected)

  def test_a_run_that_is_not_finite_has_collapsed(self):
    self.assertTrue(measures.collapsed(np.array([0.4, 0.5]), nonfinite=True))
    self.assertTrue(measures.collapsed(np.array([])))

  def test_area_is_the_mean_height(self):
    # Trapezes of height .3, .5: their mean.
    self.assertAlmostEqual(measures.area(np.array([0.2, 0.4, 0.6])), 0.4)
    self.assertAlmostEqual(measures.area(np.array([0.0, 1.0, 0.0])), 0.5)
    self.assertAlmostEqual(measures.area(np.array([0.0, 1.0, 1.0]), [0, 2, 8]), (1 + 6) / 8)
    # Ended after two of eight updates.
    self.assertAlmostEqual(measures.area(np.array([0.4, 0.6]), [0, 2], end=8), 1 / 8)

  def test_spike_is_five_times_previous_median(self):
    norms = np.array([1.0, 1.0, 1.0, 4.9, 5.1, 1.0, NAN, 1.0])
    # Of eight updates 5.1 > 5 x 1, and the one that is not finite; 4.9 is none.
    self.assertEqual(measures.spikes(norms), 2 / 8)
    self.assertEqual(measures.spikes(np.array([1.0, 100.0, 1.0])), 0.0)  # too early
    # A slow rise is none, since the median runs along.
    self.assertEqual(measures.spikes(1.3 ** np.arange(40)), 0.0)

  def test_how_often_the_division_changed_a_step(self):
    made = measures.of_run(np.array([0.1, 0.2]), {'factor': np.array([1.0, 1.005, 1.5, 0.4])})
    self.assertEqual(made['factor_changed'], 0.5)  # 1.5 and .4, by more than 1%
    self.assertEqual(made['factor_twofold'], 0.25)  # .4
    self.assertTrue(np.isnan(made['grad_norm']))  # the run has not written it


if __name__ == '__main__':
  absltest.main()
