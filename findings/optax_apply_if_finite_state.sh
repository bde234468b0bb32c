#!/usr/bin/env bash
set -euo pipefail
# Expected: After a series of NaN gradients ends, apply_if_finite either recovers or keeps
#   reporting that the updates are not finite.
# Happens: The NaN gradient after the limit is applied, as documented, and stays in the moments of
#   Adam. Every later update is NaN, but last_finite is True and the counter is 0, because only
#   the incoming gradients are checked.
# Versions: optax 0.2.8, jax 0.10.2, numpy 2.4.6
# Output seen:
#   gradient 1.0: update -0.0010, last_finite True, errors in a row 0
#   gradient nan: update 0.0000, last_finite False, errors in a row 1
#   gradient nan: update 0.0000, last_finite False, errors in a row 2
#   gradient nan: update nan, last_finite False, errors in a row 3
#   gradient 1.0: update nan, last_finite True, errors in a row 0
#   gradient 1.0: update nan, last_finite True, errors in a row 0
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'optax==0.2.8' 'jax==0.10.2' 'numpy==2.4.6'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import optax

optimizer = optax.apply_if_finite(optax.adam(1e-3), max_consecutive_errors=2)
parameters = jnp.ones(())
state = optimizer.init(parameters)
nan = float('nan')
for gradient in (1.0, nan, nan, nan, 1.0, 1.0):
  update, state = optimizer.update(jnp.array(gradient), state, parameters)
  print(
      f'gradient {gradient}: update {float(update):.4f}, last_finite {bool(state.last_finite)}, '
      f'errors in a row {int(state.notfinite_count)}'
  )
assert jnp.isnan(update), 'the optimizer recovers now'
assert bool(state.last_finite) and int(state.notfinite_count) == 0
PYTHON
