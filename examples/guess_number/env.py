"""Guess a hidden number: several turns of a chat, and a reward for each of them."""

import math
import random

from stppo_jax.types import Task

NUM_TASKS = {'train': 2000, 'dev': 128}


def load(split: str) -> list[Task]:
  """Makes the tasks of a split: a task is its seed."""
  start = 0 if split == 'train' else NUM_TASKS['train']
  seeds = range(start, start + NUM_TASKS[split])
  return [
      Task(f'{split}-{seed}', 'Guess!', dataset='guess', split=split, seed=seed) for seed in seeds
  ]


class GuessNumber:
  """A hidden number from `low` to `high`. The answer to a guess is 'higher' or 'lower'.

  The reward of a turn is the share of the information that it gained, plus 0.5 for the hidden
  number. A guess that earlier answers rule out has reward -0.1.
  """

  frame = 'user'
  core_metrics = ('found',)
  uses_global_random = False

  def __init__(self, task, max_turns, low=1, high=9):
    del task  # `reset` gets its seed
    self._max_turns = max_turns
    self._low = low
    self._high = high

  def reset(self, seed=None):
    """Draws the hidden number from the task's seed."""
    self._hidden = random.Random(seed).randint(self._low, self._high)
    self._left = range(self._low, self._high + 1)
    self._turns = 0
    return f'{self._low}-{self._high}', {}

  def step(self, action):
    """Answers a guess."""
    self._turns += 1
    guess = int(action) if action.isascii() and action.isdigit() and len(action) < 9 else None
    is_found = guess == self._hidden
    is_last = self._turns >= self._max_turns
    info = {
        'action': 'invalid' if guess is None else 'guess',
        'metrics': {'found': float(is_found), 'guesses': float(self._turns)},
    }
    if guess is None:
      return '?', -0.1, is_last, is_last, info
    if guess not in self._left:
      reward = -0.1
    else:
      num_before = len(self._left)
      self._left = self._still_possible(guess)
      num_numbers = self._high - self._low + 1
      reward = math.log(num_before / len(self._left)) / math.log(num_numbers)
    if is_found:
      return '', reward + 0.5, True, False, info
    return 'higher' if guess < self._hidden else 'lower', reward, is_last, is_last, info

  def _still_possible(self, guess):
    if guess == self._hidden:
      return range(guess, guess + 1)
    if guess < self._hidden:
      return range(guess + 1, self._left.stop)
    return range(self._left.start, guess)
