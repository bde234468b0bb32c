"""Rewards of users: shapes of other libraries, results, and outages of what they call."""

import asyncio
import errno
import socket
import subprocess
import types as types_lib
from unittest import mock
import urllib.error

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest
import requests

from stppo_jax import types
from stppo_jax.envs import custom_rewards
from stppo_jax.envs import factory
from stppo_jax.envs import guard
from stppo_jax.envs import outages
from stppo_jax.envs import rewards
from stppo_jax.envs import search
from stppo_jax.envs import stepping

TASK = types.Task('t1', 'Which colour has the sky?', ('blue',), dataset='colours')
TWO = types.Task('t2', 'Which colour has it?', ('blue', 'azure'))
TRANSCRIPT = '<answer> blue</answer>'


def score(function, task=TASK, max_outage_s=0.0, **options):
  options.setdefault('have_several', lambda: len(task.answers) > 1)
  reward = custom_rewards.CustomReward('mine:reward', function, max_outage_s, **options)
  return reward(task, 'blue', TRANSCRIPT)


def verl(data_source, solution_str, ground_truth, extra_info=None):
  assert data_source == 'colours' and extra_info['index'] == 't1'
  assert extra_info['options'] == {} and extra_info['letter'] == ''
  return float(solution_str == TRANSCRIPT and ground_truth == 'blue')


def verl_math(solution_str, ground_truth, method='strict'):
  return {'score': float(ground_truth in solution_str), 'acc': True, 'pred': 'blue'}


def verl_any(solution_str, ground_truth, **kwargs):
  assert kwargs['data_source'] == 'unnamed'
  return any(answer in solution_str for answer in ground_truth)


async def verl_async(data_source, solution_str, ground_truth, extra_info=None):
  await asyncio.sleep(0)
  return float(ground_truth in solution_str)


def trl(completions, **kwargs):
  return [float(truth in text) for text, truth in zip(completions, kwargs['ground_truth'])]


def trl_chat(prompts, completions, answer):
  assert prompts[0][0]['content'] == TASK.question
  return [float(answer[0] in messages[0]['content']) for messages in completions]


async def trl_async(completions, solution, **kwargs):
  return [1.0 if solution[0] in completions[0] else 0.0]


class Judge:

  def __call__(self, task, answer, transcript):
    return np.float32(answer in task.answers)


