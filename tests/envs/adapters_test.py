"""Environments of other packages: the real ones where they are installed, else skipped."""

import importlib
import itertools
import json
import random
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

from stppo_jax import config as schema
from stppo_jax.assembly import components
from stppo_jax.envs import factory
from stppo_jax.envs import packages
from stppo_jax.envs import protocol
from stppo_jax.envs.adapters import gem as gem_lib
from stppo_jax.envs.adapters import reasoning_gym as rg_lib
from stppo_jax.settings import validation
from stppo_jax.types import Task
from stppo_jax.types import UserError

pytestmark = [
    pytest.mark.guests(
        what='GEM',
        version='gem-llm==0.1.0',
        date='2026-11-28',
        touches='envs/adapters/gem.py envs/packages.py',
    ),
    pytest.mark.guests(
        what='TextArena',
        version='textarena==0.7.4',
        date='2026-11-28',
        touches='envs/adapters/textarena.py envs/packages.py',
    ),
    pytest.mark.guests(
        what='Reasoning Gym',
        version='reasoning-gym==0.1.25',
        date='2026-11-29',
        touches='envs/adapters/answer_text.py envs/adapters/reasoning_gym.py envs/packages.py',
    ),
]

HOSTILE = (
    '', ' ', '\x00', '\\boxed{}', '\\boxed{' + '9' * 5000 + '}', '\\boxed{-1 0 99}', '[0 0]',
    '[99]',
    '[' * 5000, '\ud800', '١٢', '<answer></answer>', '<answer>' + '(' * 5000 + '</answer>', 'nan',
    '<answer>1/0</answer>', '[1 1][2 2]', '\\boxed{1 1 1}',
)  # fmt: skip


def resolve(kind, source='embedded', **options):
  config = schema.Config()
  config.env.kind, config.env.options, config.retriever.kind = kind, options, 'none'
  config.data.source = source
  return components.resolve(validation.validate(config))


def need(test, package):
  try:
    return importlib.import_module(package)
  except ImportError:
    test.skipTest(f'{package} is not installed')


def first_move(observation, rng):
  """A player of Nim that takes the first pile that is left."""
  del rng
  board = observation.rpartition('Current Pile:')[2]
  for line in board.strip().splitlines():
    pile, left = line.strip().removeprefix('pile ').split(': ')
    if int(left):
      return f'[{pile} {left}]'
  raise AssertionError(observation)


ME = f'{__name__}:first_move'
# Package, kind, options, form and numbers of the moves of any episode.
GUESS, CELL, CODE = '\\boxed{{{}}}', '\\boxed{{{} {} {}}}', '\\boxed{{{} {}}}'
GAMES = (
    ('gem', 'gem:game:GuessTheNumber-v0-random', {}, GUESS, [(i,) for i in range(3, 40, 4)]),
    (
        'gem',
        'gem:game:Sudoku-v0-easy',
        {},
        CELL,
        list(itertools.product((1, 2, 3, 4), (2, 3), (1, 4))),
    ),
    (
        'gem',
        'gem:game:Minesweeper-v0-easy',
        {},
        CELL,
        list(itertools.product(('reveal',), (0, 2, 4), (1, 3))),
    ),
    ('gem', 'gem:game:Mastermind-v0-random', {}, CODE, [(1, 2), (3, '4 5'), (6, '7 8 9')]),
    ('gem', 'gem:rg:letter_counting', {}, GUESS, [(2,)]),
    ('textarena', 'textarena:GuessTheNumber-v0', {}, '[{}]', [(i,) for i in range(1, 20, 2)]),
    ('textarena', 'textarena:FrozenLake-v0', {}, '[{}]', [('down',), ('right',)] * 9),
    (
        'textarena',
        'textarena:Nim-v0',
        {'opponent': ME, 'side': 'random'},
        '[{} {}]',
        [(2, 1), (1, 1)] * 9,
    ),
    ('textarena', 'textarena:Nim-v0', {'opponent': 'self'}, '[{} {}]', [(2, 1), (1, 1)] * 9),
    ('reasoning_gym', 'reasoning_gym:letter_counting', {}, '<answer>{}</answer>', [(2,)]),
    ('reasoning_gym', 'reasoning_gym:graph_color', {}, '<answer>{}</answer>', [('{}',)]),
)


