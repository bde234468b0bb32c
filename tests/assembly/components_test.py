"""Components that a config names: a user's environment, reward, retriever and tasks."""

import collections
import contextlib
import functools
import os
import pathlib
import sys
import tempfile
import types as python_types
from unittest import mock

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax import config as schema
from stppo_jax import plugins
from stppo_jax.assembly import agents
from stppo_jax.assembly import components
from stppo_jax.envs import factory
from stppo_jax.envs import search
from stppo_jax.evaluation import job
from stppo_jax.models import sharding
from stppo_jax.retrieval import dense
from stppo_jax.rollout import agent
from stppo_jax.rollout import prepare
from stppo_jax.settings import validation
from stppo_jax.types import Task
from stppo_jax.types import UserError
from tests.retrieval import dense_test
from tests.support import tiny_run

ROOT = pathlib.Path(__file__).parents[2]


class GameWithSeeds:
  load_tasks = None

  def __init__(self, task):
    del task

  def reset(self, seed=None):
    return 'go', {}

  def step(self, action):
    return '', 0.0, True, False, {}


class SamplerTest(absltest.TestCase):

  def test_caches_beyond_the_memory_are_refused(self):
    """Keys and values of 64 rows of 64 tokens, in float32."""
    config = tiny_run.make_config(**{'rollout.max_total': 64, 'rollout.rows': 64})
    parts = components.resolve(config)
    model = prepare.load_shape(config)
    needed = 2 * 64 * 64 * 4 * model.num_layers * model.num_kv_heads * model.head_dim
    with mock.patch.object(sharding, 'memory_of', return_value=needed):
      agents.make_agent(config, parts, model)
    with mock.patch.object(sharding, 'memory_of', return_value=needed - 1):
      with self.assertRaisesRegex(UserError, 'max_total=64.*64 rows.*lower config.rollout.rows'):
        agents.make_agent(config, parts, model)
      config.rollout.engine = 'http://127.0.0.1:1'
      agents.make_agent(config, parts, model)  # the engines' memory is not known here

  def test_rows_follow_the_memory(self):
    config = tiny_run.make_config(**{'rollout.max_total': 64, 'rollout.rows': 0})
    model = prepare.load_shape(config)
    num_episodes = config.train.episodes
    a_row = 2 * 64 * 4 * model.num_layers * model.num_kv_heads * model.head_dim

    def rows(memory, mesh=None):
      sampler = agent.make_sampler(
          config, model, np.zeros((1, 1), np.int32), (0,), mesh, memory=memory
      )
      return sampler.width * sampler.num_groups

    self.assertEqual(rows(4 * num_episodes * a_row), num_episodes)
    self.assertEqual(rows(4 * num_episodes * a_row - 4), num_episodes // 2)
    self.assertEqual(rows(1), 1)
    config.rollout.rows = 7
    self.assertEqual(rows(1), 7)


class OwnTasksTest(absltest.TestCase):

  def test_embedded_data_sets_do_not_choose_among_own_tasks(self):
    config = schema.Config()
    config.env.kind = f'{__name__}:GameWithSeeds'
    config.retriever.kind = 'none'
    for datasets in ((), ('geo', 'elements'), ('GameWithSeeds',)):
      config.data.datasets = datasets
      tasks = components.resolve(config).load_tasks('train')
      self.assertLen(tasks, 10_000)
    config.data.datasets = ('GameWithSeed',)
    with self.assertRaisesRegex(UserError, 'names GameWithSeed: .* has GameWithSeeds'):
      components.resolve(config).load_tasks('train')

  def test_a_function_of_tasks_brings_no_passages(self):
    config = schema.Config()
    config.data.source = f'{__name__}:two_tasks'
    with self.assertRaisesRegex(UserError, 'is a function, which brings no passages.*data.corpus'):
      self.assertIsNone(components.resolve(config).retriever)
    config.data.columns = {'question': 'q', 'answers': 'a'}
    with self.assertRaisesRegex(UserError, 'data.columns=.* is a function: leave'):
      components.resolve(config)


class MaxHopsTest(absltest.TestCase):

  def test_questions_with_more_hops_are_left_out(self):
    config = schema.Config()
    config.data.datasets = ('geo',)
    load = lambda: components.resolve(config).load_tasks('dev')
    count = lambda: collections.Counter(task.hops for task in load())
    everything = count()
    config.data.max_hops = 2
    self.assertEqual(count(), {hops: everything[hops] for hops in (1, 2)})
    self.assertGreater(everything[3], 0)

  def test_unknown_hops_stay_and_nothing_left_is_refused(self):
    config = schema.Config()
    config.data.source = f'{__name__}:two_tasks'
    config.data.max_hops = 1
    tasks = components.resolve(config).load_tasks('train')
    self.assertEqual([task.hops for task in tasks], [0])
    with self.assertRaisesRegex(UserError, "max_hops=1 leaves no question of the split 'dev'"):
      components.resolve(config).load_tasks('dev')


def two_tasks(split):
  unknown = Task('a', 'How many?', ['1'], 'mine', hops=0)
  many = Task('b', 'How often?', ['2'], 'mine', hops=3)
  return [unknown, many] if split == 'train' else [many]


class JaxSettingsTest(parameterized.TestCase):

  @parameterized.parameters(
      ('jax_enable_x64', True),
      ('jax_debug_nans', True),
      ('jax_numpy_dtype_promotion', 'strict'),
      ('jax_numpy_rank_promotion', 'raise'),
      ('jax_transfer_guard', 'disallow'),
  )
  def test_setting_that_ends_a_run_is_named_at_start(self, name, value):
    before = getattr(jax.config, name)
    self.addCleanup(jax.config.update, name, before)
    jax.config.update(name, value)
    with self.assertRaisesRegex(UserError, f'{name}={value!r}, by the variable {name.upper()}'):
      components.resolve(schema.Config())
    jax.config.update(name, before)
    components.resolve(schema.Config())


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
plugin.load_lists = lambda split: [Task('t', 'q', answers=['red'], seed=np.int64(3))]
plugin.Procedural = type(
    'Procedural', (Bare,), {'__init__': lambda self, task: None, 'load_tasks': plugin.load_twice}
)
plugin.truths = []
plugin.note_truth = lambda solution_str, ground_truth: plugin.truths.append(ground_truth) or 1.0
plugin.num_loads = 0


class Quiz(Bare):
  """An environment with its own tasks, some of which have several answers."""

  answers = (('a',), ('a', 'b'))

  def __init__(self, task, reward):
    self.reward = functools.partial(reward, task, '', '')

  @classmethod
  def load_tasks(cls, split):
    plugin.num_loads += 1
    if split == 'test':
      raise KeyError(split)
    tasks = enumerate(cls.answers, start=1)
    return [Task(f'{i}', 'q', names, dataset=f'quiz{i}', hops=i) for i, names in tasks]


plugin.Quiz = Quiz
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
  return components.resolve(validation.validate(config))


class ResolveTest(parameterized.TestCase):

  def test_environment_gets_the_settings_its_constructor_names(self):
    kind = resolve(
        env__kind='a_users_module:Game', env__options={'high': 5}, env__max_searches=3
    ).env
    task = Task('t', 'q')
    self.assertEqual(kind(task, 7).settings, (task, 1, 5, 3))
    self.assertEqual((kind.stop_strings, kind.frame), (('.',), 'user'))
    self.assertEqual(kind.core_metrics, ('won',))

  @parameterized.parameters(('by_position', (1, 5)), ('any_number', (('t',), 5)))
  def test_first_argument_is_the_task(self, name, made):
    kind = resolve(env__kind=f'a_users_module:{name}', env__options={'high': 5}).env
    self.assertEqual(kind.make('t', **kind.settings), made)

  def test_attributes_of_instances_only_are_rejected(self):
    """The sampler is built before there is an instance, and would not know."""
    for name, value in (('stop_strings', ['!']), ('frame', 'tool'), ('core_metrics', ('lost',))):
      made = type('Made', (Game,), {name: value})
      for game in (made, type('Isolated', (made,), {'uses_global_random': True})):
        make = lambda task, game=game: game(task, 5)
        make.stop_strings, make.frame, make.core_metrics = ('.',), 'user', ('won',)
        with self.assertRaisesRegex(UserError, f'^the environment has {name}=.*set {name} on'):
          factory.make_factory('m:make', make, {}, {})(Task('t'), 0)
    make = lambda task: type('Video', (Game,), {'frame': 0})(task, 5)
    make.stop_strings, make.frame, make.core_metrics = ['.'], 'user', ['won']
    factory.make_factory('m:make', make, {}, {})(Task('t'), 0)

  def test_core_metrics_of_a_factory_are_scored(self):
    config = tiny_run.make_config(env__kind='a_users_module:make_bare', train__updates=0)
    config.retriever.kind = 'none'
    with tiny_run.on_one_device():
      scores = job.evaluate(config, self.enterContext(tempfile.TemporaryDirectory())).scores
    self.assertEqual(scores['val-core/all/won'], 0.5)
    self.assertEqual(scores['val-core/all/score'], 0.25)

  def test_several_answers_are_those_of_the_tasks_of_the_run(self):
    """The ground truth is a list if a task that the run plays has several answers."""
    selections = (
        ({}, ['a']),
        ({'data__datasets': ('quiz1',)}, 'a'),
        ({'data__datasets': ('quiz1', 'quiz2'), 'data__max_hops': 2}, ['a']),
        ({'data__max_hops': 1}, 'a'),
        ({'data__train_split': 'test'}, ['a']),
    )
    for values, truth in selections:
      with self.subTest(values=values):
        env = {'env__kind': 'a_users_module:Quiz', 'env__reward': 'a_users_module:note_truth'}
        parts = resolve(**env, **values)
        plugin.num_loads = 0
        task = parts.held_out[0]
        parts.env(task, 0).reward()
        self.assertEqual(plugin.truths[-1], truth)
        parts.env(task, 0).reward()
        self.assertLessEqual(plugin.num_loads, 2)  # once per split

  def test_options_override_settings(self):
    options = {'high': 5, 'max_turns': 20}
    kind = resolve(env__kind='a_users_module:Game', env__options=options).env
    self.assertEqual(kind.settings['max_turns'], 20)

  def test_search_environment_gets_retriever_and_reward(self):
    parts = resolve(retriever__top_k=2, env__reward='a_users_module:always_half')
    kind = parts.bind(retriever := object())
    env = kind(Task('t', 'q', ('a',)), 0)
    self.assertIsInstance(env, search.SearchEnv)
    self.assertIs(env.retriever, retriever)
    self.assertEqual((env.top_k, env.max_searches), (2, 4))
    env.reset()
    self.assertEqual(env.step('<answer>a</answer>')[1], 0.5)

  @parameterized.parameters(
      (dict(env__kind='serach'), 'allowed are search, tools, or module:attribute'),
      (dict(env__kind='a_users_module:Gaem'), 'has no .Gaem'),
      (dict(env__kind='no_such_module:Game'), 'cannot import no_such_module'),
      (dict(env__kind='a_users_module:number'), 'a class is needed'),
      (dict(env__kind='a_users_module:Taskless'), 'first parameter is the task'),
      (dict(env__kind='a_users_module:Game'), "missing a required argument: 'high'"),
      (
          dict(env__kind='a_users_module:Game', env__options={'hihg': 1}),
          r"'hihg'.*missing a required argument: 'high'.*\(task, high, low, max_turns\)",
      ),
      (dict(env__options={'x': 1}), "unexpected keyword argument 'x'"),
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
      (dict(retriever__kind='none'), 'max_searches=0'),
      (dict(data__source='a_users_module:laod'), 'has no .laod'),
  )
  def test_mistake_is_one_line_before_loading(self, values, message):
    with self.assertRaisesRegex(UserError, message) as caught:
      resolve(**values)
    self.assertNotIn('\n', str(caught.exception))

  def test_custom_retriever(self):
    parts = resolve(retriever__kind='a_users_module:own_search', retriever__top_k=7)
    ((top_k, passages, query),) = parts.retriever.search(['who?'], 1)
    self.assertEqual((top_k, query), (7, 'who?'))
    self.assertGreater(passages, 100)

  @absltest.skipUnless(dense_test.HAS_LIBRARY, 'sentence-transformers is not installed')
  @parameterized.parameters(('dense', dense.DenseRetriever), ('hybrid', dense.HybridRetriever))
  def test_dense_and_hybrid_retrievers(self, kind, expected):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    corpus = os.path.join(folder, 'corpus.jsonl')
    tiny_run.write_lines(corpus, [{'id': 'p', 'title': 'Paris', 'text': 'A town.'}])
    retriever = resolve(
        retriever__kind=kind,
        retriever__encoder=dense_test.write_encoder(folder),
        retriever__embeddings=os.path.join(folder, 'vectors'),
        data__corpus=corpus,
    ).retriever
    self.assertIsInstance(retriever, expected)
    self.assertEqual(retriever.search(['paris'], 1)[0][0].id, 'p')
    self.assertLen(os.listdir(os.path.join(folder, 'vectors')), 1)

  def test_retriever_none_loads_no_corpus(self):
    parts = resolve(retriever__kind='none', env__max_searches=0, data__corpus='/no/such/file')
    self.assertIsNone(parts.retriever)
    self.assertEqual(parts.passages_digest, '')

  def test_passages_that_are_read_have_a_digest(self):
    corpus = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), 'corpus.jsonl')
    mix = ({'kind': 'search', 'name': 'a'}, {'kind': 'search', 'name': 'b'})
    digests = []
    for text, values in (('A town.', {}), ('A town.', {'env__mix': mix}), ('A city.', {})):
      tiny_run.write_lines(corpus, [{'id': 'p', 'title': 'Paris', 'text': text}])
      parts = resolve(data__corpus=corpus, **values)
      self.assertIsNotNone(parts.retriever)
      digests.append(parts.passages_digest)
    self.assertEqual(digests[0], digests[1])
    self.assertNotEqual(digests[0], digests[2])

  def test_custom_task_function(self):
    parts = resolve(data__source='a_users_module:load', data__datasets=('b',))
    self.assertEqual([task.id for task in parts.load_tasks('dev')], ['dev-1', 'dev-3'])

  def test_lists_and_numbers_of_numpy_are_accepted(self):
    (task,) = resolve(data__source='a_users_module:load_lists').load_tasks('dev')
    self.assertEqual((task.answers, task.seed), (['red'], 3))

  def test_tasks_of_an_environment_may_share_an_id(self):
    parts = resolve(env__kind='a_users_module:Procedural')
    self.assertLen(parts.load_tasks('train'), 2)
    self.assertLen(parts.held_out, 2)

  @parameterized.parameters(
      ('load_nothing', 'no task'),
      ('load_texts', "'q'"),
      ('load_twice', "field 'id' is 't' a second time"),
      ('load_letters', "field 'answers' is 'red': must be a tuple of str"),
      ('load_numbers', "field 'id' is 7: must be of type str"),
  )
  def test_unusable_tasks_are_rejected(self, name, message):
    with self.assertRaisesRegex(UserError, message):
      resolve(data__source=f'a_users_module:{name}').load_tasks('dev')

  @parameterized.parameters(
      (plugin.load_nothing, 'its load_tasks gives no task'),
      (plugin.load_texts, "'q': a stppo_jax.types.Task is needed"),
      (lambda split: None, r'TypeError: .*not iterable\): a function that takes the split'),
      (lambda self, split: [], "missing 1 required positional argument: 'split'"),
      (lambda split: {}[split], r"KeyError: 'dev'; .*components_test.py:\d+"),
      ([Task('t', 'q')], "'list' object is not callable"),
  )
  def test_unusable_tasks_of_an_environment_are_rejected(self, load, message):
    plugin.Wrong = type('Wrong', (plugin.Procedural,), {'load_tasks': load})
    with self.assertRaisesRegex(UserError, message):
      resolve(env__kind='a_users_module:Wrong').load_tasks('dev')

  def test_a_maker_that_returns_no_retriever_is_refused(self):
    plugin.no_search = lambda settings, load_corpus: None
    with self.assertRaisesRegex(UserError, 'made None: return search'):
      self.assertIsNone(resolve(retriever__kind='a_users_module:no_search').retriever)

  def test_plugin_names(self):
    config = schema.Config()
    config.env.kind, config.data.source = 'm:Game', 'embedded'
    self.assertEqual(components.plugin_names(config), {'env.kind': 'm:Game'})
    config.env.tools = ('calculator', 'm:tool', 'mcp:server')
    self.assertEqual(
        components.plugin_names(config), {'env.kind': 'm:Game', 'env.tools[1]': 'm:tool'}
    )


