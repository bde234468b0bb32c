"""LangChain's agent, whose middleware replaces a long history by a summary of the model."""

import common
from langchain import agents
from langchain.agents import middleware
from langchain_core import tools
import langchain_openai

model = langchain_openai.ChatOpenAI(
    model=common.MODEL,
    base_url=common.BASE_URL,
    api_key='none',
    max_retries=0,
    default_headers={'X-Session-Id': 'main'},
)
compaction = middleware.SummarizationMiddleware(
    model=model,
    trigger=('messages', 4),
    keep=('messages', 2),
    summary_prompt='Summarise:\n{messages}',
)
agent = agents.create_agent(model, [tools.tool(common.search)], middleware=[compaction])
messages = agent.invoke({'messages': [('user', common.PROMPT)]})['messages']
common.end(messages[-1].content)
