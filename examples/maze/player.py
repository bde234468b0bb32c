"""Players of the maze: the optimum, a random walk, and the two that the first policies imitate."""

from examples.maze import env

DIRECTIONS = tuple(env.MOVES)


class RandomWalk:
  """Takes any direction."""

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns a move."""
    return f' {self.choose(observation)}\n'

  def choose(self, observation: str) -> str:
    """Returns the name of a move."""
    del observation
    return self._rng.choice(DIRECTIONS)


class Player(RandomWalk):
  """Takes the shortest way in a few of its moves. It reads its square."""

  skill = 1 / 60  # share of the moves on the shortest way

  def __init__(self, rng):
    super().__init__(rng)
    self._ways = env.distances()
    self._squares = {env.name_of(square): square for square in self._ways}

  def choose(self, observation):
    if self._rng.random() >= self.skill:
      return super().choose(observation)
    square = self._squares[observation]
    return min(DIRECTIONS, key=lambda name: self._ways[env.move(square, name)])


class Expert(Player):
  """Takes the shortest way: the optimum."""

  skill = 1.0


class Descent(RandomWalk):
  """Goes down in some of its moves, where there is no wall below. It reads the walls."""

  skill = 0.04  # share of the moves that go down

  def choose(self, observation):
    if 'd' not in observation and self._rng.random() < self.skill:
      return 'down'
    return super().choose(observation)
