"""Environments with several roles: turns, contexts, rewards, baselines, metrics and resumption."""

import dataclasses
import json
import os
import tempfile
from unittest import mock

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import variants
from stppo_jax.atif import reader as atif_reader
from stppo_jax.atif import writer as atif_writer
from stppo_jax.envs import factory
from stppo_jax.evaluation import chat as chat_lib
from stppo_jax.evaluation import job
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.models import convert
from stppo_jax.monitoring import charts
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import report
from stppo_jax.monitoring import scores as evaluation
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import batching
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.rollout import saved
from stppo_jax.text import tokenizer as chat
from stppo_jax.training import checkpoint
from stppo_jax.training import loop
from stppo_jax.training import minibatches
from tests.rollout import episode_test
from tests.support import tiny_run

ROLES = ('asker', 'answerer')
ENV = factory.EnvFactory(None, {}, roles=ROLES)
# Who moves first and what it reads; then, after each turn, the outcome.
FIRST = ('where', {'role': 'asker'})
SCRIPT = (
    ('the river', 0.5, False, False, {'role': 'answerer', 'action': 'ask'}),
    ('Paris is', 0.25, False, False, {'role': 'asker', 'rewards': {'asker': 2.0}}),
    (
        '',
        1.0,
        True,
        False,
        {
            'rewards': {'asker': 10.0, 'answerer': -1.0},
            'metrics': {'moves': 3.0, 'won': 0.5},
            'role_metrics': {'asker': {'won': 1.0}},
        },
    ),
)
ALONE = (*SCRIPT[0][:4], {'role': 'asker'}), ('', 1.0, True, False, {})  # the other never moves


class ScriptedEnv:
  """Returns a list of outcomes whatever the agents do, and records their texts."""

  def __init__(self, first, outcomes):
    self.first, self.outcomes, self.heard = first, list(outcomes), []

  def reset(self, seed=None):
    return self.first

  def step(self, action):
    self.heard.append(action)
    return self.outcomes[len(self.heard) - 1]


def play(scripts, roles=ROLES, first=FIRST, groups=None, threads=0, limits=episode_test.LIMITS):
  envs = [ScriptedEnv(first, script) for script in scripts]
  tasks = [types.Task(id=str(i)) for i in range(len(envs))]
  groups = range(len(envs)) if groups is None else groups
  keys = episode_lib.row_keys(jax.random.key(0), tasks)
  env = factory.EnvFactory(None, {}, roles=roles, core_metrics=('won',))
  episodes, _ = episode_lib.play(
      episode_test.make_sampler(),
      episode_test.make_params(),
      episode_test.make_tokenizer(),
      episode_lib.EpisodeInputs(envs, tasks, groups, keys),
      episode_lib.EpisodeRules(env, limits, threads=threads),
  )
  return episodes, envs


def content(episode):
  """What an episode is, for comparisons bit for bit."""
  rows = [row.tolist() for row in episode.unroll()]
  return rows, [turn.reward for turn in episode.turns], episode.metrics, episode.truncated


