"""The list of figures and tables of numbers in docs/numbers.md, compared with the pages."""

from collections.abc import Iterator
import importlib.util
import pathlib
import re

from absl.testing import absltest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
TEXTS = {page.name: page.read_text(encoding='utf-8') for page in PAGES}
FIGURE = re.compile(r'!\[[^\]]*\]\(([^)]+\.png)\)|\{figure\} (\S+\.png)')
NUMBER = re.compile(r'[*`~<]*[-+]?\.?\d')
SCORES = re.compile(r'((?:\d*\.)?\d+) → ((?:\d*\.)?\d+(?:, (?:\d*\.)?\d+)*)')
EVERYTHING = 'everything'
LEAST = 4  # cells with numbers, of a table that is one of numbers
NO_RESULTS = ('setting', 'default', 'minutes', 'commit')  # columns of tables that measure nothing


def tables(text: str) -> Iterator[tuple[str, list[list[str]]]]:
  """Yields (heading, rows of cells) of each table of a page."""
  heading = ''
  lines = []
  for line in [*re.sub(r'```.*?```', '', text, flags=re.DOTALL).splitlines(), '']:
    if line.startswith('|'):
      lines.append(line)
      continue
    if lines:
      yield heading, [[cell.strip() for cell in row.strip('| ').split(' |')] for row in lines]
      lines = []
    if line.startswith('#'):
      heading = line.lstrip('# ')


def has_numbers(rows: list[list[str]]) -> bool:
  """Whether a table reports numbers: in four cells and two fifths of them, or scores of runs."""
  if any(name in NO_RESULTS for name in rows[0]):
    return False
  cells = [cell for row in rows[2:] for cell in row[1:] if cell]
  number = sum(bool(NUMBER.match(cell)) for cell in cells)
  is_numeric = number >= max(LEAST, 0.4 * len(cells))
  return is_numeric or sum(bool(SCORES.search(cell)) for cell in cells) >= LEAST


def listed() -> list[list[str]]:
  """Returns the rows of the list: page, figure or table, data, command."""
  return next(rows[2:] for _, rows in tables(TEXTS['numbers.md']))


class NumbersTest(absltest.TestCase):

  def test_list_has_every_figure_and_table(self):
    found = set()
    for name, text in TEXTS.items():
      found |= {(name, first or second) for first, second in FIGURE.findall(text)}
      found |= {(name, heading) for heading, rows in tables(text) if has_numbers(rows)}
    whole = {page for page, part, *_ in listed() if part == EVERYTHING}
    parts = {(page, part.strip('`')) for page, part, *_ in listed() if part != EVERYTHING}
    self.assertSetEqual(whole, {page for page in TEXTS if page.startswith(('study', 'rows'))})
    self.assertSetEqual(parts, {(page, part) for page, part in found if page not in whole})

  def test_data_and_programs_exist(self):
    for page, part, data, command in listed():
      for pattern in re.findall('`([^`]+)`', data):
        self.assertNotEmpty(list(ROOT.glob(pattern)), f'{page}: {part}: {pattern}')
      for module, path in re.findall(r'python (?:-m (\S+?)|(\S+\.py))[ `]', command):
        exists = importlib.util.find_spec(module) if module else (ROOT / path).exists()
        self.assertTrue(exists, f'{page}: {part}: {command}')


if __name__ == '__main__':
  absltest.main()
