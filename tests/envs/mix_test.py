"""Several environments in one run (config.env.mix)."""

import collections
import json
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.algorithms import correction
from stppo_jax.algorithms import filters
from stppo_jax.algorithms import variants
from stppo_jax.assembly import components
from stppo_jax.cli import flags
from stppo_jax.cli import saved_config
from stppo_jax.data import mix as mix_data
from stppo_jax.evaluation import estimates
from stppo_jax.evaluation import job
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import scores as scores_lib
from stppo_jax.rollout import batches
from stppo_jax.rollout import batching
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.text import tokenizer as chat
from stppo_jax.training import loop
from tests.support import metric_meanings
from tests.support import tiny_run

PAY = {'kind': f'{__name__}:Pay', 'weight': 2.0, 'data': 'embedded'}


class Pay:
  """Pays ten times the length of the first turn, and reads the task as it was loaded."""

  stop_strings = ('blue',)
  core_metrics = ('paid',)
  uses_global_random = False
  load_tasks = None  # a task is a seed

  def __init__(self, task):
    assert task.id in (f'train-{task.seed}', f'dev-{task.seed}'), task
    assert task.dataset == 'Pay', task

  def reset(self, seed=None):
    return f'pay {seed}', {}

  def step(self, action):
    paid = 10.0 * len(action)
    return '', paid, True, False, {'metrics': {'paid': paid, 'length': float(len(action))}}


class Pair(Pay):
  roles = ('first', 'second')


class Chatty(Pay):
  frame = 'user'


def make_config(*mix, **values):
  """A tiny run with three questions of search for each one of Pay."""
  config = tiny_run.make_config(
      algorithm__variant='grpo', rollout__group_size=2, eval__episodes=3, eval__every=2
  )
  config.env.mix = mix or ({'kind': 'search', 'share': 3}, PAY)
  return tiny_run.replace(config, values)


def episode(name, score, failed=False, **fields):
  """An episode of one turn of two tokens, with a reward."""
  task = types.MixTask(f'{name}.a', dataset=name, environment=name)
  tokens = np.array([3, 4], np.int32)
  turn = types.Turn(tokens, np.zeros(2, np.float32), reward=score)
  fields = {'group': 0} | fields
  prompt = np.array([1], np.int32)
  return types.Episode(task, prompt=prompt, turns=[turn], failed=failed, **fields)


