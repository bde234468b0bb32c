"""Players of all patterns: one that marks the ceiling, and one that the first policy imitates."""

import re

QUESTION = re.compile(r'(\d) plus (\d) plus (\d)\?')


class Player:
  """Adds right in a share of its turns, and miscounts in the others."""

  skill = 0.4

  def __init__(self, rng):
    self._rng = rng
    self._digits = (0, 0, 0)

  def act(self, observation: str) -> str:
    """Returns a thought or an answer."""
    if match := QUESTION.search(observation):
      self._digits = tuple(map(int, match.groups()))
    a, b, c = self._digits
    if observation.endswith('think.'):
      return f'{a} plus {b} is {self._add(a + b)}'
    return str(self._add(a + b + c))

  def _add(self, total):
    if self._rng.random() < self.skill:
      return total
    return max(0, total + self._rng.choice((-2, -1, 1, 1)))


class Expert(Player):
  """Adds right: the ceiling. It also plays the demonstrations."""

  skill = 1.0
