"""Planners: one that marks the ceiling, and one that the first policy imitates."""

import re

PAIR = re.compile(r'(\w+) is (before|after) (\w+)\.')


class Player:
  """Calls the tools in any order in most episodes, else in one that the constraints allow."""

  skill = 0.3  # share of episodes in which it sorts

  def __init__(self, rng):
    self._rng = rng
    self._sorts = rng.random() < self.skill
    self._text = ''
    self._called = []
    self._left = []
    self._names = {}

  def act(self, observation: str) -> str:
    """Returns a call, or `done`."""
    if not self._text:
      self._read(observation)
    if not self._text or 'new:' in observation:
      self._text += observation
    if not self._left:
      return 'done'
    tool = self._next() if self._sorts else self._left[0]
    self._left.remove(tool)
    self._called.append(tool)
    return f'{tool} for {self._names[tool]}' if tool in self._names else tool

  def _read(self, text):
    """Reads the tools and the arguments of a task."""
    tools = re.search(r'tools: (.*?)\.', text)[1].split(', ')
    self._names = dict(re.findall(r'(\w+) is for (\w+)\.', text))
    never = re.findall(r'(\w+) is never\.', text)
    self._left = [tool for tool in tools if tool not in never]
    self._rng.shuffle(self._left)

  def _next(self):
    """Returns a tool that no constraint asks to call later."""
    first = re.findall(r'(\w+) is first\.', self._text)
    late = set()
    for tool, word, other in PAIR.findall(self._text):
      before, after = (tool, other) if word == 'before' else (other, tool)
      if before in self._left:
        late.add(after)
    ready = [tool for tool in self._left if tool not in late]
    return next((tool for tool in ready if tool in first), ready[0])


class Expert(Player):
  """Sorts the tools topologically: the ceiling."""

  skill = 1.0
