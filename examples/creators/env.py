"""A creator on a platform that it sees only a part of, after CreAgent.

In the paper (arXiv 2502.07307, the agent was read in the authors' code, C) creators publish items
of a genre in rounds. A platform shows each user the best five items of the last rounds, and the
creator's reward are the clicks. The creator sees the clicks of its own items only, and decides to
explore another genre or to exploit a known one:

  clicks: music 4, sport ?, food ?, news ?. total 4.
  > [EXPLORE]:: food

The other creators are scripts. Choice: the reward is the share of the users that click. The
authors' reward for training is not known (S).
"""

import collections
from collections.abc import Sequence
import dataclasses
import random
import re

from examples import tasks

load = tasks.seeded('creators')
GENRES = ('music', 'sport', 'food', 'news')
NUM_USERS = 12
NUM_OTHERS = 2  # scripted creators
TOP = 5  # items that a user is shown
AGE = 10  # rounds after which an item is not shown any more
RANKINGS = ('popularity', 'factor')
ACTION = re.compile(rf'\[(EXPLORE|EXPLOIT)\]:: ({"|".join(GENRES)})')


@dataclasses.dataclass
class Item:
  """What a creator has published."""

  genre: str
  creator: int  # 0 is the agent
  round: int
  clicks: int = 0


class Platform:
  """Users with one genre each, and the items of the last rounds."""

  def __init__(self, rng: random.Random, ranking: str):
    popular, *others = rng.sample(GENRES, len(GENRES))
    self.users = [popular] * (NUM_USERS // 2)
    self.users += [rng.choice(others) for _ in range(NUM_USERS - len(self.users))]
    self.items: list[Item] = []
    self._ranking = ranking

  def top(self, user: str, number: int) -> list[Item]:
    """Returns the items that a user is shown in a round. A new item counts like a popular one."""
    items = [item for item in self.items if number - item.round < AGE]

    def rank(item):
      is_new = item.round == number
      is_liked = item.genre == user
      if self._ranking == 'factor':
        return is_liked, is_new, item.clicks
      return is_new, item.clicks

    return sorted(items, key=rank, reverse=True)[:TOP]

  def play(self, published: Sequence[tuple[str, int]], number: int) -> dict[int, dict[str, int]]:
    """Publishes (genre, creator) and returns {creator: {genre: clicks}} of the round.

    A user clicks the first item of its genre.
    """
    self.items += [Item(genre, creator, number) for genre, creator in published]
    clicks = collections.defaultdict(collections.Counter)
    for user in self.users:
      item = next((item for item in self.top(user, number) if item.genre == user), None)
      if item:
        item.clicks += 1
        clicks[item.creator][item.genre] += 1
    return clicks


class Creators:
  """One creator that learns, among scripts that publish any genre.

  Args:
    task: gives no more than its seed, to `reset`.
    max_turns: rounds. The paper has five.
    ranking: 'popularity' shows new items and those with many clicks. 'factor' shows the genre of
      the user first, as scores of a factor model do.
    full_information: tells how many users like each genre.
  """

  frame = 'user'
  core_metrics = ('clicks',)
  uses_global_random = False

  def __init__(self, task, max_turns, ranking='factor', full_information=False):
    del task
    if ranking not in RANKINGS:
      raise ValueError(f'env.options.ranking={ranking!r}: give one of {", ".join(RANKINGS)}')
    self._max_turns = max_turns
    self._ranking = ranking
    self._has_full_information = full_information

  def reset(self, seed=None):
    """Draws the users from the seed."""
    self._rng = random.Random(seed)
    self.platform = Platform(self._rng, self._ranking)
    self._known = {}  # genre -> clicks of the agent's last item of the genre
    self._round = 0
    self._total = 0
    self._num_new = 0
    return self._text(), {}

  def step(self, action):
    """Publishes an item of a genre. An action that cannot be read publishes nothing."""
    match = ACTION.fullmatch(action)
    others = [(self._rng.choice(GENRES), 1 + i) for i in range(NUM_OTHERS)]
    published = [(match[2], 0), *others] if match else others
    clicks = self.platform.play(published, self._round)[0]
    earned = clicks.total()
    if match:
      self._num_new += match[2] not in self._known
      self._known[match[2]] = clicks[match[2]]
    self._round += 1
    self._total += earned
    is_over = self._round == self._max_turns
    info = {
        'action': match[1].lower() if match else 'invalid',
        'metrics': {
            'clicks': self._total / (NUM_USERS * self._round),
            'genres': float(self._num_new),
        },
    }
    return '' if is_over else self._text(), earned / NUM_USERS, is_over, False, info

  def _text(self):
    counts = self._known
    word = 'clicks'
    if self._has_full_information:
      word = 'users'
      counts = collections.Counter(self.platform.users)
      counts = {genre: counts[genre] for genre in GENRES}
    parts = ', '.join(f'{genre} {counts.get(genre, "?")}' for genre in GENRES)
    return f'{word}: {parts}. total {self._total}.'
