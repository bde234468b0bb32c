"""The kernels of accelerators for attention in training: splash for TPUs, cuDNN for NVIDIA GPUs."""

from collections.abc import Sequence
import functools
import math
import re
from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

SPLASH_BLOCKS = (512, 256, 128)  # queries and keys held at once: the first that divides T


def causal(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    mask: jax.Array | None,
    backend: str,
    row_sharding: jax.sharding.NamedSharding | None,
    window: int,
    softcap: float,
) -> jax.Array:
  """Computes `attention.causal` with the kernel `backend`, on each device's rows and heads.

  `mask` [B,1,T,T] says what each query (row) attends to, in place of segments and window.
  """
  devices = jax.devices() if row_sharding is None else row_sharding.mesh.devices.flat
  kernel = {'splash': _splash, 'cudnn': _cudnn}[backend]
  attend = functools.partial(kernel, platform=devices[0].platform, window=window, softcap=softcap)
  if row_sharding is not None:
    num_kv_heads = k.shape[2]
    attend = _on_each_device(attend, row_sharding, num_kv_heads)
  return attend(q, k, v, segments, mask)


def obstacle(
    backend: str,
    device: jax.Device,
    dtype: str,
    head_dim: int,
    lengths: Sequence[int],
    softcap: float,
) -> str:
  """Returns why a backend cannot run; empty where it can."""
  if backend == 'splash':
    multiple = SPLASH_BLOCKS[-1]
    if device.platform != 'tpu':
      return f'needs a TPU, and this is {device.device_kind}'
    if head_dim % 64:
      return f'needs heads of a multiple of 64 channels, and the model has {head_dim}'
    for length in lengths:
      if length % multiple:
        return f'needs rows of a multiple of {multiple} tokens, and some have {length}'
  if backend == 'cudnn':
    # NVIDIA's capability is '8.0' and so on; ROCm's is not a number.
    is_nvidia = device.platform == 'gpu' and re.match(r'(\d+)\.\d', device.compute_capability)
    generation = int(is_nvidia[1]) if is_nvidia else 0
    most_channels = 256 if generation >= 9 else 128  # Hopper and later
    if generation < 8:
      return f'needs an NVIDIA GPU of capability 8.0 or more, and this is {device.device_kind}'
    if dtype not in ('bfloat16', 'float16'):
      return f'computes in bfloat16 or float16, and config.model.dtype is {dtype}'
    if head_dim % 8 or head_dim > most_channels:
      return (
          f'needs heads of at most {most_channels} channels on this device, a multiple of 8, and '
          f'the model has {head_dim}'
      )
    if softcap:
      return f'needs scores without a cap, and the model has attention_softcap = {softcap}'
  return ''


def _splash(q, k, v, segments, mask, platform, window=0, softcap=0.0):
  """Runs the TPU kernel on one device's part; other platforms interpret it, slowly, for tests."""
  from jax.experimental.pallas.ops.tpu import splash_attention as splash  # only on TPUs

  length, heads, width = q.shape[1:]
  assert length % SPLASH_BLOCKS[-1] == 0, f'`choose` was not given the length {length}'
  block = next(block for block in SPLASH_BLOCKS if length % block == 0)
  sizes = splash.BlockSizes(
      block_q=block,
      block_kv=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_q_dq=block,
      block_kv_dq=block,
  )
  options: dict[str, Any] = {
      'block_sizes': sizes,
      'interpret': platform != 'tpu',
      'attn_logits_soft_cap': softcap or None,
  }

  def attend_segments(q, k, v, segments):
    shape = (length, length)
    fixed: Any = splash.LocalMask(shape, (window - 1, 0), 0) if window else splash.CausalMask(shape)
    kernel = splash.make_splash_mha_single_device(splash.MultiHeadMask([fixed] * heads), **options)
    ids = None if segments is None else splash.SegmentIds(segments, segments)
    return kernel(q, k, v, ids)

  def attend_by_mask(q, k, v, mask):  # [1,T,T], which all heads read from memory
    kernel = splash.make_splash_mha_single_device(mask, **options)
    for name in ('fwd_mask_info', 'dq_mask_info', 'dkv_mask_info'):
      # JAX made an array of this flag, and then asks for its value.
      info = getattr(kernel, name)._replace(is_dynamic_mask=True)
      setattr(kernel, name, info)
    return kernel(q, k, v)

  q = jnp.swapaxes(q * width**-0.5, 1, 2)
  k = jnp.swapaxes(k, 1, 2)
  v = jnp.swapaxes(v, 1, 2)
  if mask is None:
    y = jax.vmap(attend_segments)(q, k, v, segments)
  else:
    y = jax.vmap(attend_by_mask)(q, k, v, mask)
  return jnp.swapaxes(y, 1, 2)


def _cudnn(q, k, v, segments, mask, platform, window=0, softcap=0.0):
  """Runs cuDNN on one device's part; other platforms run XLA's implementation, for tests."""
  assert segments is None and mask is None and not softcap
  implementation: Literal['cudnn', 'xla'] = 'cudnn' if platform == 'gpu' else 'xla'
  local = (window - 1, 0) if window else None
  return jax.nn.dot_product_attention(
      q, k, v, is_causal=True, local_window_size=local, implementation=implementation
  )


def _on_each_device(attend, row_sharding, num_kv_heads):
  """Maps `attend` over each device's rows, and over its heads where the key heads divide evenly."""
  mesh = row_sharding.mesh
  rows = row_sharding.spec[0]
  head_axes = tuple(axis for axis in mesh.axis_names if axis not in rows)
  num_shards = math.prod(mesh.shape[axis] for axis in head_axes)
  if num_kv_heads % num_shards == 0:
    part = P(rows, None, head_axes)
  else:
    part = P(rows)
  # No check: Pallas does not declare how its results vary over the devices.
  return jax.shard_map(
      attend,
      mesh=mesh,
      in_specs=(part, part, part, P(rows), P(rows)),
      out_specs=part,
      check_vma=False,
  )
