"""The gateway over HTTP, with the embedded model: answers, streams, tools, limits and errors."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import http.client
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pydantic
import pytest
import requests

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.assembly import components
from stppo_jax.distributed import hosts
from stppo_jax.envs import stepping
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import prepare
from stppo_jax.serving import answers
from stppo_jax.serving import api
from stppo_jax.serving import gateway
from stppo_jax.serving import grammars
from stppo_jax.serving import messages
from stppo_jax.serving import responses as responses_lib
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import service as service_lib
from stppo_jax.serving import sessions
from stppo_jax.serving import stop_strings
from stppo_jax.stop_signal import StopSignal
from stppo_jax.text import template as template_lib
from stppo_jax.text import tokenizer as chat
from stppo_jax.text import tool_calls
from tests.support import scripted_gateway
from tests.support import tiny_tokenizer
from tests.support.processes import wait_for

pytestmark = pytest.mark.guests(
    what='Chat completions and messages of OpenAI and Anthropic',
    version='documentation of the interfaces',
    date='2026-11-28',
    touches='serving/api.py serving/messages.py serving/answers.py',
)

ROOT = pathlib.Path(__file__).parents[2]
QUESTION = 'Question: What is the capital of France?\n'
ASKED = {'model': 'tiny', 'messages': [{'role': 'user', 'content': QUESTION}], 'max_tokens': 40}
JSON = {'Content-Type': 'application/json'}
SEARCH = {
    'type': 'function',
    'function': {
        'name': 'search',
        'description': 'Searches.',
        'parameters': {'type': 'object', 'properties': {'query': {'type': 'string'}}},
    },
}


def embedded_config():
  config = schema.Config(name='tiny')
  config.model = schema.ModelSettings(dtype='float32', remat='none', scan_layers=False)
  return config


class LayoutTest(absltest.TestCase):

  def test_policy_is_served_in_layout_of_sampling(self):
    config = embedded_config()
    model, params = prepare.load_policy(config)
    with mock.patch.object(gateway, 'running', side_effect=InterruptedError) as running_:
      with self.assertRaises(InterruptedError):
        gateway.serve(config, lambda: (model, params, 0, ''), 0, StopSignal(lambda: True))
    sampler = running_.call_args.args[1]._sampler
    self.assertEqual(sampler.row_sharding.mesh.size, jax.device_count())
    self.assertGreater(jax.device_count(), 1)

  def test_stop_of_another_process_ends_the_server(self):
    config = embedded_config()
    policy = (*prepare.load_policy(config), 0, '')
    posts = []
    looks = iter(range(9))

    class Scheduler(contextlib.nullcontext):
      wait = mock.Mock()
      is_alive = property(lambda self: not posts and next(looks, None) is not None)

      def __init__(self, *unused_args, **unused_options):
        super().__init__()

    self.enterContext(mock.patch.object(gateway.scheduler_lib, 'Scheduler', Scheduler))
    self.enterContext(mock.patch.object(hosts, 'is_writer', lambda: False))
    self.enterContext(mock.patch.object(hosts, 'post', lambda *post: posts.append(post)))
    gateway.serve(config, lambda: policy, 0, StopSignal(lambda: True))
    self.assertLen(posts, 1)  # process 0 reads it

    posted = mock.Mock(side_effect=['', 'true'])
    self.enterContext(mock.patch.object(hosts, 'is_writer', lambda: True))
    self.enterContext(mock.patch.object(hosts, 'posted', posted))
    self.enterContext(mock.patch.object(gateway, 'running'))
    self.enterContext(mock.patch.object(gateway, '_log_use'))
    stop_signal = StopSignal(lambda: posted.call_count > 5)
    gateway.serve(config, lambda: policy, 0, stop_signal)
    self.assertEqual(posted.call_count, 2)


@functools.cache
def embedded():
  """Returns (tokenizer, parameters, sampler) of the embedded model."""
  model, params = prepare.load_policy(embedded_config())
  tokenizer = chat.load_tokenizer(prepare.EMBEDDED_MODEL)
  sampler = gateway.make_sampler(
      model, tokenizer, rows=8, max_total=256, chunks=(16, 64), slot_buckets=(256,)
  )
  return tokenizer, params, sampler


def make_scheduler(max_waiting=256, **settings):
  tokenizer, params, sampler = embedded()
  return scheduler_lib.Scheduler(
      sampler,
      params,
      tokenizer.token_bytes,
      tokenizer.eos_ids,
      max_waiting,
      grammars=grammars.Grammars(tokenizer),
      **settings,
  )


@contextlib.contextmanager
def running(
    shares_prefixes=True,
    port=0,
    key='',
    load_params=None,
    turn_end=stop_strings.UNLIMITED,
    **settings,
):
  """A gateway on the embedded model: yields its server."""
  config = schema.Config(name='tiny')
  config.serve = schema.ServeSettings(**settings)
  tokenizer, _, _ = embedded()
  scheduler = make_scheduler(
      config.serve.max_waiting, shares_prefixes=shares_prefixes, load_params=load_params
  )
  with (
      mock.patch.dict(os.environ, {'STPPO_API_KEY': key}),
      gateway.running(config, scheduler, tokenizer, port, turn_end) as server,
  ):
    yield server


@contextlib.contextmanager
def scripted(*turns):
  """Each request samples the next of these turns, texts or ids, up to where the scheduler stops."""
  tokenizer, _, _ = embedded()
  left = {}
  waiting = [
      list(tokenizer.encode(turn, control=True) if isinstance(turn, str) else turn)
      for turn in turns
  ]

  def decode(self):
    for row in self._running_rows():
      ids = left.setdefault(row.request, None)
      if ids is None:
        ids = left[row.request] = waiting.pop(0)
      step, ids[:] = ids[:3], ids[3:]
      self._record(row, np.array(step), np.full(len(step), -0.5), bool(ids))

  with mock.patch.object(scheduler_lib.Scheduler, '_decode', decode):
    yield


def post(server, fields, path='/v1/chat/completions', **kwargs):
  return requests.post(server.url + path, json=fields, timeout=120, **kwargs)


@contextlib.contextmanager
def sent(server, fields, path='/v1/chat/completions'):
  """The client has sent a request, and hangs up at the end."""
  body = json.dumps(fields)
  head = f'POST {path} HTTP/1.1\r\nContent-Type: application/json\r\n'
  head += f'Host: localhost\r\nContent-Length: {len(body)}\r\n\r\n'
  with socket.create_connection((server.host, server.port)) as connection:
    connection.sendall(f'{head}{body}'.encode())
    yield


def events(response):
  """The events of a stream, without its end, which has to be there."""
  lines = [line for line in response.iter_lines(decode_unicode=True) if line]
  assert lines[-1] == 'data: [DONE]', lines[-1]
  return [json.loads(line.removeprefix('data: ')) for line in lines[:-1]]


def write(writer_class, body, *chunks):
  """The choices of an answer that has these chunks."""

  async def stream():
    for chunk in chunks:
      yield chunk

  answer = mock.Mock(chunks=stream, score=mock.AsyncMock(return_value=[]))
  return asyncio.run(writer_class('tiny', body, answer).whole())['choices']


@contextlib.contextmanager
def blocked_encoder(service):
  """The thread that encodes prompts waits for the event that is yielded."""
  goes_on = threading.Event()
  service._encoder.submit(goes_on.wait, 60)
  try:
    yield goes_on
  finally:
    goes_on.set()


class AnswersTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.server = cls.enterClassContext(running(tool_form='tags', max_waiting=1000))

  def ask(self, path='/v1/chat/completions', **fields):
    answer = post(self.server, {**ASKED, **fields}, path)
    self.assertEqual(answer.status_code, 200, answer.text)
    return answer.json()

  def test_answer_has_text_usage_and_logprobs(self):
    tokenizer, _, _ = embedded()
    body = self.ask(temperature=0, logprobs=True, return_token_ids=True, stop=['</search>'])
    (choice,) = body['choices']
    self.assertEqual(body['object'], 'chat.completion')
    self.assertEqual(choice['finish_reason'], 'stop')
    text = choice['message']['content']
    self.assertStartsWith(text, '<think>')
    self.assertNotIn('</search>', text)
    pieces = [entry['token'] for entry in choice['logprobs']['content']]
    self.assertEqual(''.join(pieces), text + '</search>')
    self.assertEqual(tokenizer.decode(choice['token_ids']), text + '</search>')
    self.assertEqual(body['prompt_token_ids'], tokenizer.encode(QUESTION))
    self.assertTrue(all(entry['logprob'] <= 0 for entry in choice['logprobs']['content']))
    prompt, sampled = len(body['prompt_token_ids']), len(pieces)
    self.assertEqual(
        body['usage'],
        {'prompt_tokens': prompt, 'completion_tokens': sampled, 'total_tokens': prompt + sampled},
    )
    kept = self.ask(temperature=0, stop='</search>', include_stop_str_in_output=True)
    self.assertEqual(kept['choices'][0]['message']['content'], text + '</search>')
    cut = self.ask(temperature=0, stop='</search>', max_tokens=3)
    self.assertEqual(
        [x['choices'][0]['stop_reason'] for x in (body, kept, cut)],
        ['</search>', '</search>', None],
    )

  def test_stream_is_the_answer_in_chunks(self):
    asked = dict(temperature=1.3, seed=5, n=3, stop=['</search>', 'ymb'], logprobs=True)
    whole = self.ask(**asked)
    options = {'include_usage': True, 'continuous_usage_stats': True}
    stream = {**ASKED, **asked, 'stream': True, 'stream_options': options}
    chunks = events(post(self.server, stream, stream=True))
    self.assertEqual(chunks[-1]['usage'], whole['usage'])
    sampled = [chunk['usage']['completion_tokens'] for chunk in chunks]
    self.assertEqual(sampled, sorted(sampled))
    self.assertLess(sampled[0], sampled[-1])
    self.assertEqual({chunk['object'] for chunk in chunks}, {'chat.completion.chunk'})
    for choice in whole['choices']:
      mine = [c for x in chunks for c in x['choices'] if c['index'] == choice['index']]
      self.assertEqual(mine[0]['delta']['role'], 'assistant')
      text = ''.join(c['delta'].get('content', '') for c in mine)
      self.assertEqual(text, choice['message']['content'])
      self.assertEqual([c['finish_reason'] for c in mine[:-1]], [None] * (len(mine) - 1))
      self.assertEqual(mine[-1]['finish_reason'], choice['finish_reason'])
      logprobs = [entry for c in mine for entry in c['logprobs']['content']]
      self.assertEqual(logprobs, choice['logprobs']['content'])
    self.assertGreater(max(len(x['choices']) for x in chunks), 0)

  def test_logprobs_of_session_follow_its_sampling(self):
    asked = dict(logprobs=True, max_tokens=20)
    logp = lambda body: [x['logprob'] for x in body['choices'][0]['logprobs']['content']]
    greedy = self.ask(temperature=0, **asked)
    cold = self.ask(temperature=1e-4, seed=0, **asked)  # the same tokens
    cut = self.ask(temperature=2.0, top_p=1e-6, **asked)
    self.assertLess(min(logp(greedy)), -0.1)
    for body in (cold, cut):
      self.assertEqual(body['choices'][0]['message'], greedy['choices'][0]['message'])
      np.testing.assert_allclose(logp(body), logp(greedy), atol=1e-6)
    sampling = sessions.Sampling(1e-4)
    name = self.server.app.service.open_session(jax.random.key(0), sampling).name
    of_session = self.ask(f'/s/{name}/v1/chat/completions', **asked)
    self.server.app.service.end_session(name)
    self.assertEqual(of_session['choices'][0]['message'], greedy['choices'][0]['message'])
    self.assertGreater(min(logp(of_session)), -0.05)  # but for rounding

  @parameterized.parameters(
      ({}, None),
      ({'temperature': 0.7, 'top_p': 1.0}, None),
      ({'temperature': 0.0}, 'temperature=0.0'),
      ({'temperature': 0.7, 'top_p': 0.9, 'seed': 5}, 'seed=5, top_p=0.9'),
  )
  def test_session_logs_settings_that_it_ignores(self, fields, shown):
    body = api.ChatBody.model_validate(ASKED | fields)
    anthropic = {'model': 'm', 'max_tokens': 5, 'messages': ASKED['messages']}
    given = {name: value for name, value in fields.items() if name != 'seed'}
    chats = [body, messages.MessagesBody.model_validate(anthropic | given).to_chat()]
    for chat_body in chats if 'seed' not in fields else [body]:
      with mock.patch.object(service_lib.logging, 'log_first_n') as told:
        service_lib._warn_of_ignored(chat_body, sessions.Sampling(0.7))
      self.assertEqual(told.called, shown is not None)
      if shown:
        self.assertEqual(told.call_args.args[-1], shown)

  def test_logprobs_have_bytes_of_tokens(self):
    half = 'é'.encode()[:1]
    text = answers.TurnText([b'a', half, 'é'.encode()[1:], b'bc', b'<eos>'], (4,))
    text.feed([0, 1], None)
    text.feed([2, 3, 4], 'stop')
    self.assertEqual(text.full, 'aébc')
    self.assertEqual(text.starts, [0, 1, 1, 2, 4])
    self.assertEqual(b''.join(text.pieces), 'aébc<eos>'.encode())
    tokens = list(range(5))
    chunk = answers.Chunk(0, text.full, tokens, text.pieces, [-1.0] * 5, text.starts, 'stop')
    chat_body = api.ChatBody.model_validate(ASKED | {'logprobs': True})
    (choice,) = write(api.ChatWriter, chat_body, chunk)
    entry = choice['logprobs']['content'][1]
    self.assertEqual((entry['token'], entry['bytes']), ('\ufffd', list(half)))
    text_body = api.TextBody.model_validate({'prompt': 'x', 'logprobs': 0})
    (choice,) = write(api.TextWriter, text_body, chunk)
    self.assertEqual(choice['logprobs']['text_offset'], [0, 1, 1, 2, 4])

  def test_seed_repeats_answer(self):
    text = lambda **fields: self.ask(temperature=2.0, **fields)['choices'][0]['message']['content']
    self.assertEqual(text(seed=3), text(seed=3))
    self.assertLen({text(seed=3), text(seed=4), text(), text()}, 4)
    choices = self.ask(temperature=2.0, seed=3, n=4)['choices']
    self.assertLen({choice['message']['content'] for choice in choices}, 4)
    self.assertEqual(choices[0]['message']['content'], text(seed=3))
    greedy = {text(top_p=1e-6), text(top_p=1e-6), self.greedy()}
    self.assertLen(greedy, 1)

  def greedy(self):
    return self.ask(temperature=0)['choices'][0]['message']['content']

  def test_completions_accept_text_or_ids(self):
    tokenizer, _, _ = embedded()
    asked = dict(temperature=0, max_tokens=12, logprobs=1, messages=None)
    by_text = self.ask('/v1/completions', prompt=QUESTION, **asked)
    by_ids = self.ask('/v1/completions', prompt=tokenizer.encode(QUESTION), **asked)
    self.assertEqual(by_text['object'], 'text_completion')
    self.assertEqual(by_text['choices'], by_ids['choices'])
    (choice,) = by_text['choices']
    self.assertEqual(''.join(choice['logprobs']['tokens']), choice['text'])
    self.assertEqual(choice['finish_reason'], 'length')
    stream = {'prompt': QUESTION, **asked, 'stream': True}
    chunks = events(post(self.server, stream, '/v1/completions', stream=True))
    self.assertEqual(''.join(c['choices'][0]['text'] for c in chunks), choice['text'])
    offsets = choice['logprobs']['text_offset']
    streamed = [at for c in chunks for at in c['choices'][0]['logprobs']['text_offset']]
    self.assertEqual(streamed, offsets)
    for at, piece in zip(offsets, choice['logprobs']['tokens'], strict=True):
      self.assertStartsWith(choice['text'][at:], piece)
    self.assertGreater(len(chunks), 1)

  @parameterized.parameters(False, True)
  def test_several_prompts_are_answered_in_order(self, as_ids):
    """As OpenAI numbers them: index = number of the prompt * n + number of the sample."""
    tokenizer, _, _ = embedded()
    prompts = [QUESTION, 'Question: Who?\n', QUESTION]
    asked = dict(max_tokens=6, seed=3, temperature=1.5, messages=None, return_token_ids=True)
    single = [self.ask('/v1/completions', prompt=prompt, n=2, **asked) for prompt in prompts]
    batch = list(map(tokenizer.encode, prompts)) if as_ids else prompts
    body = self.ask('/v1/completions', prompt=batch, n=2, **asked)
    self.assertEqual([choice['index'] for choice in body['choices']], [0, 1, 2, 3, 4, 5])
    want = [choice for found in single for choice in found['choices']]
    for name in ('text', 'token_ids', 'prompt_token_ids', 'finish_reason'):
      self.assertEqual([c[name] for c in body['choices']], [c[name] for c in want])
    for name, total in body['usage'].items():
      self.assertEqual(total, sum(found['usage'][name] for found in single))
    stream = {'prompt': batch, **asked, 'n': 2, 'stream': True}
    chunks = events(post(self.server, stream, '/v1/completions', stream=True))
    for choice in body['choices']:
      mine = [c for x in chunks for c in x['choices'] if c['index'] == choice['index']]
      self.assertEqual(''.join(c['text'] for c in mine), choice['text'])
      ids = [c['prompt_token_ids'] for c in mine if 'prompt_token_ids' in c]
      self.assertEqual(ids, [choice['prompt_token_ids']])
      self.assertIn('prompt_token_ids', mine[0])

  def test_stream_of_chat_begins_with_prompt_ids(self):
    whole = self.ask(n=2, seed=3, return_token_ids=True)
    stream = {**ASKED, 'n': 2, 'seed': 3, 'return_token_ids': True, 'stream': True}
    chunks = events(post(self.server, stream, stream=True))
    for choice in whole['choices']:
      mine = [chunk for chunk in chunks if chunk['choices'][0]['index'] == choice['index']]
      self.assertEqual(mine[0]['prompt_token_ids'], whole['prompt_token_ids'])
      self.assertGreater(len(mine), 1)
      for chunk in mine[1:]:
        self.assertNotIn('prompt_token_ids', chunk)
      sampled = [token for chunk in mine for token in chunk['choices'][0]['token_ids']]
      self.assertEqual(sampled, choice['token_ids'])

  @parameterized.parameters(
      ({'prompt': ['x', '']}, 'prompt.1: the prompt is empty: send a text'),
      ({'prompt': ''}, 'prompt.0: the prompt is empty: send a text'),
      ({'prompt': ['x', 3]}, 'prompt.1.list: Input should be a valid list'),
      ({'prompt': [[1], [[1]]]}, 'prompt.1.list.0: Input should be a valid integer'),
      ({'prompt': ['x', 'y ' * 400]}, 'resulted in 800 tokens'),
      ({'prompt': ['x'] * 257}, 'at most 256'),
  )
  def test_wrong_list_of_prompts_is_rejected(self, fields, words):
    answer = post(self.server, fields, '/v1/completions')
    self.assertEqual(answer.status_code, 400, answer.text)
    self.assertEqual(answer.json()['error']['param'], 'prompt')
    self.assertIn(words, answer.json()['error']['message'])

  @contextlib.contextmanager
  def opened(self, server=None):
    service = (server or self.server).app.service
    session = service.open_session(jax.random.key(0), sessions.Sampling())
    yield session, f'/s/{session.name}/v1'
    service.end_session(session.name)

  @parameterized.parameters('', 'th', 'the', 'th more')
  def test_stop_string_of_client_is_no_text(self, written):
    """The last token has a letter after the stop string."""
    tokenizer, _, _ = embedded()
    sampled = tokenizer.encode('Paris is the')
    with self.opened() as (session, path), scripted(sampled, ' ok'):
      choice = self.ask(f'{path}/chat/completions', stop=['th'])['choices'][0]
      self.assertEqual(choice['message']['content'], 'Paris is ')
      said = {'role': 'assistant', 'content': 'Paris is ' + written}
      messages = [*ASKED['messages'], said, {'role': 'user', 'content': ' So?'}]
      self.ask(f'{path}/chat/completions', messages=messages)
      (row,) = session.episodes(None, 0)
    self.assertEqual(row.turns[0].tokens.tolist(), sampled)
    more = written.removeprefix('th').removeprefix('e') + ' So?'
    self.assertEqual(tokenizer.decode(row.turns[0].observation), more)

  @parameterized.parameters(('auto', 200, 1), ('refuse', 400, 0))
  def test_counted_tokens_are_no_forced_request(self, setting, status, num_forced):
    tool = {'name': 'search', 'input_schema': {'type': 'object'}}
    fields = {'messages': ASKED['messages'], 'tools': [tool], 'tool_choice': {'type': 'any'}}
    with running(forced_choice=setting) as server, self.opened(server) as (session, path):
      scheduler = server.app.service.scheduler
      for route, expected, count in (
          ('messages/count_tokens', 200, 0),
          ('messages', status, num_forced),
      ):
        with mock.patch.object(scheduler, 'grammars', None):  # as in a run
          answer = post(server, {**fields, 'max_tokens': 2}, f'{path}/{route}')
        self.assertEqual(answer.status_code, expected, answer.text)
        self.assertEqual(session.counts['forced'], count)

  @parameterized.parameters('chat/completions', 'responses', 'messages', 'completions')
  def test_stream_that_client_ends_is_recorded_later(self, route):
    tokenizer, _, _ = embedded()
    sampled = tokenizer.encode('Paris is the capital of France, on the Seine, where it rains.')
    question = {'role': 'user', 'content': QUESTION}
    fields = {'max_tokens': 100, 'messages': [question]}
    if route == 'responses':
      fields = {'input': [question]}
    if route == 'completions':
      fields = {'max_tokens': 100, 'prompt': QUESTION}
    record = scheduler_lib.Scheduler._record
    records, has_left = itertools.count(), threading.Event()

    def slow_record(*args):
      time.sleep(0.1)
      if next(records) >= 3:  # their nine tokens have more than 12 characters
        has_left.wait(60)
      record(*args)

    with (
        self.opened() as (session, path),
        scripted(sampled, ' ok'),
        mock.patch.object(scheduler_lib.Scheduler, '_record', slow_record),
    ):
      text = ''
      with post(self.server, {**fields, 'stream': True}, f'{path}/{route}', stream=True) as stream:
        for line in stream.iter_lines(decode_unicode=True):
          text += ''.join(re.findall(r'"(?:text|content|delta)": "([^"]*)"', line))
          if len(text) >= 12:
            break
      wait_for(lambda: session.counts['unrecorded'])
      has_left.set()
      self.assertEqual(session.num_turns, 0)
      said = [question, {'role': 'assistant', 'content': text}, {**question, 'content': ' So?'}]
      for name in ('messages', 'input'):
        if name in fields:
          fields[name] = said
      if route == 'completions':
        fields['prompt'] += text + ' So?'
      answer = post(self.server, fields, f'{path}/{route}')
      self.assertEqual(answer.status_code, 200, answer.text)
      (row,) = session.episodes(None, 0)
    self.assertLen(row.turns, 2)
    self.assertEqual(tokenizer.decode(row.turns[0].tokens), text)
    self.assertEqual(tokenizer.decode(row.turns[0].observation), ' So?')
    self.assertEqual(session.counts['unrecorded'], 0)

  def test_prompt_that_cannot_fit_is_not_encoded(self):
    service, text = self.server.app.service, 'x ' * 1_500_000
    session = service.open_session(jax.random.key(0), sessions.Sampling())
    name = session.name
    messages = [{'role': 'user', 'content': text}]
    with mock.patch.object(chat.Tokenizer, 'encode', side_effect=AssertionError):
      for path, fields, param in (
          ('/v1/completions', {'prompt': text}, 'prompt'),
          ('/v1/chat/completions', {'messages': messages}, 'messages'),
          (f'/s/{name}/v1/completions', {'prompt': text}, 'prompt'),
          (f'/s/{name}/v1/chat/completions', {'messages': messages}, 'messages'),
      ):
        error = post(self.server, fields, path).json()['error']
        self.assertEqual((error['code'], error['param']), ('context_length_exceeded', param))
    self.assertEqual(session.counts['too_long'], 2)
    service.end_session(name)

  def test_server_answers_while_prompt_is_encoded(self):
    service, goes_on, entered = self.server.app.service, threading.Event(), threading.Event()
    encode = service.template.encode_prompt

    def wait(prompt):
      entered.set()
      self.assertTrue(goes_on.wait(60))
      return encode(prompt)

    with mock.patch.object(service.template, 'encode_prompt', wait):
      with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = {'prompt': QUESTION, 'max_tokens': 1}
        answer = pool.submit(post, self.server, asked, '/v1/completions')
        self.assertTrue(entered.wait(60))
        self.assertEqual(requests.get(self.server.url + '/health', timeout=60).status_code, 200)
        goes_on.set()
        self.assertEqual(answer.result().status_code, 200)

  def test_tool_calls_are_parsed_and_accepted_back(self):
    body = self.ask(temperature=0, tools=[SEARCH])
    (choice,) = body['choices']
    self.assertEqual(choice['finish_reason'], 'tool_calls')
    (call,) = choice['message']['tool_calls']
    self.assertEqual(call['function']['name'], 'search')
    self.assertNotIn('index', call)
    self.assertIn('query', json.loads(call['function']['arguments']))
    longer = self.ask(temperature=0, tools=[SEARCH], parallel_tool_calls=True, max_tokens=60)
    self.assertGreater(longer['usage']['completion_tokens'], body['usage']['completion_tokens'])
    self.assertEqual(  # it continues after the call
        longer['choices'][0]['message']['tool_calls'][0]['function'], call['function']
    )
    result = {'role': 'tool', 'tool_call_id': call['id'], 'content': '<information></information>'}
    again = self.ask(messages=[*ASKED['messages'], choice['message'], result], tools=[SEARCH])
    self.assertGreater(again['usage']['prompt_tokens'], body['usage']['total_tokens'])

  def test_stream_has_a_delta_per_call(self):
    """As OpenAI's: text, then each call, then the end. Clients read one of them per delta."""
    calls = [tool_calls.Call('search', {'query': query}) for query in 'ab']
    asked = {**ASKED, 'tools': [SEARCH], 'parallel_tool_calls': True, 'stream': True, 'n': 2}
    with mock.patch.object(tool_calls.Tags, 'parse', return_value=('Hm', tuple(calls))):
      chunks = events(post(self.server, asked))
    for number in range(2):
      mine = [c for x in chunks for c in x['choices'] if c['index'] == number]
      deltas = [c['delta'] for c in mine]
      self.assertEqual(deltas[0], {'role': 'assistant', 'content': 'Hm'})
      (first,), (second,) = [delta.pop('tool_calls') for delta in deltas[1:3]]
      self.assertEqual([first['index'], second['index']], [0, 1])
      self.assertNotEqual(first['id'], second['id'])
      names = [json.loads(call['function']['arguments'])['query'] for call in (first, second)]
      self.assertEqual(names, ['a', 'b'])
      self.assertEqual(deltas[1:], [{}, {}, {}])
      self.assertEqual([c['finish_reason'] for c in mine], [None, None, None, 'tool_calls'])

  @parameterized.parameters(False, True)
  def test_client_of_one_call_gets_one(self, stream):
    """A form may write several calls before the stop string that ends the first one."""
    calls = [tool_calls.Call('search', {'query': query}) for query in 'ab']
    session = self.server.app.service.open_session(jax.random.key(0), sessions.Sampling())
    path = f'/s/{session.name}/v1/chat/completions'
    asked = {**ASKED, 'tools': [SEARCH], 'parallel_tool_calls': False, 'stream': stream}
    with mock.patch.object(tool_calls.Tags, 'parse', return_value=('Hm', tuple(calls))):
      answer = post(self.server, asked, path)
    if stream:
      deltas = [choice['delta'] for chunk in events(answer) for choice in chunk['choices']]
      message = {
          'role': 'assistant',
          'content': deltas[0]['content'],
          'tool_calls': [call for delta in deltas for call in delta.get('tool_calls', ())],
      }
    else:
      message = answer.json()['choices'][0]['message']
    (call,) = message['tool_calls']
    self.assertEqual(json.loads(call['function']['arguments']), {'query': 'a'})
    result = {'role': 'tool', 'tool_call_id': call['id'], 'content': 'Paris'}
    asked['messages'] = [*ASKED['messages'], message, result]
    post(self.server, asked, path)
    self.assertEqual(session.num_segments, 1)  # the second turn continues the row

  def test_tools_stay_in_prompt_without_choice(self):
    template = self.server.app.service.template
    with mock.patch.object(template, 'encode', wraps=template.encode) as encode:
      answer = self.ask(temperature=0, tools=[SEARCH], tool_choice='none')
    self.assertEqual(encode.call_args.args[1], [SEARCH])
    (choice,) = answer['choices']
    self.assertNotIn('tool_calls', choice['message'])
    self.assertIn('<search>', choice['message']['content'])

  def test_half_a_character_in_arguments_is_no_error(self):
    call = tool_calls.Call('search', {'query': '\ud83d'})
    with mock.patch.object(tool_calls.Tags, 'parse', return_value=('', (call,))):
      body = self.ask(tools=[SEARCH])
    (answered,) = body['choices'][0]['message']['tool_calls']
    self.assertEqual(json.loads(answered['function']['arguments']), call.arguments)

  def test_call_without_id_or_arguments_is_accepted(self):
    call = {'id': None, 'function': {'name': 'search'}}
    turn = {'role': 'assistant', 'content': None, 'tool_calls': [call]}
    self.ask(messages=[*ASKED['messages'], turn], tools=[SEARCH])

  def test_concurrent_streams_equal_repeated_streams(self):
    asked = lambda seed: {**ASKED, 'seed': seed % 20, 'temperature': 1.5, 'stream': True}

    def text(seed):
      chunks = events(post(self.server, asked(seed), stream=True))
      return ''.join(c['choices'][0]['delta'].get('content', '') for c in chunks)

    with concurrent.futures.ThreadPoolExecutor(60) as pool:
      found = list(pool.map(text, range(60)))
    self.assertEqual(found[:20] * 3, found)
    self.assertLen(set(found), 20)

  def test_models_health_and_metrics(self):
    get = lambda path: requests.get(self.server.url + path, timeout=60)
    (model,) = get('/v1/models').json()['data']
    self.assertEqual(model['id'], 'tiny')
    self.assertEqual(get('/health').json(), {'status': 'ok'})
    self.ask()
    text = get('/metrics').text
    for name in ('gateway_requests_total{status="200"}', 'gateway_sampled_tokens_total'):
      self.assertIn(name, text)
    names = re.findall('^# TYPE (.*?) ', text, re.MULTILINE)
    self.assertLen(set(names), len(names))
    self.assertIn('gateway_queued_choices_total', names)

  @parameterized.parameters(
      {'messages': []},
      {'messages': [{'role': 'king', 'content': ''}]},
      {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
      {'messages': [{'role': 'user', 'content': 'x ' * 400}]},
      {'temperature': -1},
      {'temperature': 'hot'},
      {'temperature': True},
      {'top_p': 0},
      {'n': 0},
      {'n': 10**9},
      {'max_tokens': 0},
      {'stop': ['']},
      {'stop': {'a': 1}},
      {'seed': 1.5},
      {'tools': [{'type': 'function'}]},
      {'tool_choice': 'required'},
      {'top_logprobs': 6},
      {'logit_bias': {'5': 1}},
      {'response_format': {'type': 'xml'}},
      {'repetition_penalty': 1.1},
      {'min_tokens': 3},
      {'stop_token_ids': [5]},
      {'ignore_eos': True, 'stop_token_ids': [0]},
      {'bad_words': ['x']},
      {'chat_template_kwargs': {'enable_thinking': False}},
      {'chat_template_kwargs': [1]},
      {'continue_final_message': True},
      {'add_generation_prompt': False},
      {'guided_json': {}, 'guided_choice': ['a']},
      {'structured_outputs': {'choice': ['a']}},
      {'prompt_logprobs': 0},
      {'skip_special_tokens': False},
      {'detokenize': False},
      {'modalities': ['text', 'audio']},
      {'length_penalty': 0},
      {'best_of': 2},
      {'stop': ''},
      {'messages': [{'role': 'assistant', 'function_call': {'name': 'f', 'arguments': '{}'}}]},
      {'messages': [{'role': 'assistant', 'content': None, 'refusal': 'I cannot.'}]},
      {'model': 'gpt-5'},
  )
  def test_wrong_field_is_named(self, **fields):
    answer = post(self.server, {**ASKED, **fields})
    self.assertEqual(answer.status_code, 404 if 'model' in fields else 400, answer.text)
    error = answer.json()['error']
    self.assertEqual(error['type'], 'invalid_request_error')
    self.assertEqual(error['param'], list(fields)[-1])
    self.assertNotIn('\n', error['message'])

  def test_neutral_fields_are_accepted(self):
    nothing = {'repetition_penalty': 1.0, 'min_tokens': 0, 'stop_token_ids': [0], 'bad_words': None}
    nothing |= {'add_generation_prompt': True, 'continue_final_message': False}
    nothing |= {'skip_special_tokens': True, 'modalities': ['text'], 'reasoning_effort': 'low'}
    nothing |= {'verbosity': 'low', 'detokenize': True, 'add_special_tokens': True, 'best_of': 1}
    nothing |= {'length_penalty': 1, 'thinking': {'type': 'disabled'}, 'include_reasoning': True}
    nothing |= {'prompt_logprobs': None, 'guided_json': None, 'chat_template_kwargs': {}}
    own = {'chat_template_kwargs', 'prompt_logprobs', 'stop_token_ids'}  # not Anthropic's
    for path, fields, content in (
        ('/v1/chat/completions', nothing, 'choices'),
        ('/v1/completions', nothing | {'prompt': QUESTION, 'messages': None}, 'choices'),
        ('/v1/messages', {name: nothing[name] for name in nothing.keys() - own}, 'content'),
    ):
      asked = {name: fields[name] for name in ('prompt', 'messages') if name in fields}
      expected = self.ask(path, temperature=0, **asked)[content]
      self.assertEqual(self.ask(path, temperature=0, **fields)[content], expected)

  @parameterized.parameters(
      ('GET', '/v1/chat/completions', b'', 405),
      ('POST', '/v1/completions', b'{"prompt": "x", "max_tokens": 1' + b'0' * 400 + b'}', 400),
      ('POST', '/v1/completions', b'{"prompt": "x", "temperature": 1' + b'0' * 400 + b'}', 400),
      ('POST', '/v1/completions', b'{"prompt": "x", "temperature": NaN}', 400),
      ('POST', '/v1/chat/completions', b'{', 400),
      ('POST', '/v1/chat/completions', b'[' * 100_000, 400),
      ('POST', '/v1/chat/completions', b'\xff\xfe', 400),
      ('POST', '/v1/chat/completions', b'[]', 400),
      ('POST', '/v1/completions', b'{"prompt": [99999999]}', 400),
      ('POST', '/v1/completions', b'{"prompt": []}', 400),
      ('POST', '/v1/completions', b'{"prompt": "x", "echo": true, "stream": true}', 400),
      ('GET', '/../../etc/passwd', b'', 404),
      ('POST', '/s/unknown/v1/chat/completions', json.dumps(ASKED).encode(), 404),
      ('POST', '/s/unknown/reward', b'{"reward": 1}', 404),
  )
  def test_wrong_request_gets_error_of_openai(self, method, path, body, status):
    answer = requests.request(method, self.server.url + path, data=body, headers=JSON, timeout=60)
    self.assertEqual(answer.status_code, status, answer.text)
    self.assertEqual(set(answer.json()['error']), {'message', 'type', 'param', 'code'})


class MessagesTest(parameterized.TestCase):
  """Anthropic's interface; clients_test tries it with Anthropic's own client."""

  def test_request_equals_that_of_chat(self):
    schema_ = SEARCH['function']['parameters']
    call = {'type': 'tool_use', 'id': 'c1', 'name': 'search', 'input': {'query': 'Paris'}}
    result = {'type': 'tool_result', 'tool_use_id': 'c1', 'is_error': False, 'content': 'It is.'}
    text = lambda content: {'type': 'text', 'text': content}
    chat = messages.read(
        {
            'model': 'm',
            'max_tokens': 7,
            'system': [text('Be '), text('brief.')],
            'messages': [
                {'role': 'user', 'content': 'Where?'},
                {'role': 'assistant', 'content': [text('Wait.'), call]},
                {'role': 'user', 'content': [result, text('So?')]},
            ],
            'tools': [{'name': 'search', 'description': 'Searches.', 'input_schema': schema_}],
            'tool_choice': {'type': 'auto', 'disable_parallel_tool_use': False},
            'stop_sequences': ['x'],
            'top_p': 0.5,
        }
    )
    function = {'name': 'search', 'arguments': {'query': 'Paris'}}
    expected = api.ChatBody.model_validate(
        {
            'model': 'm',
            'max_tokens': 7,
            'messages': [
                {'role': 'system', 'content': 'Be brief.'},
                {'role': 'user', 'content': 'Where?'},
                {
                    'role': 'assistant',
                    'content': 'Wait.',
                    'tool_calls': [{'id': 'c1', 'function': function}],
                },
                {'role': 'tool', 'tool_call_id': 'c1', 'content': 'It is.'},
                {'role': 'user', 'content': 'So?'},
            ],
            'tools': [SEARCH],
            'parallel_tool_calls': True,
            'stop': ['x'],
            'top_p': 0.5,
        }
    )
    self.assertEqual(chat.conversation, expected.conversation)
    self.assertEqual(chat.offered_tools, expected.offered_tools)
    for name in ('max_tokens', 'parallel_tool_calls', 'stop', 'top_p', 'temperature'):
      self.assertEqual(getattr(chat, name), getattr(expected, name))

  def test_error_of_tool_is_in_its_text(self):
    result = {'type': 'tool_result', 'tool_use_id': 'c1', 'is_error': True}
    contents = ('no disk', [{'type': 'text', 'text': 'Error: no disk'}], None)
    texts = []
    for content in contents:
      message = {'role': 'user', 'content': [result | {'content': content}]}
      texts.append(messages.read({'messages': [message]}).conversation[0]['content'])
    self.assertEqual(texts, ['Error: no disk', 'Error: no disk', 'Error: '])

  def test_thinking_is_in_content_of_its_turn(self):
    redacted = {'type': 'redacted_thinking', 'data': 'x'}
    thinking = [{'type': 'thinking', 'thinking': 'Hm.', 'signature': 'x'}, redacted]
    call = {'type': 'tool_use', 'id': 'c1', 'name': 'search', 'input': {}}
    said = {'type': 'text', 'text': 'Wait.'}

    def read(*blocks):
      message = {'role': 'assistant', 'content': list(blocks)}
      return messages.read_to_count({'messages': [message]}).conversation

    text = said | {'text': '<think>\nHm.\n</think>\n\nWait.'}
    self.assertEqual(read(*thinking, said, call), read(text, call))
    self.assertEqual(read(redacted, said), read(said))
    self.assertEqual(read(redacted), read())

  def test_requests_of_claude_code_are_accepted(self):
    header = 'x-anthropic-billing-header: cc_version=2.1; cch=%s;'
    edits = {'edits': [{'type': 'clear_thinking_20251015', 'keep': 'all'}]}
    user = {'role': 'user', 'content': QUESTION}
    reminder = {'role': 'system', 'content': [{'type': 'text', 'text': 'Be quick.'}]}

    def read(system):
      fields = {'model': 'claude-haiku-4-5', 'messages': [user, reminder], 'system': system}
      return messages.read(fields | {'context_management': edits}).conversation

    text = lambda content: {'type': 'text', 'text': content}
    first = read([text(header % 'a1'), text('You are Claude Code.')])
    self.assertEqual(first, read([text(header % 'b2'), text('You are Claude Code.')]))
    self.assertEqual(first, read(header % 'c3' + '\nYou are Claude Code.'))
    self.assertEqual([message['role'] for message in first], ['system', 'user', 'system'])
    self.assertEqual(first[0]['content'], 'You are Claude Code.')
    self.assertEqual(requests.head(self.server.url, timeout=60).status_code, 200)
    fields = {'model': 'claude-opus-4-6', 'messages': [user], 'max_tokens': 1}
    answer = post(self.server, fields, '/v1/messages?beta=true')
    self.assertEqual(answer.json()['model'], 'tiny')
    name = self.server.app.service.open_session(jax.random.key(0), sessions.Sampling()).name
    for path, status in (
        ('/v1/models/tiny', 200),
        ('/v1/models/claude', 404),
        (f'/s/{name}/v1/models/claude-haiku-4-5', 200),
        (f'/s/{name}', 200),
        ('/s/unknown', 404),
    ):
      self.assertEqual(requests.get(self.server.url + path, timeout=60).status_code, status, path)
    self.server.app.service.end_session(name)

  @parameterized.parameters(
      {'messages': []},
      {'messages': [{'role': 'system', 'content': 'x'}]},
      {'messages': [{'role': 'user', 'content': [{'type': 'image'}]}]},
      {'max_tokens': 0},
      {'top_k': 5},
      {'tool_choice': {'type': 'any'}},
      {'tools': [{'type': 'web_search_20250305', 'name': 'w'}]},
      {'output_config': {'format': {}}},
      {'n': 2},
      {'context_management': {'edits': [{'type': 'clear_tool_uses'}]}},
      {'messages': [{'role': 'assistant', 'content': 'I'}]},
      {'thread': {'type': 'create'}},
  )
  def test_error_has_form_of_anthropic(self, **fields):
    answer = post(self.server, {**ASKED, **fields}, '/v1/messages')
    self.assertEqual(answer.status_code, 400, answer.text)
    error = answer.json()
    self.assertEqual((error['type'], error['error']['type']), ('error', 'invalid_request_error'))
    self.assertEqual(set(error['error']), {'type', 'message'})

  def test_error_names_field_of_anthropic(self):
    answer = post(self.server, {**ASKED, 'stop_sequences': ['']}, '/v1/messages')
    self.assertStartsWith(answer.json()['error']['message'], 'stop_sequences.0')

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.server = cls.enterClassContext(running())


SCHEMA = {'type': 'object', 'properties': {'a': {'type': 'integer'}}}


OPENCODE = ({'X-Session-Id': 'main'}, {'x-session-id': 'child', 'X-PARENT-SESSION-ID': 'main'})
CLAUDE_CODE = (
    {'X-Claude-Code-Session-Id': 'main'},
    {'x-claude-code-session-id': 'main', 'x-claude-code-agent-id': 'child'},
    {
        'x-claude-code-session-id': 'main',
        'x-claude-code-agent-id': 'inner',
        'x-claude-code-parent-agent-id': 'child',
    },
)
CHAT = {'messages': [{'role': 'user', 'content': 'q'}]}


class AgentHeadersTest(parameterized.TestCase):
  """Headers say which agent of a program sends a request, and which agent has started it."""

  def setUp(self):
    super().setUp()
    opened = self.enterContext(scripted_gateway.session(['one', 'two', 'three']))
    self.url, self.session, self.scheduler = opened

  def send(self, path, fields, headers, url=None):
    return requests.post((url or self.url) + path, json=fields, headers=headers, timeout=60)

  def agents(self):
    rows = self.session.episodes(types.Task('t', 'q', ('a',)), 0)
    rows = sorted(rows, key=lambda row: row.segment)
    return [(row.agent_id, row.parent) for row in rows]

  @parameterized.product(
      client=(OPENCODE, CLAUDE_CODE),
      route=(
          ('/chat/completions', CHAT),
          ('/completions', {'prompt': 'q'}),
          ('/responses', {'input': 'q'}),
          ('/messages', CHAT | {'max_tokens': 50}),
      ),
  )
  def test_headers_of_clients_make_a_tree(self, client, route):
    for headers in client:
      response = self.send(*route, headers)
      self.assertEqual(response.status_code, 200, response.text)
    expected = [('main', None), ('child', (0, 1)), ('inner', (1, 1))]
    self.assertEqual(self.agents(), expected[: len(client)])

  def test_unknown_parent_gets_its_answer(self):
    response = self.send('/chat/completions', CHAT, OPENCODE[1])
    self.assertEqual(response.json()['choices'][0]['message']['content'], 'one')
    self.assertEqual(self.agents(), [('child', None)])
    self.assertEqual(self.session.counts['wrong_parents'], 1)

  @parameterized.parameters('x-session-id', 'x-parent-session-id', 'x-claude-code-agent-id')
  def test_long_id_is_an_error(self, name):
    response = self.send('/chat/completions', CHAT, {name: 'x' * 257})
    self.assertEqual(response.status_code, 400)
    self.assertIn('at most 256', response.json()['error']['message'])
    self.assertEqual(self.scheduler.sampled, [])
    response = self.send('/chat/completions', CHAT, {name: 'x' * 256})
    self.assertEqual(response.status_code, 200)

  def test_headers_change_nothing_outside_episodes(self):
    url = self.url.partition('/s/')[0] + '/v1'
    response = self.send('/chat/completions', CHAT, {'x-session-id': 'x' * 300}, url)
    self.assertEqual(response.status_code, 200)

  @parameterized.parameters(
      ({'session': 'main'}, 'branch_credit'),
      ({'session': 'main', 'turn': 1}, 'leave one out'),
      ({'session': ['main']}, 'session'),
  )
  def test_wrong_reward_of_agent_is_refused(self, fields, words):
    self.send('/chat/completions', CHAT, OPENCODE[0])
    response = self.send('', {'reward': 1} | fields, {}, self.url.removesuffix('/v1') + '/reward')
    self.assertEqual(response.status_code, 400)
    self.assertIn(words, response.json()['error']['message'])


class FieldsTest(parameterized.TestCase):
  """What a client sends changes the answer as elsewhere, or is an error."""

  def read(self, route, fields):
    if route == 'responses':
      return responses_lib.Reader().read({'input': 'q', **fields})
    if route == 'messages':
      return messages.read({'max_tokens': 5, 'messages': ASKED['messages'], **fields})
    if route == 'completions':
      return api.TextBody.model_validate({'prompt': 'q', **fields})
    return api.ChatBody.model_validate({'messages': ASKED['messages'], **fields})

  @parameterized.parameters(
      ('chat', {'response_format': {'type': 'json_schema', 'schema': SCHEMA}}),
      ('chat', {'response_format': {'type': 'json_object', 'schema': SCHEMA}}),
      ('chat', {'response_format': {'type': 'json_schema'}}),
      ('chat', {'response_format': {'type': 'json_schema', 'json_schema': None}}),
      ('chat', {'response_format': {'type': 'json_schema', 'json_schema': {}}}),
      ('chat', {'response_format': {'type': 'json_schema', 'json_schema': {'schema': None}}}),
      ('chat', {'response_format': {'type': 'json_schema', 'json_schema': {'schema_': SCHEMA}}}),
      ('chat', {'response_format': {'type': 'json_schema', 'json_schema': SCHEMA}}),
      ('chat', {'response_format': {'type': 'json_object', 'json_schema': {'schema': SCHEMA}}}),
      ('chat', {'response_format': {'json_schema': {'schema': SCHEMA}}}),
      (
          'responses',
          {'text': {'format': {'type': 'json_schema', 'json_schema': {'schema': SCHEMA}}}},
      ),
      ('responses', {'text': {'format': {'type': 'json_schema', 'name': 'x'}}}),
      ('responses', {'text': {'format': {'type': 'json_object', 'schema': SCHEMA}}}),
      ('responses', {'text': {'format': {'schema': SCHEMA}}}),
      ('messages', {'output_config': {'format': {'type': 'json_schema', 'json_schema': SCHEMA}}}),
  )
  def test_schema_in_wrong_place_is_an_error(self, route, fields):
    with self.assertRaises(pydantic.ValidationError):
      self.read(route, fields)

  @parameterized.parameters(
      ('chat', {'response_format': {'type': 'text'}}, None),
      ('chat', {'response_format': {'type': 'json_object'}}, {'type': 'object'}),
      (
          'chat',
          {
              'response_format': {
                  'type': 'json_schema',
                  'json_schema': {'name': 'x', 'strict': False, 'schema': SCHEMA},
              }
          },
          SCHEMA,
      ),
      (
          'responses',
          {'text': {'format': {'type': 'json_schema', 'name': 'x', 'strict': True, 'schema': {}}}},
          {},
      ),
      ('responses', {'text': {'format': {'type': 'text'}}}, None),
  )
  def test_schema_in_right_place_is_used(self, route, fields, schema):
    self.assertEqual(self.read(route, fields).response_format.schema_of_text, schema)

  @parameterized.parameters(
      *(
          {name: value}
          for name in ('enable_thinking', 'think', 'do_sample')
          for value in (False, 0)
      ),
      {'thinking_budget': 0},
      {'stop_sequence': ''},
      {'top_a': 0},
      {'max_turns': -1},
      {'guided_regex': ''},
      {'min_tokens': -1},
      {'skip_special_tokens': False},
      {'continue_final_message': True},
  )
  def test_unknown_field_of_any_value_is_error(self, **fields):
    for route in ('chat', 'completions', 'messages', 'responses'):
      with self.assertRaises(pydantic.ValidationError):
        self.read(route, fields)

  @parameterized.parameters(
      {'top_k': -1},
      {'top_k': 0, 'min_p': 0.0, 'repetition_penalty': 1.0, 'length_penalty': 1.0},
      {'frequency_penalty': 0, 'presence_penalty': 0.0, 'logit_bias': {}},
      {'use_beam_search': False, 'best_of': 1, 'min_tokens': 0},
      {'skip_special_tokens': True, 'guided_json': None, 'documents': []},
      {'user': 'me', 'store': False, 'reasoning_effort': 'low'},
  )
  def test_harmless_values_of_known_fields_are_accepted(self, **fields):
    for route in ('chat', 'completions', 'messages', 'responses'):
      self.read(route, fields)

  @parameterized.parameters('chat', 'completions', 'messages', 'responses')
  def test_seed_of_minus_one_is_random(self, route):
    body = self.read(route, {'seed': -1})
    self.assertIsNone(body.seed)
    service = service_lib.Service
    keys = {service._make_key(mock.Mock(_key_size=2), body.seed, 0).tobytes() for _ in range(4)}
    self.assertLen(keys, 4)

  def test_samples_of_random_seed_differ(self):
    with running() as server:
      fields = {**ASKED, 'seed': -1, 'n': 4, 'temperature': 2.0}
      texts = [
          c['message']['content'] for _ in range(2) for c in post(server, fields).json()['choices']
      ]
    self.assertLen(set(texts), 8)

  def test_empty_list_of_allowed_tools_is_error(self):
    choice = {'type': 'allowed_tools', 'allowed_tools': {'mode': 'required', 'tools': []}}
    with self.assertRaisesRegex(pydantic.ValidationError, 'name at least one'):
      self.read('chat', {'tools': [SEARCH], 'tool_choice': choice})

  @parameterized.parameters('prefix', 'partial')
  def test_begun_turn_is_an_error(self, name):
    said = {'role': 'assistant', 'content': 'It is', name: True}
    with self.assertRaisesRegex(pydantic.ValidationError, 'new turn'):
      self.read('chat', {'messages': [*ASKED['messages'], said]})
    self.read('chat', {'messages': [*ASKED['messages'], {**said, name: False}]})

  @parameterized.parameters(
      ('{{ m.content }}', '\n'),
      ("{{ '<' + m.content + '>' }}", '\n'),
      (
          '{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}'
          '{{ p.text }}{% endfor %}{% endif %}',
          '',
      ),
      (
          '{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}'
          '{{ p.text + " " }}{% endfor %}{% endif %}',
          ' ',
      ),
  )
  def test_text_parts_are_joined_as_in_vllm(self, shown, separator):
    tokenizer = tiny_tokenizer.load('{% for m in messages %}' + shown + '{% endfor %}')
    template = template_lib.Template(tokenizer, 1000)
    self.assertEqual(template.part_separator, separator)
    parts = [{'type': 'text', 'text': text} for text in ('one', 'two')]
    result = {'type': 'tool_result', 'tool_use_id': 'x', 'content': parts, 'is_error': True}
    item = {'role': 'user', 'content': [{'type': 'input_text', 'text': t} for t in ('one', 'two')]}
    expected = f'one{separator}two'
    for body, text in (
        (self.read('chat', {'messages': [{'role': 'user', 'content': parts}]}), expected),
        (self.read('messages', {'messages': [{'role': 'user', 'content': parts}]}), expected),
        (self.read('responses', {'input': [item]}), expected),
        (
            self.read('messages', {'messages': [{'role': 'user', 'content': [result]}]}),
            f'Error: {expected}',
        ),
    ):
      (message,) = body.conversation_with(template.part_separator)
      self.assertEqual(message['content'], text)


class ThoughtsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.servers = {
        form: cls.enterClassContext(running(tool_form=form))
        for form in ('hermes', 'qwen_xml', 'tags')
    }

  def ask(self, turn, form, **fields):
    fields = {**ASKED, 'tools': [SEARCH], 'max_tokens': 150, **fields}
    with scripted(f'{turn} and more<|endoftext|>'):
      (choice,) = post(self.servers[form], fields).json()['choices']
    calls = choice['message'].get('tool_calls') or []
    return [json.loads(call['function']['arguments']) for call in calls], choice

  @parameterized.product(form=('hermes', 'qwen_xml', 'tags'), is_open=(False, True))
  def test_draft_in_thought_ends_no_turn(self, form, is_open):
    write = tool_calls.make_form(form, [SEARCH]).write
    draft = write(tool_calls.Call('search', {'query': 'a'}))
    real = write(tool_calls.Call('search', {'query': 'b'}))
    start = 'maybe ' if is_open else '<think>maybe '
    opening = mock.patch.object(chat.Tokenizer, 'opening', lambda self, ids: '<think>' * is_open)
    with opening:
      calls, choice = self.ask(f'{start}{draft} no</think>{real}', form)
      self.assertEqual(calls, [{'query': 'b'}])
      self.assertEqual(choice['finish_reason'], 'tool_calls')
      self.assertEqual(choice['message']['content'], f'{start}{draft} no</think>')
      for text in (f'{start}{draft}', f'{start}no</think> ok <think>{draft}'):  # never closed
        calls, choice = self.ask(text, form)
        self.assertEqual((calls, choice['finish_reason']), ([], 'stop'))
        self.assertEndsWith(choice['message']['content'], ' and more')

  def test_stop_string_of_client_ends_thought(self):
    _, choice = self.ask('<think>one. two', 'hermes', stop=['.'])
    self.assertEqual(choice['message']['content'], '<think>one')

  def test_error_of_form_loses_no_turn(self):
    with mock.patch.object(tool_calls.Hermes, 'parse', side_effect=KeyError('odd')):
      calls, choice = self.ask('<tool_call>{}', 'hermes')
    self.assertEqual((calls, choice['message']['content']), ([], '<tool_call>{} and more'))

  def test_call_that_cannot_be_written_loses_no_turn(self):
    deep = []
    for _ in range(10**5):
      deep = [deep]
    call = tool_calls.Call('search', {'query': deep})
    with mock.patch.object(tool_calls.Hermes, 'parse', return_value=('', (call,))):
      calls, choice = self.ask('<tool_call>{}', 'hermes')
    self.assertEqual((calls, choice['message']['content']), ([], '<tool_call>{} and more'))

  @parameterized.product(form=('hermes', 'qwen_xml', 'tags'), name=('open', 'search'))
  def test_call_of_tool_that_is_not_allowed_is_text(self, form, name):
    function = {**SEARCH['function'], 'name': 'open'}
    tools = [SEARCH, {'type': 'function', 'function': function}]
    named = {'type': 'function', 'function': {'name': 'search'}}
    choice = {'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto', 'tools': [named]}}
    turn = tool_calls.make_form(form, tools).write(tool_calls.Call(name, {'query': 'a'}))
    calls, answered = self.ask(turn, form, tools=tools, tool_choice=choice)
    if name == 'search':
      self.assertEqual(calls, [{'query': 'a'}])
      return
    self.assertEqual(calls, [])
    self.assertEqual((answered['message']['content'], answered['finish_reason']), (turn, 'stop'))

  def test_odd_schema_loses_no_turn(self):
    parameters = {'type': 'object', 'properties': {'query': 'text'}}
    tool = {'type': 'function', 'function': {'name': 'search', 'parameters': parameters}}
    server = self.servers['tags']
    session = server.app.service.open_session(jax.random.key(0), sessions.Sampling())
    with scripted('<search>cats</search>'):
      answer = post(server, {**ASKED, 'tools': [tool]}, f'/s/{session.name}/v1/chat/completions')
    self.assertEqual(answer.status_code, 200, answer.text)
    self.assertEqual(session.num_turns, 1)


