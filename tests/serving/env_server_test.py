"""The environment server: its messages, limits and hostile clients. Skipped without websockets."""

import contextlib
import importlib.util
import json
import os
import random
import socket as network
import subprocess
import sys
import threading
import time
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest
import requests

from stppo_jax import config as schema
from stppo_jax.assembly import components
from stppo_jax.envs import factory as factory_lib
from stppo_jax.envs import guard
from stppo_jax.envs import served
from stppo_jax.envs import stepping
from stppo_jax.envs.adapters import openenv_servers
from stppo_jax.net import http_server
from stppo_jax.serving import env_server
from stppo_jax.settings import validation
from stppo_jax.types import RunError
from stppo_jax.types import Task
from stppo_jax.types import UserError

pytestmark = pytest.mark.guests(
    what='OpenEnv clients',
    version='openenv==0.10.0 websockets==17.4',
    date='2026-11-28',
    touches='serving/env_server.py envs/served.py net/http_server.py',
)

HAS_WEBSOCKETS = importlib.util.find_spec('websockets') is not None
if HAS_WEBSOCKETS:
  from websockets import exceptions
  from websockets.sync import client

needs_websockets = unittest.skipUnless(HAS_WEBSOCKETS, 'websockets is not installed')
RELEASED = threading.Event()  # ends the steps 'wait'
ENTERED = threading.Event()  # a step 'wait' has begun
DROPPED = threading.Event()  # an environment was dropped


class Words:
  """An environment whose action names what it does."""

  stop_strings = ('.', '!')
  frame = 'user'
  core_metrics = ('won',)
  uses_global_random = False

  def __init__(self, task, bonus=0.0):
    self.task = task
    self.bonus = bonus
    self.left = 6

  def reset(self, seed=None):
    if self.task.question == 'raise':
      raise ValueError('no start')
    self.random = random.Random(seed)
    return f'{self.task.question} \u00e9\u4e16 {self.random.random()}', {'suffix': 'go'}

  def step(self, action):
    self.left -= 1
    if action == 'wait':
      ENTERED.set()
      RELEASED.wait(30)
    if action == 'raise':
      raise ValueError('broken')
    if action == 'stop the run':
      raise UserError('the key is wrong')
    if action == 'end the run':
      raise RunError('the retriever is gone')
    reward = {
        'numpy': np.float32(0.1),
        'nan': float('nan'),
        'array': np.zeros(2),
        'none': None,
    }.get(action, 0.1 + 0.2 + self.bonus)
    info = {'metrics': {'won': np.int64(self.left), 'third': 1 / 3}, 'action': action}
    if action == 'set':
      info['passage_ids'] = {1}
    if action == 'keys':
      info['passage_ids'] = {1: 2}
    if action == 'bytes':
      info['passage_ids'] = b'x'
    text = f'{action} {self.random.random()}'
    return text, reward, action == 'win', self.left == 0, info

  def __del__(self):
    DROPPED.set()


class Draws:
  """An environment of the global random generators, with two roles."""

  roles = ('asks', 'answers')

  def __init__(self, task):
    self.turns = 0

  def reset(self, seed=None):
    return f'{random.random()} {np.random.rand()}', {'role': 'asks'}

  def step(self, action):
    self.turns += 1
    role = Draws.roles[self.turns % 2]
    rewards = {'answers': random.random()}
    info = {'role': role, 'rewards': rewards, 'role_metrics': {'asks': {'x': np.random.rand()}}}
    return f'{random.random()}', np.random.rand(), False, self.turns == 4, info


class OwnTasks(Words):
  """An environment with tasks of its own."""

  @staticmethod
  def load_tasks(split):
    options = (('A', 'one'), ('B', 'two'))
    return [Task('t', 'q', ('a', 'b'), split=split, options=options, letter='A', seed=3)]


@contextlib.contextmanager
def serving(env_class=Words, api_key='', options=None, port=0, **limits):
  factory = factory_lib.make_factory('tests:Env', env_class, {}, options or {})
  description = served.Description.of_factory('tests:Env', factory, {'options': options or {}})
  defaults = {'max_body_bytes': 1 << 16, 'grace_s': 1.0, 'max_sessions': 4, 'call_s': 20.0}
  app = env_server.EnvApp(
      factory, description, env_server.SessionLimits(**defaults | limits), api_key
  )
  with http_server.Server(app, port=port) as server:
    yield server


