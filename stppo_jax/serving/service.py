"""The gateway without HTTP: requests in, answers in progress out.

A request becomes ids (`template`, or its session), then one scheduler request per choice, whose
tokens come back through the event loop (`answers`).
"""

import asyncio
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from concurrent import futures
import contextlib
import dataclasses
import functools
import hashlib
import secrets

from absl import logging
import jax
import numpy as np

from stppo_jax.net import http_server
from stppo_jax.rollout import sampling
from stppo_jax.serving import answers
from stppo_jax.serving import api
from stppo_jax.serving import grammars as grammars_lib
from stppo_jax.serving import prompt_scores
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import sessions
from stppo_jax.serving import stop_strings
from stppo_jax.text import template as template_lib
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.text import tool_calls

Body = api.ChatBody | api.TextBody


@dataclasses.dataclass(frozen=True)
class ServiceSettings:
  """The rules by which a service reads requests and answers them."""

  name: str  # the model's, in requests and answers
  tool_form: str = tool_calls.AUTO
  template_kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)
  plain_logp: bool = True  # False: log-probs of the distribution that was drawn from
  forces_in_sessions: bool = True  # False: a forced choice is an error in a session
  recording: sessions.Recording = sessions.Recording()
  turn_end: stop_strings.TurnEnd = stop_strings.UNLIMITED  # where a client gives none


