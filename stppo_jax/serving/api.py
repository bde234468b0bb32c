"""OpenAI's HTTP interface as data: bodies in, checked requests out; answers out as JSON values.

A field that is not supported and would change an answer is an error, never ignored.
"""

import collections
from collections.abc import AsyncGenerator
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import json
import re
import time
from typing import Annotated
from typing import Any
from typing import ClassVar
from typing import Literal
from typing import Protocol
from typing import Self
import uuid

import pydantic
from starlette import exceptions

from stppo_jax import types
from stppo_jax.net import http_server
from stppo_jax.serving import answers
from stppo_jax.serving import prompt_scores
from stppo_jax.text import tool_calls
from stppo_jax.text import turns

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
    'request_id priority cache_salt spaces_between_special_tokens cache_control speed '
    # The model thinks and writes as it was trained to.
    'reasoning_effort verbosity thinking'.split()
)
_NEUTRAL = (None, [], {})  # values of unknown fields that change no answer
# Values that change no answer, of fields that other servers know. Other values are errors.
_NEUTRAL_OF: dict[str, tuple[Any, ...]] = {
    'skip_special_tokens': (True,),
    'detokenize': (True,),
    'add_special_tokens': (True, False),
    'add_generation_prompt': (True,),
    'continue_final_message': (False,),
    'include_reasoning': (True,),
    'cache_prompt': (True, False),
    'do_sample': (True,),
    'modalities': (['text'],),
    'best_of': (1,),
    'suffix': ('',),
    'grammar': ('',),
    'seed': (-1,),
    'top_k': (0, -1),
    'truncate_prompt_tokens': (-1,),
    'thinking_budget': (-1,),
    'tool_choice': ('none',),
    **dict.fromkeys(('length_penalty', 'repetition_penalty', 'repeat_penalty', 'typical_p'), (1,)),
    **dict.fromkeys(
        'min_p min_tokens frequency_penalty presence_penalty no_repeat_ngram_size mirostat n_probs '
        'num_logprobs dry_multiplier xtc_probability dynatemp_range '.split(),
        (0,),
    ),
    **dict.fromkeys(
        'use_beam_search echo logprobs parallel_tool_calls return_token_ids background raw '
        'return_tokens_as_token_ids return_logprob return_hidden_states return_progress '
        'timings_per_token use_tqdm ignore_eos no_stop_trim'.split(),
        (False,),
    ),
}
# Fields of messages that hold what the assistant did, in forms that are not read.
_OTHER_CONTENTS = {
    'function_call': 'send tool_calls',
    'refusal': 'send its text as content',
    'audio': 'send a text as content',
    # A turn that the client has begun. DeepSeek, Mistral, Moonshot and Qwen continue it.
    'prefix': 'a new turn begins after the message, so leave it out',
    'partial': 'a new turn begins after the message, so leave it out',
}
# Where clients put a thought that the turn's text had between <think> and </think>.
THOUGHT_FIELDS = (
    'reasoning_content',
    'reasoning',
    'thinking',
    'reasoning_text',
    'reasoning_details',
    'thinking_blocks',
)
_BILLING = re.compile(r'\Ax-anthropic-billing-header:[^\n]*\n?')  # changes with every request
_ERROR_TYPES = {401: 'authentication_error', 429: 'rate_limit_error'}


def listed(value: object) -> object:
  """Returns a list: a single value is a list of one."""
  return value if isinstance(value, list) else [value]


def _listed_prompts(value: object) -> object:
  """Returns a list of prompts: a list of token ids is one prompt."""
  is_list = isinstance(value, list) and value[:1] and isinstance(value[0], (str, list))
  return value if is_list else [value]


def listed_parts(value: object) -> object:
  """Returns the parts of a content: a text is one part."""
  return [{'type': 'text', 'text': value}] if isinstance(value, str) else value


def _parse_arguments(value: object) -> object:
  """Returns the arguments of a call as an object. No text and null are an empty object."""
  if isinstance(value, str):
    try:
      value = types.parse_json(value.strip() or 'null')
    except (ValueError, RecursionError):
      raise ValueError('a JSON object is needed') from None
  if value is None:
    return {}
  if not isinstance(value, dict):
    raise ValueError('a JSON object is needed')
  return value


