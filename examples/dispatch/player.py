"""Players of a vehicle: two bars, and one that the first policy imitates."""

import re

from examples.dispatch import env

ORDER = re.compile(r'(\d): pickup (\d) trip (\d)\.')


class Player:
  """Names the nearest order in few turns, and has a habit of naming the first one."""

  skill = 0.25  # share of turns with the nearest order
  habit = 0.5  # share of the other turns with the first order; the rest has any order, or none

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns the number of an order, or `-`."""
    orders = {name: (int(pickup), int(trip)) for name, pickup, trip in ORDER.findall(observation)}
    if self._rng.random() < self.skill:
      return self._best(orders)
    if self._rng.random() < self.habit:
      return next(iter(orders))
    return self._rng.choice([*orders, env.NONE])

  def _best(self, orders):
    """Returns the nearest order; of equally near ones the longest trip."""
    return min(orders, key=lambda name: (orders[name][0], -orders[name][1]))


class Expert(Player):
  """Names the nearest order in each turn: the greedy bar."""

  skill = 1.0


class Selfish(Expert):
  """Names the order with the highest reward, which another vehicle may be nearer to."""

  def _best(self, orders):
    return max(orders, key=lambda name: env.reward(*orders[name]))
