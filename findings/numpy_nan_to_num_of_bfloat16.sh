#!/usr/bin/env bash
set -euo pipefail
# Expected: np.nan_to_num replaces NaN and infinities of any floating-point array, or refuses the
#   array.
# Happens: It returns an array of bfloat16 or float8 unchanged, without a warning, because numpy
#   counts these types neither as inexact nor as floating-point ones. np.isnan sees the NaN.
#   jnp.nan_to_num replaces it.
# Versions: numpy 2.4.6, ml_dtypes 0.6.0, jax 0.10.2
# Output seen:
#   bfloat16: nan_to_num gives [nan, inf, 1], isnan sees 1
#   float8_e5m2: nan_to_num gives [nan, inf, 1], isnan sees 1
#   float16: nan_to_num gives [0, 65504, 1], isnan sees 1
#   jnp.nan_to_num of bfloat16: [0, 3.38953e+38, 1]
# Seen on: 2026-11-30, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  'numpy==2.4.6' 'ml_dtypes==0.6.0' 'jax==0.10.2' 'jaxlib==0.10.2'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import ml_dtypes
import numpy as np

VALUES = [np.nan, np.inf, 1]


def shown(values):
  """Returns numbers as a short text."""
  return '[' + ', '.join(f'{float(value):g}' for value in values) + ']'


for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.float16):
  x = np.array(VALUES, dtype)
  replaced = np.nan_to_num(x)
  name = np.dtype(dtype).name
  print(f'{name}: nan_to_num gives {shown(replaced)}, isnan sees {np.isnan(x).sum()}')
  assert np.isnan(x).sum() == 1
  is_unchanged = shown(replaced) == '[nan, inf, 1]'
  assert is_unchanged == (dtype is not np.float16), f'{name} is treated otherwise now'
by_jax = jnp.nan_to_num(jnp.array(VALUES, jnp.bfloat16))
print(f'jnp.nan_to_num of bfloat16: {shown(by_jax)}')
assert bool(jnp.isfinite(by_jax).all())
PYTHON
