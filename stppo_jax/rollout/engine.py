"""Continuous batching: many dialogues over few rows; a row that is free takes the next dialogue at once.

A dialogue is read (prefill), says a turn (decode), waits for the world's answer, is read that, and so
on. Rows stand in bands, and one device call decodes one band. While it runs, the host hands the
turns that ended before to the world, and the call after it waits in the device's queue.

  band 0   | read, decode |              | read, decode |              | ..
  band 1                  | read, decode |              | read, decode | ..
  world                   | answers 0    | answers 1    | ..    (in threads: late, in any order)

What a dialogue says depends on its key and its ids alone. With `threads=0` the schedule too is a
function of what was said and answered, so that many hosts take the same steps. With threads it follows
the clock: the band that is done first goes on. All that it changes is a row's neighbours and the number
of slots of its band. Neighbours do not change a row's numbers. The number of slots may change their last
digit (matmuls sum in another order), so that only with one slot bucket two runs with threads are the
same bit by bit.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import time

import chex
import jax
import numpy as np

from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.runtime import hosts

CALLS = (
    2  # that the device has at once: one in its queue behind the other, or on a CPU side by side
)


@dataclasses.dataclass(frozen=True)
class Cue:
  """What a dialogue hears next."""

  ids: Sequence[int]  # to be read first
  budget: int  # most tokens of the turn that follows; 0 ends the dialogue


@dataclasses.dataclass(frozen=True)
class Said:
  """A turn that ended."""

  index: int  # of its dialogue
  tokens: np.ndarray  # [n] int32
  logp: np.ndarray  # [n] float32


@dataclasses.dataclass
class Report:
  """What a run took. The seconds are the host's, and add up to the whole."""

  seconds: dict[str, float] = dataclasses.field(
      default_factory=lambda: {'prefill': 0.0, 'decode': 0.0, 'env': 0.0}
  )
  prefill_tokens: int = 0  # ids that were read
  shared_tokens: int = 0  # ids of prompts that were copied from a neighbour's context instead
  sampled_tokens: int = 0
  decode_steps: int = 0  # of one band each

  @property
  def rows_busy(self) -> float:
    """How many rows of a band sampled, in the mean over all steps."""
    return self.sampled_tokens / max(self.decode_steps, 1)

  def metrics(self) -> dict[str, float]:
    """The report under the names of metrics.jsonl."""
    names = ('rows_busy', 'decode_steps', 'prefill_tokens', 'shared_tokens')
    return {f'timing_s/gen_{phase}': seconds for phase, seconds in self.seconds.items()} | {
        f'perf/{name}': getattr(self, name) for name in names
    }


def run(
    sampler: sampler_lib.Sampler,
    params,
    prompts: Sequence[Cue],
    keys: jax.Array,  # [dialogues]
    respond: Callable[[list[Said]], list[Cue]],  # called from threads, if there are any
    threads: int = 0,  # calls of `respond` under way at once; 0: none, the engine waits for each
) -> Report:
  """Plays every dialogue to its end; those with budget 0 are over before they begin.

  Dialogues start in their order. What `respond` raises ends the run, and is raised here.
  """
  chex.assert_equal(len(prompts), keys.shape[0])
  with _World(respond, threads) as world, contextlib.ExitStack() as resources:
    engine = _Engine(sampler, params, prompts, keys, world, threads, resources)
    engine.run()
    return engine.report


class _World:
  """Answers turns, in threads or on the spot."""

  def __init__(self, respond, threads):
    self._respond = respond
    self._pool = futures.ThreadPoolExecutor(threads, 'rollout') if threads else None
    self._under_way: dict[futures.Future, list[Said]] = {}
    self._answered: list[tuple[int, Cue]] = []

  def __enter__(self):
    return self

  def __exit__(self, kind, *unused_error):
    if self._pool is not None:  # after an error nobody waits for answers that nobody wants
      self._pool.shutdown(wait=kind is None, cancel_futures=True)

  def hand_over(self, turns: list[Said]) -> None:
    """Takes turns that ended together: one call of `respond`."""
    if not turns:
      return
    if self._pool is None:
      self._note(turns, self._respond(turns))
    else:
      self._under_way[self._pool.submit(self._respond, turns)] = turns

  @property
  def under_way(self) -> list[futures.Future]:
    """What the threads are at."""
    return list(self._under_way)

  def answers(self) -> list[tuple[int, Cue]]:
    """(dialogue, cue) of what was answered since the last call."""
    for future in [future for future in self._under_way if future.done()]:
      self._note(self._under_way.pop(future), future.result())
    answered, self._answered = self._answered, []
    return answered

  def _note(self, turns, cues):
    chex.assert_equal(len(turns), len(cues))
    self._answered += [(turn.index, cue) for turn, cue in zip(turns, cues)]


