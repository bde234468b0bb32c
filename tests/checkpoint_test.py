"""Checkpoints: checksums of several processes, time limits, and the best one beside the newest."""

import errno
import json
import os
import tempfile
import threading
from unittest import mock

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp

from stppo_jax.distributed import hosts
from stppo_jax.monitoring import journal as journals
from stppo_jax.training import checkpoint
from stppo_jax.training import recovery
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


class SumsTest(CheckpointCase):

  def test_each_process_reads_its_share_of_the_files_and_all_learn_of_damage(self):
    with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
      checkpoints.save(1, STATE, {})
    folder = os.path.join(self.workdir, 'checkpoints', '1')
    with open(os.path.join(folder, 'checksums.json'), encoding='utf-8') as file:
      names = set(json.load(file))
    state = next(name for name in sorted(names) if '/d/' in name)
    with open(os.path.join(folder, state), 'r+b') as file:
      file.write(b'x')
    read, said = [], []

    def sum_of(path):
      read.append(os.path.relpath(path, folder))
      return real_sum(path)

    def share(value):
      said.append(value)
      return [value]

    real_sum = checkpoint._sum
    self.enterContext(mock.patch.object(checkpoint, '_sum', sum_of))
    with checkpoint.Checkpoints(self.workdir) as checkpoints:
      self.enterContext(mock.patch.object(jax, 'process_count', lambda: 3))
      self.enterContext(mock.patch.object(hosts, 'share', share))
      for i in range(3):
        with mock.patch.object(jax, 'process_index', lambda i=i: i):
          checkpoints._damage(1)
      self.assertCountEqual(read, names)  # each file once
      with mock.patch.object(hosts, 'share', lambda value: said):
        self.assertEqual(checkpoints._damage(1), f'{state} is not what was written')
      self.enterContext(mock.patch.object(jax, 'process_count', lambda: 1))
    self.assertEqual(sorted(said)[:2], ['', ''])

  def test_shares_are_about_equal_in_bytes(self):
    sums = {f'f{i}': [size, 0] for i, size in enumerate([5, 90, 100, 10, 95, 5, 4])}
    shares = [checkpoint._share(sums, i, 3) for i in range(3)]
    self.assertCountEqual(sum(shares, []), sums)
    self.assertEqual(shares[0], ['f2', 'f3', 'f6'])  # 100, 10, 4
    self.assertEqual(shares[1], ['f4', 'f0'])  # 95, 5

  def test_process_0_reads_only_what_the_others_did_not_sum(self):
    """At the barrier Orbax has not renamed `state` yet."""
    folder = os.path.join(self.workdir, '7.tmp')
    for name in ('state.tmp-1/ocdbt.process_0/d/a', 'state.tmp-1/ocdbt.process_1/d/b'):
      os.makedirs(os.path.dirname(os.path.join(folder, name)))
      with open(os.path.join(folder, name), 'w', encoding='utf-8') as file:
        file.write(name)
    entered = []
    with checkpoint.Checkpoints(os.path.join(self.workdir, 'run'), keep=1) as checkpoints:
      with (
          mock.patch.object(checkpoints, '_unfinished', lambda: [folder]),
          mock.patch.object(jax, 'process_index', lambda: 1),
          mock.patch.object(
              checkpoint.ocp.multihost, 'get_barrier_sync_fn', lambda: lambda **k: entered.append(k)
          ),
      ):
        checkpoints._sync(key='save_async_write_complete.7', timeout_ms=5)
        checkpoints._sync(key='save_async_commit_complete.7', timeout_ms=6)
    self.assertEqual([call['timeout_ms'] for call in entered], [5, 6])
    os.rename(os.path.join(folder, 'state.tmp-1'), os.path.join(folder, 'state'))
    theirs = 'state/ocdbt.process_1/d/b'
    with mock.patch.object(checkpoint, '_crc', lambda path: os.path.relpath(path, folder)):
      sums = checkpoint._checksums(folder)
    self.assertCountEqual(sums, ['state/ocdbt.process_0/d/a', theirs])
    self.assertEqual(sums['state/ocdbt.process_0/d/a'][1], 'state/ocdbt.process_0/d/a')  # read now
    self.assertEqual(sums[theirs], checkpoint._sum(os.path.join(folder, theirs)))
    self.assertEqual(os.listdir(folder), ['state'])

  def test_the_time_limit_grows_with_the_state(self):
    self.assertEqual(checkpoint.deadline_s(0), 1200)
    # 176 GB written and read at 50 MB per second.
    self.assertEqual(checkpoint.deadline_s(176 * 10**9), 7040)
    real = checkpoint.ocp.AsyncOptions
    with mock.patch.object(checkpoint.ocp, 'AsyncOptions', wraps=real) as options:
      checkpoint.Checkpoints(self.workdir, 1, num_bytes=10**11).close()
    self.assertEqual(options.call_args.kwargs['timeout_secs'], 4000)

  @parameterized.parameters(True, False)
  def test_only_the_writer_removes_what_failed(self, is_writer):
    part = os.path.join(self.workdir, 'checkpoints', '3.part')  # Orbax cleans up its own
    with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
      os.makedirs(part)
      checkpoints._saving = 3
      with mock.patch.object(hosts, 'is_writer', lambda: is_writer):
        checkpoints._fail(OSError(errno.ETIMEDOUT, 'barrier'))
      checkpoints._failed = None
    self.assertEqual(os.path.exists(part), not is_writer)


