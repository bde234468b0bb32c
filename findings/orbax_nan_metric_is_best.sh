#!/usr/bin/env bash
set -euo pipefail
# Expected: With best_fn and max_to_keep=2, CheckpointManager keeps the two steps of the highest
#   metric. A step with the metric NaN is not among the best.
# Happens: NaN counts as the best metric, and then every newer step as better. The step with the
#   metric 0.9 is deleted, and best_step names the last one, with 0.3.
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.4.6
# Output seen:
#   step 0, reward 0.1: kept [0], best_step 0
#   step 1, reward 0.9: kept [0, 1], best_step 1
#   step 2, reward nan: kept [1, 2], best_step 2
#   step 3, reward 0.2: kept [2, 3], best_step 3
#   step 4, reward 0.3: kept [3, 4], best_step 4
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
options = ocp.CheckpointManagerOptions(
    max_to_keep=2, best_fn=lambda metrics: metrics['reward'], best_mode='max'
)
with ocp.CheckpointManager(tempfile.mkdtemp(), options=options) as manager:
  for step, reward in enumerate([0.1, 0.9, float('nan'), 0.2, 0.3]):
    state = {'w': jnp.full(2, float(step))}
    manager.save(step, args=ocp.args.StandardSave(state), metrics={'reward': reward})
    manager.wait_until_finished()
    kept = sorted(manager.all_steps())
    best = manager.best_step()
    print(f'step {step}, reward {reward}: kept {kept}, best_step {best}')
assert 1 not in kept, 'the step with the highest metric is kept now'
assert best == 4
PYTHON
