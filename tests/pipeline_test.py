"""Waiting for a failed retriever, with a simulated clock."""

import dataclasses
import json

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax import types
from stppo_jax.rollout import pipeline


class FakeRetriever:
  """A retriever that is down until `up_at`; time passes only in `sleep`."""

  def __init__(self, up_at):
    self.now, self.up_at, self.waits, self.plays, self.probes = 0.0, up_at, [], 0, []

  def search(self, queries, top_k):
    self.probes += queries
    return [[] if self.now >= self.up_at else None for _ in queries]

  def play(self):
    self.plays += 1
    return episodes(0 if self.now >= self.up_at else 8, 8)

  def sleep(self, seconds):
    self.waits.append(seconds)
    self.now += seconds

  def run(self, share=0.5, max_outage_s=3600.0):
    return pipeline.play_through(
        self.play, self, share, max_outage_s, sleep=self.sleep, clock=lambda: self.now
    )


def episodes(failed, total, too_long=0):
  task = types.Task('t', 'q', ('a',))
  made = []
  for i in range(total):
    one = types.Episode(task, i, np.zeros(1, np.int32), [], failed=i < failed + too_long)
    one.counts['prompt_too_long'] = float(failed <= i < failed + too_long)
    made.append(one)
  return made


class JsonTest(absltest.TestCase):

  def test_a_batch_survives_exactly(self):
    task = types.Task('t', 'q', ('a',))
    ids = lambda *x: np.array(x, np.int32)
    logp = np.array([-0.1, -2.5], np.float32)
    turns = [
        types.Turn(ids(3, 4), logp, ids(5), 'guess', 0.1),
        types.Turn(ids(6, 7), logp / 3, ids(), 'other', -0.3),
    ]
    made = types.Episode(
        task, 2, ids(1), turns, True, False, {'won': 0.7}, {'cut': 1.0}, ('won', 'f')
    )
    batch = pipeline.Sampled(4, 1, [made], {'timing_s/gen': 0.5})
    record = json.loads(json.dumps(pipeline.to_json(batch)))
    again = pipeline.from_json(record, [task])
    jax.tree.map(
        np.testing.assert_array_equal, dataclasses.asdict(batch), dataclasses.asdict(again)
    )
    self.assertEqual([turn.reward for turn in again.episodes[0].turns], [0.1, -0.3])
    self.assertEqual(again.episodes[0].core_metrics, ('won', 'f'))


class OutageTest(parameterized.TestCase):

  def test_without_a_failure_there_is_no_wait(self):
    retriever = FakeRetriever(up_at=0)
    played, replays = retriever.run()
    self.assertLen(played, 8)
    self.assertEqual((replays, retriever.plays, retriever.waits, retriever.probes), (0, 1, [], []))

  def test_waits_double_and_the_batch_is_played_once_more(self):
    retriever = FakeRetriever(up_at=10)
    played, replays = retriever.run()
    self.assertEqual(pipeline.failed_share(played), 0)
    self.assertEqual(retriever.waits, [1, 2, 4, 8])  # up at 15
    self.assertEqual((replays, retriever.plays), (1, 2))
    self.assertLen(set(retriever.probes), 4)  # no two alike: a cache must not answer

  def test_waits_are_bounded(self):
    retriever = FakeRetriever(up_at=400)
    retriever.run()
    self.assertEqual(retriever.waits[:8], [1, 2, 4, 8, 16, 32, 60, 60])

  def test_the_whole_wait_is_bounded(self):
    retriever = FakeRetriever(up_at=1e9)
    with self.assertRaisesRegex(types.RunError, r'^retrieval failed in 100% [^\n]*for 20 s[^\n]*$'):
      retriever.run(max_outage_s=20)
    self.assertEqual(retriever.now, 20)
    self.assertEqual(retriever.plays, 1)

  def test_a_retriever_that_answers_only_probes_ends_the_run(self):
    retriever = FakeRetriever(up_at=1e9)
    retriever.search = lambda queries, top_k: [[]]
    with self.assertRaises(types.RunError):
      retriever.run(max_outage_s=20)
    self.assertEqual(retriever.plays, 6)  # after 0, 1, 3, 7, 15 and 20 s

  @parameterized.parameters((4, 0.5, 1), (5, 0.5, 2), (8, 1.0, 1), (1, 0.0, 2), (0, 0.0, 1))
  def test_the_allowed_share_of_failures(self, failed, share, plays):
    played = []

    def play():
      played.append(1)
      return episodes(failed if len(played) == 1 else 0, 8)

    pipeline.play_through(play, FakeRetriever(up_at=0), share, 60.0, sleep=lambda s: None)
    self.assertLen(played, plays)

  def test_overlong_prompts_are_not_failures(self):
    self.assertEqual(pipeline.failed_share(episodes(0, 4, too_long=4)), 0)
    self.assertEqual(pipeline.failed_share(episodes(1, 4, too_long=2)), 0.25)
    self.assertEqual(pipeline.failed_share([]), 0)


if __name__ == '__main__':
  absltest.main()
