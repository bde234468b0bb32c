"""The critic of bins: targets by hand, gradients against another implementation, whole steps."""

import dataclasses
import json
import math
import os
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import config as schema
from stppo_jax.algorithms import variants
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.settings import objective
from stppo_jax.systems import hl_gauss
from stppo_jax.training import loop
from stppo_jax.training import recovery
from stppo_jax.types import UserError
from tests.support import tiny_run
from tests.training import update_test

ROW = dataclasses.replace(variants.VARIANTS['hl_gauss_ppo'], value_bins=21)
BINS = dataclasses.replace(update_test.CRITIC, value_labels=ROW.value_labels)


def mean_of_bins(probabilities, low, high):
  width = (high - low) / probabilities.shape[-1]
  centres = low + width * (np.arange(probabilities.shape[-1]) + 0.5)
  return np.asarray(probabilities) @ centres


def targets_of_math(y, low, high, num_bins):
  """The same targets bin by bin with `math.erf`."""
  width = (high - low) / num_bins
  y = min(max(y, low), high)
  mass = []
  for k in range(num_bins):
    upper = (low + (k + 1) * width - y) / (0.75 * width)
    lower = (low + k * width - y) / (0.75 * width)
    mass.append(0.5 * (math.erf(upper / 2**0.5) - math.erf(lower / 2**0.5)))
  return np.array(mass) / sum(mass)


class TargetsTest(parameterized.TestCase):

  def test_four_bins_by_hand(self):
    # s = 3/16. Phi(4/3) = .90879 and Phi(8/3) = .99617, so that the bins have .40879 and .08738
    # before the division by .99234.
    targets = hl_gauss.gaussian_targets(jnp.array(0.5), 0.0, 1.0, 4)
    np.testing.assert_allclose(targets, [0.0881, 0.4119, 0.4119, 0.0881], atol=5e-5)

  def test_a_return_at_the_end_is_off(self):
    targets = hl_gauss.gaussian_targets(jnp.array([0.0, 1.0]), 0.0, 1.0, 51)
    np.testing.assert_allclose(mean_of_bins(targets, 0, 1), [0.0135, 0.9865], atol=2e-4)

  def test_inside_the_margin_the_mean_is_the_return(self):
    low, high = hl_gauss.inner_support(variants.VARIANTS['hl_gauss_ppo'])
    self.assertLess(low, 0)
    self.assertGreater(high, 1)
    returns = np.linspace(low, high, 201)
    targets = hl_gauss.gaussian_targets(jnp.asarray(returns), -0.5, 1.5, 51)
    np.testing.assert_allclose(mean_of_bins(targets, -0.5, 1.5), returns, atol=2e-4)
    targets = hl_gauss.gaussian_targets(jnp.array([0.0, 0.3, 1.0]), -0.5, 1.5, 51)
    np.testing.assert_allclose(mean_of_bins(targets, -0.5, 1.5), [0, 0.3, 1], atol=1e-5)

  @parameterized.parameters(-9.0, -1.0, -0.3, 0.0, 0.77, 2.0, 50.0)
  def test_against_the_error_function(self, y):
    with jax.enable_x64(True):
      got = hl_gauss.gaussian_targets(jnp.array(y), -1.0, 2.0, 7)
      np.testing.assert_allclose(got, targets_of_math(y, -1.0, 2.0, 7), atol=1e-14)


class LossTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.logits = rng.normal(size=(2, 3, 21))
    self.returns = rng.uniform(-0.4, 1.4, (2, 3))
    self.enter_context(jax.enable_x64(True))

  def loss(self, logits):
    return hl_gauss.loss(logits, jnp.zeros((2, 3)), jnp.asarray(self.returns), ROW)

  def test_loss_and_gradient_against_numpy(self):
    shifted = np.exp(self.logits)
    probabilities = shifted / shifted.sum(axis=-1, keepdims=True)
    targets = np.zeros_like(self.logits)
    for place in np.ndindex(2, 3):
      targets[place] = targets_of_math(self.returns[place], -0.5, 1.5, 21)
    expected = -(targets * np.log(probabilities)).sum(axis=-1)
    np.testing.assert_allclose(self.loss(self.logits), expected, rtol=1e-12)
    weights = np.arange(6.0).reshape(2, 3)
    gradient = jax.grad(lambda x: jnp.sum(weights * self.loss(x)))(jnp.asarray(self.logits))
    expected = weights[..., None] * (probabilities - targets)
    np.testing.assert_allclose(gradient, expected, atol=1e-12)

  def test_gradient_is_zero_at_the_targets(self):
    targets = hl_gauss.gaussian_targets(jnp.asarray(self.returns), -0.5, 1.5, 21)
    logits = jnp.log(targets)
    gradient = jax.grad(lambda x: jnp.sum(self.loss(x)))(logits)
    np.testing.assert_allclose(gradient, np.zeros((2, 3, 21)), atol=1e-12)
    near = np.clip(self.returns, *hl_gauss.inner_support(ROW))
    targets = hl_gauss.gaussian_targets(jnp.asarray(near), -0.5, 1.5, 21)
    values = hl_gauss.values(jnp.log(targets), ROW)
    np.testing.assert_allclose(values, near, atol=2e-3)

  def test_zero_logits_are_the_middle(self):
    values = hl_gauss.values(jnp.zeros((2, 3, 21)), ROW)
    np.testing.assert_allclose(values, np.full((2, 3), 0.5), rtol=1e-12)

  def test_mse_is_the_regression_loss(self):
    row = variants.VARIANTS['ppo']
    outputs = jnp.array([[0.25, 2.0]])
    head = row.value_head
    np.testing.assert_array_equal(head.values(outputs, row), outputs)
    loss = head.loss(outputs, jnp.array([[0.25, 1.0]]), jnp.ones((1, 2)), row)
    np.testing.assert_allclose(loss, [[0.28125, 0.5]])

  def test_share_of_returns_outside(self):
    # 40 bins of .05: the inner support is [-.35, 1.35].
    row = dataclasses.replace(ROW, value_bins=40)
    returns = jnp.array([[-0.4, -0.3, 1.3, 1.4, 9.0]])
    share = hl_gauss.outside_share(returns, jnp.array([[1.0, 1, 1, 1, 0]]), row)
    self.assertAlmostEqual(float(share), 0.5)


class StepTest(parameterized.TestCase):

  def test_gradient_of_the_critic_end_to_end(self):
    spec = update_test.make_spec(row=ROW, critic=BINS, micro_batch=2)
    mesh = update_test.one_device()
    functions = update_test.functions_of(spec, mesh)
    state = update_test.make_state(spec, mesh)
    batch = update_test.annotate(functions, spec, state, update_test.make_batch())
    state, batch, metrics = functions.with_advantages(state, batch)
    self.assertEqual(metrics['critic/outside_bins'], 0)
    np.testing.assert_allclose(batch.old_values, 0.5 * batch.action_mask, rtol=1e-6)
    before = jax.tree.map(jnp.copy, state.critic)

    def loss_of(critic):
      x, _ = decoder.trunk(critic, BINS, batch.tokens)
      logits = decoder.state_values(critic, x)
      loss = hl_gauss.loss(logits, batch.old_values, batch.returns, ROW)
      return jnp.sum(loss * batch.action_mask) / batch.action_mask.sum()

    loss, gradient = jax.jit(jax.value_and_grad(loss_of))(before)
    after, metrics, _ = update_test.step(functions, spec, state, batch)
    step = jax.tree.map(jnp.subtract, before, after.critic)  # plain descent with rate 1
    chex.assert_trees_all_close(step, gradient, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics['critic/vf_loss'], loss, rtol=1e-5)
    self.assertGreater(float(jnp.abs(gradient['value_head']['kernel']).max()), 1e-3)

  @parameterized.parameters(False, True)
  @pytest.mark.slow
  def test_eight_devices_equal_one(self, is_shared):
    critic = BINS
    actor = update_test.MODEL
    if is_shared:
      critic = None
      actor = dataclasses.replace(actor, head='both', value_labels=ROW.value_labels)
    spec = update_test.make_spec(row=ROW, critic=critic, actor=actor)
    alone = update_test.run_step(spec, update_test.one_device())
    together = update_test.run_step(spec, sharding.make_mesh(2, 2, 2))
    chex.assert_trees_all_close(alone, together, rtol=1e-4, atol=1e-6)


