"""Episodes as records: exact both ways, and written in a thread that never stops a run."""

import dataclasses
import errno
import json
import os
import tempfile
import threading
import tracemalloc
from unittest import mock

from absl import logging
from absl.testing import absltest
import hypothesis
from hypothesis import strategies as st
import numpy as np

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.monitoring import episodes
from stppo_jax.monitoring import journal as journals
from tests.rollout.batching_test import make_episode
from tests.rollout.batching_test import TASK


class Pieces:
  """The part of a tokenizer that records need."""

  def pieces(self, ids):
    return [f'<{i}>' for i in ids]


def records(*rows):
  return lambda: list(rows)


class SummaryTest(absltest.TestCase):

  def test_lengths_and_turns_count_as_in_verl(self):
    """Three tokens, four read, two tokens, five that were never read."""
    turn = lambda agent, read: types.Turn(
        np.zeros(agent, np.int32), np.zeros(agent, np.float32), np.zeros(read, np.int32), 'a', 0.0
    )
    task, prompt = types.Task('t', 'q', ('a',)), np.zeros(7, np.int32)
    found = episodes.summarize([types.Episode(task, 0, prompt, [turn(3, 4), turn(2, 5)])])
    expected = {'response_length': 9, 'num_turns': 4, 'prompt_length': 7}
    expected |= {'stppo/agent_tokens': 5, 'stppo/agent_turns': 2}
    self.assertEqual({name: found[name + '/mean'] for name in expected}, expected)

  def test_segments_of_a_program_are_one_episode(self):
    """A score of 0 in nine segments and one of 1 in one: .5, not .1. Roles stand for themselves."""

    def row(number, reward, role=''):
      turn = types.Turn(
          np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(0, np.int32), 'a', reward
      )
      episode = types.Episode(types.Task('t', 'q', ('a',)), 0, np.zeros(1, np.int32), [turn])
      return dataclasses.replace(
          episode, number=number, role=role, metrics={'won': reward}, core_metrics=('won',)
      )

    found = episodes.summarize([*(row(0, 0.0) for _ in range(9)), row(1, 1.0)])
    expected = {'critic/score/mean': 0.5, 'won/mean': 0.5, 'stppo/agent_turns/mean': 1}
    self.assertEqual({name: found[name] for name in expected}, expected)
    found = episodes.summarize([row(0, 0.0, 'a'), row(0, 0.5, 'b'), row(1, 1.0, 'a')])
    self.assertEqual(found['critic/score/mean'], 0.5)

  def test_role_has_the_metrics_of_all_its_environments(self):
    """Rows of an environment that lacks a metric do not count in it."""
    rows = []
    for number, (name, value) in enumerate([('won', 1.0), ('won', 0.0), ('solved', 1.0)]):
      turn = types.Turn(np.zeros(1, np.int32), np.zeros(1, np.float32))
      fields = {'number': number, 'role': 'a', 'metrics': {name: value}, 'core_metrics': (name,)}
      rows.append(types.Episode(TASK, number, np.zeros(1, np.int32), [turn], **fields))
    found = episodes.summarize(rows)
    expected = {'role/a/won/mean': 0.5, 'role/a/solved/mean': 1.0}
    self.assertEqual({name: found[name] for name in expected}, expected)


