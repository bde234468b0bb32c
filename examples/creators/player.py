"""Creators: bars with and without exploration, and one that the first policy imitates."""

import re

from examples.creators import env

COUNT = re.compile(r'(\w+) (\d+|\?)[,.]')


def read(observation: str) -> tuple[dict[str, int], list[str]]:
  """Returns ({genre: clicks}, genres that are not known)."""
  counts = {}
  for genre, number in COUNT.findall(observation):
    if genre in env.GENRES:
      counts[genre] = number
  known = {genre: int(number) for genre, number in counts.items() if number != '?'}
  return known, [genre for genre in env.GENRES if genre not in known]


class Player:
  """Publishes any genre in most rounds, and explores well in the others."""

  skill = 0.2  # share of rounds of the explorer

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns an action."""
    known, unknown = read(observation)
    if self._rng.random() < self.skill:
      genre = self._choose(known, unknown)
    else:
      genre = self._rng.choice(env.GENRES)
    return f'[{"EXPLOIT" if genre in known else "EXPLORE"}]:: {genre}'

  def _choose(self, known, unknown):
    """Returns the best known genre if it is good enough, or else an unknown one."""
    best = max(known, key=known.get, default='')
    if best and (known[best] >= env.NUM_USERS // 3 or not unknown):
      return best
    return self._rng.choice(unknown)


class Expert(Player):
  """Explores until a genre is liked by a third of the users. With full information: the ceiling."""

  skill = 1.0


class Stubborn(Expert):
  """Never explores: it publishes its first genre again and again."""

  def _choose(self, known, unknown):
    return next(iter(known), None) or self._rng.choice(unknown)
