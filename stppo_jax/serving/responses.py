"""OpenAI's Responses interface as data: bodies in, chat requests out; answers out as JSON values.

A request becomes a chat request, so the same tokens are sampled and recorded. The server stores no
response. The client sends the whole conversation. The items of one turn become one message:

  reasoning, message, function_call, function_call   assistant
  function_call_output                               tool

As in api.py, an answer ends with its first call, unless the client allows parallel calls, and a
field that is not supported is an error.
"""

from collections.abc import AsyncGenerator
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import json
import time
from typing import Annotated
from typing import Any
from typing import ClassVar
from typing import Literal
from typing import Self
import uuid

import pydantic

from stppo_jax.net import http_server
from stppo_jax.serving import answers
from stppo_jax.serving import api
from stppo_jax.text import tool_calls

_LOGPROBS = 'message.output_text.logprobs'  # a value of `include`


def _refuse(unused_value: object) -> None:
  raise ValueError(
      'nothing is stored between requests: send the whole conversation as `input`, in '
      'several clients by store=false'
  )


_Refused = Annotated[None, pydantic.BeforeValidator(_refuse)]


def _listed_input(value: object) -> object:
  """Returns the items of an input: a text is a message of the user."""
  return [{'role': 'user', 'content': value}] if isinstance(value, str) else value


def _listed_text(value: object) -> object:
  return [{'type': 'input_text', 'text': value}] if isinstance(value, str) else value


class TextItem(api.Part):
  """A part of a content."""

  type: Literal['input_text', 'output_text', 'text']
  text: http_server.Text


class Refusal(api.Part):
  """A part of a content in which a model has refused."""

  type: Literal['refusal']
  refusal: http_server.Text

  @property
  def text(self) -> str:
    return self.refusal


_TextItems = Annotated[
    list[Annotated[TextItem | Refusal, pydantic.Field(discriminator='type')]],
    api.FIRST_ERROR,
    pydantic.BeforeValidator(_listed_text),
]


class MessageItem(api.Part):
  """A message, whose content is a text."""

  type: Literal['message'] = 'message'
  role: Literal['system', 'developer', 'user', 'assistant']
  content: _TextItems


class CallItem(api.Part):
  """A call of the assistant."""

  type: Literal['function_call']
  call_id: str
  name: str
  namespace: str = ''
  arguments: http_server.Text


class ResultItem(api.Part):
  """The result of a call."""

  type: Literal['function_call_output']
  call_id: str
  output: _TextItems


class ReasoningText(api.Part):
  """A part of the text of a thought."""

  type: Literal['reasoning_text']
  text: http_server.Text


class ReasoningItem(api.Part):
  """A thought of the assistant. The model does not see one without text.

  Its summary and its encrypted content come from a model that is not served here.
  """

  type: Literal['reasoning']
  content: Annotated[list[ReasoningText], api.FIRST_ERROR] = []


def _kind(item: object) -> str:
  """Returns the tag of an item. Its type may be left out where a field tells it."""
  if not isinstance(item, dict):
    return ''
  kind = item.get('type') or ('message' if 'role' in item else '')
  return kind if isinstance(kind, str) else ''


_Item = Annotated[
    Annotated[MessageItem, pydantic.Tag('message')]
    | Annotated[CallItem, pydantic.Tag('function_call')]
    | Annotated[ResultItem, pydantic.Tag('function_call_output')]
    | Annotated[ReasoningItem, pydantic.Tag('reasoning')],
    pydantic.Discriminator(
        _kind,
        custom_error_type='item_type',
        custom_error_message=(
            'send items of the types message, function_call, function_call_output and reasoning, '
            'in full: the server stores no item'
        ),
    ),
]


class FunctionTool(api.Part):
  """A function that the client runs."""

  type: Literal['function']
  name: str
  description: str = ''
  parameters: dict[str, Any] = {}

  def to_chat(self, namespace: str = '') -> dict[str, object]:
    """Returns the tool of a chat."""
    name = _join_name(namespace, self.name)
    function = {'name': name, 'description': self.description, 'parameters': self.parameters}
    return {'type': 'function', 'function': function}


class NamespaceTool(api.Part):
  """Functions that belong together. The model sees each as 'namespace.name'."""

  type: Literal['namespace']
  name: str
  tools: list[FunctionTool]


def _check_tool(tool: object) -> object:
  """Raises ValueError for a tool that OpenAI's servers run."""
  kind = tool.get('type') if isinstance(tool, dict) else None
  if isinstance(kind, str) and kind not in ('function', 'namespace'):
    raise ValueError(
        f'the server does not run tools such as {kind[:80]!r}: leave it out, or send a tool of '
        "type 'function' that the client runs"
    )
  return tool


