"""What carries another project's name has its value: numbers worked out with verl 0.9.1's formulas.

The inputs are small enough to check by hand; the expected numbers are stored.
"""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types
from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import correction
from stppo_jax.algorithms import filters
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import off_policy
from stppo_jax.algorithms import segments
from stppo_jax.algorithms import variants
from stppo_jax.training import diagnostics

# Row 0: a turn of two tokens, an observation, a turn of one. Row 1: one token.
TURN_IDS = np.array([[0, 1, 1, 0, 2, 0], [0, 1, 0, 0, 0, 0]], np.int32)
MASK = (TURN_IDS > 0).astype(np.float32)
LOG_RATIO = np.log(np.array([[9, 2, 0.5, 9, 4, 9], [9, 0.25, 9, 9, 9, 9]], np.float32))
BEHAVIOUR = np.array([[-1, -2, -0.5, -3, -1.5, -1], [-1, -1.25, -2, -2, -2, -2]], np.float32)
GAP = (BEHAVIOUR + LOG_RATIO, BEHAVIOUR, MASK, TURN_IDS)


def make_batch(**columns):
  zeros = jnp.zeros(np.shape(columns['action_mask']))
  required = [f for f in dataclasses.fields(types.TurnBatch) if f.default is dataclasses.MISSING]
  empty = {f.name: zeros for f in required}
  columns = {name: jnp.asarray(x) for name, x in columns.items()}
  return types.TurnBatch(**{**empty, **columns})


class RolloutCorrectionTest(parameterized.TestCase):

  @parameterized.parameters(
      ('token', 3.0, 0.0, dict(mean=1.4375, ratio_fraction_high=0.25, ratio_fraction_low=0.25,
                               max=3.0, min=0.25, std=1.123263, eff_sample_size=0.620892)),
      ('token', 3.0, 0.4, dict(mean=0.625, ratio_fraction_high=0.25, ratio_fraction_low=0.25,
                               max=2.0, min=0.0, std=0.81968, eff_sample_size=0.367647)),
      # Shares are of the two sequences, and extremes are those before truncation.
      ('sequence', 3.0, 0.0, dict(mean=2.3125, ratio_fraction_high=0.5, ratio_fraction_low=0.5,
                                  max=4.0, min=0.25, std=1.190785, eff_sample_size=0.790416)),
      ('sequence', 5.0, 0.5, dict(mean=3.0, ratio_fraction_high=0.0, ratio_fraction_low=0.5,
                                  max=4.0, min=0.25, std=1.732051, eff_sample_size=0.75)),
  )  # fmt: skip
  def test_metrics_of_the_weights(self, level, threshold, low, expected):
    row = dataclasses.replace(
        variants.VARIANTS['ppo'],
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_low=low,
    )
    got = diagnostics.sampler_gap(*map(jnp.asarray, GAP), row)
    for name, value in expected.items():
      np.testing.assert_allclose(got[f'rollout_corr/rollout_is_{name}'], value, 1e-5, err_msg=name)

  def test_metrics_of_the_gap(self):
    got = diagnostics.sampler_gap(*map(jnp.asarray, GAP), variants.VARIANTS['ppo'])
    expected = dict(
        kl=0.0, k3_kl=0.6875, training_ppl=8.175616, rollout_ppl=3.642005, ppl_ratio=2.31498,
        chi2_token=4.078125, chi2_seq=7.03125,
    )  # fmt: skip
    for name, value in expected.items():
      np.testing.assert_allclose(got[f'rollout_corr/{name}'], value, 1e-5, 1e-6, err_msg=name)

  @parameterized.parameters(
      ('token', 3.0, 0.0, [[1.391304, 0.347826, 2.086957], [0.173913]]),
      ('token', 3.0, 0.4, [[3.2, 0.8, 0], [0]]),
      ('sequence', 3.0, 0.0, [[1.846154, 1.846154, 1.846154], [0.153846]]),
      ('sequence', 5.0, 0.5, [[2, 2, 2], [0]]),
  )
  def test_normalised_weights(self, level, threshold, low, expected):
    weights = off_policy.truncated(off_policy.log_weights(*GAP, level), threshold, low)
    got = np.asarray(off_policy.normalised(weights, MASK, level))
    np.testing.assert_allclose(got[MASK > 0], np.concatenate(expected), rtol=1e-5)
    np.testing.assert_array_equal(got[MASK == 0], 1)

  def test_weights_of_0_are_not_divided(self):
    weights = jnp.asarray(1 - MASK)
    np.testing.assert_array_equal(off_policy.normalised(weights, MASK, 'token'), weights)

  @parameterized.parameters(
      # verl's bands are of the inverse ratio: token_k1 .4_3, seq_sum_k1 .2_3, seq_mean_k1 .5_2
      ('token', 1 / 3, 1 / 0.4, [1, 1, 0, 0]),
      ('sequence', 1 / 3, 1 / 0.2, [1, 1, 1, 0]),
      ('sequence_geometric', 0.5, 2.0, [1, 1, 1, 0]),
      # Turns have 1 and 4; the sequences' arithmetic means are 6.5 / 3 and .25.
      ('turn', 0.5, 2.0, [1, 1, 0, 0]),
      ('sequence_mean', 0.2, 2.0, [0, 0, 0, 1]),
  )
  def test_rejection(self, level, low, high, expected):
    got = np.asarray(off_policy.accepted(off_policy.log_weights(*GAP, level), low, high))
    np.testing.assert_array_equal(got[MASK > 0], np.array(expected, bool))

  def test_accepted_tokens_are_counted_and_weighted(self):
    row = dataclasses.replace(
        variants.VARIANTS['ppo'],
        rollout_rs='token',
        rollout_rs_low=0.3,
        rollout_rs_high=3.0,
        rollout_is='token',
        rollout_is_threshold=1.5,
    )
    batch = make_batch(
        action_mask=MASK, turn_ids=TURN_IDS, old_logp=GAP[0], behaviour_logp=BEHAVIOUR
    )
    batch = filters.apply(batch, row)
    np.testing.assert_array_equal(batch.loss_mask, [[0, 1, 1, 0, 0, 0], [0] * 6])
    np.testing.assert_allclose(batch.is_weights[0, 1:3], [1.5, 0.5], rtol=1e-6)
    plain = filters.apply(batch.replace(loss_mask=None), variants.VARIANTS['ppo'])
    self.assertIsNone(plain.loss_mask)
    self.assertIsNone(plain.is_weights)


