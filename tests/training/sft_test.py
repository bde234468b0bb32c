"""Tests of stppo_jax.training.sft: `run.py sft`."""

import dataclasses
import functools
import json
import os
import pathlib
import tempfile
import unittest
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.data import row_files
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.rollout import batching
from stppo_jax.rollout import prepare
from stppo_jax.stop_signal import StopSignal
from stppo_jax.training import loop
from stppo_jax.training import packing
from stppo_jax.training import sft
from stppo_jax.training import state as state_lib
from stppo_jax.training import supervised
from stppo_jax.types import UserError
from tests.support import tiny_run

_COLOURS = tiny_run.COLOURS


def setUpModule():
  global FOLDER
  temporary = tempfile.TemporaryDirectory()
  unittest.addModuleCleanup(temporary.cleanup)
  FOLDER = temporary.name
  tiny_run.write(FOLDER)
  rows = []
  for i in range(24):
    thing, colour = list(_COLOURS.items())[i % len(_COLOURS)]
    rows.append(
        {
            'messages': [
                {'role': 'user', 'content': f'Question {i}: Which colour has {thing}?\n'},
                {'role': 'assistant', 'content': f'<search> {thing}</search>'},
                {'role': 'tool', 'content': f'<information>{colour}</information>'},
                {'role': 'assistant', 'content': f'<answer> {colour}</answer>'},
            ],
            'split': 'dev' if i >= 20 else 'train',
        }
    )
  tiny_run.write_lines(os.path.join(FOLDER, 'chats.jsonl'), rows)


def tearDownModule():
  unittest.doModuleCleanups()  # pytest leaves that out


def make_config(**values):
  settings = {'sft__lr': 3e-3, 'sft__batch': 8, 'sft__epochs': 4, 'eval__every': 4}
  config = tiny_run.make_config(FOLDER, **(settings | values))
  config.data.source = os.path.join(FOLDER, 'chats.jsonl')
  config.data = dataclasses.replace(
      config.data,
      **{name.removeprefix('data__'): value for name, value in values.items() if 'data__' in name},
  )
  return config


class _Test(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(tiny_run.on_one_device())
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())

  def records(self, workdir=None):
    path = pathlib.Path(workdir or self.workdir, 'metrics.jsonl')
    return [json.loads(line) for line in path.read_text().splitlines()]

  def weights(self, workdir):
    config = make_config()
    config.model.folder = os.path.join(workdir, 'model')
    return jax.device_get(prepare.load_policy(config)[1])


class ChooseBinsTest(absltest.TestCase):

  def test_few_tokens_are_computed(self):
    """Lengths of three data sets, 32 conversations per step, the default bins and buckets."""
    defaults = schema.Config()
    buckets = defaults.train.length_buckets
    rng = np.random.default_rng(0)
    for mean in (144, 383, 872):
      lengths = np.clip(rng.lognormal(np.log(mean) - 0.18, 0.6, 640), 8, buckets[-1]).astype(int)
      order = functools.partial(tasks_lib.in_epochs, 640, 32, 0)
      for multiple in (1, 2):
        number = supervised.choose_bins(lengths, order, 64, multiple, buckets, shared=True)
        computed = 0
        used = 0
        for n in range(20):
          rows = lengths[order(n)]
          packed = packing.pack(rows, number, buckets)
          computed += packing.num_computed(packed, number, buckets)
          used += rows.sum()
        with self.subTest(mean=mean, multiple=multiple):
          self.assertEqual(number % multiple, 0)
          self.assertLess(computed / used, 1.5)

  def test_all_bins_are_used_where_they_are_full(self):
    order = functools.partial(tasks_lib.in_epochs, 64, 32, 0)
    lengths = np.full(64, 1000)
    self.assertEqual(supervised.choose_bins(lengths, order, 8, 1, (1024, 2048), shared=True), 8)


