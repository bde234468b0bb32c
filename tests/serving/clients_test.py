"""Programs that others wrote, pointed at the gateway; each test is skipped without its package."""

import importlib.util
import tempfile

from absl.testing import absltest
import jax
import pytest

from stppo_jax import types
from stppo_jax.serving import sessions
from tests.serving import gateway_test

QUESTION = gateway_test.QUESTION


def needs(module):
  return absltest.skipIf(importlib.util.find_spec(module) is None, f'{module} is not installed')


@pytest.mark.guests(
    what='OpenAI SDK',
    version='openai==3.57.0',
    date='2026-11-28',
    touches='serving/api.py serving/answers.py',
)
@needs('openai')
class OpenAiTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.server = cls.enterClassContext(gateway_test.running(tool_form='tags', key='secret'))
    import openai

    cls.client = openai.OpenAI(
        base_url=cls.server.url + '/v1', api_key='secret', max_retries=0, timeout=60
    )

  def create(self, **fields):
    asked = {'model': 'tiny', 'messages': [{'role': 'user', 'content': QUESTION}], 'temperature': 0}
    return self.client.chat.completions.create(**{**asked, 'max_completion_tokens': 40, **fields})

  def test_answers_and_streams(self):
    whole = self.create(stop=['</search>'], logprobs=True)
    self.assertEqual(whole.choices[0].finish_reason, 'stop')
    self.assertLen(whole.choices[0].logprobs.content, whole.usage.completion_tokens)
    with self.create(
        stop=['</search>'], stream=True, stream_options={'include_usage': True}
    ) as stream:
      chunks = list(stream)
    text = ''.join(c.choices[0].delta.content or '' for c in chunks if c.choices)
    self.assertEqual(text, whole.choices[0].message.content)
    self.assertEqual(chunks[-1].usage, whole.usage)
    self.assertEqual(self.client.models.list().data[0].id, 'tiny')

  def test_stream_helper_reads_tools(self):
    tools = [gateway_test.SEARCH]
    with self.client.chat.completions.stream(
        model='tiny', messages=[{'role': 'user', 'content': QUESTION}], temperature=0, tools=tools
    ) as stream:
      streamed = stream.get_final_completion().choices[0].message
    message = self.create(tools=tools).choices[0].message
    (call,) = message.tool_calls
    self.assertEqual(call.function.name, 'search')
    self.assertEqual(streamed.tool_calls[0].function.arguments, call.function.arguments)
    result = {'role': 'tool', 'tool_call_id': call.id, 'content': '<information></information>\n'}
    asked = [{'role': 'user', 'content': QUESTION}, message, result]
    self.assertIsNotNone(self.create(messages=asked, tools=tools).choices[0].message)

  def test_completions(self):
    answer = self.client.completions.create(
        model='tiny', prompt=QUESTION, max_tokens=5, temperature=0, n=2, logprobs=1
    )
    self.assertEqual(answer.choices[0].text, answer.choices[1].text)
    self.assertLen(answer.choices[0].logprobs.tokens, 5)

  def test_responses_stream_and_call_tools(self):
    asked = {'model': 'tiny', 'input': QUESTION, 'temperature': 0, 'max_output_tokens': 40}
    tool = {'type': 'function', 'strict': True, **gateway_test.SEARCH['function']}
    whole = self.client.responses.create(**asked, tools=[tool])
    with self.client.responses.stream(**asked, tools=[tool]) as stream:
      streamed = stream.get_final_response()
    self.assertEqual(streamed.output_text, whole.output_text)
    self.assertEqual(streamed.usage, whole.usage)
    self.assertEqual(streamed.output[-1].arguments, whole.output[-1].arguments)
    result = '<information></information>\n'
    call_id = whole.output[-1].call_id
    asked['input'] = [
        {'role': 'user', 'content': QUESTION},
        *whole.output,
        {'type': 'function_call_output', 'call_id': call_id, 'output': result},
    ]
    self.assertNotEmpty(self.client.responses.create(**asked, tools=[tool]).output)

  def test_errors_have_openai_types(self):
    import openai

    with self.assertRaises(openai.BadRequestError) as caught:
      self.create(temperature=-1)
    self.assertEqual(caught.exception.param, 'temperature')
    with self.assertRaises(openai.NotFoundError):
      self.create(model='another')
    with self.assertRaises(openai.AuthenticationError):
      self.client.with_options(api_key='wrong').models.list()
    with self.assertRaises(openai.BadRequestError) as caught:
      self.create(messages=[{'role': 'user', 'content': 'x ' * 1000}])
    self.assertEqual(caught.exception.code, 'context_length_exceeded')

  def test_closed_stream_is_cancelled(self):
    with self.create(stream=True, temperature=2.0, n=8, max_completion_tokens=200) as stream:
      next(iter(stream))
    self.assertIsNotNone(self.create().choices[0].message)


