"""Generated shell tasks, filtered for solvability, in a simulated shell, after Endless Terminals.

The paper (arXiv 2601.16443) generates a task in four stages. Here each is a few lines of Python
instead of a language model and a container:

  1. a text that describes the task                       KINDS: `text`
  2. an initial state                                     `draw`: files with random contents
  3. a test of the final state                            the state that the reference leaves
  4. a filter that keeps the solvable tasks               `is_solvable`: the reference solves the
                                                          task, and doing nothing does not

The agent writes `<command>sort data > out</command>`, or `<action>done</action>` to end the
episode. Both forms are those of the paper's code.
"""

from collections.abc import Mapping
import dataclasses
import random
import re

from examples import tasks
from examples.terminals import shell as shell_lib

load = tasks.seeded('terminals')
FILES = ('log', 'data', 'list')
TARGETS = ('out', 'new')
FOLDERS = ('docs', 'src')
WORDS = ('red', 'blue', 'pear', 'plum')
ACTION = re.compile(r'<(command|action)>(.*?)</\1>', re.DOTALL)
MAX_OUTPUT = 60  # characters that the agent sees


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of task: its text and the lines of its reference, with the names to be filled in."""

  text: str
  reference: tuple[str, ...]


# {file}, {target}, {folder} and {word} are names. {hidden} is a file that the text does not name.
KINDS = {
    'count': Kind('count lines of {file} into {target}.', ('cat {file} | wc -l > {target}',)),
    'keep': Kind(
        'keep lines of {file} with {word} in {target}.', ('grep {word} {file} > {target}',)
    ),
    'drop': Kind(
        'keep lines of {file} without {word} in {target}.', ('grep -v {word} {file} > {target}',)
    ),
    'sort': Kind('sort lines of {file} into {target}.', ('sort {file} > {target}',)),
    'first': Kind('copy first line of {file} to {target}.', ('head -n 1 {file} > {target}',)),
    'add': Kind('add line {word} at end of {file}.', ('echo {word} >> {file}',)),
    'write': Kind('write line {word} to {target}.', ('echo {word} > {target}',)),
    'move': Kind('move {file} to folder {folder}.', ('mv {file} {folder}',)),
    'hidden': Kind(
        'copy file in folder {folder} to {target}.',
        ('ls {folder}', 'cp {folder}/{hidden} {target}'),
    ),
    'delete': Kind('delete file in folder {folder}.', ('ls {folder}', 'rm {folder}/{hidden}')),
}


@dataclasses.dataclass(frozen=True)
class ShellTask:
  """A task with the state that it starts from and the lines that solve it."""

  kind: str
  names: Mapping[str, str]
  files: Mapping[str, str]
  folders: tuple[str, ...]

  @property
  def text(self) -> str:
    """What the agent is asked to do."""
    return KINDS[self.kind].text.format(**self.names)

  @property
  def reference(self) -> list[str]:
    """The lines that solve the task."""
    return [line.format(**self.names) for line in KINDS[self.kind].reference]

  def start(self) -> shell_lib.Shell:
    """Returns a shell in the initial state."""
    return shell_lib.Shell(dict(self.files), self.folders)

  def goal(self) -> tuple[dict[str, str], set[str]]:
    """Returns the final state that the test accepts: the one that the reference leaves."""
    shell = self.start()
    for line in self.reference:
      shell.run(line)
    return shell.state()


def draw(rng: random.Random) -> ShellTask:
  """Draws a task that may be impossible or done already."""
  folder = rng.choice(FOLDERS)
  hidden = rng.choice(WORDS)
  names = {
      'file': rng.choice(FILES),
      'target': rng.choice(TARGETS),
      'folder': folder,
      'word': rng.choice(WORDS),
      'hidden': hidden,
  }
  files = {f'/{name}': _lines(rng) for name in rng.sample(FILES, 2)}
  files[f'/{folder}/{hidden}'] = _lines(rng)
  folders = tuple(f'/{name}' for name in FOLDERS)
  return ShellTask(rng.choice(sorted(KINDS)), names, files, folders)


def _lines(rng):
  return ''.join(f'{rng.choice(WORDS)} {rng.choice(WORDS)}\n' for _ in range(rng.randint(1, 4)))


def is_solvable(task: ShellTask) -> bool:
  """Returns whether the reference runs without an error and changes the state."""
  shell = task.start()
  # A line that works prints nothing, except `ls`.
  prints = [shell.run(line) for line in task.reference if not line.startswith('ls')]
  return not any(prints) and shell.state() != task.start().state()


def make_task(seed: int | None) -> tuple[ShellTask, int]:
  """Returns the first solvable task of a seed, and the number of tasks that were rejected."""
  rng = random.Random(seed)
  rejected = 0
  while not is_solvable(task := draw(rng)):
    rejected += 1
  return task, rejected


class Terminals:
  """One task in a simulated shell. The reward is 1 if the final state is the reference's.

  Args:
    task: gives no more than its seed, to `reset`.
    max_turns: actions of an episode.
  """

  frame = 'user'
  core_metrics = ('solved',)
  uses_global_random = False

  def __init__(self, task, max_turns):
    del task
    self._max_turns = max_turns

  def reset(self, seed=None):
    """Draws a solvable task from the seed."""
    self.task, _ = make_task(seed)
    self._shell = self.task.start()
    self._goal = self.task.goal()
    self._turns = 0
    self._failures = 0
    return self.task.text, {}

  def step(self, action):
    """Runs a command in the simulated shell, or ends the episode."""
    self._turns += 1
    is_last = self._turns >= self._max_turns
    found = ACTION.search(action)
    kind = found[1] if found else 'invalid'
    is_done = kind == 'action' and found[2].strip() == 'done'
    output = '' if is_done else 'write a command or an action.'
    if kind == 'command':
      output = self._shell.run(found[2])[:MAX_OUTPUT].strip() or 'ok'
    is_over = is_done or is_last
    is_solved = self._shell.state() == self._goal
    info = {
        'action': kind,
        'metrics': {
            'solved': float(is_over and is_solved),
            'done': float(is_done),
            'commands': float(self._turns - is_done),
        },
    }
    return output, float(is_over and is_solved), is_over, is_last and not is_done, info
