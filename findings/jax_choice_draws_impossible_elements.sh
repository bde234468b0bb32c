#!/usr/bin/env bash
set -euo pipefail
# Expected: jax.random.choice draws no element of probability 0. If more elements are asked for
#   without replacement than have a probability, it cannot answer; NumPy raises ValueError. The
#   same holds for probabilities that are all 0, as priorities of questions that are all solved.
# Happens: It fills up with elements of probability 0. With probabilities that are all 0, or with a
#   NaN among them, it returns one index for every draw.
# Versions: jax 0.10.2, numpy 2.4.6
# Output seen:
#   three of four without replacement, two possible: jax [0, 1, 2], NumPy ValueError
#   all probabilities 0: jax [0, 0, 0, 0, 0, 0, 0, 0], NumPy ValueError
#   a NaN in the second place: jax [1, 1, 1, 1, 1, 1, 1, 1], NumPy ValueError
# Seen on: 2026-11-29, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'jax==0.10.2' 'numpy==2.4.6'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

nan = float('nan')
cases = (
    ('three of four without replacement, two possible', [0.5, 0.5, 0.0, 0.0], 3, False),
    ('all probabilities 0', [0.0, 0.0, 0.0, 0.0], 8, True),
    ('a NaN in the second place', [0.25, nan, 0.25, 0.25], 8, True),
)
found = []
for name, probabilities, number, with_replacement in cases:
  drawn = jax.random.choice(
      jax.random.key(0), 4, (number,), replace=with_replacement, p=jnp.array(probabilities)
  )
  indices = np.asarray(drawn).tolist()
  if not with_replacement:
    indices = sorted(indices)
  try:
    np.random.default_rng(0).choice(4, number, replace=with_replacement, p=probabilities)
    numpy_says = 'an answer'
  except ValueError:
    numpy_says = 'ValueError'
  print(f'{name}: jax {indices}, NumPy {numpy_says}')
  assert numpy_says == 'ValueError'
  found.append(indices)
assert found[0][:2] == [0, 1] and found[0][2] in (2, 3), 'it draws possible elements only now'
assert len(set(found[1])) == 1 and len(set(found[2])) == 1, 'it draws otherwise now'
PYTHON
