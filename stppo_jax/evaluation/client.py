"""Client of an OpenAI-compatible server: messages in, the text of a turn out.

OpenAI's own client retries overload and network errors. If the server rejects a request for good,
the error is one line.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import re
from typing import Any

from stppo_jax.envs import packages
from stppo_jax.types import UserError

RETRIES = 6  # further attempts per request
_TIMEOUT_S = 300.0
_MAX_STOPS = 4  # OpenAI's own server takes no more
_MAX_MESSAGE = 300  # characters of a server's message in an error
# Codes and words of OpenAI, vLLM, SGLang and llama.cpp for messages that do not fit.
_TOO_LONG_CODES = ('context_length_exceeded', 'exceed_context_size_error')
_TOO_LONG_WORDS = re.compile(
    r'context (length|window|size)|maximum (context|model length|allowed length)|max_model_len|'
    r'(prompt|input|messages)\b[^.]* too long',
    re.IGNORECASE,
)
_ECHO = re.compile('[\'"]input[\'"]:')  # pydantic's errors repeat the request after it


class UnansweredError(Exception):
  """There was no answer after the last attempt, or the job has ended."""


class TooLongError(Exception):
  """The messages and an answer do not fit into the model's context."""


@dataclasses.dataclass(frozen=True)
class ClientSettings:
  """The address, and the settings of each request."""

  address: str  # up to /v1
  model: str
  temperature: float
  top_p: float
  max_tokens: int  # per turn
  stop: tuple[str, ...]  # texts that end a turn
  api_key: str = ''
  template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ChatCompletion:
  """An answer."""

  text: str  # with the stop string that ended it
  num_tokens: int  # sampled
  total_tokens: int  # including those of the messages


class ChatClient:
  """Asks for completions. Threads may share it."""

  def __init__(self, settings: ClientSettings):
    given = f'config.eval.address={settings.address!r}'
    self._openai = packages.import_package(given, 'openai', 'remote')
    self._settings = settings
    self._has_answered = False
    self._client = self._openai.OpenAI(
        base_url=settings.address,
        api_key=settings.api_key or 'none',
        max_retries=RETRIES,
        timeout=_TIMEOUT_S,
    )

  def complete(
      self, messages: Sequence[Mapping[str, str]], seed: int | None = None
  ) -> ChatCompletion:
    """Returns the next turn. Raises TooLongError, UnansweredError, or a UserError for good."""
    try:
      answer = self._client.chat.completions.create(**self._body(messages, seed))
      completion = _parse(answer, self._settings)
    except self._openai.APIStatusError as error:
      raise self._explain(error) from None
    except self._openai.APIConnectionError as error:
      if not self._has_answered:
        raise self._error(f'gave no answer ({error}): start it, or correct the address') from None
      raise UnansweredError(str(error)) from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
      message = f'an answer that is no completion ({type(error).__name__})'
      raise UnansweredError(message) from error
    self._has_answered = True
    return completion

  def _body(self, messages: Sequence[Mapping[str, str]], seed: int | None) -> dict[str, Any]:
    settings = self._settings
    body: dict[str, Any] = {
        'model': settings.model,
        'messages': list(messages),
        'max_tokens': settings.max_tokens,
        'temperature': settings.temperature,
    }
    if settings.top_p < 1:
      body['top_p'] = settings.top_p
    if settings.stop:
      body['stop'] = list(settings.stop[:_MAX_STOPS])
    if settings.template_kwargs:  # vLLM and SGLang take it
      body['extra_body'] = {'chat_template_kwargs': dict(settings.template_kwargs)}
    if settings.temperature > 0 and seed is not None:
      body['seed'] = seed
    return body

  def _explain(self, error: Any) -> Exception:
    """Returns the error for an answer with a status other than 200."""
    status = error.status_code
    if status in (408, 409, 429) or status >= 500:
      return UnansweredError(f'HTTP status {status}')
    fields = error.body if isinstance(error.body, dict) else {}
    message = ' '.join(str(fields.get('message') or error.body).split())[:_MAX_MESSAGE]
    if status in (400, 413, 422) and _is_too_long(fields):
      return TooLongError(message)
    return self._error(f'rejected a request with status {status}: {message}')

  def _error(self, reason: str) -> UserError:
    return UserError(
        f'config.eval.address={self._settings.address!r} with config.eval.model='
        f'{self._settings.model!r} {reason}'
    )


def whole_turn(
    text: str, finish: str | None, stops: Sequence[str], stop_reason: Any = Ellipsis
) -> str:
  """Returns a turn up to and with the stop string that ended it, which servers leave out.

  `stop_reason` is vLLM's: the stop string, or None. Choice: without it, a turn that ended by itself
  gets the closing tag among `stops` of the tag that it opened last.
  """
  ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
  if ends:
    return text[: min(ends)]
  if finish != 'stop':
    return text
  if stop_reason is not Ellipsis:
    return text + stop_reason if stop_reason in stops else text
  opened = {text.rfind('<' + stop[2:]): stop for stop in stops if stop.startswith('</')}
  last = max(opened, default=-1)
  return text + opened[last] if last >= 0 else text


def _parse(answer: Any, settings: ClientSettings) -> ChatCompletion:
  """Returns the completion of an answer; raises an ordinary error if there is none."""
  choice = answer.choices[0]
  content = choice.message.content or ''
  if not isinstance(content, str):
    raise TypeError
  reason = getattr(choice, 'stop_reason', Ellipsis)  # vLLM's
  text = whole_turn(content, choice.finish_reason, settings.stop, reason)
  if answer.usage is None:
    return ChatCompletion(text, 0, 0)
  return ChatCompletion(text, answer.usage.completion_tokens, answer.usage.total_tokens)


def _is_too_long(fields: Mapping[str, Any]) -> bool:
  """Returns whether the messages do not fit, by the error's code or its own words."""
  if fields.get('code') in _TOO_LONG_CODES or fields.get('type') in _TOO_LONG_CODES:
    return True
  own_words = _ECHO.split(str(fields.get('message')))[0]
  return _TOO_LONG_WORDS.search(own_words) is not None
