"""The layers of the decoder as stateless Flax modules, and the shapes of models.

Einsum letters are those of `types.py`; the parameter tree is drawn in decoder.py.
"""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from stppo_jax.models import attention
from stppo_jax.models import lora
from stppo_jax.models import moe


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a model; hashable, so it can be a static argument of jax.jit."""

  vocab_size: int
  d_model: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  d_ff: int  # of an expert, where there are experts
  num_experts: int = 0  # per layer; 0: one dense feed-forward network
  experts_per_token: int = 0
  norm_topk_prob: bool = False  # the weights of the chosen experts sum to 1
  rope_theta: float = 10_000.0
  # Llama 3's: (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings).
  rope_scaling: tuple[float, float, float, int] | None = None
  rms_norm_eps: float = 1e-6
  tie_embeddings: bool = False
  qkv_bias: bool = False  # Qwen2
  qk_norm: bool = False  # Qwen3
  # Key names that convert.py reads and writes: 'qwen2' | 'qwen3' | 'qwen3_moe' | 'llama'.
  family: str = 'qwen2'
  head: str = 'tokens'  # 'tokens' | 'value' | 'both' (two heads on one trunk)
  dtype: str = 'float32'  # of the computation: 'float32' | 'bfloat16'
  param_dtype: str = 'float32'  # of the stored parameters
  remat: str = 'none'  # what backward recomputes: 'none' | 'full' (all) | 'dots' (all but matmuls)
  scan_layers: bool = True  # False unrolls the layers: slower to compile, faster on a CPU
  attention: str = 'plain'  # in training: 'plain' | 'splash' (TPU) | 'cudnn' (NVIDIA)
  attention_chunk: int = 0  # queries whose scores are live at once in plain attention; 0: all
  max_positions: int = 32_768  # the longest row the published weights were trained for
  lora_scale: float = 1.0  # of what adapters add, if there are any
  cache_tile: int = 0  # slots per tile of keys in a KVCache; 0: one tile
  row_sharding: jax.sharding.NamedSharding | None = None  # of activations' rows; None: XLA's choice


class RMSNorm(nn.Module):
  """Returns x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x):
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:], self.config.param_dtype)
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.config.rms_norm_eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


class Project(nn.Module):
  """Multiplies x [..,in..] by a kernel [in..,out..]; adds a bias and an adapter where they exist.

  Choice: one product of two matrices. For an einsum with more axes XLA transposes copies of x in
  the kernel's gradient, which is slower on a CPU (measured in docs/dev/notes).
  """

  config: ModelConfig
  shape: tuple[int, ...]  # of the kernel
  contracted: int = 1  # how many leading axes of the kernel are contracted with the last of x
  bias: bool = False  # on all other axes of the kernel
  stddev: float = 0.02
  precision: str | None = None  # 'highest': float32 is not rounded on its way into the product

  @nn.compact
  def __call__(self, x):
    config = self.config
    inputs, outputs = self.shape[: self.contracted], self.shape[self.contracted :]
    rows = x.shape[: x.ndim - self.contracted]
    x = x.reshape(-1, math.prod(inputs))
    normal = nn.initializers.normal(self.stddev)
    kernel = self.param('kernel', normal, self.shape, config.param_dtype)
    matrix = kernel.astype(config.dtype).reshape(x.shape[1], -1)
    y = jnp.matmul(x, matrix, precision=self.precision)
    if self.has_variable('params', 'lora_a'):
      a, b = self.get_variable('params', 'lora_a'), self.get_variable('params', 'lora_b')
      y = y + config.lora_scale * lora.product(x, a.astype(config.dtype), b.astype(config.dtype))
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
      cached_k, cached_v = layer_cache
      layer_cache = attention.write_cache(cached_k, cached_v, k, v, slots)
      k, v = (a.astype(config.dtype) for a in layer_cache)
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
    d, f = config.d_model, config.d_ff
    gate = Project(config, (d, f), name='gate')(x)
    up = Project(config, (d, f), name='up')(x)
    y = jax.nn.silu(gate) * up
    stddev = 0.02 / math.sqrt(2 * config.num_layers)
    return Project(config, (f, d), stddev=stddev, name='down')(y)


