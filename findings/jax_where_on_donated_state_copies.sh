#!/usr/bin/env bash
set -euo pipefail
# Expected: A jitted optimizer step whose state is donated needs no room for a second state. It stays
#   so if the step is taken only where a flag is set, by jnp.where of each new and old array.
# Happens: On a CPU the compiled step keeps copies of moments. With jax.lax.cond around the same
#   step it keeps none.
# Versions: jax 0.10.2, jaxlib 0.10.2
# Output seen:
#   always: 0 arrays of temporaries
#   jnp.where: 2 arrays of temporaries
#   lax.cond: 0 arrays of temporaries
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'jax==0.10.2' 'jaxlib==0.10.2'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp


def adam(params, mean, square, gradient):
  mean = 0.9 * mean + 0.1 * gradient
  square = 0.99 * square + 0.01 * gradient * gradient
  return params - 0.1 * mean / (jnp.sqrt(square) + 1e-8), mean, square


def always(flag, gradient, *state):
  return adam(*state, gradient)


def by_where(flag, gradient, *state):
  return tuple(jnp.where(flag, new, old) for new, old in zip(adam(*state, gradient), state))


def by_cond(flag, gradient, *state):
  return jax.lax.cond(flag, lambda *state: adam(*state, gradient), lambda *state: state, *state)


array = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
flag = jax.ShapeDtypeStruct((), bool)
found = {}
for name, step in (('always', always), ('jnp.where', by_where), ('lax.cond', by_cond)):
  jitted = jax.jit(step, donate_argnums=(2, 3, 4))
  memory = jitted.lower(flag, array, array, array, array).compile().memory_analysis()
  found[name] = round(memory.temp_size_in_bytes / (4 * array.size))
  print(f'{name}: {found[name]} arrays of temporaries')
assert found == {'always': 0, 'jnp.where': 2, 'lax.cond': 0}, 'the copies have changed'
PYTHON