_Tool = Annotated[
    Annotated[FunctionTool | NamespaceTool, pydantic.Field(discriminator='type')],
    pydantic.BeforeValidator(_check_tool),
]


def _join_name(namespace: str, name: str) -> str:
  return f'{namespace}.{name}' if namespace else name


class ToolName(api.Part):
  """A tool by its name."""

  type: Literal['function']
  name: str
  namespace: str = ''

  def to_chat(self) -> dict[str, object]:
    """Returns the tool of a chat's choice."""
    return {'type': 'function', 'function': {'name': _join_name(self.namespace, self.name)}}


class ToolNames(api.Part):
  """A choice of some of the tools."""

  type: Literal['allowed_tools']
  mode: Literal['auto', 'required']
  tools: list[ToolName]

  def to_chat(self) -> dict[str, object]:
    """Returns the choice of a chat."""
    tools = [tool.to_chat() for tool in self.tools]
    return {'type': self.type, 'allowed_tools': {'mode': self.mode, 'tools': tools}}


class TextFormat(api.Part):
  """The form of the answer's text."""

  model_config = pydantic.ConfigDict(extra='forbid')

  type: Literal['text', 'json_object', 'json_schema'] = 'text'
  name: str = ''
  description: str = ''
  strict: bool = True  # changes nothing: the text follows the schema in any case
  json_schema: Annotated[dict[str, Any] | None, pydantic.Field(alias='schema')] = None

  @pydantic.model_validator(mode='after')
  def _check_schema(self) -> Self:
    if (self.type == 'json_schema') != (self.json_schema is not None):
      raise ValueError("send type='json_schema' with name and schema")
    return self

  def to_chat(self) -> dict[str, object]:
    """Returns the `response_format` of a chat."""
    if self.json_schema is None:
      return {'type': self.type}
    return {'type': self.type, 'json_schema': {'schema': self.json_schema}}


class TextSettings(api.Part):
  """Settings of the answer's text."""

  format: TextFormat = TextFormat()
  verbosity: Any = None  # changes nothing: the model writes as it was trained to


class ResponsesBody(api.ClientBody):
  """A request of /v1/responses."""

  input: Annotated[
      list[_Item],
      pydantic.Field(min_length=1, max_length=api.MAX_MESSAGES),
      pydantic.BeforeValidator(_listed_input),
  ]
  instructions: http_server.Text = ''
  max_output_tokens: api.TokenCount | None = None
  tools: list[_Tool] = pydantic.Field([], max_length=api.MAX_TOOLS)
  tool_choice: Literal['auto', 'none', 'required'] | ToolNames | ToolName = 'auto'
  parallel_tool_calls: bool = False
  # OpenAI has none here.
  stop: Annotated[api.Stops, pydantic.BeforeValidator(api.listed)] | None = None
  text: TextSettings = TextSettings()
  include: Annotated[list[str], api.FIRST_ERROR] = []
  metadata: dict[str, Any] = {}  # is sent back
  # The next ones change nothing. A prompt that is too long is an error, whatever `truncation` says.
  reasoning: dict[str, Any] = {}
  truncation: Literal['auto', 'disabled'] = 'disabled'
  max_tool_calls: int | None = None  # counts the server's own tools
  top_logprobs: Literal[0, 1] = 0
  stream_options: dict[str, Any] = {}
  client_metadata: Any = None  # Codex's
  background: Literal[False] = False
  # What needs a stored response.
  previous_response_id: _Refused = None
  conversation: _Refused = None
  prompt: _Refused = None

  def to_chat(self) -> 'EchoedBody':
    """Returns the equal chat request."""
    messages: list[dict[str, Any]] = []
    if self.instructions:
      messages.append({'role': 'system', 'content': self.instructions})
    messages += _to_messages(self.input)
    tools = []
    for tool in self.tools:
      if isinstance(tool, NamespaceTool):
        tools += [function.to_chat(tool.name) for function in tool.tools]
      else:
        tools.append(tool.to_chat())
    choice = self.tool_choice
    fields = self.model_dump(include=set(api.ClientBody.model_fields))
    fields |= {
        'messages': messages,
        'stop': self.stop,
        'max_completion_tokens': self.max_output_tokens,
        'tools': tools,
        'tool_choice': choice if isinstance(choice, str) else choice.to_chat(),
        'response_format': self.text.format.to_chat(),
        'parallel_tool_calls': self.parallel_tool_calls,
        'logprobs': _LOGPROBS in self.include,
        'echoed': self._echo(),
    }
    return EchoedBody.model_validate(fields)

  def _echo(self) -> dict[str, object]:
    """Returns the fields of the answer that repeat the request."""
    names = (
        'instructions max_output_tokens metadata parallel_tool_calls reasoning temperature text '
        'tool_choice tools top_logprobs top_p truncation'
    )
    fields = self.model_dump(include=set(names.split()), by_alias=True)
    fields['instructions'] = self.instructions or None
    if self.text.format.type != 'json_schema':
      fields['text']['format'] = {'type': self.text.format.type}
    for name in ('description', 'strict'):
      if name not in self.text.format.model_fields_set:
        fields['text']['format'].pop(name, None)
    return fields


