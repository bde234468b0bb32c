"""Two players of Nim: the scripted opponent, and the one that the first policy imitates."""

import re

PILE = re.compile(r'pile (\d+): (\d+)')


def piles(observation: str) -> dict[int, int]:
  """Returns {pile: objects} of the newest board in an observation."""
  return {int(pile): int(left) for pile, left in PILE.findall(observation)}


def opponent(observation: str, rng) -> str:
  """Takes the last pile where only one is left, else any number of objects from any pile."""
  left = {pile: size for pile, size in piles(observation).items() if size}
  pile = rng.choice(sorted(left))
  size = left[pile] if len(left) == 1 else rng.randint(1, left[pile])
  return f'[{pile} {size}]'


class Player:
  """Takes any number of objects from any pile, also where it could take the last ones."""

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns a legal move in TextArena's form."""
    left = {pile: size for pile, size in piles(observation).items() if size}
    pile = self._rng.choice(sorted(left))
    return f'[{pile} {self._rng.randint(1, left[pile])}]'
