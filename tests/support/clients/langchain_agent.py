"""LangChain with LangGraph's agent: `langchain_agent.py chat`, `stream` or `responses`."""

import common
from langchain_core import tools
import langchain_openai
from langgraph import prebuilt

model = langchain_openai.ChatOpenAI(
    model=common.MODEL,
    base_url=common.BASE_URL,
    api_key='none',
    max_retries=0,
    streaming=common.KIND == 'stream',
    use_responses_api=common.KIND == 'responses',
)
agent = prebuilt.create_react_agent(model, [tools.tool(common.search)])
messages = agent.invoke({'messages': [('user', common.PROMPT)]})['messages']
common.end(messages[-1].content)