class StartTest(_Test):

  def test_splits_are_kept_apart(self):
    rows = [json.loads(line) for line in open(os.path.join(FOLDER, 'chats.jsonl'))]
    folder = self.enterContext(tempfile.TemporaryDirectory())
    for splits, numbers in (
        (('train', 'test'), (12, 0)),
        (('train', 'validation'), (12, 12)),
        (('', 'test'), (12, 0)),
    ):
      marked = [row | {'split': splits[i % 2]} for i, row in enumerate(rows)]
      path = os.path.join(folder, 'marked.jsonl')
      tiny_run.write_lines(path, marked)
      config = make_config(sft__held_out=0.0)
      config.data.source = path
      pools = sft.load_pools(config)
      self.assertEqual((len(pools.train), len(pools.held_out)), numbers, splits)
    for i, name in enumerate(('train', 'test')):
      tiny_run.write_lines(
          os.path.join(folder, f'{name}.jsonl'), [row | {'split': ''} for row in rows[i::2]]
      )
    config.data.source = ','.join(os.path.join(folder, f'{n}.jsonl') for n in ('train', 'test'))
    with self.assertLogs('absl', 'INFO') as logs:
      pools = sft.load_pools(config)
    self.assertEqual((len(pools.train), len(pools.held_out)), (12, 0))
    self.assertIn("12 with the split 'test', which config.data.train_split may name", str(logs))

  def test_stop_before_the_first_checkpoint_keeps_one_line_of_step_0(self):
    with self.assertRaises(KeyboardInterrupt):
      sft.start(make_config(), self.workdir, StopSignal(mock.Mock(side_effect=KeyboardInterrupt)))
    sft.start(make_config(), self.workdir)
    self.assertEqual([row['step'] for row in self.records()].count(0), 1)

  def test_loss_falls_and_stops_change_nothing(self):
    folder = sft.start(make_config(), self.workdir)
    self.assertEqual(folder, os.path.join(self.workdir, 'model'))
    held_out = [r['sft/held_out_loss'] for r in self.records() if 'sft/held_out_loss' in r]
    self.assertLen(held_out, 4)  # before the 10 steps, after 4, 8 and 10
    self.assertLess(held_out[-1], held_out[0] - 0.2)
    other = self.enterContext(tempfile.TemporaryDirectory())
    polls = iter([False] * 3 + [True])
    line = sft.start(make_config(), other, StopSignal(lambda: next(polls)))
    self.assertRegex(line, 'stopped after 3 of 10 steps')
    self.assertFalse(os.path.exists(os.path.join(other, 'model')))
    sft.start(make_config(), other)
    self.assertEqual(self.records(other), self.records())
    jax.tree.map(np.testing.assert_array_equal, self.weights(other), self.weights(self.workdir))

  def test_an_interrupt_loses_only_steps_since_the_checkpoint(self):
    polls = iter([False] * 5)

    def interrupt():
      if next(polls, None) is None:
        raise KeyboardInterrupt
      return False

    config = make_config(train__checkpoint_every=2, data__eval_split='other', sft__held_out=0.0)
    with self.assertRaises(KeyboardInterrupt):
      sft.start(config, self.workdir, StopSignal(interrupt))
    with open(os.path.join(self.workdir, 'metrics.jsonl'), 'a', encoding='utf-8') as file:
      file.write('{"step": 5, "sft/lo')  # a line that a crash cut
    with self.assertLogs('absl', 'INFO') as logs:
      sft.start(config, self.workdir)
    output = ''.join(logs.output)
    self.assertIn('resumed after 4 of 10 steps', output)
    self.assertIn('step 10/10: no conversation is held out', output)
    steps = [r['step'] for r in self.records() if 'sft/loss' in r]
    self.assertEqual(steps, [*range(1, 11)])
    self.assertFalse(any('sft/held_out_loss' in r for r in self.records()))

  def test_another_config_or_other_conversations_do_not_resume(self):
    sft.start(make_config(), self.workdir)
    with self.assertRaisesRegex(UserError, 'sft.lr .0.003 there, 0.1 here'):
      sft.start(make_config(sft__epochs=1, sft__lr=0.1), self.workdir)

  def test_mistakes(self):
    with self.assertRaisesRegex(UserError, '--config.data.source=FILE'):
      sft.start(make_config(data__source='embedded'), self.workdir)
    path = os.path.join(self.workdir, 'qa.jsonl')
    tiny_run.write_lines(path, [{'question': 'q', 'answers': ['a']}])
    with self.assertRaisesRegex(UserError, 'qa.jsonl:1: no conversation in the columns question'):
      sft.start(make_config(data__source=path), self.workdir)
    tiny_run.write_lines(path, [{'messages': [{'role': 'user', 'content': 'q'}]}])
    with self.assertRaisesRegex(UserError, 'none of 1 conversations .*1 with no turn'):
      sft.start(make_config(data__source=path), self.workdir)

  def test_adapters_are_merged_into_the_folder(self):
    sft.start(make_config(model__lora_rank=2, sft__epochs=1), self.workdir)
    before = prepare.load_policy(make_config())[1]
    after = self.weights(self.workdir)
    change = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), jax.device_get(before), after)
    self.assertEqual(change['embed']['embedding'], 0)
    self.assertGreater(max(jax.tree.leaves(change)), 0)


