"""Injected faults: kills, a full disk, damaged files and non-finite numbers.

The policy has a few numbers; loop, checkpoints, metrics and command line are the real ones.
STPPO_KILLS=100 kills more often.
"""

import errno
import glob
import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import unittest
from unittest import mock

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import numpy as np
import pytest

import stppo_jax
from stppo_jax.cli import entry
from stppo_jax.cli import signals
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import workdir as workdirs
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.stop_signal import StopSignal
from stppo_jax.training import checkpoint
from stppo_jax.types import RunError
from stppo_jax.types import Stopped
from stppo_jax.types import UserError
from tests.support import micro_run
from tests.support.processes import wait_for

KILLS = int(os.environ.get('STPPO_KILLS', '20'))
ENDLESS = 5000  # updates


def setUpModule():
  global FOLDER, CONTEXT
  logging.set_verbosity(logging.WARNING)
  temporary = tempfile.TemporaryDirectory()
  unittest.addModuleCleanup(temporary.cleanup)
  FOLDER = temporary.name
  micro_run.write_knowledge(FOLDER)
  CONTEXT = multiprocessing.get_context('forkserver')
  CONTEXT.set_forkserver_preload(['tests.support.micro_fork'])  # imported once, not once a child


def tearDownModule():
  unittest.doModuleCleanups()  # pytest leaves that out


def make_config(**values):
  return micro_run.make_config(FOLDER, **values)


def steps(workdir):
  return [row['step'] for row in metrics_lib.read_metrics(workdir)]


def saved(workdir):
  return sorted(
      int(name) for name in os.listdir(os.path.join(workdir, 'checkpoints')) if name.isdigit()
  )


class FaultCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.tmp = self.enterContext(tempfile.TemporaryDirectory())
    self.workdir = os.path.join(self.tmp, 'run')

  def warnings(self, function, *args, **kwargs):
    """The lines of our own that a call logs as a warning or an error."""
    with self.assertLogs('absl', 'WARNING') as caught:
      function(*args, **kwargs)
    package = os.path.dirname(stppo_jax.__file__)
    own = [record for record in caught.records if record.pathname.startswith(package)]
    return [record.getMessage() for record in own]


class ProcessTest(FaultCase):

  def start(self, staleness=1, updates=ENDLESS):
    """A child process that trains in the workdir."""
    self.stderr = os.path.join(self.tmp, 'stderr')
    child = CONTEXT.Process(
        target=micro_run.command,
        args=(
            FOLDER,
            self.workdir,
            self.stderr,
            [f'--config.pipeline.staleness={staleness}', f'--config.train.updates={updates}'],
        ),
    )
    child.start()
    self.addCleanup(child.kill)
    return child

  def progress(self):
    """Lines of metrics that are there, counted without a warning for one that is being written."""
    path = os.path.join(self.workdir, metrics_lib.FILE_NAME)
    if not os.path.exists(path):
      return 0
    with open(path, 'rb') as file:
      return file.read().count(b'\n')

  def told(self):
    if not os.path.exists(self.stderr):
      return ''  # killed before it could say anything
    with open(self.stderr, encoding='utf-8') as file:
      return file.read()

  def end(self, child, number):
    os.kill(child.pid, number)
    child.join()
    return child.exitcode

  def test_two_kills_leave_no_trace(self):
    self.kill_and_compare(2)

  @pytest.mark.slow
  def test_killed_at_random_moments(self):
    self.assertGreater(self.kill_and_compare(KILLS), 0)  # some fall into a save

  def kill_and_compare(self, kills):
    """Kills a run at random moments; how many were during a save. It equals the undisturbed run."""
    rng, during_save, lines = random.Random(0), 0, 0
    for _ in range(kills):
      child = self.start()
      if rng.random() < 0.8:  # else: while it starts
        wait_for(lambda: self.progress() > lines or not child.is_alive(), 300)
      time.sleep(rng.uniform(0, 0.4))
      self.assertEqual(self.end(child, signal.SIGKILL), -signal.SIGKILL, self.told())
      during_save += bool(glob.glob(os.path.join(self.workdir, 'checkpoints', '*tmp*')))
      lines = max(lines, self.progress())
    child = self.start()
    wait_for(lambda: self.progress() > lines + 1, 300)
    self.assertEqual(self.end(child, signal.SIGTERM), 0)
    self.assertEqual(self.told().count('stopped on request'), 1)
    self.assertNotIn('Traceback', self.told())
    print(f'{kills} kills, {during_save} of them during a save, in {lines - 1} updates')
    self.assertEmpty(glob.glob(os.path.join(self.workdir, 'checkpoints', '*tmp*')))
    done = steps(self.workdir)[-1]
    self.assertEqual(steps(self.workdir), list(range(done + 1)))
    self.assertEqual(saved(self.workdir)[-1], done)

    config = make_config(
        **{'pipeline.staleness': 1, 'train.updates': ENDLESS, 'train.checkpoint_every': 0}
    )
    straight, calls = os.path.join(self.tmp, 'straight'), iter(range(ENDLESS))
    micro_run.train(config, straight, StopSignal(lambda: next(calls) >= done))
    self.assertEqual(steps(straight)[-1], done)
    self.assertEqual(
        micro_run.comparable_metrics(self.workdir), micro_run.comparable_metrics(straight)
    )
    chex.assert_trees_all_equal(
        micro_run.state_after(config, self.workdir, done),
        micro_run.state_after(config, straight, done),
    )
    return during_save

  def test_second_run_is_refused_until_an_interrupt(self):
    child = self.start()
    wait_for(lambda: self.progress() > 1, 300)
    with self.assertRaisesRegex(
        UserError, rf'^[^\n]*is in use by process {child.pid} on [^\n]*another --workdir$'
    ):
      micro_run.train(make_config(), self.workdir)
    self.assertEqual(self.end(child, signal.SIGINT), 130)
    self.assertIn('run.py: interrupted', self.told().splitlines()[-1])
    self.assertNotIn('Traceback', self.told())
    with workdirs.lock(self.workdir):  # it is free again
      pass


