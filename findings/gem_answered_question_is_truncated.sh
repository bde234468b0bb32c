#!/usr/bin/env bash
set -euo pipefail
# Expected: A question that is answered in its only turn has terminated=True and truncated=False, as
#   `truncated` is for limits outside of the task.
# Happens: The environments of questions (here rg:, by their sources math: and qa:, too) set both
#   flags after every answer. A trainer that leaves truncated episodes out trains on none of them. A
#   game that is won sets terminated alone.
# Versions: gem-llm 0.1.0
# Output seen:
#   answers of questions: {(True, True)}
#   won games: {(True, False)}
# Seen on: 2026-11-30, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'gem-llm==0.1.0'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import gem


def flags_of(name, answers):
  found = set()
  for seed in range(20):
    env = gem.make(name)
    for answer in answers:
      env.reset(seed=seed)
      _, reward, terminated, truncated, _ = env.step(f'\\boxed{{{answer}}}')
      if terminated and (reward == 1 or name.startswith('rg:')):
        found.add((terminated, truncated))
  return found


questions = flags_of('rg:letter_counting', range(6))
games = flags_of('game:GuessTheNumber-v0-easy', range(1, 11))
print(f'answers of questions: {questions}')
print(f'won games: {games}')
assert questions == {(True, True)}, 'answered questions are not truncated now'
assert games == {(True, False)}
PYTHON
