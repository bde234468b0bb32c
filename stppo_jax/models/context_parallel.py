"""Rows over several devices: each bin [P] is cut into c shards of P / c tokens, one per device.

The axis `context` of the mesh has c devices. The models compute shards [Rc,P/c] in place of bins
[R,P], so that all that works on single tokens is as for whole rows. Two things read other tokens:
attention gathers keys and values of the whole bin, and `DeviceShards.before` gathers its states.

A shard is an early and a late chunk of its bin, so that all devices attend to equally many tokens
(as in Llama 3, arXiv 2407.21783, section 3.3.2). With c = 2 the chunks of a bin go to the devices

  0 1 1 0

Attention computes blocks of queries and keys one after the other, with sums that are corrected when
a larger score comes (FlashAttention-2, arXiv 2307.08691, section 3.1). No score is kept for the
backward pass. Each device has its own list of the blocks, and all lists are equally long.

Einsum letters are those of `types.py`; g is the number of query heads per key head (N = M g).
"""

import dataclasses
import functools
from typing import Any
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from stppo_jax.models import attention
from stppo_jax.models import categorical
from stppo_jax.models import sharding

Array = TypeVar('Array', jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class DeviceShards:
  """How the bins of a micro-batch are cut over the devices of a mesh.

  The shards of bins [R,P] are in an order in which each device has consecutive ones: the bins of
  the first devices of (data, fsdp), with all first shards before all second ones, and so on.
  """

  mesh: jax.sharding.Mesh

  @property
  def number(self) -> int:
    """Shards per bin, c."""
    return self.mesh.shape['context']

  def cut(self, x: Array) -> Array:
    """Cuts bins [R,P,..] into shards [Rc,P/c,..]."""
    return _cut(x, self.number, sharding.num_row_shards(self.mesh))

  def join(self, x: Array) -> Array:
    """Joins shards [Rc,P/c,..] to bins [R,P,..]."""
    return _join(x, self.number, sharding.num_row_shards(self.mesh))

  def before(self, x: jax.Array, parents: jax.Array) -> jax.Array:
    """Returns shards x [Rc,P/c,..] at the columns `parents` [R,P] of each place."""

    def on_each_device(x, columns):
      whole = self._gather(x)
      columns = columns.reshape(*columns.shape, *[1] * (x.ndim - 2))
      return jnp.take_along_axis(whole, columns, axis=1)

    places = sharding.context_rows(self.mesh).spec
    gather = jax.shard_map(
        on_each_device, mesh=self.mesh, in_specs=(places, places), out_specs=places, check_vma=False
    )
    return gather(x, self.cut(parents))

  def attend(
      self,
      q: jax.Array,
      k: jax.Array,
      v: jax.Array,
      paths: attention.Paths,
      chunk: int = 0,
      window: int = 0,
      softcap: float = 0.0,
  ) -> jax.Array:
    """Computes `attention.causal` of shards q [Rc,P/c,N,H], k and v [Rc,P/c,M,H].

    `paths` are those of the bins [R,P]. A `chunk` bounds the size of a block.
    """
    chex.assert_equal_shape([k, v])
    mesh = self.mesh
    rows = sharding.context_rows(mesh).spec[0]
    heads = 'tensor' if k.shape[2] % mesh.shape['tensor'] == 0 else None
    part = P(rows, None, heads)
    blocks = _Blocks(self.number, chunk, window, softcap)

    def on_each_device(q, k, v, ends, depths):
      device = jax.lax.axis_index('context')
      return _attend(blocks, q, self._gather(k), self._gather(v), ends, depths, device)

    mapped = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(part, part, part, sharding.ROWS, sharding.ROWS),
        out_specs=part,
        check_vma=False,
    )
    return mapped(q, k, v, paths.ends, paths.depths)

  def _gather(self, x):
    """Gathers the shards [r,P/c,..] of all devices of a bin on each of them: [r,P,..]."""
    x = jax.lax.all_gather(x, 'context', tiled=True)
    return _join(x, self.number, num_shards=1)


