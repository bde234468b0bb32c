"""The gateway without HTTP: requests in, answers out, chunk by chunk as they are sampled.

A request becomes ids (`template`, or its session), then one scheduler request per choice, whose
tokens come back through the event loop and become text, calls and log-probs.
"""

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Callable
from collections.abc import Mapping
from concurrent import futures
import contextlib
import dataclasses
import functools
import hashlib
import secrets
from typing import Any

import jax
import numpy as np

from stppo_jax import tokenizer as tokenizer_lib
from stppo_jax.distributed import http_server
from stppo_jax.envs import tool_calls
from stppo_jax.serving import api
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import sessions
from stppo_jax.serving import template as template_lib
from stppo_jax.serving import turn_text

Body = api.ChatBody | api.TextBody


@dataclasses.dataclass
class Chunk:
  """New content of a choice. `finish` is set in its last chunk."""

  index: int
  text: str
  tokens: list[int]
  logp: list[float]
  starts: list[int]  # place of each token in the text
  finish: str | None
  calls: tuple[tool_calls.Call, ...] = ()
  stop: str | None = None  # the client's stop string that ended the choice
  turn: int | None = None  # its number in the session


@dataclasses.dataclass(eq=False)
class _Choice:
  """One sample of an answer, as far as it is sampled."""

  request: scheduler_lib.Request
  text: turn_text.TurnText
  plan: sessions.RequestPlan | None
  tokens: list[int] = dataclasses.field(default_factory=list)
  logp: list[float] = dataclasses.field(default_factory=list)
  num_sent: int = 0  # tokens
  unsent: str = ''  # text
  is_over: bool = False


