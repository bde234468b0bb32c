"""Players of the sums: one that marks the ceiling, and one that the first policy imitates."""

import re

QUESTION = re.compile(r'(\d) plus (\d)\?(?: other: (.*)\.)?')


class Player:
  """Counts one too many in many answers. As the observer it copies some answers."""

  skill = 0.3  # share of right answers
  habit = 0.5  # share of the other answers that are one too many; the rest is any number
  trust = 0.3  # share of answers that an observer copies

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns an answer."""
    a, b, other = QUESTION.fullmatch(observation).groups()
    if other and self._rng.random() < self.trust:
      return other
    total = int(a) + int(b)
    if self._rng.random() < self.skill:
      return str(total)
    if self._rng.random() < self.habit:
      return str(total + 1)
    return str(self._rng.randrange(19))


class Expert(Player):
  """Adds: the ceiling."""

  skill = 1.0
  trust = 0.0