@pytest.mark.guests(
    what='Rewards of verl, TRL and other trainers',
    version='signatures of their reward functions',
    date='2026-11-26',
    touches='envs/custom_rewards.py',
)
class ShapesTest(parameterized.TestCase):

  @parameterized.parameters(
      (verl,),
      (verl_math,),
      (verl_async,),
      (trl,),
      (trl_chat,),
      (trl_async,),
      (Judge(),),
      (lambda task, answer, transcript: answer == 'blue',),
      (lambda t, a, x, strict=True: float(a == 'blue'),),
      (lambda transcript, answer: float(answer == 'blue' and transcript == TRANSCRIPT),),
      (lambda answer: float(answer == 'blue'),),
      (lambda *args: float(args[1] == 'blue'),),
  )
  def test_right_answer_has_reward_one(self, function):
    self.assertEqual(score(function), 1.0)

  def test_several_answers_are_a_list(self):
    self.assertEqual(score(verl_any, TWO), 1.0)

  def test_truths_have_one_type_per_run(self):
    truths = []

    def reward(completions, answer):
      truths.append(answer[0])
      return [0.0]

    for several, expected in ((True, [['blue'], ['blue', 'azure']]), (False, ['blue', 'blue'])):
      with self.subTest(several=several):
        for task, truth in zip((TASK, TWO), expected):
          score(reward, task, have_several=lambda: several)
          self.assertEqual(truths[-1], truth)

  def test_trl_reward_finds_its_form_of_completions(self):
    def finds_keys(completions, **kwargs):
      return [float('blue' in dict(enumerate(completions[0]))[0]['content'])]

    async def reads_messages(completions, **kwargs):
      return [1.0 if 'blue' in completions[0][0]['content'] else 0.0]

    async def reads_texts(completions, **kwargs):
      return [1.0 if 'blue' in completions[0].strip() else 0.0]

    for function in (finds_keys, reads_messages, reads_texts):
      with self.subTest(function.__name__):
        reward = custom_rewards.CustomReward('mine:reward', function, 0.0)
        self.assertEqual(reward(TASK, 'red', 'red'), 0.0)
        self.assertEqual([reward(TASK, 'blue', TRANSCRIPT) for _ in range(2)], [1.0, 1.0])

  def test_scores_do_not_decide_form_of_completions(self):
    def reward_len(completions, **kwargs):
      return [-abs(20 - len(completion)) for completion in completions]

    reward = custom_rewards.CustomReward('mine:reward', reward_len, 0.0)
    lengths = (500, 20, 30)
    self.assertEqual([reward(TASK, 'x', 'x' * n) for n in lengths], [-480.0, 0.0, -10.0])

  def test_trl_reward_keeps_texts_after_a_score(self):
    def fails_sometimes(completions, **kwargs):
      if completions[0] == 'red':
        raise KeyError('choices')
      return [float(len(completions[0]))]

    reward = custom_rewards.CustomReward('mine:reward', fails_sometimes, 0.0)
    self.assertEqual(reward(TASK, 'blue', 'blue'), 4.0)
    with self.assertRaisesRegex(rewards.RewardError, 'KeyError'):
      reward(TASK, 'red', 'red')
    self.assertEqual(reward(TASK, 'blue', 'blue'), 4.0)

  @parameterized.parameters(
      (
          lambda prompt, completion, answer: 1,
          r'prompt=task.question, completion=transcript, answer=',
      ),
      (lambda queries, prompts, labels: 1, r'queries=\[task.question\], prompts='),
      (lambda response, label: 1, r'response=transcript, label=task.answers\[0\]\)'),
      (lambda args, sample: 1, 'args=..., sample=None'),
      (lambda data_source, solution_str, ground_truth, tokenizer: 1, 'tokenizer=...'),
      (lambda completions, test_cases: 1, r'completions=\[transcript\], test_cases=...'),
      (Judge, 'is a class'),
      (lambda question, response, answer: 1, r'answer=task.answers\[0\]\)'),
      (lambda query, response, answer: 1, r'query=task.question, response=transcript'),
      (lambda question, answer, solution: 1, r'answer=task.answers\[0\], solution=transcript'),
      (lambda answer, *rest: 1, 'answer=answer'),
      (lambda response, question, solution: 1, r'response=transcript, question=task.question'),
      (lambda question, query, response: 1, r'query=task.question, response=transcript'),
      (lambda question, solution, state: 1, r'solution=transcript, state=None'),
      (lambda transcript, /, answer, task: 1, 'transcript=transcript'),
      (lambda transcript, task, extra: 1, 'extra=...'),
  )
  def test_other_shapes_are_refused_with_a_wrapper(self, function, words):
    with self.assertRaisesRegex(types.UserError, f'^[^\n]*mine:reward[^\n]*{words}'):
      score(function)

  @parameterized.parameters(
      (1, 1.0, {}),
      (True, 1.0, {}),
      (np.float32(0.5), 0.5, {}),
      (np.array(0.5), 0.5, {}),
      (np.array([0.5]), 0.5, {}),
      ({'score': 0.5, 'acc': np.bool_(True), 'pred': 'x', 'n': np.nan}, 0.5, {'reward/acc': 1.0}),
      ({'reward': 2, 'length': 3}, 2.0, {'reward/length': 3.0}),
      ((0.5, {'acc': 0}), 0.5, {'reward/acc': 0.0}),
      ((0.5, 'because'), 0.5, {}),
      ([0.5, 3], 0.5, {'reward/second': 3.0}),
  )
  def test_results(self, value, number, metrics):
    result = score(lambda task, answer, transcript: value)
    self.assertEqual((result, result.metrics), (number, metrics))

  @parameterized.parameters((None,), ('good',), ({'acc': 1.0},), ((),), (np.nan,), ([1.0],))
  def test_no_number_is_one_line(self, value):
    line = r"^the reward 'mine:reward' gave [^\n]*'blue' to the task 't1': a finite number[^\n]*$"
    with self.assertRaisesRegex(types.UserError, line):
      score(lambda task, answer, transcript: value)

  def test_outage_does_not_decide_form_of_completions(self):
    num_calls = 0

    def reads_messages(completions, **kwargs):
      nonlocal num_calls
      num_calls += 1
      (message,) = completions[0]
      if message['content'] and num_calls == 2:
        raise ConnectionRefusedError('the judge is busy')
      return [1.0]

    reward = custom_rewards.CustomReward('a:b', reads_messages, max_outage_s=60)
    with mock.patch.object(guard, 'pause'):
      self.assertEqual(reward(TASK, 'a', 'a'), 1.0)

  @parameterized.parameters(([0.0, 1.0],), ([],), (1.0,), ({'score': 1.0},), (None,), ('1',))
  def test_trl_reward_gives_a_list_of_one(self, value):
    line = r"^the reward 'mine:reward' gave [^\n]* for one completion: a list of one number[^\n]*$"
    with self.assertRaisesRegex(types.UserError, line):
      score(lambda completions, **columns: value)

  def test_metrics_reach_the_episode(self):
    reward = custom_rewards.CustomReward('mine:f', verl_math, 0.0)
    env = search.SearchEnv(TASK, None, reward=reward)
    env.reset()
    _, value, _, _, info = env.step(TRANSCRIPT)
    self.assertEqual((value, info['metrics']['reward/acc']), (1.0, 1.0))

  def test_blocked_loop_is_replaced(self):
    self.enterContext(absltest.mock.patch.object(custom_rewards, '_LOOP_S', 0.1))
    blocked = absltest.mock.Mock(side_effect=lambda *unused: over.wait())
    over = custom_rewards.threading.Event()
    self.addCleanup(over.set)

    async def blocks(task, answer, transcript):
      blocked()

    with self.assertRaises(guard.TimedOut):
      guard.Guard(0.3).call('x', score, blocks)
    self.assertEqual(score(verl_async), 1.0)