class ToolsOfEmbeddedModelTest(parameterized.TestCase):

  @parameterized.parameters(
      ('tools', 'embedded', 1), ('search', 'embedded', 0), ('tools', 'calculator', 0)
  )
  def test_model_without_calls_is_named_once(self, kind, model, count):
    config = schema.Config()
    config.env.kind = kind
    config.env.tools = ('calculator',) if kind == 'tools' else ()
    if model != 'embedded':
      config.model.folder = str(ROOT / 'examples' / model / 'model')
      config.rollout.max_total = 192
    with self.assertLogs(level='WARNING') as logs:
      logging.warning('other')
      components.resolve(config).load()
    told = [line for line in logs.output if 'examples/calculator/config.py' in line]
    self.assertLen(told, count)


class PluginsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    sys.path.insert(0, str(self.folder))
    self.addCleanup(sys.path.remove, str(self.folder))

  def module(self, name, text):
    (self.folder / f'{name}.py').write_text(text, encoding='utf-8')
    sys.modules.pop(name, None)
    self.addCleanup(sys.modules.pop, name, None)

  def test_short_name_is_an_entry_of_the_table(self):
    self.assertEqual(plugins.load('env.kind', 'search', {'search': 7}), 7)

  def test_module_and_attribute_are_imported(self):
    self.module('plugged_in', 'class Outer:\n  inner = 3\n')
    self.assertEqual(plugins.load('env.kind', 'plugged_in:Outer.inner', {}), 3)

  @parameterized.parameters(
      ('serch', ['serch', 'did you mean search?', 'module:attribute']),
      ('no_such_module:Env', ['no_such_module', 'ModuleNotFoundError', 'folder that holds it']),
      ('fails:Env', ['fails.py:2', 'ZeroDivisionError']),
      ('at_length:Env', ['at_length.py:1', 'one two']),
      ('a name: of none', ['allowed are search', 'module:attribute']),
      ('fails:', ['allowed are search', 'module:attribute']),
      ('fails:of none', ['allowed are search', 'module:attribute']),
      ('json:no_such_name', ['no_such_name', 'json']),
  )
  def test_other_names_are_rejected_in_one_line(self, name, words):
    self.module('fails', '\n1 / 0\n')
    self.module('at_length', 'raise ValueError("one\\ntwo")\n')
    with self.assertRaises(UserError) as caught:
      plugins.load('env.kind', name, {'search': 7})
    message = str(caught.exception)
    self.assertNotIn('\n', message)
    for word in ['config.env.kind', *words]:
      self.assertIn(word, message)

  def test_digest_changes_with_the_source(self):
    config = schema.Config()
    config.env.kind = 'plugged_in:x'
    self.module('plugged_in', 'x = 1\n')
    first = components.plugin_digests(config)
    self.assertEqual(set(first), {'env.kind'})
    (self.folder / 'plugged_in.py').write_text('x = 2\n', encoding='utf-8')
    self.assertNotEqual(components.plugin_digests(config), first)
    config.env.kind = 'no_such_module:x'
    with self.assertRaisesRegex(UserError, r'^config.env.kind=.no_such_module:x.: cannot import'):
      components.plugin_digests(config)

  def test_file_of_the_same_name_hides_no_plugin(self):
    """It hides a source of questions alone, which is read instead."""
    with contextlib.chdir(self.folder):
      (self.folder / 'plugged_in:x').write_text('', encoding='utf-8')
      config = schema.Config()
      config.env.kind = config.data.source = 'plugged_in:x'
      config.env.tools = ('calculator', 'plugged_in:x')
      self.assertEqual(
          components.plugin_names(config),
          {'env.kind': 'plugged_in:x', 'env.tools[1]': 'plugged_in:x'},
      )

  def test_raised_at_names_the_line_of_the_user(self):
    """Their folder's name begins like that of the package."""
    path = pathlib.Path(plugins.__file__).parent.with_name('stppo_jax_envs') / 'mine.py'
    names = {}
    exec(compile('import json\ndef step():\n  json.loads("{")', path, 'exec'), names)
    try:
      names['step']()
    except ValueError as error:
      self.assertEqual(plugins.raised_at(error), f'{path}:3')
    else:
      self.fail('nothing was raised')


class CallFormTest(absltest.TestCase):

  def test_environment_with_tools_has_its_own_form(self):
    config = schema.Config()
    config.serve.tool_form = 'llama3'
    self.assertEqual(components.call_form(config, None), 'llama3')
    config.env.kind = 'tools'
    self.assertEqual(components.call_form(config, None), 'hermes')  # there is no chat template
    config.env.options = {'form': 'tags'}
    self.assertEqual(components.call_form(config, None), 'tags')


if __name__ == '__main__':
  absltest.main()
