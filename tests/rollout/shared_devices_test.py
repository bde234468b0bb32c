"""Engines on the devices of the trainer: they sleep while it trains, and it leaves meanwhile.

No GPU was available. The engines are stand-ins with vLLM's routes, see `support.vllm_stand_in`.
"""

import os
import queue
import subprocess
import sys
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from benchmarks import servers as servers_lib
from stppo_jax import types
from stppo_jax.models import sharding
from stppo_jax.net import http_client
from stppo_jax.rollout import remote
from stppo_jax.rollout import servers
from stppo_jax.settings import validation
from stppo_jax.stop_signal import StopSignal
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import loop
from stppo_jax.training import offload
from tests.support import tiny_run
from tests.support import vllm_stand_in

pytestmark = pytest.mark.guests(
    what='Sleep mode of vLLM',
    version='vLLM 0.32.0, with a stand-in',
    date='2026-11-28',
    touches='rollout/shared_devices.py rollout/remote.py rollout/servers.py training/offload.py',
)

ALL = vllm_stand_in.TAGS
# What is measured in seconds.
MEASURED = ('engine/push_s',)


def flags_of(port, *more):
  model = os.path.join(tiny_run.shared_folder(), 'model')
  words = ['--host', '127.0.0.1', '--port', str(port), '--model', model, '--dtype', 'bfloat16']
  words += ['--max-model-len', '192', '--logprobs-mode', 'processed_logprobs', *more]
  return words


def make_config(engine, **values):
  config = tiny_run.make_config(rollout__engine=engine, **values)
  config.rollout.engine_gap = 100.0  # the stand-in does not compute with the weights
  config.rollout.engine_shares_devices = True
  return config


class SharedDevicesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(tiny_run.on_one_device())
    self.tmp = self.enterContext(tempfile.TemporaryDirectory())
    self.enterContext(mock.patch.dict(os.environ, VLLM_SERVER_DEV_MODE='1'))
    self.enterContext(mock.patch.object(remote, '_RETRY_S', 0.05))

  def engine(self, *more, sleeps=True):
    """Returns a stand-in in a thread of this process. A crash is put into `crashes`."""
    words = flags_of(0, *(['--enable-sleep-mode'] if sleeps else []), *more)
    engine = vllm_stand_in.Engine(vllm_stand_in.parse(words))
    engine.crashes = queue.SimpleQueue()

    def crash(cause):
      engine.crashes.put(cause)
      raise AssertionError(cause)

    engine.crash = crash
    thread = threading.Thread(target=engine.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    self.addCleanup(engine.server_close)
    self.addCleanup(engine.shutdown)
    engine.address = f'http://127.0.0.1:{engine.server_port}'
    return engine

  def path(self, name):
    return os.path.join(self.tmp, name)

  def metrics(self, name):
    return tiny_run.comparable_metrics(self.path(name), MEASURED)

  def assert_equal_runs(self, config, first, second):
    self.assertEqual(self.metrics(first), self.metrics(second))
    updates = config.train.updates
    states = [tiny_run.state_after(config, self.path(name), updates) for name in (first, second)]
    jax.tree.map(np.testing.assert_array_equal, *states)

  def test_numbers_equal_those_of_engines_that_stay_awake(self):
    engine = self.engine()
    config = make_config(engine.address)
    config.rollout.engine_shares_devices = False
    loop.start(config, self.path('awake'))
    self.assertFalse(any('sleep' in path or 'wake' in path for path in engine.log))

    # The engine has restarted: it has its first weights, and it is awake.
    engine.label, engine.weights = 'default', 'model'
    engine.log.clear()
    config.rollout.engine_shares_devices = True
    sample = engine.sample
    update = learner_lib.Learners.update
    make = offload.DeviceArrays
    trainers = []
    kinds = set()  # where the trainer's arrays are while turns are sampled
    updated = []

    def make_noted(learners):
      trainers.append(learners)
      return make(learners)

    def sample_alone(prompt):
      arrays = jax.tree.leaves((trainers[0].states, trainers[0].frozen))
      kinds.update(x.sharding.memory_kind for x in arrays if x.ndim)
      return sample(prompt)

    def update_alone(learners, *args):
      self.assertEqual(engine.asleep, ALL)
      arrays = jax.tree.leaves(learners.states)
      self.assertEqual({x.sharding.memory_kind for x in arrays}, {'device'})
      updated.append(learners)
      return update(learners, *args)

    engine.sample = sample_alone
    self.enterContext(mock.patch.object(learner_lib.Learners, 'update', update_alone))
    self.enterContext(mock.patch.object(offload, 'DeviceArrays', make_noted))
    loop.start(config, self.path('shared'))
    self.assert_equal_runs(config, 'awake', 'shared')
    self.assertEqual(engine.asleep, ALL)
    self.assertTrue(engine.crashes.empty())
    self.assertLen(updated, 2)
    self.assertEqual(kinds, {sharding.HOST})
    # One for the trainer's start, then per batch, evaluation and check of log-probs.
    self.assertEqual(sum(path == '/sleep?level=2' for path in engine.log), 1 + 1 + 2 + 3 * 2)
    first = engine.log.index('/wake_up?tags=weights')
    steps = [path.partition('?')[0] for path in engine.log[first : first + 7]]
    self.assertEqual(
        steps,
        [
            '/wake_up',
            '/pause',
            '/collective_rpc',
            '/wake_up',
            '/reset_prefix_cache',
            '/wake_up',
            '/update_weight_version',
        ],
    )

  @pytest.mark.slow
  def test_error_in_batch_is_resumed_exactly(self):
    """The turns in progress are aborted, and none of them wakes the engine again."""
    engine = self.engine()
    config = make_config(engine.address, eval__every=0, train__checkpoint_every=0)
    loop.start(config, self.path('whole'))
    update = learner_lib.Learners.update
    sample = engine.sample
    turns = []

    def spoil_last(prompt):
      turns.append(prompt)
      if len(turns) == 16:
        return [10**9], 'stop'
      engine.delay_s = 60.0
      return sample(prompt)

    def update_then_spoil(learners, *args):
      engine.sample = spoil_last
      return update(learners, *args)

    with mock.patch.object(learner_lib.Learners, 'update', update_then_spoil):
      with self.assertRaisesRegex(types.RunError, 'serves another model'):
        loop.start(config, self.path('spoilt'))
    self.assertEqual(engine.asleep, ALL)
    engine.sample, engine.delay_s = sample, 0.0
    loop.start(config, self.path('spoilt'))
    self.assert_equal_runs(config, 'whole', 'spoilt')

  @pytest.mark.slow
  def test_engine_that_stays_awake_ends_run_with_save(self):
    """The state is saved from the host's memory, because the devices have no room for it."""
    engine = self.engine()
    config = make_config(engine.address, eval__every=0, train__checkpoint_every=0)
    loop.start(config, self.path('whole'))
    self.enterContext(mock.patch.object(remote, '_CONTROL_S', 0.5))
    update = learner_lib.Learners.update

    def fail(level):
      raise AssertionError(level)

    def update_then_break(learners, *args):
      engine.sleep = fail
      return update(learners, *args)

    with mock.patch.object(learner_lib.Learners, 'update', update_then_break):
      with self.assertRaisesRegex(types.RunError, 'did not fall asleep'):
        loop.start(config, self.path('held'))
    self.assertTrue(os.path.isdir(self.path('held/checkpoints/1')))
    del engine.sleep
    loop.start(config, self.path('held'))
    self.assert_equal_runs(config, 'whole', 'held')

  @pytest.mark.slow
  def test_stop_in_batch_is_resumed_exactly(self):
    engine = self.engine()
    config = make_config(engine.address, eval__every=0)
    loop.start(config, self.path('whole'))
    stop = StopSignal()
    update = learner_lib.Learners.update

    def update_then_delay(learners, *args):
      engine.delay_s = 60.0
      threading.Timer(1.0, stop.set).start()
      return update(learners, *args)

    with mock.patch.object(learner_lib.Learners, 'update', update_then_delay):
      loop.start(config, self.path('stopped'), stop)
    self.assertEqual(engine.asleep, ALL)
    engine.delay_s = 0.0
    loop.start(config, self.path('stopped'))
    self.assert_equal_runs(config, 'whole', 'stopped')

  @parameterized.parameters(
      ({'sleeps': False}, '1', 'its sleep mode is off'), ({}, '0', 'status 404')
  )
  def test_engine_that_cannot_sleep_is_refused(self, options, dev_mode, cause):
    with mock.patch.dict(os.environ, VLLM_SERVER_DEV_MODE=dev_mode):
      engine = self.engine(**options)
    with self.assertRaisesRegex(types.UserError, f'{cause}.*--enable-sleep-mode') as raised:
      loop.start(make_config(engine.address), self.path('run'))
    self.assertNotIn('\n', str(raised.exception))

  def test_missing_engine_is_refused(self):
    self.enterContext(mock.patch.object(remote, '_START_S', 0.3))
    config = make_config(f'http://127.0.0.1:{servers_lib.free_port()}')
    with self.assertRaisesRegex(types.UserError, 'does not answer'):
      loop.start(config, self.path('run'))

  @pytest.mark.slow
  def test_killed_engine_returns_awake(self):
    """One of two engines is killed while it samples, and is started again."""
    ports = [servers_lib.free_port() for _ in range(2)]
    config = make_config(','.join(f'http://127.0.0.1:{port}' for port in ports), eval__every=0)
    engines = [self.start(port) for port in ports]
    loop.start(config, self.path('whole'))
    update = learner_lib.Learners.update

    def update_then_kill(learners, *args):
      def kill():
        engines[0].kill()
        engines[0].wait()
        engines.append(self.start(ports[0]))

      if len(engines) == 2:
        threading.Timer(0.2, kill).start()
      return update(learners, *args)

    with mock.patch.object(learner_lib.Learners, 'update', update_then_kill):
      loop.start(config, self.path('killed'))
    self.assert_equal_runs(config, 'whole', 'killed')
    self.assertGreaterEqual(len(engines), 3)
    self.assertIsNone(engines[-1].poll())

  def start(self, port):
    command = [sys.executable, vllm_stand_in.__file__, *flags_of(port, '--enable-sleep-mode')]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    servers_lib.wait_until_healthy(process, port)
    return process

  def test_request_to_sleeping_engine_waits(self):
    """So does vLLM 0.32: the trainer must not send any."""
    engine = self.engine()
    limits = http_client.ClientLimits(60.0, 60.0)
    server = http_client.Connection(engine.address, limits, 4)
    server.ask('/sleep?level=2', {})
    with self.assertRaises(http_client.Temporary):
      server.ask('/v1/completions', {'prompt': [1]}, total_s=0.3)
    server.ask('/resume', {})
    with self.assertRaises(http_client.Temporary):
      server.ask('/v1/completions', {'prompt': [1]})
    # The thread of the request that the client gave up may run late.
    self.assertEqual([engine.crashes.get(timeout=60) for _ in range(2)], ['a turn'] * 2)


class ArraysTest(absltest.TestCase):

  def test_sharded_arrays_move_and_return(self):
    """The old buffers are freed even if something refers to them."""
    config = tiny_run.make_config(mesh__fsdp=2, placement__optimizer='host')
    learners = tiny_run.load_learners(config)
    old = learners.states
    before = jax.device_get(old)
    places = jax.tree.map(lambda x: x.sharding, old)
    arrays = offload.DeviceArrays(learners)
    arrays.to_host()
    for x in jax.tree.leaves(learners.states):
      self.assertTrue(x.ndim == 0 or x.sharding.memory_kind == sharding.HOST)
    self.assertTrue(all(x.is_deleted() for x in jax.tree.leaves(old[''].actor)))
    arrays.to_devices()
    self.assertEqual(jax.tree.map(lambda x: x.sharding, learners.states), places)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(learners.states), before)

  def test_devices_that_cannot_be_shared_are_refused(self):
    mesh = mock.Mock()
    (device,) = mesh.devices.flat = [mock.Mock(platform='tpu')]
    with self.assertRaisesRegex(types.UserError, 'no sleep mode on TPUs'):
      offload.check(mesh)
    device.platform = 'gpu'
    device.addressable_memories.return_value = [mock.Mock(kind=sharding.HOST)]
    self.enterContext(mock.patch.dict(os.environ))
    for allocator in ('', 'default', 'platform'):
      os.environ['XLA_PYTHON_CLIENT_ALLOCATOR'] = allocator
      if allocator == 'platform':
        offload.check(mesh)
        continue
      with self.assertRaisesRegex(types.UserError, 'XLA_PYTHON_CLIENT_ALLOCATOR=platform'):
        offload.check(mesh)
    device.memory_stats.return_value = None
    self.assertGreater(sharding.memory_of(device), 0)
    with mock.patch.object(jax, 'process_count', return_value=2):
      with self.assertRaisesRegex(types.UserError, 'one process'):
        offload.check(mesh)


