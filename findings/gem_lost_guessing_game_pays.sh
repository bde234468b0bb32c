#!/usr/bin/env bash
set -euo pipefail
# Expected: GuessTheNumber pays 1 for a game that is won and 0, or less, for a game that is lost,
#   so that the mean reward is the share of games won.
# Happens: If the turns run out, the last guess is paid by its distance from the number, up to 1 -
#   1/range. A player that always names the middle wins few games and has a mean reward above 0.7.
# Versions: gem-llm 0.1.0
# Output seen:
#   always 5: 15 of 200 games won, mean reward 0.713
#   highest reward of a lost game: 0.889
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'gem-llm==0.1.0'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import gem

rewards = []
wins = 0
highest_loss = 0.0
for seed in range(200):
  game = gem.make('game:GuessTheNumber-v0-easy')
  game.reset(seed=seed)
  total = 0.0
  over = False
  while not over:
    observation, reward, terminated, truncated, _ = game.step('\\boxed{5}')
    total += reward
    over = terminated or truncated
  is_win = 'Congratulations' in observation
  wins += is_win
  rewards.append(total)
  if not is_win:
    highest_loss = max(highest_loss, total)
mean = sum(rewards) / len(rewards)
print(f'always 5: {wins} of 200 games won, mean reward {mean:.3f}')
print(f'highest reward of a lost game: {highest_loss:.3f}')
assert wins < 40
assert mean > 0.5 and highest_loss > 0.8, 'lost games pay less now'
PYTHON
