"""The rules of Dhumbal, a card game, and scripted players.

Rules as on pagat.com (second-hand): five cards each from one pack. An ace counts 1, a jack, queen
and king 11, 12 and 13. In its turn a player whose hand counts at most 5 may call. Otherwise it
discards a card, a set of one rank, or a run of three or more in a suit, and draws one card: from
the stock, or the last card that the player before discarded. After a call the lowest hand wins. If
another hand is as low or lower, the caller loses and is fined.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import itertools
import random

RANKS = 'A23456789TJQK'
SUITS = 'cdhs'
HAND = 5
CALL_AT_MOST = 5
FINE = 30
MAX_TURNS = 60  # turns of all players together, after which a round ends


def points(cards: Sequence[str]) -> int:
  """Returns what cards count; a card is rank and suit, as in 'Th'."""
  return sum(RANKS.index(card[0]) + 1 for card in cards)


def is_discard(cards: Sequence[str]) -> bool:
  """Returns whether cards may be discarded together."""
  if not cards or len(set(cards)) < len(cards):
    return False
  ranks = sorted(RANKS.index(card[0]) for card in cards)
  if len(set(ranks)) == 1:
    return True
  is_row = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
  return len(cards) >= 3 and is_row and len({card[1] for card in cards}) == 1


def discards(hand: Sequence[str]) -> list[tuple[str, ...]]:
  """Returns all possible discards of a hand."""
  choices = (itertools.combinations(hand, size) for size in range(1, len(hand) + 1))
  return [cards for cards in itertools.chain.from_iterable(choices) if is_discard(cards)]


@dataclasses.dataclass(frozen=True)
class View:
  """What a player sees in its turn."""

  hand: tuple[str, ...]
  top: str  # the card that it may draw instead of the stock's
  others: tuple[int, ...]  # sizes of the other hands, the next player first

  @property
  def can_call(self) -> bool:
    """Whether the hand is low enough."""
    return points(self.hand) <= CALL_AT_MOST


@dataclasses.dataclass(frozen=True)
class Move:
  """A call, or a discard and where to draw from."""

  cards: tuple[str, ...] = ()  # empty: a call
  from_pile: bool = False


Policy = Callable[[View, random.Random], Move]


class Round:
  """One round: hands, stock and pile."""

  def __init__(self, num_players: int, rng: random.Random):
    self._rng = rng
    pack = [rank + suit for rank in RANKS for suit in SUITS]
    rng.shuffle(pack)
    self.hands = [sorted(pack.pop() for _ in range(HAND)) for _ in range(num_players)]
    self.top = pack.pop()
    self._stock = pack
    self._pile: list[str] = []
    self.player = 0
    self.num_turns = 0
    self.winner: int | None = None
    self.costs = [0] * num_players
    self.caller: int | None = None

  def view(self) -> View:
    """Returns what the player whose turn it is sees."""
    order = [(self.player + i) % len(self.hands) for i in range(1, len(self.hands))]
    sizes = tuple(len(self.hands[i]) for i in order)
    return View(tuple(self.hands[self.player]), self.top, sizes)

  def is_legal(self, move: Move) -> bool:
    """Returns whether the player whose turn it is may make a move."""
    hand = self.hands[self.player]
    if not move.cards:
      return points(hand) <= CALL_AT_MOST
    return set(move.cards) <= set(hand) and is_discard(move.cards)

  def play(self, move: Move) -> None:
    """Makes a legal move."""
    assert self.is_legal(move), move
    self.num_turns += 1
    if not move.cards:
      self.caller = self.player
      self.end()
      return
    hand = self.hands[self.player]
    for card in move.cards:
      hand.remove(card)
    if move.from_pile:
      hand.append(self.top)
    else:
      self._pile.append(self.top)
      if not self._stock:
        self._rng.shuffle(self._pile)
        self._stock, self._pile = self._pile, []
      hand.append(self._stock.pop())
    hand.sort()
    *rest, self.top = move.cards
    self._pile += rest
    self._pass_on()

  def skip(self) -> None:
    """Makes no move: the player keeps its hand, and it is the next one's turn."""
    self.num_turns += 1
    self._pass_on()

  def _pass_on(self):
    self.player = (self.player + 1) % len(self.hands)
    if self.num_turns >= MAX_TURNS:
      self.end()

  def end(self) -> None:
    """Ends the round: the lowest hand wins, and after a call that fails the lowest other one."""
    counts = [points(hand) for hand in self.hands]
    lowest = min(counts)
    holders = [i for i, count in enumerate(counts) if count == lowest]
    winners = [i for i in holders if i != self.caller] or holders
    self.winner = winners[0]
    self.costs = counts
    if self.caller is not None and self.caller != self.winner:
      self.costs[self.caller] += FINE
    self.costs[self.winner] = 0


def play_round(policies: Sequence[Policy], rng: random.Random) -> Round:
  """Plays a round of scripts and returns it."""
  game = Round(len(policies), rng)
  while game.winner is None:
    game.play(policies[game.player](game.view(), rng))
  return game


# --- Scripts. Their thresholds are ours: those of the paper are not known. ------------------------


def any_move(view: View, rng: random.Random) -> Move:
  """Makes any move, and calls half of the time if it may."""
  if view.can_call and rng.random() < 0.5:
    return Move()
  return Move(rng.choice(discards(view.hand)), rng.random() < 0.5)


def _script(call_at: int, draw_at: int) -> Policy:
  """Returns a script that calls at `call_at` points and takes a card of up to `draw_at` points."""

  def policy(view: View, rng: random.Random) -> Move:
    del rng
    if points(view.hand) <= call_at:
      return Move()
    cards = max(discards(view.hand), key=points)
    return Move(cards, points([view.top]) <= draw_at)

  return policy


aggressive = _script(call_at=CALL_AT_MOST, draw_at=3)
balanced = _script(call_at=3, draw_at=3)
conservative = _script(call_at=1, draw_at=1)

SCRIPTS: dict[str, Policy] = {
    'aggressive': aggressive,
    'balanced': balanced,
    'conservative': conservative,
    'random': any_move,
}
