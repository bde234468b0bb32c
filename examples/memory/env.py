"""A memory that one agent keeps and another one answers from, after Memory-R1.

In the paper (arXiv 2508.19828) a manager reads facts and changes a memory by ADD, UPDATE, DELETE or
NOOP. An answer agent then reads what a search in the memory returns. Both have the exact match of
the answer as their reward. The sessions here are generated, and short:

  manager    fact: ann lives in oslo.
             memory: 1 ann lives in rome; 2 bob has dog.
             > UPDATE 1 ann lives in oslo
  answerer   question: where does ann live?
             memory: 1 ann lives in oslo; 2 bob has dog.
             > oslo

Nothing in the memory says which of two facts is newer. So a question about a fact that has changed
needs an UPDATE, or a DELETE and an ADD.
"""

import dataclasses
import random
import re

from examples import tasks

load = tasks.seeded('memory')
NAMES = ('ann', 'bob', 'eve')
CITIES = ('rome', 'oslo', 'lima')
PETS = ('dog', 'cat', 'fish')
CHATTER = ('it is cold.', 'i like tea.', 'good night.')
NUM_FACTS = 3
TOP_K = 2  # memories that an agent sees
MAX_MEMORIES = 8
MAX_LENGTH = 60  # characters of a memory
OPERATION = re.compile(r'ADD (?P<new>.+)|UPDATE (?P<id>\d) (?P<text>.+)|DELETE (?P<old>\d)|NOOP')


@dataclasses.dataclass(frozen=True)
class Session:
  """Facts in the order in which they are told, a question, and its answer."""

  facts: tuple[str, ...]
  question: str
  answer: str
  is_conflict: bool  # whether the answer replaces an earlier one


def make_session(rng: random.Random) -> Session:
  """Draws a session: the facts of one person that is asked for, and some others."""
  name, other = rng.sample(NAMES, 2)
  has_changed = rng.random() < 0.7
  if rng.random() < 0.6:
    question = f'where does {name} live?'
    cities = rng.sample(CITIES, 2 if has_changed else 1)
    facts = [f'{name} lives in {city}.' for city in cities]
    answer = cities[-1]
    is_conflict = has_changed
  else:
    question = f'what has {name}?'
    facts, answer = _make_pets(rng, name, has_changed)
    is_conflict = False
  others = [_make_fact(rng, other), *CHATTER][: NUM_FACTS - len(facts)]
  if len(others) > 1:
    others[1] = rng.choice(CHATTER)
  for fact in others:
    facts.insert(rng.randint(0, len(facts)), fact)
  return Session(tuple(facts), question, answer, is_conflict)


def _make_pets(rng, name, has_changed):
  """Returns facts about pets and the answer that they give."""
  first, second = rng.sample(PETS, 2)
  if not has_changed:
    return [f'{name} has {first}.'], first
  if rng.random() < 0.5:
    return [f'{name} has {first}.', f'{name} lost {first}.'], 'none'
  pair = ' and '.join(sorted((first, second)))
  return [f'{name} has {first}.', f'{name} also has {second}.'], pair


def _make_fact(rng, name):
  if rng.random() < 0.5:
    return f'{name} lives in {rng.choice(CITIES)}.'
  return f'{name} has {rng.choice(PETS)}.'


class Bank:
  """The memory: numbered texts."""

  def __init__(self):
    self.texts: dict[int, str] = {}

  def apply(self, action: str) -> str:
    """Carries out an operation and returns its name, or 'invalid' and changes nothing."""
    match = OPERATION.fullmatch(action)
    if match is None:
      return 'invalid'
    name = action.partition(' ')[0]
    number = int(match['id'] or match['old'] or 0)
    if number and number not in self.texts:
      return 'invalid'
    if name == 'ADD':
      free = [i for i in range(1, MAX_MEMORIES + 1) if i not in self.texts]
      if not free:
        return 'invalid'
      self.texts[free[0]] = match['new'][:MAX_LENGTH]
    elif name == 'UPDATE':
      self.texts[number] = match['text'][:MAX_LENGTH]
    elif name == 'DELETE':
      del self.texts[number]
    return name

  def search(self, query: str) -> str:
    """Returns the memories that share the most words with a query.

    The order of equally good ones is alphabetical, so that it does not show which one is newer.
    """
    words = set(re.findall(r'\w+', query))
    shared = {i: len(words & set(re.findall(r'\w+', text))) for i, text in self.texts.items()}
    hits = [i for i in self.texts if shared[i]]
    hits.sort(key=lambda i: (-shared[i], self.texts[i]))
    return '; '.join(f'{i} {self.texts[i]}' for i in hits[:TOP_K]) or 'none'


class Memory:
  """A session: the manager reads the facts, then the answerer reads the question.

  Args:
    task: gives no more than its seed, to `reset`.
  """

  frame = 'user'
  roles = ('manager', 'answerer')
  core_metrics = ('right',)
  uses_global_random = False

  def __init__(self, task):
    del task

  def reset(self, seed=None):
    """Draws a session from the seed and tells the manager its first fact."""
    self.session = make_session(random.Random(seed))
    self.bank = Bank()
    self._num_told = 0
    self._used = []
    return self._tell(), {'role': 'manager'}

  def step(self, action):
    """Takes an operation of the manager, or the answer."""
    session = self.session
    if self._num_told <= len(session.facts):
      kind = self.bank.apply(action)
      self._used.append(kind)
      if self._num_told < len(session.facts):
        return self._tell(), 0.0, False, False, {'action': kind.lower(), 'role': 'manager'}
      self._num_told += 1
      text = f'question: {session.question}\nmemory: {self.bank.search(session.question)}'
      return text, 0.0, False, False, {'action': kind.lower(), 'role': 'answerer'}
    is_right = float(action.strip() == session.answer)
    metrics = {'right': is_right}
    for name in ('ADD', 'UPDATE', 'DELETE', 'NOOP'):
      metrics[name.lower()] = self._used.count(name) / len(self._used)
    info = {
        'action': 'answer',
        'role': 'answerer',
        'rewards': {'manager': is_right},
        'metrics': metrics,
    }
    return '', is_right, True, False, info

  def _tell(self):
    """Returns the next fact, with the memories that are like it."""
    fact = self.session.facts[self._num_told]
    self._num_told += 1
    return f'fact: {fact}\nmemory: {self.bank.search(fact)}'