def _cut(x, c, num_shards):
  """Cuts bins [R,P,..] into shards [Rc,P/c,..]; the bins are split over `num_shards`."""
  xp = np if isinstance(x, np.ndarray) else jnp
  num_bins, num_columns, *rest = x.shape
  x = x.reshape(num_shards, num_bins // num_shards, 2 * c, num_columns // (2 * c), *rest)
  early, late = xp.split(x, 2, axis=2)
  x = xp.stack([early, xp.flip(late, axis=2)], axis=3)  # [shards,r,c,2,n,..]
  return x.swapaxes(1, 2).reshape(num_bins * c, num_columns // c, *rest)


def _join(x, c, num_shards):
  """Joins shards [Rc,P/c,..] to bins [R,P,..]: the inverse of `_cut`."""
  xp = np if isinstance(x, np.ndarray) else jnp
  num_context_shards, num_columns, *rest = x.shape
  x = x.reshape(num_shards, c, num_context_shards // (c * num_shards), 2, num_columns // 2, *rest)
  x = x.swapaxes(1, 2)
  x = xp.concatenate([x[:, :, :, 0], xp.flip(x[:, :, :, 1], axis=2)], axis=2)
  return x.reshape(num_context_shards // c, num_columns * c, *rest)


@dataclasses.dataclass(frozen=True)
class _Blocks:
  """What is static about the attention of one device: hashable."""

  number: int  # devices per bin, c
  chunk: int
  window: int
  softcap: float

  def size(self, num_queries: int) -> int:
    """Returns the tokens of a block, of which a chunk has a whole number."""
    chunk = num_queries // 2
    if not 0 < self.chunk < chunk:
      return chunk
    return max(n for n in range(1, self.chunk + 1) if chunk % n == 0)

  def pairs(self, num_queries: int) -> np.ndarray:
    """Returns the blocks [c,S,3] int32 that each device computes.

    A triple is the number of the queries' block on the device, its number in the bin, and that of
    the keys' block. Keys after the queries are left out.
    """
    per_chunk = num_queries // 2 // self.size(num_queries)
    devices = []
    for device in range(self.number):
      chunks = (device, 2 * self.number - 1 - device)
      in_bin = [chunk * per_chunk + i for chunk in chunks for i in range(per_chunk)]
      devices.append([(a, own, key) for a, own in enumerate(in_bin) for key in range(own + 1)])
    return np.array(devices, np.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks, q, k, v, ends, depths, device):
  """Attends q [r,P/c,N,H] of a `device` to k and v [r,P,M,H] of the bins: [r,P/c,N,H].

  `ends` and `depths` [r,P] are those of the bins' Paths.
  """
  return _attend_forward(blocks, q, k, v, ends, depths, device)[0]


def _attend_forward(blocks, q, k, v, ends, depths, device):
  walk = _Walk(blocks, q, k, v, ends, depths, device)
  shape = walk.queries.shape  # [r,M,g,P/c,H]
  column = (*shape[:-1], 1)

  def add(carry, triple):
    y, peak, total = carry
    a, scores, _ = walk.scores(triple)
    old_peak = walk.block(peak, a)
    new_peak = jnp.maximum(old_peak, scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - new_peak)
    shrink = jnp.exp(old_peak - new_peak)
    values = walk.keys_block(walk.values, triple[2])
    added = _product('rmgqk,rmkh->rmgqh', weights.astype(q.dtype), values)
    y = walk.put(y, a, walk.block(y, a) * shrink + added)
    new_total = walk.block(total, a) * shrink + weights.sum(axis=-1, keepdims=True)
    return (y, walk.put(peak, a, new_peak), walk.put(total, a, new_total)), None

  start = (jnp.zeros(shape), jnp.full(column, attention.NEVER), jnp.zeros(column))
  (y, peak, total), _ = jax.lax.scan(add, start, walk.triples)
  y = (y / total).astype(q.dtype)
  log_sum = peak + jnp.log(total)
  return attention.ungrouped(y), (q, k, v, ends, depths, device, y, log_sum)


def _attend_backward(blocks, residuals, d):
  q, k, v, ends, depths, device, y, log_sum = residuals
  walk = _Walk(blocks, q, k, v, ends, depths, device)
  d = attention.grouped(d, k.shape[2])
  d_sum = jnp.sum(d.astype(jnp.float32) * y, axis=-1, keepdims=True)

  def add(carry, triple):
    d_q, d_k, d_v = carry
    a, scores, slope = walk.scores(triple)
    key = triple[2]
    weights = jnp.exp(scores - walk.block(log_sum, a))
    own_d = walk.block(d, a)
    d_weights = _product('rmgqh,rmkh->rmgqk', own_d, walk.keys_block(walk.values, key))
    d_scores = weights * (d_weights - walk.block(d_sum, a)) * slope
    d_scores = d_scores.astype(q.dtype)
    weights = weights.astype(q.dtype)
    own_d_q = _product('rmgqk,rmkh->rmgqh', d_scores, walk.keys_block(walk.keys, key))
    own_d_k = _product('rmgqk,rmgqh->rmkh', d_scores, walk.block(walk.queries, a))
    own_d_v = _product('rmgqk,rmgqh->rmkh', weights, own_d)
    d_q = walk.put(d_q, a, walk.block(d_q, a) + own_d_q)
    d_k = walk.put_keys(d_k, key, walk.keys_block(d_k, key) + own_d_k)
    d_v = walk.put_keys(d_v, key, walk.keys_block(d_v, key) + own_d_v)
    return (d_q, d_k, d_v), None

  zeros = [jnp.zeros(x.shape) for x in (walk.queries, walk.keys, walk.values)]
  (d_q, d_k, d_v), _ = jax.lax.scan(add, tuple(zeros), walk.triples)
  d_q = attention.ungrouped(d_q * q.shape[-1] ** -0.5)
  d_k = jnp.swapaxes(d_k, 1, 2)
  d_v = jnp.swapaxes(d_v, 1, 2)
  gradients: tuple[Any, ...] = (d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype))
  return *gradients, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


class _Walk:
  """The blocks of one device's attention, and slices of its arrays at a block."""

  def __init__(self, blocks, q, k, v, ends, depths, device):
    num_queries = q.shape[1]
    # Where only q, k and v are differentiated JAX would compute the masks of all blocks before the
    # loop and keep them, because they depend on nothing else.
    q, ends, depths, device = jax.lax.optimization_barrier((q, ends, depths, device))
    self._size = blocks.size(num_queries)
    self._window = blocks.window
    self._softcap = blocks.softcap
    self._ends = ends
    self._depths = depths
    self.queries = attention.grouped(q, k.shape[2]) * q.shape[-1] ** -0.5  # [r,M,g,P/c,H]
    self.keys = jnp.swapaxes(k, 1, 2)  # [r,M,P,H]
    self.values = jnp.swapaxes(v, 1, 2)
    self.triples = jnp.asarray(blocks.pairs(num_queries))[device]

  def scores(self, triple):
    """Returns (number of the queries' block, its scores [r,M,g,q,k], their slope under the cap)."""
    a, own, key = triple
    scores = _product(
        'rmgqh,rmkh->rmgqk', self.block(self.queries, a), self.keys_block(self.keys, key)
    )
    scores = categorical.softcap(scores, self._softcap)
    slope = 1 - jnp.square(scores / self._softcap) if self._softcap else 1.0
    columns = jnp.arange(self._size)
    query_columns = own * self._size + columns
    key_columns = key * self._size + columns
    mask = key_columns <= query_columns[:, None]
    mask = mask & (query_columns[:, None] < self._places(self._ends, key)[:, None])  # [r,q,k]
    if self._window:
      first = self._places(self._depths, own) - self._window
      mask &= self._places(self._depths, key)[:, None] > first[:, :, None]
    return a, jnp.where(mask[:, None, None], scores, attention.NEVER), slope

  def block(self, x, a):
    """Returns the queries' block a of x [r,M,g,P/c,..]."""
    return jax.lax.dynamic_slice_in_dim(x, a * self._size, self._size, axis=3)

  def put(self, x, a, block):
    """Writes the queries' block a of x [r,M,g,P/c,..]."""
    return jax.lax.dynamic_update_slice_in_dim(x, block, a * self._size, axis=3)

  def keys_block(self, x, key):
    """Returns a keys' block of x [r,M,P,H]."""
    return jax.lax.dynamic_slice_in_dim(x, key * self._size, self._size, axis=2)

  def put_keys(self, x, key, block):
    """Writes a keys' block of x [r,M,P,H]."""
    return jax.lax.dynamic_update_slice_in_dim(x, block, key * self._size, axis=2)

  def _places(self, x, number):
    """Returns a block of x [r,P]."""
    return jax.lax.dynamic_slice_in_dim(x, number * self._size, self._size, axis=1)


def _product(equation, a, b):
  return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
