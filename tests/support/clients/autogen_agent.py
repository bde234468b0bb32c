"""AutoGen's AssistantAgent: `autogen_agent.py run` or `stream`."""

import asyncio

from autogen_agentchat import agents
from autogen_ext.models import openai as models
import common

INFO = {
    'vision': False,
    'function_calling': True,
    'json_output': True,
    'family': 'unknown',
    'structured_output': True,
}


async def main():
  client = models.OpenAIChatCompletionClient(
      model=common.MODEL, base_url=common.BASE_URL, api_key='none', model_info=INFO, max_retries=0
  )
  agent = agents.AssistantAgent(
      'agent',
      model_client=client,
      tools=[common.search],
      system_message=None,
      max_tool_iterations=5,
      model_client_stream=common.KIND == 'stream',
  )
  *_, result = [item async for item in agent.run_stream(task=common.PROMPT)]
  return result.messages[-1].content


common.end(asyncio.run(main()))
