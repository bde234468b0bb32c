"""The maze of examples/maze: numbers of the published benchmark, and moves worked out by hand."""

import json
import pathlib
import random
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

from examples.maze import compare
from examples.maze import config as maze
from examples.maze import env
from examples.maze import player
from stppo_jax.algorithms import variants
from stppo_jax.assembly import components
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.types import Task
from tests.support import tiny_run

OPTIMUM = -6.84  # published
DATA = -83  # published, the mean return of the authors' data
Z = 2.576  # 99% of a normal distribution


def play(game, actor, seed):
  """Plays an episode; returns its rewards and its last metrics."""
  observation, _ = game.reset(seed=seed)
  rewards = []
  is_over = False
  while not is_over:
    observation, reward, terminated, truncated, info = game.step(actor.act(observation))
    rewards.append(reward)
    is_over = terminated or truncated
  return rewards, info['metrics']


def returns(kind, observed, number):
  """Returns the returns of as many episodes, whose starts are all starts in turn."""
  episodes = [
      play(env.Maze(Task('t'), observed), kind(random.Random(seed)), seed) for seed in range(number)
  ]
  return np.array([metrics['return'] for _, metrics in episodes])


def exact_random_walk():
  """Returns the mean return of a random walk, and the share that does not reach the goal."""
  chance = dict.fromkeys(env.STARTS, 1 / len(env.STARTS))
  cost = 0.0
  for _ in range(env.MAX_MOVES):
    after = dict.fromkeys(env.STARTS, 0.0)
    for square, share in chance.items():
      for name in env.MOVES:
        target = env.move(square, name)
        if target != env.GOAL:
          after[target] += share / 4
    chance = after
    cost += sum(chance.values())  # the move that reaches the goal costs nothing
  return -cost, sum(chance.values())


class MazeTest(parameterized.TestCase):

  def test_optimum_is_the_published_one(self):
    ways = env.distances()
    self.assertLen(env.STARTS, 25)
    self.assertAlmostEqual(np.mean([1 - ways[start] for start in env.STARTS]), OPTIMUM)
    self.assertAlmostEqual(returns(player.Expert, 'fully', 25).mean(), OPTIMUM)

  def test_random_walk_has_its_exact_return(self):
    moves, lost = exact_random_walk()
    self.assertAlmostEqual(moves, -85.14, places=2)
    exact = moves - lost  # one more turn ends the episodes that do not reach the goal
    self.assertAlmostEqual(exact, -85.89, places=2)
    sampled = returns(player.RandomWalk, 'partly', 1000)
    margin = Z * sampled.std() / len(sampled) ** 0.5
    self.assertBetween(sampled.mean(), exact - margin, exact + margin)

  @parameterized.parameters((player.Player, 'fully'), (player.Descent, 'partly'))
  def test_imitated_players_are_like_the_data(self, kind, observed):
    sampled = returns(kind, observed, 1000)
    margin = Z * sampled.std() / len(sampled) ** 0.5
    self.assertBetween(sampled.mean(), DATA - margin, DATA + margin)

  def test_moves_by_hand(self):
    """From cE a wall is on the left, above is cD, and the way to the goal is 6 moves long."""
    game = env.Maze(Task('t'), scale=1.0)
    seed = env.STARTS.index((5, 3))
    self.assertEqual(game.reset(seed=seed), ('cE', {}))
    told = []
    for action in (' left\n', ' up\n', 'down', ' right\n', ' right\n', ' right\n', ' down\n'):
      observation, reward, terminated, truncated, _ = game.step(action)
      told.append((observation, reward, terminated or truncated))
    squares = ['cE', 'cD', 'cE', 'dE', 'eE', 'fE', 'fF']
    self.assertEqual(told, [(square, -1.0, False) for square in squares])
    self.assertEqual(game.step(' down\n')[:4], ('fG', -1.0, False, False))
    observation, reward, terminated, truncated, info = game.step(' down\n')
    self.assertEqual((observation, reward, terminated, truncated), ('', 0.0, True, False))
    self.assertEqual(info['metrics'], {'return': -8.0, 'solved': 1.0, 'moves': 9.0, 'illegal': 0.0})

  @parameterized.parameters('north\n', '', ' left right\n', 'Left\n', ' lef', '\n')
  def test_illegal_text_costs_four(self, action):
    game = env.Maze(Task('t'), scale=1.0)
    first, _ = game.reset(seed=3)
    observation, reward, terminated, truncated, info = game.step(action)
    self.assertEqual((observation, reward), (first, -4.0))
    self.assertFalse(terminated or truncated)
    self.assertEqual((info['action'], info['metrics']['illegal']), ('invalid', 1.0))
    self.assertEqual(info['metrics']['moves'], 1.0)

  @parameterized.parameters((' left\n', -101.0), ('x', -401.0))
  def test_hundred_moves_end_an_episode(self, action, total):
    """The turn behind the hundredth move costs 1, whatever its text."""
    game = env.Maze(Task('t'), scale=1.0)
    actor = mock.Mock(act=lambda observation: action)
    rewards, metrics = play(game, actor, env.STARTS.index((1, 1)))
    self.assertLen(rewards, 101)
    self.assertEqual((rewards[-1], metrics['moves'], metrics['solved']), (-1.0, 100.0, 0.0))
    self.assertEqual((sum(rewards), metrics['return']), (total, total))

  def test_walls_by_hand(self):
    squares = {(1, 1): 'lud', (1, 3): 'u', (1, 2): 'ud', (3, 3): 'lr', (5, 3): 'ld', (5, 9): 'rd'}
    self.assertEqual({square: env.walls(square) for square in squares}, squares)
    game = env.Maze(Task('t'), 'partly')
    self.assertEqual(game.reset(seed=0), ('lud', {}))
    self.assertEqual(game.step('right')[0], 'ud')

  def test_scale_changes_no_return(self):
    game = env.Maze(Task('t'), scale=0.05)
    actor = mock.Mock(act=lambda observation: 'up')
    rewards, metrics = play(game, actor, 0)
    self.assertAlmostEqual(sum(rewards), -101 * 0.05)
    self.assertEqual(metrics['return'], -101)

  def test_unknown_view_is_an_error(self):
    with self.assertRaisesRegex(ValueError, "observed='half': give fully or partly"):
      env.Maze(Task('t'), observed='half')

  def test_tasks_cover_all_starts(self):
    for split, number in (('train', 4000), ('dev', 25)):
      tasks = env.load(split)
      self.assertLen(tasks, number)
      starts = [task.seed % len(env.STARTS) for task in tasks]
      counts = np.bincount(starts)
      self.assertEqual(counts.tolist(), [number / 25] * 25)


