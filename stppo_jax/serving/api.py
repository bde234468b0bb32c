"""OpenAI's HTTP interface as data: bodies in, checked asks out; answers out as JSON values.

What is not supported is refused in one line and never ignored where it would change an answer.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
from typing import Any

# Further fields, mostly vLLM's, that change an answer unless they are empty, and are not supported.
_UNSUPPORTED = (
    'echo suffix logit_bias presence_penalty frequency_penalty functions audio top_k min_p '
    'use_beam_search min_tokens stop_token_ids bad_words allowed_token_ids chat_template documents '
    'continue_final_message structured_outputs reasoning_effort return_tokens_as_token_ids '
    'truncate_prompt_tokens'
).split()
# The only value that changes nothing: all special tokens but the eos that ends an answer are shown.
_FIXED = {'repetition_penalty': 1, 'add_generation_prompt': True, 'skip_special_tokens': False}
ROLES = ('system', 'developer', 'user', 'assistant', 'tool')


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits per request."""

  max_body_bytes: int = 4 << 20
  max_receiving_bytes: int = 256 << 20  # of all bodies that are not whole yet
  max_choices: int = 16  # per prompt
  max_prompts: int = 256
  max_stops: int = 16
  max_stop_chars: int = 256
  max_messages: int = 4096
  max_tools: int = 128
  body_timeout_s: float = 10.0
  idle_timeout_s: float = 75.0
  write_timeout_s: float = 30.0  # for a client that does not read


class ApiError(Exception):
  """A refused request: an HTTP status, and one line for the client."""

  def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
    super().__init__(message)
    self.status, self.message, self.code, self.param = status, message, code, param

  def body(self) -> dict[str, Any]:
    """Returns the error as OpenAI's clients expect it."""
    kinds = {401: 'authentication_error', 429: 'rate_limit_error'}
    kind = kinds.get(self.status, 'invalid_request_error' if self.status < 500 else 'server_error')
    return {
        'error': {'message': self.message, 'type': kind, 'param': self.param, 'code': self.code}
    }


@dataclasses.dataclass(frozen=True)
class Ask:
  """A valid request for completions."""

  model: str
  messages: tuple[dict[str, Any], ...] | None  # of a chat; None: `prompts` are continued
  prompts: tuple[str | tuple[int, ...], ...]  # texts or token ids
  max_tokens: int | None
  temperature: float
  top_p: float
  n: int
  stop: tuple[str, ...]
  seed: int | None
  stream: bool
  with_usage: bool  # at the end of a stream
  logprobs: bool
  tools: tuple[dict[str, Any], ...]
  keeps_stop: bool  # vLLM's include_stop_str_in_output
  token_ids: bool  # vLLM's return_token_ids
  ignore_eos: bool = False  # vLLM's: only max_tokens and stop end the answer
  parallel_calls: bool = False  # else an answer ends with its first call


def parse(
    body: bytes, is_chat: bool, limits: Limits, template_kwargs: Mapping[str, Any] | None = None
) -> Ask:
  """Parses a request's body; `template_kwargs` are the server's own. Raises ApiError."""
  try:
    fields = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise ApiError(400, f'the body is not JSON ({type(error).__name__})') from None
  if not isinstance(fields, dict):
    raise ApiError(400, 'the body must be a JSON object')
  get = _Fields(fields)
  get.refuse_unsupported(dict(template_kwargs or {}))
  if (fields.get('response_format') or {'type': 'text'}) != {'type': 'text'}:
    raise ApiError(400, 'response_format must be {"type": "text"}', param='response_format')
  options = fields.get('stream_options') or {}
  if not isinstance(options, dict):
    raise ApiError(400, 'stream_options must be an object', param='stream_options')
  longest = get.number('max_tokens', None, 1, 2**31 - 1, whole=True)
  n = get.number('n', 1, 1, limits.max_choices, whole=True)
  if get.number('best_of', n, 1, limits.max_choices, whole=True) != n:
    raise ApiError(400, 'best_of must equal n', param='best_of')
  return Ask(
      model=get.text('model', ''),
      messages=_messages(fields.get('messages'), limits) if is_chat else None,
      prompts=() if is_chat else _prompts(fields.get('prompt'), limits),
      max_tokens=get.number('max_completion_tokens', longest, 1, 2**31 - 1, whole=True),
      temperature=get.number('temperature', 1.0, 0, 100),
      top_p=get.number('top_p', 1.0, 0, 1, above=True),
      n=n,
      stop=_stops(fields.get('stop'), limits),
      seed=get.number('seed', None, -(2**63), 2**63 - 1, whole=True),
      stream=get.flag('stream'),
      with_usage=bool(options.get('include_usage')),
      logprobs=_logprobs(get, is_chat),
      tools=_tools(get, limits) if is_chat else (),
      keeps_stop=get.flag('include_stop_str_in_output'),
      token_ids=get.flag('return_token_ids'),
      ignore_eos=get.flag('ignore_eos'),
      parallel_calls=get.flag('parallel_tool_calls'),
  )


