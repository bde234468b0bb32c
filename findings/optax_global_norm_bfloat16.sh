#!/usr/bin/env bash
set -euo pipefail
# Expected: The global norm of 1,000 bfloat16 leaves with 100 ones each is sqrt(100000), about
#   316. Clipping to 1 gives updates of norm 1.
# Happens: The sum over the leaves is itself computed in bfloat16 and stops growing at 32768, so
#   the norm is 181. The clipped updates have norm 1.75. An error of rounding would be below 1%.
# Versions: optax 0.2.8, jax 0.10.2, numpy 2.4.6
# Output seen:
#   norm 181.0, exact 316.2
#   norm after clip_by_global_norm(1.0): 1.747
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'optax==0.2.8' 'jax==0.10.2' 'numpy==2.4.6'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import numpy as np
import optax

gradients = {f'w{i}': jnp.ones(100, jnp.bfloat16) for i in range(1000)}
norm = float(optax.global_norm(gradients))
clip = optax.clip_by_global_norm(1.0)
updates, _ = clip.update(gradients, clip.init(gradients))
squares = [np.square(np.asarray(leaf, np.float64)).sum() for leaf in updates.values()]
clipped_norm = float(np.sqrt(sum(squares)))
print(f'norm {norm:.1f}, exact {np.sqrt(100_000):.1f}')
print(f'norm after clip_by_global_norm(1.0): {clipped_norm:.3f}')
assert norm < 200, 'the norm is accurate now'
assert clipped_norm > 1.5, 'the clipped norm is accurate now'
PYTHON
