"""Dhumbal against scripted players, after the paper that compares scripts and learners.

In the paper (arXiv 2510.11736, read in its abstract) a script wins most rounds, and PPO and DQN win
few. The agent reads its hand, the card that it may draw, and the sizes of the other hands:

  hand: 3h 3s 9d Kc. top: 7h. others: 5.
  > 3h 3s stock

It writes cards and `stock` or `top`, or `call`.
"""

import random

from examples import tasks
from examples.dhumbal import game

load = tasks.seeded('dhumbal')
DRAWS = ('stock', 'top')


def describe(view: game.View) -> str:
  """Returns a view as text."""
  others = ' '.join(map(str, view.others))
  return f'hand: {" ".join(view.hand)}. top: {view.top}. others: {others}.'


def parse(action: str) -> game.Move | None:
  """Returns the move that a text describes, or None."""
  words = action.split()
  if words == ['call']:
    return game.Move()
  if len(words) < 2 or words[-1] not in DRAWS:
    return None
  return game.Move(tuple(words[:-1]), words[-1] == 'top')


class Dhumbal:
  """A round against scripts. The reward is 1 for a win.

  An illegal move has reward -0.1, and loses the turn.

  Args:
    task: gives no more than its seed, to `reset`.
    max_turns: moves of the agent. After them the lowest hand wins.
    opponents: names of `game.SCRIPTS`, one per other player.
  """

  frame = 'user'
  core_metrics = ('won',)
  uses_global_random = False

  def __init__(self, task, max_turns, opponents=('aggressive',)):
    del task
    if set(opponents) - set(game.SCRIPTS) or not 1 <= len(opponents) <= 4:
      raise ValueError(
          f'env.options.opponents={opponents!r}: give one to four of {", ".join(game.SCRIPTS)}'
      )
    self._max_turns = max_turns
    self._opponents = [game.SCRIPTS[name] for name in opponents]

  def reset(self, seed=None):
    """Deals the cards from the seed. The agent's seat is drawn as well."""
    self._rng = random.Random(seed)
    num_players = 1 + len(self._opponents)
    self._round = game.Round(num_players, self._rng)
    self._seat = self._rng.randrange(num_players)
    self._turns = 0
    self._play_others()
    return describe(self._round.view()), {}

  def step(self, action):
    """Makes a move of the agent, and the moves of the others until its next turn."""
    self._turns += 1
    move = parse(action)
    is_legal = move is not None and self._round.is_legal(move)
    if is_legal:
      self._round.play(move)
    else:
      self._round.skip()
    self._play_others()
    is_last = self._turns >= self._max_turns
    if is_last and self._round.winner is None:
      self._round.end()
    is_ended = self._round.winner is not None
    has_won = self._round.winner == self._seat
    info = {
        'action': ('discard' if move.cards else 'call') if is_legal else 'invalid',
        'metrics': {'won': float(has_won), 'moves': float(self._turns)},
    }
    text = '' if is_ended else describe(self._round.view())
    reward = float(has_won) - 0.1 * (not is_legal)
    return text, reward, is_ended, False, info

  def _play_others(self):
    """Lets the scripts move until it is the agent's turn, or the round has ended."""
    while self._round.winner is None and self._round.player != self._seat:
      offset = (self._round.player - self._seat) % len(self._round.hands)
      policy = self._opponents[offset - 1]
      self._round.play(policy(self._round.view(), self._rng))
