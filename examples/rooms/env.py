"""Text worlds of growing size: a quest over rooms and objects, after the Practitioner's Guide.

A world has three sizes, as in the Guide (arXiv 2510.01132, its TextWorld tasks `w2-o3-q4` and
`w4-o6-q8`): the rooms w, the objects o, and the commands q of the shortest solution. The quest is
the paper's, the texts are ours and short.

  quest: take lamp, put lamp in den.
  hall: cup, lamp. exits: north.
"""

from collections.abc import Sequence
import dataclasses
import random

from examples import tasks

load = tasks.seeded('rooms')
ROOMS = ('hall', 'den', 'attic', 'cellar', 'porch', 'shed')
OBJECTS = ('lamp', 'cup', 'key', 'coin', 'book', 'rope', 'vase', 'bell')
STEPS = {'north': (0, 1), 'south': (0, -1), 'east': (1, 0), 'west': (-1, 0)}
BACK = {'north': 'south', 'south': 'north', 'east': 'west', 'west': 'east'}
HELD = ''  # the place of an object that the agent carries


@dataclasses.dataclass(frozen=True)
class Goal:
  """One part of a quest: hold an object, or leave it in a room."""

  thing: str
  room: str  # HELD: the agent must hold it

  @property
  def text(self) -> str:
    """The goal as the quest names it."""
    if self.room == HELD:
      return f'take {self.thing}'
    return f'put {self.thing} in {self.room}'


@dataclasses.dataclass
class World:
  """A map, the places of the objects, the agent's room and the quest."""

  exits: dict[str, dict[str, str]]  # room -> {direction: room}
  places: dict[str, str]  # object -> room, or HELD
  room: str
  goals: list[Goal]

  def describe(self) -> str:
    """Returns what the agent sees in its room."""
    things = sorted(thing for thing, place in self.places.items() if place == self.room)
    contents = ', '.join(things) or 'nothing'
    return f'{self.room}: {contents}. exits: {", ".join(sorted(self.exits[self.room]))}.'

  def apply(self, command: str) -> bool:
    """Carries out a command. Returns False if it is impossible here, and changes nothing."""
    verb, _, name = command.partition(' ')
    if verb == 'go' and name in self.exits[self.room]:
      self.room = self.exits[self.room][name]
    elif verb == 'take' and self.places.get(name) == self.room:
      self.places[name] = HELD
    elif verb == 'put' and self.places.get(name) == HELD:
      self.places[name] = self.room
    else:
      return False
    return True

  def path(self, room: str) -> list[str]:
    """Returns the directions from the agent's room to another one. The map is a tree."""
    ways = {self.room: []}
    for here in (queue := [self.room]):
      for direction, there in self.exits[here].items():
        if there not in ways:
          ways[there] = [*ways[here], direction]
          queue.append(there)
    return ways[room]

  def solution(self) -> list[str]:
    """Returns the commands of the shortest solution for an agent that knows the map."""
    world = dataclasses.replace(self, places=dict(self.places))
    commands = []
    for goal in self.goals:
      if world.places[goal.thing] == goal.room:
        continue
      room = world.places[goal.thing] if goal.room == HELD else goal.room
      verb = 'take' if goal.room == HELD else 'put'
      plan = [f'go {direction}' for direction in world.path(room)]
      plan.append(f'{verb} {goal.thing}')
      for command in plan:
        assert world.apply(command), command
      commands += plan
    return commands


def make_world(rng: random.Random, rooms: int, objects: int, quest: int) -> World:
  """Draws worlds until the quest of one takes exactly `quest` commands."""
  while True:
    exits = _make_map(rng, rng.sample(ROOMS, rooms))
    names = sorted(exits)
    places = {thing: rng.choice(names) for thing in rng.sample(OBJECTS, objects)}
    world = World(exits, places, room=rng.choice(names), goals=[])
    while len(world.solution()) < quest:
      _add_goals(rng, world)
    if len(world.solution()) == quest:
      return world


def _make_map(rng: random.Random, names: Sequence[str]) -> dict[str, dict[str, str]]:
  """Returns a tree of rooms on a grid."""
  cells = {(0, 0): names[0]}
  exits = {name: {} for name in names}
  for name in names[1:]:
    free = [
        (cell, direction)
        for cell in cells
        for direction, (x, y) in STEPS.items()
        if (cell[0] + x, cell[1] + y) not in cells
    ]
    cell, direction = rng.choice(free)
    x, y = STEPS[direction]
    cells[cell[0] + x, cell[1] + y] = name
    exits[cells[cell]][direction] = name
    exits[name][BACK[direction]] = cells[cell]
  return exits


def _add_goals(rng: random.Random, world: World) -> None:
  """Adds an object to fetch, or to fetch and to bring to another room."""
  used = {goal.thing for goal in world.goals}
  things = sorted(set(world.places) - used)
  if not things:
    world.goals.clear()
    return
  thing = rng.choice(things)
  world.goals.append(Goal(thing, HELD))
  if rng.random() < 0.5:
    others = [room for room in sorted(world.exits) if room != world.places[thing]]
    world.goals.append(Goal(thing, rng.choice(others)))


class Rooms:
  """A quest whose goals have to be reached in their order.

  The agent writes `go north`, `take lamp` or `put lamp`. It sees its room and no other.

  Args:
    task: gives no more than its seed, to `reset`.
    max_turns: commands of an episode.
    rooms: w, at least 2.
    objects: o.
    quest: q, commands of the shortest solution.
    reward: 'sparse' pays 1 for the whole quest, 'dense' pays each goal its share of 1.
  """

  frame = 'user'
  core_metrics = ('solved',)
  uses_global_random = False

  def __init__(self, task, max_turns, rooms=2, objects=3, quest=4, reward='dense'):
    del task
    if reward not in ('sparse', 'dense'):
      raise ValueError(f"env.options.reward={reward!r}: give 'sparse' or 'dense'")
    self._max_turns = max_turns
    self._sizes = (rooms, objects, quest)
    self._is_dense = reward == 'dense'

  def reset(self, seed=None):
    """Draws the world and the quest from the seed."""
    self.world = make_world(random.Random(seed), *self._sizes)
    self._turns = 0
    self._reached = 0
    quest = ', '.join(goal.text for goal in self.world.goals)
    return f'quest: {quest}.\n{self.world.describe()}', {}

  def step(self, action):
    """Carries out a command and describes the room."""
    self._turns += 1
    is_possible = self.world.apply(action)
    goals = self.world.goals
    before = self._reached
    while self._reached < len(goals) and self._is_reached(goals[self._reached]):
      self._reached += 1
    is_solved = self._reached == len(goals)
    is_last = self._turns >= self._max_turns
    reward = float(is_solved)
    if self._is_dense:
      reward = (self._reached - before) / len(goals)
    info = {
        'action': action.partition(' ')[0] if is_possible else 'invalid',
        'metrics': {
            'solved': float(is_solved),
            'goals': self._reached / len(goals),
            'commands': float(self._turns),
        },
    }
    observation = self.world.describe() if is_possible else 'impossible.'
    return observation, reward, is_solved or is_last, is_last and not is_solved, info

  def _is_reached(self, goal):
    return self.world.places[goal.thing] == goal.room