class RunTest(absltest.TestCase):
  """Two updates at once, and the same two with a stop between them."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.enterClassContext(tiny_run.on_one_device())
    cls.whole, cls.resumed = (
        cls.enterClassContext(tempfile.TemporaryDirectory()) for _ in range(2)
    )
    loop.start(make_config(), cls.whole)
    for updates in (1, 2):
      loop.start(make_config(train__updates=updates), cls.resumed)
    cls.rows = metrics_lib.read_metrics(cls.whole)

  def read(self, workdir, name):
    with open(f'{workdir}/episodes/{name}.jsonl', encoding='utf-8') as file:
      return [json.loads(line) for line in file]

  def test_resume_repeats_tasks_episodes_and_parameters(self):
    for name in ('train_000001', 'train_000002'):
      self.assertEqual(self.read(self.whole, name), self.read(self.resumed, name))
    states = [tiny_run.state_after(make_config(), x, 2) for x in (self.whole, self.resumed)]
    jax.tree.map(np.testing.assert_array_equal, *states)

  def test_each_batch_has_exact_shares(self):
    for n in (1, 2):
      records = self.read(self.whole, f'train_{n:06d}')
      groups = {record['group']: record['environment'] for record in records}
      self.assertEqual(collections.Counter(groups.values()), {'search': 6, 'Pay': 2})

  def test_advantages_are_centred_within_one_environment(self):
    """Scores of Pay are in the tens, so one of another environment in a group would show."""
    by_group = collections.defaultdict(list)
    for n in (1, 2):
      for record in self.read(self.whole, f'train_{n:06d}'):
        by_group[n, record['group']].append(record)
    spread = set()
    for records in by_group.values():
      self.assertLen({record['environment'] for record in records}, 1)
      advantages = [record['advantages'][0] for record in records]
      self.assertAlmostEqual(sum(advantages), 0.0, places=5)
      if advantages[0]:
        spread.add(records[0]['environment'])
    self.assertIn('Pay', spread)

  def test_environments_have_curves_and_scores(self):
    row = self.rows[-1]
    paid = [
        record['score']
        for record in self.read(self.whole, 'train_000002')
        if record['environment'] == 'Pay'
    ]
    self.assertAlmostEqual(row['mix/Pay/score/mean'], np.mean(paid))
    self.assertAlmostEqual(row['paid/mean'], np.mean(paid))  # search never reports it
    shares = [row[f'mix/{name}/token_share'] for name in ('search', 'Pay')]
    self.assertAlmostEqual(sum(shares), 1.0)
    for name in ('val-core/search/em', 'val-core/search.nature/em', 'val-core/Pay/paid'):
      self.assertIn(name, row)
    self.assertNotIn('val-core/search/paid', row)
    self.assertNotIn('val-aux/Pay/searches', row)
    unknown = {name for name in row if not metric_meanings.meaning(name)}
    self.assertEqual(unknown, {'step', 'time'})

  def test_evaluation_has_each_environment(self):
    held_out = self.read(self.whole, 'eval_000002')
    counts = collections.Counter(record['environment'] for record in held_out)
    self.assertEqual(counts, {'search': 3, 'Pay': 3})
    results = job.evaluate(make_config(), self.whole)
    groups = {group.name: group for group in results.groups}
    self.assertContainsSubset(['all', 'environment search', 'environment Pay'], groups)
    paid = self.rows[-1]['val-core/Pay/paid']
    self.assertAlmostEqual(groups['environment Pay'].estimates['paid'].value, paid)
    self.assertEqual([*groups['all'].estimates], ['score'])  # the only score that both have

  def test_replay_repeats_the_run(self):
    with tempfile.TemporaryDirectory() as workdir:
      loop.start(make_config(rollout__replay=f'{self.whole}/episodes'), workdir)
      state = tiny_run.state_after(make_config(), workdir, 2)
    jax.tree.map(
        np.testing.assert_array_equal, state, tiny_run.state_after(make_config(), self.whole, 2)
    )


class StreamTest(absltest.TestCase):

  def make(self, **counts):
    tasks = []
    for name in counts:
      tasks += mix_data.tag(name, [types.Task(str(i), dataset='same') for i in range(7)])
    return mix_data.MixStream(tasks, counts, seed=5)

  def test_every_batch_has_the_counts(self):
    stream = self.make(a=3, b=1)
    for step in range(20):
      names = [task.environment for task in stream.take(step)]
      self.assertEqual(names, ['a', 'a', 'a', 'b'])

  def test_order_depends_on_name_and_seed_alone(self):
    orders = []
    for counts in ({'a': 2}, {'b': 3, 'a': 2}):
      stream = self.make(**counts)
      orders.append([x.id for n in range(9) for x in stream.take(n) if x.environment == 'a'])
    self.assertEqual(*orders)
    others = [x.own.id for n in range(9) for x in self.make(b=2).take(n)]
    self.assertNotEqual(others, [name.partition('.')[2] for name in orders[0]])

  def test_replaced_questions_keep_their_environment(self):
    stream = self.make(a=3, b=3)
    taken = stream.take(0)
    replaced = [taken[i] for i in (4, 0, 5, 1)]
    used = {task.id for task in taken}
    further = stream.further(0, 1, replaced, used)
    self.assertEqual([task.environment for task in further], ['b', 'a', 'b', 'a'])
    self.assertNoCommonElements([task.id for task in further], used)
    self.assertLen({task.id for task in further}, 4)

  def test_equal_tasks_of_two_environments_stay_apart(self):
    first, second = (mix_data.tag(name, [types.Task('x')])[0] for name in ('a', 'b'))
    self.assertEqual((first.id, second.id), ('a.x', 'b.x'))
    self.assertEqual((first.dataset, second.dataset), ('a', 'b'))  # both unnamed
    self.assertEqual(first.own, second.own)


class WeightTest(absltest.TestCase):

  def batch(self, *weights):
    """Rows with two and one tokens of the agent, on-policy."""
    ones = jnp.ones((2, 2))
    zeros = jnp.zeros((2, 2))
    mask = jnp.array([[1.0, 1], [1, 0]])
    row_weights = jnp.array(weights) if weights else None
    return types.TurnBatch(
        tokens=ones.astype(int),
        action_mask=mask,
        turn_ids=mask.astype(int),
        rewards=zeros,
        old_logp=zeros,
        ref_logp=zeros,
        old_values=zeros,
        advantages=jnp.array([[2.0, -1], [4, 0]]),
        returns=zeros,
        group_ids=jnp.arange(2),
        row_weights=row_weights,
    )

  def test_gradient_by_hand(self):
    """Three tokens with the weight 1/3 each: the rows' weights 1 and 3 make it 1/3 and 1."""
    variant = variants.Variant('group_zscore', 'token', kl_in='none', aggregation='token-mean')
    batch = self.batch(1.0, 3.0)
    weights = filters.weights(batch, variant)
    np.testing.assert_allclose(weights.token, [[1 / 3, 1 / 3], [1, 0]], rtol=1e-6)
    np.testing.assert_allclose(weights.value, [[1 / 3, 1 / 3], [1 / 3, 0]], rtol=1e-6)
    logp = jnp.zeros((2, 2))
    to_loss, _, _ = correction.cotangents(logp, batch, variant, weights=weights.policy)
    # d(-J)/dlogp = -weight A, at the ratio 1.
    np.testing.assert_allclose(to_loss, [[-2 / 3, 1 / 3], [-4, 0]], rtol=1e-6)

    def loss(logp):  # the same from its definition
      terms = jnp.exp(logp) * batch.advantages * batch.action_mask
      return -(1.0 * terms[0].sum() + 3.0 * terms[1].sum()) / 3

    np.testing.assert_allclose(to_loss, jax.grad(loss)(logp), rtol=1e-6)

  def test_weights_of_one_change_nothing(self):
    variant = variants.VARIANTS['st_ppo']
    given = filters.weights(self.batch(1.0, 1.0), variant)
    jax.tree.map(np.testing.assert_array_equal, given, filters.weights(self.batch(), variant))

  def test_rows_get_weights_of_their_environment(self):
    config = make_config()
    rows = [episode('Pay', 1.0), episode('search', 0.0)]
    components.mix_rules().weigh(config, rows)
    batch = batching.to_turn_batch(rows, (8,), rows=4)
    np.testing.assert_array_equal(batch.row_weights, [2, 1, 1, 1])
    with self.assertRaisesRegex(types.UserError, "environment 'other', and config.env.mix has"):
      components.mix_rules().weigh(config, [episode('other', 1.0)])