class PoolsTest(_Test):

  def test_splits_lengths_and_counts(self):
    with self.assertLogs('absl', 'INFO') as logs:
      pools = sft.load_pools(make_config())
    self.assertEqual(tuple(map(len, pools)), (20, 4))
    self.assertIn('24 of 24 conversations with 48 turns', logs.output[-1])
    longest = max(len(row.tokens) for row in pools.train)
    config = make_config(train__length_buckets=(longest - 8,))
    with self.assertLogs('absl', 'INFO') as logs:
      pools = sft.load_pools(config)
    self.assertRegex(logs.output[-1], r'cut after their last turn within \d+ tokens: [1-9]')
    self.assertLessEqual(max(len(row.tokens) for row in pools.train), longest - 8)

  def test_a_share_is_held_out_without_a_split(self):
    config = make_config(data__eval_split='other', sft__held_out=0.25)
    self.assertEqual(tuple(map(len, sft.load_pools(config))), (15, 5))  # no row of the split dev
    again = sft.load_pools(config)
    np.testing.assert_array_equal(again[1][0].tokens, sft.load_pools(config)[1][0].tokens)

  def test_rows_of_an_agent_program_have_its_whole_score(self):
    turns = [types.Turn(np.array([1]), np.zeros(1), reward=0.0)]
    episodes = [
        types.Episode(types.Task('t'), 0, np.array([0]), turns, number=i, whole_score=score)
        for i, score in enumerate((1.0, 0.0))
    ]
    sampled = batching.Sampled(1, 0, episodes, {})
    with mock.patch.multiple(sft.saved, numbers=lambda folder: [1], read=lambda *args: sampled):
      kept = [episode for _, episode in sft._saved_episodes('folder', None, 0.5)]
    self.assertEqual(kept, [episodes[0], 'a score below 0.5'])

  def test_conversations_with_one_prompt_stay_together(self):
    rows = []
    for i in range(24):
      tokens = np.array([i % 8, 7, i])
      rows.append(supervised.Demonstration(tokens, np.array([0.0, 0.0, 1.0])))
    pools = sft._with_held_out(make_config(sft__held_out=0.25), sft.Pools(rows, []))
    train, held_out = ({int(row.tokens[0]) for row in pool} for pool in pools)
    self.assertEqual((len(train), len(held_out)), (6, 2))
    self.assertEqual(tuple(map(len, pools)), (18, 6))
    pools = sft._with_held_out(make_config(sft__held_out=0.25), sft.Pools(rows[::8], []))
    self.assertEqual(tuple(map(len, pools)), (2, 1))  # all three have the same prompt


