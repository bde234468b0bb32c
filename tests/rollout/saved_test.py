"""Batches that a run saved are trained on again: the same numbers, without sampling."""

import dataclasses
import glob
import json
import os
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.assembly import components
from stppo_jax.evaluation import sample as sample_lib
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import saved
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.text import tokenizer as chat
from stppo_jax.training import checkpoint
from stppo_jax.training import loop
from stppo_jax.training import state as train_state
from stppo_jax.types import RunError
from stppo_jax.types import UserError
from tests.support import tiny_run

GROUPS = {'algorithm.variant': 'grpo', 'rollout.group_size': 4}
STALE = {'pipeline.staleness': 1, 'algorithm.rollout_is': 'turn', 'train.updates': 3}
# What only a sampler measures.
OF_SAMPLING = ('env/replays', 'train/num_gen_batches', 'rollout/')


def lines(path):
  with open(path, encoding='utf-8') as file:
    return [json.loads(line) for line in file]


class ReplayTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(tiny_run.on_one_device())
    self.folder = self.enterContext(tempfile.TemporaryDirectory())

  def make(self, name, **values):
    values = {'eval.every': 0, 'eval.episodes': 1, 'train.checkpoint_every': 2} | values
    return tiny_run.make_config(**values), os.path.join(self.folder, name)

  @pytest.mark.slow
  def test_replay_of_groups_ahead_is_bit_exact(self):
    self.check_replay(GROUPS | STALE)

  @parameterized.parameters({}, {'algorithm.old_logp': 'sampler', 'train.updates': 1})
  @pytest.mark.slow
  def test_replay_is_bit_exact(self, **values):
    self.check_replay(values)

  def check_replay(self, values):
    config, workdir = self.make('run', **values)
    updates = config.train.updates
    loop.start(config, workdir)
    replay, again = self.make('again', **values)
    replay.rollout.replay = os.path.join(workdir, 'episodes')
    with mock.patch.object(batches_lib.Batches, 'sample', side_effect=AssertionError('sampled')):
      loop.start(replay, again)
    theirs, ours = (tiny_run.comparable_metrics(x, OF_SAMPLING) for x in (workdir, again))
    self.assertEqual(ours, theirs)
    chex.assert_trees_all_equal(
        tiny_run.state_after(config, workdir, updates), tiny_run.state_after(replay, again, updates)
    )
    for path in glob.glob(os.path.join(workdir, 'episodes', 'train_*.jsonl')):
      # The replay saved what it read: it can be replayed in turn.
      self.assertEqual(lines(os.path.join(again, 'episodes', os.path.basename(path))), lines(path))

  def test_malformed_records_are_one_line(self):
    path = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), 'train_000001.jsonl')
    record = {'tokens': [2**40], 'turn_ids': [0], 'behaviour_logp': [], 'actions': []}
    for text, words in (
        (json.dumps(record), 'does not hold the episodes'),
        ('[' * 100_000, 'is not JSON lines'),
    ):
      with open(path, 'w', encoding='utf-8') as file:
        file.write(text)
      with self.assertRaisesRegex(UserError, words):
        saved.read(path, mock.Mock())

  def test_rows_of_one_episode_are_no_group(self):
    def row(number, segment, group):
      turn = types.Turn(np.ones(2, np.int32), np.full(2, -1.0, np.float32))
      episode = types.Episode(types.Task(str(number)), group, np.ones(1, np.int32), [turn])
      episode.number, episode.segment, episode.whole_score = number, segment, 1.0
      return episode

    env = mock.Mock(**{'has_rows_of.return_value': True})
    replay = saved.Replay('folder', None, 2, 8, 4, env, needs_groups=True)
    for num_rows in 1, 2:
      alone = [row(i, segment, i) for i in range(4) for segment in range(num_rows)]
      with self.assertRaisesRegex(UserError, 'no two episodes are of one group'):
        replay._check('batch', alone)
      replay._check('batch', [row(i, s, i // 2) for i in range(4) for s in range(num_rows)])

  @pytest.mark.slow
  def test_unusable_replays_are_one_line(self):
    config, workdir = self.make('run', **{'train.updates': 1})
    loop.start(config, workdir)
    folder = os.path.join(workdir, 'episodes')
    path = saved.path_of(folder, 1)
    tokenizer = chat.load_tokenizer(config.model.folder)
    written = lines(path)
    env = components.resolve(config).env

    def refused(text, records=written, mini_batch=8, longest=192, **needs):
      with open(path, 'w', encoding='utf-8') as file:
        file.writelines(json.dumps(record) + '\n' for record in records)
      with self.assertRaisesRegex(UserError, f'^[^\n]*{text}[^\n]*$'):
        saved.Replay(folder, tokenizer, mini_batch, longest, 16, env, **needs)(1)

    with self.subTest('a later batch that cannot be read keeps the updates before it'):
      with open(saved.path_of(folder, 2), 'w', encoding='utf-8') as file:
        file.write('{')
      two, again = self.make('two', **{'train.updates': 2, 'rollout.replay': folder})
      with self.assertRaisesRegex(RunError, 'train_000002.jsonl is not JSON lines'):
        loop.start(two, again)
      with checkpoint.Checkpoints(again) as checkpoints:
        self.assertEqual(checkpoints.newest(), 1)
      os.remove(saved.path_of(folder, 2))

    refused('16 episodes, which .*mini_batch=5 does not divide', mini_batch=5)
    with self.assertLogs(level='WARNING') as logs:
      saved.Replay(folder, tokenizer, 8, 192, 512, env)(1)
    self.assertRegex(logs.output[0], 'has 16 episodes.*episodes=512: set .*episodes=16')
    refused('length_buckets end at 8: add', longest=8)
    refused('no two episodes are of one group', needs_groups=True)
    refused('another tokenizer', [r | {'pieces': ['?', *r['pieces'][1:]]} for r in written])
    refused('does not hold the episodes', [{'step': 1}])
    refused('does not hold the episodes', [])
    refused('does not hold the episodes', [[1]])
    refused('without the experts', needs_routes=True)
    without = lambda r: [None] * len(r['behaviour_logp'])
    refused('turns without log-probs', [r | {'behaviour_logp': without(r)} for r in written])

    # All of it before the folder of the run is made.
    config, again = self.make('again', **{'train.updates': 1, 'rollout.replay': folder})
    with self.assertRaisesRegex(UserError, 'turns without log-probs'):
      loop.start(config, again)
    config.train.updates = 3
    with self.assertRaisesRegex(UserError, 'no train_000002.jsonl.*--config.train.updates=1'):
      loop.start(config, again)
    config.rollout.replay = tiny_run.shared_folder()
    with self.assertRaisesRegex(UserError, 'holds no saved batches'):
      loop.start(config, again)
    config.rollout.replay = os.path.join(self.folder, 'nowhere')
    with self.assertRaisesRegex(UserError, 'cannot be read'):
      loop.start(config, again)
    self.assertFalse(os.path.exists(again))

  @pytest.mark.slow
  def test_samples_are_the_batches_of_the_run(self):
    config, workdir = self.make('run', **GROUPS, **{'train.updates': 1})
    no_optimizer = mock.patch.object(train_state, 'create', side_effect=AssertionError('state'))
    with no_optimizer:
      untrained = sample_lib.sample(config, workdir, 1, NEVER)
    loop.start(config, workdir)
    trained_on = lines(os.path.join(workdir, 'episodes', 'train_000001.jsonl'))
    names = ('task', 'group', 'tokens', 'turn_ids', 'behaviour_logp', 'rewards')
    chosen = lambda records: sorted([record[name] for name in names] for record in records)
    self.assertEqual(chosen(lines(saved.path_of(untrained, 1))), chosen(trained_on))

    with no_optimizer:
      folder = sample_lib.sample(config, workdir, 2, NEVER)
    self.assertNotEqual(folder, untrained)
    self.assertEqual(saved.numbers(folder), [1, 2])
    with mock.patch.object(checkpoint, 'fingerprint', return_value='of other weights'):
      self.assertNotEqual(sample_lib.sample(config, workdir, 1, StopSignal(lambda: True)), folder)
    config.train.updates = 2  # the batch of update 2 is that of the policy after update 1
    loop.start(config, workdir)
    trained_on = lines(os.path.join(workdir, 'episodes', 'train_000002.jsonl'))
    self.assertEqual(chosen(lines(saved.path_of(folder, 2))), chosen(trained_on))

  def test_sampling_continues_after_a_stop(self):
    config, workdir = self.make('run')
    folder = sample_lib.sample(config, workdir, 1, NEVER)
    first = saved.path_of(folder, 1)
    before = os.stat(first).st_mtime_ns
    self.assertEqual(sample_lib.sample(config, workdir, 3, StopSignal(lambda: True)), folder)
    self.assertEqual(saved.numbers(folder), [1])
    self.assertEqual(sample_lib.sample(config, workdir, 0, NEVER), folder)
    self.assertEqual(os.stat(first).st_mtime_ns, before)
    played = {r['task'] for n in saved.numbers(folder) for r in lines(saved.path_of(folder, n))}
    self.assertEqual(played, {task.id for task in components.resolve(config).load_tasks('train')})
    load = components.Components.load_tasks
    edited = lambda *given: [dataclasses.replace(task, question='?') for task in load(*given)]
    with mock.patch.object(components.Components, 'load_tasks', edited):
      other = sample_lib.sample(config, workdir, 1, StopSignal(lambda: True))
    self.assertNotEqual(other, folder)  # other questions, and other episodes
    config.rollout.temperature = 0.5
    self.assertNotEqual(sample_lib.sample(config, workdir, 1, StopSignal(lambda: True)), folder)

  def test_run_with_engines_samples_in_this_process(self):
    config, workdir = self.make('run', **{'rollout.engine': 'http://127.0.0.1:9'})
    folder = sample_lib.sample(config, workdir, 1, NEVER)
    self.assertEqual(saved.numbers(folder), [1])


if __name__ == '__main__':
  absltest.main()
