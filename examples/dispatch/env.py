"""A fleet that shares orders, after OSPO.

In the paper (arXiv 2507.15351, read in the authors' code, C) vehicles of a ride-sharing fleet take
orders, and a service has at once the reward

  R = 3 + 1 trip - 3 pickup - 1 timeout - 3 added time - 5 excess

Here a vehicle carries one passenger, so the last two terms are 0. Choice: a cell of a pickup counts
1 instead of 3, so that most orders pay. Vehicles drive on a grid. In each step they all read the
same new orders, with their own distances, and name one or none:

  1: pickup 2 trip 3. 2: pickup 0 trip 5. 3: pickup 4 trip 1.
  > 2

If several vehicles name an order, the nearest one has it. It is at the order's target in the next
step. An order that no vehicle has times out, and the vehicles share that cost.
"""

from collections.abc import Sequence
import dataclasses
import random

from examples import tasks

load = tasks.seeded('dispatch')
FLEET = ('red', 'green', 'blue')
SIZE = 4  # rows and columns of the grid
NUM_ORDERS = 3  # in a step
NONE = '-'
Cell = tuple[int, int]


def distance(a: Cell, b: Cell) -> int:
  """Returns the way between two cells along the grid."""
  return abs(a[0] - b[0]) + abs(a[1] - b[1])


@dataclasses.dataclass(frozen=True)
class Order:
  """A passenger at one cell, who wants to go to another one."""

  start: Cell
  target: Cell

  @property
  def trip(self) -> int:
    """Length of the trip."""
    return distance(self.start, self.target)


def make_order(rng: random.Random) -> Order:
  """Draws an order with two different cells."""
  cells = [(x, y) for x in range(SIZE) for y in range(SIZE)]
  return Order(*rng.sample(cells, 2))


def reward(pickup: int, trip: int) -> int:
  """Returns what one service earns at once."""
  return 3 + trip - pickup


def assign(places: Sequence[Cell], orders: Sequence[Order], wishes: Sequence[int | None]):
  """Returns {vehicle: order}: of the vehicles that name an order, the nearest one has it.

  Of equally near ones it is the first.
  """
  winners: dict[int, int] = {}  # order -> vehicle
  for vehicle, wish in enumerate(wishes):
    if wish is None:
      continue
    start = orders[wish].start
    other = winners.get(wish)
    if other is None or distance(places[vehicle], start) < distance(places[other], start):
      winners[wish] = vehicle
  return {vehicle: wish for wish, vehicle in winners.items()}


class Dispatch:
  """Some steps of a fleet. A role is a vehicle, and a turn is its choice in one step.

  A choice has its own reward at once, as a reward of its turn.

  Args:
    task: gives no more than its seed, to `reset`.
    max_turns: steps of an episode.
  """

  frame = 'user'
  roles = FLEET
  core_metrics = ('profit',)
  uses_global_random = False

  def __init__(self, task, max_turns):
    del task
    self._max_turns = max_turns

  def reset(self, seed=None):
    """Draws the places of the vehicles and all orders from the seed."""
    rng = random.Random(seed)
    cells = [(x, y) for x in range(SIZE) for y in range(SIZE)]
    self.places = rng.sample(cells, len(FLEET))
    self.steps = [[make_order(rng) for _ in range(NUM_ORDERS)] for _ in range(self._max_turns)]
    self._step = 0
    self._wishes = []
    self._total = 0.0
    self._num_served = 0
    return self.describe(0), {'role': FLEET[0]}

  def describe(self, vehicle: int) -> str:
    """Returns the orders of this step as a vehicle reads them."""
    parts = []
    for number, order in enumerate(self.steps[self._step], start=1):
      pickup = distance(self.places[vehicle], order.start)
      parts.append(f'{number}: pickup {pickup} trip {order.trip}.')
    return ' '.join(parts)

  def step(self, action):
    """Takes the choice of a vehicle. After the last one the orders are served."""
    numbers = [str(i + 1) for i in range(NUM_ORDERS)]
    is_order = action in numbers
    self._wishes.append(numbers.index(action) if is_order else None)
    info = {'action': 'order' if is_order else 'none' if action == NONE else 'invalid'}
    vehicle = len(self._wishes)
    if vehicle < len(FLEET):
      return self.describe(vehicle), 0.0, False, False, info | {'role': FLEET[vehicle]}
    *others, own = self._serve()
    self._step += 1
    self._wishes = []
    is_over = self._step == self._max_turns
    info['rewards'] = dict(zip(FLEET, others))
    num_choices = len(FLEET) * self._step
    info['metrics'] = {
        'profit': self._total / num_choices,
        'served': self._num_served / num_choices,
    }
    info['role'] = FLEET[0]
    text = '' if is_over else self.describe(0)
    return text, own, is_over, False, info

  def _serve(self):
    """Serves the orders and returns the reward of each vehicle."""
    orders = self.steps[self._step]
    served = assign(self.places, orders, self._wishes)
    timeouts = (len(orders) - len(served)) / len(FLEET)
    rewards = [-timeouts] * len(FLEET)
    for vehicle, number in served.items():
      order = orders[number]
      rewards[vehicle] += reward(distance(self.places[vehicle], order.start), order.trip)
      self.places[vehicle] = order.target
    self._total += sum(rewards)
    self._num_served += len(served)
    return rewards