class EchoedBody(api.ChatBody):
  """A chat request, with the fields of the answer that repeat the client's request."""

  PROMPT_FIELD: ClassVar[str] = 'input'
  echoed: dict[str, Any]


class Reader:
  """Reads bodies, and remembers the latest items that were sent, to which a client may refer.

  A client that sets `store`, which is OpenAI's default, may send the id of an item for the item.
  """

  def __init__(self, most: int = 4096):
    self._most = most
    self._items: dict[str, Any] = {}  # the oldest first

  def read(self, fields: dict[str, object]) -> EchoedBody:
    """Returns the chat request of a body. Raises pydantic.ValidationError and RequestError."""
    items = fields.get('input')
    if isinstance(items, list):
      fields = fields | {'input': [self._resolve(item) for item in items]}
    return ResponsesBody.model_validate(fields).to_chat()

  def keep(self, items: Sequence[dict[str, Any]]) -> None:
    """Remembers items, and forgets the oldest ones."""
    self._items |= {item['id']: item for item in items}
    for name in list(self._items)[: -self._most]:
      del self._items[name]

  def _resolve(self, item: object) -> object:
    if not isinstance(item, dict) or item.get('type') != 'item_reference':
      return item
    known = self._items.get(str(item.get('id')))
    if known is None:
      shown = str(item.get('id'))[:80]
      raise http_server.RequestError(
          400,
          f'input: the server does not have the item {shown!r}. It keeps only its last '
          f'{self._most} items: send the whole item, for example with store=false',
          param='input',
      )
    return known


def _to_messages(items: Sequence[Any]) -> Iterator[dict[str, object]]:
  """Yields the messages of a chat. The items of one turn of the assistant are one message."""
  turn: dict[str, Any] = {}  # message of the assistant to which more items may belong
  for item in items:
    new: dict[str, Any] = {}  # fields of the turn
    if isinstance(item, ReasoningItem):
      if not item.content:
        continue
      new['reasoning_content'] = api.join(item.content)
      belongs = False
    elif isinstance(item, CallItem):
      name = _join_name(item.namespace, item.name)
      function = {'name': name, 'arguments': item.arguments}
      call = {'id': item.call_id, 'function': function}
      new['tool_calls'] = [*turn.get('tool_calls', ()), call]
      belongs = True
    elif isinstance(item, MessageItem) and item.role == 'assistant':
      new['content'] = api.text_parts(item.content)
      belongs = not {'content', 'tool_calls'} & set(turn)
    else:
      belongs = False
    if turn and not belongs:
      yield turn
      turn = {}
    if new:
      turn = {'role': 'assistant'} | turn | new
    elif isinstance(item, ResultItem):
      output = api.text_parts(item.output)
      yield {'role': 'tool', 'tool_call_id': item.call_id, 'content': output}
    else:
      yield {'role': item.role, 'content': api.text_parts(item.content)}
  if turn:
    yield turn


