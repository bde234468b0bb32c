"""pydantic-ai with agents that a tool starts: `pydantic_sub_agent.py`, or with `rewards`."""

import json
import urllib.request

import common
import pydantic_ai
from pydantic_ai.models import openai as models
from pydantic_ai.providers import openai as providers

provider = providers.OpenAIProvider(base_url=common.BASE_URL, api_key='none')
model = models.OpenAIChatModel(common.MODEL, provider=provider)
sub_agent = pydantic_ai.Agent(model)
sub_agent.tool_plain(common.search)
agent = pydantic_ai.Agent(model, model_settings={'extra_headers': {'X-Session-Id': 'main'}})
started = []


@agent.tool_plain
async def search(query: str) -> str:
  """Asks an agent that can search.

  Args:
    query: the question
  """
  name = f'sub-{len(started)}'
  started.append(name)
  headers = {'X-Session-Id': name, 'x-parent-session-id': 'main'}
  result = await sub_agent.run(query, model_settings={'extra_headers': headers})
  return result.output


answer = agent.run_sync(common.PROMPT).output
if common.KIND == 'rewards':
  for name in started:
    body = json.dumps({'reward': 0.25, 'session': name}).encode()
    url = common.ANTHROPIC_URL + '/reward'
    headers = {'Content-Type': 'application/json'}
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).close()
common.end(answer)
