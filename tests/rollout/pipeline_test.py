"""Waiting for a failed retriever, with a simulated clock."""

import json
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax import types
from stppo_jax.data import tasks as task_files
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import batching
from stppo_jax.rollout import engine
from stppo_jax.rollout import episode


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
    with mock.patch.object(batches_lib, 'pause', lambda seconds, all_stop: self.sleep(seconds)):
      with mock.patch.object(batches_lib, 'time', self):
        return batches_lib.play_through(self.play, self, share, max_outage_s)

  def monotonic(self):
    return self.now

  def time_ns(self):
    return len(self.probes)


def episodes(failed, total, too_long=0):
  task = types.Task('t', 'q', ('a',))
  made = []
  for i in range(total):
    one = types.Episode(task, i, np.zeros(1, np.int32), [], failed=i < failed + too_long)
    one.counts['prompt_too_long'] = float(failed <= i < failed + too_long)
    made.append(one)
  return made


class ScriptedAgent:
  """Scores each episode by `score(call, task, sample)`; calls are counted from 0."""

  def __init__(self, score, failed=()):
    self.score, self.failed = score, failed
    self.calls, self.retriever, self.report = [], None, None

  def play(self, params, tasks, keys, groups, stop_signal=None):
    del params, stop_signal
    call, made = len(self.calls), []
    self.calls.append(([task.id for task in tasks], list(groups), jax.random.key_data(keys)))
    for i, (task, group) in enumerate(zip(tasks, groups)):
      score = self.score(call, task.id, i % 2)
      turn = types.Turn(np.ones(1, np.int32), np.zeros(1, np.float32), np.zeros(0, np.int32))
      turn.reward = score
      made.append(types.Episode(task, group, np.ones(1, np.int32), [turn]))
      made[-1].failed = (call, i) in self.failed
    self.report = engine.Report(decode_steps=2, sampled_tokens=2 * len(tasks))
    return made


class KeysTest(absltest.TestCase):

  def test_keys_are_drawn_on_the_cpu(self):
    """With golden bits. The default device stands for an accelerator that is training."""
    cpu = jax.local_devices(backend='cpu')[0]
    tasks = [types.Task('x'), types.Task('y'), types.Task('x')]
    with jax.default_device(jax.devices()[1]):
      sampling_key, mini_batch_key = batching.batch_keys(7, 3)
      round_key = jax.random.fold_in(sampling_key, 1)
      keys = episode.row_keys(round_key, tasks)
      by_role = episode.role_keys(keys, 2)
      seeds = episode.episode_seeds(keys)
    for key in (sampling_key, mini_batch_key, round_key, keys, by_role):
      self.assertEqual(key.devices(), {cpu})
    bits = lambda key: jax.random.key_data(key).tolist()
    self.assertEqual(bits(mini_batch_key), [4073741833, 2748900490])
    self.assertEqual(bits(keys)[0], [2306840020, 2202650387])
    self.assertEqual(bits(by_role)[2], [[2890047781, 3488942358], [1329005715, 3041335428]])
    self.assertEqual(seeds, [1944964367, 485676318, 213632281])


