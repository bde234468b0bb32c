"""OpenAI's HTTP interface as data: bodies in, checked requests out; answers out as JSON values.

A field that is not supported and would change an answer is an error, never ignored.
"""

from collections.abc import Sequence
import json
from typing import Annotated
from typing import Any
from typing import Literal
from typing import NotRequired

import pydantic
from typing_extensions import TypedDict

from stppo_jax.distributed import http_server

MAX_CHOICES = 16  # per prompt
MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_MESSAGES = 4096
MAX_TOOLS = 128
_MAX_TOKEN = 2**31 - 1
# Fields that change no answer.
_IGNORED = frozenset(
    'user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention '
    'request_id priority cache_salt spaces_between_special_tokens'.split()
)
_NEUTRAL = (None, False, 0, -1, '', [], {})  # values of unknown fields that change no answer
# Messages and tools have many more fields, which templates and clients add.
_ignores_unknown = pydantic.with_config(pydantic.ConfigDict(extra='ignore', strict=True))


def _split_stops(value: Any) -> Any:
  return [value] if isinstance(value, str) else value


def _join_parts(value: Any) -> Any:
  """Returns the text of a list of text parts."""
  if not isinstance(value, list):
    return value
  texts = [part.get('text') for part in value if isinstance(part, dict)]
  is_text = all(isinstance(part, dict) and part.get('type') == 'text' for part in value)
  if not is_text or not all(isinstance(text, str) for text in texts):
    raise ValueError('use a text, or a list of text parts')
  return ''.join(map(str, texts))


def _parse_arguments(value: Any) -> Any:
  """Returns the arguments of a call as an object. A text that is not JSON stays a text."""
  if value is None:
    return {}
  if isinstance(value, str):
    try:
      return json.loads(value)
    except (ValueError, RecursionError):
      pass
  return value


def _normalize_call(value: Any) -> Any:
  """Fills in the fields that clients leave out or set to null."""
  if not isinstance(value, dict):
    return value
  call = {'id': '', 'type': 'function'} | {k: v for k, v in value.items() if v is not None}
  if isinstance(call.get('function'), dict):
    call['function'] = {'arguments': None, **call['function']}
  return call


def _normalize_message(value: Any) -> Any:
  if not isinstance(value, dict):
    return value
  message = {'content': ''} | {k: v for k, v in value.items() if v is not None}
  if message.get('role') == 'developer':
    message['role'] = 'system'
  if message.get('role') != 'assistant' or not message.get('tool_calls'):
    message.pop('tool_calls', None)
  return message


def _check_only(value: Any, check: pydantic.ValidatorFunctionWrapHandler) -> Any:
  """Returns the value as it is: a chat template shows a tool's fields in the client's order."""
  check(value)
  return value


def _parse_prompts(value: Any) -> list[str | list[int]]:
  """Returns the prompts: one, or each of a list of them."""
  is_list = isinstance(value, list) and bool(value) and isinstance(value[0], (str, list))
  prompts = value if is_list else [value]
  if len(prompts) > MAX_PROMPTS:
    raise ValueError(f'send at most {MAX_PROMPTS} prompts in a request')
  for prompt in prompts:
    is_ids = isinstance(prompt, list) and all(
        type(token) is int and 0 <= token <= _MAX_TOKEN for token in prompt
    )
    if not prompt or not (is_ids or isinstance(prompt, str)):
      raise ValueError('use a text, a list of token ids, or a list of such prompts')
  return prompts


@_ignores_unknown
class CalledFunction(TypedDict):
  """The function of a call, with its arguments as an object."""

  name: str
  arguments: Annotated[Any, pydantic.BeforeValidator(_parse_arguments)]


@_ignores_unknown
class ToolCall(TypedDict):
  """A call in a message of the assistant."""

  id: NotRequired[str]
  type: NotRequired[Literal['function']]
  function: CalledFunction


@_ignores_unknown
class Message(TypedDict):
  """A message, whose content is a text."""

  role: Literal['system', 'user', 'assistant', 'tool']
  content: Annotated[http_server.Text, pydantic.BeforeValidator(_join_parts)]
  tool_calls: NotRequired[
      Annotated[
          list[Annotated[ToolCall, pydantic.BeforeValidator(_normalize_call)]], pydantic.FailFast()
      ]
  ]
  tool_call_id: NotRequired[str]
  name: NotRequired[str]


@_ignores_unknown
class FunctionSchema(TypedDict):
  """A function that the model may call."""

  name: str
  parameters: NotRequired[dict[str, Any] | None]


@_ignores_unknown
class ToolSchema(TypedDict):
  """A tool of a request."""

  type: Literal['function']
  function: FunctionSchema