@pytest.mark.guests(
    what='Anthropic SDK',
    version='anthropic==2.14.0',
    date='2026-11-28',
    touches='serving/messages.py',
)
@needs('anthropic')
class AnthropicTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.server = cls.enterClassContext(gateway_test.running(tool_form='tags', key='secret'))
    cls.client = cls.connect(cls.server.url)

  @classmethod
  def connect(cls, url):
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key='secret', max_retries=0, timeout=60)

  def asked(self, **fields):
    asked = {'model': 'tiny', 'messages': [{'role': 'user', 'content': QUESTION}]}
    greedy = {'temperature': 0}  # the client's own methods no longer have it
    return {**asked, 'max_tokens': 40, 'extra_body': greedy, **fields}

  def create(self, client=None, **fields):
    return (client or self.client).messages.create(**self.asked(**fields))

  def stream(self, **fields):
    with self.client.messages.stream(**self.asked(**fields)) as stream:
      return stream.get_final_message()

  def test_answers_and_streams(self):
    whole = self.create(stop_sequences=['</search>'])
    self.assertEqual((whole.stop_reason, whole.stop_sequence), ('stop_sequence', '</search>'))
    (block,) = whole.content
    self.assertStartsWith(block.text, '<think>')
    streamed = self.stream(stop_sequences=['</search>'])
    self.assertEqual(streamed.content[0].text, block.text)
    self.assertEqual(streamed.stop_reason, 'stop_sequence')
    self.assertEqual(streamed.usage.output_tokens, whole.usage.output_tokens)
    with self.client.messages.stream(**self.asked()) as stream:
      self.assertGreater(len(list(stream.text_stream)), 1)
    self.assertEqual(self.create(max_tokens=3).stop_reason, 'max_tokens')

  def test_system_prompt_is_that_of_chat(self):
    system = [{'type': 'text', 'text': 'Be brief. ', 'cache_control': {'type': 'ephemeral'}}]
    whole = self.create(
        system=system,
        thinking={'type': 'adaptive'},
        output_config={'effort': 'low'},
        cache_control={'type': 'ephemeral'},
        metadata={'user_id': 'me'},
    )
    messages = [{'role': 'system', 'content': 'Be brief. '}, {'role': 'user', 'content': QUESTION}]
    fields = {'messages': messages, 'model': 'tiny', 'max_tokens': 40, 'temperature': 0}
    key = {'Authorization': 'Bearer secret'}
    chat = gateway_test.post(self.server, fields, headers=key).json()
    self.assertEqual(whole.content[0].text, chat['choices'][0]['message']['content'])
    self.assertEqual(whole.usage.input_tokens, chat['usage']['prompt_tokens'])
    asked = self.asked(system=system)
    count = self.client.messages.count_tokens(
        model='tiny', messages=asked['messages'], system=system
    )
    self.assertEqual(count.input_tokens, whole.usage.input_tokens)

  def test_tools_are_called_and_answered(self):
    tools = [{'name': 'search', 'input_schema': gateway_test.SEARCH['function']['parameters']}]
    whole = self.create(tools=tools)
    self.assertEqual(whole.stop_reason, 'tool_use')
    call = whole.content[-1]
    self.assertEqual((call.type, call.name), ('tool_use', 'search'))
    self.assertIn('query', call.input)
    streamed = self.stream(tools=tools)
    self.assertEqual([block.type for block in streamed.content], [x.type for x in whole.content])
    self.assertEqual(streamed.content[-1].input, call.input)
    self.assertEqual(streamed.content[0].text, whole.content[0].text)

  def test_errors_have_anthropic_types(self):
    import anthropic

    with self.assertRaises(anthropic.BadRequestError) as caught:
      self.create(extra_body={'temperature': -1})
    self.assertIn('temperature', caught.exception.message)
    self.assertEqual(caught.exception.body['error']['type'], 'invalid_request_error')
    self.assertEqual(self.create(model='claude-haiku-4-5').model, 'tiny')  # as Claude Code asks
    with self.assertRaises(anthropic.AuthenticationError):
      self.create(self.client.with_options(api_key='wrong'))
    with self.assertRaisesRegex(anthropic.BadRequestError, 'prompt is too long'):
      self.create(messages=[{'role': 'user', 'content': 'x ' * 1000}])
    image = {'type': 'image', 'source': {'type': 'url', 'url': 'http://x'}}
    with self.assertRaisesRegex(anthropic.BadRequestError, "'image'"):
      self.create(messages=[{'role': 'user', 'content': [image]}])

  def test_compaction_starts_new_segment(self):
    """A tool result continues the row. A summary in place of the history starts another one."""
    service = self.server.app.service
    sampling = sessions.Sampling(0.0, max_turn=40)
    session = service.open_session(jax.random.key(0), sampling)
    client = self.connect(f'{self.server.url}/s/{session.name}')
    tools = [{'name': 'search', 'input_schema': gateway_test.SEARCH['function']['parameters']}]
    history = [{'role': 'user', 'content': QUESTION}]
    for number in range(2):
      answer = self.create(client, messages=history, tools=tools, model='claude')
      self.assertEqual(answer.to_dict()['turn'], number + 1)
      calls = [block for block in answer.content if block.type == 'tool_use']
      found = [{'type': 'text', 'text': f'<information>Paris {number}</information>\n'}]
      content = [
          {'type': 'tool_result', 'tool_use_id': call.id, 'content': found} for call in calls
      ]
      history += [{'role': 'assistant', 'content': answer.content}]
      history += [{'role': 'user', 'content': content or found}]
    self.assertTrue(any('tool_result' in str(message) for message in history))
    self.create(client, messages=history, tools=tools)
    summary = [{'role': 'user', 'content': f'Summary: Paris. {QUESTION}'}]
    self.create(client, messages=summary, tools=tools)
    rows = session.episodes(types.Task('1', QUESTION, ('Paris',)), 0)
    service.end_session(session.name)
    self.assertEqual([len(row.turns) for row in rows], [3, 1])
    self.assertEqual({row.counts['rewritten'] for row in rows}, {0.0})
    self.assertEqual({row.counts['conversations'] for row in rows}, {2.0})
    self.assertEqual({row.counts['segments'] for row in rows}, {2.0})


