"""The gateway without HTTP: asks in, answers out, piece by piece as they are sampled.

An ask becomes ids (`template`, or its session), then one request per choice (`scheduler`), whose
tokens come back through the event loop and become text, calls and log-probs.
"""

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import hashlib
import secrets
import threading
from typing import Any

import jax
import numpy as np

from stppo_jax import tokenizer as chat
from stppo_jax.envs import tool_calls
from stppo_jax.serving import api
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import sessions as sessions_lib
from stppo_jax.serving import template as template_lib
from stppo_jax.serving import turn_text


class Gone(Exception):
  """The client has disconnected."""


@dataclasses.dataclass
class Piece:
  """What is new of a choice. `finish` is set in its last piece."""

  index: int
  text: str = ''
  calls: tuple[tool_calls.Call, ...] = ()
  tokens: list[int] = dataclasses.field(default_factory=list)
  logp: list[float] = dataclasses.field(default_factory=list)
  starts: list[int] = dataclasses.field(default_factory=list)  # of the tokens, in the text
  finish: str | None = None
  stop: str | None = None  # the client's stop string that ended it
  turn: int | None = None  # its number in the session


@dataclasses.dataclass(eq=False)
class _Choice:
  """One sample of an answer, as far as it has come."""

  request: scheduler_lib.Request
  text: turn_text.TurnText
  plan: sessions_lib.Plan | None
  tokens: list[int] = dataclasses.field(default_factory=list)
  logp: list[float] = dataclasses.field(default_factory=list)
  is_over: bool = False