class _Fields:
  """Checked access to the fields of a body; null counts as absent."""

  def __init__(self, fields: Mapping[str, Any]):
    self.fields = fields

  def refuse_unsupported(self, template_kwargs: dict[str, Any]) -> None:
    guided = [name for name in self.fields if name.startswith('guided_')]
    for name in (*_UNSUPPORTED, *guided):
      if self.fields.get(name) and self.fields[name] != -1:  # 'all', for numbers
        raise ApiError(400, f'{name} is not supported: leave it out', param=name)
    for name, value in (_FIXED | {'prompt_logprobs': None}).items():
      if self.fields.get(name) not in (None, value):
        raise ApiError(400, f'{name} must be {json.dumps(value)}, or left out', param=name)
    given = self.fields.get('chat_template_kwargs') or {}
    if not isinstance(given, dict) or template_kwargs | given != template_kwargs:
      own = json.dumps(template_kwargs)
      message = f"chat_template_kwargs must be the server's, {own}, or left out"
      raise ApiError(400, message, param='chat_template_kwargs')

  def number(self, name, default, least, most, whole=False, above=False) -> Any:
    value = self.fields.get(name)
    if value is None:
      return default
    kinds = int if whole else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool)
    if not fits or not least <= value <= most or (above and value == least):  # NaN is no number
      kind = 'whole number' if whole else 'number'
      more = 'above' if above else 'from'
      raise ApiError(400, f'{name} must be a {kind} {more} {least} to {most}', param=name)
    return value if whole else float(value)

  def text(self, name: str, default: str) -> str:
    value = self.fields.get(name)
    if value is not None and not isinstance(value, str):
      raise ApiError(400, f'{name} must be a text', param=name)
    return default if value is None else value

  def flag(self, name: str) -> bool:
    value = self.fields.get(name)
    if value is not None and not isinstance(value, bool):
      raise ApiError(400, f'{name} must be true or false', param=name)
    return bool(value)


def _logprobs(get: _Fields, is_chat: bool) -> bool:
  if is_chat:
    if get.number('top_logprobs', 0, 0, 20, whole=True):
      message = 'top_logprobs is not supported: ask for logprobs alone'
      raise ApiError(400, message, param='top_logprobs')
    return get.flag('logprobs')
  if get.number('logprobs', 0, 0, 5, whole=True) > 1:
    raise ApiError(400, 'logprobs must be 0 or 1: those of the chosen tokens', param='logprobs')
  return get.fields.get('logprobs') is not None


def _stops(value: Any, limits: Limits) -> tuple[str, ...]:
  stops = [value] if isinstance(value, str) else value or []
  fits = isinstance(stops, list) and len(stops) <= limits.max_stops
  if not fits or not all(isinstance(s, str) and 0 < len(s) <= limits.max_stop_chars for s in stops):
    raise ApiError(
        400,
        f'stop must be a text or up to {limits.max_stops} texts of 1 to {limits.max_stop_chars} '
        'characters',
        param='stop',
    )
  return tuple(stops)


def _prompts(value: Any, limits: Limits) -> tuple[str | tuple[int, ...], ...]:
  """Returns the prompts: one, or each of a list of them."""
  is_list = isinstance(value, list) and bool(value) and isinstance(value[0], (str, list))
  values = value if is_list else [value]
  if len(values) > limits.max_prompts:
    message = f'prompt has {len(values)} texts: send at most {limits.max_prompts} in a request'
    raise ApiError(400, message, param='prompt')
  return tuple(map(_prompt, values))


def _prompt(value: Any) -> str | tuple[int, ...]:
  if isinstance(value, list) and value:
    if all(type(token) is int and 0 <= token < 2**31 for token in value):
      return tuple(value)
  if not isinstance(value, str) or not value:
    message = 'prompt must be a text, a list of token ids, or a list of such prompts'
    raise ApiError(400, message, param='prompt')
  return value


