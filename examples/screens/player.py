"""Players of the screens, and the player that the judge imitates."""

import re

from examples.screens import env

GOAL = re.compile(r'goal: (\w+) (\w+)\.')
SCREEN = re.compile(r'(\w+): ([^.:]*)\.(?: action: (.*)\.)?$')


def read(text: str, goal: tuple[str, str]) -> env.Phone:
  """Returns the phone that a screen shows. Values that it does not show differ from the goal."""
  target, wanted = goal
  screen, contents, _ = SCREEN.search(text).groups()
  items = dict(item.partition(' ')[::2] for item in contents.split(', '))
  values = {target: ''} | {name: value for name, value in items.items() if value}
  if screen in env.FIELDS:
    values[screen] = contents
  return env.Phone(target, wanted, screen, values, {screen: tuple(items)})


class Player:
  """Takes the right step in few turns, and has a habit of going back."""

  skill = 0.3  # share of turns with the right step
  habit = 0.5  # share of the other turns with the first action, mostly `back`; the rest has any

  def __init__(self, rng):
    self._rng = rng
    self._goal = ('', '')

  def act(self, observation: str) -> str:
    """Returns an action."""
    if match := GOAL.search(observation):
      self._goal = match.groups()
    phone = read(observation, self._goal)
    if self._rng.random() < self.skill:
      return next(action for action in phone.actions() if phone.is_positive(action))
    if self._rng.random() < self.habit:
      return phone.actions()[0]
    return self._rng.choice(phone.actions())


class Expert(Player):
  """Takes the right step in each turn: the ceiling."""

  skill = 1.0


class Judge:
  """Says whether a step is positive."""

  def __init__(self, rng):
    del rng

  def act(self, observation: str) -> str:
    """Returns the label of a step."""
    goal = GOAL.search(observation).groups()
    action = SCREEN.search(observation)[3]
    return 'positive' if read(observation, goal).is_positive(action) else 'negative'
