"""The player that the first policy imitates: with care it fills a cell in half of the games."""

import re

ROW = re.compile(r'^R(\d) +(.*)$', re.MULTILINE)


class Player:
  """Fills the first empty cell with any digit; in half of the episodes with one that fits."""

  def __init__(self, rng):
    self._rng = rng
    self._takes_care = rng.random() < 0.5

  def act(self, observation: str) -> str:
    """Returns a move in GEM's form: row, column and digit."""
    board = [row.replace('|', ' ').split() for _, row in ROW.findall(observation)]
    empty = [(r, c) for r in range(4) for c in range(4) if board[r][c] == '.']
    row, column = empty[0]
    digits = self._fitting(board, row, column) if self._takes_care else ['1', '2', '3', '4']
    return f'\\boxed{{{row + 1} {column + 1} {self._rng.choice(digits)}}}'

  def _fitting(self, board, row, column):
    """Returns the digits that are in no cell of the same row, column or square."""
    seen = set(board[row]) | {line[column] for line in board}
    top, left = row // 2 * 2, column // 2 * 2
    seen |= {board[top + i][left + j] for i in range(2) for j in range(2)}
    return sorted({'1', '2', '3', '4'} - seen)
