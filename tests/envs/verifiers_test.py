"""Environments of Prime Intellect's verifiers: the real package, in an environment of its own."""

import asyncio
import contextlib
import importlib.util
import os
import pathlib
import sys
import tempfile
import types as types_lib
from unittest import mock

from absl.testing import absltest
import pytest

from stppo_jax import types
from stppo_jax.assembly import components
from stppo_jax.envs import commands
from stppo_jax.envs.adapters import verifiers
from tests.serving import rollouts_test
from tests.support import client_envs

pytestmark = pytest.mark.guests(
    what='verifiers',
    version='verifiers==0.4.0',
    date='2026-11-26',
    touches='envs/adapters/verifiers.py envs/adapters/verifiers_worker.py',
    environment='verifiers',
)

EXAMPLE = str(pathlib.Path(__file__).parents[2] / 'examples' / 'verifiers_search')


def make_config(**options):
  config = rollouts_test.make_config('verifiers:knowledge-search', **options)
  config.serve.rows = 4
  return config


class SettingsTest(absltest.TestCase):

  def test_wrong_settings_are_one_line(self):
    for options, words in (
        ({'splitt': 'a'}, 'no option splitt; allowed in config.env.options are python, taskset'),
        ({'python': '/no/python'}, "options.python='/no/python' is no program"),
    ):
      with self.assertRaisesRegex(types.UserError, words):
        components.resolve(make_config(**options))
    config = make_config()
    config.data.source = 'tasks.jsonl'
    with self.assertRaisesRegex(types.UserError, 'has tasks of its own: leave out config.data'):
      components.resolve(config)
    config = make_config()
    config.env.reward = 'f1'
    with self.assertRaisesRegex(types.UserError, 'scores by itself'):
      components.resolve(config)

  def test_missing_package_is_one_line(self):
    script = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), 'worker.py')
    pathlib.Path(script).write_text('import sys; sys.exit(3)', encoding='utf-8')
    with mock.patch('stppo_jax.envs.adapters.verifiers._WORKER', script):
      parts = components.resolve(make_config(python=sys.executable))
      for _ in range(2):  # it is started again
        with self.assertRaisesRegex(types.UserError, r'has ended \(exit status 3\).*verifiers 0.4'):
          parts.load_tasks('train')

  def test_process_gets_no_key_of_the_gateway(self):
    with mock.patch.dict(os.environ, {'STPPO_API_KEY': 'secret'}):
      self.assertNotIn('STPPO_API_KEY', commands.base_environment())


class WorkerTest(absltest.TestCase):
  """The process's module with a stub in place of the package."""

  def setUp(self):
    super().setUp()
    names = ('verifiers', 'verifiers.v1', 'verifiers.v1.utils')
    self.enterContext(mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in names}))
    spec = importlib.util.spec_from_file_location('worker', verifiers._WORKER)
    self.worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(self.worker)

  def test_failed_start_is_tried_again(self):
    starts = []

    @contextlib.asynccontextmanager
    async def serving():
      starts.append('start')
      if len(starts) == 1:
        raise OSError('no port')
      yield

    async def run_slot(slot, context):
      return slot

    self.worker.loaders.load_environment.return_value = types_lib.SimpleNamespace(
        taskset=[], serving=serving, slots=lambda task: [task], run_slot=run_slot
    )

    async def play():
      environment = self.worker.Environment(None, None)
      with self.assertRaisesRegex(OSError, 'no port'):
        await environment.play('a', 'http://a', 'model')
      episodes = [await environment.play(task, 'http://a', 'model') for task in ('b', 'c')]
      await environment.close()
      return episodes

    self.assertEqual(asyncio.run(play()), ['b', 'c'])
    self.assertLen(starts, 2)


@pytest.mark.slow
class PackageTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.python = client_envs.find('verifiers/bin/python')
    self.enterContext(mock.patch.dict(os.environ, {'PYTHONPATH': os.path.abspath(EXAMPLE)}))

  def test_splits_share_no_task(self):
    parts = components.resolve(make_config(python=self.python, max_tasks=25))
    train = parts.load_tasks('train')
    held_out = parts.load_tasks('dev')
    self.assertLen(train, 23)
    self.assertEqual([task.id for task in held_out], ['9', '19'])
    self.assertStartsWith(train[0].question, 'Question: ')
    options = {'eval_taskset': {'split': 'dev'}, 'max_tasks': 3}
    parts = components.resolve(make_config(python=self.python, **options))
    questions = [{task.question for task in parts.load_tasks(split)} for split in ('train', 'dev')]
    self.assertEqual(list(map(len, questions)), [3, 3])
    self.assertEmpty(questions[0] & questions[1])

  def test_episodes_have_rewards_and_metrics_of_package(self):
    config = make_config(python=self.python, max_tasks=40)
    tasks = components.resolve(config).load_tasks('train')[:8]
    episodes, _ = rollouts_test.play(config, tasks, groups=[0] * 4 + [1] * 4)
    self.assertLen(episodes, 8)  # one row each
    for episode in episodes:
      self.assertEqual(episode.counts['crashed'], 0)
      self.assertEqual(episode.counts['rewritten'], 0)
      self.assertEqual(episode.metrics['turns'], len(episode.turns))
      self.assertEqual(episode.score, episode.metrics['exact_match'])
    self.assertGreater(max(len(episode.turns) for episode in episodes), 1)

  def test_harness_that_runs_code_needs_a_runtime(self):
    env = {'agent': {'harness': {'id': 'bash'}}}
    parts = components.resolve(make_config(python=self.python, env=env))
    with self.assertRaisesRegex(types.UserError, "'bash' runs programs that the model writes: set"):
      parts.load_tasks('train')


if __name__ == '__main__':
  absltest.main()
