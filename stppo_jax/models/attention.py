"""Attention: queries, keys and values in, weighted values out; who may read whom is decided here.

Sampling (`cached`) reads a cache with slots of its own. Training (`causal`) reads whole rows, in which
several episodes may stand behind each other as segments; three backends compute the same:

  plain   two einsums and a softmax, for a block of queries at a time; runs anywhere
  splash  JAX's flash attention kernel for TPU
  cudnn   NVIDIA's, through jax.nn

Einsum letters are those of `types.py`, and g for the query heads that share one key head (N = M g).
"""

import functools
import math
import re

import chex
import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from stppo_jax.types import UserError

SPLASH_BLOCKS = (512, 256, 128)  # queries and keys held at once: the first that divides T
NEVER = -1e30  # the score of what may not be read
NUM_BLOCKS, MIN_BLOCK = (
    4,
    64,
)  # of the plain backend: at most so many blocks, of so many queries or more


def causal(q, k, v, segments=None, backend='plain', chunk=0, row_sharding=None):
  """Each token reads itself and those before it in its segment: q [B,T,N,H], k and v [B,T,M,H] -> q's.

  `segments` [B,T] are any integers; None is one segment a row. `chunk` is the plain backend's.
  `row_sharding` says over which devices the rows lie; the kernels cannot be split by the compiler.

  Choice: packed rows are plain on a GPU. The cuDNN of jax.nn takes them as a mask alone, which it
  makes a bias of [B,1,T,T] with a gradient of the same size; its packed layout is private to JAX.
  """
  chex.assert_rank([q, k, v], 4)
  chex.assert_equal_shape([k, v])
  if backend == 'plain' or (backend == 'cudnn' and segments is not None):
    return _plain(q, k, v, segments, chunk)
  device = jax.devices()[0] if row_sharding is None else row_sharding.mesh.devices.flat[0]
  attend = {'splash': _splash, 'cudnn': _cudnn}[backend]
  attend = functools.partial(attend, platform=device.platform)
  if row_sharding is not None:
    attend = _on_each_device(attend, row_sharding, k.shape[2])
  return attend(q, k, v, segments)


def choose(wanted, device, dtype, head_dim, lengths):
  """The backend of `causal` for rows of these lengths: `wanted`, or for 'auto' the best that can run.

  Raises UserError for one that cannot run on this kind of device.
  """
  if wanted == 'auto':
    refused = lambda backend: _refusal(backend, device, dtype, head_dim, lengths)
    return next((backend for backend in ('splash', 'cudnn') if not refused(backend)), 'plain')
  if refusal := _refusal(wanted, device, dtype, head_dim, lengths):
    raise UserError(
        f'config.model.attention={wanted!r} {refusal}: set --config.model.attention=auto, '
        'or plain, which runs anywhere'
    )
  return wanted


def cached(q, k, v, slots):
  """Queries at `slots` [B,T] of a cache read it up to their own: q [B,T,N,H], k [B,M,C,H,c], v [B,M,S,H].

  Where keys lie in several tiles, so on a CPU, one query reads tile by tile, and several queries read row
  by row, so that a row's scores stay in a core's cache.
  """
  if k.shape[2] == 1:
    return _read_cache(q, k, v, slots)
  if q.shape[1] == 1:
    return _read_tiles(q, k, v, slots)
  return jax.lax.map(lambda row: _read_cache(*(a[None] for a in row))[0], (q, k, v, slots))


def causal_mask(length, segments=None, first=0, count=None):
  """[1 or B,1,1,T or count,T], true where the query (row) may read the key (column).

  Of a row with segments 5 5 7, and of the same row without:

    1 0 0    1 0 0
    1 1 0    1 1 0
    0 0 1    1 1 1

  `first` and `count` choose the queries.
  """
  count = length if count is None else count
  queries = first + jnp.arange(count)
  mask = (jnp.arange(length) <= queries[:, None])[None]
  if segments is not None:
    of_queries = jax.lax.dynamic_slice_in_dim(segments, first, count, axis=1)
    mask &= of_queries[:, :, None] == segments[:, None]
  return mask[:, None, None]


def cache_mask(slots, num_slots):
  """[B,1,1,T,S] from the queries' slots [B,T]; T = 2 queries of a row whose length was 1, S = 4:

  1 1 0 0
  1 1 1 0
  """
  return (jnp.arange(num_slots) <= slots[..., None])[:, None, None]


def _refusal(backend, device, dtype, head_dim, lengths):
  """Why a backend cannot run; empty where it can."""
  if backend == 'splash':
    if device.platform != 'tpu':
      return f'needs a TPU, and this is {device.device_kind}'
    if head_dim % 64:
      return f'needs heads of a multiple of 64 channels, and the model has {head_dim}'
    if odd := [length for length in lengths if length % SPLASH_BLOCKS[-1]]:
      return f'needs rows of a multiple of {SPLASH_BLOCKS[-1]} tokens, and some have {odd[0]}'
  if backend == 'cudnn':
    # '8.0' and so on; ROCm's are no numbers.
    found = device.platform == 'gpu' and re.match(r'(\d+)\.\d', device.compute_capability)
    if not found or int(found[1]) < 8:
      return f'needs an NVIDIA GPU of capability 8.0 or more, and this is {device.device_kind}'
    if dtype not in ('bfloat16', 'float16'):
      return f'computes in bfloat16 or float16, and config.model.dtype is {dtype}'
    if head_dim % 8 or head_dim > 128:
      return f'needs heads of at most 128 channels, a multiple of 8, and the model has {head_dim}'
  return ''


