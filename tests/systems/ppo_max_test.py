"""Normalised scores: moments over batches by hand and by NumPy, clipping, and exact resume."""

import dataclasses
import tempfile
import unittest

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import ppo_max as experiment
from stppo_jax.algorithms import variants
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.systems import ppo_max
from stppo_jax.training import loop
from stppo_jax.types import Task
from stppo_jax.types import TurnBatch
from tests.support import tiny_run

PPO_MAX = variants.VARIANTS['ppo_max']


def make_batch(scores, first_turn=0.0, padding=0):
  """Episodes of two turns: the first earns `first_turn`, the second the rest of the score."""
  scores = np.asarray(scores, np.float32)
  num_rows = len(scores) + padding
  turn_ids = np.zeros((num_rows, 6), np.int32)
  turn_ids[: len(scores), 1:3] = 1
  turn_ids[: len(scores), 4] = 2
  rewards = np.zeros((num_rows, 6), np.float32)
  rewards[: len(scores), 2] = first_turn
  rewards[: len(scores), 4] = scores - first_turn
  zeros = np.zeros((num_rows, 6), np.float32)
  return TurnBatch(
      tokens=turn_ids,
      action_mask=(turn_ids > 0).astype(np.float32),
      turn_ids=turn_ids,
      rewards=rewards,
      old_logp=zeros,
      ref_logp=zeros,
      old_values=zeros,
      advantages=zeros,
      returns=zeros,
      group_ids=np.arange(num_rows, dtype=np.int32),
  )


def normalised(*batches, **columns):
  """Returns the rewards of the last batch [B,T], and the moments."""
  variant = dataclasses.replace(PPO_MAX, **columns)
  moments = ppo_max.ScoreMoments.zero()
  for batch in batches:
    batch, moments = ppo_max.normalise(batch, moments, variant)
  return np.asarray(batch.rewards), moments


class MomentsTest(parameterized.TestCase):

  def test_two_batches_by_hand(self):
    """1, 3 and then 5, 7: means 2 and 4; sums of squares 2 and 20, deviation sqrt(20 / 3)."""
    rewards, moments = normalised(make_batch([1, 3]), score_norm='normalise', score_clip=0)
    np.testing.assert_allclose(rewards.sum(axis=1), [-(0.5**0.5), 0.5**0.5], rtol=1e-6)
    np.testing.assert_allclose(moments, [2, 2, 2])
    batches = make_batch([1, 3]), make_batch([5, 7])
    rewards, moments = normalised(*batches, score_norm='normalise', score_clip=0)
    np.testing.assert_allclose(moments, [4, 4, 20])
    np.testing.assert_allclose(rewards.sum(axis=1), np.array([1, 3]) / (20 / 3) ** 0.5, rtol=1e-6)
    rewards, _ = normalised(*batches, score_norm='scale', score_clip=0)
    np.testing.assert_allclose(rewards.sum(axis=1), np.array([5, 7]) / (20 / 3) ** 0.5, rtol=1e-6)

  def test_any_split_has_the_moments_of_all_scores(self):
    rng = np.random.default_rng(0)
    scores = rng.normal(3.0, 2.0, 40)
    parts = [make_batch(part, padding=2) for part in np.split(scores, [1, 8, 8 + 17])]
    _, moments = normalised(*parts)
    np.testing.assert_allclose(moments.mean, scores.mean(), rtol=1e-5)
    np.testing.assert_allclose(moments.deviation, scores.std(ddof=1), rtol=1e-5)
    self.assertEqual(moments.num_scores, 40)  # rows of padding do not count

  @parameterized.parameters(0.0, 0.1, 7.3)
  def test_equal_scores_are_divided_by_one(self, score):
    batch = make_batch([score] * 5)
    rewards, moments = normalised(batch, batch, score_norm='normalise')
    self.assertEqual(moments.deviation, 1)
    np.testing.assert_allclose(rewards.sum(axis=1), 0, atol=1e-6)

  @parameterized.parameters('scale', 'normalise')
  def test_the_unit_of_the_scores_does_not_matter(self, mode):
    scores = np.random.default_rng(1).random((3, 8))
    plain, _ = normalised(*map(make_batch, scores), score_norm=mode)
    tenfold, _ = normalised(*map(make_batch, 10 * scores), score_norm=mode)
    np.testing.assert_allclose(plain, tenfold, rtol=1e-5, atol=1e-6)

  def test_clipped_scores_and_rewards_of_turns(self):
    """The deviation divides the first turn's reward, and the last token gets the rest of s'."""
    scores = np.array([0.0, 0.0, 0.0, 4.0])  # mean 1, deviation 2
    rewards, _ = normalised(make_batch(scores, first_turn=0.5), score_clip=0.8)
    np.testing.assert_allclose(rewards.sum(axis=1), [-0.5, -0.5, -0.5, 0.8], rtol=1e-6)
    np.testing.assert_allclose(rewards[:, 2], 0.25)
    self.assertEqual(np.count_nonzero(rewards), 8)

  def test_it_compiles_with_a_batch_of_padding(self):
    batch = jax.tree.map(jnp.asarray, make_batch([], padding=3))
    run = jax.jit(ppo_max.normalise, static_argnums=2)
    batch, moments = run(batch, ppo_max.ScoreMoments.zero(), PPO_MAX)
    np.testing.assert_array_equal(batch.rewards, 0)
    np.testing.assert_array_equal(moments, 0)


