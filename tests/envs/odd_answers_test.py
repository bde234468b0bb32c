"""The script that plays environment packages with odd answers."""

from absl.testing import absltest

from scripts import odd_answers


def pay(text):
  """A package that reads whole numbers only."""
  return float(int(text) == 1200)


def guard(text):
  try:
    return pay(text)
  except ValueError:
    return 0.0


GAME = odd_answers.Play('stub:game', '1200', '1201', '{}', pay, guard)


class OddAnswersTest(absltest.TestCase):

  def test_right_answer_gives_every_kind(self):
    answers = odd_answers.make_answers(GAME)
    self.assertEqual(set(answers), set(odd_answers.KINDS))
    self.assertEqual(answers['right'], '1200')
    self.assertEqual(answers['thousands'], '1,200')
    self.assertEqual(answers['json'], '{"answer": "1200"}')
    boxed = odd_answers.make_answers(GAME._replace(form='<{}>', right='2'))
    self.assertEqual(boxed['twice'], '<2> <2>')
    self.assertEqual(boxed['thousands'], '<1,234>')

  def test_unknown_right_answer_leaves_kinds_out(self):
    answers = odd_answers.make_answers(GAME._replace(right=None))
    self.assertEqual(set(answers), {'empty', 'unknown', 'thousands', 'wrong', 'json'})

  def test_tables_show_rewards_and_exceptions(self):
    line = odd_answers.table_of_rewards([GAME])[-1]
    cells = dict(zip(odd_answers.KINDS, line.strip('| ').split(' | ')[1:], strict=True))
    self.assertEqual(cells['right'], '1')
    self.assertEqual(cells['wrong'], '0')
    self.assertEqual(cells['unknown'], 'ValueError (0)')
    counts = odd_answers.table_of_counts([GAME, GAME._replace(right=None)])
    self.assertIn('| right | 0 | 0 | 0 | 1 |', counts)
    self.assertIn('| wrong | 0 | 2 | 0 | 0 |', counts)
    self.assertIn('| unknown | 2: `game`, `game` | 0 | 0 | 0 |', counts)

  def test_near_miss_is_wrong_and_close(self):
    self.assertEqual(odd_answers.near_miss(7), ('7', '6'))
    self.assertEqual(odd_answers.near_miss(1), ('1', '2'))
    self.assertEqual(odd_answers.near_miss([4, 2, 3]), ('4 2 3', '2 4 3'))


if __name__ == '__main__':
  absltest.main()
