"""Players of Dhumbal: the best script marks the bar, and a careless one is imitated."""

import re

from examples.dhumbal import env
from examples.dhumbal import game

STATE = re.compile(r'hand: (.*)\. top: (..)\. others: (.*)\.')


class Player:
  """Makes the move of the aggressive script in a share of its turns, else any legal move."""

  skill = 0.3

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns a move."""
    hand, top, others = STATE.search(observation).groups()
    view = game.View(tuple(hand.split()), top, tuple(map(int, others.split())))
    policy = game.aggressive if self._rng.random() < self.skill else game.any_move
    move = policy(view, self._rng)
    if not move.cards:
      return 'call'
    return ' '.join([*move.cards, env.DRAWS[move.from_pile]])


class Expert(Player):
  """Plays the aggressive script, which wins most rounds of the tournament."""

  skill = 1.0