class Experts(nn.Module):
  """Returns the weighted sum of each token's chosen experts; see moe.py."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x, chosen=None):
    """Maps x [B,T,D] to (y [B,T,D], Routing); `chosen` [B,T,A] replays an earlier choice.

    Choice: the router computes in float32, because bfloat16 makes many experts equal.
    """
    config = self.config
    d, f, e = config.d_model, config.d_ff, config.num_experts
    exact = dataclasses.replace(config, dtype='float32')
    router = Project(exact, (d, e), precision='highest', name='router')
    logits = router(x.astype(jnp.float32))
    normal = nn.initializers.normal
    stddevs = (0.02, 0.02, 0.02 / math.sqrt(2 * config.num_layers))
    kernels = tuple(
        self.param(name, normal(stddev), shape, config.param_dtype)
        for name, stddev, shape in zip(moe.KERNELS, stddevs, ((e, d, f), (e, d, f), (e, f, d)))
    )
    weights, routing = moe.route(logits, config.experts_per_token, config.norm_topk_prob, chosen)
    if self.is_initializing():  # under vmap, which a sharded sort does not need to know
      return x, routing
    gate, up, down = (kernel.astype(config.dtype) for kernel in kernels)
    y = moe.experts(x, weights, routing.chosen, (gate, up, down), config.row_sharding)
    return y, routing


class Block(nn.Module):
  """Applies one layer: attention and feed-forward, each after a norm and added to the residual."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x, rope, segments=None, layer_cache=None, slots=None, chosen=None):
    """Maps x [B,T,D] to (x, layer_cache, Routing or None); `chosen` as in `Experts`."""
    y = RMSNorm(self.config, name='attention_norm')(x)
    y, layer_cache = Attention(self.config, name='attention')(y, rope, segments, layer_cache, slots)
    x = x + y
    y = RMSNorm(self.config, name='mlp_norm')(x)
    routing = None
    if self.config.num_experts:
      y, routing = Experts(self.config, name='moe')(y, chosen)
    else:
      y = Mlp(self.config, name='mlp')(y)
    return x + y, layer_cache, routing


# The shapes of published models, by name; the numbers are those of each model's config.json.
# The columns that the models of a family share.
_qwen2 = functools.partial(ModelConfig, rope_theta=1e6, qkv_bias=True, head_dim=128, family='qwen2')
_tiny = functools.partial(
    ModelConfig,
    vocab_size=2697,
    head_dim=32,
    rope_theta=10_000.0,
    tie_embeddings=True,
    qkv_bias=True,
    family='qwen2',
    max_positions=4096,
)
_qwen3 = functools.partial(
    ModelConfig,
    vocab_size=151_936,
    head_dim=128,
    rope_theta=1e6,
    qk_norm=True,
    max_positions=40_960,
)
_llama3 = functools.partial(
    ModelConfig,
    vocab_size=128_256,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
    family='llama',
    max_positions=131_072,
)
PRESETS = {
    # The embedded model.
    'tiny': _tiny(d_model=128, num_layers=3, num_heads=4, num_kv_heads=2, d_ff=384),
    # Of the study: does what holds for the embedded model hold for one of five times its size?
    'tiny-5m': _tiny(d_model=256, num_layers=5, num_heads=8, num_kv_heads=4, d_ff=896),
    'qwen2.5-0.5b': _qwen2(
        vocab_size=151_936,
        d_model=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        d_ff=4864,
        tie_embeddings=True,
    ),
    'qwen2.5-1.5b': _qwen2(
        vocab_size=151_936,
        d_model=1536,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        d_ff=8960,
        tie_embeddings=True,
    ),
    'qwen2.5-3b': _qwen2(
        vocab_size=151_936,
        d_model=2048,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
        d_ff=11_008,
        tie_embeddings=True,
    ),
    'qwen2.5-7b': _qwen2(
        vocab_size=152_064, d_model=3584, num_layers=28, num_heads=28, num_kv_heads=4, d_ff=18_944
    ),
    'qwen3-8b': _qwen3(
        d_model=4096, num_layers=36, num_heads=32, num_kv_heads=8, d_ff=12_288, family='qwen3'
    ),
    'qwen3-30b-a3b': _qwen3(
        d_model=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        d_ff=768,
        num_experts=128,
        experts_per_token=8,
        norm_topk_prob=True,
        family='qwen3_moe',
    ),
    'llama3.2-1b': _llama3(
        d_model=2048,
        num_layers=16,
        num_heads=32,
        head_dim=64,
        d_ff=8192,
        rope_scaling=(32.0, 1.0, 4.0, 8192),
        tie_embeddings=True,
    ),
    'llama3.2-3b': _llama3(
        d_model=3072,
        num_layers=28,
        num_heads=24,
        d_ff=8192,
        rope_scaling=(32.0, 1.0, 4.0, 8192),
        tie_embeddings=True,
    ),
    'llama3.1-8b': _llama3(
        d_model=4096, num_layers=32, num_heads=32, d_ff=14_336, rope_scaling=(8.0, 1.0, 4.0, 8192)
    ),
    'smollm2-135m': ModelConfig(
        vocab_size=49_152,
        d_model=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        d_ff=1536,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        tie_embeddings=True,
        family='llama',
        max_positions=8192,
    ),
}
