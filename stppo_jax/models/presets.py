"""The shapes of published models, and how large each is. Names in, ModelConfigs out.

The numbers are those of each model's published config.json.
"""

import math

import jax

from stppo_jax.models import decoder

PRESETS = {
  # The model that ships with the project.
  'tiny': decoder.ModelConfig(
    vocab_size=2697, d_model=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, d_ff=384,
    rope_theta=10_000.0, tie_embeddings=True, qkv_bias=True, family='qwen2', max_positions=4096,
  ),
  'qwen2.5-0.5b': decoder.ModelConfig(
    vocab_size=151_936, d_model=896, num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64,
    d_ff=4864, rope_theta=1e6, tie_embeddings=True, qkv_bias=True, family='qwen2',
  ),
  'qwen2.5-1.5b': decoder.ModelConfig(
    vocab_size=151_936, d_model=1536, num_layers=28, num_heads=12, num_kv_heads=2, head_dim=128,
    d_ff=8960, rope_theta=1e6, tie_embeddings=True, qkv_bias=True, family='qwen2',
  ),
  'qwen2.5-3b': decoder.ModelConfig(
    vocab_size=151_936, d_model=2048, num_layers=36, num_heads=16, num_kv_heads=2, head_dim=128,
    d_ff=11_008, rope_theta=1e6, tie_embeddings=True, qkv_bias=True, family='qwen2',
  ),
  'qwen2.5-7b': decoder.ModelConfig(
    vocab_size=152_064, d_model=3584, num_layers=28, num_heads=28, num_kv_heads=4, head_dim=128,
    d_ff=18_944, rope_theta=1e6, qkv_bias=True, family='qwen2',
  ),
  'qwen3-8b': decoder.ModelConfig(
    vocab_size=151_936, d_model=4096, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128,
    d_ff=12_288, rope_theta=1e6, qk_norm=True, family='qwen3', max_positions=40_960,
  ),
  'llama3.2-1b': decoder.ModelConfig(
    vocab_size=128_256, d_model=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64,
    d_ff=8192, rope_theta=500_000.0, rope_scaling=(32.0, 1.0, 4.0, 8192), rms_norm_eps=1e-5,
    tie_embeddings=True, family='llama', max_positions=131_072,
  ),
  'llama3.2-3b': decoder.ModelConfig(
    vocab_size=128_256, d_model=3072, num_layers=28, num_heads=24, num_kv_heads=8, head_dim=128,
    d_ff=8192, rope_theta=500_000.0, rope_scaling=(32.0, 1.0, 4.0, 8192), rms_norm_eps=1e-5,
    tie_embeddings=True, family='llama', max_positions=131_072,
  ),
  'llama3.1-8b': decoder.ModelConfig(
    vocab_size=128_256, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    d_ff=14_336, rope_theta=500_000.0, rope_scaling=(8.0, 1.0, 4.0, 8192), rms_norm_eps=1e-5,
    family='llama', max_positions=131_072,
  ),
  'smollm2-135m': decoder.ModelConfig(
    vocab_size=49_152, d_model=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    d_ff=1536, rope_theta=100_000.0, rms_norm_eps=1e-5, tie_embeddings=True, family='llama',
    max_positions=8192,
  ),
}


def num_params(config):
  """How many numbers `decoder.init` would make, without making them. Tied embeddings count once."""
  shapes = jax.eval_shape(lambda key: decoder.init(key, config), jax.random.key(0))
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