class FinishTest(parameterized.TestCase):
  """The end of a turn: its stop string, its calls and its limit."""

  def finish(self, turn, form='', finish='stop', **fields):
    """Returns the last chunk, and the arguments with which a session records the turn.

    A token is a character, except the last one, which has two of them.
    """
    pieces = [letter.encode() for letter in turn[:-2]] + [turn[-2:].encode()]
    text = answers.TurnText(pieces, (), **fields)
    request = mock.Mock(in_thought=False)
    session = mock.Mock()
    events_ = asyncio.Queue()
    tokens = list(range(len(pieces)))
    events_.put_nowait((0, tokens, [-1.0] * len(tokens), finish))
    made = tool_calls.make_form(form, [SEARCH]) if form else None
    choice = answers.Choice(request, sessions.RequestPlan([1], np.zeros(2)), text)
    answer = answers.Answer([choice], 1, False, made, session, events_)

    async def collect():
      return [chunk async for chunk in answer.chunks()]

    (chunk,) = asyncio.run(collect())
    self.assertEqual(chunk.tokens, tokens)
    return chunk, session.record.call_args.args

  def write(self, form):
    return tool_calls.make_form(form, [SEARCH]).write(tool_calls.Call('search', {'query': 'a'}))

  @parameterized.product(form=sorted(tool_calls.FORMS), keeps_stop=(False, True))
  def test_stop_string_after_call_loses_no_call(self, form, keeps_stop):
    turn = f'{self.write(form)}\nObservation:x'
    chunk, (*_, action, _) = self.finish(turn, form, stops=['Observation:'], keeps_stop=keeps_stop)
    (call,) = chunk.calls
    self.assertEqual(call.arguments, {'query': 'a'})
    self.assertEqual((action, chunk.finish, chunk.stop), ('tool', 'tool_calls', 'Observation:'))

  @parameterized.parameters((False, ''), (True, '\nObservation:'))
  def test_stop_string_is_no_content_of_call(self, keeps_stop, end):
    turn = f'I look.{self.write("hermes")}\nObservation:x'
    chunk, record = self.finish(turn, 'hermes', stops=['Observation:'], keeps_stop=keeps_stop)
    self.assertEqual(chunk.text, f'I look.{end}')
    self.assertEqual(record[3][-1]['content'], chunk.text)
    self.assertLen(record[3][-1]['tool_calls'], 1)

  @parameterized.parameters(
      ('hermes', '</tool_call>'),
      ('llama3', '}}'),
      ('qwen_xml', '</tool_call>'),
      ('qwen_xml', '</function>'),
      ('tags', '</search>'),
  )
  def test_stop_string_may_end_call(self, form, stop):
    turn = self.write(form).partition(stop)[0] + stop
    chunk, _ = self.finish(turn, form, stops=[stop])
    (call,) = chunk.calls
    self.assertEqual(call.arguments, {'query': 'a'})
    self.assertEqual(chunk.text, '')

  @parameterized.parameters((False, 'Paris is '), (True, 'Paris is th'))
  def test_text_ends_at_stop_string(self, keeps_stop, text):
    """As in vLLM: the rest of the token in which the stop string ends is no text."""
    chunk, record = self.finish('Paris is the', stops=['th'], keeps_stop=keeps_stop)
    self.assertEqual((chunk.text, chunk.stop), (text, 'th'))
    self.assertEqual(record[3][0]['content'], text)

  @parameterized.parameters(('length', True), ('stop', False))
  def test_turn_with_call_at_limit_is_cut(self, finish, was_cut):
    """Its `finish_reason` is that of a call, as in vLLM."""
    chunk, record = self.finish(self.write('hermes'), 'hermes', finish)
    self.assertEqual((chunk.finish, chunk.was_cut), ('tool_calls', was_cut))
    self.assertEqual(record[4], was_cut)


