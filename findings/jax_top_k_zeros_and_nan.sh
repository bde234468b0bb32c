#!/usr/bin/env bash
set -euo pipefail
# Expected: top_k and argmax agree on the largest element, because -0.0 == 0.0, and a NaN is
#   either always or never the largest.
# Happens: top_k uses a total order: -0.0 is below 0.0, so with k=1 it names another index than
#   argmax. A NaN with the sign bit set, which 0/0 gives on x86, is below -inf in top_k and the
#   largest in argmax and in sort.
# Versions: jax 0.10.2, numpy 2.4.6
# Output seen:
#   [-0.0, 0.0, -5.0]: top_k 1, argmax 0
#   [nan, -inf, 1, 2]: top_k [0, 3, 2, 1], argmax 0, sort puts it last: True
#   [-nan, -inf, 1, 2]: top_k [3, 2, 1, 0], argmax 0, sort puts it last: True
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'jax==0.10.2' 'numpy==2.4.6'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

zeros = jnp.array([-0.0, 0.0, -5.0])
top = int(jax.lax.top_k(zeros, 1)[1][0])
largest = int(jnp.argmax(zeros))
print(f'[-0.0, 0.0, -5.0]: top_k {top}, argmax {largest}')

tops = {}
for name, nan in (('nan', np.float32(np.nan)), ('-nan', -np.float32(np.nan))):
  values = jnp.array([nan, -np.inf, 1.0, 2.0])
  tops[name] = np.asarray(jax.lax.top_k(values, 4)[1]).tolist()
  last = bool(jnp.isnan(jnp.sort(values)[-1]))
  print(f'[{name}, -inf, 1, 2]: top_k {tops[name]}, argmax {int(jnp.argmax(values))}, sort puts it last: {last}')
  assert int(jnp.argmax(values)) == 0 and last
assert (top, largest) == (1, 0), 'top_k and argmax agree on zeros now'
assert tops['nan'][0] == 0 and tops['-nan'][-1] == 0, 'top_k ignores the sign of a NaN now'
PYTHON
