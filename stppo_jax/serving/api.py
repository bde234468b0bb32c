"""OpenAI's HTTP interface as data: bodies in, checked requests out; answers out as JSON values.

A field that is not supported and would change an answer is an error, never ignored.
"""

from collections.abc import Sequence
import contextlib
import json
from typing import Annotated
from typing import Any
from typing import Literal

import pydantic
import typing_extensions

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
    'request_id priority cache_salt spaces_between_special_tokens cache_control speed'.split()
)
_NEUTRAL = (None, False, 0, -1, '', [], {})  # values of unknown fields that change no answer


def _listed(value: Any) -> Any:
  return value if isinstance(value, list) else [value]


def _listed_prompts(value: Any) -> Any:
  """Returns a list of prompts: a list of token ids is one prompt."""
  is_list = isinstance(value, list) and value[:1] and isinstance(value[0], (str, list))
  return value if is_list else [value]


def _parse_arguments(value: Any) -> Any:
  """Returns the arguments of a call as an object. A text that is not JSON stays a text."""
  if isinstance(value, str):
    with contextlib.suppress(ValueError, RecursionError):
      return json.loads(value)
  return value


class Part(pydantic.BaseModel):
  """A part of a request. Unknown fields, which clients and templates add, and null are ignored."""

  model_config = pydantic.ConfigDict(extra='ignore', strict=True)

  @pydantic.model_validator(mode='before')
  @classmethod
  def _drop_null(cls, fields: Any) -> Any:
    if not isinstance(fields, dict):
      return fields
    return {name: value for name, value in fields.items() if value is not None}


class CalledFunction(Part):
  """The function of a call, with its arguments as an object."""

  name: str
  arguments: Annotated[Any, pydantic.BeforeValidator(_parse_arguments)] = {}


class ToolCall(Part):
  """A call in a message of the assistant."""

  id: str = ''
  type: Literal['function'] = 'function'
  function: CalledFunction


def kind(value: Any) -> str:
  """Returns the tag of a value that is a text or a list."""
  return 'text' if isinstance(value, str) else 'list'


class TextPart(Part):
  """A part of a content."""

  type: Literal['text']
  text: http_server.Text


# An alias, because FailFast has no hash and cannot stand in a union.
_TextParts = typing_extensions.TypeAliasType(
    '_TextParts', Annotated[list[TextPart], pydantic.FailFast()]
)


TextContent = Annotated[
    Annotated[http_server.Text, pydantic.Tag('text')] | Annotated[_TextParts, pydantic.Tag('list')],
    pydantic.Discriminator(kind),
]


class Message(Part):
  """A message, whose content is a text."""

  role: Literal['system', 'developer', 'user', 'assistant', 'tool']
  content: TextContent = ''
  tool_calls: Annotated[list[ToolCall], pydantic.FailFast()] = []
  tool_call_id: str | None = None
  name: str | None = None

  def to_dict(self) -> dict[str, Any]:
    """Returns the message for a chat template."""
    message = self.model_dump(exclude_none=True)
    if self.role == 'developer':
      message['role'] = 'system'
    if isinstance(self.content, list):
      message['content'] = ''.join(part.text for part in self.content)
    if self.role != 'assistant' or not self.tool_calls:
      message.pop('tool_calls', None)
    return message


class FunctionSchema(Part):
  """A function that the model may call."""

  name: str
  parameters: dict[str, Any] | None = None


class ToolSchema(Part):
  """A tool of a request."""

  type: Literal['function']
  function: FunctionSchema


def _check_only(value: Any, check: pydantic.ValidatorFunctionWrapHandler) -> Any:
  """Returns the value as it is: a chat template shows a tool's fields in the client's order."""
  check(value)
  return value


TokenCount = Annotated[int, pydantic.Field(ge=1, le=_MAX_TOKEN)]
TokenId = Annotated[int, pydantic.Field(ge=0, le=_MAX_TOKEN)]
_TokenIds = typing_extensions.TypeAliasType(
    '_TokenIds', Annotated[list[TokenId], pydantic.FailFast()]
)
Prompt = Annotated[
    Annotated[http_server.Text, pydantic.Tag('text')] | Annotated[_TokenIds, pydantic.Tag('list')],
    pydantic.Discriminator(kind),
    pydantic.Field(min_length=1),
]
Stop = Annotated[http_server.Text, pydantic.Field(min_length=1, max_length=MAX_STOP_CHARS)]


class ClientBody(http_server.Body):
  """A body of a client, which may also send fields that change no answer."""

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


class CompletionBody(ClientBody):
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
      pydantic.BeforeValidator(_listed),
  ] = []
  seed: int | None = pydantic.Field(None, ge=-(2**63), lt=2**63)
  stream: bool = False
  stream_options: dict[str, bool] = {}
  response_format: dict[Literal['type'], Literal['text']] = {}
  include_stop_str_in_output: bool = False
  return_token_ids: bool = False
  stop_token_ids: list[TokenId] = []  # some of the tokenizer's eos ids, which end answers anyway
  ignore_eos: bool = False  # only max_tokens and stop end the answer
  chat_template_kwargs: dict[str, Any] = {}
  # The values that change nothing.
  prompt_logprobs: None = None
  repetition_penalty: float = pydantic.Field(1.0, ge=1, le=1)
  add_generation_prompt: Literal[True] = True

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

  prompt: Annotated[
      list[Prompt],
      pydantic.Field(max_length=MAX_PROMPTS),
      pydantic.FailFast(),
      pydantic.BeforeValidator(_listed_prompts),
  ]
  logprobs: int | None = pydantic.Field(None, ge=0, le=1)  # those of the chosen tokens

  @property
  def wants_logprobs(self) -> bool:
    return self.logprobs is not None


class ChatBody(CompletionBody):
  """A request of /v1/chat/completions."""

  messages: Annotated[
      list[Message], pydantic.Field(min_length=1, max_length=MAX_MESSAGES), pydantic.FailFast()
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
  def conversation(self) -> list[dict[str, Any]]:
    """The messages as chat templates expect them."""
    return [message.to_dict() for message in self.messages]

  @property
  def offered_tools(self) -> list[Any]:
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