class SettingsTest(parameterized.TestCase):

  @parameterized.parameters(
      ({'algorithm.value_clip': 0.5}, 'set --config.algorithm.value_clip=0'),
      ({'algorithm.value_low': 0.0}, "rewards of 'em' are from 0 to 1"),
      ({'algorithm.value_high': 1.05}, 'raise value_high'),
      ({'algorithm.value_low': 2.0}, 'must be below value_high'),
      ({'algorithm.value_bins': 7}, 'at least 8'),
      ({'algorithm.score_norm': 'scale', 'algorithm.score_clip': 0.8}, 'normalised scores'),
      ({'algorithm.variant': 'ppo_max', 'env.kind': 'gateway:a:b'}, 'an episode of an agent'),
  )
  def test_contradictions_are_refused(self, values, words):
    values = {'algorithm.variant': 'hl_gauss_ppo'} | values
    config = tiny_run.replace(schema.Config(), values)
    with self.assertRaisesRegex(UserError, words):
      objective.make_variant(config)

  def test_a_custom_reward_may_have_any_bins(self):
    values = {'algorithm.variant': 'hl_gauss_ppo', 'env.reward': 'own:reward'}
    values |= {'algorithm.value_low': 10.0, 'algorithm.value_high': 30.0}
    config = tiny_run.replace(schema.Config(), values)
    self.assertEqual(len(objective.make_variant(config).value_labels), 51)

  def test_environments_of_a_mix_decide_about_bins(self):
    own = {'kind': 'search', 'reward': 'own:reward', 'name': 'own'}
    values = {'algorithm.variant': 'hl_gauss_ppo', 'env.mix': (own,)}
    values |= {'algorithm.value_low': 10.0, 'algorithm.value_high': 30.0}
    objective.make_variant(tiny_run.replace(schema.Config(), values))
    values['env.mix'] = (own, {'kind': 'tools', 'reward': 'f1'})
    with self.assertRaisesRegex(UserError, "rewards of 'f1' are from 0 to 1"):
      objective.make_variant(tiny_run.replace(schema.Config(), values))


class RunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())
    self.enterContext(tiny_run.on_one_device())
    tiny_run.write(self.folder)

  def make_config(self, **values):
    values = {'algorithm.variant': 'hl_gauss_ppo', 'algorithm.kl_in': 'none'} | values
    return tiny_run.make_config(self.folder, **values)

  @pytest.mark.slow
  def test_resume_export_and_folder_of_the_critic(self):
    straight = os.path.join(self.folder, 'straight')
    resumed = os.path.join(self.folder, 'resumed')
    scores = loop.start(self.make_config(), straight)
    loop.start(self.make_config(**{'train.updates': 1}), resumed)
    self.assertEqual(
        loop.start(self.make_config(), resumed)['val-core/all/em'], scores['val-core/all/em']
    )
    states = []
    for workdir in (straight, resumed):
      learners = tiny_run.load_learners(self.make_config())
      learners.restore(lambda like, workdir=workdir: recovery.restore_part(workdir, like)[0])
      states.append(learners.state)
    chex.assert_trees_all_equal(*states)
    critic = states[0].critic
    self.assertEqual(critic['value_head']['kernel'].shape, (16, 51))
    self.assertGreater(float(jnp.abs(critic['value_head']['kernel']).max()), 0)
    _, exported = convert.load_hf(policy_lib.export(self.make_config(), straight))
    self.assertNotIn('value_head', exported)

    folder = os.path.join(self.folder, 'critic')
    model = learners.spec.critic
    convert.save_hf(folder, model, critic, os.path.join(self.folder, 'model'))
    labels = json.loads(pathlib.Path(folder, 'config.json').read_text())['id2label']
    self.assertLen(labels, 51)
    self.assertEqual(labels['0'], 'bin from -0.5 to -0.460784')
    in_folder = {'model.critic_folder': folder}
    again = tiny_run.load_learners(self.make_config(**in_folder)).state
    chex.assert_trees_all_equal(again.critic, critic)
    moved = {'algorithm.value_high': 2.5} | in_folder
    with self.assertRaisesRegex(UserError, "is 'bin from -0.5 to -0.460784', .* value_high make"):
      tiny_run.load_learners(self.make_config(**moved))
    regression = {'algorithm.value_loss': 'mse'} | in_folder
    with self.assertRaisesRegex(UserError, 'has 51 outputs, and algorithm.value_loss needs 1'):
      tiny_run.load_learners(self.make_config(**regression))


if __name__ == '__main__':
  absltest.main()