def _is_neutral(name: str, value: object) -> bool:
  """Returns whether an unknown field changes no answer."""
  return name in _IGNORED or value in (*_NEUTRAL, *_NEUTRAL_OF.get(name, ()))


def _check_stop(value: object) -> object:
  if value == '':
    raise ValueError('an empty text ends no answer: leave it out')
  return value


def _read_seed(value: object) -> object:
  """Returns a seed; None for -1, with which vLLM and llama.cpp take a random one."""
  return None if value == -1 else value


def _check_messages(value: object) -> object:
  if value == []:
    raise ValueError('send at least one message')
  return value


def _check_prompt(value: object) -> object:
  if value in ('', []):
    raise ValueError('the prompt is empty: send a text, or at least one token id')
  return value


def _read_thought(value: object) -> str:
  """Returns the text of a thought: a text, or a list of blocks that hold texts."""
  if isinstance(value, str):
    return value
  blocks = value if isinstance(value, list) else [value]
  texts = []
  for block in blocks:
    if isinstance(block, dict):
      texts += [block[name] for name in ('thinking', 'text') if isinstance(block.get(name), str)]
  return ''.join(texts)


def _check_only(value: object, check: pydantic.ValidatorFunctionWrapHandler) -> object:
  """Returns the value as it is: a chat template shows a tool's fields in the client's order."""
  check(value)
  return value


def _kind(value: object) -> str:
  """Returns the tag of a prompt: a text or a list."""
  return 'text' if isinstance(value, str) else 'list'


class Part(pydantic.BaseModel):
  """A part of a request. Unknown fields, which clients and templates add, and null are ignored."""

  model_config = pydantic.ConfigDict(extra='ignore', strict=True)

  @pydantic.model_validator(mode='before')
  @classmethod
  def _drop_null(cls, fields: object) -> object:
    if not isinstance(fields, dict):
      return fields
    return {name: value for name, value in fields.items() if value is not None}


class CalledFunction(Part):
  """The function of a call, with its arguments as an object."""

  name: str
  arguments: Annotated[dict[str, Any], pydantic.BeforeValidator(_parse_arguments)] = {}


class ToolCall(Part):
  """A call in a message of the assistant."""

  id: str = ''
  type: Literal['function'] = 'function'
  function: CalledFunction


class WithText(Protocol):
  """A part that has a text."""

  @property
  def text(self) -> str:
    """The text."""


class TextPart(Part):
  """A part of a content."""

  type: Literal['text']
  text: http_server.Text


# A body has room for millions of wrong items, and an answer names the first.
FIRST_ERROR = pydantic.Field(fail_fast=True)
TextParts = Annotated[list[TextPart], FIRST_ERROR, pydantic.BeforeValidator(listed_parts)]


def join(parts: Iterable[WithText], separator: str = '') -> str:
  """Returns the text of a content."""
  return separator.join(part.text for part in parts)


def text_parts(parts: Iterable[WithText]) -> list[dict[str, str]]:
  """Returns the parts of a content of a chat."""
  return [{'type': 'text', 'text': part.text} for part in parts]


def join_system(parts: Iterable[TextPart], separator: str = '') -> str:
  """Returns the text of a system prompt, without Claude Code's line about its billing."""
  texts = [_BILLING.sub('', part.text) for part in parts]
  return separator.join(filter(None, texts))


