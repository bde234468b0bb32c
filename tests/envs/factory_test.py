"""Environments of a run: their seeds and random states."""

from concurrent import futures
import random
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax import config as schema
from stppo_jax.envs import factory
from stppo_jax.envs import isolation
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import prepare
from stppo_jax.types import Task


class GlobalRandomGame:
  """A GEM-like game that draws from the process's global random state, also in the constructor."""

  def __init__(self):
    self.drawn = [random.random()]

  def reset(self, seed=None):
    if seed is not None:  # as gem.core.Env.reset
      random.seed(seed)
      np.random.seed(seed)
    self.drawn.append((random.randint(1, 10**6), np.random.randint(10**6)))
    return 'guess', {}

  def step(self, action):
    self.drawn.append(random.random())
    return '', 0.0, False, False, {}


class UnseededGame(GlobalRandomGame):
  """A game that ignores the seed."""

  def reset(self, seed=None):
    return super().reset(None)


class SeedsTest(parameterized.TestCase):

  def play(self, make, run_seed, order=range(16)):
    """Returns the draws of 16 environments whose steps are interleaved in an order."""
    keys = episode_lib.row_keys(
        jax.random.key(run_seed), [Task(str(i // 4), 'q') for i in range(16)]
    )
    seeds = episode_lib.episode_seeds(keys)
    envs = [isolation.IsolatedEnv(make, seed) for seed in seeds]
    for env, seed in zip(envs, seeds):
      env.reset(seed=seed)
    for _ in range(2):
      for i in order:
        random.random()  # a draw by other code
        envs[i].step('1')
    return [tuple(env.drawn) for env in envs]

  @parameterized.parameters(GlobalRandomGame, UnseededGame)
  def test_episodes_differ_and_runs_repeat(self, make):
    games = self.play(make, 0)
    self.assertLen({game[1] for game in games}, 16)
    self.assertLen({game[2:] for game in games}, 16)
    random.seed(99)  # whatever the process did before
    np.random.seed(98)
    self.assertEqual(self.play(make, 0, order=range(15, -1, -1)), games)
    self.assertEmpty(set(self.play(make, 1)) & set(games))

  def test_samples_of_a_seeded_task_share_an_instance(self):
    """Also where a game draws from the global random state and ignores its seed."""
    kind = mock.Mock(side_effect=lambda task, seed, _: isolation.IsolatedEnv(UnseededGame, seed))
    agent = mock.Mock(env=kind)
    agent.config = schema.Config()
    tasks = [Task('a', 'q', seed=7)] * 2 + [Task('b', 'q', seed=8), Task('c', 'q'), Task('c', 'q')]
    keys = episode_lib.row_keys(jax.random.key(0), tasks)
    with mock.patch.object(episode_lib, 'play', return_value=([], None)) as play:
      agent_lib.Agent.play(agent, {}, tasks, keys)
    envs = play.call_args.args[3].envs
    for env in envs:
      env.reset(seed=1)
    first, again, other, free, another = [tuple(env.drawn) for env in envs]
    self.assertEqual(first, again)
    self.assertLen({first, other, free, another}, 4)

  @parameterized.product(num_processes=(1, 2), uses_global_random=(True, False))
  def test_isolated_environments_do_not_overlap(self, num_processes, uses_global_random):
    """On several processes too, where the engine has no threads: it must not depend on timing."""
    engine_threads, in_main = [], []
    barrier = threading.Barrier(1 if uses_global_random else 3, timeout=60)

    def called():
      barrier.wait()
      in_main.append(threading.current_thread() is threading.main_thread())

    class Waits:

      def reset(self, seed=None):
        called()
        return 'x', {}

      def step(self, action):
        called()
        return action, 0.0, True, False, {}

    def play(sampler, params, tokenizer, rows, rules, run):
      del sampler, params, tokenizer, run
      engine_threads.append(rules.threads)
      mine = rows.envs[::num_processes]
      seeds = [1] * len(rows.envs)
      openings = rules.map_resets(lambda env, seed: env.reset(seed), rows.envs, seeds)
      self.assertEqual(list(openings), [('x', {})] * len(rows.envs))
      steps = rules.step_envs(mine, list('abc'))
      self.assertEqual([step[0] for step in steps], list('abc'))
      return [], None

    agent = mock.Mock(config=schema.Config())
    agent.env = mock.Mock(side_effect=lambda *_: Waits())
    agent.env.uses_global_random = uses_global_random
    tasks = [Task(name) for name in 'abcdef'[: 3 * num_processes]]
    keys = episode_lib.row_keys(jax.random.key(0), tasks)
    share = lambda mine: [mine, mine][:num_processes]
    with (
        mock.patch.object(jax, 'process_count', lambda: num_processes),
        mock.patch.object(prepare.hosts, 'share', share),
        mock.patch.object(episode_lib, 'play', play),
    ):
      agent_lib.Agent.play(agent, {}, tasks, keys)
    self.assertEqual(in_main, [uses_global_random] * 6)
    self.assertEqual(engine_threads, [agent.config.rollout.threads if num_processes == 1 else 0])

  def test_process_keeps_its_random_state(self):
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    env = isolation.IsolatedEnv(GlobalRandomGame, 5)
    env.reset(seed=3)
    env.step('')
    self.assertEqual((random.random(), np.random.rand()), expected)

  def test_threads_do_not_mix_random_states(self):
    class Slow(GlobalRandomGame):

      def step(self, action):
        outcome = super().step(action)
        time.sleep(0.001)  # another thread's turn
        self.drawn.append(random.random())
        return outcome

    def play(threads):
      envs = [isolation.IsolatedEnv(Slow, seed) for seed in range(8)]
      with futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
          list(pool.map(lambda env: env.step(''), envs))
      return [env.drawn for env in envs]

    self.assertEqual(play(8), play(1))

  def test_seeds_have_31_bits(self):
    keys = jax.random.split(jax.random.key(0), 1000)
    seeds = episode_lib.episode_seeds(keys)
    self.assertLen(set(seeds), 1000)
    self.assertBetween(min(seeds), 0, 2**31 - 1)
    self.assertBetween(max(seeds), 2**30, 2**31 - 1)


class TasksTest(absltest.TestCase):

  def test_tasks_of_an_environment_without_questions_are_seeds(self):
    class Game(GlobalRandomGame):
      load_tasks = None

      def __init__(self, task):
        del task
        super().__init__()

    made = factory.make_factory('mine:Game', Game, {}, {})
    train, dev = made.load_tasks('train'), made.load_tasks('dev')
    self.assertEqual((len(train), len(dev)), (10_000, 256))
    self.assertEqual((train[3].seed, train[3].hops, train[3].dataset), (3, 0, 'Game'))
    self.assertNoCommonElements([task.seed for task in train], [task.seed for task in dev])
    self.assertIsNone(factory.make_factory('mine:Game', UnseededTaskGame, {}, {}).load_tasks)


class UnseededTaskGame(UnseededGame):
  """A game whose tasks are those of the data."""

  def __init__(self, task):
    del task
    super().__init__()


if __name__ == '__main__':
  absltest.main()
