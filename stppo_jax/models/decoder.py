"""A decoder-only transformer (Qwen2, Qwen3, Llama) as functions of a parameter tree.

Tokens in, log-probs or values out. The layers are Flax modules that hold no state; the functions
here glue them together. Training reads whole rows: right padding, causal attention, so padding needs
no mask; segment ids keep packed episodes apart. Sampling reads chunks against a `KVCache` in which
every row has its own length.

Parameter tree, every leaf under `layers` stacked on a leading L axis:

  embed/embedding [V,D]          final_norm/scale [D]
  layers/attention_norm/scale    layers/mlp_norm/scale
  layers/attention/{query,key,value}/kernel [L,D,N or M,H], with qkv_bias also bias [L,N or M,H]
  layers/attention/out/kernel [L,N,H,D], with qk_norm also {query,key}_norm/scale [L,H]
  layers/mlp/{gate,up}/kernel [L,D,F]    layers/mlp/down/kernel [L,F,D]
  lm_head/kernel [D,V]           where there are token logits and they are not tied to `embed`
  value_head/{kernel [D,1], bias [1]}    where there are values
  lora_a, lora_b beside any kernel of `layers`: an adapter, see lora.py

Einsum letters are those of `types.py`.
"""

import dataclasses
import functools
import math

import chex
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import attention
from stppo_jax.models import categorical
from stppo_jax.models import lora
from stppo_jax.models import sharding

