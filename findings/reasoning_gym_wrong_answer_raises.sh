#!/usr/bin/env bash
set -euo pipefail
# Expected: score_answer gives 0 or a small score to a wrong answer, whatever its text.
# Happens: Three data sets read the answer without a guard and raise for texts and JSON that a
#   language model often writes: ValueError, TypeError and KeyError. Code that masks failed
#   episodes then removes the worst answers from the batch.
# Versions: reasoning-gym 0.1.25
# Output seen:
#   prime_factorization, I do not know: ValueError: invalid literal for int() with base 10: 'I do not know'
#   boxnet, 3.5: TypeError: 'float' object is not iterable
#   game_of_life, {"grid": [[0, 1], [1, 0]]}: KeyError: 0
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'reasoning-gym==0.1.25'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import reasoning_gym

CASES = (
    ('prime_factorization', 'I do not know', ValueError),
    ('boxnet', '3.5', TypeError),
    ('game_of_life', '{"grid": [[0, 1], [1, 0]]}', KeyError),
)
for name, answer, error_type in CASES:
  data = reasoning_gym.create_dataset(name, seed=3, size=1)
  entry = data[0]
  try:
    outcome = data.score_answer(answer, entry)
  except (ValueError, TypeError, KeyError) as error:
    outcome = error
  print(f'{name}, {answer}: {type(outcome).__name__}: {outcome}')
  assert type(outcome) is error_type, f'{name} behaves differently now'
PYTHON
