#!/usr/bin/env bash
set -euo pipefail
# Expected: StandardRestore refuses a target whose dtype differs from that of the checkpoint, as
#   it refuses another shape.
# Happens: It converts without a word. float32 weights restored into an int32 target are cut to
#   whole numbers. Another shape is a ValueError.
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.4.6
# Output seen:
#   target float32: [0.75, -1.5, 2.25]
#   target bfloat16: [0.75, -1.5, 2.25]
#   target int32: [0, -1, 2]
#   target of another shape is refused: True
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'orbax-checkpoint==0.12.8' 'jax==0.10.2' 'numpy==2.4.6'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import tempfile

import absl.logging
import jax.numpy as jnp
import orbax.checkpoint as ocp

absl.logging.set_verbosity('error')
with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
  manager.save(0, args=ocp.args.StandardSave({'w': jnp.array([0.75, -1.5, 2.25])}))
  manager.wait_until_finished()
  restored = {}
  for dtype in (jnp.float32, jnp.bfloat16, jnp.int32):
    target = {'w': jnp.zeros(3, dtype)}
    name = jnp.dtype(dtype).name
    restored[name] = manager.restore(0, args=ocp.args.StandardRestore(target))['w'].tolist()
    print(f'target {name}: {restored[name]}')
  try:
    manager.restore(0, args=ocp.args.StandardRestore({'w': jnp.zeros(4)}))
    refused = False
  except ValueError:
    refused = True
  print('target of another shape is refused:', refused)
assert restored['int32'] == [0, -1, 2], 'another dtype is refused or rounded now'
assert refused
PYTHON
