#!/usr/bin/env bash
set -euo pipefail
# Expected: The sum of a thousand bfloat16 numbers is the same up to one rounding, whether it is
#   written as sum or as segment_sum with one segment.
# Happens: sum adds in float32 and rounds once. segment_sum, and .at[].add, on which it is built,
#   round to bfloat16 after each addition. A thousand ones give 256, and a thousand log-ratios of
#   0.01, as in a long turn, give 4 instead of 10.
# Versions: jax 0.10.2
# Output seen:
#   ones: at.add 256, segment_sum 256, sum 1000
#   0.01: at.add 4, segment_sum 4, sum 10
# Seen on: 2026-11-29, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'jax==0.10.2'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp


@jax.jit
def sums(x):
  one_segment = jnp.zeros(x.size, jnp.int32)
  return {
      'sum': x.sum(),
      'segment_sum': jax.ops.segment_sum(x, one_segment, 1)[0],
      'at.add': jnp.zeros(1, x.dtype).at[one_segment].add(x)[0],
  }


found = {}
for name, value in (('ones', 1.0), ('0.01', 0.01)):
  values = sums(jnp.full(1000, value, jnp.bfloat16))
  assert all(x.dtype == jnp.bfloat16 for x in values.values())
  found[name] = {key: float(x) for key, x in values.items()}
  print(f'{name}:', ', '.join(f'{key} {x:g}' for key, x in found[name].items()))
for name, total in (('ones', 1000), ('0.01', 10)):
  assert abs(found[name]['sum'] - total) < 0.01 * total
  assert found[name]['segment_sum'] < total / 2, 'segment_sum adds in float32 now'
  assert found[name]['at.add'] == found[name]['segment_sum']
PYTHON
