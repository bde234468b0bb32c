"""Continuous batching of requests: ids in, sampled ids and log-probs out as they come.

One thread owns the sampler. Between two short decode calls it gives free rows to waiting requests,
so that a request joins those in progress. A row keeps its tokens after its request: one that begins
with them prefills only the rest.

  row 0   | prompt A | decode .. done | (idle) | rest of A's next turn | decode ..
  row 1   | prompt B           | decode ..                      done | (kept)

Pauses and new weights are calls of the same thread, between two decode calls. With new weights the
contexts of requests in progress are prefilled again, so that no token depends on two versions.

With several processes each has a scheduler. Requests and calls come to that of process 0, which
shares them before each decode call. All processes therefore launch the same programs.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import itertools
import threading
from typing import Any
from typing import NamedTuple

from absl import logging
import jax
import numpy as np

from stppo_jax.distributed import hosts
from stppo_jax.models import decoder
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.rollout import slots as slots_lib
from stppo_jax.serving import grammars as grammars_lib
from stppo_jax.serving import prompt_scores
from stppo_jax.serving import stop_strings
from stppo_jax.types import RunError
from stppo_jax.types import UserError

LoadParams = Callable[[str], decoder.Params]  # a folder -> its weights

_STOPS = 'the server stops'


class Busy(Exception):
  """The scheduler cannot do this now: it stops, or a folder is not there yet."""


class QueueFull(Busy):
  """Too many requests are waiting."""


@dataclasses.dataclass(eq=False)
class Request:
  """Tokens to continue. `emit` is called from the scheduler's or a caller's thread.

  It must not block.

  emit(tokens [n], logp [n], finish): the next tokens; finish is None until the last call, which
  gives 'stop' (an eos token or stop string, which is among the tokens), 'length', 'cancelled',
  'grammar' (the answer cannot follow it to its end) or 'error'. The tokens of all calls are exactly
  those that remain in the row's context.
  """

  ids: Sequence[int]
  budget: int  # tokens
  key: np.ndarray  # jax.random.key_data; token number i is drawn with fold_in(key, i)
  emit: Callable[[Sequence[int], Sequence[float], str | None], None]
  temperature: float = 1.0
  top_p: float = 1.0
  stop: Sequence[str] = ()
  call_stop: Sequence[str] = ()  # end a turn as well, but not in a thought
  in_thought: bool = False  # its prompt has opened a thought
  ignore_eos: bool = False  # True: an eos token does not end it
  grammar: str = ''  # the answer must follow it, see `grammars`; empty: none
  plain_logp: bool = False  # True: the model's own log-probs, neither tempered nor cut
  owner: str = ''  # `release` frees the rows of an owner
  cancelled: bool = False


class _ControlCall(NamedTuple):
  """A call of `Scheduler.control`."""

  name: str
  arguments: list[Any]
  done: futures.Future[Any]


class _Step(NamedTuple):
  """The work that other threads have given to the scheduler since its last decode call."""

  closes: bool
  requests: list[Request]
  cancelled: list[int]  # places among the requests with a row, then those without
  released: list[str]  # owners
  calls: list[_ControlCall]


@dataclasses.dataclass
class Counts:
  """What the scheduler has done since it started."""

  prefill_tokens: int = 0
  reused_tokens: int = 0  # prompt tokens that a row already had
  sampled_tokens: int = 0
  dropped_tokens: int = 0  # decoded past a stop string
  decode_calls: int = 0
  decode_steps: int = 0  # over all calls
  rows_decoded: int = 0  # over all calls
  queued_choices: int = 0


@dataclasses.dataclass(eq=False, kw_only=True)
class _CacheRow(slots_lib.ActiveSequence):
  """A row of the context: its tokens, and its request while there is one."""

  tokens: np.ndarray  # [S] int32; those of the context, and those to prefill
  request: Request | None = None
  owner: str = ''  # its last request's
  matcher: grammars_lib.Matcher | None = None  # place of the request in its grammar
  text: bytes = b''  # end of the turn so far, as long as the longest stop string
  call_stops: stop_strings.StopSearch | None = None  # looks for those of calls in the turn
  used: int = 0  # when; the least recent idle row is overwritten first


class Scheduler:
  """Runs requests on a sampler in a separate thread. A context manager."""

  def __init__(
      self,
      sampler: sampler_lib.Sampler,
      params: dict,
      token_bytes: Sequence[bytes],
      eos_ids: Sequence[int],
      max_waiting: int = 256,
      shares_prefixes: bool = True,  # False: a request only continues a row as a whole
      load_params: LoadParams | None = None,  # called by `reload`; raises UserError, Busy
      grammars: grammars_lib.Grammars | None = None,  # None: no request has a grammar
  ):
    self.counts = Counts()
    self.max_total = sampler.max_slots
    self.vocab_size = sampler.config.vocab_size
    self.max_waiting = max_waiting
    self.score_rows = sampler.prefill_rows
    self._sampler = sampler
    self._scorer = prompt_scores.PromptScorer(sampler)
    self._token_bytes = token_bytes
    self._eos_ids = frozenset(eos_ids)
    self._has_state = sampler.config.delta is not None  # a delta net's cannot go back to a token
    self._shares_prefixes = shares_prefixes and not self._has_state
    self._load_params = load_params
    self.grammars = grammars
    self._group = slots_lib.SlotGroup(sampler, sampler.copy(params))
    self._rows = []
    for slot in range(sampler.width):
      row = _CacheRow(tokens=np.zeros(sampler.slot_buckets[-1], np.int32), phase='waiting')
      row.occupy(self._group, slot)
      self._rows.append(row)
    self._new: list[Request] = []
    self._waiting: collections.deque[Request] = collections.deque()
    self._changed = threading.Condition()
    self._closed = False
    self._has_failed = False
    self._calls: list[_ControlCall] = []  # in progress
    self._released: list[str] = []  # owners, since the last step
    self._admits = True  # whether waiting requests get rows
    self._decodes = True  # whether requests with rows continue
    self._clock = itertools.count(1)
    self._thread = threading.Thread(target=self._run, name='scheduler', daemon=True)

  def __enter__(self) -> 'Scheduler':
    self._finish_programs()
    self._thread.start()
    return self

  def __exit__(self, *unused_error) -> None:
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._thread.join()
    # Server and group are cycles of references, which would keep policy and cache on the device.
    self._group.rows.clear()
    self._rows.clear()
    del self._group

  def wait(self, timeout_s: float | None = None) -> None:
    """Waits until the scheduler has ended. RunError: it has failed."""
    self._thread.join(timeout_s)
    self.raise_if_failed()

  def raise_if_failed(self) -> None:
    """RunError: an error has ended the scheduler, and all requests with it."""
    if self._has_failed:
      raise RunError('the engine has failed, see above: start again')

  @property
  def waiting(self) -> int:
    """Requests without a row."""
    requests = [*self._waiting, *self._new]  # a copy, because the scheduler's thread changes them
    return sum(not request.cancelled for request in requests)

  @property
  def running(self) -> int:
    """Requests with a row."""
    return len(self._running_rows())

  @property
  def drains(self) -> bool:
    """Whether a pause lets the requests with a row continue."""
    return self._decodes and not self._admits

  @property
  def is_alive(self) -> bool:
    """Whether requests are still served."""
    return self._thread.is_alive() and not self._closed

  def submit(self, requests: Sequence[Request]) -> None:
    """Queues requests, all of them or none. Raises Busy and QueueFull."""
    for request in requests:
      fits = len(request.ids) + request.budget <= self.max_total
      if not fits or not len(request.ids) or request.budget < 1:
        raise ValueError(
            f'{len(request.ids)} tokens and a turn of {request.budget} do not fit in '
            f'{self.max_total}'
        )
    with self._changed:
      if not self.is_alive:
        raise Busy(_STOPS)
      if self.waiting + len(requests) > self.max_waiting:
        raise QueueFull(f'busy: {self.waiting} requests are waiting; try again')
      self._new.extend(requests)
      self.counts.queued_choices += len(requests)
      self._changed.notify_all()

  @property
  def can_reload(self) -> bool:
    """Whether the weights can be replaced."""
    return self._load_params is not None

  def control(self, name: str, *arguments: Any) -> futures.Future[Any]:
    """Calls a method in the scheduler's thread, between two decode calls. Raises Busy.

    'pause' (drains)    no token is sampled until 'resume'; with `drains` requests that have a row
                        still continue
    'resume' ()         ends a pause
    'reload' (folder)   samples with the weights of a folder; UserError: they do not fit, Busy: the
                        folder is not there yet
    'forget' ()         computes all contexts again before the next token, as 'reload' does
    'score' (ids)       returns the `PromptScores` of at most `score_rows` lists of ids; UserError:
                        the device has too little memory for them
    """
    call = _ControlCall(name, list(arguments), futures.Future())
    with self._changed:
      if not self.is_alive:
        raise Busy(_STOPS)
      self._calls.append(call)
      self._changed.notify_all()
    return call.done

  def release(self, owner: str) -> None:
    """Lets the idle rows of an owner be overwritten first."""
    with self._changed:
      self._released.append(owner)

  def _run(self):
    try:
      while True:
        step = self._share(self._next_step() if hosts.is_writer() else None)
        if step.closes:
          self._finish_programs()
          return
        self._take(step)
        if not self._decodes:
          continue
        self._prefill_forgotten()
        batches = self._take_waiting() if self._admits else []
        for rows, slots in batches:
          self._group.prefill_copies(self._group, slots, rows)
        self.counts.prefill_tokens = self._group.prefill_tokens
        if self.running:
          self._decode()
    except Exception:  # the device or `emit` may raise: every request must get an end
      logging.exception('the scheduler has failed')
      self._has_failed = True
    finally:
      self._end_all()

  def _finish_programs(self) -> None:
    """Waits for the device, because CPUs of several processes order the programs of a thread only.

    Collectives of another thread's programs would meet those of this thread.
    """
    jax.block_until_ready((self._group.params, self._group.context))

  def _next_step(self) -> _Step:
    """Waits for work and takes it."""
    with self._changed:
      while not (self._closed or self._calls or self._new or self._has_work()):
        self._changed.wait()
      requests = self._new
      self._new = []
      self._waiting.extend(requests)
      places = enumerate(self._requests())
      cancelled = [place for place, request in places if request.cancelled]
      # A caller may have given up a call. From here on it cannot.
      self._calls = [call for call in self._calls if call.done.set_running_or_notify_cancel()]
      released = self._released
      self._released = []
      return _Step(self._closed, requests, cancelled, released, list(self._calls))

  def _has_work(self) -> bool:
    """Returns whether a token could be sampled."""
    return self._decodes and (self.running > 0 or (self._admits and len(self._waiting) > 0))

  def _requests(self) -> list[Request]:
    """Returns the requests with a row, then those without."""
    running = [row.request for row in self._running_rows()]
    return [*running, *self._waiting]

  def _share(self, step: _Step | None) -> _Step:
    """Returns the step of process 0 on all processes."""
    message: Any = None
    if step is not None:
      if jax.process_count() == 1:
        return step
      new = [vars(request) | {'emit': None} for request in step.requests]
      named = [(call.name, call.arguments) for call in step.calls]
      message = step.closes, new, step.cancelled, step.released, named
    closes, new, cancelled, released, named = hosts.share(message)[0]
    if step is not None:
      return step
    for fields in new:
      fields['emit'] = lambda *tokens: None  # process 0 answers the client
      self._waiting.append(Request(**fields))
    self._calls += [_ControlCall(name, arguments, futures.Future()) for name, arguments in named]
    return _Step(closes, [], cancelled, released, list(self._calls))

  def _take(self, step: _Step) -> None:
    """Ends cancelled requests, lets go of rows, and runs the calls of other threads."""
    requests = self._requests()
    for place in step.cancelled:
      self._cancel(requests[place])
    for row in self._rows:
      if row.request is None and row.owner in step.released:
        row.used = 0
    for call in step.calls:
      try:
        result = getattr(self, f'_{call.name}')(*call.arguments)
        call.done.set_result(result)
      except (UserError, Busy) as error:
        call.done.set_exception(error)
      self._calls.remove(call)

  def _cancel(self, request: Request) -> None:
    if request in self._waiting:
      self._waiting.remove(request)
    for row in self._running_rows():
      if row.request is request:
        self._free(row)
    request.emit((), (), 'cancelled')

  def _pause(self, drains: bool) -> None:
    self._admits = False
    self._decodes = drains

  def _resume(self) -> None:
    self._admits = True
    self._decodes = True

  def _score(self, ids: Sequence[Sequence[int]]) -> list[prompt_scores.PromptScores]:
    try:
      return self._scorer.score(self._group.params, ids)
    except jax.errors.JaxRuntimeError as error:
      if jax.process_count() > 1:  # others may have succeeded, and differ from this one
        raise
      logging.exception('the log-probs of known tokens failed')
      cause = str(error).partition('\n')[0]
      lengths = ', '.join(str(len(row_ids)) for row_ids in ids)
      raise UserError(
          f'the device failed to score prompts of {lengths} tokens: send fewer or shorter ones, or '
          f'serve fewer rows with --config.serve.rows ({cause})'
      ) from error

  def _reload(self, folder: str) -> None:
    assert self._load_params is not None
    rejection = ''
    delay = ''
    try:
      params = self._load_params(folder)
    except Busy as error:
      delay = str(error)
    except (ValueError, OSError) as error:  # the former are UserErrors and odd paths
      rejection = str(error)
    except Exception as error:  # a file that is no safetensors, or too little memory
      logging.exception('the weights of %r cannot be loaded', folder)
      rejection = str(error) or type(error).__name__
    outcomes = hosts.share([rejection, delay])
    if rejections := ''.join(outcome[0] for outcome in outcomes):
      raise UserError(' '.join(rejections.split()))
    if delays := ''.join(outcome[1] for outcome in outcomes):
      raise Busy(delays)
    self._group.params = None  # so that there are never three copies
    self._group.params = self._sampler.copy(params)
    self._forget()

  def _forget(self) -> None:
    for row in self._rows:
      ids: list[int] = []
      if row.request is not None:
        ids = row.tokens[: row.length_with_ids].tolist()
        row.phase = 'ready'
      row.ids = ids
      row.length = 0

  def _prefill_forgotten(self) -> None:
    """Prefills the contexts of requests in progress that were forgotten."""
    for rows in sampling.batched(self._group.rows_in('ready'), self._sampler.prefill_rows):
      slots = [row.slot for row in rows]
      self._group.prefill_copies(self._group, slots, rows)

  def _end_all(self):
    with self._changed:
      self._closed = True
      requests = [*self._requests(), *self._new]
      self._waiting.clear()
      self._new.clear()
      for row in self._running_rows():
        row.request = None
    for request in requests:
      with contextlib.suppress(Exception):  # the listener may be gone
        request.emit((), (), 'error')
    for call in self._calls:
      if call.done.running() or call.done.set_running_or_notify_cancel():
        call.done.set_exception(Busy(_STOPS))

  def _take_waiting(self) -> list[tuple[list[_CacheRow], list[int]]]:
    """Gives idle rows to waiting requests.

    Returns (rows, slots of the rows with the same first tokens) of prefill calls, in the same
    order. Of equal prompts the first is prefilled in an earlier call than the others, which copy
    it.
    """
    batches: list[tuple[list[_CacheRow], list[int]]] = []
    prompts: set[bytes] = set()  # prompts of the last batch
    while self._waiting and self.running < len(self._rows):
      request = self._waiting.popleft()
      ids = np.asarray(request.ids, np.int32)
      is_twin = self._shares_prefixes and ids.tobytes() in prompts
      if is_twin or not batches or len(batches[-1][0]) == self._sampler.prefill_rows:
        batches.append(([], []))
        prompts.clear()
      prompts.add(ids.tobytes())
      rows, slots = batches[-1]
      source, common = self._source(ids, unread=rows)
      row = self._target(source, common)
      rows.append(row)
      slots.append(source.slot)
      self._occupy(row, ids, common, request)
    return batches

  def _occupy(self, row: _CacheRow, ids: np.ndarray, common: int, request: Request) -> None:
    """Gives a row to a request whose first `common` tokens will be copied."""
    row.used = next(self._clock)
    row.request = request
    row.owner = request.owner
    row.matcher = None
    if request.grammar:
      assert self.grammars is not None
      row.matcher = self.grammars.start(request.grammar)
    row.text = b''
    row.call_stops = None
    if request.call_stop:
      row.call_stops = stop_strings.StopSearch(request.call_stop, request.in_thought)
    row.tokens[: len(ids)] = ids
    row.length = common
    row.ids = ids[common:].tolist()
    row.phase = 'ready'
    row.budget = request.budget
    row.key = request.key
    row.settings = (request.temperature, request.top_p, request.plain_logp)
    self.counts.reused_tokens += common

  def _source(self, ids: np.ndarray, unread: Sequence[_CacheRow]) -> tuple[_CacheRow, int]:
    """Returns the row that begins with most of `ids`, and how many; the last id is always left.

    Rows in progress serve as well, because their first tokens do not change; those of `unread` are
    not prefilled yet.
    """
    source = self._rows[0]
    longest = 0
    for row in self._rows:
      if row in unread:
        continue
      known = row.length_with_ids
      size = min(known, len(ids) - 1)
      is_same = row.tokens[:size] == ids[:size]
      common = size if is_same.all() else int(np.argmin(is_same))
      if not self._shares_prefixes and (common < known or row.request is not None):
        continue
      if common > longest:
        source = row
        longest = common
    return source, longest

  def _target(self, source: _CacheRow, common: int) -> _CacheRow:
    """Returns the source if the request continues it as a whole, else the least recent row."""
    if source.request is None and common and common == source.length:
      return source
    idle = [row for row in self._rows if row.request is None]
    return min(idle, key=lambda row: (row.used, row.slot))

  def _running_rows(self) -> list[Any]:
    return [row for row in self._rows if row.request is not None]

  def _decode(self) -> None:
    """Samples some tokens of each row in progress, and emits them."""
    rows = self._running_rows()
    log_mass, most_steps = self._mask(rows)
    places: Sequence[int]
    if len(rows) <= max(self._sampler.few_rows, default=0):
      result = self._group.decode_few(rows, most_steps)
      places = range(len(rows))
    else:
      result = self._group.decode(self._sampler.width, most_steps)
      places = [row.slot for row in rows]
    sampled, log_mass = jax.device_get((result, log_mass))
    self.counts.decode_calls += 1
    self.counts.decode_steps += int(sampled.counts.max())
    self.counts.rows_decoded += len(rows)
    for row, place in zip(rows, places):
      count = sampled.counts[place]
      tokens = sampled.tokens[place, :count]
      logp = sampled.logp[place, :count]
      if row.settings[2] and log_mass is not None:  # the model's log-prob, of all tokens
        logp = logp + log_mass[row.slot]
      self._record(row, tokens, logp, bool(sampled.alive[place]))

  def _mask(self, rows: Sequence[_CacheRow]) -> tuple[jax.Array | None, int | None]:
    """Leaves the tokens that the grammars of some rows allow next.

    Returns the logs of the masses that are left, per slot, and the most tokens to sample then.
    """
    if all(row.matcher is None for row in rows):
      return None, None
    num_bytes = -(-self._sampler.config.vocab_size // 8)
    allowed = np.full((self._sampler.width, num_bytes), 255, np.uint8)
    for row in rows:
      if row.matcher is not None:
        allowed[row.slot] = row.matcher.allowed(num_bytes)
    return self._group.mask(allowed), 1

  def _record(self, row: _CacheRow, tokens: np.ndarray, logp: np.ndarray, alive: bool) -> None:
    """Adds sampled tokens to a row, up to the end of its turn."""
    request = row.request
    assert request is not None
    count, has_stop_string = self._count_to_stop(row, tokens)
    num_dropped = len(tokens) - count
    self.counts.dropped_tokens += num_dropped
    self.counts.sampled_tokens += count
    tokens = tokens[:count]
    row.tokens[row.length : row.length + count] = tokens
    row.length += count
    row.budget -= count
    if request.ignore_eos:
      alive = row.budget > 0
    has_eos = not alive and not request.ignore_eos and int(tokens[-1]) in self._eos_ids
    is_complete = False
    if row.matcher is not None:
      for token in tokens.tolist():
        row.matcher.add(token)
      is_complete = row.matcher.is_over
    finish = None
    if has_stop_string or has_eos or is_complete:
      finish = 'stop'
    elif not alive:
      finish = 'length'
    if row.matcher is not None and row.matcher.error:
      logging.warning('an answer cannot follow its grammar: %.300s', row.matcher.error)
      finish = 'grammar'
    if finish is not None:
      self._free(row)
      if num_dropped and self._has_state:  # it has read the dropped tokens
        row.length = 0
    request.emit(tokens.tolist(), logp[:count].tolist(), finish)

  def _count_to_stop(self, row: _CacheRow, tokens: np.ndarray) -> tuple[int, bool]:
    """Returns the number of tokens up to a stop string, and whether there is one."""
    assert row.request is not None
    stops = [stop.encode() for stop in row.request.stop]
    if not stops and row.call_stops is None:
      return len(tokens), False
    longest = max(map(len, stops), default=1)
    for count, token in enumerate(tokens, start=1):
      piece = self._token_bytes[token] if token < len(self._token_bytes) else b''
      row.text += piece
      if any(stop in row.text for stop in stops):
        return count, True
      if row.call_stops is not None and row.call_stops.feed(piece):
        return count, True
      row.text = row.text[-longest:]
    return len(tokens), False

  def _free(self, row: _CacheRow) -> None:
    """Ends the request of a row, which keeps the tokens that are in the cache.

    A request that is cancelled between new weights and the next prefill has none there.
    """
    row.request = None
    row.phase = 'waiting'
    row.ids = ()
    row.used = next(self._clock)