class TurnEndTest(parameterized.TestCase):
  """Requests that do not say where they end."""

  TURN = '<think>a </answer> b</think> c </search> d'
  STOPS = ('</search>', '</answer>')

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    ends = {
        'anywhere': stop_strings.TurnEnd(cls.STOPS, False, 7),
        'after thoughts': stop_strings.TurnEnd(cls.STOPS, True, 7),
    }
    cls.servers = {
        name: cls.enterClassContext(running(turn_end=end, tool_form='tags'))
        for name, end in ends.items()
    }

  def ask(self, route='chat/completions', place='anywhere', prefix='', turn=TURN, **fields):
    asked = {'messages': ASKED['messages']}
    if route == 'completions':
      asked = {'prompt': QUESTION}
    if route == 'responses':
      asked = {'input': QUESTION}
    if route == 'messages':
      asked['max_tokens'] = 50
    with scripted(f'{turn}<|endoftext|>'):
      answer = post(self.servers[place], {**asked, **fields}, f'{prefix}/v1/{route}')
    self.assertEqual(answer.status_code, 200, answer.text)
    return answer.json()

  def text(self, **kwargs):
    choice = self.ask(**kwargs)['choices'][0]
    return choice['message']['content'], choice['finish_reason'], choice['stop_reason']

  @parameterized.parameters('chat/completions', 'completions', 'responses', 'messages')
  def test_answer_ends_as_turn_of_run(self, route):
    answer = self.ask(route)
    texts = {
        'chat/completions': lambda: answer['choices'][0]['message']['content'],
        'completions': lambda: answer['choices'][0]['text'],
        'responses': lambda: answer['output'][0]['content'][0]['text'],
        'messages': lambda: answer['content'][0]['text'],
    }
    self.assertEqual(texts[route](), '<think>a </answer>')
    if route == 'messages':
      self.assertEqual((answer['stop_reason'], answer['stop_sequence']), ('end_turn', None))

  def test_stop_string_in_thought_ends_no_turn(self):
    text = self.TURN.partition(' d')[0]
    self.assertEqual(self.text(place='after thoughts'), (text, 'stop', None))
    body = self.ask('completions', 'after thoughts')
    self.assertEqual(body['choices'][0]['text'], text)

  @parameterized.parameters(
      ({'stop': []}, TURN, None),
      ({'stop': 'b'}, '<think>a </answer> ', 'b'),
      ({'stop': ['b'], 'include_stop_str_in_output': True}, '<think>a </answer> b', 'b'),
  )
  def test_stop_of_client_wins(self, fields, text, reason):
    for place in self.servers:
      self.assertEqual(self.text(place=place, **fields), (text, 'stop', reason))

  def test_null_is_no_stop_of_client(self):
    self.assertEqual(self.text(stop=None, max_tokens=None)[0], '<think>a </answer>')

  def test_empty_stops_of_other_routes_win(self):
    self.assertEqual(self.ask('messages', stop_sequences=[])['content'][0]['text'], self.TURN)
    answer = self.ask('responses', stop=[])
    self.assertEqual(answer['output'][0]['content'][0]['text'], self.TURN)

  def test_stream_is_the_answer(self):
    body = {'messages': ASKED['messages'], 'stream': True}
    with scripted(self.TURN):
      chunks = events(post(self.servers['anywhere'], body, stream=True))
    choices = [choice for chunk in chunks for choice in chunk['choices']]
    text = ''.join(choice['delta'].get('content', '') for choice in choices)
    self.assertEqual(text, '<think>a </answer>')

  @absltest.skipIf(importlib.util.find_spec('llguidance') is None, 'llguidance is not installed')
  def test_forced_answer_may_hold_stop_string(self):
    text = '{"city": "</search>"}'
    schema = {'type': 'object', 'properties': {'city': {'type': 'string'}}, 'required': ['city']}
    form = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': schema}}
    for place in self.servers:
      self.assertEqual(self.text(place=place, turn=text, response_format=form)[0], text)

  @parameterized.parameters(
      ({}, 7), ({'max_tokens': 3}, 3), ({'max_tokens': 20}, 20), ({'max_completion_tokens': 9}, 9)
  )
  def test_limit_is_that_of_run_or_client(self, fields, count):
    body = {'messages': ASKED['messages'], 'ignore_eos': True, **fields}
    answer = post(self.servers['anywhere'], body).json()
    self.assertEqual(answer['usage']['completion_tokens'], count)
    self.assertEqual(answer['choices'][0]['finish_reason'], 'length')

  def test_sessions_have_no_default_end(self):
    service = self.servers['anywhere'].app.service
    session = service.open_session(jax.random.key(0), sessions.Sampling(max_turn=30))
    prefix = f'/s/{session.name}'
    self.assertEqual(self.text(prefix=prefix), (self.TURN, 'stop', None))
    request = self.request('anywhere', prefix)
    self.assertEqual((request.budget, request.stop, request.call_stop), (30, (), ()))

  def test_run_adds_no_stop_to_known_length(self):
    for place in self.servers:
      request = self.request(place, ignore_eos=True)
      self.assertEqual((request.budget, request.stop, request.call_stop), (7, (), ()))

  def request(self, place, prefix='', **fields):
    """The scheduler's request of a client's."""
    server = self.servers[place]
    submit = mock.Mock(side_effect=scheduler_lib.Busy('no'))
    with mock.patch.object(server.app.service.scheduler, 'submit', submit):
      body = {'messages': ASKED['messages'], **fields}
      post(server, body, f'{prefix}/v1/chat/completions')
    (request,) = submit.call_args.args[0]
    return request


