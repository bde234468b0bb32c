"""Tests of the answer scores: worked by hand, the field's corner cases, and two properties."""

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies

from stppo_jax import types
from stppo_jax.envs import rewards

GOOD = '<think>a</think><answer>b</answer>'
SEARCHED = (
    '<think>a</think>\n<search>q</search>\n\n<information>d</information>\n\n'
    '<think>b</think><answer>c</answer>\n'
)


class RewardsTest(parameterized.TestCase):

  @parameterized.parameters(
      ('The Beatles', 'beatles'),
      ('the  U.S.A.', 'usa'),
      ('An apple a day', 'apple day'),
      ('rock-and-roll', 'rockandroll'),  # punctuation goes without leaving a space
      ('a.b', 'ab'),  # .. and before the articles, so this is one word
      ('anthem', 'anthem'),  # an article inside a word stays
      ('São\tTomé\n', 'são tomé'),
      ('“Quote”', '“quote”'),  # punctuation is ASCII punctuation
      ('The', ''),
      ('', ''),
      ('Cafe\u0301', 'caf\u00e9'),  # an accent of its own
      ('\ufeffAnn\u200b\u00a0Bell', 'ann bell'),
      (
          '\u0645\u06cc\u200c\u0631\u0648\u0645',
          '\u0645\u06cc\u200c\u0631\u0648\u0645',
      ),  # a letter of Persian
  )
  def test_normalize_answer(self, text, expected):
    self.assertEqual(rewards.normalize_answer(text), expected)

  @parameterized.parameters(
      ('Paris', ['Paris'], 1.0),
      (' the paris! ', ['London', 'Paris'], 1.0),
      ('Paris, France', ['Paris'], 0.0),
      ('Sao Tome', ['São Tomé'], 0.0),
      ('', ['Paris'], 0.0),
      (None, ['Paris'], 0.0),
      ('Paris', [], 0.0),
      ('Paris', 'Paris', 1.0),  # one gold instead of a list: not its letters
      ('P', 'Paris', 0.0),
      ('', ['A'], 0.0),  # normalisation leaves nothing of this gold ..
      ('the', ['A'], 0.0),
      ('a', ['A'], 1.0),  # .. yet it can be answered
      ('+', ['+'], 1.0),
      ('-', ['+'], 0.0),
  )
  def test_exact_match(self, prediction, golds, expected):
    self.assertEqual(rewards.exact_match(prediction, golds), expected)

  @parameterized.parameters(
      ('It is Paris, of course', ['paris'], 1.0),
      ('Lyon', ['Paris', 'The Lyon'], 1.0),
      ('Paris', ['Paris France'], 0.0),
      ('anything', ['The'], 0.0),
      ('', ['Paris'], 0.0),
      (None, ['Paris'], 0.0),
  )
  def test_sub_exact_match(self, prediction, golds, expected):
    self.assertEqual(rewards.sub_exact_match(prediction, golds), expected)

  @parameterized.parameters(
      ('new york city', ['New York'], 0.8),  # P 2/3, R 2/2: 2 * 2/3 / (5/3) = 4/5
      ('the new york', ['new york'], 1.0),
      ('york york', ['york'], 2 / 3),  # words are counted once each: P 1/2, R 1
      ('boston', ['new york'], 0.0),
      ('red fox', ['blue fox', 'red fox cub'], 0.8),  # best of 1/2 and 4/5
      ('', ['new york'], 0.0),
      (None, ['new york'], 0.0),
      ('', ['the'], 0.0),
      ('new york', [], 0.0),
  )
  def test_f1(self, prediction, golds, expected):
    self.assertAlmostEqual(rewards.f1(prediction, golds), expected)

  @parameterized.parameters(
      ('巴黎。', '巴黎', 1.0, 1.0),
      ('《红楼梦》', '红楼梦', 1.0, 1.0),
      ('１，８８９', '1889', 1.0, 1.0),
      ('A。', 'A', 1.0, 1.0),
      ('A.', 'A', 1.0, 1.0),  # also an article
      ('B.', 'A', 0.0, 0.0),
      ('是巴黎', '巴黎', 0.0, 0.8),  # P 2/3, R 1 over characters: 2 * 2/3 / (5/3) = 4/5
      ('서울은', '서울', 0.0, 0.8),
      ('北京', '巴黎', 0.0, 0.0),
      ('在 Paris 市', 'Paris', 0.0, 0.5),  # P 1/3, R 1
  )
  def test_answers_of_other_scripts(self, answer, gold, em, f1):
    task = types.Task('0', '?', (gold,))
    self.assertEqual(rewards.REWARDS['em'](task, answer, ''), em)
    self.assertAlmostEqual(rewards.REWARDS['f1'](task, answer, ''), f1)

  @hypothesis.given(strategies.text(), strategies.lists(strategies.text(), max_size=2))
  def test_gold_answers_itself(self, gold, others):
    self.assertEqual(rewards.exact_match(gold, [*others, gold]), 1.0)
    self.assertEqual(rewards.sub_exact_match(gold, [*others, gold]), 1.0)
    self.assertAlmostEqual(rewards.f1(gold, [*others, gold]), 1.0)

  @hypothesis.given(strategies.text(), strategies.text())
  def test_scores_are_ordered(self, prediction, gold):
    em = rewards.exact_match(prediction, [gold])
    self.assertLessEqual(em, rewards.sub_exact_match(prediction, [gold]))
    self.assertBetween(rewards.f1(prediction, [gold]), em, 1.0)

  @parameterized.parameters(
      ('<answer> Paris </answer>', 'Paris'),
      ('x<answer>one\ntwo</answer><answer>three</answer>', 'one\ntwo'),
      ('<answer></answer>', ''),
      ('<answer>Paris', None),
      ('<think>between <answer> and </answer></think><answer>Paris</answer>', 'Paris'),
      ('so <answer>Rome</answer></think>', None),  # all of it is a thought
      ('Paris', None),
      ('', None),
  )
  def test_extract_answer(self, text, expected):
    self.assertEqual(rewards.extract_answer(text), expected)

  @parameterized.parameters(
      GOOD,
      SEARCHED,
      f' \n{GOOD}\t',
      SEARCHED.replace(
          '<answer>',
          '<search>r</search><information></information>' '<think>< 3 <b></think><answer>',
      ),
  )
  def test_well_formed(self, text):
    self.assertTrue(rewards.well_formed(text))

  @parameterized.named_parameters(
      ('empty', ''),
      ('no_tags', 'Paris'),
      ('no_think', '<answer>b</answer>'),
      ('no_answer', '<think>a</think>'),
      ('open_answer', '<think>a</think><answer>b'),
      ('text_before', f'so {GOOD}'),
      ('text_between', '<think>a</think> so <answer>b</answer>'),
      ('text_after', f'{GOOD}.'),
      ('two_answers', f'{GOOD}<answer>b</answer>'),
      ('nested', '<think>a<answer>b</answer></think>'),
      ('crossed', '<think>a<answer></think>b</answer>'),
      ('no_think_after_information', SEARCHED.replace('<think>b</think>', '')),
      ('search_without_information', SEARCHED.replace('<information>d</information>', '')),
      ('information_without_search', SEARCHED.replace('<search>q</search>', '')),
      ('thinks_twice', f'<think>z</think>{GOOD}'),
      ('stray_closing', f'</think>{GOOD}'),
      ('closed_twice', '<think>a</think></think><answer>b</answer>'),
      ('wrong_case', '<Think>a</Think><answer>b</answer>'),
  )
  def test_not_well_formed(self, text):
    self.assertFalse(rewards.well_formed(text))

  @parameterized.parameters(
      (True, True, 1.0), (True, False, 0.8), (False, True, 0.2), (False, False, 0.1)
  )
  def test_format_reward(self, correct, formed, expected):
    self.assertEqual(rewards.format_reward(correct, formed), expected)


if __name__ == '__main__':
  absltest.main()
