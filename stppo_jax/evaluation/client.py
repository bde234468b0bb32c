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
_CONNECT_S = 10.0
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
class ChatCompletion:
  """An answer."""

  text: str  # with the stop string that ended it
  num_tokens: int  # sampled
  total_tokens: int  # including those of the messages


class ChatClient:
  """Asks for completions. Threads may share it.

  Args:
    address: up to /v1.
    api_key: empty: the server needs none.
    fields: of each request, such as `model`.
    stop: texts that end a turn.
  """

  def __init__(
      self, address: str, api_key: str, fields: Mapping[str, Any], stop: Sequence[str] = ()
  ):
    self._given = f'config.eval.address={address!r}'
    self._openai = packages.import_package(self._given, 'openai', 'remote')
    self._fields = dict(fields)
    if stop:
      self._fields['stop'] = list(stop[:_MAX_STOPS])
    self._stop = tuple(stop)
    self._has_answered = False
    self._client = self._openai.OpenAI(
        base_url=address,
        api_key=api_key or 'none',
        max_retries=RETRIES,
        timeout=self._openai.Timeout(_TIMEOUT_S, connect=_CONNECT_S),
    )

  def complete(
      self, messages: Sequence[Mapping[str, str]], seed: int | None = None
  ) -> ChatCompletion:
    """Returns the next turn. Raises TooLongError, UnansweredError, or a UserError for good."""
    try:
      answer = self._client.chat.completions.create(
          messages=messages, seed=self._openai.omit if seed is None else seed, **self._fields
      )
      completion = _parse(answer, self._stop)
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
    return UserError(f'{self._given} with config.eval.model={self._fields["model"]!r} {reason}')


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


def _parse(answer: Any, stop: Sequence[str]) -> ChatCompletion:
  """Returns the completion of an answer; raises an ordinary error if there is none."""
  choice = answer.choices[0]
  content = choice.message.content or ''
  if not isinstance(content, str):
    raise TypeError
  reason = getattr(choice, 'stop_reason', Ellipsis)  # vLLM's
  text = whole_turn(content, choice.finish_reason, stop, reason)
  count = lambda name: getattr(answer.usage, name, None) or 0  # some servers leave some out
  return ChatCompletion(text, count('completion_tokens'), count('total_tokens'))


def _is_too_long(fields: Mapping[str, Any]) -> bool:
  """Returns whether the messages do not fit, by the error's code or its own words."""
  if fields.get('code') in _TOO_LONG_CODES or fields.get('type') in _TOO_LONG_CODES:
    return True
  own_words = _ECHO.split(str(fields.get('message')))[0]
  return _TOO_LONG_WORDS.search(own_words) is not None
