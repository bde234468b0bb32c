"""Two copies of a model that learn together and exchange their roles, after CORY.

In the paper (arXiv 2410.06101, S; rewards read in the authors' code, C) a model is copied. The
pioneer answers a question. The observer reads the question and the pioneer's answer, and answers as
well. Both have the sum of the two rewards, each has its own KL penalty, and they exchange their
roles every few batches:

  pioneer   3 plus 8?
            > 12
  observer  3 plus 8? other: 12.
            > 11

Here the seed of a task decides which copy is the pioneer, so that each batch has both halves.
"""

import random
import re

from examples import tasks

load = tasks.seeded('cory')
COPIES = ('first', 'second')


def is_right(question: tuple[int, int], action: str) -> bool:
  """Returns whether an answer is the sum, as a number without leading zeros."""
  return bool(re.fullmatch(r'\d+', action)) and action == str(sum(question))


class Cory:
  """A sum of two digits, which both copies answer.

  Args:
    task: gives no more than its seed, to `reset`.
    alone: leaves the observer out, for a comparison with one model that learns alone.
  """

  frame = 'user'
  core_metrics = ('right',)
  uses_global_random = False

  def __init__(self, task, alone=False):
    del task
    self._is_alone = alone

  @staticmethod
  def attributes(settings):
    """Returns the roles: there are none if the pioneer is alone."""
    return {'roles': () if settings.get('alone') else COPIES}

  def reset(self, seed=None):
    """Draws the question from the seed, and which copy is the pioneer."""
    rng = random.Random(seed)
    self._question = (rng.randrange(10), rng.randrange(10))
    pioneer = rng.randrange(2)
    self._pioneer = COPIES[pioneer]
    self._observer = COPIES[1 - pioneer]
    self._first_reward = None
    return self._text(), {'role': self._pioneer}

  def step(self, action):
    """Takes the pioneer's answer, then the observer's."""
    reward = float(is_right(self._question, action))
    kind = 'answer' if action.isdecimal() else 'invalid'
    if self._is_alone:
      return '', reward, True, False, {'action': kind, 'metrics': {'right': reward}}
    if self._first_reward is None:
      self._first_reward = reward
      text = f'{self._text()} other: {action[:8]}.'
      return text, 0.0, False, False, {'action': kind, 'role': self._observer}
    both = self._first_reward + reward
    info = {
        'action': kind,
        'rewards': {self._pioneer: both},
        'metrics': {'right': both / 2, 'pioneer': self._first_reward, 'observer': reward},
    }
    return '', both, True, False, info

  def _text(self):
    a, b = self._question
    return f'{a} plus {b}?'