@dataclasses.dataclass(eq=False)
class _Row:
  """A dialogue under way, and where it stands."""

  index: int
  ids: Sequence[int]  # not read yet
  left: int  # tokens that its turn may still have
  length: int = 0  # of its context
  phase: str = 'ready'  # to be read; then 'speaking'; then 'waiting' for the world
  stop_state: int = 0  # of the stop automaton
  tokens: list[np.ndarray] = dataclasses.field(default_factory=list)  # of the turn so far
  logp: list[np.ndarray] = dataclasses.field(default_factory=list)

  def length_with_ids(self) -> int:
    """Of the context, once all is read."""
    return self.length + len(self.ids)

  def has_read(self) -> None:
    """The row goes on to speak."""
    self.length, self.ids, self.phase = self.length_with_ids(), (), 'speaking'


@dataclasses.dataclass(eq=False)
class _Band:
  """Rows that are decoded together; None is a free one."""

  context: sampler_lib.Context
  rows: list[_Row | None]
  thread: futures.Executor  # of one thread, that waits for the device

  def places(self, phase: str) -> list[int]:
    """Where the rows of a phase are."""
    return [b for b, row in enumerate(self.rows) if row is not None and row.phase == phase]

  def free(self) -> list[int]:
    """Where no row is."""
    return [b for b, row in enumerate(self.rows) if row is None]


@dataclasses.dataclass
class _Call:
  """A band that the device is decoding."""

  band: _Band
  sampled: sampler_lib.Sampled
  read: futures.Future  # done once all reading before it is
  done: futures.Future  # once all is sampled


