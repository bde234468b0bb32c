"""The player that the first policy imitates: it guesses, and uses answers in half of the games."""

import json


class Player:
  """Guesses any number. In half of the episodes it guesses one that the answers leave."""

  def __init__(self, rng):
    self._rng = rng
    self._uses_answers = rng.random() < 0.5
    self._low = 1
    self._high = 20
    self._last = 0

  def act(self, observation: str) -> str:
    """Returns an action as JSON."""
    if self._uses_answers and 'higher' in observation:
      self._low = max(self._low, self._last + 1)
    elif self._uses_answers and 'lower' in observation:
      self._high = min(self._high, self._last - 1)
    self._last = self._rng.randint(self._low, max(self._low, self._high))
    return json.dumps({'guess': self._last})
