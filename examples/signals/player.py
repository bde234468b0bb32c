"""The player that the first policy imitates: legal words, with a weak habit of one code."""

from examples.signals import env

HABIT = 0.3  # share of turns that follow the code 1-a, 2-b, 3-c, 4-d


class Player:
  """Sends any letter and names any target. In a few turns it follows the code."""

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns a legal word."""
    readable = env.SIGNALS
    words = env.TARGETS
    if observation.startswith('send'):
      readable = env.TARGETS
      words = env.SIGNALS
    word = observation[-1]
    if word in readable and self._rng.random() < HABIT:
      return words[readable.index(word)]
    return self._rng.choice(words)
