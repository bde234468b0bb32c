#!/usr/bin/env bash
set -euo pipefail
# Expected: save_file writes the values of an array. A transposed array is read back transposed.
# Happens: The writer for NumPy copies the memory and ignores the strides. A transposed array, an
#   array in Fortran order and a slice with a step come back with the right shape and dtype and
#   with other values, without an error.
# Versions: safetensors 0.8.0, numpy 2.4.6
# Output seen:
#   transposed: saved [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], loaded [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
#   Fortran order: saved [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], loaded [[0.0, 3.0, 1.0], [4.0, 2.0, 5.0]]
#   every other: saved [0.0, 2.0, 4.0], loaded [0.0, 1.0, 2.0]
#   contiguous: saved [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], loaded [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'safetensors==0.8.0' 'numpy==2.4.6'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from safetensors.numpy import load, save

matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
arrays = {
    'transposed': matrix.T,
    'Fortran order': np.asfortranarray(matrix),
    'every other': np.arange(6, dtype=np.float32)[::2],
    'contiguous': np.ascontiguousarray(matrix.T),
}
equal = {}
for name, array in arrays.items():
  loaded = load(save({'array': array}))['array']
  equal[name] = bool((loaded == array).all())
  print(f'{name}: saved {array.tolist()}, loaded {loaded.tolist()}')
assert equal.pop('contiguous')
assert not any(equal.values()), 'views are written correctly now'
PYTHON