class OthersTest(CheckpointCase):
  """Several processes: one whose save fails tells the others, who wait for it at a barrier."""

  def test_the_wait_for_a_process_that_failed_ends_at_once(self):
    posts, released = {}, threading.Event()
    self.addCleanup(released.set)

    def barrier(key, timeout_ms):
      del key
      released.wait(timeout_ms / 1000)

    self.enterContext(
        mock.patch.object(checkpoint.ocp.multihost, 'get_barrier_sync_fn', lambda: barrier)
    )
    self.enterContext(mock.patch.object(hosts, 'posted', lambda name: posts.get(name, '')))
    self.enterContext(mock.patch.object(checkpoint, '_LOOK_S', 0.05))
    with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
      checkpoints._attempt = 'save 7'
      timer = threading.Timer(0.2, posts.update, [{'save 7': 'process 1: the disk is full'}])
      timer.start()
      with self.assertRaisesRegex(RuntimeError, '^process 1: the disk is full$') as raised:
        checkpoints._sync(key='tmp_ready', timeout_ms=60_000)
      with self.subTest('and is told as it was, and not posted again'):
        post = self.enterContext(mock.patch.object(hosts, 'post'))
        with mock.patch.object(checkpoint.logging, 'error') as told:
          checkpoints._fail(raised.exception)
        self.assertIn('could not be saved (process 1: the disk is full)', told.call_args.args[1])
        post.assert_not_called()
        checkpoints._fail(OSError(errno.ENOSPC, 'full'))
        post.assert_called_once_with('save 7', mock.ANY)
      with self.subTest('the one that failed posts its reason and does not wait either'):
        post.reset_mock()
        checkpoints._begun, checkpoints._committed = True, False
        posts.clear()
        try:
          raise OSError(errno.ENOSPC, 'No space left')
        except OSError:
          checkpoints._sync(key='Holder:set_value_start_9', timeout_ms=60_000)
        post.assert_called_once_with('save 7', 'process 0: the disk is full')
      checkpoints._failed, checkpoints._committed = None, True
      released.set()
      checkpoints._sync(key='tmp_ready', timeout_ms=60_000)  # all have come


