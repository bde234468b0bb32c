"""Continuous batching: many sequences over few slots; a free slot takes the next sequence at once.

Each sequence alternates prefill, decode and an environment step until its episode ends. Slots form
groups, and one device call decodes one group. While it runs, the host gives the completions of
earlier calls to the environments, and the next call waits in the device's queue.

  group 0        | prefill, decode |                 | prefill, decode |                | ..
  group 1                          | prefill, decode |                 | prefill, decode | ..
  environments   | of group 0      | of group 1      | ..    (in threads: late, in any order)

An environment with several agents has one sequence for each. One of them continues at a time, and
the others wait in their slots.

The tokens of a sequence depend only on its key and its ids. With `threads=0` the schedule is a
function of the completions and prompts, so that many hosts take the same steps. With threads it
depends on timing, because the group that is done first continues. That changes only which sequences
share a group, and the number of cache slots of a group. Neighbours do not change a row's numbers.
The number of cache slots may change their last digit (matmuls sum in another order), so that only
with one slot bucket two runs with threads are bitwise equal.
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
from typing import NamedTuple

import chex
import jax
import numpy as np

from stppo_jax.distributed import hosts
from stppo_jax.rollout import env_pool
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.rollout.env_pool import Prompt
from stppo_jax.rollout.env_pool import TurnCompletion

CALLS = 2  # in progress at once: queued on an accelerator, side by side on a CPU


@dataclasses.dataclass
class Report:
  """The work of a run. The seconds are the host's, and add up to the whole."""

  seconds: dict[str, float] = dataclasses.field(
      default_factory=lambda: {'prefill': 0.0, 'decode': 0.0, 'env': 0.0}
  )
  prefill_tokens: int = 0
  shared_tokens: int = 0  # prompt tokens copied from the context of an equal prompt instead
  sampled_tokens: int = 0
  decode_steps: int = 0  # each of one group

  @property
  def rows_busy(self) -> float:
    """Mean number of rows of a group that sampled, over all decode steps."""
    return self.sampled_tokens / max(self.decode_steps, 1)

  def __add__(self, other: 'Report') -> 'Report':
    """Returns the report of both runs, one after the other."""
    return Report(
        {phase: self.seconds[phase] + other.seconds[phase] for phase in self.seconds},
        self.prefill_tokens + other.prefill_tokens,
        self.shared_tokens + other.shared_tokens,
        self.sampled_tokens + other.sampled_tokens,
        self.decode_steps + other.decode_steps,
    )

  def metrics(self) -> dict[str, float]:
    """Returns the report under the names of metrics.jsonl."""
    metrics = {f'timing_s/gen_{phase}': seconds for phase, seconds in self.seconds.items()}
    for name in ('rows_busy', 'decode_steps', 'prefill_tokens', 'shared_tokens'):
      metrics[f'perf/{name}'] = getattr(self, name)
    return metrics


def run(
    sampler: sampler_lib.Sampler,
    params: Any,  # or a list: sequence r of an environment is sampled with params[r]
    prompts: Sequence[Prompt],
    keys: jax.Array,  # [sequences], or [environments,R] of sequences that take turns
    respond: Callable[
        [list[TurnCompletion]], list[Prompt]
    ],  # called from threads, if there are any
    threads: int = 0,  # calls of `respond` in progress at once; 0: none, the engine waits for each
) -> Report:
  """Plays every sequence to its end. A sequence with budget 0 waits until it is given a prompt.

  Sequences start in their order. An exception of `respond` ends the run, and is raised here.
  """
  chex.assert_equal(len(prompts), keys.size)
  with env_pool.EnvPool(respond, threads) as pool, contextlib.ExitStack() as resources:
    engine = _Engine(sampler, params, prompts, keys, pool, threads, resources)
    engine.run()
    return engine.report