class Message(Part):
  """A message, whose content is a text."""

  role: Literal['system', 'developer', 'user', 'assistant', 'tool']
  content: TextParts = []
  tool_calls: list[ToolCall] = []
  tool_call_id: str | None = None
  name: str | None = None
  thought: http_server.Text = ''  # from one of THOUGHT_FIELDS

  @pydantic.model_validator(mode='before')
  @classmethod
  def _find_thought(cls, fields: object) -> object:
    """Reads the thought from the first field that has one. They hold the same thought."""
    if not isinstance(fields, dict):
      return fields
    for name, remedy in _OTHER_CONTENTS.items():
      if fields.get(name):
        raise ValueError(f'{name} is not supported: {remedy}')
    thoughts = [_read_thought(fields[name]) for name in THOUGHT_FIELDS if fields.get(name)]
    return fields | {'thought': next(filter(None, thoughts), '')}

  def to_dict(self, separator: str = '') -> dict[str, object]:
    """Returns the message for a chat template. A thought is in the content of its turn."""
    message = self.model_dump(exclude_none=True, exclude={'thought'})
    message['content'] = join(self.content, separator)
    if self.role == 'assistant':
      message['content'] = turns.join_thought(self.thought, message['content'])
    if self.role == 'system':
      message['content'] = join_system(self.content, separator)
    if self.role == 'developer':
      message['role'] = 'system'
    if self.role != 'assistant' or not self.tool_calls:
      del message['tool_calls']
    return message


class FunctionSchema(Part):
  """A function that the model may call."""

  name: str
  parameters: dict[str, Any] | None = None


class ToolSchema(Part):
  """A tool of a request."""

  type: Literal['function']
  function: FunctionSchema


TokenCount = Annotated[int, pydantic.Field(ge=1, le=_MAX_TOKEN)]
TokenId = Annotated[int, pydantic.Field(ge=0, le=_MAX_TOKEN)]
Messages = Annotated[
    list[Message],
    pydantic.Field(max_length=MAX_MESSAGES),
    pydantic.BeforeValidator(_check_messages),
]
Prompt = Annotated[
    Annotated[http_server.Text, pydantic.Tag('text')]
    | Annotated[list[TokenId], FIRST_ERROR, pydantic.Tag('list')],
    pydantic.Discriminator(_kind),
    pydantic.BeforeValidator(_check_prompt),
]
Stop = Annotated[
    http_server.Text,
    pydantic.Field(max_length=MAX_STOP_CHARS),
    pydantic.BeforeValidator(_check_stop),
]
Stops = Annotated[list[Stop], pydantic.Field(max_length=MAX_STOPS)]


class ClientBody(http_server.Body):
  """Fields of all requests. A client may also send fields that change no answer."""

  model: str = ''
  max_tokens: TokenCount | None = None
  temperature: float = pydantic.Field(1.0, ge=0, le=100)
  top_p: float = pydantic.Field(1.0, gt=0, le=1)
  stream: bool = False

  @pydantic.model_validator(mode='before')
  @classmethod
  def _drop_neutral(cls, fields: dict[str, object]) -> dict[str, object]:
    """Drops null, and unknown fields that change no answer."""
    reads_ids = fields.get('return_token_ids') is True
    if reads_ids and fields.get('skip_special_tokens') is False:
      # Engines' clients ask for whole texts and read the ids, which hold every token here.
      fields = {**fields, 'skip_special_tokens': None}
    return {
        name: value
        for name, value in fields.items()
        if value is not None and (name in cls.model_fields or not _is_neutral(name, value))
    }


class CompletionBody(ClientBody):
  """Fields of OpenAI's two kinds of requests. Fields that are not OpenAI's are vLLM's."""

  PROMPT_FIELD: ClassVar[str]
  max_completion_tokens: TokenCount | None = None
  n: int = pydantic.Field(1, ge=1, le=MAX_CHOICES)
  stop: Annotated[Stops, pydantic.BeforeValidator(listed)] | None = None  # None: the run's own
  seed: Annotated[int | None, pydantic.BeforeValidator(_read_seed)] = pydantic.Field(
      None, ge=-(2**63), lt=2**63
  )
  stream_options: dict[str, bool] = {}
  include_stop_str_in_output: bool = False
  return_token_ids: bool = False
  stop_token_ids: Annotated[list[TokenId], FIRST_ERROR] = (
      []
  )  # some of the tokenizer's eos ids, which end answers anyway
  ignore_eos: bool = False  # only max_tokens and stop end the answer
  chat_template_kwargs: dict[str, Any] = {}
  prompt_logprobs: None = None  # the only value: 0 would ask for those of the prompt

  @property
  def most_tokens(self) -> int | None:
    return self.max_completion_tokens or self.max_tokens

  @property
  def num_top(self) -> int:
    """Number of likeliest tokens that the answer gives for each token."""
    raise NotImplementedError

  @property
  def wants_scores(self) -> bool:
    """Whether the answer needs log-probs that sampling does not give."""
    return self.num_top > 0

  @pydantic.model_validator(mode='after')
  def _check_scores(self) -> Self:
    if self.wants_scores and self.stream:
      raise ValueError('stream: is not supported with likeliest tokens: leave one of them out')
    return self


