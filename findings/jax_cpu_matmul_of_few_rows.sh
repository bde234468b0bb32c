#!/usr/bin/env bash
set -euo pipefail
# Expected: The product of a few rows with a large matrix, as in every step of sampling, takes the
#   same time however it is written.
# Happens: On a CPU it is faster as (W^T x^T)^T with W^T stored, the matrix on the left. XLA turns
#   this form back into x W when it compiles, and the gain is lost. An optimization_barrier before
#   the last transpose keeps it.
# Versions: jax 0.12.0; the same with 0.10.2
# Output seen:
#   x W 3.82 ms, (W^T x^T)^T 1.80 ms, with a barrier 1.37 ms: 2.8 times as fast as x W
#   the matrix is the left operand: without a barrier False, with it True
# Seen on: 2026-11-29, Python 3.12, two cores of an AMD EPYC, which also did other work

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'jax==0.12.0'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import re
import time

import jax
import jax.numpy as jnp
import numpy as np

ROWS, SIZE, LAYERS = 16, 2048, 6


def plain(x, w):
  return x @ w


def left(x, w_t):
  return jax.lax.dot_general(w_t, x, (((1,), (1,)), ((), ()))).T


def left_with_barrier(x, w_t):
  y = jax.lax.dot_general(w_t, x, (((1,), (1,)), ((), ())))
  return jax.lax.optimization_barrier(y).T


def milliseconds(product, x, matrices):
  run = jax.jit(lambda x, matrices: [product(x, w) for w in matrices])
  jax.block_until_ready(run(x, matrices))
  seconds = []
  for _ in range(15):
    start = time.perf_counter()
    jax.block_until_ready(run(x, matrices))
    seconds.append(time.perf_counter() - start)
  return 1000 * min(seconds) / LAYERS


def has_matrix_on_the_left(product, x, w):
  text = jax.jit(product).lower(x, w).compile().as_text()
  (operands,) = re.findall(r' dot\(([^)]*)\)', text)
  shapes = dict(re.findall(r'(%[\w.-]+) = f32\[([\d,]+)\]', text))
  first = operands.split(',')[0].split()[-1]
  return shapes[first] == f'{SIZE},{SIZE}'


rng = np.random.default_rng(0)
x = jnp.asarray(rng.standard_normal((ROWS, SIZE)), jnp.float32)
matrices = [jnp.asarray(rng.standard_normal((SIZE, SIZE)), jnp.float32) for _ in range(LAYERS)]
transposed = [jnp.asarray(np.asarray(w).T.copy()) for w in matrices]
np.testing.assert_allclose(plain(x, matrices[0]), left_with_barrier(x, transposed[0]), atol=1e-3)
ms = [
    milliseconds(plain, x, matrices),
    milliseconds(left, x, transposed),
    milliseconds(left_with_barrier, x, transposed),
]
print('x W %.2f ms, (W^T x^T)^T %.2f ms, with a barrier %.2f ms: ' % tuple(ms), end='')
print('%.1f times as fast as x W' % (ms[0] / ms[2]))
kept = [has_matrix_on_the_left(product, x, transposed[0]) for product in (left, left_with_barrier)]
print('the matrix is the left operand: without a barrier %s, with it %s' % tuple(kept))
assert kept == [False, True], kept
assert ms[0] > 1.2 * ms[2], ms
PYTHON