class StopTest(FaultCase):

  @parameterized.parameters(signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
  def test_signal_without_state_ends_at_once(self, number):
    """While weights are loaded, say; from the first question of the loop on the loop decides."""
    self.addCleanup(signal.signal, number, signal.signal(number, signal.SIG_DFL))  # not nohup's
    with signals.handled() as stop_signal:
      with self.assertRaises(Stopped):
        os.kill(os.getpid(), number)
        time.sleep(60)
      self.assertTrue(stop_signal.is_set())
    with signals.handled() as stop_signal:
      self.assertFalse(stop_signal.is_set())
      os.kill(os.getpid(), number)
      self.assertTrue(stop_signal.is_set())
    with mock.patch.object(entry, '_run', side_effect=Stopped):
      self.assertEqual(entry.run(['run.py']), 0)

  @parameterized.parameters(signal.SIGHUP, signal.SIGUSR1)
  def test_ignored_signal_stays_ignored(self, number):
    """As SIGHUP under nohup."""
    self.addCleanup(signal.signal, number, signal.signal(number, signal.SIG_IGN))
    with signals.handled() as stop_signal:
      os.kill(os.getpid(), number)
      self.assertFalse(stop_signal.is_set())


class DiskTest(FaultCase):

  def full_at(self, *updates):
    """The disk is full while the checkpoints after these updates are written, in Orbax's thread."""
    checksums = checkpoint._checksums

    def failing(folder):
      if any(os.path.basename(folder).startswith(f'{n}.') for n in updates):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
      return checksums(folder)

    return mock.patch.object(checkpoint, '_checksums', failing)

  def test_a_full_disk_loses_one_checkpoint_only(self):
    values = {'pipeline.staleness': 1, 'train.keep_checkpoints': 1, 'train.updates': 6}
    config = make_config(**values)
    with self.full_at(2, 3):
      told = self.warnings(micro_run.train, config, self.workdir)
    self.assertEqual(
        told,
        [
            'the checkpoint after 2 updates could not be saved (the disk is full); the newest is '
            'that after 1; training continues',
            'the checkpoint after 3 updates could not be saved (the disk is full); the newest is '
            'that after 1; 2 saves in a row failed, 2 updates are unsaved: make room; '
            'training continues',
        ],
    )
    self.assertEqual(saved(self.workdir), [4, 6])  # 4 has the best score
    # A save is found to have failed when the next one begins, and is counted by the update after.
    rows = metrics_lib.read_metrics(self.workdir)[1:]
    self.assertEqual([row['perf/failed_saves'] for row in rows], [0, 0, 0, 1, 2, 0])
    straight = os.path.join(self.tmp, 'straight')
    micro_run.train(config, straight)
    self.assertEqual(
        micro_run.comparable_metrics(self.workdir), micro_run.comparable_metrics(straight)
    )

  def test_the_previous_checkpoint_is_kept(self):
    config = make_config(**{'train.keep_checkpoints': 1})
    with self.full_at(2):
      with self.assertRaises(micro_run.Killed):
        micro_run.train(config, self.workdir, micro_run.killed_after(2))
    self.assertEqual(saved(self.workdir), [1])
    self.assertEmpty(glob.glob(os.path.join(self.workdir, 'checkpoints', '2*')))  # its room is free
    micro_run.train(config, self.workdir)
    self.assertEqual(steps(self.workdir), [0, 1, 2, 3, 4])

  def test_stop_on_error(self):
    config = make_config(**{'train.on_save_error': 'stop'})
    with self.full_at(2):
      with self.assertRaisesRegex(
          RunError, r'^the checkpoint after 2 [^\n]*disk is full[^\n]*after 1: make room[^\n]*$'
      ):
        micro_run.train(config, self.workdir)
    self.assertLess(steps(self.workdir)[-1], 4)
    micro_run.train(config, self.workdir)
    self.assertEqual(steps(self.workdir), [0, 1, 2, 3, 4])

  def test_a_lost_last_checkpoint_is_an_error(self):
    with self.full_at(4):
      with self.assertRaisesRegex(RunError, r'^the last checkpoint, after 4 [^\n]*full[^\n]*$'):
        micro_run.train(make_config(), self.workdir)
    self.assertEqual(saved(self.workdir), [1, 2, 3])


class DamageTest(FaultCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = make_config(**{'pipeline.staleness': 1})
    cls.whole = os.path.join(cls.enterClassContext(tempfile.TemporaryDirectory()), 'whole')
    micro_run.train(cls.config, cls.whole)

  def setUp(self):
    super().setUp()
    shutil.copytree(self.whole, self.workdir)

  def files(self, step):
    folder = os.path.join(self.workdir, 'checkpoints', str(step))
    return [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names]

  def test_any_flipped_bit_is_noticed_or_harmless(self):
    expected = micro_run.state_after(self.config, self.workdir, 4)
    passed_over, logged = 0, []
    for path in self.files(4):
      size = os.path.getsize(path)
      if not size:
        continue
      flip(path, random.Random(path).randrange(size))
      with checkpoint.Checkpoints(self.workdir) as checkpoints:
        with mock.patch.object(logging, 'warning', lambda *args: logged.append(args)):
          newest = checkpoints.newest()
      self.assertIn(newest, (3, 4), path)
      passed_over += newest == 3
      if newest == 4:
        chex.assert_trees_all_equal(micro_run.state_after(self.config, self.workdir, 4), expected)
      shutil.copyfile(path.replace(self.workdir, self.whole), path)
    self.assertGreater(passed_over, 5)
    self.assertLen(logged, passed_over)

  @parameterized.parameters('cut', 'missing', 'unreadable sums')
  def test_the_run_resumes_from_the_previous_checkpoint(self, damage):
    metrics = micro_run.comparable_metrics(self.workdir)
    state = micro_run.state_after(self.config, self.workdir, 4)
    path = max(self.files(4), key=os.path.getsize)
    if damage == 'cut':
      os.truncate(path, os.path.getsize(path) // 2)
    elif damage == 'missing':
      os.remove(path)
    else:
      os.truncate(os.path.join(self.workdir, 'checkpoints', '4', 'checksums.json'), 10)
    told = self.warnings(micro_run.train, self.config, self.workdir)
    self.assertLen(told, 1)
    self.assertIn('the checkpoint after 4 updates is damaged', told[0])
    self.assertEqual(micro_run.comparable_metrics(self.workdir), metrics)
    chex.assert_trees_all_equal(micro_run.state_after(self.config, self.workdir, 4), state)

  def test_start_is_refused_without_whole_checkpoint(self):
    for step in saved(self.workdir):
      os.truncate(max(self.files(step), key=os.path.getsize), 3)
    with self.assertRaisesRegex(UserError, r'none of the 3 checkpoints is whole[^\n]*start again$'):
      micro_run.train(self.config, self.workdir)
    self.assertLen(saved(self.workdir), 3)


def flip(path, position):
  """Changes one bit of a file."""
  with open(path, 'r+b') as file:
    file.seek(position)
    byte = file.read(1)[0]
    file.seek(position)
    file.write(bytes([byte ^ 4]))


class NonfiniteTest(FaultCase):

  def poisoned(self, *numbers, rows=slice(None)):
    """The sampler reports log-probs that are not finite in these batches."""
    sample = batches_lib.Batches.sample

    def poison(batches, params, number, staleness):
      batch = sample(batches, params, number, staleness)
      self.played.append(number)
      if number in numbers:
        for episode in batch.episodes[rows]:
          episode.turns[0].logp[:] = np.nan
      return batch

    self.played = []
    return mock.patch.object(batches_lib.Batches, 'sample', poison)

  def test_stop_dumps_without_episode_logs(self):
    with self.poisoned(3):
      with self.assertRaisesRegex(
          RunError, r'^gradients or losses were not finite in 4 [^\n]*up to update 3[^\n]*rollback$'
      ):
        micro_run.train(make_config(), self.workdir)
    with open(
        os.path.join(self.workdir, 'episodes', 'nonfinite_000003.jsonl'), encoding='utf-8'
    ) as f:
      rows = [json.loads(line) for line in f]
    self.assertLen(rows, 10)
    self.assertEqual(set(rows[0]['behaviour_logp']), {None})
    self.assertEqual(saved(self.workdir), [1, 2])
    # And the advice that the line gives works.
    with self.poisoned(3):
      self.warnings(
          micro_run.train, make_config(**{'train.on_nonfinite': 'rollback'}), self.workdir
      )
    self.assertEqual(steps(self.workdir), [0, 1, 2, 3, 4])

  def test_consecutive_bad_steps_count_across_good_ends(self):
    """One bad episode of ten: of the two steps of each epoch one is skipped, here the first
    ones."""
    config = make_config(**{'train.max_nonfinite': 1})
    with self.poisoned(1, rows=slice(1, 2)):
      with self.assertRaisesRegex(RunError, r'not finite in \d [^\n]*up to update 1: '):
        micro_run.train(config, self.workdir)

  def test_a_rollback_continues_with_other_questions(self):
    staleness = 1
    config = make_config(**{'train.on_nonfinite': 'rollback', 'pipeline.staleness': staleness})
    with self.poisoned(3):
      told = self.warnings(micro_run.train, config, self.workdir)
    self.assertLen(told, 1)
    self.assertIn('up to update 3', told[0])
    self.assertIn('going back to update 2 and continuing with other questions', told[0])
    self.assertEqual(steps(self.workdir), [0, 1, 2, 3, 4])  # update 3 once: that on batch 4
    self.assertEqual(self.played.count(3), 1)
    self.assertEqual(self.played[-2 - staleness :], list(range(4, 6 + staleness)))
    state = micro_run.state_after(config, self.workdir, 4)
    self.assertTrue(all(np.isfinite(x).all() for x in jax.tree.leaves(state)))

    with self.subTest('killed before, at and after it, and resumed'):
      again = os.path.join(self.tmp, 'again')
      with self.poisoned(3):
        for _ in range(3):
          with self.assertRaises(micro_run.Killed):
            micro_run.train(config, again, micro_run.killed_after(1))
        micro_run.train(config, again)
      self.assertEqual(
          micro_run.comparable_metrics(again), micro_run.comparable_metrics(self.workdir)
      )
      chex.assert_trees_all_equal(micro_run.state_after(config, again, 4), state)

  def test_the_number_of_rollbacks_is_limited(self):
    with self.poisoned(*range(3, 100)):
      with self.assertRaisesRegex(RunError, r'^[^\n]*after 3 rollbacks to update 2: lower[^\n]*$'):
        self.warnings(
            micro_run.train, make_config(**{'train.on_nonfinite': 'rollback'}), self.workdir
        )
    self.assertEqual(self.played, [1, 2, 3, 4, 5, 6])

  @parameterized.parameters('stppo/step_norm', 'critic/step_norm')
  def test_infinite_parameters_end_the_run(self, name):
    """The gradient was finite, so no step was skipped, and there is no later update to notice."""
    update_step = micro_run.update_step

    def too_far(optimizer, state, frozen, batch, step):
      state, metrics, tokens = update_step(optimizer, state, frozen, batch, step)
      return state, metrics | {name: np.inf}, tokens

    with mock.patch.object(micro_run, 'update_step', too_far):
      with self.assertRaisesRegex(
          RunError, f'update 1 left parameters that are not finite .{name}.; .*rate'
      ):
        micro_run.train(make_config(**{'train.updates': 1}), self.workdir)
    self.assertEqual(saved(self.workdir), [])

  def test_stop_in_evaluation_after_skip_resumes(self):
    config = make_config(**{'eval.every': 3, 'train.on_nonfinite': 'rollback'})
    stop, play = threading.Event(), micro_run.Agent.play

    def stopped(agent, *args, greedy=False, **kwargs):
      if greedy and self.played[-1:] == [3] and not stop.is_set():
        stop.set()
        raise Stopped
      return play(agent, *args, greedy=greedy, **kwargs)

    with self.poisoned(3), mock.patch.object(micro_run.Agent, 'play', stopped):
      micro_run.train(config, self.workdir, StopSignal(stop.is_set))
      self.assertEqual(saved(self.workdir)[-1], 3)
      micro_run.train(config, self.workdir)
    self.assertEqual(steps(self.workdir), [0, 1, 2, 3, 4])

  def test_rollback_needs_a_checkpoint(self):
    with self.poisoned(1):
      with self.assertRaisesRegex(RunError, 'up to update 1: .*no checkpoint yet: lower'):
        micro_run.train(make_config(**{'train.on_nonfinite': 'rollback'}), self.workdir)


if __name__ == '__main__':
  absltest.main()