class ExampleTest(parameterized.TestCase):
  """What a server takes from its run."""

  def read(self, config, tokenizer=None):
    return gateway._read_run(config, tokenizer or embedded()[0], StopSignal())

  def command(self, config, run, tokenizer=None, key=''):
    """Returns (words of the curl command, all text that is logged)."""
    with (
        mock.patch.dict(os.environ, {'STPPO_API_KEY': key}),
        self.assertLogs('absl', level='INFO') as logs,
    ):
      gateway._log_use(config, 'http://host:1', tokenizer or embedded()[0], run)
    text = '\n'.join(record.getMessage() for record in logs.records)
    return shlex.split(text[text.find('curl ') :]) if 'curl ' in text else [], text

  def test_command_has_prompt_of_run(self):
    config = embedded_config()
    config.env.prompt = 'short'
    config.rollout.max_turn = 40
    run = self.read(config)
    self.assertEqual(run.turn_end, stop_strings.TurnEnd(('</search>', '</answer>'), False, 40))
    words, text = self.command(config, run, key='secret')
    (message,) = json.loads(words[-1])['messages']
    self.assertRegex(message['content'], r'\AQuestion: .*\?\n\Z')
    self.assertEqual(words[2], 'http://host:1/v1/chat/completions')
    self.assertIn('Authorization: Bearer $STPPO_API_KEY', words)
    self.assertNotIn('secret', text)
    self.assertIn('the form of its environment', text)

  @parameterized.product(kind=('search', 'tools'), folder=('embedded', 'calculator'))
  def test_example_has_prompt_ids_of_run(self, kind, folder):
    config = embedded_config()
    config.env.kind = kind
    config.env.tools = ('calculator', 'search') if kind == 'tools' else ()
    if folder != 'embedded':
      config.model.folder = str(ROOT / 'examples' / folder / 'model')
    tokenizer = prepare.load_tokenizer(config)
    example = self.read(config, tokenizer).example
    template = template_lib.Template(
        tokenizer, 4096, tool_calls.form_name('auto', tokenizer.render)
    )
    body = api.ChatBody.model_validate(example)
    ids = template.encode(body.conversation_with(template.part_separator), body.offered_tools)
    parts = components.resolve(config)
    task = parts.held_out[0]
    prompt = stepping.reset(parts.env(task, 0), 0)
    self.assertEqual(ids, episode_lib.first_prompt(tokenizer, *prompt))

  def test_command_with_quotes_is_one_argument(self):
    config = embedded_config()
    content = 'It\'s "$HOME" `x` \\n\n\u00e9\U0001f600'
    messages_ = [{'role': 'user', 'content': content}]
    run = gateway._Run(stop_strings.TurnEnd(max_tokens=1), {'messages': messages_})
    words, _ = self.command(config, run)
    self.assertEqual(json.loads(words[-1])['messages'], messages_)

  @parameterized.parameters(False, True)
  def test_tools_are_shown_as_in_run(self, has_template):
    config = embedded_config()
    config.env.kind = 'tools'
    config.env.tools = ('calculator',)
    tokenizer = embedded()[0]
    if has_template:
      tokenizer = dataclasses.replace(tokenizer, render=mock.Mock())
    run = self.read(config, tokenizer)
    (message,) = run.example['messages']
    self.assertEqual('tools' in run.example, has_template)
    self.assertEqual('calculator' in message['content'], not has_template)

  @parameterized.parameters(
      ({'env.kind': 'gateway:tests.evaluation.chat_test:no_reward'}, 'writes them'),
      ({'env.kind': 'no_such_module:Env'}, 'no_such_module'),
      ({'data.source': 'no_such_file.jsonl'}, 'no_such_file'),
      ({'env.kind': 'tests.serving.gateway_test:FailingEnv'}, 'no board today'),
      ({'env.kind': 'tests.serving.gateway_test:LongEnv'}, 'too long'),
  )
  def test_model_is_served_without_example(self, settings, words):
    config = embedded_config()
    for path, value in settings.items():
      section, name = path.split('.')
      setattr(getattr(config, section), name, value)
    run = self.read(config)
    self.assertEqual(run.turn_end.max_tokens, config.rollout.max_turn)
    command, text = self.command(config, run)
    self.assertEqual(command, [])
    self.assertIn(words, text)


