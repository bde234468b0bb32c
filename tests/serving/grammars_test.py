"""Answers that follow a JSON schema or must call a tool, with the library that masks tokens."""

from concurrent import futures
import functools
import importlib.util
import json
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jsonschema
import numpy as np
import pytest

from stppo_jax.rollout import prepare
from stppo_jax.serving import api
from stppo_jax.serving import grammars
from stppo_jax.serving import sessions
from stppo_jax.text import tokenizer as chat
from stppo_jax.text import tool_calls
from tests.serving import gateway_test

pytestmark = pytest.mark.guests(
    what='llguidance',
    version='llguidance==1.9.1',
    date='2026-11-28',
    touches='serving/grammars.py serving/text_schemas.py',
)

QUESTION = gateway_test.QUESTION
CITY = {
    'type': 'object',
    'properties': {'city': {'$ref': '#/$defs/city'}, 'is_large': {'type': 'boolean'}},
    'required': ['city', 'is_large'],
    'additionalProperties': False,
    '$defs': {'city': {'enum': ['Paris', 'Rome']}},
}
FIND = {'name': 'find', 'parameters': CITY}
SAY = {'name': 'say', 'parameters': {'type': 'object', 'properties': {'text': {'type': 'string'}}}}
TOOLS = [{'type': 'function', 'function': function} for function in (FIND, SAY)]
ASKED = {'model': 'tiny', 'messages': [{'role': 'user', 'content': QUESTION}], 'max_tokens': 150}
JSON_TEXT = {
    'chat': {'response_format': {'type': 'json_schema', 'json_schema': {'schema': CITY}}},
    'messages': {'output_config': {'format': {'type': 'json_schema', 'schema': CITY}}},
    'responses': {'text': {'format': {'type': 'json_schema', 'name': 'x', 'schema': CITY}}},
}
needs_library = absltest.skipIf(
    importlib.util.find_spec('llguidance') is None, 'llguidance is not installed'
)


