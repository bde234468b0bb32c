"""Rows of a KV cache: sequences in slots, which are prefilled and decoded together.

`engine` plays episodes in several groups of slots. The `scheduler` of the gateway has one group, in
which each request has a slot.

A slot of this module is a row of the cache, for one sequence. The cache slots that
`Sampler.max_slots` and `Context.slots` count are the S places for tokens in each row.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from stppo_jax.rollout import sampler as sampler_lib


@dataclasses.dataclass(eq=False)
class ActiveSequence:
  """A sequence in progress, and its state."""

  ids: Sequence[int] = ()  # to prefill
  budget: int = 0  # tokens left for its turn
  key: Any = 0  # jax.random.key_data; token number i is drawn with fold_in(key, i)
  settings: Sequence[float] | None = None  # see `sampling.make_draw`; None: the sampler's
  length: int = 0  # tokens in its context
  phase: str = 'ready'  # 'ready' to prefill, 'decoding', or 'waiting' for its next turn
  stop_state: int = 0  # state of the stop automaton
  group: Any = None  # the SlotGroup in which it has a slot
  slot: int = 0

  @property
  def length_with_ids(self) -> int:
    """Length of the context after prefill."""
    return self.length + len(self.ids)

  def occupy(self, group: 'SlotGroup', slot: int) -> None:
    """Moves to a slot."""
    self.leave()
    self.group = group
    self.slot = slot
    group.rows[slot] = self

  def leave(self) -> None:
    """Frees the slot."""
    if self.group is not None:
      self.group.rows[self.slot] = None

  def end_prefill(self, result: sampler_lib.PrefillResult, row: int) -> None:
    """Moves on to decoding. Its context is in a row of the result."""
    del result, row
    self.length = self.length_with_ids
    self.ids = ()
    self.phase = 'decoding'


Sequences = Sequence[ActiveSequence]


class Prefilled(NamedTuple):
  """Rows after a prefill."""

  context: sampler_lib.Context
  result: sampler_lib.PrefillResult


class SlotGroup:
  """Slots that are decoded together, with the same parameters."""

  def __init__(self, sampler: sampler_lib.Sampler, params: object):
    fewest_slots = sampler.slot_buckets[0]
    self.rows: list[Any] = [None] * sampler.width  # a sequence per slot, None where it is free
    self.context = sampler.empty(sampler.width, fewest_slots)
    self.prefill_tokens = 0  # so far
    self.last_prefill: jax.Array | None = None  # to wait for
    self._sampler = sampler
    self.params = params

  def rows_in(self, phase: str) -> list[Any]:
    """Returns the sequences in a phase, in the order of their slots."""
    rows = [row for row in self.rows if row is not None]
    return [row for row in rows if row.phase == phase]

  def free(self) -> list[int]:
    """Returns the slots without a sequence."""
    slots = enumerate(self.rows)
    return [slot for slot, row in slots if row is None]

  def reserve(self, length: int) -> None:
    """Makes room for `length` tokens per row."""
    self.context = self._sampler.with_room(self.context, length)

  def prefill_new(self, sequences: Sequences) -> Prefilled:
    """Prefills at most `prefill_rows` new sequences, in a separate context."""
    sampler = self._sampler
    lengths = [len(sequence.ids) for sequence in sequences]
    self.reserve(max(lengths))
    context = sampler.empty(sampler.prefill_rows, self.context.slots)
    return self._prefill(context, sequences)

  def prefill_copies(self, home: 'SlotGroup', slots: Sequence[int], sequences: Sequences) -> None:
    """Prefills copies of at most `prefill_rows` rows of `home`, for the slots of the sequences."""
    sampler = self._sampler
    lengths = [sequence.length_with_ids for sequence in sequences]
    needed = max(home.context.slots, *lengths)
    self.reserve(needed)
    context = sampler.take(home.context, slots)
    context = sampler.with_room(context, self.context.slots)
    prefilled = self._prefill(context, sequences)
    sources = range(len(sequences))
    self.put(prefilled, sequences, sources)

  def prefill_in_place(self) -> None:
    """Prefills the rows that are ready where they are. The others do not change."""
    ready = self.rows_in('ready')
    needed = max(sequence.length_with_ids for sequence in ready)
    self.reserve(needed)
    empty = ActiveSequence()
    rows = [row or empty for row in self.rows]
    context, result = self._prefill(self.context, rows)
    self.context = context
    for sequence in ready:
      sequence.end_prefill(result, sequence.slot)

  def put(self, prefilled: Prefilled, sequences: Sequences, sources: Sequence[int]) -> None:
    """Copies the row sources[i] of `prefilled` to the slot of sequences[i]."""
    sampler = self._sampler
    taken = prefilled.context
    slots = [sequence.slot for sequence in sequences]
    self.reserve(taken.slots)
    size = sampler.prefill_rows
    for start in range(0, len(slots), size):
      part = slice(start, start + size)
      targets = slots[part]
      rows = sources[part]
      self.context = sampler.put(self.context, taken, targets, rows)
    for sequence, source in zip(sequences, sources):
      sequence.end_prefill(prefilled.result, source)

  def mask(self, allowed: np.ndarray) -> jax.Array:
    """Restricts the next token of each slot, see `Sampler.mask`."""
    self.context, log_mass = self._sampler.mask(self.context, allowed)
    return log_mass

  def decode(self, enough: int, most_steps: int | None = None) -> sampler_lib.DecodeResult:
    """Starts to decode, until `enough` rows have stopped. Does not wait for the device."""
    sampler = self._sampler
    decoding = self.rows_in('decoding')
    steps = self._reserve_steps(decoding, most_steps)
    inputs = self._decode_inputs(self.rows, sampler.width)
    context = self.context
    context, sampled = sampler.decode(self.params, context, inputs, steps, enough)
    self.context = context
    return sampled

  def decode_few(
      self, sequences: Sequences, most_steps: int | None = None
  ) -> sampler_lib.DecodeResult:
    """Decodes at most `few_rows[-1]` sequences: row i of the result belongs to sequences[i].

    They have a small separate context, because a call computes all rows of its context.
    """
    sampler = self._sampler
    enough = sampler.width
    steps = self._reserve_steps(sequences, most_steps)
    slots = [sequence.slot for sequence in sequences]
    rows = range(len(slots))
    size = min(size for size in sampler.few_rows if size >= len(slots))
    few = sampler.take(self.context, slots, size)
    inputs = self._decode_inputs(sequences, size)
    few, sampled = sampler.decode(self.params, few, inputs, steps, enough)
    self.context = sampler.put(self.context, few, slots, rows)
    return sampled

  def _reserve_steps(self, sequences: Sequences, most_steps: int | None) -> int:
    """Makes room for a decode call. Returns its largest number of tokens per row."""
    longest = max(sequence.length for sequence in sequences)
    self.reserve(longest + 1)
    room = self.context.slots - longest
    return room if most_steps is None else min(room, most_steps)

  def _decode_inputs(self, rows, num_rows):
    """Returns the inputs of a decode call: rows[i] is the sequence in row i, or None."""
    inputs = self._sampler.idle_rows(num_rows)
    for i, row in enumerate(rows):
      if row is None:
        continue
      inputs.lengths[i] = row.length  # an idle row is also written to, behind its end
      if row.phase != 'decoding':
        continue
      inputs.keys[i] = row.key
      inputs.stop_state[i] = row.stop_state
      inputs.budgets[i] = row.budget
      if row.settings is not None:
        inputs.settings[i] = row.settings
    return inputs

  def _prefill(self, context, sequences):
    """Prefills the ids of the sequences in the first rows of `context`."""
    ids = [sequence.ids for sequence in sequences]
    starts = [sequence.length for sequence in sequences]
    self.prefill_tokens += sum(map(len, ids))
    sampler = self._sampler
    context, result = sampler.prefill(self.params, context, ids, starts)
    if result.lengths is not None:
      self.last_prefill = result.lengths
    return Prefilled(context, result)
