"""Demonstrations: played in the environment, imitated, compared by GRAO, and repeated on resume."""

import dataclasses
import json
import os
import random
import tempfile
import threading
import unittest
from unittest import mock

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stppo_jax import types
from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import demonstrations as demonstrations_lib
from stppo_jax.algorithms import variants
from stppo_jax.assembly import components
from stppo_jax.data import mix
from stppo_jax.envs import guard
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import demonstrations
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.systems import grao
from stppo_jax.training import loop
from stppo_jax.training import packing
from stppo_jax.training import run as run_lib
from stppo_jax.training import state as train_state
from stppo_jax.training import update
from stppo_jax.types import Episode
from stppo_jax.types import TurnBatch
from stppo_jax.types import UserError
from tests.support import tiny_run

MODEL = decoder.ModelConfig(
    vocab_size=32,
    d_model=16,
    num_layers=1,
    scan_layers=False,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=32,
    tie_embeddings=True,
)
DESCENT, LR = optax.sgd(1.0), optax.constant_schedule(1.0)
ROWS = 8
LENGTH = 16
IS_DEMONSTRATED = np.array([0, 0, 0, 1, 0, 1, 1, 0], np.float32)
PLAYER = 'tests.rollout.demonstrations_test:Oracle'


class Oracle:
  """Searches in half of the episodes, then answers."""

  def __init__(self, rng):
    self._searches = rng.random() < 0.5
    self._answer = ''

  def begin(self, task):
    self._answer = task.answers[0]

  def act(self, observation):
    if self._searches and '</information>' not in observation:
      return '<search> apple</search>'
    return f'<answer> {self._answer}</answer>'


class Broken:

  def __init__(self, rng):
    del rng

  def act(self, observation):
    raise ValueError('no idea')


def make_batch(demonstrated=IS_DEMONSTRATED, seed=0):
  """Two groups of four episodes, each with one or two turns."""
  rng = np.random.default_rng(seed)
  turn_ids = np.zeros((ROWS, LENGTH), np.int32)
  rewards = np.zeros((ROWS, LENGTH), np.float32)
  for b in range(ROWS):
    end = 2 + rng.integers(1, 4)
    turn_ids[b, 2:end] = 1
    if b % 2:
      turn_ids[b, end + 2 : end + 4] = 2
    rewards[b, np.flatnonzero(turn_ids[b])[-1]] = rng.random()
  mask = (turn_ids > 0).astype(np.float32)
  zeros = np.zeros((ROWS, LENGTH), np.float32)
  return TurnBatch(
      tokens=rng.integers(0, 32, (ROWS, LENGTH)).astype(np.int32),
      action_mask=mask,
      turn_ids=turn_ids,
      rewards=rewards,
      old_logp=zeros,
      ref_logp=zeros,
      old_values=zeros,
      advantages=zeros,
      returns=zeros,
      group_ids=np.arange(ROWS, dtype=np.int32) // 4,
      behaviour_logp=-3 * mask * (1 - demonstrated[:, None]),
      demonstrated=demonstrated,
  )


def make_spec(variant, micro_batch=ROWS, length_buckets=(LENGTH,), **columns):
  """Plain descent at rate 1, so that a step is minus the gradient."""
  row = dataclasses.replace(variants.VARIANTS[variant], entropy_coef=0.0, kl_in='none', **columns)
  return train_state.Spec(
      variant=row,
      actor=MODEL,
      critic=dataclasses.replace(MODEL, head='value') if row.needs_critic else None,
      actor_optimizer=DESCENT,
      critic_optimizer=DESCENT,
      actor_lr=LR,
      critic_lr=LR,
      micro_batch=micro_batch,
      length_buckets=length_buckets,
      temperature=1.0,
      logp_chunk=None,
      critic_warmup=0,
      num_logged_turns=2,
  )


