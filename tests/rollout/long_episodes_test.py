"""Episodes with many turns: the host's work and memory are linear in their tokens.

Work is counted, not timed: calls of functions, and the sizes of what is decoded, compared or cut.
An episode with four times as many turns may need four times as much of it.
"""

from collections.abc import Callable
import functools
import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
import types as python_types
from typing import NamedTuple
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax import types
from stppo_jax.envs import factory
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import report
from stppo_jax.monitoring import viewer
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import saved
from stppo_jax.serving import sessions
from stppo_jax.text import template as template_lib
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.text import turns as turns_lib
from tests.support import tiny_tokenizer

TURNS = 30
FACTOR = 4  # more turns in the longer episode
MOST = 1.1  # share of what is linear, for what both episodes have once
CHAT = (
    '{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|im_end|>'
    '{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}'
)


def count_calls(action: Callable[[], object]) -> int:
  """Returns how many functions are called."""
  num_calls = 0

  def add(frame, event, argument):
    nonlocal num_calls
    del frame, argument
    num_calls += event in ('call', 'c_call')

  before = sys.getprofile()
  sys.setprofile(add)
  try:
    action()
  finally:
    sys.setprofile(before)
  return num_calls


def measure_bytes(make: Callable[[], object]) -> tuple[int, int]:
  """Returns the bytes of what a call makes, and the most bytes during the call."""
  gc.collect()
  tracemalloc.start()
  try:
    value = make()
    gc.collect()
    kept, peak = tracemalloc.get_traced_memory()
    del value
    return kept, peak
  finally:
    tracemalloc.stop()


class Counted:
  """Sizes of what is decoded, compared or cut."""

  total = 0


class CountedText(str):
  """A text that counts the characters of it that are compared or cut."""

  def startswith(self, prefix, start=0, *end):
    Counted.total += len(prefix)
    return super().startswith(prefix, start, *end)

  def __getitem__(self, place):
    part = super().__getitem__(place)
    Counted.total += len(part)
    return part

  def removeprefix(self, prefix):
    return CountedText(super().removeprefix(prefix))


class CountedIds(list):
  """Ids that count those of them that are cut out."""

  def __getitem__(self, place):
    part = super().__getitem__(place)
    Counted.total += len(part) if isinstance(place, slice) else 1
    return part


class Work(NamedTuple):
  """The work of the last request of a session, and the memory of the whole."""

  plan: int
  record: int
  transcript: int
  kept_bytes: int


def make_session(kind: str) -> tuple[sessions.Session, tokenizer_lib.Tokenizer]:
  """Returns a session whose tokenizer counts the ids that it decodes."""
  tokenizer = tiny_tokenizer.load(CHAT if kind.startswith('chat') else None)
  template = template_lib.Template(tokenizer, 1 << 30)
  return sessions.Session(template, jax.random.key(0), sessions.Sampling()), tokenizer


def play_session(kind: str, num_turns: int) -> tuple[sessions.Session, list[int]]:
  """Returns a session after these turns, and the work of planning and recording the last one."""
  session, tokenizer = make_session(kind)
  work = []
  messages = [{'role': 'user', 'content': 'Question'}]
  prompt: str | list[int] = 'Question: '
  if kind == 'ids':
    prompt = tokenizer.encode(prompt)
  for turn in range(num_turns):
    thought = f'<think>about {turn}</think>' * (kind == 'chat without thoughts')
    said = f'I search for the capital of France in {turn}.'
    seen = f'\nParis is the capital of France, {turn}.\n'
    tokens = tokenizer.encode(thought + said)
    answer = {'role': 'assistant', 'content': thought + said}
    plans: list[sessions.RequestPlan] = []

    def plan():
      if kind.startswith('chat'):
        plans.append(session.plan(messages))
      else:
        counted = CountedText(prompt) if isinstance(prompt, str) else CountedIds(prompt)
        plans.append(session.plan_prompt(counted))

    def record():
      logp = [-0.5] * len(tokens)
      session.record(plans[0], tokens, logp, [answer], text=thought + said)

    work = []
    is_last = turn == num_turns - 1
    for step in (plan, record):
      work.append(count_work(step) if is_last else step())
    messages = [
        *messages,
        {'role': 'assistant', 'content': said},
        {'role': 'user', 'content': seen},
    ]
    if kind == 'ids':
      prompt = [*prompt, *tokens, *tokenizer.encode(seen)]
    else:
      prompt += said + seen
  return session, work


def count_work(action: Callable[[], object]) -> int:
  """Returns the calls of an action, and the sizes of what it decodes, compares or cuts."""
  decode = tokenizer_lib.Tokenizer.decode

  def count_ids(tokenizer, ids):
    Counted.total += len(ids)
    return decode(tokenizer, ids)

  Counted.total = 0
  with mock.patch.object(tokenizer_lib.Tokenizer, 'decode', count_ids):
    num_calls = count_calls(action)
  return num_calls + Counted.total