class _Engine:
  """One run."""

  def __init__(self, sampler, params, prompts, keys, world, threads, resources):
    self.report = Report()
    self._resources, self._clock_decides = resources, threads > 0
    self._sampler, self._params, self._world = sampler, params, world
    self._keys = np.asarray(jax.random.key_data(keys))
    self._queue = collections.deque(
        _Row(i, cue.ids, cue.budget) for i, cue in enumerate(prompts) if cue.budget > 0
    )
    self._seats: dict[int, tuple[_Band, int]] = {}  # dialogue under way -> its place
    self._bands: list[_Band] = []
    self._calls: list[_Call] = []  # what the device is at, and what waits in its queue
    self._kept = None  # (prompt, context, row in it) that the next in the queue begins with
    self._last_read = None  # what the last reading of a launch computes: the new lengths
    self._clock = time.perf_counter()

  def run(self):
    """Until nothing is left."""
    while self._queue or self._seats:
      while len(self._calls) < CALLS and (band := self._next_band()):
        self._calls.append(self._launch(band))
      self._wait()
      for call in self._awaited():
        if call.done.done():
          self._calls.remove(call)
          self._world.hand_over(self._finish(call))
      self._listen()

  def _awaited(self) -> list[_Call]:
    """The calls of which the first to be done is finished; by the clock any, else the oldest."""
    return list(self._calls) if self._clock_decides else self._calls[:1]

  def _wait(self):
    """Until something happens: a call has read or is done, or an answer came that could start one."""
    calls = self._awaited()
    events = [call.done if call.read.done() else call.read for call in calls]
    name = 'decode' if all(call.read.done() for call in calls) else 'prefill'
    if len(self._calls) < CALLS:
      events += self._world.under_way
    if events:
      futures.wait(events, return_when=futures.FIRST_COMPLETED)
    self._lap(name if calls else 'env')

  def _lap(self, name):
    """The time since the last lap goes to `name`."""
    now = time.perf_counter()
    self.report.seconds[name] += now - self._clock
    self._clock = now

  def _next_band(self) -> _Band | None:
    """The band, of those that the device is not at, in which most rows can speak."""

    def speakers(band):
      return (
          len(band.places('speaking'))
          + len(band.places('ready'))
          + min(len(band.free()), len(self._queue))
      )

    width = self._sampler.width
    if self._calls and not self._queue and len(self._seats) <= width:
      return None  # the last rows are to share a band, and those at the device cannot move
    bands = [band for band in self._bands if self._can_move(band)]
    band = max(bands, key=speakers, default=None)  # the first of several
    most = 0 if band is None else speakers(band)
    if len(self._bands) < self._sampler.num_bands and most < min(width, len(self._queue)):
      slots = self._sampler.slot_buckets[0]
      thread = self._resources.enter_context(futures.ThreadPoolExecutor(1, 'band'))
      self._bands.append(_Band(self._sampler.empty(width, slots), [None] * width, thread))
      return self._bands[-1]
    return band if most else None

  def _launch(self, band: _Band) -> _Call:
    """Seats and reads who is ready, and starts to decode; returns before the device is done."""
    self._last_read = None
    self._admit(band)
    self._read_in_place(band) if self._sampler.in_place else self._read_elsewhere(band)
    self._lap('prefill')
    places = band.places('speaking')
    rows, width = [band.rows[b] for b in places], self._sampler.width
    longest = max(row.length for row in rows)
    band.context = self._sampler.with_room(band.context, longest + 1)
    lengths, stop_state, budgets = np.zeros((3, width), np.int32)
    keys = np.zeros((width, *self._keys.shape[1:]), self._keys.dtype)
    for b, row in enumerate(band.rows):
      if row is not None:  # rows that stand still are written to as well, behind their end
        lengths[b] = row.length
      if row is not None and row.phase == 'speaking':
        stop_state[b], budgets[b], keys[b] = row.stop_state, row.left, self._keys[row.index]
    band.context, sampled = self._dispatch(
        band,
        self._sampler.decode,
        self._params,
        band.context,
        lengths,
        keys,
        stop_state,
        budgets,
        steps=band.context.slots - longest,
        enough=-(-len(rows) // 4),
    )
    self._lap('decode')
    read, done = (
        band.thread.submit(jax.block_until_ready, result) for result in (self._last_read, sampled)
    )
    return _Call(band, sampled, read, done)

  def _dispatch(self, band: _Band, function, *args, **kwargs):
    """function(*args): a call to the device, which is not waited for.

    A CPU computes what one thread dispatches in that order, and what several dispatch side by side: two
    bands in two thirds of the time. So there each band has its thread. Programs of several devices
    are left in order, or each could wait for the other.
    """
    devices = jax.tree.leaves(self._params)[0].devices()
    if len(devices) > 1 or next(iter(devices)).platform != 'cpu':
      return function(*args, **kwargs)
    return band.thread.submit(function, *args, **kwargs).result()

  def _finish(self, call: _Call) -> list[Said]:
    """The turns that ended with a call that is done."""
    call.done.result()
    sampled = hosts.fetch(call.sampled)
    said = []
    for b in call.band.places('speaking'):
      row, count = call.band.rows[b], int(sampled.counts[b])
      row.tokens.append(sampled.tokens[b, :count])
      row.logp.append(sampled.logp[b, :count])
      row.length += count
      row.left -= count
      row.stop_state = int(sampled.stop_state[b])
      if not sampled.alive[b]:
        said.append(Said(row.index, np.concatenate(row.tokens), np.concatenate(row.logp)))
        row.phase, row.stop_state, row.tokens, row.logp = 'waiting', 0, [], []
    self.report.decode_steps += int(sampled.counts.max())
    self.report.sampled_tokens += int(sampled.counts.sum())
    self._lap('decode')
    return said

  def _listen(self) -> None:
    """Takes in what the world has answered."""
    for index, cue in self._world.answers():
      band, b = self._seats[index]
      row = band.rows[b]
      row.ids, row.left, row.phase = cue.ids, cue.budget, 'ready'
      if cue.budget > 0:
        self._check_room(row)
      else:
        band.rows[b] = None
        del self._seats[index]
    self._lap('env')

  def _check_room(self, row):
    if row.length_with_ids() == 0:
      raise ValueError('a dialogue without any context cannot be sampled: give it a prompt')
    if row.length_with_ids() + row.left > self._sampler.max_slots:
      raise ValueError(
          f'{row.length} tokens, {len(row.ids)} to read and a turn of {row.left} do not fit in '
          f'max_slots={self._sampler.max_slots}: lower the budget'
      )

  def _seat(self, row: _Row, band: _Band, b: int) -> None:
    band.rows[b] = row
    self._seats[row.index] = (band, b)

  def _admit(self, band: _Band) -> None:
    """Gives the free rows to the next dialogues, and reads their prompts but for `in_place`.

    Each prompt is read once; its other rows, now or when they get a place, are copies of the first.
    """
    by_prompt: dict[tuple[int, ...], list[_Row]] = {}
    for b in band.free()[: len(self._queue)]:
      row = self._queue.popleft()
      self._check_room(row)
      self._seat(row, band, b)
      by_prompt.setdefault(tuple(row.ids), []).append(row)
    if self._sampler.in_place or not by_prompt:
      return
    if self._kept and (rows := by_prompt.pop(self._kept[0], None)):
      prompt, context, source = self._kept
      self.report.shared_tokens += len(prompt) * len(rows)
      self._put(band, context, [(row, source) for row in rows])
    upcoming = tuple(self._queue[0].ids) if self._queue else None
    if self._kept and self._kept[0] != upcoming:
      self._kept = None
    prompts = sorted(by_prompt, key=len)  # alike in length, they are cut alike
    for i in range(0, len(prompts), self._sampler.read_rows):
      batch = prompts[i : i + self._sampler.read_rows]
      band.context = self._sampler.with_room(band.context, len(batch[-1]))
      context = self._sampler.empty(self._sampler.read_rows, band.context.slots)
      context = self._read(context, batch, [0] * len(batch))
      self.report.shared_tokens += sum(len(p) * (len(by_prompt[p]) - 1) for p in batch)
      self._put(
          band,
          context,
          [(row, source) for source, prompt in enumerate(batch) for row in by_prompt[prompt]],
      )
      if upcoming in batch:
        self._kept = upcoming, context, batch.index(upcoming)

  def _read(self, context, ids, starts):
    """`Sampler.read` of the first rows of `context`, counted."""
    self.report.prefill_tokens += sum(map(len, ids))
    none = self._sampler.read_rows - len(ids)
    context, lengths = self._sampler.read(
        self._params, context, [*ids, *[()] * none], [*starts, *[0] * none]
    )
    self._last_read = self._last_read if lengths is None else lengths
    return context

  def _put(self, band: _Band, context, rows: list[tuple[_Row, int]]) -> None:
    """Gives the band's rows what was read in `context`: pairs (row, the row of it that it copies)."""
    size = self._sampler.read_rows
    band.context = self._sampler.with_room(band.context, context.slots)
    for i in range(0, len(rows), size):
      part = rows[i : i + size]
      targets = [self._seats[row.index][1] for row, _ in part]
      band.context = self._sampler.put(
          band.context, context, targets, [source for _, source in part]
      )
    for row, _ in rows:
      row.has_read()

  def _read_in_place(self, band: _Band) -> None:
    """Reads what the band's rows have not read yet; those that have stand still."""
    ready = [band.rows[b] for b in band.places('ready')]
    if not ready:
      return
    ids = [() if row is None else row.ids for row in band.rows]
    starts = [0 if row is None else row.length for row in band.rows]
    band.context = self._sampler.with_room(band.context, max(map(_Row.length_with_ids, ready)))
    band.context = self._read(band.context, ids, starts)
    for row in ready:
      row.has_read()

  def _read_elsewhere(self, band: _Band) -> None:
    """The same on rows taken out, and put back after. In the end, when the queue is empty, rows of
    emptier bands are put here, so that ever fewer bands have to be decoded."""
    for home, places in self._to_read(band):
      for i in range(0, len(places), self._sampler.read_rows):
        batch = places[i : i + self._sampler.read_rows]
        rows, others = [home.rows[b] for b in batch], self._sampler.read_rows - len(batch)
        needed = max(map(_Row.length_with_ids, rows))
        band.context = self._sampler.with_room(band.context, max(needed, home.context.slots))
        taken = self._sampler.take(home.context, np.array(batch + [0] * others, np.int32))
        taken = self._sampler.with_room(taken, band.context.slots)
        taken = self._read(taken, [row.ids for row in rows], [row.length for row in rows])
        if home is not band:
          for row, b, target in zip(rows, batch, band.free()):
            home.rows[b] = None
            self._seat(row, band, target)
        self._put(band, taken, [(row, source) for source, row in enumerate(rows)])

  def _to_read(self, band: _Band) -> Iterator[tuple[_Band, list[int]]]:
    """(where they are, places) of the rows to be put into `band`; the short before the long."""
    yield band, self._by_length(band, band.places('ready'))
    emptiness = lambda band: (len(band.free()), self._bands.index(band))  # of equals the later one
    for other in self._bands:
      if (
          not self._queue
          and band.free()
          and self._can_move(other)
          and emptiness(other) > emptiness(band)
      ):
        places = other.places('speaking') + other.places('ready')
        yield other, self._by_length(other, places[: len(band.free())])

  def _can_move(self, band: _Band) -> bool:
    """Whether the device is not at the band."""
    return all(band is not call.band for call in self._calls)

  def _by_length(self, band, places):
    """Rows with like numbers of ids to read beside each other: they are cut alike."""
    return sorted(places, key=lambda b: len(band.rows[b].ids))