class ScoreTest(absltest.TestCase):

  def test_scores_of_environments_are_apart(self):
    rows = [
        episode('a', 0.0, core_metrics=('won',), metrics={'won': 1.0, 'moves': 4.0}),
        episode('a', 0.0, core_metrics=('won',), metrics={'won': 0.0}),
        episode('b', 5.0, core_metrics=('em',), metrics={'em': 1.0}),
    ]
    got = scores_lib.scores(rows)
    self.assertEqual(got['val-core/a/won'], 0.5)
    self.assertEqual(got['val-core/all/won'], 0.5)  # b has no such score
    self.assertEqual(got['val-aux/all/moves'], 2.0)
    self.assertEqual(got['val-core/b/score'], 5.0)
    self.assertNotIn('val-aux/b/moves', got)
    samples = {str(i): [row] for i, row in enumerate(rows)}
    groups = {group.name: group.questions for group in estimates.groups(samples)}
    self.assertEqual((groups['environment a'], groups['environment b']), (2, 1))

  def test_failing_environment_is_not_hidden(self):
    rows = [episode('a', 1.0) for _ in range(9)] + [episode('b', 0.0, failed=True)]
    self.assertEqual(batches.failed_share(rows), 0.1)
    self.assertEqual(batches.largest_share(batches.failed_share, rows), 1.0)
    rows[0].error = 'a raised'
    rows[-1].error = 'b raised'
    with self.assertRaisesRegex(types.RunError, 'raised in 100% of 1 episodes.*error: b raised'):
      batches.check_environment(rows, 0.5)

  def test_saved_episodes_know_their_environment(self):
    row = types.Episode.from_dict(json.loads(json.dumps(episode('a', 1.0).to_dict())))
    self.assertEqual(row.task.environment, 'a')
    plain = types.Episode(types.Task('x'), 0, np.zeros(0, np.int32), [])
    self.assertNotIn('environment', plain.to_dict())


