"""Programs that others wrote, pointed at the gateway; each test is skipped without its package."""

import importlib.util
import tempfile

from absl.testing import absltest

from tests import gateway_test

QUESTION = gateway_test.QUESTION


def needs(module):
  return absltest.skipIf(importlib.util.find_spec(module) is None, f'{module} is not installed')


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
