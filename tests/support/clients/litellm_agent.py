"""litellm: `litellm_agent.py chat` or `stream`."""

import json

import common
import litellm

litellm.suppress_debug_info = True
parameters = {'type': 'object', 'properties': {'query': {'type': 'string'}}, 'required': ['query']}
tool = {'type': 'function', 'function': {'name': 'search', 'parameters': parameters}}
messages = [{'role': 'user', 'content': common.PROMPT}]
is_streamed = common.KIND == 'stream'
while True:
  answer = litellm.completion(
      f'openai/{common.MODEL}',
      messages,
      api_base=common.BASE_URL,
      api_key='none',
      tools=[tool],
      num_retries=0,
      stream=is_streamed,
  )
  if is_streamed:
    answer = litellm.stream_chunk_builder(list(answer), messages=messages)
  message = answer.choices[0].message
  messages.append(message.model_dump())
  if not message.tool_calls:
    break
  for call in message.tool_calls:
    query = json.loads(call.function.arguments)['query']
    result = common.search(query)
    messages.append({'role': 'tool', 'tool_call_id': call.id, 'content': result})
common.end(messages[-1]['content'])