@_ignores_unknown
class StreamOptions(TypedDict):
  """Options of a stream."""

  include_usage: NotRequired[bool]


@_ignores_unknown
class TextFormat(TypedDict):
  """The only form of an answer."""

  type: Literal['text']


TokenCount = Annotated[int, pydantic.Field(ge=1, le=_MAX_TOKEN)]
Stop = Annotated[http_server.Text, pydantic.Field(min_length=1, max_length=MAX_STOP_CHARS)]


class CompletionBody(http_server.Body):
  """Fields of both kinds of requests. Fields that are not OpenAI's are vLLM's."""

  model: str = ''
  max_tokens: TokenCount | None = None
  max_completion_tokens: TokenCount | None = None
  temperature: float = pydantic.Field(1.0, ge=0, le=100)
  top_p: float = pydantic.Field(1.0, gt=0, le=1)
  n: int = pydantic.Field(1, ge=1, le=MAX_CHOICES)
  best_of: int | None = None
  stop: Annotated[
      list[Stop],
      pydantic.Field(max_length=MAX_STOPS),
      pydantic.FailFast(),
      pydantic.BeforeValidator(_split_stops),
  ] = []
  seed: int | None = pydantic.Field(None, ge=-(2**63), lt=2**63)
  stream: bool = False
  stream_options: StreamOptions = {}
  response_format: TextFormat = {'type': 'text'}
  include_stop_str_in_output: bool = False
  return_token_ids: bool = False
  ignore_eos: bool = False  # only max_tokens and stop end the answer
  chat_template_kwargs: dict[str, Any] = {}
  # The values that change nothing.
  prompt_logprobs: None = None
  repetition_penalty: float = pydantic.Field(1.0, ge=1, le=1)
  add_generation_prompt: Literal[True] = True

  @pydantic.model_validator(mode='before')
  @classmethod
  def _drop_neutral(cls, fields: dict[str, Any]) -> dict[str, Any]:
    """Drops null, and unknown fields that change no answer."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None
        and name not in _IGNORED
        and (name in cls.model_fields or value not in _NEUTRAL)
    }

  @pydantic.model_validator(mode='after')
  def _check_best_of(self) -> 'CompletionBody':
    if self.best_of not in (None, self.n):
      raise ValueError('best_of must equal n')
    return self

  @property
  def most_tokens(self) -> int | None:
    return self.max_completion_tokens or self.max_tokens


class TextBody(CompletionBody):
  """A request of /v1/completions."""

  prompt: Annotated[list[str | list[int]], pydantic.PlainValidator(_parse_prompts)]
  logprobs: int | None = pydantic.Field(None, ge=0, le=1)  # those of the chosen tokens

  @property
  def wants_logprobs(self) -> bool:
    return self.logprobs is not None


class ChatBody(CompletionBody):
  """A request of /v1/chat/completions."""

  messages: Annotated[
      list[Annotated[Message, pydantic.BeforeValidator(_normalize_message)]],
      pydantic.Field(min_length=1, max_length=MAX_MESSAGES),
      pydantic.FailFast(),
  ]
  tools: Annotated[
      list[Annotated[ToolSchema, pydantic.WrapValidator(_check_only)]],
      pydantic.Field(max_length=MAX_TOOLS),
      pydantic.FailFast(),
  ] = []
  tool_choice: Literal['auto', 'none'] = 'auto'
  parallel_tool_calls: bool = False  # False: an answer ends with its first call
  logprobs: bool = False  # those of the chosen tokens

  @property
  def wants_logprobs(self) -> bool:
    return self.logprobs

  @property
  def offered_tools(self) -> list[ToolSchema]:
    return [] if self.tool_choice == 'none' else self.tools


def chat_logprobs(tokens: Sequence[bytes], logp: Sequence[float]) -> dict[str, Any]:
  """Returns the `logprobs` of a chat choice: those of the chosen tokens."""
  content = []
  for token, value in zip(tokens, logp):
    entry = {'token': _decode(token), 'logprob': value, 'bytes': list(token), 'top_logprobs': []}
    content.append(entry)
  return {'content': content}


def text_logprobs(
    tokens: Sequence[bytes], logp: Sequence[float], starts: Sequence[int]
) -> dict[str, Any]:
  """Returns the `logprobs` of a choice of /v1/completions; `starts` are places in its text."""
  return {
      'tokens': list(map(_decode, tokens)),
      'token_logprobs': list(logp),
      'top_logprobs': None,
      'text_offset': list(starts),
  }


def _decode(token: bytes) -> str:
  return token.decode('utf-8', 'replace')
