"""The maze of LMRL-Gym (arXiv 2311.18232): walk to a goal, from any free square.

The map, the costs and the limits are those of the published benchmark, and the texts are ours and
short. A square is a letter for its column and a capital for its row. It is one token:

  cE
  > right
  dE
  > up
  dE          (a wall is above)

Fully observed, the agent reads its square. Partly observed, it reads the directions of the walls
around it, and has to remember where it has been.
"""

from collections.abc import Mapping
import string

from stppo_jax.types import Task

# A wall is #, the goal is G. Rows and columns count from 0, and the border is row 0 and column 0.
MAP = """
#############
#.....#.....#
###.#####.###
###.#####.###
###.#####.###
###.......###
######.######
######.######
######G######
#############
"""
MOVES = {'left': (0, -1), 'right': (0, 1), 'up': (-1, 0), 'down': (1, 0)}
MAX_MOVES = 100
MOVE_COST = 1.0
ILLEGAL_COST = 4.0  # a text that is no move
OBSERVED = ('fully', 'partly')
NUM_TASKS = 4000  # to train on

Square = tuple[int, int]  # row, column


def _find(symbols: str) -> list[Square]:
  lines = MAP.split()
  return [
      (row, column)
      for row, line in enumerate(lines)
      for column, symbol in enumerate(line)
      if symbol in symbols
  ]


STARTS = _find('.')
(GOAL,) = _find('G')
_FREE = frozenset([*STARTS, GOAL])


def load(split: str) -> list[Task]:
  """Returns the tasks of a split. Those of 'dev' are all starts, each once."""
  numbers = range(NUM_TASKS) if split == 'train' else range(len(STARTS))
  return [Task(f'{split}-{n}', dataset='maze', split=split, seed=n) for n in numbers]


def move(square: Square, name: str) -> Square:
  """Returns the square after a move. A move into a wall changes nothing."""
  down, right = MOVES[name]
  target = (square[0] + down, square[1] + right)
  return target if target in _FREE else square


def distances() -> dict[Square, int]:
  """Returns the moves of the shortest way to the goal, of each square."""
  ways = {GOAL: 0}
  for square in (queue := [GOAL]):
    for name in MOVES:
      neighbour = move(square, name)  # a way back exists, because every move can be undone
      if neighbour not in ways:
        ways[neighbour] = ways[square] + 1
        queue.append(neighbour)
  return ways


def name_of(square: Square) -> str:
  """Returns the name of a square, such as cE for the third column and the fifth row."""
  row, column = square
  return string.ascii_lowercase[column - 1] + string.ascii_uppercase[row - 1]


def walls(square: Square) -> str:
  """Returns the first letters of the directions in which there is a wall."""
  blocked = [name[0] for name in MOVES if move(square, name) == square]
  return ''.join(blocked) or 'none'


class Maze:
  """A walk to the goal. Each move costs 1, a text that is no move 4, and reaching the goal nothing.

  After 100 moves one more turn ends the episode, at the cost of a move. A return is therefore
  between minus the number of moves before the last one, and -101 for an agent that never writes an
  illegal text.

  Args:
    task: gives no more than its seed, to `reset`.
    observed: 'fully' or 'partly'.
    scale: factor of the rewards that the agent learns from. The metric `return` has none.
  """

  frame = 'inline'
  stop_strings = ('\n',)
  core_metrics = ('return',)
  uses_global_random = False

  def __init__(self, task, observed='fully', scale=0.05):
    del task
    if observed not in OBSERVED:
      raise ValueError(f'env.options.observed={observed!r}: give {" or ".join(OBSERVED)}')
    self._describe = name_of if observed == 'fully' else walls
    self._scale = scale

  def reset(self, seed=None):
    """Starts on the square that the seed names."""
    self.square = STARTS[seed % len(STARTS)]
    self._num_moves = 0
    self._num_illegal = 0
    self._return = 0.0
    return self._describe(self.square), {}

  def step(self, action):
    """Carries out a move."""
    if self._num_moves == MAX_MOVES:
      return '', *self._outcome('late', -MOVE_COST, True)
    self._num_moves += 1
    name = action.strip()
    if name not in MOVES:
      self._num_illegal += 1
      return self._describe(self.square), *self._outcome('invalid', -ILLEGAL_COST, False)
    self.square = move(self.square, name)
    if self.square == GOAL:
      return '', *self._outcome(name, 0.0, False)
    return self._describe(self.square), *self._outcome(name, -MOVE_COST, False)

  def _outcome(
      self, kind: str, reward: float, truncated: bool
  ) -> tuple[float, bool, bool, Mapping]:
    """Returns all that `step` returns after the observation."""
    self._return += reward
    metrics = {
        'return': self._return,
        'solved': float(self.square == GOAL),
        'moves': float(self._num_moves),
        'illegal': float(self._num_illegal),
    }
    is_over = truncated or self.square == GOAL
    return reward * self._scale, is_over, truncated, {'action': kind, 'metrics': metrics}
