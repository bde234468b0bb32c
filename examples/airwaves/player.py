"""Players of the channel: the optimum of the formula, and one that the first policy imitates."""

import re

from examples.airwaves import env

STATE = re.compile(r'(snr|band|entropy|novel) (\d)')


class Player:
  """Sends any low ranks in most turns, and the best ones in the others."""

  skill = 0.1

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns two ranks."""
    ranks = (self._rng.randrange(5), self._rng.randrange(5))
    if self._rng.random() < self.skill:
      ranks = self._best({name: int(value) for name, value in STATE.findall(observation)})
    return f'{ranks[0]} {ranks[1]}'

  def _best(self, state):
    return env.best(state)


class Expert(Player):
  """Tries all ranks on the formula: the ceiling."""

  skill = 1.0


class Threshold(Expert):
  """Splits what the channel holds evenly: a rule by hand."""

  def _best(self, state):
    room = min(9, int(1 / env.cost(state['snr'], state['band'], (1, 0))))
    return room // 2, room // 2