class PlayTest(parameterized.TestCase):

  def test_by_hand(self):
    (asker, answerer), (env,) = play([SCRIPT])
    encode = episode_test.make_tokenizer().encode
    self.assertEqual([asker.role, answerer.role], list(ROLES))
    self.assertEqual(
        [asker.prompt.tolist(), answerer.prompt.tolist()], [encode('where'), encode('the river')]
    )
    self.assertLen(asker.turns, 2)
    self.assertLen(answerer.turns, 1)
    read = chat.encode_observation(episode_test.make_tokenizer(), 'Paris is', 20)
    self.assertEqual(asker.turns[0].observation.tolist(), read)
    self.assertEmpty(asker.turns[1].observation)
    self.assertEmpty(answerer.turns[0].observation)
    # 0.5 of its own turn and 2 given after the answerer's; 1 and 10 at the end. 0.25 and -1.
    self.assertEqual([turn.reward for turn in asker.turns], [2.5, 11.0])
    self.assertEqual([turn.reward for turn in answerer.turns], [-0.75])
    self.assertEqual(asker.metrics, {'moves': 3.0, 'won': 1.0})
    self.assertEqual(answerer.metrics, {'moves': 3.0, 'won': 0.5})
    self.assertEqual([turn.action for turn in asker.turns], ['ask', 'other'])
    said = [asker.turns[0], answerer.turns[0], asker.turns[1]]
    decode = lambda turn: episode_test.make_tokenizer().decode(turn.tokens)
    self.assertEqual(env.heard, [decode(turn).removesuffix('<|im_end|>') for turn in said])

  def test_batch_has_a_row_per_role(self):
    (asker, answerer), _ = play([SCRIPT])
    batch = batching.to_turn_batch([asker, answerer], (96,), rows=3)
    np.testing.assert_array_equal(batch.roles['asker'], [1, 0, 0])
    np.testing.assert_array_equal(batch.roles['answerer'], [0, 1, 0])
    np.testing.assert_allclose(batch.rewards.sum(axis=1), [13.5, -0.75, 0])
    self.assertEqual(np.asarray(batch.turn_ids).max(axis=1).tolist(), [2, 1, 0])
    self.assertLen(set(np.asarray(batch.group_ids).tolist()), 3)
    said = lambda episode: sum(len(turn.tokens) for turn in episode.turns)
    np.testing.assert_array_equal(batch.action_mask.sum(axis=1), [said(asker), said(answerer), 0])

  def test_records_give_the_rows_back(self):
    episodes, _ = play([SCRIPT, ALONE])
    self.assertEqual([episode.group for episode in episodes], [0, 1, 2, 3])
    self.assertEqual([episode.number for episode in episodes], [0, 0, 1, 1])
    tokenizer, folder = episode_test.make_tokenizer(), self.enterContext(
        tempfile.TemporaryDirectory()
    )
    path = lambda *names: os.path.join(folder, *names)
    sampled = batching.Sampled(1, 0, episodes, {})
    records = episodes_lib.batch_records(sampled, tokenizer, 1)
    episodes_lib.write_lines(saved.path_of(path('episodes'), 1), records)
    atif_writer.write_folder(path('episodes'), path('atif'), tokenizer, 'tiny', 'hermes')
    atif_reader.read_folder(path('atif'), path('in'), atif_reader.AtifReader(tokenizer), 2)
    for source in ('episodes', 'in'):  # as a run writes them, and by way of ATIF
      again = saved.read(saved.path_of(path(source), 1), tokenizer).episodes
      for one, other in zip(episodes, again, strict=True):
        self.assertEqual(content(one), content(other))
        for name in ('role', 'number', 'group', 'absent'):
          self.assertEqual(getattr(one, name), getattr(other, name), name)

  def test_no_role_reads_what_another_read(self):
    """The sampler's log-probs are those of a model that sees the role's own row alone."""
    episodes, _ = play([SCRIPT] * 5)
    batch = batching.to_turn_batch(episodes, (96,))
    logp, _ = episode_test.plain_forward(episode_test.make_params(), batch.tokens, 1.0)
    mask = np.asarray(batch.action_mask)
    np.testing.assert_allclose(logp * mask, batch.behaviour_logp, atol=1e-5)

  def test_roles_read_independently(self):
    secret = ('a secret', *SCRIPT[0][1:])
    (asker, answerer), _ = play([SCRIPT])
    (asker2, answerer2), _ = play([(secret, *SCRIPT[1:])])
    self.assertEqual(content(asker), content(asker2))
    self.assertNotEqual(answerer.prompt.tolist(), answerer2.prompt.tolist())

  @parameterized.parameters(0, 3)
  def test_an_episode_depends_on_its_own_key_alone(self, threads):
    """Seven environments of two roles over four slots: two are in play at once."""
    scripts = [SCRIPT, SCRIPT[:1] + (ALONE[1],), SCRIPT, ALONE, SCRIPT, SCRIPT, ALONE]
    together, _ = play(scripts, threads=threads)
    self.assertEqual([episode.number for episode in together[::2]], list(range(7)))
    for i in (0, 3, 6):
      keys = episode_lib.row_keys(jax.random.key(0), [types.Task(id=str(i))])
      envs = [ScriptedEnv(FIRST, scripts[i])]
      alone, _ = episode_lib.play(
          episode_test.make_sampler(),
          episode_test.make_params(),
          episode_test.make_tokenizer(),
          episode_lib.EpisodeInputs(envs, [types.Task(id=str(i))], [i], keys),
          episode_lib.EpisodeRules(ENV, episode_test.LIMITS),
      )
      for one, other in zip(alone, together[2 * i : 2 * i + 2]):
        self.assertEqual(content(one)[:2], content(other)[:2])
        self.assertEqual(one.role, other.role)

  def test_a_second_role_that_never_moves_changes_nothing(self):
    two, _ = play([ALONE] * 6)
    one, _ = play([ALONE] * 6, roles=())
    self.assertEqual(list(map(content, two[::2])), list(map(content, one)))
    self.assertTrue(all(episode.absent and not episode.failed for episode in two[1::2]))
    self.assertFalse(any(episode.absent for episode in one))

  def test_roles_sample_with_parameters_of_their_own(self):
    """Seven environments over two groups of two slots, one group per role."""
    params = [
        episode_test.make_params(),
        jax.tree.map(lambda x: 0.9 * x, episode_test.make_params()),
    ]
    sizes = sampling.Sizes(
        96, rows=4, width=2, prefill_rows=1, slot_buckets=(96,), chunk_buckets=(8,), steps=4
    )
    tokenizer = episode_test.make_tokenizer()
    table = chat.stop_automaton(tokenizer.token_bytes, ('s>', 'an'))
    sampler = sampler_lib.Sampler(episode_test.make_config(), table, tokenizer.eos_ids, sizes)

    def play_with(params):
      tasks = [types.Task(id=str(i)) for i in range(7)]
      keys = episode_lib.row_keys(jax.random.key(0), tasks)
      rows = episode_lib.EpisodeInputs(
          [ScriptedEnv(FIRST, SCRIPT) for _ in tasks], tasks, range(7), keys
      )
      rules = episode_lib.EpisodeRules(ENV, episode_test.LIMITS)
      return episode_lib.play(sampler, params, tokenizer, rows, rules)[0]

    episodes = play_with(params)
    for role, of_role in enumerate(params):
      batch = batching.to_turn_batch(episodes[role::2], (96,))
      logp, _ = episode_test.plain_forward(of_role, batch.tokens, 1.0)
      np.testing.assert_allclose(logp * batch.action_mask, batch.behaviour_logp, atol=1e-5)
    shared, equal = play_with(params[0]), play_with([params[0], params[0]])
    self.assertEqual(list(map(content, shared)), list(map(content, equal)))
    self.assertEqual(list(map(content, shared[::2]))[0][0][0][:5], content(episodes[0])[0][0][:5])

  def test_limit_of_one_role_ends_episode(self):
    limits = dataclasses.replace(episode_test.LIMITS, max_total_tokens=30, max_prompt_tokens=20)
    again = ('x y z ' * 4, 0.0, False, False, {'role': 'answerer'})
    (asker, answerer), env = play([[again] * 9], first=('a', {'role': 'answerer'}), limits=limits)
    self.assertTrue(asker.truncated and answerer.truncated)
    self.assertTrue(asker.absent)
    self.assertLess(len(env[0].heard), 9)

  def test_overlong_second_prompt_is_counted(self):
    long = ('the capital of France ' * 20, *SCRIPT[0][1:])
    (asker, answerer), _ = play([[long]])
    self.assertEqual(answerer.counts['prompt_too_long'], 1)
    self.assertTrue(answerer.failed and answerer.truncated and asker.truncated)
    self.assertFalse(asker.failed)

  def test_a_reward_before_the_first_turn_is_told(self):
    early = ('go on', 0.0, False, False, {'role': 'asker', 'rewards': {'answerer': 1.0}})
    with mock.patch.object(logging, 'log_first_n') as told:  # once per process
      (_, answerer), _ = play([[early, *ALONE[1:]]])
    told.assert_called_once_with(logging.WARNING, mock.ANY, 1, 'answerer')
    self.assertTrue(answerer.absent)

  @parameterized.parameters(
      (({'role': 'nobody'},), 'for the one that moves next'),
      (({},), 'asker, answerer'),
      (({'role': 'asker', 'rewards': {'jury': 1.0}},), "'jury'"),
  )
  def test_a_name_that_is_no_role_is_refused(self, infos, message):
    script = [('x', 0.0, False, False, info) for info in infos]
    with self.assertRaisesRegex(types.UserError, message):
      play([script])