@dataclasses.dataclass(eq=False)
class Answer:
  """A request in progress. Call `close` once at its end."""

  body: Body
  prompts: list[list[int]]  # choice i belongs to prompt i // body.n
  session: sessions.Session | None
  form: tool_calls.Form | None  # None: the request has no tools
  choices: list[_Choice]
  events: asyncio.Queue

  def prompt(self, index: int) -> list[int]:
    """Returns the prompt of a choice."""
    return self.prompts[index // self.body.n]

  def usage(self) -> dict[str, int]:
    """Returns the `usage` of the answer."""
    num_prompt = sum(map(len, self.prompts))
    num_sampled = sum(len(choice.tokens) for choice in self.choices)
    return {
        'prompt_tokens': num_prompt,
        'completion_tokens': num_sampled,
        'total_tokens': num_prompt + num_sampled,
    }

  def close(self) -> None:
    """Cancels the choices in progress."""
    for choice in self.choices:
      choice.request.cancelled = True
      if self.session is not None and choice.plan is not None and not choice.is_over:
        self.session.abandon(choice.plan)


class Service:
  """A model behind the gateway, with its sessions. Requests come from one event loop."""

  def __init__(
      self,
      scheduler: scheduler_lib.Scheduler,
      tokenizer: tokenizer_lib.Tokenizer,
      name: str,
      tool_form: str = 'hermes',
      template_kwargs: Mapping[str, Any] | None = None,  # arguments of the chat template
      plain_logp: bool = True,  # False: log-probs of the distribution that was drawn from
  ):
    self.scheduler = scheduler
    self.tokenizer = tokenizer
    self.name = name
    self.tool_form = tool_form
    self.template_kwargs = dict(template_kwargs or {})
    self._plain_logp = plain_logp
    max_chars = scheduler.max_total * tokenizer_lib.LONGEST_TOKEN
    self.template = template_lib.Template(tokenizer, scheduler.max_total, tool_form, max_chars)
    # Long texts take seconds. One thread encodes them in the order in which they came.
    self._encoder = futures.ThreadPoolExecutor(1, 'encode')
    self._num_encoding = 0  # requests in that thread or its queue
    self._sessions: dict[str, sessions.Session] = {}
    self._key_shape = jax.random.key_data(jax.random.key(0)).shape

  def close(self) -> None:
    """Ends the service's thread."""
    self._encoder.shutdown(wait=False, cancel_futures=True)

  def open_session(
      self, key: jax.Array, sampling: sessions.Sampling
  ) -> tuple[str, sessions.Session]:
    """Starts a session; returns its id, which nobody can guess, and the session."""
    name = secrets.token_hex(16)
    session = sessions.Session(self.template, key, sampling)
    self._sessions[name] = session
    return name, session

  def end_session(self, name: str) -> None:
    """Ends a session: its client gets 404 from now on."""
    session = self._sessions.pop(name, None)
    if session is not None:
      session.close()
      self.scheduler.release(name)

  def session(self, name: str) -> sessions.Session:
    """Returns an open session, or raises RequestError."""
    session = self._sessions.get(name)
    if session is None:
      message = 'there is no such session, or it has ended'
      raise http_server.RequestError(404, message, 'session_not_found')
    return session

  async def count_tokens(self, body: api.ChatBody, session_name: str = '') -> int:
    """Returns the number of tokens of a conversation. Raises RequestError."""
    self._check(body, self.session(session_name) if session_name else None)
    _, prompts = await self._encode_in_thread(body, None)
    return len(prompts[0])

  async def begin(self, body: Body, session_name: str = '') -> Answer:
    """Queues a request. Raises RequestError. In a session any model name is accepted."""
    session = self.session(session_name) if session_name else None
    self._check(body, session)
    plans, prompts = await self._encode_in_thread(body, session)
    answer = self._make_answer(body, session, session_name, plans, prompts)
    try:
      self.scheduler.submit([choice.request for choice in answer.choices])
    except scheduler_lib.Busy as error:
      answer.close()
      status = 429 if self.scheduler.is_alive else 503
      raise http_server.RequestError(status, f'busy: {error}; try again') from None
    return answer

  def _check(self, body: Body, session: sessions.Session | None) -> None:
    """Raises RequestError for a request that this model or session cannot answer."""
    num_prompts = len(body.prompt) if isinstance(body, api.TextBody) else 1
    if body.chat_template_kwargs and (
        self.template_kwargs | body.chat_template_kwargs != self.template_kwargs
    ):
      message = f"must be the server's, {self.template_kwargs}, or left out"
      raise _invalid('chat_template_kwargs', message)
    eos_ids = () if body.ignore_eos else self.tokenizer.eos_ids
    if not set(body.stop_token_ids) <= set(eos_ids):
      message = f'must be among the eos ids that end an answer anyway, {sorted(eos_ids)}'
      raise _invalid('stop_token_ids', message)
    if session is None and body.model not in ('', self.name):
      message = f'there is no model {body.model[:80]!r}, but {self.name!r}'
      raise http_server.RequestError(404, message, 'model_not_found', 'model')
    if session is not None and body.ignore_eos:
      raise _invalid('ignore_eos', 'is not supported in a session')
    if session is not None and num_prompts > 1:
      raise _invalid('prompt', 'send one in a session')
    most = self.scheduler.max_waiting
    num_choices = body.n * num_prompts
    if num_choices > most:
      raise _invalid('n', f'{num_choices} answers (prompts times n): ask for at most {most}')
    if self._num_encoding >= most:
      message = f'busy: {self._num_encoding} requests are waiting; try again'
      raise http_server.RequestError(429, message)

  async def _encode_in_thread(
      self, body: Body, session: sessions.Session | None
  ) -> tuple[list[sessions.RequestPlan], list[list[int]]]:
    """Returns the plans of a session's request, one per choice, and the ids of each prompt."""
    self._num_encoding += 1
    future = self._encoder.submit(self._encode, body, session)
    try:
      return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
      if session is not None:
        future.add_done_callback(functools.partial(_abandon_plans, session))
      raise
    except template_lib.TooLong as error:
      param = 'prompt' if isinstance(body, api.TextBody) else 'messages'
      raise http_server.RequestError(400, str(error), 'context_length_exceeded', param) from None
    except (ValueError, RecursionError) as error:  # the latter: arguments that are nested deeply
      message = ' '.join(str(error).split())[:500]
      raise http_server.RequestError(400, message) from None
    except sessions.Closed as error:
      raise http_server.RequestError(404, str(error), 'session_not_found') from None
    finally:
      self._num_encoding -= 1

  def _encode(
      self, body: Body, session: sessions.Session | None
  ) -> tuple[list[sessions.RequestPlan], list[list[int]]]:
    if session is None:
      return [], self._encode_prompts(body)
    if isinstance(body, api.ChatBody):
      first = session.plan(body.conversation, body.offered_tools)
    else:
      first = session.plan_prompt(body.prompt[0])
    more = [session.fork(first) for _ in range(1, body.n)]  # each is a segment of its own
    return [first, *more], [first.ids]

  def _encode_prompts(self, body: Body) -> list[list[int]]:
    """Returns the ids of each prompt of a request without a session."""
    if isinstance(body, api.ChatBody):
      prompts = [self.template.encode(body.conversation, body.offered_tools)]
      self.template.check(prompts[0])
      return prompts
    prompts = []
    for prompt in body.prompt:  # a text may be a chat that the client's own template wrote
      prompts.append(self.template.encode_prompt(prompt))
      self.template.check(prompts[-1])  # before the other prompts take their time
    return prompts

  def _make_answer(
      self,
      body: Body,
      session: sessions.Session | None,
      session_name: str,
      plans: list[sessions.RequestPlan],
      prompts: list[list[int]],
  ) -> Answer:
    sampling = sessions.Sampling(body.temperature, body.top_p, self.scheduler.max_total)
    if session is not None:
      sampling = session.sampling
    form = None
    stops = list(body.stop)
    if isinstance(body, api.ChatBody) and body.offered_tools:
      form = tool_calls.make_form(self.tool_form, body.offered_tools)
      if not body.parallel_tool_calls:
        stops += form.stop_strings
    events: asyncio.Queue = asyncio.Queue()
    choices = []
    for index in range(len(prompts) * body.n):
      prompt_index, sample = divmod(index, body.n)
      ids = prompts[prompt_index]
      room = self.scheduler.max_total - len(ids)
      plan = plans[index] if plans else None
      request = scheduler_lib.Request(
          ids=ids,
          budget=min(body.most_tokens or room, sampling.max_turn, room),
          key=plan.key if plan else self._make_key(body.seed, sample),
          emit=_sender(events, index),
          temperature=sampling.temperature,
          top_p=sampling.top_p,
          stop=stops,
          ignore_eos=body.ignore_eos,
          plain_logp=self._plain_logp and session is None,
          owner=session_name,
      )
      text = turn_text.TurnText(
          self.tokenizer.token_bytes,
          self.tokenizer.eos_ids,
          body.stop,
          body.include_stop_str_in_output,
      )
      choices.append(_Choice(request, text, plan))
    return Answer(body, prompts, session, form, choices, events)

  def _make_key(self, seed: int | None, sample: int) -> np.ndarray:
    """Returns the random key of a choice: of its seed, or one that no other choice has.

    `sample` counts the choices of its prompt, whose answer does not depend on the other prompts.
    """
    source = secrets.token_bytes(32) if seed is None else f'{seed} {sample}'.encode()
    words = np.frombuffer(hashlib.sha256(source).digest(), np.uint32)
    size = int(np.prod(self._key_shape))
    return words[:size].reshape(self._key_shape)

  async def chunks(self, answer: Answer) -> AsyncGenerator[Chunk, None]:
    """Yields the chunks of all choices: one per choice unless the body asks for a stream.

    RequestError: the engine failed or stops.
    """
    num_left = len(answer.choices)
    while num_left:
      index, tokens, logp, finish = await answer.events.get()
      choice = answer.choices[index]
      if finish == 'cancelled':
        raise http_server.RequestError(503, 'the server stops, or the session has ended')
      if finish == 'error':
        raise http_server.RequestError(500, 'the engine has failed; see the log')
      choice.tokens += tokens
      choice.logp += logp
      choice.unsent += choice.text.feed(tokens, finish)
      is_streamed = answer.body.stream and answer.form is None
      if finish is None and not is_streamed:
        continue  # Choice: a turn that may be a call is sent when it is complete
      new = slice(choice.num_sent, None)
      starts = choice.text.starts[new]
      chunk = Chunk(index, choice.unsent, choice.tokens[new], choice.logp[new], starts, finish)
      choice.num_sent = len(choice.tokens)
      choice.unsent = ''
      if finish is not None:
        num_left -= 1
        choice.is_over = True
        self._finish(answer, choice, chunk)
      yield chunk

  def _finish(self, answer: Answer, choice: _Choice, chunk: Chunk) -> None:
    """Parses the calls of a turn that has ended, and records it."""
    action = 'other'
    forms = [_message(choice.text.shown), _message(choice.text.full)]
    if chunk.finish == 'stop':
      chunk.stop = choice.text.stop
    if answer.form is not None:
      content, calls = answer.form.parse(choice.text.full)
      if any(call.error for call in calls):
        action = 'invalid'  # the client gets the text as it is
      elif calls:
        action = 'tool'
        chunk.text = content
        chunk.calls = calls
        chunk.finish = 'tool_calls'
        forms.append(_message(content, calls))
    if choice.plan is not None and answer.session is not None:
      was_cut = chunk.finish == 'length'
      with contextlib.suppress(sessions.Closed):  # the client's next request gets 404
        chunk.turn = answer.session.record(
            choice.plan, choice.tokens, choice.logp, forms, was_cut, action
        )


def _invalid(param: str, message: str) -> http_server.RequestError:
  return http_server.RequestError(400, f'{param}: {message}', param=param)


def _abandon_plans(session: sessions.Session, future: futures.Future) -> None:
  """Gives up the plans of a client that disconnected while its prompt was encoded."""
  if not future.cancelled() and future.exception() is None:
    plans, _ = future.result()
    for plan in plans:
      session.abandon(plan)


def _sender(events: asyncio.Queue, index: int) -> Callable:
  """Returns a function that brings tokens from the scheduler's thread to the event loop."""
  loop = asyncio.get_running_loop()

  def send(tokens, logp, finish):
    with contextlib.suppress(RuntimeError):  # the loop has been closed
      loop.call_soon_threadsafe(events.put_nowait, (index, list(tokens), list(logp), finish))

  return send


def _message(content: str, calls: tuple[tool_calls.Call, ...] = ()) -> dict[str, Any]:
  """Returns the message with which a client sends a turn back."""
  message: dict[str, Any] = {'role': 'assistant', 'content': content}
  if calls:
    functions = [{'name': call.name, 'arguments': call.arguments} for call in calls]
    message['tool_calls'] = [{'function': function} for function in functions]
  return message
