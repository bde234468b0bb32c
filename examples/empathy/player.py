"""Players of the talk: ones that mark the bars, and one that the first policy imitates."""

import re

from examples.empathy import env

NEED_BY_TEXT = {f'{text}.': need for need, (text, _) in env.NEEDS.items()}


class Player:
  """Asks sometimes, and meets the need that it knows in a share of its turns."""

  skill = 0.15  # share of turns that are the expert's

  def __init__(self, rng):
    self._rng = rng
    self._topic = ''
    self._need = ''  # what the user has told so far

  def act(self, observation: str) -> str:
    """Returns a reply."""
    if match := re.match(r'it is about the (\w+)\.', observation):
      self._topic = match[1]
    if observation in NEED_BY_TEXT:
      self._need = NEED_BY_TEXT[observation]
    elif 'something else' in observation:
      self._need = ''
    if self._rng.random() < self.skill:
      return self._meet()
    if self._rng.random() < 0.15:
      return f'{env.QUESTION}?'
    return self._reply(self._rng.choice(sorted(env.NEEDS)))

  def _meet(self):
    """Asks for the need, or meets it if it is known."""
    return self._reply(self._need) if self._need else f'{env.QUESTION}?'

  def _reply(self, need):
    return f'{env.NEEDS[need][1]} with the {self._topic}.'


class Expert(Player):
  """Asks first, and again when the need has changed: the ceiling."""

  skill = 1.0


class Adviser(Player):
  """Never asks and gives advice to everyone."""

  skill = 1.0

  def _meet(self):
    return self._reply('advice')