def one_update(spec, batch, rows=None, mesh=None):
  """Returns (state before, state after, metrics, annotated batch) of one step on `rows`."""
  rows = np.arange(ROWS, dtype=np.int32) if rows is None else np.array(rows, np.int32)
  mesh = mesh or sharding.make_mesh(1, 1, 1, jax.devices()[:1])
  actor = decoder.init(jax.random.key(1), spec.actor)
  critic = None if spec.critic is None else decoder.init(jax.random.key(2), spec.critic)
  state = train_state.create_sharded(spec, actor, critic, mesh)
  before = jax.device_get(state)
  frozen = train_state.Frozen()
  functions = update.compile_functions(spec, state, frozen, mesh)
  ends = (np.asarray(batch.action_mask) > 0) * np.arange(1, LENGTH + 1)
  lengths = ends.max(axis=1)
  batch = jax.device_put(batch, sharding.rows(mesh))

  def step_of(rows):
    return packing.OptimizerStep(
        rows, packing.pack(lengths[rows], spec.micro_batch, spec.length_buckets)
    )

  whole = step_of(np.arange(ROWS, dtype=np.int32))
  batch, gap = functions.annotate(state, frozen, batch, packing.stack([whole]))
  state, batch, metrics = functions.with_advantages(state, batch)
  state, step_metrics, _ = functions.update_step(state, frozen, batch, step_of(rows))
  return before, *jax.device_get((state, gap | metrics | step_metrics, batch))


def moved(before, after):
  return jax.tree.map(lambda x, y: y - x, before, after)


def nll_sum(params, tokens, weights):
  """The loss of training/supervised.py before its mean, on rows that share no bin."""
  x, _ = decoder.trunk(params, MODEL, tokens, None)
  logp, _ = decoder.token_logp(params, MODEL, x, tokens)
  return -(logp * weights).sum()


def imitation_gradient(batch, rows):
  """The gradient of supervised training on the agent tokens of the rows."""
  weights = batch.action_mask[rows]
  params = decoder.init(jax.random.key(1), MODEL)
  grads = jax.jit(jax.grad(nll_sum))(params, batch.tokens[rows], weights)
  return jax.tree.map(lambda x: x / weights.sum(), grads)


