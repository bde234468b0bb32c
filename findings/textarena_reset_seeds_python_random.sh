#!/usr/bin/env bash
set -euo pipefail
# Expected: reset(seed=5) of a game seeds the game. The random numbers of the program around it do
#   not change.
# Happens: It seeds Python's global `random`. Whatever the program draws next is the same after
#   every reset with that seed, for example the shuffle of a batch or the choice of an opponent.
# Versions: textarena 0.7.4
# Output seen:
#   first draw after reset(seed=5), for three seeds of the program: [0.6229016948897019, 0.6229016948897019, 0.6229016948897019]
#   first draw after random.seed(5): 0.6229016948897019
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'textarena==0.7.4'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import random

import textarena

draws = []
for program_seed in (1, 2, 3):
  random.seed(program_seed)
  game = textarena.make('TicTacToe-v0')
  game.reset(num_players=2, seed=5)
  draws.append(random.random())
print('first draw after reset(seed=5), for three seeds of the program:', draws)
random.seed(5)
print('first draw after random.seed(5):', random.random())
assert len(set(draws)) == 1, 'the game has a generator of its own now'
random.seed(5)
assert draws[0] == random.random()
PYTHON
