"""Answers in progress: sampled tokens in, chunks of text with calls and log-probs out.

The scheduler sends the tokens of a choice to the queue of its answer. `Answer.chunks` decodes them.
At the end of a turn it parses the tool calls and records the turn in its session.
"""

import asyncio
import codecs
from collections.abc import AsyncGenerator
from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Sequence
import contextlib
import dataclasses
import json
from typing import Any

from absl import logging

from stppo_jax.net import http_server
from stppo_jax.serving import prompt_scores
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import sessions
from stppo_jax.text import tool_calls

_FAILURES = {
    'cancelled': (
        503,
        'the server stops, the session has ended, or a later request has a part of it',
    ),
    'grammar': (
        400,
        'the schema is not supported: no answer could follow it to its end. Use a smaller one, or '
        'leave out patterns',
    ),
    'error': (500, 'the engine has failed; see the log'),
}


Scorer = Callable[[list[list[int]]], Awaitable[list[prompt_scores.PromptScores]]]


@dataclasses.dataclass
class Chunk:
  """New content of a choice. `finish` is set in its last chunk."""

  index: int
  text: str
  tokens: list[int]
  pieces: list[bytes]  # the text of each token
  logp: list[float]
  starts: list[int]  # place of each token in the text
  finish: str | None
  calls: tuple[tool_calls.Call, ...] = ()
  stop: str | None = None  # the client's stop string that ended the choice
  turn: int | None = None  # its number in the session
  was_cut: bool = False  # the choice ended at a limit, even if `finish` is 'tool_calls'


@dataclasses.dataclass(eq=False)
class TurnText:
  """Decodes a turn token by token, without its eos token and, by default, without its stop string.

  Bytes of an unfinished character, and text that may become a stop string, are held back.
  """

  token_bytes: Sequence[bytes]
  eos_ids: Collection[int]
  stops: Sequence[str] = ()
  keeps_stop: bool = False
  full: str = ''  # with the stop string, and the rest of the token in which it ends
  shown: str = ''  # the part that a client may see
  stop: str | None = None  # the stop string that comes first
  before_stop: str = ''  # the text up to its start, or all of it
  through_stop: str = ''  # the text up to its end, or all of it
  pieces: list[bytes] = dataclasses.field(default_factory=list)  # the text of each token
  starts: list[int] = dataclasses.field(default_factory=list)  # place of each token in `full`

  def __post_init__(self):
    self._longest = max(map(len, self.stops), default=0)
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')

  def feed(self, tokens: Sequence[int], finish: str | None) -> None:
    """Adds sampled tokens. `finish` is set with the last ones."""
    before = len(self.full)
    pieces = self.bytes_of(tokens)
    self.pieces += pieces
    has_eos = finish == 'stop' and len(tokens) > 0 and tokens[-1] in self.eos_ids
    for piece in pieces[: len(pieces) - has_eos]:
      self.starts.append(len(self.full))
      self.full += self._decoder.decode(piece)
    if finish is not None:
      self.full += self._decoder.decode(b'', True)
    if has_eos:
      self.starts.append(len(self.full))
    self._find_stop(max(0, before - self._longest))
    self.shown = self._visible(finish is not None)

  def bytes_of(self, tokens: Sequence[int]) -> list[bytes]:
    """Returns the text of each token."""
    known = len(self.token_bytes)
    return [self.token_bytes[token] if token < known else b'' for token in tokens]

  def _find_stop(self, start: int) -> None:
    """Sets the stop string that comes first, and the text before and through it."""
    self.before_stop = self.full
    self.through_stop = self.full
    places = []
    for stop in self.stops:
      place = self.full.find(stop, start)
      if place >= 0:
        places.append((place, stop))
    if places:
      place, self.stop = min(places)
      self.before_stop = self.full[:place]
      self.through_stop = self.full[: place + len(self.stop)]

  def _visible(self, is_over: bool) -> str:
    """Returns the text before a stop string, or before a text that may become one."""
    if self.keeps_stop:
      return self.through_stop
    if self.stop is not None:
      return self.before_stop
    num_held = 0
    if not is_over:
      for size in range(1, min(self._longest, len(self.full) + 1)):
        if any(stop.startswith(self.full[-size:]) for stop in self.stops):
          num_held = size
    end = max(len(self.shown), len(self.full) - num_held)
    return self.full[:end]


def places_of(pieces: Sequence[bytes]) -> tuple[list[int], int]:
  """Returns where each token begins in the text of all of them, and the length of that text."""
  decoder = codecs.getincrementaldecoder('utf-8')('replace')
  places = []
  length = 0
  for piece in pieces:
    places.append(length)
    length += len(decoder.decode(piece))
  return places, length + len(decoder.decode(b'', True))


@dataclasses.dataclass(eq=False)
class Choice:
  """One sample of an answer, as far as it is sampled."""

  request: scheduler_lib.Request
  plan: sessions.RequestPlan
  text: TurnText
  tokens: list[int] = dataclasses.field(default_factory=list)
  logp: list[float] = dataclasses.field(default_factory=list)
  num_sent: int = 0  # tokens
  num_sent_chars: int = 0
  is_over: bool = False

  def sent(self) -> tuple[list[int], list[float]]:
    """Returns the tokens that the client can have, and their log-probs."""
    end = self.num_sent
    return self.tokens[:end], self.logp[:end]

  def cancel(self) -> None:
    """Ends the request."""
    self.request.cancelled = True

  def take_chunk(self, index: int, finish: str | None) -> Chunk:
    """Returns the content that was not sent yet."""
    text = self.text.shown[self.num_sent_chars :]
    new = slice(self.num_sent, None)
    self.num_sent = len(self.tokens)
    self.num_sent_chars = len(self.text.shown)
    self.is_over = finish is not None
    return Chunk(
        index,
        text,
        self.tokens[new],
        self.text.pieces[new],
        self.logp[new],
        self.text.starts[new],
        finish,
        was_cut=finish == 'length',
    )