class ImitationTest(parameterized.TestCase):

  @parameterized.parameters((8, (16,)), (1, (12, 16)), (2, (8, 16)))
  @pytest.mark.slow_after(1)
  def test_alone_it_is_the_gradient_of_sft(self, micro_batch, length_buckets):
    """All scores are equal, so that the policy gradient is 0."""
    batch = dataclasses.replace(make_batch(), rewards=np.zeros((ROWS, LENGTH), np.float32))
    spec = make_spec('st_ppo', micro_batch, length_buckets, imitation=2.0, divisor='none')
    before, after, metrics, _ = one_update(spec, batch)
    rows = np.flatnonzero(IS_DEMONSTRATED)
    expected = jax.tree.map(lambda x: -2 * x, imitation_gradient(batch, rows))
    chex.assert_trees_all_close(moved(before.actor, after.actor), expected, rtol=1e-4, atol=1e-6)
    nll = nll_sum(before.actor, batch.tokens[rows], batch.action_mask[rows])
    np.testing.assert_allclose(
        metrics['actor/imitation_loss'], nll / batch.action_mask[rows].sum(), rtol=1e-5
    )

  @pytest.mark.slow
  def test_on_eight_devices_it_equals_one(self):
    spec = make_spec('rloo', imitation=0.5)
    batch = make_batch()
    alone = one_update(spec, batch)
    together = one_update(spec, batch, mesh=sharding.make_mesh(2, 2, 2))
    chex.assert_trees_all_close(alone, together, rtol=1e-4, atol=1e-6)

  def test_imitation_adds_to_the_sampled_gradient(self):
    self.check_sum('st_ppo')

  @parameterized.parameters('rloo', 'grpo', 'reinforce')
  @pytest.mark.slow
  def test_it_adds_to_the_gradient_of_other_objectives(self, variant):
    self.check_sum(variant)

  @pytest.mark.slow
  def test_demonstrations_are_padding_to_the_divisor(self):
    self.check_padding(make_spec('st_ppo'), make_batch())

  def check_padding(self, spec, batch):
    """Without imitation, demonstrations are padding to the policy, the critic and all metrics."""
    is_sampled = 1 - IS_DEMONSTRATED[:, None]
    ids = np.where(IS_DEMONSTRATED, 100 + np.arange(ROWS), batch.group_ids).astype(np.int32)
    padded = dataclasses.replace(
        batch,
        action_mask=batch.action_mask * is_sampled,
        turn_ids=(batch.turn_ids * is_sampled).astype(np.int32),
        rewards=batch.rewards * is_sampled,
        group_ids=ids,
        demonstrated=None,
    )
    _, expected, expected_metrics, _ = one_update(spec, padded)
    _, plain, metrics, _ = one_update(spec, batch)
    chex.assert_trees_all_close(plain, expected, rtol=1e-5, atol=1e-7)
    metrics.pop('actor/imitation_loss')
    chex.assert_trees_all_close(metrics, expected_metrics, rtol=1e-4, atol=1e-6)
    return plain

  def check_sum(self, variant):
    batch = make_batch()
    plain = self.check_padding(make_spec(variant, divisor='none'), batch)
    _, both, _, _ = one_update(make_spec(variant, imitation=2.0, divisor='none'), batch)
    added = moved(plain.actor, both.actor)
    gradient = imitation_gradient(batch, np.flatnonzero(IS_DEMONSTRATED))
    chex.assert_trees_all_close(
        added, jax.tree.map(lambda x: -2 * x, gradient), rtol=1e-3, atol=1e-5
    )
    chex.assert_trees_all_equal(plain.critic, both.critic)

  @pytest.mark.slow
  def test_it_adds_to_an_objective_that_compares_rows(self):
    batch = make_batch()
    _, plain, _, _ = one_update(make_spec('p3o'), batch)
    _, both, metrics, _ = one_update(make_spec('p3o', imitation=2.0), batch)
    gradient = imitation_gradient(batch, np.flatnonzero(IS_DEMONSTRATED))
    expected = jax.tree.map(lambda x: -2 * x, gradient)
    chex.assert_trees_all_close(moved(plain.actor, both.actor), expected, rtol=1e-3, atol=1e-5)
    self.assertGreater(metrics['actor/imitation_loss'], 0)

  @parameterized.parameters((0.0, False), (2.0, True))
  def test_a_step_of_demonstrations_alone_trains_no_critic(self, imitation, moves):
    spec = make_spec('st_ppo', imitation=imitation, divisor='none')
    before, after, metrics, _ = one_update(spec, make_batch(), rows=[3, 5])
    chex.assert_trees_all_equal(before.critic, after.critic)
    change = jax.tree.leaves(moved(before.actor, after.actor))
    self.assertEqual(any(np.any(x) for x in change), moves)
    self.assertGreater(metrics['actor/imitation_loss'], 0)

  @pytest.mark.slow
  def test_a_batch_without_demonstrations_may_have_the_column(self):
    """One program serves all batches of a run, and computes the same."""
    nobody = np.zeros_like(IS_DEMONSTRATED)
    spec = make_spec('st_ppo', imitation=1.0)
    marked = one_update(spec, make_batch(nobody))
    _, expected, metrics, _ = one_update(spec, make_batch(nobody).replace(demonstrated=None))
    chex.assert_trees_all_equal(marked[1], expected)
    self.assertTrue(np.isnan(marked[2].pop('actor/imitation_loss')))
    chex.assert_trees_all_equal(marked[2], metrics)

  def test_a_step_without_demonstrations_has_no_imitation_loss(self):
    _, _, metrics, _ = one_update(
        make_spec('st_ppo', imitation=2.0, divisor='none'), make_batch(), rows=[0, 1]
    )
    self.assertTrue(np.isnan(metrics['actor/imitation_loss']))
    self.assertTrue(np.isfinite(metrics['stppo/grad_norm']))


def reference_objective(logp, batch, beta, lam):
  """GRAO's J, equation 3, mean over groups, in float64."""
  mask = np.asarray(batch.action_mask, float)
  scores = np.asarray(batch.rewards, float).sum(axis=1)
  means = (logp * mask).sum(axis=1) / mask.sum(axis=1)
  total = 0.0
  groups = np.unique(batch.group_ids)
  for group in groups:
    rows = np.flatnonzero(batch.group_ids == group)
    z = (scores[rows] - scores[rows].mean()) / (scores[rows].std(ddof=1) + 1e-6)
    is_reference = np.asarray(batch.demonstrated)[rows] > 0
    e, a = means[rows][~is_reference], z[~is_reference]
    total += np.mean(a * e)
    if is_reference.any():
      (m,), (a_y,) = means[rows][is_reference], z[is_reference]
      total += beta * a_y * m + lam * np.mean(a * (e - m))
    else:
      total += lam * np.mean(a * e)
  return total / len(groups)


