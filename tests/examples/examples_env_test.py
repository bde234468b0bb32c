"""The environments of examples/: scores worked out by hand."""

import math

from absl.testing import absltest
from absl.testing import parameterized

from examples.countdown import env as countdown
from examples.guess_number import env as guess_number
from examples.signals import env as signals
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
      ('f("x")', None),
      ('3+7--2', None),
      ('', None),
      ('٣+7-2', None),
      ('3+7-2' + ' ' * 50, None),
  )
  def test_expressions_are_parsed(self, text, want):
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

  def test_tasks_have_solutions(self):
    for task in countdown.load('dev'):
      a, b, c = countdown.numbers(task)
      sums = [f'{a}{x}{b}{y}{c}' for x in '+-' for y in '+-']
      self.assertIn(1.0, [countdown.check(task, text, '') for text in sums])


class GuessNumberTest(absltest.TestCase):

  def test_rewards_per_turn(self):
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

  def test_last_turn_truncates(self):
    env = guess_number.GuessNumber(Task('t', ''), max_turns=1)
    env.reset(seed=0)
    self.assertEqual(env.step('0')[2:4], (True, True))

  def test_seed_fixes_the_game(self):
    env = guess_number.GuessNumber(Task('t', ''), max_turns=4)
    hidden = [env.reset(seed=task.seed) and env._hidden for task in guess_number.load('dev')]
    self.assertEqual(set(hidden), set(range(1, 10)))
    again = [env.reset(seed=task.seed) and env._hidden for task in guess_number.load('dev')]
    self.assertEqual(hidden, again)


class SignalsTest(absltest.TestCase):

  def test_two_rounds(self):
    """Round one is understood and pays both 1; in round two an illegal letter costs its sender."""
    env = signals.Signals(Task('t'))
    prompt, info = env.reset(seed=3)
    first = prompt.removeprefix('send ')
    self.assertEqual(info, {'role': 'first'})
    text, reward, over, _, info = env.step('b')
    self.assertEqual((text, reward, over, info['role']), ('got b', 0.0, False, 'second'))
    text, reward, over, _, info = env.step(first)
    self.assertEqual((reward, over, info['role']), (1.0, False, 'second'))
    self.assertEqual(info['rewards'], {'first': 1.0})
    self.assertStartsWith(text, 'send ')
    text, reward, over, _, info = env.step('x')
    self.assertEqual(
        (text, reward, info['role'], info['action']), ('got ?', -0.1, 'first', 'invalid')
    )
    _, reward, over, _, info = env.step('9')
    self.assertEqual((reward, over, info['rewards']), (-0.1, True, {'second': 0.0}))
    self.assertEqual(info['metrics'], {'understood': 0.5})
    self.assertEqual(info['role_metrics']['first'], {'as_sender': 1.0, 'as_receiver': 0.0})
    self.assertEqual(info['role_metrics']['second'], {'as_sender': 0.0, 'as_receiver': 1.0})


if __name__ == '__main__':
  absltest.main()
