"""Agent programs through the gateway: the same episodes as an environment gives, and what fails."""

import asyncio
import contextlib
import functools
import itertools
import json
import pathlib
import queue
import sys
import tempfile
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest
import requests

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.assembly import agents
from stppo_jax.assembly import components
from stppo_jax.envs import search
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import outcomes
from stppo_jax.monitoring import scores
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import batching
from stppo_jax.rollout import episode as episode_loop
from stppo_jax.rollout import prepare
from stppo_jax.serving import rollouts
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.training import loop
from tests.support import micro_run
from tests.support import tiny_run

THIS = f'gateway:{__name__}'


def create(base_url, messages, **fields):
  asked = {'model': 'any', 'messages': messages, **fields}
  answer = requests.post(base_url + '/chat/completions', json=asked, timeout=60)
  answer.raise_for_status()
  return answer.json()['choices'][0]


def play_search(task, base_url, model, max_turns=4):
  """The search environment, played by a client: text in, text out."""
  del model
  task = types.Task(**{**task, 'answers': tuple(task['answers'])})
  env = search.SearchEnv(task, retriever(), max_searches=max_turns, top_k=1, prompt='short')
  messages = [{'role': 'user', 'content': env.reset()[0]}]
  while True:
    stops = ['</search>', '</answer>']
    message = create(base_url, messages, stop=stops, include_stop_str_in_output=True)['message']
    observation, reward, terminated, truncated, _ = env.step(message['content'])
    if terminated or truncated:
      return reward
    messages += [message, {'role': 'user', 'content': observation}]


@functools.cache
def retriever():
  return components.resolve(make_config('search')).retriever


def once(task, base_url, model):
  """One turn; the reward is left to the config's function."""
  del model
  create(base_url, [{'role': 'user', 'content': f'Question: {task["question"]}\n'}], stop=['</'])


def post_rewards(task, base_url, model):
  """Two turns that do not belong together, then a branch of the first; rewards are posted."""
  del task, model
  ask = {'role': 'user', 'content': 'Question: one?\n'}
  first = create(base_url, [ask], max_tokens=5)['message']
  create(base_url, [{'role': 'user', 'content': 'Question: another?\n'}], max_tokens=5)
  more = [ask, first, {'role': 'user', 'content': ' go on'}]
  create(base_url, more, max_tokens=5)
  turn = create(base_url, more, max_tokens=5)['turn']
  url = base_url.removesuffix('/v1') + '/reward'
  for fields in ({'reward': 0.5, 'turn': 2}, {'reward': 2, 'metrics': {'turns': turn}}):
    requests.post(url, json=fields, timeout=60).raise_for_status()


def start_agent(task, base_url, model, reward):
  """A sub-agent, whose reward is posted if there is one."""
  del task, model
  ask = [{'role': 'user', 'content': 'Question: one?\n'}]
  body = {'model': 'any', 'messages': ask, 'max_tokens': 5}
  for headers in (
      {'X-Session-Id': 'main'},
      {'X-Session-Id': 'child', 'x-parent-session-id': 'main'},
      {'X-Session-Id': 'orphan', 'x-parent-session-id': 'nobody'},
  ):
    url = base_url + '/chat/completions'
    requests.post(url, json=body, headers=headers, timeout=60).raise_for_status()
  if reward is not None:
    url = base_url.removesuffix('/v1') + '/reward'
    fields = {'reward': reward, 'session': 'child'}
    requests.post(url, json=fields, timeout=60).raise_for_status()
  return 1.0


def fail_on_even(task, base_url, model):
  if int(task['id'][-1]) % 2 == 0:
    raise RuntimeError('an even task')
  once(task, base_url, model)
  return 1.0


def ask_if_odd(task, base_url, model):
  if int(task['id'][-1]) % 2:
    once(task, base_url, model)
  return 1.0


def sleep(task, base_url, model):
  del task, base_url, model
  time.sleep(5.0)


def hang(task, base_url, model):
  """Takes too long after a turn; what it samples then is refused."""
  with contextlib.suppress(requests.RequestException):  # a slow machine may not answer in time
    once(task, base_url, model)
  time.sleep(3.6)
  body = {'model': 'any', 'messages': [{'role': 'user', 'content': 'Question: late?\n'}]}
  try:
    late.put(requests.post(base_url + '/chat/completions', json=body, timeout=60).status_code)
  except requests.ConnectionError:
    late.put(None)  # the batch has ended, and its server with it