def setUpModule():
  global FOLDER
  logging.set_verbosity(logging.ERROR)
  temporary = tempfile.TemporaryDirectory()
  unittest.addModuleCleanup(temporary.cleanup)
  FOLDER = temporary.name
  tiny_run.write(FOLDER)


def tearDownModule():
  unittest.doModuleCleanups()  # pytest leaves that out


class RunTest(absltest.TestCase):

  @pytest.mark.slow
  def test_resume_is_exact(self):
    """On all simulated devices. The moments are in the checkpoint, and go on from there."""
    values = dict(algorithm__variant='ppo_max', pipeline__staleness=0, eval__every=0)
    values |= dict(algorithm__kl_in=None, train__critic_warmup=1)
    straight, resumed = (self.enterContext(tempfile.TemporaryDirectory()) for _ in range(2))
    loop.start(tiny_run.make_config(FOLDER, **values), straight)
    loop.start(tiny_run.make_config(FOLDER, **values, train__updates=1), resumed)
    loop.start(tiny_run.make_config(FOLDER, **values), resumed)
    ours, theirs = (metrics_lib.read_metrics(folder) for folder in (straight, resumed))
    skipped = ('time', 'timing_s/', 'perf/')
    names = [name for name in ours[-1] if not name.startswith(skipped)]
    self.assertIn('critic/score_moments/mean', names)
    self.assertEqual([ours[-1][name] for name in names], [theirs[-1][name] for name in names])
    scores = [line['critic/score/mean'] for line in ours[1:]]
    self.assertAlmostEqual(ours[-1]['critic/score_moments/mean'], np.mean(scores), places=5)


class ReaderTest(absltest.TestCase):

  def test_demonstration_follows_the_steps(self):
    steps = (
        ('country where Radium was discovered', 'France'),
        ('capital of #1', 'Paris'),
        ('nearest foreign capital to #2', 'Brussels'),
    )
    player = experiment.Reader(None)
    player.begin(Task('t', answers=('Brussels',), steps=steps))
    expected = [
        '<think> country where Radium was discovered</think><search> Radium</search>',
        '<think> country France. capital of France</think><search> France</search>',
        '<think> capital Paris. nearest foreign capital to Paris</think><search> Paris</search>',
        '<think> foreign capital Brussels</think><answer> Brussels</answer>',
        '',
    ]
    self.assertEqual([player.act('') for _ in expected], expected)


if __name__ == '__main__':
  absltest.main()