@dataclasses.dataclass(eq=False)
class _Sequence:
  """A sequence in progress, and its state."""

  index: int
  ids: Sequence[int]  # to prefill
  budget: int  # tokens that its turn may still have
  length: int = 0  # tokens in its context
  phase: str = 'ready'  # 'ready' to prefill, 'decoding', or 'waiting' for its environment
  stop_state: int = 0  # state of the stop automaton
  tokens: list[np.ndarray] = dataclasses.field(default_factory=list)  # the turn so far
  logp: list[np.ndarray] = dataclasses.field(default_factory=list)
  # Experts since the turn before: functions that fetch [n,L,A].
  routes: list[Callable[[], np.ndarray]] = dataclasses.field(default_factory=list)

  def length_with_ids(self) -> int:
    """Length of the context after prefill."""
    return self.length + len(self.ids)

  def add(self, sampled: Any, b: int) -> None:
    """Adds the tokens of row b of `DecodeResult` NumPy arrays."""
    count = int(sampled.counts[b])
    self.tokens.append(sampled.tokens[b, :count])
    self.logp.append(sampled.logp[b, :count])
    self.length += count
    self.budget -= count
    self.stop_state = int(sampled.stop_state[b])
    if sampled.routes is not None:
      routes = sampled.routes[b, :count]
      self.routes.append(lambda: routes)

  def end_turn(self) -> TurnCompletion:
    """Returns the turn, and waits for the environment."""
    routes = [fetch() for fetch in self.routes]
    completion = TurnCompletion(
        self.index,
        np.concatenate(self.tokens),
        np.concatenate(self.logp),
        np.concatenate(routes) if routes else None,
    )
    self.phase = 'waiting'
    self.stop_state = 0
    self.tokens = []
    self.logp = []
    self.routes = []
    return completion


@dataclasses.dataclass(eq=False)
class _Group:
  """Slots that are decoded together, with the same parameters."""

  queue: '_Queue'
  context: sampler_lib.Context
  rows: list[Any]  # a _Sequence per slot, None where it is free
  thread: futures.Executor  # one thread, which waits for the device

  def slots_in(self, phase: str) -> list[int]:
    """Slots of the sequences in a phase."""
    return [b for b, row in enumerate(self.rows) if row is not None and row.phase == phase]

  def free(self) -> list[int]:
    """Slots without a sequence."""
    return [b for b, row in enumerate(self.rows) if row is None]


class _SharedPrompt(NamedTuple):
  """A prefilled prompt that the next sequence in the queue has too."""

  ids: tuple[int, ...]
  context: sampler_lib.Context
  prefilled: sampler_lib.PrefillResult
  source: int  # its row in them


@dataclasses.dataclass(eq=False)
class _Queue:
  """Sequences that wait for a slot, and the parameters that sample them."""

  params: Any
  waiting: collections.deque[_Sequence] = dataclasses.field(default_factory=collections.deque)
  shared: _SharedPrompt | None = None


@dataclasses.dataclass
class _Call:
  """A group that the device is decoding."""

  group: _Group
  sampled: sampler_lib.DecodeResult
  prefilled: futures.Future  # done once all prefill before it is
  done: futures.Future  # once all is sampled


