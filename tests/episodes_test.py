"""Records of episodes are written in a thread, which never ends or stops a run."""

import dataclasses
import errno
import json
import os
import tempfile
import threading
from unittest import mock

from absl import logging
from absl.testing import absltest
import numpy as np

from stppo_jax import types
from stppo_jax.monitoring import episodes
from tests.support import micro_run


def records(*rows):
  return episodes.Records(lambda: list(rows))


class SummaryTest(absltest.TestCase):

  def test_lengths_and_turns_are_counted_as_in_verl_and_as_ours(self):
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


class RecorderTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())
    self.told = []
    tell = lambda text, *args: self.told.append(text % args)
    self.enterContext(mock.patch.object(logging, 'warning', tell))

  def names(self):
    return sorted(os.listdir(os.path.join(self.workdir, 'episodes')))

  def test_records_are_made_and_written_by_another_thread_once(self):
    makers = []

    def make():
      makers.append(threading.current_thread())
      return [{'a': 1}, {'a': 2}]

    lazy = episodes.Records(make)
    with episodes.Recorder(self.workdir) as recorder:
      recorder.put('train', 3, lazy)
    self.assertEqual(lazy.get(), [{'a': 1}, {'a': 2}])
    self.assertLen(makers, 1)
    self.assertIsNot(makers[0], threading.main_thread())
    with open(os.path.join(self.workdir, 'episodes', 'train_000003.jsonl'), encoding='utf-8') as f:
      self.assertEqual([json.loads(line) for line in f], [{'a': 1}, {'a': 2}])
    self.assertEmpty(self.told)

  def test_a_full_disk_is_told_once_and_leaves_no_part(self):
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

  def test_a_disk_that_was_slow_once_loses_no_last_file(self):
    go_on, begun = threading.Event(), threading.Event()

    def slow():
      begun.set()
      go_on.wait(60)
      return []

    with episodes.Recorder(self.workdir, behind=1, put_s=0.01, close_s=60) as recorder:
      recorder.put('train', 1, episodes.Records(slow))
      self.assertTrue(begun.wait(60))
      recorder.put('train', 2, records())
      recorder.put('train', 3, records())  # finds no room, is told and left out
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
    recorder.put('train', 0, episodes.Records(stuck))
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

  def test_every_kth_update_of_a_run(self):
    with tempfile.TemporaryDirectory() as folder:
      micro_run.write_knowledge(folder)
      config = micro_run.make_config(folder, **{'log.episodes': True, 'log.episodes_every': 3})
      micro_run.train(config, self.workdir)
    self.assertEqual(
        self.names(),
        ['eval_000000.jsonl', 'eval_000002.jsonl', 'eval_000004.jsonl', 'train_000003.jsonl'],
    )


if __name__ == '__main__':
  absltest.main()
