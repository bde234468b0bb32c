"""openai-agents: `openai_agents.py chat`, `responses`, `chat_stream` or `responses_stream`."""

import asyncio

import agents
import common
import openai

agents.set_tracing_disabled(True)
name, _, is_streamed = common.KIND.partition('_')
models = {'chat': agents.OpenAIChatCompletionsModel, 'responses': agents.OpenAIResponsesModel}


async def main():
  client = openai.AsyncOpenAI(base_url=common.BASE_URL, api_key='none', max_retries=0)
  agent = agents.Agent(
      'agent', model=models[name](common.MODEL, client), tools=[agents.function_tool(common.search)]
  )
  if is_streamed:
    result = agents.Runner.run_streamed(agent, common.PROMPT)
    async for _ in result.stream_events():
      pass
    return result.final_output
  return (await agents.Runner.run(agent, common.PROMPT)).final_output


common.end(asyncio.run(main()))