def make(name, base=Exception, **attributes):
  """Returns an error of a library that is not installed."""
  error = type(name, (base,), attributes)('x')
  return error


def response(status):
  answer = requests.Response()
  answer.status_code = status
  return answer


def raised_from(cause, error):
  error.__cause__ = cause
  return error


OUTAGES = (
    ConnectionRefusedError(),
    TimeoutError(),
    OSError(errno.EHOSTUNREACH, 'x'),
    socket.gaierror(),
    requests.ConnectionError(),
    requests.ReadTimeout(),
    requests.HTTPError(response=response(503)),
    requests.HTTPError(response=response(429)),
    urllib.error.URLError(ConnectionRefusedError()),
    urllib.error.HTTPError('u', 502, 'x', {}, None),
    make('ConnectError', make('TransportError').__class__),  # httpx
    make('RemoteProtocolError', make('TransportError').__class__),
    make('APITimeoutError'),  # openai
    make('APIConnectionError'),
    make('RateLimitError'),
    make('ClientConnectorDNSError'),
    make('NetworkTimeout', make('AutoReconnect').__class__),  # pymongo
    make('InternalServerError', status_code=500),
    make('OverloadedError', status_code=529),  # anthropic
    make('ClientResponseError', status=503),  # aiohttp
    make('ServerDisconnectedError', make('ClientConnectionError').__class__),
    make('RpcError', code=lambda self: types_lib.SimpleNamespace(name='UNAVAILABLE'), details=str),
    raised_from(requests.ConnectionError(), RuntimeError('no judge')),
    ExceptionGroup('both', [ValueError(), TimeoutError()]),
)
ERRORS = (
    ValueError('503'),
    KeyError('score'),
    FileNotFoundError(),
    requests.HTTPError(response=response(401)),
    urllib.error.HTTPError('u', 404, 'x', {}, None),
    make('BadRequestError', status_code=400),
    make('UnsupportedProtocol', make('TransportError').__class__),
    subprocess.TimeoutExpired('grader', 3),
    make(
        'NetworkXNoPath', make('NetworkXUnfeasible', make('NetworkXException').__class__).__class__
    ),
    make('DisconnectedGraphError', ValueError),
    make('ConnectFourError', ValueError),
    make('UnreachableNodeError', ValueError),
    raised_from(ValueError(), RuntimeError()),
    raised_from(TimeoutError(), make('AuthenticationError', status_code=401)),
)


class OutageTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.waits = []
    self.now = 0.0
    self.enterContext(absltest.mock.patch.object(guard, 'pause', self.pause))

  def pause(self, seconds):
    self.waits.append(seconds)
    self.now += seconds

  def test_kinds_of_errors(self):
    for error in OUTAGES:
      self.assertTrue(outages.is_outage(error), repr(error))
    for error in ERRORS:
      self.assertFalse(outages.is_outage(error), repr(error))

  def test_outage_is_waited_for_with_one_warning(self):
    results = iter([*OUTAGES[:5], 1.0])

    def reward(task, answer, transcript):
      result = next(results)
      if isinstance(result, Exception):
        raise result
      return result

    with self.assertLogs('absl', 'INFO') as logs:
      self.assertEqual(score(reward, max_outage_s=3600.0), 1.0)
    self.assertEqual(self.waits, [1, 2, 4, 8, 16])
    self.assertLen(logs.output, 2)
    self.assertIn("the reward 'mine:reward' cannot be had (ConnectionRefusedError", logs.output[0])
    self.assertIn('answers again', logs.output[1])

  def test_long_outage_ends_the_run_with_one_line(self):
    line = r"^the reward 'mine:reward' could not be had within [^\n]*max_outage_s=90 [^\n]*resumes$"
    down = absltest.mock.Mock(side_effect=requests.ConnectionError('refused'))
    with self.assertRaisesRegex(types.RunError, line):
      score(lambda task, answer, transcript: down(), max_outage_s=90.0, clock=lambda: self.now)
    self.assertEqual(self.waits, [1, 2, 4, 8, 16, 32, 27])

  def test_failing_judge_fails_one_episode(self):

    def reward(task, answer, transcript):
      if task is TWO:
        raise requests.HTTPError('too long', response=response(500))
      return 1.0

    custom = custom_rewards.CustomReward('mine:reward', reward, 3600.0)
    self.assertEqual(custom(TASK, 'blue', ''), 1.0)
    with self.assertRaisesRegex(rewards.RewardError, "^the reward 'mine:reward' raised HTTPError"):
      custom(TWO, 'blue', '')
    self.assertEqual(self.waits, [1, 2])

  def test_error_names_the_reward_and_its_line(self):

    def reward(task, answer, transcript):
      raise KeyError('score')

    custom = custom_rewards.CustomReward('mine:reward', reward, 0.0)
    kind = factory.make_factory(
        'search', search.SearchEnv, {'retriever': None, 'reward': custom}, {}
    )
    env = kind(TASK, 0, guard.Guard(60.0))
    stepping.reset(env, 0)
    *_, info = stepping.step(env, TRANSCRIPT)
    self.assertStartsWith(
        info['environment_error'], f"the reward 'mine:reward' raised KeyError: 'score' ({__file__}:"
    )


if __name__ == '__main__':
  absltest.main()
