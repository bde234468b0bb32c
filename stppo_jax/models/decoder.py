"""A decoder-only transformer as functions of a parameter tree; families are flags of ModelConfig.

Tokens in, log-probs or values out; layers.py has the layers. Training takes whole rows with right
padding: attention is causal, so padding needs no mask, and segment ids separate packed episodes.
Sampling takes chunks and a `KVCache` in which every row has its own length.

Parameter tree, every leaf under `layers` stacked on a leading L axis:

  embed/embedding [V,D]          final_norm/scale [D]
  layers/{attention,mlp}_norm/scale, with norm_after also {attention,mlp}_post_norm/scale [L,D]
  layers/attention/{query,key,value}/kernel [L,D,N or M,H], with qkv_bias also bias [L,N or M,H],
                                 with attention_gate query is [L,D,N,2H]
  layers/attention/out/kernel [L,N,H,D], with qk_norm also {query,key}_norm/scale [L,H],
                                 with qk_norm_whole [L,NH] and [L,MH]
  layers/mlp/{gate,up}/kernel [L,D,F]    layers/mlp/down/kernel [L,F,D]
  layers/moe/router/kernel [L,D,E], layers/moe/{gate,up} [L,E,D,F], layers/moe/down [L,E,F,D]
                                 a mixture of experts has these in place of mlp, with shared_d_ff
                                 also moe/shared/.. as mlp, and moe/shared_gate/kernel [L,D,1]
  layers/delta/..                layers without attention have these, see delta_net.py. Stacks of
                                 attention and delta hold only the layers that have them.
  lm_head/kernel [D,V]           only if token logits are not tied to `embed`
  value_head/{kernel [D,n], bias [n]}    only if the model has values; n is 1, or a number of bins
  lora_a, lora_b next to any kernel of `layers`: an adapter, see lora.py

Einsum letters are those of `types.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any
from typing import TYPE_CHECKING

import chex
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import attention
from stppo_jax.models import categorical
from stppo_jax.models import sharding
from stppo_jax.models.layers import Attention
from stppo_jax.models.layers import LayerKind
from stppo_jax.models.layers import Mlp
from stppo_jax.models.layers import ModelConfig
from stppo_jax.models.layers import RMSNorm
from stppo_jax.types import UserError

if TYPE_CHECKING:
  from stppo_jax.models import moe

Params = dict[str, Any]  # a tree of arrays, as drawn above
CPU_CACHE_TILE = 64  # ModelConfig.cache_tile for sampling on a CPU


@flax.struct.dataclass
class KVCache:
  """Keys and values of the tokens of each row so far. Slots from `length` on contain garbage.

  Choice: a tuple of L arrays instead of one array with an L axis, because reading a layer of a
  stacked array copies it. Keys have their slots last and in tiles, which is faster for a single
  query on a CPU (measured in docs/dev/notes).

  Attributes:
    k: L arrays [B,M,C,H,c], keys after rotation by their positions, in C tiles of c slots.
    v: L arrays [B,M,S,H], values. A gated delta-net layer has its state in place of keys, and the
      last inputs of its convolution in place of values.
    length: [B] int32, number of live slots per row, and so the slot of the next token. The caller
      keeps it within S: writes past the last slot are lost.
  """

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  length: jax.Array


class Block(nn.Module):
  """Applies one layer: attention and feed-forward, each after a norm and added to the residual."""

  config: ModelConfig
  kind: LayerKind = LayerKind()

  @nn.compact
  def __call__(
      self, x, ropes, segments=None, layer_cache=None, slots=None, chosen=None, lengths=None
  ):
    """Maps x [B,T,D] to (x, layer_cache, Routing or None); `chosen` as in `moe.Experts`."""
    config = self.config
    y = x
    if config.norm_before:
      y = RMSNorm(config, name='attention_norm')(y)
    if self.kind.is_delta:
      from stppo_jax.models import delta_net

      mix = delta_net.DeltaNet(config, name='delta')
      y, layer_cache = mix(y, segments, layer_cache, slots, lengths)
    else:
      attend = Attention(config, self.kind.window, name='attention')
      y, layer_cache = attend(y, ropes.get(self.kind.rope), segments, layer_cache, slots)
    if config.norm_after:
      y = RMSNorm(config, name='attention_post_norm')(y)
    x = x + y
    y = x
    if config.norm_before:
      y = RMSNorm(config, name='mlp_norm')(y)
    routing = None
    if config.num_experts:
      from stppo_jax.models import moe

      y, routing = moe.Experts(config, name='moe')(y, chosen)
    else:
      y = Mlp(config, name='mlp')(y)
    if config.norm_after:
      y = RMSNorm(config, name='mlp_post_norm')(y)
    return x + y, layer_cache, routing


def init(key: jax.Array, config: ModelConfig) -> Params:
  """Returns random parameters: normal(0.02), less before the residual; a zero value head."""
  embed_key, layers_key, lm_head_key = jax.random.split(key, 3)
  dtype = jnp.dtype(config.param_dtype)
  d = config.d_model
  v = config.vocab_size
  x = jnp.zeros((1, 1, d), config.dtype)
  ropes = _rope_tables(config, 1)
  plain = dataclasses.replace(config, attention='plain', row_sharding=None)

  def init_layers(kind, keys):
    block = Block(plain, kind)

    def init_layer(key):
      return block.init(key, x, ropes)['params']

    return jax.vmap(init_layer)(keys)

  layer_keys = jax.random.split(layers_key, config.num_layers)
  embedding = 0.02 * jax.random.normal(embed_key, (v, d), dtype)
  kinds = config.layer_kinds
  layers = {}
  if config.delta is None:
    layers = init_layers(kinds[0], layer_keys)
  else:
    numbers = {is_delta: [] for is_delta in (False, True)}
    for l, kind in enumerate(kinds):
      numbers[kind.is_delta].append(l)
    stacks = [init_layers(kinds[own[0]], layer_keys[np.array(own)]) for own in numbers.values()]
    order = np.argsort(numbers[False] + numbers[True])
    layers = stacks[0] | stacks[1]
    for name in stacks[0].keys() & stacks[1].keys():
      in_order = lambda a, b: jnp.concatenate([a, b])[order]
      layers[name] = jax.tree.map(in_order, stacks[0][name], stacks[1][name])
  params = {
      'embed': {'embedding': embedding},
      'layers': layers,
      'final_norm': {'scale': jnp.full((d,), 0 if config.norm_offset else 1, dtype)},
  }
  if config.head in ('tokens', 'both') and not config.tie_embeddings:
    kernel = 0.02 * jax.random.normal(lm_head_key, (d, v), dtype)
    params['lm_head'] = {'kernel': kernel}
  if config.head in ('value', 'both'):
    n = len(config.value_labels)
    kernel = jnp.zeros((d, n), dtype)
    params['value_head'] = {'kernel': kernel, 'bias': jnp.zeros((n,), dtype)}
  return params


def trunk(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    segments: jax.Array | attention.Paths | None = None,
    routes: jax.Array | None = None,
) -> tuple[jax.Array, moe.Routing | None]:
  """Runs the layers: tokens [B,T] -> (x [B,T,D] after the final norm, Routing of all layers).

  Each token attends to itself and to the earlier tokens of its row with the same number in
  `segments` [B,T]; None is one segment. `positions` [B,T] are the rotary positions; None means 0,
  1, .. Only distances matter, so positions may go on counting across segments. With Paths in place
  of segments a token attends along its path, and its position is its depth. `routes` [B,T,L,A]
  replays the experts that an earlier pass chose. Without experts the Routing is None.
  """
  chex.assert_rank(tokens, 2)
  if positions is not None:
    ropes = _angles(config, positions)
  elif isinstance(segments, attention.Paths):
    ropes = _looked_up(config, segments.depths.shape[1], segments.positions)
  else:
    ropes = _rope_tables(config, tokens.shape[1])
  x = _embed(params, config, tokens)
  if routes is not None:
    routes = jnp.moveaxis(routes, 2, 0)  # a layer's experts per step of the scan
  x, routing = _training_layers(params['layers'], config, x, ropes, segments, routes)
  return _final_norm(params, config, x), routing


def cached_trunk(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    cache: KVCache,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, KVCache, moe.Routing | None]:
  """Runs the layers on a chunk of each row [B,T]: returns (x [B,T,D], cache, Routing).

  Row b's chunk is written to slots length[b], length[b] + 1, .. and each token attends to all live
  slots up to its own. A token's position is its slot. `lengths` [B] is the number of real tokens of
  the chunk (default: T). The tail of a chunk leaves garbage behind the new length, which the next
  write overwrites; writes past the last slot are dropped. The outputs of the tail are garbage too.
  A row with length 0 does not change.
  """
  chex.assert_rank(tokens, 2)
  length = tokens.shape[1]
  slots = cache.length[:, None] + jnp.arange(length)
  if lengths is None:
    lengths = jnp.full_like(cache.length, length)
  num_slots = cache.v[config.first_attention].shape[2]
  ropes = _looked_up(config, num_slots, slots)
  x = _embed(params, config, tokens)
  x, k, v, routing = _cached_layers(params['layers'], config, x, ropes, slots, lengths, cache)
  x = _final_norm(params, config, x)
  return x, KVCache(k, v, cache.length + lengths), routing


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array | None,
    cache: KVCache | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, KVCache | None]:
  """Returns (logits [B,T,V], cache) of tokens [B,T], or (`value_of`, cache) for head 'value'.

  Both are float32. Column t is the prediction AFTER token t, unlike everywhere else in the project.
  `token_logp` and `state_values` shift to "column t belongs to token t". Head 'both' gives logits.
  With a cache, positions are the slots.
  """
  if cache is None:
    x, _ = trunk(params, config, tokens, positions)
  else:
    assert positions is None, 'with a cache, positions are the slots'
    x, cache, _ = cached_trunk(params, config, tokens, cache, lengths)
  if config.head == 'value':
    return value_of(params, x), cache
  return token_logits(params, config, x), cache


def untied(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
  """Returns the same policy with a separate output matrix, a copy of the embedding.

  A reload in vLLM 0.32 on CPUs misses the output matrix of a folder without one.
  """
  config = dataclasses.replace(config, tie_embeddings=False)
  kernel = params['embed']['embedding'].T
  return config, params | {'lm_head': {'kernel': kernel}}


def token_logits(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
  """Returns float32 logits [...,V] of x [...,D], as one matrix product like in `Project`."""
  x = sharding.spread(x, config.row_sharding)
  if config.tie_embeddings:
    kernel = params['embed']['embedding']
    equation = 'xd,vd->xv'
  else:
    kernel = params['lm_head']['kernel']
    equation = 'xd,dv->xv'
  rows = x.reshape(-1, x.shape[-1])
  kernel = kernel.astype(config.dtype)
  logits = jnp.einsum(equation, rows, kernel, preferred_element_type=jnp.float32)
  logits = categorical.softcap(logits, config.logit_softcap)
  return logits.reshape(*x.shape[:-1], -1)


def value_of(params: Params, x: jax.Array) -> jax.Array:
  """Returns float32 outputs of the value head for x [...,D], each of the state after its token.

  One output is the value [...]. Several outputs are the logits [...,n] of bins.
  """
  head = params['value_head']
  kernel = head['kernel'].astype(jnp.float32)
  bias = head['bias'].astype(jnp.float32)
  if len(bias) == 1:
    kernel = kernel[:, 0]
    bias = bias[0]
  # 'highest': float32 is not rounded on its way into the product, as TPUs would.
  return jnp.matmul(x.astype(jnp.float32), kernel, precision='highest') + bias


def state_values(params: Params, x: jax.Array, paths: attention.Paths | None = None) -> jax.Array:
  """Returns `value_of` x [B,T,D]: column t is the state before token t.

  The column of a row's first token is 0. With `paths` the first tokens of paths have any number.
  """
  chex.assert_rank(x, 3)
  if paths is not None:
    return value_of(params, before(x, paths))
  return pad_first(value_of(params, x[:, :-1]))


def before(x: jax.Array, paths: attention.Paths | None = None) -> jax.Array:
  """Returns x [B,T,..] of the token before each token: of its parent, if there are `paths`."""
  if paths is None:
    return pad_first(x[:, :-1])
  if paths.context_shards is not None:
    return paths.context_shards.before(x, paths.parents)
  columns = paths.parents.reshape(*paths.parents.shape, *[1] * (x.ndim - 2))
  return jnp.take_along_axis(x, columns, axis=1)


def pad_first(x: jax.Array) -> jax.Array:
  """Returns x [B,T-1,..] with a column of zeros in front: column t belongs to token t."""
  padding = [(0, 0)] * x.ndim
  padding[1] = (1, 0)
  return jnp.pad(x, padding)


def token_logp(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    tokens: jax.Array,
    temperature: float | jax.Array = 1.0,
    chunk: int | None = None,
    paths: attention.Paths | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns (log-prob of each token, entropy of its distribution), both [B,T], of x [B,T,D].

  logp[t] = log softmax(logits[t-1] / temperature)[tokens[t]]; column 0 is 0 in both. With `paths`
  the parent of t takes the place of t - 1, and the first tokens of paths have any number.

  With a `chunk` below T the vocabulary is cut into T / chunk chunks. Their logits are computed one
  chunk after the other, and again in the backward pass (`head_chunks.head_logp_and_entropy`). So
  as many logits are live at once as `chunk` tokens of each row have. With None, or chunk >= T, all
  logits are computed once and kept.
  """
  chex.assert_rank([x, tokens], [3, 2])
  chex.assert_equal_shape_prefix([x, tokens], 2)
  length = tokens.shape[1]
  x = before(x, paths)
  if chunk is None or chunk >= length:
    name = 'embed' if config.tie_embeddings else 'lm_head'
    head = sharding.gradient_over_rows({name: params[name]}, config.row_sharding, config.d_model)
    logits = token_logits(head, config, x) / temperature
    logp, entropy = categorical.logp_and_entropy(logits, tokens)
  else:
    from stppo_jax.models import head_chunks

    x = sharding.spread(x, config.row_sharding)
    rows = x.reshape(-1, config.d_model)
    num_chunks = -(-length // chunk)
    kernel = head_rows(params, config)
    logp, entropy = head_chunks.head_logp_and_entropy(
        rows,
        kernel,
        tokens.reshape(-1),
        temperature,
        num_chunks,
        config.row_sharding,
        config.logit_softcap,
    )
    logp = logp.reshape(tokens.shape)
    entropy = entropy.reshape(tokens.shape)
  if paths is not None:
    return logp, entropy
  is_first = jnp.arange(length) == 0
  return jnp.where(is_first, 0.0, logp), jnp.where(is_first, 0.0, entropy)


def head_rows(params: Params, config: ModelConfig) -> jax.Array:
  """Returns the matrix of the token head as a row per token [V,D]."""
  if config.tie_embeddings:
    return params['embed']['embedding']
  return params['lm_head']['kernel'].T


def init_cache(config: ModelConfig, rows: int, slots: int) -> KVCache:
  """Returns an empty cache for `rows` rows of `slots` slots, rounded up to whole tiles."""
  tile = config.cache_tile or slots
  tiles = -(-slots // tile)
  heads = config.num_kv_heads
  width = config.head_dim

  def empty(*shape):
    return [jnp.zeros(shape, config.dtype) for _ in range(config.num_layers)]

  k = empty(rows, heads, tiles, width, tile)
  v = empty(rows, heads, tiles * tile, width)
  for l, kind in enumerate(config.layer_kinds):
    if kind.is_delta:
      from stppo_jax.models import delta_net

      k[l], v[l] = delta_net.empty_cache(config, rows)
  return KVCache(tuple(k), tuple(v), jnp.zeros((rows,), jnp.int32))


def in_compute_dtype(params: Params, config: ModelConfig) -> Params:
  """Casts the weights once as the layers would; norm scales and routers are used in float32."""

  def cast(path, weight):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    is_float32 = name.endswith(('/scale', 'delta/log_decay', 'delta/decay_bias'))
    is_float32 |= '/router/' in name
    return weight if is_float32 else weight.astype(config.dtype)

  return jax.tree_util.tree_map_with_path(cast, params)


def unstack_layers(params: Params, config: ModelConfig) -> Params:
  """Returns the same parameters with `layers` as a tuple of L trees, if they are not yet.

  Do this once before a decode loop: slicing the stack inside it would copy all weights per token.
  """
  return params | {'layers': _unstack(params['layers'], config)}


def has_part(kind: LayerKind, part: str) -> bool:
  """Returns whether a layer of this kind has a part of the parameter tree, such as 'attention'."""
  absent = 'attention' if kind.is_delta else 'delta'
  return part != absent


def layers_with(config: ModelConfig, part: str) -> list[int]:
  """Returns the numbers of the layers that have a part: those that its stack holds."""
  return _numbers(part, config.layer_kinds)


def obstacle_to_paths(config: ModelConfig) -> str:
  """Returns why layers cannot go along `attention.Paths`; empty where all can."""
  if any(kind.is_delta for kind in config.layer_kinds):
    return 'the gated delta nets of the model pass a state along a row'
  if not attention.takes_paths(config.attention):
    return f'{config.attention} attention takes no paths, and config.model.attention=plain does'
  return ''


def choose_attention(
    config: ModelConfig, backend: str, mesh: jax.sharding.Mesh, lengths: Sequence[int]
) -> str:
  """Returns the attention of training on rows of these lengths.

  `backend` is config.model.attention. UserError: it cannot run on the devices of the mesh.
  """
  context = mesh.shape['context']
  if context == 1:
    device = mesh.devices.flat[0]
    return attention.choose(
        backend, device, config.dtype, config.head_dim, lengths, config.attention_softcap
    )
  setting = f'config.mesh.context={context}'
  if any(kind.is_delta for kind in config.layer_kinds):
    raise UserError(
        f'{setting} cuts rows over devices, and the gated delta nets of the model pass a state '
        'along a row: set --config.mesh.context=1'
    )
  if backend not in ('auto', 'plain'):
    raise UserError(
        f'{setting}: config.model.attention={backend!r} computes whole rows: set '
        '--config.model.attention=auto'
    )
  for length in lengths:
    if length % (2 * context):
      raise UserError(
          f'{setting} gives each device two parts of a row, and {length} of '
          f'config.train.length_buckets is no multiple of {2 * context}: choose multiples of it'
      )
  return 'plain'


def has_adapters(params: Params) -> bool:
  """Returns whether a kernel of the layers has an adapter, see lora.py."""
  paths = flax.traverse_util.flatten_dict(params['layers'])
  return any('lora_a' in path for path in paths)


def shapes(config: ModelConfig) -> Params:
  """Returns the parameters of `init` as ShapeDtypeStructs."""
  return jax.eval_shape(lambda: init(jax.random.key(0), config))


def num_params(config: ModelConfig) -> int:
  """Counts the parameters of `init`. Tied embeddings count once."""
  return sum(leaf.size for leaf in jax.tree.leaves(shapes(config)))


def _embed(params, config, tokens):
  x = params['embed']['embedding'][tokens].astype(config.dtype)
  if config.scale_embeddings:
    x = x * jnp.asarray(math.sqrt(config.d_model), config.dtype)  # rounded, as in transformers
  return sharding.spread(x, config.row_sharding)


def _final_norm(params, config, x):
  return RMSNorm(config).apply({'params': params['final_norm']}, x)


def _training_layers(layers, config, x, ropes, segments, routes):
  """Maps x [B,T,D] through all layers, scanned or unrolled, with rematerialisation.

  Layers of several kinds are scanned in periods: a step of the scan applies one layer of each place
  in the period. If the layers are no whole number of periods, a step applies one layer, and its
  kind is chosen in the step. Layers of several shapes are then unrolled.
  """
  kinds = config.layer_kinds

  def apply_layer(kind, x, layer_and_routes):
    layer, layer_routes = layer_and_routes
    x, _, routing = _apply(config, kind, layer, x, ropes, segments, chosen=layer_routes)
    return x, routing

  period = _period(kinds)
  is_whole = len(kinds) % period == 0
  has_one_shape = all(len(_numbers(part, kinds)) == len(kinds) for part in layers)
  can_scan = is_whole or has_one_shape
  scanned = config.scan_layers and not isinstance(layers, tuple) and can_scan
  if config.remat != 'none':
    policies = {
        'full': jax.checkpoint_policies.nothing_saveable,
        'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    policy = policies[config.remat]
    checkpoint: Any = functools.partial(jax.checkpoint, policy=policy, prevent_cse=not scanned)
  else:
    checkpoint = lambda function: function
  apply_kind = {kind: functools.partial(apply_layer, kind) for kind in kinds}
  apply_kept = {kind: checkpoint(function) for kind, function in apply_kind.items()}

  def apply_in_turn(kinds, x, layers_and_routes):
    layers, routes = layers_and_routes
    routings = []
    for l, kind in enumerate(kinds):
      layer_routes = None
      if routes is not None:
        layer_routes = routes[l]
      x, routing = apply_kept[kind](x, (_layer_of(layers, kinds, l), layer_routes))
      routings.append(routing)
    return x, _stack(routings)

  if not scanned:
    routings = []
    for l, layer in enumerate(_unstack(layers, config)):
      layer_routes = None
      if routes is not None:
        layer_routes = routes[l]
      x, routing = apply_kept[kinds[l]](x, (layer, layer_routes))
      routings.append(routing)
    return x, _stack(routings)
  if period == 1:
    return jax.lax.scan(apply_kept[kinds[0]], x, (layers, routes))
  if not is_whole:
    # Slices of the stacks would be copies of them, so a step applies one layer of any kind.
    order = list(apply_kind)
    numbers = np.array([order.index(kind) for kind in kinds], np.int32)

    def apply_any(x, inputs):
      number, layer_and_routes = inputs
      return jax.lax.switch(number, list(apply_kind.values()), x, layer_and_routes)

    return jax.lax.scan(checkpoint(apply_any), x, (numbers, (layers, routes)))

  num_periods = len(kinds) // period

  def in_periods(part, stack):
    count = len(_numbers(part, kinds[:period]))
    return jax.tree.map(lambda w: w.reshape(num_periods, count, *w.shape[1:]), stack)

  step = functools.partial(apply_in_turn, kinds[:period])
  stacks = (
      {part: in_periods(part, stack) for part, stack in layers.items()},
      in_periods('', routes),
  )
  x, routing = jax.lax.scan(step, x, stacks)
  return x, jax.tree.map(lambda r: r.reshape(len(kinds), *r.shape[2:]), routing)


def _period(kinds):
  """Returns the smallest number of layers after which their kinds repeat."""
  for period in range(1, len(kinds)):
    if kinds[period:] == kinds[:-period]:
      return period
  return len(kinds)


def _cached_layers(layers, config, x, ropes, slots, lengths, cache):
  """Returns (x [B,T,D] after all layers, new keys, new values, Routing).

  The layers are unrolled, because a scan would copy the cache.
  """
  rows = len(x)
  first = config.first_attention
  chex.assert_shape(cache.k[first], (rows, config.num_kv_heads, None, config.head_dim, None))
  keys = []
  values = []
  routings = []
  layers = _unstack(layers, config)
  caches = zip(cache.k, cache.v)
  for kind, layer, layer_cache in zip(config.layer_kinds, layers, caches, strict=True):
    options = {'layer_cache': layer_cache, 'slots': slots, 'lengths': lengths}
    x, layer_cache, routing = _apply(config, kind, layer, x, ropes, **options)
    k, v = layer_cache
    keys.append(k)
    values.append(v)
    routings.append(routing)
  return x, tuple(keys), tuple(values), _stack(routings)


def _apply(config, kind, layer, x, *args, **kwargs):
  """Applies one layer."""
  outputs: Any = Block(config, kind).apply({'params': layer}, x, *args, **kwargs)
  x, layer_cache, routing = outputs
  return sharding.spread(x, config.row_sharding), layer_cache, routing


def _unstack(layers, config):
  if isinstance(layers, tuple):
    return layers
  kinds = config.layer_kinds
  return tuple(_layer_of(layers, kinds, l) for l in range(config.num_layers))


def _numbers(part, kinds):
  """Returns the numbers of the layers that have a part of the parameter tree."""
  return [l for l, kind in enumerate(kinds) if has_part(kind, part)]


def _layer_of(layers, kinds, l):
  """Returns the parameters of layer l from stacks that hold layers of these kinds."""
  own = {}
  for part, stack in layers.items():
    numbers = _numbers(part, kinds)
    if l in numbers:
      rank = numbers.index(l)
      own[part] = jax.tree.map(lambda w, rank=rank: w[rank], stack)
  return own


def _stack(trees):
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _looked_up(config, length, positions):
  """Returns the angles of positions [B,T] below `length`, from a constant table.

  Choice: XLA would duplicate computed angles into every use on a CPU, and take a cosine per layer,
  head and row: 8% of an update.
  """
  ropes = {}
  for name, table in _rope_tables(config, length).items():
    ropes[name] = tuple(jnp.asarray(column[0])[positions] for column in table)
  return ropes


def _rope_tables(config, length):
  """Returns `_angles` [1,T,1,H/2] of the positions 0 to length - 1, as constants."""
  positions = np.arange(length)
  return _angles(config, positions[None])


def _angles(config, positions):
  """Returns (cos, sin) of the positions [B,T] for each rotation that a layer has, by its name."""
  width = int(config.head_dim * config.rotary_share)
  rotations = {'full': (config.rope_theta, config.rope_scaling), 'window': config.window_rope}
  ropes = {}
  for name in sorted({kind.rope for kind in config.layer_kinds} - {'none'}):
    theta, scaling = rotations[name]
    radians = attention.frequencies(width, theta, scaling)
    factor = getattr(scaling, 'attention_factor', 1.0)
    ropes[name] = attention.angles(positions, radians, factor)
  return ropes
