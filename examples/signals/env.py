"""Two copies of a policy agree on a code: each sends to the other once, then they exchange jobs."""

import random

from stppo_jax.types import Task

NUM_TASKS = {'train': 2000, 'dev': 128}
TARGETS, SIGNALS = '1234', 'abcd'


def load(split: str) -> list[Task]:
  """Makes the tasks of a split: a task is its seed."""
  start = 0 if split == 'train' else NUM_TASKS['train']
  seeds = range(start, start + NUM_TASKS[split])
  return [Task(f'{split}-{seed}', dataset='signals', split=split, seed=seed) for seed in seeds]


class Signals:
  """Lewis's signalling game in two rounds, between the roles 'first' and 'second'.

  The sender of a round reads a target from 1 to 4, and says one letter from a to d. The receiver
  reads the letter alone, and names a target. Both are paid 1 if it is the sender's. 'first' sends
  in round one, 'second' in round two. No letter has a meaning until they agree on one.
  """

  frame = 'user'
  roles = ('first', 'second')
  core_metrics = ('understood',)
  uses_global_random = False

  def __init__(self, task):
    del task

  def reset(self, seed=None):
    """Draws the target of both rounds from the seed; 'first' is told its own."""
    rng = random.Random(seed)
    self._targets = [rng.choice(TARGETS) for _ in self.roles]
    self._round, self._is_sent = 0, False
    self._right = [False, False]
    return f'send {self._targets[0]}', {'role': 'first'}

  def step(self, action):
    """Takes a letter of the sender, or a target of the receiver."""
    sender, receiver = self.roles[self._round], self.roles[1 - self._round]
    known = SIGNALS if not self._is_sent else TARGETS
    legal = len(action) == 1 and action in known
    info = {'action': ('name' if self._is_sent else 'send') if legal else 'invalid'}
    self._is_sent = not self._is_sent
    if self._is_sent:
      return (
          f'got {action if legal else "?"}',
          -0.1 * (not legal),
          False,
          False,
          info | {'role': receiver},
      )
    right = self._right[self._round] = action == self._targets[self._round]
    info['rewards'] = {sender: float(right)}
    self._round += 1
    over = self._round == len(self.roles)
    if over:
      first, second = map(float, self._right)  # by the round in which it sent
      info['metrics'] = {'understood': (first + second) / 2}
      info['role_metrics'] = {
          'first': {'as_sender': first, 'as_receiver': second},
          'second': {'as_sender': second, 'as_receiver': first},
      }
      return '', float(right) - 0.1 * (not legal), True, False, info
    observation = f'send {self._targets[self._round]}'
    return observation, float(right) - 0.1 * (not legal), False, False, info | {'role': receiver}