def connect(server, path='/ws', **arguments):
  return client.connect(server.url.replace('http', 'ws') + path, proxy=None, **arguments)


def ask(socket, kind, data=None, timeout=20):
  message = {'type': kind} if data is None else {'type': kind, 'data': data}
  socket.send(json.dumps(message))
  return json.loads(socket.recv(timeout=timeout))


def wait_for(condition):
  for _ in range(400):
    if condition():
      return
    time.sleep(0.05)
  raise AssertionError('it does not happen')


class ServerTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    for event in (RELEASED, ENTERED, DROPPED):
      event.clear()
    self.addCleanup(RELEASED.set)

  def start(self, *args, **kwargs):
    return self.enterContext(serving(*args, **kwargs))

  def open(self, server, **arguments):
    return self.enterContext(connect(server, **arguments))

  def assert_works(self, server):
    """A new client plays."""
    with connect(server) as socket:
      self.assertEqual(ask(socket, 'reset', {'seed': 1})['type'], 'observation')
      self.assertEqual(ask(socket, 'step', {'text': 'x'})['type'], 'observation')

  def assert_error(self, answer, code, words='.'):
    self.assertEqual((answer['type'], answer['data']['code']), ('error', code), answer)
    self.assertRegex(json.dumps(answer), words)
    self.assertNotIn('\n', answer['data']['message'])


