"""The player that the first policy imitates: it guesses, and uses answers in half of the games."""

import re

HINT = re.compile(r'number is (higher|lower) than (\d+)')


class Player:
  """Guesses any number. In half of the episodes it guesses one that the answers leave."""

  def __init__(self, rng):
    self._rng = rng
    self._uses_answers = rng.random() < 0.5
    self._low = self._high = 0

  def act(self, observation: str) -> str:
    """Returns a guess in GEM's form."""
    if limits := re.search(r'between (\d+) and (\d+)', observation):
      self._low, self._high = int(limits[1]), int(limits[2])
    for direction, number in HINT.findall(observation) if self._uses_answers else ():
      if direction == 'higher':
        self._low = max(self._low, int(number) + 1)
      else:
        self._high = min(self._high, int(number) - 1)
    return f'\\boxed{{{self._rng.randint(self._low, max(self._low, self._high))}}}'