GATHERED_LAYERS = 4  # whose weights are gathered together while sampling with sharded parameters
CPU_CACHE_TILE = 64  # ModelConfig.cache_tile where sampling runs on a CPU


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a model; hashable, so it can be a static argument of jax.jit."""

  vocab_size: int
  d_model: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  d_ff: int
  rope_theta: float = 10_000.0
  # Llama 3's: (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings).
  rope_scaling: tuple[float, float, float, int] | None = None
  rms_norm_eps: float = 1e-6
  tie_embeddings: bool = False
  qkv_bias: bool = False  # Qwen2
  qk_norm: bool = False  # Qwen3
  family: str = 'qwen2'  # 'qwen2' | 'qwen3' | 'llama': whose key names convert.py reads and writes
  head: str = 'tokens'  # 'tokens' | 'value' | 'both' (two heads on one trunk)
  dtype: str = 'float32'  # of the computation: 'float32' | 'bfloat16'
  param_dtype: str = 'float32'  # of the stored parameters
  remat: str = 'none'  # what backward recomputes: 'none' | 'full' (all) | 'dots' (all but matmuls)
  scan_layers: bool = True  # False unrolls them: longer to compile, faster on a CPU
  attention: str = 'plain'  # in training: 'plain' | 'splash' (TPU) | 'cudnn' (NVIDIA)
  attention_chunk: int = 0  # queries whose scores are live at once in plain attention; 0: all
  max_positions: int = 32_768  # the longest row the published weights were trained for
  lora_scale: float = 1.0  # of what adapters add, where the parameters hold any
  cache_tile: int = 0  # slots of a KVCache whose keys lie together; 0: all
  row_sharding: jax.sharding.Sharding | None = None  # of activations' rows; None: compiler's choice


@flax.struct.dataclass
class KVCache:
  """Keys and values of what each row has read so far. Slots from `length` on hold rubbish.

  Choice: a tuple of L arrays, not one array with an L axis. In a decode loop on a CPU (B 32, S 256,
  L 2 and 4) one stacked array, written in place, cost 1.3 to 1.5 times the CPU time, because
  reading a layer's part copies it; writing by a one-hot `where` cost 5 times as much as a scatter. Keys lie
  with their slots last: scores of one query then take half the time of [B,M,S,H] there, and half
  of that again in tiles of 64 slots: wider products of few rows are slow there.

  Attributes:
    k: L arrays [B,M,C,H,c]: keys, already turned by their rotary positions, in C tiles of c slots.
    v: L arrays [B,M,S,H]: values.
    length: [B] int32: how many slots of each row are live, and so where its next token goes. The
      caller keeps it within S: what is written past the last slot is lost.
  """

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  length: jax.Array


def init(key, config):
  """Random parameters: normal(0.02), less for what feeds the residual; the value head is zero."""
  embed_key, layers_key, lm_head_key = jax.random.split(key, 3)
  dtype = jnp.dtype(config.param_dtype)
  d, v = config.d_model, config.vocab_size
  x = jnp.zeros((1, 1, d), config.dtype)
  rope = _rope(config, None, 1, None, None)
  plain = dataclasses.replace(
      config, attention='plain', row_sharding=None
  )  # for a row of one token
  init_layer = lambda k: Block(plain).init(k, x, rope)['params']
  params = {
      'embed': {'embedding': 0.02 * jax.random.normal(embed_key, (v, d), dtype)},
      'layers': jax.vmap(init_layer)(jax.random.split(layers_key, config.num_layers)),
      'final_norm': {'scale': jnp.ones((d,), dtype)},
  }
  if config.head in ('tokens', 'both') and not config.tie_embeddings:
    params['lm_head'] = {'kernel': 0.02 * jax.random.normal(lm_head_key, (d, v), dtype)}
  if config.head in ('value', 'both'):
    params['value_head'] = {'kernel': jnp.zeros((d, 1), dtype), 'bias': jnp.zeros((1,), dtype)}
  return params


def hidden(params, config, tokens, positions, cache=None, lengths=None, segments=None):
  """The trunk: tokens [B,T] -> (x [B,T,D] after the final norm, cache).

  Without a cache each token sees itself and those before it in its row that have its number in
  `segments` [B,T]; None is one segment. With one, row b's chunk is written to slots length[b],
  length[b] + 1, .. and sees all live slots up to its own.

  `positions` [B,T] are the rotary positions; None means 0, 1, .. or, with a cache, the slots. (Only
  distances matter, so they need not start anew with each segment.)
  `lengths` [B] is how many tokens of the chunk are real (default: T). The tail of a chunk leaves
  rubbish behind the new length, which the next write covers; writes past the last slot are dropped.
  What the tail's own queries return is rubbish too. With lengths 0 a row stands still.
  """
  chex.assert_rank(tokens, 2)
  if positions is not None:
    chex.assert_equal_shape([tokens, positions])
  chunk = tokens.shape[1]
  slots = None if cache is None else cache.length[:, None] + jnp.arange(chunk)
  x = sharding.spread(
      params['embed']['embedding'][tokens].astype(config.dtype), config.row_sharding
  )
  rope = _rope(config, positions, chunk, slots, cache)
  if cache is None:
    x = _training_layers(params['layers'], config, x, rope, segments)
  else:
    assert segments is None, 'a cached row is one segment'
    x, cache = _cached_layers(params['layers'], config, x, rope, slots, cache)
    cache = cache.replace(length=cache.length + (chunk if lengths is None else lengths))
  x = RMSNorm(config).apply({'params': params['final_norm']}, x)
  return x, cache


def forward(params, config, tokens, positions, cache=None, lengths=None):
  """tokens [B,T] -> (logits [B,T,V], or values [B,T] for head 'value'; float32; cache).

  Column t is what the model says AFTER reading token t, unlike everywhere else in the project:
  `token_logp` and `state_values` shift to "column t belongs to token t". Head 'both' gives logits.
  """
  x, cache = hidden(params, config, tokens, positions, cache, lengths)
  if config.head == 'value':
    return value_of(params, x), cache
  return token_logits(params, config, x), cache


def token_logits(params, config, x):
  """x [...,D] -> float32 logits [...,V]; one product of matrices, as in `Project`."""
  x = sharding.spread(x, config.row_sharding)
  if config.tie_embeddings:
    kernel, equation = params['embed']['embedding'], 'xd,vd->xv'
  else:
    kernel, equation = params['lm_head']['kernel'], 'xd,dv->xv'
  rows = x.reshape(-1, x.shape[-1])
  logits = jnp.einsum(
      equation, rows, kernel.astype(config.dtype), preferred_element_type=jnp.float32
  )
  return logits.reshape(*x.shape[:-1], -1)


def value_of(params, x):
  """x [...,D] -> float32 values [...], each of the state after its token."""
  head = jax.tree.map(lambda w: w.astype(jnp.float32), params['value_head'])
  return x.astype(jnp.float32) @ head['kernel'][:, 0] + head['bias'][0]


def state_values(params, x):
  """x [B,T,D] -> values [B,T]: column t is the value of the state before token t; column 0 is 0."""
  chex.assert_rank(x, 3)
  return jnp.pad(value_of(params, x[:, :-1]), ((0, 0), (1, 0)))


def token_logp(params, config, x, tokens, temperature=1.0, chunk=None):
  """Log-prob of each token and entropy of the distribution it came from: (logp, entropy) [B,T].

  logp[t] = log softmax(logits[t-1] / temperature)[tokens[t]]; column 0 is 0 in both.

  `chunk` columns at a time are turned into logits, and again in the backward pass, so [B,T,V] never
  exists; with None, or chunk >= T, it is done at once and kept.
  """
  chex.assert_rank([x, tokens], [3, 2])
  chex.assert_equal_shape_prefix([x, tokens], 2)
  length = tokens.shape[1]
  x = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))  # column t: what the model knew before token t
  name = 'embed' if config.tie_embeddings else 'lm_head'
  head = {name: params[name]}
  logp_of = functools.partial(_logp_and_entropy, head, config, temperature=temperature)
  if chunk is None or chunk >= length:
    logp, entropy = logp_of(x, tokens)
  else:
    num_chunks = -(-length // chunk)
    fold = lambda a: jnp.moveaxis(_fold_columns(a, num_chunks, chunk), 1, 0)
    unfold = lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1)[:, :length]
    logp_of = jax.checkpoint(logp_of, prevent_cse=False)
    columns = jax.lax.map(lambda xt: logp_of(*xt), (fold(x), fold(tokens)))
    logp, entropy = jax.tree.map(unfold, columns)
  first = jnp.arange(length) == 0
  return jnp.where(first, 0.0, logp), jnp.where(first, 0.0, entropy)


def init_cache(config, rows, slots, dtype=None):
  """An empty cache of `slots` positions for each of `rows` rows, rounded up to whole tiles."""
  tile = config.cache_tile or slots
  tiles = -(-slots // tile)

  def empty(*axes):
    shape = (rows, config.num_kv_heads, *axes)
    return tuple(jnp.zeros(shape, dtype or config.dtype) for _ in range(config.num_layers))

  return KVCache(
      k=empty(tiles, config.head_dim, tile),
      v=empty(tiles * tile, config.head_dim),
      length=jnp.zeros((rows,), jnp.int32),
  )


def unstack_layers(params, config):
  """The same parameters with `layers` as a tuple of L trees.

  Do this once before a decode loop: slicing the stack inside it copies every weight every token.
  """
  take = lambda l: jax.tree.map(lambda w: w[l], params['layers'])
  return {**params, 'layers': tuple(take(l) for l in range(config.num_layers))}


class RMSNorm(nn.Module):
  """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x):
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:], self.config.param_dtype)
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.config.rms_norm_eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


