#!/usr/bin/env bash
set -euo pipefail
# Expected: A run that collapsed is restored from an earlier step and trained on. Its next save
#   replaces the checkpoint of the collapsed run, or raises, as save(force=True) does.
# Happens: CheckpointManager.save returns False and writes nothing, without a warning, until the run
#   has passed the last step of the collapsed one. latest_step() and restore() of that time give
#   the collapsed parameters.
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2
# Output seen:
#   steps [1, 2, 3], restored 1, save(2) returns False
#   latest step 3, step 2 holds [2.0, 2.0] of the first run, not [20.0, 20.0]
#   save(2, force=True) raises StepAlreadyExistsError
# Seen on: 2026-11-29, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  'orbax-checkpoint==0.12.8' 'jax==0.10.2'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - "$folder/checkpoints" <<'PYTHON'
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp

manager = ocp.CheckpointManager(sys.argv[1], options=ocp.CheckpointManagerOptions(max_to_keep=3))


def save(step, value, **options):
  state = {'w': jnp.full(2, value)}
  saved = manager.save(step, args=ocp.args.StandardSave(state), **options)
  manager.wait_until_finished()
  return saved


assert all(save(step, float(step)) for step in (1, 2, 3))
steps = manager.all_steps()
assert manager.restore(1)['w'].tolist() == [1.0, 1.0]
saved = save(2, 20.0)
print(f'steps {steps}, restored 1, save(2) returns {saved}')
held = manager.restore(2)['w'].tolist()
print(f'latest step {manager.latest_step()}, step 2 holds {held} of the first run, not [20.0, 20.0]')
try:
  save(2, 20.0, force=True)
  forced = 'saves'
except ValueError as error:
  forced = f'raises {type(error).__name__}'
print(f'save(2, force=True) {forced}')
manager.close()
assert not saved and held == [2.0, 2.0] and manager.latest_step() == 3, 'a save after a rollback is written now'
assert forced == 'raises StepAlreadyExistsError'
PYTHON