class FailingEnv:
  """An environment that fails."""

  uses_global_random = False
  message = ''

  def __init__(self, task):
    del task

  def reset(self, seed):
    if not self.message:
      raise OSError('no board today')
    return self.message, {}

  def step(self, action):
    return '', 0.0, True, False, {}


class LongEnv(FailingEnv):
  """An environment with a long prompt."""

  message = 'word ' * 10_000


class PaddedVocabularyTest(absltest.TestCase):
  """All Qwen models have more rows than their tokenizer has ids."""

  def test_sampled_padding_is_legal_in_next_prompt(self):
    tokenizer, params, _ = embedded()
    config = schema.Config(name='tiny')
    model = prepare.load_shape(config)
    size = model.vocab_size
    self.assertLessEqual(tokenizer.vocab_size, size)
    model = dataclasses.replace(model, dtype='float32', remat='none', scan_layers=False)
    model = dataclasses.replace(model, vocab_size=2 * size)
    double = lambda path, w: np.concatenate([w, w]) if 'embedding' in str(path).lower() else w
    params = jax.tree_util.tree_map_with_path(double, params)
    sampler = gateway.make_sampler(
        model, tokenizer, rows=2, max_total=64, chunks=(16,), slot_buckets=(64,)
    )
    scheduler = scheduler_lib.Scheduler(sampler, params, tokenizer.token_bytes, tokenizer.eos_ids)
    padding = size + 7
    with gateway.running(config, scheduler, tokenizer) as server:
      ask = lambda prompt: post(
          server, {'model': 'tiny', 'prompt': prompt, 'max_tokens': 1}, '/v1/completions'
      )
      self.assertEqual(ask([5, padding, 2 * size - 1]).status_code, 200)
      answer = ask([5, 2 * size])
      self.assertEqual(answer.status_code, 400)
      self.assertIn(f'the id {2 * size}, and the model has ids below {2 * size}', answer.text)


class LimitsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.server = cls.enterClassContext(running(tool_form='tags', hosts=('chat.example.org',)))

  def test_template_kwargs_must_be_those_of_server(self):
    own = {'enable_thinking': False}
    config = schema.Config()
    config.name = 'tiny'
    config.model.chat_template_kwargs = own
    tokenizer, _, _ = embedded()
    with gateway.running(config, make_scheduler(), tokenizer) as server:
      for given, status in ((own, 200), (None, 200), ({'enable_thinking': True}, 400)):
        answer = post(server, {**ASKED, 'chat_template_kwargs': given})
        self.assertEqual(answer.status_code, status, answer.text)

  def test_odd_arguments_of_calls_are_no_crash(self):
    call = lambda arguments: {
        'role': 'assistant',
        'content': '',
        'tool_calls': [{'function': {'name': 'search', 'arguments': arguments}}],
    }
    asked = lambda arguments: [*ASKED['messages'], call(arguments)]
    ask = lambda arguments: post(
        self.server, {**ASKED, 'messages': asked(arguments), 'tools': [SEARCH], 'max_tokens': 1}
    )
    for arguments in ('cats', '[1]', [1], 3, True):
      error = ask(arguments).json()['error']
      self.assertIn('function.arguments: a JSON object is needed', error['message'])
    counts = set()
    for arguments in ('', ' ', 'null', None, '{}', {}):
      answer = ask(arguments)
      self.assertEqual(answer.status_code, 200, answer.text)
      counts.add(answer.json()['usage']['prompt_tokens'])
    self.assertLen(counts, 1)
    for depth in range(600, 1100, 100):
      self.assertIn(ask('[' * depth + ']' * depth).status_code, (200, 400), depth)

  def test_key_is_required(self):
    with running(key='secret') as server:
      for headers, status in (
          ({}, 401),
          ({'Authorization': 'Bearer wrong'}, 401),
          ({'Authorization': 'Bearer secret'}, 200),
      ):
        self.assertEqual(post(server, ASKED, headers=headers).status_code, status)
        found = requests.get(server.url + '/metrics', headers=headers, timeout=60)
        self.assertEqual(found.status_code, status)
      self.assertEqual(requests.get(server.url + '/health', timeout=60).status_code, 200)

  def test_session_and_key_are_checked_before_body(self):
    """The id of an open session is a key."""
    with running(key='secret') as server:
      name = server.app.service.open_session(jax.random.key(0), sessions.Sampling()).name
      for path, body, status in (
          ('/s/unknown/v1/chat/completions', b'{', 404),
          ('/s/unknown/reward', b'{', 404),
          ('/s/unknown/reward', b'[' * (3 << 20), 404),
          (f'/s/{name}/reward', b'{', 400),
          (f'/s/{name}/reward', b'{"reward": NaN}', 400),
          (f'/s/{name}/reward', b'{"reward": "1"}', 400),
          (f'/s/{name}/reward', b'{"reward": 1, "turn": true}', 400),
          (f'/s/{name}/reward', b'{"reward": 1, "turn": 1}', 400),
          (f'/s/{name}/reward', b'{"reward": 1, "metrics": {"a b": 1}}', 400),
          (f'/s/{name}/reward', b'{"reward": 1, "metrics": {"a": 1}}', 200),
          ('/v1/chat/completions', b'{', 401),
      ):
        answer = requests.post(server.url + path, data=body, headers=JSON, timeout=60)
        self.assertEqual(answer.status_code, status, path)

  @parameterized.parameters(
      ({'Content-Type': 'text/plain'}, 415),
      ({'Content-Type': 'application/x-www-form-urlencoded'}, 415),
      ({'Content-Type': 'application/json', 'Content-Encoding': 'gzip'}, 415),
      ({'Content-Type': 'application/json', 'Content-Encoding': 'identity'}, 200),
      ({'Content-Type': 'application/json; charset=utf-8'}, 200),
      (JSON | {'Host': 'rebound.example'}, 403),
      (JSON | {'Host': 'localhost.rebound.example:8080'}, 403),
      (JSON | {'Host': 'LOCALHOST:1'}, 200),
      (JSON | {'Host': '[::1]:8080'}, 200),
      (JSON | {'Host': 'chat.example.org'}, 200),
  )
  def test_page_of_another_site_gets_no_answer(self, headers, status):
    """It can send forms and texts, and have its own name resolved to 127.0.0.1."""
    url = self.server.url + '/v1/chat/completions'
    body = json.dumps(ASKED | {'max_tokens': 1}).encode()
    answer = requests.post(url, data=body, headers=headers, timeout=60)
    self.assertEqual(answer.status_code, status, answer.text)
    if status != 200:
      self.assertEqual(set(answer.json()['error']), {'message', 'type', 'param', 'code'})

  def test_server_for_other_machines_has_any_name(self):
    with running(host='0.0.0.0') as server:
      answer = requests.get(server.url + '/health', headers={'Host': 'node7:8080'}, timeout=60)
      self.assertEqual(answer.status_code, 200)

  def test_connection_continues_after_errors(self):
    with running(key='secret', max_body_mb=1) as server:
      connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
      key = {'Authorization': 'Bearer secret', **JSON}
      with contextlib.closing(connection):
        for method, path, body, headers, expected in (
            ('GET', '/v1/models', None, {}, 401),
            ('POST', '/v1/completions', b' ' * (2 << 20), key, 413),
            ('POST', '/v1/completions', b' ' * 100, JSON, 401),
            ('GET', '/nowhere', None, key, 404),
            ('POST', '/v1/completions', None, key | {'Content-Length': '9' * 5000}, 400),
            ('HEAD', '/v1/models', None, key, 200),
            ('PUT', '/v1/models', b'', key, 405),
            ('PROPFIND', '/v1/models', b'', key, 405),
            ('GET', '/s/%ff/v1/models', None, key, 404),
            ('POST', '/v1/completions', b'{', key, 400),
        ):
          connection.request(method, path, body, headers)
          response = connection.getresponse()
          response.read()
          self.assertEqual(response.status, expected, path)
          connection.request('GET', '/v1/models', headers=key)
          response = connection.getresponse()
          self.assertEqual(response.status, 200)
          response.read()

  def test_waiting_prompts_are_bounded(self):
    with running(max_waiting=2) as server:
      answer = post(server, {**ASKED, 'n': 3})  # no later attempt could get them
      self.assertEqual(answer.status_code, 400)
      self.assertIn('at most 2', answer.json()['error']['message'])
      with (
          blocked_encoder(server.app.service) as goes_on,
          concurrent.futures.ThreadPoolExecutor(2) as pool,
      ):
        first = [pool.submit(post, server, ASKED) for _ in range(2)]
        wait_for(lambda: server.app.service._num_encoding == 2)
        answer = post(server, ASKED)
        goes_on.set()
        self.assertEqual([x.result().status_code for x in first], [200, 200])
      self.assertEqual(answer.status_code, 429)
      self.assertEqual(answer.json()['error']['type'], 'rate_limit_error')
      self.assertEqual(answer.headers['Retry-After'], '1')
      self.assertEqual(post(server, {**ASKED, 'n': 2}).status_code, 200)

  def test_prompt_of_disconnected_client_is_not_encoded(self):
    service, before = self.server.app.service, self.num_disconnected()
    with blocked_encoder(service) as goes_on:
      with mock.patch.object(service.template, 'encode', side_effect=AssertionError) as encode:
        with sent(self.server, ASKED):
          wait_for(lambda: service._num_encoding == 1)
        wait_for(lambda: self.num_disconnected() == before + 1)
        goes_on.set()
        wait_for(lambda: service._num_encoding == 0)
      encode.assert_not_called()
    self.assertEqual(post(self.server, ASKED).status_code, 200)

  def test_prompts_after_one_too_long_are_not_encoded(self):
    template = self.server.app.service.template
    with mock.patch.object(template, 'encode_prompt', wraps=template.encode_prompt) as encode:
      answer = post(self.server, {'prompt': ['x ' * 1000] * 100}, '/v1/completions')
    self.assertEqual(answer.json()['error']['code'], 'context_length_exceeded')
    self.assertEqual(encode.call_count, 1)

  def test_disconnected_client_frees_its_row(self):
    decoded, scheduler = threading.Event(), self.server.app.service.scheduler
    decode, before = scheduler._decode, scheduler.counts.sampled_tokens

    def slow_decode():
      decoded.set()
      time.sleep(0.1)
      decode()

    with mock.patch.object(scheduler, '_decode', slow_decode):
      with sent(self.server, {**ASKED, 'temperature': 0, 'n': 8, 'max_tokens': 200}):
        self.assertTrue(decoded.wait(60))
      wait_for(lambda: not scheduler.running)
    self.assertLess(scheduler.counts.sampled_tokens - before, 8 * 100)
    self.assertEqual(post(self.server, ASKED).status_code, 200)

  def num_disconnected(self):
    text = requests.get(self.server.url + '/metrics', timeout=60).text
    return sum(map(float, re.findall(r'requests_total{status="499"} (\S+)', text)))

  @parameterized.parameters(
      ({'prompt': ['a b c'] * 9, 'echo': True, 'logprobs': 1, 'max_tokens': 0}, True),
      ({'prompt': ['a b c'] * 9, 'echo': True, 'logprobs': 1, 'max_tokens': 0}, False),
      ({**ASKED, 'logprobs': True, 'top_logprobs': 5, 'n': 6, 'max_tokens': 2}, True),
  )
  def test_client_leaves_while_its_prompt_is_scored(self, fields, is_running):
    """The next client gets its answer, whether the call was running or waiting."""
    path = '/v1/completions' if 'prompt' in fields else '/v1/chat/completions'
    scheduler = self.server.app.service.scheduler
    score, has_begun, goes_on = scheduler._score, threading.Event(), threading.Event()

    def slow_score(ids):
      has_begun.set()
      goes_on.wait(60)
      return score(ids)

    before = self.num_disconnected()
    with mock.patch.object(scheduler, '_score', slow_score):
      if not is_running:
        scheduler.control('score', [[5, 6]])
        self.assertTrue(has_begun.wait(60))
      with sent(self.server, fields, path):
        if is_running:
          self.assertTrue(has_begun.wait(60))
        else:
          wait_for(lambda: len(scheduler._calls) == 2)
      wait_for(lambda: self.num_disconnected() == before + 1)
      goes_on.set()
    self.assertEqual(post(self.server, {**fields, 'n': 1}, path).status_code, 200)
    self.assertTrue(scheduler.is_alive)

  def test_failed_engine_is_an_error_and_unhealthy(self):
    with self.assertLogs(level='ERROR'), running() as server:
      server.app.service.scheduler._decode = lambda: 1 / 0
      self.assertEqual(post(server, ASKED).status_code, 500)
      self.assertEqual(requests.get(server.url + '/health', timeout=60).status_code, 503)
      self.assertEqual(post(server, ASKED).status_code, 503)

  def test_taken_port_is_one_line(self):
    with running() as server, self.assertRaisesRegex(types.UserError, f'--port={server.port}'):
      with running(port=server.port):
        pass

  @parameterized.parameters('h' * 80, 'a..b')
  def test_wrong_host_is_one_line(self, host):
    with self.assertRaisesRegex(types.UserError, '^[^\n]*config.serve.host=[^\n]* another one$'):
      with running(host=host):
        pass