@dataclasses.dataclass(eq=False)
class Answer:
  """A request in progress. Call `close` once at its end."""

  choices: list[Choice]
  num_samples: int  # choices per prompt
  is_streamed: bool
  form: tool_calls.Form | None  # None: the request has no tools
  session: sessions.Session | None
  events: asyncio.Queue  # (index, tokens, log-probs, finish) as the scheduler emits them
  scorer: Scorer | None = None  # None: the log-probs of sampling are enough
  barred: Collection[str] = ()  # names of offered tools that the answer may not call
  max_calls: int | None = None  # calls in an answer; None: any number

  @property
  def prompts(self) -> list[list[int]]:
    """The ids of each prompt."""
    return [choice.plan.ids for choice in self.choices[:: self.num_samples]]

  def usage(self) -> dict[str, int]:
    """Returns the `usage` of the answer."""
    num_prompt = sum(map(len, self.prompts))
    num_sampled = sum(len(choice.tokens) for choice in self.choices)
    return {
        'prompt_tokens': num_prompt,
        'completion_tokens': num_sampled,
        'total_tokens': num_prompt + num_sampled,
    }

  async def chunks(self) -> AsyncGenerator[Chunk, None]:
    """Yields the chunks of all choices: one per choice unless the answer is streamed.

    Choice: a turn that may be a call is sent when it is complete. RequestError: the engine failed
    or stops.
    """
    num_left = len(self.choices)
    while num_left:
      index, tokens, logp, finish = await self.events.get()
      if finish in _FAILURES:
        raise http_server.RequestError(*_FAILURES[finish])
      choice = self.choices[index]
      choice.tokens += tokens
      choice.logp += logp
      choice.text.feed(tokens, finish)
      if finish is None and (self.form or not self.is_streamed):
        continue
      chunk = choice.take_chunk(index, finish)
      if finish is not None:
        num_left -= 1
        self._finish(choice, chunk)
      yield chunk

  async def score(self) -> list[prompt_scores.PromptScores]:
    """Returns the log-probs of all tokens of each choice, once it is over; empty: not needed."""
    if self.scorer is None:
      return []
    return await self.scorer([[*choice.plan.ids, *choice.tokens] for choice in self.choices])

  def close(self) -> None:
    """Cancels the choices in progress."""
    for choice in self.choices:
      choice.cancel()
      if self.session is not None and not choice.is_over:
        self.session.abandon(choice.plan, *choice.sent())

  def _finish(self, choice: Choice, chunk: Chunk) -> None:
    """Parses the calls of a turn that has ended, and records it."""
    action = 'other'
    text = choice.text
    forms = list(map(_message, dict.fromkeys((text.shown, text.through_stop, text.full))))
    if chunk.finish == 'stop':
      chunk.stop = text.stop
    if self.form is not None:
      content, calls = self._parse(self.form, choice)
      if any(call.error for call in calls):
        action = 'invalid'  # the client gets the text as it is
      elif calls:
        action = 'tool'
        calls = calls[: self.max_calls]
        chunk.text = content
        chunk.calls = calls
        chunk.finish = 'tool_calls'
        forms.append(_message(content, calls))
    if self.session is not None:
      with contextlib.suppress(sessions.Closed):  # the client's next request gets 404
        chunk.turn = self.session.record(
            choice.plan, choice.tokens, choice.logp, forms, chunk.was_cut, action, text.through_stop
        )

  def _parse(self, form: tool_calls.Form, choice: Choice) -> tool_calls.Parsed:
    """Returns content and calls of a turn.

    The client's stop string may follow a call or be the end of one. Up to three texts are tried.
    They are the text that the client may see, the text before the stop string and the text through
    it. The first text without a malformed call counts.
    """
    turn = choice.text
    for text in dict.fromkeys((turn.shown, turn.before_stop, turn.through_stop)):
      content, calls = self._read_calls(form, text, choice.request.in_thought)
      if not any(call.error for call in calls):
        break
    return content, calls

  def _read_calls(self, form: tool_calls.Form, text: str, in_thought: bool) -> tool_calls.Parsed:
    """Returns content and calls of a text. An error of the form is a call that cannot be read.

    A call of a tool that the request does not allow cannot be read either.
    """
    try:
      content, calls = form.parse(text, in_thought)
      for call in calls:
        json.dumps(call.arguments)  # some nest too deeply for the answer
    except Exception as error:  # also on a tool that the client describes oddly
      logging.log_first_n(logging.ERROR, 'a call cannot be read', 1, exc_info=True)
      return text, (tool_calls.Call('', {}, f'{type(error).__name__}'),)
    if any(call.name in self.barred for call in calls):
      return text, (tool_calls.Call('', {}, 'the request does not allow this tool'),)
    return content, calls


def _message(content: str, calls: tuple[tool_calls.Call, ...] = ()) -> dict[str, object]:
  """Returns the message with which a client sends a turn back."""
  message: dict[str, Any] = {'role': 'assistant', 'content': content}
  if calls:
    functions = [{'name': call.name, 'arguments': call.arguments} for call in calls]
    message['tool_calls'] = [{'function': function} for function in functions]
  return message
