"""The algorithm in one file: its gradient is the trainer's, and it learns."""

import dataclasses
from unittest import mock

from absl.testing import absltest
import chex
import jax
import numpy as np
import pytest

from examples import minimal
from stppo_jax.models import decoder
from stppo_jax.training import state as train_state
from tests.training import update_test


class MinimalTest(absltest.TestCase):

  def test_gradients_equal_the_trainers(self):
    """The trainer descends by SGD at a rate of 1, so its step is the gradient."""
    mesh = update_test.one_device()
    small = dataclasses.replace(minimal.POLICY, num_layers=1)
    shapes = {'POLICY': small, 'CRITIC': dataclasses.replace(small, head='value')}
    self.enterContext(mock.patch.multiple(minimal, **shapes))
    policy = decoder.init(jax.random.key(1), minimal.POLICY)
    critic = decoder.init(jax.random.key(2), minimal.CRITIC)
    sampler = decoder.init(jax.random.key(3), minimal.POLICY)  # another policy: the clip acts
    tokens, logp, rewards = minimal.play(sampler, np.random.default_rng(0), jax.random.key(0))
    batch = jax.jit(minimal.annotate)(critic, tokens, 3 * logp, rewards)
    batch = jax.tree.map(lambda x: x[:8], batch)
    expected, metrics = jax.jit(minimal.policy_gradient)(policy, batch)
    expected_critic = jax.jit(minimal.value_gradient)(critic, batch)

    spec = update_test.make_spec(
        'st_ppo', actor=minimal.POLICY, critic=minimal.CRITIC, length_buckets=(9,), value_clip=0.0
    )
    state = train_state.create_sharded(spec, policy, critic, mesh)
    functions = update_test.update.compile_functions(spec, state, update_test.NOTHING, mesh)
    before = jax.tree.map(np.asarray, (state.actor, state.critic))
    state, measured, _ = update_test.step(functions, spec, state, batch)
    taken = jax.tree.map(lambda a, b: a - b, before, (state.actor, state.critic))

    chex.assert_trees_all_close(taken[0], expected, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(taken[1], expected_critic, rtol=1e-4, atol=1e-6)
    self.assertGreater(float(metrics['clip']), 0.1)
    np.testing.assert_allclose(measured['stppo/bias_norm'], metrics['|C|'], rtol=1e-4)
    np.testing.assert_allclose(measured['stppo/divisor'], metrics['divisor'], rtol=1e-4)

  @pytest.mark.slow
  def test_reward_rises(self):
    rewards = minimal.train(updates=12, report=lambda line: None)
    self.assertGreater(rewards[-1], rewards[0] + 0.15)


if __name__ == '__main__':
  absltest.main()
