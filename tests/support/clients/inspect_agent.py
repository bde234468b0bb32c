"""inspect-ai: a task of one question, played by its react agent."""

import tempfile

import common
import inspect_ai
from inspect_ai import agent
from inspect_ai import dataset
from inspect_ai import model
from inspect_ai import scorer
from inspect_ai import tool


@tool.tool
def search():
  async def execute(query: str):
    """Searches for facts.

    Args:
      query: the words to look for
    """
    return common.search(query)

  return execute


policy = model.get_model(
    f'openai-api/gateway/{common.MODEL}', base_url=common.BASE_URL, api_key='none'
)
task = inspect_ai.Task(
    dataset=[dataset.Sample(common.PROMPT, target=common.TASK['answers'][0])],
    solver=agent.react(tools=[search()], submit=False, prompt=None),
    scorer=scorer.includes(),
)
with tempfile.TemporaryDirectory() as folder:
  (log,) = inspect_ai.eval(task, policy, display='none', log_dir=folder, message_limit=12)
  assert log.status == 'success', log.error
  common.end(log.samples[0].output.completion)