class Service:
  """A model behind the gateway, with its sessions. Requests come from one event loop."""

  def __init__(
      self,
      scheduler: scheduler_lib.Scheduler,
      tokenizer: tokenizer_lib.Tokenizer,
      settings: ServiceSettings,
  ):
    self.scheduler = scheduler
    self.tokenizer = tokenizer
    self.settings = settings
    self.tool_form = tool_calls.form_name(settings.tool_form, tokenizer.render)
    self.template = template_lib.Template(
        tokenizer, scheduler.max_total, self.tool_form, scheduler.vocab_size, limits_prompts=True
    )
    # Long texts take seconds. One thread encodes them in the order in which they came.
    self._encoder = futures.ThreadPoolExecutor(1, 'encode')
    self._num_encoding = 0  # requests in that thread or its queue
    self._sessions: dict[str, sessions.Session] = {}
    self._key_size = jax.random.key_data(jax.random.key(0)).size

  def close(self) -> None:
    """Ends the service's thread."""
    self._encoder.shutdown(wait=False, cancel_futures=True)

  def open_session(self, key: jax.Array, sampling: sessions.Sampling) -> sessions.Session:
    """Starts a session, whose name nobody can guess."""
    name = secrets.token_hex(16)
    session = sessions.Session(self.template, key, sampling, name, self.settings.recording)
    self._sessions[name] = session
    return session

  def end_session(self, name: str) -> None:
    """Ends a session: its client gets 404 from now on."""
    session = self._sessions.pop(name, None)
    if session is not None:
      session.close()
      self.scheduler.release(name)

  def session(self, name: str) -> sessions.Session:
    """Returns an open session. Raises Closed."""
    session = self._sessions.get(name)
    if session is None:
      raise sessions.Closed('there is no such session, or it has ended')
    return session

  async def count_tokens(self, body: api.ChatBody, session: sessions.Session | None) -> int:
    """Returns the number of tokens of a conversation. Raises errors as `begin` does."""
    # Nothing is sampled, so no answer is forced.
    body = body.model_copy(update={'tool_choice': 'auto', 'response_format': api.ResponseFormat()})
    self._check(body, session)
    (plan, *_), _ = await self._encode_in_thread(body, None)
    return len(plan.ids)

  async def begin(
      self,
      body: Body,
      session: sessions.Session | None,
      agent: sessions.ClientAgent = sessions.NO_AGENT,
  ) -> answers.Answer:
    """Queues a request. Raises RequestError, Closed and Busy.

    In a session any model name is accepted, and `agent` sends the request.
    """
    self._check(body, session)
    plans, grammar = await self._encode_in_thread(body, session, agent)
    if session is not None and isinstance(body, api.ChatBody) and body.is_forced:
      session.counts['forced'] += 1
    answer = self._make_answer(body, session, plans, grammar)
    sampled = []
    for index, choice in enumerate(answer.choices):
      if choice.request.budget:
        sampled.append(choice.request)
      else:  # the client asks only for the log-probs of its prompt
        answer.events.put_nowait((index, [], [], 'length'))
    try:
      self.scheduler.submit(sampled)
    except scheduler_lib.Busy:
      answer.close()
      raise
    return answer

  def _check(self, body: Body, session: sessions.Session | None) -> None:
    """Raises RequestError for a request that this model or session cannot answer."""
    template_kwargs = dict(self.settings.template_kwargs)
    if template_kwargs | body.chat_template_kwargs != template_kwargs:
      message = f"must be the server's, {template_kwargs}, or left out"
      raise _invalid('chat_template_kwargs', message)
    eos_ids = () if body.ignore_eos else self.tokenizer.eos_ids
    if not set(body.stop_token_ids) <= set(eos_ids):
      message = f'must be among the eos ids that end an answer anyway, {sorted(eos_ids)}'
      raise _invalid('stop_token_ids', message)
    self.check_model(body.model, session)
    num_prompts = len(body.prompt) if isinstance(body, api.TextBody) else 1
    if session is not None and body.ignore_eos:
      raise _invalid('ignore_eos', 'is not supported in a session')
    if session is not None and num_prompts > 1:
      raise _invalid('prompt', 'send one in a session')
    self._check_scores(body, session)
    if isinstance(body, api.ChatBody) and body.is_forced:
      self._check_forced(body, session)
    most = self.scheduler.max_waiting
    num_choices = body.n * num_prompts
    if num_choices > most:
      raise _invalid('n', f'{num_choices} answers (prompts times n): ask for at most {most}')
    if self._num_encoding >= most:
      raise scheduler_lib.QueueFull(f'busy: {self._num_encoding} requests are waiting; try again')

  def _check_forced(self, body: api.ChatBody, session: sessions.Session | None) -> None:
    """Raises RequestError for a forced answer in a session that has none."""
    if session is not None and not self.settings.forces_in_sessions:
      param = 'tool_choice' if body.forced_functions else 'response_format'
      message = (
          'the trainer needs the log-probs of the distribution that was drawn from, without forced '
          'tokens: leave it out, or use --config.serve.forced_choice=auto, which forces nothing'
      )
      raise _invalid(param, message)

  def _check_scores(self, body: Body, session: sessions.Session | None) -> None:
    """Raises RequestError where log-probs beyond those of sampling would not be comparable."""
    param = 'logprobs' if isinstance(body, api.TextBody) else 'top_logprobs'
    if session is not None:
      if isinstance(body, api.TextBody) and body.echo:
        raise _invalid('echo', 'is not supported in a session')
      if body.num_top:
        most = 1 if isinstance(body, api.TextBody) else 0
        raise _invalid(param, f'ask for at most {most} in a session')
    is_tempered = body.temperature not in (0, 1) or body.top_p < 1
    if body.num_top and session is None and is_tempered and not self.settings.plain_logp:
      message = (
          'likeliest tokens are those of the model: use temperature=1 and top_p=1, or start the '
          'server with --config.serve.logprobs_mode=raw_logprobs'
      )
      raise _invalid(param, message)

  async def _score(self, ids: list[list[int]]) -> list[prompt_scores.PromptScores]:
    """Returns the log-probs of known tokens. Raises Busy and UserError, see `control`."""
    scores = []
    for part in sampling.batched(ids, self.scheduler.score_rows):
      done = self.scheduler.control('score', part)
      scores += await asyncio.wrap_future(done)
    return scores

  def check_model(self, name: str, session: sessions.Session | None) -> None:
    """Raises RequestError for another model's name outside a session."""
    if session is None and name not in ('', self.settings.name):
      message = f'there is no model {name[:80]!r}, but {self.settings.name!r}'
      raise http_server.RequestError(404, message, 'model_not_found', 'model')

  async def _encode_in_thread(
      self,
      body: Body,
      session: sessions.Session | None,
      agent: sessions.ClientAgent = sessions.NO_AGENT,
  ) -> tuple[list[sessions.RequestPlan], str]:
    """Returns the plans of the choices, and their grammar. Raises RequestError and Closed."""
    self._num_encoding += 1
    future = self._encoder.submit(self._encode, body, session, agent)
    try:
      return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
      if session is not None:
        future.add_done_callback(functools.partial(_abandon_plans, session))
      raise
    except grammars_lib.Missing as error:
      raise http_server.RequestError(400, str(error)) from None
    except template_lib.TooLong as error:
      code = 'context_length_exceeded'
      raise http_server.RequestError(400, str(error), code, body.PROMPT_FIELD) from None
    except (ValueError, RecursionError) as error:  # the latter: arguments that are nested deeply
      message = ' '.join(str(error).split())[:500]
      raise http_server.RequestError(400, message) from None
    finally:
      self._num_encoding -= 1

  def _encode(
      self, body: Body, session: sessions.Session | None, agent: sessions.ClientAgent
  ) -> tuple[list[sessions.RequestPlan], str]:
    """Returns the plans of the choices: all samples of a prompt, then those of the next.

    The second value is the grammar that their answers must follow; empty: there is none.
    """
    if session is None:
      plans = []
      for ids in self._encode_prompts(body):
        self.template.check(ids)  # before the other prompts take their time
        keys = [self._make_key(body.seed, sample) for sample in range(body.n)]
        plans += [sessions.RequestPlan(ids, key) for key in keys]
      grammar = self._grammar(body, plans[0].ids)
      if grammar:
        assert self.scheduler.grammars is not None
        self.scheduler.grammars.start(grammar)  # compiles it here, or rejects it
      return plans, grammar
    if isinstance(body, api.ChatBody):
      first = session.plan(self._conversation(body), body.offered_tools, agent)
    else:
      first = session.plan_prompt(body.prompt[0], agent)
    more = [session.fork(first) for _ in range(1, body.n)]  # each is a separate segment
    return [first, *more], ''

  def _grammar(self, body: Body, prompt: list[int]) -> str:
    """Returns the grammar of an answer; empty: none. Raises ValueError, and Missing."""
    if not isinstance(body, api.ChatBody) or not body.is_forced:
      return ''
    assert self.scheduler.grammars is not None
    schema = body.response_format.schema_of_text
    functions = body.forced_functions
    if functions:
      schema = None
    else:
      functions = body.allowed_functions
    return self.scheduler.grammars.of_answer(
        self.tool_form,
        functions,
        schema,
        body.parallel_tool_calls,
        self.tokenizer.opening(prompt) != '',
    )

  def _encode_prompts(self, body: Body) -> Iterator[list[int]]:
    """Yields the ids of each prompt. A text may be a chat that the client's template wrote."""
    if isinstance(body, api.ChatBody):
      yield self.template.encode(self._conversation(body), body.offered_tools)
    else:
      yield from map(self.template.encode_prompt, body.prompt)

  def _conversation(self, body: api.ChatBody) -> list[dict[str, object]]:
    return body.conversation_with(self.template.part_separator)

  def _make_answer(
      self,
      body: Body,
      session: sessions.Session | None,
      plans: list[sessions.RequestPlan],
      grammar: str,
  ) -> answers.Answer:
    """Returns an answer whose requests are not submitted yet."""
    limits = sessions.Sampling(body.temperature, body.top_p, self.scheduler.max_total)
    owner = ''
    if session is not None:
      limits = session.sampling
      owner = session.name
      _warn_of_ignored(body, limits)
    form = None
    barred: frozenset[str] = frozenset()
    call_stop: tuple[str, ...] = ()
    max_calls = None
    if isinstance(body, api.ChatBody) and body.may_call:
      form = tool_calls.make_form(self.tool_form, body.offered_tools)
      barred = body.barred_names
      if not body.parallel_tool_calls:
        call_stop = form.stop_strings  # a form may write several calls before one
        max_calls = 1
    end = self._end_of_turn(body, session, grammar)
    stop = end.stop_strings
    if end.skips_thoughts:
      call_stop += stop
      stop = ()
    events: asyncio.Queue = asyncio.Queue()
    choices = []
    for index, plan in enumerate(plans):
      room = self.scheduler.max_total - len(plan.ids)
      budget = min(limits.max_turn, room)
      if end.max_tokens is not None:
        budget = min(budget, end.max_tokens)
      request = scheduler_lib.Request(
          ids=plan.ids,
          budget=budget,
          key=plan.key,
          emit=_sender(events, index),
          temperature=limits.temperature,
          top_p=limits.top_p,
          stop=stop,
          call_stop=call_stop,
          in_thought=self.tokenizer.opening(plan.ids) != '',
          ignore_eos=body.ignore_eos,
          grammar=grammar,
          plain_logp=self.settings.plain_logp and session is None,
          owner=owner,
      )
      text = answers.TurnText(
          self.tokenizer.token_bytes,
          self.tokenizer.eos_ids,
          body.stop or (),
          body.include_stop_str_in_output,
      )
      choice = answers.Choice(request, plan, text)
      choices.append(choice)
      if session is not None and body.stream and form is None:  # a call is sent as a whole
        session.follow(plan, choice.sent, choice.cancel)
    scorer = self._score if session is None and body.wants_scores else None
    return answers.Answer(
        choices, body.n, body.stream, form, session, events, scorer, barred, max_calls
    )

  def _end_of_turn(
      self, body: Body, session: sessions.Session | None, grammar: str
  ) -> stop_strings.TurnEnd:
    """Returns how the answer ends: as the client says, or else as the turns of the run.

    A forced answer has no stop strings by default, because its text may hold them. With
    `ignore_eos` the client alone says where the answer ends.
    """
    end = self.settings.turn_end if session is None else stop_strings.UNLIMITED
    if body.stop is not None or grammar or body.ignore_eos:
      own = tuple(body.stop or ())
      end = dataclasses.replace(end, stop_strings=own, skips_thoughts=False)
    if body.most_tokens is not None:
      end = dataclasses.replace(end, max_tokens=body.most_tokens)
    return end

  def _make_key(self, seed: int | None, sample: int) -> np.ndarray:
    """Returns the random key of a choice: of its seed, or one that no other choice has.

    `sample` counts the choices of its prompt, whose answer does not depend on the other prompts.
    """
    source = secrets.token_bytes(32) if seed is None else f'{seed} {sample}'.encode()
    words = np.frombuffer(hashlib.sha256(source).digest(), np.uint32)
    return words[: self._key_size]


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
      loop.call_soon_threadsafe(events.put_nowait, (index, tokens, logp, finish))

  return send


def _warn_of_ignored(body: Body, sampling: sessions.Sampling) -> None:
  """Logs once which sampling settings of a client have no effect, because the run has its own."""
  ignored = {}
  for name in ('temperature', 'top_p'):
    value = getattr(body, name)
    if value not in (getattr(sampling, name), type(body).model_fields[name].default):
      ignored[name] = value
  if body.seed is not None:
    ignored['seed'] = body.seed
  if ignored:
    logging.log_first_n(
        logging.WARNING,
        'a program asked for %s: in a session of a run, temperature and top_p are those of '
        'config.rollout, and seeds are those of the run',
        1,
        ', '.join(f'{name}={value}' for name, value in sorted(ignored.items())),
    )
