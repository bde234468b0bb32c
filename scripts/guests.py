"""Writes the book of guests: software of other people that this package knows, and its tests.

    python -m scripts.guests

Each line of docs/dev/guests.md is a mark of the tests, which stands on the class or the module:

    pytestmark = pytest.mark.guests(
        what='Anthropic SDK', version='anthropic==2.14.0', date='2026-11-26',
        touches='serving/messages.py')

`version` is what was last tried, and `date` is the day of the trial. A version with `==` names
packages of PyPI, which `scripts.try_guests` installs in their newest releases. `environment` names
the environment of `scripts/client_envs.sh` in which the tests look for the packages, or 'vllm'.
"""

import ast
from collections.abc import Iterator
import dataclasses
import datetime
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / 'docs' / 'dev' / 'guests.md'
TABLE = re.compile(r'^\| guest \|.*', re.DOTALL | re.MULTILINE)
PIN = re.compile(r'[\w.-]+(\[[\w,-]+\])?==\d[\w.]*')
HEAD = (
    '| guest | version last tried | date | test | files of the package |\n'
    '|---|---|---|---|---|\n'
)


@dataclasses.dataclass(frozen=True)
class Guest:
  """A line of the book.

  Attributes:
    test: the test file, from the folder of the repository.
    what: the software, in a few words. No two guests have the same words.
    version: PACKAGE==VERSION for each package of PyPI, or another text.
    date: the day of the last trial, YYYY-MM-DD.
    touches: the files of stppo_jax that know the guest, with spaces between them.
    environment: the environment of the packages, if it is not that of the tests.
  """

  test: str
  what: str
  version: str
  date: str
  touches: str
  environment: str = ''

  def __post_init__(self):
    datetime.date.fromisoformat(self.date)
    if not (self.what and self.version and self.touches):
      raise ValueError(f'{self.test}: {self} lacks a text')
    for word in self.version.split():
      if '==' in word and not PIN.fullmatch(word):
        raise ValueError(f'{self.test}: {word} is no PACKAGE==VERSION of a release')
    for name in self.touches.split():
      if not (ROOT / 'stppo_jax' / name).exists():
        raise ValueError(f'{self.test}: stppo_jax/{name} does not exist')

  @property
  def pins(self) -> dict[str, str]:
    """The version of each package: {'pydantic-ai-slim[openai]': '2.68.0'}."""
    return dict(word.split('==') for word in self.version.split() if '==' in word)

  @property
  def names(self) -> list[str]:
    """The names of the packages, without extras."""
    return [package.partition('[')[0] for package in self.pins]


def read() -> list[Guest]:
  """Returns the guests of all test files. ValueError: a mark does not fit `Guest`."""
  guests = [guest for path in sorted(ROOT.glob('tests/**/*_test.py')) for guest in read_file(path)]
  words = [guest.what for guest in guests]
  if len(set(words)) < len(words):
    raise ValueError(f'two guests have the same `what`: {sorted(words)}')
  return guests


def read_file(path: pathlib.Path) -> Iterator[Guest]:
  """Yields the guests of a test file, from its source alone."""
  tree = ast.parse(path.read_text(encoding='utf-8'))
  calls = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and ast.unparse(node) == 'pytest.mark.guests':
      name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
      try:
        fields = {x.arg: ast.literal_eval(x.value) for x in calls[node].keywords}
        yield Guest(name, **fields)
      except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f'{name}:{node.lineno}: the mark of a guest: {error}') from error


def table(guests: list[Guest]) -> str:
  """Returns the table of docs/dev/guests.md."""
  lines = []
  for guest in sorted(guests, key=lambda guest: guest.what.lower()):
    version = ', '.join(guest.version.split()) if guest.pins else guest.version
    files = ', '.join(f'`{name}`' for name in guest.touches.split())
    test = f'`{guest.test}`'
    lines.append(f'| {guest.what} | {version} | {guest.date} | {test} | {files} |\n')
  return HEAD + ''.join(lines)


def main() -> None:
  """Writes the table into the page."""
  text = PAGE.read_text(encoding='utf-8')
  printed = table(read())
  PAGE.write_text(TABLE.sub(lambda match: printed, text), encoding='utf-8')


if __name__ == '__main__':
  main()
