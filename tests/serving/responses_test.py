"""OpenAI's Responses interface: items and messages, events, refusals, and rows of a session."""

import asyncio
import json
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import pydantic
import pytest
import requests

from stppo_jax import types
from stppo_jax.serving import answers
from stppo_jax.serving import responses
from stppo_jax.serving import sessions
from stppo_jax.text import tool_calls
from tests.serving import gateway_test

pytestmark = pytest.mark.guests(
    what='Responses interface of OpenAI',
    version='documentation of the interface',
    date='2026-11-26',
    touches='serving/responses.py',
)

QUESTION = gateway_test.QUESTION
SEARCH = {'type': 'function', 'strict': True, **gateway_test.SEARCH['function']}


def read(items, **fields):
  return responses.Reader().read({'model': 'tiny', 'input': items, **fields})


def call_item(call_id, name='search', **fields):
  return {'type': 'function_call', 'call_id': call_id, 'name': name, 'arguments': '{}', **fields}


def events(body, *chunks):
  """The events of an answer that has these chunks."""

  async def stream():
    for chunk in chunks:
      yield chunk

  async def collect():
    writer = responses.ResponsesWriter(lambda items: None, 'tiny', body, answer)
    return [event async for event in writer.events()]

  answer = mock.Mock(chunks=stream)
  answer.usage.return_value = dict.fromkeys(
      ('prompt_tokens', 'completion_tokens', 'total_tokens'), 1
  )
  return [json.loads(event.partition('\ndata: ')[2]) for event in asyncio.run(collect())]


class ReaderTest(parameterized.TestCase):

  def test_items_of_a_turn_are_one_message(self):
    body = read(
        [
            {'role': 'user', 'content': 'Hi'},
            {'type': 'reasoning', 'summary': [], 'encrypted_content': 'x'},
            {
                'type': 'message',
                'role': 'assistant',
                'content': [{'type': 'output_text', 'text': 'I see.', 'annotations': []}],
            },
            {'type': 'reasoning', 'summary': [], 'encrypted_content': 'y'},
            call_item('1'),
            call_item('2', 'open', namespace='files'),
            {'type': 'function_call_output', 'call_id': '1', 'output': 'A'},
            {
                'type': 'function_call_output',
                'call_id': '2',
                'output': [{'type': 'input_text', 'text': 'B'}],
            },
            call_item('3'),
            {'type': 'message', 'role': 'assistant', 'content': 'Done.'},
        ],
        instructions='Be brief.',
    )
    found = [
        (m['role'], m['content'], [c['function']['name'] for c in m.get('tool_calls', ())])
        for m in body.conversation
    ]
    self.assertEqual(
        found,
        [
            ('system', 'Be brief.', []),
            ('user', 'Hi', []),
            ('assistant', 'I see.', ['search', 'files.open']),
            ('tool', 'A', []),
            ('tool', 'B', []),
            ('assistant', '', ['search']),
            ('assistant', 'Done.', []),
        ],
    )

  def test_fields_of_real_clients_are_accepted(self):
    body = read(
        'Hi',
        store=False,
        include=['reasoning.encrypted_content'],
        parallel_tool_calls=True,
        truncation='auto',
        metadata={'a': 'b'},
        reasoning={'effort': 'low', 'summary': 'auto'},
        text={'format': {'type': 'text'}, 'verbosity': 'low'},
        prompt_cache_key='key',
        client_metadata={'thread': '1'},
        stream_options={'include_obfuscation': False},
        previous_response_id=None,
        max_output_tokens=7,
        tools=[{'type': 'namespace', 'name': 'files', 'tools': [SEARCH]}, SEARCH],
    )
    self.assertEqual((body.most_tokens, body.parallel_tool_calls, body.logprobs), (7, True, False))
    self.assertEqual(body.echoed['metadata'], {'a': 'b'})
    names = [tool['function']['name'] for tool in body.tools]
    self.assertEqual(names, ['files.search', 'search'])

  @parameterized.parameters(
      ({'previous_response_id': 'resp_1'}, 'send the whole conversation as .* store=false'),
      ({'conversation': {'id': 'c'}}, 'send the whole conversation'),
      ({'prompt': {'id': 'p'}}, 'send the whole conversation'),
      ({'tools': [{'type': 'web_search'}]}, "'web_search': leave it out, or send a tool of type"),
      ({'input': [{'type': 'compaction', 'id': 'x'}]}, 'send items of the types message'),
      ({'input': [{'role': 'user', 'content': [{'type': 'input_image'}]}]}, 'input_image'),
      ({'input': []}, 'input'),
      ({'background': True}, 'background'),
      ({'unheard_of': 1}, 'unheard_of'),
  )
  def test_refusal_says_what_to_send(self, fields, message):
    with self.assertRaisesRegex(pydantic.ValidationError, message):
      responses.Reader().read({'input': 'Hi', **fields})

  def test_reader_keeps_latest_items_only(self):
    reader = responses.Reader(most=2)
    items = [
        {'id': f'msg_{i}', 'type': 'message', 'role': 'assistant', 'content': f'{i}'}
        for i in range(3)
    ]
    reader.keep(items[:2])
    reader.keep(items[2:])
    refer = lambda name: {'input': [{'type': 'item_reference', 'id': name}]}
    for i in (1, 2):
      self.assertEqual(reader.read(refer(f'msg_{i}')).conversation[0]['content'], f'{i}')
    for name in ('msg_0', None, ['x']):
      with self.assertRaisesRegex(Exception, 'send the whole item'):
        reader.read(refer(name))


