"""Frameworks of others as agent programs, in environments of their own; skipped without them.

`scripts/client_envs.sh` makes the environments.
"""

import json
import sys
import tempfile
import time

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from stppo_jax import types
from stppo_jax.envs import commands
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.training import loop
from tests import rollouts_test
from tests.support import client_envs
from tests.support import scripted_gateway
from tests.support import tiny_run

TASK = {'id': 't', 'question': 'What is the capital of France?', 'answers': ['Paris']}
TOOL_LOOP = (
    client_envs.thought('I look it up.') + client_envs.call('search', query='capital of  "France"'),
    client_envs.thought('Again.') + 'Now é.\n' + client_envs.call('search', query='Paris é'),
    client_envs.thought('I know it.') + 'The answer is Paris.',
)
FINAL_ANSWER = client_envs.thought('I know it.') + client_envs.call('final_answer', answer='Paris')
CODE = (
    client_envs.thought('Search.') + 'Thought: search\n<code>\nprint(search("a  b"))\n</code>',
    client_envs.thought('Again.') + 'Thought: é\n<code>\nx = search("é")\nprint(x)\n</code>',
    client_envs.thought('End.') + 'Thought: end\n<code>\nfinal_answer("Paris")\n</code>',
)
BASH = (
    client_envs.thought('Files.') + client_envs.call('Bash', command='echo "a  é" > a && ls'),
    client_envs.thought('Read.') + 'I read.\n' + client_envs.call('Bash', command='cat a'),
    client_envs.thought('Done.') + 'The answer is Paris.',
)
# (environment and program, arguments, turns, serve.forced_choice)
CASES = (
    ('agents', 'openai_agents', 'responses', TOOL_LOOP, 'refuse'),
    ('agents', 'openai_agents', 'responses_stream', TOOL_LOOP, 'refuse'),
    ('agents', 'openai_agents', 'chat', TOOL_LOOP, 'refuse'),
    ('agents', 'openai_agents', 'chat_stream', TOOL_LOOP, 'refuse'),
    ('agents', 'langchain_agent', 'chat', TOOL_LOOP, 'refuse'),
    ('agents', 'langchain_agent', 'stream', TOOL_LOOP, 'refuse'),
    ('agents', 'langchain_agent', 'responses', TOOL_LOOP, 'refuse'),
    ('agents', 'pydantic_agent', 'chat', TOOL_LOOP, 'refuse'),
    ('agents', 'pydantic_agent', 'responses', TOOL_LOOP, 'refuse'),
    ('agents', 'pydantic_agent', 'anthropic', TOOL_LOOP, 'refuse'),
    ('agents', 'anthropic_agent', 'create', TOOL_LOOP, 'refuse'),
    ('agents', 'anthropic_agent', 'stream', TOOL_LOOP, 'refuse'),
    ('agents', 'anthropic_agent', 'runner', TOOL_LOOP, 'refuse'),
    ('smol', 'litellm_agent', 'chat', TOOL_LOOP, 'refuse'),
    ('smol', 'litellm_agent', 'stream', TOOL_LOOP, 'refuse'),
    ('smol', 'smol_agent', 'code', CODE, 'refuse'),
    ('smol', 'smol_agent', 'tools', (*TOOL_LOOP[:2], FINAL_ANSWER), 'auto'),
    ('autogen', 'autogen_agent', 'run', TOOL_LOOP, 'refuse'),
    ('autogen', 'autogen_agent', 'stream', TOOL_LOOP, 'refuse'),
    ('inspect', 'inspect_agent', '', TOOL_LOOP, 'refuse'),
)


def command(environment, program, *arguments):
  """Returns the words that start a program of tests/support/clients."""
  python = client_envs.find(f'{environment}/bin/python')
  return [python, str(client_envs.SCRIPTS / f'{program}.py'), *filter(None, arguments)]


@pytest.mark.slow
class ToolLoopTest(parameterized.TestCase):
  """Three turns with two calls and thoughts are one row, whose ids are the sampled ones."""

  def check(self, words, turns, forced):
    with scripted_gateway.session(turns, forced) as (url, session, scheduler):
      process = commands.Process(words, TASK, url, 'tiny')
      try:
        end = time.monotonic() + 300
        while not process.wait(1.0):
          self.assertLess(time.monotonic(), end)
        result = process.result()
      finally:
        process.end()
      rows = session.episodes(types.Task('t', TASK['question'], ('Paris',)), 0)
      difference = session.difference
    sampled = [turn.tokens.tolist() for row in rows for turn in row.turns]
    self.assertEqual(sampled, scheduler.sampled)
    self.assertLen(sampled, len(turns))
    self.assertEqual(rows[0].counts['rewritten'], 0, difference)
    self.assertLen(rows, 1)
    self.assertEqual(result.reward, 1.0)
    return result

  @parameterized.parameters(*CASES)
  def test_tool_loop_is_one_row(self, environment, program, argument, turns, forced):
    result = self.check(command(environment, program, argument), turns, forced)
    self.assertEqual(result.metrics, {'calls': 2})

  def test_claude_code_is_one_row(self):
    program = client_envs.find('claude/node_modules/.bin/claude')
    script = str(client_envs.SCRIPTS / 'claude_code.py')
    self.check([sys.executable, script, program], BASH, 'refuse')


@pytest.mark.slow
class TrainingTest(parameterized.TestCase):
  """Two updates of the embedded model, which calls the tool itself."""

  @parameterized.parameters(
      ('agents', 'openai_agents', 'responses'),
      ('agents', 'langchain_agent', 'chat'),
      ('agents', 'pydantic_agent', 'chat'),
      ('agents', 'anthropic_agent', 'create'),
      ('smol', 'litellm_agent', 'chat'),
      ('autogen', 'autogen_agent', 'stream'),
  )
  def test_two_updates_have_whole_rows(self, environment, program, argument):
    words = command(environment, program, argument)
    config = rollouts_test.make_config(f'gateway:command:{" ".join(words)}')
    config.train.updates = 2
    config.train.episodes = config.train.mini_batch = 4
    config.rollout.group_size = 2
    config.eval.every = 0
    config.eval.episodes = 1
    config.serve.rows = 2
    workdir = self.enterContext(tempfile.TemporaryDirectory())
    with tiny_run.on_one_device():
      loop.start(config, workdir)
    updates = [row for row in metrics_lib.read_metrics(workdir) if 'env/segments/mean' in row]
    self.assertLen(updates, 2)
    for row in updates:
      self.assertEqual(row['env/segments/mean'], 1, json.dumps(row))
      self.assertEqual(row['env/rewritten/mean'], 0)
      self.assertEqual(row['env/crashed/mean'], 0)
    self.assertGreater(max(row['env/calls/mean'] for row in updates), 0)


if __name__ == '__main__':
  absltest.main()
