#!/usr/bin/env bash
set -euo pipefail
# Expected: Data sets with the seeds 0 and 1 are independent: one can be trained on and the other
#   held out.
# Happens: Item i of seed s has the seed s + i, so the two have all questions but one in common,
#   shifted by one place. Seeds have to be further apart than the size of the data set.
# Versions: reasoning-gym 0.1.25
# Output seen:
#   chain_sum: 99 of 100 questions of seed 1 are in seed 0, shifted by one: True; of seed 100: 0
#   leg_counting: 99 of 100 questions of seed 1 are in seed 0, shifted by one: True; of seed 100: 0
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'reasoning-gym==0.1.25'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import reasoning_gym

shared = {}
for name in ('chain_sum', 'leg_counting'):
  questions = []
  for seed in (0, 1, 100):
    data = reasoning_gym.create_dataset(name, seed=seed, size=100)
    questions.append([item['question'] for item in data])
  first, second, far = questions
  shared[name] = sum(question in set(first) for question in second)
  is_shifted = first[1:] == second[:-1]
  repeats = sum(question in set(first) for question in far)
  print(f'{name}: {shared[name]} of 100 questions of seed 1 are in seed 0, shifted by one: {is_shifted}; '
        f'of seed 100: {repeats}')
  assert is_shifted, 'the seeds are independent now'
  assert shared[name] >= 99
PYTHON