DEFS = {'mode': {'enum': ['asc', 'desc']}, 'size': {'type': 'integer', 'minimum': 0}}
TEXT = {'type': 'string'}
# Schemas of a parameter.
PARAMETERS = (
    TEXT,
    {},
    True,
    {'type': ['string', 'null']},
    {'anyOf': [TEXT, {'type': 'null'}]},
    {'anyOf': [{'type': 'string', 'enum': ['asc', 'desc']}, {'type': 'null'}]},
    {'anyOf': [{'$ref': '#/$defs/mode'}, {'type': 'null'}], 'default': None},
    {'allOf': [{'$ref': '#/$defs/mode'}], 'description': 'An order.'},
    {'allOf': [TEXT, {'minLength': 2}, {'maxLength': 4}]},
    {'$ref': '#/$defs/mode'},
    {'$ref': '#/$defs/size'},
    {'const': 'x y'},
    {'const': 5},
    {'const': None},
    {'enum': ['a', 1, None, True]},
    {'enum': [1, 2]},
    {'enum': ['null', 'b', 'two\nlines', ' c ', '"q"']},
    {'type': ['string', 'null'], 'enum': ['a', 'null']},
    {'type': ['string', 'integer']},
    {'anyOf': [TEXT, {'type': 'integer'}]},
    {'anyOf': [{'type': 'integer'}, {'type': 'null'}]},
    {'oneOf': [{'const': 'a'}, {'type': 'string', 'minLength': 3, 'maxLength': 5}]},
    {'oneOf': [{'type': 'string', 'maxLength': 3}, {'type': 'string', 'minLength': 2}]},
    {'oneOf': [TEXT, {'type': 'null'}]},
    {'type': 'string', 'pattern': '^[A-Z]{2}[0-9]{2}$'},
    {'type': 'string', 'pattern': 'a/b|^c', 'maxLength': 12},
    {'type': 'string', 'maxLength': 3},
    {'type': 'string', 'minLength': 9},
    {'type': 'string', 'format': 'date'},
    {'type': 'string', 'format': 'date-time'},
    {'type': 'string', 'format': 'uuid'},
    {'type': ['string', 'null'], 'format': 'ipv4'},
    {'type': 'string', 'not': {'enum': ['a', 'b']}, 'maxLength': 1},
    {'type': 'boolean'},
    {'type': 'number'},
    {'type': 'null'},
    {'type': 'array', 'items': TEXT, 'maxItems': 2},
    {'type': 'array', 'items': {'$ref': '#/$defs/mode'}, 'minItems': 1, 'maxItems': 2},
    {'type': 'object', 'properties': {'a': TEXT}, 'required': ['a'], 'additionalProperties': False},
    {'type': 'object', 'additionalProperties': {'type': 'integer'}, 'maxProperties': 2},
    {'anyOf': [{'type': 'array', 'items': {'type': 'integer'}}, {'type': 'null'}]},
    {'type': 'string', 'title': 'T', 'x-other': 3, 'examples': ['e'], 'contentEncoding': 'base64'},
)
# Schemas of all parameters, and schemas of one that no text can follow.
OBJECTS = (
    {'$ref': '#/$defs/all', '$defs': {'all': {'properties': {'q': TEXT}, 'required': ['q']}}},
    {'properties': {'q': TEXT}, 'anyOf': [{'required': ['q']}]},
    {'properties': {'a': TEXT, 'b': TEXT}, 'dependentRequired': {'a': ['b']}},
    {'properties': {'a': TEXT}, 'if': {'required': ['a']}, 'then': {'maxProperties': 1}},
    {'properties': ['q']},
    {'properties': {'q': None}},
    {'properties': {'q': 'text'}},
    {'properties': {'q': False}},
    {'properties': {'q': False}, 'required': ['q']},
    {'properties': {'q': TEXT, 'r': False}, 'required': ['q']},
    {'properties': {'q': TEXT}, 'required': 'q'},
    {'properties': {'q': TEXT}, 'required': ['r'], 'additionalProperties': False},
    {'properties': {'q': TEXT}, 'additionalProperties': {'type': 'integer'}, 'required': ['q']},
    {'additionalProperties': {'type': 'integer'}, 'maxProperties': 2},
    {'properties': {'q': TEXT}, 'const': {'q': 'a'}},
    {'properties': {'q': TEXT}, 'enum': [{'q': 'a'}]},
    {'type': 'array'},
    {'properties': {'s': TEXT}, 'patternProperties': {'^s$': {}}, 'additionalProperties': False},
    {'properties': {'q': {'type': 'string', 'format': 'no-such-format'}}},
    {'properties': {'q': {'type': 'string', 'pattern': '(?=a)b'}}},
    {'properties': {'q': {'type': 'string', 'pattern': '['}}},
    {'properties': {'q': {'type': 'string', 'pattern': 5}}},
    {'properties': {'q': {'type': 'string', 'pattern': '^a$', 'minLength': 3}}, 'required': ['q']},
    {'properties': {'q': {'enum': []}}, 'required': ['q']},
    {'properties': {'q': {'enum': 'ab'}}, 'required': ['q']},
    {'properties': {'q': {'anyOf': 'ab'}}, 'required': ['q']},
    {'properties': {'q': {'$ref': '#/$defs/none'}}, 'required': ['q']},
    {'properties': {'q': {'$ref': 5}}, 'required': ['q']},
    {'properties': {'q': {'$ref': '#/properties/q'}}, 'required': ['q']},
    {'properties': {'q': {'type': 'string', 'maxLength': 'x'}}, 'required': ['q']},
    {'properties': {'q<': TEXT}, 'required': ['q<']},
    {'properties': {f'p{i}': TEXT for i in range(3)}, 'required': ['p1']},
    {'properties': {'q': {'not': {}}}, 'required': ['q']},
    {'properties': {'q': {'not': {'type': 'string'}}}, 'required': ['q']},
    {'$ref': '#/$defs/none'},
    {'$ref': '#'},
)


@functools.cache
def vocabulary():
  """Returns (texts of the tokens, whether each is plain, whether each may end a text)."""
  pieces = chat.load_tokenizer(prepare.EMBEDDED_MODEL).token_bytes
  plain = np.array([piece.isascii() and piece.isalnum() for piece in pieces])
  ends = np.array([piece[:1] in (b'"', b'}', b']') for piece in pieces])
  return pieces, plain, ends