class LossTest(parameterized.TestCase):

  @parameterized.parameters(
      ('clip', 0.2, 0.2, -0.117417, 0.5, [0, 0.184195, 0, -0.301612, 0, 0]),
      ('dppo_tv', 0.1, 0.1, 0.317734, 1 / 6, [-0.224976, 0.184195, 0.101088, -0.301612, 0, 0]),
      ('dppo_kl', 0.05, 0.05, 0.317734, 1 / 6, [-0.224976, 0.184195, 0.101088, -0.301612, 0, 0]),
      ('cispo', 0.2, 0.2, 0.028268, 2 / 3, [-0.2, 0.184195, 0.133333, -0.301612, 0, 0.066667]),
  )
  def test_losses_gradients_and_clip_fractions(
      self, surrogate, low, high, loss, clip_fraction, gradient
  ):
    """The fifth token is out of the clip's range and has no advantage: it is not clipped."""
    logp = jnp.array([[-1.0, -0.2, -2.0, -1.1, -0.4, -3.0]])
    ones = jnp.ones((1, 6))
    batch = make_batch(
        action_mask=ones,
        turn_ids=ones.astype(int),
        old_logp=[[-1.3, -0.3, -1.5, -1.0, -0.9, -1.0]],
        advantages=[[1.0, -1.0, -1.0, 2.0, 0.0, -0.5]],
    )
    row = variants.Variant('token_gae', 'token', surrogate, clip_low=low, clip_high=high)
    weights = losses.aggregation_weights(ones, 'token-mean')
    got, _, aux = correction.cotangents(logp, batch, row, weights=weights)
    np.testing.assert_allclose(aux['pg_loss'], loss, rtol=1e-4)
    np.testing.assert_allclose(got[0], gradient, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(aux['clipped'].mean(), clip_fraction, rtol=1e-5)

  def test_k3_is_clamped(self):
    """Gaps of 0, .5, 4, -30 and 40 nats; the last two have no gradient."""
    logp = jnp.array([[0.0, -1.0, -1.0, -30.0, 0.0]])
    ref_logp = jnp.array([[0.0, -1.5, -5.0, 0.0, -40.0]])
    got, pull = jax.vjp(lambda x: losses.kl(x, ref_logp, 'k3'), logp)
    np.testing.assert_allclose(got[0], [0, 0.1065307, 3.0183158, 10, 10], rtol=1e-5)
    np.testing.assert_array_equal(pull(jnp.ones((1, 5)))[0][0, 3:], [0, 0])

  @parameterized.parameters(
      ('token-mean', 28 / 9),
      ('seq-mean-token-sum', 7.0),
      ('seq-mean-token-mean', 3.625),
      ('seq-mean-token-sum-norm', 0.7),
  )
  def test_aggregations(self, mode, expected):
    x = jnp.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]])
    mask = jnp.array([[1.0, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]])
    np.testing.assert_allclose(losses.aggregate(x, mask, mode, 10), expected, rtol=1e-6)

  @parameterized.parameters('turn', 'sequence', 'token')
  def test_log_ratios_above_88_nats_are_numbers(self, level):
    """exp(90) is infinite in float32, and 0 times it is not a number."""
    ids = jnp.array([[0, 1, 1, 2]])
    batch = make_batch(
        action_mask=(ids > 0) * 1.0,
        turn_ids=ids,
        old_logp=[[0.0, -95.0, -90.0, -1.0]],
        advantages=[[0.0, 0.0, 1.0, -1.0]],
    )
    row = variants.Variant('token_gae', level)
    got, bias, aux = correction.cotangents(jnp.array([[0.0, -1.0, -1.0, -1.0]]), batch, row)
    for x in (got, bias, aux['pg_loss'], aux['clipped_objective'], aux['ratio']):
      self.assertTrue(np.isfinite(np.asarray(x)).all())

  def test_the_turn_ratio_is_rolls_segment_ratio(self):
    """ROLL: mean of the log-ratio over each run of ones in the mask, then exp.

    Runs (.1, .3), (-.2, .2, .6) and (.5): means .2, .2 and .5.
    """
    turn_ids = jnp.array([[0, 1, 1, 0, 2, 2, 2, 0, 0, 3]])
    log_ratio = jnp.array([[7, 0.1, 0.3, 7, -0.2, 0.2, 0.6, 7, 7, 0.5]])
    mask = (turn_ids > 0) * 1.0
    ids, count = segments.segment_ids('turn', mask, turn_ids)
    got = segments.importance_ratio(log_ratio, 0 * log_ratio, mask, ids, count)
    expected = np.exp([[0, 0.2, 0.2, 0, 0.2, 0.2, 0.2, 0, 0, 0.5]])
    np.testing.assert_allclose(got, expected, rtol=1e-6)


