"""Plug-ins that the config names: a user's environment, reward, retriever and questions."""

from concurrent import futures
import os
import random
import sys
import tempfile
import threading
import time
import types as python_types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax import config as schema
from stppo_jax import plugins
from stppo_jax import validation
from stppo_jax.envs import protocol
from stppo_jax.envs import search
from stppo_jax.retrieval import dense
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import prepare
from stppo_jax.rollout import seams
from stppo_jax.training import loop
from stppo_jax.types import Task
from stppo_jax.types import UserError
from tests import dense_test
from tests.support import tiny_run


class Game:
  """A user's environment."""

  stop_strings = ('.',)
  frame = 'user'
  core_metrics = ('won',)

  def __init__(self, task, high, low=1, *, max_turns=9):
    self.settings = task, low, high, max_turns


def own_search(settings, load_corpus):
  """A user's retriever, which returns its top_k and the number of passages."""
  passages = load_corpus()
  return lambda queries, top_k: [(settings.top_k, len(passages), query) for query in queries]


class Bare:
  """An environment whose core metrics only the function that makes it names."""

  def reset(self, seed=None):
    return 'sky', {}

  def step(self, action):
    return '', 0.25, True, False, {'metrics': {'won': 0.5}}


def make_bare(task):
  return Bare()


make_bare.core_metrics = ('won',)

plugin = python_types.ModuleType('a_users_module')
plugin.make_bare = make_bare
plugin.Game = Game
plugin.own_search = own_search
plugin.always_half = lambda task, answer, transcript: 0.5
plugin.number = 3
plugin.load = lambda split: [Task(f'{split}-{i}', 'q', dataset='ab'[i % 2]) for i in range(4)]
plugin.load_nothing = lambda split: []
plugin.load_texts = lambda split: ['q']
plugin.load_letters = lambda split: [Task('t', 'q', answers='red')]
plugin.load_numbers = lambda split: [Task(7, 'q', answers=('red',))]
plugin.load_twice = lambda split: [Task('t', 'q')] * 2
plugin.LetterStops = type('LetterStops', (Game,), {'stop_strings': 'ab'})
plugin.Sideways = type('Sideways', (Game,), {'frame': 'sideways'})
plugin.Taskless = type('Taskless', (), {})
plugin.by_position = lambda task, /, low=1, *, high: (low, high)
plugin.any_number = lambda *tasks, high: (tasks, high)
sys.modules[plugin.__name__] = plugin


def resolve(**values):
  config = schema.Config()
  for path, value in values.items():
    section, name = path.split('__')
    setattr(getattr(config, section), name, value)
  return seams.resolve(validation.validate(config))


