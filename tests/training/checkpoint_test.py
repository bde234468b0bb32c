"""Checkpoints: checksums of several processes, time limits, and the best one beside the newest."""

import errno
import json
import os
import signal
import tempfile
import threading
from unittest import mock

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from stppo_jax.distributed import hosts
from stppo_jax.monitoring import journal as journals
from stppo_jax.training import checkpoint
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import recovery
from stppo_jax.types import UserError
from tests.support import micro_run

STATE = {'a': jnp.arange(12.0).reshape(3, 4), 'b': jnp.ones(5)}


def steps(workdir):
  folder = os.path.join(workdir, 'checkpoints')
  return sorted(int(name) for name in os.listdir(folder) if name.isdigit())


class CheckpointCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())
    self.enterContext(mock.patch.object(logging, 'error'))


class ChecksumTest(CheckpointCase):

  def test_processes_share_the_check_and_its_result(self):
    with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
      checkpoints.save(1, STATE, {})
    folder = os.path.join(self.workdir, 'checkpoints', '1')
    with open(os.path.join(folder, 'checksums.json'), encoding='utf-8') as file:
      names = set(json.load(file))
    state = next(name for name in sorted(names) if '/d/' in name)
    with open(os.path.join(folder, state), 'r+b') as file:
      file.write(b'x')
    read, results = [], []

    def checksum(path):
      read.append(os.path.relpath(path, folder))
      return real_checksum(path)

    def share(value):
      results.append(value)
      return [value]

    real_checksum = checkpoint._checksum
    self.enterContext(mock.patch.object(checkpoint, '_checksum', checksum))
    with checkpoint.Checkpoints(self.workdir) as checkpoints:
      self.enterContext(mock.patch.object(jax, 'process_count', lambda: 3))
      self.enterContext(mock.patch.object(hosts, 'share', share))
      for i in range(3):
        with mock.patch.object(jax, 'process_index', lambda i=i: i):
          checkpoints._find_damage(1)
      self.assertLen(set(read), len(read))  # each file once
      with mock.patch.object(hosts, 'share', lambda value: results):
        self.assertEqual(checkpoints._find_damage(1), f'{state} is not what was written')
      self.enterContext(mock.patch.object(jax, 'process_count', lambda: 1))
    self.assertEqual(sorted(results)[:2], ['', ''])

  def test_time_limit_grows_with_the_state(self):
    self.assertEqual(checkpoint.deadline_s(0), 1200)
    self.assertEqual(checkpoint.deadline_s(176 * 10**9), 7040)  # written and read at 50 MB/s
    real = checkpoint.ocp.AsyncOptions
    with mock.patch.object(checkpoint.ocp, 'AsyncOptions', wraps=real) as options:
      checkpoint.Checkpoints(self.workdir, 1, num_bytes=10**11).close()
    self.assertEqual(options.call_args.kwargs['timeout_secs'], 4000)

  @parameterized.parameters(True, False)
  def test_only_the_writer_removes_a_failed_save(self, is_writer):
    part = os.path.join(self.workdir, 'checkpoints', '3.part')  # Orbax cleans up its own
    with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
      os.makedirs(part)
      checkpoints._saving = 3
      with mock.patch.object(hosts, 'is_writer', lambda: is_writer):
        checkpoints._fail(OSError(errno.ETIMEDOUT, 'barrier'))
      checkpoints._error = None
    self.assertEqual(os.path.exists(part), not is_writer)