class GraoTest(parameterized.TestCase):

  @parameterized.parameters((0.5, 0.6), (0.0, 0.6), (0.5, 0.0))
  def test_its_weights_are_the_slopes_of_the_objective(self, beta, lam):
    """Finite differences of J, a linear function of the log-probs, with one reference per group."""
    demonstrated = np.array([0, 0, 0, 1, 0, 1, 0, 0], np.float32)
    batch = make_batch(demonstrated)
    variant = dataclasses.replace(variants.VARIANTS['grao'], grao_beta=beta, grao_lambda=lam)
    weights, _ = grao.grao(batch, variant)
    lengths = np.asarray(batch.action_mask).sum(axis=1)
    zero = np.zeros((ROWS, LENGTH))
    for b in range(ROWS):
      t = np.flatnonzero(batch.action_mask[b])[0]
      shifted = zero.copy()
      shifted[b, t] = 1.0
      slope = reference_objective(shifted, batch, beta, lam)
      # The weight of a token in seq-mean-token-mean is 1 / (B |y|).
      np.testing.assert_allclose(weights[b, t] / (ROWS * lengths[b]), slope, rtol=1e-5, atol=1e-7)

  def test_without_references_it_is_reinforce_with_z_scores(self):
    batch = dataclasses.replace(make_batch(), demonstrated=None)
    row = variants.VARIANTS['grao']
    plain = dataclasses.replace(row, grao_beta=0.0, grao_lambda=0.0)
    zscores = dataclasses.replace(row, advantage='group_zscore')
    expected = advantages.estimate(batch, zscores).advantages
    np.testing.assert_allclose(advantages.estimate(batch, plain).advantages, expected, rtol=1e-6)
    np.testing.assert_allclose(
        advantages.estimate(batch, row).advantages, 1.6 * expected, rtol=1e-6
    )

  def test_rows_of_an_episode_share_its_weight(self):
    """As with the other advantages of groups. An episode has two rows here."""
    batch = dataclasses.replace(make_batch(), demonstrated=None)
    ids = np.arange(ROWS, dtype=np.int32) // 2
    batch = dataclasses.replace(batch, episode_ids=ids)
    row = variants.VARIANTS['grao']
    plain = dataclasses.replace(row, grao_beta=0.0, grao_lambda=0.0)
    zscores = dataclasses.replace(row, advantage='group_zscore')
    expected = advantages.estimate(batch, zscores).advantages
    weights = np.asarray(advantages.estimate(batch, plain).advantages)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    self.assertTrue(np.abs(weights).max(axis=1).all())

  def test_failed_samples_move_towards_the_reference(self):
    demonstrated = np.array([0, 0, 0, 1] * 2, np.float32)
    batch = make_batch(demonstrated)
    rewards = np.where(demonstrated[:, None] > 0, batch.rewards, 0)
    batch = dataclasses.replace(batch, rewards=rewards)
    weights, _ = grao.grao(batch, variants.VARIANTS['grao'])
    by_row = np.asarray(weights).sum(axis=1)
    self.assertTrue((by_row[demonstrated > 0] > 0).all())
    self.assertTrue((by_row[demonstrated == 0] < 0).all())

  def test_ratios_of_references_start_at_one(self):
    """The sampler has no log-prob of them, so that the trainer's stands for it."""
    spec = make_spec('grao', ratio='token', old_logp='sampler')
    _, _, metrics, batch = one_update(spec, make_batch())
    rows = IS_DEMONSTRATED > 0
    np.testing.assert_array_equal(batch.imitation_mask[rows], batch.action_mask[rows])
    self.assertTrue((np.asarray(batch.action_mask)[rows].sum(axis=1) > 0).all())
    logp = np.asarray(batch.old_logp)[rows]
    np.testing.assert_array_equal(logp, np.asarray(batch.behaviour_logp)[rows])
    self.assertTrue((logp[np.asarray(batch.action_mask)[rows] > 0] < -0.1).all())
    # Without the references, whose gap is 0 by definition.
    np.testing.assert_allclose(metrics['rollout_corr/rollout_ppl'], np.exp(3), rtol=1e-5)

  def test_rows_of_another_objective_leave_the_batch(self):
    batch = make_batch()
    logp = jnp.full((ROWS, LENGTH), -0.7)
    after = demonstrations_lib.split(batch, logp, variants.VARIANTS['grpo'])
    rows = IS_DEMONSTRATED > 0
    for column in (after.action_mask, after.turn_ids, after.rewards):
      self.assertFalse(np.asarray(column)[rows].any())
      self.assertTrue(np.asarray(column)[~rows].any())
    self.assertLen(set(np.asarray(after.group_ids).tolist()), 2 + rows.sum())
    np.testing.assert_array_equal(after.imitation_mask, batch.action_mask * rows[:, None])
    none = dataclasses.replace(batch, demonstrated=None)
    self.assertIs(demonstrations_lib.split(none, logp, variants.VARIANTS['grpo']), none)


