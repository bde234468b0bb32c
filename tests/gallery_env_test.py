"""The gallery's environments: their scores worked out by hand."""

import math

from absl.testing import absltest
from absl.testing import parameterized

from gallery.countdown import env as countdown
from gallery.guess_number import env as guess_number
from stppo_jax.types import Task


class CountdownTest(parameterized.TestCase):

  @parameterized.parameters(
      ('3+7-2', 8),
      ('3-7-2', -6),
      ('3+7', None),  # a number is missing
      ('7+3-2', None),  # another order
      ('3+7-2+0', None),
      ('3*7-2', None),
      ('3+7-2)', None),
      ('__import__("os")', None),
      ('3+7--2', None),
      ('', None),
      ('٣+7-2', None),
      ('3+7-2' + ' ' * 50, None),
  )
  def test_an_expression_is_parsed_and_never_evaluated(self, text, want):
    self.assertEqual(countdown.value(text, [3, 7, 2]), want)

  def test_reward_and_metrics(self):
    task = Task('t', '3 7 2=8')
    env = countdown.Countdown(task, countdown.check)
    self.assertEqual(env.reset(), ('3 7 2=8:', {}))
    _, reward, terminated, _, info = env.step('3+7-2;')
    self.assertEqual((reward, terminated), (1.0, True))
    self.assertEqual(info['metrics'], {'right': 1.0, 'legal': 1.0})
    self.assertEqual(env.step('3-7+2;')[1], 0.0)
    self.assertEqual(env.step('3+7;')[4]['metrics'], {'right': 0.0, 'legal': 0.0})

  def test_every_task_has_a_solution(self):
    for task in countdown.load('dev'):
      a, b, c = countdown.numbers(task)
      sums = [f'{a}{x}{b}{y}{c}' for x in '+-' for y in '+-']
      self.assertIn(1.0, [countdown.check(task, text, '') for text in sums])


class GuessNumberTest(absltest.TestCase):

  def test_rewards_of_each_turn(self):
    env = guess_number.GuessNumber(Task('t', ''), max_turns=4)
    env.reset(seed=0)
    env._hidden = 7
    # 1..9 -> 6..9 -> (5 is ruled out) -> no number -> 7
    outcomes = [env.step(guess) for guess in ('5', '5', 'x', '7')]
    share = lambda before, after: math.log(before / after) / math.log(9)
    rewards = [outcome[1] for outcome in outcomes]
    for got, want in zip(rewards, (share(9, 4), -0.1, -0.1, share(4, 1) + 0.5)):
      self.assertAlmostEqual(got, want)
    self.assertEqual([outcome[0] for outcome in outcomes], ['higher', 'higher', '?', ''])
    self.assertEqual(outcomes[-1][2:4], (True, False))

  def test_one_that_does_not_find_it_is_truncated(self):
    env = guess_number.GuessNumber(Task('t', ''), max_turns=1)
    env.reset(seed=0)
    self.assertEqual(env.step('0')[2:4], (True, True))

  def test_a_seed_is_a_game(self):
    env = guess_number.GuessNumber(Task('t', ''), max_turns=4)
    hidden = [env.reset(seed=task.seed) and env._hidden for task in guess_number.load('dev')]
    self.assertEqual(set(hidden), set(range(1, 10)))
    again = [env.reset(seed=task.seed) and env._hidden for task in guess_number.load('dev')]
    self.assertEqual(hidden, again)


if __name__ == '__main__':
  absltest.main()