class RecordTest(absltest.TestCase):

  def test_routes_expand_to_their_shape_only(self):
    routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    np.testing.assert_array_equal(types.unpack_array(types.pack_array(routes)), routes)
    bomb = types.pack_array(np.zeros(1 << 24, np.uint8))
    tracemalloc.start()
    self.addCleanup(tracemalloc.stop)
    for shape in ([3, 2, 2], [0], [-1, 2, 2]):
      with self.assertRaises(ValueError):
        types.unpack_array(['uint8', shape, bomb[2]])
    self.assertLess(tracemalloc.get_traced_memory()[1], 1 << 22)
    with self.assertRaises(ValueError):
      types.unpack_array(['V16', [1 << 20], bomb[2]])

  def test_record_with_too_large_claims_is_rejected(self):
    episode = make_episode(turns=(((5, 6), ()),))
    (record,) = episodes.to_records([episode], Pieces(), 1, 'train')
    num_tokens = len(record['tokens'])
    bomb = types.pack_array(np.zeros((1 << 20, 2, 2), np.uint8))
    for changes in (
        {'routes': [bomb]},
        {'routes': [['uint8', [num_tokens, 9**9, 2], bomb[2]]]},
        {'turn_ids': [0] * (num_tokens - 1) + [10**6]},
    ):
      with self.assertRaises(ValueError):
        types.Episode.from_dict(record | changes)

  def test_by_hand(self):
    episode = make_episode()
    episode.metrics, episode.counts, episode.core_metrics = {'em': 1.0}, {'cut': 1.0}, ('em',)
    ratio = np.arange(16, dtype=np.float32).reshape(2, 8)
    ratio[1, 3] = np.nan
    clipped = np.zeros((2, 8), bool)
    clipped[1, 5] = True
    records = episodes.to_records(
        [make_episode(), episode], Pieces(), 12, 'train', {'ratio': ratio, 'clipped': clipped}
    )
    want = {
        'step': 12,
        'kind': 'train',
        'task': 'q1',
        'dataset': 'toy',
        'hops': 2,
        'question': 'Who?',
        'answers': ['A', 'B'],
        'group': 0,
        'score': 1.0,
        'right': True,
        'metrics': {'em': 1.0},
        'core_metrics': ['em'],
        'counts': {'cut': 1.0},
        'failed': False,
        'truncated': False,
        'tokens': [1, 2, 3, 4, 5, 6],
        'pieces': ['<1>', '<2>', '<3>', '<4>', '<5>', '<6>'],
        'turn_ids': [0, 0, 1, 1, 0, 2],
        'actions': ['search', 'answer'],
        'rewards': [0.0, 1.0],
        'behaviour_logp': [-0.3, -0.4, -0.6],
        'ratio': [10.0, None, 13.0],
        'clipped': [0, 0, 1],
    }
    self.assertEqual(records[1], want)
    self.assertEqual(json.loads(json.dumps(records[1], allow_nan=False)), want)

  @hypothesis.given(st.data())
  @hypothesis.settings(deadline=None, max_examples=50)
  def test_records_give_the_episodes_back_exactly(self, data):
    ids = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(lambda x: np.array(x, np.int32))
    logp = st.floats(-1e30, -1e-30, allow_subnormal=False)
    turns = []
    for _ in range(data.draw(st.integers(0, 3))):
      tokens = data.draw(ids.filter(len))
      numbers = data.draw(st.lists(logp, min_size=len(tokens), max_size=len(tokens)))
      routes = np.arange(len(tokens) * 4, dtype=np.uint8).reshape(-1, 2, 2)
      reward = data.draw(st.floats(-1e9, 1e9, allow_subnormal=False))
      turns.append(
          types.Turn(tokens, np.array(numbers, np.float32), data.draw(ids), 'act', reward, routes)
      )
    episode = types.Episode(
        TASK, 3, data.draw(ids), turns, True, data.draw(st.booleans()), {'em': 1 / 3}, {'cut': 2.0}
    )
    episode.core_metrics = ('em', 'f1')
    records = episodes.to_records([episode], Pieces(), 1, 'train')
    again = types.Episode.from_dict(json.loads(json.dumps(records[0], allow_nan=False)))
    self.assertEqual(again.task, TASK)
    for name in ('group', 'truncated', 'failed', 'metrics', 'counts', 'core_metrics', 'score'):
      self.assertEqual(getattr(again, name), getattr(episode, name), name)
    np.testing.assert_array_equal(again.prompt, episode.prompt)
    for ours, theirs in zip(again.turns, turns, strict=True):
      for name in ('tokens', 'logp', 'observation', 'routes'):
        got, want = getattr(ours, name), getattr(theirs, name)
        self.assertEqual(got.dtype, want.dtype)
        np.testing.assert_array_equal(got, want, name)
      self.assertEqual((ours.action, ours.reward), (theirs.action, theirs.reward))

  def test_missing_log_prob_becomes_nan(self):
    records = episodes.to_records([make_episode()], Pieces(), 1, 'train')
    records[0]['behaviour_logp'][1] = None
    again = types.Episode.from_dict(records[0])
    np.testing.assert_array_equal(np.isnan(again.turns[0].logp), [False, True])


class RecorderTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())
    self.told = []
    tell = lambda text, *args: self.told.append(text % args)
    self.enterContext(mock.patch.object(logging, 'warning', tell))

  def names(self):
    return sorted(os.listdir(os.path.join(self.workdir, 'episodes')))

  def test_another_thread_makes_the_records(self):
    makers = []

    def make():
      makers.append(threading.current_thread())
      return [{'a': 1}, {'a': 2}]

    with episodes.Recorder(self.workdir) as recorder:
      recorder.put('train', 3, make)
    self.assertLen(makers, 1)
    self.assertIsNot(makers[0], threading.main_thread())
    with open(os.path.join(self.workdir, 'episodes', 'train_000003.jsonl'), encoding='utf-8') as f:
      self.assertEqual([json.loads(line) for line in f], [{'a': 1}, {'a': 2}])
    self.assertEmpty(self.told)

  def test_full_disk_warns_once_and_leaves_no_part(self):
    replace, full = os.replace, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def failing(source, target):
      if 'train_000004' not in target:
        raise full
      replace(source, target)

    with mock.patch.object(os, 'replace', failing):
      with episodes.Recorder(self.workdir) as recorder:
        for n in range(5):
          recorder.put('train', n, records({'a': n}))
    self.assertLen(self.told, 1)
    self.assertRegex(self.told[0], r'left out \(OSError: .*No space left.*training continues$')
    self.assertEqual(self.names(), ['train_000004.jsonl'])  # there is room again

  def test_slow_disk_loses_no_last_file(self):
    go_on, begun = threading.Event(), threading.Event()

    def slow():
      begun.set()
      go_on.wait(60)
      return []

    with episodes.Recorder(self.workdir, behind=1, put_s=0.01, close_s=60) as recorder:
      recorder.put('train', 1, slow)
      self.assertTrue(begun.wait(60))
      recorder.put('train', 2, records())
      recorder.put('train', 3, records())  # the queue is full: left out, with a warning
      threading.Timer(0.2, go_on.set).start()
    written = sorted(os.listdir(os.path.join(self.workdir, 'episodes')))
    self.assertEqual(written, ['train_000001.jsonl', 'train_000002.jsonl'])

  def test_a_disk_that_stands_still_holds_nobody_up(self):
    go_on, begun = threading.Event(), threading.Event()

    def let_go():  # and wait, because the folder is removed next
      go_on.set()
      recorder._queue.put(None)
      recorder._thread.join(60)

    def stuck():
      begun.set()
      go_on.wait()
      return []

    recorder = episodes.Recorder(self.workdir, behind=2, put_s=0.01, close_s=0.1)
    self.addCleanup(let_go)
    recorder.put('train', 0, stuck)
    self.assertTrue(begun.wait(60))
    for n in range(1, 50):
      recorder.put('train', n, records())
    recorder.close()
    self.assertEqual(
        self.told,
        [
            'records of episodes are left out (the disk is too slow: train_000003.jsonl waited for '
            '0.01 s); training continues'
        ],
    )

  def test_every_kth_update_is_recorded(self):
    log = schema.LogSettings(episodes=True, episodes_every=3, tensorboard=False)
    config = dataclasses.asdict(schema.Config(log=log))
    with journals.Journal(self.workdir, config, 0) as journal:
      for n in range(5):
        journal.record('train', n + 1, records())
        if n % 2 == 0:
          journal.record('eval', n, records())
    self.assertEqual(
        self.names(),
        ['eval_000000.jsonl', 'eval_000002.jsonl', 'eval_000004.jsonl', 'train_000003.jsonl'],
    )


if __name__ == '__main__':
  absltest.main()
