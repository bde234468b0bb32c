#!/usr/bin/env bash
set -euo pipefail
# Expected: train = data[:8] and held_out = data[8:] of a shuffled MapDataset are two disjoint
#   sets of elements, in every epoch.
# Happens: The slices are of positions, and the shuffle has another order in each epoch. With
#   repeat(2) the second epoch of the training slice contains elements that are held out. Slicing
#   before the shuffle is disjoint.
# Versions: grain 0.2.18
# Output seen:
#   shuffle then slice: held out [5, 2], epoch 1 [0, 4, 6, 7, 8, 3, 1, 9], epoch 2 [5, 7, 6, 0, 4, 8, 9, 2], in both [2, 5]
#   slice then shuffle: held out [8, 9], epoch 1 [0, 4, 6, 7, 5, 3, 1, 2], epoch 2 [5, 7, 6, 0, 4, 1, 3, 2], in both []
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'grain==0.2.18'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import grain

data = grain.MapDataset.range(10)
shared = {}
for name in ('shuffle then slice', 'slice then shuffle'):
  if name == 'shuffle then slice':
    shuffled = data.shuffle(seed=0)
    train, held_out = shuffled[:8], shuffled[8:]
  else:
    train, held_out = data[:8].shuffle(seed=0), data[8:]
  epochs = list(train.repeat(2))
  held = list(held_out)
  shared[name] = sorted(set(epochs) & set(held))
  print(f'{name}: held out {held}, epoch 1 {epochs[:8]}, epoch 2 {epochs[8:]}, in both {shared[name]}')
assert shared['slice then shuffle'] == []
assert shared['shuffle then slice'], 'slices of a shuffled data set are disjoint now'
PYTHON