@dataclasses.dataclass(eq=False)
class Answer:
  """An ask in progress."""

  ask: api.Ask
  prompts: list[list[int]]  # choice i is of prompt i // ask.n
  session: sessions_lib.Session | None
  form: tool_calls.Form | None  # None: the ask names no tools
  choices: list[_Choice]
  events: asyncio.Queue

  def prompt(self, index: int) -> list[int]:
    """Returns the prompt of a choice."""
    return self.prompts[index // self.ask.n]

  def cancel(self) -> None:
    """Ends it soon; whoever waits for a piece gets Gone."""
    for choice in self.choices:
      choice.request.cancelled = True


class Service:
  """A model behind the gateway, with its sessions. Asks come from one event loop."""

  def __init__(
      self,
      scheduler: scheduler_lib.Scheduler,
      tokenizer: chat.Tokenizer,
      name: str,
      tool_form: str = 'hermes',
      limits: api.Limits | None = None,
      api_key: str = '',  # empty: none is asked for
      template_kwargs: Mapping[str, Any] | None = None,  # of the chat template
  ):
    self.scheduler, self.tokenizer, self.name = scheduler, tokenizer, name
    self.limits, self.api_key = limits or api.Limits(), api_key
    self.tool_form, self.template_kwargs = tool_form, template_kwargs
    max_chars = scheduler.max_total * chat.LONGEST_TOKEN
    self.template = template_lib.Template(tokenizer, scheduler.max_total, tool_form, max_chars)
    # Long texts take seconds. One thread encodes them in the order in which they came.
    self._encoder = futures.ThreadPoolExecutor(1, 'encode')
    self._num_encoding = 0  # asks that wait for that thread, or that it encodes
    self.stopping = False
    self._sessions: dict[str, sessions_lib.Session] = {}
    self._lock = threading.Lock()
    self._key_shape = jax.random.key_data(jax.random.key(0)).shape

  def close(self) -> None:
    """Ends the service's thread."""
    self._encoder.shutdown(wait=False, cancel_futures=True)

  def open_session(
      self, key: jax.Array, sampling: sessions_lib.Sampling
  ) -> tuple[str, sessions_lib.Session]:
    """Starts a session; returns its id, which nobody can guess, and the session."""
    name, session = secrets.token_hex(16), sessions_lib.Session(self.template, key, sampling)
    with self._lock:
      self._sessions[name] = session
    return name, session

  def end_session(self, name: str) -> None:
    """Ends a session: its client gets 404 from now on."""
    with self._lock:
      session = self._sessions.pop(name, None)
    if session is not None:
      session.close()
      self.scheduler.release(name)

  def session(self, name: str) -> sessions_lib.Session:
    """Returns an open session, or raises ApiError."""
    with self._lock:
      found = self._sessions.get(name)
    if found is None:
      raise api.ApiError(404, 'there is no such session, or it has ended', 'session_not_found')
    return found

  async def begin(
      self,
      ask: api.Ask,
      session_name: str = '',
      is_gone: Callable[[], bool] = lambda: False,  # whether the client has disconnected
  ) -> Answer:
    """Queues an ask. Raises ApiError, and Gone. Within a session any model name will do."""
    session = self.session(session_name) if session_name else None
    if session is None and ask.model not in ('', self.name):
      raise api.ApiError(
          404,
          f'there is no model {ask.model[:80]!r}, but {self.name!r}',
          'model_not_found',
          'model',
      )
    if session is not None and ask.ignore_eos:
      raise api.ApiError(400, 'ignore_eos is not supported in a session', param='ignore_eos')
    if session is not None and len(ask.prompts) > 1:
      raise api.ApiError(400, 'a request in a session has one prompt', param='prompt')
    most = self.scheduler.max_waiting
    num_choices = ask.n * max(1, len(ask.prompts))
    if num_choices > most:
      raise api.ApiError(
          400, f'{num_choices} answers: ask for at most {most} in a request, prompts times n'
      )
    if self._num_encoding >= most:
      raise api.ApiError(429, f'busy: {self._num_encoding} requests are waiting; try again')
    form = tool_calls.make_form(self.tool_form, ask.tools) if ask.tools else None
    loop = asyncio.get_running_loop()
    encode = functools.partial(self._encode, ask, session, is_gone)
    self._num_encoding += 1
    try:
      plans, prompts = await loop.run_in_executor(self._encoder, encode)
    except template_lib.TooLong as error:
      if session is not None:
        session.abandon(None, too_long=True)
      raise _too_long(ask, str(error)) from None
    except (ValueError, RecursionError) as error:  # the latter: arguments that are nested deeply
      raise api.ApiError(400, ' '.join(str(error).split())[:500]) from None
    except sessions_lib.Closed as error:
      raise api.ApiError(404, str(error), 'session_not_found') from None
    finally:
      self._num_encoding -= 1
    try:
      answer = self._answer(ask, session, session_name, plans, prompts, form)
      self.scheduler.submit([choice.request for choice in answer.choices])
    except (api.ApiError, scheduler_lib.Busy) as error:
      for plan in plans:
        assert session is not None
        session.abandon(plan, too_long=isinstance(error, api.ApiError))
      if isinstance(error, api.ApiError):
        raise
      stopping = self.stopping or not self.scheduler.is_alive
      raise api.ApiError(503 if stopping else 429, f'busy: {error}; try again') from None
    return answer

  def _encode(
      self, ask: api.Ask, session: sessions_lib.Session | None, is_gone: Callable[[], bool]
  ) -> tuple[list[sessions_lib.Plan], list[list[int]]]:
    """Returns the plans of a session's request, one per choice, and the ids of each prompt."""
    if is_gone():
      raise Gone
    if session is not None:
      plans = _plans(session, ask)
      return plans, [plans[0].ids]
    if ask.messages is not None:
      return [], [self.template.encode(ask.messages, ask.tools)]
    # A text may be a chat that the client's own template wrote.
    prompts = []
    for prompt in ask.prompts:
      prompts.append(self.template.encode_prompt(prompt))
      self._check_ids(ask, prompts[-1])  # before the others take their time
    return [], prompts

  def _check_ids(self, ask: api.Ask, ids: Sequence[int]) -> None:
    """Raises ApiError for a prompt that leaves no room, or that is no text."""
    most = self.scheduler.max_total
    if len(ids) >= most:
      raise _too_long(
          ask, f'the prompt has {len(ids)} tokens, and with an answer at most {most} fit'
      )
    wrong = [i for i in ids if not 0 <= i < self.tokenizer.vocab_size]
    if wrong or not ids:
      raise api.ApiError(400, f'the prompt holds no token, or one of no text: {wrong[:1]}')

  def _answer(self, ask, session, session_name, plans, prompts, form) -> Answer:
    for ids in prompts:
      self._check_ids(ask, ids)
    limit, temperature, top_p = self.scheduler.max_total, ask.temperature, ask.top_p
    if session is not None:
      sampling = session.sampling
      limit, temperature, top_p = sampling.max_turn, sampling.temperature, sampling.top_p
    stops = ask.stop
    if form and not ask.parallel_calls:
      stops += form.stop_strings
    events: asyncio.Queue = asyncio.Queue()
    choices = []
    for index in range(len(prompts) * ask.n):
      prompt_index, sample = divmod(index, ask.n)
      ids = prompts[prompt_index]
      room = self.scheduler.max_total - len(ids)
      plan = plans[index] if plans else None
      request = scheduler_lib.Request(
          ids=ids,
          budget=min(ask.max_tokens or limit, limit, room),
          key=plan.key if plan else self._key(ask.seed, sample),
          emit=_sender(events, index),
          temperature=temperature,
          top_p=top_p,
          stop=tuple(stop.encode('utf-8', 'replace') for stop in stops),
          ignore_eos=ask.ignore_eos,
          plain_logp=session is None,
          owner=session_name,
      )
      text = turn_text.TurnText(
          self.tokenizer.token_bytes, self.tokenizer.eos_ids, ask.stop, ask.keeps_stop
      )
      choices.append(_Choice(request, text, plan))
    return Answer(ask, prompts, session, form, choices, events)

  def _key(self, seed: int | None, index: int) -> np.ndarray:
    """Returns the random key of a choice: of its seed, or one that no other has.

    `index` counts the choices of its prompt, whose answer does not depend on the other prompts.
    """
    given = secrets.token_bytes(32) if seed is None else f'{seed} {index}'.encode()
    size = int(np.prod(self._key_shape))
    return np.frombuffer(hashlib.sha256(given).digest(), np.uint32)[:size].reshape(self._key_shape)

  async def pieces(self, answer: Answer) -> AsyncGenerator[Piece, None]:
    """Yields what is sampled, of all choices. Raises Gone, and ApiError if the engine failed."""
    left = len(answer.choices)
    try:
      while left:
        index, tokens, logp, finish = await answer.events.get()
        choice = answer.choices[index]
        if finish == 'cancelled':
          raise Gone
        if finish == 'error':
          raise api.ApiError(500, 'the engine has failed; see the log')
        choice.tokens += tokens
        choice.logp += logp
        new = choice.text.feed(tokens, finish)
        starts = choice.text.starts[len(choice.tokens) - len(tokens) :]
        piece = Piece(index, new, (), tokens, logp, starts, finish)
        if finish is not None:
          left, choice.is_over = left - 1, True
          self._finish(answer, choice, piece)
        elif answer.form is not None:
          continue  # Choice: a turn that may be a call is shown when it is whole
        yield piece
    finally:
      answer.cancel()
      for choice in answer.choices:
        if not choice.is_over and choice.plan is not None:
          assert answer.session is not None
          answer.session.abandon(choice.plan)

  def _finish(self, answer: Answer, choice: _Choice, piece: Piece) -> None:
    """Parses the calls of a turn that has ended, and records it."""
    action, said = 'other', [_said(choice.text.shown), _said(choice.text.full)]
    if piece.finish == 'stop':
      piece.stop = _first_stop(choice.text.full, answer.ask.stop)
    if answer.form is not None:
      content, calls = answer.form.parse(choice.text.full)
      piece.text, piece.tokens, piece.logp = choice.text.shown, choice.tokens, choice.logp
      piece.starts = choice.text.starts
      if any(call.error for call in calls):
        action = 'invalid'  # the client sees the text as it is
      elif calls:
        action, piece.text, piece.calls = 'tool', content, calls
        said.append(_said(content, calls))
        piece.finish = 'tool_calls'
    if choice.plan is None or answer.session is None:
      return
    was_cut = piece.finish == 'length'
    with contextlib.suppress(sessions_lib.Closed):  # its client learns it with the next request
      piece.turn = answer.session.record(
          choice.plan, choice.tokens, choice.logp, said, was_cut, action
      )


def _too_long(ask: api.Ask, message: str) -> api.ApiError:
  param = 'prompt' if ask.messages is None else 'messages'
  return api.ApiError(400, message, 'context_length_exceeded', param)


def _plans(session: sessions_lib.Session, ask: api.Ask) -> list[sessions_lib.Plan]:
  """Returns a plan per choice: all but the first are segments of their own."""
  if ask.messages is None:
    first = session.plan_prompt(ask.prompts[0])
  else:
    first = session.plan(ask.messages, ask.tools)
  return [first, *(session.fork(first) for _ in range(1, ask.n))]


def _first_stop(text: str, stops: Sequence[str]) -> str | None:
  """Returns the stop string that a text has first; None: it ended by itself."""
  found = [(at, len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
  return min(found)[-1] if found else None


def _sender(events: asyncio.Queue, index: int):
  """Returns a function that brings tokens from the scheduler's thread to the event loop."""
  loop = asyncio.get_running_loop()

  def send(tokens, logp, finish):
    with contextlib.suppress(RuntimeError):  # the loop has been closed
      loop.call_soon_threadsafe(events.put_nowait, (index, list(tokens), list(logp), finish))

  return send


def _said(content: str, calls: tuple[tool_calls.Call, ...] = ()) -> dict[str, Any]:
  """Returns the message with which a client sends a turn back."""
  message: dict[str, Any] = {'role': 'assistant', 'content': content}
  if calls:
    message['tool_calls'] = [
        {'function': {'name': c.name, 'arguments': c.arguments}} for c in calls
    ]
  return message
