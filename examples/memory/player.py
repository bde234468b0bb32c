"""Players of both roles: ones that mark the bars, and one that the first policy imitates."""

import re

from examples.memory import env

FACT = re.compile(r'fact: (.*)\.\nmemory: (.*)')
QUESTION = re.compile(r'question: (.*)\?\nmemory: (.*)')


class Player:
  """Manages badly and answers from what it sees. It is right in a share of its turns."""

  skill = 0.3  # share of operations that are the expert's
  reading = 0.7  # share of answers that are the expert's

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns an operation or an answer."""
    if match := QUESTION.search(observation):
      if self._rng.random() < self.reading:
        return self._answer(match[1], _memories(match[2]))
      return self._rng.choice((*env.CITIES, *env.PETS, 'none'))
    match = FACT.search(observation)
    fact = match[1]
    memories = _memories(match[2])
    if self._rng.random() < self.skill:
      return self._manage(fact, memories)
    return self._any(fact, memories)

  def _any(self, fact, memories):
    """Returns any operation that is possible."""
    choices = [f'ADD {fact}', f'ADD {fact}', 'NOOP']
    for number in memories:
      choices += [f'UPDATE {number} {fact}', f'DELETE {number}']
    return self._rng.choice(choices)

  def _manage(self, fact, memories):
    """Returns the right operation."""
    name, verb, *rest = fact.split()
    if name not in env.NAMES:
      return 'NOOP'
    kind = 'lives' if verb == 'lives' else 'has'
    old = [i for i, text in memories.items() if text.startswith(f'{name} {kind}')]
    if not old:
      return f'ADD {fact}'
    if memories[old[0]] == fact:
      return 'NOOP'
    if verb == 'lost':
      return f'DELETE {old[0]}'
    if verb == 'also':
      pets = sorted([*memories[old[0]].split()[2:], rest[-1]])
      return f'UPDATE {old[0]} {name} has {" and ".join(pets)}'
    return f'UPDATE {old[0]} {fact}'

  def _answer(self, question, memories):
    """Returns an answer that the memories give, or 'none'."""
    words = question.split()
    name = words[-1] if words[0] == 'what' else words[2]
    kind = 'has' if words[0] == 'what' else 'lives in'
    found = [text for text in memories.values() if text.startswith(name)]
    answers = [text.partition(f'{kind} ')[2] for text in found if f' {kind} ' in text]
    lost = [text.split()[-1] for text in found if ' lost ' in text]
    if kind == 'lives in' and answers:
      return self._rng.choice(answers)
    return ' and '.join(sorted(set(answers) - set(lost))) or 'none'


def _memories(text):
  """Returns {number: text} of the memories that an observation shows."""
  if text == 'none':
    return {}
  parts = [entry.partition(' ') for entry in text.split('; ')]
  return {int(number): memory for number, _, memory in parts}


class Expert(Player):
  """Keeps the memory true: the ceiling."""

  skill = 1.0
  reading = 1.0


class AddOnly(Expert):
  """Adds every fact, as a store without a manager does."""

  def _manage(self, fact, memories):
    del memories
    return f'ADD {fact}'
