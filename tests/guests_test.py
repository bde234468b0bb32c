"""The book of guests: each has a line, the page has the lines of the tests' marks."""

import functools
import pathlib
import re
import tempfile
import tomllib

from absl.testing import absltest
from absl.testing import parameterized

from scripts import guests as guests_lib
from scripts import try_guests
from tests import layering_test

ROOT = guests_lib.ROOT
# Extras of guests, which the package works without.
EXTRAS = ('dense', 'clients', 'gem', 'textarena', 'reasoning_gym', 'openenv', 'mcp', 'grammar')
read_guests = functools.cache(guests_lib.read)
MARK = "pytest.mark.guests(what='A', version='a==1 b[c]==2', date='2026-11-28', touches='atif')"


class BookTest(parameterized.TestCase):

  def test_page_has_the_lines_of_the_marks(self):
    (printed,) = guests_lib.TABLE.findall(guests_lib.PAGE.read_text(encoding='utf-8'))
    table = guests_lib.table(read_guests())
    self.assertEqual(printed, table, 'write it with: python -m scripts.guests')

  @parameterized.parameters(*layering_test.GUESTS)
  def test_guest_in_package_has_a_line(self, module):
    path = module.replace('.', '/')
    touched = [name for guest in read_guests() for name in guest.touches.split()]
    files = [name.removesuffix('.py') for name in touched]
    is_known = any((file + '/').startswith(path + '/') for file in files)
    is_known |= any((path + '/').startswith(file + '/') for file in files)
    self.assertTrue(is_known, f'no mark of a test touches {module}: see scripts/guests.py')

  @parameterized.parameters(*EXTRAS)
  def test_package_of_an_extra_has_a_line(self, extra):
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']
    needed = {re.split(r'[\[>=<]', text)[0] for text in project['optional-dependencies'][extra]}
    self.assertEmpty(needed - {name for guest in read_guests() for name in guest.names})

  def test_client_environments_have_lines(self):
    script = (ROOT / 'scripts' / 'client_envs.sh').read_text(encoding='utf-8')
    guests = read_guests()
    for name, packages in re.findall(r'^make (\w+) [\d.]+ (.*)', script, re.MULTILINE):
      needed = {re.split(r'[\[>=<]', word.strip("'"))[0] for word in packages.split()}
      inside = {x for guest in guests if guest.environment == name for x in guest.names}
      self.assertEqual(needed, inside, name)


class MarkTest(parameterized.TestCase):

  def read(self, text):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    (folder / 'x_test.py').write_text(text, encoding='utf-8')
    return list(guests_lib.read_file(folder / 'x_test.py'))

  @parameterized.parameters(
      f'pytestmark = {MARK}',
      f'pytestmark = [pytest.mark.slow, {MARK}]',
      f'@{MARK}\nclass X:\n  pass',
      f'class X:\n  @{MARK}\n  def test_x(self):\n    pass',
  )
  def test_mark_is_found_wherever_it_stands(self, text):
    (guest,) = self.read(text)
    self.assertEqual(guest.pins, {'a': '1', 'b[c]': '2'})
    self.assertEqual(guest.names, ['a', 'b'])

  @parameterized.parameters(
      'pytestmark = pytest.mark.guests',
      '@pytest.mark.guests()\nclass X:\n  pass',
      'pytestmark = ' + MARK.replace("date='2026-11-28', ", ''),
      'pytestmark = ' + MARK.replace('2026-11-28', 'today'),
      'pytestmark = ' + MARK.replace('a==1', 'a==newest'),
      'pytestmark = ' + MARK.replace('a==1 ', 'a==1, '),
      'pytestmark = ' + MARK.replace("'atif'", "'no_room/no_file.py'"),
      'pytestmark = ' + MARK.replace("'atif'", 'name'),
      'pytestmark = ' + MARK.replace("'A'", "''"),
      'pytestmark = ' + MARK.replace('what=', 'name='),
  )
  def test_mark_without_a_whole_line_fails(self, text):
    with self.assertRaisesRegex(ValueError, 'x_test.py:1: the mark of a guest'):
      self.read(text)


class TryTest(parameterized.TestCase):

  @parameterized.parameters(
      (0, '3 passed in 1.2s', 'passed', True),
      (0, '2 passed, 4 skipped, 1 deselected in 1s', 'passed', True),
      (0, '4 skipped in 1s', 'not tried: all 4 tests were skipped', False),
      (5, 'no tests ran in 1s', 'not tried', False),
      (1, 'FAILED tests/x_test.py::X::test_y - no\n1 failed, 2 passed in 1s', 'X::test_y', False),
      (1, 'ERROR tests/x_test.py\n1 error in 1s', 'ERROR tests/x_test.py', False),
      (4, 'ERROR: not found: x_test.py', 'not found', False),
  )
  def test_only_tests_that_ran_pass(self, code, output, words, is_right):
    outcome, passed = try_guests.judge(code, output)
    self.assertIn(words, outcome)
    self.assertEqual(passed, is_right)

  def test_guest_is_chosen_by_package(self):
    guests = read_guests()
    self.assertEqual([g.what for g in try_guests.choose(['mcp'], guests)], ['MCP'])
    self.assertGreater(len(try_guests.choose([], guests)), 10)
    with self.assertRaisesRegex(SystemExit, "no guest has the package 'mpc': choose from .*mcp"):
      try_guests.choose(['mpc'], guests)


if __name__ == '__main__':
  absltest.main()