def crash(task, base_url, model):
  raise KeyError('always')


def post_then_crash(task, base_url, model):
  once(task, base_url, model)
  url = base_url.removesuffix('/v1') + '/reward'
  requests.post(url, json={'reward': 1}, timeout=60).raise_for_status()
  if int(task['id'][-1]) % 2 == 0:
    raise KeyError('after its reward')


def leave(task, base_url, model, how):
  """Ends after a turn with an error that is no Exception."""
  once(task, base_url, model)
  raise {'exit': SystemExit, 'interrupt': KeyboardInterrupt, 'cancel': asyncio.CancelledError}[how]


def play_twice(task, base_url, model):
  """Two turns of one conversation; the reward depends on what was sampled."""
  del model
  messages = [{'role': 'user', 'content': f'Question: {task["question"]}\n'}]
  first = create(base_url, messages, max_tokens=12)['message']
  again = [*messages, first, {'role': 'user', 'content': 'again\n'}]
  return len(create(base_url, again, max_tokens=12)['message']['content']) % 3 / 2


def measure(task, base_url, model, metrics):
  """One turn that ends by itself; posts metrics under names that the gateway uses, too."""
  once(task, base_url, model)
  url = base_url.removesuffix('/v1') + '/reward'
  requests.post(url, json={'reward': 1, 'metrics': metrics}, timeout=60).raise_for_status()


def wait_on_even(task, base_url, model):
  """An even task waits for the test, and an odd one ends after a turn."""
  once(task, base_url, model)
  if int(task['id'][-1]) % 2 == 0:
    has_failed.wait(30)
    ended_late.append(not has_failed.is_set())


has_failed = threading.Event()
ended_late: list[bool] = []


async def play_later(task, base_url, model):
  await asyncio.sleep(0)
  once(task, base_url, model)
  return 0.25


def catch_errors(task, base_url, model):
  """Plays on after an error of the server, as if the episode had ended."""
  try:
    for _ in range(4):
      once(task, base_url, model)
  except requests.RequestException:
    return 0.0
  return 1.0


late: queue.SimpleQueue[int | None] = queue.SimpleQueue()


def make_config(kind, **options):
  config = schema.Config()
  config.env = schema.EnvSettings(kind=kind, prompt='short', options=options)
  config.retriever = schema.RetrieverSettings(top_k=1, kind='bm25' if kind == 'search' else 'none')
  config.model = schema.ModelSettings(
      dtype='float32', remat='none', scan_layers=False, logp_chunk=0
  )
  config.rollout = schema.RolloutSettings(
      max_prompt=128,
      max_turn=40,
      max_observation=512,
      max_total=512,
      rows=8,
      width=8,
      chunks=(16, 64),
      slot_buckets=(512,),
      threads=0,
  )
  config.serve = schema.ServeSettings(rows=8, tool_form='tags')
  config.eval.rows = 8
  config.train = schema.TrainSettings(
      updates=1, episodes=8, mini_batch=4, micro_batch=2, length_buckets=(512,)
  )
  config.algorithm.kl_in = 'none'
  config.log.tensorboard = False
  return config


@functools.cache
def model_and_params():
  return prepare.load_policy(make_config('search'))


def make_agent(config, model):
  return agents.make_agent(config, components.resolve(config), model)


@functools.cache
def shared_sampler():
  """One compiled sampler for all tests."""
  return make_agent(make_config(THIS + ':once'), model_and_params()[0]).sampler


def play(config, tasks, **kwargs):
  model, params = model_and_params()
  agent = make_agent(config, model)
  if isinstance(agent, rollouts.ProgramAgent):
    agent.sampler = agent.greedy = shared_sampler()
  keys = episode_loop.row_keys(jax.random.key(3), tasks)
  return agent.play(params, tasks, keys, **kwargs), agent


def make_tasks(count):
  return [types.Task(f't{i}', f'What is the capital of {i}?', ('x',)) for i in range(count)]


class ProgramAgentTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_episodes_equal_environment_bit_for_bit(self, greedy):
    tasks = components.resolve(make_config('search')).load_tasks('dev')[::40][:8]
    wanted, _ = play(make_config('search'), tasks, greedy=greedy)
    found, agent = play(make_config(THIS + ':play_search'), tasks, greedy=greedy)
    self.assertGreater(max(len(episode.turns) for episode in wanted), 1)
    for ours, theirs in zip(wanted, found, strict=True):
      self.assertEqual(ours.prompt.tolist(), theirs.prompt.tolist())
      for turn, recorded in zip(ours.turns, theirs.turns, strict=True):
        self.assertEqual(turn.tokens.tolist(), recorded.tokens.tolist())
        np.testing.assert_array_equal(turn.logp, recorded.logp)
        self.assertEqual(turn.observation.tolist(), recorded.observation.tolist())
      self.assertEqual(ours.score, theirs.score)
      self.assertEqual(theirs.counts['segments'], 1)
    self.assertGreater(sum(episode.score for episode in found), 0)
    self.assertGreater(agent.report.shared_tokens, 0)  # prefixes were not computed again

  def test_segments_are_rows_with_shared_reward(self):
    tasks = make_tasks(8)
    episodes, _ = play(make_config(THIS + ':post_rewards'), tasks, groups=[0] * 4 + [1] * 4)
    self.assertLen(episodes, 24)  # each has three segments
    by_task = [e for e in episodes if e.task.id == 't0']
    longest, *others = sorted(by_task, key=lambda episode: -len(episode.turns))
    self.assertEqual([turn.reward for turn in longest.turns], [0, 2])
    self.assertCountEqual([[t.reward for t in e.turns] for e in others], [[2.5], [2]])
    self.assertEqual(longest.metrics['turns'], 4)
    counts = {'segments': 3, 'conversations': 2, 'branched': 1, 'crashed': 0}
    self.assertEqual(longest.counts, longest.counts | counts)
    branch = next(e for e in others if e.turns[0].reward == 2)
    start = np.concatenate([longest.prompt, longest.turns[0].tokens, longest.turns[0].observation])
    self.assertEqual(branch.prompt.tolist(), start.tolist())  # recorded ids, not encoded again
    self.assertNotEqual(branch.turns[0].tokens.tolist(), longest.turns[1].tokens.tolist())
    self.assertLen({tuple(e.group for e in episodes if e.task.id == 't7')}, 1)
    batch = batching.to_turn_batch(episodes, (512,))
    self.assertAlmostEqual(float(batch.rewards.sum()), 8 * (2 + 2.5 + 2))
    self.assertEqual({episode.whole_score for episode in episodes}, {2 + 0.5})  # as evaluated below
    self.assertEqual(episodes_lib.summarize(episodes)['critic/score/mean'], 2 + 0.5)
    ids = [int(episode.task.id[1]) for episode in episodes]  # one episode per task
    np.testing.assert_array_equal(batch.episode_ids, ids)
    tokenizer = mock.Mock(pieces=lambda tokens: [''] * len(tokens))
    records = episodes_lib.to_records(episodes, tokenizer, 1, 'train')
    again = list(map(types.Episode.from_dict, records))
    self.assertEqual([episode.number for episode in again], ids)
    whole = play(make_config(THIS + ':post_rewards'), tasks)[0]  # evaluation
    self.assertEqual([episode.score for episode in whole], [2 + 0.5] * 8)  # each reward once

  @parameterized.parameters(
      ('episode', None, [1, 1, 1], ()),
      ('program', None, [1, 1, 1], ('no program of the batch has posted',)),
      ('program', -0.5, [1, -0.5, 1], ()),
  )
  def test_agents_have_parents_and_rewards(self, credit, reward, rewards, warnings):
    config = make_config(THIS + ':start_agent', reward=reward)
    config.env.branch_credit = credit
    with self.assertLogs(level='WARNING') as logs:
      episodes, _ = play(config, make_tasks(2), groups=[0, 0])
    for number in range(2):
      rows = [row for row in episodes if row.number == number]
      rows.sort(key=lambda row: row.segment)
      self.assertEqual([row.agent_id for row in rows], ['main', 'child', 'orphan'])
      self.assertEqual([row.parent for row in rows], [None, (0, 1), None])
      self.assertEqual([row.score for row in rows], rewards)
      self.assertEqual([row.whole_score for row in rows], [1, 1, 1])
    warnings = (*warnings, "2 rows are recorded without the parent .*'nobody'")
    for words in warnings:
      self.assertRegex('\n'.join(logs.output), words)
    self.assertLen(logs.output, len(warnings))
    self.assertEqual(episodes_lib.summarize(episodes)['program/wrong_parents/mean'], 1)
    self.assertEqual([row.score for row in play(config, make_tasks(2))[0]], [1, 1])  # evaluation

  def test_crash_is_masked_or_scored_zero(self):
    tasks = make_tasks(4)
    for on_crash in ('mask', 'zero'):
      config = make_config(THIS + ':fail_on_even')
      config.serve.on_crash = on_crash
      with self.assertLogs(level='WARNING') as logs:
        episodes, _ = play(config, tasks)
      self.assertRegex(logs.output[0], 'of 4 programs 2 raised.*error: RuntimeError: an even task')
      self.assertEqual([e.counts['crashed'] for e in episodes], [1, 0, 1, 0])
      self.assertEqual([e.failed for e in episodes], [True, False, True, False])  # no turn at all
      self.assertEqual(batches_lib.failed_share(episodes), 0)  # no retriever is to blame
      self.assertEqual([e.score for e in episodes], [0, 1, 0, 1])
    batch = batching.to_turn_batch(episodes, (512,))
    self.assertEqual(batch.action_mask.any(axis=1).tolist(), [False, True, False, True])

  def test_failure_of_the_sampler_ends_the_run(self):
    """Turns from before it would train with the reward of a program that got an error."""
    config = make_config(THIS + ':catch_errors')
    decode = scheduler_lib.Scheduler._decode
    calls = itertools.count()

    def fail_later(scheduler):
      if next(calls) == 2:
        raise RuntimeError('the device has no memory')
      return decode(scheduler)

    with mock.patch.object(scheduler_lib.Scheduler, '_decode', fail_later):
      with self.assertRaisesRegex(types.RunError, 'the engine has failed'):
        play(config, make_tasks(8))

  def test_metrics_of_a_program_have_their_own_names(self):
    posted = {'crashed': 1.0, 'segments': 40.0, 'timed_out': 0.5, 'invalid': 9.0, 'branched': 7.0}
    episodes, _ = play(make_config(THIS + ':measure', metrics=posted), make_tasks(4))
    self.assertEqual(outcomes.count(episodes)['answered'], 4)
    summary = episodes_lib.summarize(episodes)
    for name, value in posted.items():
      self.assertEqual(summary[f'env/{name}/mean'], value)
    counted = [summary[f'program/{name}/mean'] for name in ('crashed', 'segments', 'branched')]
    self.assertEqual(counted, [0, 1, 0])
    self.assertEqual(scores.scores(episodes)['val-program/segments'], 1)

  def test_last_turn_at_its_limit_truncates(self):
    config = make_config(THIS + ':fail_on_even')
    config.rollout.max_turn = 2
    episodes, _ = play(config, make_tasks(4))
    self.assertEqual([episode.truncated for episode in episodes], [False, True] * 2)
    self.assertEqual(outcomes.count(episodes)['truncated'], 2)

  def test_reward_before_crash_is_dropped(self):
    config = make_config(THIS + ':post_then_crash')
    config.serve.on_crash = 'zero'
    episodes, _ = play(config, make_tasks(2))
    self.assertEqual(
        [(len(e.turns), e.failed, e.score) for e in episodes], [(1, False, 0), (1, False, 1)]
    )

  def test_programs_that_do_not_ask_the_policy(self):
    with self.assertLogs(level='WARNING') as logs:
      episodes, _ = play(make_config(THIS + ':ask_if_odd'), make_tasks(4))
    self.assertIn('and 2 had no answer of the policy', logs.output[0])
    self.assertEqual([e.failed for e in episodes], [True, False, True, False])
    self.assertEqual(batches_lib.failed_share(episodes), 0)
    self.assertLen(play(make_config(THIS + ':ask_if_odd'), make_tasks(1))[0], 1)  # evaluation

  def test_batch_without_answers_ends_run(self):
    config = make_config(THIS + ':sleep')
    config.serve.agent_timeout_s = 0.1
    said = 'of 2 programs 0 raised, 2 took longer .* and 2 had no answer of the policy'
    with self.assertRaisesRegex(types.RunError, said):
      play(config, make_tasks(2), groups=[0, 0])

  def test_slow_program_is_truncated(self):
    config = make_config(THIS + ':hang')
    config.serve.agent_timeout_s = 3.0
    episodes, _ = play(config, make_tasks(3))
    for episode in episodes:
      self.assertEqual(episode.counts['timed_out'], 1)
      self.assertTrue(episode.truncated)
    statuses = {late.get(timeout=60) for _ in range(3)}
    self.assertContainsSubset(statuses, {None, 404})

  def test_punctual_programs_are_not_late(self):
    config = make_config(THIS + ':crash')
    config.serve.agent_timeout_s = 1.5
    with self.assertRaisesRegex(types.RunError, 'of 3 programs 3 raised'):
      slow_loop = StopSignal(lambda: time.sleep(1.8))
      play(config, make_tasks(3), stop_signal=slow_loop)

  def test_run_ends_if_all_programs_raise(self):
    with self.assertRaisesRegex(types.RunError, "of 3 programs 3 raised.*KeyError: 'always'"):
      play(make_config(THIS + ':crash'), make_tasks(3))

  @parameterized.parameters('exit', 'interrupt', 'cancel')
  def test_program_that_exits_has_crashed(self, how):
    error = 'of 2 programs 2 raised.*(SystemExit|KeyboardInterrupt|CancelledError)'
    with self.assertRaisesRegex(types.RunError, error):
      play(make_config(THIS + ':leave', how=how), make_tasks(2), groups=[0, 0])

  def test_coroutine_is_awaited(self):
    episodes, _ = play(make_config(THIS + ':play_later'), make_tasks(2))
    self.assertEqual([(len(e.turns), e.score) for e in episodes], [(1, 0.25)] * 2)

  def test_program_writes_its_own_prompts(self):
    config = make_config(THIS + ':once')
    config.rollout.max_prompt = 2
    components.resolve(config).check_prompts(make_tasks(2))  # no error

  def test_config_scores_program_without_reward(self):
    config = make_config(THIS + ':once')
    with mock.patch.object(rollouts.rewards, 'extract_answer', lambda text: 'x'):
      episodes, _ = play(config, make_tasks(2))
    self.assertEqual([episode.score for episode in episodes], [1, 1])

  def test_reward_that_ends_run_waits_for_nobody(self):
    has_failed.clear()
    score = mock.Mock(side_effect=types.UserError('there is no judge'))
    with (
        mock.patch.object(rollouts.rewards, 'extract_answer', lambda text: 'x'),
        mock.patch.object(rollouts.rewards, 'score_answer', score),
        self.assertRaisesRegex(types.UserError, 'there is no judge'),
    ):
      play(make_config(THIS + ':wait_on_even'), make_tasks(2))
    has_failed.set()
    self.assertNotIn(True, ended_late)

  def test_routing_replay_is_rejected(self):
    config = make_config(THIS + ':once')
    config.rollout.routing_replay = 'sampling'
    with self.assertRaisesRegex(types.UserError, 'does not support rollout.routing_replay: '):
      make_agent(config, model_and_params()[0])

  def test_signal_ends_the_programs(self):
    with self.assertRaises(types.Stopped):
      play(make_config(THIS + ':hang'), make_tasks(2), stop_signal=StopSignal(lambda: True))

  @parameterized.parameters('gateway:no_such:f', THIS + ':nothing', THIS + ':THIS', 'gateway:x')
  def test_unknown_program_is_one_line(self, kind):
    with self.assertRaisesRegex(types.UserError, f'config.env.kind={kind!r}: '):
      components.resolve(make_config(kind))


