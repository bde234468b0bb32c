"""Attention with its masks and rotary positions: queries, keys and values in, weighted values out.

Sampling (`cached`) attends to a KV cache. Training (`causal`) attends within whole rows, which may
pack several episodes as segments, or as paths that begin alike. Three backends compute the same:

  plain   two einsums and a softmax per block of queries; runs anywhere
  splash  JAX's flash attention kernel for TPU, see attention_kernels.py
  cudnn   NVIDIA's kernel, through jax.nn

Einsum letters are those of `types.py`; g is the number of query heads per key head (N = M g).
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Protocol

from absl import logging
import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import categorical
from stppo_jax.types import UserError

NEVER = -1e30  # the score of a masked position
NUM_BLOCKS = 4  # the plain backend has at most this many blocks of queries
MIN_BLOCK = 64  # and at least this many queries per block


Rope = tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]  # (cos, sin), see `angles`


class ContextShards(Protocol):
  """How rows are cut over the devices that compute them together, see context_parallel.py."""

  def cut(self, x: jax.Array) -> jax.Array:
    """Cuts rows [B,T,..] into shards."""

  def join(self, x: jax.Array) -> jax.Array:
    """Joins shards to rows [B,T,..]."""

  def before(self, x: jax.Array, parents: jax.Array) -> jax.Array:
    """Returns shards x at the columns `parents` [B,T] of their rows."""

  def attend(
      self,
      q: jax.Array,
      k: jax.Array,
      v: jax.Array,
      paths: 'Paths',
      chunk: int,
      window: int,
      softcap: float,
  ) -> jax.Array:
    """Computes `causal` of shards."""


@flax.struct.dataclass
class Paths:
  """What each token of a row attends to where the row holds a forest, in depth-first order.

  A token attends to itself and to the tokens on the path to it. For the paths 0 1 2, 0 1 3 4 and 5,
  the mask and the attributes are

    1 . . . . .    parents  0 0 1 1 3 5
    1 1 . . . .    ends     5 5 3 5 5 6
    1 1 1 . . .    depths   0 1 2 2 3 0
    1 1 . 1 . .
    1 1 . 1 1 .
    . . . . . 1

  Attributes:
    parents: [B,T] int32, the column of the token before; the first token of a path has its own.
    ends: [B,T] int32, the column after the last token that attends to the token.
    depths: [B,T] int32, the tokens before it on its path.
    context_shards: how the rows are cut over the devices that compute them together; None: they
      are whole.
  """

  parents: jax.Array
  ends: jax.Array
  depths: jax.Array
  context_shards: ContextShards | None = flax.struct.field(pytree_node=False, default=None)

  @property
  def positions(self) -> jax.Array:
    """The depths, laid out as the tokens: [B,T], or their shards."""
    return self.depths if self.context_shards is None else self.context_shards.cut(self.depths)


class RopeScaling(Protocol):
  """A scaling of rotary positions, see rope_scaling.py."""

  def scale(self, radians: np.ndarray, theta: float) -> np.ndarray:
    """Returns the radians per position [H/2] after scaling, for rotations with base `theta`."""

  def longest_row(self) -> int:
    """Returns the tokens of the longest row that it makes possible. 0: config.json counts them."""

  def to_json(self) -> dict[str, object]:
    """Returns the scaling as config.json has it."""


def causal(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | Paths | None = None,
    backend: str = 'plain',
    chunk: int = 0,
    row_sharding: jax.sharding.NamedSharding | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> jax.Array:
  """Attends each token to itself and to the earlier tokens of its segment.

  q [B,T,N,H], k and v [B,T,M,H] -> [B,T,N,H]. `segments` [B,T] are arbitrary integers; None is one
  segment per row. With Paths, which cuDNN does not take, a token attends along its path, and a
  window counts the tokens of a path. With Paths that have shards q, k and v are shards of rows.
  `chunk` is the plain backend's. `row_sharding` is the placement of the rows, which the kernels
  need because the compiler cannot split them. With a `window` a token attends to that many tokens,
  itself included. `softcap` caps the scores as `categorical.softcap` does.

  Choice: cuDNN takes no segments, so that rows for it are not packed (`takes_segments`). jax.nn
  passes segments only as a mask, which becomes a bias [B,1,T,T] with a gradient of that size; the
  packed layout is private to JAX. Right padding needs no mask, because attention is causal.
  """
  chex.assert_rank([q, k, v], 4)
  chex.assert_equal_shape([k, v])
  if isinstance(segments, Paths) and segments.context_shards is not None:
    return segments.context_shards.attend(q, k, v, segments, chunk, window, softcap)
  if backend == 'plain':
    return _plain(q, k, v, segments, chunk, window, softcap)
  from stppo_jax.models import attention_kernels

  mask = None
  if isinstance(segments, Paths):
    mask = causal_mask(q.shape[1], segments, window=window)[:, 0]
    segments = None
  return attention_kernels.causal(q, k, v, segments, mask, backend, row_sharding, window, softcap)


def takes_segments(backend: str) -> bool:
  """Returns whether a backend of `causal` can keep the episodes of a packed row apart."""
  return backend != 'cudnn'


def takes_paths(backend: str) -> bool:
  """Returns whether a backend of `causal` can attend along the Paths of a packed row."""
  return backend != 'cudnn'


def choose(
    backend: str,
    device: jax.Device,
    dtype: str,
    head_dim: int,
    lengths: Sequence[int],
    softcap: float = 0.0,
) -> str:
  """Returns the backend of `causal` for rows of these lengths.

  The result is `backend`, or for 'auto' the fastest backend that can run. The log says once why the
  kernel of an accelerator cannot. UserError: the backend cannot run on this device.
  """
  kernel = backend
  if backend == 'auto':
    kernel = {'tpu': 'splash', 'gpu': 'cudnn'}.get(device.platform, 'plain')
  if kernel == 'plain':
    return 'plain'
  from stppo_jax.models import attention_kernels

  obstacle = attention_kernels.obstacle(kernel, device, dtype, head_dim, lengths, softcap)
  if not obstacle:
    return kernel
  if backend != 'auto':
    raise UserError(
        f'config.model.attention={backend!r} {obstacle}: set --config.model.attention=auto, '
        'or plain, which runs anywhere'
    )
  logging.log_first_n(
      logging.WARNING, 'plain attention in training, because %s %s', 1, kernel, obstacle
  )
  return 'plain'


def cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    window: int = 0,
    softcap: float = 0.0,
) -> jax.Array:
  """Attends queries at `slots` [B,T] of a KV cache to all slots up to their own.

  q [B,T,N,H], k [B,M,C,H,c], v [B,M,S,H] -> [B,T,N,H]. With keys in several tiles, which is the
  layout for CPUs, a single query goes tile by tile. Several queries go row by row, so that the
  scores of a row stay in a core's cache. `window` and `softcap` are as in `causal`.
  """
  num_tiles = k.shape[2]
  num_queries = q.shape[1]
  if num_tiles == 1:
    return _read_cache(q, k, v, slots, window, softcap)
  if num_queries == 1:
    return _read_tiles(q, k, v, slots, window, softcap)

  def read_row(row):
    q, k, v, slots = (x[None] for x in row)
    return _read_cache(q, k, v, slots, window, softcap)[0]

  return jax.lax.map(read_row, (q, k, v, slots))


def write_cache(
    cached_k: jax.Array, cached_v: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Writes k and v [B,T,M,H] into the caches at slots [B,T]; slots past the end are dropped.

  vmapped over rows: XLA cannot see that a batched scatter is row-local and would all-gather the new
  keys and values.
  """
  tile = cached_k.shape[-1]

  def write_row(cached_k, cached_v, k, v, slots):
    k = k.astype(cached_k.dtype)  # [T,M,H]
    v = v.astype(cached_v.dtype)
    v = jnp.swapaxes(v, 0, 1)  # [M,T,H]
    options = {'mode': 'drop', 'unique_indices': True}
    tiles = slots // tile
    columns = slots % tile
    # The index [:, a, :, b] puts the axis of a and b first: [T,M,H].
    cached_k = cached_k.at[:, tiles, :, columns].set(k, **options)
    cached_v = cached_v.at[:, slots].set(v, **options)
    return cached_k, cached_v

  return jax.vmap(write_row)(cached_k, cached_v, k, v, slots)


