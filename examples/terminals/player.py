"""Players of the shell: one that marks the ceiling, and one that the first policy imitates."""

import re

from examples.terminals import env

NAMES = {
    'file': env.FILES,
    'target': env.TARGETS,
    'folder': env.FOLDERS,
    'word': env.WORDS,
    'hidden': env.WORDS,
}
# Kind -> the kind that the careless player takes it for. Both have the same names.
CONFUSED = {'count': 'sort', 'sort': 'first', 'first': 'count', 'keep': 'drop', 'drop': 'keep'}
DONE = '<action>done</action>'


def parse(text: str) -> tuple[str, dict[str, str]]:
  """Returns the kind of a task and the names in its text."""
  groups = {name: f'(?P<{name}>{"|".join(words)})' for name, words in NAMES.items()}
  for kind, parts in env.KINDS.items():
    if match := re.fullmatch(parts.text.format(**groups), text):
      return kind, match.groupdict()
  raise ValueError(f'{text!r} is no task of env.KINDS')


class Player:
  """Knows how each kind of task is solved, but takes most tasks for another kind."""

  skill = 0.4  # share of episodes in which it recognises the kind

  def __init__(self, rng):
    self._rng = rng
    self._names = {}
    self._lines = []

  def act(self, observation: str) -> str:
    """Returns a command, or the end."""
    if not self._names:
      self._plan(observation)
    elif self._lines and '{hidden}' in self._lines[0]:
      self._names['hidden'] = observation.strip()
    if not self._lines:
      return DONE
    return f'<command>{self._lines.pop(0).format(**self._names)}</command>'

  def _plan(self, text):
    """Reads the kind and the names of a task. It guesses the names that the text does not give."""
    kind, names = parse(text)
    self._names = {name: self._rng.choice(words) for name, words in NAMES.items()} | names
    if self._rng.random() >= self.skill:
      kind = CONFUSED.get(kind) or self._rng.choice(sorted(env.KINDS))
    self._lines = list(env.KINDS[kind].reference)


class Expert(Player):
  """Recognises every task: the ceiling."""

  skill = 1.0