class AdvantageTest(absltest.TestCase):

  def estimate(self, name, **columns):
    mask = np.asarray(columns['action_mask'])
    batch = make_batch(turn_ids=mask.astype(np.int32), **columns)
    return advantages.estimate(batch, dataclasses.replace(variants.VARIANTS[name], gamma=0.9))

  def test_reinforce_plus_plus(self):
    got = self.estimate(
        'reinforce_pp',
        rewards=[[0.0, 0, 1, 0, 0], [0, 1, 0, 0, -1]],
        action_mask=[[0.0, 1, 1, 0, 1], [0, 1, 1, 0, 1]],
    )
    returns = [[0, 0.9, 1, 0, 0], [0, 0.19, -0.9, 0, -1]]
    whitened = [[0, 1.0163, 1.13334, 0, -0.03706], [0, 0.18531, -1.09042, 0, -1.20746]]
    np.testing.assert_allclose(got.returns, returns, atol=1e-5)
    np.testing.assert_allclose(got.advantages, whitened, atol=1e-4)

  def test_group_means_whitened_and_not(self):
    columns = dict(
        rewards=[[0, 1.0, 0], [0, 0, 0], [1, 0, 0], [0, 0.5, 0]],
        action_mask=[[1.0, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]],
        group_ids=[0, 0, 1, 1],
    )
    each = lambda a, b, c, d: [[a, a, 0], [b, b, b], [c, 0, 0], [d, d, d]]
    plain = self.estimate('dr_grpo', **columns).advantages
    np.testing.assert_allclose(plain, each(0.5, -0.5, 0.25, -0.25), atol=1e-6)
    whitened = self.estimate('reinforce_pp_baseline', **columns).advantages
    expected = each(1.46667, -0.93333, 0.86667, -0.33333)
    np.testing.assert_allclose(whitened, expected, atol=1e-4)


if __name__ == '__main__':
  absltest.main()
