"""The whole loop on a tiny model: what a run writes, resumption, and a failing retriever."""

import functools
import glob
import json
import math
import os
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import numpy as np
import pytest

from stppo_jax.evaluation import job
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.retrieval import bm25
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import batching
from stppo_jax.stop_signal import StopSignal
from stppo_jax.training import loop
from stppo_jax.training import recovery
from stppo_jax.training import run as run_lib
from stppo_jax.types import RunError
from stppo_jax.types import UserError
from tests.support import processes
from tests.support import tiny_run

make_config = tiny_run.make_config

# Names of verl, and our own; every line of a run with a critic has them.
NAMES = tuple("""
  actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy
  actor/grad_norm actor/lr actor/skipped critic/vf_loss critic/vf_clipfrac critic/vpred_mean
  critic/grad_norm critic/lr critic/vf_explained_var critic/score/mean critic/score/max
  critic/score/min critic/rewards/mean critic/rewards/max critic/rewards/min
  critic/advantages/mean critic/advantages/max critic/advantages/min critic/returns/mean
  critic/values/mean response_length/mean response_length/max response_length/min
  prompt_length/mean num_turns/mean num_turns/max num_turns/min timing_s/step timing_s/gen
  stppo/agent_tokens/mean stppo/agent_turns/mean
  timing_s/old_log_prob timing_s/update_actor timing_s/gen_prefill timing_s/gen_decode
  timing_s/gen_env timing_s/wait timing_s/records pipeline/staleness perf/rows_busy
  perf/decode_steps perf/prefill_tokens perf/shared_tokens perf/throughput perf/padding
  perf/shared_train_tokens
  perf/host_memory_gb perf/compilations perf/failed_saves env/replays
  rollout_corr/kl rollout_corr/k3_kl
  rollout_corr/logp_diff_max rollout_corr/rollout_is_mean rollout_corr/rollout_is_max
  rollout_corr/rollout_is_min rollout_corr/rollout_is_eff_sample_size stppo/grad_norm
  stppo/bias_norm stppo/divisor stppo/step_norm stppo/ratio_std_token
  stppo/applied_factor stppo/grad_factor
  stppo/ratio_std_turn stppo/ratio_std_sequence stppo/clipfrac_turn1_pos stppo/clipfrac_turn1_neg
  stppo/clipfrac_turn3_pos em/mean f1/mean env/searches/mean env/invalid_share env/truncated
  env/retrieval_failed env/environment_failed env/replays env/invalid_share env/repeated_share
  env/empty_share env/cut_share env/prompt_too_long
  outcome/answered outcome/skipped health/invalid health/score_drop""".split())
EVAL_NAMES = (
    'val-core/all/em',
    'val-core/all/f1',
    'val-core/all/em_hops1',
    'val-core/fruit/em',
    'val-core/nature/em',
    'val-core/macro/em',
    'val-aux/num_turns/mean',
    'val-aux/agent_turns/mean',
    'val-aux/truncated',
    'val-aux/environment_failed',
    'val-outcome/answered',
    'timing_s/testing',
)
SEARCHES = [action for action in tiny_run.ACTIONS if 'search' in action]


def read_records(workdir, name):
  with open(os.path.join(workdir, 'episodes', name), encoding='utf-8') as file:
    return [json.loads(line) for line in file]


class LoopTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(tiny_run.on_one_device())
    self.ahead = self.enterContext(tiny_run.updates_compiled_ahead())
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())

  def test_a_run_writes_its_files(self):
    config = make_config()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of Python would take seconds
    trace = functools.partial(jax.profiler.trace, profiler_options=options)
    with mock.patch.object(jax.profiler, 'trace', trace):
      scores = loop.start(config, self.workdir, profile=1)
    self.assertContainsSubset(self.ahead, ['annotate', 'update_step', 'with_advantages'])
    self.assertLen(set(self.ahead), len(self.ahead))  # nothing twice
    rows = metrics_lib.read_metrics(self.workdir)

    with self.subTest('a trace of the second update, with its phases'):
      (path,) = glob.glob(
          os.path.join(self.workdir, 'profile', '**', '*.xplane.pb'), recursive=True
      )
      found = jax.profiler.ProfileData.from_file(path)
      phases = {'step', 'wait', 'old_log_prob', 'update_actor', 'records'}
      named = [
          event.name
          for plane in found.planes
          for line in plane.lines
          for event in line.events
          if event.name in phases
      ]
      # Batches move to the devices in 'old_log_prob', before the log-probs of any policy.
      self.assertCountEqual(named, [*phases, 'old_log_prob'])
      seconds = {name: rows[2][f'timing_s/{name}'] for name in phases}
      self.assertAlmostEqual(sum(seconds.values()), 2 * seconds['step'])

    with self.subTest('metrics'):
      self.assertEqual([row['step'] for row in rows], [0, 1, 2])
      self.assertContainsSubset(EVAL_NAMES, rows[0])
      for row in rows[1:]:
        self.assertContainsSubset(NAMES + EVAL_NAMES, row)
        self.assertNotIn('nonfinite', row)
      self.assertLess(rows[1]['rollout_corr/logp_diff_max'], 1e-4)
      self.assertEqual(scores['val-core/all/em'], rows[2]['val-core/all/em'])

    with self.subTest('episodes'):
      for n in (1, 2):
        records = read_records(self.workdir, f'train_{n:06d}.jsonl')
        self.check_records(records, rows[n])
      self.assertLen(read_records(self.workdir, 'eval_000000.jsonl'), 5)
      self.assertLen(read_records(self.workdir, 'eval_000002.jsonl'), 5)

    with self.subTest('report and config'):
      with open(os.path.join(self.workdir, 'report.html'), encoding='utf-8') as file:
        self.assertIn('tiny_run', file.read())
      with open(os.path.join(self.workdir, 'config.json'), encoding='utf-8') as file:
        self.assertEqual(json.load(file)['train']['episodes'], 16)

    with self.subTest('evaluate reads the newest checkpoint'):
      with tiny_run.reading_policies_alone():
        evaluated = job.evaluate(config, self.workdir)
      again = evaluated.scores
      with open(os.path.join(evaluated.folder, 'config.json'), encoding='utf-8') as file:
        self.assertRegex(json.load(file)['player']['weights'], '^[0-9a-f]{8}$')
      self.assertContainsSubset([name for name in EVAL_NAMES if name[:4] == 'val-'], again)
      for name in again:
        self.assertEqual(again[name], rows[2][name], name)

    with self.subTest('the same command again changes nothing'):
      loop.start(config, self.workdir)
      self.assertEqual(metrics_lib.read_metrics(self.workdir), rows)

    with self.subTest('another config is refused'):
      with self.assertRaisesRegex(UserError, r'^[^\n]*seed \(0 there, 1 here\)[^\n]*$'):
        loop.start(make_config(seed=1), self.workdir)
      self.assertEqual(metrics_lib.read_metrics(self.workdir), rows)

  def check_records(self, records, row):
    """Checks that an episodes file agrees with itself and with the line of metrics."""
    self.assertLen(records, 16)
    self.assertAlmostEqual(
        np.mean([record['score'] for record in records]), row['critic/score/mean'], places=5
    )
    self.assertAlmostEqual(
        np.mean([len(record['actions']) for record in records]),
        row['stppo/agent_turns/mean'],
        places=5,
    )
    self.assertIn('search', sum((record['actions'] for record in records), []))
    for record in records:
      self.assertLen(record['turn_ids'], len(record['tokens']))
      self.assertLen(record['pieces'], len(record['tokens']))
      self.assertEqual(max(record['turn_ids']), len(record['actions']))
      agent = [piece for piece, turn in zip(record['pieces'], record['turn_ids']) if turn]
      for name in ('behaviour_logp', 'old_logp', 'values', 'advantages', 'ratio', 'clipped'):
        self.assertLen(record[name], len(agent), name)
      np.testing.assert_allclose(record['old_logp'], record['behaviour_logp'], atol=1e-4)
      if record['score'] == 1:
        self.assertIn(f'<answer> {record["answers"][0]}</answer>', ''.join(agent))
      self.assertTrue(''.join(record['pieces']).startswith('Question: ' + record['question']))

  @parameterized.named_parameters(
      (
          'shared_trunk_kl_in_reward',
          {'model.critic': 'shared', 'algorithm.kl_in': 'reward', 'algorithm.kl_target': 0.1},
          ('actor/reward_kl_penalty', 'actor/reward_kl_penalty_coeff', 'critic/vf_loss'),
          (),
      ),
      (
          'grpo_kl_in_loss',
          {
              'algorithm.variant': 'grpo',
              'rollout.group_size': 4,
              'algorithm.kl_in': 'loss',
              'algorithm.kl_estimator': 'k3',
          },
          ('actor/kl_loss',),
          ('critic/vf_loss', 'critic/lr'),
      ),
  )
  @pytest.mark.slow
  def test_one_update_of(self, values, present, absent):
    self.check_one_update(values, present, absent)

  @pytest.mark.slow
  def test_one_update_of_rloo(self):
    absent = ('critic/vf_loss', 'actor/kl_loss', 'stppo/bias_norm')
    self.check_one_update({'algorithm.variant': 'rloo', 'rollout.group_size': 4}, (), absent)

  def check_one_update(self, values, present, absent):
    config = make_config(**{'train.updates': 1, 'algorithm.log_bias': False, **values})
    loop.start(config, self.workdir)
    row = metrics_lib.read_metrics(self.workdir)[-1]
    self.assertContainsSubset(present, row)
    self.assertNoCommonElements(absent, row)
    self.assertNotIn('nonfinite', row)
    self.assertGreater(row['stppo/step_norm'], 0)
    questions = [r['task'] for r in read_records(self.workdir, 'train_000001.jsonl')]
    group_size = config.rollout.group_size
    for question in set(questions):
      self.assertEqual(questions.count(question) % group_size, 0)

  def test_stale_run_resumes_bit_exactly(self):
    config = make_config(
        **{
            'train.updates': 3,
            'train.checkpoint_every': 2,
            'pipeline.staleness': 1,
            'eval.every': 0,
            'algorithm.rollout_is': 'turn',
            'algorithm.rollout_is_threshold': 1.05,
        }
    )
    straight = os.path.join(self.workdir, 'straight')
    loop.start(config, straight)
    rows = metrics_lib.read_metrics(straight)
    self.assertEqual([row['pipeline/staleness'] for row in rows[1:]], [0, 1, 1])
    self.assertLess(rows[1]['rollout_corr/logp_diff_max'], 1e-4)  # on-policy but for rounding
    self.assertEqual(rows[1]['rollout_corr/rollout_is_ratio_fraction_high'], 0)
    for row in rows[2:]:
      self.assertGreater(row['rollout_corr/logp_diff_max'], 1e-2)
      self.assertGreater(row['rollout_corr/rollout_is_ratio_fraction_high'], 0)
      self.assertLessEqual(row['rollout_corr/rollout_is_mean'], 1.05)
      self.assertBetween(row['rollout_corr/rollout_is_eff_sample_size'], 0.5, 1)
    killed, calls = os.path.join(self.workdir, 'killed'), iter(range(3))

    def is_set():
      if next(calls) == 2:
        raise KeyboardInterrupt
      return False

    with self.assertRaises(KeyboardInterrupt):
      loop.start(config, killed, StopSignal(is_set))
    loop.start(config, killed)
    self.assertEqual(tiny_run.comparable_metrics(killed), tiny_run.comparable_metrics(straight))
    self.assertEqual(*(read_records(x, 'train_000003.jsonl') for x in (killed, straight)))
    chex.assert_trees_all_equal(
        tiny_run.state_after(config, killed, 3), tiny_run.state_after(config, straight, 3)
    )

  @pytest.mark.slow
  def test_unavailable_retriever_trains_nothing(self):
    folder = os.path.join(self.workdir, 'searcher')
    tiny_run.write_model(folder, favoured=SEARCHES, strength=5.0)
    url = self.enterContext(processes.unused_address())
    config = make_config(
        **{
            'train.updates': 1,
            'model.folder': folder,
            'retriever.kind': 'http',
            'retriever.url': f'{url}/retrieve',
            'retriever.retries': 0,
            'retriever.max_failed_share': 1.0,
            'retriever.timeout_s': 1.0,
            'actor.weight_decay': 0.0,
            'critic.weight_decay': 0.0,
        }
    )
    before = jax.device_get(tiny_run.load_learners(config).state)
    run = os.path.join(self.workdir, 'run')
    with self.assertLogs('absl', 'WARNING') as caught:
      loop.start(config, run)
    self.assertLen(
        [line for line in caught.output if 'in 100% of the held-out episodes' in line], 2
    )
    row = metrics_lib.read_metrics(run)[-1]
    self.assertEqual(row['env/retrieval_failed'], 1)
    self.assertEqual(row['val-aux/retrieval_failed'], 1)
    self.assertEqual(row['actor/skipped'], 0)
    self.assertEqual(row['stppo/grad_norm'], 0)
    self.assertTrue(all(r['failed'] for r in read_records(run, 'train_000001.jsonl')))
    after = tiny_run.state_after(config, run, 1)
    chex.assert_trees_all_equal(after.actor, before.actor)
    chex.assert_trees_all_equal(after.critic, before.critic)

  @pytest.mark.slow
  def test_waiting_for_a_failed_retriever_changes_no_number(self):
    in_order = {'rollout.threads': 0}  # so that calls can be counted
    config = make_config(
        **{
            'retriever.max_failed_share': 0.0,
            'train.checkpoint_every': 0,
            'eval.every': 0,
            'retriever.max_outage_s': 2.0,
            **in_order,
        }
    )
    undisturbed = os.path.join(self.workdir, 'undisturbed')
    loop.start(config, undisturbed)
    expected = tiny_run.comparable_metrics(undisturbed)
    search, calls = bm25.Bm25Retriever.search, []

    def fails_from(first, last):
      def flaky(retriever, queries, top_k):
        calls.append(queries)
        if first <= len(calls) < last:
          return [None] * len(queries)
        return search(retriever, queries, top_k)

      calls.clear()
      return mock.patch.object(bm25.Bm25Retriever, 'search', flaky)

    with (
        mock.patch.object(batches_lib, '_FIRST_WAIT_S', 0.01),
        mock.patch.object(run_lib.Run, 'evaluate', lambda run, n, metrics: metrics),
    ):
      with self.subTest('short'), fails_from(2, 5):
        short = os.path.join(self.workdir, 'short')
        loop.start(config, short)
        rows = tiny_run.comparable_metrics(short)
        self.assertEqual(rows[1]['env/replays'], 1)
        self.assertEqual(rows[1] | {'env/replays': 0}, expected[1])
        self.assertTrue(any('probe' in queries[0] for queries in calls))

      with self.subTest('long'):
        long = os.path.join(self.workdir, 'long')
        with fails_from(0, 0):
          loop.start(
              make_config(**{'train.updates': 1, **in_order}), os.path.join(self.workdir, 'count')
          )
          in_first = len(calls)
        with fails_from(in_first + 1, 10**9), self.assertRaises(RunError) as caught:
          loop.start(config, long)
        self.assertRegex(str(caught.exception), r'^retrieval failed in \d+% of the episodes[^\n]*$')
        self.assertEqual([row['step'] for row in metrics_lib.read_metrics(long)], [0, 1])

    with self.subTest('resumed'):
      loop.start(config, long)
      self.assertEqual(tiny_run.comparable_metrics(long)[2], expected[2])

  @parameterized.parameters(('playing', 0), ('waiting', 1), ('blocked', 0), ('blocked', 1))
  @pytest.mark.slow_after(1)
  def test_stop_waits_for_nothing(self, when, staleness):
    config = make_config(
        **{
            'train.checkpoint_every': 0,
            'eval.every': 0,
            'retriever.max_failed_share': 0.0,
            'pipeline.staleness': staleness,
        }
    )
    straight, stopped = (os.path.join(self.workdir, name) for name in ('straight', 'stopped'))
    sample, search, stop = batches_lib.Batches.sample, bm25.Bm25Retriever.search, threading.Event()
    numbers, asked = [], []
    over = threading.Event()
    self.addCleanup(over.set)

    def numbered(batches, params, number, stale):
      numbers.append(number)
      return sample(batches, params, number, stale)

    def stopped_in_the_second_batch(retriever, queries, top_k):
      if numbers[-1:] != [2]:
        return search(retriever, queries, top_k)
      asked.append(queries)
      if when == 'blocked':  # a retriever that never answers
        stop.set()
        over.wait()
      if when == 'playing' or 'probe' in queries[0]:
        stop.set()
      return search(retriever, queries, top_k) if when == 'playing' else [None] * len(queries)

    with (
        mock.patch.object(batches_lib.Batches, 'sample', numbered),
        mock.patch.object(bm25.Bm25Retriever, 'search', stopped_in_the_second_batch),
        mock.patch.object(batches_lib, '_FIRST_WAIT_S', 0.01),
    ):
      loop.start(config, stopped, StopSignal(stop.is_set))
    self.assertEqual([row['step'] for row in metrics_lib.read_metrics(stopped)], [0, 1])
    tiny_run.state_after(config, stopped, 1)  # was saved
    if when == 'playing':
      self.assertLessEqual(len(asked), config.rollout.threads)  # those in progress
    loop.start(config, stopped)
    self.assertEqual(
        [row['pipeline/staleness'] for row in metrics_lib.read_metrics(stopped)[1:]], [0, staleness]
    )
    loop.start(config, straight)
    self.assertEqual(tiny_run.comparable_metrics(stopped), tiny_run.comparable_metrics(straight))

  def test_an_unhealthy_run_warns_and_stops_if_configured(self):
    config = make_config(
        **{
            'health.invalid': 1e-6,
            'health.window': 1,
            'health.stop_on': ('invalid',),
            'train.checkpoint_every': 0,
            'eval.every': 0,
        }
    )
    with self.assertRaises(RunError) as caught:
      loop.start(config, self.workdir)
    self.assertRegex(
        str(caught.exception),
        r'^update 1: health: many turns hold no valid action: '
        r'env/invalid_share is [^\n]*--mode=watch[^\n]*$',
    )
    self.assertEqual(metrics_lib.read_metrics(self.workdir)[-1]['health/invalid'], 1)
    # The same command resumes: the alarm is not new any more.
    loop.start(config, self.workdir)
    self.assertEqual(metrics_lib.read_metrics(self.workdir)[-1]['step'], 2)

  def test_persistent_nonfinite_gradients_end_the_run(self):
    def poisoned(*args, **kwargs):
      batch = to_turn_batch(*args, **kwargs)
      return batch.replace(rewards=batch.rewards * np.nan)

    to_turn_batch = batching.to_turn_batch
    config = make_config(**{'train.max_nonfinite': 3})  # two steps an update: in the second
    with mock.patch.object(batching, 'to_turn_batch', poisoned):
      with self.assertRaises(RunError) as caught:
        loop.start(config, self.workdir)
    message = str(caught.exception)
    self.assertNotIn('\n', message)
    self.assertIn('in 4 optimizer steps in a row, up to update 2', message)
    self.assertIn('nonfinite_000002.jsonl', message)
    self.assertLen(read_records(self.workdir, 'nonfinite_000002.jsonl'), 16)
    row = metrics_lib.read_metrics(self.workdir)[-1]
    self.assertEqual(row['actor/skipped'], 4)
    self.assertEqual(row['outcome/skipped'], 16)
    self.assertIn('actor/pg_loss', row['nonfinite'])
    # What was checkpointed after update 1 is what the run began with, and still finite.
    after = tiny_run.state_after(config, self.workdir, 1)
    chex.assert_trees_all_equal(
        after.actor, jax.device_get(tiny_run.load_learners(config).state.actor)
    )


