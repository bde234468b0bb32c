"""Checkpoints in a bucket: a real store, which is killed and changed, and the lease of a folder."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import chex
import pytest

from stppo_jax.evaluation import policy
from stppo_jax.monitoring import buckets
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.settings import validation
from stppo_jax.training import checkpoint
from stppo_jax.types import RunError
from stppo_jax.types import UserError
from tests.support import micro_run
from tests.support import object_store
from tests.support import processes

MISSING = object_store.missing()
ROOT = pathlib.Path(__file__).parents[2]
UPDATES = 4
KILLED = """
import os, signal, sys
from tests.support import micro_run
from stppo_jax.training import checkpoint

def kill_in_the_middle(self, write=checkpoint.Checkpoints._write_checksums):
  write(self)
  if self._saving == 3:
    os.kill(os.getpid(), signal.SIGKILL)  # all files are written, and Orbax's last one is not

checkpoint.Checkpoints._write_checksums = kill_in_the_middle
folder, workdir, bucket = sys.argv[1:]
config = micro_run.make_config(folder, **{'train.checkpoint_folder': bucket})
micro_run.train(config, workdir)
"""
# Process 1 has no WORKDIR.
TWO_PROCESSES = """
import sys
import jax
rank, address, workdir = int(sys.argv[1]), *sys.argv[2:]
jax.distributed.initialize(address, 2, rank)
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from stppo_jax import config as schema
from stppo_jax.algorithms import variants
from stppo_jax.training import checkpoint
from stppo_jax.training import recovery

config = schema.Config()
config.train.checkpoint_folder = 'gs://bucket/two_processes'
values = np.arange(12.0).reshape(4, 3)
place = NamedSharding(jax.make_mesh((2,), ('x',)), PartitionSpec('x'))
state = {'a': jax.make_array_from_callback((4, 3), place, values.__getitem__)}
with recovery.hold_workdir(config, variants.VARIANTS['st_ppo'], workdir):
  with checkpoint.Checkpoints(workdir, keep=2) as saves:
    newest = saves.newest() or 0
    if newest:
      (shard,) = saves.restore(newest, state)['a'].addressable_shards
      np.testing.assert_array_equal(shard.data, values[shard.index])
    saves.save(newest + 1, state, {}, 0.5)
