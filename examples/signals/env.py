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

  The sender of a round reads a target from 1 to 4, and sends one letter from a to d. The receiver
  reads only the letter, and names a target. Both have reward 1 if it is the sender's target.
  'first' sends in round one, 'second' in round two. The roles have to agree on a code.
  """

  frame = 'user'
  roles = ('first', 'second')
  core_metrics = ('understood',)
  uses_global_random = False

  def __init__(self, task):
    del task

  def reset(self, seed=None):
    """Draws the targets of both rounds from the seed. 'first' reads its own."""
    rng = random.Random(seed)
    self._targets = [rng.choice(TARGETS) for _ in self.roles]
    self._round = 0
    self._is_sent = False
    self._is_right = [False, False]
    return f'send {self._targets[0]}', {'role': 'first'}

  def step(self, action):
    """Takes a letter of the sender, or a target of the receiver."""
    sender = self.roles[self._round]
    receiver = self.roles[1 - self._round]
    if not self._is_sent:
      self._is_sent = True
      is_legal = len(action) == 1 and action in SIGNALS
      info = {'action': 'send' if is_legal else 'invalid', 'role': receiver}
      letter = action if is_legal else '?'
      return f'got {letter}', -0.1 * (not is_legal), False, False, info
    self._is_sent = False
    is_legal = len(action) == 1 and action in TARGETS
    is_right = action == self._targets[self._round]
    self._is_right[self._round] = is_right
    reward = float(is_right) - 0.1 * (not is_legal)
    info = {'action': 'name' if is_legal else 'invalid', 'rewards': {sender: float(is_right)}}
    self._round += 1
    if self._round == len(self.roles):
      first, second = map(float, self._is_right)  # by the round in which the role sent
      info['metrics'] = {'understood': (first + second) / 2}
      info['role_metrics'] = {
          'first': {'as_sender': first, 'as_receiver': second},
          'second': {'as_sender': second, 'as_receiver': first},
      }
      return '', reward, True, False, info
    info['role'] = receiver  # sends in the next round
    return f'send {self._targets[self._round]}', reward, False, False, info
