"""The scores on docs/systems.md and docs/examples.md, compared with the records."""

import pathlib
import re
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from research import scores
from research import study_rows
from tests import numbers_test

DOCS = pathlib.Path(__file__).parents[2] / 'docs'


class ScoresTest(parameterized.TestCase):

  def test_pages_are_those_of_the_records(self):
    pages = scores.make_pages()
    self.assertCountEqual(pages, ['systems.md', 'examples.md'])
    for name, text in pages.items():
      self.assertEqual((DOCS / name).read_text(encoding='utf-8'), text, 'python -m research.scores')

  def test_systems_show_every_recorded_seed(self):
    """A system with committed seeds has their scores in its last cell, and no word in place."""
    recorded = {(record['grid'], record['method']) for record in scores._records()}
    (rows,) = [rows[2:] for _, rows in numbers_test.tables(numbers_test.TEXTS['systems.md'])]
    number = 0
    for _, here, _, _, result in rows:
      kinds = [
          (study_rows.ROWS, scores.row, r'the row `(\w+)`'),
          (study_rows.EXAMPLES, scores.example, r'`examples/(\w+)`'),
      ]
      for grid_name, get_scores, pattern in kinds:
        for name in re.findall(pattern, here):
          if (grid_name, name) in recorded:
            self.assertIn(get_scores(name), result)
            number += 1
    self.assertEqual(number, 7 + 8)  # seven rows, and all examples but gem_guess

  def test_curve_and_records_are_joined_by_seed(self):
    self.assertEqual(scores.example('cory'), '.37 → .83, .87, .82')
    self.assertEqual(scores.example('screens', 'outcome'), '.38 → .55')
    self.assertLen(scores.default_run('st_ppo').split(','), 5)

  def test_newest_record_of_a_seed_counts(self):
    make = lambda seed, *values: {
        'grid': 'rows', 'method': 'ppo', 'seeds': [seed], 'score': {'values': values}
    }  # fmt: skip
    records = [make(1, 0.5, 0.7), make(0, 0.5, 0.8), make(1, 0.5, 1.1)]
    with mock.patch.object(scores, '_records', lambda: records):
      self.assertEqual(scores.row('ppo'), '.50 → .80, 1.10')

  def test_placeholder_without_a_record_is_an_error(self):
    with self.assertRaisesRegex(ValueError, 'no record'):
      scores.row('no_such_row')
    with self.assertRaisesRegex(KeyError, 'no_such_label'):
      scores.example('cory', 'no_such_label')

  def test_seeds_of_different_policies_are_an_error(self):
    with self.assertRaisesRegex(ValueError, 'begin with different scores'):
      scores.show({0: [0.1, 0.5], 1: [0.2, 0.5]})

  def test_main_writes_the_pages(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    with mock.patch.object(scores, 'DOCS', folder):
      scores.main()
    for path in folder.iterdir():
      self.assertEqual(path.read_text(encoding='utf-8'), scores.make_pages()[path.name])


if __name__ == '__main__':
  absltest.main()
