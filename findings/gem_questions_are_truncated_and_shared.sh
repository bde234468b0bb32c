#!/usr/bin/env bash
set -euo pipefail
# Expected: A question that is answered in its only turn has terminated=True and truncated=False, and
#   resets with different seeds give different questions, so that other seeds are held-out questions.
# Happens: The environments of questions (here rg:, by their sources math: and qa:, too) set both
#   flags after every answer. The seed of a reset draws from one pool of 500 questions, which each new
#   environment makes anew, so that about half of the questions of 100 further seeds were drawn by
#   the first 400.
# Versions: gem-llm 0.1.0
# Output seen:
#   right and wrong answers: {(True, True)}
#   59 of 100 questions of further seeds are among those of the first 400 seeds
# Seen on: 2026-11-30, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'gem-llm==0.1.0'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import gem


def question(seed):
  return gem.make('rg:letter_counting').reset(seed=seed)[0]


env = gem.make('rg:letter_counting')
flags = set()
for seed in range(20):
  for answer in range(6):
    env.reset(seed=seed)
    _, _, terminated, truncated, _ = env.step(f'\\boxed{{{answer}}}')
    flags.add((terminated, truncated))
print(f'right and wrong answers: {flags}')
first = {question(seed) for seed in range(400)}
num_known = sum(question(seed) in first for seed in range(10_000, 10_100))
print(f'{num_known} of 100 questions of further seeds are among those of the first 400 seeds')
assert flags == {(True, True)}, 'the flags differ now'
assert num_known > 30, 'seeds have questions of their own now'
PYTHON