"""


class FoldersTest(parameterized.TestCase):
  """What needs no store."""

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())
    micro_run.write_knowledge(self.folder)
    self.workdir = os.path.join(self.folder, 'run')

  def make_config(self, checkpoints, **values):
    return micro_run.make_config(
        self.folder, **{'train.checkpoint_folder': checkpoints, 'train.updates': 2, **values}
    )

  @parameterized.parameters(
      's3://bucket/run', 'az://bucket/run', 'GS://bucket', 'gs:/bucket', 'gs://', 'file:///tmp'
  )
  def test_other_stores_are_refused(self, folder):
    with self.assertRaisesRegex(UserError, r'checkpoint_folder=[^\n]*gs://BUCKET/FOLDER[^\n]*$'):
      validation.validate(self.make_config(folder))

  @parameterized.parameters('gs://bucket/run', 's3://bucket/run')
  def test_engines_get_weights_by_a_path(self, folder):
    config = self.make_config('', **{'rollout.engine_folder': folder})
    with self.assertRaisesRegex(UserError, r'engine_folder=[^\n]*same path[^\n]*NFS$'):
      validation.validate(config)

  def test_missing_packages_are_named(self):
    config = self.make_config('gs://bucket/run')
    with mock.patch.dict(sys.modules, gcsfs=None):
      with self.assertRaisesRegex(UserError, r'needs gcsfs: pip install [^\n]*\[bucket\]"$'):
        micro_run.train(config, self.workdir)

  def test_a_path_holds_the_checkpoints(self):
    elsewhere = os.path.join(self.folder, 'elsewhere')
    micro_run.train(self.make_config(elsewhere), self.workdir)
    self.assertContainsSubset({'1', '2', 'config.json'}, os.listdir(elsewhere))
    self.assertNotIn('checkpoints', os.listdir(self.workdir))
    self.assertNotEmpty(checkpoint.fingerprint(self.workdir, 2))
    self.assertTrue(workdir_lib.has_checkpoint_folder(self.workdir))

  def test_a_path_is_locked(self):
    elsewhere = os.path.join(self.folder, 'elsewhere')
    with workdir_lib.lock(os.path.join(self.folder, 'other'), elsewhere):
      with self.assertRaisesRegex(UserError, r'checkpoint_folder=[^\n]* is in use by process'):
        micro_run.train(self.make_config(elsewhere), self.workdir)

  def test_another_folder_must_hold_the_checkpoints(self):
    micro_run.train(self.make_config(''), self.workdir)
    elsewhere = os.path.join(self.folder, 'elsewhere')
    config = self.make_config(elsewhere, **{'train.updates': 3})
    with self.assertRaisesRegex(UserError, r'checkpoints in [^\n]*run/checkpoints[^\n]*copy them'):
      micro_run.train(config, self.workdir)
    former = os.path.join(self.workdir, 'checkpoints')
    shutil.copytree(former, elsewhere, dirs_exist_ok=True)
    micro_run.train(config, self.workdir)
    self.assertIn('3', os.listdir(elsewhere))


@pytest.mark.guests(
    what='Google Cloud Storage',
    version='gcsfs==2026.10.1 google-cloud-storage==3.17.1',
    date='2026-11-28',
    touches='monitoring/buckets.py',
)
@pytest.mark.slow
@unittest.skipIf(MISSING, MISSING)
class BucketTest(parameterized.TestCase):
  """Runs of a policy of a few numbers, whose checkpoints are in a store of another process."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.store = cls.enterClassContext(object_store.running(os.path.join(cls.folder, 'store')))
    micro_run.write_knowledge(cls.folder)
    cls.straight = os.path.join(cls.folder, 'straight')
    micro_run.train(micro_run.make_config(cls.folder), cls.straight)
    logging.set_verbosity(logging.WARNING)

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())
    self.bucket = f'gs://bucket/{self._testMethodName}'

  def make_config(self, **values):
    return micro_run.make_config(self.folder, **{'train.checkpoint_folder': self.bucket, **values})

  def assert_equals_straight_run(self):
    config = self.make_config()
    metrics = micro_run.comparable_metrics
    self.assertEqual(metrics(self.workdir), metrics(self.straight))
    chex.assert_trees_all_equal(
        micro_run.state_after(config, self.workdir, UPDATES),
        micro_run.state_after(micro_run.make_config(self.folder), self.straight, UPDATES),
    )

  def test_resume_is_bit_exact(self):
    micro_run.train(self.make_config(**{'train.updates': 2}), self.workdir)
    micro_run.train(self.make_config(), self.workdir)
    self.assert_equals_straight_run()
    self.assertNotIn('checkpoints', os.listdir(self.workdir))
    self.assertNotIn('in_use.json', buckets.names(self.bucket))

  def test_resume_in_a_new_workdir(self):
    micro_run.train(self.make_config(**{'train.updates': 2}), self.workdir)
    with tempfile.TemporaryDirectory() as other:
      micro_run.train(self.make_config(), other)
      chex.assert_trees_all_equal(
          micro_run.state_after(self.make_config(), other, UPDATES),
          micro_run.state_after(micro_run.make_config(self.folder), self.straight, UPDATES),
      )
      with self.assertRaisesRegex(UserError, 'another config: seed'):
        micro_run.train(self.make_config(seed=7), os.path.join(other, 'third'))

  def test_newest_and_best_stay(self):
    config = self.make_config(**{'train.keep_checkpoints': 1})
    with workdir_lib.lock(self.workdir, self.bucket):
      workdir_lib.write_whole(
          os.path.join(self.workdir, 'config.json'),
          json.dumps({'train': {'checkpoint_folder': self.bucket}}),
      )
      state = micro_run.make_learners(config).state
      with checkpoint.Checkpoints(self.workdir, keep=1) as saves:
        for updates, score in ((1, 0.5), (2, 0.9), (3, 0.1)):
          saves.save(updates, state, {}, score)
    self.assertContainsSubset({'2', '3', 'scores.json'}, buckets.names(self.bucket))
    self.assertNotIn('1', buckets.names(self.bucket))
    with checkpoint.Checkpoints(self.workdir) as saves:
      self.assertEqual(saves.newest(), 3)
      self.assertEqual(saves.best(3), 2)

  def test_changed_and_missing_objects_are_found(self):
    micro_run.train(self.make_config(), self.workdir)
    name = next(
        name for name in buckets.digests(f'{self.bucket}/4/state') if name.endswith('_METADATA')
    )
    buckets.write_text(f'{self.bucket}/4/state/{name}', 'other')
    buckets.remove(f'{self.bucket}/3/progress/metadata')
    warnings = self.enterContext(mock.patch.object(logging, 'warning'))
    with checkpoint.Checkpoints(self.workdir) as saves:
      self.assertEqual(saves.newest(), 2)
    texts = [str(call.args) for call in warnings.call_args_list]
    self.assertLen([text for text in texts if 'is damaged' in text], 2)

  def test_half_checkpoint_is_not_taken(self):
    command = [sys.executable, '-c', KILLED, self.folder, self.workdir, self.bucket]
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])}
    killed = subprocess.run(command, env=environment, cwd=self.folder, check=False)
    self.assertEqual(killed.returncode, -signal.SIGKILL)
    half = buckets.names(f'{self.bucket}/3')
    self.assertIn('checksums.json', half)
    self.assertNotIn('commit_success.txt', half)
    self.assertIn('in_use.json', buckets.names(self.bucket))
    with checkpoint.Checkpoints(self.workdir) as saves:
      self.assertEqual(saves.newest(), 2)
    micro_run.train(self.make_config(), self.workdir)  # at once, in the same folder
    self.assert_equals_straight_run()

  @parameterized.parameters('continue', 'stop')
  def test_store_that_goes_away_for_a_minute(self, on_save_error):
    warnings = self.enterContext(mock.patch.object(logging, 'warning'))
    self.enterContext(mock.patch.object(buckets, '_BEAT_S', 1.0))
    self.bucket += f'_{on_save_error}'
    config = self.make_config(
        **{'train.updates': 6, 'train.on_save_error': on_save_error, 'train.keep_checkpoints': 6}
    )
    lines = os.path.join(self.workdir, 'metrics.jsonl')

    def stop_store():
      while not os.path.exists(lines) or '"step": 1' not in pathlib.Path(lines).read_text():
        threading.Event().wait(0.05)
      if on_save_error == 'continue':
        self.store.stop_for(90)
      else:  # until a save has failed: each of its requests is tried again for a minute
        self.store.stop()

    thread = threading.Thread(target=stop_store)
    thread.start()
    if on_save_error == 'stop':
      with self.assertRaisesRegex(checkpoint.SaveError, 'see that the bucket answers'):
        micro_run.train(config, self.workdir, slow_s=3.0)
      thread.join()
      self.store.start()
    else:
      micro_run.train(config, self.workdir, slow_s=3.0)
      thread.join()
      self.assertIn('6', buckets.names(self.bucket))
    texts = [call.args[0] for call in warnings.call_args_list]
    self.assertIn('%s does not answer (%s); trying again', texts)
    micro_run.train(config, self.workdir)
    reference = micro_run.comparable_metrics(self.straight)
    self.assertEqual(micro_run.comparable_metrics(self.workdir)[: len(reference)], reference)

  def test_store_without_answer_is_one_line(self):
    self.store.stop()
    try:
      with self.assertRaisesRegex(UserError, r'checkpoint_folder=[^\n]*cannot be used[^\n]*$'):
        micro_run.train(self.make_config(), self.workdir)
    finally:
      self.store.start()

  def test_missing_bucket_is_one_line(self):
    config = self.make_config(**{'train.checkpoint_folder': 'gs://no-such-bucket/run'})
    with self.assertRaisesRegex(UserError, r'checkpoint_folder=[^\n]*cannot be used[^\n]*$'):
      micro_run.train(config, self.workdir)

  def test_processes_share_the_bucket_alone(self):
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])}
    environment.pop('XLA_FLAGS', None)  # else each process has several devices
    for _ in range(2):  # the second time, they restore
      with processes.unused_address() as address:
        coordinator = address.removeprefix('http://')
      started = []
      for rank in range(2):
        workdir = os.path.join(self.workdir, str(rank))
        command = [sys.executable, '-c', TWO_PROCESSES, str(rank), coordinator, workdir]
        started.append(subprocess.Popen(command, env=environment, cwd=self.folder))
      self.assertEqual([process.wait() for process in started], [0, 0])
    self.assertEqual(os.listdir(self.workdir), ['0'])
    self.assertContainsSubset({'1', '2'}, buckets.names('gs://bucket/two_processes'))

  def test_evaluation_reads_the_bucket(self):
    micro_run.train(self.make_config(), self.workdir)
    self.assertTrue(workdir_lib.has_checkpoint_folder(self.workdir))
    self.assertNotEmpty(checkpoint.fingerprint(self.workdir, UPDATES))
    with mock.patch.object(policy, '_trained', lambda *args: 'trained'):
      self.assertEqual(policy.policy(self.make_config(), self.workdir), 'trained')


