"""Random programs of clients against the real server, service and sessions.

The decoder is a script with odd token splits, and each of its tokens has a log-prob of its own. So
a recorded turn can be told from all others. After each program:

- each recorded turn is one sampled answer, with its ids and log-probs, and no answer occurs twice
- the ids before a turn are those that its request has read
- a request reads the sampled ids of the turns in its history
- turns are in the rows that docs/agent_programs.md describes
"""

import collections
import contextlib
import dataclasses
import json
import random
import re
import threading
import time

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest
import requests

from stppo_jax.net import http_server
from stppo_jax.serving import server as server_lib
from stppo_jax.serving import service as service_lib
from stppo_jax.serving import sessions
from stppo_jax.text import thoughts
from tests.support import scripted_gateway
from tests.support import tiny_tokenizer
from tests.support.processes import wait_for

CHATML = (
    '{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}'
    '{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}'
    '{% for c in m.tool_calls %}%s{% endfor %}<|im_end|>\n{% endfor %}'
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
HERMES = '<tool_call>\n{{ c.function | tojson }}\n</tool_call>'
XML = (
    '<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}'
    '<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}'
    '</function>\n</tool_call>'
)
TEMPLATES = {
    'hermes': CHATML.replace('%s', HERMES),
    'qwen_xml': CHATML.replace('%s', XML),
    'none': None,
}
PARAMETERS = {'q': {'type': 'string'}, 'k': {'type': 'array'}}
TOOL = {
    'type': 'function',
    'function': {'name': 'search', 'parameters': {'type': 'object', 'properties': PARAMETERS}},
}
THOUGHT = re.compile('<think>(.*?)</think>', re.DOTALL)
STOP = 'HALT'
NUM_SLOW_PROGRAMS = 300


@dataclasses.dataclass(eq=False)
class Answer:
  """What the decoder has sampled for a request."""

  request: object
  tokens: list
  logp: list
  pauses_after: int | None  # pieces of the stream, until the client leaves
  is_over: bool = False
  parent: 'Answer | None' = None

  @property
  def read(self):
    """The ids before the turn, and the turn."""
    return [*self.request.ids, *self.tokens]


class Decoder(scripted_gateway.ScriptedScheduler):
  """Samples random turns, and keeps what it has sampled."""

  def __init__(self, tokenizer, rng, form, has_tools):
    super().__init__(tokenizer, ())
    self.answers = []
    self.pauses_after = None  # before the next requests
    self._rng = rng
    self._form = form
    self._has_tools = has_tools
    self._num_tokens = 0

  def submit(self, new_requests):
    for request in new_requests:
      ids = self._sample(len(self.answers))
      ids = ids[: min(self._end(request, ids), request.budget)]
      logp = [-1e-4 * (self._num_tokens + number) for number in range(1, len(ids) + 1)]
      self._num_tokens += len(ids)
      answer = Answer(request, ids, logp, self.pauses_after)
      self.answers.append(answer)
      threading.Thread(target=self._emit_answer, args=(answer,)).start()

  def _sample(self, number):
    """Returns the ids of a turn with a number, as no text of it would be encoded."""
    rng = self._rng
    text = ''
    if rng.random() < 0.4:
      text += f'<think>\n{number}, hm: é中?\n</think>\n\n'
    if rng.random() < 0.8 or not self._has_tools:
      text += rng.choice(('', 'So  ', '\n')) + f'{number} is the town, of {rng.randrange(99)}.'
    if rng.random() < 0.3:
      text += f' {STOP}. And {number} more'
    if self._has_tools and (not text or rng.random() < 0.6):
      text = text or f'{number}: '
      for call in range(rng.choice((1, 1, 2))):
        text += '\n' + self._call(f'{number}.{call}')
    ids = []
    while text:
      size = rng.randrange(1, 8)
      ids += self._tokenizer.encode(text[:size])
      text = text[size:]
    return [*ids, self._tokenizer.eos_ids[0]]

  def _call(self, query):
    if self._form == 'qwen_xml':
      lines = ['<tool_call>', '<function=search>', '<parameter=q>', query, '</parameter>']
      lines += ['<parameter=k>', '[1, {"a": 2.0}]', '</parameter>', '</function>', '</tool_call>']
      return '\n'.join(lines)
    arguments = {'q': query, 'k': [1, {'a': 2.0}]}
    return f'<tool_call>\n{json.dumps({"name": "search", "arguments": arguments})}\n</tool_call>'

  def _emit_answer(self, answer):
    request = answer.request
    num_pieces = 0
    end = 0
    while end < len(answer.tokens) and not request.cancelled:
      if num_pieces == answer.pauses_after:
        wait_for(lambda: request.cancelled)
        break
      start, end = end, end + 2
      is_last = end >= len(answer.tokens)
      finish = None
      if is_last:
        is_cut = len(answer.tokens) == request.budget
        finish = 'length' if is_cut and answer.tokens[-1] != self._tokenizer.eos_ids[0] else 'stop'
      request.emit(answer.tokens[start:end], answer.logp[start:end], finish)
      num_pieces += 1
      time.sleep(0.0005)
    answer.is_over = True


@dataclasses.dataclass
class State:
  """A conversation that ends with a turn, as the client will send it."""

  messages: list
  answer: Answer | None  # the turn; None: there is none yet
  has_calls: bool = False
  num_results: int = 0


class Program:
  """A client that does random things in a session, and the rows that they should give."""

  def __init__(self, seed, form):
    self.rng = random.Random(seed)
    self.has_tools = form != 'none' and self.rng.random() < 0.6
    self.tokenizer = tiny_tokenizer.load(TEMPLATES[form])
    self.decoder = Decoder(self.tokenizer, self.rng, form, self.has_tools)
    self.form = form
    self.states = []
    self.rows = []  # lists of answers
    self.deepest_match = 0
    self.counts = collections.Counter()
    self.number = 0
    self.num_sent = 0
    self.plans = []

  def run(self, num_requests=14):
    settings = service_lib.ServiceSettings(
        'tiny',
        tool_form='auto' if self.form != 'none' else 'hermes',
        recording=sessions.Recording(max_rows=1000),
    )
    self.service = service_lib.Service(self.decoder, self.tokenizer, settings)
    self.app = server_lib.GatewayApp(self.service, http_server.ServerLimits(), '')
    with http_server.Server(self.app, '127.0.0.1', 0) as server, contextlib.closing(self.service):
      sampling = sessions.Sampling(max_turn=400)
      self.session = self.service.open_session(jax.random.key(0), sampling)
      self.url = f'{server.url}/s/{self.session.name}/v1'
      claim = self.session._claim

      def keep_plan(*args, **named):
        self.plans.append(claim(*args, **named))
        return self.plans[-1]

      self.session._claim = keep_plan
      with requests.Session() as self.client:
        for _ in range(num_requests):
          self.act()
      self.check()

  def act(self):
    """Does one random thing."""
    old = State([{'role': 'user', 'content': f'Question {self.number}?'}], None)
    self.number += 1
    if self.states and self.rng.random() < 0.9:
      old = self.states[-1] if self.rng.random() < 0.6 else self.rng.choice(self.states)
    messages = self.extend(old)
    fields = {'messages': messages, 'max_tokens': self.rng.choice((400, 400, 400, 14))}
    if self.has_tools:
      fields |= {'tools': [TOOL], 'parallel_tool_calls': self.rng.random() < 0.5}
    if self.rng.random() < 0.4:
      fields['stop'] = [STOP]
    if self.rng.random() < 0.15:
      fields['n'] = 2
    kind = self.rng.choice(('whole', 'whole', 'whole', 'stream', 'cancel', 'leave', 'stay'))
    if kind in ('leave', 'stay') and (self.has_tools or 'n' in fields):
      kind = 'stream'  # a turn that may be a call comes at once
    self.counts[kind] += 1
    getattr(self, f'ask_{kind}')(old, messages, fields)

  def extend(self, old):
    """Returns the messages of a request after a state."""
    if old.answer is None:
      return old.messages
    self.number += 1
    new = [{'role': 'user', 'content': f'And {self.number}?'}]
    if old.has_calls:
      new = []
      for call in old.messages[-1]['tool_calls']:
        text = f'Result {self.number}.'
        new.append({'role': 'tool', 'tool_call_id': call['id'], 'content': text})
    return [*old.messages, *new]

  def place(self, old, answer):
    """Puts a turn into its row: that of the turn before it, if no turn has followed that one."""
    answer.parent = old.answer
    for row in self.rows:
      if old.answer is not None and row[-1] is old.answer:
        row.append(answer)
        return
    self.rows.append([answer])

  def check_match(self, old, answer):
    """The request has read the sampled ids of the turns in its history."""
    answer.parent = old.answer
    if old.answer is None:
      return
    known = old.answer.read
    assert list(answer.request.ids[: len(known)]) == known, (old.messages, self.session.difference)
    depth = 0
    while (answer := answer.parent) is not None:
      depth += 1
    self.deepest_match = max(self.deepest_match, depth)

  def finish(self, old, messages, answer, message, reason):
    """A client has a whole turn."""
    self.check_match(old, answer)
    self.place(old, answer)
    returned = self.change(message, reason, answer)
    has_calls = bool(message.get('tool_calls'))
    self.states.append(State([*messages, returned], answer, has_calls))

  def change(self, message, reason, answer):
    """Returns a turn as a framework may send it back."""
    rng = self.rng
    said = {'role': 'assistant', 'content': message.get('content') or ''}
    calls = message.get('tool_calls')
    if calls:
      said['tool_calls'] = json.loads(json.dumps(calls))
      for call in said['tool_calls']:
        arguments = json.loads(call['function']['arguments'])
        if rng.random() < 0.5:
          arguments = dict(reversed(arguments.items()))
          arguments['k'] = [1.0, {'a': 2}]
        call['function']['arguments'] = json.dumps(arguments, indent=rng.choice((None, 1)))
      if rng.random() < 0.2:
        said['content'] = None
    if said['content'] is None:
      return said
    thought = THOUGHT.match(said['content'].lstrip())
    rest = said['content'].lstrip()[thought.end() :] if thought else ''
    if thought and rest.strip():
      kind = rng.choice(('keep', 'drop', 'field'))
      if kind != 'keep':
        said['content'] = rest
      if kind == 'field':
        said['reasoning_content'] = thought[1].strip()
    ends_itself = answer.tokens[-1] == self.tokenizer.eos_ids[0]
    if rng.random() < 0.3:
      said['content'] = ' ' + said['content'].replace('\n', '\n\n').replace(', ', ',  ') + '\n'
    elif reason == STOP and rng.random() < 0.5:
      said['content'] += STOP
    elif ends_itself and not calls and rest.strip() == '' and thought is None:
      if rng.random() < 0.3 and said['content'].strip():
        said['content'] += f'\n[Step {self.number}]'
        self.counts['appended'] += 1
    return said

  def ask_whole(self, old, messages, fields):
    before = len(self.decoder.answers)
    self.num_sent += 1
    response = self.client.post(f'{self.url}/chat/completions', json=fields, timeout=60)
    assert response.status_code == 200, response.text
    for answer, choice in zip(self.decoder.answers[before:], response.json()['choices']):
      self.finish(old, messages, answer, choice['message'], choice['stop_reason'])

  def ask_stream(self, old, messages, fields):
    before = len(self.decoder.answers)
    found = collections.defaultdict(lambda: {'content': '', 'tool_calls': []})
    reasons = {}
    with self.post_stream(fields) as response:
      for choice in self.choices(response):
        found[choice['index']]['content'] += choice['delta'].get('content') or ''
        found[choice['index']]['tool_calls'] += choice['delta'].get('tool_calls', [])
        reasons[choice['index']] = choice['stop_reason']
    for index, answer in enumerate(self.decoder.answers[before:]):
      self.finish(old, messages, answer, found[index], reasons[index])

  def ask_cancel(self, old, messages, fields):
    """The client leaves after some milliseconds. What it has not read it does not send back."""
    before = len(self.decoder.answers)
    is_streamed = self.rng.random() < 0.5
    timeout = self.rng.uniform(0.001, 0.01)
    self.num_sent += 1
    try:
      with requests.post(
          f'{self.url}/chat/completions',
          json=fields | {'stream': is_streamed},
          timeout=(1, timeout),
          stream=True,
      ) as response:
        time.sleep(timeout)
        del response
    except requests.RequestException:
      pass
    wait_for(self.is_quiet)
    for sample, answer in enumerate(self.decoder.answers[before:]):
      self.check_match(old, answer)
      if self.is_recorded(answer):
        if sample:  # it has a row of its own, also if the first sample was cancelled in time
          self.rows.append([answer])
        else:
          self.place(old, answer)
        self.counts['cancelled too late'] += 1

  def is_recorded(self, answer):
    """Whether a whole answer has become a turn."""
    first = np.float32(answer.logp[0])
    turns = [turn for turn in self.session._turns if turn.logp[0] == first]
    return len(turns) > 0 and len(turns[0].tokens) == len(answer.tokens)

  def is_quiet(self):
    """Whether the server has answered all requests, also those whose clients have left."""
    samples = [x for metric in self.app.registry.collect() for x in metric.samples]
    num_answered = sum(x.value for x in samples if x.name == 'gateway_requests_total')
    is_ended = all(not plan.segment.is_extended for plan in self.plans)
    is_over = all(answer.is_over for answer in self.decoder.answers)
    return num_answered == self.num_sent and is_ended and is_over

  def ask_leave(self, old, messages, fields):
    """The client ends the stream after some text, and continues with this text."""
    self._read_a_part(old, messages, fields, closes=True)

  def ask_stay(self, old, messages, fields):
    """The client stops reading, leaves the stream open, and continues with what it has read."""
    self._read_a_part(old, messages, fields, closes=False)

  def _read_a_part(self, old, messages, fields, closes):
    before = len(self.decoder.answers)
    pauses_after = self.rng.randrange(2, 5)
    if not closes and self.rng.random() < 0.5:
      pauses_after = 1_000  # the whole turn is sampled, and the client reads more slowly
    self.decoder.pauses_after = pauses_after
    text = ''
    num_tokens = 0
    with contextlib.ExitStack() as stack:
      stack.callback(wait_for, self.is_quiet)  # after the connection is closed
      response = stack.enter_context(self.post_stream({**fields, 'return_token_ids': True}))
      choices = self.choices(response)  # without a name it would close the connection
      for choice in choices:
        text += choice['delta'].get('content') or ''
        num_tokens += len(choice['token_ids'])
        is_paused = num_tokens >= 2 * pauses_after
        if is_paused or choice['finish_reason'] or (text.strip() and self.rng.random() < 0.4):
          break
      (answer,) = self.decoder.answers[before:]
      self.decoder.pauses_after = None
      if closes:
        stack.close()
        wait_for(self.is_quiet)
      elif len(answer.tokens) <= 2 * pauses_after:  # it ends, although nobody reads it
        wait_for(lambda: self.is_recorded(answer))
      self.check_match(old, answer)
      is_recorded = self.is_recorded(answer)
      if is_recorded:
        self.place(old, answer)
        self.counts['left too late'] += 1
        whole = self.tokenizer.decode([t for t in answer.tokens if t != self.tokenizer.eos_ids[0]])
        is_whole = whole.split() == text.split() or not thoughts.outside(text).strip()
        if 'stop' in fields or is_whole:  # a turn may come back without its thought
          return
      texts = [self.tokenizer.decode(answer.tokens[: n + 1]) for n in range(len(answer.tokens))]
      if text not in texts or not text.strip():
        return
      if self.rng.random() < 0.2:
        self.counts['lost'] += 1
        return
      end = texts.index(text) + 1
      kept = Answer(answer.request, answer.tokens[:end], answer.logp[:end], None, True)
      kept.parent = old.answer
      if is_recorded:
        kept = answer
        answer.tokens = answer.tokens[:end]
        answer.logp = answer.logp[:end]
      later = State([*messages, {'role': 'assistant', 'content': text}], kept)
      new = self.extend(later)
      if not is_recorded:
        self.place(old, kept)  # when it comes back
      self.counts['cut' if is_recorded else 'adopted' if closes else 'ended'] += 1
      self.ask_whole(later, new, {**fields, 'messages': new, 'max_tokens': 400})

  @contextlib.contextmanager
  def post_stream(self, fields):
    url = f'{self.url}/chat/completions'
    self.num_sent += 1
    with requests.post(url, json=fields | {'stream': True}, timeout=60, stream=True) as response:
      assert response.status_code == 200, response.text
      yield response

  def choices(self, response):
    for line in response.iter_lines(decode_unicode=False, chunk_size=1):
      data = line.decode().removeprefix('data: ')
      if data and data != '[DONE]':
        yield from json.loads(data)['choices']

  def check(self):
    """Compares the recorded rows with what was sampled and with the documented rows."""
    by_logp = {np.float32(answer.logp[0]): answer for answer in self.decoder.answers}
    found = []
    used = set()
    for episode in self.session.episodes(None, 0):
      context = episode.prompt.tolist()
      row = []
      for turn in episode.turns:
        answer = by_logp[turn.logp[0]]
        assert answer not in used, 'an answer is recorded twice'
        used.add(answer)
        size = len(turn.tokens)
        assert turn.tokens.tolist() == answer.tokens[:size]
        np.testing.assert_array_equal(turn.logp, np.float32(answer.logp[:size]))
        assert (
            list(answer.request.ids) == context
        ), 'the ids before a turn are not those it has read'
        row.append((float(turn.logp[0]), size))
        context += turn.tokens.tolist()
        if turn.observation is not None:
          context += np.asarray(turn.observation).tolist()
      if row:
        found.append(row)
    documented = [[(float(np.float32(a.logp[0])), len(a.tokens)) for a in row] for row in self.rows]
    assert sorted(found) == sorted(documented), (self.session.difference, found, documented)


class MachineTest(parameterized.TestCase):

  def run_programs(self, seeds):
    """Runs programs, and returns how many had a history of two turns or more that was matched."""
    counts = collections.Counter()
    num_deep = 0
    for seed in seeds:
      for form in TEMPLATES:
        program = Program(seed, form)
        try:
          program.run()
        except AssertionError as error:
          raise AssertionError(f'program {seed} of {form}') from error
        counts += program.counts
        num_deep += program.deepest_match >= 2
    num_programs = len(seeds) * len(TEMPLATES)
    print(f'{num_programs} programs, {num_deep} past the first check; {dict(counts)}')
    for name in ('adopted', 'ended', 'cut'):
      self.assertGreater(counts[name], 0, name)
    self.assertGreater(num_deep, 0.9 * num_programs)

  def test_rows_of_random_programs(self):
    self.run_programs(range(5))

  @pytest.mark.slow
  def test_rows_of_many_random_programs(self):
    self.run_programs(range(100, 100 + NUM_SLOW_PROGRAMS // len(TEMPLATES)))


if __name__ == '__main__':
  absltest.main()