def _plain(q, k, v, segments, chunk):
  """By blocks of queries. With a `chunk` that divides T, one after the other, their scores computed again
  in the backward pass: [B,M,g,T,T] never exists. With 0 a few blocks, each of which reads only the keys
  up to its end; with `_read`'s derivative .6 of the time on a CPU, forward and backward.
  """
  length = q.shape[1]
  q, k, v = _grouped(q, k.shape[2]), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
  if not chunk or length <= chunk or length % chunk:
    block = max(MIN_BLOCK, -(-length // NUM_BLOCKS))
    parts = []
    for first in range(0, length, block):
      end = min(first + block, length)
      mask = causal_mask(length, segments, first, end - first)[..., :end]
      parts.append(_read(q[..., first:end, :], k[:, :, :end], v[:, :, :end], mask))
    return _ungrouped(jnp.concatenate(parts, axis=3))
  firsts = jnp.arange(0, length, chunk)
  parts = jnp.moveaxis(q.reshape(*q.shape[:3], len(firsts), chunk, q.shape[-1]), 3, 0)

  def attend(part_and_first):
    part, first = part_and_first  # [B,M,g,chunk,H]
    return _read(part, k, v, causal_mask(length, segments, first, chunk))

  y = jax.lax.map(jax.checkpoint(attend, prevent_cse=False), (parts, firsts))
  return _ungrouped(jnp.moveaxis(y, 0, 3).reshape(q.shape))


def _splash(q, k, v, segments, platform):
  """The TPU kernel on one device's part; elsewhere interpreted, which is slow and meant for tests."""
  length, heads, width = q.shape[1:]
  assert length % SPLASH_BLOCKS[-1] == 0, f'{length} tokens: `choose` was told of other lengths'
  block = next(block for block in SPLASH_BLOCKS if length % block == 0)
  kernel = splash.make_splash_mha_single_device(
      splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
      block_sizes=splash.BlockSizes(
          block_q=block,
          block_kv=block,
          block_q_dkv=block,
          block_kv_dkv=block,
          block_q_dq=block,
          block_kv_dq=block,
      ),
      interpret=platform != 'tpu',
  )

  def attend(q, k, v, segments):
    ids = None if segments is None else splash.SegmentIds(segments, segments)
    return kernel(q, k, v, ids)

  q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q * width**-0.5, k, v))
  return jnp.swapaxes(jax.vmap(attend)(q, k, v, segments), 1, 2)


def _cudnn(q, k, v, segments, platform):
  """cuDNN on one device's part; elsewhere jax.nn's own, for tests."""
  assert segments is None
  implementation = 'cudnn' if platform == 'gpu' else 'xla'
  return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def _on_each_device(attend, row_sharding, num_kv_heads):
  """`attend` on every device's rows, and heads over the mesh's other axes where key heads divide."""
  mesh, rows = row_sharding.mesh, row_sharding.spec[0]
  others = tuple(axis for axis in mesh.axis_names if axis not in rows)
  divides = num_kv_heads % math.prod(mesh.shape[axis] for axis in others) == 0
  part = P(rows, None, others if divides else None)
  # Pallas does not say how its results vary over the devices, hence no check.
  return jax.shard_map(
      attend, mesh=mesh, in_specs=(part, part, part, P(rows)), out_specs=part, check_vma=False
  )


@jax.custom_vjp
def _read(q, k, v, mask):
  """q [B,M,g,T,H], k and v [B,M,S,H], mask [1 or B,1,1,T,S] -> [B,M,g,T,H]; written out so that the
  derivative is one pass over the scores.

  With weights w, y = w v and a cotangent d of y, that of the scores is w (d v^T - sum(d y)); softmax's own
  sums over S instead (FlashAttention, Dao et al., arXiv 2205.14135, appendix B).
  """
  return _read_forward(q, k, v, mask)[0]


def _read_forward(q, k, v, mask):
  scores = _per_key_head('bmth,bmsh->bmts', q * q.shape[-1] ** -0.5, k)
  scores = jnp.where(mask, scores, NEVER)
  weights, scale = _softmax_parts(scores, q.dtype)
  y = (_per_key_head('bmts,bmsh->bmth', weights, v) * scale).astype(q.dtype)
  return y, (q, k, v, weights, scale, y)


