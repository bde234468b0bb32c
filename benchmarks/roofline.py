"""The roofline of a decoded token beside a measured one, on one CPU device; JSON lines.

  python -m benchmarks.roofline

The rate of the memory is measured too: by products of a vector with matrices that together are
larger than the processor's caches. It alternates with the decoding, so that another load slows
both; of each the fastest repeat counts. `ratio` = measured / roofline, so 1.5 means half slower
than the estimate.
"""

import json
import time

from absl import app
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import decoder
from stppo_jax.planning import roofline
from stppo_jax.planning import topologies
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling

MODEL = decoder.ModelConfig(
    vocab_size=8192,
    d_model=768,
    num_layers=10,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    d_ff=2048,
    tie_embeddings=True,
    cache_tile=decoder.CPU_CACHE_TILE,
)
STEPS, SLOTS, REPEATS = 16, 128, 7


def main(unused_argv):
  for rows in (1, 4):
    print(json.dumps({'benchmark': 'roofline'} | measure(rows)), flush=True)


def measure(rows: int) -> dict[str, float]:
  """Returns the measured seconds of a token for so many rows, the roofline's, and their ratio."""
  params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), MODEL)
  stops = np.zeros((2, MODEL.vocab_size), np.int32)
  sampler = sampler_lib.Sampler(
      MODEL, stops, (), sampling.Sizes(SLOTS, rows=rows, slot_buckets=(SLOTS,), steps=STEPS)
  )
  params = sampler.copy(params)
  call = sampler.idle_rows(rows)
  call.lengths[:] = 1
  call.budgets[:] = STEPS
  call.keys[:] = jax.random.key_data(jax.random.split(jax.random.key(1), rows))

  def decode():
    context = jax.block_until_ready(sampler.empty(rows, SLOTS))
    started = time.perf_counter()
    jax.block_until_ready(sampler.decode(params, context, call, STEPS, rows + 1))
    return (time.perf_counter() - started) / STEPS

  size = 4 * decoder.num_params(MODEL)
  width, count = 2048, size // (4 * 2048**2)
  matrices = tuple(jnp.full((width, width), 1e-3) for _ in range(count))
  vector = jnp.ones((1, width))

  @jax.jit
  def multiply(vector, matrices):
    for matrix in matrices:
      vector = vector @ matrix
    return vector

  def read():
    started = time.perf_counter()
    jax.block_until_ready(multiply(vector, matrices))
    return (time.perf_counter() - started) / (count * 4 * width**2)

  decode(), read()
  token_s, byte_s = np.min([(decode(), read()) for _ in range(REPEATS)], axis=0)
  cache = 4 * 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * rows
  chip = topologies.Chip('here', 0, flops=np.inf, bandwidth=1 / byte_s)
  wanted_s = roofline.Token(weights=size, cache=cache).seconds(SLOTS, chip)
  return {
      'rows': rows,
      'weights_mb': size / 1e6,
      'memory_gb_per_s': 1e-9 / byte_s,
      'measured_ms': 1e3 * token_s,
      'roofline_ms': 1e3 * wanted_s,
      'ratio': token_s / wanted_s,
  }


if __name__ == '__main__':
  app.run(main)
