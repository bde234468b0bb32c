"""Numbers and signs in answers: cases worked by hand, and agreement with Search-R1 on words."""

import fractions

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies

from stppo_jax import types
from stppo_jax.envs import numerals
from stppo_jax.envs import rewards

HALF = fractions.Fraction(1, 2)
WORDS = strategies.text('abc XYZé,.;!?"\'', max_size=12)


def choice(*texts, letter='A'):
  options = tuple(zip('ABCDE', texts))
  return types.Task('t', 'Which?', (dict(options)[letter],), options=options, letter=letter)


class NumberTest(parameterized.TestCase):

  @parameterized.parameters(
      ('5', 5),
      ('-5', -5),
      ('\u22125', -5),  # the sign of mathematics
      ('+5', 5),
      ('5.0', 5),
      ('.5', HALF),
      ('0.50', HALF),
      ('1/2', HALF),
      ('-1/2', -HALF),
      ('1 1/2', 3 * HALF),
      ('-1 1/2', -3 * HALF),
      ('1,234,567', 1234567),
      ('$1,000', 1000),
      ('-$5', -5),
      ('50%', 50),
      (r'50\%', 50),
      ('$-5$', -5),
      (r'\(\frac{1}{2}\)', HALF),
      (r'-\dfrac{1}{2}', -HALF),
      (' **5** ', 5),
      ('5.', 5),
      ('0', 0),
      ('1e3', 1000),
      ('-2.5E-1', -HALF / 2),
      (r'\frac12', HALF),
      (r'\boxed{5}', 5),
      (r'$\boxed{-\frac{1}{2}}$', -HALF),
  )
  def test_numbers(self, text, value):
    self.assertEqual(numerals.number(text), value)

  @parameterized.parameters(
      '',
      '-',
      '.',
      '007',
      '1,23',
      '1/0',
      '01/2',
      '5 kg',
      '1-2',
      '1e500',
      'x',
      '1.2.3',
      '1,2',
      '9' * 101,
  )
  def test_other_texts(self, text):
    self.assertIsNone(numerals.number(text))

  def test_numbers_in_a_text(self):
    found = numerals.numbers_in('It is x=-5, not 15, 3-4 or 1,000.50; half is 1/2.')
    self.assertEqual(list(found), [-5, 15, 3, 4, fractions.Fraction(2001, 2), HALF])

  @hypothesis.given(strategies.fractions(), strategies.booleans())
  def test_written_number_is_read(self, value, plus):
    text = f'+{value}' if plus and value >= 0 else str(value)
    self.assertEqual(numerals.number(text), value)