class JsonSchema(Part):
  """The name and the schema of a JSON text."""

  model_config = pydantic.ConfigDict(extra='forbid')

  json_schema: Annotated[dict[str, Any], pydantic.Field(alias='schema')]
  name: str = ''
  description: str = ''
  strict: bool = True  # changes nothing: the text follows the schema in any case


class ResponseFormat(Part):
  """The form of an answer's text."""

  model_config = pydantic.ConfigDict(extra='forbid')

  type: Literal['text', 'json_object', 'json_schema'] = 'text'
  json_schema: JsonSchema | None = None

  @pydantic.model_validator(mode='after')
  def _check_schema(self) -> Self:
    if (self.type == 'json_schema') != (self.json_schema is not None):
      raise ValueError("send type='json_schema' with json_schema={'name': .., 'schema': {..}}")
    return self

  @property
  def schema_of_text(self) -> dict[str, object] | None:
    """The schema that the text must follow; None: there is none."""
    if self.json_schema is not None:
      return self.json_schema.json_schema
    return {'type': 'object'} if self.type == 'json_object' else None


class NamedFunction(Part):
  """A function by its name."""

  name: str


class NamedTool(Part):
  """A tool by its name."""

  type: Literal['function'] = 'function'
  function: NamedFunction


class AllowedTools(Part):
  """Tools by their names, and whether one of them must be called."""

  mode: Literal['auto', 'required']
  tools: list[NamedTool]


class ToolSubset(Part):
  """A choice of some of the tools."""

  type: Literal['allowed_tools']
  allowed_tools: AllowedTools


class TextBody(CompletionBody):
  """A request of /v1/completions."""

  PROMPT_FIELD = 'prompt'
  prompt: Annotated[
      list[Prompt],
      pydantic.Field(max_length=MAX_PROMPTS),
      pydantic.BeforeValidator(_listed_prompts),
  ]
  # The log-probs of the chosen tokens. From 2 on, and with `echo`, also so many likeliest ones.
  logprobs: int | None = pydantic.Field(None, ge=0, le=prompt_scores.TOP)
  echo: bool = False  # the answer begins with the prompt
  max_tokens: Annotated[int, pydantic.Field(ge=0, le=_MAX_TOKEN)] | None = None  # 0: only echo

  @property
  def num_top(self) -> int:
    return self.logprobs or 0 if self.echo or (self.logprobs or 0) > 1 else 0

  @property
  def wants_scores(self) -> bool:
    return self.num_top > 0 or (self.echo and self.logprobs is not None)

  @pydantic.model_validator(mode='after')
  def _check_max_tokens(self) -> Self:
    if self.max_tokens == 0 and not self.echo:
      raise ValueError('max_tokens: is 0, which needs echo=true')
    if self.echo and self.stream:
      raise ValueError('echo: is not supported with stream')
    return self