class Project(nn.Module):
  """x [..,in..] times a kernel [in..,out..], + bias, and what an adapter adds where there is one.

  Choice: one product of two matrices. From an einsum with more axes XLA makes copies of x transposed, for
  the kernel's gradient; on a CPU layers by themselves then take 1.5 times as long, an update 1.08 times.
  """

  config: ModelConfig
  shape: tuple[int, ...]  # of the kernel
  contracted: int = 1  # how many of its axes x has too, as its last
  bias: bool = False  # on all axes of the kernel but the contracted
  stddev: float = 0.02

  @nn.compact
  def __call__(self, x):
    config = self.config
    inputs, outputs = self.shape[: self.contracted], self.shape[self.contracted :]
    rows = x.shape[: x.ndim - self.contracted]
    x = x.reshape(-1, math.prod(inputs))
    normal = nn.initializers.normal(self.stddev)
    kernel = self.param('kernel', normal, self.shape, config.param_dtype)
    y = x @ kernel.astype(config.dtype).reshape(x.shape[1], -1)
    if self.has_variable('params', 'lora_a'):
      a, b = (self.get_variable('params', name) for name in ('lora_a', 'lora_b'))
      y = y + config.lora_scale * lora.product(x, a.astype(config.dtype), b.astype(config.dtype))
    y = y.reshape(*rows, *outputs)
    if self.bias:
      bias = self.param('bias', nn.initializers.zeros, outputs, config.param_dtype)
      y = y + bias.astype(config.dtype)
    return y


