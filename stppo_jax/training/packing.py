"""Packing: puts the rows of a batch into bins, several per bin, so that there is little padding.

On the host, `pack` gives each token of a step's rows its place. On the device a `Layout` moves
token arrays between rows [B,T], which the algorithms use, and the bins [R,P] of one micro-batch,
which a model computes:

  rows  a a a a . .      bins  b b b b b b c c
        b b b b b b            a a a a . . . .
        c c . . . .

A row is never split. It ends with its last agent token: what follows has no influence. Its first
token has no log-prob and no state before it; column 0 of what comes back is 0.

Rows of a bin may share the places of a prefix that they have in common: the prompt of a group, or
the beginning of the rows of an episode. A bin is then a forest. Each token has one place, after the
places of the tokens before it, and a token attends to itself and to the tokens on its path:

  rows  p q a b      bin      p q a b c d e        the children of q are a and c,
        p q c d      parents  - p q a q c d        and those of d are e
        p q c d e    ends     7 7 4 4 7 7 7

Where several devices compute a bin together (`attention.ContextShards`), the layout has shards of
bins, and [R,P] are their number and their places.

The places are in depth-first order, so that the continuations of a token in any row are the places
up to its end. Masks, advantages and returns belong to a row, log-probs and values to a place.
`unpack` gives each row the numbers of its places, and `add_up` is its transpose.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import Any
from typing import TypeVar

import chex
import flax
import jax
from jax.extend.core import jaxpr_as_fun
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import attention

Tree = TypeVar('Tree')  # a tree of arrays
Array = jax.Array | np.ndarray


@flax.struct.dataclass
class Packing:
  """The place of each token. Bins are numbered across micro-batches.

  With R bins per micro-batch, micro-batch j has the bins j R to (j + 1) R - 1.
  """

  bin: Array  # [B] int32
  offset: Array  # [B] int32, the place of the row's first token in its bin
  length: Array  # [B] int32, the tokens of the row; 0: it is in no bin
  # The place [B,T] int32 of each token in its bin, rising along a row. None: no row shares a place,
  # and the tokens of a row are next to each other.
  place: Array | None = None
  num_tokens: int = flax.struct.field(pytree_node=False, default=0)  # T

  @property
  def end(self) -> Array:
    """The place [B] after the last token of each row; of no meaning for a row in no bin."""
    if self.place is None:
      return self.offset + self.length
    is_last = np.arange(self.place.shape[1]) == self.length[:, None] - 1
    return ((self.place + 1) * is_last).sum(axis=1)


@flax.struct.dataclass
class OptimizerStep:
  """One optimizer step: its rows of the batch, and their place in the bins."""

  rows: Array  # [b] int32, rising
  packing: Packing  # the bins of these rows


@flax.struct.dataclass
class Layout:
  """One micro-batch: the token in each place of the bins, and the place of each token."""

  row: jax.Array  # [R,P] int32, the first of the rows that have the token
  position: jax.Array  # [R,P] int32, within the row
  live: jax.Array  # [R,P] bool, false in padding
  # What the token in each place [R,P] attends to; None: to the tokens of its row before it.
  paths: attention.Paths | None
  slot: jax.Array  # [B,T] int32, among the R P of the bins; R P for other micro-batches
  owned: jax.Array  # [B,T] bool, true for tokens of this micro-batch

  @property
  def predicted(self) -> jax.Array:
    """True [B,T] for tokens of this micro-batch, except for the first token of each row."""
    num_tokens = self.owned.shape[1]
    columns = jnp.arange(num_tokens)
    return self.owned & (columns > 0)

  @property
  def segments(self) -> jax.Array:
    """Ids [R,P] int32 that distinguish the rows of a bin, if none shares a place; -1 in padding."""
    return jnp.where(self.live, self.row, -1)

  @property
  def num_rows(self) -> jax.Array:
    """The number of rows [R,P] float32 that have the token in each place."""
    if self.paths is None:
      return self.live.astype(jnp.float32)
    return self._scattered_sum(self.owned.astype(jnp.float32))

  def pack(self, x: jax.Array) -> jax.Array:
    """Moves x [B,T,..], the same for all rows that share a place, to the bins [R,P,..]; else 0."""
    by_slot = x[self.row, self.position]
    return _where(self.live, by_slot)

  def add_up(self, x: jax.Array) -> jax.Array:
    """Sums x [B,T,..] over the rows that share a place: [R,P,..]. The transpose of `unpack`."""
    if self.paths is None:
      return self.pack(_where(self.predicted, x))
    return self._scattered_sum(_where(self.predicted, x))

  def unpack(self, y: jax.Array) -> jax.Array:
    """Moves y [R,P,..] to the rows [B,T,..]; 0 for first tokens and other micro-batches."""
    return _where(self.predicted, self._gathered(y))

  def unpack_all(self, y: jax.Array) -> jax.Array:
    """Moves y [R,P,..] to the rows [B,T,..]; 0 for tokens of other micro-batches."""
    return _where(self.owned, self._gathered(y))

  def _gathered(self, y):
    rest = y.shape[2:]
    by_slot = y.reshape(-1, *rest)
    return by_slot.at[self.slot].get(mode='clip')

  def _scattered_sum(self, x):
    rest = x.shape[2:]
    zeros = jnp.zeros((self.row.size, *rest), x.dtype)
    return zeros.at[self.slot].add(x, mode='drop').reshape(*self.row.shape, *rest)


class RowLayout:
  """The layout of rows [B,T] that are computed as they are, without bins: see `Layout`."""

  def __init__(self, shape: tuple[int, ...]):
    self.predicted = jnp.ones(shape, bool)

  def pack(self, x: jax.Array) -> jax.Array:
    """Returns x."""
    return x

  def add_up(self, x: jax.Array) -> jax.Array:
    """Returns x."""
    return x

  def unpack(self, y: jax.Array) -> jax.Array:
    """Returns y."""
    return y


def context_shards_of(mesh: jax.sharding.Mesh) -> attention.ContextShards | None:
  """Returns how the devices of `context` cut bins, if there are several of them; else None."""
  if mesh.shape['context'] == 1:
    return None
  from stppo_jax.models import context_parallel

  return context_parallel.DeviceShards(mesh)


def num_tokens(steps: Sequence[OptimizerStep]) -> int:
  """Counts the tokens of the rows of these steps."""
  lengths = [step.packing.length for step in steps]
  return sum(int(length.sum()) for length in lengths)


def num_places(packing: Packing) -> int:
  """Counts the places of a Packing on the host: a token that several rows share counts once."""
  ends = np.zeros(len(packing.bin), np.int64)  # by bin, which has no gaps
  np.maximum.at(ends, packing.bin, packing.end)
  return int(ends.sum())


def pack(
    lengths: np.ndarray,
    num_bins: int,
    length_buckets: Sequence[int],
    shared: bool = True,
    tokens: np.ndarray | None = None,
    num_tokens: int | None = None,
) -> Packing:
  """Packs rows of the given lengths [B] into micro-batches of `num_bins` bins; NumPy, on the host.

  Micro-batches are filled one after the other, and so are their bins. A bin takes the longest row
  that is left, and then the longest one that fits, until none does. All bins of a micro-batch have
  the same capacity. It is the one of the rising `length_buckets` that serves the most tokens of
  rows per place, among those that hold the longest row. B / num_bins micro-batches, rounded up, are
  always enough, because each but the last holds a row in every bin. Bins that are not `shared` hold
  one row each, from their first place. `num_tokens` is T, by default the largest bucket.

  With `tokens` [B,T], integers that tell tokens apart, rows of a bin share the places of their
  common prefixes. A bin then prefers the rows that have most in common with it.
  """
  lengths = np.asarray(lengths, np.int32)
  chex.assert_rank(lengths, 1)
  num_tokens = num_tokens or length_buckets[-1]
  bins = np.zeros_like(lengths)
  offsets = np.zeros_like(lengths)
  places = None
  if tokens is not None:
    places = np.zeros((len(lengths), num_tokens), np.int32)
  prefixes = _Prefixes(lengths, tokens)
  longest_first = np.argsort(-lengths, kind='stable')
  left = longest_first[lengths[longest_first] > 0]
  first_bin = 0  # the first one in the micro-batch
  while len(left):
    longest = lengths[left[0]]
    contents: list[list[int]] = []  # the rows of each bin of the best capacity
    most = 0.0
    for capacity in length_buckets:
      if capacity < longest:
        continue
      candidate = _fill(left, num_bins, capacity, shared, prefixes)
      num_served = sum(int(lengths[rows].sum()) for rows in candidate)
      served = np.round(num_served / (num_bins * capacity), 2)
      if not contents or served > most:
        contents = candidate
        most = served
    for number, rows in enumerate(contents, start=first_bin):
      bins[rows] = number
      prefixes.number_places(rows, offsets, places)
    placed = np.concatenate(contents)
    left = left[~np.isin(left, placed)]
    first_bin += num_bins
  return Packing(bins, offsets, lengths, places, num_tokens)


class _Prefixes:
  """The common prefixes of rows. Without `tokens` none has any."""

  def __init__(self, lengths, tokens=None):
    self.lengths = lengths
    num_rows = len(lengths)
    # The rank of each row in an order that puts equal prefixes together, and by rank the number of
    # first tokens that a row shares with the next.
    self._rank = np.zeros(num_rows, int)
    self._common = np.zeros(num_rows, np.int32)
    if tokens is None:
      self._rank[np.argsort(-lengths, kind='stable')] = np.arange(num_rows)
      return
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    sortable = [row.astype('>i8').tobytes() for row in rows]  # equal prefixes come together
    order = sorted(range(num_rows), key=lambda row: sortable[row])
    self._rank[order] = np.arange(num_rows)
    for rank, (row, following) in enumerate(itertools.pairwise(order)):
      self._common[rank] = _num_equal(rows[row], rows[following])

  def with_row(self, row):
    """Returns the number of first tokens that each row [B] shares with `row`."""
    rank = self._rank[row]
    before = np.minimum.accumulate(self._common[:rank][::-1])[::-1]
    after = np.minimum.accumulate(self._common[rank:-1])
    by_rank = np.concatenate([before, self.lengths[row : row + 1], after])
    return by_rank[self._rank]

  def number_places(self, rows, offsets, places):
    """Writes the offsets [B] and places [B,T], if there are any, of the rows of a bin."""
    rows = sorted(rows, key=lambda row: self._rank[row])
    end = 0
    previous = None
    for row in rows:
      common = 0
      if previous is not None:
        first, last = self._rank[previous], self._rank[row]
        common = int(self._common[first:last].min())
      num_own = self.lengths[row] - common
      offsets[row] = end
      if common:
        offsets[row] = offsets[previous]
        places[row, :common] = places[previous, :common]
      if places is not None:
        places[row, common : self.lengths[row]] = np.arange(end, end + num_own)
      end += num_own
      previous = row


def _num_equal(a, b):
  """Returns the length of the common prefix of two arrays."""
  shorter = min(len(a), len(b))
  differs = a[:shorter] != b[:shorter]
  return int(differs.argmax()) if differs.any() else shorter


def _fill(rows, num_bins, capacity, shared, prefixes):
  """Fills bins of a capacity with `rows`, which are sorted: returns the rows of each bin."""
  contents = []
  lengths = prefixes.lengths
  is_left = np.ones(len(rows), bool)
  for _ in range(num_bins):
    members: list[int] = []
    room = capacity
    common = np.zeros(len(rows), np.int32)  # tokens that the bin has already
    while shared or not members:
      fits = is_left & (lengths[rows] - common <= room)
      if not fits.any():
        break
      chosen = int(np.where(fits, common, -1).argmax())  # the first one of the best
      is_left[chosen] = False
      row = rows[chosen]
      room -= lengths[row] - common[chosen]
      members.append(int(row))
      common = np.maximum(common, prefixes.with_row(row)[rows])
    contents.append(members)
  return contents


def num_computed(packing: Packing, num_bins: int, length_buckets: Sequence[int]) -> int:
  """Counts the tokens that a model computes for a Packing on the host, padding included."""
  longest = np.zeros(len(packing.bin), np.int64)  # end of the longest bin of each micro-batch
  micro_batches = packing.bin // num_bins
  np.maximum.at(longest, micro_batches, packing.end)
  longest = longest[longest > 0]
  chosen = np.searchsorted(length_buckets, longest)
  capacities = np.asarray(length_buckets)[chosen]
  return num_bins * int(capacities.sum())


def stack(steps: Sequence[OptimizerStep]) -> OptimizerStep:
  """Stacks OptimizerSteps of equally many rows along a leading axis."""

  def join(*leaves):
    return np.stack(leaves)

  return jax.tree.map(join, *steps)


def step_shapes(num_tokens: int, share_prefixes: bool, *axes: int) -> OptimizerStep:
  """Returns the shapes of a step of rows of `num_tokens`: axes [b], or [steps,b] if stacked."""
  shape: Any = jax.ShapeDtypeStruct
  whole = shape(axes, np.int32)
  place = shape((*axes, num_tokens), np.int32) if share_prefixes else None
  return OptimizerStep(whole, Packing(whole, whole, whole, place, num_tokens))


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
    length_buckets: Sequence[int],
    context_shards: attention.ContextShards | None = None,
) -> Tree:
  """Returns the sum of function(Layout) over every non-empty micro-batch.

  Choice: one program for any number of micro-batches, with a branch for each of `length_buckets`: a
  micro-batch is computed with the smallest capacity that holds its bins.
  """

  def compute(capacity, j):
    micro_batch = layout(packing, j, num_bins, capacity, context_shards)
    return function(micro_batch)

  branches = [functools.partial(compute, capacity) for capacity in length_buckets]
  # The trace that shows the shapes of the sum is the first branch: tracing it again takes seconds.
  jaxpr, shapes = jax.make_jaxpr(branches[0], return_shape=True)(0)
  branches[0] = _as_function(jaxpr, shapes)
  zeros = jax.tree.map(jnp.zeros_like, shapes)

  def add(j, total):
    chosen = which_bucket(packing, j, num_bins, length_buckets)
    summand = jax.lax.switch(chosen, branches, j)
    return jax.tree.map(jnp.add, total, summand)

  num = num_micro_batches(packing, num_bins)
  return jax.lax.fori_loop(0, num, add, zeros)


def _as_function(jaxpr, shapes):
  """Returns the function that was traced, whose results have these shapes."""
  compute = jaxpr_as_fun(jaxpr)
  structure = jax.tree.structure(shapes)
  return lambda *arguments: jax.tree.unflatten(structure, compute(*arguments))


def which_bucket(
    packing: Packing, j: jax.Array, num_bins: int, length_buckets: Sequence[int]
) -> jax.Array:
  """Returns the index of the first of the rising `length_buckets` that micro-batch j fits in."""
  is_in_j = packing.bin // num_bins == j
  ends = jnp.where(is_in_j, packing.end, 0)
  capacities = jnp.asarray(length_buckets)
  return jnp.searchsorted(capacities, ends.max())


def only(packing: Packing, rows: jax.Array, num_bins: int) -> Packing:
  """Keeps the bins that hold any of `rows` [B] bool, moved to the front, and drops the others."""
  num_rows = packing.bin.shape[0]
  max_micro_batches = -(-num_rows // num_bins)
  max_bins = max_micro_batches * num_bins
  rows = rows & (packing.length > 0)
  is_kept = jnp.zeros(max_bins, bool)
  is_kept = is_kept.at[packing.bin].max(rows)
  new_numbers = jnp.cumsum(is_kept) - 1
  bins = new_numbers[packing.bin]
  is_row_kept = is_kept[packing.bin]
  length = jnp.where(is_row_kept, packing.length, 0)
  return dataclasses.replace(packing, bin=bins, length=length)


def layout(
    packing: Packing,
    j: jax.Array,
    num_bins: int,
    capacity: int,
    context_shards: attention.ContextShards | None = None,
) -> Layout:
  """Returns the Layout of micro-batch j, with bins of P = `capacity`, or with their shards."""
  is_in_j = packing.bin // num_bins == j
  tokens = jnp.arange(packing.num_tokens)
  owned = is_in_j[:, None] & (tokens < packing.length[:, None])
  place = packing.place
  if place is None:
    place = packing.offset[:, None] + tokens
  first_slot = (packing.bin - j * num_bins) * capacity
  size = num_bins * capacity
  slot = jnp.where(owned, first_slot[:, None] + place, size)
  find_tokens = _tokens_in_order if packing.place is None else _first_tokens
  row, position, live = find_tokens(slot, packing, size)
  paths = None
  if packing.place is not None or context_shards is not None:
    paths = _paths(slot, packing, row, position, live, capacity)
  in_bins = lambda x: x.reshape(num_bins, capacity)
  row, position, live, paths = jax.tree.map(in_bins, (row, position, live, paths))
  if context_shards is not None:
    paths = dataclasses.replace(paths, context_shards=context_shards)
    row, position, live = map(context_shards.cut, (row, position, live))
    numbers = jnp.arange(size).reshape(row.shape)
    slot = jnp.append(context_shards.join(numbers), size)[slot]
  return Layout(row, position, live, paths, slot, owned)


def _tokens_in_order(slot, packing, size):
  """Returns (row, position, whether it is live) of each slot; no row shares one.

  A slot holds a token of the last row that starts at or before it, if that row is long enough.
  """
  start = slot[:, 0]
  order = jnp.argsort(start)
  slots = jnp.arange(size)
  starts = start[order]
  before = jnp.searchsorted(starts, slots, side='right')
  last = jnp.maximum(before - 1, 0)
  row = order[last]
  position = slots - start[row]
  live = (before > 0) & (position < packing.length[row])
  return row, jnp.where(live, position, 0), live


def _first_tokens(slot, packing, size):
  """Returns (row, position, whether it is live) of each slot, of the first row that has it."""
  num_rows, num_tokens = slot.shape
  numbers = jnp.arange(num_rows * num_tokens).reshape(slot.shape)
  number = jnp.full(size, num_rows * num_tokens).at[slot].min(numbers, mode='drop')
  live = number < num_rows * num_tokens
  number = jnp.where(live, number, 0)
  return number // num_tokens, number % num_tokens, live


def _paths(slot, packing, row, position, live, capacity):
  """Returns the Paths of the slots, in one row."""
  own = jnp.arange(len(row)) % capacity
  before = own - 1
  if packing.place is not None:
    before = packing.place[row, jnp.maximum(position - 1, 0)]
  parents = jnp.where(live & (position > 0), before, own)
  row_ends = jnp.broadcast_to(packing.end[:, None], slot.shape)
  ends = (own + 1).at[slot].max(row_ends, mode='drop')  # the largest of the paths through a slot
  return attention.Paths(parents, ends, position)


def _where(mask, x):
  """Returns x [R,P,..] where `mask` [R,P] is true, else 0."""
  more_axes = tuple(range(mask.ndim, x.ndim))
  mask = jnp.expand_dims(mask, more_axes)
  return jnp.where(mask, x, 0)