class ChatBody(CompletionBody):
  """A request of /v1/chat/completions."""

  PROMPT_FIELD = 'messages'
  messages: Messages
  tools: list[Annotated[ToolSchema, pydantic.WrapValidator(_check_only)]] = pydantic.Field(
      [], max_length=MAX_TOOLS
  )
  tool_choice: Literal['auto', 'none', 'required'] | ToolSubset | NamedTool = 'auto'
  response_format: ResponseFormat = ResponseFormat()
  parallel_tool_calls: bool = False  # False: an answer ends with its first call
  logprobs: bool = False  # those of the chosen tokens
  top_logprobs: int = pydantic.Field(0, ge=0, le=prompt_scores.TOP)

  @property
  def num_top(self) -> int:
    return self.top_logprobs if self.logprobs else 0

  @property
  def conversation(self) -> list[dict[str, object]]:
    """The messages as chat templates expect them, where parts are joined by nothing."""
    return self.conversation_with('')

  def conversation_with(self, separator: str) -> list[dict[str, object]]:
    """Returns the messages as chat templates expect them. See `Template.part_separator`."""
    return [message.to_dict(separator) for message in self.messages]

  @property
  def offered_tools(self) -> list[Any]:
    """The tools as the client sent them. The prompt shows them in any case, as in vLLM."""
    return self.tools

  @property
  def may_call(self) -> bool:
    """Whether the text is parsed for calls."""
    return len(self.allowed_functions) > 0

  @property
  def allowed_functions(self) -> list[Any]:
    """The functions that the answer may call."""
    choice = self.tool_choice
    if choice == 'none':
      return []
    tools: list[Any] = self.tools
    functions = [tool['function'] for tool in tools]
    if isinstance(choice, str):
      return functions
    names = _chosen_names(choice)
    return [function for function in functions if function['name'] in names]

  @property
  def barred_names(self) -> frozenset[str]:
    """Names of the tools that the prompt shows and the answer may not call."""
    tools: list[Any] = self.tools
    names = {tool['function']['name'] for tool in tools}
    return frozenset(names - {function['name'] for function in self.allowed_functions})

  @property
  def forced_functions(self) -> list[Any]:
    """The functions of which the answer must call one; empty: it need not call any."""
    choice = self.tool_choice
    mode = choice.allowed_tools.mode if isinstance(choice, ToolSubset) else choice
    return [] if mode == 'auto' else self.allowed_functions

  @property
  def is_forced(self) -> bool:
    """Whether the answer must follow a grammar."""
    return len(self.forced_functions) > 0 or self.response_format.type != 'text'

  @pydantic.field_validator('tool_choice')
  @classmethod
  def _check_choice(cls, choice: object, info: pydantic.ValidationInfo) -> object:
    tools: list[Any] = info.data.get('tools', [])
    if choice not in ('auto', 'none') and not tools:
      raise ValueError('there are no tools')
    names = _chosen_names(choice)
    if not isinstance(choice, str) and not names:
      raise ValueError("allowed_tools has no tools: name at least one, or send 'none'")
    known = [tool['function']['name'] for tool in tools]
    unknown = [name for name in names if name not in known]
    if unknown:
      raise ValueError(f'there is no tool {unknown[0][:80]!r}')
    return choice

  @pydantic.field_validator('top_logprobs')
  @classmethod
  def _check_top_logprobs(cls, count: int, info: pydantic.ValidationInfo) -> int:
    if count and not info.data.get('logprobs'):
      raise ValueError('needs logprobs=true')
    return count


def _chosen_names(choice: object) -> list[str]:
  """Returns the names of the tools in a choice."""
  if isinstance(choice, NamedTool):
    return [choice.function.name]
  if isinstance(choice, ToolSubset):
    return [tool.function.name for tool in choice.allowed_tools.tools]
  return []