def walk(grammar, seed, start, end):
  """Returns a random text from `start` that a grammar admits; None: it is too long."""
  rng = np.random.default_rng(seed)
  tokenizer = chat.load_tokenizer(prepare.EMBEDDED_MODEL)
  pieces, plain, ends = vocabulary()
  matcher = GRAMMARS().start(grammar)
  num_bytes = -(-tokenizer.vocab_size // 8)
  ids = tokenizer.encode(start)
  for token in ids:
    matcher.add(token)
  written = b''  # a part of the end
  for step in range(120):
    bits = np.unpackbits(matcher.allowed(num_bytes), bitorder='little')[: tokenizer.vocab_size]
    assert not matcher.error, matcher.error
    allowed = bits.astype(bool)
    if allowed[list(tokenizer.eos_ids)].any():
      return tokenizer.decode(ids)
    assert allowed.any(), 'no token is allowed'
    token = None
    if step > 3 * (seed + 1):  # towards the end
      left = end.encode()[len(written) :]
      closing = [t for t in np.flatnonzero(allowed) if pieces[t] and left.startswith(pieces[t])]
      token = max(closing, key=lambda t: len(pieces[t]), default=None)
      written = written + pieces[token] if token is not None else b''
      if token is None and (allowed & ends).any() and rng.random() < 0.6:
        allowed &= ends
    if token is None:
      if (allowed & plain).any() and rng.random() < 0.7:
        allowed &= plain
      token = int(rng.choice(np.flatnonzero(allowed)))
    ids.append(int(token))
    matcher.add(int(token))
  return None


@functools.cache
def GRAMMARS():
  return grammars.Grammars(chat.load_tokenizer(prepare.EMBEDDED_MODEL))


def accepts(grammar, text):
  """Returns whether a text follows a grammar, and how its last byte leaves it."""
  tokenizer = chat.load_tokenizer(prepare.EMBEDDED_MODEL)
  matcher = grammars.Grammars(tokenizer).start(grammar)
  num_bytes = -(-tokenizer.vocab_size // 8)
  for token in tokenizer.encode(text, control=True):
    bits = np.unpackbits(matcher.allowed(num_bytes), bitorder='little')
    if not bits[token]:
      return False
    matcher.add(token)
  bits = np.unpackbits(matcher.allowed(num_bytes), bitorder='little')
  return bool(bits[tokenizer.eos_ids[0]])


@needs_library
class GrammarTest(parameterized.TestCase):

  @parameterized.product(form=sorted(tool_calls.FORMS), thinks=(False, True))
  def test_calls_are_those_that_the_form_writes(self, form, thinks):
    tokenizer = chat.load_tokenizer(prepare.EMBEDDED_MODEL)
    make = grammars.Grammars(tokenizer).of_answer
    one = make(form, [FIND, SAY], None, has_several=False)
    several = make(form, [FIND, SAY], None, has_several=True)
    writer = tool_calls.make_form(form, TOOLS)
    find = writer.write(tool_calls.Call('find', {'city': 'Paris', 'is_large': True}))
    say = writer.write(tool_calls.Call('say', {'text': 'é "x"'}))
    thought = '<think>I <search> it.</think>\n' if thinks else ''
    for text in (find, say):
      self.assertTrue(accepts(one, thought + text))
      self.assertEqual(writer.parse(thought + text)[1][0].error, '')
    both = find + {'llama3': '; '}.get(form, '\n') + say
    self.assertTrue(accepts(several, thought + both))
    self.assertLen(writer.parse(thought + both)[1], 2)
    self.assertFalse(accepts(one, thought + both))
    self.assertFalse(accepts(one, 'Hello'))
    self.assertFalse(accepts(one, find.replace('Paris', 'Bonn')))

  def test_open_thought_is_ended_first(self):
    tokenizer = chat.load_tokenizer(prepare.EMBEDDED_MODEL)
    grammar = grammars.Grammars(tokenizer).of_answer('tags', [SAY], None, False, in_thought=True)
    self.assertTrue(accepts(grammar, 'Hm.</think>\n<say>x</say>'))
    self.assertFalse(accepts(grammar, '<say>x</say>'))

  def test_text_of_a_schema_may_replace_calls(self):
    tokenizer = chat.load_tokenizer(prepare.EMBEDDED_MODEL)
    grammar = grammars.Grammars(tokenizer).of_answer('tags', [SAY], CITY, has_several=False)
    self.assertTrue(accepts(grammar, '<say>x</say>'))
    self.assertTrue(accepts(grammar, '{"city": "Rome", "is_large": true}'))
    self.assertFalse(accepts(grammar, '{"city": "Bonn", "is_large": true}'))


@needs_library
class SchemaTest(parameterized.TestCase):

  def check(self, form, parameters, num_walks=2):
    """The form reads what the grammar admits, as values of the schema. Returns how much ended."""
    function = {'name': 'find', 'parameters': parameters}
    grammar = GRAMMARS().of_answer(form, [function], None, has_several=False)
    reader = tool_calls.make_form(form, [{'type': 'function', 'function': function}])
    start = {'tags': '<find>', 'llama3': '{'}.get(form, '<tool_call>')
    end = {'tags': '</find>', 'qwen_xml': '\n</parameter>\n'}.get(form, '"}')
    if form == 'tags' and not tool_calls.text_parameter(function):
      end = '"}'
    num_ended = 0
    for seed in range(num_walks):
      text = walk(grammar, seed, start, end)
      if text is None:
        continue
      num_ended += 1
      _, calls = reader.parse(text)
      self.assertLen(calls, 1, text)
      self.assertEqual((calls[0].name, calls[0].error), ('find', ''), text)
      if parameters.get('$ref') != '#':
        checker = jsonschema.FormatChecker(['date', 'ipv4'])
        jsonschema.validate(calls[0].arguments, parameters, format_checker=checker)
    return num_ended

  @parameterized.product(form=sorted(tool_calls.FORMS), schema=PARAMETERS)
  def test_form_reads_what_grammar_admits(self, form, schema):
    parameters = {'type': 'object', 'properties': {'q': schema}, 'required': ['q'], '$defs': DEFS}
    try:
      num_ended = self.check(form, parameters)
    except ValueError as error:  # raised by the library if texts have quotes
      self.assertRegex(str(error), 'not supported.*(oneOf|not|[Uu]nsatisf)')
      self.assertNotEqual(form, 'qwen_xml')
      return
    self.assertGreater(num_ended, 0)

  @parameterized.product(form=sorted(tool_calls.FORMS), parameters=OBJECTS)
  def test_odd_schema_is_followed_or_one_line(self, form, parameters):
    try:
      self.assertGreater(self.check(form, {'type': 'object', **parameters}), 0)
    except ValueError as error:
      self.assertRegex(str(error), 'schema|name|format|pattern|length|list|property|refer')
      self.assertLess(len(str(error)), 500)

  @parameterized.parameters(
      ({'type': 'string', 'pattern': '^[A-Z]{2}[0-9]{2}$'}, 'AB12', 'hello'),
      ({'type': 'string', 'maxLength': 3}, 'abc', 'hello'),
      ({'type': 'string', 'minLength': 6}, 'hello you', 'hello'),
      ({'type': 'string', 'format': 'date'}, '2024-02-28', 'hello'),
      ({'anyOf': [{'type': 'string', 'enum': ['asc', 'desc']}, {'type': 'null'}]}, 'asc', '"asc"'),
      ({'anyOf': [TEXT, {'type': 'null'}], 'maxLength': 4}, 'null', 'hello'),
      ({'const': 'asc'}, 'asc', '"asc"'),
  )
  def test_texts_stand_without_quotes(self, schema, right, wrong):
    parameters = {'type': 'object', 'properties': {'q': schema}, 'required': ['q']}
    function = {'name': 'find', 'parameters': parameters}
    for form in ('qwen_xml', 'tags'):
      grammar = GRAMMARS().of_answer(form, [function], None, has_several=False)
      reader = tool_calls.make_form(form, [{'type': 'function', 'function': function}])
      value = None if right == 'null' else right
      text = reader.write(tool_calls.Call('find', {'q': value}))
      self.assertTrue(accepts(grammar, text), text)
      self.assertEqual(reader.parse(text)[1][0].arguments, {'q': value})
      self.assertFalse(accepts(grammar, text.replace(right, wrong)))

  def test_grammar_without_end_is_an_error(self):
    with self.assertRaisesRegex(ValueError, 'patternProperties.*properties, s'):
      parameters = OBJECTS[17]
      GRAMMARS().of_answer('hermes', [{'name': 'f', 'parameters': parameters}], None, False)
    with self.assertRaisesRegex(ValueError, 'patternProperties'):
      GRAMMARS().of_schema({'type': 'object', **OBJECTS[17]})


@needs_library
class ServedTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.server = cls.enterClassContext(gateway_test.running())

  def ask(self, route='chat/completions', **fields):
    return gateway_test.post(self.server, ASKED | fields, f'/v1/{route}')

  def test_text_of_each_route_follows_the_schema(self):
    chat_text = self.ask(**JSON_TEXT['chat']).json()['choices'][0]['message']['content']
    message = self.ask('messages', **JSON_TEXT['messages']).json()['content'][0]['text']
    fields = {'input': QUESTION} | JSON_TEXT['responses']
    response = gateway_test.post(self.server, fields, '/v1/responses').json()
    texts = [chat_text, message, response['output'][0]['content'][0]['text']]
    for text in texts:
      jsonschema.validate(json.loads(text), CITY)
    self.assertEqual(response['text']['format'], JSON_TEXT['responses']['text']['format'])

  @parameterized.parameters(
      ('chat/completions', 'required'),
      ('chat/completions', {'type': 'function', 'function': {'name': 'find'}}),
      ('messages', {'type': 'any'}),
      ('messages', {'type': 'tool', 'name': 'find'}),
      ('responses', 'required'),
      ('responses', {'type': 'function', 'name': 'find'}),
      (
          'responses',
          {
              'type': 'allowed_tools',
              'mode': 'required',
              'tools': [{'type': 'function', 'name': 'find'}],
          },
      ),
  )
  def test_forced_call_is_made(self, route, choice):
    fields = {'tool_choice': choice}
    find = {'type': 'function', **FIND}
    if route == 'messages':
      find = {'name': 'find', 'input_schema': CITY}
    fields['tools'] = TOOLS[:1] if route == 'chat/completions' else [find]
    asked = ASKED | fields
    if route == 'responses':
      asked = {'input': QUESTION, **fields}
    for seed in range(3):
      if route == 'chat/completions':
        asked['seed'] = seed
      answer = gateway_test.post(self.server, asked, f'/v1/{route}').json()
      self.assertIn('find', json.dumps(answer), answer)
      if route == 'chat/completions':
        (call,) = answer['choices'][0]['message']['tool_calls']
        jsonschema.validate(json.loads(call['function']['arguments']), CITY)

  @parameterized.parameters(
      ('none', []),
      ('auto', ['find', 'say']),
      (
          {
              'type': 'allowed_tools',
              'allowed_tools': {
                  'mode': 'auto',
                  'tools': [{'type': 'function', 'function': {'name': 'say'}}],
              },
          },
          ['say'],
      ),
  )
  def test_grammar_has_calls_of_allowed_tools_only(self, choice, names):
    service = self.server.app.service
    fields = {'tools': TOOLS, 'tool_choice': choice, **JSON_TEXT['chat']}
    grammar = service._grammar(api.ChatBody.model_validate(ASKED | fields), [1])
    self.assertTrue(accepts(grammar, '{"city": "Rome", "is_large": true}'))
    writer = tool_calls.make_form(service.tool_form, TOOLS)
    calls = [
        tool_calls.Call('find', {'city': 'Rome', 'is_large': True}),
        tool_calls.Call('say', {'text': 'x'}),
    ]
    found = [call.name for call in calls if accepts(grammar, writer.write(call))]
    self.assertEqual(found, names)

  def test_logprobs_are_of_model_or_draw(self):
    fields = {**JSON_TEXT['chat'], 'logprobs': True, 'return_token_ids': True}
    raw = self.ask(**fields).json()
    choice = raw['choices'][0]
    known = raw['prompt_token_ids'] + choice['token_ids']
    echo = {'prompt': known, 'echo': True, 'max_tokens': 0, 'logprobs': 0}
    scores = gateway_test.post(self.server, echo, '/v1/completions').json()['choices'][0]
    logp = [entry['logprob'] for entry in choice['logprobs']['content']]
    np.testing.assert_allclose(
        logp, scores['logprobs']['token_logprobs'][-len(logp) :], rtol=1e-3, atol=1e-3
    )
    with gateway_test.running(logprobs_mode='processed_logprobs') as server:
      drawn = gateway_test.post(server, ASKED | fields).json()['choices'][0]['logprobs']['content']
    self.assertEqual(drawn[0]['logprob'], 0)  # an object has one first token
    self.assertLess(logp[0], -1)

  @parameterized.parameters(
      ({'tool_choice': 'required'}, 'no tools'),
      ({'tools': TOOLS, 'tool_choice': {'type': 'function', 'function': {'name': 'x'}}}, "'x'"),
      (
          {'response_format': {'type': 'json_schema', 'json_schema': {'schema': {'type': 'x'}}}},
          'the schema is not supported',
      ),
      ({'response_format': {'type': 'xml'}}, 'json_schema'),
  )
  def test_wrong_choice_is_an_error(self, fields, message):
    answer = self.ask(**fields)
    self.assertEqual(answer.status_code, 400)
    self.assertIn(message, answer.json()['error']['message'])

  @parameterized.parameters(*tool_calls.FORMS)
  def test_odd_schema_is_no_server_error(self, form):
    with gateway_test.running(tool_form=form) as server:
      for parameters in (*OBJECTS, {'properties': {'q': True}}, {'properties': {'q': False}}):
        tool = {'type': 'function', 'function': {'name': 'find', 'parameters': parameters}}
        fields = {'tools': [tool], 'tool_choice': 'required', 'max_tokens': 2}
        answer = gateway_test.post(server, ASKED | fields)
        self.assertIn(answer.status_code, (200, 400), answer.text)

  def test_grammar_that_stops_is_error_of_schema(self):
    error = 'x' * 5000
    with (
        mock.patch.object(grammars.Matcher, 'error', error),
        self.assertLogs(level='WARNING') as logs,
    ):
      answer = self.ask(**JSON_TEXT['chat'])
    self.assertEqual(answer.status_code, 400, answer.text)
    self.assertIn('schema', answer.json()['error']['message'])
    self.assertLess(max(map(len, logs.output)), 500)

  def test_other_requests_are_sampled_as_before(self):
    """A masked row changes no other row of its call."""
    plain = {'temperature': 1.0, 'seed': 3}
    alone = self.ask(**plain).json()['choices'][0]['message']
    with futures.ThreadPoolExecutor(2) as pool:
      both = [pool.submit(self.ask, **fields) for fields in (plain, JSON_TEXT['chat'])]
    message = both[0].result().json()['choices'][0]['message']
    self.assertEqual(message, alone)


class SettingTest(parameterized.TestCase):

  @parameterized.parameters('refuse', 'auto')
  def test_session_refuses_or_samples_freely(self, setting):
    with gateway_test.running(forced_choice=setting) as server:
      service = server.app.service
      session = service.open_session(jax.random.key(0), sessions.Sampling(0.0, max_turn=8))
      for fields in ({'tools': TOOLS, 'tool_choice': 'required'}, JSON_TEXT['chat']):
        path = f'/s/{session.name}/v1/chat/completions'
        answer = gateway_test.post(server, ASKED | fields, path)
        if setting == 'refuse':
          self.assertEqual(answer.status_code, 400)
          self.assertIn('serve.forced_choice=auto', answer.json()['error']['message'])
        else:
          self.assertTrue(answer.ok, answer.text)
    self.assertEqual(session.counts['forced'], 2 * (setting == 'auto'))
    self.assertEqual(session.num_turns, 2 * (setting == 'auto'))

  def test_missing_library_is_named(self):
    with gateway_test.running() as server, mock.patch.dict('sys.modules', llguidance=None):
      answer = gateway_test.post(server, ASKED | JSON_TEXT['chat'])
    self.assertEqual(answer.status_code, 400)
    self.assertIn('pip install', answer.json()['error']['message'])


if __name__ == '__main__':
  absltest.main()
