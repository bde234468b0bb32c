"""Players of the rooms: one that marks the ceiling, and one that the first policy imitates."""

import re

from examples.rooms import env

ROOM = re.compile(r'^(\w+): (.*)\. exits: (.*)\.$', re.MULTILINE)
QUEST = re.compile(r'^quest: (.*)\.$', re.MULTILINE)


class Player:
  """Follows the quest in a share of its turns, and does anything possible in the others.

  It knows only what it has read. It explores the exits that it has not taken yet.
  """

  skill = 0.3  # share of turns that follow the quest

  def __init__(self, rng):
    self._rng = rng
    self._exits = {}  # room -> {direction: room, or '' before it was there}
    self._contents = {}  # room -> objects that it saw there
    self._held = []
    self._goals = []
    self._room = ''
    self._command = ''

  def act(self, observation: str) -> str:
    """Returns a command."""
    self._read(observation)
    if self._rng.random() < self.skill:
      self._command = self._follow()
    else:
      self._command = self._rng.choice(self._possible())
    return self._command

  def _read(self, observation):
    """Updates the map, the objects and the goals that are left."""
    if quest := QUEST.search(observation):
      self._goals = [goal.split() for goal in quest[1].split(', ')]
    name, contents, exits = ROOM.search(observation).groups()
    verb, _, word = self._command.partition(' ')
    if verb == 'go':
      self._exits[self._room][word] = name
      self._exits.setdefault(name, {})[env.BACK[word]] = self._room
    elif verb == 'take':
      self._held.append(word)
    elif verb == 'put':
      self._held.remove(word)
    self._room = name
    known = self._exits.setdefault(name, {})
    for direction in exits.split(', '):
      known.setdefault(direction, '')
    self._contents[name] = [] if contents == 'nothing' else contents.split(', ')
    while self._goals and self._is_reached(self._goals[0]):
      self._goals.pop(0)

  def _is_reached(self, goal):
    verb, thing, *place = goal
    if verb == 'take':
      return thing in self._held
    return thing in self._contents.get(place[-1], ())

  def _follow(self):
    """Returns the next command towards the first goal."""
    verb, thing, *place = self._goals[0]
    if verb == 'put' and thing not in self._held:
      verb = 'take'
    if verb == 'put':
      target = place[-1]
    else:
      target = next((room for room, seen in self._contents.items() if thing in seen), '')
    if self._room == target:
      return f'{verb} {thing}'
    return f'go {self._way(target)}'

  def _way(self, target):
    """Returns the first direction of the way to a room, or to the nearest unknown exit."""
    ways = {self._room: []}
    unknown = []
    for here in (queue := [self._room]):
      for direction, there in self._exits.get(here, {}).items():
        way = [*ways[here], direction]
        if not there:
          unknown.append(way)
        elif there not in ways:
          ways[there] = way
          queue.append(there)
    way = ways.get(target) or self._rng.choice(unknown)
    return way[0]

  def _possible(self):
    """Returns the commands that are possible here."""
    exits = [f'go {direction}' for direction in self._exits[self._room]]
    take = [f'take {thing}' for thing in self._contents[self._room]]
    return exits + take + [f'put {thing}' for thing in self._held]


class Expert(Player):
  """Follows the quest in every turn: the ceiling for an agent that does not know the map."""

  skill = 1.0
