#!/usr/bin/env bash
set -euo pipefail
# Expected: A product of bfloat16 matrices takes the same time with a result in bfloat16 as with one
#   in float32 that is rounded to bfloat16, and is faster than a product of float32 matrices on a
#   CPU with AMX.
# Happens: Only the product with a result in float32 uses AMX. The product that jnp.matmul computes
#   by default, with a result in bfloat16, is as slow as that of float32. The rounded results are
#   equal but for one in 8,000. JAX 0.12.0 uses AMX for both.
# Versions: jax 0.10.2, the newest one for Python 3.11
# Output seen:
#   GFLOP/s of bfloat16 to bfloat16 231, bfloat16 to float32 1537, float32 to float32 272
#   386 of 3145728 results differ after rounding
# Seen on: 2026-11-29, Python 3.12, two cores of an Intel Xeon with amx_bf16

if ! grep -q amx_bf16 /proc/cpuinfo; then
  echo 'this CPU has no AMX, so nothing can be seen here'
  exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'jax==0.10.2'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

ROWS, IN, OUT = 2048, 576, 1536


@functools.partial(jax.jit, static_argnums=2)
def product(a, b, dtype):
  return jnp.matmul(a, b, preferred_element_type=dtype)


def gigaflops(a, b, dtype):
  jax.block_until_ready(product(a, b, dtype))
  seconds = []
  for _ in range(15):
    start = time.perf_counter()
    jax.block_until_ready(product(a, b, dtype))
    seconds.append(time.perf_counter() - start)
  return 2 * ROWS * IN * OUT / min(seconds) / 1e9


rng = np.random.default_rng(0)
a = jnp.asarray(rng.standard_normal((ROWS, IN)), jnp.bfloat16)
b = jnp.asarray(rng.standard_normal((IN, OUT)), jnp.bfloat16)
default = product(a, b, None)
rounded = product(a, b, jnp.float32).astype(jnp.bfloat16)
assert default.dtype == jnp.bfloat16
differing = int((default != rounded).sum())
to_bfloat16 = gigaflops(a, b, None)
to_float32 = gigaflops(a, b, jnp.float32)
float32 = gigaflops(a.astype(jnp.float32), b.astype(jnp.float32), None)
print('GFLOP/s of bfloat16 to bfloat16 %.0f, ' % to_bfloat16, end='')
print('bfloat16 to float32 %.0f, float32 to float32 %.0f' % (to_float32, float32))
print(f'{differing} of {default.size} results differ after rounding')
assert to_float32 > 2.5 * to_bfloat16, (to_float32, to_bfloat16)
assert differing < 0.001 * default.size, differing
PYTHON
