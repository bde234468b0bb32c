"""Rotary positions: each pair of channels (i, i + H/2) of a query or key turns with its position."""

import jax.numpy as jnp
import numpy as np


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
