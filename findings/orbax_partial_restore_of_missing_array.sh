#!/usr/bin/env bash
set -euo pipefail
# Expected: partial_restore=True reads a part of a checkpoint, such as the policy without the moments
#   of the optimizer. An array that is asked for and not there is an error, as without the option.
# Happens: The ShapeDtypeStruct that asked for the array is returned in its place. It has the right
#   shape and dtype, so a check of shapes passes. The error comes where a number is first needed.
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2
# Output seen:
#   restored whole: ValueError
#   restored in part: w ndarray, head ShapeDtypeStruct of shape (3,)
# Seen on: 2026-11-29, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  'orbax-checkpoint==0.12.8' 'jax==0.10.2'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - "$folder/checkpoint" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
checkpointer.save(sys.argv[1], {'w': jnp.ones(2)})
wanted = {
    'w': jax.ShapeDtypeStruct((2,), jnp.float32),
    'head': jax.ShapeDtypeStruct((3,), jnp.float32),  # was never saved
}
options = {'item': wanted, 'restore_args': ocp.checkpoint_utils.construct_restore_args(wanted)}
try:
  checkpointer.restore(sys.argv[1], args=ocp.args.PyTreeRestore(**options))
  whole = 'no error'
except ValueError:
  whole = 'ValueError'
print('restored whole:', whole)
part = checkpointer.restore(
    sys.argv[1], args=ocp.args.PyTreeRestore(**options, partial_restore=True)
)
kinds = {name: type(value).__name__ for name, value in part.items()}
print(f'restored in part: w {kinds["w"]}, head {kinds["head"]} of shape {part["head"].shape}')
assert whole == 'ValueError'
assert kinds['head'] == 'ShapeDtypeStruct', 'a missing array is treated otherwise now'
PYTHON