class BestTest(CheckpointCase):

  def test_the_best_stays_beside_the_newest(self):
    scores = {1: 0.3, 2: None, 3: 0.5, 4: 0.4, 5: None, 6: 0.6, 7: 0.1, 8: 0.2}
    kept = {3: [2, 3], 4: [3, 4], 5: [3, 4, 5], 6: [5, 6], 7: [6, 7], 8: [6, 7, 8]}
    for first in (1, 5, 7):  # a new process from here on
      with checkpoint.Checkpoints(self.workdir, keep=2) as checkpoints:
        if first > 1:
          checkpoints.progress(first - 1)
        for n in range(first, {1: 5, 5: 7, 7: 9}[first]):
          checkpoints.save(n, STATE, {'n': n}, scores[n])
          checkpoints._settle()
          self.assertEqual(steps(self.workdir), kept.get(n, steps(self.workdir)))
    self.assertEqual(checkpoints.best, (0.6, 6))

  def test_a_score_that_comes_after_the_save_counts(self):
    with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
      for n, score in ((1, 0.5), (2, None)):
        checkpoints.save(n, STATE, {}, score)
      checkpoints.note_score(2, 0.7)  # of an evaluation that the resumed run has done
      checkpoints.note_score(9, 0.9)  # not on disk
      for n in (3, 4):
        checkpoints.save(n, STATE, {}, 0.6)
      checkpoints._settle()
      self.assertEqual(checkpoints.best, (0.7, 2))
      self.assertEqual(steps(self.workdir), [2, 4])

  def test_so_does_that_of_the_last_step(self):
    for score, step in ((0.5, 1), (0.9, 2)):
      with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
        if step == 2:
          checkpoints.progress(1)
        checkpoints.save(step, STATE, {}, score if step == 1 else None)
        checkpoints.note_score(step, score)  # nothing is saved after it
    with checkpoint.Checkpoints(self.workdir) as checkpoints:
      self.assertEqual(checkpoints.best_before(2), 2)
      self.assertEqual(checkpoints.best, (0.9, 2))
      self.assertEqual(checkpoints.best_before(1), 1)  # of which the later one is unknown
    with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
      checkpoints.drop_after(1)
      checkpoints.progress(1)
      checkpoints.save(2, STATE, {}, 0.1)  # another one of that number
    with checkpoint.Checkpoints(self.workdir) as checkpoints:
      checkpoints.progress(2)
      self.assertEqual(checkpoints.best, (0.5, 1))

  def test_a_best_one_that_cannot_be_saved_leaves_the_one_before(self):
    sums = checkpoint._checksums

    def failing(folder):
      if os.path.basename(folder).startswith('2.'):
        raise OSError(errno.ENOSPC, 'full')
      return sums(folder)

    self.enterContext(mock.patch.object(checkpoint, '_checksums', failing))
    with checkpoint.Checkpoints(self.workdir, keep=1) as checkpoints:
      for n, score in ((1, 0.5), (2, 0.7), (3, None), (4, 0.6)):
        checkpoints.save(n, STATE, {}, score)
        checkpoints._settle()
        self.assertEqual(steps(self.workdir), {1: [1], 2: [1], 3: [1, 3], 4: [4]}[n])

  def test_a_run_keeps_the_best_of_those_that_are_due_and_writes_no_other(self):
    with tempfile.TemporaryDirectory() as folder:
      micro_run.write_knowledge(folder)
      config = micro_run.make_config(
          folder, **{'train.keep_checkpoints': 1, 'train.checkpoint_every': 3, 'train.updates': 7}
      )
      save = checkpoint.Checkpoints.save
      spy = mock.patch.object(checkpoint.Checkpoints, 'save', autospec=True, side_effect=save)
      # Evaluated after 2, 4, 6 and 7 updates; a checkpoint is due after 3 and 6, and at the end.
      with mock.patch.object(journals.Journal, 'main_score', side_effect=[0.1, 0.5, 0.3, 0.2]):
        with spy as saves:
          micro_run.train(config, self.workdir)
      self.assertEqual([call.args[1] for call in saves.call_args_list], [3, 6, 7])
      self.assertEqual(steps(self.workdir), [6, 7])
      for which, updates in (('newest', 7), ('best', 6)):
        state = micro_run.setup(config).state
        actor, found = recovery.saved(self.workdir, state.actor, which)
        with checkpoint.Checkpoints(self.workdir) as checkpoints:
          state = checkpoints.restore(updates, state)
        self.assertEqual((found, int(state.step)), (updates, 4 * updates))
        chex.assert_trees_all_equal(actor, state.actor)

  def test_the_last_one_counts_too_although_it_is_not_due(self):
    with tempfile.TemporaryDirectory() as folder:
      micro_run.write_knowledge(folder)
      values = {'train.keep_checkpoints': 1, 'train.checkpoint_every': 2, 'train.updates': 3}
      config = micro_run.make_config(folder, **values)
      with mock.patch.object(journals.Journal, 'main_score', side_effect=[0.1, 0.5]):
        micro_run.train(config, self.workdir)
      with checkpoint.Checkpoints(self.workdir) as checkpoints:
        self.assertEqual(checkpoints.best_before(3), 3)
        self.assertEqual(checkpoints.best, (0.5, 3))


if __name__ == '__main__':
  absltest.main()