@needs_websockets
class EnvServerTest(ServerTestCase):

  def test_episode_has_the_messages_of_openenv(self):
    socket = self.open(self.start(options={'bonus': 1.0}))
    self.assertEqual(ask(socket, 'state')['data'], {'episode_id': None, 'step_count': 0})
    task = {'id': 't', 'question': 'Who?'}
    answer = ask(socket, 'reset', {'seed': 1, 'episode_id': 'e', 'task': task})
    number = random.Random(1)
    observation = {'terminated': False, 'truncated': False}
    first = {'text': f'Who? \u00e9\u4e16 {number.random()}', 'info': {'suffix': 'go'}}
    self.assertEqual(
        answer,
        {
            'type': 'observation',
            'data': {'observation': observation | first, 'reward': None, 'done': False},
        },
    )
    answer = ask(socket, 'step', {'text': 'win', 'metadata': {}})
    info = {'metrics': {'won': 5, 'third': 1 / 3}, 'action': 'win'}
    second = {'text': f'win {number.random()}', 'terminated': True, 'truncated': False}
    self.assertEqual(
        answer['data'],
        {'observation': second | {'info': info}, 'reward': 0.1 + 0.2 + 1.0, 'done': True},
    )
    self.assertEqual(ask(socket, 'state')['data'], {'episode_id': 'e', 'step_count': 1})
    self.assert_error(ask(socket, 'step', {'text': 'x'}), 'EXECUTION_ERROR', 'send reset')
    self.assertEqual(ask(socket, 'reset', {'seed': 1, 'task': task})['data']['done'], False)
    socket.send('{"type": "close"}')
    with self.assertRaises(exceptions.ConnectionClosedOK):
      socket.recv(timeout=20)

  def test_sessions_are_separate(self):
    server = self.start()
    one, two = self.open(server), self.open(server)
    first = ask(one, 'reset', {'seed': 1})
    ask(two, 'reset', {'seed': 2})
    ask(one, 'step', {'text': 'win'})
    self.assertEqual(
        ask(two, 'step', {'text': 'x'})['data']['observation']['info']['metrics']['won'], 5
    )
    self.assertEqual(ask(two, 'reset', {'seed': 1}), first)
    self.assertNotEqual(ask(two, 'reset'), ask(two, 'reset'))

  def test_slow_step_does_not_stop_others(self):
    server = self.start()
    slow = self.open(server)
    ask(slow, 'reset')
    slow.send('{"type": "step", "data": {"text": "wait"}}')
    self.assertTrue(ENTERED.wait(20))
    self.assert_works(server)
    self.assertFalse(RELEASED.is_set())
    RELEASED.set()
    self.assertStartsWith(json.loads(slow.recv(timeout=20))['data']['observation']['text'], 'wait')

  @parameterized.parameters(
      ('raise', 'Words raised ValueError: broken .*env_server_test'),
      ('stop the run', 'the key is wrong'),
      ('end the run', 'the retriever is gone'),
      ('nan', 'the reward is nan'),
      ('array', 'the reward is array'),
      ('set', r"observation\['info'\]\['passage_ids'\] is \{1\}"),
      ('keys', r"observation\['info'\]\['passage_ids'\] is \{1: 2\}"),
      ('bytes', r"observation\['info'\]\['passage_ids'\] is b'x'"),
  )
  def test_failed_step_is_an_error_message(self, action, words):
    server = self.start()
    socket = self.open(server)
    ask(socket, 'reset')
    self.assert_error(ask(socket, 'step', {'text': action}), 'EXECUTION_ERROR')
    ask(socket, 'reset')
    message = ask(socket, 'step', {'text': action})['data']['message']
    self.assertRegex(message, words)
    self.assert_error(ask(socket, 'step', {'text': 'x'}), 'EXECUTION_ERROR', 'send reset')
    self.assertEqual(ask(socket, 'reset')['type'], 'observation')

  def test_failed_reset_is_an_error_message(self):
    socket = self.open(self.start())
    task = {'id': 't', 'question': 'raise'}
    self.assert_error(ask(socket, 'reset', {'task': task}), 'EXECUTION_ERROR', 'no start')
    self.assertEqual(ask(socket, 'reset')['type'], 'observation')

  def test_call_has_a_time_limit(self):
    server = self.start(call_s=1.0)
    socket = self.open(server)
    ask(socket, 'reset')
    self.assert_error(ask(socket, 'step', {'text': 'wait'}), 'EXECUTION_ERROR', 'within 1 s')
    self.assert_works(server)

  def test_stop_ends_sessions_at_once(self):
    with serving(call_s=300.0) as server:
      socket = self.open(server)
      ask(socket, 'reset')
      socket.send('{"type": "step", "data": {"text": "wait"}}')
      self.assertTrue(ENTERED.wait(20))
    with self.assertRaises(exceptions.ConnectionClosed):
      socket.recv(timeout=20)
    thread = threading.Thread(target=server.app._pool.shutdown, daemon=True)
    thread.start()
    thread.join(20)
    self.assertFalse(thread.is_alive())
    self.assertFalse(RELEASED.is_set())

  def test_class_is_described(self):
    with serving(OwnTasks, api_key='k', options={'bonus': 1.0}) as server:
      key = {'Authorization': 'Bearer k'}
      fields = requests.get(server.url + '/environment', headers=key, timeout=20).json()
      description = served.Description.from_dict(fields)
      self.assertTrue(description.has_tasks)
      self.assertEqual(description.stop_strings, ('.', '!'))
      self.assertEqual((description.frame, description.core_metrics), ('user', ('won',)))
      with connect(server, additional_headers=key) as socket:
        self.assertEqual(socket.response.headers[served.HEADER], description.digest)
      rows = requests.get(server.url + '/tasks?split=dev', headers=key, timeout=20).json()
      self.assertEqual([served.read_task(row) for row in rows], OwnTasks.load_tasks('dev'))
    with serving(OwnTasks) as server:
      fields = requests.get(server.url + '/environment', timeout=20).json()
      self.assertNotEqual(served.Description.from_dict(fields).digest, description.digest)
    with serving() as server:
      self.assertEqual(requests.get(server.url + '/tasks', timeout=20).status_code, 404)


