"""Staleness and resumption of the whole loop, bit for bit, with a policy of a few numbers."""

import dataclasses
import gc
import json
import os
import shutil
import tempfile
import threading
import types
import unittest
from unittest import mock
import weakref

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import numpy as np

from stppo_jax.assembly import components
from stppo_jax.evaluation import sample
from stppo_jax.models import sharding
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import batching
from stppo_jax.rollout import pipeline as pipelines
from stppo_jax.rollout import prepare
from stppo_jax.settings import objective
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.training import checkpoint
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import loop
from stppo_jax.training import recovery
from stppo_jax.training import run as run_lib
from stppo_jax.types import RunError
from stppo_jax.types import Stopped
from stppo_jax.types import UserError
from tests.support import micro_run

UPDATES = 4


def setUpModule():
  global FOLDER, STRAIGHT
  logging.set_verbosity(logging.ERROR)
  temporary = tempfile.TemporaryDirectory()
  unittest.addModuleCleanup(temporary.cleanup)
  FOLDER, STRAIGHT = temporary.name, {}
  micro_run.write_knowledge(FOLDER)


def tearDownModule():
  unittest.doModuleCleanups()  # pytest leaves that out


def make_config(**values):
  return micro_run.make_config(FOLDER, **values)


def straight(**values):
  """Returns (metrics, final state) of an undisturbed run, made once."""
  key = tuple(sorted(values.items()))
  if key not in STRAIGHT:
    with tempfile.TemporaryDirectory() as workdir:
      micro_run.train(make_config(**values), workdir)
      STRAIGHT[key] = (
          micro_run.comparable_metrics(workdir),
          micro_run.state_after(make_config(**values), workdir, UPDATES),
      )
  return STRAIGHT[key]


def failing_at_batch(wanted, error):
  """Context manager in which sampling batch `wanted` raises the error."""
  sample = batches_lib.Batches.sample

  def failing(batches, params, number, stale):
    if number == wanted:
      raise error
    return sample(batches, params, number, stale)

  return mock.patch.object(batches_lib.Batches, 'sample', failing)


class ResumeTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())

  def assert_as_straight(self, **values):
    metrics, state = straight(**values)
    self.assertEqual(micro_run.comparable_metrics(self.workdir), metrics)
    chex.assert_trees_all_equal(
        micro_run.state_after(make_config(**values), self.workdir, UPDATES), state
    )

  @parameterized.parameters((0, 1), (0, 3), (1, 0), (1, 2), (2, 1), (2, 3), (2, UPDATES))
  def test_killed_and_resumed_equals_straight(self, staleness, killed_after):
    """Every update ends at an epoch's end, and every second batch starts with a checkpoint."""
    values = {'pipeline.staleness': staleness, 'train.checkpoint_every': 2}
    with self.assertRaises(micro_run.Killed):
      micro_run.train(
          make_config(**values | {'train.updates': UPDATES + 1}),
          self.workdir,
          micro_run.killed_after(killed_after),
      )
    micro_run.train(make_config(**values), self.workdir)
    self.assert_as_straight(**values)

  @parameterized.parameters((0, 3), (1, 1))
  def test_killed_and_resumed_with_replaced_groups_equals_straight(self, staleness, killed_after):
    values = {
        'pipeline.staleness': staleness,
        'algorithm.variant': 'grpo',
        'rollout.group_size': 2,
        'rollout.max_num_gen_batches': 4,
    }
    with self.assertRaises(micro_run.Killed):
      micro_run.train(make_config(**values), self.workdir, micro_run.killed_after(killed_after))
    micro_run.train(make_config(**values), self.workdir)
    self.assert_as_straight(**values)
    rows = metrics_lib.read_metrics(self.workdir)[1:]
    self.assertGreater(max(row['train/num_gen_batches'] for row in rows), 1)
    self.assertGreater(min(row['rollout/groups_kept'] for row in rows), 0.5)

  def test_killed_after_every_update_equals_straight(self):
    values = {'pipeline.staleness': 2}
    for _ in range(UPDATES - 1):
      with self.assertRaises(micro_run.Killed):
        micro_run.train(make_config(**values), self.workdir, micro_run.killed_after(1))
    micro_run.train(make_config(**values), self.workdir)
    self.assert_as_straight(**values)

  @parameterized.parameters(0, 2)
  def test_more_updates_later_equal_all_at_once(self, staleness):
    values = {'pipeline.staleness': staleness, 'eval.every': 1}
    for updates in (1, 3, UPDATES):
      micro_run.train(make_config(**values | {'train.updates': updates}), self.workdir)
    self.assert_as_straight(**values)

  def test_a_stop_is_saved_and_resumed(self):
    values = {'pipeline.staleness': 0, 'train.checkpoint_every': 0}
    answers = iter([False, False, True, True])
    micro_run.train(make_config(**values), self.workdir, StopSignal(lambda: next(answers)))
    self.assertLen(metrics_lib.read_metrics(self.workdir), 3)
    micro_run.train(make_config(**values), self.workdir)
    self.assert_as_straight(**values)

  @parameterized.parameters(1, 3)
  def test_stop_saves_without_waiting_for_batches_ahead(self, staleness):
    """The second update is done, and the batch after the next one is still being sampled."""
    values = {'pipeline.staleness': staleness, 'train.checkpoint_every': 0, 'eval.every': 0}
    stop, sample, saved = threading.Event(), batches_lib.Batches.sample, []
    were_stopped = []
    unfinished = 2 + staleness

    def stopped(batches, params, number, stale):
      if number >= unfinished:
        were_stopped.append(stop.wait(60))
        raise Stopped  # as an agent does at the signal
      return sample(batches, params, number, stale)

    def is_set():
      return len(metrics_lib.read_metrics(self.workdir)) - 1 == 2

    def save(checkpoints, updates, state, progress, *args):
      saved.append(progress)
      stop.set()  # ends the sampling thread, so that a save that waits for it is too late
      return save_checkpoint(checkpoints, updates, state, progress, *args)

    save_checkpoint = checkpoint.Checkpoints.save
    with mock.patch.object(batches_lib.Batches, 'sample', stopped):
      with mock.patch.object(checkpoint.Checkpoints, 'save', save):
        micro_run.train(make_config(**values), self.workdir, StopSignal(is_set))
    (progress,) = saved
    self.assertEqual(were_stopped, [True])
    sampled = [record['number'] for record in progress['sampled']]
    unsampled = [record['number'] for record in progress['unsampled']]
    self.assertEqual(unsampled, [unfinished])
    self.assertEqual(sampled + unsampled, list(range(3, 3 + staleness)))
    micro_run.train(make_config(**values), self.workdir)
    self.assert_as_straight(**values)

  def test_copies_of_a_checkpoint_are_freed_once_used(self):
    values = {'pipeline.staleness': 2, 'train.updates': 1, 'train.checkpoint_every': 0}
    sample, copies, alive = batches_lib.Batches.sample, [], []

    def first_only(batches, params, number, stale):
      if number > 1:
        raise Stopped
      return sample(batches, params, number, stale)

    def watched(batches, params, number, stale):
      gc.collect()
      alive.append(sum(copy() is not None for copy in copies[:2]))
      copies.append(weakref.ref(jax.tree.leaves(params)[0]))
      return sample(batches, params, number, stale)

    with mock.patch.object(batches_lib.Batches, 'sample', first_only):
      micro_run.train(make_config(**values), self.workdir)
    with mock.patch.object(batches_lib.Batches, 'sample', watched):
      micro_run.train(make_config(**values | {'train.updates': 8}), self.workdir)
    self.assertEqual(alive[-1], 0)  # batches 2 and 3 were not sampled before the stop

  def test_environment_error_saves_the_state(self):
    values, play, batches = {'train.checkpoint_every': 0}, micro_run.Agent.play, []

    def failing(agent, *args, greedy=False, **kwargs):
      episodes = play(agent, *args, greedy=greedy, **kwargs)
      if not greedy:
        batches.append(episodes)
      for episode in episodes if len(batches) == 3 else ():
        episode.failed, episode.error = True, 'Env raised ValueError: x (mine.py:3), in turn 1'
      return episodes

    with mock.patch.object(micro_run.Agent, 'play', failing):
      line = r'^[^\n]*100% of 10 episodes[^\n]*max_failed=0.5[^\n]*\(mine.py:3\), in turn 1$'
      with self.assertRaisesRegex(RunError, line):
        micro_run.train(make_config(**values), self.workdir)
    with checkpoint.Checkpoints(self.workdir) as checkpoints:
      self.assertEqual(checkpoints.newest(), 2)
    micro_run.train(make_config(**values), self.workdir)
    self.assert_as_straight(**values)

  def test_last_update_ends_a_batch_that_nobody_needs(self):
    asked, play = [], micro_run.Agent.play

    def played(agent, *args, greedy=False, stop_signal=NEVER, **kwargs):
      if not greedy:
        asked.append((stop_signal, stop_signal.is_set()))
      return play(agent, *args, greedy=greedy, stop_signal=stop_signal, **kwargs)

    with mock.patch.object(micro_run.Agent, 'play', played):
      micro_run.train(make_config(**{'pipeline.staleness': 1}), self.workdir)
    self.assertFalse(any(answer for _, answer in asked[:UPDATES]))
    self.assertTrue(all(signal.is_set() for signal, _ in asked))

  @parameterized.parameters((0, 0), (1, 2), (0, UPDATES))
  def test_stop_during_evaluation_is_resumed(self, staleness, at):
    """The evaluation ends early, and the resumed run begins with it."""
    values = {'pipeline.staleness': staleness, 'train.checkpoint_every': 0}
    stop, play, evaluations = StopSignal(), micro_run.Agent.play, []

    def stopped(agent, *args, greedy=False, stop_signal=NEVER, **kwargs):
      if greedy:
        evaluations.append(len(evaluations) * 2)
        if evaluations[-1] == at:
          stop.set()
          stop_signal.raise_if_set()
      return play(agent, *args, greedy=greedy, **kwargs)

    with mock.patch.object(micro_run.Agent, 'play', stopped):
      micro_run.train(make_config(**values), self.workdir, stop)
    steps = [row['step'] for row in metrics_lib.read_metrics(self.workdir)]
    self.assertEqual(steps, list(range(at)))
    scores = micro_run.train(make_config(**values), self.workdir)
    self.assertIn('val-core/all/em', scores)
    self.assert_as_straight(**values)
    evaluations.clear()
    with mock.patch.object(micro_run.Agent, 'play', stopped):
      micro_run.train(make_config(**values), self.workdir)
    self.assertEmpty(evaluations)  # the run is done, and nothing is repeated
    self.assert_as_straight(**values)

  def test_an_evaluation_waits_for_a_failed_retriever(self):
    play, failing = micro_run.Agent.play, [True, False, True, True, False]

    def failed(agent, *args, greedy=False, **kwargs):
      episodes = play(agent, *args, greedy=greedy, **kwargs)
      if greedy and failing and failing.pop(0):
        for episode in episodes[:4]:
          episode.failed = True
      return episodes

    with mock.patch.object(micro_run.Agent, 'play', failed):
      with mock.patch.object(batches_lib, '_FIRST_WAIT_S', 0.01):
        micro_run.train(make_config(), self.workdir)
    self.assertEmpty(failing)
    self.assert_as_straight()

  def test_an_unexpected_error_loses_no_update(self):
    """As of a plug-in in the third batch, long before a checkpoint is due."""
    values = {'train.checkpoint_every': 100}
    with failing_at_batch(3, ZeroDivisionError('a reward')):
      with self.assertRaisesRegex(ZeroDivisionError, 'a reward'):
        micro_run.train(make_config(**values), self.workdir)
    with checkpoint.Checkpoints(self.workdir) as checkpoints:
      self.assertEqual(checkpoints.newest(), 2)
    micro_run.train(make_config(**values), self.workdir)
    self.assert_as_straight(**values)

  def test_a_clock_that_jumps_changes_nothing(self):
    """The clock goes back by an hour at every reading."""
    now = iter(np.arange(2e9, 0, -3600.0))
    lock = threading.Lock()

    def jumping():
      with lock:
        return float(next(now))

    values = {'pipeline.staleness': 1}
    with mock.patch('time.time', jumping):
      with self.assertRaises(micro_run.Killed):
        micro_run.train(make_config(**values), self.workdir, micro_run.killed_after(2))
      micro_run.train(make_config(**values), self.workdir)
    self.assert_as_straight(**values)
    for row in metrics_lib.read_metrics(self.workdir):
      for name, value in row.items():
        if name.startswith(('timing_s/', 'perf/')):
          self.assertGreaterEqual(value, 0, name)

  def test_restores_onto_another_mesh(self):
    config = make_config(**{'train.updates': 1})
    micro_run.train(config, self.workdir, mesh=(1, 2, 4))
    many = micro_run.make_learners(config, mesh=(1, 2, 4))
    with checkpoint.Checkpoints(self.workdir) as checkpoints:
      many_state = checkpoints.restore(1, many.state)
      one = micro_run.make_learners(config)
      one_state = checkpoints.restore(1, one.state)
    kernel = many_state.actor['mlp']['up']['kernel']
    self.assertEqual(kernel.addressable_shards[0].data.shape, (1, 4, 2))
    self.assertEqual(one_state.actor['mlp']['up']['kernel'].sharding.num_devices, 1)
    chex.assert_trees_all_equal(jax.device_get(many_state), jax.device_get(one_state))
    like = {'actor': one.state.actor}  # as evaluation and export read it
    part, _ = recovery.restore_part(self.workdir, like)
    chex.assert_trees_all_equal(jax.device_get(part['actor']), jax.device_get(one_state.actor))
    micro_run.train(make_config(**{'train.updates': 2}), self.workdir)  # and continues there
    self.assertEqual(metrics_lib.read_metrics(self.workdir)[-1]['step'], 2)

  def test_other_questions_are_refused_on_resume(self):
    config = make_config(**{'pipeline.staleness': 1, 'train.updates': 1})
    contents = pipelines.Pipeline.contents

    def wait(pipeline):
      for queued in pipeline._queue:
        queued.future.result()
      return contents(pipeline)

    with mock.patch.object(pipelines.Pipeline, 'contents', wait):
      micro_run.train(config, self.workdir)
    path = os.path.join(FOLDER, 'knowledge', 'qa.jsonl')
    with open(path, encoding='utf-8') as file:
      rows = file.read()
    self.addCleanup(lambda: open(path, 'w', encoding='utf-8').write(rows))
    with open(path, 'w', encoding='utf-8') as file:
      file.write(rows.replace('train-sky', 'train-cloud').replace('train-apple', 'train-pear'))
    config.train.updates = 2
    with self.assertRaisesRegex(UserError, r'^[^\n]*questions [^\n]*accept_changed_plugins$'):
      micro_run.train(config, self.workdir)
    config.train.accept_changed_plugins = True
    with self.assertRaisesRegex(UserError, r'^[^\n]*(sky|apple)[^\n]*resume with the same[^\n]*$'):
      micro_run.train(config, self.workdir)

  def test_other_weights_are_refused(self):
    source, folder = prepare.EMBEDDED_MODEL, os.path.join(self.workdir, 'model')
    shutil.copytree(source, folder)
    workdir = os.path.join(self.workdir, 'run')
    config = make_config(**{'model.folder': folder, 'train.updates': 1})
    micro_run.train(config, workdir)
    folder_name = lambda: sample.folder_name(components.resolve(config), workdir, 0)
    sampled = folder_name()
    path = os.path.join(folder, 'model.safetensors')
    with open(path, 'r+b') as file:  # as training again in the same place does
      file.seek(os.path.getsize(path) // 2)
      file.write(bytes(os.path.getsize(path) // 4))
    self.assertNotEqual(folder_name(), sampled)  # nor are its episodes
    config.train.updates = 2
    with self.assertRaisesRegex(UserError, r'^[^\n]*model\.folder=[^\n]* names has changed[^\n]*$'):
      micro_run.train(config, workdir)
    config.train.accept_changed_plugins = True
    micro_run.train(config, workdir)
    self.assertEqual(metrics_lib.read_metrics(workdir)[-1]['step'], 2)


class StalenessTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())

  @parameterized.parameters(0, 3)
  def test_batches_are_sampled_with_scheduled_parameters(self, staleness):
    """Against a list of the parameters after each update, kept by hand."""
    updates, after, sampled_with = 5, {}, {}
    sample, update = batches_lib.Batches.sample, learner_lib.Learners.update

    def watched_sample(batches, params, number, stale):
      sampled_with[number] = jax.device_get(params)
      return sample(batches, params, number, stale)

    def watched_update(learners, batch, timing):
      learned = update(learners, batch, timing)
      after[batch.number] = jax.device_get(learners.state.actor)
      return learned

    config = make_config(**{'pipeline.staleness': staleness, 'train.updates': updates})
    after[0] = jax.device_get(micro_run.make_learners(config).state.actor)
    with mock.patch.object(batches_lib.Batches, 'sample', watched_sample):
      with mock.patch.object(learner_lib.Learners, 'update', watched_update):
        micro_run.train(config, self.workdir)
    rows = metrics_lib.read_metrics(self.workdir)
    for n in range(1, updates + 1):
      expected = max(n - 1 - staleness, 0)
      chex.assert_trees_all_equal(sampled_with[n], after[expected])
      self.assertEqual(rows[n]['pipeline/staleness'], n - 1 - expected)
    self.assertFalse(np.array_equal(*map(lambda n: jax.tree.leaves(after[n])[0], (0, 1))))

  def test_run_depends_on_staleness_alone(self):
    runs = []
    for staleness, slow_s in ((1, 0.0), (1, 0.02), (2, 0.0)):
      with tempfile.TemporaryDirectory() as workdir:
        micro_run.train(make_config(**{'pipeline.staleness': staleness}), workdir, slow_s=slow_s)
        runs.append(micro_run.comparable_metrics(workdir))
    self.assertEqual(runs[0], runs[1])
    self.assertNotEqual(runs[0][3:], runs[2][3:])

  def test_without_staleness_there_is_neither_thread_nor_copy(self):
    seen = []

    def sample(params, number, staleness):
      seen.append((params, threading.current_thread()))
      return batching.Sampled(number, staleness, [], {})

    params = {'x': jax.numpy.ones(3)}
    with pipelines.Pipeline(sample, 0) as pipeline:
      self.assertEqual(pipeline.take(params, 7).number, 7)
      self.assertEmpty(pipeline.contents())
    self.assertIs(seen[0][0], params)
    self.assertIs(seen[0][1], threading.main_thread())

  def test_sampling_overlaps_updates_and_pauses_for_evaluation(self):
    begun, go_on = threading.Event(), threading.Event()

    def sample(params, number, staleness):
      if number == 2:
        begun.set()
        self.assertTrue(go_on.wait(60))
      return batching.Sampled(number, staleness, [], {})

    with pipelines.Pipeline(sample, 1) as pipeline:
      self.assertEqual(pipeline.take({}, 1).staleness, 0)
      self.assertTrue(begun.wait(60))  # batch 2 is under way, and this thread continues
      self.assertEqual(pipeline.contents(), [pipelines.Unsampled(2, 1, {})])
      self.assertFalse(pipeline._sampling.acquire(blocking=False))
      go_on.set()
      with pipeline.idle():
        pass
      (batch,) = pipeline.contents()
      self.assertIsInstance(batch, batching.Sampled)
      self.assertEqual(batch.number, 2)
      self.assertEqual(pipeline.take({}, 2).staleness, 1)

  @parameterized.parameters(0, 2)
  def test_an_exception_while_sampling_ends_the_run(self, staleness):
    with failing_at_batch(3, UserError('the third batch')):
      with self.assertRaisesRegex(UserError, 'the third batch'):
        micro_run.train(make_config(**{'pipeline.staleness': staleness}), self.workdir)
    self.assertLess(metrics_lib.read_metrics(self.workdir)[-1]['step'], 3)
    self.assertNotIn('sampling_0', [thread.name for thread in threading.enumerate()])

  def test_several_devices_are_refused_off_the_cpu(self):
    mesh = types.SimpleNamespace(
        size=4, devices=np.array([types.SimpleNamespace(platform='gpu')], object)
    )
    with mock.patch.object(sharding, 'make_mesh', lambda *sizes: mesh):
      with self.assertRaisesRegex(UserError, r'^[^\n]*staleness=1 [^\n]*4 devices \(gpu\)[^\n]*$'):
        loop.start(make_config(**{'pipeline.staleness': 1}), self.workdir)
    self.assertEmpty(os.listdir(self.workdir))

  @parameterized.parameters(
      ({}, True), ({'old_logp': 'sampler'}, False), ({'rollout_is': 'turn'}, False)
  )
  def test_a_run_without_a_correction_is_warned(self, algorithm, warned):
    config = make_config(**{'pipeline.staleness': 1, 'algorithm.rollout_is': None})
    for name, value in algorithm.items():
      setattr(config.algorithm, name, value)
    with mock.patch.object(logging, 'warning') as warning:
      objective.warn_of_settings(config, objective.make_variant(config))
    self.assertEqual(warning.called, warned)

  def test_several_processes_are_refused(self):
    with mock.patch.object(jax, 'process_count', lambda: 2):
      with self.assertRaisesRegex(UserError, 'staleness=1 .*several processes'):
        micro_run.train(make_config(**{'pipeline.staleness': 1}), self.workdir)


class JsonTest(absltest.TestCase):

  def test_batches_survive_bit_exactly(self):
    config = make_config(**{'rollout.group_size': 2})
    parts = components.resolve(config)
    learners, agent = micro_run.setup(parts)
    batches = run_lib.make_batches(config, agent, learners.policy, parts.tasks, NEVER)
    batch = batches.sample(learners.actor, 3, 1)
    turn = batch.episodes[0].turns[0]
    turn.logp = np.array([-1e-30, -np.float32(1) / 3, -np.inf, np.nan], np.float32)
    turn.tokens, turn.observation = np.arange(4, dtype=np.int32), np.array([7], np.int32)
    batch.episodes[1].truncated = batch.episodes[1].failed = True
    text = json.dumps(batches_lib.to_json(batch))
    back = batches_lib.from_json(json.loads(text), [row.task for row in batch.episodes])
    flat = lambda batch: jax.tree.map(np.asarray, dataclasses.asdict(batch))
    ours, theirs = flat(batch), flat(back)
    chex.assert_trees_all_equal(jax.tree.leaves_with_path(ours), jax.tree.leaves_with_path(theirs))
    self.assertEqual(
        [x.dtype for x in jax.tree.leaves(ours)], [x.dtype for x in jax.tree.leaves(theirs)]
    )


if __name__ == '__main__':
  absltest.main()
