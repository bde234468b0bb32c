#!/usr/bin/env bash
set -euo pipefail
# Expected: Equal logits over 10,000 ids give each id with the same probability, whatever their
#   dtype. 100,000 samples contain nearly all of them.
# Happens: With bfloat16 logits the Gumbel noise is drawn in bfloat16, too, and has few distinct
#   values. Ties go to the lowest id, so low ids are sampled far too often and most ids never.
#   float32 logits are right.
# Versions: jax 0.10.2, numpy 2.4.6
# Output seen:
#   float32: 10000 distinct ids of 10000, 10% of samples among the first 1000
#   bfloat16: 919 distinct ids of 10000, 100% of samples among the first 1000
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

key = jax.random.key(0)
distinct = {}
for dtype in (jnp.float32, jnp.bfloat16):
  logits = jnp.zeros(10_000, dtype)
  draw = jax.jit(lambda key: jax.random.categorical(key, logits))
  ids = np.concatenate([jax.vmap(draw)(keys) for keys in jax.random.split(key, (100, 1000))])
  name = jnp.dtype(dtype).name
  distinct[name] = len(np.unique(ids))
  low = (ids < 1000).mean()
  print(f'{name}: {distinct[name]} distinct ids of 10000, {low:.0%} of samples among the first 1000')
assert distinct['float32'] > 9900
assert distinct['bfloat16'] < 5000, 'bfloat16 logits are sampled well now'
PYTHON