class InterruptTest(CheckpointCase):

  def setUp(self):
    super().setUp()
    self.addCleanup(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs may ignore it

  def save(self, presses):
    """Presses Ctrl-C `presses` times before Orbax's save, in the main thread."""
    orbax_save = ocp.CheckpointManager.save

    def interrupted(*args, **kwargs):
      for _ in range(presses):
        signal.raise_signal(signal.SIGINT)
      return orbax_save(*args, **kwargs)

    self.enterContext(mock.patch.object(ocp.CheckpointManager, 'save', interrupted))
    with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
      checkpoints.save(1, STATE, {})

  def test_interrupt_waits_for_the_call_that_begins_a_save(self):
    """Orbax's thread would wait for minutes for a call that did not end."""
    before = signal.getsignal(signal.SIGINT)
    with self.assertRaises(KeyboardInterrupt):
      self.save(1)
    self.assertEqual(steps(self.workdir), [1])
    self.assertIs(signal.getsignal(signal.SIGINT), before)

  def test_second_interrupt_does_not_wait(self):
    with self.assertRaises(KeyboardInterrupt) as raised:
      self.save(2)
    self.assertIsNone(raised.exception.__context__)  # it was raised once
    self.assertEqual(steps(self.workdir), [])

  def test_other_threads_and_ignored_interrupts_change_nothing(self):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    self.save(1)
    thread = threading.Thread(target=self.save, args=(0,))
    thread.start()
    thread.join()
    self.assertEqual(steps(self.workdir), [1])


class OtherProcessTest(CheckpointCase):

  def test_failed_process_ends_the_wait_of_others(self):
    posts, released = {}, threading.Event()
    self.addCleanup(released.set)

    def barrier(key, timeout_ms):
      del key
      released.wait(timeout_ms / 1000)

    self.enterContext(
        mock.patch.object(checkpoint.ocp.multihost, 'get_barrier_sync_fn', lambda: barrier)
    )
    self.enterContext(mock.patch.object(hosts, 'posted', lambda name: posts.get(name, '')))
    self.enterContext(mock.patch.object(checkpoint, '_POLL_S', 0.05))
    with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
      checkpoints._attempt = 'save 7'
      timer = threading.Timer(0.2, posts.update, [{'save 7': 'process 1: the disk is full'}])
      timer.start()
      with self.assertRaisesRegex(RuntimeError, '^process 1: the disk is full$') as raised:
        checkpoints._wait_for_processes(key='any', timeout_ms=60_000)
      post = self.enterContext(mock.patch.object(hosts, 'post'))
      with self.subTest('its reason is logged, and not reported again'):
        with mock.patch.object(checkpoint.logging, 'error') as error:
          checkpoints._fail(raised.exception)
        self.assertIn('could not be saved (process 1: the disk is full)', error.call_args.args[1])
        post.assert_not_called()
      with self.subTest('the failed process reports its reason and does not wait'):
        posts.clear()

        def finish():
          try:
            raise OSError(errno.ENOSPC, 'No space left')
          except OSError:
            checkpoints._wait_for_processes(key='any', timeout_ms=60_000)

        thread = threading.Thread(target=finish)  # Orbax finishes a save in a thread
        thread.start()
        thread.join(30)
        self.assertFalse(thread.is_alive())
        post.assert_called_once_with('save 7', 'process 0: the disk is full')
      checkpoints._error = None
      released.set()
      checkpoints._wait_for_processes(key='any', timeout_ms=60_000)  # all have come


class RolesTest(CheckpointCase):

  def test_resumed_run_has_roles_in_same_order(self):
    """The policies of roles are a list by position, and trees have their keys sorted."""
    state = {'solver': {'actor': jnp.zeros(2)}, 'critic': {'actor': jnp.ones(2)}}
    with recovery.RunCheckpoints(self.workdir, keep=1) as saves:
      saves.save_run(recovery.Progress(updates=1), state, ())
    zeros = jax.tree.map(jnp.zeros_like, state)
    states = {name: zeros[name] for name in state}
    learners = learner_lib.Learners(*[None] * 5, states, seed=0)
    with recovery.RunCheckpoints(self.workdir, keep=1) as saves:
      saves.resume(learners, None, None)
    self.assertEqual(list(learners.states), ['solver', 'critic'])
    chex.assert_trees_all_equal(learners.state, state)

  @parameterized.parameters(
      ({'critic': {'actor': (2,)}}, ''),
      ({'writer': {'actor': (2,)}}, 'has no writer/actor'),
      ({'critic': {'actor': (2,), 'lm_head': (2,)}}, 'has no critic/lm_head'),
      ({'critic': {'actor': (3,)}}, 'does not fit .*shape'),
  )
  def test_parts_that_a_checkpoint_lacks_are_refused(self, shapes, message):
    state = {'critic': {'actor': jnp.ones(2)}}
    with recovery.RunCheckpoints(self.workdir, keep=1) as saves:
      saves.save_run(recovery.Progress(updates=1), state, ())
    place = state['critic']['actor'].sharding
    make = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
    like = jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))
    if not message:
      part, _ = recovery.restore_part(self.workdir, like)
      chex.assert_trees_all_equal(part, state)
      return
    with self.assertRaisesRegex(UserError, f'^[^\n]*{message}[^\n]*of its training$'):
      recovery.restore_part(self.workdir, like)