class RefillTest(parameterized.TestCase):
  """Groups whose scores are all equal are replaced, see `batches.Batches.sample`."""

  def sample(self, agent, number=1, rounds=3, questions=8, batch=4):
    tasks = [types.Task(str(i), 'q', ('a',)) for i in range(questions)]
    stream = task_files.TaskStream(tasks, batch, 0)
    batches = batches_lib.Batches(
        agent, lambda params: params, stream, 2, 0, max_num_gen_batches=rounds
    )
    return batches, batches.sample({}, number, 0)

  def test_equal_groups_are_replaced(self):
    """Of 4 groups the 2nd and 4th have equal scores; of their two successors the first too."""
    due = [
        t.id for t in task_files.TaskStream([types.Task(str(i)) for i in range(8)], 4, 0).take(0)
    ]
    plain = {(0, due[1]), (0, due[3])}

    def score(call, task, sample):
      first_of_second = call == 1 and task == agent.calls[1][0][0]
      return 1.0 if (call, task) in plain or first_of_second else float(sample)

    agent = ScriptedAgent(score)
    _, sampled = self.sample(agent)
    tasks, groups, keys = zip(*agent.calls)
    self.assertEqual(tasks[0], [name for name in due for _ in range(2)])
    self.assertEqual(groups, ([0, 0, 1, 1, 2, 2, 3, 3], [1, 1, 3, 3], [1, 1]))
    self.assertEmpty(set(tasks[1]) & set(due))  # other questions, as long as there are some
    self.assertEmpty(set(tasks[2]) & set(due + tasks[1]))
    self.assertLen({tuple(key.tolist()) for call in keys for key in call}, 8 + 4 + 2)
    self.assertEqual([episode.group for episode in sampled.episodes], groups[0])
    self.assertEqual(
        [episode.task.id for episode in sampled.episodes],
        [due[0]] * 2 + tasks[2] + [due[2]] * 2 + tasks[1][2:],
    )
    measured = sampled.measured
    self.assertEqual(measured['train/num_gen_batches'], 3)
    self.assertEqual(measured['rollout/questions'], 4 + 2 + 1)
    self.assertAlmostEqual(measured['rollout/groups_with_spread'], (2 + 1 + 1) / 7)
    self.assertEqual(measured['rollout/groups_kept'], 1)
    self.assertEqual(measured['perf/rows_busy'], (16 + 8 + 4) / 6)

  @parameterized.parameters((4, 0.5, False), (5, 0.5, True))
  def test_many_environment_errors_end_the_run(self, raised, allowed, ends):
    agent = ScriptedAgent(lambda call, task, sample: float(sample))
    play = agent.play

    def played(*args, **kwargs):
      rows = play(*args, **kwargs)
      for row in rows[:raised]:
        row.failed, row.error = True, f'the environment raised, on {row.task.id}'
      return rows

    agent.play = played
    tasks = [types.Task(str(i), 'q', ('a',)) for i in range(8)]
    pause = self.enterContext(mock.patch.object(batches_lib, 'pause'))
    batches = batches_lib.Batches(
        agent,
        lambda params: params,
        task_files.TaskStream(tasks, 4, 0),
        2,
        0,
        max_failed_share=0.0,
        max_outage_s=3600.0,
        max_failed=allowed,
    )
    if ends:
      line = rf'^[^\n]*raised in {raised / 8:.0%} of 8 [^\n]*max_failed={allowed:g}[^\n]*, on \d$'
      with self.assertRaisesRegex(types.RunError, line):
        batches.sample({}, 1, 0)
    else:
      sampled = batches.sample({}, 1, 0)
      self.assertEqual(batches_lib.environment_failed_share(sampled.episodes), raised / 8)
    self.assertLen(agent.calls, 1)  # played once
    pause.assert_not_called()

  def test_batch_keeps_size_after_last_round(self):
    agent = ScriptedAgent(lambda call, task, sample: 0.5)
    _, sampled = self.sample(agent)
    self.assertLen(agent.calls, 3)
    self.assertEqual([e.task.id for e in sampled.episodes], agent.calls[0][0])
    self.assertEqual(sampled.measured['rollout/groups_kept'], 0)
    self.assertLen(agent.calls[2][0], 8)  # no other question is left: any of them again

  def test_a_failed_episode_makes_no_spread(self):
    agent = ScriptedAgent(lambda call, task, sample: float(sample), failed={(0, 3)})
    self.sample(agent)
    self.assertEqual([groups for _, groups, _ in agent.calls], [[0, 0, 1, 1, 2, 2, 3, 3], [1, 1]])

  def test_one_round_is_all_without_the_setting(self):
    agent = ScriptedAgent(lambda call, task, sample: 0.5)
    _, sampled = self.sample(agent, rounds=1)
    self.assertLen(agent.calls, 1)
    self.assertNotIn('train/num_gen_batches', sampled.measured)

  def test_a_batch_is_a_function_of_its_number(self):
    score = lambda call, task, sample: float(sample * (int(task) % 3 > 0))
    again, alone = ScriptedAgent(score), ScriptedAgent(score)
    batches, _ = self.sample(again, number=1)
    second = batches.sample({}, 2, 0)
    _, expected = self.sample(alone, number=2)
    names = lambda sampled: [episode.task.id for episode in sampled.episodes]
    self.assertEqual(names(second), names(expected))
    self.assertGreater(expected.measured['train/num_gen_batches'], 1)
    with self.subTest('and is restored from a checkpoint with the questions that it has'):
      record = json.loads(json.dumps(batches_lib.to_json(expected)))
      self.assertEqual(names(batches.restored(record)), names(expected))
      record['episodes'][0]['task'] = 'unknown'
      with self.assertRaisesRegex(types.UserError, "on question 'unknown'"):
        batches.restored(record)


class OutageTest(parameterized.TestCase):

  def test_waits_double_and_batch_is_repeated(self):
    retriever = FakeRetriever(up_at=100)
    played, replays = retriever.run()
    self.assertEqual(batches_lib.failed_share(played), 0)
    self.assertEqual(retriever.waits, [1, 2, 4, 8, 16, 32, 60])  # at most a minute
    self.assertEqual((replays, retriever.plays), (1, 2))
    self.assertLen(set(retriever.probes), 7)  # no two alike: a cache must not answer

  def test_the_whole_wait_is_bounded(self):
    retriever = FakeRetriever(up_at=1e9)
    with self.assertRaisesRegex(types.RunError, r'^retrieval failed in 100% [^\n]*for 20 s[^\n]*$'):
      retriever.run(max_outage_s=20)
    self.assertEqual(retriever.now, 20)
    self.assertEqual(retriever.plays, 1)

  def test_failure_without_retriever_blames_the_environment(self):
    play = lambda: episodes(8, 8)
    with self.assertRaisesRegex(types.RunError, '^the environment failed in 100% [^\n]*$'):
      batches_lib.play_through(play, None, 0.5, 0.0)

  def test_retriever_answering_only_probes_ends_run(self):
    retriever = FakeRetriever(up_at=1e9)
    retriever.search = lambda queries, top_k: [[]]
    with self.assertRaises(types.RunError):
      retriever.run(max_outage_s=20)
    self.assertEqual(retriever.plays, 6)  # after 0, 1, 3, 7, 15 and 20 s

  @parameterized.parameters((4, 0.5, 1), (5, 0.5, 2), (8, 1.0, 1))
  def test_the_allowed_share_of_failures(self, failed, share, plays):
    played = []

    def play():
      played.append(1)
      return episodes(failed if len(played) == 1 else 0, 8)

    with mock.patch.object(batches_lib, 'pause'):
      batches_lib.play_through(play, FakeRetriever(up_at=0), share, 60.0)
    self.assertLen(played, plays)

  def test_overlong_prompts_are_not_failures(self):
    self.assertEqual(batches_lib.failed_share(episodes(0, 4, too_long=4)), 0)
    self.assertEqual(batches_lib.failed_share(episodes(1, 4, too_long=2)), 0.25)
    self.assertEqual(batches_lib.failed_share([]), 0)


if __name__ == '__main__':
  absltest.main()
