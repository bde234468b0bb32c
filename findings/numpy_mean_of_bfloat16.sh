#!/usr/bin/env bash
set -euo pipefail
# Expected: The mean of a metric that device_get returns in bfloat16 is the mean that JAX computes.
#   NumPy adds float16 in float32 for a mean.
# Happens: NumPy knows bfloat16 from ml_dtypes only as another library's type, for which it adds in
#   the type itself and takes the elements one by one. The sum of ones stops at 256, so the mean of
#   1,000 ones is 0.256. A standard deviation is wrong, too. No warning is given.
# Versions: jax 0.10.2, numpy 2.4.6, ml_dtypes 0.6.0
# Output seen:
#   mean of 1000 ones: bfloat16 0.255859, float16 1, jnp 1
#   share of 1000 rows of which every other counts: bfloat16 0.255859, jnp 0.5
#   std of 0..6: bfloat16 2.01562 (1000 values), 1.28125 (10000), float64 2.0
# Seen on: 2026-11-29, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  'jax==0.10.2' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

ones = jnp.ones(1000, jnp.bfloat16)
on_host = jax.device_get(ones)
half = np.ones(1000, np.float16).mean()
print(f'mean of 1000 ones: bfloat16 {float(on_host.mean()):g}, float16 {half:g}, jnp {float(ones.mean()):g}')
assert float(ones.mean()) == half == 1.0
assert float(on_host.mean()) < 0.3, 'NumPy adds bfloat16 in float32 now'

every_other = jnp.arange(1000) % 2 == 0
counts = every_other.astype(jnp.bfloat16)
share = float(jax.device_get(counts).mean())
print(f'share of 1000 rows of which every other counts: bfloat16 {share:g}, jnp {float(counts.mean()):g}')
assert share < 0.3 and float(counts.mean()) == 0.5

spreads = []
for size in (1000, 10000):
  values = jnp.asarray(np.arange(size) % 7, jnp.bfloat16)
  spreads.append(float(jax.device_get(values).std()))
exact = (np.arange(10000) % 7).astype(np.float64).std()
print(f'std of 0..6: bfloat16 {spreads[0]:g} (1000 values), {spreads[1]:g} (10000), float64 {exact:.1f}')
assert abs(exact - 2) < 0.01 and abs(spreads[1] - 2) > 0.1
PYTHON