def setUpModule():
  global FOLDER
  logging.set_verbosity(logging.ERROR)
  temporary = tempfile.TemporaryDirectory()
  unittest.addModuleCleanup(temporary.cleanup)
  FOLDER = temporary.name
  tiny_run.write(FOLDER)


def tearDownModule():
  unittest.doModuleCleanups()  # pytest leaves that out


def make_config(**values):
  settings = {
      'algorithm__variant': 'grpo',
      'algorithm__imitation': 0.5,
      'rollout__group_size': 4,
      'rollout__demonstrations': PLAYER,
      'pipeline__staleness': 0,
  }
  return tiny_run.make_config(FOLDER, **settings | values)


class PlayTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(tiny_run.on_one_device())

  def batches(self, **values):
    config = make_config(**values)
    parts = components.resolve(config)
    variant = objective.make_variant(config)
    run_lib.load_inputs(parts, variant)
    learners, agent = run_lib.setup(parts, variant)
    batches = run_lib.make_batches(config, agent, learners.policy, parts.tasks, NEVER)
    return batches, batches.copy(learners.actor)

  def test_batch_keeps_its_size_and_samples(self):
    batches, params = self.batches(rollout__demonstrate_every=2)
    sampled = batches.sample(params, 1, 0)
    plain = dataclasses.replace(batches, demonstrator=None).sample(params, 1, 0)
    flags = [episode.demonstrated for episode in sampled.episodes]
    self.assertEqual(flags, [False, False, False, True, *[False] * 4] * 2)
    for ours, theirs in zip(sampled.episodes, plain.episodes, strict=True):
      self.assertEqual((ours.task, ours.group), (theirs.task, theirs.group))
      if ours.demonstrated:
        self.assertEqual(ours.score, 1)
        self.assertTrue(all(np.isnan(turn.logp).all() for turn in ours.turns))
        action = batches.agent.tokenizer.decode(ours.turns[-1].tokens)
        self.assertEqual(action, f'<answer> {ours.task.answers[0]}</answer>')
      else:
        self.assertEqual(ours.to_dict(), theirs.to_dict())
    again = batches.sample(params, 1, 0)
    self.assertEqual(*[[row.to_dict() for row in x.episodes] for x in (sampled, again)])
    with self.subTest('a checkpoint holds the batch without loss'):
      record = json.loads(json.dumps(batches_lib.to_json(sampled)))
      restored = batches.restored(record)
      self.assertEqual(*[[row.to_dict() for row in x.episodes] for x in (sampled, restored)])
    with self.subTest('metrics leave demonstrations out'):
      metrics = episodes_lib.summarize_update(sampled.episodes)
      scores = [row.score for row in sampled.episodes if not row.demonstrated]
      self.assertEqual(metrics['demonstrations/rows'], 2)
      self.assertEqual(metrics['demonstrations/score/mean'], 1)
      self.assertAlmostEqual(metrics['critic/score/mean'], np.mean(scores))

  def test_recorded_episodes_are_played_on_their_own_tasks(self):
    batches, params = self.batches()
    task = batches.stream.take(0)[1]
    path = os.path.join(FOLDER, 'recorded.jsonl')
    turns = ['<search> sky</search>', f'<answer> {task.answers[0]}</answer>']
    with open(path, 'w', encoding='utf-8') as file:
      file.write(json.dumps({'task': task.id, 'turns': turns}) + '\n')
    batches, params = self.batches(rollout__demonstrations=path)
    sampled = batches.sample(params, 1, 0)
    (row,) = [row for row in sampled.episodes if row.demonstrated]
    self.assertEqual(row.task.id, task.id)
    self.assertLen(sampled.episodes, 16)
    tokenizer = batches.agent.tokenizer
    self.assertEqual([tokenizer.decode(turn.tokens) for turn in row.turns], turns)
    self.assertEqual(row.score, 1)
    with self.subTest('and a run can repeat its own episodes'):
      records = episodes_lib.to_records([row], tokenizer, 1, 'train')
      with open(path, 'w', encoding='utf-8') as file:
        file.write(json.dumps(records[0]) + '\n')
      (player,) = demonstrations.read(path, tokenizer).values()
      repeated = player(random.Random(0))
      self.assertEqual([repeated.act('') for _ in range(3)], [*turns, ''])
    with self.subTest('a turn ends where a sampled one does'):
      with open(path, 'w', encoding='utf-8') as file:
        longer = [f'{turns[0]}\n', f'{turns[1]} I am sure.']
        file.write(json.dumps({'task': task.id, 'turns': longer}) + '\n')
      batches, params = self.batches(rollout__demonstrations=path)
      sampled = batches.sample(params, 1, 0)
      (row,) = [row for row in sampled.episodes if row.demonstrated]
      self.assertEqual([tokenizer.decode(turn.tokens) for turn in row.turns], turns)
    with self.subTest('turns that are missing end the episode'):
      with open(path, 'w', encoding='utf-8') as file:
        file.write(json.dumps({'task': task.id, 'turns': turns[:1]}) + '\n')
      batches, params = self.batches(rollout__demonstrations=path)
      (row,) = [row for row in batches.sample(params, 1, 0).episodes if row.demonstrated]
      self.assertEqual((len(row.turns), row.truncated, row.score), (1, True, 0))

  @parameterized.parameters(
      ('{"task": 1', 'line 1 .JSONDecodeError'),
      ('{"task": "a", "turns": [1]}', 'line 1 .ValueError: turns=.1.'),
      ('{"task": "a", "turns": ["x", ""]}', 'line 1 .ValueError: turns='),
      ('{"turns": []}', "line 1 .KeyError: 'task'"),
  )
  def test_file_without_episodes_is_one_line(self, text, message):
    path = os.path.join(FOLDER, 'wrong.jsonl')
    with open(path, 'w', encoding='utf-8') as file:
      file.write(text + '\n')
    with self.assertRaisesRegex(UserError, f'wrong.jsonl[^\n]*{message}[^\n]*give lines of'):
      demonstrations.read(path, None)

  def test_a_file_that_fits_no_task_is_refused(self):
    path = os.path.join(FOLDER, 'others.jsonl')
    with open(path, 'w', encoding='utf-8') as file:
      file.write('{"task": 7, "turns": ["x"]}\n')
    env = mock.Mock(rows_per_episode=1)
    source = demonstrations.load(path, None)
    demonstrations.check_tasks(path, source, env, [types.Task('7'), types.Task('8')])
    with self.assertRaisesRegex(UserError, "no line has the id .* such as '8'"):
      demonstrations.check_tasks(path, source, env, [types.Task('8')])
    env.rows_per_episode = 2
    with self.assertRaisesRegex(UserError, 'one role'):
      demonstrations.check_tasks(path, source, env, [types.Task('7')])
    with self.assertRaisesRegex(UserError, 'there is no such file'):
      demonstrations.load(path + 'x', None)

  def test_environments_that_raise_count(self):
    batches, params = self.batches()
    play = demonstrations.Demonstrator.play

    def play_failed(*args):
      episodes = play(*args)
      for row in episodes:
        row.error = 'it broke'
      return episodes

    self.enterContext(mock.patch.object(demonstrations.Demonstrator, 'play', play_failed))
    batches = dataclasses.replace(batches, max_failed=0.1)
    with self.assertRaisesRegex(types.RunError, 'the environment raised'):
      batches.sample(params, 1, 0)

  def test_mistakes_of_a_player_are_one_line(self):
    broken = 'tests.rollout.demonstrations_test:Broken'
    batches, params = self.batches(rollout__demonstrations=broken)
    with self.assertRaisesRegex(UserError, r'^[^\n]*ValueError: no idea[^\n]*demonstrations_test'):
      batches.sample(params, 1, 0)
    with self.assertRaisesRegex(UserError, 'act.observation. is needed'):
      demonstrations.load('tests.rollout.demonstrations_test:FOLDER', None)

  def test_player_of_a_mix_gets_the_task_of_its_environment(self):
    own = types.Task('q1', 'Which?', ('a',), dataset='nq')
    (task,) = mix.tag('game', [own])
    source = demonstrations.load(PLAYER, None)
    with mock.patch.object(Oracle, 'begin') as begin:
      source(task)(random.Random(0))
      source(own)(random.Random(0))
    self.assertEqual(begin.call_args_list, [mock.call(own)] * 2)

  @parameterized.parameters(True, False)
  def test_stop_leaves_a_slow_player(self, raises):
    batches, _ = self.batches()
    stop_signal = StopSignal()
    released = threading.Event()
    self.addCleanup(released.set)

    def act(observation):
      stop_signal.set()
      released.wait(30)

    demonstrator = dataclasses.replace(
        batches.demonstrator,
        source=lambda task: lambda rng: mock.Mock(act=act),
        guard=guard.Guard(0.0, stop_signal, raises=raises),  # False: with several processes
    )
    with self.assertRaises(types.Stopped):
      demonstrator.play(jax.random.key(0), [types.Task('1', 'q', ('a',))], [0])

  @parameterized.parameters(
      (dict(rollout__demonstrated=4), 'leaves nothing to sample'),
      (dict(rollout__demonstrated=3), 'leaves one sampled episode'),
      (dict(algorithm__imitation=0.0), 'does not train on demonstrations'),
      (dict(env__kind='gateway:a:b'), 'is a program'),
      (dict(rollout__replay='folder'), 'samples nothing'),
      (dict(rollout__routing_replay='sampling'), 'routing_replay'),
      (dict(algorithm__variant='grao', algorithm__whiten=True), 'whiten=True'),
      (
          dict(rollout__demonstrate_every=2, env__mix=({'kind': 'search'}, {'kind': 'own:Env'})),
          'sorts by environment',
      ),
      (dict(algorithm__variant='grao', algorithm__kl_in='reward'), "kl_in='reward'"),
  )
  def test_settings_without_a_meaning_are_refused(self, values, message):
    with self.assertRaisesRegex(UserError, f'^[^\n]*{message}[^\n]*$'):
      objective.make_variant(validation.validate(make_config(**values)))

  def test_a_record_survives_and_others_have_no_flag(self):
    batches, params = self.batches()
    rows = batches.sample(params, 1, 0).episodes
    for row in rows:
      record = json.loads(json.dumps(row.to_dict()))
      self.assertEqual('demonstrated' in record, row.demonstrated)
      self.assertEqual(Episode.from_dict(record, row.task).to_dict(), row.to_dict())

  @parameterized.parameters(('grpo', 1), ('grao', 0))
  @pytest.mark.slow
  def test_resume_is_exact(self, variant, staleness):
    values = dict(algorithm__variant=variant, pipeline__staleness=staleness, eval__every=0)
    if variant == 'grao':
      values['algorithm__imitation'] = 0.0
    straight, resumed = (self.enterContext(tempfile.TemporaryDirectory()) for _ in range(2))
    with tiny_run.updates_compiled_ahead():
      loop.start(make_config(**values), straight)
    loop.start(make_config(**values | dict(train__updates=1)), resumed)
    loop.start(make_config(**values), resumed)
    ours, theirs = map(numbers, (straight, resumed))
    self.assertEqual(ours[-1], theirs[-1])
    self.assertEqual(ours[-1]['demonstrations/rows'], 4)
    self.assertGreater(ours[-1]['actor/imitation_loss'], 0)


def numbers(workdir):
  """The metrics of each update, without timings."""
  lines = metrics_lib.read_metrics(workdir)
  skipped = ('time', 'timing_s/', 'perf/')
  return [{k: v for k, v in line.items() if not k.startswith(skipped)} for line in lines]


if __name__ == '__main__':
  absltest.main()
