"""Nested settings on text screens, and a judge of single steps, after GUI-Shepherd.

In the paper (arXiv 2509.23738, R) an agent operates an interface by its screenshots. A process
reward model is trained on (instruction, screen, action) with the labels positive and negative, as
many of each. Its judgement of each step is the agent's reward. The screens here are texts:

  goal: wifi on. network: mobile on, wifi off, proxy.
  > tap wifi

The label of a step comes from the shortest way to the goal: it is positive if the way gets shorter.
"""

from collections.abc import Callable
import dataclasses
import importlib
import random

from examples import tasks

load = tasks.seeded('screens')
# Screen -> what is on it: screens, switches and fields.
TREE = {
    'home': ('network', 'display', 'account'),
    'network': ('wifi', 'mobile', 'proxy'),
    'display': ('bright', 'dark', 'font'),
    'account': ('name', 'sync', 'privacy'),
    'proxy': ('host', 'tunnel'),
    'privacy': ('alias', 'hidden'),
}
PARENTS = {name: screen for screen, names in TREE.items() for name in names}
FIELDS = ('font', 'name', 'host', 'alias')
SWITCHES = tuple(name for name in PARENTS if name not in (*TREE, *FIELDS))
WORDS = ('ann', 'bob', 'eve', 'red', 'tea')
REWARDS = ('outcome', 'process', 'oracle')
FIELD_SHARE = 0.3  # share of the judge's steps in an open field, or close to the goal
STEP_WEIGHT = 0.2  # weight of a step's judgement. The paper's weight is not known.


@dataclasses.dataclass(frozen=True)
class Phone:
  """A goal, the screen that is shown, the order of its lines, and all values."""

  target: str  # a switch or a field
  wanted: str  # its value at the goal
  screen: str  # a name of TREE, or a field that is open
  values: dict[str, str]
  lines: dict[str, tuple[str, ...]]  # screen -> its contents in the order that is shown

  @property
  def goal(self) -> str:
    """The instruction."""
    return f'goal: {self.target} {self.wanted}.'

  def describe(self) -> str:
    """Returns the screen as text."""
    if self.screen in FIELDS:
      return f'{self.screen}: {self.values[self.screen]}.'
    items = [f'{name} {self.values.get(name, "")}'.strip() for name in self.lines[self.screen]]
    return f'{self.screen}: {", ".join(items)}.'

  def apply(self, action: str) -> 'Phone | None':
    """Returns the phone after an action, or None if the action is impossible here."""
    verb, _, word = action.partition(' ')
    if action == 'back' and self.screen != 'home':
      return dataclasses.replace(self, screen=PARENTS[self.screen])
    if verb == 'type' and self.screen in FIELDS and word in WORDS:
      values = self.values | {self.screen: word}
      return dataclasses.replace(self, values=values, screen=PARENTS[self.screen])
    if verb != 'tap' or word not in self.lines.get(self.screen, ()):
      return None
    if word not in SWITCHES:
      return dataclasses.replace(self, screen=word)
    values = self.values | {word: 'off' if self.values[word] == 'on' else 'on'}
    return dataclasses.replace(self, values=values)

  def actions(self) -> list[str]:
    """Returns the possible actions."""
    if self.screen in FIELDS:
      return ['back', *(f'type {word}' for word in WORDS)]
    taps = [f'tap {name}' for name in self.lines[self.screen]]
    return taps if self.screen == 'home' else ['back', *taps]

  def distance(self) -> int:
    """Returns the length of the shortest way to the goal. The screens are a tree."""
    if self.values[self.target] == self.wanted:
      return 0
    ours = _way_up(self.screen)
    goals = _way_up(self.target)
    common = next(name for name in ours if name in goals)
    return ours.index(common) + goals.index(common) + (self.target in FIELDS)

  def is_positive(self, action: str) -> bool:
    """Returns whether an action makes the way shorter."""
    after = self.apply(action)
    return after is not None and after.distance() < self.distance()


def _way_up(name: str) -> list[str]:
  names = [name]
  while names[-1] != 'home':
    names.append(PARENTS[names[-1]])
  return names


