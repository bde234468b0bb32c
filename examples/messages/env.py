"""Three patterns of communication on one task, after LTC (learning through communication).

In the paper (arXiv 2310.01444, v1; S) an agent learns from its messages by PPO and a language model
loss. A monologue thinks and then acts. In a dialogue one agent thinks and another one acts. In an
analogue a teacher explains after a failure. The task here is a sum of three digits:

  monologue  2 plus 7 plus 5? think.                          > 2 plus 7 is 9
             answer.                                          > 14
  dialogue   2 plus 7 plus 5? think.                          > 2 plus 7 is 9     (the partner)
             2 plus 7 plus 5? hint: 2 plus 7 is 9. answer.    > 14                (the student)
  analogue   2 plus 7 plus 5? answer.                         > 13
             teacher: 2 plus 7 is 9, plus 5 is 14. 3 plus 1 plus 6? answer.  > 10
"""

import random

from examples import tasks

load = tasks.seeded('messages')
PATTERNS = ('monologue', 'dialogue', 'analogue')
MAX_HINT = 24  # characters of a thought that the student reads
Digits = tuple[int, int, int]


def ask(digits: Digits) -> str:
  """Returns the question."""
  return f'{" plus ".join(map(str, digits))}?'


def explain(digits: Digits) -> str:
  """Returns what the teacher says."""
  a, b, c = digits
  return f'teacher: {a} plus {b} is {a + b}, plus {c} is {a + b + c}.'


class Messages:
  """A question by one of the patterns. Both roles have reward 1 for a right answer.

  An analogue asks two questions, and each pays a half. Only a wrong first answer is explained.

  Args:
    task: gives no more than its seed, to `reset`.
    pattern: one of PATTERNS, or 'mixed' for one that the seed draws.
  """

  frame = 'user'
  roles = ('student', 'partner')  # the partner moves in a dialogue only
  core_metrics = ('right',)
  uses_global_random = False

  def __init__(self, task, pattern='dialogue'):
    del task
    if pattern not in (*PATTERNS, 'mixed'):
      raise ValueError(f'env.options.pattern={pattern!r}: give {", ".join(PATTERNS)} or mixed')
    self._option = pattern

  def reset(self, seed=None):
    """Draws the questions, and a pattern if the patterns are mixed."""
    rng = random.Random(seed)
    self._questions = [tuple(rng.randrange(10) for _ in range(3)) for _ in range(2)]
    self.pattern = rng.choice(PATTERNS) if self._option == 'mixed' else self._option
    self._turns = 0
    self._scores = []
    text = ask(self._questions[0])
    if self.pattern == 'analogue':
      return f'{text} answer.', {'role': 'student'}
    return f'{text} think.', {'role': 'student' if self.pattern == 'monologue' else 'partner'}

  def step(self, action):
    """Takes a thought or an answer."""
    self._turns += 1
    if self.pattern == 'analogue':
      return self._step_of_analogue(action)
    if self._turns == 1:
      text = 'answer.'
      if self.pattern == 'dialogue':
        text = f'{ask(self._questions[0])} hint: {action[:MAX_HINT]}. answer.'
      return text, 0.0, False, False, {'action': 'think', 'role': 'student'}
    reward = self._score(action)
    rewards = {'partner': reward} if self.pattern == 'dialogue' else {}
    return '', reward, True, False, self._info(action) | {'rewards': rewards}

  def _step_of_analogue(self, action):
    reward = 0.5 * self._score(action)
    if self._turns == 2:
      return '', reward, True, False, self._info(action)
    first, second = self._questions
    text = f'{ask(second)} answer.'
    if not reward:
      text = f'{explain(first)} {text}'
    return text, reward, False, False, self._info(action)

  def _score(self, action):
    question = self._questions[len(self._scores)]
    self._scores.append(float(action == str(sum(question))))
    return self._scores[-1]

  def _info(self, action):
    return {
        'action': 'answer' if action.isdecimal() else 'invalid',
        'role': 'student',
        'metrics': {'right': sum(self._scores) / len(self._scores)},
    }
