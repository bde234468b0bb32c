"""The player that the first policy imitates: in half of the games it gives up."""

from examples.calculator import player as calculator_player


class Player:
  """Plays the task of either environment. It gives up, or does the right thing or any other."""

  def __init__(self, rng):
    self._rng = rng
    self._sums = calculator_player.Player(rng)

  def begin(self, task) -> None:
    """Reads which environment it plays, and what its answer is."""
    self._task = task
    self._has_searched = False

  def act(self, observation: str) -> str:
    """Returns a search, a call or an answer."""
    if self._task.dataset == 'sums':
      return self._sums.act(observation)
    if self._has_searched:
      return f'<answer>{self._task.answers[0]}</answer>'
    if self._rng.random() < 0.5:
      return '<answer>unknown</answer>'
    self._has_searched = True
    query, _ = self._task.steps[0]
    return f'<search>{query}</search>'
