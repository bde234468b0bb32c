"""Continuous batching: many sequences over few slots; a free slot takes the next sequence at once.

Each sequence alternates prefill, decode and an environment step until its episode ends. Slots form
groups, and one device call decodes one group. While it runs, the host gives the completions of
earlier calls to the environments, and the next call waits in the device's queue.

  group 0        | prefill, decode |                 | prefill, decode |                | ..
  group 1                          | prefill, decode |                 | prefill, decode | ..
  environments   | of group 0      | of group 1      | ..    (in threads: late, in any order)

Of an environment with several roles one sequence goes on, and the others wait in their slots.

What is sampled for a sequence depends on its key and its ids alone. With `threads=0` the schedule
is a function of the completions and prompts, so that many hosts take the same steps. With threads
it depends on timing: the group that is done first goes on. That changes only which sequences share
a group, and the number of cache slots of a group. Neighbours do not change a row's numbers. The
number of cache slots may change their last digit (matmuls sum in another order), so that only with
one slot bucket two runs with threads are bitwise equal.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import time
from typing import Any

import chex
import jax
import numpy as np

from stppo_jax.distributed import hosts
from stppo_jax.rollout import env_pool
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout.env_pool import Completion
from stppo_jax.rollout.env_pool import Prompt
from stppo_jax.rollout.env_pool import Report

CALLS = 2  # in progress at once: queued on an accelerator, side by side on a CPU


def run(
    sampler: sampler_lib.Sampler,
    params: Any,  # or a list of them, for each of R roles its own
    prompts: Sequence[Prompt],
    keys: jax.Array,  # [sequences], or [environments,R] of sequences that take turns
    respond: Callable[[list[Completion]], list[Prompt]],  # called from threads, if there are any
    threads: int = 0,  # calls of `respond` in progress at once; 0: none, the engine waits for each
) -> Report:
  """Plays every sequence to its end; those with budget 0 wait for a prompt, or are over.

  Sequences start in their order. An exception of `respond` ends the run, and is raised here.
  """
  chex.assert_equal(len(prompts), keys.size)
  with env_pool.EnvPool(respond, threads) as pool, contextlib.ExitStack() as resources:
    engine = _Engine(sampler, params, prompts, keys, pool, threads, resources)
    engine.run()
    return engine.report


@dataclasses.dataclass(eq=False)
class _Row:
  """A sequence in progress, and its state."""

  index: int
  ids: Sequence[int]  # to prefill
  left: int  # tokens that its turn may still have
  length: int = 0  # of its context
  phase: str = 'ready'  # for prefill; then 'decoding'; then 'waiting' for its environment
  stop_state: int = 0  # of the stop automaton
  tokens: list[np.ndarray] = dataclasses.field(default_factory=list)  # of the turn so far
  logp: list[np.ndarray] = dataclasses.field(default_factory=list)
  # Experts since the turn before: those of a prefill call and the row in it, then arrays [n,L,A].
  routes: list[Any] = dataclasses.field(default_factory=list)

  def length_with_ids(self) -> int:
    """Length of the context after prefill."""
    return self.length + len(self.ids)

  def take_routes(self) -> np.ndarray:
    """Returns the experts [n,L,A] of what was prefilled and sampled since the turn before."""
    parts = [x if isinstance(x, np.ndarray) else x[0].routes(x[1]) for x in self.routes]
    self.routes = []
    return np.concatenate(parts)

  def finish_prefill(self) -> None:
    """Moves on to decoding."""
    self.length, self.ids, self.phase = self.length_with_ids(), (), 'decoding'


@dataclasses.dataclass(eq=False)
class _Group:
  """Slots that are decoded together; None is a free one."""

  context: sampler_lib.Context
  lane: int  # whose parameters its rows have, see `_Engine`
  rows: list[Any]  # a _Row per slot, None where it is free
  thread: futures.Executor  # one thread, which waits for the device

  def slots_in(self, phase: str) -> list[int]:
    """Slots of the rows in a phase."""
    return [b for b, row in enumerate(self.rows) if row is not None and row.phase == phase]

  def free(self) -> list[int]:
    """Slots without a row."""
    return [b for b, row in enumerate(self.rows) if row is None]


@dataclasses.dataclass(frozen=True)
class _Kept:
  """A prompt that is prefilled already, and whose other rows are next in the queue."""

  prompt: tuple[int, ...]
  context: sampler_lib.Context
  prefilled: sampler_lib.Prefilled
  source: int  # its row in them


@dataclasses.dataclass
class _Call:
  """A group that the device is decoding."""

  group: _Group
  sampled: sampler_lib.Sampled
  prefilled: futures.Future  # done once all prefill before it is
  done: futures.Future  # once all is sampled


class _Engine:
  """The state of one run. Where roles have parameters of their own, each is a lane; else all are 0.

  A group is decoded with one lane's parameters, and has the rows of that lane alone.
  """

  def __init__(self, sampler, params, prompts, keys, pool, threads, resources):
    self.report = Report()
    self._resources, self._clock_decides = resources, threads > 0
    self._sampler, self._pool = sampler, pool
    self._params = params if isinstance(params, list) else [params]
    self._keys = np.asarray(jax.random.key_data(keys.reshape(-1)))
    rows = [
        _Row(i, prompt.ids, prompt.budget) for i, prompt in enumerate(prompts) if prompt.budget > 0
    ]
    num_roles, lanes = 1 if keys.ndim == 1 else keys.shape[1], len(self._params)
    num_slots = sampler.num_groups // lanes * lanes * sampler.width
    self._line = env_pool.Line(rows, num_roles, num_slots)
    self._queues: list[collections.deque[_Row]] = [collections.deque() for _ in self._params]
    self._enqueue(self._line.begin())
    self._slots: dict[int, tuple[_Group, int]] = {}  # sequence in progress -> its slot
    self._groups: list[_Group] = []
    self._calls: list[_Call] = []  # in progress on the device, or in its queue
    self._kept: list[_Kept | None] = [None] * lanes  # per lane
    self._last_prefill = None  # result of the last prefill of a launch: the new lengths
    self._clock = time.perf_counter()

  def run(self) -> None:
    """Runs until no sequence is left."""
    while any(self._queues) or self._slots:
      while len(self._calls) < CALLS and (group := self._next_group()):
        self._calls.append(self._launch(group))
      self._wait()
      for call in self._awaited():
        if call.done.done():
          self._calls.remove(call)
          self._pool.hand_over(self._finish(call))
      self._take_responses()

  def _awaited(self) -> list[_Call]:
    """Calls that may be finished next: with threads any, else the oldest."""
    return list(self._calls) if self._clock_decides else self._calls[:1]

  def _wait(self):
    """Waits until a call is prefilled or done, or a response came that could start one."""
    calls = self._awaited()
    events = [call.done if call.prefilled.done() else call.prefilled for call in calls]
    name = 'decode' if all(call.prefilled.done() for call in calls) else 'prefill'
    if len(self._calls) < CALLS:
      events += self._pool.in_progress
    if events:
      futures.wait(events, return_when=futures.FIRST_COMPLETED)
    self._lap(name if calls else 'env')

  def _lap(self, name):
    """Adds the time since the last lap to `name`."""
    now = time.perf_counter()
    self.report.seconds[name] += now - self._clock
    self._clock = now

  def _next_group(self) -> _Group | None:
    """Returns the group, of those not in a call, in which most rows can be decoded."""

    def decodable(group):
      return (
          len(group.slots_in('decoding'))
          + len(group.slots_in('ready'))
          + min(len(group.free()), len(self._queues[group.lane]))
      )

    width = self._sampler.width
    if self._calls and not any(self._queues) and len(self._slots) <= width:
      return None  # the last rows are to share a group, and those in a call cannot move
    groups = [group for group in self._groups if self._can_move(group)]
    for lane, queue in enumerate(self._queues):
      most = max((decodable(group) for group in groups if group.lane == lane), default=0)
      number = sum(group.lane == lane for group in self._groups)
      most_groups = self._sampler.num_groups // len(self._queues)
      if number < most_groups and most < min(width, len(queue)):
        context = self._sampler.empty(width, self._sampler.slot_buckets[0])
        thread = self._resources.enter_context(futures.ThreadPoolExecutor(1, 'group'))
        self._groups.append(_Group(context, lane, [None] * width, thread))
        return self._groups[-1]
    group = max(groups, key=decodable, default=None)  # the first of several
    return group if group is not None and decodable(group) else None

  def _enqueue(self, rows: Sequence[_Row]) -> None:
    for row in rows:
      self._queues[row.index % len(self._queues)].append(row)

  def _launch(self, group: _Group) -> _Call:
    """Fills free slots, prefills, and starts to decode; returns before the device is done."""
    self._last_prefill = None
    self._admit(group)
    self._prefill_in_place(group) if self._sampler.in_place else self._prefill_apart(group)
    self._lap('prefill')
    slots = group.slots_in('decoding')
    rows, width = [group.rows[b] for b in slots], self._sampler.width
    longest = max(row.length for row in rows)
    group.context = self._sampler.with_room(group.context, longest + 1)
    lengths, stop_state, budgets = np.zeros((3, width), np.int32)
    keys = np.zeros((width, *self._keys.shape[1:]), self._keys.dtype)
    for b, row in enumerate(group.rows):
      if row is not None:  # rows that are not decoded are also written to, behind their end
        lengths[b] = row.length
      if row is not None and row.phase == 'decoding':
        stop_state[b], budgets[b], keys[b] = row.stop_state, row.left, self._keys[row.index]
    group.context, sampled = self._dispatch(
        group,
        self._sampler.decode,
        self._params[group.lane],
        group.context,
        sampler_lib.Rows(lengths, keys, stop_state, budgets),
        steps=group.context.slots - longest,
        enough=-(-len(rows) // 4),
    )
    self._lap('decode')
    prefilled, done = (
        group.thread.submit(jax.block_until_ready, result)
        for result in (self._last_prefill, sampled)
    )
    return _Call(group, sampled, prefilled, done)

  def _dispatch(self, group: _Group, function, *args, **kwargs):
    """Calls function(*args), which starts work on the device, without waiting for the result.

    A CPU runs the programs of one thread in order, and those of several side by side: two groups
    take two thirds of the time. So there each group has its thread. Programs of several devices
    stay in order, since each could wait for the other.
    """
    devices = jax.tree.leaves(self._params)[0].devices()
    if len(devices) > 1 or next(iter(devices)).platform != 'cpu':
      return function(*args, **kwargs)
    return group.thread.submit(function, *args, **kwargs).result()

  def _finish(self, call: _Call) -> list[Completion]:
    """Returns the turns that ended with a call that is done."""
    call.done.result()
    sampled = hosts.fetch(call.sampled)
    completions = []
    for b in call.group.slots_in('decoding'):
      row, count = call.group.rows[b], int(sampled.counts[b])
      row.tokens.append(sampled.tokens[b, :count])
      row.logp.append(sampled.logp[b, :count])
      if self._sampler.records_routes:
        row.routes.append(sampled.routes[b, :count])
      row.length += count
      row.left -= count
      row.stop_state = int(sampled.stop_state[b])
      if not sampled.alive[b]:
        tokens, logp = np.concatenate(row.tokens), np.concatenate(row.logp)
        routes = row.take_routes() if self._sampler.records_routes else None
        completions.append(Completion(row.index, tokens, logp, routes))
        row.phase, row.stop_state, row.tokens, row.logp = 'waiting', 0, [], []
    self.report.decode_steps += int(sampled.counts.max())
    self.report.sampled_tokens += int(sampled.counts.sum())
    self._lap('decode')
    return completions

  def _take_responses(self) -> None:
    """Takes the prompts that the environments have given."""
    for index, prompt in self._pool.responses():
      index = index if prompt.sequence is None else prompt.sequence
      if prompt.budget <= 0:
        over, following = self._line.end(index)
        for group, b in [self._slots.pop(i) for i in over if i in self._slots]:
          group.rows[b] = None
        self._enqueue(following)
      elif index not in self._slots:
        self._enqueue([_Row(index, prompt.ids, prompt.budget)])
      else:
        group, b = self._slots[index]
        row = group.rows[b]
        row.ids, row.left, row.phase = prompt.ids, prompt.budget, 'ready'
        self._check_room(row)
    self._lap('env')

  def _check_room(self, row):
    if row.length_with_ids() == 0:
      raise ValueError('a sequence without any context cannot be sampled: give it a prompt')
    if row.length_with_ids() + row.left > self._sampler.max_slots:
      raise ValueError(
          f'{row.length} tokens, {len(row.ids)} to prefill and a turn of {row.left} do not fit in '
          f'max_slots={self._sampler.max_slots}: lower the budget'
      )

  def _occupy(self, row: _Row, group: _Group, b: int) -> None:
    group.rows[b] = row
    self._slots[row.index] = (group, b)

  def _admit(self, group: _Group) -> None:
    """Gives the free slots to the next sequences, and prefills their prompts unless `in_place`.

    Each prompt is prefilled once; its other rows, now or later, are copies of the first.
    """
    by_prompt: dict[tuple[int, ...], list[_Row]] = {}
    queue, kept = self._queues[group.lane], self._kept[group.lane]
    for b in group.free()[: len(queue)]:
      row = queue.popleft()
      self._check_room(row)
      self._occupy(row, group, b)
      by_prompt.setdefault(tuple(row.ids), []).append(row)
    if self._sampler.in_place or not by_prompt:
      return
    if kept and (rows := by_prompt.pop(kept.prompt, None)):
      self.report.shared_tokens += len(kept.prompt) * len(rows)
      self._put(group, kept.context, kept.prefilled, [(row, kept.source) for row in rows])
    upcoming = tuple(queue[0].ids) if queue else None
    if kept and kept.prompt != upcoming:
      self._kept[group.lane] = None
    prompts = sorted(by_prompt, key=len)  # similar lengths are cut into similar chunks
    for i in range(0, len(prompts), self._sampler.prefill_rows):
      batch = prompts[i : i + self._sampler.prefill_rows]
      group.context = self._sampler.with_room(group.context, len(batch[-1]))
      context = self._sampler.empty(self._sampler.prefill_rows, group.context.slots)
      context, prefilled = self._prefill(group, context, batch, [0] * len(batch))
      self.report.shared_tokens += sum(len(p) * (len(by_prompt[p]) - 1) for p in batch)
      self._put(
          group,
          context,
          prefilled,
          [(row, source) for source, prompt in enumerate(batch) for row in by_prompt[prompt]],
      )
      if upcoming in batch:
        self._kept[group.lane] = _Kept(upcoming, context, prefilled, batch.index(upcoming))

  def _prefill(self, group, context, ids, starts):
    """Runs and counts `Sampler.prefill` of the first rows of `context`."""
    self.report.prefill_tokens += sum(map(len, ids))
    none = self._sampler.prefill_rows - len(ids)
    context, prefilled = self._sampler.prefill(
        self._params[group.lane], context, [*ids, *[()] * none], [*starts, *[0] * none]
    )
    if prefilled.lengths is not None:
      self._last_prefill = prefilled.lengths
    return context, prefilled

  def _put(self, group: _Group, context, prefilled, rows: list[tuple[_Row, int]]) -> None:
    """Copies rows of `context` to the group: pairs (row, number of the row that it copies)."""
    size = self._sampler.prefill_rows
    group.context = self._sampler.with_room(group.context, context.slots)
    for i in range(0, len(rows), size):
      part = rows[i : i + size]
      targets = [self._slots[row.index][1] for row, _ in part]
      group.context = self._sampler.put(
          group.context, context, targets, [source for _, source in part]
      )
    for row, source in rows:
      self._note_routes(row, prefilled, source)
      row.finish_prefill()

  def _note_routes(self, row, prefilled, source):
    """Remembers where the experts of the row's ids are, to be fetched when its turn has ended."""
    if self._sampler.records_routes and len(row.ids):
      row.routes.append((prefilled, source))

  def _prefill_in_place(self, group: _Group) -> None:
    """Prefills the group's rows where they are; the others do not change."""
    ready = [group.rows[b] for b in group.slots_in('ready')]
    width, decoding = self._sampler.width, len(group.slots_in('decoding'))
    # A prefill computes all rows, also those that are not ready: a few wait while many decode.
    if not ready or (4 * len(ready) < width and 16 * decoding >= width):
      return
    ids = [() if row is None else row.ids for row in group.rows]
    starts = [0 if row is None else row.length for row in group.rows]
    group.context = self._sampler.with_room(group.context, max(map(_Row.length_with_ids, ready)))
    group.context, prefilled = self._prefill(group, group.context, ids, starts)
    for b in group.slots_in('ready'):
      self._note_routes(group.rows[b], prefilled, b)
      group.rows[b].finish_prefill()

  def _prefill_apart(self, group: _Group) -> None:
    """Prefills rows that are taken out of their group, and puts them back.

    When the queue is empty, rows of emptier groups move here, so that fewer groups have to be
    decoded.
    """
    for home, slots in self._to_prefill(group):
      for i in range(0, len(slots), self._sampler.prefill_rows):
        batch = slots[i : i + self._sampler.prefill_rows]
        rows, others = [home.rows[b] for b in batch], self._sampler.prefill_rows - len(batch)
        needed = max(map(_Row.length_with_ids, rows))
        group.context = self._sampler.with_room(group.context, max(needed, home.context.slots))
        taken = self._sampler.take(home.context, np.array(batch + [0] * others, np.int32))
        taken = self._sampler.with_room(taken, group.context.slots)
        taken, prefilled = self._prefill(
            group, taken, [row.ids for row in rows], [row.length for row in rows]
        )
        if home is not group:
          for row, b, target in zip(rows, batch, group.free()):
            home.rows[b] = None
            self._occupy(row, group, target)
        self._put(group, taken, prefilled, [(row, source) for source, row in enumerate(rows)])

  def _to_prefill(self, group: _Group) -> Iterator[tuple[_Group, list[int]]]:
    """Yields (their group, slots) of the rows to be put into `group`, shortest first."""
    yield group, self._by_length(group, group.slots_in('ready'))
    for other in self._groups:
      if (
          not self._queues[group.lane]
          and other.lane == group.lane
          and group.free()
          and self._can_move(other)
          and self._emptiness(other) > self._emptiness(group)
      ):
        slots = other.slots_in('decoding') + other.slots_in('ready')
        yield other, self._by_length(other, slots[: len(group.free())])

  def _emptiness(self, group):
    return len(group.free()), self._groups.index(group)  # of equally empty ones the later

  def _can_move(self, group: _Group) -> bool:
    """Returns whether the group is in no call."""
    return all(group is not call.group for call in self._calls)

  def _by_length(self, group, slots):
    """Sorts slots by the number of ids to prefill: similar ones are cut into similar chunks."""
    return sorted(slots, key=lambda b: len(group.rows[b].ids))