COMMAND = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
asked = {'messages': [{'role': 'user', 'content': task['question']}], 'stop': ['</'], 'model': 'x'}
urllib.request.urlopen(urllib.request.Request(
    os.environ['OPENAI_BASE_URL'] + '/chat/completions',
    json.dumps(asked).encode(), {'Content-Type': 'application/json'})).read()
print('reading', task['id'], file=sys.stderr)
number = int(task['id'][-1])
if number % 2:
  sys.exit('an odd task')
print(json.dumps({'reward': 0.5, 'metrics': {'files': 3}}) if number else 'no number')
"""


class CommandTest(absltest.TestCase):

  def test_command_plays_episodes(self):
    script = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'agent.py')
    script.write_text(COMMAND, encoding='utf-8')
    kind = f'gateway:command:{sys.executable} -S {script}'
    with (
        self.assertLogs(level='WARNING') as logs,
        mock.patch.object(rollouts.rewards, 'extract_answer', lambda text: 'x'),
    ):
      episodes, _ = play(make_config(kind), make_tasks(4))
    self.assertIn('of 4 programs 2 raised', logs.output[0])
    self.assertIn(
        'exit status 1, standard error ends with: reading t1 | an odd task', logs.output[0]
    )
    self.assertEqual([e.failed for e in episodes], [False, True, False, True])
    # The reward of the run scores the first.
    self.assertEqual([e.score for e in episodes[::2]], [1, 0.5])
    self.assertEqual([e.metrics.get('files') for e in episodes], [None, None, 3, None])
    self.assertEqual(episodes[1].log, 'reading t1\nan odd task\n')
    tokenizer = mock.Mock(pieces=lambda tokens: [''] * len(tokens))
    record = episodes_lib.to_records(episodes, tokenizer, 1, 'train')[0]
    self.assertEqual(record['log'], 'reading t0\n')
    self.assertEqual(types.Episode.from_dict(record).log, 'reading t0\n')

  def test_time_limit_kills_commands(self):
    config = make_config('gateway:command:sleep 60')
    config.serve.agent_timeout_s = 0.5
    episodes, _ = play(config, make_tasks(2))
    self.assertEqual([e.counts['timed_out'] for e in episodes], [1, 1])


class TrainingTest(absltest.TestCase):

  @pytest.mark.slow
  def test_loop_trains_and_evaluates_program(self):
    config = make_config(THIS + ':play_search')
    config.eval = schema.EvalSettings(every=1, episodes=8, rows=8)
    config.rollout.max_total = 256
    config.rollout.max_observation = 128
    config.rollout.slot_buckets = (256,)
    config.train.length_buckets = (256,)
    folder = self.enterContext(tempfile.TemporaryDirectory())
    with tiny_run.on_one_device():
      scores = loop.start(config, folder)
    self.assertIn('val-core/all/score', scores)
    lines = [json.loads(line) for line in open(folder + '/metrics.jsonl', encoding='utf-8')]
    self.assertEqual(lines[-1]['program/segments/mean'], 1)
    records = open(folder + '/episodes/train_000001.jsonl', encoding='utf-8').readlines()
    self.assertLen(records, 8)
    self.assertIn(
        '<search>',
        ''.join(
            json.loads(record)['question'] + ''.join(json.loads(record)['pieces'])
            for record in records
        ),
    )


def train_ahead(kind, workdir, stop_signal=NEVER):
  """Three updates. A thread plays batches 2 and 3 with the policy of one update before."""
  config = make_config(kind)
  config.train.updates = 3
  config.train.episodes = config.train.mini_batch = 4
  config.train.checkpoint_every = 0
  config.rollout.group_size = 2
  config.rollout.max_prompt = 192  # a program has no such limit
  config.eval.episodes = 4
  config.pipeline.staleness = 1
  config.algorithm.rollout_is = 'token'
  with tiny_run.on_one_device():
    loop.start(config, workdir, stop_signal)
  return micro_run.comparable_metrics(workdir)


@functools.cache
def trained_ahead(kind):
  with tempfile.TemporaryDirectory() as workdir:
    return train_ahead(kind, workdir)


@pytest.mark.slow
class StalenessTest(absltest.TestCase):

  def test_program_trains_ahead_as_environment(self):
    expected = trained_ahead('search')[1:]
    rows = trained_ahead(THIS + ':play_search')[1:]
    names = 'critic/score/mean actor/pg_loss stppo/step_norm rollout_corr/logp_diff_mean'.split()
    for theirs, ours in zip(expected, rows, strict=True):
      for name in names:
        self.assertEqual(theirs[name], ours[name], name)
      self.assertEqual(ours['program/segments/mean'], 1)
    self.assertEqual([row['pipeline/staleness'] for row in rows], [0, 1, 1])
    fresh, stale = (row['rollout_corr/logp_diff_mean'] for row in rows[:2])
    self.assertGreater(stale, 10 * fresh)  # the log-probs are those of older weights

  def test_stop_while_a_batch_is_played_is_resumed(self):
    kind = THIS + ':play_search'
    workdir = self.enterContext(tempfile.TemporaryDirectory())
    stop = threading.Event()
    numbers = []
    sample = batches_lib.Batches.sample
    original = create

    def numbered(batches, params, number, staleness):
      numbers.append(number)
      return sample(batches, params, number, staleness)

    def stopping(base_url, messages, **fields):
      if numbers[-1:] == [2]:
        stop.set()
      return original(base_url, messages, **fields)

    with (
        mock.patch.object(batches_lib.Batches, 'sample', numbered),
        mock.patch(__name__ + '.create', stopping),
    ):
      stopped = train_ahead(kind, workdir, StopSignal(stop.is_set))
    self.assertLen(stopped, 2)  # the batch is not among them
    self.assertEqual(train_ahead(kind, workdir), trained_ahead(kind))


if __name__ == '__main__':
  absltest.main()
