"""The environment `tools`: workers, limits, rejected calls, and a run of the training loop."""

import contextlib
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from stppo_jax import config as schema
from stppo_jax.assembly import components
from stppo_jax.envs import calculator
from stppo_jax.envs import guard
from stppo_jax.envs import stepping
from stppo_jax.envs import tool_runners
from stppo_jax.envs import tools
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.settings import validation
from stppo_jax.stop_signal import StopSignal
from stppo_jax.text import tokenizer as chat
from stppo_jax.text import tool_calls
from stppo_jax.training import loop
from stppo_jax.types import Passage
from stppo_jax.types import Stopped
from stppo_jax.types import Task
from stppo_jax.types import UserError
from tests.support import tiny_run
from tests.support import tiny_tokenizer

HERE = 'tests.support.tool_functions'
ROOT = pathlib.Path(__file__).parents[2]


def workers(test, **limits):
  made = tool_runners.Workers(tool_runners.ToolLimits(**limits))
  test.addCleanup(made.close)
  return made


class WorkersTest(absltest.TestCase):

  def test_worker_is_reused(self):
    run = workers(self)
    self.assertEqual(run.call(f'{HERE}:add', {'a': 2, 'b': 3}), tool_runners.Outcome('5'))
    self.assertEqual(run.call(f'{HERE}:later', {'a': 2}), tool_runners.Outcome('3'))
    pids = {run.call(f'{HERE}:pid', {}).text for _ in range(3)}
    self.assertLen(pids, 1)
    self.assertNotIn(str(os.getpid()), pids)

  def test_dead_idle_worker_is_replaced(self):
    run = workers(self)
    pid = int(run.call(f'{HERE}:pid', {}).text)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    self.assertEqual(run.call(f'{HERE}:add', {'a': 2, 'b': 3}), tool_runners.Outcome('5'))

  def test_start_does_not_count_as_call_time(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    slow = pathlib.Path(folder, 'sitecustomize.py')  # Python imports it at its start
    slow.write_text('import time\ntime.sleep(1.2)\n', encoding='utf-8')
    with mock.patch.dict(os.environ, {'PYTHONPATH': folder}):
      outcome = workers(self, timeout_s=1.0).call(f'{HERE}:add', {'a': 2, 'b': 3})
    self.assertEqual(outcome, tool_runners.Outcome('5'))

  def test_failures_are_reported(self):
    run = workers(self)
    for name, arguments, message in (
        ('leave', {}, 'the process of the tool died'),
        ('stop', {}, 'SystemExit: no'),
        ('hoard', {}, 'MemoryError'),
        ('add', {'a': 1}, 'TypeError: .*b'),
        ('nothing', {}, 'AttributeError'),
        ('no_json', {}, 'TypeError: .*not JSON serializable'),
    ):
      outcome = run.call(f'{HERE}:{name}', arguments)
      self.assertEqual(outcome.status, tool_runners.FAILED)
      self.assertRegex(outcome.text, message)
    self.assertEqual(run.call(f'{HERE}:add', {'a': 1, 'b': 1}).text, '2')

  def test_timeout_kills_worker_and_children(self):
    run = workers(self, timeout_s=0.7)
    path = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), 'written')
    for name, arguments in (('spin', {}), ('with_child', {'path': path})):
      outcome = run.call(f'{HERE}:{name}', arguments)
      self.assertEqual(outcome, tool_runners.Outcome('no result within 0.7 seconds', 'timed_out'))
    time.sleep(0.6)
    self.assertFalse(os.path.exists(path))

  def test_long_result_is_cut(self):
    run = workers(self, max_chars=100)
    for times in (100, 101, 10**6):
      text = run.call(f'{HERE}:shout', {'times': times}).text
      self.assertLen(text, 100)
      self.assertEqual(text.endswith('..'), times > 100)

  def test_threads_use_separate_workers(self):
    run, found = workers(self), []
    call = lambda: found.append(run.call(f'{HERE}:pid', {}).text)
    sleep = lambda: (run.call(f'{HERE}:sleep', {'seconds': 0.3}), call())
    threads = [threading.Thread(target=sleep) for _ in range(2)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertLen(found, 2)


class CalculatorTest(parameterized.TestCase):

  @parameterized.parameters(
      ('(3 + 4) * 2', '14'), ('7 / 2', '3.5'), ('-2^3', '-8'), ('7 // 2 % 2', '1'), ('1e3', '1000'),
      ('2**100', str(2**100)), ('12345678901234/2', '6172839450617'), ('.1+.2', '0.3'),
      ('1/3', '0.333333333333333'),
  )  # fmt: skip
  def test_values(self, expression, value):
    self.assertEqual(calculator.calculator(expression), value)

  @parameterized.parameters(
      'f("x")', '2 ** 10 ** 4', '"a" * 9', 'x', '1 < 2', '[1]', 'True', '9' * 501, '',
      '1/0', '(' * 300, '2**-9999', '1j', 'abs(1)', '10**400*1.0',
  )  # fmt: skip
  def test_other_expressions_are_rejected(self, expression):
    with self.assertRaises((ValueError, SyntaxError, ArithmeticError, MemoryError, RecursionError)):
      calculator.calculator(expression)


class Found:
  """A retriever that returns the query as a passage; None for 'down'."""

  def __init__(self):
    self.batches = []

  def search(self, queries, top_k):
    self.batches.append(list(queries))
    found = [[Passage('p', 'Title', query)] * top_k for query in queries]
    return [None if query == 'down' else row for query, row in zip(queries, found)]


NAMES = ('calculator', 'search', f'{HERE}:add', f'{HERE}:sleep')


def make(form='hermes', names=NAMES, timeout_s=10.0, retriever=None, **options):
  config = schema.Config()
  config.env = schema.EnvSettings(
      kind='tools', tools=names, tool_timeout_s=timeout_s, max_searches=3
  )
  config.env.options = {'form': form, **options}
  config.retriever.top_k = 1
  kind = components.resolve(validation.validate(config)).bind(retriever or Found())
  env = kind(Task('t', 'How many?', ('14',)), 0)
  env.reset()
  return env


def make_with(parameters, call=lambda arguments: tool_runners.Outcome('done'), **options):
  """An environment with one tool, `f`."""
  function = {'name': 'f', 'description': 'Does.', 'parameters': parameters}
  if parameters is None:
    del function['parameters']
  tool = tools.Tool({'type': 'function', 'function': function}, call)
  env = tools.ToolEnv(Task('t', 'q', ('a',)), None, [tool], **options)
  env.reset()
  return env


class EnvTest(parameterized.TestCase):

  @parameterized.parameters(
      {'properties': None},
      {'properties': {'a': {'type': 'text'}}},
      {'properties': {'a': {'$ref': 'http://127.0.0.1:9/schema.json'}}},
      {'properties': {'a': {'pattern': '('}}},
  )
  def test_a_wrong_schema_is_left_to_the_tool(self, **parameters):
    env = make_with(parameters)
    with mock.patch('urllib.request.urlopen') as fetch:
      observation, *_ = env.step('<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>')
    self.assertEqual(observation, 'done')
    fetch.assert_not_called()

  @parameterized.parameters(
      ({'type': 'object'}, True),
      ({}, True),
      (None, False),  # a function that takes none
      ({'type': 'object', 'properties': {}}, False),
      ({'properties': {'b': {}}}, False),
      ({'properties': {'b': {}}, 'additionalProperties': True}, True),
      ({'properties': {'b': {}}, 'required': ['a']}, True),
      ({'type': 'object', 'patternProperties': {'^a': {}}}, True),
      ({'properties': {'b': {}}, 'patternProperties': {'^a': {}}}, True),
      ({'$ref': '#/$defs/A', '$defs': {'A': {'properties': {'a': {}}}}}, True),
      ({'$ref': '#/$defs/A', '$defs': {'A': {'required': ['b']}}}, False),
      *(
          ({key: [{'properties': {'a': {'type': 'integer'}}, 'required': ['a']}]}, True)
          for key in ('anyOf', 'oneOf', 'allOf')
      ),
      ({'properties': {'b': {}}, 'anyOf': [{'properties': {'a': {}}}]}, True),
      ({'anyOf': [{'required': ['b']}, {'required': ['c']}]}, False),
  )
  def test_schema_refuses_only_arguments_it_excludes(self, parameters, is_accepted):
    observation, *_ = make_with(parameters).step(
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    )
    self.assertEqual(observation == 'done', is_accepted, observation)

  def test_lone_surrogates_reach_no_tool_and_reward(self):
    given = []

    def call(arguments):
      given.append(arguments)
      return tool_runners.Outcome('r\ud800')

    transcripts = []
    reward = lambda task, answer, transcript: transcripts.append(transcript) or 1.0
    env = make_with({'type': 'object'}, call, reward=reward)
    turn = '<tool_call>{"name": "f", "arguments": {"a\\udc00": ["x\\ud800"]}}</tool_call>'
    self.assertEqual(env.step(turn)[0], 'r?')
    self.assertEqual(given, [{'a?': ['x?']}])
    env.step('<answer>a</answer>')
    self.assertEqual(transcripts, [f'{turn}r?<answer>a</answer>'])

  @parameterized.parameters(100, 500, 900, 950, 980, 3000, 9000)
  def test_deeply_nested_arguments_are_an_observation(self, depth):
    nested = '[' * depth + ']' * depth
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": {nested}, "b": 1}}}}</tool_call>'
    self.assertStartsWith(make().step(call)[0], 'Error: ')

  @parameterized.parameters(*tool_calls.FORMS)
  def test_episode(self, form):
    env = make(form)
    write = tool_calls.make_form(form, [tool.schema for tool in env._tools.values()]).write
    call = write(tool_calls.Call('calculator', {'expression': '(3+4)*2'}))
    observation, reward, terminated, _, info = env.step(call)
    block = '\n<information>14</information>\n' if form == 'tags' else '14'
    self.assertEqual((observation, reward, terminated), (block, 0.0, False))
    self.assertEqual((info['action'], info['metrics']['tools/calls']), ('tool', 1.0))
    _, reward, terminated, truncated, info = env.step('So <answer>14</answer>')
    self.assertEqual((reward, terminated, truncated), (1.0, True, False))
    counts = {'tools/calls': 1, 'tools/malformed': 0, 'tools/failed': 0, 'tools/timed_out': 0}
    self.assertEqual(info['metrics'], {'em': 1.0, 'f1': 1.0, 'sub_em': 1.0, **counts})

  def test_frames_and_stop_strings(self):
    env = make('hermes')
    self.assertEqual((env.frame, env.stop_strings), ('tool', ()))
    env = make('tags', NAMES[:2])
    self.assertEqual(env.frame, 'inline')
    self.assertEqual(env.stop_strings, ('</calculator>', '</search>', '</answer>'))

  @parameterized.parameters(
      ('{"name": "calculator"', 'the call is malformed, not JSON .*write <tool_call>'),
      ('{"name": "abacus"}', "Error: there is no tool 'abacus'; there are calculator, search, add"),
      ('{"name": "add", "arguments": {"a": 1}}', "add do not fit, 'b' is a required"),
      ('{"name": "add", "arguments": {"a": 1, "b": "2"}}', "'2' is not of type 'integer'"),
      ('{"name": "add", "arguments": {"a": 1, "b": true}}', "True is not of type 'integer'"),
      ('{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}', "'c' was unexpected"),
  )
  def test_malformed_call_is_reported_and_counted(self, body, message):
    observation, reward, terminated, _, info = make().step(f'<tool_call>{body}</tool_call>')
    self.assertRegex(observation, message)
    self.assertEqual((reward, terminated, info['action']), (0.0, False, 'invalid'))
    self.assertEqual(info['metrics']['tools/malformed'], 1.0)
    self.assertEqual(info['metrics']['tools/calls'], 0.0)

  def test_failures_and_timeouts_are_counted(self):
    env = make(timeout_s=1.0)
    call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    observation, *_, info = env.step(call % ('calculator', '{"expression": "1/0"}'))
    self.assertEqual(observation, 'Error: ZeroDivisionError: division by zero')
    observation, *_, info = env.step(call % ('sleep', '{"seconds": 30}'))
    self.assertEqual(observation, 'Error: no result within 1 seconds')
    self.assertEqual(info['metrics']['tools/failed'], 1.0)
    self.assertEqual(info['metrics']['tools/timed_out'], 1.0)
    self.assertEqual(info['metrics']['tools/calls'], 2.0)

  def test_several_calls_per_turn(self):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    observation, *_, info = make(max_calls=2).step(call * 2 + '<tool_call>{</tool_call>')
    self.assertRegex(observation, '^add: 3\nadd: 3\n: Error: the call is malformed')
    self.assertEqual((info['action'], info['metrics']['tools/malformed']), ('tool', 1.0))
    observation, *_, info = make(max_calls=2).step(call * 3)
    self.assertEndsWith(observation, 'Error: at most 2 calls per turn are run')

  def test_turn_without_call_or_answer(self):
    env = make()
    for turn in range(4):
      observation, reward, terminated, truncated, info = env.step('14')
      self.assertEqual((info['action'], reward), ('invalid', 0.0))
      self.assertEqual((terminated, truncated), (turn == 3, turn == 3))
    self.assertEmpty(observation)

  def test_episodes_share_a_search(self):
    retriever = Found()
    envs = [make(retriever=retriever) for _ in range(3)]
    search = '<tool_call>{"name": "search", "arguments": {"query": "%s"}}</tool_call>'
    both = search % 'c' + '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    outcomes = stepping.step_all(envs, [search % 'a', search % 'down', both])
    self.assertEqual(retriever.batches, [['a', 'down'], ['c']])
    self.assertEqual(outcomes[0][0], '1. Title: a')
    self.assertEqual([outcome[4]['retrieval_failed'] for outcome in outcomes], [False, True, False])
    self.assertEqual(outcomes[2][0], 'search: 1. Title: c\nadd: 3')

  def test_result_cannot_close_its_block(self):
    env = make('tags', ('search',))
    observation, *_ = env.step('<search></information><answer>14</answer></search>')
    self.assertEqual(observation.count('</information>'), 1)
    self.assertNotIn('<answer>', observation)

  @parameterized.parameters(
      (dict(names=()), "env.kind='tools' needs tools"),
      (dict(names=(f'{HERE}:undocumented',)), 'annotate its arguments'),
      (dict(names=('calculater',)), 'did you mean calculator'),
      (dict(names=('no_such:f',)), 'cannot import no_such'),
      (dict(names=(f'{HERE}:add',) * 2), "two tools are called 'add'"),
      (dict(form='xml'), 'allowed are hermes, qwen_xml, llama3, tags'),
  )
  def test_mistake_is_one_line(self, arguments, message):
    with self.assertRaisesRegex(UserError, message) as caught:
      make(**arguments)
    self.assertNotIn('\n', str(caught.exception))

  def test_tools_need_their_environment(self):
    config = schema.Config()
    config.env.tools = ('calculator',)
    with self.assertRaisesRegex(UserError, 'search uses none'):
      components.resolve(validation.validate(config))
    config.env = schema.EnvSettings(kind='tools', tools=('search',))
    config.retriever.kind = 'none'
    with self.assertRaisesRegex(UserError, 'retriever.kind'):
      validation.validate(config)


class PromptTest(absltest.TestCase):

  def tokenizer(self, template):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    tiny_tokenizer.write(folder)
    if template:
      pathlib.Path(folder, 'chat_template.jinja').write_text(template, encoding='utf-8')
    return chat.load_tokenizer(folder)

  def test_template_shows_tools(self):
    env = make(names=('calculator',))
    question, info = env.reset()
    encode = lambda tokenizer: tokenizer.decode(
        chat.encode_prompt(tokenizer, question, info['tools'], info['declaration'])
    )
    shows = '{{ tools | tojson }}|{% for m in messages %}{{ m.content }}{% endfor %}'
    text = encode(self.tokenizer(shows))
    self.assertEqual(text.count('"calculator"'), 1)
    self.assertNotIn('You may call', text)
    self.assertEndsWith(text, question)
    for template in ('{% for m in messages %}{{ m.content }}{% endfor %}', ''):
      self.assertEqual(encode(self.tokenizer(template)), info['declaration'] + question)


class RunTest(absltest.TestCase):

  @pytest.mark.slow
  def test_run_with_tools(self):
    """The tiny model's searches are calls of the search tool in the form of tags."""
    self.enterContext(tiny_run.on_one_device())
    folder = self.enterContext(tempfile.TemporaryDirectory())
    tiny_run.write(folder)
    config = tiny_run.make_config(folder)
    config.env = schema.EnvSettings(kind='tools', tools=('calculator', 'search'), max_searches=2)
    config.env.options = {'form': 'tags', 'instructions': ''}
    config.rollout.max_prompt, config.rollout.max_total = 256, 384
    config.train.length_buckets = (384,)
    config.train.updates = 1
    loop.start(config, os.path.join(folder, 'run'))
    rows = metrics_lib.read_metrics(os.path.join(folder, 'run'))
    names = ('calls', 'malformed', 'failed', 'timed_out')
    wanted = {f'env/tools/{name}/mean' for name in names}
    self.assertContainsSubset(wanted, rows[-1])
    self.assertContainsSubset({f'val-aux/all/tools/{name}' for name in names}, rows[-1])
    self.assertGreater(rows[-1]['env/tools/calls/mean'], 0)
    self.assertIn('val-core/all/em', rows[-1])


class McpAnswerTest(parameterized.TestCase):

  @parameterized.parameters(
      ([], {'sum': 3, 'of': ['é']}, False, '{"sum": 3, "of": ["é"]}'),
      ([], {}, False, '{}'),
      ([], None, False, ''),
      (['three'], {'sum': 3}, False, 'three'),
      (['no'], {'code': 7}, True, 'no\n{"code": 7}'),
      (['{"code":7}'], {'code': 7}, True, '{"code":7}'),
      ([''], {'code': 7}, True, '{"code": 7}'),
      (['image'], None, False, '[image image/png: not shown]'),
      (['audio', 'seen'], None, False, 'seen\n[audio audio/wav: not shown]'),
      (['image'], {'sum': 3}, False, '{"sum": 3}\n[image image/png: not shown]'),
      (['link'], None, False, '[resource link text/csv file:///a.csv: not shown]'),
      (['blob'], None, False, '[resource image/png file:///b: not shown]'),
      (['note'], None, False, 'a note'),
  )  # fmt: skip
  def test_answer_is_text_or_says_what_it_holds(self, names, structured, is_error, wanted):
    make_part = types.SimpleNamespace
    note = make_part(uri='file:///n', mime_type='text/plain', text='a note')
    blob = make_part(uri='file:///b', mime_type='image/png', blob='')
    known = {
        'image': make_part(type='image', data='', mime_type='image/png'),
        'audio': make_part(type='audio', data='', mime_type='audio/wav'),
        'link': make_part(
            type='resource_link', name='a', uri='file:///a.csv', mime_type='text/csv'
        ),
        'note': make_part(type='resource', resource=note),
        'blob': make_part(type='resource', resource=blob),
    }
    parts = [known.get(name, make_part(type='text', text=name)) for name in names]
    answer = make_part(content=parts, structured_content=structured, is_error=is_error)
    self.assertEqual(tool_runners._answer_text(answer), wanted)


class FakeMcpServer(tool_runners.McpServer):
  """A server whose client runs functions in this process, and whose starts are counted."""

  def __init__(self, **functions):
    super().__init__('program', tool_runners.ToolLimits(timeout_s=1.0))
    self._functions = functions
    self.starts = 0

  def _start(self):
    if self._client is None:
      self.starts += 1
      self._client = types.SimpleNamespace(**self._functions)

  def _run(self, timeout_s, function, *arguments):
    return function(*arguments)


def listing(*names, cursor=None):
  tools = [types.SimpleNamespace(name=name) for name in names]
  return types.SimpleNamespace(tools=tools, next_cursor=cursor)


class McpSessionTest(absltest.TestCase):

  def test_call_that_fails_alone_keeps_the_server(self):
    def call_tool(name, arguments, **_):
      if name == 'mean':
        raise RuntimeError('Invalid structured content returned by tool mean')
      return types.SimpleNamespace(content=[], structured_content=arguments, is_error=False)

    server = FakeMcpServer(call_tool=call_tool, list_tools=lambda **_: listing('mean', 'add'))
    for name in ('add', 'mean', 'mean', 'add'):
      status = server.call(name, {'x': 1}).status
      self.assertEqual(status, tool_runners.FAILED if name == 'mean' else tool_runners.OK)
    self.assertEqual(server.starts, 1)

  def test_connection_that_is_over_restarts_the_server(self):
    def fail(*_, **__):
      raise ConnectionError('closed')

    server = FakeMcpServer(call_tool=fail, list_tools=fail)
    for starts in (1, 2):
      self.assertEqual(server.call('add', {}).status, tool_runners.FAILED)
      self.assertEqual(server.starts, starts)

  def test_limit_of_client_is_longer_than_that_of_call(self):
    def call_tool(name, arguments, read_timeout_seconds=None):
      limits.append(read_timeout_seconds)
      return types.SimpleNamespace(content=[], structured_content={}, is_error=False)

    limits = []
    for timeout_s in (1.0, 120.0):
      server = FakeMcpServer(call_tool=call_tool)
      server._limits = tool_runners.ToolLimits(timeout_s=timeout_s)
      self.assertEqual(server.call('wait', {}).status, tool_runners.OK)
      self.assertGreater(limits[-1], timeout_s)

  def test_all_pages_of_tools_are_listed(self):
    pages = {None: listing(cursor='b'), 'b': listing('x', 'y', cursor=''), '': listing('z')}
    server = FakeMcpServer(list_tools=lambda cursor: pages[cursor])
    self.assertEqual([tool.name for tool in server.list_tools()], ['x', 'y', 'z'])

  def test_list_of_tools_without_end_is_refused(self):
    server = FakeMcpServer(list_tools=lambda cursor: listing('x', cursor='again'))
    with self.assertRaisesRegex(ValueError, "does not end: 1 pages, then 'again'"):
      server.list_tools()

  def test_server_does_not_act_for_ended_episodes(self):
    calls = []
    is_free = threading.Event()

    def call_tool(name, arguments, **_):
      calls.append(arguments['episode'])
      is_free.wait(10)
      return types.SimpleNamespace(content=[], structured_content={}, is_error=False)

    server = FakeMcpServer(call_tool=call_tool, list_tools=lambda **_: listing('act'))
    stop_signal = StopSignal()
    guarded = guard.Guard(30.0, stop_signal)

    def play(episode):
      with contextlib.suppress(Stopped):
        guarded.call('a tool', server.call, 'act', {'episode': episode})

    threads = [threading.Thread(target=play, args=(episode,)) for episode in range(5)]
    for thread in threads:
      thread.start()
    while not calls:
      time.sleep(0.01)
    stop_signal.set()  # all episodes end, one of them within its call
    for thread in threads:
      thread.join()
    is_free.set()
    with server._lock:  # what was in progress has ended
      pass
    time.sleep(0.6)  # longer than a queued call looks at its signal
    self.assertLen(calls, 1)

  def test_queue_of_a_server_is_not_in_the_limit(self):
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(1.5, lock.release).start()

    def hold():
      with guard.hold(lock):
        return 'held'

    self.assertEqual(guard.Guard(1.0).call('a tool', hold), 'held')


@pytest.mark.guests(
    what='MCP', version='mcp==2.3.0', date='2026-11-28', touches='envs/tool_runners.py'
)
class McpTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    try:
      import mcp  # noqa: F401
    except ImportError:
      self.skipTest('mcp is not installed')

  def test_server_over_stdio(self):
    names = (f'mcp:{sys.executable} {ROOT}/tests/support/mcp_server.py', 'calculator')
    env = make(names=names, timeout_s=3.0)
    self.assertEqual(
        list(env._tools), ['mix', 'wait', 'fail', 'add', 'mean', 'refuse', 'calculator']
    )
    call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    mix = call % ('mix', '{"first": "red", "second": "blue"}')
    self.assertEqual(env.step(mix)[0], 'red and blue')
    observation, *_, info = env.step(call % ('fail', '{}'))
    self.assertRegex(observation, '^Error: .*')
    self.assertEqual(info['metrics']['tools/failed'], 1.0)
    observation, *_, info = env.step(call % ('wait', '{"seconds": 30}'))
    self.assertEqual(observation, 'Error: no result within 3 seconds')
    env.reset()
    self.assertIn('is a required property', env.step(call % ('mix', '{"first": "red"}'))[0])
    env.reset()
    self.assertEqual(env.step(mix)[0], 'red and blue')  # started again, under a limit of its own

  def test_server_keeps_its_state_after_failed_calls(self):
    server = tool_runners.McpServer(
        f'{sys.executable} {ROOT}/tests/support/mcp_server.py', tool_runners.ToolLimits()
    )
    self.addCleanup(server._end)
    add = lambda x: server.call('add', {'x': x}).text
    self.assertEqual(add(5), '5')
    for name, arguments in (('mean', {'values': []}), ('refuse', {}), ('fail', {}), ('none', {})):
      self.assertEqual(server.call(name, arguments).status, tool_runners.FAILED, name)
    self.assertEqual(add(1), '6')

  def test_call_may_take_longer_than_a_start(self):
    command = f'{sys.executable} {ROOT}/tests/support/mcp_server.py'
    server = tool_runners.McpServer(command, tool_runners.ToolLimits(timeout_s=60.0))
    self.addCleanup(server._end)
    server.list_tools()
    server._client.read_timeout_seconds = 0.5
    server._client.session._session_read_timeout_seconds = 0.5
    self.assertEqual(server.call('wait', {'seconds': 1.5}), tool_runners.Outcome('awake'))

  def test_command_without_server(self):
    for command in ('/no/such/program', f'{sys.executable} -c pass'):
      with self.assertRaisesRegex(UserError, 'lists no tools') as caught:
        make(names=(f'mcp:{command}',))
      self.assertNotIn('\n', str(caught.exception))


if __name__ == '__main__':
  absltest.main()