@pytest.mark.guests(
    what='OpenAI Agents SDK',
    version='openai-agents==0.24.0',
    date='2026-11-26',
    touches='serving/responses.py',
)
@needs('agents')
class OpenAiAgentsTest(absltest.TestCase):
  """The agent framework of OpenAI, with its default, the Responses interface."""

  def test_tool_loop_of_agent_is_one_row(self):
    import agents
    import openai

    queries = []

    @agents.function_tool
    def search(query: str) -> str:
      """Searches."""
      queries.append(query)
      return '<information> France: The capital of France is Paris.\n</information>\n'

    with gateway_test.running(tool_form='tags') as server:
      service = server.app.service
      session = service.open_session(jax.random.key(0), sessions.Sampling(0.0, max_turn=100))
      url = f'{server.url}/s/{session.name}/v1'
      client = openai.AsyncOpenAI(base_url=url, api_key='none', max_retries=0)
      model = agents.OpenAIResponsesModel('tiny', client)
      settings = agents.ModelSettings(extra_body={'stop': ['</answer>']})
      agent = agents.Agent('searcher', model=model, tools=[search], model_settings=settings)
      run_config = agents.RunConfig(tracing_disabled=True)
      answer = agents.Runner.run_sync(agent, QUESTION, run_config=run_config).final_output
      (row,) = session.episodes(types.Task('1', QUESTION, ('Paris',)), 0)
    self.assertNotEmpty(queries)
    self.assertIn('<answer>', answer)
    self.assertLen(row.turns, len(queries) + 1)


@pytest.mark.guests(
    what='pydantic-ai',
    version='pydantic-ai-slim[openai]==2.68.0',
    date='2026-11-26',
    touches='serving/api.py',
)
@needs('pydantic_ai')
class PydanticAiTest(absltest.TestCase):
  """An agent framework: its tool loop, in the model's plain-tag form."""

  def test_agent_calls_tool_and_reads_result(self):
    import pydantic_ai
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers import openai as providers

    with gateway_test.running(tool_form='tags') as server:
      provider = providers.OpenAIProvider(base_url=server.url + '/v1', api_key='none')
      model = models.OpenAIChatModel('tiny', provider=provider)
      settings = {'temperature': 0.0, 'max_tokens': 40}
      agent = pydantic_ai.Agent(model, model_settings=settings)
      queries = []

      @agent.tool_plain
      def search(query: str) -> str:
        """Searches."""
        queries.append(query)
        return '<information> France: The capital of France is Paris.\n</information>\n'

      answer = agent.run_sync(QUESTION).output
    self.assertNotEmpty(queries)
    self.assertIn('<answer> Paris', answer)


@pytest.mark.guests(
    what='inspect-ai', version='inspect-ai==0.3.285', date='2026-11-26', touches='serving/api.py'
)
@needs('inspect_ai')
class InspectTest(absltest.TestCase):
  """An evaluation harness: a task of two questions."""

  def test_task_is_run_and_scored(self):
    import inspect_ai
    from inspect_ai import dataset
    from inspect_ai import model as models
    from inspect_ai import scorer
    from inspect_ai import solver

    with gateway_test.running() as server:
      model = models.get_model(
          'openai-api/gateway/tiny', base_url=server.url + '/v1', api_key='none'
      )
      task = inspect_ai.Task(
          dataset=[dataset.Sample(QUESTION, target=x) for x in ('France', 'nowhere')],
          solver=solver.generate(),
          scorer=scorer.includes(),
          config=models.GenerateConfig(temperature=0, max_tokens=40, stop_seqs=['</search>']),
      )
      (log,) = inspect_ai.eval(
          task, model, display='none', log_dir=self.enterContext(tempfile.TemporaryDirectory())
      )
    self.assertEqual(log.status, 'success')
    self.assertEqual(log.results.scores[0].metrics['accuracy'].value, 0.5)


if __name__ == '__main__':
  absltest.main()
