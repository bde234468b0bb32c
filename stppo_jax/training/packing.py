"""Packing: puts the rows of a batch into bins, several per bin, so that there is little padding.

On the host, `pack` gives each row of a step its place. On the device a `Layout` moves token arrays
between rows [B,T], which the algorithms use, and the bins [R,P] of one micro-batch, which a model
computes:

  rows  a a a a . .      bins  b b b b b b c c
        b b b b b b            a a a a . . . .
        c c . . . .

A row is never split. It ends with its last agent token: what follows has no influence. Its first
token has no log-prob and no state before it; column 0 of what comes back is 0.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import TypeVar

import chex
import flax
import jax
from jax.extend.core import jaxpr_as_fun
import jax.numpy as jnp
import numpy as np

Tree = TypeVar('Tree')  # a tree of arrays
Array = jax.Array | np.ndarray


@flax.struct.dataclass
class Packing:
  """The place of each row. Bins are numbered across micro-batches.

  With R bins per micro-batch, micro-batch j has the bins j R to (j + 1) R - 1.
  """

  bin: Array  # [B] int32
  offset: Array  # [B] int32, the column of its first token
  length: Array  # [B] int32, its tokens; 0: it is in no bin


@flax.struct.dataclass
class Step:
  """One optimizer step: its rows of the batch, and their place in the bins."""

  rows: Array  # [b] int32, rising
  packing: Packing  # the bins of these rows


@flax.struct.dataclass
class Layout:
  """One micro-batch: the token in each place of the bins, and the place of each token."""

  row: jax.Array  # [R,P] int32
  position: jax.Array  # [R,P] int32, within the row
  live: jax.Array  # [R,P] bool, false in padding
  slot: jax.Array  # [B,T] int32, among the R P of the bins
  owned: jax.Array  # [B,T] bool, true for tokens of this micro-batch

  @property
  def predicted(self) -> jax.Array:
    """True [B,T] for tokens of this micro-batch, except for the first token of each row."""
    num_tokens = self.owned.shape[1]
    columns = jnp.arange(num_tokens)
    return self.owned & (columns > 0)

  @property
  def segments(self) -> jax.Array:
    """Ids [R,P] int32 that distinguish the rows of a bin; -1 in padding."""
    return jnp.where(self.live, self.row, -1)

  def pack(self, x: jax.Array) -> jax.Array:
    """Moves x [B,T,..] to the bins [R,P,..]; 0 in padding."""
    by_slot = x[self.row, self.position]
    return _where(self.live, by_slot)

  def unpack(self, y: jax.Array) -> jax.Array:
    """Moves y [R,P] to the rows [B,T]; 0 for first tokens and those of other micro-batches."""
    by_token = self.unpack_all(y)
    return jnp.where(self.predicted, by_token, 0)

  def unpack_all(self, y: jax.Array) -> jax.Array:
    """Moves y [R,P,..] to the rows [B,T,..]; 0 for tokens of other micro-batches."""
    rest = y.shape[2:]
    by_slot = y.reshape(-1, *rest)
    by_token = by_slot[self.slot]
    return _where(self.owned, by_token)


class RowLayout:
  """The layout of rows [B,T] that are computed as they are, without bins: see `Layout`."""

  def __init__(self, shape: tuple[int, ...]):
    self.predicted = jnp.ones(shape, bool)

  def pack(self, x: jax.Array) -> jax.Array:
    """Returns x."""
    return x

  def unpack(self, y: jax.Array) -> jax.Array:
    """Returns y."""
    return y


def num_tokens(steps: Sequence[Step]) -> int:
  """Counts the tokens of the rows of these steps."""
  lengths = [step.packing.length for step in steps]
  return sum(int(length.sum()) for length in lengths)


def pack(
    lengths: np.ndarray, num_bins: int, capacities: Sequence[int], shared: bool = True
) -> Packing:
  """Packs rows of the given lengths [B] into micro-batches of `num_bins` bins; NumPy, on the host.

  Micro-batches are filled one after the other. Each takes the longest rows that are left, and puts
  each of them into the first bin that has room. All bins of a micro-batch have the same capacity.
  It is the one of the rising `capacities` that leaves the least padding, among those that hold the
  longest row. B / num_bins micro-batches, rounded up, are always enough, because each but the last
  holds a row in every bin. Bins that are not `shared` hold one row each, from their first column.
  """
  lengths = np.asarray(lengths, np.int32)
  chex.assert_rank(lengths, 1)
  bins = np.zeros_like(lengths)
  offsets = np.zeros_like(lengths)
  longest_first = np.argsort(-lengths, kind='stable')
  left = [row for row in longest_first if lengths[row]]
  first_bin = 0  # the first one in the micro-batch
  while left:
    longest = lengths[left[0]]
    places = {}  # by the capacity with the least padding, the smallest among equals
    fullest = 0.0
    for capacity in capacities:
      if capacity < longest:
        continue
      candidate = _first_fit(lengths, left, num_bins, capacity, shared)
      num_filled = sum(int(lengths[row]) for row in candidate)
      size = num_bins * capacity
      fill = np.round(num_filled / size, 2)
      if not places or fill > fullest:
        places = candidate
        fullest = fill
    for row, place in places.items():
      chosen, offset = place
      bins[row] = first_bin + chosen
      offsets[row] = offset
    left = [row for row in left if row not in places]
    first_bin += num_bins
  return Packing(bins, offsets, lengths)


def num_computed(packing: Packing, num_bins: int, capacities: Sequence[int]) -> int:
  """Counts the tokens that a model computes for a Packing on the host, padding included."""
  longest = np.zeros(len(packing.bin), np.int64)  # end of the longest bin of each micro-batch
  ends = packing.offset + packing.length
  micro_batches = packing.bin // num_bins
  np.maximum.at(longest, micro_batches, ends)
  longest = longest[longest > 0]
  chosen = np.searchsorted(capacities, longest)
  columns = np.asarray(capacities)[chosen]
  return num_bins * int(columns.sum())


def stack(steps: Sequence[Step]) -> Step:
  """Stacks Steps of equally many rows along a leading axis."""

  def join(*leaves):
    return np.stack(leaves)

  return jax.tree.map(join, *steps)


def step_shapes(*axes: int) -> Step:
  """Returns the shapes of a Step: axes are [b], or [steps,b] for stacked ones."""
  whole: Any = jax.ShapeDtypeStruct(axes, np.int32)
  return Step(whole, Packing(whole, whole, whole))


def num_micro_batches(packing: Packing, num_bins: int) -> jax.Array:
  """Counts the micro-batches that hold anything: a scalar."""
  is_used = packing.length > 0
  micro_batches = packing.bin // num_bins
  counts = jnp.where(is_used, micro_batches + 1, 0)
  return counts.max()


def sum_over(
    function: Callable[[Layout], Tree],
    packing: Packing,
    num_bins: int,
    capacities: Sequence[int],
    num_tokens: int,
) -> Tree:
  """Returns the sum of function(Layout) over every non-empty micro-batch, for rows of `num_tokens`.

  Choice: one program for any number of micro-batches, with a branch for each of `capacities`: a
  micro-batch is computed on as few columns as hold its bins.
  """

  def compute(columns, j):
    micro_batch = layout(packing, j, num_bins, columns, num_tokens)
    return function(micro_batch)

  branches = [functools.partial(compute, columns) for columns in capacities]
  # The trace that shows the shapes of the sum is the first branch: tracing it again takes seconds.
  jaxpr, shapes = jax.make_jaxpr(branches[0], return_shape=True)(0)
  branches[0] = _as_function(jaxpr, shapes)
  zeros = jax.tree.map(jnp.zeros_like, shapes)

  def add(j, total):
    chosen = which_capacity(packing, j, num_bins, capacities)
    summand = jax.lax.switch(chosen, branches, j)
    return jax.tree.map(jnp.add, total, summand)

  num = num_micro_batches(packing, num_bins)
  return jax.lax.fori_loop(0, num, add, zeros)


def _as_function(jaxpr, shapes):
  """Returns the function that was traced, whose results have these shapes."""
  compute = jaxpr_as_fun(jaxpr)
  structure = jax.tree.structure(shapes)
  return lambda *arguments: jax.tree.unflatten(structure, compute(*arguments))


def which_capacity(
    packing: Packing, j: jax.Array, num_bins: int, capacities: Sequence[int]
) -> jax.Array:
  """Returns the index of the first of the rising `capacities` that micro-batch j fits in."""
  is_in_j = packing.bin // num_bins == j
  ends = packing.offset + packing.length
  ends = jnp.where(is_in_j, ends, 0)
  columns = jnp.asarray(capacities)
  return jnp.searchsorted(columns, ends.max())


def only(packing: Packing, rows: jax.Array, num_bins: int) -> Packing:
  """Keeps the bins that hold any of `rows` [B] bool, moved to the front, and drops the others."""
  num_rows = packing.bin.shape[0]
  max_micro_batches = -(-num_rows // num_bins)
  max_bins = max_micro_batches * num_bins
  rows = rows & (packing.length > 0)
  is_kept = jnp.zeros(max_bins, bool)
  is_kept = is_kept.at[packing.bin].max(rows)
  places = jnp.cumsum(is_kept) - 1
  bins = places[packing.bin]
  is_row_kept = is_kept[packing.bin]
  length = jnp.where(is_row_kept, packing.length, 0)
  return dataclasses.replace(packing, bin=bins, length=length)


def layout(packing: Packing, j: jax.Array, num_bins: int, capacity: int, num_tokens: int) -> Layout:
  """Returns the Layout of micro-batch j: bins of P = `capacity`, rows of T = `num_tokens`."""
  is_in_j = packing.bin // num_bins == j
  here = is_in_j & (packing.length > 0)
  size = num_bins * capacity
  bin_in_j = packing.bin - j * num_bins
  start = bin_in_j * capacity + packing.offset
  start = jnp.where(here, start, size)
  # A slot holds a token of the last row that starts at or before it, if that row is long enough.
  order = jnp.argsort(start)
  slots = jnp.arange(size)
  starts = start[order]
  before = jnp.searchsorted(starts, slots, side='right')
  last = jnp.maximum(before - 1, 0)
  row = order[last]
  position = slots - start[row]
  is_long_enough = position < packing.length[row]
  live = (before > 0) & is_long_enough
  columns = jnp.arange(num_tokens)
  is_in_row = columns < packing.length[:, None]
  owned = here[:, None] & is_in_row
  position = jnp.where(live, position, 0)
  slot = start[:, None] + columns
  in_bins = lambda x: x.reshape(num_bins, capacity)
  return Layout(
      row=in_bins(row),
      position=in_bins(position),
      live=in_bins(live),
      slot=jnp.where(owned, slot, 0),
      owned=owned,
  )


def _where(mask, x):
  """Returns x [R,P,..] where `mask` [R,P] is true, else 0."""
  more_axes = tuple(range(mask.ndim, x.ndim))
  mask = jnp.expand_dims(mask, more_axes)
  return jnp.where(mask, x, 0)


def _first_fit(lengths, rows, num_bins, capacity, shared):
  """Places as many of `rows`, in this order, as fit, each into the first bin that has room.

  Returns {row: (bin, offset)}.
  """
  filled = np.zeros(num_bins, np.int32)
  places = {}
  for row in rows:
    fits = filled + lengths[row] <= capacity
    if not shared:
      fits &= filled == 0
    if fits.any():
      chosen = int(fits.argmax())
      offset = int(filled[chosen])
      places[row] = (chosen, offset)
      filled[chosen] += lengths[row]
  return places