@needs_websockets
class HostileClientTest(ServerTestCase):

  @parameterized.parameters(
      ('{', 'INVALID_JSON'),
      ('', 'INVALID_JSON'),
      ('[1]', 'INVALID_JSON'),
      ('null', 'INVALID_JSON'),
      ('[' * 30_000, 'INVALID_JSON'),
      (b'{"type": "state"}', 'INVALID_JSON'),
      ('{"type": "steal"}', 'UNKNOWN_TYPE'),
      ('{"type": "observation"}', 'UNKNOWN_TYPE'),
      ('{"type": 1}', 'VALIDATION_ERROR'),
      ('{}', 'VALIDATION_ERROR'),
      ('{"type": "step"}', 'VALIDATION_ERROR'),
      ('{"type": "step", "data": []}', 'VALIDATION_ERROR'),
      ('{"type": "step", "data": {"text": 1}}', 'VALIDATION_ERROR'),
      ('{"type": "step", "data": {"text": "x", "y": 1}}', 'VALIDATION_ERROR'),
      ('{"type": "step", "data": {"text": "x"}, "z": 1}', 'VALIDATION_ERROR'),
      ('{"type": "reset", "data": {"seed": -1}}', 'VALIDATION_ERROR'),
      ('{"type": "reset", "data": {"seed": true}}', 'VALIDATION_ERROR'),
      ('{"type": "reset", "data": {"seed": 1.5}}', 'VALIDATION_ERROR'),
      ('{"type": "reset", "data": {"seed": NaN}}', 'VALIDATION_ERROR'),
      ('{"type": "reset", "data": {"difficulty": 1}}', 'VALIDATION_ERROR'),
      ('{"type": "reset", "data": {"task": {}}}', 'VALIDATION_ERROR'),
      ('{"type": "reset", "data": {"task": {"id": 1}}}', 'VALIDATION_ERROR'),
      ('{"type": "reset", "data": {"task": {"id": "t", "answers": "a"}}}', 'VALIDATION_ERROR'),
      ('{"type": "reset", "data": {"task": {"id": "t", "steps": [["a"]]}}}', 'VALIDATION_ERROR'),
      ('{"type": "reset", "data": {"task": {"id": "t", "x": 1}}}', 'VALIDATION_ERROR'),
      ('{"type": "step", "data": {"text": "before reset"}}', 'EXECUTION_ERROR'),
  )
  def test_bad_message_is_an_error_message(self, text, code):
    server = self.start()
    socket = self.open(server)
    socket.send(text)
    self.assert_error(json.loads(socket.recv(timeout=20)), code)
    self.assertEqual(ask(socket, 'reset')['type'], 'observation')

  def test_half_a_character_is_replaced(self):
    socket = self.open(self.start())
    ask(socket, 'reset')
    socket.send('{"type": "step", "data": {"text": "\\ud800"}}')
    self.assertStartsWith(json.loads(socket.recv(timeout=20))['data']['observation']['text'], '?')

  def test_large_message_ends_its_session(self):
    server = self.start()
    socket = self.open(server)
    with self.assertRaises(exceptions.ConnectionClosedError) as caught:
      socket.send('{"type": "step", "data": {"text": "%s"}}' % ('x' * (1 << 17)))
      socket.recv(timeout=20)
    self.assertEqual(caught.exception.rcvd.code, 1009)
    wait_for(lambda: server.app.num_sessions == 0)
    self.assert_works(server)

  def test_large_message_in_parts_ends_its_session(self):
    server = self.start()
    socket = self.open(server)
    with self.assertRaises(exceptions.ConnectionClosedError) as caught:
      socket.send('x' * 1000 for _ in range(100))
      socket.recv(timeout=20)
    self.assertEqual(caught.exception.rcvd.code, 1009)
    wait_for(lambda: server.app.num_sessions == 0)

  def test_client_that_leaves_frees_its_session(self):
    server = self.start(max_sessions=1)
    socket = self.open(server)
    ask(socket, 'reset')
    DROPPED.clear()
    socket.send('{"type": "step", "data": {"text": "wait"}}')
    self.assertTrue(ENTERED.wait(20))
    socket.socket.close()
    self.assertEqual(server.app.num_sessions, 1)  # its call is still running
    RELEASED.set()
    wait_for(lambda: server.app.num_sessions == 0)
    self.assertTrue(DROPPED.wait(20))
    self.assert_works(server)

  def test_client_that_does_not_read_loses_its_session(self):
    server = self.start(idle_s=1.0)
    socket = self.open(server, max_queue=1)
    ask(socket, 'reset')
    message = json.dumps({'type': 'step', 'data': {'text': 'x' * 60_000}})

    def send_all():
      with contextlib.suppress(exceptions.ConnectionClosed):
        for _ in range(1000):
          socket.send('{"type": "reset"}')
          socket.send(message)

    sender = threading.Thread(target=send_all, daemon=True)
    sender.start()
    try:
      wait_for(lambda: server.app.num_sessions == 0)
      self.assert_works(server)
    finally:
      socket.socket.shutdown(network.SHUT_RDWR)  # ends a call that sends

  def test_session_too_many_is_refused(self):
    server = self.start(max_sessions=2)
    sockets = [self.open(server) for _ in range(2)]
    for socket in sockets:
      ask(socket, 'reset')
    late = self.open(server)
    answer = json.loads(late.recv(timeout=20))
    self.assert_error(answer, 'CAPACITY_REACHED', 'has 2 sessions.*--sessions')
    with self.assertRaises(exceptions.ConnectionClosed):
      late.recv(timeout=20)
    sockets[0].close()
    wait_for(lambda: server.app.num_sessions == 1)
    self.assert_works(server)

  def test_idle_session_ends(self):
    server = self.start(idle_s=0.3)
    socket = self.open(server)
    self.assert_error(json.loads(socket.recv(timeout=20)), 'SESSION_ERROR', 'no message within')
    with self.assertRaises(exceptions.ConnectionClosed):
      socket.recv(timeout=20)
    wait_for(lambda: server.app.num_sessions == 0)

  @parameterized.parameters(
      ({}, 401),
      ({'Authorization': 'Bearer wrong'}, 401),
      ({'Authorization': 'Bearer kk'}, 401),
      ({'x-api-key': ''}, 401),
      ({'Authorization': 'Bearer k', 'Origin': 'http://127.0.0.1'}, 403),
  )
  def test_stranger_gets_no_session(self, headers, status):
    server = self.start(api_key='k')
    with self.assertRaises(exceptions.InvalidStatus) as caught:
      self.open(server, additional_headers=headers)
    self.assertEqual(caught.exception.response.status_code, status)
    for path in ('/environment', '/tasks', '/metrics'):
      self.assertEqual(requests.get(server.url + path, timeout=20).status_code, 401)
    self.assertEqual(requests.get(server.url + '/health', timeout=20).json()['sessions'], 0)
    self.open(server, additional_headers={'Authorization': 'Bearer k'})

  def test_rebound_name_gets_no_session(self):
    server = self.start()
    headers = {
        'Connection': 'Upgrade',
        'Upgrade': 'websocket',
        'Sec-WebSocket-Key': 'AAAAAAAAAAAAAAAAAAAAAA==',
        'Sec-WebSocket-Version': '13',
        'Host': 'rebound.example',
    }
    answer = requests.get(server.url + '/ws', headers=headers, timeout=20)
    self.assertEqual(answer.status_code, 403)
    self.assertIn('rebound.example', answer.json()['error'])

  def test_other_paths_are_refused(self):
    server = self.start()
    with self.assertRaises(exceptions.InvalidStatus) as caught:
      connect(server, path='/wss')
    self.assertEqual(caught.exception.response.status_code, 404)
    self.assertEqual(requests.get(server.url + '/ws', timeout=20).status_code, 404)