class _Engine:
  """The state of one run. Each set of parameters has a queue and groups of its own."""

  def __init__(self, sampler, params, prompts, keys, pool, threads, resources):
    self.report = Report()
    self._sampler = sampler
    if not isinstance(params, list):
      params = [params]
    self._queues = [_Queue(one) for one in params]
    self._keys = np.asarray(jax.random.key_data(keys.reshape(-1)))
    self._pool = pool
    self._is_threaded = threads > 0
    self._resources = resources
    self._groups: list[_Group] = []
    self._max_groups = sampler.num_groups // len(params)  # per queue
    self._slots: dict[int, tuple[_Group, int]] = {}  # sequence in progress -> its slot
    self._calls: list[_Call] = []  # in progress on the device, or in its queue
    self._last_prefill = None  # result of the last prefill of a launch: the new lengths
    self._clock = time.perf_counter()

    self._unstarted: collections.deque[_Sequence] = collections.deque()
    for i, prompt in enumerate(prompts):
      if prompt.budget > 0:
        self._unstarted.append(_Sequence(i, prompt.ids, prompt.budget))
    num_starts = len(self._unstarted)
    self._rows_per_env = 1
    if keys.ndim == 2:
      # A sequence needs a slot when it is given a prompt, while no other may end. So no more
      # environments start than have slots for all their sequences.
      self._rows_per_env = keys.shape[1]
      num_slots = self._max_groups * len(params) * sampler.width
      num_starts = num_slots // self._rows_per_env
      if not num_starts:
        raise ValueError(
            f'{self._rows_per_env} sequences of an environment do not fit in {num_slots} slots'
        )
    self._start(num_starts)

  def run(self) -> None:
    """Runs until no sequence is left."""
    while self._has_waiting() or self._slots:
      while len(self._calls) < CALLS and (group := self._next_group()):
        self._calls.append(self._launch(group))
      self._wait()
      for call in self._awaited():
        if call.done.done():
          self._calls.remove(call)
          self._pool.step(self._finish(call))
      self._take_prompts()

  def _awaited(self) -> list[_Call]:
    """Calls that may be finished next: with threads any, else the oldest."""
    return list(self._calls) if self._is_threaded else self._calls[:1]

  def _wait(self):
    """Waits until a call is prefilled or done, or a response came that could start one."""
    calls = self._awaited()
    events = [call.done if call.prefilled.done() else call.prefilled for call in calls]
    is_decoding = all(call.prefilled.done() for call in calls)
    if len(self._calls) < CALLS:
      events += self._pool.in_progress
    if events:
      futures.wait(events, return_when=futures.FIRST_COMPLETED)
    if not calls:
      self._lap('env')
    else:
      self._lap('decode' if is_decoding else 'prefill')

  def _lap(self, phase):
    """Adds the time since the last lap to a phase."""
    now = time.perf_counter()
    self.report.seconds[phase] += now - self._clock
    self._clock = now

  def _start(self, count: int) -> None:
    """Queues the next `count` sequences that have not started."""
    for _ in range(min(count, len(self._unstarted))):
      self._enqueue(self._unstarted.popleft())

  def _enqueue(self, sequence: _Sequence) -> None:
    queue = self._queues[sequence.index % len(self._queues)]
    queue.waiting.append(sequence)

  def _has_waiting(self) -> bool:
    return any(queue.waiting for queue in self._queues)

  def _next_group(self) -> _Group | None:
    """Returns the group, of those not in a call, in which most rows can be decoded."""

    def decodable(group):
      num_new = min(len(group.free()), len(group.queue.waiting))
      num_ready = len(group.slots_in('ready'))
      return len(group.slots_in('decoding')) + num_ready + num_new

    width = self._sampler.width
    if self._calls and not self._has_waiting() and len(self._slots) <= width:
      return None  # the last rows are to share a group, and those in a call cannot move
    groups = [group for group in self._groups if self._can_move(group)]
    for queue in self._queues:
      counts = [decodable(group) for group in groups if group.queue is queue]
      num_groups = sum(group.queue is queue for group in self._groups)
      wanted = min(width, len(queue.waiting))
      if num_groups < self._max_groups and max(counts, default=0) < wanted:
        return self._add_group(queue)
    group = max(groups, key=decodable, default=None)  # the first of several
    return group if group is not None and decodable(group) else None

  def _add_group(self, queue: _Queue) -> _Group:
    width = self._sampler.width
    context = self._sampler.empty(width, self._sampler.slot_buckets[0])
    thread = self._resources.enter_context(futures.ThreadPoolExecutor(1, 'group'))
    group = _Group(queue, context, [None] * width, thread)
    self._groups.append(group)
    return group

  def _launch(self, group: _Group) -> _Call:
    """Fills free slots, prefills, and starts to decode; returns before the device is done."""
    self._last_prefill = None
    admitted = self._admit(group)
    if self._sampler.in_place:
      self._prefill_in_place(group)
    else:
      self._prefill_prompts(group, admitted)
      self._prefill_observations(group)
    self._lap('prefill')
    sampled = self._decode(group)
    self._lap('decode')
    prefilled = group.thread.submit(jax.block_until_ready, self._last_prefill)
    done = group.thread.submit(jax.block_until_ready, sampled)
    return _Call(group, sampled, prefilled, done)

  def _decode(self, group: _Group) -> sampler_lib.DecodeResult:
    slots = group.slots_in('decoding')
    longest = max(group.rows[b].length for b in slots)
    group.context = self._sampler.with_room(group.context, longest + 1)
    inputs = self._sampler.idle_rows(self._sampler.width)
    for b, row in enumerate(group.rows):
      if row is not None:  # rows that are not decoded are also written to, behind their end
        inputs.lengths[b] = row.length
    for b in slots:
      row = group.rows[b]
      inputs.stop_state[b] = row.stop_state
      inputs.budgets[b] = row.budget
      inputs.keys[b] = self._keys[row.index]
    group.context, sampled = self._dispatch(
        group,
        self._sampler.decode,
        group.queue.params,
        group.context,
        inputs,
        steps=group.context.slots - longest,
        enough=-(-len(slots) // 4),
    )
    return sampled

  def _dispatch(self, group: _Group, function, *args, **kwargs):
    """Calls function(*args), which starts work on the device, without waiting for the result.

    A CPU runs the programs of one thread in order, and those of several side by side: two groups
    take two thirds of the time. So there each group has its thread. Programs of several devices
    stay in order, since each could wait for the other.
    """
    devices = jax.tree.leaves(group.queue.params)[0].devices()
    if len(devices) > 1 or next(iter(devices)).platform != 'cpu':
      return function(*args, **kwargs)
    return group.thread.submit(function, *args, **kwargs).result()

  def _finish(self, call: _Call) -> list[TurnCompletion]:
    """Returns the turns that ended with a call that is done."""
    call.done.result()
    if not self._sampler.records_routes:
      call.sampled = dataclasses.replace(call.sampled, routes=None)
    sampled: Any = hosts.fetch(call.sampled)
    completions = []
    for b in call.group.slots_in('decoding'):
      sequence = call.group.rows[b]
      sequence.add(sampled, b)
      if not sampled.alive[b]:
        completions.append(sequence.end_turn())
    self.report.decode_steps += int(sampled.counts.max())
    self.report.sampled_tokens += int(sampled.counts.sum())
    self._lap('decode')
    return completions

  def _take_prompts(self) -> None:
    """Takes the prompts that the environments have given."""
    for index, prompt in self._pool.take_prompts():
      if prompt.budget <= 0:
        self._end_environment(index)
      elif index not in self._slots:
        self._enqueue(_Sequence(index, prompt.ids, prompt.budget))
      else:
        group, b = self._slots[index]
        sequence = group.rows[b]
        sequence.ids = prompt.ids
        sequence.budget = prompt.budget
        sequence.phase = 'ready'
        self._check_room(sequence)
    self._lap('env')

  def _end_environment(self, index: int) -> None:
    """Frees the slots of the environment of a sequence, and starts the next environment."""
    first = index - index % self._rows_per_env
    for i in range(first, first + self._rows_per_env):
      if i in self._slots:
        group, b = self._slots.pop(i)
        group.rows[b] = None
    self._start(1)

  def _check_room(self, sequence):
    if sequence.length_with_ids() == 0:
      raise ValueError('a sequence without any context cannot be sampled: give it a prompt')
    if sequence.length_with_ids() + sequence.budget > self._sampler.max_slots:
      raise ValueError(
          f'{sequence.length} tokens, {len(sequence.ids)} to prefill and a turn of '
          f'{sequence.budget} do not fit in max_slots={self._sampler.max_slots}: lower the budget'
      )

  def _occupy(self, sequence: _Sequence, group: _Group, b: int) -> None:
    group.rows[b] = sequence
    self._slots[sequence.index] = (group, b)

  def _admit(self, group: _Group) -> list[_Sequence]:
    """Gives the free slots to the next sequences; returns them."""
    waiting = group.queue.waiting
    admitted = []
    for b in group.free()[: len(waiting)]:
      sequence = waiting.popleft()
      self._check_room(sequence)
      self._occupy(sequence, group, b)
      admitted.append(sequence)
    return admitted

  def _prefill_prompts(self, group: _Group, admitted: list[_Sequence]) -> None:
    """Prefills each prompt once; other sequences with it, now or later, get copies of the row."""
    if not admitted:
      return
    by_prompt: dict[tuple[int, ...], list[_Sequence]] = {}
    for sequence in admitted:
      by_prompt.setdefault(tuple(sequence.ids), []).append(sequence)
    queue = group.queue
    shared = queue.shared
    if shared and (copies := by_prompt.pop(shared.ids, None)):
      self.report.shared_tokens += len(shared.ids) * len(copies)
      pairs = [(sequence, shared.source) for sequence in copies]
      self._put(group, shared.context, shared.prefilled, pairs)
    next_prompt = tuple(queue.waiting[0].ids) if queue.waiting else ()
    if shared and shared.ids != next_prompt:
      queue.shared = None
    prompts = sorted(by_prompt, key=len)  # similar lengths are cut into similar chunks
    for batch in sampling.batched(prompts, self._sampler.prefill_rows):
      group.context = self._sampler.with_room(group.context, len(batch[-1]))
      context = self._sampler.empty(self._sampler.prefill_rows, group.context.slots)
      starts = [0] * len(batch)
      context, prefilled = self._prefill(group, context, batch, starts)
      pairs = []
      for source, prompt in enumerate(batch):
        sequences = by_prompt[prompt]
        pairs += [(sequence, source) for sequence in sequences]
        self.report.shared_tokens += len(prompt) * (len(sequences) - 1)
      self._put(group, context, prefilled, pairs)
      if next_prompt in batch:
        source = batch.index(next_prompt)
        queue.shared = _SharedPrompt(next_prompt, context, prefilled, source)

  def _prefill(self, group, context, ids, starts):
    """Runs and counts `Sampler.prefill` of the first rows of `context`."""
    self.report.prefill_tokens += sum(map(len, ids))
    params = group.queue.params
    context, prefilled = self._sampler.prefill(params, context, ids, starts)
    if prefilled.lengths is not None:
      self._last_prefill = prefilled.lengths
    return context, prefilled

  def _put(self, group: _Group, context, prefilled, pairs: list[tuple[_Sequence, int]]) -> None:
    """Copies rows of `context` to the group: pairs (sequence, number of the row that it copies)."""
    group.context = self._sampler.with_room(group.context, context.slots)
    for batch in sampling.batched(pairs, self._sampler.prefill_rows):
      targets = [self._slots[sequence.index][1] for sequence, _ in batch]
      sources = [source for _, source in batch]
      group.context = self._sampler.put(group.context, context, targets, sources)
    for sequence, source in pairs:
      self._begin_decoding(sequence, prefilled, source)

  def _begin_decoding(self, sequence, prefilled, source):
    """Moves on from prefill to decoding. Experts are fetched when the turn has ended."""
    if self._sampler.records_routes and len(sequence.ids):
      sequence.routes.append(lambda: prefilled.routes(source))
    sequence.length = sequence.length_with_ids()
    sequence.ids = ()
    sequence.phase = 'decoding'

  def _prefill_in_place(self, group: _Group) -> None:
    """Prefills the group's rows where they are; the others do not change."""
    slots = group.slots_in('ready')
    width = self._sampler.width
    num_decoding = len(group.slots_in('decoding'))
    # A prefill computes all rows, also those that are not ready: a few wait while many decode.
    if not slots or (4 * len(slots) < width and 16 * num_decoding >= width):
      return
    ids = [() if row is None else row.ids for row in group.rows]
    starts = [0 if row is None else row.length for row in group.rows]
    needed = max(group.rows[b].length_with_ids() for b in slots)
    group.context = self._sampler.with_room(group.context, needed)
    group.context, prefilled = self._prefill(group, group.context, ids, starts)
    for b in slots:
      self._begin_decoding(group.rows[b], prefilled, b)

  def _prefill_observations(self, group: _Group) -> None:
    """Prefills rows that are taken out of their group, and puts them back.

    When the queue is empty, rows of emptier groups move here, so that fewer groups have to be
    decoded.
    """
    for home, slots in self._to_prefill(group):
      for batch in sampling.batched(slots, self._sampler.prefill_rows):
        sequences = [home.rows[b] for b in batch]
        needed = max(sequence.length_with_ids() for sequence in sequences)
        group.context = self._sampler.with_room(group.context, max(needed, home.context.slots))
        context = self._sampler.take(home.context, batch)
        context = self._sampler.with_room(context, group.context.slots)
        ids = [sequence.ids for sequence in sequences]
        starts = [sequence.length for sequence in sequences]
        context, prefilled = self._prefill(group, context, ids, starts)
        if home is not group:
          for sequence, b, target in zip(sequences, batch, group.free()):
            home.rows[b] = None
            self._occupy(sequence, group, target)
        pairs = [(sequence, source) for source, sequence in enumerate(sequences)]
        self._put(group, context, prefilled, pairs)

  def _to_prefill(self, group: _Group) -> Iterator[tuple[_Group, list[int]]]:
    """Yields (their group, slots) of the rows to be put into `group`, shortest first."""
    yield group, self._by_length(group, group.slots_in('ready'))
    for other in self._groups:
      if (
          not group.queue.waiting
          and other.queue is group.queue
          and group.free()
          and self._can_move(other)
          and self._emptiness(other) > self._emptiness(group)
      ):
        num_free = len(group.free())
        slots = other.slots_in('decoding') + other.slots_in('ready')
        yield other, self._by_length(other, slots[:num_free])

  def _emptiness(self, group):
    return len(group.free()), self._groups.index(group)  # among equally empty groups the later

  def _can_move(self, group: _Group) -> bool:
    """Returns whether the group is in no call."""
    return all(group is not call.group for call in self._calls)

  def _by_length(self, group, slots):
    """Sorts slots by the number of ids to prefill: similar ones are cut into similar chunks."""
    return sorted(slots, key=lambda b: len(group.rows[b].ids))