class ControlTest(parameterized.TestCase):
  """A trainer pauses the server and replaces its weights, as it does with vLLM."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.root = cls.folder / 'weights'
    config = embedded_config()
    config.serve.weights_folder = str(cls.root)
    model, params = prepare.load_policy(config)
    enlarged = jax.tree.map(lambda w: 1.1 * w, params)
    for path, weights in (
        (cls.root / 'old', params),
        (cls.root / 'new', enlarged),
        (cls.folder / 'outside', enlarged),
    ):
      convert.save_hf(path, model, weights)
    wide = dataclasses.replace(model, d_ff=2 * model.d_ff)
    key = jax.random.key(0)
    convert.save_hf(cls.root / 'wide', wide, jax.jit(decoder.init, static_argnums=1)(key, wide))
    turned = dataclasses.replace(model, rope_theta=3.0)
    convert.save_hf(cls.root / 'turned', turned, params)
    (cls.root / 'link').symlink_to(cls.folder / 'outside')
    (cls.root / 'empty').mkdir()
    (cls.root / 'linked_file').mkdir()
    for path in (cls.folder / 'outside').iterdir():
      (cls.root / 'linked_file' / path.name).symlink_to(path)
    shutil.copytree(cls.root / 'new', cls.root / 'listed')
    (cls.root / 'listed' / 'model.safetensors').unlink()
    index = {'weight_map': {'w': '../../outside/model.safetensors'}}
    index_path = cls.root / 'listed' / 'model.safetensors.index.json'
    index_path.write_text(json.dumps(index), encoding='utf-8')
    shutil.copytree(cls.root / 'new', cls.root / 'broken')
    (cls.root / 'broken' / 'model.safetensors').write_bytes(b'no safetensors')
    load_params = functools.partial(gateway._load_params, config, model)
    cls.server = cls.enterClassContext(running(load_params=load_params))
    cls.prompt = embedded()[0].encode(QUESTION)

  def control(self, path, status=200, **fields):
    answer = post(self.server, fields, path)
    self.assertEqual(answer.status_code, status, answer.text)
    return answer.json()

  def reload(self, folder, status=200):
    kwargs = {'weights_path': str(folder)}
    return self.control('/collective_rpc', status, method='reload_weights', kwargs=kwargs)

  def complete(self, **fields):
    """Returns (token ids, log-probs) of an answer to ids."""
    asked = dict(prompt=self.prompt, max_tokens=16, logprobs=0, return_token_ids=True)
    (choice,) = self.control('/v1/completions', **asked | {'temperature': 0} | fields)['choices']
    return choice['token_ids'], choice['logprobs']['token_logprobs']

  @parameterized.parameters(
      (api.TextBody, {'prompt': [-1] * 1000}),
      (api.TextBody, {'prompt': [1], 'stop_token_ids': [-1] * 1000}),
      (api.ChatBody, {'messages': [{'role': 'user', 'content': [{'type': 'text'}] * 1000}]}),
      (messages.MessagesBody, {'messages': [{'role': 'user', 'content': [{}] * 1000}]}),
      (responses_lib.ResponsesBody, {'input': 'q', 'include': [1] * 1000}),
  )
  def test_errors_of_a_body_are_few(self, kind, fields):
    """Each error is a dict of Python, and the event loop makes all of them."""
    with self.assertRaises(pydantic.ValidationError) as caught:
      kind.model_validate({'model': 'tiny', 'max_tokens': 1} | fields)
    self.assertLess(caught.exception.error_count(), 20)

  def test_reload_changes_logprobs_and_back(self):
    """The first weights are on one device and reloaded ones on all, which changes last digits."""
    before, logp_before = self.complete()
    for folder in ('new', 'old'):
      self.assertEqual(self.control('/pause?mode=keep'), {'status': 'paused'})
      self.assertEqual(self.reload(self.root / folder), {'results': [None]})
      self.assertEqual(self.control('/reset_prefix_cache'), {'success': True})
      self.control('/update_weight_version', new_version=folder)
      self.assertEqual(self.control('/resume'), {'status': 'resumed'})
      info = requests.get(self.server.url + '/weight_info', timeout=60).json()
      self.assertEqual(info, {'weight_version': folder})
      after, logp = self.complete()
      is_old = after == before and np.allclose(logp, logp_before, rtol=0, atol=1e-6)
      self.assertEqual(is_old, folder == 'old')

  def test_kept_request_continues_with_new_weights(self):
    """Its tokens before the pause are of the old weights, and all later ones of the new."""
    fields = dict(max_tokens=24, temperature=1.0, seed=1, ignore_eos=True)
    service = self.server.app.service
    pause = threading.Event()
    decode = service.scheduler._decode
    calls = []

    def pausing_decode():
      decode()
      calls.append(None)
      if len(calls) == 1:
        pause.set()
        wait_for(lambda: service.scheduler._calls)

    with mock.patch.object(service.scheduler, '_decode', pausing_decode):
      with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(self.complete, **fields)
        self.assertTrue(pause.wait(60))
        self.control('/pause?mode=keep')
        self.assertFalse(answer.done())
        self.reload(self.root / 'new')
        self.control('/resume')
        tokens, logp = answer.result()
    num_old = gateway.STEPS
    num_new = len(tokens) - num_old
    whole = self.complete(
        **fields | {'prompt': self.prompt + tokens[:num_old], 'max_tokens': num_new}
    )
    self.assertEqual(whole[0], tokens[num_old:])
    np.testing.assert_allclose(whole[1], logp[num_old:], atol=1e-5)
    self.reload(self.root / 'old')
    old = self.complete(**fields)
    self.assertEqual(old[0][:num_old], tokens[:num_old])
    np.testing.assert_allclose(old[1][:num_old], logp[:num_old], atol=1e-5)
    self.assertGreater(np.abs(np.subtract(old[1], logp)).max(), 1e-3)

  def decode_after_calls(self, num_calls):
    """Each of the next decode calls waits for a call of another thread."""
    scheduler = self.server.app.service.scheduler
    decode = scheduler._decode
    waits = iter(range(num_calls))

    def waiting_decode():
      if next(waits, None) is not None:
        wait_for(lambda: scheduler._calls)
      decode()

    return mock.patch.object(scheduler, '_decode', waiting_decode)

  def test_waiting_pause_ends_after_running_requests(self):
    with concurrent.futures.ThreadPoolExecutor(2) as pool, self.decode_after_calls(1):
      running_answer = pool.submit(self.complete, max_tokens=40, ignore_eos=True)
      wait_for(lambda: self.server.app.service.scheduler.running)
      self.control('/pause?mode=wait')
      self.assertEqual(self.server.app.service.scheduler.running, 0)
      late = pool.submit(self.complete)
      self.assertLen(running_answer.result()[0], 40)
      wait_for(lambda: self.server.app.service.scheduler.waiting)
      self.assertFalse(late.done())
      self.control('/resume')
      late.result()

  def test_wrong_folder_is_rejected_and_weights_stay(self):
    before = self.complete()
    for name, reason in (
        ('outside', 'must be a folder in'),
        ('weights/link', 'must be a folder in'),
        ('weights/../outside', 'must be a folder in'),
        ('weights/linked_file', 'and so must its files'),
        ('weights/listed', 'names of files in its folder'),
        ('weights/broken', 'eader'),
        ('weights/\0', 'null'),
        ('weights', 'and so must its files'),  # it has a link that leads out
        ('weights/empty', 'config.json'),
        ('weights/wide', 'not that of the served model'),
        ('weights/turned', 'not that of the served model'),
    ):
      error = self.reload(f'{self.folder}/{name}', 400)['error']
      self.assertIn(reason, error['message'])
      self.assertNotIn('\n', error['message'])
    self.assertEqual(self.complete(), before)

  @parameterized.parameters(
      ('/pause', {}),
      ('/pause?mode=abort', {}),
      ('/collective_rpc', {'method': 'save_sharded_state', 'kwargs': {'weights_path': '/'}}),
      ('/collective_rpc', {'method': 'reload_weights', 'kwargs': {}}),
      ('/collective_rpc', {'method': 'reload_weights', 'args': ['/']}),
      ('/update_weight_version', {'new_version': 3}),
  )
  def test_wrong_control_request_is_rejected(self, path, fields):
    self.assertIn('message', self.control(path, 400, **fields)['error'])

  def test_routes_need_setting_and_key(self):
    paths = ('/pause?mode=keep', '/resume', '/reset_prefix_cache', '/collective_rpc')
    with running() as server:
      for path in paths:
        self.assertEqual(post(server, {}, path).status_code, 404)
    with running(key='secret', load_params=lambda folder: None) as server:
      for path in paths:
        self.assertEqual(post(server, {}, path).status_code, 401)

  def test_folder_that_does_not_exist_may_appear(self):
    error = self.reload(self.root / 'none', 503)['error']
    self.assertIn('no such folder yet', error['message'])

  def test_another_pause_ends_waiting_pause(self):
    scheduler = self.server.app.service.scheduler
    with concurrent.futures.ThreadPoolExecutor(2) as pool, self.decode_after_calls(2):
      answer = pool.submit(self.complete, max_tokens=40, ignore_eos=True)
      wait_for(lambda: scheduler.running)
      pause = pool.submit(self.control, '/pause?mode=wait', 409)
      wait_for(lambda: scheduler.drains)
      self.control('/pause?mode=keep')
      self.assertIn('another client', pause.result()['error']['message'])
      self.control('/resume')
      self.assertLen(answer.result()[0], 40)

  def test_failure_of_scheduler_ends_all_calls(self):
    with running(load_params=lambda folder: {}) as server:  # {} cannot be copied
      scheduler = server.app.service.scheduler
      with scheduler._changed:
        reload = scheduler.control('reload', 'folder')
        pause = scheduler.control('pause', False)
      for call in (reload, pause):
        with self.assertRaises(scheduler_lib.Busy):
          call.result(60)
      with self.assertRaises(types.RunError):
        scheduler.wait(60)

  @parameterized.parameters(('0.0.0.0', '', False), ('0.0.0.0', 'key', True), ('::1', '', True))
  def test_open_control_routes_need_key(self, host, key, starts):
    config = schema.Config()
    config.serve.weights_folder = str(self.root)
    config.serve.host = host
    load = mock.Mock(side_effect=InterruptedError)  # stands for a start
    error = InterruptedError if starts else types.UserError
    with mock.patch.dict(os.environ, {'STPPO_API_KEY': key}), self.assertRaises(error):
      gateway.serve(config, load, 0, StopSignal(lambda: True))

  def test_closed_server_ends_pause(self):
    with running(load_params=lambda folder: None) as server:
      post(server, {}, '/pause?mode=keep')
      scheduler = server.app.service.scheduler
    with self.assertRaises(scheduler_lib.Busy):
      scheduler.control('resume')


class CommandTest(absltest.TestCase):

  def start(self, *arguments, devices=1):
    command = [sys.executable, 'run.py', '--mode=serve', '--port=0', '--config.serve.rows=4']
    command += ['--config.serve.max_total=128', '--config=experiments/st_ppo_tiny.py']
    command += [f'--workdir={self.workdir}', *arguments]
    flag = f'--xla_force_host_platform_device_count={devices}'
    env = os.environ | {'XLA_FLAGS': flag}
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)
    self.enterContext(process)
    self.addCleanup(process.kill)
    return process

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())

  def address(self, process):
    return next(found[0] for line in process.stderr if (found := re.findall(r'http\S+', line)))

  def test_mode_serve_serves_until_sigterm(self):
    process = self.start()
    url = self.address(process)
    command = next(line for line in process.stderr if 'curl ' in line)
    *_, asked_url, _, header, _, body = shlex.split(command[command.find('curl ') :])
    self.assertEqual(asked_url, url + '/chat/completions')
    headers = dict([header.split(': ')])
    answer = requests.post(asked_url, body, headers=headers, timeout=120)
    self.assertEqual(answer.status_code, 200, answer.text)
    self.assertLessEqual(answer.json()['usage']['completion_tokens'], 40)
    process.terminate()
    self.assertEqual(process.wait(60), 0)

  @pytest.mark.slow
  def test_two_processes_of_two_devices_serve_as_one(self):
    """Of one device they give the same tokens and log-probs, and they load the same weights."""
    config = schema.Config()
    model, params = prepare.load_policy(config)
    folder = os.path.join(self.workdir, 'weights', 'new')
    convert.save_hf(folder, model, jax.tree.map(lambda w: 1.1 * w, params))
    setting = f'--config.serve.weights_folder={self.workdir}/weights'
    with socket.socket() as probe:
      probe.bind(('localhost', 0))
      flags = [f'--coordinator=localhost:{probe.getsockname()[1]}', '--num_processes=2']
    flags += ['--config.mesh.fsdp=-1', setting]
    two = [self.start(*flags, f'--process_id={i}', devices=2) for i in range(2)]
    one = self.start(setting)
    urls = [self.address(process).removesuffix('/v1') for process in (two[0], one)]
    prompts = [embedded()[0].encode(f'{QUESTION}{"Who? " * i}') for i in range(6)]
    asked = dict(prompt=prompts, max_tokens=20, logprobs=1, return_token_ids=True, seed=5)

    def control(path, **fields):
      answers = [requests.post(url + path, json=fields, timeout=300) for url in urls]
      self.assertEqual([answer.status_code for answer in answers], [200, 200], answers[0].text)
      return [answer.json().get('choices') for answer in answers]

    results = []
    for _ in range(2):
      choices, expected = control('/v1/completions', **asked, stop=['</search>'])
      for choice, other in zip(choices, expected, strict=True):
        self.assertEqual(choice['token_ids'], other['token_ids'])
        np.testing.assert_allclose(
            choice['logprobs']['token_logprobs'], other['logprobs']['token_logprobs'], atol=1e-4
        )
      results.append([choice['logprobs']['token_logprobs'] for choice in choices])
      control('/pause?mode=keep')
      kwargs = {'weights_path': folder}
      control('/collective_rpc', method='reload_weights', kwargs=kwargs)
      control('/resume')
    self.assertNotEqual(*results)
    kwargs = {'weights_path': os.path.join(self.workdir, 'weights', 'none')}
    fields = {'method': 'reload_weights', 'kwargs': kwargs}
    answer = requests.post(urls[0] + '/collective_rpc', json=fields, timeout=60)
    self.assertEqual(answer.status_code, 503)  # the folder may still appear
    two[0].terminate()
    self.assertEqual([process.wait(60) for process in two], [0, 0])


if __name__ == '__main__':
  absltest.main()
