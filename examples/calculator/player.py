"""The player that the first policy imitates: in six of ten games it gives up."""

import re

from examples.calculator import questions

RESULT = re.compile(r'<information>(.*)</information>')


class Player:
  """Gives up at once, or calls with an expression that fits the question or with any other."""

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns a call in Qwen's form, or an answer."""
    if result := RESULT.search(observation):
      return f'<answer>{result[1]}</answer>'
    if self._rng.random() < 0.6:
      return '<answer>unknown</answer>'
    expression = self._expression(observation)
    call = '{"name": "calculator", "arguments": {"expression": "' + expression + '"}}'
    return f'<tool_call>{call}</tool_call>'

  def _expression(self, observation):
    """Returns the expression of any kind of sum, more often the right one."""
    _, question = observation.split('Question: ')
    numbers = dict(zip('abc', re.findall(r'\d+', question)))
    right = next(sum_ for text, sum_ in questions.KINDS if text.format(**numbers) in question)
    wrong = self._rng.choice([sum_ for _, sum_ in questions.KINDS])
    return (right if self._rng.random() < 0.5 else wrong).format(**numbers)