class SettingsTest(parameterized.TestCase):

  @parameterized.parameters(
      ({'rollout__engine': ''}, 'needs engines'),
      ({'rollout__engine_kind': 'sglang'}, 'only vLLM'),
      ({'rollout__engine_kind': 'stppo'}, 'only vLLM'),
      ({'rollout__engine': 'dns://e:8000'}, 'give each engine as http'),
      ({'rollout__engine': 'http://e:1,file:list'}, 'give each engine as http'),
      ({'pipeline__staleness': 1}, 'staleness=0'),
  )
  def test_settings_that_cannot_work_are_refused(self, values, message):
    config = tiny_run.replace(make_config('http://e:1'), values)
    with self.assertRaisesRegex(types.UserError, message) as raised:
      validation.validate(config)
    self.assertNotIn('\n', str(raised.exception))

  def test_adapters_keep_the_weights_below_them(self):
    """At level 1, because no load brings them. An adapter is loaded into memory that is there."""
    sent = []

    def send(path, body):
      del body
      sent.append(path)
      return {'is_sleeping': True, 'data': []}

    api = servers.VllmAdapterApi(sleeps=True)
    api.sleep(send)
    api.load(send, '/weights/000003', 'a-3')
    self.assertEqual(
        sent, ['/sleep?level=1', '/is_sleeping', '/wake_up', '/v1/models', '/v1/load_lora_adapter']
    )


if __name__ == '__main__':
  absltest.main()
