"""smolagents: `smol_agent.py code` or `tools`."""

import common
import smolagents

kinds = {'code': smolagents.CodeAgent, 'tools': smolagents.ToolCallingAgent}
model = smolagents.OpenAIServerModel(common.MODEL, api_base=common.BASE_URL, api_key='none')
tool = smolagents.tool(common.search)
agent = kinds[common.KIND](tools=[tool], model=model, max_steps=4, verbosity_level=0)
common.end(agent.run(common.PROMPT))
