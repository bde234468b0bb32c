"""A model at an address: what is asked, how turns end, errors and waits, and the local scores."""

import contextlib
import http.server
import itertools
import json
import pathlib
import random
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from stppo_jax import types
from stppo_jax.assembly import components
from stppo_jax.evaluation import client as client_lib
from stppo_jax.evaluation import job
from stppo_jax.evaluation import remote
from stppo_jax.rollout import prepare
from stppo_jax.serving import gateway
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.stop_signal import StopSignal
from stppo_jax.text import tokenizer as chat
from stppo_jax.types import RunError
from stppo_jax.types import UserError
from tests.support import processes
from tests.support import tiny_run

pytestmark = pytest.mark.guests(
    what='Servers with the chat completions of OpenAI, in evaluations',
    version='documentation of the interface, with stand-ins',
    date='2026-11-28',
    touches='evaluation/remote.py evaluation/client.py',
)

STOPS = ('</search>', '</answer>')


def completion(text, finish='stop', total_tokens=10, **more):
  choice = {'index': 0, 'message': {'role': 'assistant', 'content': text}, 'finish_reason': finish}
  usage = {'prompt_tokens': 8, 'completion_tokens': 2, 'total_tokens': total_tokens}
  return 200, {'choices': [choice | more], 'usage': usage}, {}


def failure(status, message='no', **headers):
  return status, {'error': {'message': message}}, headers


@contextlib.contextmanager
def serving(answer):
  """A server: yields (its address, bodies of requests); answer(body) -> (status, JSON, headers)."""
  asked, lock = [], threading.Lock()

  class Handler(http.server.BaseHTTPRequestHandler):

    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
      with lock:
        asked.append(body | {'path': self.path, 'key': self.headers['Authorization']})
      status, fields, headers = answer(body)
      data = json.dumps(fields).encode()
      self.send_response(status)
      for name, value in headers.items():
        self.send_header(name.replace('_', '-'), value)
      self.send_header('Content-Length', str(len(data)))
      self.end_headers()
      self.wfile.write(data)

    def log_message(self, *unused):
      pass

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
  try:
    yield f'http://127.0.0.1:{server.server_port}/v1', asked
  finally:
    server.shutdown()
    server.server_close()


class TurnTest(parameterized.TestCase):

  @parameterized.parameters(
      # A server that stops at a string leaves it out.
      ('<think>x</think><search> a', 'stop', '<think>x</think><search> a</search>'),
      ('<think>x</think><answer> b', 'stop', '<think>x</think><answer> b</answer>'),
      ('<search> a <answer> b', 'stop', '<search> a <answer> b</answer>'),
      # A server that does not stop, or that keeps the string, continues after it.
      ('<search>a</search><information>', 'stop', '<search>a</search>'),
      ('<search>a</search>', 'length', '<search>a</search>'),
      # The end of the text, and the limit.
      ('I do not know.', 'stop', 'I do not know.'),
      ('<search> a', 'length', '<search> a'),
      ('', None, ''),
  )
  def test_turn_ends_with_its_stop_string(self, text, finish, expected):
    self.assertEqual(client_lib.whole_turn(text, finish, STOPS), expected)

  def test_stop_reason_of_the_server_wins(self):
    turn = lambda text, reason: client_lib.whole_turn(text, 'stop', STOPS, reason)
    self.assertEqual(turn('an <answer> tag', None), 'an <answer> tag')
    self.assertEqual(turn('<answer> a', '</answer>'), '<answer> a</answer>')
    self.assertEqual(turn('<answer> a', 151643), '<answer> a')


class ClientTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(mock.patch.object(client_lib, 'RETRIES', 2))

  def client(self, address, api_key='', stop_signal=None, **fields):
    stop_signal = stop_signal or mock.Mock(**{'is_set.return_value': False})  # its waits are short
    fixed = dict(model='m', temperature=0.0, max_tokens=7)
    return client_lib.ChatClient(address, api_key, fixed | fields, STOPS, stop_signal)

  def test_what_is_asked(self):
    messages = [{'role': 'user', 'content': 'Q'}]
    template = {'chat_template_kwargs': {'enable_thinking': False}}
    with serving(lambda body: completion('<answer> a', total_tokens=12)) as (address, asked):
      turn = self.client(address + '/').complete(messages)
      self.client(address, temperature=0.5, top_p=0.9, api_key='k').complete(messages, seed=3)
      self.client(address, **template).complete(messages)
    self.assertEqual(turn, client_lib.ChatCompletion('<answer> a</answer>', 2, 12))
    greedy = {'model': 'm', 'messages': messages, 'max_tokens': 7, 'temperature': 0.0}
    greedy |= {'stop': list(STOPS), 'path': '/v1/chat/completions'}
    self.assertEqual(asked[0], greedy | {'key': None})
    sampled = {'temperature': 0.5, 'top_p': 0.9, 'seed': 3, 'key': 'Bearer k'}
    self.assertEqual(asked[1], greedy | sampled)
    self.assertEqual(asked[2], greedy | template | {'key': None})

  @parameterized.parameters(429, 500, 503)
  def test_overload_is_asked_again_after_a_wait(self, status):
    answers = iter([failure(status, Retry_After='7'), failure(status), completion('x')])
    stop_signal = mock.Mock(**{'is_set.return_value': False})
    with serving(lambda body: next(answers)) as (address, asked):
      self.assertEqual(self.client(address, stop_signal=stop_signal).complete([]).text, 'x')
    self.assertLen(asked, 3)
    (first,), (second,) = (call.args for call in stop_signal.wait.call_args_list)
    self.assertEqual(first, 7.0)  # as the server says
    self.assertBetween(second, 1.0, 3.0)  # 2 s, with jitter

  def test_after_the_last_attempt_there_is_no_answer(self):
    with serving(lambda body: failure(503)) as (address, asked):
      with self.assertRaisesRegex(client_lib.UnansweredError, 'status 503'):
        self.client(address).complete([])
    self.assertLen(asked, 3)

  @parameterized.parameters(
      (0, UserError, 'no answer to any request .*restart it', 1),
      (1, client_lib.UnansweredError, 'no answer to any request', 2),
  )
  def test_server_that_hangs_is_given_up(self, answered, error, words, attempts):
    ended = threading.Event()
    self.addCleanup(ended.set)
    limits = client_lib.http_client.ClientLimits(10.0, 0.3)
    answer = lambda body: ended.wait(60 * (len(asked) > answered)) or completion('x')
    with serving(lambda body: answer(body)) as (address, asked):
      client = self.client(address)
      for _ in range(answered):
        client.complete([])
      self.enterContext(mock.patch.object(client_lib, '_LIMITS', limits))
      self.enterContext(mock.patch.object(client._server, '_limits', limits))
      with self.assertRaisesRegex(error, words):
        client.complete([])
      # The server's thread of a request that was given up may run late.
      processes.wait_for(lambda: len(asked) >= answered + attempts)
      ended.set()
    self.assertLen(asked, answered + attempts)

  @parameterized.parameters(
      (401, 'Incorrect API key', 'status 401: .*Incorrect API key'),
      (404, 'no such model', "config.eval.model='m' rejected a request .* 404: no such model$"),
      (400, 'stop is not supported', 'stop is not supported'),
  )
  def test_rejected_request_is_one_line(self, status, message, words):
    with serving(lambda body: failure(status, message)) as (address, asked):
      with self.assertRaisesRegex(UserError, f'^[^\n]*{words}[^\n]*$'):
        self.client(address).complete([])
    self.assertLen(asked, 1)

  @parameterized.parameters(
      {'message': "This model's maximum context length is 4096 tokens"},
      {'message': 'at most 9 fit', 'code': 'context_length_exceeded'},
      {'message': 'Your input exceeds the context window of this model.'},  # OpenAI's
      {'message': 'The decoder prompt (length 9) is longer than the maximum model length of 8.'},
      {'message': "The input (9 tokens) is longer than the model's context length (8 tokens)."},
      {'message': 'Input length (9 tokens) exceeds the maximum allowed length (8 tokens).'},
      {'message': 'request (9 tokens) exceeds the available context size (8 tokens)', 'code': 400},
      {'message': 'it does not fit', 'type': 'exceed_context_size_error'},  # llama.cpp's
      {'message': 'prompt is too long: 9 tokens > 8 maximum'},
  )
  def test_messages_that_are_too_long(self, **error):
    for fields in ({'error': error}, {'object': 'error'} | error):  # the latter is SGLang's
      with serving(lambda body, fields=fields: (400, fields, {})) as (address, _):
        with self.assertRaises(client_lib.TooLongError):
          self.client(address).complete([])

  @parameterized.parameters(
      lambda body: {'error': {'message': 'no stop'}, 'request': body},
      lambda body: {'message': 'no stop', 'body': json.dumps(body)},
      lambda body: {'message': str([{'msg': 'no stop', 'input': body}]), 'code': 400},  # vLLM's
      lambda body: {'detail': [{'msg': 'no stop', 'input': body}]},  # FastAPI's
      lambda body: ['no stop', body],
  )
  def test_repeated_request_is_not_too_long(self, answer):
    asked = 'Why is the maximum context length of this prompt too long for its context window?'
    with serving(lambda body: (400, answer(body), {})) as (address, _):
      with self.assertRaisesRegex(UserError, '^[^\n]*status 400: [^\n]*no stop[^\n]*$'):
        self.client(address).complete([{'role': 'user', 'content': asked}])

  @parameterized.parameters({}, {'choices': []}, {'choices': [{'message': {'content': 3}}]})
  def test_an_answer_that_is_none(self, **fields):
    with serving(lambda body: (200, fields, {})) as (address, asked):
      with self.assertRaisesRegex(client_lib.UnansweredError, 'no completion'):
        self.client(address).complete([])
    self.assertLen(asked, 3)

  def test_redirects_and_long_answers_are_refused(self):
    with serving(lambda body: failure(307, Location='http://127.0.0.1:1/')) as (address, asked):
      with self.assertRaisesRegex(UserError, 'status 307'):
        self.client(address).complete([])
    self.assertLen(asked, 1)
    limits = client_lib.http_client.ClientLimits(10.0, 300.0, max_bytes=4096)
    self.enterContext(mock.patch.object(client_lib, '_LIMITS', limits))
    with serving(lambda body: completion('x' * 8192)) as (address, _):
      with self.assertRaisesRegex(UserError, 'over 4096 bytes'):
        self.client(address).complete([])

  def test_usage_in_part(self):
    answer = {**completion('x')[1], 'usage': {'total_tokens': 12}}
    with serving(lambda body: (200, answer, {})) as (address, _):
      self.assertEqual(self.client(address).complete([]), client_lib.ChatCompletion('x', 0, 12))

  def test_a_server_that_is_not_there(self):
    address = self.enterContext(processes.unused_address()) + '/v1'
    with self.assertRaisesRegex(UserError, 'gave no answer .*start it'):
      self.client(address).complete([])


