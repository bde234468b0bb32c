#!/usr/bin/env bash
set -euo pipefail
# Expected: An array of bfloat16, as jax.device_get returns it, sorts as float16 and float32 do, with
#   NaN at the end. Its median is NaN if it holds one.
# Happens: One NaN leaves the array unsorted: what stands before the NaN is not compared with what
#   follows. np.unique returns values in the wrong order, and np.median a finite, wrong number. The
#   same is true of both types of float8. jnp.sort is right.
# Versions: numpy 2.4.6, ml_dtypes 0.6.0, jax 0.10.2
# Output seen:
#   bfloat16: sort [3, nan, 0, 1, 1, 2], unique [3, nan, 0, 1, 2], median 0.5
#   float8_e4m3fn: sort [3, nan, 0, 1, 1, 2], unique [3, nan, 0, 1, 2], median 0.5
#   float16: sort [0, 1, 1, 2, 3, nan], unique [0, 1, 2, 3, nan], median nan
#   jnp.sort of bfloat16: [0, 1, 1, 2, 3, nan]
# Seen on: 2026-11-30, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  'numpy==2.4.6' 'ml_dtypes==0.6.0' 'jax==0.10.2' 'jaxlib==0.10.2'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import jax.numpy as jnp
import ml_dtypes
import numpy as np

VALUES = [3, np.nan, 1, 2, 0, 1]


def shown(values):
  """Returns numbers as a short text."""
  return '[' + ', '.join(f'{float(value):g}' for value in values) + ']'


for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16):
  x = np.array(VALUES, dtype)
  median = float(np.median(x))
  name = np.dtype(dtype).name
  print(f'{name}: sort {shown(np.sort(x))}, unique {shown(np.unique(x))}, median {median:g}')
  is_sorted = shown(np.sort(x)) == '[0, 1, 1, 2, 3, nan]'
  assert is_sorted == np.isnan(median) == (dtype is np.float16), f'{name} sorts otherwise now'
by_jax = shown(jnp.sort(jnp.array(VALUES, jnp.bfloat16)))
print(f'jnp.sort of bfloat16: {by_jax}')
assert by_jax == '[0, 1, 1, 2, 3, nan]'
PYTHON