class Episode:
  """One episode of an environment with moves that are fixed and its observations."""

  def __init__(self, kind, seed, moves):
    self._moves, self.over, self.rewards = iter(moves), False, []
    self._env = kind(Task(str(seed), seed=seed), seed)
    self.observed = [protocol.full_text(*self._env.reset(seed=seed))]

  def move(self):
    """Makes the next move."""
    action = next(self._moves, None)
    if action is None:
      self.over = True
      return
    observation, reward, terminated, truncated, info = self._env.step(action)
    self.over = terminated or truncated
    self.observed.append((protocol.full_text(observation, info), reward, info['metrics']))
    self.rewards.append(reward)


def alone(kind, seed, moves):
  episode = Episode(kind, seed, moves)
  while not episode.over:
    episode.move()
  return episode


class IsolationTest(parameterized.TestCase):

  @parameterized.parameters(*GAMES)
  def test_interleaved_episodes_are_independent(self, package, name, options, form, moves):
    need(self, package)
    moves = [form.format(*move) for move in moves]
    kind = resolve(name, **options).env
    seeds = range(6)
    expected = [alone(kind, seed, moves).observed for seed in seeds]
    if options.get('opponent') != 'self':  # Nim itself has no random part
      self.assertGreater(len({json.dumps(observed) for observed in expected}), 1)
    random.seed(7)
    np.random.seed(7)
    episodes = [Episode(kind, seed, moves) for seed in reversed(seeds)]
    while not all(episode.over for episode in episodes):
      for episode in episodes:
        random.random()  # other code
        np.random.rand()
        if not episode.over:
          episode.move()
    self.assertEqual([episode.observed for episode in reversed(episodes)], expected)

  @parameterized.parameters(*GAMES)
  def test_hostile_texts_do_not_raise(self, package, name, options, form, moves):
    need(self, package)
    moves = [form.format(*move) for move in moves]
    kind = resolve(name, **options).env
    for text in HOSTILE:
      episode = Episode(kind, 3, [text, *moves[:2]])
      while not episode.over:
        episode.move()
      self.assertTrue(np.isfinite(sum(episode.rewards)))