class Lottery:
  """Draws from the global random state, and ignores the seed that `reset` is given."""

  def __init__(self, task):
    del task

  def reset(self, seed=None):
    del seed
    return f'{random.random()}', {}

  def step(self, action):
    del action
    return '', 1.0, True, False, {}

  @staticmethod
  def load_tasks(split):
    return [types.Task(f'{split}-{i}', 'Guess!', seed=i) for i in range(4)]


class Raising(Lottery):
  """Raises in `reset` of one task, and in `step` of another."""

  def __init__(self, task):
    self._task = task

  def reset(self, seed=None):
    if self._task.id == 'dev-0':
      raise KeyError('no instance')
    return super().reset(seed)

  def step(self, action):
    if self._task.id == 'dev-1':
      raise ValueError('no move')
    return super().step(action)


class RemoteTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.enterClassContext(tiny_run.on_one_device())
    cls.enterClassContext(mock.patch.object(client_lib, 'RETRIES', 0))

  def evaluate(self, address, workdir=None, **values):
    fixed = {'eval__address': address, 'eval__model': 'm', 'eval__rows': 2}
    config = tiny_run.make_config(**(fixed | values))
    return job.evaluate(config, workdir or self.workdir())

  def workdir(self):
    return self.enterContext(tempfile.TemporaryDirectory())

  def lines(self, results):
    path = pathlib.Path(results.folder, 'episodes.jsonl')
    return {(x['task'], x['sample']): x for x in map(json.loads, path.read_text().splitlines())}

  def answer(self, body):
    """Searches for the thing that is asked for, reads its colour, and answers."""
    *_, last = body['messages']
    if len(body['messages']) == 1:
      return completion(f'<search> {last["content"].split()[-1].strip("?")}')
    return completion(f'<answer> {last["content"].split()[4].strip(".")}')

  def test_an_episode_is_a_chat(self):
    with serving(self.answer) as (address, asked):
      results = self.evaluate(address)
    self.assertEqual(results.scores['val-core/all/em'], 1.0)
    self.assertIn(f'm at {address}', results.table)
    self.assertEqual({group.name for group in results.groups} & {'1 turn', '2 turns'}, {'2 turns'})
    line = self.lines(results)['dev-apple', 0]
    observation = '<information> apple: apple is red.\n</information>\n'
    self.assertEqual(line['turns'][0]['observation'], observation)
    (second,) = [
        body['messages']
        for body in asked
        if len(body['messages']) == 3 and 'apple' in body['messages'][0]['content']
    ]
    self.assertEqual(
        second,
        [
            {'role': 'user', 'content': 'Question: Which colour has apple?\n'},
            {'role': 'assistant', 'content': '<search> apple</search>'},
            {'role': 'user', 'content': observation},
        ],
    )

  def test_other_passages_are_another_evaluation(self):
    corpus = pathlib.Path(self.workdir(), 'corpus.jsonl')
    workdir = self.workdir()
    folders = []
    for text in ('apple is red.', 'apple is red.', 'apple is green.'):
      tiny_run.write_lines(str(corpus), [{'id': 'apple', 'title': 'apple', 'text': text}])
      stopped = mock.patch.object(remote.RemotePlayer, 'play', side_effect=types.Stopped)
      with stopped, self.assertLogs('absl') as logs:
        self.evaluate('http://127.0.0.1:1/v1', workdir, data__corpus=str(corpus))
      folders.append(logs.output[-1])
    self.assertEqual(folders[0], folders[1])
    self.assertNotEqual(folders[0], folders[2])

  @parameterized.parameters((2, {'temperature': 0.7, 'top_p': 0.9, 'top_k': 5}), (1, {}))
  def test_requests_have_the_distribution_of_training(self, samples, expected):
    values = {'rollout__temperature': 0.7, 'rollout__top_p': 0.9, 'rollout__top_k': 5}
    with serving(self.answer) as (address, asked):
      self.evaluate(address, eval__samples=samples, **values)
    greedy = {'temperature': 0.0}
    sent = {name: asked[0][name] for name in ('temperature', 'top_p', 'top_k') if name in asked[0]}
    self.assertEqual(sent, greedy | expected)

  def test_samples_have_seeds_of_their_own_and_repeat(self):
    seeds = []
    for _ in range(2):
      with serving(self.answer) as (address, asked):
        self.evaluate(address, eval__samples=3)
      seeds.append(sorted(body['seed'] for body in asked))
    self.assertLen(set(seeds[0]), 5 * 3 * 2)
    self.assertEqual(*seeds)

  def test_seeded_task_plays_the_agents_instance(self):
    """Also where a game draws from the global random state and ignores its seed."""
    values = dict(env__kind=f'{__name__}:Lottery', data__source='embedded', eval__samples=3)
    values |= {'retriever__kind': 'none'}
    with serving(lambda body: completion('<answer> x')) as (address, asked):
      self.evaluate(address, **values)
    played = sorted(body['messages'][0]['content'] for body in asked)
    agent = components.resolve(tiny_run.make_config(**values)).bind(None)
    local = [agent(task, task.seed).reset(task.seed)[0] for task in Lottery.load_tasks('dev')]
    self.assertEqual(played, sorted(local * 3))

  def test_raising_environment_is_counted_and_limited(self):
    values = dict(env__kind=f'{__name__}:Raising', data__source='embedded', retriever__kind='none')
    with serving(lambda body: completion('<answer> x')) as (address, asked):
      results = self.evaluate(address, **values)
      self.assertEqual(results.scores['val-aux/environment_failed'], 0.5)
      self.assertEqual(results.scores['val-core/all/score'], 0.5)
      asked.clear()
      workdir, line = self.workdir(), r"raised in 50% of 4 .*Raising raised .* on task 'dev-[01]'"
      for number in (3, 1):  # the episode that raises in `reset` asks for nothing
        with self.assertRaisesRegex(RunError, line):
          self.evaluate(address, workdir, rollout__max_failed=0.4, **values)
        self.assertLen(asked, number)
        asked.clear()
        line = "raised in 100% of 2 .*Raising raised .* on task 'dev-[01]'"

  def test_tools_are_declared_in_the_prompt(self):
    values = dict(env__kind='tools', env__tools=('calculator',), retriever__kind='none')
    with serving(lambda body: completion('<answer> x')) as (address, asked):
      with mock.patch.object(remote.logging, 'log_first_n') as told:
        self.evaluate(address, **values)
    self.assertIn('"calculator"', asked[0]['messages'][0]['content'])
    self.assertNotIn('tools', asked[0])
    self.assertIn('the prompts differ', told.call_args.args[1])

  def test_same_command_plays_unanswered_episodes(self):
    down = lambda body: 'sea' in body['messages'][0]['content']
    respond = self.answer
    with serving(lambda body: respond(body)) as (address, asked):
      workdir = self.workdir()
      respond = lambda body: failure(503) if down(body) else self.answer(body)
      with self.assertRaisesRegex(RunError, 'no answer to 1 of 5 episodes .*503.*same command'):
        self.evaluate(address, workdir)
      asked.clear()
      respond = self.answer
      results = self.evaluate(address, workdir)
    self.assertLen(asked, 2)
    self.assertLen(self.lines(results), 5)

  def test_stopped_job_leaves_no_thread_to_wait_for(self):
    release = threading.Event()
    self.addCleanup(release.set)
    answer = lambda body: release.wait(60) and completion('x')
    # The threads look at the signal after the test does.
    self.enterContext(mock.patch.object(client_lib.http_client, '_POLL_S', 60.0))
    with serving(answer) as (address, asked):
      config = tiny_run.make_config(eval__address=address, eval__model='m', eval__rows=2)
      self.assertIsNone(job.evaluate(config, self.workdir(), StopSignal(lambda: bool(asked))))
      threads = [thread for thread in threading.enumerate() if 'episodes' in thread.name]
      self.assertNotEmpty(threads)
      self.assertTrue(all(thread.daemon for thread in threads))

  def test_dead_server_ends_the_job_soon(self):
    count = itertools.count()
    answer = lambda body: self.answer(body) if next(count) < 2 else failure(503)
    with serving(answer) as (address, asked):
      with self.assertRaisesRegex(RunError, 'no answer to [0-9]+ of 100 episodes .*503'):
        self.evaluate(address, eval__samples=20)
    self.assertLess(len(asked), 20)

  def test_limits_of_the_server_end_an_episode(self):
    long = lambda body: completion('<search> sea', total_tokens=192)
    with serving(long) as (address, _):
      results = self.evaluate(address)
    self.assertEqual(results.scores['val-aux/truncated'], 1.0)
    self.assertEqual(results.scores['val-aux/agent_turns/mean'], 1.0)
    with serving(lambda body: failure(400, 'maximum context length')) as (address, _):
      results = self.evaluate(address)
    self.assertEqual(results.scores['val-aux/prompt_too_long'], 1.0)

  @parameterized.parameters(
      ({'eval__address': 'here:80', 'eval__model': 'm'}, 'http://HOST:PORT/v1'),
      ({'eval__address': 'http://here:80/v1'}, 'config.eval.model'),
      ({'eval__model': 'm'}, 'config.eval.address'),
  )
  def test_an_address_and_a_model_need_each_other(self, values, words):
    with self.assertRaisesRegex(UserError, f'^[^\n]*{words}[^\n]*$'):
      job.evaluate(tiny_run.make_config(**values), self.workdir())

  def test_own_gateway_gives_the_local_scores(self):
    from experiments import st_ppo_tiny

    config = tiny_run.replace(
        st_ppo_tiny.get_config(), {'train.updates': 0, 'eval.episodes': 24, 'eval.rows': 8}
    )
    local = job.evaluate(config, self.workdir())
    model, params = prepare.load_policy(config)
    tokenizer = chat.load_tokenizer(prepare.model_folder(config))
    sampler = gateway.make_sampler(
        model, tokenizer, rows=8, max_total=384, chunks=(16, 64), slot_buckets=(384,)
    )
    scheduler = scheduler_lib.Scheduler(sampler, params, tokenizer.token_bytes, tokenizer.eos_ids)
    with gateway.running(config, scheduler, tokenizer) as server:
      config.eval.address, config.eval.model = f'{server.url}/v1', config.name
      at_address = job.evaluate(config, self.workdir())
    self.assertEqual(at_address.scores, local.scores)
    said = lambda results: {
        key: [turn['agent'] for turn in line['turns']] for key, line in self.lines(results).items()
    }
    self.assertEqual(said(at_address), said(local))
    self.assertBetween(local.scores['val-core/all/em'], 0.2, 0.6)


if __name__ == '__main__':
  absltest.main()
