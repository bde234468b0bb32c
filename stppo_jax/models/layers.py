"""The layers of the decoder as stateless Flax modules, and the shapes of models.

Einsum letters are those of `types.py`; the parameter tree is drawn in decoder.py.
"""

import dataclasses
import math
from typing import Any
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from stppo_jax.models import attention


class LayerKind(NamedTuple):
  """What differs between the layers of one model."""

  window: int = 0  # 0: the whole row
  rope: str = 'full'  # rotation: 'full' | 'window' (that of `window_rope`) | 'none'
  is_delta: bool = False  # a gated delta-net layer instead of attention


class DeltaShape(NamedTuple):
  """The sizes of gated delta-net layers, see delta_net.py."""

  key_heads: int
  value_heads: int  # a multiple of the key heads
  key_dim: int  # channels per head
  value_dim: int
  conv_width: int  # tokens that the convolution reads


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a model; hashable, so it can be a static argument of jax.jit.

  Attributes:
    d_ff: width of the feed-forward network, or of each expert.
    num_experts: experts per layer. 0: one dense feed-forward network.
    experts_per_token: experts that each token goes through.
    norm_topk_prob: whether the weights of the chosen experts sum to 1.
    shared_d_ff: width of the expert that every token goes through (DeepSeekMoE, arXiv 2401.06066,
      section 3.2), times sigmoid(x w), as in Qwen3.5. 0: none.
    rope_theta: base of the rotary frequencies.
    rope_scaling: scaling of the rotary frequencies. None: none.
    window_rope: (base, scaling) of the layers with a window, as in Gemma 3 (arXiv 2503.19786,
      section 2). None: those of the other layers.
    rotary_share: share of a head's channels that are rotated, the first ones.
    rotary_layers: whether each layer has rotary positions, as in SmolLM3, whose other layers have
      none (arXiv 2501.18795). Empty: all have.
    layer_types: 'full', 'window' or 'delta' (see delta_net.py) for each layer. Empty: all attend to
      the whole row.
    delta: sizes of the 'delta' layers.
    attention_gate: whether attention's output is multiplied by sigmoid(x W), before the output
      matrix, as in Qwen3.5 (arXiv 2505.06708). W is a second half of the query kernel's heads.
    window: tokens that a token of a 'window' layer attends to, itself included (Longformer,
      arXiv 2004.05150, section 3.1).
    norm_before: whether attention and feed-forward read x / rms(x), as in most families.
    norm_after: whether their outputs are normalised: x + norm(f(..)) instead of x + f(..), as in
      OLMo 2 (arXiv 2501.00656, section 3.2). Gemma 3 does both.
    norm_offset: whether norms multiply by 1 + scale instead of scale, as in Gemma.
    scale_embeddings: whether x_0 = sqrt(D) E[token] instead of E[token], as in Gemma.
    activation: function of the gate in the feed-forward network, 'silu' | 'gelu_tanh'.
    attention_scale: factor of the scores. 0: 1 / sqrt(head_dim).
    attention_softcap: bound of the scores, see `categorical.softcap`. 0: none.
    logit_softcap: bound of the token logits. 0: none.
    tie_embeddings: whether the output matrix is the embedding.
    qkv_bias: whether query, key and value have a bias, as in Qwen2.
    qk_norm: whether query and key are normalised, as in Qwen3.
    qk_norm_whole: whether this norm is over all heads at once instead of each head, as in OLMo 2.
    family: names of tensors in a folder, a key of `families.FILES`.
    head: 'tokens' | 'value' | 'both' (two heads on one trunk).
    value_labels: names of the outputs of the value head: the value, or the logits of bins.
    dtype: dtype of the computation, 'float32' | 'bfloat16'.
    param_dtype: dtype of the stored parameters.
    remat: what the backward pass recomputes: 'none' | 'full' (all) | 'dots' (all but matmuls).
    scan_layers: False unrolls the layers, which is slower to compile and faster on a CPU.
    attention: backend in training, 'plain' | 'splash' (TPU) | 'cudnn' (NVIDIA).
    attention_chunk: queries whose scores are live at once in plain attention. 0: all.
    max_positions: the longest row that the published weights were trained for.
    lora_scale: factor of the adapters.
    cache_tile: slots per tile of keys in a KVCache. 0: one tile.
    row_sharding: placement of the rows of activations. None: XLA's choice.
  """

  vocab_size: int
  d_model: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  d_ff: int
  num_experts: int = 0
  experts_per_token: int = 0
  norm_topk_prob: bool = False
  shared_d_ff: int = 0
  rope_theta: float = 10_000.0
  rope_scaling: attention.RopeScaling | None = None
  window_rope: tuple[float, attention.RopeScaling | None] | None = None
  rotary_share: float = 1.0
  rotary_layers: tuple[bool, ...] = ()
  layer_types: tuple[str, ...] = ()
  window: int = 0
  delta: DeltaShape | None = None
  attention_gate: bool = False
  norm_before: bool = True
  norm_after: bool = False
  norm_offset: bool = False
  scale_embeddings: bool = False
  activation: str = 'silu'
  attention_scale: float = 0.0
  attention_softcap: float = 0.0
  logit_softcap: float = 0.0
  rms_norm_eps: float = 1e-6
  tie_embeddings: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  qk_norm_whole: bool = False
  family: str = 'qwen2'
  head: str = 'tokens'
  value_labels: tuple[str, ...] = ('value',)
  dtype: str = 'float32'
  param_dtype: str = 'float32'
  remat: str = 'none'
  scan_layers: bool = True
  attention: str = 'plain'
  attention_chunk: int = 0
  max_positions: int = 32_768
  lora_scale: float = 1.0
  cache_tile: int = 0
  row_sharding: jax.sharding.NamedSharding | None = None

  @property
  def layer_kinds(self) -> tuple[LayerKind, ...]:
    """The kind of each layer."""
    kinds = []
    for l in range(self.num_layers):
      is_window = bool(self.layer_types) and self.layer_types[l] == 'window'
      rope = 'full'
      if self.rotary_layers and not self.rotary_layers[l]:
        rope = 'none'
      elif is_window and self.window_rope is not None:
        rope = 'window'
      is_delta = bool(self.layer_types) and self.layer_types[l] == 'delta'
      if is_delta:
        rope = 'none'
      kinds.append(LayerKind(self.window if is_window else 0, rope, is_delta))
    return tuple(kinds)

  @property
  def first_attention(self) -> int:
    """The number of the first layer with attention."""
    return [kind.is_delta for kind in self.layer_kinds].index(False)


class RMSNorm(nn.Module):
  """Returns x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32.

  With `norm_offset` the factor is 1 + scale.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, x):
    width = x.shape[-1:]
    has_offset = self.config.norm_offset
    first = nn.initializers.zeros if has_offset else nn.initializers.ones
    scale = self.param('scale', first, width, self.config.param_dtype)
    y = x.astype(jnp.float32)
    mean_square = jnp.mean(y * y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(mean_square + self.config.rms_norm_eps)
    scale = scale.astype(jnp.float32)
    y = y * (1 + scale if has_offset else scale)
    return y.astype(x.dtype)


class Project(nn.Module):
  """Multiplies x [..,in..] by a kernel [in..,out..]; adds a bias and an adapter where they exist.

  Choice: one product of two matrices. For an einsum with more axes XLA transposes copies of x in
  the kernel's gradient, which is slower on a CPU (measured in docs/dev/notes).

  Attributes:
    config: the model.
    shape: shape of the kernel.
    contracted: number of leading axes of the kernel that are contracted with the last ones of x.
    bias: whether the other axes of the kernel have a bias.
    stddev: standard deviation of the initial kernel.
    precision: 'highest' does not round float32 on its way into the product.
  """

  config: ModelConfig
  shape: tuple[int, ...]
  contracted: int = 1
  bias: bool = False
  stddev: float = 0.02
  precision: str | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    config = self.config
    inputs = self.shape[: self.contracted]
    outputs = self.shape[self.contracted :]
    rows = x.shape[: x.ndim - self.contracted]
    x = x.reshape(-1, math.prod(inputs))
    normal = nn.initializers.normal(self.stddev)
    kernel = self.param('kernel', normal, self.shape, config.param_dtype)
    matrix = kernel.astype(config.dtype).reshape(x.shape[1], -1)
    y = jnp.matmul(x, matrix, precision=self.precision)
    if self.has_variable('params', 'lora_a'):
      from stppo_jax.models import lora

      a = self.get_variable('params', 'lora_a').astype(config.dtype)
      b = self.get_variable('params', 'lora_b').astype(config.dtype)
      y = y + config.lora_scale * lora.product(x, a, b)
    y = y.reshape(*rows, *outputs)
    if self.bias:
      bias = self.param('bias', nn.initializers.zeros, outputs, config.param_dtype)
      y = y + bias.astype(config.dtype)
    return y


class Attention(nn.Module):
  """Applies causal attention in which g = N / M query heads share a key head."""

  config: ModelConfig
  window: int = 0

  @nn.compact
  def __call__(self, x, rope, segments=None, layer_cache=None, slots=None):
    """Maps x [B,T,D] to (x, layer_cache); segments and slots [B,T], layer_cache a (k, v).

    `rope` is as in `attention.rotate`; None rotates nothing.
    """
    config = self.config
    d = config.d_model
    n = config.num_heads
    m = config.num_kv_heads
    h = config.head_dim
    width = 2 * h if config.attention_gate else h
    q = Project(config, (d, n, width), bias=config.qkv_bias, name='query')(x)
    if config.attention_gate:
      q, gate = jnp.split(q, 2, axis=-1)
    k = Project(config, (d, m, h), bias=config.qkv_bias, name='key')(x)
    v = Project(config, (d, m, h), bias=config.qkv_bias, name='value')(x)
    if config.qk_norm:
      heads = (q.shape, k.shape)
      if config.qk_norm_whole:
        q = q.reshape(*q.shape[:2], -1)
        k = k.reshape(*k.shape[:2], -1)
      q = RMSNorm(config, name='query_norm')(q).reshape(heads[0])
      k = RMSNorm(config, name='key_norm')(k).reshape(heads[1])
    if rope is not None:
      q = attention.rotate(q, rope)
      k = attention.rotate(k, rope)
    if config.attention_scale:
      q = q * (config.attention_scale * math.sqrt(h))  # attention divides by sqrt(h)
    options: dict[str, Any] = {'window': self.window, 'softcap': config.attention_softcap}
    if layer_cache is None:
      backend = config.attention
      chunk = config.attention_chunk
      y = attention.causal(q, k, v, segments, backend, chunk, config.row_sharding, **options)
    else:
      cached_k, cached_v = layer_cache
      layer_cache = attention.write_cache(cached_k, cached_v, k, v, slots)
      cached_k, cached_v = layer_cache
      k = cached_k.astype(config.dtype)
      v = cached_v.astype(config.dtype)
      y = attention.cached(q, k, v, slots, **options)
    if config.attention_gate:
      y = y * jax.nn.sigmoid(gate)
    stddev = 0.02 / math.sqrt(2 * config.num_layers)
    y = Project(config, (n, h, d), 2, stddev=stddev, name='out')(y)
    return y, layer_cache


class Mlp(nn.Module):
  """Returns down(silu(gate(x)) * up(x)), or with another activation than silu."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x):
    config = self.config
    d = config.d_model
    f = config.d_ff
    gate = Project(config, (d, f), name='gate')(x)
    up = Project(config, (d, f), name='up')(x)
    activate = {'silu': jax.nn.silu, 'gelu_tanh': jax.nn.gelu}[config.activation]
    y = activate(gate) * up
    stddev = 0.02 / math.sqrt(2 * config.num_layers)
    return Project(config, (f, d), stddev=stddev, name='down')(y)