def work_of_session(kind: str, num_turns: int) -> Work:
  """Returns the work and the memory of a session."""
  kept_bytes, _ = measure_bytes(lambda: play_session(kind, num_turns))
  session, (plan, record) = play_session(kind, num_turns)
  transcript = count_work(lambda: session.transcript)
  assert session.num_turns == num_turns and session.num_segments == 1
  return Work(plan, record, transcript, kept_bytes)


class SessionTest(parameterized.TestCase):

  @parameterized.parameters('text', 'ids', 'chat', 'chat without thoughts')
  def test_request_is_matched_in_one_pass(self, kind):
    play_session(kind, 2)  # compiles, and fills caches
    short = work_of_session(kind, TURNS)
    long = work_of_session(kind, FACTOR * TURNS)
    self.assertLess(long.plan, FACTOR * MOST * short.plan)
    self.assertLess(long.record, MOST * short.record)  # whatever was before
    self.assertLess(long.transcript, FACTOR * MOST * short.transcript + 20)
    self.assertLess(long.kept_bytes, FACTOR * MOST * short.kept_bytes)

  def test_transcript_is_that_of_last_turn(self):
    for kind in ('text', 'ids', 'chat'):
      session, _ = play_session(kind, 3)
      self.assertStartsWith(session.transcript, 'I search for the capital of France in 0.\nParis')
      self.assertEndsWith(session.transcript, '1.\nI search for the capital of France in 2.')

  def test_ended_streams_do_not_pile_up(self):
    session, tokenizer = make_session('text')
    tokens = tokenizer.encode('Paris is a town')
    plan = None
    for number in range(100):
      plan = session.plan_prompt(f'Question {number}: ')
      session.abandon(plan, tokens, [-0.5] * len(tokens))
    few = count_work(lambda: session.plan_prompt('Another question: '))
    for number in range(300):
      session.abandon(session.plan_prompt(f'Question {number}: '), tokens, [-0.5] * len(tokens))
    many = count_work(lambda: session.plan_prompt('Another question: '))
    self.assertLessEqual(many, MOST * few)
    session.plan_prompt('Question 299: Paris is a town, and ')
    self.assertEqual(session.num_turns, 1)  # the newest ones become turns

  def test_similar_turns_are_told_apart_at_once(self):
    """The calls of an agent begin with the same characters."""

    def work(num_turns):
      index: turns_lib.TurnIndex[int] = turns_lib.TurnIndex()
      text = '<tool_call>{"name": "search", "arguments": {"query": "town %d"}}</tool_call>'
      for turn in range(num_turns):
        message = {'role': 'assistant', 'content': text % turn}
        index.add([turns_lib.ReadMessage(message)], turn)
      message = turns_lib.ReadMessage({'role': 'assistant', 'content': text % -1})
      return count_calls(lambda: index.find(message))

    self.assertLess(work(FACTOR * TURNS), MOST * work(TURNS))


class EpisodeStateTest(absltest.TestCase):

  def test_turn_takes_same_work_however_many_came_before(self):
    tokenizer = tiny_tokenizer.load()
    framing = tokenizer_lib.make_framing(tokenizer, 'inline', 500)
    limits = episode_lib.EpisodeLimits(max_total_tokens=1 << 20)
    rules = episode_lib.EpisodeRules(factory.EnvFactory(None, {}, stop_strings=('</a>',)), limits)
    ids = np.array(tokenizer.encode('<a>town</a>'), np.int32)
    outcome = ('\nParis is a town\n', 0.0, False, False, {'action': 'search'})

    def work(num_turns):
      state = episode_lib.EpisodeState(types.Task('t'), framing, rules, 0, 0)
      state.observe('Question: who?\n', {})

      def play_turn():
        state.action_text(ids)
        state.record(types.Turn(ids, np.zeros(len(ids), np.float32)), outcome)

      for _ in range(num_turns):
        play_turn()
      last = count_work(play_turn)
      (episode,) = state.episodes
      self.assertLen(episode.turns, num_turns + 1)
      return last

    work(1)
    self.assertEqual(work(TURNS), work(FACTOR * TURNS))


class CountedNumpy(python_types.SimpleNamespace):
  """NumPy, whose functions count the elements of the arrays that they get."""

  def __getattr__(self, name):
    function = getattr(np, name)
    if isinstance(function, type) or not callable(function):
      return function

    @functools.wraps(function)
    def call(*arguments, **options):
      Counted.total += sum(x.size for x in arguments if isinstance(x, np.ndarray))
      return function(*arguments, **options)

    return call


def make_episode(num_turns: int) -> types.Episode:
  """Returns an episode of turns of eight tokens, with as many of the environment after each."""
  rng = np.random.default_rng(0)
  tokenizer = tiny_tokenizer.load()
  ids = rng.integers(2, tokenizer.vocab_size, (num_turns + 1, 16)).astype(np.int32)
  logp = -rng.random((num_turns, 8)).astype(np.float32)
  turns = [types.Turn(row[:8], row_logp, row[8:], 'search') for row, row_logp in zip(ids, logp)]
  return types.Episode(types.Task('t', 'q', ('a',)), 0, ids[-1], turns)


class RecordsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())
    self.tokenizer = tiny_tokenizer.load()

  def check_is_linear(self, act):
    """Checks what `act` does with an episode, its work and its memory."""
    act(make_episode(2))
    measured = []
    for num_turns in (TURNS, FACTOR * TURNS):
      episode = make_episode(num_turns)
      with mock.patch.object(types, 'np', CountedNumpy()):
        work = count_work(lambda: act(episode))
      measured.append((work, measure_bytes(lambda: act(episode))[1]))
    (short, short_bytes), (long, long_bytes) = measured
    self.assertLess(long, FACTOR * MOST * short)
    self.assertLess(long_bytes, FACTOR * MOST * short_bytes)

  def records(self, episode):
    per_token = {'ratio': np.ones((1, len(episode.unroll()[0])), np.float32)}
    return episodes_lib.to_records([episode], self.tokenizer, 1, 'train', per_token)

  def test_records_are_linear_in_tokens(self):
    self.check_is_linear(self.records)

  def test_reading_is_linear_in_tokens(self):
    self.check_is_linear(lambda episode: types.Episode.from_dict(episode.to_dict()))

  def test_files_and_report_are_linear_in_tokens(self):
    path = episodes_lib.record_path(self.workdir, 'train', 1)

    def write_and_show(episode):
      episodes_lib.write_lines(path, self.records(episode))
      saved.read(path, self.tokenizer)
      group = report.episode_group(self.workdir, 'train', 1)
      self.assertEqual(group['shown'], 1)

    self.check_is_linear(write_and_show)
    self.assertTrue(os.path.exists(path))

  def test_metrics_are_linear_in_tokens(self):
    self.check_is_linear(
        lambda episode: [
            episodes_lib.summarize([episode]),
            episodes_lib.summarize_update([episode]),
        ]
    )


# A page without a browser. It counts nodes, reads of arrays and layouts. A layout is computed when
# a height is read after the page has changed.
PAGE = """
let nodes = 0, reads = 0, layouts = 0, hasChanged = true;
class Node {
  constructor() {
    nodes++;
    this.children = [];
    this.style = {};
    this.classList = {add() { hasChanged = true; }};
  }
  setAttribute(name, value) { if (name === 'class') this.kind = value; }
  addEventListener() {}
  append(...children) { hasChanged = true; this.children.push(...children); }
  replaceChildren(...children) { hasChanged = true; this.children = children; }
  querySelector(selector) { return this.children.find((child) => `.${child.kind}` === selector); }
  get scrollHeight() { layouts += hasChanged; hasChanged = false; return 400; }
}
const article = new Node();
globalThis.document = {
  getElementById: () => ({textContent: '{"live": false, "runs": []}'}),
  createElement: () => new Node(),
  querySelector: () => article,
  querySelectorAll: () => article.children.filter((child) => child.kind === 'piece forced'),
};
"""
DRAW = """
const handler = {get(array, name) { reads++; return array[name]; }};
const counted = (x) => Array.isArray(x) ? new Proxy(x, handler) : x;
for (const mode of ['mask', 'ratio', 'value']) {
  browser.mode = mode;
  showEpisode(Object.fromEntries(Object.entries(EPISODE).map(([name, x]) => [name, counted(x)])));
}
const drawn = article.children.filter((child) => /^piece/.test(child.kind)).length;
console.log(JSON.stringify({nodes, reads, layouts, pieces: drawn}));
"""


class PageTest(absltest.TestCase):

  def draw(self, num_turns):
    node = shutil.which('node')
    if not node:
      self.skipTest('no Node.js')
    episode = make_episode(num_turns)
    per_token = {
        'ratio': np.full((1, len(episode.unroll()[0])), 1.5, np.float32),
        'values': np.full((1, len(episode.unroll()[0])), np.nan, np.float32),  # none was finite
    }
    tokenizer = tiny_tokenizer.load()
    (record,) = episodes_lib.to_records([episode], tokenizer, 1, 'train', per_token)
    folder = pathlib.Path(viewer.__file__).parent / 'page'
    page = [folder.joinpath(name).read_text() for name in ('page.js', 'episodes.js')]
    script = ''.join([PAGE, *page, DRAW.replace('EPISODE', report.to_json(record))])
    command = [node, '-']
    shown = subprocess.run(command, input=script, capture_output=True, text=True, check=True)
    return json.loads(shown.stdout)

  def test_page_is_linear_in_tokens(self):
    short = self.draw(TURNS)
    long = self.draw(FACTOR * TURNS)
    self.assertEqual(short['pieces'], 2 * TURNS + 1)
    self.assertEqual(long['pieces'], 2 * FACTOR * TURNS + 1)
    self.assertLess(long['nodes'], FACTOR * MOST * short['nodes'])
    self.assertLess(long['reads'], FACTOR * MOST * short['reads'])
    self.assertEqual(long['layouts'], 3)  # one per drawing


if __name__ == '__main__':
  absltest.main()
