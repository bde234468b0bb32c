"""Sends hostile commands to the examples, and checks that none leaves its simulated world.

  python -m examples.worlds

While an environment works, Python reports to an audit hook whatever opens a file, starts a process,
uses the network or executes a string. Any such event is a failure, and so is an exception. The
command prints a line per example, and exits with 1 after a failure. Needs `pip install ".[study]"`.
"""

import argparse
from collections.abc import Iterator
import contextlib
import importlib
import importlib.util
import pathlib
import random
import sys

from examples import curves
from scripts import warm_start
from stppo_jax.assembly import components
from stppo_jax.settings import validation

FOLDERS = (
    'airwaves',
    'calculator',
    'cory',
    'countdown',
    'creators',
    'dhumbal',
    'dispatch',
    'empathy',
    'guess_number',
    'labels',
    'maze',
    'memory',
    'messages',
    'plans',
    'rooms',
    'screens',
    'signals',
    'terminals',
)
ROOT = pathlib.Path(__file__).parent
FORBIDDEN = ('open', 'exec', 'import', 'os.', 'subprocess.', 'socket.', 'shutil.', 'ctypes.')
# Commands of a shell, of Python, of a template, and texts that break a parser.
HOSTILE = (
    'rm x',
    'cat /etc/hosts',
    'cat ../../../a > b',
    'cp a ..',
    '$(echo x)',
    '`echo x`',
    'ls; ls && ls || ls &',
    'echo x >> ~/x',
    'f("x")',
    'x.y("x", "w")',
    '(lambda: 1)()',
    '2**3**2',
    '{0.x}',
    '%s%d%x',
    '-1',
    '1e999',
    '\0',
    '\ud800',
    'x' * 10_000,
    '',
)
# Forms of the examples around a command.
FORMS = (
    '{}',
    '<command>{}</command>',
    '<Judgement>{}</Judgement>',
    '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>',
    '<answer>{}</answer>',
    '[EXPLORE]:: {}',
    'type {}',
    'tap {}',
    'go {}',
    'take {}',
    'ADD {}',
    'UPDATE 1 {}',
)

_events: list[str] | None = None  # None: nobody listens


def _hook(event: str, args: tuple) -> None:
  if _events is not None and event.startswith(FORBIDDEN):
    _events.append(f'{event} {args!r}'[:200])


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
  """Gives the list of forbidden events, which grows while the context is open."""
  global _events
  _events = []
  try:
    yield _events
  finally:
    _events = None


class Nobody:
  """Plays an example that has no player."""

  def __init__(self, rng):
    del rng

  def act(self, observation: str) -> str:
    """Returns a word."""
    del observation
    return '5'


def check(folder: str, num_episodes: int = 40) -> tuple[int, list[str]]:
  """Plays hostile episodes of an example; returns (number of commands, forbidden events).

  A third of the commands are those of the example's own player, so that the episodes get far.
  """
  config = validation.validate(warm_start.load_config(str(ROOT / folder / 'config.py')))
  named = components.resolve(config)
  make_player = Nobody
  if importlib.util.find_spec(f'examples.{folder}.player'):
    make_player = importlib.import_module(f'examples.{folder}.player').Player
  tasks = named.load_tasks(config.data.train_split)[:num_episodes]
  curves.play_episode(named.env(tasks[0], 0), 0, make_player)  # loads what is loaded once
  rng = random.Random(0)
  num_commands = 0
  events = []
  for task in tasks:
    player = make_player(rng)
    env = named.env(task, 0)
    text, _ = env.reset(seed=task.seed)
    is_over = False
    while not is_over:
      command = _command(rng, player, text)
      num_commands += 1
      with listening() as found:
        text, _, terminated, truncated, _ = env.step(command)
      events += found
      is_over = terminated or truncated
  return num_commands, events


def _command(rng: random.Random, player, text: str) -> str:
  """Returns a hostile command, or one of the player where it can read the text."""
  if rng.random() < 0.33:
    with contextlib.suppress(Exception):  # a player may not know what follows a hostile command
      return player.act(text)
  return rng.choice(FORMS).format(rng.choice(HOSTILE))


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--episodes', type=int, default=200)
  args = parser.parse_args()
  num_failures = 0
  for folder in FOLDERS:
    num_commands, events = check(folder, args.episodes)
    num_failures += len(events)
    print(f'{folder:12s} {num_commands:6d} commands, {len(events)} left the world')
    for event in events[:5]:
      print(f'  {event}')
  sys.exit(num_failures > 0)


sys.addaudithook(_hook)

if __name__ == '__main__':
  main()