def causal_mask(
    num_keys: int,
    segments: jax.Array | Paths | None = None,
    first: int | jax.Array = 0,
    num_queries: int | None = None,
    window: int = 0,
) -> jax.Array:
  """Returns [1 or B,1,1,T,S], true where the query (row) may attend to the key (column).

  For a row with segments 5 5 7, and for the same row without segments:

    1 0 0    1 0 0
    1 1 0    1 1 0
    0 0 1    1 1 1

  `segments` [B,S] or Paths belong to the keys. The queries are at `first` and the following
  columns, by default at all columns. With a `window` a query attends to that many keys, its own
  included.
  """
  if num_queries is None:
    num_queries = num_keys
  queries = first + jnp.arange(num_queries)
  keys = jnp.arange(num_keys)
  mask = keys <= queries[:, None]
  if isinstance(segments, Paths):
    mask = mask & (queries[:, None] < segments.ends[:, None])  # [B,T,S]
    if window:
      depths = segments.depths
      query_depths = jax.lax.dynamic_slice_in_dim(depths, first, num_queries, axis=1)
      mask &= depths[:, None] > query_depths[:, :, None] - window
    return mask[:, None, None]
  if window:
    mask &= keys > queries[:, None] - window
  mask = mask[None]  # [1,T,S]
  if segments is not None:
    query_segments = jax.lax.dynamic_slice_in_dim(segments, first, num_queries, axis=1)
    mask &= query_segments[:, :, None] == segments[:, None]
  return mask[:, None, None]