class TurnTest(absltest.TestCase):

  def test_turns_end_by_their_own_environment(self):
    ends = ((('ab',), False), (('cd', 'x'), True), (('b',), False))
    pieces = [b'a', b'b', b'c', b'd', b'x', b'<think>', b'</think>']
    table = chat.joint_stop_automaton(pieces, ends)
    starts = chat.first_states(ends)
    self.assertEqual(starts, [0, 1, 3])
    stopped = len(table) - 1

    def length(state, text):
      for i, piece in enumerate(text):
        state = table[state, pieces.index(piece)]
        if state == stopped:
          return i + 1
      return 0

    text = [b'c', b'a', b'b', b'x', b'c', b'd']
    self.assertEqual([length(start, text) for start in starts], [3, 4, 3])
    thought = [b'<think>', b'x', b'a', b'</think>', b'c', b'd']
    self.assertEqual([length(start, thought) for start in starts], [0, 6, 0])
    within = starts[1] + chat.THOUGHT_STATE
    self.assertEqual(length(within, thought[1:]), 5)
    for i, end in enumerate(ends):  # as each automaton alone
      alone = chat.stop_automaton(pieces, *end)
      state = starts[i]
      own = 0
      for piece in (*text, *thought):
        own = alone[own, pieces.index(piece)]
        state = table[state, pieces.index(piece)]
        self.assertEqual(own == len(alone) - 1, state == stopped)

  def test_frames_may_differ(self):
    config = make_config({'kind': 'search'}, {'kind': f'{__name__}:Chatty'})
    config.model.folder = 'embedded'
    config.rollout.max_prompt = 512
    config.rollout.max_total = config.train.length_buckets = 700
    config.train.length_buckets = (700,)
    parts = components.resolve(config).load()
    self.assertEqual(parts.env.frames, ('inline', 'user'))
    self.assertIsNotNone(parts.tokenizer.render)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      ('search', 'config.env.mix=.*: must be a tuple of dict'),
      ({'share': 1}, "give 'kind'"),
      ({'kind': 'serch'}, 'serch of config.env.mix: config.env.kind.*did you mean search'),
      ({'kind': 'search', 'shares': 1}, "no setting 'shares'; did you mean share"),
      ({'kind': 'search', 'mix': ()}, "no setting 'mix'"),
      ({'kind': 'search', 'share': 0}, "'share' is 0: a number above 0"),
      ({'kind': 'search', 'share': -1}, "'share' is -1"),
      ({'kind': 'search', 'share': '3'}, "'share' is '3'"),
      ({'kind': 'search', 'share': True}, "'share' is True"),
      ({'kind': 'search', 'share': float('nan')}, "'share' is nan"),
      ({'kind': 'search', 'weight': float('inf')}, "'weight' is inf"),
      ({'kind': 'search', 'share': 2}, 'the 8 questions of a batch.*into 5.33 of search'),
      ({'kind': 'search', 'share': 0.001}, 'into 0.00799 of search'),
      ({'kind': 'search', 'name': 'Pay'}, "2 environments are called 'Pay'"),
      ({'kind': 'search', 'name': 'all'}, "called 'all'"),
      ({'kind': 'search', 'name': 'a.b'}, "called 'a.b'"),
      ({'kind': 'search', 'name': 3}, 'called 3'),
      ({'kind': 'search', 'data': 3}, "'data' is 3"),
      ({'kind': 'search', 'data': {'corpus': 'x'}}, "'data' is {'corpus': 'x'}"),
      ({'kind': 'search', 'max_searches': -1}, 'search of config.env.mix: .*max_searches=-1'),
      ({'kind': 'search', 'options': {1: 2}}, 'search of config.env.mix: config.env.options'),
      ({'kind': 'tools'}, 'tools of config.env.mix: .*needs tools'),
      ({'kind': 'gateway:m:play'}, 'play is an agent program'),
      ({'kind': 'openenv:http://h:80'}, "called '80'"),
      ({'kind': f'{__name__}:Pair'}, 'Pair has first, second, and Pay has one agent'),
      ({'kind': 'search', 'options': {'none': 1}}, "search of config.env.mix: .*'none'"),
      ({'kind': 'search', 'data': 'nowhere.jsonl'}, 'search of config.env.mix: nowhere.jsonl'),
  )
  def test_item_is_refused_in_one_line(self, item, message):
    config = make_config(item, PAY)
    with self.assertRaisesRegex(types.UserError, rf'^[^\n]*({message})[^\n]*$'):
      validation.validate(config)
      _ = components.resolve(config).tasks

  @parameterized.parameters(
      ({'env__kind': 'tools', 'env__tools': ('calculator',)}, 'is one environment, and'),
      (
          {'rollout.allocation': 'dars_et', 'rollout.group_size': 4, 'rollout.first_rows': 3},
          'would move',
      ),
      ({'algorithm__variant': 'dpo'}, "the weights {'search': 1, 'Pay': 2.0}"),
      ({'env__mix': 3}, 'config.env.mix=3'),
  )
  def test_run_is_refused_in_one_line(self, values, message):
    config = make_config(**values)
    with self.assertRaisesRegex(types.UserError, rf'^[^\n]*{message}[^\n]*$'):
      validation.validate(config)
      objective.make_variant(config)

  def test_two_corpora_are_refused(self):
    searches = [
        {'kind': 'search', 'name': name, 'data': source}
        for name, source in (('a', 'embedded'), ('b', make_config().data.source))
    ]
    config = make_config(*searches)
    parts = components.resolve(validation.validate(config))
    with self.assertRaisesRegex(types.UserError, 'a, b search in the passages of different data'):
      _ = parts.retriever
    config.data.corpus = 'embedded'
    self.assertIsNotNone(components.resolve(config).retriever)

  def test_no_environment_may_have_only_long_prompts(self):
    config = make_config({'kind': 'search', 'share': 3, 'prompt': 'search_r1'}, PAY)
    parts = components.resolve(validation.validate(config)).load()
    with self.assertRaisesRegex(types.UserError, 'search of config.env.mix: .*max_prompt=64'):
      parts.check_prompts(parts.tasks)


class CommandTest(absltest.TestCase):

  def test_command_line_takes_a_list(self):
    mix = ({'kind': 'search', 'share': 3}, {'kind': 'm:Game', 'tools': ['calculator']})
    argument = f'--config.env.mix={json.dumps(mix)}'
    self.assertEqual(flags.parse([argument]).overrides, {'env.mix': mix})

  def test_code_in_a_mix_needs_trust(self):
    config = schema.Config()
    config.env.mix = ({'kind': 'search', 'data': 'stranger:load'},)
    names = saved_config.untrusted('runs/x', config, ())
    self.assertStartsWith(names[0], 'env.mix=')
    config.env.mix = ({'kind': 'search', 'share': 2},)
    self.assertEmpty(saved_config.untrusted('runs/x', config, ()))

  def test_files_of_plugins_are_recorded(self):
    digests = components.plugin_digests(make_config())
    self.assertEqual([*digests], ['env.mix[1].env.kind'])


if __name__ == '__main__':
  absltest.main()