def resolve(*urls, **options):
  config = schema.Config()
  config.env.kind = f'openenv:{",".join(urls)}'
  config.env.options = options
  config.retriever.kind = 'none'
  return components.resolve(validation.validate(config)).env


def play(factory, task, seed, actions):
  """Returns all that an episode gives to its caller."""
  env = factory(task, seed, guard.Guard(20.0))
  outcomes = [stepping.reset(env, seed)]
  if 'environment_error' not in outcomes[0][1]:
    for action in actions:
      outcome = stepping.step(env, action)
      outcomes.append(outcome)
      if outcome[2] or outcome[3]:
        break
  return outcomes


@needs_websockets
class ServedEnvTest(ServerTestCase):
  """The client of several servers."""

  def setUp(self):
    super().setUp()
    self.enterContext(mock.patch.object(openenv_servers, '_FIRST_RETRY_S', 0.1))

  def begin(self, factory, seed=0):
    env = factory(Task('t', 'q'), seed)
    self.addCleanup(env._close)
    return env, stepping.reset(env, seed)

  @parameterized.parameters(
      (Words, ['x', 'numpy', '\u00e9"\\\n\u4e16', '', 'win']),
      (Words, ['x'] * 8),
      (Words, ['x', 'raise', 'x']),
      (Draws, ['x'] * 8),
  )
  def test_episodes_equal_those_in_this_process(self, env_class, actions):
    here = factory_lib.make_factory('tests:Env', env_class, {}, {})
    there = resolve(self.start(env_class).url)
    for seed in (0, 7, 2**40):
      task = Task(f't{seed}', 'Who?', ('a', 'b'), options=(('A', 'x'),), letter='A')
      expected = play(here, task, seed, actions)
      self.assertEqual(play(there, task, seed, actions), expected)
      self.assertGreater(len(expected), 2)
      rewards = [outcome[1] for outcome in expected[1:]]
      self.assertGreater(sum(rewards), 0)

  def test_failed_reset_equals_that_in_this_process(self):
    here = factory_lib.make_factory('tests:Env', Words, {}, {})
    there = resolve(self.start().url)
    outcomes = [play(factory, Task('t', 'raise'), 0, ()) for factory in (here, there)]
    self.assertEqual(outcomes[0], outcomes[1])
    self.assertIn('no start', outcomes[0][0][1]['environment_error'])

  def test_error_that_ends_the_run_ends_it(self):
    factory = resolve(self.start().url)
    for action, kind, words in (
        ('stop the run', UserError, 'the key is wrong'),
        ('end the run', RunError, 'the retriever is gone'),
        ('nan', UserError, 'the reward is nan'),
        ('keys', UserError, 'cannot send'),
    ):
      env, _ = self.begin(factory)
      with self.assertRaisesRegex(kind, words):
        stepping.step(env, action)

  def test_attributes_and_tasks_are_those_of_the_class(self):
    here = factory_lib.make_factory('tests:Env', OwnTasks, {}, {})
    there = resolve(self.start(OwnTasks).url)
    for name in ('stop_strings', 'frame', 'core_metrics', 'roles', 'stops_in_thoughts'):
      self.assertEqual(getattr(there, name), getattr(here, name))
    self.assertEqual(there.load_tasks('dev'), here.load_tasks('dev'))
    self.assertIsNone(resolve(self.start().url).load_tasks)
    self.assertEqual(resolve(self.start(Draws).url).roles, Draws.roles)

  def test_sessions_are_spread_by_load(self):
    one, two = self.start(), self.start()
    factory = resolve(one.url, two.url)
    envs = [self.begin(factory)[0] for _ in range(6)]
    self.assertEqual([one.app.num_sessions, two.app.num_sessions], [3, 3])
    for env in envs[::2]:
      env._close()
    wait_for(lambda: one.app.num_sessions == 0)
    for _ in range(3):
      self.begin(factory)
    self.assertEqual([one.app.num_sessions, two.app.num_sessions], [3, 3])

  def test_lost_address_is_masked_and_taken_back(self):
    other = self.start(max_sessions=2)
    with serving() as lost:
      factory = resolve(lost.url, other.url, timeout_s=20)
      (one, _), (two, _) = self.begin(factory), self.begin(factory)
      self.assertEqual([lost.app.num_sessions, other.app.num_sessions], [1, 1])
    _, reward, terminated, truncated, info = stepping.step(one, 'x')
    self.assertEqual((reward, terminated, truncated), (0.0, True, True))
    self.assertTrue(info['retrieval_failed'])
    self.assertEqual(stepping.step(two, 'x')[4]['action'], 'x')
    self.begin(factory)
    self.assertEqual(other.app.num_sessions, 2)
    _, (_, info) = self.begin(factory)
    self.assertRegex(info['environment_error'], '1 of 2 addresses do not answer')
    back = self.start(port=lost.port)
    time.sleep(0.5)
    env, _ = self.begin(factory)
    self.assertEqual(back.app.num_sessions, 1)
    self.assertEqual(stepping.step(env, 'x')[4]['action'], 'x')

  def test_all_addresses_lost_waits(self):
    with serving() as lost:
      factory = resolve(lost.url, timeout_s=20)
    timer = threading.Timer(1.0, lambda: self.start(port=lost.port))
    timer.start()
    _, (text, _) = self.begin(factory)
    self.assertStartsWith(text, 'q')
    timer.join()
    self.doCleanups()
    with self.assertRaisesRegex(UserError, 'starts no episode .*Connect.*start the server'):
      resolve(lost.url, timeout_s=0.5)(Task('t'), 0).reset(seed=0)

  def test_open_session_does_not_keep_its_process(self):
    server = self.start()
    code = (
        'from tests.serving import env_server_test as test\n'
        f'env = test.resolve({server.url!r})(test.Task("t", "q"), 0)\n'
        'print(env.reset(0)[0])\n'
    )
    output = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, check=True, timeout=120
    )
    self.assertStartsWith(output.stdout, 'q')
    self.assertEmpty(output.stderr)
    wait_for(lambda: server.app.num_sessions == 0)

  def test_full_server_is_waited_for(self):
    factory = resolve(self.start(max_sessions=1).url, timeout_s=20)
    first, _ = self.begin(factory)
    timer = threading.Timer(0.5, first._close)
    timer.start()
    self.addCleanup(timer.join)
    _, (text, _) = self.begin(factory)
    self.assertStartsWith(text, 'q')

  def test_full_servers_are_one_line(self):
    factory = resolve(*[self.start(max_sessions=1).url for _ in range(2)], timeout_s=2)
    for _ in range(2):
      self.begin(factory)
    with self.assertRaisesRegex(UserError, 'starts no episode .*CAPACITY_REACHED') as caught:
      self.begin(factory)
    self.assertNotIn('\n', str(caught.exception))

  def test_servers_that_differ_are_refused(self):
    one = self.start()
    for other in (self.start(options={'bonus': 1.0}), self.start(OwnTasks)):
      factory = resolve(one.url, other.url)
      self.begin(factory)
      with self.assertRaisesRegex(UserError, 'plays another environment, or with other settings'):
        self.begin(factory)
    with self.assertRaisesRegex(UserError, 'twice'):
      resolve(one.url, one.url)
    with self.assertRaisesRegex(UserError, 'options'):
      resolve(one.url, tries=3)

  def test_key_is_sent(self):
    server = self.start(api_key='k')
    with self.assertRaisesRegex(UserError, 'OPENENV_API_KEY'):
      resolve(server.url)
    with mock.patch.dict(os.environ, {'OPENENV_API_KEY': 'k'}):
      self.begin(resolve(server.url))
    self.assertEqual(server.app.num_sessions, 1)


