"""Answers that follow a JSON schema or must call a tool, with the library that masks tokens."""

from concurrent import futures
import importlib.util
import json
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jsonschema
import numpy as np

from stppo_jax import tokenizer as chat
from stppo_jax.envs import tool_calls
from stppo_jax.rollout import prepare
from stppo_jax.serving import grammars
from stppo_jax.serving import sessions
from tests import gateway_test

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
