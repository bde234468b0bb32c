"""Anthropic's Messages interface as data: bodies in, chat requests out; answers out as JSON values.

A request becomes a chat request, so the same tokens are sampled and recorded. A tool result becomes
a message of the role `tool`. As in api.py, an answer ends with its first call, unless the client
allows parallel calls, and a field that is not supported is an error.
"""

from collections.abc import AsyncGenerator
from collections.abc import Iterator
import json
from typing import Annotated
from typing import Any
from typing import Literal
import uuid

import pydantic
from starlette import exceptions

from stppo_jax.net import http_server
from stppo_jax.serving import answers
from stppo_jax.serving import api
from stppo_jax.text import tool_calls

_STOP_REASONS = {'length': 'max_tokens', 'tool_calls': 'tool_use'}
_ERROR_TYPES = {
    400: 'invalid_request_error',
    401: 'authentication_error',
    403: 'permission_error',
    404: 'not_found_error',
    413: 'request_too_large',
    429: 'rate_limit_error',
    503: 'overloaded_error',
}


class ToolUse(api.Part):
  """A call in a message of the assistant."""

  type: Literal['tool_use']
  id: str
  name: str
  input: dict[str, Any]

  def to_chat(self) -> dict[str, object]:
    """Returns the call of a chat."""
    function = {'name': self.name, 'arguments': self.input}
    return {'id': self.id, 'function': function}


class ToolResult(api.Part):
  """The result of a call, in a message of the user."""

  type: Literal['tool_result']
  tool_use_id: str
  content: api.TextParts = []
  is_error: bool = False  # the call failed, and the content tells why

  def to_chat(self) -> dict[str, object]:
    """Returns the message of a chat. It marks an error as the package's own tools do."""
    content = api.text_parts(self.content)
    if self.is_error and not api.join(self.content).startswith('Error'):
      first = content[0]['text'] if content else ''
      content[:1] = [{'type': 'text', 'text': f'Error: {first}'}]
    return {'role': 'tool', 'tool_call_id': self.tool_use_id, 'content': content}


class Thinking(api.Part):
  """A thought in an earlier message of the assistant."""

  type: Literal['thinking']
  thinking: http_server.Text = ''


class RedactedThinking(api.Part):
  """A thought that only Anthropic can read. The model does not see it."""

  type: Literal['redacted_thinking']


_Block = Annotated[
    api.TextPart | ToolUse | ToolResult | Thinking | RedactedThinking,
    pydantic.Field(discriminator='type'),
]


class BlockMessage(api.Part):
  """A message, whose content is a text or a list of blocks."""

  role: Literal['user', 'assistant', 'system']
  content: Annotated[list[_Block], api.FIRST_ERROR, pydantic.BeforeValidator(api.listed_parts)]

  def to_chat(self) -> Iterator[dict[str, object]]:
    """Yields the messages of a chat: one for each tool result, and one for the rest."""
    text = [block for block in self.content if isinstance(block, api.TextPart)]
    calls = [block.to_chat() for block in self.content if isinstance(block, ToolUse)]
    results = [block.to_chat() for block in self.content if isinstance(block, ToolResult)]
    thoughts = [block.thinking for block in self.content if isinstance(block, Thinking)]
    yield from results
    if text or calls or self.role == 'assistant':
      thought = '\n'.join(thoughts)
      yield {'role': self.role, 'content': text, 'tool_calls': calls, 'thinking': thought}


class BlockTool(api.Part):
  """A tool that the client runs."""

  type: Literal['custom'] = 'custom'
  name: str
  description: str = ''
  input_schema: dict[str, Any]

  def to_chat(self) -> dict[str, object]:
    """Returns the tool of a chat."""
    function = {'name': self.name, 'description': self.description, 'parameters': self.input_schema}
    return {'type': 'function', 'function': function}


class ToolChoice(api.Part):
  """Whether the model may or must call tools."""

  type: Literal['auto', 'none', 'any', 'tool'] = 'auto'
  name: str = ''  # only for the type 'tool'
  disable_parallel_tool_use: bool = True

  def to_chat(self) -> object:
    """Returns the `tool_choice` of a chat."""
    if self.type == 'tool':
      return {'type': 'function', 'function': {'name': self.name}}
    return 'required' if self.type == 'any' else self.type


class OutputFormat(api.Part):
  """The form of an answer's text."""

  type: Literal['json_schema']
  json_schema: Annotated[dict[str, Any], pydantic.Field(alias='schema')]


class OutputConfig(api.Part):
  """Settings of the answer's text."""

  model_config = pydantic.ConfigDict(extra='forbid')

  effort: Any = None  # changes nothing: the model thinks as it was trained to
  format: OutputFormat | None = None


class ContextEdit(api.Part):
  """An edit of the context. The server sends no blocks of thinking that it could remove."""

  type: Annotated[str, pydantic.Field(pattern='^clear_thinking_')]


class ContextManagement(api.Part):
  """Edits that Anthropic makes in the context."""

  edits: list[ContextEdit] = []


def _check_messages(messages: list[BlockMessage]) -> list[BlockMessage]:
  if not messages:
    raise ValueError('send at least one message')
  if messages[0].role == 'system':
    raise ValueError('the first message is a system prompt: send it in the field system')
  return messages


def _refuse_thread(unused_value: object) -> None:
  raise ValueError(
      "nothing is stored between requests: send the whole conversation, in Anthropic's client by "
      'tool_runner(.., thread=False)'
  )


