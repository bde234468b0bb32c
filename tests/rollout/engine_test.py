"""Continuous batching: the sequences do not depend on order, number of rows or timing."""

import collections
import copy
import functools
import random
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax.models import decoder
from stppo_jax.rollout import engine
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.text import tokenizer as chat

VOCAB = 24
CONFIG = decoder.ModelConfig(
    vocab_size=VOCAB, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=32
)
TOKEN_BYTES = tuple(bytes([97 + i]) for i in range(VOCAB))
SLOTS, TURN = 128, 10


@functools.cache
def make_params():
  """Random weights, large enough that the context matters and no distribution is uniform."""
  enlarge = lambda path, w: w if path[-1].key == 'scale' else 12.0 * w
  params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), CONFIG)
  return jax.tree_util.tree_map_with_path(enlarge, params)


@functools.cache  # a sampler compiles a handful of programs
def compiled(**settings):
  table = chat.stop_automaton(TOKEN_BYTES, ('bc', 'hh', 'a'))
  defaults = dict(
      rows=8, width=4, prefill_rows=2, steps=6, slot_buckets=(SLOTS,), chunk_buckets=(4, 8)
  )
  sizes = sampling.Sizes(SLOTS, **{**defaults, **settings})
  return sampler_lib.Sampler(CONFIG, table, (3,), sizes)


def make_sampler(groups=2, **settings):
  """A sampler that shares its programs with those of other numbers of groups."""
  sampler = copy.copy(compiled(**settings))
  sampler.num_groups = groups
  return sampler


@functools.cache
def baseline():
  """Returns 23 sequences, their keys and their sampled turns."""
  sequences, keys = make_sequences(23), jax.random.split(jax.random.key(1), 23)
  return sequences, keys, play(sequences, keys)[0]


def make_sequences(count, seed=0):
  """Returns [(prompt, [observations])] of 1 to 4 turns; the lengths differ."""
  rng = np.random.default_rng(seed)
  ids = lambda most: rng.integers(0, VOCAB, rng.integers(1, most)).tolist()
  return [
      (ids(20), [ids(15) if rng.random() < 0.8 else [] for _ in range(rng.integers(4))])
      for _ in range(count)
  ]


def play(sequences, keys, sampler=None, threads=0, delay=lambda: None):
  """Returns ([[(tokens, logp) of each turn] of each sequence], Report, the order of turns)."""
  turns, order = [[] for _ in sequences], []

  def respond(said):
    delay()
    following = []
    for turn in said:
      order.append(turn.index)
      turns[turn.index].append((turn.turn.tokens.tolist(), turn.turn.logp.tolist()))
      observations = sequences[turn.index][1]
      k = len(turns[turn.index])
      over = k > len(observations)
      following.append(engine.Prompt(() if over else observations[k - 1], 0 if over else TURN))
    return following

  prompts = [engine.Prompt(prompt, TURN) for prompt, _ in sequences]
  report = engine.run(sampler or make_sampler(), make_params(), prompts, keys, respond, threads)
  return turns, report, order


@jax.jit
def plain_logp(params, tokens):
  x, _ = decoder.trunk(params, CONFIG, tokens, None)
  return decoder.token_logp(params, CONFIG, x, tokens)[0]


class EngineTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.sequences, self.keys, self.want = baseline()

  def test_logp_is_that_of_one_forward(self):
    """Across chunks, growth, reused rows and rows that moved: each token is the model's."""
    rows = np.zeros((23, SLOTS), np.int32)
    found = np.zeros((23, SLOTS), np.float32)
    for b, ((prompt, observations), turns) in enumerate(zip(self.sequences, self.want)):
      self.assertLen(turns, len(observations) + 1)
      row, logps = [*prompt], [0.0] * len(prompt)
      for (tokens, logp), observation in zip(turns, [*observations, []]):
        row += [*tokens, *observation]
        logps += [*logp, *[0.0] * len(observation)]
      rows[b, : len(row)], found[b, : len(row)] = row, logps
    want = np.asarray(plain_logp(make_params(), rows))
    np.testing.assert_allclose(found, np.where(found != 0, want, 0), atol=2e-5)
    self.assertGreater((found != 0).sum(), 200)

  @parameterized.parameters(0, 4)
  def test_order_and_delays_change_no_bit(self, threads):
    """The same bits, log-probs too: with one slot bucket every call has the same shapes."""
    rng = random.Random(0)
    order = np.random.default_rng(0).permutation(23)
    delay = (lambda: time.sleep(rng.uniform(0, 0.02))) if threads else (lambda: None)
    got, _, _ = play([self.sequences[i] for i in order], self.keys[order], None, threads, delay)
    self.assertEqual(got, [self.want[i] for i in order])

  @parameterized.parameters(dict(groups=1), dict(groups=8))
  def test_number_of_groups_changes_no_bit(self, **settings):
    got, _, _ = play(self.sequences, self.keys, make_sampler(**settings))
    self.assertEqual(got, self.want)

  @parameterized.parameters(
      dict(prefill_rows=4, groups=1), dict(width=3, chunk_buckets=(5,), slot_buckets=(48, SLOTS))
  )
  def test_shapes_change_last_digits_only(self, **settings):
    got, _, _ = play(self.sequences, self.keys, make_sampler(**settings))
    for mine, others in zip(self.want, got):
      self.assertEqual([tokens for tokens, _ in mine], [tokens for tokens, _ in others])
      for (_, a), (_, b) in zip(mine, others):
        np.testing.assert_allclose(a, b, atol=1e-5)

  def test_reused_row_equals_fresh_row(self):
    """Plays all sequences in one row, short ones after long ones, and each alone."""
    order = sorted(range(23), key=lambda i: -sum(map(len, self.sequences[i][1])))
    got, _, _ = play(
        [self.sequences[i] for i in order], self.keys[np.array(order)], make_sampler(groups=1)
    )
    self.assertEqual(got, [self.want[i] for i in order])
    for i in order[-3:]:
      alone, _, _ = play([self.sequences[i]], self.keys[i : i + 1])
      self.assertEqual(alone[0], self.want[i])

  def test_schedule_without_threads_ignores_timing(self):
    """The calls to the device are the same, one by one, as many hosts require."""

    def calls_of(delay):
      sampler, calls = make_sampler(), []
      decode = sampler._decode
      note = lambda *args: (
          calls.append([np.asarray(a).tolist() for a in jax.tree.leaves(args[2:4])])
          or decode(*args)
      )
      with mock.patch.object(sampler, '_decode', side_effect=note):
        _, _, order = play(self.sequences, self.keys, sampler, delay=delay)
      return calls, order

    first, second = calls_of(lambda: None), calls_of(lambda: time.sleep(random.uniform(0, 0.005)))
    self.assertGreater(len(first[0]), 20)
    self.assertEqual(first, second)

  @parameterized.parameters(dict(groups=2), dict(groups=1, prefill_rows=4))
  def test_equal_prompts_are_prefilled_once(self, **settings):
    groups = make_sequences(4, seed=5)
    groups = [([*prompt, i], rest) for i, (prompt, rest) in enumerate(groups)]  # none alike
    sequences = [sequence for sequence in groups for _ in range(5)]
    keys = jax.random.split(jax.random.key(2), 20)
    got, report, _ = play(sequences, keys, make_sampler(**settings))
    for i in (0, 7, 19):
      alone, _, _ = play([sequences[i]], keys[i : i + 1], make_sampler(**settings))
      self.assertEqual(got[i], alone[0])
    self.assertLen({str(turns) for turns in got[:5]}, 5)
    prompts = sum(len(prompt) for prompt, _ in groups)
    observed = sum(len(ids) for _, rest in sequences for ids in rest)
    in_place = settings.get('prefill_rows') == 4
    self.assertEqual(report.shared_tokens, 0 if in_place else 4 * prompts)
    self.assertEqual(report.prefill_tokens, observed + (5 * prompts if in_place else prompts))

  def test_prefill_in_place_waits_for_ready_rows(self):
    sampler, waited = make_sampler(groups=1, width=8, prefill_rows=8), []
    should_prefill = engine._Engine._should_prefill

    def check(run, group):
      num_ready = len(group.rows_in('ready'))
      num_decoding = len(group.rows_in('decoding'))
      waits = num_ready > 0 and not should_prefill(run, group)
      self.assertEqual(waits, num_ready == 1 and num_decoding > 0)
      waited.append(waits)
      return should_prefill(run, group)

    with mock.patch.object(engine._Engine, '_should_prefill', check):
      got, _, _ = play(self.sequences, self.keys, sampler)
    tokens = lambda played: [[tokens for tokens, _ in turns] for turns in played]
    self.assertEqual(tokens(got), tokens(self.want))
    self.assertTrue(any(waited))

  def test_last_rows_move_into_one_group(self):
    """At the end the last rows share a group, which takes fewer steps than if they stayed."""
    sequences = [([1 + i % 20, 2], [[5, 6]] * (0 if i % 4 else 6)) for i in range(16)]
    keys = jax.random.split(jax.random.key(3), 16)
    sampler = make_sampler(groups=4)
    got, report, _ = play(sequences, keys, sampler)
    with mock.patch.object(engine._Engine, '_emptier_groups', return_value=()):
      apart, report_apart, _ = play(sequences, keys, sampler)
    self.assertEqual(got, apart)
    self.assertLess(report.decode_steps, report_apart.decode_steps)

  def test_other_rows_continue_while_some_wait(self):
    """The first response waits for the end of all others; without threads it would wait forever."""
    others, done = threading.Event(), collections.Counter()
    sequences = [([1, 2], [[3]])] + make_sequences(7, seed=8)

    def respond(said):
      following = []
      for turn in said:
        k = done[turn.index]
        done[turn.index] += 1
        if turn.index == 0 and k == 0:
          self.assertTrue(others.wait(60))
        rest = sequences[turn.index][1]
        following.append(engine.Prompt(rest[k], TURN) if k < len(rest) else engine.Prompt((), 0))
      if sum(done[i] == len(rest) + 1 for i, (_, rest) in enumerate(sequences) if i) == 7:
        others.set()
      return following

    # Turns that end together are one call: the budget makes the first sequence's end alone.
    prompts = [engine.Prompt(prompt, TURN if i else 1) for i, (prompt, _) in enumerate(sequences)]
    engine.run(
        make_sampler(),
        make_params(),
        prompts,
        jax.random.split(jax.random.key(0), 8),
        respond,
        threads=2,
    )
    self.assertTrue(others.is_set())

  def test_first_finished_group_continues_with_threads(self):
    """The first call is done only after a turn of the other group was answered."""
    answered, calls, block = threading.Event(), [], jax.block_until_ready

    def block_until_ready(result):
      if isinstance(result, sampler_lib.DecodeResult):
        calls.append(result)
        if len(calls) == 1:
          self.assertTrue(answered.wait(60))
      return block(result)

    with mock.patch.object(jax, 'block_until_ready', block_until_ready):
      got, _, _ = play(self.sequences, self.keys, threads=1, delay=answered.set)
    self.assertEqual(got, self.want)

  def test_turns_that_end_together_step_together(self):
    calls = []
    respond = lambda said: calls.append(len(said)) or [engine.Prompt((), 0)] * len(said)
    prompts = [engine.Prompt([1 + i], 1) for i in range(8)]
    engine.run(make_sampler(), make_params(), prompts, self.keys[:8], respond, threads=2)
    self.assertEqual(calls, [4, 4])

  @parameterized.parameters(0, 2)
  def test_errors_end_the_run_and_its_threads(self, threads):
    for error in (RuntimeError, KeyboardInterrupt):

      def respond(said):
        raise error('no')

      with self.assertRaisesRegex(error, 'no'):
        engine.run(
            make_sampler(), make_params(), [engine.Prompt([1], 4)], self.keys[:1], respond, threads
        )
    deadline = time.monotonic() + 30
    alive = lambda: [t for t in threading.enumerate() if t.name.startswith('rollout')]
    while alive() and time.monotonic() < deadline:
      time.sleep(0.01)
    self.assertEmpty(alive())

  def test_report(self):
    _, report, _ = play(self.sequences, self.keys, delay=lambda: time.sleep(0.002))
    self.assertGreater(report.seconds['env'], 0.02)
    self.assertEqual(report.sampled_tokens, sum(len(t) for turns in self.want for t, _ in turns))
    self.assertEqual(
        report.prefill_tokens,
        sum(len(prompt) + sum(map(len, rest)) for prompt, rest in self.sequences),
    )
    self.assertBetween(report.rows_busy, 1, 4)

  def test_nothing_to_play(self):
    report = engine.run(make_sampler(), make_params(), [engine.Prompt([1], 0)], self.keys[:1], None)
    self.assertEqual(report.sampled_tokens, 0)
    engine.run(make_sampler(), make_params(), [], self.keys[:0], None)


if __name__ == '__main__':
  absltest.main()
