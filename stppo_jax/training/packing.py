"""Packing: rows of a batch behind each other in bins, so that little of what a model computes is padding.

Row lengths in, a `Packing` out (host, `pack`). On the device a `Layout` moves what belongs to tokens
between rows [B,T], in which the algorithms think, and the bins [R,P] of one micro-batch, which a model
computes:

  rows  a a a a . .      bins  b b b b b b c c
        b b b b b b            a a a a . . . .
        c c . . . .

A row is never cut. It ends with its last agent token: what follows can influence nothing. Its first
token has no log-prob and no state before it; column 0 of what comes back is 0.
"""

import typing

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np


@flax.struct.dataclass
class Packing:
  """Where the rows of a batch stand. Micro-batch j has bins j R to j R + R - 1, R its number of bins."""

  bin: jax.Array  # [B] int32
  offset: jax.Array  # [B] int32, the column of its first token
  length: jax.Array  # [B] int32, its tokens; 0: it stands nowhere


@flax.struct.dataclass
class Layout:
  """One micro-batch: which token of which row stands where, and the other way round."""

  row: jax.Array  # [R,P] int32
  position: jax.Array  # [R,P] int32, within the row
  live: jax.Array  # [R,P] bool, false where nothing stands
  slot: jax.Array  # [B,T] int32, among the R P of the bins
  mine: jax.Array  # [B,T] bool, true for tokens in this micro-batch that something stands before

  @property
  def segments(self):
    """[R,P] int32 that keeps the rows of a bin apart."""
    return jnp.where(self.live, self.row, -1)

  def pack(self, x):
    """x [B,T] -> [R,P], 0 where nothing stands."""
    return jnp.where(self.live, x[self.row, self.position], 0)

  def unpack(self, y):
    """y [R,P] -> [B,T], 0 for first tokens and those of other micro-batches."""
    return jnp.where(self.mine, y.reshape(-1)[self.slot], 0)


def pack(lengths, num_bins, capacities) -> Packing:
  """Packs rows of the given lengths [B] into micro-batches of `num_bins` bins; NumPy, on the host.

  One micro-batch after the other takes, first fit, the longest rows that are left. Its bins are as long
  as the smallest of the rising `capacities` that holds the first of them. B / num_bins micro-batches,
  rounded up, are always enough: each but the last holds a row in every bin.
  """
  lengths = np.asarray(lengths, np.int32)
  chex.assert_rank(lengths, 1)
  bins, offsets = np.zeros_like(lengths), np.zeros_like(lengths)
  left = [row for row in np.argsort(-lengths, kind='stable') if lengths[row]]
  first = 0
  while left:
    tries = [_first_fit(lengths, left, num_bins, c) for c in capacities if c >= lengths[left[0]]]
    placed = max(
        tries, key=lambda placed: round(placed.fill, 2)
    )  # the first, so smallest, of equals
    for row, (chosen, offset) in placed.where.items():
      bins[row], offsets[row] = first + chosen, offset
    first, left = first + num_bins, [row for row in left if row not in placed.where]
  return Packing(bins, offsets, lengths)


def num_computed(packing, num_bins, capacities) -> int:
  """Tokens that a model computes for a Packing of the host, padding included."""
  ends = np.zeros(len(packing.bin), np.int64)  # of each micro-batch
  np.maximum.at(ends, packing.bin // num_bins, packing.offset + packing.length)
  chosen = np.searchsorted(capacities, ends[ends > 0])
  return num_bins * int(np.asarray(capacities)[chosen].sum())


def stack(packings) -> Packing:
  """Packings of equally many rows as one, with a leading axis."""
  return jax.tree.map(lambda *leaves: np.stack(leaves), *packings)


def num_micro_batches(packing, num_bins):
  """Micro-batches that hold anything: a scalar."""
  return jnp.max(jnp.where(packing.length > 0, packing.bin // num_bins + 1, 0))


def which_capacity(packing, j, num_bins, capacities):
  """Index of the first of the rising `capacities` that holds all bins of micro-batch j."""
  ends = jnp.where(packing.bin // num_bins == j, packing.offset + packing.length, 0)
  return jnp.searchsorted(jnp.asarray(capacities), ends.max())


def only(packing, rows, num_bins) -> Packing:
  """The Packing of the bins that hold any of `rows` [B] bool, moved to the front; others are left out."""
  wanted = (
      jnp.zeros(_most_bins(packing, num_bins), bool)
      .at[packing.bin]
      .max(rows & (packing.length > 0))
  )
  place = jnp.cumsum(wanted) - 1
  return packing.replace(
      bin=place[packing.bin], length=jnp.where(wanted[packing.bin], packing.length, 0)
  )


def layout(packing, j, num_bins, capacity, num_tokens) -> Layout:
  """The Layout of micro-batch j with bins of `capacity` columns, for rows of `num_tokens`: P and T."""
  here = (packing.bin // num_bins == j) & (packing.length > 0)
  size = num_bins * capacity
  start = jnp.where(here, (packing.bin - j * num_bins) * capacity + packing.offset, size)
  # A slot belongs to the last row that starts at or before it, if that row is long enough.
  order = jnp.argsort(start)
  slots = jnp.arange(size)
  before = jnp.searchsorted(start[order], slots, side='right')
  row = order[jnp.maximum(before - 1, 0)]
  position = slots - start[row]
  live = (before > 0) & (position < packing.length[row])
  columns = jnp.arange(num_tokens)
  mine = here[:, None] & (columns > 0) & (columns < packing.length[:, None])
  in_bins = lambda x: x.reshape(num_bins, capacity)
  return Layout(
      row=in_bins(row),
      position=in_bins(jnp.where(live, position, 0)),
      live=in_bins(live),
      slot=jnp.where(mine, start[:, None] + columns, 0),
      mine=mine,
  )


class _Placed(typing.NamedTuple):
  where: dict[int, tuple[int, int]]  # row: (bin, offset)
  fill: float  # share of the bins


def _first_fit(lengths, rows, num_bins, capacity):
  """What fits of `rows`, in this order, each into the first bin that has room."""
  filled, where = np.zeros(num_bins, np.int32), {}
  for row in rows:
    fits = filled + lengths[row] <= capacity
    if fits.any():
      chosen = int(fits.argmax())
      where[row] = chosen, int(filled[chosen])
      filled[chosen] += lengths[row]
  return _Placed(where, filled.sum() / (num_bins * capacity))


def _most_bins(packing, num_bins):
  """Bins that any packing of so many rows may use."""
  return -(-packing.bin.shape[0] // num_bins) * num_bins