class ConfigTest(parameterized.TestCase):

  @parameterized.parameters('', 'partly')
  def test_longest_episode_fits(self, mode):
    config = validation.validate(maze.get_config(mode))
    tokenizer = tokenizer_lib.load_tokenizer(config.model.folder)
    named = components.resolve(config)
    framing = tokenizer_lib.make_framing(tokenizer, named.env.frame, 100)
    views = [env.name_of(square) for square in env.STARTS]
    if mode == 'partly':
      views = [env.walls(square) for square in env.STARTS]
    prompt = max(len(tokenizer_lib.encode_prompt(tokenizer, view)) for view in views)
    turns = [tokenizer.encode(f' {name}\n') for name in env.MOVES]
    seen = max(len(framing.encode(view, turns[0])) for view in views)
    self.assertLessEqual(max(map(len, turns)), config.rollout.max_turn)
    self.assertLessEqual(seen, config.rollout.max_observation)
    self.assertLessEqual(prompt, config.rollout.max_prompt)
    longest = prompt + env.MAX_MOVES * (config.rollout.max_turn + seen) + config.rollout.max_turn
    self.assertLessEqual(longest, config.rollout.max_total)


class CompareTest(absltest.TestCase):

  def test_methods_and_configs_are_valid(self):
    for method, observed in compare.METHODS:
      config = compare.make_config(compare.Job(method, observed, 1e-3, 0))
      validation.validate(config)
      self.assertEqual(objective.make_variant(config).ratio, variants.VARIANTS[method].ratio)

  def test_search_decides_the_rate(self):
    """The runs of the seeds follow those of the search, at the rate with the highest return."""
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'maze.jsonl'
      order = []
      for job in compare.plan(path):
        order.append(job)
        score = -abs(job.lr - compare.RATES[1])
        with path.open('a') as file:
          file.write(json.dumps({'job': vars(job), 'sampled': score}) + '\n')
      own = [job for job in order if (job.method, job.observed) == ('ppo', 'fully')]
      searches = [(rate, compare.SEARCH_SEED) for rate in compare.RATES]
      seeds = [(compare.RATES[1], seed) for seed in compare.SEEDS]
      self.assertEqual([(job.lr, job.seed) for job in own], searches + seeds)
      num_runs = len(compare.METHODS) * (len(searches) + len(seeds))
      self.assertLen(order, len(compare.first_jobs()) + num_runs)
      self.assertEmpty(list(compare.plan(path)))

  def test_processes_share_the_runs_by_method(self):
    path = pathlib.Path('no_such_file')
    whole = list(compare.plan(path))
    first = list(compare.plan(path, ['ppo', 's_ppo']))
    second = list(compare.plan(path, ['st_ppo', 'turn_ppo', 'grpo']))
    shared = compare.first_jobs()
    self.assertCountEqual(first + second, whole + shared)
    self.assertCountEqual(set(first) & set(second), shared)

  @pytest.mark.slow
  def test_run_leaves_its_record(self):
    job = compare.Job('st_ppo', 'partly', 1e-3, 0)
    make_config = compare.make_config

    def make_small_config(job):
      config = make_config(job)
      config.train.updates = 2
      config.train.episodes = 8
      config.train.critic_warmup = 0
      return config

    self.enterContext(tiny_run.on_one_device())
    self.enterContext(mock.patch.object(compare, 'make_config', make_small_config))
    self.enterContext(mock.patch.object(compare, 'SAMPLES', 1))
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'results' / 'maze.jsonl'
      compare.run(job, pathlib.Path(folder) / 'runs', path)
      records = compare.read_records(path)
      self.assertEmpty(list((pathlib.Path(folder) / 'runs').iterdir()))
    record = records[job]
    self.assertBetween(record['sampled'], -401, OPTIMUM)
    self.assertBetween(record['solved'], 0, 1)
    self.assertLen(record['curve'], 2)
    self.assertEqual([step for step, _ in record['greedy']], [0, 2])


if __name__ == '__main__':
  absltest.main()
