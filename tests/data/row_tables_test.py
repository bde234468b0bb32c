"""Tests of stppo_jax.data.row_tables and cells: quotes, columns and values of tables."""

import csv
import io
import random

from absl.testing import absltest
from absl.testing import parameterized

from stppo_jax.data import cells
from stppo_jax.data import row_tables

_PIECES = ('a', 'b c', '"', '""', '\t', '\n', '\r\n', ' ', 'x"y', '1', "'")


def _read(text, delimiter):
  return list(row_tables.text(io.BytesIO(text.encode()), delimiter))


def _written(rows, delimiter, **settings):
  file = io.StringIO(newline='')
  csv.writer(file, delimiter=delimiter, **settings).writerows(rows)
  return file.getvalue()


class TextTest(parameterized.TestCase):

  def test_line_breaks_in_first_and_last_cell(self):
    rows = [
        ['question', 'kind', 'answer'],
        ['Read the poem.\nWho wrote it?', 'poems', 'William\nBlake'],
        ['Who?', 'names', 'Ann'],
    ]
    expected = [dict(zip(rows[0], row)) for row in rows[1:]]
    for delimiter in ('\t', ','):
      self.assertEqual(_read(_written(rows, delimiter), delimiter), expected)

  def test_written_tabs_equal_commas(self):
    r = random.Random(0)
    for _ in range(500):
      width = r.randint(2, 4)
      rows = [[f'c{i}' for i in range(width)]]
      for _ in range(r.randint(1, 4)):
        rows.append([''.join(r.choices(_PIECES, k=r.randint(1, 4))) for _ in range(width)])
      quoting = r.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
      tabs = _read(_written(rows, '\t', quoting=quoting), '\t')
      self.assertEqual(tabs, _read(_written(rows, ',', quoting=quoting), ','), rows)

  def test_two_columns_of_one_name_are_refused(self):
    for delimiter in ('\t', ','):
      text = delimiter.join(['question', 'answer', 'answer']) + '\n' + delimiter.join('qab')
      with self.assertRaisesRegex(ValueError, "two columns are called 'answer': rename one"):
        _read(text, delimiter)


class CellsTest(parameterized.TestCase):

  @parameterized.parameters('{{1,2},{3}}', '{[1]: 2}', '{{}: 1}', '[{[]}]')
  def test_text_that_is_no_value_stays(self, text):
    self.assertEqual(cells.parsed(text), text)

  @parameterized.parameters(
      (False, False),
      (0, False),
      (0.0, False),
      ('false', False),
      ('False ', False),
      ('0', False),
      (True, True),
      (1, True),
      ('TRUE', True),
      ('1.0', True),
      ('yes', True),
  )
  def test_flag(self, value, expected):
    self.assertIs(cells.flag('label', value), expected)

  @parameterized.parameters('good', 2, 0.5, -1, ({'a': True},), 'none')
  def test_flag_of_another_kind(self, value):
    with self.assertRaisesRegex(ValueError, "column 'label' is .*: true or false is needed"):
      cells.flag('label', value)


if __name__ == '__main__':
  absltest.main()