class GemTest(absltest.TestCase):

  def test_outcomes_are_those_of_the_package(self):
    gem = need(self, 'gem')
    game = gem.make('game:Sudoku-v0-easy')
    observation, info = game.reset(seed=5)
    expected, over = [(f'{observation}{info["suffix"]}', None)], False
    moves = [CELL.format(*cell) for cell in itertools.product((1, 2, 3, 4), repeat=3)]
    for move in moves:
      if over:
        break
      observation, reward, terminated, truncated, info = game.step(move)
      over = terminated or truncated
      expected.append((f'{observation}\n{info["suffix"]}', reward))
    episode = alone(resolve('gem:game:Sudoku-v0-easy').env, 5, moves)
    got = [(episode.observed[0], None), *(observed[:2] for observed in episode.observed[1:])]
    self.assertEqual(got, expected)
    self.assertGreater(max(episode.rewards), 0)

  def test_success_is_a_full_reward(self):
    need(self, 'gem')
    kind = resolve('gem:game:GuessTheNumber-v0-easy').env
    last = [alone(kind, 0, [f'\\boxed{{{guess}}}'] * 4).observed[-1] for guess in range(1, 11)]
    self.assertEqual(sum(metrics['success'] for _, _, metrics in last), 1)
    (won,) = [observed for observed in last if observed[2]['success']]
    self.assertEqual((won[1], won[2]['moves']), (1.0, 1.0))
    self.assertEqual(sorted(reward == 1 for _, reward, _ in last), [False] * 9 + [True])

  def test_answered_question_is_not_cut_by_a_limit(self):
    need(self, 'gem')
    for answer in (r'\boxed{0}', 'nothing'):
      env = resolve('gem:rg:letter_counting').env(Task('t'), 0)
      env.reset(seed=0)
      self.assertEqual(env.step(answer)[2:4], (True, False))
    env = resolve('gem:game:GuessTheNumber-v0-easy', max_turns=1).env(Task('t'), 0)
    env.reset(seed=0)
    self.assertEqual(env.step(r'\boxed{0}')[2:4], (True, True))

  def test_splits_of_one_data_set_are_warned_of(self):
    need(self, 'gem')
    with mock.patch.object(gem_lib.logging, 'log_first_n') as log:
      resolve('gem:game:GuessTheNumber-v0-easy').env(Task('t'), 0)
      log.assert_not_called()
      resolve('gem:rg:letter_counting').env(Task('t'), 0)
    self.assertEqual(log.call_args.args[-1], 'gem:rg:letter_counting')

  def test_frame_and_stop_strings_are_options(self):
    need(self, 'gem')
    kind = resolve('gem:game:TowerofHanoi-v0-easy').env
    self.assertEqual((kind.frame, kind.stop_strings), ('user', ()))
    kind = resolve('gem:game:TowerofHanoi-v0-easy', frame='inline', stop_strings=['}']).env
    self.assertEqual((kind.frame, kind.stop_strings), ('inline', ('}',)))
    kind(Task('t'), 0)

  def test_process_keeps_its_logging(self):
    need(self, 'gem')
    import logging

    with mock.patch.dict(sys.modules):
      for name in [name for name in sys.modules if name.partition('.')[0] == 'gem']:
        del sys.modules[name]
      before = list(logging.root.handlers)
      packages.import_package('gem:x', 'gem', 'gem')
      self.assertEqual(logging.root.handlers, before)


class TextArenaTest(absltest.TestCase):

  def test_a_game_of_two_against_a_script(self):
    """Piles 3, 4, 5: the opponent takes the first pile whole, then the agent wins by the rest."""
    need(self, 'textarena')
    kind = resolve('textarena:Nim-v0', opponent=ME).env
    episode = alone(kind, 0, ['[2 5]', '[1 4]'])  # opponent between: [0 3]
    self.assertEqual(episode.rewards, [0.0, 1.0])
    self.assertEqual(episode.observed[-1][2]['won'], 1.0)
    self.assertIn('Player 1 removes 3 from pile 0', episode.observed[1][0])
    self.assertNotIn('[2 5]', episode.observed[1][0])  # its own words are in its context
    episode = alone(kind, 0, ['[2 4]', '[1 4]'])  # the opponent takes the last one
    self.assertEqual((episode.rewards, episode.observed[-1][2]['won']), ([0.0, -1.0], 0.0))
    second = resolve('textarena:Nim-v0', opponent=ME, side='second').env
    self.assertIn('Player 0 removes 3 from pile 0', alone(second, 0, []).observed[0])

  def test_a_policy_plays_both_sides(self):
    """Piles 2 and 3. Player 1 takes the last one, and both have what they earned."""
    need(self, 'textarena')
    kind = resolve('textarena:Nim-v0', opponent='self', eval_opponent=ME, piles=[2, 3]).env
    self.assertEqual(kind.roles, ('player_0', 'player_1'))
    env = kind(Task('t'), 0)
    prompt, info = env.reset(seed=0)
    self.assertEqual(info['role'], 'player_0')
    self.assertIn('Player 0!', prompt)
    observed, reward, over, _, info = env.step('[0 2]')
    self.assertEqual((reward, over, info['role']), (0.0, False, 'player_1'))
    self.assertIn('Player 1!', observed)  # its prompt, and what has happened
    self.assertIn('Player 0 removes 2 from pile 0', observed)
    _, reward, over, _, info = env.step('[9 9]')  # illegal: it is still its turn
    self.assertEqual(
        (reward, over, info['role'], info['action']), (0.0, False, 'player_1', 'invalid')
    )
    _, reward, over, _, info = env.step('[1 3]')
    self.assertEqual((reward, over, info['rewards']), (1.0, True, {'player_0': -1.0}))
    self.assertEqual(info['metrics']['won'], 1.0)
    self.assertEqual(info['role_metrics']['player_0']['won'], 0.0)

  def test_held_out_games_are_against_a_script(self):
    need(self, 'textarena')
    kind = resolve('textarena:Nim-v0', opponent='self', eval_opponent=ME, side='second').env
    env = kind(Task('t', split='dev'), 0)
    observed, info = env.reset(seed=0)
    self.assertEqual(info['role'], 'player_1')
    self.assertIn('Player 0 removes 3 from pile 0', observed)
    _, reward, over, _, info = env.step('[1 4]')  # the script takes the last pile
    self.assertEqual((reward, over, info['metrics']['won']), (-1.0, True, 0.0))
    self.assertNotIn('rewards', info)
    with self.assertRaisesRegex(UserError, "set opponent='self'"):
      resolve('textarena:Nim-v0', opponent=ME, eval_opponent='self').env(Task('t'), 0)

  def test_two_invalid_moves_lose(self):
    need(self, 'textarena')
    kind = resolve('textarena:Nim-v0', opponent=ME).env
    env = kind(Task('t'), 0)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step('[9 9]')
    self.assertEqual((reward, terminated, info['action']), (0.0, False, 'invalid'))
    _, reward, terminated, _, info = env.step('what?')
    self.assertEqual((reward, terminated, info['action']), (-1.0, True, 'invalid'))
    self.assertEqual(info['metrics']['invalid_move'], 1.0)

  def test_wrong_number_of_players(self):
    need(self, 'textarena')
    for name, options in (('Nim-v0', {}), ('GuessTheNumber-v0', {'opponent': ME})):
      env = resolve(f'textarena:{name}', **options).env(Task('t'), 0)
      with self.assertRaisesRegex(UserError, 'cannot be played by .*options.opponent'):
        env.reset(seed=0)


