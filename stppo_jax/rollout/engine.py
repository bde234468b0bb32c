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
share a group, and the number of cache slots of a group. The other rows of a group do not change a
row's numbers. The number of cache slots may change their last digit, because matmuls sum in another
order. So two runs with threads are bitwise equal only with one slot bucket.
"""

import collections
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

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.rollout import env_pool
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.rollout import sequences as sequences_lib
from stppo_jax.rollout import slots as slots_lib
from stppo_jax.rollout.sequences import Prompt
from stppo_jax.rollout.sequences import Report
from stppo_jax.rollout.sequences import TurnCompletion

CALLS = 2  # in progress at once: queued on an accelerator, side by side on a CPU


def run(
    sampler: sampler_lib.Sampler,
    params: sequences_lib.PolicyParams,
    prompts: Sequence[Prompt],
    keys: jax.Array,
    respond: sequences_lib.Respond,
    threads: int = 0,
) -> Report:
  """Plays every sequence to its end, see `sequences.Play`. They start in the given order."""
  chex.assert_equal(len(prompts), keys.size)
  with contextlib.ExitStack() as resources:
    pool = resources.enter_context(env_pool.EnvPool(respond, threads))
    engine = _Engine(sampler, params, prompts, keys, pool, threads > 0, resources)
    engine.run()
    return engine.report


@dataclasses.dataclass(eq=False, kw_only=True)
class _Sequence(slots_lib.ActiveSequence):
  """A sequence with the parts of its turn so far."""

  index: int
  sampled: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)  # (tokens, log-probs)
  # (experts, row, tokens) of the calls that read or sampled it, where experts are recorded.
  routes: list[tuple[Any, int, int]] = dataclasses.field(default_factory=list)

  def end_prefill(self, result: sampler_lib.PrefillResult, row: int) -> None:
    for routes, counts in result.chunks:
      self.routes.append((routes, row, counts[row]))
    super().end_prefill(result, row)

  def add(self, sampled: sampler_lib.DecodeResult) -> None:
    """Adds the tokens of its row of a `DecodeResult` on the host."""
    row = self.slot
    count = int(sampled.counts[row])
    tokens = sampled.tokens[row, :count]
    logp = sampled.logp[row, :count]
    self.sampled.append((tokens, logp))
    if sampled.routes is not None:
      self.routes.append((sampled.routes, row, count))
    self.length += count
    self.budget -= count
    self.stop_state = int(sampled.stop_state[row])

  def end_turn(self) -> TurnCompletion:
    """Returns the turn, and waits for the environment."""
    tokens, logp = zip(*self.sampled)
    turn = types.Turn(np.concatenate(tokens), np.concatenate(logp))
    if self.routes:
      parts = [np.asarray(routes)[row, :count] for routes, row, count in self.routes]
      turn.routes = np.concatenate(parts)
    self.sampled = []
    self.routes = []
    self.phase = 'waiting'
    return TurnCompletion(self.index, turn)


class _SharedPrompt(NamedTuple):
  """A prefilled prompt that the next sequence in the queue has too."""

  ids: tuple[int, ...]
  prefilled: slots_lib.Prefilled
  source: int  # its row


@dataclasses.dataclass(eq=False)
class _Queue:
  """Sequences that wait for a slot, and the parameters that sample them."""

  params: Any
  waiting: collections.deque[_Sequence] = dataclasses.field(default_factory=collections.deque)
  shared: _SharedPrompt | None = None


class _Group(slots_lib.SlotGroup):
  """Slots that take their sequences from a queue."""

  # The call in progress, if there is one.
  sampled: sampler_lib.DecodeResult
  prefilled: futures.Future  # done once all prefill before it is
  done: futures.Future  # once all is sampled

  def __init__(self, sampler, queue, thread):
    super().__init__(sampler, queue.params)
    self.queue = queue
    self.thread = thread  # it waits for the device

  def num_decodable(self) -> int:
    """Counts the rows that the next call could decode."""
    num_new = min(len(self.free()), len(self.queue.waiting))
    num_ready = len(self.rows_in('ready'))
    num_decoding = len(self.rows_in('decoding'))
    return num_new + num_ready + num_decoding


class _Engine:
  """The state of one run. Each set of parameters has its own queue and groups."""

  def __init__(self, sampler, params, prompts, keys, pool, is_threaded, resources):
    self.report = Report()
    self._sampler = sampler
    if not isinstance(params, list):
      params = [params]
    self._queues = [_Queue(one) for one in params]
    # A CPU runs the programs of one thread in order, and those of several side by side: two groups
    # take two thirds of the time. Programs of several devices stay in order, since each could wait
    # for the other.
    devices = jax.tree.leaves(params)[0].devices()
    platforms = [device.platform for device in devices]
    self._is_one_cpu = platforms == ['cpu']
    flat_keys = keys.reshape(-1)
    self._keys = np.asarray(jax.random.key_data(flat_keys))
    self._pool = pool
    self._is_threaded = is_threaded
    self._resources = resources
    self._groups: list[_Group] = []
    self._max_groups = sampler.num_groups // len(params)  # per queue
    self._active: dict[int, _Sequence] = {}  # sequences with a slot, by their number
    self._running: list[_Group] = []  # their calls are in progress, the oldest first
    self._clock = time.perf_counter()

    first_turns = [(i, prompt) for i, prompt in enumerate(prompts) if prompt.budget > 0]
    self._unstarted = collections.deque(first_turns)
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
    while self._num_waiting() or self._active:
      while len(self._running) < CALLS:
        group = self._next_group()
        if group is None:
          break
        self._launch(group)
        self._running.append(group)
      self._wait()
      for group in self._awaited():
        if group.done.done():
          self._running.remove(group)
          self._pool.step(self._finish(group))
      self._take_prompts()
    self.report.prefill_tokens = sum(group.prefill_tokens for group in self._groups)

  def _awaited(self):
    """Returns the groups whose calls may finish next: all with threads, else only the oldest."""
    if self._is_threaded:
      return list(self._running)
    return self._running[:1]

  def _wait(self):
    """Waits until a call is prefilled or done, or a response came that could start one."""
    prefilling = []
    decoding = []
    for group in self._awaited():
      if group.prefilled.done():
        decoding.append(group.done)
      else:
        prefilling.append(group.prefilled)
    events = prefilling + decoding
    if len(self._running) < CALLS:
      events += self._pool.in_progress
    if events:
      futures.wait(events, return_when=futures.FIRST_COMPLETED)
    if prefilling:
      self._lap('prefill')
    elif decoding:
      self._lap('decode')
    else:
      self._lap('env')

  def _lap(self, phase):
    """Adds the time since the last lap to a phase."""
    now = time.perf_counter()
    self.report.seconds[phase] += now - self._clock
    self._clock = now

  def _start(self, count):
    """Queues the next `count` sequences that have not started."""
    for _ in range(min(count, len(self._unstarted))):
      index, prompt = self._unstarted.popleft()
      self._enqueue(index, prompt)

  def _enqueue(self, index, prompt):
    """Queues a sequence for its first turn."""
    key = self._keys[index]
    sequence = _Sequence(
        index=index, ids=prompt.ids, budget=prompt.budget, key=key, stop_state=prompt.stop_state
    )
    # Sequences are numbered by environment, then by role. With a policy per role, this is the role.
    number = index % len(self._queues)
    self._queues[number].waiting.append(sequence)

  def _num_waiting(self):
    return sum(len(queue.waiting) for queue in self._queues)

  def _next_group(self):
    """Returns the group, of those not in a call, in which most rows can be decoded."""
    width = self._sampler.width
    if self._running and not self._num_waiting() and len(self._active) <= width:
      return None  # The last rows should share a group, and rows in a call cannot move.
    idle = [group for group in self._groups if group not in self._running]
    for queue in self._queues:
      num_groups = sum(group.queue is queue for group in self._groups)
      counts = [group.num_decodable() for group in idle if group.queue is queue]
      most = max(counts, default=0)
      wanted = min(width, len(queue.waiting))
      if num_groups < self._max_groups and most < wanted:
        return self._add_group(queue)
    group = max(idle, key=_Group.num_decodable, default=None)  # the first of several
    if group is None or not group.num_decodable():
      return None
    return group

  def _add_group(self, queue):
    thread = futures.ThreadPoolExecutor(1, 'group')
    self._resources.enter_context(thread)
    group = _Group(self._sampler, queue, thread)
    self._groups.append(group)
    return group

  def _launch(self, group):
    """Fills free slots, prefills, and starts to decode; returns before the device is done."""
    self._admit(group)
    group.last_prefill = None
    if not self._sampler.in_place:
      self._prefill_prompts(group)
      self._prefill_copies(group, group.rows_in('ready'))
      for other in self._emptier_groups(group):
        rows = other.rows_in('decoding') + other.rows_in('ready')
        num_free = len(group.free())
        self._prefill_copies(group, rows[:num_free])
    elif self._should_prefill(group):
      group.prefill_in_place()
    self._lap('prefill')
    num_decoding = len(group.rows_in('decoding'))
    enough = sampling.round_up(num_decoding, 4) // 4
    if self._is_one_cpu:
      call = group.thread.submit(group.decode, enough)
      group.sampled = call.result()
    else:
      group.sampled = group.decode(enough)
    self._lap('decode')
    group.prefilled = group.thread.submit(jax.block_until_ready, group.last_prefill)
    group.done = group.thread.submit(jax.block_until_ready, group.sampled)

  def _should_prefill(self, group):
    """Returns whether to prefill in place. This computes all rows: a few wait while many decode."""
    width = self._sampler.width
    num_ready = len(group.rows_in('ready'))
    num_decoding = len(group.rows_in('decoding'))
    is_few = 4 * num_ready < width
    are_many = 16 * num_decoding >= width
    return num_ready > 0 and not (is_few and are_many)

  def _prefill_prompts(self, group):
    """Prefills each prompt once. Other sequences with it, now or later, get copies of the row."""
    by_prompt: dict[tuple[int, ...], list[_Sequence]] = {}
    for sequence in group.rows_in('ready'):
      if sequence.length == 0:
        prompt = tuple(sequence.ids)
        by_prompt.setdefault(prompt, []).append(sequence)
    queue = group.queue
    next_prompt: tuple[int, ...] = ()
    if queue.waiting:
      next_prompt = tuple(queue.waiting[0].ids)
    shared = queue.shared
    if shared is not None:
      copies = by_prompt.pop(shared.ids, [])
      sources = [shared.source] * len(copies)
      group.put(shared.prefilled, copies, sources)
      self.report.shared_tokens += len(shared.ids) * len(copies)
      if shared.ids != next_prompt:
        queue.shared = None
    prompts = sorted(by_prompt, key=len)  # similar lengths are cut into similar chunks
    for batch in sampling.batched(prompts, self._sampler.prefill_rows):
      firsts = [by_prompt[prompt][0] for prompt in batch]
      prefilled = group.prefill_new(firsts)
      sequences = []
      sources = []
      for source, prompt in enumerate(batch):
        equal = by_prompt[prompt]
        num_copies = len(equal) - 1
        sequences += equal
        sources += [source] * len(equal)
        self.report.shared_tokens += len(prompt) * num_copies
      group.put(prefilled, sequences, sources)
      if next_prompt in batch:
        source = batch.index(next_prompt)
        queue.shared = _SharedPrompt(next_prompt, prefilled, source)

  def _prefill_copies(self, group, sequences):
    """Prefills rows out of place. Rows of another group move to this one."""
    by_length = sorted(sequences, key=lambda sequence: len(sequence.ids))
    for batch in sampling.batched(by_length, self._sampler.prefill_rows):
      home = batch[0].group
      slots = [sequence.slot for sequence in batch]
      if home is not group:
        for sequence, slot in zip(batch, group.free()):
          sequence.occupy(group, slot)
      group.prefill_copies(home, slots, batch)

  def _admit(self, group):
    """Gives the free slots to the next sequences."""
    waiting = group.queue.waiting
    for slot in group.free()[: len(waiting)]:
      sequence = waiting.popleft()
      self._check_room(sequence)
      sequence.occupy(group, slot)
      self._active[sequence.index] = sequence

  def _emptier_groups(self, group):
    """Yields groups whose rows should move to `group`, so that fewer groups are decoded."""
    if group.queue.waiting:
      return
    for other in self._groups:
      is_alike = other.queue is group.queue and other not in self._running
      if is_alike and self._emptiness(other) > self._emptiness(group):
        yield other

  def _emptiness(self, group):
    """Orders groups by their free slots. Of equally empty groups the later one is emptier."""
    return len(group.free()), self._groups.index(group)

  def _finish(self, group):
    """Returns the turns that ended with a call that is done."""
    group.done.result()
    sampled: Any = hosts.fetch(group.sampled)
    completions = []
    for sequence in group.rows_in('decoding'):
      sequence.add(sampled)
      if not sampled.alive[sequence.slot]:
        completions.append(sequence.end_turn())
    self.report.decode_steps += int(sampled.counts.max())
    self.report.sampled_tokens += int(sampled.counts.sum())
    self._lap('decode')
    return completions

  def _take_prompts(self):
    """Takes the prompts that the environments have given."""
    for index, prompt in self._pool.take_prompts():
      sequence = self._active.get(index)
      if prompt.budget <= 0:
        self._end_environment(index)
      elif sequence is None:
        self._enqueue(index, prompt)
      else:
        sequence.ids = prompt.ids
        sequence.budget = prompt.budget
        sequence.stop_state = prompt.stop_state
        sequence.phase = 'ready'
        self._check_room(sequence)
    self._lap('env')

  def _end_environment(self, index):
    """Frees the slots of the environment of a sequence, and starts the next environment."""
    first = index - index % self._rows_per_env
    for i in range(first, first + self._rows_per_env):
      sequence = self._active.pop(i, None)
      if sequence is not None:
        sequence.leave()
    self._start(1)

  def _check_room(self, sequence):
    length = sequence.length_with_ids
    if length == 0:
      raise ValueError('a sequence without any context cannot be sampled: give it a prompt')
    if length + sequence.budget > self._sampler.max_slots:
      raise ValueError(
          f'{length} tokens and a turn of {sequence.budget} do not fit in '
          f'max_slots={self._sampler.max_slots}: lower the budget'
      )
