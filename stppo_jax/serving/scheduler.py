"""Continuous batching of requests: ids in, sampled ids and log-probs out as they come.

One thread owns the sampler. Between two short decode calls it gives free rows to waiting requests,
so that a request joins those in progress. A row keeps its tokens after its request: one that begins
with them prefills only the rest.

  row 0   | prompt A | decode .. done | (kept) | rest of A's next turn | decode ..
  row 1   | prompt B           | decode ..                      done | (kept)
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import threading
from typing import Any

from absl import logging
import jax
import numpy as np

from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.serving import row_sampler


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
  owner: str = ''  # whose rows `release` frees
  cancelled: bool = False


@dataclasses.dataclass
class Counts:
  """What the scheduler has done since it started."""

  prefill_tokens: int = 0
  reused_tokens: int = 0  # of prompts, found in a row's context
  sampled_tokens: int = 0
  dropped_tokens: int = 0  # decoded past a stop string
  decode_calls: int = 0
  decode_steps: int = 0  # over all calls
  rows_decoded: int = 0  # over all calls
  queued_choices: int = 0


@dataclasses.dataclass(eq=False)
class _Row:
  """A row of the context: its live tokens, and its request while there is one."""

  number: int
  ids: np.ndarray  # [S] int32; the first `live` are in the context
  live: int = 0
  request: Request | None = None
  owner: str = ''
  left: int = 0  # tokens that the request may still have
  text: bytearray = dataclasses.field(default_factory=bytearray)  # of the turn
  used: int = 0  # when; the least recent idle row is overwritten first


@dataclasses.dataclass(frozen=True)
class _Admitted:
  """A row that has got a request, and the row that begins with its first `common` tokens."""

  row: _Row
  source: _Row
  common: int


class Scheduler:
  """Runs requests on a RowSampler in a thread of its own. A context manager."""

  def __init__(
      self,
      sampler: row_sampler.RowSampler,
      params: dict,
      token_bytes: Sequence[bytes],
      eos_ids: Sequence[int],
      max_waiting: int = 256,
      shares_prefixes: bool = True,  # False: a request only continues a row as a whole
  ):
    self.counts = Counts()
    self.max_total = sampler.max_slots
    self._sampler, self._params = sampler, sampler.copy(params)
    self._token_bytes, self._eos_ids = token_bytes, frozenset(eos_ids)
    self.max_waiting, self._shares_prefixes = max_waiting, shares_prefixes
    self._context = sampler.empty(sampler.width, sampler.slot_buckets[0])
    room = sampler.slot_buckets[-1]
    self._rows = [_Row(i, np.zeros(room, np.int32)) for i in range(sampler.width)]
    self._waiting: collections.deque[Request] = collections.deque()
    self._changed = threading.Condition()
    self._closed, self._clock = False, 0
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
    return sum(row.request is not None for row in self._rows)

  @property
  def is_alive(self) -> bool:
    """Whether requests are still served."""
    return self._thread.is_alive() and not self._closed

  def submit(self, requests: Sequence[Request]) -> None:
    """Queues requests, all of them or none. Raises Busy."""
    for request in requests:
      if not 0 < len(request.ids) <= self.max_total - request.budget or request.budget < 1:
        raise ValueError(
            f'{len(request.ids)} tokens and a turn of {request.budget} do not fit in '
            f'{self.max_total}'
        )
    with self._changed:
      if not self.is_alive:
        raise Busy('the server stops')
      self._drop_waiting()
      if len(self._waiting) + len(requests) > self.max_waiting:
        raise Busy(f'{len(self._waiting)} requests are waiting')
      self._waiting.extend(requests)
      self.counts.queued_choices += len(requests)
      self._changed.notify_all()

  def _drop_waiting(self) -> None:
    """Ends cancelled requests that have no row, so that they take no place in the queue."""
    for request in [request for request in self._waiting if request.cancelled]:
      self._waiting.remove(request)
      request.emit((), (), 'cancelled')

  def cancel(self, request: Request) -> None:
    """Ends a request soon, if it has not ended; its last `emit` says 'cancelled'."""
    request.cancelled = True

  def release(self, owner: str) -> None:
    """Lets the idle rows of an owner be overwritten first."""
    with self._changed:
      for row in self._rows:
        if row.owner == owner and row.request is None:
          row.used = 0

  def set_params(self, params: dict) -> None:
    """Takes other parameters and forgets all rows. No request may be in progress."""
    with self._changed:
      if self._waiting or self.running:
        raise RuntimeError('requests are in progress: their parameters cannot change')
      self._params = self._sampler.copy(params)
      for row in self._rows:
        row.live, row.used, row.owner = 0, 0, ''

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
        self._drop_cancelled()
        if self.running:
          self._decode()
    except Exception:  # of the device or of `emit`: every request must get an end
      logging.exception('the scheduler has failed')
      self._closed = True
    finally:
      self._end_all()

  def _end_all(self):
    with self._changed:
      self._closed = True
      left = [*self._waiting, *(row.request for row in self._rows if row.request)]
      self._waiting.clear()
      for row in self._rows:
        row.request = None
    for request in left:
      with contextlib.suppress(Exception):  # the listener may be gone
        request.emit((), (), 'error')

  def _take_waiting(self) -> list[list[_Admitted]]:
    """Gives idle rows to waiting requests: batches to be prefilled one after the other.

    Of equal prompts the first is prefilled in an earlier batch than the others, which copy it.
    """
    batches: list[list[_Admitted]] = []
    prompts: set[bytes] = set()  # of the last batch
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

  def _occupy(self, row: _Row, ids: np.ndarray, request: Request) -> None:
    self._clock += 1
    row.request, row.owner, row.left = request, request.owner, request.budget
    row.used, row.text = self._clock, bytearray()
    row.ids[: len(ids)] = ids
    row.live = len(ids)

  def _source(self, ids: np.ndarray, unread: Sequence[_Row]) -> tuple[_Row, int]:
    """Returns the row that begins with most of `ids`, and how many; the last id is always left.

    Rows in progress serve as well, because their first tokens do not change; those of `unread` are
    not prefilled yet.
    """
    best, most = self._rows[0], 0
    for row in self._rows:
      if row in unread:
        continue
      size = min(row.live, len(ids) - 1)
      same = row.ids[:size] == ids[:size]
      common = size if same.all() else int(np.argmin(same))
      if not self._shares_prefixes and (common < row.live or row.request is not None):
        continue
      if common > most:
        best, most = row, common
    return best, most

  def _target(self, source: _Row, common: int) -> _Row:
    """Returns the source if the request continues it as a whole, else the least recent row."""
    if source.request is None and common and common == source.live:
      return source
    idle = [row for row in self._rows if row.request is None]
    return min(idle, key=lambda row: (row.live > 0 and row.used > 0, row.used, row.number))

  def _prefill(self, batch: list[_Admitted]) -> None:
    """Copies what is there, prefills the rest, and puts the rows in place."""
    sampler, missing = self._sampler, self._sampler.prefill_rows - len(batch)
    rows = [admitted.row for admitted in batch]
    self._context = sampler.with_room(self._context, max(row.live for row in rows) + 1)
    starts = [admitted.common for admitted in batch]
    rest = [row.ids[start : row.live].tolist() for row, start in zip(rows, starts)]
    taken = self._copied([admitted.source for admitted in batch])
    taken, _ = sampler.prefill(
        self._params, taken, [*rest, *[()] * missing], [*starts, *[0] * missing]
    )
    self._put_back(taken, rows)
    self.counts.prefill_tokens += sum(map(len, rest))
    self.counts.reused_tokens += sum(starts)

  def _running_rows(self) -> Iterator[tuple[_Row, Request]]:
    for row in self._rows:
      if row.request is not None:
        yield row, row.request

  def _drop_cancelled(self):
    for row, request in self._running_rows():
      if request.cancelled:
        self._finish(row, (), (), 'cancelled')

  def _copied(self, rows: Sequence[_Row]) -> sampler_lib.Context:
    """Returns a context of copies of some rows, at most `prefill_rows`."""
    missing = self._sampler.prefill_rows - len(rows)
    numbers = [row.number for row in rows] + [0] * missing
    return self._sampler.take(self._context, np.array(numbers, np.int32))

  def _put_back(self, taken: sampler_lib.Context, rows: Sequence[_Row]) -> None:
    numbers = [row.number for row in rows]
    self._context = self._sampler.put(self._context, taken, numbers, range(len(rows)))

  def _decode(self):
    """Samples some tokens of each row in progress, and hands them out.

    A few rows are decoded in a small context of their own: a call computes all rows it is given.
    """
    sampler, running = self._sampler, list(self._running_rows())
    longest = max(row.live for row, _ in running)
    self._context = sampler.with_room(self._context, longest + 1)
    if is_few := len(running) <= sampler.prefill_rows < sampler.width:
      rows, width = [row for row, _ in running], sampler.prefill_rows
      context = self._copied(rows)
    else:
      rows, width, context = self._rows, sampler.width, self._context
    context, result = sampler.decode(
        self._params,
        context,
        _inputs(rows, width),
        steps=self._context.slots - longest,
        enough=width,
        settings=_settings(rows, width),
    )
    if is_few:
      self._put_back(context, rows)
    else:
      self._context = context
    sampled = jax.device_get(result)
    self.counts.decode_calls += 1
    self.counts.decode_steps += int(sampled.counts.max())
    for i, row in enumerate(rows):
      if row.request is not None:
        count = int(sampled.counts[i])
        self.counts.rows_decoded += 1
        tokens, logp = sampled.tokens[i, :count], sampled.logp[i, :count]
        self._take(row, tokens, logp, bool(sampled.alive[i]))

  def _take(self, row: _Row, tokens: np.ndarray, logp: np.ndarray, alive: bool) -> None:
    """Adds sampled tokens to a row, up to the end of its turn."""
    assert row.request is not None
    kept = self._before_stop(row, tokens)
    stopped = kept is not None
    count = len(tokens) if kept is None else kept
    self.counts.dropped_tokens += len(tokens) - count
    self.counts.sampled_tokens += count
    tokens, logp = tokens[:count], logp[:count]
    row.ids[row.live : row.live + count] = tokens
    row.live += count
    row.left -= count
    if row.request.ignore_eos:
      alive = row.left > 0
    if stopped or (not alive and int(tokens[-1]) in self._eos_ids and not row.request.ignore_eos):
      self._finish(row, tokens, logp, 'stop')
    elif not alive:
      self._finish(row, tokens, logp, 'length')
    else:
      row.request.emit(tokens.tolist(), logp.tolist(), None)

  def _before_stop(self, row: _Row, tokens: np.ndarray) -> int | None:
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

  def _finish(self, row: _Row, tokens, logp, reason: str) -> None:
    request, row.request = row.request, None
    self._clock += 1
    row.used = self._clock
    assert request is not None
    request.emit(list(map(int, tokens)), list(map(float, logp)), reason)


def _inputs(rows: Sequence[_Row], width: int) -> sampler_lib.Rows:
  """Returns what a decode call is told of each row; rows without a request do not change."""
  lengths, stop_state, budgets = np.zeros((3, width), np.int32)
  keys: Any = None
  for i, row in enumerate(rows):
    lengths[i] = row.live
    if row.request is not None:
      key = row.request.key
      keys = np.zeros((width, *key.shape), key.dtype) if keys is None else keys
      keys[i], budgets[i] = key, row.left
  return sampler_lib.Rows(lengths, keys, stop_state, budgets)


def _settings(rows: Sequence[_Row], width: int) -> np.ndarray:
  """Returns temperature, top_p and whether log-probs are plain [width,3] of each row."""
  settings = np.ones((width, 3), np.float32)
  for i, row in enumerate(rows):
    if row.request is not None:
      settings[i] = row.request.temperature, row.request.top_p, row.request.plain_logp
  return settings
