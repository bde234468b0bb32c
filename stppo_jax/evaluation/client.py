"""Client of an OpenAI-compatible server: messages in, the text of a turn out.

The client retries overload and network errors after waits that double. If the server rejects a
request for good, the error is one line.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import json
import math
import re
import time
from typing import Any

import requests

from stppo_jax.net import http_client
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.types import UserError

RETRIES = 6  # further attempts per request
_BACKOFF_S = 1.0
_LIMITS = http_client.ClientLimits(connect_s=10.0, total_s=300.0)
_MAX_SOCKETS = 1024  # shared by all threads
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
  is_cut: bool = False  # it ended at a limit


class ChatClient:
  """Asks for completions. Threads may share it, and `stop_signal` ends their waits.

  Args:
    address: up to /v1.
    api_key: empty: the server needs none.
    fields: of each request, such as `model`.
    stop: texts that end a turn.
    stop_signal: set when the job has ended.
  """

  def __init__(
      self,
      address: str,
      api_key: str,
      fields: Mapping[str, object],
      stop: Sequence[str] = (),
      stop_signal: StopSignal = NEVER,
  ):
    self._fields = dict(fields)
    if stop:
      self._fields['stop'] = list(stop[:_MAX_STOPS])
    self._stop = tuple(stop)
    self._stop_signal = stop_signal
    self._has_answered = False
    self._answered_s = -math.inf  # when the newest answer came
    self._server = http_client.Connection(
        address.rstrip('/'), _LIMITS, _MAX_SOCKETS, api_key, is_outside=True
    )

  def complete(
      self, messages: Sequence[Mapping[str, str]], seed: int | None = None
  ) -> ChatCompletion:
    """Returns the next turn. Raises TooLongError, UnansweredError, or a UserError for good."""
    body = self._fields | {'messages': list(messages)}
    if seed is not None:
      body['seed'] = seed
    attempt = functools.partial(self._attempt, body)
    try:
      return http_client.with_retries(attempt, RETRIES, _BACKOFF_S, self._stop_signal.wait)
    except http_client.Temporary as error:
      raise UnansweredError(str(error)) from error

  def _attempt(self, body: Mapping[str, object], unused_number: int) -> ChatCompletion:
    """Sends the request once. Raises http_client.Temporary if another attempt may help."""
    if self._stop_signal.is_set():
      raise UnansweredError('the job has ended')
    began_s = time.monotonic()
    try:
      answer = self._server.ask('/chat/completions', body, self._stop_signal)
      completion = _parse(json.loads(answer), self._stop)
    except http_client.Rejected as error:
      fields = _error_fields(error.text)
      message = ' '.join(str(fields.get('message') or error.text).split())[:_MAX_MESSAGE]
      if error.status in (400, 413, 422) and _is_too_long(fields):
        raise TooLongError(message) from None
      raise self._error(f'rejected a request with status {error.status}: {message}') from None
    except http_client.Temporary as error:
      if isinstance(error.__cause__, requests.ConnectionError) and not self._has_answered:
        raise self._error(f'gave no answer ({error}): start it, or correct the address') from None
      # One that hangs would take all attempts of all rows. A row alone may try once more.
      waited_s = time.monotonic() - began_s
      if waited_s > 0.9 * _LIMITS.total_s and self._answered_s < began_s - _LIMITS.total_s:
        reason = f'gave no answer to any request for {waited_s:.0f} s'
        if not self._has_answered:
          raise self._error(
              f'{reason}: restart it, correct the address, or lower config.eval.rows'
          ) from None
        raise UnansweredError(reason) from None
      raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
      message = f'an answer that is no completion ({type(error).__name__})'
      raise http_client.Temporary(message) from None
    self._has_answered = True
    self._answered_s = time.monotonic()
    return completion

  def _error(self, reason: str) -> UserError:
    address = self._server.address
    model = self._fields['model']
    return UserError(f'config.eval.address={address!r} with config.eval.model={model!r} {reason}')


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
  closing_tags = [stop for stop in stops if stop.startswith('</')]
  # Where each tag was opened last, and its closing tag. -1: the tag was never opened.
  closing_by_place = {text.rfind('<' + tag[2:]): tag for tag in closing_tags}
  last_place = max(closing_by_place, default=-1)
  return text + closing_by_place[last_place] if last_place >= 0 else text


def _parse(answer: Any, stop: Sequence[str]) -> ChatCompletion:
  """Returns the completion of an answer; raises an ordinary error if there is none."""
  choice = answer['choices'][0]
  content = choice['message'].get('content') or ''
  if not isinstance(content, str):
    raise TypeError
  reason = choice.get('stop_reason', Ellipsis)  # vLLM's
  text = whole_turn(content, choice.get('finish_reason'), stop, reason)
  usage = answer.get('usage') or {}
  count = lambda name: int(usage.get(name) or 0)  # some servers leave some out
  is_cut = choice.get('finish_reason') == 'length'
  return ChatCompletion(text, count('completion_tokens'), count('total_tokens'), is_cut)


def _error_fields(text: str) -> dict[str, object]:
  """Returns the fields of an error; {} if the body has another form."""
  body = None
  with contextlib.suppress(ValueError, RecursionError):
    body = json.loads(text)
  error = body.get('error', body) if isinstance(body, dict) else None  # SGLang: without `error`
  if isinstance(error, str):
    return {'message': error}
  return error if isinstance(error, dict) else {}


def _is_too_long(fields: Mapping[str, object]) -> bool:
  """Returns whether the messages do not fit, by the error's code or its own words."""
  if fields.get('code') in _TOO_LONG_CODES or fields.get('type') in _TOO_LONG_CODES:
    return True
  own_words = _ECHO.split(str(fields.get('message')))[0]
  return _TOO_LONG_WORDS.search(own_words) is not None
