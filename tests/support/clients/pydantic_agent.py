"""pydantic-ai: `pydantic_agent.py chat`, `responses` or `anthropic`."""

import common
import pydantic_ai

if common.KIND == 'anthropic':
  from pydantic_ai.models import anthropic as models
  from pydantic_ai.providers import anthropic as providers

  provider = providers.AnthropicProvider(base_url=common.ANTHROPIC_URL, api_key='none')
  model = models.AnthropicModel(common.MODEL, provider=provider)
else:
  from pydantic_ai.models import openai as models
  from pydantic_ai.providers import openai as providers

  kinds = {'chat': models.OpenAIChatModel, 'responses': models.OpenAIResponsesModel}
  provider = providers.OpenAIProvider(base_url=common.BASE_URL, api_key='none')
  model = kinds[common.KIND](common.MODEL, provider=provider)
agent = pydantic_ai.Agent(model)
agent.tool_plain(common.search)
common.end(agent.run_sync(common.PROMPT).output)