def _messages(value: Any, limits: Limits) -> tuple[dict[str, Any], ...]:
  if not isinstance(value, list) or not 0 < len(value) <= limits.max_messages:
    raise ApiError(400, f'messages must be a list of 1 to {limits.max_messages}', param='messages')
  return tuple(_message(message, f'messages[{i}]') for i, message in enumerate(value))


def _message(value: Any, where: str) -> dict[str, Any]:
  """Returns a message with a text as its content, and calls with their arguments as objects."""
  if not isinstance(value, dict) or value.get('role') not in ROLES:
    raise ApiError(400, f'{where}.role must be one of {", ".join(ROLES)}', param=where)
  role = 'system' if value['role'] == 'developer' else value['role']
  message = {'role': role, 'content': _content(value.get('content'), where)}
  calls = value.get('tool_calls')
  if role == 'assistant' and calls:
    if not isinstance(calls, list):
      raise ApiError(400, f'{where}.tool_calls must be a list', param=where)
    message['tool_calls'] = [_call(call, where) for call in calls]
  for name in ('tool_call_id', 'name'):
    if isinstance(value.get(name), str):
      message[name] = value[name]
  return message


def _content(value: Any, where: str) -> str:
  if value is None or isinstance(value, str):
    return value or ''
  parts = value if isinstance(value, list) else [None]
  texts = [p.get('text') for p in parts if isinstance(p, dict) and p.get('type') == 'text']
  if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
    raise ApiError(400, f'{where}.content must be a text, or a list of text parts', param=where)
  return ''.join(map(str, texts))


def _call(value: Any, where: str) -> dict[str, Any]:
  function = value.get('function') if isinstance(value, dict) else None
  if not isinstance(function, dict) or not isinstance(function.get('name'), str):
    raise ApiError(400, f'{where}.tool_calls must hold functions with a name', param=where)
  arguments = function.get('arguments')
  try:
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
  except (ValueError, RecursionError):
    pass  # a text that is no JSON stays one
  function = {'name': function['name'], 'arguments': {} if arguments is None else arguments}
  return {'id': str(value.get('id', '')), 'type': 'function', 'function': function}


def _tools(get: _Fields, limits: Limits) -> tuple[dict[str, Any], ...]:
  tools, choice = get.fields.get('tools') or [], get.fields.get('tool_choice')
  if choice not in (None, 'auto', 'none'):
    raise ApiError(400, "tool_choice must be 'auto' or 'none'", param='tool_choice')
  if not isinstance(tools, list) or len(tools) > limits.max_tools:
    raise ApiError(400, f'tools must be a list of at most {limits.max_tools}', param='tools')
  for tool in tools:
    function: Any = tool.get('function') if isinstance(tool, dict) else None
    named = isinstance(function, dict) and isinstance(function.get('name'), str)
    if not named or tool.get('type') != 'function':
      raise ApiError(
          400, 'tools must hold {"type": "function", "function": {"name": ..}}', param='tools'
      )
    if not isinstance(function.get('parameters') or {}, dict):
      raise ApiError(400, 'parameters of a tool must be a JSON schema', param='tools')
  return () if choice == 'none' else tuple(tools)


def chat_logprobs(tokens: Sequence[bytes], logp: Sequence[float]) -> dict[str, Any]:
  """Returns the `logprobs` of a chat choice: those of the chosen tokens."""
  return {
      'content': [
          {'token': _piece(t), 'logprob': x, 'bytes': list(t), 'top_logprobs': []}
          for t, x in zip(tokens, logp)
      ]
  }


def text_logprobs(
    tokens: Sequence[bytes], logp: Sequence[float], starts: Sequence[int]
) -> dict[str, Any]:
  """Returns the `logprobs` of a choice of /v1/completions; `starts` are places in its text."""
  return {
      'tokens': list(map(_piece, tokens)),
      'token_logprobs': list(logp),
      'top_logprobs': None,
      'text_offset': list(starts),
  }


def _piece(token: bytes) -> str:
  return token.decode('utf-8', 'replace')


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
  """Returns the `usage` of an answer."""
  return {
      'prompt_tokens': prompt_tokens,
      'completion_tokens': completion_tokens,
      'total_tokens': prompt_tokens + completion_tokens,
  }