class ReasoningGymTest(parameterized.TestCase):

  @parameterized.parameters(
      'chain_sum', 'basic_arithmetic', 'mini_sudoku', 'spell_backward', 'maze'
  )
  def test_the_right_answer_scores_one(self, name):
    rg = need(self, 'reasoning_gym')
    entry = rg.create_dataset(name, seed=9, size=1)[0]
    env = resolve(f'reasoning_gym:{name}').env(Task('t'), 9)
    prompt, _ = env.reset(seed=9)
    self.assertStartsWith(prompt, entry['question'])
    outcome = env.step(f'Well. <answer>{entry["answer"]}</answer>')
    self.assertEqual((outcome[1], outcome[2]), (1.0, True))
    self.assertEqual(outcome[4]['metrics'], {'solved': 1.0, 'score': 1.0, 'answered': 1.0})

  @parameterized.parameters('f(1)', '9**9**9', '1e999999999', '3', '(8-4)*6')
  def test_dangerous_answer_is_not_scored(self, answer):
    dataset = mock.MagicMock()
    dataset.score_answer.side_effect = lambda answer, entry: float(answer != 'I do not know')
    construct = lambda **_: dataset
    env = packages.adapt(rg_lib.ReasoningGymEnv, construct, 'reasoning_gym:x', 'x')(Task('t'))
    with mock.patch.object(rg_lib, '_computes_texts', return_value=True):
      env.reset(seed=9)
      score = env.step(f'<answer>{answer}</answer>')[1]
    is_safe = answer in ('3', '(8-4)*6')
    self.assertEqual(score, float(is_safe))
    answers = [call.kwargs['answer'] for call in dataset.score_answer.call_args_list]
    self.assertEqual(answer in answers, is_safe)

  @parameterized.parameters(
      'n_queens', 'spiral_matrix', 'countdown', 'simple_integration', 'coin_flip'
  )
  def test_answer_with_a_call_is_not_scored(self, name):
    rg = need(self, 'reasoning_gym')
    entry = rg.create_dataset(name, seed=9, size=1)[0]
    env = resolve(f'reasoning_gym:{name}').env(Task('t'), 9)
    env.reset(seed=9)
    with mock.patch.object(type(env._dataset), 'score_answer') as score:
      for answer in ('f(1)', '9**9**9', '1e999999999'):
        self.assertEqual(env.step(f'<answer>{answer}</answer>')[1], 0.0)
      score.assert_not_called()
    self.assertEqual(env.step(f'<answer>{entry["answer"]}</answer>')[1], 1.0)

  def test_an_answer_without_tags(self):
    need(self, 'reasoning_gym')
    env = resolve('reasoning_gym:chain_sum', min_terms=2, max_terms=2).env(Task('t'), 1)
    env.reset(seed=1)
    outcome = env.step('I do not know.')
    self.assertEqual((outcome[4]['action'], outcome[4]['metrics']['answered']), ('invalid', 0.0))
    kind = resolve('reasoning_gym:chain_sum', tagged=False, stop_strings=['\n']).env
    self.assertEqual(kind.stop_strings, ('\n',))
    env = kind(Task('t'), 1)
    question, _ = env.reset(seed=1)
    terms = question.partition(': ')[2].removesuffix('=').strip()
    self.assertEqual(env.step(f'{eval(terms)}\n')[1], 1.0)

  def test_partial_scores(self):
    """A text with all digits contains the answer; the package pays for that."""
    need(self, 'reasoning_gym')
    for partial in (True, False):
      env = resolve('reasoning_gym:chain_sum', partial=partial, tagged=False).env(Task('t'), 1)
      question, _ = env.reset(seed=1)
      right = str(eval(question.partition(': ')[2].removesuffix('=')))
      _, reward, _, _, info = env.step(f'{right} or 0123456789')
      self.assertBetween(info['metrics']['score'], 0.01, 0.99)
      self.assertEqual(reward, info['metrics']['score'] if partial else 0.0)

  @parameterized.parameters(
      ('prime_factorization', 'The answer is 5'),
      ('prime_factorization', '1,000'),
      ('boxnet', '3.5'),
      ('boxnet', '[1]'),
      ('game_of_life', '{"a": 1}'),
  )
  def test_answer_that_cannot_be_parsed_scores_zero(self, name, answer):
    need(self, 'reasoning_gym')
    env = resolve(f'reasoning_gym:{name}').env(Task('t'), 3)
    env.reset(seed=3)
    _, reward, is_over, _, info = env.step(f'<answer>{answer}</answer>')
    self.assertEqual((reward, is_over, info['action']), (0.0, True, 'answer'))
    self.assertEqual(info['metrics'], {'solved': 0.0, 'score': 0.0, 'answered': 1.0})

  def test_scorer_that_raises_gives_zero(self):
    scores = {'nan': float('nan'), 'none': None}
    env, _ = self.make_with_scorer(lambda a: scores[a] if a in scores else float(int(a) == 7))
    right = {'7': 1.0, '8': 0.0, 'seven': 0.0, 'nan': 0.0, 'none': 0.0}
    rewards = {answer: env.step(f'<answer>{answer}</answer>')[1] for answer in right}
    self.assertEqual(rewards, right)

  def test_scorer_that_accepts_anything_is_warned_of(self):
    _, lines = self.make_with_scorer(lambda answer: 1.0)
    self.assertRegex(' '.join(lines), "gives the full score to 'I do not know'")
    _, lines = self.make_with_scorer(lambda answer: 0.5)
    self.assertEmpty(lines)

  def make_with_scorer(self, score):
    """Returns an environment whose data set scores by a function, and the warnings of a reset."""

    class Dataset:

      def __init__(self, seed, size):
        del seed, size

      def __getitem__(self, index):
        return {'question': f'Question {index}', 'answer': '7'}

      def score_answer(self, answer, entry):
        del entry
        return score(answer)

    env = packages.adapt(rg_lib.ReasoningGymEnv, Dataset, 'reasoning_gym:stub', 'stub')(Task('t'))
    with mock.patch.object(rg_lib.logging, 'log_first_n') as log:
      env.reset(seed=1)
    return env, [
        call.args[1] % call.args[3:] for call in log.call_args_list if 'gives' in call.args[1]
    ]

  def test_rejected_options(self):
    need(self, 'reasoning_gym')
    for options in ({'min_terms': 0}, {'no_such': 1}):
      env = resolve('reasoning_gym:chain_sum', **options).env(Task('t'), 1)
      with self.assertRaisesRegex(UserError, 'gives no question.*change the options') as caught:
        env.reset(seed=1)
      self.assertNotIn('\n', str(caught.exception))