class WriterTest(parameterized.TestCase):

  @parameterized.parameters(('Text', 1), ('', 0))
  def test_events_add_up_to_the_answer(self, text, num_messages):
    calls = (tool_calls.Call('search', {'query': 'é'}), tool_calls.Call('files.open', {}))
    body = read('Hi', tools=[SEARCH, {'type': 'namespace', 'name': 'files', 'tools': []}])
    found = events(body, answers.Chunk(0, text, [1], [b'T'], [-1.0], [0], 'tool_calls', calls))
    self.assertEqual([event['sequence_number'] for event in found], list(range(len(found))))
    end = found[-1]
    self.assertEqual((end['type'], end['response']['status']), ('response.completed', 'completed'))
    output = end['response']['output']
    done = [event['item'] for event in found if event['type'] == 'response.output_item.done']
    self.assertEqual(output, done)
    self.assertEqual(
        [e['output_index'] for e in found if e['type'].endswith('item.added')],
        list(range(len(output))),
    )
    self.assertLen(output, num_messages + 2)
    first, second = output[num_messages:]
    self.assertEqual((first['name'], json.loads(first['arguments'])), ('search', {'query': 'é'}))
    self.assertEqual((second['name'], second['namespace']), ('open', 'files'))
    deltas = [event['delta'] for event in found if event['type'].endswith('.delta')]
    self.assertEqual(''.join(deltas), text + first['arguments'] + second['arguments'])

  @parameterized.parameters(
      ('length', (), 'message'), ('tool_calls', (tool_calls.Call('search', {}),), 'function_call')
  )
  def test_answer_at_limit_is_incomplete(self, finish, calls, kind):
    chunk = answers.Chunk(0, '', [1], [b''], [-1.0], [0], finish, calls, was_cut=True)
    found = events(read('Hi', tools=[SEARCH]), chunk)
    end = found[-1]['response']
    self.assertEqual(found[-1]['type'], 'response.incomplete')
    self.assertEqual(end['incomplete_details'], {'reason': 'max_output_tokens'})
    self.assertEqual([item['type'] for item in end['output']], [kind])


class RouteTest(parameterized.TestCase):

  @parameterized.parameters(True, False)
  def test_tool_loop_is_one_row(self, refers):
    """A client may send the items back, or refer to its messages as AI SDK does."""
    with gateway_test.running(tool_form='tags') as server:
      service = server.app.service
      session = service.open_session(jax.random.key(0), sessions.Sampling(0.0, max_turn=40))
      items = [{'role': 'user', 'content': QUESTION}]
      for number in range(3):
        answer = gateway_test.post(
            server,
            {'model': 'any', 'input': items, 'tools': [SEARCH]},
            f'/s/{session.name}/v1/responses',
        ).json()
        self.assertEqual(answer['turn'], number + 1)
        for item in answer['output']:
          is_call = item['type'] == 'function_call'
          if refers and not is_call:
            item = {'type': 'item_reference', 'id': item['id']}
          items.append(item)
          if is_call:
            result = f'<information>Paris {number}</information>\n'
            items.append(
                {'type': 'function_call_output', 'call_id': item['call_id'], 'output': result}
            )
        if not is_call:
          items.append({'role': 'user', 'content': 'More.\n'})
      (row,) = session.episodes(types.Task('1', QUESTION, ('Paris',)), 0)
      self.assertIn('function_call', str(items))
      self.assertLen(row.turns, 3)
      self.assertEqual(row.counts['rewritten'], 0)

  def test_whole_and_streamed_answers_are_those_of_chat(self):
    with gateway_test.running() as server:
      asked = {'model': 'tiny', 'temperature': 0}
      messages = [{'role': 'user', 'content': QUESTION}]
      chat = gateway_test.post(
          server, asked | {'messages': messages, 'max_tokens': 40, 'logprobs': True}
      ).json()['choices'][0]
      asked |= {'input': QUESTION, 'max_output_tokens': 40}
      asked['include'] = ['message.output_text.logprobs']
      whole = gateway_test.post(server, asked, '/v1/responses').json()
      (part,) = whole['output'][0]['content']
      self.assertEqual(part['text'], chat['message']['content'])
      self.assertEqual(part['logprobs'], chat['logprobs']['content'])
      response = requests.post(
          f'{server.url}/v1/responses', json=asked | {'stream': True}, timeout=120
      )
      lines = response.text.split('\n\n')
      found = [json.loads(line.partition('\ndata: ')[2]) for line in lines if line]
      self.assertEqual(found[-1]['response']['output'][0]['content'], [part])
      deltas = [event for event in found if event['type'] == 'response.output_text.delta']
      self.assertGreater(len(deltas), 1)
      self.assertEqual(''.join(event['delta'] for event in deltas), part['text'])
      self.assertEqual(sum([event['logprobs'] for event in deltas], []), part['logprobs'])

  def test_long_prompt_has_code_and_param(self):
    with gateway_test.running() as server:
      answer = gateway_test.post(server, {'input': 'x ' * 1000}, '/v1/responses')
      error = answer.json()['error']
    self.assertEqual(answer.status_code, 400)
    self.assertEqual((error['code'], error['param']), ('context_length_exceeded', 'input'))


if __name__ == '__main__':
  absltest.main()
