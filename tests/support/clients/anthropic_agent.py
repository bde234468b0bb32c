"""Anthropic's client: `anthropic_agent.py create`, `stream` or `runner`."""

import anthropic
import common

client = anthropic.Anthropic(base_url=common.ANTHROPIC_URL, api_key='none', max_retries=0)
tool = anthropic.beta_tool(common.search)
messages = [{'role': 'user', 'content': common.PROMPT}]
fields = {'model': common.MODEL, 'max_tokens': 1000, 'messages': messages}
if common.KIND == 'runner':
  message = client.beta.messages.tool_runner(tools=[tool], thread=False, **fields).until_done()
else:
  while True:
    if common.KIND == 'stream':
      with client.messages.stream(tools=[tool.to_dict()], **fields) as stream:
        message = stream.get_final_message()
    else:
      message = client.messages.create(tools=[tool.to_dict()], **fields)
    results = [
        {'type': 'tool_result', 'tool_use_id': block.id, 'content': tool.call(block.input)}
        for block in message.content
        if block.type == 'tool_use'
    ]
    if not results:
      break
    messages += [
        {'role': 'assistant', 'content': message.content},
        {'role': 'user', 'content': results},
    ]
common.end(message.content[-1].text)
