"""Gated delta-net layers (Gated Delta Networks, Yang et al., arXiv 2412.06464), as in Qwen3.5.

A layer keeps a matrix S [K,V] per head instead of keys and values of all tokens:

  S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T,   y_t = S_t^T q_t / sqrt(K)

The decay a_t and the rate b_t are in (0, 1). Queries and keys have length 1. Queries, keys and
values come out of a causal convolution over a few tokens. Training computes chunks of tokens at
once (section 3.2 of the paper). Sampling keeps S and the last inputs of the convolution.

Parameters of a layer, next to the tree of decoder.py. G key heads of K channels, N value heads of V
channels (each key head serves N / G of them), C = 2GK + NV:

  delta/qkv/kernel [D,C]    delta/conv/kernel [C,w]    delta/z/kernel [D,N,V]
  delta/{rate,decay}/kernel [D,N]    delta/{log_decay,decay_bias} [N]
  delta/norm/scale [V]      delta/out/kernel [N,V,D]

Only configs with such layers import this file.
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from stppo_jax.models import layers

CHUNK = 64  # tokens whose updates are solved at once
EXACT = 'highest'  # products in float32, as in transformers


class DeltaNet(nn.Module):
  """Applies a gated delta-net layer."""

  config: layers.ModelConfig

  @nn.compact
  def __call__(self, x, segments=None, layer_cache=None, slots=None, lengths=None):
    """Maps x [B,T,D] to (y [B,T,D], layer_cache).

    Segments [B,T] are whole runs of equal numbers: state and convolution start anew in each. A
    layer_cache is (S [B,N,K,V] float32, last inputs of the convolution [B,C,w-1]). Of a chunk at
    `slots` [B,T] the first lengths[b] tokens are real, and the others change no state. A row at
    slot 0 starts anew, whatever its cache holds.
    """
    config = self.config
    shape = _shape(config)
    d = config.d_model
    n = shape.value_heads
    width = shape.value_dim
    keys = shape.key_heads * shape.key_dim
    channels = 2 * keys + n * width

    def small(name, first):
      return self.param(name, first, (n,), config.param_dtype).astype(jnp.float32)

    mixed = layers.Project(config, (d, channels), name='qkv')(x)
    z = layers.Project(config, (d, n, width), name='z')(x)
    rate = layers.Project(config, (d, n), name='rate')(x)
    decay = layers.Project(config, (d, n), name='decay')(x)
    log_decay = small('log_decay', nn.initializers.zeros)
    decay_bias = small('decay_bias', nn.initializers.ones)
    rate = jax.nn.sigmoid(rate).astype(jnp.float32)
    decay = -jnp.exp(log_decay) * jax.nn.softplus(decay.astype(jnp.float32) + decay_bias)

    state: Any = None
    tail: Any = None
    if layer_cache is not None:
      is_new = slots[:, 0] == 0
      state, tail = layer_cache
      state = jnp.where(is_new[:, None, None, None], 0, state)
      tail = jnp.where(is_new[:, None, None], 0, tail)
      live = jnp.arange(x.shape[1]) < lengths[:, None]
      rate = jnp.where(live[..., None], rate, 0)
      decay = jnp.where(live[..., None], decay, 0)
    conv = Convolution(config, channels, name='conv')
    mixed, tail = conv(mixed, segments, tail, lengths)
    q, k, v = jnp.split(mixed, (keys, 2 * keys), axis=-1)
    q = q.reshape(*x.shape[:2], shape.key_heads, shape.key_dim)
    k = k.reshape(*x.shape[:2], shape.key_heads, shape.key_dim)
    v = v.reshape(*x.shape[:2], n, width)
    if layer_cache is not None and x.shape[1] == 1:
      y, state = step(q, k, v, rate, decay, state)
    else:
      y, state = chunked(q, k, v, rate, decay, segments, state)
    y = y.astype(config.dtype)
    plain = dataclasses.replace(config, norm_offset=False)
    y = layers.RMSNorm(plain, name='norm')(y)
    y = (y * jax.nn.silu(z.astype(jnp.float32))).astype(config.dtype)
    stddev = 0.02 / math.sqrt(2 * config.num_layers)
    y = layers.Project(config, (n, width, d), 2, stddev=stddev, name='out')(y)
    if layer_cache is not None:
      layer_cache = (state, tail)
    return y, layer_cache


class Convolution(nn.Module):
  """Returns silu(sum_j kernel[:,j] x_{t-w+1+j}) over the tokens of t's segment, and the tail."""

  config: layers.ModelConfig
  channels: int

  @nn.compact
  def __call__(self, x, segments, tail, lengths):
    """Maps x [B,T,C] and the inputs before it [B,C,w-1] to (y [B,T,C], tail)."""
    config = self.config
    width = _shape(config).conv_width
    normal = nn.initializers.normal(0.02)
    kernel = self.param('kernel', normal, (self.channels, width), config.param_dtype)
    kernel = kernel.astype(config.dtype)
    rows, length, _ = x.shape
    if tail is None:
      before = jnp.zeros((rows, width - 1, self.channels), x.dtype)
    else:
      before = jnp.swapaxes(tail, 1, 2).astype(x.dtype)
    padded = jnp.concatenate([before, x], axis=1)
    y = x * kernel[:, width - 1]
    for back in range(1, width):
      start = width - 1 - back
      earlier = padded[:, start : start + length]
      if segments is not None:
        source = jnp.pad(segments, ((0, 0), (back, 0)), constant_values=-1)[:, :length]
        earlier = jnp.where((source == segments)[..., None], earlier, 0)
      y = y + earlier * kernel[:, start]
    if tail is not None:

      def last(row, length):
        return jax.lax.dynamic_slice_in_dim(row, length, width - 1)

      new_tail = jax.vmap(last)(padded, lengths)
      tail = jnp.swapaxes(new_tail, 1, 2).astype(tail.dtype)
    return jax.nn.silu(y), tail