class Attention(nn.Module):
  """Causal attention in which g = N / M query heads share a key head."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x, rope, segments=None, layer_cache=None, slots=None):
    """x [B,T,D], segments and slots [B,T], layer_cache (k, v) of a KVCache -> (x, layer_cache)."""
    config = self.config
    d, n, m, h = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
    q = Project(config, (d, n, h), bias=config.qkv_bias, name='query')(x)
    k = Project(config, (d, m, h), bias=config.qkv_bias, name='key')(x)
    v = Project(config, (d, m, h), bias=config.qkv_bias, name='value')(x)
    if config.qk_norm:
      q = RMSNorm(config, name='query_norm')(q)
      k = RMSNorm(config, name='key_norm')(k)
    q, k = attention.rotate(q, rope), attention.rotate(k, rope)
    if layer_cache is None:
      y = attention.causal(
          q, k, v, segments, config.attention, config.attention_chunk, config.row_sharding
      )
    else:
      layer_cache = _write(*layer_cache, k, v, slots)
      y = attention.cached(q, *(a.astype(config.dtype) for a in layer_cache), slots)
    stddev = 0.02 / math.sqrt(2 * config.num_layers)
    y = Project(config, (n, h, d), 2, stddev=stddev, name='out')(y)
    return y, layer_cache


class Mlp(nn.Module):
  """down(silu(gate(x)) * up(x))."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x):
    config = self.config
    d, f = config.d_model, config.d_ff
    gate = Project(config, (d, f), name='gate')(x)
    up = Project(config, (d, f), name='up')(x)
    y = jax.nn.silu(gate) * up
    stddev = 0.02 / math.sqrt(2 * config.num_layers)
    return Project(config, (f, d), stddev=stddev, name='down')(y)