def cache_mask(slots: jax.Array, num_slots: int, window: int = 0) -> jax.Array:
  """Returns [B,1,1,T,S] for queries at `slots` [B,T]; for a row at length 1 with T = 2 and S = 4:

  1 1 0 0
  1 1 1 0

  With a `window` a query attends to that many slots, its own included.
  """
  keys = jnp.arange(num_slots)
  mask = keys <= slots[..., None]
  if window:
    mask &= keys > slots[..., None] - window
  return mask[:, None, None]


def _plain(q, k, v, segments, chunk, window, softcap):
  """Computes `causal` by blocks of queries.

  There are a few blocks, each of which attends only to the keys up to its end (on CPU speed see
  docs/dev/notes). With a `chunk` the chunks of a block run one after the other and the backward
  pass recomputes their scores, so [B,M,g,T,T] never exists. With a `window` a block leaves out the
  keys before the window of its first query.
  """
  length = q.shape[1]
  q = grouped(q, k.shape[2])
  k = jnp.swapaxes(k, 1, 2)
  v = jnp.swapaxes(v, 1, 2)
  chunk = _divisor(length, chunk)
  if 0 < chunk < length:
    num_chunks = length // chunk
    divisors = [n for n in range(1, NUM_BLOCKS + 1) if num_chunks % n == 0]
    block = length // max(divisors)
  else:
    chunk = 0
    block = max(MIN_BLOCK, -(-length // NUM_BLOCKS))
  blocks = []
  for first in range(0, length, block):
    end = min(first + block, length)
    queries = q[..., first:end, :]
    start = 0
    if window and not isinstance(
        segments, Paths
    ):  # the tokens of a path are not next to each other
      start = max(0, first + 1 - window)
    keys = k[:, :, start:end]
    values = v[:, :, start:end]
    key_segments = jax.tree.map(lambda x: x[:, start:end], segments)
    block_first = first - start
    blocks.append(
        _attend_block(queries, keys, values, key_segments, block_first, chunk, window, softcap)
    )
  y = jnp.concatenate(blocks, axis=3)
  return ungrouped(y)


def _attend_block(q, k, v, segments, first, chunk, window, softcap):
  """Attends a block of queries, which begins at column `first`, to all keys, in chunks."""
  num_queries = q.shape[3]
  num_keys = k.shape[2]
  attend_all: Callable[..., jax.Array] = _attend
  if softcap:
    attend_all = functools.partial(_attend_capped, softcap=softcap)
  if not chunk:
    mask = causal_mask(num_keys, segments, first, num_queries, window)
    return attend_all(q, k, v, mask)
  firsts = jnp.arange(first, num_keys, chunk)
  chunks = q.reshape(*q.shape[:3], len(firsts), chunk, -1)
  chunks = jnp.moveaxis(chunks, 3, 0)

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def attend(queries_and_first):
    queries, first = queries_and_first  # [B,M,g,chunk,H]
    mask = causal_mask(num_keys, segments, first, chunk, window)
    return attend_all(queries, k, v, mask)

  y = jax.lax.map(attend, (chunks, firsts))
  y = jnp.moveaxis(y, 0, 3)
  return y.reshape(q.shape)


def _divisor(length, chunk):
  """Returns the largest divisor of a length up to `chunk`; 0, with a warning, if it is far less."""
  if not chunk or length <= chunk:
    return chunk
  largest = max(n for n in range(1, chunk + 1) if length % n == 0)
  if 4 * largest >= chunk:
    return largest
  logging.warning(
      'config.model.attention_chunk=%d: %d tokens have no divisor near it, and all their scores '
      'are kept: choose config.train.length_buckets that are multiples of it',
      chunk,
      length,
  )
  return 0


@jax.custom_vjp
def _attend(q, k, v, mask):
  """Softmax attention with a derivative that is one pass over the scores.

  q [B,M,g,T,H], k and v [B,M,S,H], mask [1 or B,1,1,T,S] -> [B,M,g,T,H]. For weights w, y = w v and
  a cotangent d of y, the cotangent of the scores is w (d v^T - sum(d y)), a sum over H. The
  derivative of softmax sums over S instead (FlashAttention, Dao et al., arXiv 2205.14135, appendix
  B).
  """
  return _attend_forward(q, k, v, mask)[0]


def _attend_forward(q, k, v, mask):
  scale = q.shape[-1] ** -0.5
  scores = _per_key_head('bmth,bmsh->bmts', q * scale, k)
  scores = jnp.where(mask, scores, NEVER)
  weights, inverse_sum = _softmax_parts(scores, q.dtype)
  y = _per_key_head('bmts,bmsh->bmth', weights, v) * inverse_sum
  y = y.astype(q.dtype)
  return y, (q, k, v, weights, inverse_sum, y)


def _attend_backward(residuals, d):
  q, k, v, weights, inverse_sum, y = residuals
  d = d.astype(jnp.float32) * inverse_sum
  d_sum = jnp.sum(d * y, axis=-1, keepdims=True)
  d = d.astype(q.dtype)
  d_weights = _per_key_head('bmth,bmsh->bmts', d, v)
  d_scores = weights * (d_weights - d_sum)
  d_scores = d_scores.astype(q.dtype)
  scale = q.shape[-1] ** -0.5
  d_q = _per_key_head('bmts,bmsh->bmth', d_scores, k) * scale
  d_k = _over_queries(d_scores, q * scale)
  d_v = _over_queries(weights, d)
  d_q = d_q.astype(q.dtype)
  d_k = d_k.astype(k.dtype)
  d_v = d_v.astype(v.dtype)
  return d_q, d_k, d_v, None


_attend.defvjp(_attend_forward, _attend_backward)


def _attend_capped(q, k, v, mask, softcap):
  """Computes `_attend` with capped scores. XLA derives it."""
  scale = q.shape[-1] ** -0.5
  scores = _per_key_head('bmth,bmsh->bmts', q * scale, k)
  scores = categorical.softcap(scores, softcap)
  weights = jax.nn.softmax(jnp.where(mask, scores, NEVER)).astype(q.dtype)
  return _per_key_head('bmts,bmsh->bmth', weights, v).astype(q.dtype)


def _read_cache(q, k, v, slots, window, softcap):
  """Computes `cached` with the tiles of keys joined."""
  q = grouped(q, v.shape[1])  # [B,M,g,T,H]
  k = jnp.swapaxes(k, 2, 3)  # [B,M,H,C,c]
  k = k.reshape(*k.shape[:3], -1)
  scale = q.shape[-1] ** -0.5
  scores = _per_key_head('bmth,bmhs->bmts', q * scale, k)
  scores = categorical.softcap(scores, softcap)
  scores += _cache_bias(slots, v.shape[2], window)
  weights, inverse_sum = _softmax_parts(scores, q.dtype)
  y = _per_key_head('bmts,bmsh->bmth', weights, v) * inverse_sum
  return ungrouped(y.astype(q.dtype))


def _read_tiles(q, k, v, slots, window, softcap):
  """Computes `cached` for one query per row, with one product per tile of keys and of values."""
  rows, heads, tiles, width, tile = k.shape
  q = grouped(q, heads)[:, :, :, 0]  # [B,M,g,H]
  # A copy per tile: without c in the equation XLA multiplies one element at a time.
  group = q.shape[2]
  q = q * width**-0.5
  q = jnp.broadcast_to(q[:, :, None], (rows, heads, tiles, group, width))
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  scores = product('bmcgh,bmchs->bmcgs', q, k)
  scores = categorical.softcap(scores, softcap)
  bias = _cache_bias(slots, tiles * tile, window)
  scores += bias.reshape(rows, 1, tiles, 1, tile)
  weights, inverse_sum = _softmax_parts(scores, q.dtype, axes=(2, 4))
  v = v.reshape(rows, heads, tiles, tile, width)
  y = product('bmcgs,bmcsh->bmcgh', weights, v)
  y = jnp.sum(y, axis=2) * inverse_sum[:, :, 0]
  y = y[:, :, :, None]
  return ungrouped(y.astype(q.dtype))


def _cache_bias(slots, num_slots, window):
  """Returns `cache_mask` as a bias. On a CPU a `where` would be another pass over the scores."""
  return jnp.where(cache_mask(slots, num_slots, window), 0.0, NEVER)


def _softmax_parts(scores, dtype, axes=-1):
  """Returns (exp(scores - max), 1 / its sum), so that the product with values comes in between."""
  peak = scores.max(axis=axes, keepdims=True)
  weights = jnp.exp(scores - peak)
  inverse_sum = 1 / weights.sum(axis=axes, keepdims=True)
  return weights.astype(dtype), inverse_sum


def _per_key_head(equation, q, k):
  """Einsum of [B,M,g,T,..] and [B,M,..] in float32; the g heads are more rows of one product."""
  y = jnp.einsum(equation, _merged(q), k, preferred_element_type=jnp.float32)
  return y.reshape(*q.shape[:-1], -1)


def _over_queries(a, b):
  """Returns the sum over queries and the g heads of a [B,M,g,T,S] times b [B,M,g,T,H]."""
  a = _merged(a)
  b = _merged(b)
  return jnp.einsum('bmts,bmth->bmsh', a, b, preferred_element_type=jnp.float32)


def _merged(q):
  """Reshapes [B,M,g,T,X] to [B,M,gT,X]."""
  return q.reshape(*q.shape[:2], -1, q.shape[-1])


def grouped(q: jax.Array, num_kv_heads: int) -> jax.Array:
  """Moves the heads of [B,T,N,H] to the front: [B,M,g,T,H]."""
  rows, length, heads, width = q.shape
  group = heads // num_kv_heads
  q = jnp.swapaxes(q, 1, 2)
  return q.reshape(rows, num_kv_heads, group, length, width)


def ungrouped(y: jax.Array) -> jax.Array:
  """Moves the heads of [B,M,g,T,H] back: [B,T,N,H]."""
  rows, num_kv_heads, group, length, width = y.shape
  y = y.reshape(rows, num_kv_heads * group, length, width)
  return jnp.swapaxes(y, 1, 2)


def frequencies(width: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
  """Returns radians per position [H/2] of each pair of `width` H channels."""
  radians = theta ** -(np.arange(0, width, 2) / width)
  if scaling is not None:
    radians = scaling.scale(radians, theta)
  return radians.astype(np.float32)


def angles(positions: jax.Array | np.ndarray, radians: np.ndarray, factor: float = 1.0) -> Rope:
  """Returns (cos, sin) [B,T,1,H/2] float32 of positions [B,T]; NumPy positions give constants.

  Both are multiplied by `factor`, see `rope_scaling.YarnScaling`.
  """
  xp = np if isinstance(positions, np.ndarray) else jnp
  turned = positions[..., None, None].astype(np.float32) * radians
  cos, sin = xp.cos(turned), xp.sin(turned)
  if factor == 1:
    return cos, sin
  scale = np.float32(factor)
  return cos * scale, sin * scale


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
  """Rotates the pairs of channels of x [B,T,N,H] by (cos, sin) of its positions.

  With angles for fewer channels the rest stays as it is (GPT-NeoX, arXiv 2204.06745, section 2.1).
  """
  cos, sin = rope
  width = 2 * cos.shape[-1]
  if width < x.shape[-1]:
    rotated = rotate(x[..., :width], rope)
    return jnp.concatenate([rotated, x[..., width:]], axis=-1)
  x_float32 = x.astype(jnp.float32)
  a, b = jnp.split(x_float32, 2, axis=-1)
  rotated_a = a * cos - b * sin
  rotated_b = b * cos + a * sin
  rotated = jnp.concatenate([rotated_a, rotated_b], axis=-1)
  return rotated.astype(x.dtype)