class NamesTest(parameterized.TestCase):

  @parameterized.parameters(
      ('gem', 'gem:game:GuessTheNumber-v0-esay', 'game:GuessTheNumber-v0-easy'),
      ('textarena', 'textarena:guessthenumber-v0', 'GuessTheNumber-v0'),
      ('reasoning_gym', 'reasoning_gym:chainsum', 'chain_sum'),
  )
  def test_wrong_name_lists_similar_names(self, package, kind, close):
    need(self, package)
    with self.assertRaisesRegex(UserError, f'such as .*{close}') as caught:
      resolve(kind)
    self.assertNotIn('\n', str(caught.exception))

  @parameterized.parameters('gem', 'textarena', 'reasoning_gym')
  def test_missing_package_is_one_line(self, package):
    with mock.patch.dict(sys.modules, {package: None, f'{package}.factory': None}):
      with self.assertRaisesRegex(UserError, rf'pip install "\.\[{package}\]"'):
        resolve(f'{package}:x')

  def test_id_is_no_plugin(self):
    config = schema.Config()
    config.env.kind = 'gem:game:GuessTheNumber-v0-easy'
    self.assertEmpty(components.plugin_names(config))

  @parameterized.parameters(
      ('gem', 'gem:game:Wordle-v0-easy'), ('reasoning_gym', 'reasoning_gym:maze')
  )
  def test_seeds_are_the_tasks_without_a_data_file(self, package, kind):
    need(self, package)
    parts = resolve(kind)
    self.assertIsNone(parts.retriever)
    seeds = {split: {t.seed for t in parts.load_tasks(split)} for split in ('train', 'dev', 'test')}
    self.assertEqual(
        {split: len(s) for split, s in seeds.items()}, dict(train=10**4, dev=256, test=256)
    )
    self.assertLen(set.union(*seeds.values()), 10**4 + 512)
    named = resolve(kind, source=f'{__name__}:two_tasks').load_tasks('dev')
    self.assertEqual([task.id for task in named], ['a', 'b'])


def two_tasks(split):
  """A user's questions take precedence over an environment's."""
  del split
  return [Task('a', seed=1), Task('b', seed=2)]


class HelpersTest(absltest.TestCase):

  def test_attributes_depend_on_settings(self):
    def make(task, letters='ab', frame='inline'):
      del task, letters, frame

    make.attributes = lambda settings: {
        'stop_strings': tuple(settings.get('letters', '')),
        'frame': settings.get('frame', 'inline'),
    }
    kind = factory.make_factory('m:make', make, {}, {'letters': 'xy', 'frame': 'tool'})
    self.assertEqual((kind.stop_strings, kind.frame), (('x', 'y'), 'tool'))
    with self.assertRaisesRegex(UserError, 'its frame is .side.'):
      factory.make_factory('m:make', make, {}, {'frame': 'side'})

  def test_numbers_of_an_info(self):
    info = {'a': 1, 'b': True, 'c': np.float32(0.5), 'd': 'x', 'e': float('nan'), 'f': [1], 3: 2}
    self.assertEqual(packages.numbers(info), {'a': 1.0, 'b': 1.0, 'c': 0.5, '3': 2.0})


if __name__ == '__main__':
  absltest.main()
