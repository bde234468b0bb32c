"""Continuous batching of requests: ids in, sampled ids and log-probs out as they come.

One thread owns the sampler. Between two short decode calls it gives free rows to waiting requests,
so that a request joins those in progress. A row keeps its tokens after its request: one that begins
with them prefills only the rest.

  row 0   | prompt A | decode .. done | (idle) | rest of A's next turn | decode ..
  row 1   | prompt B           | decode ..                      done | (kept)
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import threading
from typing import Any

from absl import logging
import jax
import numpy as np

from stppo_jax.rollout import sampler as sampler_lib


class Busy(Exception):
  """The queue is full, or the scheduler has been closed: try again later, or never."""


@dataclasses.dataclass(eq=False)
class Request:
  """Tokens to continue. `emit` is called from the scheduler's or a caller's thread.

  It must not block.

  emit(tokens [n], logp [n], finish): the next tokens; finish is None until the last call, which
  gives 'stop' (an eos token or stop string, which is among the tokens), 'length', 'cancelled' or
  'error'. The tokens of all calls are exactly those that remain in the row's context.
  """

  ids: Sequence[int]
  budget: int  # tokens
  key: np.ndarray  # jax.random.key_data; token number i is drawn with fold_in(key, i)
  emit: Callable[[Sequence[int], Sequence[float], str | None], None]
  temperature: float = 1.0
  top_p: float = 1.0
  stop: tuple[bytes, ...] = ()
  ignore_eos: bool = False  # True: an eos token does not end it
  plain_logp: bool = False  # True: the model's own log-probs, neither tempered nor cut
  owner: str = ''  # `release` frees the rows of an owner
  cancelled: bool = False


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


@dataclasses.dataclass(eq=False)
class _CacheRow:
  """A row of the context: its live tokens, and its request while there is one."""

  number: int
  ids: np.ndarray  # [S] int32; the first `live` are in the context
  live: int = 0
  request: Request | None = None
  owner: str = ''
  budget: int = 0  # tokens that the request may still have
  text: bytearray = dataclasses.field(default_factory=bytearray)  # the turn so far
  used: int = 0  # when; the least recent idle row is overwritten first


@dataclasses.dataclass(frozen=True)
class _Admitted:
  """A row that has got a request, and the row that begins with its first `common` tokens."""

  row: _CacheRow
  source: _CacheRow
  common: int


class Scheduler:
  """Runs requests on a sampler in a thread of its own. A context manager."""

  def __init__(
      self,
      sampler: sampler_lib.Sampler,
      params: dict,
      token_bytes: Sequence[bytes],
      eos_ids: Sequence[int],
      max_waiting: int = 256,
      shares_prefixes: bool = True,  # False: a request only continues a row as a whole
  ):
    self.counts = Counts()
    self.max_total = sampler.max_slots
    self.max_waiting = max_waiting
    self._sampler = sampler
    self._params = sampler.copy(params)
    self._token_bytes = token_bytes
    self._eos_ids = frozenset(eos_ids)
    self._shares_prefixes = shares_prefixes
    self._context = sampler.empty(sampler.width, sampler.slot_buckets[0])
    slots = sampler.slot_buckets[-1]
    self._rows = [_CacheRow(i, np.zeros(slots, np.int32)) for i in range(sampler.width)]
    self._waiting: collections.deque[Request] = collections.deque()
    self._changed = threading.Condition()
    self._closed = False
    self._clock = 0
    self._thread = threading.Thread(target=self._run, name='scheduler', daemon=True)

  def __enter__(self) -> 'Scheduler':
    self._thread.start()
    return self

  def __exit__(self, *unused_error) -> None:
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._thread.join()
    # A server is a cycle of references, which would keep policy and cache on the device.
    del self._params, self._context

  @property
  def waiting(self) -> int:
    """Requests without a row."""
    return len(self._waiting)

  @property
  def running(self) -> int:
    """Requests with a row."""
    return len(self._running_rows())

  @property
  def is_alive(self) -> bool:
    """Whether requests are still served."""
    return self._thread.is_alive() and not self._closed

  def submit(self, requests: Sequence[Request]) -> None:
    """Queues requests, all of them or none. Raises Busy."""
    for request in requests:
      fits = len(request.ids) + request.budget <= self.max_total
      if not fits or not len(request.ids) or request.budget < 1:
        raise ValueError(
            f'{len(request.ids)} tokens and a turn of {request.budget} do not fit in '
            f'{self.max_total}'
        )
    with self._changed:
      if not self.is_alive:
        raise Busy('the server stops')
      for request in list(self._waiting):
        if request.cancelled:  # it takes no place in the queue
          self._waiting.remove(request)
          request.emit((), (), 'cancelled')
      if len(self._waiting) + len(requests) > self.max_waiting:
        raise Busy(f'{len(self._waiting)} requests are waiting')
      self._waiting.extend(requests)
      self.counts.queued_choices += len(requests)
      self._changed.notify_all()

  def cancel(self, request: Request) -> None:
    """Ends a request soon, if it has not ended; its last `emit` says 'cancelled'."""
    request.cancelled = True

  def release(self, owner: str) -> None:
    """Lets the idle rows of an owner be overwritten first."""
    with self._changed:
      for row in self._rows:
        if row.owner == owner and row.request is None:
          row.used = 0

  def _run(self):
    try:
      while True:
        with self._changed:
          while not (self._closed or self._waiting or self.running):
            self._changed.wait()
          if self._closed:
            return
          admitted = self._take_waiting()
        for batch in admitted:
          self._prefill(batch)
        for row in self._running_rows():
          if row.request.cancelled:
            self._finish(row, (), (), 'cancelled')
        if self.running:
          self._decode()
    except Exception:  # the device or `emit` may raise: every request must get an end
      logging.exception('the scheduler has failed')
      self._closed = True
    finally:
      self._end_all()

  def _end_all(self):
    with self._changed:
      self._closed = True
      requests = list(self._waiting)
      self._waiting.clear()
      for row in self._running_rows():
        requests.append(row.request)
        row.request = None
    for request in requests:
      with contextlib.suppress(Exception):  # the listener may be gone
        request.emit((), (), 'error')

  def _take_waiting(self) -> list[list[_Admitted]]:
    """Gives idle rows to waiting requests: batches to be prefilled one after the other.

    Of equal prompts the first is prefilled in an earlier batch than the others, which copy it.
    """
    batches: list[list[_Admitted]] = []
    prompts: set[bytes] = set()  # prompts of the last batch
    while self._waiting and self.running < len(self._rows):
      request = self._waiting.popleft()
      if request.cancelled:
        request.emit((), (), 'cancelled')
        continue
      ids = np.asarray(request.ids, np.int32)
      is_twin = self._shares_prefixes and ids.tobytes() in prompts
      if is_twin or not batches or len(batches[-1]) == self._sampler.prefill_rows:
        batches.append([])
        prompts.clear()
      prompts.add(ids.tobytes())
      source, common = self._source(ids, [admitted.row for admitted in batches[-1]])
      row = self._target(source, common)
      batches[-1].append(_Admitted(row, source, common))
      self._occupy(row, ids, request)
    return batches

  def _occupy(self, row: _CacheRow, ids: np.ndarray, request: Request) -> None:
    self._clock += 1
    row.request = request
    row.owner = request.owner
    row.budget = request.budget
    row.text = bytearray()
    row.used = self._clock
    row.ids[: len(ids)] = ids
    row.live = len(ids)

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
      size = min(row.live, len(ids) - 1)
      same = row.ids[:size] == ids[:size]
      common = size if same.all() else int(np.argmin(same))
      if not self._shares_prefixes and (common < row.live or row.request is not None):
        continue
      if common > longest:
        source = row
        longest = common
    return source, longest

  def _target(self, source: _CacheRow, common: int) -> _CacheRow:
    """Returns the source if the request continues it as a whole, else the least recent row."""
    if source.request is None and common and common == source.live:
      return source
    idle = [row for row in self._rows if row.request is None]
    return min(idle, key=lambda row: (row.live > 0 and row.used > 0, row.used, row.number))

  def _prefill(self, batch: list[_Admitted]) -> None:
    """Copies the common prefixes, prefills the rest, and puts the rows in place."""
    rows = [admitted.row for admitted in batch]
    starts = [admitted.common for admitted in batch]
    rest = [row.ids[start : row.live].tolist() for row, start in zip(rows, starts)]
    longest = max(row.live for row in rows)
    self._context = self._sampler.with_room(self._context, longest + 1)
    taken = self._take_rows([admitted.source for admitted in batch])
    taken, _ = self._sampler.prefill(self._params, taken, rest, starts)
    self._put_back(taken, rows)
    self.counts.prefill_tokens += sum(map(len, rest))
    self.counts.reused_tokens += sum(starts)

  def _running_rows(self) -> list[Any]:
    return [row for row in self._rows if row.request is not None]

  def _take_rows(self, rows: Sequence[_CacheRow]) -> sampler_lib.Context:
    return self._sampler.take(self._context, [row.number for row in rows])

  def _put_back(self, taken: sampler_lib.Context, rows: Sequence[_CacheRow]) -> None:
    numbers = [row.number for row in rows]
    self._context = self._sampler.put(self._context, taken, numbers, range(len(rows)))

  def _decode(self):
    """Samples some tokens of each row in progress, and emits them.

    A few rows are decoded in a small context of their own, because a call computes all its rows.
    """
    sampler = self._sampler
    rows = self._running_rows()
    longest = max(row.live for row in rows)
    self._context = sampler.with_room(self._context, longest + 1)
    is_small = len(rows) <= sampler.prefill_rows < sampler.width
    places: Sequence[int]
    if is_small:
      context = self._take_rows(rows)
      places = range(len(rows))
    else:
      context = self._context
      places = [row.number for row in rows]
    inputs = self._decode_inputs(rows, places, context.logits.shape[0])
    steps = self._context.slots - longest
    context, result = sampler.decode(self._params, context, inputs, steps, enough=sampler.width)
    if is_small:
      self._put_back(context, rows)
    else:
      self._context = context
    sampled = jax.device_get(result)
    self.counts.decode_calls += 1
    self.counts.decode_steps += int(sampled.counts.max())
    self.counts.rows_decoded += len(rows)
    for row, b in zip(rows, places):
      count = sampled.counts[b]
      tokens = sampled.tokens[b, :count]
      logp = sampled.logp[b, :count]
      self._record(row, tokens, logp, bool(sampled.alive[b]))

  def _decode_inputs(self, rows, places, num_rows) -> sampler_lib.DecodeRows:
    """Returns the inputs of a decode call: row i of `rows` is row places[i] of the context."""
    inputs = self._sampler.idle_rows(num_rows)
    if num_rows == len(self._rows):  # idle rows are also written to, behind their end
      inputs.lengths[:] = [row.live for row in self._rows]
    for row, b in zip(rows, places):
      request = row.request
      inputs.lengths[b] = row.live
      inputs.keys[b] = request.key
      inputs.budgets[b] = row.budget
      inputs.settings[b] = request.temperature, request.top_p, request.plain_logp
    return inputs

  def _record(self, row: _CacheRow, tokens: np.ndarray, logp: np.ndarray, alive: bool) -> None:
    """Adds sampled tokens to a row, up to the end of its turn."""
    assert row.request is not None
    count = self._count_to_stop(row, tokens)
    has_stop_string = count is not None
    if count is None:
      count = len(tokens)
    self.counts.dropped_tokens += len(tokens) - count
    self.counts.sampled_tokens += count
    tokens = tokens[:count]
    logp = logp[:count]
    row.ids[row.live : row.live + count] = tokens
    row.live += count
    row.budget -= count
    ignores_eos = row.request.ignore_eos
    if ignores_eos:
      alive = row.budget > 0
    has_eos = not alive and int(tokens[-1]) in self._eos_ids and not ignores_eos
    if has_stop_string or has_eos:
      self._finish(row, tokens, logp, 'stop')
    elif not alive:
      self._finish(row, tokens, logp, 'length')
    else:
      row.request.emit(tokens.tolist(), logp.tolist(), None)

  def _count_to_stop(self, row: _CacheRow, tokens: np.ndarray) -> int | None:
    """Returns how many tokens there are up to the one that completes a stop string, or None."""
    stops = row.request.stop if row.request else ()
    if not stops:
      return None
    longest = max(map(len, stops))
    for count, token in enumerate(tokens, start=1):
      start = max(0, len(row.text) - longest + 1)
      row.text += self._token_bytes[token] if token < len(self._token_bytes) else b''
      if any(row.text.find(stop, start) >= 0 for stop in stops):
        return count
    return None

  def _finish(self, row: _CacheRow, tokens, logp, reason: str) -> None:
    request = row.request
    assert request is not None
    row.request = None
    self._clock += 1
    row.used = self._clock
    request.emit(list(map(int, tokens)), list(map(float, logp)), reason)