class KindTest(parameterized.TestCase):

  @parameterized.parameters(('a',), ('a', 'a'), ('a', 'b/c'))
  def test_roles_that_metrics_cannot_name_are_refused(self, *roles):
    env = type('Env', (ScriptedEnv,), {'roles': roles, '__init__': lambda self, task: None})
    with self.assertRaisesRegex(types.UserError, 'two or more different names'):
      factory.make_factory('m:Env', env, {}, {})

  def test_another_package_s_attribute_is_no_role(self):
    env = type('Env', (), {'__init__': lambda self, task: setattr(self, 'roles', {'user': 1})})
    kind = factory.make_factory('m:Env', env, {}, {})
    kind(types.Task(id='a'), 0)
    self.assertEqual((kind.roles, kind.rows_per_episode), ((), 1))


def make_episode(role, score, group, length=2, number=0, **fields):
  turn = types.Turn(
      np.arange(1, length + 1), np.zeros(length), np.zeros((0,), np.int32), 'move', score
  )
  absent = fields.pop('absent', False)
  return types.Episode(
      types.Task(id='a'),
      group,
      np.zeros((0,), np.int32) if absent else np.array([5], np.int32),
      [] if absent else [turn],
      role=role,
      number=number,
      **fields,
  )


class BaselineTest(absltest.TestCase):
  """Two samples of one question. The asker has 1 and 0, the answerer 10 and 30."""

  def setUp(self):
    super().setUp()
    scores = [('asker', 1.0), ('answerer', 10.0), ('asker', 0.0), ('answerer', 30.0)]
    self.episodes = [make_episode(role, x, ROLES.index(role)) for role, x in scores]
    self.batch = batching.to_turn_batch(self.episodes, (4,))

  def test_groups_are_of_a_question_and_a_role(self):
    got = advantages.estimate(self.batch, variants.VARIANTS['rloo']).advantages
    # Less the mean of the others of the same role: 1 - 0, 10 - 30, 0 - 1, 30 - 10.
    np.testing.assert_allclose(got[:, 1], [1, -20, -1, 20])

  def test_advantages_are_whitened_per_role(self):
    variant = dataclasses.replace(variants.VARIANTS['reinforce'], whiten=True)
    got = np.asarray(advantages.estimate(self.batch, variant).advantages)[:, 1:3]
    # Of the asker's tokens 1 1 0 0: mean 1/2, variance (n - 1) 1/3; and so the answerer's.
    want = 0.5 / np.sqrt(1 / 3)
    np.testing.assert_allclose(got[:, 0], [want, -want, -want, want], rtol=1e-5)

  def test_one_agent_is_as_before(self):
    rows = dataclasses.replace(self.batch, roles={'asker': jnp.ones(4), 'answerer': jnp.zeros(4)})
    none = dataclasses.replace(self.batch, roles=None)
    for whiten_over in ('tokens', 'turns'):
      variant = dataclasses.replace(
          variants.VARIANTS['reinforce'], whiten=True, whiten_over=whiten_over
      )
      one, other = (advantages.estimate(b, variant).advantages for b in (rows, none))
      np.testing.assert_array_equal(one, other)

  def test_a_spread_is_that_of_a_role(self):
    equal = [make_episode('asker', 1.0, 0), make_episode('answerer', 0.0, 1)] * 2
    self.assertFalse(batches_lib.has_spread(equal))
    self.assertTrue(batches_lib.has_spread(self.episodes))

  def test_rounding_is_no_spread(self):
    rewards = [(np.float32(10.1), -10.0), (0.1,)]  # .10000038 and .1
    pair = [make_episode('asker', r[0], 0) for r in rewards]
    for episode, values in zip(pair, rewards):
      turn = episode.turns[0]
      episode.turns = [dataclasses.replace(turn, reward=value) for value in values]
    self.assertNotEqual(np.float32(pair[0].score), np.float32(pair[1].score))
    self.assertFalse(batches_lib.has_spread(pair))


