"""A conversation in the terminal: the episodes of the agent, what is shown, and ways to leave."""

import dataclasses
import io
import signal
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from experiments import st_ppo_tiny
from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.envs import guard
from stppo_jax.evaluation import chat
from stppo_jax.rollout import prepare
from stppo_jax.types import UserError
from tests.support import tiny_run

CAPITAL = 'What is the capital of France?'
NEIGHBOUR = 'What is the continent of the country where Samarkand lies?'


def no_reward(task, answer, transcript):
  raise AssertionError('there is no right answer to compare with')


class Terminal(io.StringIO):

  def isatty(self):
    return True


class ChatTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.enterClassContext(tiny_run.on_one_device())
    cls.config = st_ppo_tiny.get_config()
    cls.config.env.reward = 'tests.evaluation.chat_test:no_reward'
    cls.model, cls.params = prepare.load_policy(cls.config)

  def chat(self, *lines, out=None):
    out = out or io.StringIO()
    chat.chat(self.config, self.model, self.params, 'embedded', lines, out)
    return out.getvalue()

  def test_a_question_is_played_and_shown(self):
    shown = self.chat(CAPITAL + '\n', '  \n', NEIGHBOUR)
    lines = shown.splitlines()
    self.assertEqual(lines[0], f'? {CAPITAL}')
    self.assertRegex(lines[1], '^<think>.*<search>.*</search>$')
    self.assertRegex(lines[2], r'^  search \| \S')
    self.assertRegex(shown, r'\n    read \| <information> .*Paris')
    self.assertIn('\n  answer | Paris\n? ', shown)
    self.assertNotIn('\033', shown)

  def test_observations_are_shown_as_the_agent_reads_them(self):
    rollout = dataclasses.replace(self.config.rollout, max_observation=24)
    config = dataclasses.replace(self.config, rollout=rollout)
    out = io.StringIO()
    screen = chat.Screen(out)
    agent = chat.make_agent(config, self.model, screen)
    episode = chat.play(agent, self.params, types.Task('a', CAPITAL), screen)
    read = [agent.tokenizer.decode(turn.observation).strip() for turn in episode.turns]
    shown = [line[11:] for line in out.getvalue().splitlines() if line.startswith('    read |')]
    self.assertEqual('\n'.join(shown), '\n'.join(filter(None, read)))
    self.assertLen(episode.turns[0].observation, 24)

  @pytest.mark.slow
  def test_ctrl_c_leaves_only_the_question(self):
    # A shell starts its background jobs with this signal ignored.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    self.addCleanup(signal.signal, signal.SIGINT, previous)
    step, calls = chat.ShownEnv.step, []

    def interrupted(*args, **kwargs):
      calls.append(args)
      if len(calls) == 1:
        signal.raise_signal(signal.SIGINT)
        guard.pause(5)  # ends once the main thread has left the question
      return step(*args, **kwargs)

    with mock.patch.object(chat.ShownEnv, 'step', interrupted):
      shown = self.chat(NEIGHBOUR, CAPITAL)
    self.assertIn('note | left\n', shown)
    self.assertIn('answer | Paris\n', shown)

  def test_a_question_that_is_too_long_is_told(self):
    self.assertIn('the question is too long', self.chat('why ' * 300))

  def test_no_text_controls_the_terminal(self):
    out = Terminal()
    screen = chat.Screen(out)
    screen.write_line('a\033[2J\rb')
    screen.mark('read', 'c\x07')
    self.assertEqual(out.getvalue(), 'a\ufffd[2J\ufffdb\n\033[36m    read | c\ufffd\033[0m\n')
    with mock.patch.dict('os.environ', NO_COLOR='1'):
      plain = Terminal()
      chat.Screen(plain).mark('answer', 'Paris')
    self.assertEqual(plain.getvalue(), '  answer | Paris\n')

  @parameterized.parameters(
      ('gateway:tests.evaluation.chat_test:no_reward', '--mode=serve'),
      ('tests.evaluation.chat_test:Procedural', 'its own tasks'),
  )
  def test_environment_without_questions_is_rejected(self, kind, words):
    config = schema.Config(env=schema.EnvSettings(kind=kind))
    with self.assertRaisesRegex(UserError, words):
      chat.make_agent(config, self.model, None)


class Procedural:

  def __init__(self, task):
    pass

  @staticmethod
  def load_tasks(split):
    return [types.Task(split, seed=0)]


if __name__ == '__main__':
  absltest.main()