def _shape(config: layers.ModelConfig) -> layers.DeltaShape:
  assert config.delta is not None
  return config.delta


def empty_cache(config: layers.ModelConfig, rows: int) -> tuple[jax.Array, jax.Array]:
  """Returns the layer_cache of empty rows."""
  shape = _shape(config)
  channels = 2 * shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim
  state_shape = (rows, shape.value_heads, shape.key_dim, shape.value_dim)
  state = jnp.zeros(state_shape, jnp.float32)
  tail = jnp.zeros((rows, channels, shape.conv_width - 1), config.dtype)
  return state, tail


def step(
    q: jax.Array, k: jax.Array, v: jax.Array, rate: jax.Array, decay: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns (y [B,1,N,V], S) of one token; arguments as in `chunked`."""
  q, k, v, rate, decay = _heads_first(q, k, v, rate, decay)
  q, k, v, rate, decay = (x[:, :, 0] for x in (q, k, v, rate, decay))
  state = state * jnp.exp(decay)[..., None, None]
  known = _product('bnkv,bnk->bnv', state, k)
  change = (v - known) * rate[..., None]
  state = state + k[..., None] * change[..., None, :]
  y = _product('bnkv,bnk->bnv', state, q)
  return y[:, None], state


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rate: jax.Array,
    decay: jax.Array,
    segments: jax.Array | None = None,
    state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns (y [B,T,N,V], S after the last token [B,N,K,V]) in float32.

  q, k [B,T,G,K], v [B,T,N,V], the rate b and the logarithm of the decay a [B,T,N]. `state` is S
  before the first token. None: zeros.

  Within a chunk let A_t be the product of its decays up to t, and L the lower triangle of
  b_i A_i / A_j k_i^T k_j, without the diagonal. The values that the tokens write are
  U = (I + L)^{-1} (b v - (b A k) S). Then
  y_t = A_t S^T q_t + sum_{j <= t} A_t / A_j (k_j^T q_t) u_j.
  Pairs of different segments are left out of all sums.
  """
  q, k, v, rate, decay = _heads_first(q, k, v, rate, decay)
  rows, heads, length, key_dim = q.shape
  padding = -length % CHUNK
  count = (length + padding) // CHUNK

  def cut(x):
    x = jnp.pad(x, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 3))
    return x.reshape(rows, heads, count, CHUNK, *x.shape[3:])

  q, k, v, rate, decay = (cut(x) for x in (q, k, v, rate, decay))
  total = jnp.cumsum(decay, axis=-1)  # log A_t
  index = jnp.arange(CHUNK)
  reads = index[:, None] >= index  # [query,key]
  carries: Any = None
  writes: Any = None
  keeps: Any = None
  if segments is not None:
    # Padding extends the last segment: it writes nothing.
    segments = jnp.pad(segments, ((0, 0), (0, padding)), mode='edge')
    parts = segments.reshape(rows, 1, count, CHUNK)
    reads = reads & (parts[..., :, None] == parts[..., None, :])
    last = parts[..., -1:]
    before = jnp.concatenate([parts[:, :, :1, :1], last[:, :, :-1]], axis=2)
    carries = parts == before  # tokens that read the state before the chunk
    writes = parts == last  # tokens that the state after the chunk holds
    keeps = (last == before)[..., 0]
  gaps = jnp.where(reads, total[..., :, None] - total[..., None, :], -jnp.inf)
  pairs = jnp.exp(gaps)
  k_rate = k * rate[..., None]
  lower = jnp.where(index[:, None] > index, _product('bncik,bncjk->bncij', k_rate, k) * pairs, 0)
  attention = _product('bncik,bncjk->bncij', q, k) * pairs
  into = jnp.exp(total)
  out_of = jnp.exp(total[..., -1:] - total)
  kept = jnp.exp(total[..., -1])
  if segments is not None:
    into = jnp.where(carries, into, 0)
    out_of = jnp.where(writes, out_of, 0)
    kept = jnp.where(keeps, kept, 0)
  system = lower + jnp.eye(CHUNK)
  sides = jnp.concatenate([v * rate[..., None], k_rate * into[..., None]], axis=-1)
  solved = jax.scipy.linalg.solve_triangular(system, sides, lower=True, unit_diagonal=True)
  values, reading = jnp.split(solved, (v.shape[-1],), axis=-1)
  q = q * into[..., None]
  k = k * out_of[..., None]
  if state is None:
    state = jnp.zeros((rows, heads, key_dim, v.shape[-1]), jnp.float32)

  def apply_chunk(state, chunk):
    q, k, values, reading, attention, kept = chunk
    written = values - _product('bnik,bnkv->bniv', reading, state)
    y = _product('bnik,bnkv->bniv', q, state) + _product('bnij,bnjv->bniv', attention, written)
    state = state * kept[..., None, None] + _product('bnik,bniv->bnkv', k, written)
    return state, y

  chunks = (q, k, values, reading, attention, kept)
  chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), chunks)
  after, y = jax.lax.scan(apply_chunk, state, chunks)
  y = jnp.moveaxis(y, 0, 2).reshape(rows, heads, count * CHUNK, -1)
  return jnp.swapaxes(y[:, :, :length], 1, 2), after


def _heads_first(q, k, v, rate, decay):
  """Returns q, k [B,N,T,K] of length 1 (q over sqrt(K)), v [B,N,T,V], rate, decay [B,N,T]."""
  group = v.shape[2] // k.shape[2]
  arrays = []
  for x in (q, k, v, rate, decay):
    arrays.append(jnp.swapaxes(x.astype(jnp.float32), 1, 2))
  q, k, v, rate, decay = arrays
  q = _normalised(q) * q.shape[-1] ** -0.5
  k = _normalised(k)
  if group > 1:
    q = jnp.repeat(q, group, axis=1)
    k = jnp.repeat(k, group, axis=1)
  return q, k, v, rate, decay


def _normalised(x):
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _product(equation, a, b):
  return jnp.einsum(equation, a, b, precision=EXACT)