class Block(nn.Module):
  """One layer: attention and feed-forward, each after a norm and added to the residual."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x, rope, segments=None, layer_cache=None, slots=None):
    y = RMSNorm(self.config, name='attention_norm')(x)
    y, layer_cache = Attention(self.config, name='attention')(y, rope, segments, layer_cache, slots)
    x = x + y
    y = RMSNorm(self.config, name='mlp_norm')(x)
    return x + Mlp(self.config, name='mlp')(y), layer_cache


def _training_layers(layers, config, x, rope, segments):
  """x [B,T,D] -> [B,T,D] through all layers, scanned or unrolled, with rematerialisation."""

  def apply_layer(layer, x):
    x, _ = Block(config).apply({'params': layer}, x, rope, segments)
    return sharding.spread(x, config.row_sharding)

  if config.remat != 'none':
    policies = {
        'full': jax.checkpoint_policies.nothing_saveable,
        'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    scanned = config.scan_layers and not isinstance(layers, tuple)
    policy = policies[config.remat]
    apply_layer = jax.checkpoint(apply_layer, policy=policy, prevent_cse=not scanned)
  if config.scan_layers and not isinstance(layers, tuple):
    return jax.lax.scan(lambda x, layer: (apply_layer(layer, x), None), x, layers)[0]
  for layer in _each_layer(layers, config):
    x = apply_layer(layer, x)
  return x


def _cached_layers(layers, config, x, rope, slots, cache):
  """x [B,T,D] -> ([B,T,D], cache written). Unrolled: a scan would copy the cache every token.

  Over several devices the next few layers' weights wait for x. Else XLA, seeing them all from the start,
  gathers the whole model at once: 7 GiB more a device for 7B on 64 TPU v5e.
  """
  chex.assert_shape(cache.k[0], (x.shape[0], config.num_kv_heads, None, config.head_dim, None))
  k, v = [], []
  layers = list(_each_layer(layers, config))
  for l in range(config.num_layers):
    if config.row_sharding is not None and l % GATHERED_LAYERS == 0:
      part = slice(l, l + GATHERED_LAYERS)
      layers[part], x = jax.lax.optimization_barrier((layers[part], x))
    layer = layers[l]
    layer_cache = (cache.k[l], cache.v[l])
    x, layer_cache = Block(config).apply({'params': layer}, x, rope, None, layer_cache, slots)
    x = sharding.spread(x, config.row_sharding)
    k.append(layer_cache[0])
    v.append(layer_cache[1])
  return x, cache.replace(k=tuple(k), v=tuple(v))


def _each_layer(layers, config):
  if isinstance(layers, tuple):
    return layers
  return [jax.tree.map(lambda w: w[l], layers) for l in range(config.num_layers)]


def _write(cached_k, cached_v, k, v, slots):
  """The caches with new k and v [B,T,M,H] at slots [B,T]; slots past the end are dropped.

  Mapped over rows: of one scatter into all rows the compiler, which cannot know that a row writes into
  itself, gathers what is new onto every device.
  """
  tile = cached_k.shape[-1]

  def write_row(cached_k, cached_v, k, v, slots):
    how = dict(mode='drop', unique_indices=True)
    # [T,M,H]: advanced indices that do not stand side by side come first.
    cached_k = cached_k.at[:, slots // tile, :, slots % tile].set(k.astype(cached_k.dtype), **how)
    cached_v = cached_v.at[:, slots].set(jnp.swapaxes(v, 0, 1).astype(cached_v.dtype), **how)
    return cached_k, cached_v

  return jax.vmap(write_row)(cached_k, cached_v, k, v, slots)


def _rope(config, positions, chunk, slots, cache):
  """(cos, sin) [B or 1,T,1,H/2] of the positions [B,T], else of the cache's slots [B,T], else of 0 to T - 1.

  Choice: slots are looked up in a constant table. Of what is computed XLA puts a copy into every place of
  use on a CPU, barrier or not, and takes a cosine for each layer, head and row: 8% of an update.
  """
  angles = functools.partial(
      attention.angles,
      radians=attention.frequencies(config.head_dim, config.rope_theta, config.rope_scaling),
  )
  if positions is not None:
    return angles(positions)
  if cache is None:
    return angles(np.arange(chunk)[None])
  table = angles(np.arange(cache.v[0].shape[2]))
  return tuple(jnp.asarray(column)[slots] for column in table)


def _logp_and_entropy(head, config, x, tokens, temperature):
  head = sharding.gradient_over_rows(head, config.row_sharding, config.d_model)
  return categorical.logp_and_entropy(token_logits(head, config, x) / temperature, tokens)


def _fold_columns(a, num_chunks, chunk):
  """[B,T,..] -> [B,num_chunks,chunk,..], padded with zeros on the right."""
  pad = [(0, 0), (0, num_chunks * chunk - a.shape[1])] + [(0, 0)] * (a.ndim - 2)
  return jnp.pad(a, pad).reshape(a.shape[0], num_chunks, chunk, *a.shape[2:])