class MessagesBody(api.ClientBody):
  """A request of /v1/messages, or of /v1/messages/count_tokens, which samples nothing.

  Claude Code asks several models by name. The server has one, which answers them all.
  """

  messages: Annotated[
      list[BlockMessage],
      pydantic.Field(max_length=api.MAX_MESSAGES),
      pydantic.AfterValidator(_check_messages),
  ]
  system: api.TextParts = []
  stop_sequences: api.Stops | None = None
  tools: list[BlockTool] = []
  tool_choice: ToolChoice = ToolChoice()
  output_config: OutputConfig = OutputConfig()
  thinking: dict[str, Any] = {}  # changes nothing
  context_management: ContextManagement = ContextManagement()
  thread: Annotated[None, pydantic.BeforeValidator(_refuse_thread)] = None

  def to_chat(self) -> api.ChatBody:
    """Returns the equal chat request."""
    messages: list[dict[str, Any]] = []
    system = api.join_system(self.system)
    if system:
      messages.append({'role': 'system', 'content': system})
    for message in self.messages:
      messages += message.to_chat()
    fields = self.model_dump(include=set(api.ClientBody.model_fields) - {'model'})
    fields |= {
        'messages': messages,
        'stop': self.stop_sequences,
        'tools': [tool.to_chat() for tool in self.tools],
        'tool_choice': self.tool_choice.to_chat(),
        'parallel_tool_calls': not self.tool_choice.disable_parallel_tool_use,
    }
    form = self.output_config.format
    if form is not None:
      schema = {'schema': form.json_schema}
      fields['response_format'] = {'type': 'json_schema', 'json_schema': schema}
    return api.ChatBody.model_validate(fields)


def read(fields: dict[str, object]) -> api.ChatBody:
  """Returns the chat request of a body. Raises pydantic.ValidationError and RequestError."""
  body = MessagesBody.model_validate(fields)
  if body.messages[-1].role == 'assistant':
    raise http_server.RequestError(
        400,
        'messages: the last one is of the assistant, and a turn that a client has begun is not '
        'continued: end with a message of the user',
    )
  return body.to_chat()


def read_to_count(fields: dict[str, object]) -> api.ChatBody:
  """Returns the chat request of a body whose tokens are counted. Raises ValidationError."""
  return MessagesBody.model_validate(fields).to_chat()


class MessagesWriter:
  """Writes an answer as Anthropic's JSON."""

  def __init__(self, model: str, body: api.ChatBody, answer: answers.Answer):
    del body  # its other fields change nothing here
    self._answer = answer
    self._head = {
        'id': f'msg_{uuid.uuid4().hex}',
        'type': 'message',
        'role': 'assistant',
        'model': model,
    }

  async def whole(self) -> dict[str, object]:
    """Returns a whole answer, whose one choice has one chunk."""
    (chunk,) = [chunk async for chunk in self._answer.chunks()]
    content: list[Any] = list(map(_tool_use, chunk.calls))
    if chunk.text:
      content.insert(0, {'type': 'text', 'text': chunk.text})
    fields = {'content': content, 'usage': self._usage()}
    return self._head | fields | _end(chunk)

  async def events(self) -> AsyncGenerator[str, None]:
    """Yields the answer's server-sent events."""
    start = {'content': [], 'usage': self._usage(), 'stop_reason': None, 'stop_sequence': None}
    yield _event('message_start', message=self._head | start)
    num_blocks = 0
    try:
      async for chunk in self._answer.chunks():
        if chunk.text:
          if not num_blocks:
            text_block = {'type': 'text', 'text': ''}
            yield _event('content_block_start', index=0, content_block=text_block)
            num_blocks = 1
          delta = {'type': 'text_delta', 'text': chunk.text}
          yield _event('content_block_delta', index=0, delta=delta)
        if chunk.finish is None:
          continue
        if num_blocks:
          yield _event('content_block_stop', index=0)
        for index, call in enumerate(chunk.calls, start=num_blocks):
          block = _tool_use(call)
          delta = {'type': 'input_json_delta', 'partial_json': json.dumps(block['input'])}
          yield _event('content_block_start', index=index, content_block=block | {'input': {}})
          yield _event('content_block_delta', index=index, delta=delta)
          yield _event('content_block_stop', index=index)
        yield _event('message_delta', delta=_end(chunk), usage=self._usage())
      yield _event('message_stop')
    except http_server.RequestError as error:  # the status is sent already
      yield _event('error', **error_body(error))

  def _usage(self) -> dict[str, int]:
    usage = self._answer.usage()
    return {'input_tokens': usage['prompt_tokens'], 'output_tokens': usage['completion_tokens']}


def error_body(error: exceptions.HTTPException) -> dict[str, object]:
  """Returns the JSON of an error. Harnesses look for Anthropic's words for a long prompt."""
  kind = _ERROR_TYPES.get(error.status_code, 'api_error')
  message = error.detail
  if getattr(error, 'code', None) == 'context_length_exceeded':
    message = f'prompt is too long: {message}'
  return {'type': 'error', 'error': {'type': kind, 'message': message}}


def _end(chunk: answers.Chunk) -> dict[str, object]:
  """Returns the fields at the end of an answer."""
  reason = _STOP_REASONS.get(chunk.finish or '')
  if reason is None:
    reason = 'stop_sequence' if chunk.stop else 'end_turn'
  fields: dict[str, Any] = {'stop_reason': reason, 'stop_sequence': chunk.stop}
  if chunk.turn is not None:
    fields['turn'] = chunk.turn
  return fields


def _tool_use(call: tool_calls.Call) -> dict[str, object]:
  return {
      'type': 'tool_use',
      'id': f'toolu_{uuid.uuid4().hex[:24]}',
      'name': call.name,
      'input': call.arguments,
  }


def _event(name: str, **fields: Any) -> str:
  return f'event: {name}\ndata: {json.dumps({"type": name} | fields)}\n\n'