class DealTest(absltest.TestCase):

  def test_a_step_has_whole_episodes(self):
    lengths = [(3, 1), (1, 1), (2, 6), (5, 0)]
    episodes = [
        make_episode(role, 0.0, r, length=max(n, 1), number=i, absent=n == 0)
        for i, pair in enumerate(lengths)
        for r, (role, n) in enumerate(zip(ROLES, pair))
    ]
    ordered = batching.by_length(episodes[::2] + episodes[1::2])
    self.assertEqual([episode.number for episode in ordered], [1, 1, 0, 0, 3, 3, 2, 2])
    self.assertEqual([episode.role for episode in ordered], list(ROLES) * 4)
    bins = minibatches.Bins(2, 1, 2, (8,), 0, None)
    batch, steps = minibatches.to_device(ordered, bins, jax.random.key(0))
    self.assertLen(steps, 2)
    for step in steps:
      numbers = [ordered[row].number for row in step.rows]
      self.assertEqual(numbers[::2], numbers[1::2])
      for rows in batch.roles.values():
        self.assertEqual(rows[step.rows].sum(), 2)
    (absent,) = [row for row, episode in enumerate(ordered) if episode.absent]
    self.assertEqual(batch.action_mask[absent].sum(), 0)


class MetricsTest(absltest.TestCase):

  def test_by_hand(self):
    won = lambda x: {'metrics': {'won': x}, 'core_metrics': ('won',)}
    episodes = [
        make_episode('asker', 1.0, 0, length=3, **won(1.0)),
        make_episode('answerer', -1.0, 1, length=1, **won(0.0)),
        make_episode('asker', 0.5, 0, length=4, **won(0.0)),
        make_episode('answerer', 9.0, 1, absent=True, core_metrics=('won',)),
    ]
    got = episodes_lib.summarize(episodes)
    self.assertAlmostEqual(got['critic/score/mean'], 0.5 / 3)
    want = {
        'role/asker/absent': 0.0,
        'role/answerer/absent': 0.5,
        'role/asker/token_share': 7 / 8,
        'role/answerer/token_share': 1 / 8,
        'role/asker/score/mean': 0.75,
        'role/answerer/score/mean': -1.0,
        'role/asker/won/mean': 0.5,
        'role/asker/agent_tokens/mean': 3.5,
        'role/answerer/agent_turns/mean': 1.0,
    }
    for name, value in want.items():
      self.assertAlmostEqual(got[name], value, msg=name)
    scores = evaluation.scores(episodes)
    self.assertAlmostEqual(scores['val-role/asker/won'], 0.5)
    self.assertAlmostEqual(scores['val-role/answerer/score'], -1.0)
    self.assertAlmostEqual(scores['val-core/all/won'], 1 / 3)


