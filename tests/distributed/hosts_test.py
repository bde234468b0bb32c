"""Several processes of one run: the same numbers as one process, one line each when one fails."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.rollout import split_envs
from tests.support import tiny_run

ROOT = pathlib.Path(__file__).parents[2]
EXPERIMENT = """
from tests.support import tiny_run
def get_config(mode=""):
  config = tiny_run.make_config({folder!r})
  config.algorithm.variant = 'grpo'  # no critic: less to compile
  config.algorithm.log_bias = False
  config.rollout.group_size = 2
  config.rollout.max_num_gen_batches = 2  # all processes must replace the same groups
  config.rollout.max_total = 128
  config.train.length_buckets = (128,)
  config.train.updates = 3000  # until it is killed
  config.eval.every = 0
  config.eval.rows = 3  # two devices cannot split them
  if mode == 'program':
    config.env.kind = 'gateway:tests.serving.rollouts_test:play_twice'
    config.rollout.max_num_gen_batches = 1
    config.serve.rows = 4
    config.serve.tool_form = 'tags'
  return config
"""


class Counter:
  """An environment whose observations count its own steps."""

  def __init__(self, name, last):
    self.name, self.last, self.steps = name, last, 0

  def reset(self, seed=None):
    return self.name, {}

  def step(self, action):
    self.steps += 1
    return (
        f'{self.name} {self.steps} {action}',
        0.1,
        self.steps == self.last,
        False,
        {'em': np.float32(0.5)},
    )


class OneProcessTest(parameterized.TestCase):

  def test_it_is_the_writer_and_shares_with_itself(self):
    self.assertTrue(hosts.is_writer())
    self.assertEqual(
        hosts.share({'a': np.float32(0.5), 'b': np.arange(2)}), [{'a': 0.5, 'b': [0, 1]}]
    )
    hosts.require_same('anything', [1])
    self.assertEqual(hosts.by_writer(max, 1, 2), 2)
    with self.assertRaisesRegex(types.UserError, 'no'):
      hosts.by_writer(mock.Mock(side_effect=types.UserError('no')))

  def test_a_value_that_is_not_json_is_named(self):
    with self.assertRaisesRegex(types.UserError, 'object'):
      hosts.share(object())

  def test_put_and_fetch_are_inverse(self):
    mesh = jax.make_mesh((8,), ('rows',))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('rows'))
    tree = {'a': np.arange(16).reshape(8, 2), 'b': np.ones(8)}
    placed = hosts.put(tree, sharding)
    self.assertEqual(placed['a'].sharding, sharding)
    jax.tree.map(np.testing.assert_array_equal, hosts.fetch(placed), tree)

  @parameterized.parameters(
      (dict(coordinator='a:1'), '^--coordinator=a:1: give'),
      (dict(process_id=0, num_processes=2), '^--num_processes=2 --process_id=0: give'),
      (dict(coordinator='a', num_processes=2, process_id=0), '^--coordinator=a '),
      (dict(coordinator='a:1', num_processes=2, process_id=2), '--process_id=2: give'),
      (dict(cluster=True, process_id=1), '^--process_id=1 --distributed: give'),
  )
  def test_impossible_flags(self, flags, words):
    with self.assertRaisesRegex(types.UserError, words):
      hosts.initialize(**flags)

  def test_waiting_process_says_so(self):
    self.addCleanup(logging.set_verbosity, logging.get_verbosity())
    logging.set_verbosity(logging.INFO)
    self.enterContext(mock.patch.object(type(jax.config), 'update'))
    alone = jax.errors.JaxRuntimeError('deadline')
    self.enterContext(mock.patch.object(jax.distributed, 'initialize', side_effect=alone))
    with self.assertLogs('absl', 'INFO') as logs:
      with self.assertRaisesRegex(types.RunError, 'did not find each other'):
        hosts.initialize('host0:1234', 2, 0)
    self.assertIn('waiting up to 300 s for all processes at host0:1234', logs.output[0])


class SplitStepsTest(parameterized.TestCase):

  def test_each_process_resets_its_own_environments(self):
    """An environment on a server has one session, however many processes there are."""
    envs, seeds = [Counter(name, 1) for name in 'abcde'], [5, 6, 7, 8, 9]
    reset = lambda env, seed: (f'{env.name} {seed}', {'suffix': (), 'n': np.int32(seed)})
    self.enterContext(mock.patch.object(jax, 'process_count', lambda: 2))
    self.enterContext(mock.patch.object(jax, 'process_index', lambda: 1))
    theirs = [['of process 0', {}]] * 3
    plain = lambda value: json.loads(json.dumps(value, default=hosts._plain))
    self.enterContext(mock.patch.object(hosts, 'share', lambda mine: [theirs, plain(mine)]))
    openings = split_envs.split_resets(map)(reset, envs, seeds)
    self.assertEqual([text for text, _ in openings[::2]], ['of process 0'] * 3)
    self.assertEqual(openings[1], ('b 6', {'suffix': [], 'n': 6}))
    self.assertEqual(openings[3], ('d 8', {'suffix': [], 'n': 8}))

  def test_every_process_gets_every_outcome(self):
    """Two processes as threads; environments end at different times, so the live ones shift."""
    here, barrier, said = threading.local(), threading.Barrier(2), {}

    def share(value):
      said[here.index] = json.loads(json.dumps(value, default=hosts._plain))
      barrier.wait()
      both = [said[0], said[1]]
      barrier.wait()
      return both

    def play(index, envs, outcomes):
      here.index = index
      step_all, alive = split_envs.split_steps(envs), list(envs)
      while alive:
        stepped = step_all(alive, [f'go {env.name}' for env in alive])
        outcomes.append(stepped)
        alive = [env for env, outcome in zip(alive, stepped) if not outcome[2]]

    self.enterContext(mock.patch.object(jax, 'process_count', lambda: 2))
    self.enterContext(mock.patch.object(jax, 'process_index', lambda: here.index))
    self.enterContext(mock.patch.object(hosts, 'share', share))
    make = lambda: [Counter(name, last) for name, last in zip('abcde', (1, 3, 2, 1, 3))]
    envs, outcomes = (make(), make()), ([], [])
    other = threading.Thread(target=play, args=(1, envs[1], outcomes[1]), daemon=True)
    other.start()
    play(0, envs[0], outcomes[0])
    other.join()
    self.assertEqual(outcomes[0], outcomes[1])
    self.assertEqual(
        [[outcome[0] for outcome in stepped] for stepped in outcomes[0]],
        [
            ['a 1 go a', 'b 1 go b', 'c 1 go c', 'd 1 go d', 'e 1 go e'],
            ['b 2 go b', 'c 2 go c', 'e 2 go e'],
            ['b 3 go b', 'e 3 go e'],
        ],
    )
    self.assertEqual([env.steps for env in envs[0]], [1, 0, 2, 0, 3])
    self.assertEqual([env.steps for env in envs[1]], [0, 3, 0, 1, 0])

  def test_outage_of_one_process_is_raised_by_all(self):
    self.enterContext(mock.patch.object(jax, 'process_count', lambda: 2))
    self.enterContext(mock.patch.object(jax, 'process_index', lambda: 0))
    theirs = [[], 'the reward could not be had']
    self.enterContext(mock.patch.object(hosts, 'share', lambda mine: [mine, theirs]))
    envs = [Counter(name, 2) for name in 'ab']
    with self.assertRaisesRegex(types.RunError, '^the reward could not be had$'):
      split_envs.split_steps(envs)(envs, ['x', 'y'])


class FailureTest(parameterized.TestCase):

  def test_process_ends_in_one_line_without_peer(self):
    gone = jax.errors.JaxRuntimeError('UNAVAILABLE')
    with (
        mock.patch.object(hosts, '_has_peers', True),
        mock.patch.object(hosts, 'post', side_effect=gone),
        mock.patch.object(hosts, '_end') as end,
    ):
      hosts.leave('a line', 3)
    end.assert_called_once_with('a line', 3)

  @parameterized.parameters(0, 1)
  @pytest.mark.slow
  def test_error_of_one_process_ends_the_other(self, failing):
    with socket.socket() as probe:
      probe.bind(('localhost', 0))
      address = f'localhost:{probe.getsockname()[1]}'
    program = f"""
