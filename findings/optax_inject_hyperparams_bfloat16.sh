#!/usr/bin/env bash
set -euo pipefail
# Expected: inject_hyperparams makes the learning rate of Adam changeable. The first update is the
#   same as that of plain Adam.
# Happens: It stores every constant in the dtype of the parameters. With bfloat16 parameters b2 =
#   0.999 becomes 1, the bias correction divides 0 by 0, and the first update is NaN. Plain Adam
#   is finite.
# Versions: optax 0.2.8, jax 0.10.2, numpy 2.4.6
# Output seen:
#   plain Adam: [-0.000999451 -0.000999451 -0.000999451]
#   inject_hyperparams: [nan nan nan]
#   b2 in the state: 1 bfloat16
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'optax==0.2.8' 'jax==0.10.2' 'numpy==2.4.6'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import optax

parameters = {'w': jnp.ones(3, jnp.bfloat16)}
gradients = {'w': jnp.ones(3, jnp.bfloat16)}
plain = optax.adam(learning_rate=1e-3)
injected = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
plain_updates, _ = plain.update(gradients, plain.init(parameters), parameters)
updates, state = injected.update(gradients, injected.init(parameters), parameters)
b2 = state.hyperparams['b2']
print('plain Adam:', plain_updates['w'])
print('inject_hyperparams:', updates['w'])
print('b2 in the state:', b2, b2.dtype)
assert jnp.isfinite(plain_updates['w']).all()
assert jnp.isnan(updates['w']).all(), 'the injected optimizer is finite now'
assert b2.dtype == jnp.bfloat16 and b2 == 1
PYTHON