class AwayTest(CheckpointCase):
  """A store that is away does not hide the failed save, nor keep its step for good."""

  def setUp(self):
    super().setUp()
    self.away = True
    reload = ocp.CheckpointManager.reload

    def fail(*unused):
      if self.away:
        raise OSError('the store is away')

    def reload_if_there(manager):
      fail()
      reload(manager)

    close = ocp.CheckpointManager.close

    def close_and_fail(manager):
      close(manager)
      fail()

    self.enterContext(mock.patch.object(ocp.CheckpointManager, 'close', close_and_fail))
    # Runs in Orbax's thread when all files are written.
    self.enterContext(mock.patch.object(checkpoint.Checkpoints, '_write_checksums', fail))
    self.enterContext(mock.patch.object(ocp.CheckpointManager, 'reload', reload_if_there))

  def test_training_continues_and_saves_step_again(self):
    with checkpoint.Checkpoints(self.workdir, keep=3) as checkpoints:
      for step in (1, 2):
        checkpoints.save(step, STATE, {})
      checkpoints._settle()
      self.assertEqual(checkpoints.num_failed, 2)
      self.away = False
      checkpoints.save(2, STATE, {})
      checkpoints._settle()
      self.assertEqual(checkpoints.num_failed, 0)
    self.assertEqual(steps(self.workdir), [2])

  def test_run_that_must_stop_says_so(self):
    checkpoints = checkpoint.Checkpoints(self.workdir, keep=1, on_save_error='stop')
    with self.assertRaisesRegex(
        checkpoint.SaveError, 'after 1 updates .*the store is away.*after 0'
    ):
      with checkpoints:
        checkpoints.save(1, STATE, {})


class BestTest(CheckpointCase):

  def test_best_stays_with_the_newest(self):
    scores = {1: 0.3, 2: None, 3: 0.5, 4: 0.4, 5: None, 6: 0.6, 7: 0.1, 8: 0.2}
    kept = {3: [2, 3], 4: [3, 4], 5: [3, 4, 5], 6: [5, 6], 7: [6, 7], 8: [6, 7, 8]}
    for first, last in ((1, 4), (5, 6), (7, 8)):  # a process each
      with checkpoint.Checkpoints(self.workdir, keep=2) as checkpoints:
        for n in range(first, last + 1):
          checkpoints.save(n, STATE, {'n': n}, scores[n])
          checkpoints._settle()
          self.assertEqual(steps(self.workdir), kept.get(n, steps(self.workdir)))
    self.assertEqual(checkpoints.best(8), 6)

  def test_a_score_after_the_save_counts(self):
    for score, step in ((0.5, 1), (0.9, 2)):
      with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
        checkpoints.save(step, STATE, {}, score if step == 1 else None)
        checkpoints.note_score(step, score)
        checkpoints.note_score(9, 0.95)  # is not on disk
    with checkpoint.Checkpoints(self.workdir) as checkpoints:
      self.assertEqual(checkpoints.best(2), 2)
      self.assertEqual(checkpoints.best(1), 1)
    with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
      checkpoints.drop_after(1)
      checkpoints.save(2, STATE, {}, 0.1)  # another one of that number
    with checkpoint.Checkpoints(self.workdir) as checkpoints:
      self.assertEqual(checkpoints.best(2), 1)

  def test_failed_best_save_keeps_the_previous_best(self):
    checksums = checkpoint._checksums

    def failing(folder):
      if os.path.basename(folder).startswith('2.'):
        raise OSError(errno.ENOSPC, 'full')
      return checksums(folder)

    self.enterContext(mock.patch.object(checkpoint, '_checksums', failing))
    with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
      for n, score in ((1, 0.5), (2, 0.7), (3, None), (4, 0.6)):
        checkpoints.save(n, STATE, {}, score)
        checkpoints._settle()
        self.assertEqual(steps(self.workdir), {1: [1], 2: [1], 3: [1, 3], 4: [4]}[n])

  def test_run_keeps_the_best_due_checkpoint(self):
    with tempfile.TemporaryDirectory() as folder:
      micro_run.write_knowledge(folder)
      config = micro_run.make_config(
          folder, **{'train.keep_checkpoints': 1, 'train.checkpoint_every': 3, 'train.updates': 7}
      )
      save = checkpoint.Checkpoints.save
      spy = mock.patch.object(checkpoint.Checkpoints, 'save', autospec=True, side_effect=save)
      # Evaluated after 2, 4, 6 and 7 updates; a checkpoint is due after 3 and 6, and at the end.
      with mock.patch.object(journals.Journal, 'main_score', side_effect=[0.0, 0.1, 0.5, 0.3, 0.2]):
        with spy as saves:
          micro_run.train(config, self.workdir)
      self.assertEqual([call.args[1] for call in saves.call_args_list], [3, 6, 7])
      self.assertEqual(steps(self.workdir), [6, 7])
      for which, updates in (('newest', 7), ('best', 6)):
        state = micro_run.make_learners(config).state
        part, found = recovery.restore_part(self.workdir, {'actor': state.actor}, which)
        with checkpoint.Checkpoints(self.workdir) as checkpoints:
          state = checkpoints.restore(updates, state)
        self.assertEqual((found, int(state.step)), (updates, 4 * updates))
        chex.assert_trees_all_equal(part['actor'], state.actor)


if __name__ == '__main__':
  absltest.main()