def make_phone(rng: random.Random) -> Phone:
  """Draws values, a screen, and a goal that is not reached yet."""
  values = {name: rng.choice(('on', 'off')) for name in SWITCHES}
  values |= {name: rng.choice(WORDS) for name in FIELDS}
  target = rng.choice(sorted(values))
  choices = ('on', 'off') if target in SWITCHES else WORDS
  wanted = rng.choice([value for value in choices if value != values[target]])
  lines = {screen: tuple(rng.sample(names, len(names))) for screen, names in TREE.items()}
  return Phone(target, wanted, rng.choice(sorted(TREE)), values, lines)


def question(phone: Phone, action: str) -> str:
  """Returns the instruction, the screen and the action, as the judge reads them."""
  return f'{phone.goal} {phone.describe()} action: {action}.'


class Screens:
  """A phone with a goal.

  Args:
    task: gives no more than its seed, to `reset`.
    max_turns: actions of an episode.
    reward: 'outcome' pays 1 at the goal. 'process' adds to each step 0.2 (2p - 1), where p is the
      probability of a positive step by the judge, and 0 for an impossible action. 'oracle' takes
      the label for p.
  """

  frame = 'user'
  core_metrics = ('reached',)
  uses_global_random = False

  def __init__(self, task, max_turns, reward='process'):
    del task
    if reward not in REWARDS:
      raise ValueError(f'env.options.reward={reward!r}: give one of {", ".join(REWARDS)}')
    self._max_turns = max_turns
    self._judge = _judges()[reward]

  def reset(self, seed=None):
    """Draws the phone from the seed."""
    self.phone = make_phone(random.Random(seed))
    self._turns = 0
    self._judged = 0.0
    return f'{self.phone.goal} {self.phone.describe()}', {}

  def step(self, action):
    """Carries out an action and shows the screen."""
    self._turns += 1
    after = self.phone.apply(action)
    reward = 0.0
    if self._judge:
      probability = self._judge(self.phone, action) if after else 0.0
      self._judged += probability
      reward = STEP_WEIGHT * (2 * probability - 1)
    self.phone = after or self.phone
    is_reached = self.phone.distance() == 0
    is_last = self._turns >= self._max_turns
    info = {
        'action': action.partition(' ')[0] if after else 'invalid',
        'metrics': {
            'reached': float(is_reached),
            'judged': self._judged / self._turns,
            'actions': float(self._turns),
        },
    }
    text = self.phone.describe() if after else 'impossible.'
    reward += float(is_reached)
    return text, reward, is_reached or is_last, is_last and not is_reached, info


def _judges() -> dict[str, Callable[[Phone, str], float] | None]:
  """Returns the judge of each reward."""
  return {
      'outcome': None,
      'oracle': lambda phone, action: float(phone.is_positive(action)),
      'process': lambda phone, action: _model()(question(phone, action)),
  }


def _model():
  """Returns the judge's model. It is loaded at its first use, not with the environment."""
  return importlib.import_module('examples.screens.judge').load()


class Judgements:
  """The judge's own task: one step, to be called positive or negative.

  Half of the steps are positive. Training makes the judge an imitation of the right answers.
  """

  frame = 'user'
  core_metrics = ('right',)
  uses_global_random = False

  def __init__(self, task):
    del task

  def reset(self, seed=None):
    """Draws a phone and a step from the seed."""
    rng = random.Random(seed)
    wanted = rng.random() < 0.5
    phone = make_phone(rng)
    if rng.random() < FIELD_SHARE:
      phone = dataclasses.replace(phone, screen=rng.choice((phone.target, rng.choice(FIELDS))))
    if phone.screen in SWITCHES:
      phone = dataclasses.replace(phone, screen=PARENTS[phone.screen])
    steps = [action for action in phone.actions() if phone.is_positive(action) == wanted]
    action = rng.choice(steps or phone.actions())  # any word leaves a wrong field
    self._label = 'positive' if phone.is_positive(action) else 'negative'
    return question(phone, action), {}

  def step(self, action):
    """Takes the label."""
    is_right = float(action == self._label)
    return '', is_right, True, False, {'action': 'judge', 'metrics': {'right': is_right}}