import sys, time
from stppo_jax.distributed import hosts
process = int(sys.argv[1])
hosts.initialize('{address}', 2, process)
if process == {failing}:
  hosts.leave('run.py: no disk', 3)
time.sleep(300)
"""
    processes = []
    for i in range(2):
      command = [sys.executable, '-c', program, str(i)]
      processes.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    texts = [process.communicate(timeout=200)[1] for process in processes]
    self.assertEqual(processes[failing].returncode, 3, texts[failing])
    self.assertEqual(processes[1 - failing].returncode, 1, texts[1 - failing])
    self.assertIn(f'has failed (process {failing}: run.py: no disk)', texts[1 - failing])


class TwoProcessesTest(absltest.TestCase):
  """One story: two processes train as one does, one is killed, they resume, the other is killed,
  the checkpoint is evaluated, and one process alone continues."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tmp = cls.enterClassContext(tempfile.TemporaryDirectory())
    tiny_run.write(cls.tmp)
    pathlib.Path(cls.tmp, 'experiment.py').write_text(
        EXPERIMENT.format(folder=cls.tmp), encoding='utf-8'
    )

  def start(self, workdir, devices, *arguments, mode=''):
    env = {
        **os.environ,
        'JAX_PLATFORMS': 'cpu',
        'PYTHONPATH': str(ROOT),
        # The later one of two equal flags counts.
        'XLA_FLAGS': f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count={devices}',
    }
    # To a file: an unread pipe would block the process.
    log = open(os.path.join(self.tmp, f'log_{len(os.listdir(self.tmp))}'), 'w+', encoding='utf-8')
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / 'run.py'),
            f'--config={self.tmp}/experiment.py:{mode}',
            f'--workdir={self.tmp}/{workdir}',
            *arguments,
        ],
        stdout=log,
        stderr=log,
        env=env,
        text=True,
    )
    process.log = log
    self.addCleanup(log.close)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    return process

  def start_two(self, *arguments, workdir='two', mode=''):
    with socket.socket() as probe:
      probe.bind(('localhost', 0))
      port = probe.getsockname()[1]
    return [
        self.start(
            workdir,
            1,
            f'--coordinator=localhost:{port}',
            '--num_processes=2',
            f'--process_id={i}',
            *arguments,
            mode=mode,
        )
        for i in range(2)
    ]

  def said(self, process):
    process.log.seek(0)
    return process.log.read()

  def wait_until(self, condition, processes):
    deadline = time.monotonic() + 600
    while not condition():
      self.assertLess(time.monotonic(), deadline)
      for process in processes:
        self.assertIsNone(process.poll(), self.said(process))
      time.sleep(0.1)

  def assert_ends_too(self, process):
    """One line if it can; JAX may be faster and abort."""
    self.assertIn(process.wait(300), (1, -signal.SIGABRT))

  def records(self, workdir, name):
    path = pathlib.Path(self.tmp, workdir, 'episodes', name)
    return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]

  def assert_equal_runs(self, one, two):
    expected = metrics_lib.read_metrics(f'{self.tmp}/{one}')
    rows = metrics_lib.read_metrics(f'{self.tmp}/{two}')
    for step in range(3):
      names = [
          name
          for name in rows[step]
          if name != 'time' and not name.startswith(('timing_s/', 'perf/'))
      ]
      self.assertGreater(len(names), 5)
      for name in names:
        np.testing.assert_allclose(
            rows[step][name] or 0,
            expected[step][name] or 0,
            rtol=1e-5,
            atol=1e-7,
            err_msg=f'{name} at {step}',
        )
    for name in ('eval_000000.jsonl', 'train_000001.jsonl', 'train_000002.jsonl'):
      self.assertEqual(
          [record['tokens'] for record in self.records(two, name)],
          [record['tokens'] for record in self.records(one, name)],
      )

  @pytest.mark.slow
  def test_agent_programs_train_as_with_one_process(self):
    one = self.start('one_program', 2, '--config.train.updates=2', mode='program')
    self.assertEqual(one.wait(600), 0, self.said(one))
    two = self.start_two(workdir='two_programs', mode='program')
    saved = pathlib.Path(self.tmp, 'two_programs', 'checkpoints', '2')
    self.wait_until(saved.exists, two)
    self.assert_equal_runs('one_program', 'two_programs')
    with self.subTest('a stop of process 1 ends both, and the run resumes'):
      two[1].send_signal(signal.SIGTERM)
      self.assertEqual([process.wait(60) for process in two], [0, 0], self.said(two[0]))
      two = self.start_two(workdir='two_programs', mode='program')
      self.wait_until(lambda: 'resumed after' in self.said(two[0]), two)

  @pytest.mark.slow
  def test_processes_that_share_rows_train_as_one(self):
    flags = ('--config.train.updates=2', '--config.mesh.context=2')
    one = self.start('one_shared', 2, *flags)
    two = self.start_two(*flags, workdir='two_shared')
    processes = [one, *two]
    self.assertEqual([process.wait(600) for process in processes], [0] * 3, self.said(two[0]))
    self.assert_equal_runs('one_shared', 'two_shared')

  @pytest.mark.slow
  def test_story(self):
    one = self.start('one', 2, '--config.train.updates=2')
    self.assertEqual(one.wait(600), 0, self.said(one))
    two = self.start_two()
    saved = pathlib.Path(self.tmp, 'two', 'checkpoints', '2')
    self.wait_until(saved.exists, two)
    with self.subTest('the worker dies'):
      two[1].kill()
      self.assert_ends_too(two[0])
    with self.subTest('the sums of what both wrote are in one file'):
      path = max(saved.parent.glob('*/checksums.json'))
      names = json.loads(path.read_text(encoding='utf-8'))
      for i in range(2):
        self.assertTrue(any(f'/ocdbt.process_{i}/d/' in name for name in names), names)
      self.assertEmpty(list(path.parent.glob('checksums_*')))
    with self.subTest('the same numbers and tokens'):
      self.assert_equal_runs('one', 'two')
    with self.subTest('the same command resumes; process 0 dies'):
      two = self.start_two()
      self.wait_until(lambda: 'resumed after' in self.said(two[0]), two)
      two[0].kill()
      self.assert_ends_too(two[1])
    with self.subTest('evaluation ends well, and one prints'):
      two = self.start_two('--mode=eval')
      self.assertEqual([process.wait(600) for process in two], [0, 0])
      self.assertIn('| all ', self.said(two[0]))
      self.assertNotIn('| all ', self.said(two[1]))
    with self.subTest('one process on one device resumes the run of two'):
      newest = max(int(path.name) for path in saved.parent.iterdir() if path.name.isdigit())
      alone = self.start('two', 1, f'--config.train.updates={newest + 1}')
      self.assertEqual(alone.wait(600), 0, self.said(alone))
      self.assertIn(f'resumed after {newest} updates', self.said(alone))
      self.assertEqual(metrics_lib.read_metrics(f'{self.tmp}/two')[-1]['step'], newest + 1)


if __name__ == '__main__':
  absltest.main()