class SeamsTest(parameterized.TestCase):

  def test_an_environment_gets_what_its_constructor_names(self):
    kind = resolve(env__kind='a_users_module:Game', env__options={'high': 5}, env__max_turns=3).env
    task = Task('t', 'q')
    self.assertEqual(kind(task, 7).settings, (task, 1, 5, 3))
    self.assertEqual((kind.stop_strings, kind.frame), (('.',), 'user'))
    self.assertEqual(kind.core_metrics, ('won',))

  @parameterized.parameters(('by_position', (1, 5)), ('any_number', (('t',), 5)))
  def test_the_first_argument_alone_is_the_task(self, name, made):
    kind = resolve(env__kind=f'a_users_module:{name}', env__options={'high': 5}).env
    self.assertEqual(kind.make('t', **kind.settings), made)

  def test_what_only_an_instance_has_is_refused(self):
    """The sampler is built before there is an instance, and would not know."""
    for name, value in (('stop_strings', ['!']), ('frame', 'tool'), ('core_metrics', ('lost',))):
      made = type('Made', (Game,), {name: value})
      for game in (made, type('Isolated', (made,), {'uses_global_random': True})):
        make = lambda task, game=game: game(task, 5)
        make.stop_strings, make.frame, make.core_metrics = ('.',), 'user', ('won',)
        with self.assertRaisesRegex(UserError, f'^the environment has {name}=.*set {name} on'):
          protocol.make_kind('m:make', make, {}, {})(Task('t'), 0)
    make = lambda task: type('Video', (Game,), {'frame': 0})(task, 5)
    make.stop_strings, make.frame, make.core_metrics = ['.'], 'user', ['won']
    protocol.make_kind('m:make', make, {}, {})(Task('t'), 0)

  def test_core_metrics_of_the_function_that_makes_an_environment_are_scored(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    tiny_run.write(folder)
    config = tiny_run.make_config(folder)
    config.env.kind, config.retriever.kind = 'a_users_module:make_bare', 'none'
    config.train.updates = 0
    with tiny_run.on_one_device():
      scores = loop.train(config, os.path.join(folder, 'run'))
    self.assertEqual(scores['val-core/all/won'], 0.5)
    self.assertEqual(scores['val-core/all/score'], 0.25)

  def test_options_win_over_what_is_offered(self):
    options = {'high': 5, 'max_turns': 20}
    kind = resolve(env__kind='a_users_module:Game', env__options=options).env
    self.assertEqual(kind.settings['max_turns'], 20)

  def test_the_search_environment_is_one_of_them(self):
    parts = resolve(retriever__top_k=2, env__reward='a_users_module:always_half')
    kind = parts.bind(retriever := object())
    env = kind(Task('t', 'q', ('a',)), 0)
    self.assertIsInstance(env, search.SearchEnv)
    self.assertIs(env.retriever, retriever)
    self.assertEqual((env.top_k, env.max_turns), (2, 4))
    env.reset()
    self.assertEqual(env.step('<answer>a</answer>')[1], 0.5)

  @parameterized.parameters(
      (dict(env__kind='serach'), 'allowed are search, tools, or module:attribute'),
      (dict(env__kind='a_users_module:Gaem'), 'has no .Gaem'),
      (dict(env__kind='no_such_module:Game'), 'cannot import no_such_module'),
      (dict(env__kind='a_users_module:number'), 'a class is needed'),
      (dict(env__kind='a_users_module:Taskless'), 'takes no task'),
      (dict(env__kind='a_users_module:Game'), 'needs high.*env.options.high='),
      (
          dict(env__kind='a_users_module:Game', env__options={'hihg': 1}),
          'options names hihg.*high, low, max_turns',
      ),
      (dict(env__options={'x': 1}), 'options names x'),
      (dict(env__options={'x': object()}), 'numbers, texts, lists and dicts'),
      (dict(env__options={3: 4}), 'names as keys'),
      (
          dict(env__kind='a_users_module:LetterStops', env__options={'high': 1}),
          'stop_strings is .ab.; a tuple',
      ),
      (dict(env__kind='a_users_module:Sideways', env__options={'high': 1}), 'inline, user, tool'),
      (
          dict(
              env__kind='a_users_module:Game',
              env__options={'high': 1},
              env__reward='a_users_module:always_half',
          ),
          'scores by itself',
      ),
      (dict(env__reward='a_users_module:number'), 'a function is needed'),
      (dict(retriever__kind='a_users_module:number'), 'a function is needed'),
      (dict(retriever__kind='hybrid'), 'retriever.encoder=FOLDER'),
      (dict(retriever__kind='none'), 'max_turns=0'),
      (dict(data__source='a_users_module:laod'), 'has no .laod'),
  )
  def test_a_mistake_is_one_line_before_anything_is_loaded(self, values, message):
    with self.assertRaisesRegex(UserError, message) as caught:
      resolve(**values)
    self.assertNotIn('\n', str(caught.exception))

  def test_a_retriever_of_ones_own(self):
    parts = resolve(retriever__kind='a_users_module:own_search', retriever__top_k=7)
    ((top_k, passages, query),) = parts.make_retriever().search(['who?'], 1)
    self.assertEqual((top_k, query), (7, 'who?'))
    self.assertGreater(passages, 100)

  @parameterized.parameters(('dense', dense.DenseRetriever), ('hybrid', dense.HybridRetriever))
  def test_a_run_can_choose_search_by_meaning(self, kind, expected):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    corpus = os.path.join(folder, 'corpus.jsonl')
    tiny_run.write_lines(corpus, [{'id': 'p', 'title': 'Paris', 'text': 'A town.'}])
    retriever = resolve(
        retriever__kind=kind,
        retriever__encoder=dense_test.write_encoder(folder),
        retriever__embeddings=os.path.join(folder, 'vectors'),
        data__corpus=corpus,
    ).make_retriever()
    self.assertIsInstance(retriever, expected)
    self.assertEqual(retriever.search(['paris'], 1)[0][0].id, 'p')
    self.assertLen(os.listdir(os.path.join(folder, 'vectors')), 1)

  def test_none_loads_no_corpus(self):
    parts = resolve(retriever__kind='none', env__max_turns=0, data__corpus='/no/such/file')
    self.assertIsNone(parts.make_retriever())

  def test_questions_of_ones_own(self):
    parts = resolve(data__source='a_users_module:load', data__datasets=('b',))
    self.assertEqual([task.id for task in parts.load_tasks('dev')], ['dev-1', 'dev-3'])

  @parameterized.parameters(
      ('load_nothing', 'no task'),
      ('load_texts', "'q'"),
      ('load_twice', "two tasks with the id 't'"),
      ('load_letters', r"answers='red'.*answers a tuple of texts, as \('red',\)"),
      ('load_numbers', 'id=7.*id and question are texts'),
  )
  def test_questions_that_cannot_be_used(self, name, message):
    with self.assertRaisesRegex(UserError, message):
      resolve(data__source=f'a_users_module:{name}').load_tasks('dev')

  def test_the_names_of_plugins_are_found_for_the_work_folder(self):
    config = schema.Config()
    config.env.kind, config.data.source = 'm:Game', 'embedded'
    self.assertEqual(plugins.named(config), {'env.kind': 'm:Game'})
    config.env.tools = ('calculator', 'm:tool', 'mcp:server')
    self.assertEqual(plugins.named(config), {'env.kind': 'm:Game', 'env.tools[1]': 'm:tool'})


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


class StepAllTest(absltest.TestCase):

  def test_names_that_mean_something_else_are_no_shared_search(self):
    env = GlobalRandomGame()
    env.retriever, env.top_k, env.query = object(), 3, 'the question'
    closed = search.SearchEnv(Task('t', 'q', ('a',)), None, max_turns=0)
    closed.reset()
    outcomes = protocol.step_all([env, closed], ['a', '<answer>a</answer>'])
    self.assertEqual([outcome[1] for outcome in outcomes], [0.0, 1.0])


class SeedsTest(parameterized.TestCase):

  def play(self, make, run_seed, order=range(16)):
    """Returns the draws of 16 environments whose steps are interleaved in an order."""
    keys = episode_lib.row_keys(
        jax.random.key(run_seed), [Task(str(i // 4), 'q') for i in range(16)]
    )
    seeds = episode_lib.episode_seeds(keys)
    envs = [protocol.Isolated(make, seed) for seed in seeds]
    for env, seed in zip(envs, seeds):
      env.reset(seed=seed)
    for _ in range(2):
      for i in order:
        random.random()  # a draw by other code
        envs[i].step('1')
    return [tuple(env.drawn) for env in envs]

  @parameterized.parameters(GlobalRandomGame, UnseededGame)
  def test_each_episode_plays_another_game_and_a_run_repeats_them(self, make):
    games = self.play(make, 0)
    self.assertLen({game[1] for game in games}, 16)
    self.assertLen({game[2:] for game in games}, 16)
    random.seed(99)  # whatever the process did before
    np.random.seed(98)
    self.assertEqual(self.play(make, 0, order=range(15, -1, -1)), games)
    self.assertEmpty(set(self.play(make, 1)) & set(games))

  def test_samples_of_a_seeded_task_play_the_same_instance(self):
    """Also where a game draws from the global random state and ignores its seed."""
    kind = mock.Mock(side_effect=lambda task, seed: protocol.Isolated(UnseededGame, seed))
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
  def test_environments_are_called_at_once_unless_they_use_the_global_state(
      self, num_processes, uses_global_random
  ):
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

    def play(sampler, params, tokenizer, rows, rules):
      del sampler, params, tokenizer
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

  def test_the_process_keeps_its_own_state(self):
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    env = protocol.Isolated(GlobalRandomGame, 5)
    env.reset(seed=3)
    env.step('')
    self.assertEqual((random.random(), np.random.rand()), expected)

  def test_calls_in_threads_do_not_mix_their_states(self):
    class Slow(GlobalRandomGame):

      def step(self, action):
        outcome = super().step(action)
        time.sleep(0.001)  # another thread's turn
        self.drawn.append(random.random())
        return outcome

    def play(threads):
      envs = [protocol.Isolated(Slow, seed) for seed in range(8)]
      with futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
          list(pool.map(lambda env: env.step(''), envs))
      return [env.drawn for env in envs]

    self.assertEqual(play(8), play(1))

  def test_seeds_have_31_bits_and_sampling_keeps_its_keys(self):
    keys = jax.random.split(jax.random.key(0), 1000)
    seeds = episode_lib.episode_seeds(keys)
    self.assertLen(set(seeds), 1000)
    self.assertBetween(min(seeds), 0, 2**31 - 1)
    self.assertBetween(max(seeds), 2**30, 2**31 - 1)

  def test_real_gem_games_differ_within_a_batch(self):
    try:
      from gem.envs.game_env import guess_the_number
    except ImportError:
      self.skipTest('gem-llm is not installed')
    make = lambda: guess_the_number.GuessTheNumberEnv(min_number=1, max_number=10**6)

    def games(run_seed):
      keys = jax.random.split(jax.random.key(run_seed), 16)
      numbers = []
      for seed in episode_lib.episode_seeds(keys):
        env = protocol.Isolated(make, seed)
        env.reset(seed=seed)
        numbers.append(env.game_number)
      return numbers

    self.assertLen(set(games(0)), 16)
    self.assertEqual(games(0), games(0))
    self.assertNotEqual(games(0), games(1))


if __name__ == '__main__':
  absltest.main()