@pytest.mark.slow
@unittest.skipIf(MISSING, MISSING)
class LeaseTest(absltest.TestCase):
  """Two runs with other folders and the same folder of checkpoints."""

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())
    self.enterContext(object_store.running(os.path.join(self.folder, 'store')))
    self.enterContext(mock.patch.object(buckets, '_BEAT_S', 0.2))
    self.enterContext(mock.patch.object(buckets, '_EXPIRES_S', 2.0))
    self.bucket = 'gs://bucket/run'

  def place(self, name):
    path = os.path.join(self.folder, name)
    os.makedirs(path, exist_ok=True)
    return path

  def abandon(self, name):
    """Takes the lease as a process that is killed then."""
    lease = buckets._Lease(self.bucket, self.place(name))
    lease.acquire()
    return lease

  def test_second_run_is_refused(self):
    with buckets.hold(self.bucket, self.place('one')):
      with self.assertRaisesRegex(UserError, 'is in use by process'):
        with buckets.hold(self.bucket, self.place('two')):
          pass
      buckets.require_held(self.bucket)
    with buckets.hold(self.bucket, self.place('two')):
      pass

  def test_lease_of_a_killed_run_expires(self):
    self.abandon('one')
    with buckets.hold(self.bucket, self.place('two')):
      self.assertIn('in_use.json', buckets.names(self.bucket))
    self.assertEmpty(buckets.names(self.bucket))

  def test_same_workdir_takes_over_at_once(self):
    self.abandon('one')
    with mock.patch.object(buckets, '_EXPIRES_S', 1e6):
      with buckets.hold(self.bucket, self.place('one')):
        self.assertIn('in_use.json', buckets.names(self.bucket))

  def test_lost_lease_ends_the_former_run(self):
    former = self.abandon('one')
    with buckets.hold(self.bucket, self.place('two')):
      with self.assertRaisesRegex(RunError, 'another run has taken it over'):
        former.require_held()
      former.release()  # deletes nothing of the other run's
      buckets.require_held(self.bucket)

  def test_deleted_lease_is_written_again(self):
    with buckets.hold(self.bucket, self.place('one')):
      buckets.remove(f'{self.bucket}/in_use.json')
      for _ in range(100):
        if 'in_use.json' in buckets.names(self.bucket):
          break
        threading.Event().wait(0.1)
      self.assertIn('in_use.json', buckets.names(self.bucket))


if __name__ == '__main__':
  absltest.main()
