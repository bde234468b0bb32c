"""Weights for episodes of another policy: by hand, on-policy, and in the gradient."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.algorithms import correction
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import off_policy
from stppo_jax.algorithms import variant as variant_lib
from stppo_jax.algorithms import variants
from stppo_jax.training import diagnostics
from stppo_jax.types import TurnBatch

LEVELS = variant_lib.CORRECTION_LEVELS
# Row 0: turn 1 of two tokens, an observation, turn 2 of one token, padding. Row 1: one token.
TURN_IDS = np.array([[0, 1, 1, 0, 2, 0], [0, 1, 0, 0, 0, 0]], np.int32)
MASK = (TURN_IDS > 0).astype(np.float32)
# d = old_logp - behaviour_logp. Outside the agent's tokens: numbers that must not matter.
LOG_RATIO = np.log(np.array([[9, 2, 0.5, 9, 4, 9], [9, 0.25, 9, 9, 9, 9]], np.float32))


def truncated_weights(old_logp, behaviour_logp, mask, turn_ids, level, threshold, low=0.0):
  log_w = off_policy.log_weights(old_logp, behaviour_logp, mask, turn_ids, level)
  return off_policy.truncated(log_w, threshold, low)


def weights(level, threshold, log_ratio=LOG_RATIO):
  behaviour = np.full(TURN_IDS.shape, -2.0, np.float32)
  return truncated_weights(behaviour + log_ratio, behaviour, MASK, TURN_IDS, level, threshold)


class OffPolicyTest(parameterized.TestCase):

  @parameterized.parameters(
      ('none', 2.0, [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
      # exp(d), the 4 cut to 2
      ('token', 2.0, [[1, 2, 0.5, 1, 2, 1], [1, 0.25, 1, 1, 1, 1]]),
      # sqrt(2 * .5) = 1; 4, cut to 3
      ('turn', 3.0, [[1, 1, 1, 1, 3, 1], [1, 0.25, 1, 1, 1, 1]]),
      # 2 * .5 * 4 = 4, not cut
      ('sequence', 5.0, [[1, 4, 4, 1, 4, 1], [1, 0.25, 1, 1, 1, 1]]),
      # cube root of 4; (2 + .5 + 4) / 3
      (
          'sequence_geometric',
          5.0,
          [[1, *2 * [4 ** (1 / 3)], 1, 4 ** (1 / 3), 1], [1, 0.25, *4 * [1]]],
      ),
      ('sequence_mean', 5.0, [[1, 6.5 / 3, 6.5 / 3, 1, 6.5 / 3, 1], [1, 0.25, 1, 1, 1, 1]]),
  )
  def test_by_hand(self, level, threshold, expected):
    np.testing.assert_allclose(weights(level, threshold), expected, rtol=1e-6)

  @parameterized.parameters(*LEVELS)
  def test_on_policy_all_are_one(self, level):
    on_policy = np.where(MASK > 0, 0, LOG_RATIO)
    np.testing.assert_array_equal(weights(level, 2.0, on_policy), np.ones(MASK.shape))

  def test_levels_agree_for_one_token_segments(self):
    turns = MASK.astype(np.int32) * np.arange(1, 7, dtype=np.int32)
    of = lambda level, rows: truncated_weights(
        jnp.asarray(LOG_RATIO[rows]),
        jnp.zeros_like(LOG_RATIO[rows]),
        MASK[rows],
        turns[rows],
        level,
        3.0,
    )
    both, last = slice(None), slice(1, 2)
    np.testing.assert_allclose(of('turn', both), of('token', both), rtol=1e-6)
    np.testing.assert_allclose(of('sequence', last), of('token', last), rtol=1e-6)

  @parameterized.parameters(-1, 1)
  def test_long_products_stay_finite(self, sign):
    logp = jnp.full((1, 4096), 0.5 * sign)
    ones = jnp.ones((1, 4096), jnp.int32)
    w = truncated_weights(logp, jnp.zeros_like(logp), ones, ones, 'sequence', 2.0)
    np.testing.assert_allclose(w, np.full((1, 4096), 2.0 if sign > 0 else 0.0), rtol=1e-6)

  def test_weights_outside_both_bounds_are_zero(self):
    behaviour = np.full(TURN_IDS.shape, -2.0, np.float32)
    got = truncated_weights(behaviour + LOG_RATIO, behaviour, MASK, TURN_IDS, 'token', 3.0, 0.4)
    np.testing.assert_allclose(got, [[1, 2, 0.5, 1, 0, 1], [1, 0, 1, 1, 1, 1]], rtol=1e-6)

  @parameterized.parameters(*LEVELS)
  def test_constant_for_differentiation(self, level):
    gradient = jax.grad(lambda d: weights(level, 3.0, d).sum())(jnp.asarray(LOG_RATIO))
    np.testing.assert_array_equal(gradient, np.zeros(MASK.shape))

  @parameterized.product(level=LEVELS[1:], variant=('ppo', 'turn_ppo', 'rloo'))
  def test_policy_gradient_is_weighted_per_token(self, level, variant):
    """Against jax.grad of J = sum weight_t w_t min(r_t A_t, clip(r_t) A_t)."""
    rng = np.random.default_rng(0)
    row = dataclasses.replace(variants.VARIANTS[variant], whiten=False)
    old, logp, advantages = rng.normal(size=(3, *MASK.shape)).astype(np.float32) * 0.1
    batch = TurnBatch(
        tokens=TURN_IDS,
        action_mask=MASK,
        turn_ids=TURN_IDS,
        rewards=MASK,
        old_logp=old,
        ref_logp=old,
        old_values=old,
        advantages=advantages,
        returns=old,
        group_ids=np.arange(2),
        behaviour_logp=old - LOG_RATIO,
    )
    plain = losses.aggregation_weights(jnp.asarray(MASK), 'token-mean')
    w = truncated_weights(old, old - LOG_RATIO, MASK, TURN_IDS, level, 2.0)
    got, _, aux = correction.cotangents(jnp.asarray(logp), batch, row, plain * w)

    def objective(logp):
      if row.ratio == 'none':
        return jnp.sum(plain * w * advantages * logp)
      d = (logp - old) * MASK
      if row.ratio == 'turn':
        d = jnp.stack(
            [  # row 0's turn 1 has two tokens, the others one
                jnp.where(TURN_IDS[0] == 1, d[0, 1:3].mean(), d[0]),
                d[1],
            ]
        )
      r = jnp.exp(d)
      return jnp.sum(
          plain
          * w
          * jnp.minimum(
              r * advantages, jnp.clip(r, 1 - row.clip_low, 1 + row.clip_high) * advantages
          )
      )

    value, gradient = jax.value_and_grad(objective)(jnp.asarray(logp))
    np.testing.assert_allclose(got, -gradient, atol=1e-6)
    np.testing.assert_allclose(aux['pg_loss'], -value, atol=1e-6)

  def test_effective_share_by_hand(self):
    mask = np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    share = lambda log_ratio: float(
        off_policy.effective_share(jnp.asarray(log_ratio), jnp.zeros((3, 3)), mask)
    )
    # Products: 2 x 1.5 = 3 and 1; the last row has no agent tokens. (3 + 1)^2 / (9 + 1) / 2 = .8.
    log_ratio = np.log([[2.0, 1.5, 7.0], [7.0, 1.0, 7.0], [7.0, 7.0, 7.0]])
    self.assertAlmostEqual(share(log_ratio), 0.8, places=6)
    self.assertAlmostEqual(share(np.zeros((3, 3))), 1, places=6)
    # One of two rows has all the weight; and no overflow.
    self.assertAlmostEqual(share([[400.0, 400, 0], [0, -400, 0], [0, 0, 0]]), 0.5, places=6)
    nothing = off_policy.effective_share(jnp.zeros((1, 2)), jnp.zeros((1, 2)), np.zeros((1, 2)))
    self.assertEqual(nothing, 1)

  def test_metrics_by_hand(self):
    behaviour = np.full(TURN_IDS.shape, -2.0, np.float32)

    def of(**columns):
      row = dataclasses.replace(variants.VARIANTS['ppo'], **columns)
      metrics = diagnostics.sampler_gap(
          behaviour + LOG_RATIO, behaviour, jnp.asarray(MASK), TURN_IDS, row
      )
      prefix = 'rollout_corr/rollout_is_'
      return {name.removeprefix(prefix): float(x) for name, x in metrics.items()}

    # Ratios 2, .5, 4, .25: their mean 6.75 / 4; their squares' 20.3125 / 4.
    plain = of()
    self.assertAlmostEqual(plain['mean'], 1.6875, places=5)
    self.assertAlmostEqual(plain['max'], 4, places=4)
    self.assertAlmostEqual(plain['min'], 0.25, places=5)
    self.assertAlmostEqual(plain['eff_sample_size'], 1.6875**2 / 5.078125, places=5)
    self.assertEqual(plain['ratio_fraction_high'], 0)
    # Truncated at 3: 2, .5, 3, .25; one of four was above.
    cut = of(rollout_is='token', rollout_is_threshold=3.0)
    self.assertAlmostEqual(cut['mean'], 5.75 / 4, places=5)
    self.assertAlmostEqual(cut['max'], 3, places=4)
    self.assertAlmostEqual(cut['ratio_fraction_high'], 0.25, places=6)
    self.assertAlmostEqual(cut['eff_sample_size'], (5.75 / 4) ** 2 / (13.3125 / 4), places=5)


if __name__ == '__main__':
  absltest.main()
