"""The player that the first policy imitates: it guesses, and heeds answers in half of the games."""

import json


class Player:
  """Guesses any number; in half of the episodes one that the answers leave."""

  def __init__(self, rng):
    self._rng = rng
    self._heeds = rng.random() < 0.5
    self._low, self._high, self._last = 1, 20, 0

  def act(self, observation: str) -> str:
    """Returns an action as JSON."""
    if self._heeds and 'higher' in observation:
      self._low = max(self._low, self._last + 1)
    elif self._heeds and 'lower' in observation:
      self._high = min(self._high, self._last - 1)
    self._last = self._rng.randint(self._low, max(self._low, self._high))
    return json.dumps({'guess': self._last})