class TextWriter:
  """Writes the answer of a text request as OpenAI's JSON."""

  prefix = 'cmpl'
  kind = 'text_completion'
  chunk_kind = 'text_completion'

  def __init__(self, model: str, body: Any, answer: answers.Answer):
    self._body = body
    self._answer = answer
    self._scores: list[prompt_scores.PromptScores] = []  # one per choice, where they are needed
    self._begun: set[int] = set()  # choices that have sent a chunk
    self._head = {
        'id': f'{self.prefix}-{uuid.uuid4().hex}',
        'object': self.chunk_kind if body.stream else self.kind,
        'created': int(time.time()),
        'model': model,
    }

  async def whole(self) -> dict[str, object]:
    """Returns a whole answer, whose choices have one chunk each."""
    chunks = [chunk async for chunk in self._answer.chunks()]
    chunks.sort(key=lambda chunk: chunk.index)
    self._scores = await self._answer.score()
    return self._fields(chunks) | {'usage': self._answer.usage()}

  async def events(self) -> AsyncGenerator[str, None]:
    """Yields the answer's server-sent events."""
    options = self._body.stream_options
    is_continuous = options.get('continuous_usage_stats')  # vLLM's
    try:
      async for chunk in self._answer.chunks():
        for part in self._parts(chunk):
          fields = self._fields([part])
          yield _event(fields | ({'usage': self._answer.usage()} if is_continuous else {}))
      if options.get('include_usage'):
        yield _event(self._head | {'choices': [], 'usage': self._answer.usage()})
      yield 'data: [DONE]\n\n'
    except http_server.RequestError as error:  # the status is sent already
      yield _event(error_body(error))

  def _parts(self, chunk: answers.Chunk) -> Iterator[answers.Chunk]:
    """Yields the chunks as which a chunk is streamed."""
    yield chunk

  def _fields(self, chunks: Sequence[answers.Chunk]) -> dict[str, object]:
    """Returns the fields of an answer or event that has these chunks."""
    choices = list(map(self._choice, chunks))
    self._begun.update(chunk.index for chunk in chunks)
    return self._head | {'choices': choices}

  def _choice(self, chunk: answers.Chunk) -> dict[str, object]:
    """Returns a choice of a whole answer, or of a chunk."""
    fields: dict[str, Any] = {
        'index': chunk.index,
        'finish_reason': chunk.finish,
        'stop_reason': chunk.stop,  # vLLM's
        'logprobs': self._logprobs(chunk),
    }
    if self._body.return_token_ids:
      fields['token_ids'] = chunk.tokens
    if chunk.turn is not None:
      fields['turn'] = chunk.turn
    return fields | self._content(chunk)

  def _content(self, chunk: answers.Chunk) -> dict[str, object]:
    """Returns the fields of the chunk's text."""
    fields: dict[str, Any] = {'text': chunk.text}
    if self._body.echo:
      fields['text'] = _decode(b''.join(self._prompt_pieces(chunk))) + chunk.text
    if self._body.return_token_ids and chunk.index not in self._begun:
      fields['prompt_token_ids'] = self._answer.prompts[chunk.index // self._body.n]
    return fields

  def _logprobs(self, chunk: answers.Chunk) -> dict[str, object] | None:
    """Returns the log-probs of the chosen tokens; None unless they were requested."""
    if self._body.logprobs is None:
      return None
    fields: dict[str, Any] = {
        'tokens': list(map(_decode, chunk.pieces)),
        'token_logprobs': chunk.logp,
        'top_logprobs': None,
        'text_offset': chunk.starts,
    }
    if not self._scores:
      return fields
    logp, tops = self._known_scores(chunk)
    if self._body.echo:
      pieces = self._prompt_pieces(chunk)
      places, length = answers.places_of(pieces)
      fields['tokens'] = [*map(_decode, pieces), *fields['tokens']]
      fields['text_offset'] = places + [length + start for start in chunk.starts]
    num_shown = len(fields['tokens'])
    fields['token_logprobs'] = logp[-num_shown:]
    if self._body.num_top:
      top_logprobs: list[Any] = []
      for token, value, top in zip(fields['tokens'], logp[-num_shown:], tops[-num_shown:]):
        # The likeliest one comes last, because tokens may have the same text.
        likeliest = {entry['token']: entry['logprob'] for entry in reversed(top)}
        top_logprobs.append(None if value is None else {token: value} | likeliest)
      fields['top_logprobs'] = top_logprobs
    return fields

  def _prompt_pieces(self, chunk: answers.Chunk) -> list[bytes]:
    choice = self._answer.choices[chunk.index]
    return choice.text.bytes_of(choice.plan.ids)

  def _known_scores(
      self, chunk: answers.Chunk
  ) -> tuple[list[float | None], list[list[dict[str, object]]]]:
    """Returns the log-prob and the likeliest tokens of each token of prompt and answer."""
    scores = self._scores[chunk.index]
    logp = [None, *scores.logp.tolist()]
    tops: list[Any] = [[]]
    text = self._answer.choices[chunk.index].text
    num_top = self._body.num_top
    for ids, values in zip(scores.top_ids[:, :num_top], scores.top_logp[:, :num_top].tolist()):
      tops.append(list(map(_token_entry, text.bytes_of(ids), values)))
    return logp, tops


class ChatWriter(TextWriter):
  """Writes the answer of a chat request as OpenAI's JSON."""

  prefix = 'chatcmpl'
  kind = 'chat.completion'
  chunk_kind = 'chat.completion.chunk'

  def __init__(self, model: str, body: ChatBody, answer: answers.Answer):
    super().__init__(model, body, answer)
    self._num_calls: collections.Counter[int] = collections.Counter()  # sent, per choice

  def _fields(self, chunks: Sequence[answers.Chunk]) -> dict[str, object]:
    begins = any(chunk.index not in self._begun for chunk in chunks)
    fields = super()._fields(chunks)
    if begins and self._body.return_token_ids:
      fields['prompt_token_ids'] = self._answer.prompts[0]
    return fields

  def _parts(self, chunk: answers.Chunk) -> Iterator[answers.Chunk]:
    """Yields the text, then each call, then the end. Clients read one of them per delta."""
    if chunk.tokens or chunk.text:
      yield dataclasses.replace(chunk, finish=None, calls=(), stop=None, turn=None)
    empty = answers.Chunk(chunk.index, '', [], [], [], [], None)
    for call in chunk.calls:
      yield dataclasses.replace(empty, calls=(call,))
    if chunk.finish is not None:
      yield dataclasses.replace(empty, finish=chunk.finish, stop=chunk.stop, turn=chunk.turn)

  def _content(self, chunk: answers.Chunk) -> dict[str, object]:
    """Returns the chat's message, or the part of it that is in a chunk."""
    message: dict[str, Any] = {}
    if chunk.index not in self._begun:
      message = {'role': 'assistant', 'content': ''}
    if chunk.text:
      message['content'] = chunk.text
    is_streamed = self._body.stream
    if chunk.calls:
      calls = list(map(_call, chunk.calls))
      message['tool_calls'] = calls
      if is_streamed:
        first = self._num_calls[chunk.index]
        message['tool_calls'] = [{'index': i} | call for i, call in enumerate(calls, first)]
        self._num_calls[chunk.index] += len(calls)
      else:
        message['content'] = chunk.text or None
    return {'delta' if is_streamed else 'message': message}

  def _logprobs(self, chunk: answers.Chunk) -> dict[str, object] | None:
    if not self._body.logprobs:
      return None
    entries = chosen_logprobs(chunk)
    if self._scores:
      logp, tops = self._known_scores(chunk)
      num_prompt = len(logp) - len(entries)
      for entry, value, top in zip(entries, logp[num_prompt:], tops[num_prompt:]):
        entry |= {'logprob': value, 'top_logprobs': top}
    return {'content': entries}


def chosen_logprobs(chunk: answers.Chunk) -> list[dict[str, object]]:
  """Returns the tokens of a chunk with their log-probs."""
  entries = map(_token_entry, chunk.pieces, chunk.logp)
  return [entry | {'top_logprobs': []} for entry in entries]


def error_body(error: exceptions.HTTPException) -> dict[str, object]:
  """Returns the JSON of an error as OpenAI writes it."""
  other = 'invalid_request_error' if error.status_code < 500 else 'server_error'
  fields = {
      'message': error.detail,
      'type': _ERROR_TYPES.get(error.status_code, other),
      'param': getattr(error, 'param', None),
      'code': getattr(error, 'code', None),
  }
  return {'error': fields}


def _event(fields: dict[str, object]) -> str:
  return f'data: {json.dumps(fields)}\n\n'


def _call(call: tool_calls.Call) -> dict[str, object]:
  function = {'name': call.name, 'arguments': json.dumps(call.arguments, ensure_ascii=False)}
  return {'id': f'call_{uuid.uuid4().hex[:24]}', 'type': 'function', 'function': function}


def _token_entry(piece: bytes, logp: float) -> dict[str, object]:
  return {'token': _decode(piece), 'logprob': logp, 'bytes': list(piece)}


def _decode(piece: bytes) -> str:
  return piece.decode('utf-8', 'replace')