class SameAnswerTest(parameterized.TestCase):

  @parameterized.parameters(
      ('5', '-5'),
      ('12', '1/2'),
      ('35', '3.5'),
      ('x2', 'x^2'),
      ('x + 1', 'x - 1'),
      ('p < q', 'p > q'),
      ('C#', 'C++'),
      ('C', 'C++'),
      ('A', 'A+'),
      ('Ca2-', 'Ca2+'),
      ('21', '2:1'),
      ('15', '1.5'),
      ('5 kg', '-5 kg'),
      ('5 kg', '.5 kg'),
      ('7', '007'),
      (r'\frac{1}{2}', r'-\frac{1}{2}'),
      (r'\sqrt{2}', r'-\sqrt{2}'),
      ('5', 'five'),
      ('', '5'),
      ('1e3', '1e-3'),
      ('pi', '-pi'),
      ('infinity', '-infinity'),
      (r'\cos x', r'-\cos x'),
      ('(∞, 2)', '(-∞, 2)'),
      ('Na-', 'Na+'),
      ('AB-', 'AB+'),
      ('xy', 'x-y'),
      ('n1', 'n-1'),
      ('p | q', 'p & q'),
      ('x', '|x|'),
      ('p', '~p'),
      ('A', 'A*'),
      ('34', '3;4'),
      ('3 2', '3 : 2'),
      ('(1, 2)', '(1, -2)'),
      ('[0, 1]', '[0, 1)'),
      ('(0, 1)', '[0, 1]'),
      (r'\boxed{[0,1]}', '[0,1)'),
      (r'\([0,1]\)', '[0,1)'),
      ('**[0,1]**', '[0,1)'),
      ('[0,1].', '[0,1)'),
      (r'\left[0,1\right]', r'\left[0,1\right)'),
      (r'(0,1)\cup[2,3)', r'(0,1]\cup[2,3)'),
      (r'x \in (-2,7)', r'x \in [-2,7]'),
      (r'(-\infty,3)', r'(-\infty,3]'),
      ('2^n-1', '2^{n-1}'),
      (r'\frac{1}{x}+1', r'\frac{1}{x+1}'),
      (r'\frac{a}{bc}', r'\frac{ab}{c}'),
      (r'\sqrt{x}+1', r'\sqrt{x+1}'),
      (r'\boxed{2^n-1}', '2^{n-1}'),
      ('2x+1', '2(x+1)'),
      ('-x+1', '-(x+1)'),
      ('xy+1', 'x(y+1)'),
      ('a/b+c', 'a/(b+c)'),
      ('(2x)^2', '2x^2'),
      ('x^2n', 'x^{2n}'),
      ('(a+b)(c+d)', '(a+b)/(c+d)'),
      ('10.5', r'2\frac{1}{2}'),
      ('10', '10!'),
      ('n', 'n!'),
      ('n/2', 'n!/2'),
      ('\u20ac10', '$10'),
  )
  def test_signs_matter(self, answer, gold):
    self.assertFalse(rewards.same_answer(answer, gold))
    self.assertTrue(rewards.same_answer(gold, gold))

  @parameterized.parameters(
      ('0.5', '1/2'),
      ('1000', '1,000'),
      ('B52', 'B-52'),
      ('xray', 'x-ray'),
      ('x+1', 'x + 1'),
      ('us', 'The U.S.'),
      ('July 4 1776', 'July 4, 1776'),
      ('well known', 'well  known.'),
      ('**Paris**', 'Paris'),
      ('1,000 km', '1000 km'),
      ('(1,-2)', '( 1, -2 )'),
      ('0, 1', '[0, 1]'),
      (r'\boxed{[0,1)}', '[0,1)'),
      (r'\left(3,4\right)', '(3,4)'),
      (r'[\frac{\pi}{2}, \infty)', r'\left[\frac{\pi}{2},\infty\right)'),
      (r'(0,9)\cup(9,36)', r'(0,9) \cup (9,36)'),
      (r'\{1\pm\sqrt{5},-2\}', r'\{1 \pm \sqrt{5}, -2\}'),
      (r'\left(3,\frac{\pi}{2}\right)', r'(3,\frac{\pi}{2})'),
      ('x^2', 'x^{2}'),
      ('2^10', '2^{10}'),
      ('(x+1)^2', '(x+1)^{2}'),
      ('x^(n-1)', 'x^{n-1}'),
      ('2(xy)', '2xy'),
      ('2*x', '2*(x)'),
      (r'\dfrac{x+1}{2}', r'\frac{x+1}{2}'),
      (r'\{1,2\}', '1,2'),
      ('(1,2),(3,4)', '((1,2),(3,4))'),
      ('Ca(OH)2', 'CaOH2'),
      ('Paris (France)', 'Paris France'),
      ('2.5', r'2\frac{1}{2}'),
      ('-1/2', r'\frac{-1}{2}'),
      ('10080', r'10,\!080'),
      ('1000', '1{,}000'),
      ('Evelyn', r'\text{Evelyn}'),
      ('90', r'90^\circ'),
      (r'5 \sqrt{2}', r'5\sqrt{2}'),
      ('\u00bd', '1/2'),
      ('1\u00bd', '3/2'),
      ('H\u2082O', 'H2O'),
      ("O'Brien", 'O\u2019Brien'),
      ('42!', '42'),
      ('10', '$10'),
      ('3;4', '3, 4'),
      ('n - 1', 'n-1'),
      ('- Paris', 'Paris'),
      ('wellknown', 'well-known'),
      ('Q & A', 'Q&A'),
  )
  def test_spelling_does_not_matter(self, answer, gold):
    self.assertTrue(rewards.same_answer(answer, gold))

  @hypothesis.given(WORDS, WORDS)
  def test_words_are_compared_as_search_r1_does(self, answer, gold):
    self.assertEqual(rewards.same_answer(answer, gold), rewards.exact_match(answer, [gold]) == 1.0)

  @hypothesis.given(strategies.text(alphabet=strategies.sampled_from('a5-+*/^=.,:;&|~()[]_ $%\\e')))
  def test_gold_answers_itself(self, gold):
    self.assertEqual(
        rewards.scores(types.Task('t', 'q', (gold,)), gold),
        dict.fromkeys(('em', 'f1', 'sub_em'), 1.0),
    )


