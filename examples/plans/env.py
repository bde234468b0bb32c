"""Planning tasks that are made from constraints, and an oracle that counts errors, after PDoctor.

PDoctor (arXiv 2404.17833, read in its abstract and in reviews) tests planners. It draws constraints
on the order of tool calls, writes them as a paragraph, and checks the calls of an agent. Here a
hidden order of mock tools comes first. The constraints are true statements about it, so every task
has a solution without a solver:

  tools: wash, cook, serve. cook is before serve. wash is first. call every tool once.
  > cook
  called cook.

A constraint may concern an argument as well: `cook for ann`. The oracle counts violated
constraints, missing and repeated tools and wrong arguments. The score is 1 if there are none.
"""

import dataclasses
import random
import re

from examples import tasks

load = tasks.seeded('plans')
TOOLS = ('wash', 'cook', 'serve', 'open', 'paint', 'call', 'lock', 'scan')
NAMES = ('ann', 'bob', 'eve')
CALL = re.compile(r'(\w+)(?: for (\w+))?')


@dataclasses.dataclass(frozen=True)
class Constraint:
  """A statement about the calls: 'before', 'after', 'first', 'never' or 'for'."""

  kind: str
  tool: str
  other: str = ''  # a tool, or a name

  @property
  def text(self) -> str:
    """The statement as a sentence."""
    if self.kind in ('before', 'after'):
      return f'{self.tool} is {self.kind} {self.other}.'
    if self.kind == 'for':
      return f'{self.tool} is for {self.other}.'
    return f'{self.tool} is {self.kind}.'

  def is_violated(self, calls: list[tuple[str, str]]) -> bool:
    """Returns whether calls [(tool, name)] break the statement."""
    tools = [tool for tool, _ in calls]
    if self.kind == 'never':
      return self.tool in tools
    if self.tool not in tools:
      return False  # it counts as missing
    if self.kind == 'first':
      return tools[0] != self.tool
    if self.kind == 'for':
      return any(name != self.other for tool, name in calls if tool == self.tool)
    if self.other not in tools:
      return False
    is_before = tools.index(self.tool) < tools.index(self.other)
    return is_before != (self.kind == 'before')


@dataclasses.dataclass(frozen=True)
class Plan:
  """A task: the tools to call, the constraints, and one solution."""

  tools: tuple[str, ...]
  constraints: tuple[Constraint, ...]
  solution: tuple[tuple[str, str], ...]

  @property
  def wanted(self) -> tuple[str, ...]:
    """The tools that have to be called once."""
    never = {c.tool for c in self.constraints if c.kind == 'never'}
    return tuple(tool for tool in self.tools if tool not in never)

  @property
  def text(self) -> str:
    """The paragraph that the agent reads."""
    sentences = ' '.join(constraint.text for constraint in self.constraints)
    return f'tools: {", ".join(self.tools)}. {sentences} call every other tool once.'

  def errors(self, calls: list[tuple[str, str]]) -> dict[str, int]:
    """Counts the errors of calls by their kind."""
    tools = [tool for tool, _ in calls]
    with_name = {c.tool for c in self.constraints if c.kind == 'for'}
    return {
        'violated': sum(constraint.is_violated(calls) for constraint in self.constraints),
        'missing': sum(tool not in tools for tool in self.wanted),
        'extra': len(tools) - len(set(tools) & set(self.tools)),
        'arguments': sum(bool(name) for tool, name in calls if tool not in with_name),
    }


def make_plan(rng: random.Random, num_tools: int, num_constraints: int) -> Plan:
  """Draws an order of the tools, and true statements about it."""
  tools = rng.sample(TOOLS, num_tools)
  never = rng.choice(tools) if rng.random() < 0.3 else ''
  order = [tool for tool in tools if tool != never]
  names = {}
  if rng.random() < 0.5:
    names[rng.choice(order)] = rng.choice(NAMES)
  constraints = [Constraint('never', never)] if never else []
  constraints += [Constraint('for', tool, name) for tool, name in names.items()]
  if rng.random() < 0.3:
    constraints.append(Constraint('first', order[0]))
  pairs = [(i, j) for i in range(len(order)) for j in range(i + 1, len(order))]
  for i, j in rng.sample(pairs, min(num_constraints, len(pairs))):
    if rng.random() < 0.5:
      constraints.append(Constraint('before', order[i], order[j]))
    else:
      constraints.append(Constraint('after', order[j], order[i]))
  rng.shuffle(constraints)
  solution = tuple((tool, names.get(tool, '')) for tool in order)
  return Plan(tuple(sorted(tools)), tuple(constraints), solution)


class Plans:
  """The agent calls mock tools one by one, and says `done`.

  Args:
    task: gives no more than its seed, to `reset`.
    max_turns: calls of an episode, the word `done` included. It is the time budget.
    tools: number of tools.
    constraints: number of statements about pairs of tools.
    update_after: number of calls after which the user adds a constraint; 0: never. It
      concerns tools that were not called yet, so that the task keeps a solution.
  """

  frame = 'user'
  core_metrics = ('correct',)
  uses_global_random = False

  def __init__(self, task, max_turns, tools=3, constraints=2, update_after=0):
    del task
    self._max_turns = max_turns
    self._sizes = (tools, constraints)
    self._update_after = update_after

  def reset(self, seed=None):
    """Draws a task from the seed."""
    self.plan = self._whole = make_plan(random.Random(seed), *self._sizes)
    self.calls = []
    self._turns = 0
    self._later = None
    orders = [c for c in self.plan.constraints if c.kind in ('before', 'after')]
    if self._update_after and orders:
      self._later = orders[-1]
      told = tuple(c for c in self.plan.constraints if c is not self._later)
      self.plan = dataclasses.replace(self.plan, constraints=told)
    return self.plan.text, {}

  def step(self, action):
    """Records a call, or judges all of them."""
    self._turns += 1
    is_last = self._turns >= self._max_turns
    is_done = action.strip() == 'done'
    match = CALL.fullmatch(action.strip())
    kind = 'done' if is_done else 'invalid'
    text = '' if is_done else 'write a call.'
    if match and match[1] in self.plan.tools and not is_done:
      kind = 'call'
      self.calls.append((match[1], match[2] or ''))
      text = f'called {match[1]}.'
      if self._later and len(self.calls) == self._update_after:
        text += self._tell()
    is_over = is_done or is_last
    errors = self.plan.errors(self.calls)
    is_correct = is_done and not any(errors.values())
    metrics = {'correct': float(is_correct)}
    metrics |= {name: float(count) for name, count in errors.items()}
    info = {'action': kind, 'metrics': metrics}
    return text, float(is_correct), is_over, is_last and not is_done, info

  def _tell(self):
    """Adds the constraint that was held back, if the calls so far leave it possible."""
    called = {tool for tool, _ in self.calls}
    if called & {self._later.tool, self._later.other}:
      return ''
    self.plan = self._whole
    return f' new: {self._later.text}'
