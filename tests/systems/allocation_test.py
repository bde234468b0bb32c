"""DARS: more episodes for hard questions, in a batch of fixed size."""

import collections
import contextlib
import json

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.data import tasks as task_files
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import engine
from stppo_jax.settings import validation
from stppo_jax.systems import dars

ET = dars.Allocation('dars_et', 8, 32)


class RuleTest(parameterized.TestCase):

  @parameterized.parameters(
      # Worked out by hand for N = 8: S is 15/128, 7/32, 3/8, 15/32, and N S is 8 times that.
      ('dars_et', [27, 11, 3, 1, 0, 0, 0]),
      ('dars_hw', [56, 24, 8, 3, 0, 0, 0]),
  )
  def test_by_hand(self, rule, expected):
    scores = [0, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 7 / 8, 1]
    self.assertEqual([dars.wanted_rows(a, 8, rule) for a in scores], expected)

  @parameterized.product(first_rows=(2, 4, 8, 16), rule=('dars_et', 'dars_hw'))
  def test_the_sum_of_advantages_reaches_its_target(self, first_rows, rule):
    """With k of N right, N + dN rows have (N + dN) S, and one row less is short."""
    for right in range(1, first_rows // 2):
      a = right / first_rows
      further = dars.wanted_rows(a, first_rows, rule)
      per_row = np.abs(np.r_[np.full(right, 1 - a), np.full(first_rows - right, -a)]).mean()
      target = first_rows / 2 if rule == 'dars_et' else first_rows * (1 - a)
      self.assertGreaterEqual((first_rows + further) * per_row, target - 1e-9)
      self.assertLess((first_rows + further - 1) * per_row, target)

  def test_scores_out_of_range_are_clipped(self):
    self.assertEqual(dars.wanted_rows(-3.0, 8, 'dars_et'), 27)
    self.assertEqual(dars.wanted_rows(5.0, 8, 'dars_et'), 0)

  def test_excess_demand_is_scaled_by_largest_remainders(self):
    """Wishes 24 (capped), 11, 3, 0 of 20 rows: shares 12.63, 5.79, 1.58, 0."""
    self.assertEqual(ET.extra_rows([0, 1 / 8, 2 / 8, 1], 20), [13, 6, 1, 0])

  def test_remainder_goes_to_the_smallest_groups(self):
    """Wishes 3, 1, 0, 0 leave 4 of 8 rows."""
    self.assertEqual(ET.extra_rows([2 / 8, 3 / 8, 1, 1], 8), [3, 2, 2, 1])
    self.assertEqual(ET.extra_rows([1.0] * 4, 8), [2, 2, 2, 2])

  def test_allocation_fills_the_batch_within_bounds(self):
    rng = np.random.default_rng(0)
    for _ in range(300):
      first, mean = int(rng.integers(1, 9)), int(rng.integers(9, 17))
      rule = dars.Allocation(('dars_et', 'dars_hw')[rng.integers(2)], first, 2 * mean)
      scores = rng.integers(0, first + 1, int(rng.integers(1, 12))) / first
      rows = rule.extra_rows(scores.tolist(), len(scores) * (mean - first))
      self.assertEqual(sum(rows), len(scores) * (mean - first))
      self.assertBetween(first + max(rows), first, 2 * mean)
      self.assertGreaterEqual(min(rows), 0)


class Agent:
  """Question '0' is never right, '1' in one of four episodes, the others always."""

  def __init__(self):
    self.retriever = None
    self.report = None
    self.keys = []

  def play(self, params, tasks, keys, groups, stop_signal=None):
    del params, stop_signal
    self.keys += [tuple(key) for key in np.asarray(jax.random.key_data(keys)).tolist()]
    rows = []
    counts = collections.Counter()
    for task, group in zip(tasks, groups, strict=True):
      counts[task.id] += 1
      score = {'0': 0.0, '1': float(counts[task.id] % 4 == 0)}.get(task.id, 1.0)
      turn = types.Turn(np.ones(1, np.int32), np.zeros(1, np.float32), reward=score)
      rows.append(types.Episode(task, group, np.ones(1, np.int32), [turn]))
    self.report = engine.Report()
    return rows


class BatchTest(parameterized.TestCase):

  def batches(self):
    questions = [types.Task(str(i), 'q', ('a',)) for i in range(4)]
    stream = task_files.TaskStream(questions, 4, 0)
    rule = dars.Allocation('dars_et', 4, 16)
    return batches_lib.Batches(Agent(), lambda params: params, stream, 8, 0, allocation=rule)

  def test_hard_questions_have_larger_groups(self):
    """N = 4: a = 0 counts as 1/8 and wants 6, a = 1/4 wants 2; of 16 rows 8 are left."""
    batches = self.batches()
    sampled = batches.sample({}, 1, 0)
    sizes = collections.Counter(row.task.id for row in sampled.episodes)
    self.assertEqual(sizes['0'] - 4, 6)
    self.assertEqual(sum(sizes.values()), 32)
    self.assertEqual(sampled.measured['rollout/group_size_max'], 10)
    self.assertEqual(sampled.measured['rollout/group_size_min'], min(sizes.values()))
    groups = [row.group for row in sampled.episodes]
    self.assertEqual(groups, sorted(groups))  # both rounds form one group
    self.assertLen({(row.group, row.task.id) for row in sampled.episodes}, 4)
    self.assertLen(set(batches.agent.keys), 32)  # no episode is played twice
    with self.subTest('a resumed run repeats it'):
      again = self.batches().sample({}, 1, 0)
      self.assertEqual(*[[row.to_dict() for row in x.episodes] for x in (sampled, again)])
      record = json.loads(json.dumps(batches_lib.to_json(sampled)))
      restored = batches.restored(record)
      self.assertEqual(*[[row.to_dict() for row in x.episodes] for x in (sampled, restored)])

  def test_scores_above_1_are_refused(self):
    batches = self.batches()
    play = batches.agent.play

    def play_doubled(*args, **kwargs):
      rows = play(*args, **kwargs)
      for row in rows:
        row.turns[0].reward *= 2
      return rows

    batches.agent.play = play_doubled
    with self.assertRaisesRegex(types.UserError, 'scores between 0 and 1.*0 to 2'):
      batches.sample({}, 1, 0)

  @parameterized.product(rule=('dars_et', 'dars_hw'), group_size=tuple(range(3, 10)))
  def test_settings_that_pass_can_act(self, rule, group_size):
    """Of four questions one is never solved: its group grows if, and only if, the config passes."""
    for first_rows in range(2, group_size):
      config = schema.Config()
      config.rollout = schema.RolloutSettings(
          allocation=rule, group_size=group_size, first_rows=first_rows
      )
      config.train.episodes = config.train.mini_batch = config.train.micro_batch = 4 * group_size
      dealt = dars.Allocation(rule, first_rows, 4 * group_size)
      rows = dealt.extra_rows([0.0, 1.0, 1.0, 1.0], 4 * (group_size - first_rows))
      context = contextlib.nullcontext()
      if len(set(rows)) == 1:
        context = self.assertRaisesRegex(types.UserError, 'would do nothing')
      with context:
        validation.validate(config)

  @parameterized.parameters(
      (dict(group_size=2), 'first_rows=1 must be at least 2'),
      (dict(first_rows=8), 'below group_size=8'),
      (dict(replay='folder'), 'samples nothing'),
      (dict(max_group=4), 'max_group=4 must be at least group_size=8'),
      (dict(max_group=8), 'max_group=8, the mean size of a group, no question can get more'),
      (dict(group_size=4), 'would do nothing.*--config.rollout.first_rows=3'),
      (dict(group_size=512), 'episodes=512 is one group'),
      (dict(max_num_gen_batches=2), 'max_num_gen_batches=1'),
      (dict(demonstrations='a:b'), 'leave out config.rollout.demonstrations'),
  )
  def test_settings_without_a_meaning_are_refused(self, settings, message):
    config = schema.Config()
    config.rollout.allocation = 'dars_hw'
    config.rollout.group_size = 8
    for name, value in settings.items():
      setattr(config.rollout, name, value)
    with self.assertRaisesRegex(types.UserError, f'^[^\n]*{message}[^\n]*$'):
      validation.validate(config)


if __name__ == '__main__':
  absltest.main()