class RewardTest(parameterized.TestCase):

  @parameterized.parameters(
      ('-5', '5'),
      ('x + 1', 'x - 1'),
      ('3.5', '35'),
      ('1/2', '12'),
      ('C++', 'C#'),
      ('p > q', 'p < q'),
      ('Ca2+', 'Ca2-'),
      ('Na+', 'Na-'),
      ('A', 'an'),
  )
  def test_options_that_differ_in_signs(self, right, wrong):
    task = choice(right, wrong)
    for answer in ('A', '(A)', 'a', f'A) {right}', right):
      with self.subTest(answer):
        self.assertEqual(set(rewards.scores(task, answer).values()), {1.0})
    for answer in ('B', '(B)', 'b', f'B) {wrong}', wrong, f'A) {wrong}'):
      with self.subTest(answer):
        self.assertEqual(set(rewards.scores(task, answer).values()), {0.0})

  @parameterized.parameters('21.5', 'B. 21.5', 'B', 'B)21.5')
  def test_labels_in_options_are_no_text(self, answer):
    task = choice('A)21', 'B)21.5', 'C)22', letter='B')
    self.assertEqual(set(rewards.scores(task, answer).values()), {1.0})
    for wrong in ('21', 'A)21', 'A', 'B) 22'):
      self.assertEqual(rewards.scores(task, wrong)['em'], 0.0)

  @parameterized.parameters(('2^n-1', '2^{n-1}'), ('[0,1].', '[0,1)'))
  def test_groups_count_in_all_scores(self, answer, gold):
    self.assertEqual(set(rewards.scores(types.Task('t', 'q', (gold,)), answer).values()), {0.0})

  def test_letter_decides_all_scores(self):
    task = choice('5', '15', '5 apples')
    for answer in ('B', '15', 'It is 15', '5 apples'):
      self.assertEqual(rewards.REWARDS['sub_em'](task, answer, ''), 0.0, answer)
    self.assertEqual(rewards.REWARDS['sub_em'](task, 'It is 5.', ''), 1.0)
    self.assertEqual(rewards.scores(task, 'B')['f1'], 0.0)

  def test_written_letter_names_its_option(self):
    task = choice('Paris', 'Rome')
    for answer in ('**A**', r'\boxed{A}', '"A"', '[A]', 'A) because of its tower', 'A: the first'):
      self.assertEqual(rewards.REWARDS['em'](task, answer, ''), 1.0, answer)
    for answer in ('B: not Paris', 'B) Paris is wrong', 'A) Rome', 'A. Smith', 'A and B'):
      for name in ('em', 'sub_em'):
        self.assertEqual(rewards.REWARDS[name](task, answer, ''), 0.0, answer)

  def test_name_with_an_initial_is_an_option(self):
    task = choice('T. Jefferson', 'G. Washington', 'A. Lincoln', letter='C')
    for answer in ('A. Lincoln', 'A. Lincoln.', '**A. Lincoln**', 'C', 'C. A. Lincoln'):
      self.assertEqual(set(rewards.scores(task, answer).values()), {1.0}, answer)
    for answer in ('A', 'T. Jefferson', 'A. T. Jefferson', 'C) T. Jefferson'):
      self.assertEqual(rewards.scores(task, answer)['em'], 0.0, answer)

  @parameterized.parameters(
      ('no', "I don't know"),
      ('no', 'yes, as is well known'),
      ('Iran', 'Tirana'),
      ('Niger', 'Nigeria'),
      ('Осло', 'Ослон'),
  )
  def test_part_of_a_word_is_no_answer(self, gold, answer):
    task = types.Task('t', 'q', (gold,))
    self.assertEqual(rewards.scores(task, answer)['sub_em'], 0.0)
    for text in (f'It is {gold}, of course', f"{gold}'s", f'the "{gold}"', f'{gold}-based'):
      self.assertEqual(rewards.scores(task, text)['sub_em'], 1.0, text)

  def test_script_without_spaces_has_no_limits_of_words(self):
    task = types.Task('t', 'q', ('巴黎',))
    self.assertEqual(rewards.scores(task, '法国的首都是巴黎。')['sub_em'], 1.0)

  @parameterized.product(
      answer=('**{}**.', '${}$.', r'\boxed{{{}}}.', r'$\boxed{{{}}}$.', r'\({}\).', '`{}`.'),
      gold=('5', 'Paris', r'\sqrt{2}'),
  )
  def test_full_stop_behind_markup(self, answer, gold):
    scores = rewards.scores(types.Task('t', 'q', (gold,)), answer.format(gold))
    self.assertEqual(set(scores.values()), {1.0})

  def test_long_answers_take_little_time(self):
    task = choice('x + 1', 'x - 1')
    for text in ('*', '(', ' ', ',', ' ,', '-', '1,000', '_', '$', '1/'):
      answer = f'x{text * 30_000}y'
      self.assertEqual(rewards.REWARDS['sub_em'](task, answer, ''), 0.0, text)

  def test_option_within_another_one(self):
    task = choice('increase', 'No increase')
    self.assertEqual(rewards.REWARDS['sub_em'](task, 'There is no increase', ''), 0.0)
    self.assertEqual(rewards.REWARDS['sub_em'](task, 'There is an increase', ''), 1.0)

  def test_ambiguous_text_is_no_answer(self):
    task = choice('CO', 'Co', 'co.')
    self.assertEqual(rewards.REWARDS['em'](task, 'CO', ''), 1.0)
    self.assertEqual(rewards.REWARDS['em'](task, 'co', ''), 0.0)

  def test_number_within_an_answer(self):
    task = types.Task('t', 'q', ('5',))
    rows = {'so it is 5.': 1, 'x=5': 1, '5kg': 1, '15': 0, 'it is -5': 0, '0.5': 0, '5.5': 0}
    for answer, expected in rows.items():
      self.assertEqual(rewards.REWARDS['sub_em'](task, answer, ''), expected, answer)

  def test_options_may_be_numbered(self):
    options = (('1', '1.5'), ('2', '5'))
    task = types.Task('t', 'Which?', ('1.5',), options=options, letter='1')
    right = {'1': 1.0, '1.5': 1.0, '1) 1.5': 1.0, '2': 0.0, '5': 0.0, '2. 5': 0.0, '1) 5': 0.0}
    for answer, expected in right.items():
      self.assertEqual(rewards.REWARDS['em'](task, answer, ''), expected, answer)

  def test_rule_of_search_r1(self):
    task = types.Task('t', 'q', ('-5',))
    self.assertEqual(rewards.REWARDS['em'](task, '5', ''), 0.0)
    self.assertEqual(rewards.REWARDS['search_r1'](task, '5', ''), 1.0)


if __name__ == '__main__':
  absltest.main()