class MeshTest(parameterized.TestCase):

  @parameterized.parameters({'data': 2, 'fsdp': 2, 'tensor': 2}, {'fsdp': 2, 'context': 4})
  @pytest.mark.slow
  def test_an_update_on_eight_devices(self, **mesh):
    config = make_config(
        **{f'mesh.{axis}': size for axis, size in mesh.items()},
        **{
            'train.updates': 1,
            'eval.every': 0,
            'algorithm.log_bias': False,
            # One step only: Adam's first step is a sign, which amplifies rounding near 0.
            'train.mini_batch': 16,
        },
    )
    with tempfile.TemporaryDirectory() as many, tempfile.TemporaryDirectory() as one:
      with tiny_run.updates_compiled_ahead():
        loop.start(config, many)
      with tiny_run.on_one_device():
        loop.start(config, one)
      ours, theirs = (tiny_run.comparable_metrics(workdir)[1] for workdir in (many, one))
    self.assertNotIn('nonfinite', ours)
    for name in theirs:
      if name.startswith('val-'):  # after the step
        continue
      np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-3, atol=2e-5, err_msg=name)


class CheckFiniteTest(absltest.TestCase):

  def test_error_names_what_was_not_finite(self):
    run = mock.Mock()
    run.learners.spec.variant.described = lambda: {'divisor': 'mine'}
    run.config.train.max_nonfinite, run.progress.skipped_batches = 3, 0
    metrics = {'actor/skipped': 3, 'stppo/grad_norm': 0.9, 'stppo/divisor': math.nan}
    with self.assertRaisesRegex(recovery.Stuck, "^the divisor 'mine' gave no positive number"):
      run_lib.Run._check_finite(run, 1, metrics)
    metrics['stppo/grad_norm'] = math.nan
    with self.assertRaisesRegex(recovery.Stuck, '^gradients or losses were not finite in 3'):
      run_lib.Run._check_finite(run, 1, metrics)
    run_lib.Run._check_finite(run, 1, metrics | {'actor/skipped': 2})


if __name__ == '__main__':
  absltest.main()
