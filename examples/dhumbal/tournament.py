"""Plays rounds between the scripts and prints a table with intervals.

python -m examples.dhumbal.tournament --rounds=1024
"""

import argparse
import random

from examples.dhumbal import game


def interval(wins: int, rounds: int) -> tuple[float, float]:
  """Returns the 95% interval of a share (Wilson)."""
  z = 1.96
  share = wins / rounds
  centre = share + z * z / (2 * rounds)
  spread = z * (share * (1 - share) / rounds + z * z / (4 * rounds * rounds)) ** 0.5
  return (centre - spread) / (1 + z * z / rounds), (centre + spread) / (1 + z * z / rounds)


def table(rounds: int, seed: int = 0) -> dict[str, dict[str, float]]:
  """Returns the rounds won and the mean cost of each script, in random seats."""
  rng = random.Random(seed)
  names = list(game.SCRIPTS)
  wins = dict.fromkeys(names, 0)
  costs = dict.fromkeys(names, 0)
  for _ in range(rounds):
    rng.shuffle(names)
    played = game.play_round([game.SCRIPTS[name] for name in names], rng)
    wins[names[played.winner]] += 1
    for name, cost in zip(names, played.costs):
      costs[name] += cost
  return {name: {'wins': wins[name], 'cost': costs[name] / rounds} for name in game.SCRIPTS}


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--rounds', type=int, default=1024)
  rounds = parser.parse_args().rounds
  print('script        won    95% interval   mean cost')
  for name, row in table(rounds).items():
    low, high = interval(row['wins'], rounds)
    share = row['wins'] / rounds
    print(f'{name:12s} {share:5.3f}   {low:.3f} to {high:.3f}   {row["cost"]:9.1f}')


if __name__ == '__main__':
  main()
