#!/usr/bin/env bash
set -euo pipefail
# Expected: make_splash_mha_single_device takes a mask that is a JAX array, for masks that depend on
#   data. Such a mask is usually a traced array, because the kernel is made inside of jit.
# Happens: Outside of jit the kernel works. Inside of jit the call raises TracerBoolConversionError:
#   the kernel turns the whole description of the mask into arrays, also its flag is_dynamic_mask,
#   and then asks for the value of the flag. With the flag set back the result is right, and a mask
#   of one head serves all heads.
# Versions: jax 0.10.2 and 0.12.0.1 (the newest ones for Python 3.11 and 3.12)
# Output seen:
#   outside of jit: largest error 1.2e-06
#   inside of jit: TracerBoolConversionError
#   inside of jit, flag set back: largest error 1.2e-06
# Seen on: 2026-11-29, Python 3.11 and 3.12, CPU (the kernel is interpreted)

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'jax>=0.10.2,<0.12.1'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
import numpy as np

LENGTH, HEADS, WIDTH = 128, 2, 64

rng = np.random.default_rng(0)
q, k, v = jnp.asarray(rng.standard_normal((3, HEADS, LENGTH, WIDTH)), jnp.float32)
columns = np.arange(LENGTH)
mask = jnp.asarray((columns <= columns[:, None]) & (columns % 7 != 3) | (columns == columns[:, None]))


def kernel_of(mask):
  return splash.make_splash_mha_single_device(mask[None], interpret=True)


def attend(mask, q, k, v):
  return kernel_of(mask)(q, k, v)


def attend_with_flag(mask, q, k, v):
  kernel = kernel_of(mask)
  for name in ('fwd_mask_info', 'dq_mask_info', 'dkv_mask_info'):
    info = getattr(kernel, name)
    if info is not None:
      setattr(kernel, name, info._replace(is_dynamic_mask=True))
  return kernel(q, k, v)


scores = jnp.where(mask, jnp.einsum('hqd,hkd->hqk', q, k), -jnp.inf)
expected = jax.nn.softmax(scores) @ v


def check(name, result):
  error = float(jnp.abs(result - expected).max())
  print(f'{name}: largest error {error:.1e}')
  assert error < 1e-5, error


check('outside of jit', attend(mask, q, k, v))
try:
  jax.jit(attend)(mask, q, k, v)
except jax.errors.TracerBoolConversionError as error:
  print('inside of jit:', type(error).__name__)
else:
  raise AssertionError('the kernel works inside of jit now')
check('inside of jit, flag set back', jax.jit(attend_with_flag)(mask, q, k, v))
PYTHON
