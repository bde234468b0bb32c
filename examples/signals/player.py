"""What the first policy imitates: legal words at random, with a weak habit of one code."""

from examples.signals import env

HABIT = 0.3  # share of turns that follow the code 1-a, 2-b, 3-c, 4-d


class Player:
  """Sends any letter and names any target, and in a few turns those of the code."""

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns a legal word for what is asked."""
    sends = observation.startswith('send')
    said, read = (env.SIGNALS, env.TARGETS) if sends else (env.TARGETS, env.SIGNALS)
    if observation[-1] in read and self._rng.random() < HABIT:
      return said[read.index(observation[-1])]
    return self._rng.choice(said)