class Duel:
  """Two roles in turn; the first one to say 'red' is paid by the other. For the runs below."""

  roles = ('first', 'second')
  core_metrics = ('won',)
  uses_global_random = False

  def __init__(self, task, max_turns, alone=False):
    self._question, self._max_turns, self._alone = task.question, max_turns, alone

  def reset(self, seed=None):
    """Lets the roles begin in turn."""
    self._turns, self._mover = 0, 0 if self._alone else seed % 2
    return f'{self._question}\n', {'role': self.roles[self._mover]}

  def step(self, action):
    """Ends with the first 'red', or after some turns."""
    mover = self.roles[self._mover]
    self._mover = 0 if self._alone else 1 - self._mover
    other = self.roles[self._mover]
    self._turns += 1
    won, over = 'red' in action, self._turns > self._max_turns
    info = {'role': other, 'action': 'word', 'metrics': {'won': 0.0}}
    if won:
      info['rewards'] = {mover: 1.0} if self._alone else {mover: 1.0, other: -1.0}
      info['role_metrics'] = {mover: {'won': 1.0}}
    return 'no\n', 0.0, won or over, over and not won, info


class RunTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    tiny_run.write(cls.folder)

  def setUp(self):
    super().setUp()
    self.enterContext(tiny_run.on_one_device())
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())

  def config(self, kind='Duel', **values):
    config = tiny_run.make_config(self.folder, env__kind=f'tests.envs.roles_test:{kind}', **values)
    config.retriever.kind, config.log.tensorboard = 'none', False
    config.rollout.threads = 0
    return config

  def train(self, workdir, **values):
    with tiny_run.updates_compiled_ahead():
      scores = loop.start(self.config(**values), workdir)
    return scores, metrics_lib.read_metrics(workdir)

  def restored(self, config, workdir):
    state = tiny_run.load_learners(config).state
    with checkpoint.Checkpoints(workdir) as checkpoints:
      return checkpoints.restore(checkpoints.newest(), state)

  @pytest.mark.slow
  def test_losses_metrics_and_report_are_attributed_to_roles(self):
    scores, rows = self.train(self.workdir)
    last = rows[-1]
    for name in (
        'pg_loss',
        'pg_clipfrac',
        'entropy',
        'ppo_kl',
        'vf_loss',
        'score/mean',
        'advantages/mean',
        'values/mean',
        'returns/mean',
        'token_share',
        'won/mean',
    ):
      for role in Duel.roles:
        self.assertIn(f'role/{role}/{name}', last)
    parts = [last[f'role/{role}/pg_loss'] for role in Duel.roles]
    self.assertAlmostEqual(sum(parts), last['actor/pg_loss'], places=5)
    self.assertGreater(abs(parts[0] - parts[1]), 1e-6)
    shares = [last[f'role/{role}/token_share'] for role in Duel.roles]
    self.assertAlmostEqual(sum(shares), 1.0)
    mixed = [share * last[f'role/{role}/entropy'] for share, role in zip(shares, Duel.roles)]
    self.assertAlmostEqual(sum(mixed), last['actor/entropy'], delta=0.05)
    self.assertContainsSubset(['val-role/first/won', 'val-role/second/score'], scores)
    with open(os.path.join(self.workdir, 'episodes', 'train_000002.jsonl'), encoding='utf-8') as f:
      records = [json.loads(line) for line in f]
    self.assertEqual({record['role'] for record in records}, set(Duel.roles))
    for record in records:
      self.assertLen(record['advantages'], sum(turn > 0 for turn in record['turn_ids']))
    with open(report.build(self.workdir), encoding='utf-8') as file:
      page = file.read()
    self.assertIn('role first', page)
    for chart in charts.CHARTS:
      if chart['section'] == 'Roles':
        self.assertIn(chart['title'], page)

  @parameterized.parameters((1, 'own'), (0, 'refilled'))
  @pytest.mark.slow
  def test_killed_and_resumed_equals_straight(self, staleness, how):
    values = {'pipeline__staleness': staleness, 'eval__every': 1}
    values |= {'algorithm__variant': 'grpo', 'rollout__group_size': 2}  # few programs
    values |= (
        {'model__role_parameters': 'own'} if how == 'own' else {'rollout__max_num_gen_batches': 2}
    )
    straight = self.enterContext(tempfile.TemporaryDirectory())
    _, want = self.train(straight, train__updates=2, **values)
    self.train(self.workdir, train__updates=1, **values)
    _, got = self.train(self.workdir, train__updates=2, **values)
    kept = lambda row: {
        k: v for k, v in row.items() if not k.startswith(('tim', 'perf', 'env/replays'))
    }
    self.assertEqual(list(map(kept, got)), list(map(kept, want)))
    replayed = self.enterContext(tempfile.TemporaryDirectory())
    values |= {'rollout__replay': os.path.join(straight, 'episodes'), 'pipeline__staleness': 0}
    _, got = self.train(replayed, train__updates=2, **values)
    learned = lambda row: {k: v for k, v in row.items() if k.startswith(('actor', 'role', 'stppo'))}
    self.assertEqual(list(map(learned, got)), list(map(learned, want)))

  @pytest.mark.slow
  def test_parameters_train_on_own_role_only(self):
    """The second role never moves: the first one's numbers are, bit for bit, those of one agent."""
    values = {'rollout__width': 16, 'rollout__slot_buckets': (192,)}
    values |= {'actor__weight_decay': 0.1, 'critic__weight_decay': 0.1}  # not of one that is absent
    own = {'env__options': {'alone': True}, 'model__role_parameters': 'own'}
    _, two = self.train(self.workdir, **own, **values)
    one_workdir = self.enterContext(tempfile.TemporaryDirectory())
    _, one = self.train(one_workdir, kind='Single', **values)
    for name in ('pg_loss', 'entropy', 'ppo_kl'):
      got, want = ([row[of] for row in rows[1:]] for rows, of in (
          (two, f'role/first/{name}'), (one, f'actor/{name}')
      ))  # fmt: skip
      self.assertEqual(got, want, name)
    # The common metrics are those of the role that moved, and all of them are finite.
    for name in (
        'actor/entropy',
        'critic/rewards/mean',
        'critic/advantages/max',
        'stppo/step_norm',
    ):
      self.assertEqual([row[name] for row in two[1:]], [row[name] for row in one[1:]], name)
    self.assertFalse([row['nonfinite'] for row in two if 'nonfinite' in row])
    self.assertNotIn('role/second/entropy', two[-1])
    self.assertEqual(two[-1]['role/second/absent'], 1.0)
    config = self.config(**own, **values)
    first, second = self.restored(config, self.workdir).values()
    alone = self.restored(self.config(kind='Single', **values), one_workdir)
    chex.assert_trees_all_equal(first.actor, alone.actor)
    chex.assert_trees_all_equal(first.critic, alone.critic)
    begun = tiny_run.load_learners(config).state['second']
    chex.assert_trees_all_equal(second.actor, begun.actor)
    chex.assert_trees_all_equal(second.critic, begun.critic)
    config.serve.role = 'second'
    with tiny_run.reading_policies_alone():
      path = policy_lib.export(config, self.workdir)
      policy = policy_lib.policy(config, self.workdir)
      evaluated = job.evaluate(config, self.workdir).scores
      config.train.updates = 0
      untrained = job.evaluate(config, self.workdir).scores
    self.assertEqual(sorted(os.listdir(path)), sorted(Duel.roles))
    for role, member in zip(Duel.roles, (first, second)):
      chex.assert_trees_all_equal(convert.load_hf(os.path.join(path, role))[1], member.actor)
    chex.assert_trees_all_equal(policy.params, second.actor)
    self.assertEqual({name: two[-1][name] for name in evaluated}, evaluated)
    self.assertEqual({name: two[0][name] for name in untrained}, untrained)
    self.assertIn('role second', policy.description)
    self.assertLen(policy_lib.policy(config, self.workdir, all_policies=True).params, 2)
    config.serve.role = 'third'
    with self.assertRaisesRegex(types.UserError, 'first, second'):
      policy_lib.policy(config, self.workdir)

  def test_own_parameters_need_roles(self):
    with self.assertRaisesRegex(types.UserError, "has one agent and no roles: set it to 'shared'"):
      self.train(self.workdir, kind='Single', model__role_parameters='own')
    with self.assertRaisesRegex(types.UserError, 'one policy plays all roles: leave it empty'):
      self.train(self.workdir, serve__role='first')

  def test_allocation_needs_one_score_per_episode(self):
    with self.assertRaisesRegex(types.UserError, 'each role .* has its own: set it to even'):
      self.train(self.workdir, rollout__allocation='dars_hw', rollout__group_size=8)
    self.assertFalse(os.path.exists(os.path.join(self.workdir, 'config.json')))

  def test_chat_is_with_one_agent(self):
    with self.assertRaisesRegex(types.UserError, '^[^\n]*has several agents'):
      chat_lib.chat(self.config(), None, {}, '', [])

  @pytest.mark.slow
  def test_an_absent_role_changes_nothing_in_training(self):
    """One optimizer step per update: sums over further rows of zeros, up to rounding."""
    values = {'train__mini_batch': 16, 'rollout__width': 16, 'rollout__slot_buckets': (192,)}
    values |= {'algorithm__variant': 'reinforce', 'algorithm__whiten': True, 'train__updates': 1}
    _, two = self.train(self.workdir, env__options={'alone': True}, **values)
    _, one = self.train(self.enterContext(tempfile.TemporaryDirectory()), kind='Single', **values)
    for name in (
        'actor/pg_loss',
        'actor/entropy',
        'stppo/step_norm',
        'critic/score/mean',
        'critic/advantages/max',
        'num_turns/mean',
    ):
      np.testing.assert_allclose(
          [row[name] for row in two[1:]], [row[name] for row in one[1:]], rtol=1e-4, err_msg=name
      )
    self.assertEqual(two[-1]['role/second/absent'], 1.0)


class Single(Duel):
  """The same game of one agent."""

  roles = ()

  def __init__(self, task, max_turns):
    super().__init__(task, max_turns, alone=True)

  def reset(self, seed=None):
    """Starts the game."""
    self._turns, self._mover = 0, 0
    return f'{self._question}\n', {}

  def step(self, action):
    """Pays for 'red'."""
    self._turns += 1
    won, over = 'red' in action, self._turns > self._max_turns
    info = {'action': 'word', 'metrics': {'won': float(won)}}
    return 'no\n', float(won), won or over, over and not won, info


if __name__ == '__main__':
  absltest.main()