class ResponsesWriter:
  """Writes an answer as OpenAI's Responses JSON."""

  def __init__(
      self,
      keep: Callable[[Sequence[dict[str, object]]], None],  # gets the items of each answer
      model: str,
      body: EchoedBody,
      answer: answers.Answer,
  ):
    self._keep = keep
    self._body = body
    self._answer = answer
    self._head = body.echoed | {
        'id': f'resp_{uuid.uuid4().hex}',
        'object': 'response',
        'created_at': int(time.time()),
        'model': model,
        'background': False,
        'previous_response_id': None,
        'store': False,
    }
    self._num_events = 0

  async def whole(self) -> dict[str, object]:
    """Returns a whole answer, whose one choice has one chunk."""
    async for _ in self._stream():
      pass
    return self._end

  async def events(self) -> AsyncGenerator[str, None]:
    """Yields the answer's server-sent events."""
    begun = self._response('in_progress', [])
    try:
      yield self._event('response.created', {'response': begun})
      yield self._event('response.in_progress', {'response': begun})
      async for name, fields in self._stream():
        yield self._event(name, fields)
      yield self._event(f'response.{self._end["status"]}', {'response': self._end})
    except http_server.RequestError as error:  # the status is sent already
      failure = {'code': error.code or 'server_error', 'message': error.detail}
      failed = self._response('failed', []) | {'error': failure}
      yield self._event('response.failed', {'response': failed})

  async def _stream(self) -> AsyncGenerator[tuple[str, dict[str, object]], None]:
    """Yields the names and fields of the events of all items. Then `_end` is the whole answer."""
    message = _message('', [], 'in_progress')
    place = {'item_id': message['id'], 'output_index': 0, 'content_index': 0}
    item_place = {'output_index': 0, 'item': message}
    has_begun = False
    text = ''
    logprobs: list[Any] = []
    async for chunk in self._answer.chunks():
      text += chunk.text
      new = api.chosen_logprobs(chunk) if self._body.logprobs else []
      logprobs += new
      is_empty = chunk.finish is not None and not chunk.calls
      if not has_begun and (chunk.text or is_empty):
        has_begun = True
        yield 'response.output_item.added', item_place | {'item': message | {'content': []}}
        yield 'response.content_part.added', place | {'part': message['content'][0]}
      if chunk.text:
        yield 'response.output_text.delta', place | {'delta': chunk.text, 'logprobs': new}
    status = 'incomplete' if chunk.was_cut else 'completed'
    output = []
    if has_begun:
      message = _message(text, logprobs, status, message['id'])
      output.append(message)
      yield 'response.output_text.done', place | {'text': text, 'logprobs': logprobs}
      yield 'response.content_part.done', place | {'part': message['content'][0]}
      yield 'response.output_item.done', item_place | {'item': message}
    for call in chunk.calls:
      item = self._call(call)
      place = {'item_id': item['id'], 'output_index': len(output)}
      arguments = item['arguments']
      begun = item | {'arguments': '', 'status': 'in_progress'}
      item_place = {'output_index': len(output)}
      output.append(item)
      yield 'response.output_item.added', item_place | {'item': begun}
      yield 'response.function_call_arguments.delta', place | {'delta': arguments}
      done = {'arguments': arguments, 'name': item['name']}
      yield 'response.function_call_arguments.done', place | done
      yield 'response.output_item.done', item_place | {'item': item}
    self._keep(output)
    self._end = self._response(status, output)
    if chunk.turn is not None:
      self._end['turn'] = chunk.turn

  def _call(self, call: tool_calls.Call) -> dict[str, Any]:
    item = {
        'id': f'fc_{uuid.uuid4().hex}',
        'type': 'function_call',
        'call_id': f'call_{uuid.uuid4().hex[:24]}',
        'name': call.name,
        'arguments': json.dumps(call.arguments, ensure_ascii=False),
        'status': 'completed',
    }
    for tool in self._body.echoed['tools']:
      namespace = tool['name']
      if tool['type'] == 'namespace' and call.name.startswith(f'{namespace}.'):
        item |= {'name': call.name.removeprefix(f'{namespace}.'), 'namespace': namespace}
    return item

  def _response(self, status: str, output: list[dict[str, object]]) -> dict[str, object]:
    """Returns the response object."""
    fields: dict[str, Any] = {
        'status': status,
        'output': output,
        'error': None,
        'incomplete_details': None,
        'completed_at': None,
        'usage': None,
    }
    if status == 'incomplete':
      fields['incomplete_details'] = {'reason': 'max_output_tokens'}
    if status in ('completed', 'incomplete'):
      fields['completed_at'] = int(time.time())
      fields['usage'] = self._usage()
    return self._head | fields

  def _usage(self) -> dict[str, object]:
    usage = self._answer.usage()
    return {
        'input_tokens': usage['prompt_tokens'],
        'input_tokens_details': {'cached_tokens': 0, 'cache_write_tokens': 0},
        'output_tokens': usage['completion_tokens'],
        'output_tokens_details': {'reasoning_tokens': 0},
        'total_tokens': usage['total_tokens'],
    }

  def _event(self, name: str, fields: dict[str, object]) -> str:
    data = {'type': name, 'sequence_number': self._num_events} | fields
    self._num_events += 1
    return f'event: {name}\ndata: {json.dumps(data)}\n\n'


def _message(text: str, logprobs: list[object], status: str, name: str = '') -> dict[str, Any]:
  part = {'type': 'output_text', 'text': text, 'annotations': [], 'logprobs': logprobs}
  return {
      'id': name or f'msg_{uuid.uuid4().hex}',
      'type': 'message',
      'role': 'assistant',
      'status': status,
      'content': [part],
  }
