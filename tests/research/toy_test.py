"""The toy task: its update is that of training, its rules hold, and seeds are independent."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.toy import calibration
from research.toy import settings as toy_settings
from research.toy import task
from research.toy import training
from stppo_jax.algorithms import filters
from stppo_jax.algorithms import objectives
from stppo_jax.algorithms import variants
from stppo_jax.models import decoder
from stppo_jax.training import optimizer_step
from stppo_jax.training import packing
from stppo_jax.training import state as train_state
from stppo_jax.training import update
from stppo_jax.types import UserError
from tests.training import update_test

# Two turns of 1 or 2 tokens and END, 4 questions: some hundred parameters.
SMALL = {
    'toy.turns': 2,
    'toy.tokens': 2,
    'toy.vocabulary': 3,
    'toy.keys': 4,
    'toy.hidden': 8,
    'toy.warm_steps': 200,
    'train.updates': 6,
    'train.episodes': 8,
    'train.mini_batch': 4,
    'train.epochs': 2,
    'algorithm.variant': 'ppo',
}
CHAIN = toy_settings.make(SMALL).chain


@functools.cache
def small_run(seeds=4, first_seed=0, **overrides):
  """Metrics of the small run; `lr` and `staleness` are numbers, so that all share a program."""
  settings = SMALL | {
      'actor.lr': overrides.get('lr', 0.05),
      'pipeline.staleness': overrides.get('staleness', 0),
  }
  return training.run(settings, seeds, first_seed)


def one_step(variant, seed=0, **columns):
  """(state before, state after, metrics, batch) of the first step on 8 episodes of the policy."""
  config = toy_settings.make(
      SMALL | {'train.mini_batch': 8, 'train.epochs': 1, 'rollout.group_size': 4}
  )
  plain = dict(entropy_coef=0.0, kl_in='none', gamma=0.9)
  row = dataclasses.replace(variants.VARIANTS[variant], **(plain | columns))
  spec = dataclasses.replace(
      training.make_spec(dataclasses.replace(config, variant=row)),
      actor_optimizer=update_test.DESCENT,
      critic_optimizer=update_test.DESCENT,
      actor_clip=np.inf,
  )
  world, params = jax.tree.map(lambda x: jnp.asarray(x[seed]), training.warm_start(config.warm, 0))
  head = {'kernel': jnp.ones((8, 1)), 'bias': jnp.zeros(1)}
  critic = dict(params, last=head) if row.needs_critic else None
  state = train_state.create(spec, params, critic)
  chances = jax.random.uniform(jax.random.key(3), (task.num_chances(CHAIN, 8),))
  group_ids = jnp.arange(8) // 4
  scores = functools.partial(training.log_probs, params)
  played = task.play(CHAIN, world, scores, chances, group_ids)
  features = task.features_of(CHAIN, played)
  batch = task.to_batch(CHAIN, played, group_ids)
  config = dataclasses.replace(config, variant=row)
  batch, _ = training.annotate(config, spec, state, params, batch, played.tokens, features)
  state, batch, _ = update.with_advantages(spec, state, batch)
  work = training.make_work(CHAIN, spec, state, batch, played.tokens, features)
  after, metrics, _ = optimizer_step.take_step(work)
  return work, after, metrics


class UpdateTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_step_equals_the_ordinary_update(self):
    """The toy task's step with a decoder as its model is that of `update.update_step`."""
    spec = update_test.make_spec('st_ppo', clip_low=0.01, clip_high=0.01)
    mesh, batch = update_test.one_device(), update_test.make_batch()
    state = update_test.make_state(spec, mesh)
    functions = update_test.functions_of(spec, mesh)
    step = update_test.one_step(spec, batch, update_test.ALL_ROWS)
    batch, _ = functions.annotate(state, update_test.NOTHING, batch, packing.stack([step]))
    state, batch, _ = functions.with_advantages(state, batch)
    # Off-policy, so that something is clipped.
    noise = 0.1 * np.random.default_rng(0).normal(size=batch.tokens.shape)
    batch = dataclasses.replace(batch, old_logp=batch.old_logp + noise * batch.action_mask)

    def policy(actor, unused_layout):
      x, _ = decoder.trunk(actor, spec.actor, batch.tokens)
      logp, entropy = decoder.token_logp(actor, spec.actor, x, batch.tokens, 1.0, None)
      return objectives.TokenOutputs(logp, entropy=entropy)

    def values(critic, unused_layout):
      x, _ = decoder.trunk(critic, spec.critic, batch.tokens)
      return decoder.state_values(critic, x)

    weights = filters.weights(batch, spec.variant)
    work = optimizer_step.StepInputs(spec, state, batch, weights, policy, values)
    after, metrics, _ = jax.jit(lambda: optimizer_step.take_step(work))()
    expected, of_update, _ = functions.update_step(state, update_test.NOTHING, batch, step)
    self.assertGreater(of_update['actor/pg_clipfrac'], 0.1)
    for name in ('stppo/grad_norm', 'stppo/bias_norm', 'stppo/divisor', 'stppo/step_norm'):
      np.testing.assert_allclose(metrics[name], of_update[name], rtol=1e-4, err_msg=name)
    for got, wanted in zip(jax.tree.leaves(after.actor), jax.tree.leaves(expected.actor)):
      np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)

  @parameterized.parameters('token', 'turn')
  @pytest.mark.slow
  def test_on_policy_step_is_the_policy_gradient(self, ratio):
    work, after, metrics = one_step('ppo', ratio=ratio)
    for name in ('stppo/ratio_std_token', 'stppo/ratio_std_turn', 'actor/ppo_kl'):
      self.assertEqual(metrics[name], 0, name)
    self.assertEqual(metrics['actor/pg_clipfrac'], 0)
    self.assertAlmostEqual(float(metrics['stppo/ess_share']), 1, places=6)
    if ratio != 'token':  # Every ratio is 1, but the gradient of a turn is shared.
      return
    weights, advantages = work.weights.policy, work.batch.advantages
    objective = lambda actor: jnp.sum(weights * advantages * work.policy(actor, None).logp)
    gradient = jax.grad(objective)(work.state.actor)
    ascended = jax.tree.map(jnp.add, work.state.actor, gradient)
    _, of_none, _ = one_step('ppo', ratio='none')
    for tree in (after.actor, of_none.actor):
      for got, wanted in zip(jax.tree.leaves(tree), jax.tree.leaves(ascended)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


class TaskTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    # Words of turn 1: key 0 'a b', key 1 'c'; of turn 2: key 0 'b', key 1 'a a'. END is 3.
    self.chain = task.Chain(turns=2, tokens=2, vocabulary=3, keys=2, rewards='end')
    words = [[[0, 1, 3], [2, 3, 3]], [[1, 3, 3], [0, 0, 3]]]
    self.world = task.World(
        words=jnp.asarray(words),
        following=jnp.asarray([[1, 0], [0, 1]]),
        confused=jnp.asarray([[1, 0], [1, 0]]),
        reliability=jnp.asarray([[1.0, 0.0], [1.0, 1.0]]),
    )

  def test_right_episode_follows_the_keys(self):
    ways = task.right_ways(self.chain, self.world)
    np.testing.assert_array_equal(ways.keys, [[0, 1], [1, 0]])
    np.testing.assert_array_equal(ways.previous, [[-1, 0], [-1, 1]])
    np.testing.assert_array_equal(ways.tokens, [[[0, 1, 3], [0, 0, 3]], [[2, 3, 3], [1, 3, 3]]])
    np.testing.assert_array_equal(ways.mask.sum(axis=2), [[3, 3], [2, 2]])
    self.assertTrue(ways.right.all())

  def test_rewards_are_at_last_turn_tokens(self):
    ways = task.right_ways(self.chain, self.world)
    batch = task.to_batch(self.chain, ways, jnp.arange(2))
    # key word         key word
    np.testing.assert_array_equal(batch.tokens[1], [1, 2, 3, 3, 0, 1, 3, 3])
    np.testing.assert_array_equal(batch.turn_ids[1], [0, 1, 1, 0, 0, 2, 2, 0])
    np.testing.assert_array_equal(batch.rewards[1], [0, 0, 0, 0, 0, 0, 1, 0])
    per_turn = dataclasses.replace(self.chain, rewards='turn')
    batch = task.to_batch(per_turn, ways, jnp.arange(2))
    np.testing.assert_array_equal(batch.rewards[1], [0, 0, 0.5, 0, 0, 0, 0.5, 0])

  def test_after_a_wrong_word_keys_are_noise(self):
    # Key 1 is never demonstrated rightly in turn 1: its word is that of key 0, 'a b'.
    questions = jnp.ones(200, jnp.int32)
    size = task.num_chances(self.chain, 200)
    chances = jax.random.uniform(jax.random.key(0), (size,))
    shown = task.demonstrate(self.chain, self.world, chances, questions)
    np.testing.assert_array_equal(shown.tokens[:, 0], np.tile([0, 1, 3], (200, 1)))
    self.assertFalse(shown.right.any())
    self.assertBetween(int(shown.keys[:, 1].sum()), 60, 140)  # 100 expected, deviation 7

  def test_sampling_follows_the_probabilities(self):
    probs = jnp.asarray([0.5, 0.2, 0.1, 0.2])
    questions = jnp.zeros(4000, jnp.int32)
    size = task.num_chances(self.chain, 4000)
    chances = jax.random.uniform(jax.random.key(0), (size,))
    scores = lambda x: jnp.broadcast_to(jnp.log(probs), (len(x), 4))
    played = task.play(self.chain, self.world, scores, chances, questions)
    first = np.bincount(played.tokens[:, 0, 0], minlength=4) / 4000
    np.testing.assert_allclose(first, probs, atol=0.03)
    # 'a b END' has .5 x .2 x .2 = .02; and what ended is not sampled further.
    self.assertAlmostEqual(float(played.right[:, 0].mean()), 0.02, delta=0.01)
    np.testing.assert_array_equal(played.mask[:, 0, 1], played.tokens[:, 0, 0] != 3)
    np.testing.assert_allclose(played.logp[:, 0, 0], jnp.log(probs)[played.tokens[:, 0, 0]])

  def test_features_see_the_window_only(self):
    tokens = jnp.asarray([[2, 1, 3]])
    zero = jnp.zeros(1, jnp.int32)
    seen = task.features(self.chain, zero, zero - 1, tokens, zero)[0]
    self.assertEqual(seen.shape, (3, self.chain.num_features))
    #          key   previous  1st token   2nd token   turn  place
    wanted = [[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0],
              [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0],
              [1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1]]  # fmt: skip
    np.testing.assert_array_equal(seen, wanted)


class RunTest(absltest.TestCase):

  def test_seeds_are_independent(self):
    four, one = small_run(), small_run(seeds=1, first_seed=2)
    for name, x in one.items():
      np.testing.assert_array_equal(x[0], four[name][2], name)

  def test_repeats_bit_for_bit(self):
    again = training.run(SMALL | {'actor.lr': 0.05}, 4)
    for name, x in small_run().items():
      np.testing.assert_array_equal(x, again[name], name)

  def test_staleness_counts_updates(self):
    """With staleness s the first policy plays the batches of updates 0 to s, and not s + 1."""
    frozen = small_run(lr=0.0)['rollout_corr/kl']
    np.testing.assert_allclose(frozen, 0, atol=1e-6)
    scores = lambda **options: small_run(**options)['critic/score/mean']
    of_first = scores(lr=0.0)
    for staleness in (0, 2):
      got = scores(staleness=staleness)
      np.testing.assert_array_equal(got[:, : staleness + 1], of_first[:, : staleness + 1])
      self.assertTrue((got[:, staleness + 1 :] != of_first[:, staleness + 1 :]).any())
    gap = np.abs(small_run(staleness=2)['rollout_corr/kl'])
    np.testing.assert_allclose(gap[:, 0], 0, atol=1e-6)
    self.assertTrue((gap[:, 1:] > 1e-3).all())

  def test_skipped_steps_are_counted_over_updates(self):
    skipped = small_run(lr=1e39)['toy/nonfinite']
    # All but the first, after which parameters are too large.
    np.testing.assert_array_equal(skipped, np.tile(4 * np.arange(1, 7) - 1, (4, 1)))

  def test_numbers_share_a_program(self):
    settings = SMALL | {'actor.lr': 1e-4, 'algorithm.clip_high': 0.3, 'pipeline.staleness': 8}
    self.assertEqual(
        toy_settings.split(toy_settings.make(SMALL))[0],
        toy_settings.split(toy_settings.make(settings))[0],
    )
    other = toy_settings.make(SMALL | {'algorithm.ratio': 'turn'})
    self.assertNotEqual(
        toy_settings.split(toy_settings.make(SMALL))[0], toy_settings.split(other)[0]
    )
    self.assertEqual(toy_settings.join(*toy_settings.split(other)), other)

  @pytest.mark.slow
  def test_evaluates_before_and_after_each_update(self):
    metrics = small_run()
    self.assertEqual(metrics['toy/success'].shape, (4, 7))
    self.assertEqual(metrics['stppo/step_norm'].shape, (4, 6))
    np.testing.assert_array_equal(
        metrics['toy/success'][:, 0], small_run(lr=0.0)['toy/success'][:, -1]
    )

  def test_success_equals_the_share_of_sampled_episodes(self):
    config = toy_settings.make(SMALL)
    world, params = jax.tree.map(lambda x: jnp.asarray(x[1]), training.warm_start(config.warm, 0))
    chances = jax.random.uniform(jax.random.key(0), (task.num_chances(CHAIN, 8000),))
    scores = functools.partial(training.log_probs, params)
    played = task.play(CHAIN, world, scores, chances, jnp.arange(8000) % CHAIN.keys)
    exact = small_run()['toy/success'][1, 0]
    self.assertAlmostEqual(float(played.right[:, -1].mean()), exact, delta=0.02)

  def test_matched_finds_the_value(self):
    run = lambda settings, seeds, first: {'x': np.full((1, 1), settings['actor.lr'] ** 2)}
    with absltest.mock.patch.object(training, 'run', run):
      value, reached = calibration.matched({}, 'actor.lr', 'x', 0.25, 0.01, 10.0, rounds=16)
    self.assertAlmostEqual(value, 0.5, places=3)
    self.assertAlmostEqual(reached, 0.25, places=3)


class SettingsTest(parameterized.TestCase):

  @parameterized.parameters(
      ({'model.folder': 'x'}, 'the toy task has'),
      ({'toy.turn': 2}, 'did you mean turns'),
      ({'toy.turns': 0}, 'must be at least 1'),
      ({'toy.rewards': 'never'}, 'allowed are end, turn'),
      ({'train.mini_batch': 7}, 'does not divide'),
      ({'algorithm.variant': 'grpo'}, 'group_size'),
      ({'train.epochz': 2}, 'did you mean train.epochs'),
  )
  def test_error_names_the_setting(self, settings, message):
    with self.assertRaisesRegex(UserError, message):
      toy_settings.make(settings)


if __name__ == '__main__':
  absltest.main()
