"""Token reversal: the measures, rewards and masks."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research import token_reversal


class TokenReversalTest(parameterized.TestCase):

  def test_table_measures_the_mean_curve(self):
    """Seed 0 is below 1% at update 1, seed 1 at update 3. Their mean is below 1% at update 3."""
    curves = np.array([[0.5, 0.0, 0.0, 0.0], [0.5, 0.4, 0.02, 0.0]])
    self.assertEqual([token_reversal.first_below(curve) for curve in curves], [1, 3])
    self.assertEqual(token_reversal.first_below(curves.mean(axis=0)), 3)
    self.assertIsNone(token_reversal.first_below(curves[1][:3]))

  def test_equal_groups_are_masked(self):
    """Group 0 is all wrong. In group 1 one answer of two is right."""
    setting = token_reversal.Setting(
        'groups', length=2, answers=4, group_size=2, kl_coef=0.04, mask_equal=True
    )
    is_right = jnp.array([[0, 1], [1, 0], [1, 1], [0, 1]], bool)
    advantages, mask, rewards = token_reversal.score(is_right, setting)
    np.testing.assert_array_equal(rewards, [0, 0, 1, 0])
    np.testing.assert_array_equal(mask, [[0, 0], [0, 0], [1, 1], [1, 1]])
    np.testing.assert_allclose(advantages[2:, 0], [0.5**0.5, -(0.5**0.5)], atol=1e-5)

  def test_sampling_reads_the_whole_row(self):
    """What is drawn with a cache of one token at a time is drawn from the logits of whole rows."""
    setting = token_reversal.Setting('dense', vocabulary=5, length=3, answers=6)
    policy = token_reversal.make_policy(setting)
    params = policy.init(jax.random.key(0), jnp.zeros((1, 6), int))
    params = jax.tree.map(lambda x: 3 * x, params)  # far from equal probabilities
    batch, _ = token_reversal.sample(params, jax.random.key(1), setting)
    logits = policy.apply(params, batch.tokens)[:, 2:-1]
    key = jax.random.split(jax.random.key(1))[1]
    for t in range(3):
      drawn = jax.random.categorical(jax.random.fold_in(key, t), logits[:, t])
      np.testing.assert_array_equal(batch.tokens[:, 3 + t], drawn)

  @parameterized.parameters(
      token_reversal.Setting('dense', vocabulary=3, length=2, answers=4, kl_coef=0.5),
      token_reversal.Setting(
          'groups', 2, 2, answers=16, group_size=4, kl_coef=0.5, mask_equal=True
      ),
  )
  @pytest.mark.slow
  def test_loss_gradient_is_that_of_the_policy(self, setting):
    """On-policy, the clipped loss has the gradient of -mean(sum(A logp)), and k3 has none."""
    policy = token_reversal.make_policy(setting)
    params = policy.init(jax.random.key(0), jnp.zeros((1, 4), int))
    batch, error = token_reversal.sample(params, jax.random.key(1), setting)

    def plain(params):
      logp = token_reversal.answer_logp(params, batch.tokens, setting)
      return -(logp * batch.advantages).sum(axis=1).mean()

    gradient = jax.grad(token_reversal.loss)(params, batch, setting)
    expected = jax.grad(plain)(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), gradient, expected)
    self.assertGreater(max(float(abs(x).max()) for x in jax.tree.leaves(expected)), 1e-3)
    is_right = batch.tokens[:, 2:] == batch.tokens[:, 1::-1]
    if setting.experiment == 'groups':
      is_right = is_right.all(axis=1)
    self.assertAlmostEqual(float(error), 1 - float(is_right.mean()), places=6)

  def test_later_epochs_pull_equal_groups_back(self):
    """Groups without a spread have no gradient on-policy. Later, only the KL of whole answers."""
    setting = token_reversal.Setting('groups', 2, 2, answers=4, group_size=2, kl_coef=0.5)
    policy = token_reversal.make_policy(setting)
    params = policy.init(jax.random.key(0), jnp.zeros((1, 4), int))
    tokens = jnp.zeros((4, 4), int)
    logp = token_reversal.answer_logp(params, tokens, setting)
    old_logp = logp - jnp.array([[0.1, 0.2]])  # the policy has moved since: log-ratio .3
    batch = token_reversal.Batch(tokens, old_logp, jnp.zeros((4, 2)), jnp.ones((4, 2)))
    kl = np.exp(-0.3) - 1 + 0.3
    self.assertAlmostEqual(float(token_reversal.loss(params, batch, setting)), 0.5 * kl, places=5)
    masked = batch._replace(mask=jnp.zeros((4, 2)))
    self.assertEqual(float(token_reversal.loss(params, masked, setting)), 0)


if __name__ == '__main__':
  absltest.main()
