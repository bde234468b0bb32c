"""Tries guests with the newest upstream releases of their packages, see docs/dev/guests.md.

    python -m scripts.try_guests [NAME..]

NAME is a package of the book, such as `openai`. Without a name all guests are tried. Each guest
gets a temporary environment on top of that of this command, which does not change. The command
needs the network. Its exit code is 1 unless all packages were installed, and their tests ran and
passed.
"""

from collections.abc import Sequence
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple
import venv

from scripts import guests as guests_lib
from scripts.guests import Guest

ROW = '{:<28} {:<12} {:<12} {}'
# Code that prints the versions of installed packages.
_VERSIONS = 'import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))'


class Trial(NamedTuple):
  """What became of a guest's tests with the newest releases."""

  versions: Sequence[str]  # installed, in the order of Guest.pins; empty: not installed
  outcome: str  # 'passed (3 tests)', or what went wrong
  is_right: bool


def choose(names: Sequence[str], guests: Sequence[Guest]) -> list[Guest]:
  """Returns the guests with packages of these names, or all with packages. SystemExit: none."""
  guests = [guest for guest in guests if guest.pins]
  known = {name for guest in guests for name in guest.names}
  for name in names:
    if name not in known:
      sys.exit(f'no guest has the package {name!r}: choose from {", ".join(sorted(known))}')
  return [guest for guest in guests if not names or set(names) & set(guest.names)]


def make_environment(folder: pathlib.Path, is_on_top: bool) -> pathlib.Path:
  """Makes a virtual environment, and returns its Python.

  `is_on_top`: packages of this process are visible where the environment has no others.
  """
  venv.create(folder, symlinks=True)
  python = folder / 'bin' / 'python'
  if is_on_top:
    (site,) = folder.glob('lib/python*/site-packages')
    below = [path for path in sys.path if path.endswith('site-packages')]
    (site / 'below.pth').write_text('\n'.join(below), encoding='utf-8')
  return python


def try_guest(guest: Guest, folder: pathlib.Path) -> Trial:
  """Installs the newest releases in `folder`, and runs the guest's tests."""
  own = folder / (guest.environment or 'tests')
  python = make_environment(own, is_on_top=not guest.environment)
  install = [sys.executable, '-m', 'pip', '--python', python, 'install', '-q', '--upgrade']
  installed = subprocess.run([*install, *guest.pins], capture_output=True, text=True, check=False)
  if installed.returncode:
    error = (installed.stderr.strip().splitlines() or ['no message'])[-1]
    return Trial((), f'not installed: {error}', False)
  query = [python, '-c', _VERSIONS, *guest.names]
  versions = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()

  variables = {'STPPO_CLIENTS': str(folder), 'PYTHONPATH': ''}
  if guest.environment == 'vllm':
    variables['STPPO_VLLM_PYTHON'] = str(python)
  runner = sys.executable if guest.environment else python
  tests = [runner, '-m', 'pytest', '-q', '-m', f'guests(what="{guest.what}")', guest.test]
  result = subprocess.run(
      tests,
      cwd=guests_lib.ROOT,
      env=os.environ | variables,
      capture_output=True,
      text=True,
      check=False,
  )
  return Trial(versions, *judge(result.returncode, result.stdout))


def judge(code: int, output: str) -> tuple[str, bool]:
  """Returns the outcome of pytest in words, and whether tests ran and none failed."""
  counts = {word: int(number) for number, word in re.findall(r'(\d+) (passed|skipped)', output)}
  if code not in (0, 5):
    failed = re.findall(r'^(?:FAILED|ERROR) \S+', output, re.MULTILINE)
    return '\n  '.join(['failed', *(failed or output.strip().splitlines()[-3:])]), False
  if not counts.get('passed'):
    return f'not tried: all {counts.get("skipped", 0)} tests were skipped', False
  return ', '.join(f'{number} {word}' for word, number in counts.items()), True


def rows(guest: Guest, trial: Trial) -> list[str]:
  """Returns a line per package of the guest."""
  newest = trial.versions or ['?'] * len(guest.pins)
  lines = []
  for (package, pinned), version in zip(guest.pins.items(), newest, strict=True):
    lines.append(ROW.format(package, pinned, version, trial.outcome))
  return lines


def main(names: Sequence[str]) -> int:
  """Tries guests and prints a line per package. Returns the exit code."""
  chosen = choose(names, guests_lib.read())
  print(ROW.format('package', 'last tried', 'newest', 'tests'), flush=True)
  all_right = True
  for guest in chosen:
    with tempfile.TemporaryDirectory() as folder:
      trial = try_guest(guest, pathlib.Path(folder))
    all_right = all_right and trial.is_right
    print(*rows(guest, trial), sep='\n', flush=True)
  return 0 if all_right else 1


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
