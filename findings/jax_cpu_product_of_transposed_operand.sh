#!/usr/bin/env bash
set -euo pipefail
# Expected: The products of attention's backward pass that sum over queries, as that of scores
#   [t,s] and queries [t,h] over t, take about as long as those of its forward pass, which have the
#   same size.
# Happens: On a CPU XLA gives the product of a transposed left operand to Eigen, which computes
#   bfloat16 in float32. The product whose left operand is not transposed goes to YNNPACK. A CPU
#   with AMX needs more than 10 times as long for the first. A copy of the operand in the other
#   order would cost a tenth of that, but XLA joins a transpose with the product when it compiles.
# Versions: jax 0.12.0.1; the same with 0.10.2
# Output seen:
#   forward [t,s] x [s,h] has YNNPACK True, backward [t,s]^T x [t,h] False, its transposed copy True
#   bfloat16: 0.15 ms, 5.78 ms (38 times as long), 0.38 ms
#   float32: 1.13 ms, 4.61 ms (4.1 times as long), 1.60 ms
# Seen on: 2026-11-29, Python 3.12, one core of a Xeon with AMX

if ! grep -q amx_bf16 /proc/cpuinfo; then
  echo 'this CPU has no AMX, so nothing can be seen here'
  exit 0
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'jax==0.12.0.1'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import functools
import time

import jax
import jax.numpy as jnp

HEADS, QUERIES, KEYS, WIDTH = 6, 960, 320, 64
product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def forward(scores, values):
  return product('bts,bsh->bth', scores, values)


def backward(scores, queries):
  return product('bts,bth->bsh', scores, queries)


def backward_of_copy(transposed, queries):
  return product('bst,bth->bsh', transposed, queries)


def uses_ynnpack(function, *arguments):
  return '__ynn_fusion' in jax.jit(function).lower(*arguments).compile().as_text()


def milliseconds(function, *arguments):
  run = jax.jit(function)
  run(*arguments).block_until_ready()
  times = []
  for _ in range(30):
    start = time.process_time()
    run(*arguments).block_until_ready()
    times.append(time.process_time() - start)
  return 1000 * min(times)


def calls(dtype):
  scores = jax.random.normal(jax.random.key(0), (HEADS, QUERIES, KEYS), dtype)
  values = jnp.ones((HEADS, KEYS, WIDTH), dtype)
  queries = jnp.ones((HEADS, QUERIES, WIDTH), dtype)
  transposed = jnp.asarray(scores.swapaxes(1, 2).copy())
  return (
      (forward, scores, values),
      (backward, scores, queries),
      (backward_of_copy, transposed, queries),
  )


found = [uses_ynnpack(*call) for call in calls(jnp.bfloat16)]
print(
    'forward [t,s] x [s,h] has YNNPACK %s, backward [t,s]^T x [t,h] %s, its transposed copy %s'
    % tuple(found)
)
for dtype in (jnp.bfloat16, jnp.float32):
  first, second, third = (milliseconds(*call) for call in calls(dtype))
  ratio = f'{second / first:.2g} times as long'
  print(f'{dtype.__name__}: {first:.2f} ms, {second:.2f} ms ({ratio}), {third:.2f} ms')
assert found == [True, False, True], found
PYTHON
