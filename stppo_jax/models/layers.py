"""The layers of the decoder as stateless Flax modules, and the shapes of models.

Einsum letters are those of `types.py`; the parameter tree is drawn in decoder.py.
"""

import dataclasses
import importlib.resources
import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from stppo_jax.models import attention


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a model; hashable, so it can be a static argument of jax.jit.

  Attributes:
    d_ff: width of the feed-forward network, or of each expert.
    num_experts: experts per layer. 0: one dense feed-forward network.
    experts_per_token: experts that each token goes through.
    norm_topk_prob: whether the weights of the chosen experts sum to 1.
    rope_theta: base of the rotary frequencies.
    rope_scaling: Llama 3's (factor, low_freq_factor, high_freq_factor,
      original_max_position_embeddings).
    tie_embeddings: whether the output matrix is the embedding.
    qkv_bias: whether query, key and value have a bias, as in Qwen2.
    qk_norm: whether query and key are normalised, as in Qwen3.
    family: key names that convert.py reads and writes: 'qwen2' | 'qwen3' | 'qwen3_moe' | 'llama'.
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
  rope_theta: float = 10_000.0
  rope_scaling: tuple[float, float, float, int] | None = None
  rms_norm_eps: float = 1e-6
  tie_embeddings: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
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


class RMSNorm(nn.Module):
  """Returns x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x):
    width = x.shape[-1:]
    scale = self.param('scale', nn.initializers.ones, width, self.config.param_dtype)
    y = x.astype(jnp.float32)
    mean_square = jnp.mean(y * y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(mean_square + self.config.rms_norm_eps)
    y = y * scale.astype(jnp.float32)
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

  @nn.compact
  def __call__(self, x, rope, segments=None, layer_cache=None, slots=None):
    """Maps x [B,T,D] to (x, layer_cache); segments and slots [B,T], layer_cache a (k, v)."""
    config = self.config
    d = config.d_model
    n = config.num_heads
    m = config.num_kv_heads
    h = config.head_dim
    q = Project(config, (d, n, h), bias=config.qkv_bias, name='query')(x)
    k = Project(config, (d, m, h), bias=config.qkv_bias, name='key')(x)
    v = Project(config, (d, m, h), bias=config.qkv_bias, name='value')(x)
    if config.qk_norm:
      q = RMSNorm(config, name='query_norm')(q)
      k = RMSNorm(config, name='key_norm')(k)
    q = attention.rotate(q, rope)
    k = attention.rotate(k, rope)
    if layer_cache is None:
      y = attention.causal(
          q, k, v, segments, config.attention, config.attention_chunk, config.row_sharding
      )
    else:
      cached_k, cached_v = layer_cache
      layer_cache = attention.write_cache(cached_k, cached_v, k, v, slots)
      cached_k, cached_v = layer_cache
      k = cached_k.astype(config.dtype)
      v = cached_v.astype(config.dtype)
      y = attention.cached(q, k, v, slots)
    stddev = 0.02 / math.sqrt(2 * config.num_layers)
    y = Project(config, (n, h, d), 2, stddev=stddev, name='out')(y)
    return y, layer_cache


class Mlp(nn.Module):
  """Returns down(silu(gate(x)) * up(x))."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x):
    config = self.config
    d = config.d_model
    f = config.d_ff
    gate = Project(config, (d, f), name='gate')(x)
    up = Project(config, (d, f), name='up')(x)
    y = jax.nn.silu(gate) * up
    stddev = 0.02 / math.sqrt(2 * config.num_layers)
    return Project(config, (f, d), stddev=stddev, name='down')(y)


def _presets() -> dict[str, ModelConfig]:
  """Returns the shapes of published models, as in each model's config.json, and of the own ones."""
  path = importlib.resources.files('stppo_jax.assets') / 'presets.json'
  presets = {}
  for name, fields in json.loads(path.read_text(encoding='utf-8')).items():
    scaling = fields.pop('rope_scaling', None)
    presets[name] = ModelConfig(**fields, rope_scaling=scaling and tuple(scaling))
  return presets


PRESETS = _presets()
