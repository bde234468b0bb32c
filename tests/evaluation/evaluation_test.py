"""Evaluation as a job: estimates against brute force, lines, resumption, refusals."""

import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from stppo_jax import types
from stppo_jax.evaluation import estimates
from stppo_jax.evaluation import job
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.evaluation import records
from stppo_jax.evaluation import table
from stppo_jax.monitoring import scores as scores_lib
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.stop_signal import StopSignal
from stppo_jax.types import UserError
from tests.support import tiny_run

NONE = np.zeros(0, np.int32)


def make_episode(task, em, turns=1, f1=None):
  made = [types.Turn(NONE, NONE, NONE) for _ in range(turns)]
  made[-1].reward = em
  return types.Episode(
      task,
      0,
      NONE,
      made,
      metrics={'em': em, 'f1': em if f1 is None else f1},
      core_metrics=('em', 'f1'),
  )


class EstimatesTest(parameterized.TestCase):

  @parameterized.parameters(*((n, c) for n in (1, 2, 5) for c in range(n + 1)))
  def test_pass_estimates_are_shares_of_all_subsets(self, n, passed):
    samples = [i < passed for i in range(n)]
    for k in range(1, n + 1):
      subsets = list(itertools.combinations(samples, k))
      self.assertAlmostEqual(estimates.pass_at_k(n, passed, k), np.mean([*map(any, subsets)]))
      self.assertAlmostEqual(estimates.pass_hat_k(n, passed, k), np.mean([*map(all, subsets)]))

  def test_k_doubles_up_to_n(self):
    for n, expected in ((1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])):
      self.assertEqual(estimates.ks(n), expected)

  def test_groups_by_hand(self):
    a = types.Task('a', dataset='x', hops=1)
    b = types.Task('b', dataset='x', hops=2)
    c = types.Task('c', dataset='y', hops=2)
    samples = {
        'a': [make_episode(a, 1.0), make_episode(a, 0.0, turns=2)],
        'b': [make_episode(b, 1.0, turns=2), make_episode(b, 1.0)],
        'c': [make_episode(c, 0.0), make_episode(c, 0.0, f1=0.5)],
    }
    found = {group.name: group for group in estimates.groups(samples)}
    value = lambda name, metric: found[name].estimates[metric].value
    self.assertEqual(
        list(found),
        ['all', 'mean of the data sets', 'data set x', 'data set y', '1 hop', '2 hops', '1 turn']
        + ['2 turns'],
    )
    self.assertAlmostEqual(value('all', 'em'), (0.5 + 1 + 0) / 3)
    self.assertAlmostEqual(value('all', 'f1'), (0.5 + 1 + 0.25) / 3)
    self.assertAlmostEqual(value('mean of the data sets', 'em'), (0.75 + 0) / 2)
    self.assertAlmostEqual(value('2 hops', 'em'), 0.5)
    self.assertAlmostEqual(value('1 turn', 'em'), (1 + 1 + 0) / 3)
    self.assertAlmostEqual(value('2 turns', 'em'), 1 / 2)
    self.assertEqual((found['2 turns'].questions, found['1 turn'].episodes), (2, 4))
    self.assertAlmostEqual(value('all', 'pass@1'), value('all', 'em'))
    self.assertAlmostEqual(value('all', 'pass@2'), 2 / 3)
    self.assertAlmostEqual(value('all', 'pass^2'), 1 / 3)
    self.assertNotIn('pass@2', found['1 turn'].estimates)
    em = found['all'].estimates['em']
    # Within x the mean is .5, .75 or 1, and y is always 0: over all 1/3, 1/2 or 2/3.
    self.assertAlmostEqual(em.low, 1 / 3)
    self.assertAlmostEqual(em.high, 2 / 3)

  def test_the_mean_of_the_data_sets_by_hand(self):
    tasks = [types.Task(name, dataset=dataset) for name, dataset in zip('abcd', 'xxxy')]
    episodes = [make_episode(*of) for of in zip(tasks, (1.0, 0.0, 1.0, 0.25))]
    scores = scores_lib.scores(episodes)
    self.assertAlmostEqual(scores['val-core/all/em'], 2.25 / 4)
    self.assertAlmostEqual(scores['val-core/x/em'], 2 / 3)
    for name in ('em', 'f1', 'score'):
      self.assertAlmostEqual(scores[f'val-core/macro/{name}'], (2 / 3 + 1 / 4) / 2)
    row = estimates.groups({task.id: [x] for task, x in zip(tasks, episodes)})[1]
    self.assertEqual(row.name, 'mean of the data sets')
    self.assertAlmostEqual(row.estimates['em'].value, scores['val-core/macro/em'])
    # y is one question. The mean of x is 0, 1/3, 2/3 or 1: all three wrong once in 27 resamplings.
    self.assertAlmostEqual(row.estimates['em'].low, (0 + 1 / 4) / 2)
    self.assertAlmostEqual(row.estimates['em'].high, (1 + 1 / 4) / 2)
    of_one = scores_lib.scores(episodes[:3])
    self.assertFalse([name for name in of_one if 'macro' in name])

  def test_interval_of_one_question_per_data_set_has_a_width(self):
    tasks = [types.Task(name, dataset=name) for name in 'abcd']
    samples = {task.id: [make_episode(task, i % 2)] for i, task in enumerate(tasks)}
    for group in estimates.groups(samples)[:2]:  # all, and the mean of the data sets
      em = group.estimates['em']
      self.assertEqual((em.value, em.low, em.high), (0.5, 0.0, 1.0))

  def test_questions_have_equal_weight_whatever_their_samples(self):
    tasks = [types.Task(name) for name in 'ab']
    samples = {'a': [make_episode(tasks[0], 1.0)] * 3, 'b': [make_episode(tasks[1], 0.0)]}
    whole, by_turns = estimates.groups(samples)
    self.assertEqual(whole.estimates['em'].value, 0.5)
    self.assertEqual(by_turns.estimates['em'].value, 0.5)

  def test_core_metrics_of_all_episodes(self):
    second = make_episode(types.Task('b'), 1.0)
    second.core_metrics, second.metrics = ('won',), {'won': 1.0}
    whole = estimates.groups({'a': [make_episode(types.Task('a'), 1.0)], 'b': [second]})[0]
    self.assertEqual([whole.estimates[name].value for name in ('em', 'won')], [0.5, 0.5])

  def test_sample_passes_with_score_1(self):
    scores = (0.99, 1.0, sum([0.1] * 10), 2.0)  # the third is 1 but for rounding
    samples = {'a': [make_episode(types.Task('a'), score) for score in scores]}
    self.assertEqual(estimates.groups(samples)[0].estimates['pass@1'].value, 0.75)

  def test_table_has_a_second_part_for_passes(self):
    task = types.Task('a')
    greedy = table.text('T', estimates.groups({'a': [make_episode(task, 1.0)]}), 'R')
    self.assertIn('| all', greedy)
    self.assertNotIn('pass@', greedy)
    again = [make_episode(task, 1.0), make_episode(task, 0.0)]
    sampled = table.text('T', estimates.groups({'a': again}), 'R')
    self.assertIn('pass^2', sampled)
    self.assertIn(' .500 |', sampled)  # one question has no interval
    two = {'a': again, 'b': [make_episode(types.Task('b'), 1.0)] * 2}
    self.assertIn('.750 [.500, 1.000]', table.text('T', estimates.groups(two), 'R'))
    lines = [line for line in sampled.splitlines() if line.startswith('|')]
    self.assertLen({line.count('|') for line in lines[:3]}, 1)

  def test_table_of_groups_with_different_samples(self):
    samples = lambda n: {'a': [make_episode(types.Task('a'), 1.0) for _ in range(n)]}
    of_roles = [*estimates.groups(samples(3)), *estimates.groups(samples(4))]
    last = table.text('T', of_roles, 'R').split('\n\n')[-2].splitlines()
    names = ' '.join(f'pass{sign}{k}' for sign in '@^' for k in (1, 2, 3, 4))
    self.assertEqual(last[0].replace('|', '').split(), ['questions', 'episodes', *names.split()])
    self.assertEqual([line.count('1.000') for line in last[2:]], [6, 6])
    self.assertLen({line.count('|') for line in last}, 1)


class JobTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.enterClassContext(tiny_run.on_one_device())

  def config(self, **values):
    # 5 questions, and batches of 4 rows, with environments that are stepped in turn.
    fixed = {'train__updates': 0, 'eval__rows': 1, 'rollout__threads': 0}
    return tiny_run.make_config(**fixed, **values)

  def workdir(self):
    return self.enterContext(tempfile.TemporaryDirectory())

  def lines(self, folder):
    return pathlib.Path(folder, 'episodes.jsonl').read_bytes()

  def test_stopped_job_continues_with_the_same_episodes(self):
    config = self.config(eval__samples=3)
    whole = job.evaluate(config, self.workdir())
    expected = self.lines(whole.folder)
    self.assertLen(expected.splitlines(), 15)
    self.assertGreater(len({json.loads(x)['turns'][0]['agent'] for x in expected.splitlines()}), 1)
    workdir, polls = self.workdir(), itertools.count()
    stopped = job.evaluate(config, workdir, StopSignal(lambda: next(polls) > 12))
    self.assertIsNone(stopped)
    (folder,) = pathlib.Path(workdir, 'eval').iterdir()
    left = self.lines(folder)
    self.assertBetween(len(left.splitlines()), 4, 11)
    # As kill -9 may leave it: within a batch, and within a line.
    (folder / 'episodes.jsonl').write_bytes(left[: left.rindex(b'"turns"')])
    resumed = job.evaluate(config, workdir)
    self.assertEqual(self.lines(resumed.folder), expected)
    self.assertEqual(resumed.scores, whole.scores)
    self.assertEqual(resumed.table, whole.table)
    with mock.patch.object(agent_lib.Agent, 'play', side_effect=AssertionError('played')):
      self.assertEqual(job.evaluate(config, workdir).table, whole.table)
    saved = json.loads(pathlib.Path(resumed.folder, 'results.json').read_text())
    self.assertEqual(saved['scores'], dict(whole.scores))
    self.assertEqual(saved['groups'][0]['name'], 'all')

  def test_lines_give_the_scores_of_the_episodes(self):
    played, play = [], agent_lib.Agent.play
    record = lambda *args, **kwargs: played.extend(play(*args, **kwargs)) or played[-len(args[2]) :]
    with mock.patch.object(agent_lib.Agent, 'play', record):
      results = job.evaluate(self.config(), self.workdir())
    self.assertEqual(results.scores, scores_lib.scores(played))
    self.assertEqual(results.groups[0].estimates['em'].value, results.scores['val-core/all/em'])
    lines = [json.loads(line) for line in self.lines(results.folder).splitlines()]
    self.assertEqual([line['task'] for line in lines], [episode.task.id for episode in played])
    for line, episode in zip(lines, played):
      self.assertLen(line['turns'], len(episode.turns))
      for turn in line['turns'][:-1]:
        self.assertRegex(turn['observation'], '^(<information>|Invalid)')

  def test_other_settings_are_refused(self):
    folder = os.path.join(self.workdir(), 'mine')
    job.evaluate(self.config(eval__folder=folder), self.workdir())
    with self.assertRaisesRegex(
        UserError, r'settings\.env\.max_searches \(2 there, 1 here\)[^\n]*$'
    ):
      job.evaluate(self.config(eval__folder=folder, env__max_searches=1), self.workdir())
    with self.assertRaisesRegex(UserError, r'samples \(1 there, 2 here\)'):
      job.evaluate(self.config(eval__folder=folder, eval__samples=2), self.workdir())
    knowledge = os.path.join(self.workdir(), 'knowledge')
    shutil.copytree(os.path.join(tiny_run.shared_folder(), 'knowledge'), knowledge)
    path = pathlib.Path(knowledge, 'qa.jsonl')
    path.write_text(path.read_text().replace('Which colour', 'What colour'))
    with self.assertRaisesRegex(UserError, r"questions \('\w+' there, '\w+' here\)"):
      job.evaluate(self.config(eval__folder=folder, data__source=knowledge), self.workdir())

  def test_broken_line_is_named(self):
    folder = records.EvaluationFolder(self.workdir(), {}, [])
    with folder.opened():
      pathlib.Path(folder.path, 'episodes.jsonl').write_text('{"task": 3}\n')
      with self.assertRaisesRegex(UserError, r'episodes\.jsonl:1: not a line of this evaluation'):
        folder.episodes()

  def test_questions_of_one_id_are_refused(self):
    tasks = [types.Task('a', seed=0), types.Task('b'), types.Task('a', seed=1)]
    with mock.patch.object(job.players, 'LocalPlayer', lambda *unused: mock.Mock(tasks=tasks)):
      with self.assertRaisesRegex(UserError, "2 of the held-out questions have the id 'a'"):
        job.evaluate(self.config(), self.workdir())

  def test_scores_of_tasks_with_different_core_metrics(self):
    first = make_episode(types.Task('a', dataset='x'), 1.0)
    second = make_episode(types.Task('b', dataset='y'), 0.0)
    second.core_metrics = ('won',)
    scores = scores_lib.scores([first, second])
    self.assertIn('val-core/macro/score', scores)
    self.assertNotIn('val-core/macro/won', scores)

  def test_episodes_depend_on_settings_of_programs(self):
    config = self.config()
    tasks = [types.Task('a')]
    digest = policy_lib.depends_on(config, tasks)
    for path, value in (
        ('serve.on_crash', 'zero'),
        ('serve.agent_timeout_s', 1.0),
        ('serve.max_rows', 1),
        ('serve.tool_form', 'llama3'),
        ('env.max_searches', 1),
    ):
      section, name = path.split('.')
      other = self.config(**{f'{section}__{name}': value})
      self.assertNotEqual(policy_lib.depends_on(other, tasks), digest, path)
    for name, value in (('actor__lr', 0.5), ('serve__host', 'a'), ('serve__rows', 1)):
      self.assertEqual(policy_lib.depends_on(self.config(**{name: value}), tasks), digest, name)

  def test_other_settings_of_programs_are_logged(self):
    workdir = self.workdir()
    config = self.config()
    workdir_lib.claim(workdir, dataclasses.asdict(config))
    config.serve.on_crash = 'zero'
    config.serve.rows = 1
    config.train.epochs = 7
    with self.assertLogs(level='WARNING') as logs:
      policy_lib._check_trained(config, workdir)
    self.assertRegex(
        logs.output[0], r"than the run: serve\.on_crash \('mask' there, 'zero' here\)$"
    )

  def test_a_shared_policy_does_not_import_the_environment(self):
    config = self.config(env__kind='no_such_module:Env')
    self.assertEqual(policy_lib._policies(config), ('',))

  def test_each_role_has_lines_and_groups(self):
    tasks = [types.Task(name, hops=0) for name in 'ab']

    class Team:
      description, label, identity, batch, rows_per_episode = 'a team', 'team', {}, 0, 2
      played = 0

      def __init__(self, *unused):
        self.tasks = tasks

      def play(self, rows):
        for row in rows:
          for role in ('first', 'second'):
            Team.played += 1
            episode = make_episode(row.task, float(role == 'first'), turns=1)
            episode.role = role
            yield records.PlayedRow(row, episode, [('said', '')])

    workdir = self.workdir()
    with mock.patch.object(job.players, 'LocalPlayer', Team):
      results = job.evaluate(self.config(), workdir)
      path = pathlib.Path(results.folder, 'episodes.jsonl')
      *kept, _ = path.read_text().splitlines(keepends=True)
      path.write_text(''.join(kept))  # as if it had been killed between two roles
      again = job.evaluate(self.config(), workdir)
    self.assertEqual(Team.played, 4 + 2)
    self.assertEqual(again.table, results.table)
    self.assertLen(path.read_text().splitlines(), 4)
    found = {group.name: group.estimates['em'].value for group in again.groups}
    expected = {'first: all': 1.0, 'first: 1 turn': 1.0, 'second: all': 0.0, 'second: 1 turn': 0.0}
    self.assertEqual(found, expected)
    self.assertEqual(again.scores['val-role/first/em'], 1.0)


if __name__ == '__main__':
  absltest.main()