def _read_backward(residuals, d):
  q, k, v, weights, scale, y = residuals
  d = d.astype(jnp.float32) * scale
  d_sum = jnp.sum(d * y, axis=-1, keepdims=True)
  d = d.astype(q.dtype)
  d_scores = weights * (_per_key_head('bmth,bmsh->bmts', d, v) - d_sum)
  d_scores = d_scores.astype(q.dtype)
  root = q.shape[-1] ** -0.5
  d_q = _per_key_head('bmts,bmsh->bmth', d_scores, k) * root
  sums = lambda a, b: jnp.einsum(
      'bmts,bmth->bmsh', _merged(a), _merged(b), preferred_element_type=jnp.float32
  )
  d_k, d_v = sums(d_scores, q * root), sums(weights, d)
  return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_read.defvjp(_read_forward, _read_backward)


def _read_cache(q, k, v, slots):
  """`cached` with all tiles laid together."""
  q, keys = _grouped(q, v.shape[1]), jnp.swapaxes(k, 2, 3)  # [B,M,g,T,H], [B,M,H,C,c]
  keys = keys.reshape(*keys.shape[:3], -1)
  scores = _per_key_head('bmth,bmhs->bmts', q * q.shape[-1] ** -0.5, keys)
  weights, scale = _softmax_parts(scores + _cache_bias(slots, v.shape[2]), q.dtype)
  y = _per_key_head('bmts,bmsh->bmth', weights, v) * scale
  return _ungrouped(y.astype(q.dtype))


def _read_tiles(q, k, v, slots):
  """`cached` of one query a row: a product for each tile of keys, and one for each tile of values."""
  rows, heads, tiles, width, tile = k.shape
  q = _grouped(q, heads)[:, :, :, 0]  # [B,M,g,H]
  # One for each tile: from an equation without c in it XLA multiplies an element at a time.
  queries = jnp.broadcast_to((q * width**-0.5)[:, :, None], (rows, heads, tiles, *q.shape[2:]))
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  scores = product('bmcgh,bmchs->bmcgs', queries, k)
  scores += _cache_bias(slots, tiles * tile).reshape(rows, 1, tiles, 1, tile)
  weights, scale = _softmax_parts(scores, q.dtype, axes=(2, 4))
  y = product('bmcgs,bmcsh->bmcgh', weights, v.reshape(rows, heads, tiles, tile, width))
  y = jnp.sum(y, axis=2) * scale[:, :, 0]
  return _ungrouped(y[:, :, :, None].astype(q.dtype))


def _cache_bias(slots, num_slots):
  """`cache_mask` to be added to scores: on a CPU a `where` is a pass over them of its own."""
  return jnp.where(cache_mask(slots, num_slots), 0.0, NEVER)


def _softmax_parts(scores, dtype, axes=-1):
  """(weights not yet divided by their sum, 1 / that sum): products over `axes` come between."""
  weights = jnp.exp(scores - scores.max(axis=axes, keepdims=True))
  return weights.astype(dtype), 1 / weights.sum(axis=axes, keepdims=True)


def _per_key_head(equation, q, k):
  """einsum of [B,M,g,T,..] and [B,M,..] to float32: the g heads are more queries of one product."""
  y = jnp.einsum(equation, _merged(q), k, preferred_element_type=jnp.float32)
  return y.reshape(*q.shape[:-1], -1)


def _merged(q):
  """[B,M,g,T,X] -> [B,M,gT,X]."""
  return q.reshape(*q.shape[:2], -1, q.shape[-1])


def _grouped(q, num_kv_heads):
  """[B,T,N,H] -> [B,M,g,T,H]."""
  rows, length, heads, width = q.shape
  return jnp.swapaxes(q, 1, 2).reshape(rows, num_kv_heads, heads // num_kv_heads, length, width)


def _ungrouped(y):
  """[B,M,g,T,H] -> [B,T,N,H]."""
  rows, kv_heads, group, length, width = y.shape
  return jnp.swapaxes(y.reshape(rows, kv_heads * group, length, width), 1, 2)


def frequencies(head_dim, theta, scaling=None):
  """Radians a position of each pair of channels [H/2]; `scaling` is `ModelConfig.rope_scaling`.

  Llama 3 stretches the slow ones: wavelengths above original / low_freq_factor by `factor`; those below
  original / high_freq_factor stay, and between them the two are blended.
  """
  radians = theta ** -(np.arange(0, head_dim, 2) / head_dim)
  if scaling is None:
    return radians.astype(np.float32)
  factor, low, high, original = scaling
  turns = original * radians / (2 * np.pi)  # within the original context
  keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
  return (radians * (keep + (1 - keep) / factor)).astype(np.float32)


def angles(positions, radians):
  """positions [B,T], radians [H/2] -> (cos, sin) [B,T,1,H/2] float32; of a NumPy array, constants."""
  xp = np if isinstance(positions, np.ndarray) else jnp
  turned = positions[..., None, None].astype(np.float32) * radians
  return xp.cos(turned), xp.sin(turned)


def rotate(x, rope):
  """x [B,T,N,H] turned by its positions' (cos, sin)."""
  cos, sin = rope
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