class TrainerTest(_Test):

  def trainer(self, micro_batch, buckets):
    config = decoder.ModelConfig(
        vocab_size=16,
        d_model=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        d_ff=32,
        scan_layers=False,
    )
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    optimizer = supervised.make_optimizer(1e-2, 10)
    trainer = supervised.Trainer(config, state_lib.Frozen(), optimizer, mesh, micro_batch, buckets)
    return trainer, decoder.init(jax.random.key(0), config)

  def pool(self):
    rng = np.random.default_rng(0)
    rows = []
    for length in (3, 5, 6, 8, 2):
      weights = (rng.random(length) < 0.6).astype(np.float32)
      weights[-1] = 1
      weights[0] = 0
      rows.append(supervised.Demonstration(rng.integers(0, 16, length).astype(np.int32), weights))
    return rows

  def test_packed_loss_is_that_of_single_rows(self):
    trainer, params = self.trainer(2, (8, 16))
    total = 0.0
    for row in self.pool():
      x, _ = decoder.trunk(params, trainer.model, row.tokens[None], None)
      logp, _ = decoder.token_logp(params, trainer.model, x, row.tokens[None])
      total -= float((logp[0] * row.weights).sum())
    expected = total / sum(row.weights.sum() for row in self.pool())
    self.assertAlmostEqual(trainer.loss(params, self.pool(), 3), expected, places=5)

  def test_gradient_that_is_not_finite_is_reported(self):
    def loss(trainer, actor, frozen, rows, layout):
      return jnp.sqrt(0.0 * jax.tree.leaves(actor)[0].sum())  # 0, and its gradient is NaN

    with mock.patch.object(supervised.Trainer, '_micro_batch_loss', loss):
      trainer, params = self.trainer(2, (8,))
      _, value = trainer.step(trainer.init(params), trainer.rows(self.pool(), 6))
    self.assertTrue(np.isnan(value))

  def test_best_loss_is_known_after_a_stop(self):
    path = os.path.join(self.workdir, 'metrics.jsonl')
    losses = [{'step': n, 'sft/held_out_loss': loss} for n, loss in ((0, 3.0), (4, 1.0), (8, 0.5))]
    tiny_run.write_lines(path, losses)
    with self.assertLogs('absl', 'WARNING') as logs:
      sft._Log(self.workdir, 4, 8).losses(8, 2.0)
    self.assertRegex(logs.output[-1], r'the held-out loss was lower after step 4 \(1.0000\)')

  def test_bins_do_not_change_a_step(self):
    results = []
    for micro_batch, buckets in ((1, (8,)), (2, (8, 16)), (4, (32,))):
      trainer, params = self.trainer(micro_batch, buckets)
      state, loss = trainer.step(trainer.init(params), trainer.rows(self.pool(), 6))
      results.append((loss, jax.device_get(state['actor'])))
    for loss, actor in results[1:]:
      self.assertAlmostEqual(loss, results[0][0], places=5)
      close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5)
      jax.tree.map(close, actor, results[0][1])


@pytest.mark.slow
class RunTest(_Test):

  def test_run_starts_from_folder_and_is_imitated(self):
    folder = sft.start(make_config(), self.workdir)
    config = tiny_run.make_config(FOLDER, train__updates=1)
    config.model.folder = folder
    run = os.path.join(self.workdir, 'rl')
    loop.start(config, run)
    source = os.path.join(run, 'episodes')
    row_files.log_once.cache_clear()
    config = make_config(data__source=source, sft__min_reward=-1.0, sft__epochs=1)
    sft.start(config, os.path.join(self.workdir, 'again'))
    with self.assertRaisesRegex(UserError, 'with a score below 2'):
      sft.load_pools(make_config(data__source=source, sft__min_reward=2.0))


if __name__ == '__main__':
  absltest.main()