@needs_websockets
@unittest.skipUnless(importlib.util.find_spec('openenv'), 'openenv is not installed')
class OpenEnvClientTest(ServerTestCase):

  def test_client_of_openenv_plays(self):
    from openenv.core import generic_client

    server = self.start(max_sessions=1)
    with generic_client.GenericEnvClient(base_url=server.url).sync() as env:
      result = env.reset(seed=1, episode_id='e', task={'id': 't', 'question': 'Who?'})
      text = f'Who? \u00e9\u4e16 {random.Random(1).random()}'
      self.assertEqual((result.observation['text'], result.done), (text, False))
      result = env.step({'text': 'x'})
      self.assertEqual((result.reward, result.done), (0.1 + 0.2, False))
      self.assertEqual(env.state(), {'episode_id': 'e', 'step_count': 1})
      with self.assertRaisesRegex(RuntimeError, 'Words raised ValueError: broken'):
        env.step({'text': 'raise'})
      env.reset()
      self.assertTrue(env.step({'text': 'win'}).done)
      late = generic_client.GenericEnvClient(base_url=server.url).sync()
      with late, self.assertRaisesRegex(RuntimeError, 'CAPACITY_REACHED'):
        late.reset()
    wait_for(lambda: server.app.num_sessions == 0)


if __name__ == '__main__':
  absltest.main()
