"""The sampler, as the engine calls it: its distribution, stops, and log-probs."""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import decoder
from stppo_jax.rollout import engine
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.text import tokenizer as chat

VOCAB = 24
CONFIG = decoder.ModelConfig(
    vocab_size=VOCAB, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=32
)
TOKEN_BYTES = tuple(bytes([97 + i]) for i in range(VOCAB - 4))  # a, b, c, ..; four ids have none
EOS = 3


@functools.cache
def make_params(config=CONFIG):
  """Random weights, large enough that the context matters and no distribution is uniform."""
  enlarge = lambda path, w: w if path[-1].key == 'scale' else 12.0 * w
  params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), config)
  return jax.tree_util.tree_map_with_path(enlarge, params)


@functools.cache  # a sampler compiles a handful of programs
def make_sampler(stops=('bca', 'hh'), eos=(EOS,), cache_tile=0, draw=(), **settings):
  defaults = dict(
      max_slots=64, rows=4, prefill_rows=2, slot_buckets=(64,), chunk_buckets=(4,), steps=8
  )
  table = chat.stop_automaton(TOKEN_BYTES, stops)
  config = dataclasses.replace(CONFIG, cache_tile=cache_tile)
  sizes = sampling.Sizes(**{**defaults, **settings})
  return sampler_lib.Sampler(config, table, eos, sizes, sampling.Distribution(*draw))


def plain_logits(params, rows):
  """One forward without a cache over the padded rows: [B,64,V]; column t follows token t."""
  tokens = np.zeros((len(rows), 64), np.int32)
  for padded, row in zip(tokens, rows):
    padded[: len(row)] = row
  return np.asarray(_plain_forward(params, tokens))


@jax.jit
def _plain_forward(params, tokens):
  return decoder.forward(params, CONFIG, tokens, None)[0]


def teacher_forced(params, rows, temperature=1.0):
  """Log-probs of each row's tokens by one plain forward: list of [length]."""
  tokens = np.zeros((len(rows), 64), np.int32)
  for padded, row in zip(tokens, rows):
    padded[: len(row)] = row
  logp = np.asarray(_plain_logp(params, tokens, temperature))
  return [row_logp[: len(row)] for row_logp, row in zip(logp, rows)]


@jax.jit
def _plain_logp(params, tokens, temperature):
  x, _ = decoder.trunk(params, CONFIG, tokens, None)
  return decoder.token_logp(params, CONFIG, x, tokens, temperature)[0]


def exact_distribution(logits, temperature, top_k, top_p):
  """The distribution that sample_token documents, in float64 and by loops: [V]."""
  probs = np.exp(np.float64(logits) / temperature)
  probs /= probs.sum()
  order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
  order = order[:top_k] if top_k else order
  total, mass, kept = sum(probs[i] for i in order), 0.0, []
  for i in order:
    if kept and mass >= top_p * total - 1e-9:
      break
    kept.append(i)
    mass += probs[i]
  result = np.zeros_like(probs)
  result[kept] = probs[kept] / mass
  return result


def sample_token(logits, keys, temperature=1.0, top_k=0, top_p=1.0):
  """Draws with the same settings for all rows."""
  settings = jnp.tile(jnp.array([temperature, top_p, 0.0]), (len(logits), 1))
  return sampling.make_draw(settings, top_k)(logits, keys)


class SampleTokenTest(parameterized.TestCase):

  LOGITS = np.array([0.5, 2.0, -1.0, 2.0, 0.0, 1.0, -3.0, 1.0], np.float32)

  def draw(self, logits, count, **settings):
    keys = jax.random.split(jax.random.key(1), count)
    rows = jnp.broadcast_to(jnp.asarray(logits), (count, len(logits)))
    token, logp = jax.jit(lambda l, k: sample_token(l, k, **settings))(rows, keys)
    return np.asarray(token), np.asarray(logp)

  @parameterized.parameters(
      (0.7, 0, 1.0), (1.0, 3, 1.0), (2.0, 0, 0.8), (0.7, 5, 0.7), (1.0, 0, 1e-6)
  )
  def test_frequencies_and_logp(self, temperature, top_k, top_p):
    want = exact_distribution(self.LOGITS, temperature, top_k, top_p)
    count = 20_000
    token, logp = self.draw(self.LOGITS, count, temperature=temperature, top_k=top_k, top_p=top_p)
    got = np.bincount(token, minlength=len(want)) / count
    np.testing.assert_array_less(np.abs(got - want), 5 * np.sqrt(want * (1 - want) / count) + 1e-9)
    np.testing.assert_allclose(np.exp(logp), want[token], rtol=1e-5)
    # The log-probs of the support sum to one: each support token was met, take its own.
    support = {int(t): float(np.exp(lp)) for t, lp in zip(token, logp)}
    self.assertAlmostEqual(sum(support.values()), 1.0, places=5)

  def test_many_blocks(self):
    # 1,000 ids are eight blocks, the last one not full; 400 ids are impossible; a far tail is drawn
    # too.
    rng = np.random.default_rng(0)
    logits = rng.normal(size=1000).astype(np.float32) * 2
    impossible = rng.permutation(1000)[:400]
    logits[impossible] = -np.inf
    want = exact_distribution(logits, 1.0, 0, 1.0)
    count = 50_000
    token, logp = self.draw(logits, count)
    self.assertEmpty(np.intersect1d(token, impossible))
    got = np.bincount(token, minlength=1000) / count
    np.testing.assert_array_less(
        np.abs(got - want), 5.5 * np.sqrt(want * (1 - want) / count) + 1e-9
    )
    tail = np.argsort(want)[:800]
    spread = np.sqrt(want[tail].sum() / count)
    self.assertLess(abs(got[tail].sum() - want[tail].sum()), 5 * spread)
    np.testing.assert_allclose(logp, np.log(want[token]), atol=1e-5)

  def test_ties_go_to_the_lower_id(self):
    # 1 and 3 share the top: one token kept is token 1, in every way of keeping one.
    for settings in ({'temperature': 0.0}, {'top_k': 1}, {'top_p': 1e-9}):
      token, _ = self.draw(self.LOGITS, 50, **settings)
      np.testing.assert_array_equal(token, 1)

  def test_minus_zero_equals_zero(self):
    logits = np.array([-0.0, 0.0, -5.0, -5.0], np.float32)
    for settings in ({'temperature': 0.0}, {'top_k': 1}, {'top_p': 0.01}):
      token, _ = self.draw(logits, 3, **settings)
      np.testing.assert_array_equal(token, 0)

  def test_a_nan_of_either_sign_shows_in_the_logp(self):
    for bits in (0x7FC00000, 0xFFC00000):
      nan = np.array([bits], np.uint32).view(np.float32)[0]
      logits = np.array([0.0, nan, 1.0, 2.0], np.float32)
      for settings in ({}, {'temperature': 0.0}, {'top_k': 2}, {'top_p': 0.5}):
        with self.subTest(bits=bits, **settings):
          _, logp = self.draw(logits, 3, **settings)
          self.assertTrue(np.isnan(logp).all())

  def test_greedy_reports_the_plain_logp(self):
    _, logp = self.draw(self.LOGITS, 1, temperature=0.0)
    self.assertAlmostEqual(float(logp[0]), float(jax.nn.log_softmax(self.LOGITS)[1]), places=6)

  def test_row_settings_equal_settings_of_all_rows(self):
    rng = np.random.default_rng(0)
    logits = jnp.array(3 * rng.normal(size=(64, 300)), jnp.float32)
    keys = jax.random.split(jax.random.key(1), 64)
    kinds = [(1.0, 1.0), (0.0, 1.0), (0.7, 0.5), (1.3, 0.9), (1.0, 0.1)]
    settings = np.array([(*kinds[i % 5], i % 2) for i in range(64)], np.float32)
    model_s = np.array(jax.nn.log_softmax(logits))
    draw_all = jax.jit(sample_token, static_argnums=3)
    for top_k in (0, 20):
      draw = jax.jit(
          lambda logits, keys, k=top_k: sampling.make_draw(jnp.array(settings), k)(logits, keys)
      )
      token, logp = draw(logits, keys)
      for i, (temperature, top_p) in enumerate(kinds):
        cut = 0 if temperature == 0 else top_k
        wanted = draw_all(logits, keys, temperature, cut, top_p)
        np.testing.assert_array_equal(token[i::5], wanted[0][i::5])
        plain = model_s[np.arange(64), token]
        both = np.where(settings[:, 2] > 0, plain, wanted[1])
        np.testing.assert_allclose(logp[i::5], both[i::5], rtol=1e-5, atol=1e-6)


class SamplerTest(parameterized.TestCase):

  def test_eos_id_beyond_vocabulary_ends_nothing(self):
    table = make_sampler(stops=(), eos=(-1, CONFIG.vocab_size)).stop_table
    self.assertFalse((table[:-1] == len(table) - 1).any())

  def setUp(self):
    super().setUp()
    self.params = make_params()
    self.keys = jax.random.split(jax.random.key(7), 4)

  def play(self, sampler, forced, budgets=None, keys=None):
    """Alternates prefill of forced ids and decode; returns per row all tokens, and (columns,
    log-probs) sampled.
    """
    keys = self.keys if keys is None else keys
    rows = [list(ids) for ids in forced[0]]
    columns, logps, turns = ([[] for _ in keys], [[] for _ in keys], [0] * len(keys))
    budgets = budgets or [12] * len(keys)

    def respond(said):
      following = []
      for turn in said:
        b = turn.index
        turns[b] += 1
        columns[b] += range(len(rows[b]), len(rows[b]) + len(turn.turn.tokens))
        logps[b] += turn.turn.logp.tolist()
        over = turns[b] == len(forced)
        ids = () if over else forced[turns[b]][b]
        rows[b] += [*turn.turn.tokens.tolist(), *ids]
        following.append(engine.Prompt(ids, 0 if over else budgets[b]))
      return following

    prompts = [engine.Prompt(ids, budget) for ids, budget in zip(forced[0], budgets)]
    engine.run(sampler, self.params, prompts, keys, respond)
    return rows, columns, logps

  FORCED = (
      ([5, 6, 7], [1], [2, 9, 9, 9, 4, 4, 4, 8, 1], [6, 6, 6, 6]),
      ([1, 2], [9, 8, 7, 6, 5], [4], []),  # one row gets nothing and continues
      ([11], [12], [13, 13], [14]),
  )

  def test_logp_equals_one_teacher_forced_forward(self):
    """Three turns across chunks and slot buckets against a single plain pass."""
    rows, columns, logps = self.play(make_sampler(draw=(0.7,)), self.FORCED)
    forced = teacher_forced(self.params, rows, 0.7)
    for at, got, want in zip(columns, logps, forced):
      self.assertGreater(len(at), 3)
      np.testing.assert_allclose(got, want[at], atol=1e-5)

  def test_logp_is_renormalised_over_kept_tokens(self):
    sampler = make_sampler(draw=(0.7, 10, 0.8))
    rows, columns, logps = self.play(sampler, self.FORCED)
    for row, at, got, logits in zip(rows, columns, logps, plain_logits(self.params, rows)):
      for column, logp in zip(at, got):
        exact = exact_distribution(logits[column - 1], 0.7, 10, 0.8)
        self.assertAlmostEqual(np.exp(logp), exact[row[column]], delta=1e-5)

  def test_greedy_is_argmax_and_ignores_keys(self):
    sampler = make_sampler(draw=(0.0,))
    rows, columns, _ = self.play(sampler, self.FORCED)
    other, _, _ = self.play(sampler, self.FORCED, keys=jax.random.split(jax.random.key(99), 4))
    self.assertEqual(rows, other)
    for row, at, logits in zip(rows, columns, plain_logits(self.params, rows)):
      best = np.argmax(logits, axis=-1)
      np.testing.assert_array_equal(best[np.array(at) - 1], np.array(row)[at])

  def test_token_key_is_row_key_folded_with_position(self):
    rows, columns, _ = self.play(make_sampler(), self.FORCED)
    logits = plain_logits(self.params, rows)
    places = [(b, t) for b, at in enumerate(columns) for t in at]
    b, t = np.array(places).T
    keys = jax.vmap(jax.random.fold_in)(self.keys[b], t)
    token, _ = jax.jit(sample_token)(logits[b, t - 1], keys)
    np.testing.assert_array_equal(token, [rows[b][t] for b, t in places])

  def test_row_depends_on_key_and_context_only(self):
    """Rows with one prompt differ by key (in Tunix all were equal), and by nothing else."""
    sampler = make_sampler()
    rows, _, _ = self.play(sampler, self.FORCED)
    order = np.array([2, 0, 3, 1, 1, 0])  # other places, other neighbours, another batch size
    forced = [[round_ids[i] for i in order] for round_ids in self.FORCED]
    shuffled, _, _ = self.play(sampler, forced, keys=self.keys[order])
    self.assertEqual(shuffled, [rows[i] for i in order])
    same_prompt = [[[5, 6, 7]] * 4]
    rows, _, _ = self.play(make_sampler(stops=(), eos=()), same_prompt)
    self.assertLen({tuple(row) for row in rows}, 4)

  def test_buckets_do_not_change_the_tokens(self):
    rows, _, _ = self.play(make_sampler(), self.FORCED)
    tiled = make_sampler(cache_tile=7, slot_buckets=(5, 20), chunk_buckets=(3, 9))
    self.assertEqual(tiled.slot_buckets, (7, 21, 70))
    self.assertEqual(rows, self.play(tiled, self.FORCED)[0])

  def test_turn_ends_at_stop_string_or_eos(self):
    ended = {'stop': 0, 'eos': 0, 'budget': 0}
    sampler = make_sampler(stops=('a', 'bc', 'hh'))
    for seed in range(8):
      keys = jax.random.split(jax.random.key(seed), 4)
      forced = [[[1], [7], [2], [9]]]
      rows, columns, _ = self.play(sampler, forced, keys=keys)
      for row, at in zip(rows, columns):
        turn = [row[i] for i in at]
        texts = [
            b''.join(TOKEN_BYTES[t] if t < 20 else b'' for t in turn[:n])
            for n in range(1, len(turn) + 1)
        ]
        hit = [
            any(s in text for s in (b'a', b'bc', b'hh')) or t == EOS for text, t in zip(texts, turn)
        ]
        self.assertFalse(any(hit[:-1]))
        if hit[-1]:
          ended['eos' if turn[-1] == EOS else 'stop'] += 1
        else:
          self.assertLen(turn, 12)
          ended['budget'] += 1
    self.assertGreater(min(ended['stop'], ended['eos']), 0, ended)

  def test_budgets_and_idle_rows(self):
    sampler = make_sampler(stops=(), eos=(), prefill_rows=4)
    context, prefilled = sampler.prefill(
        self.params, sampler.empty(4, 64), [[1, 2], [], [3], [4, 5, 6, 7, 8]], [0] * 4
    )
    np.testing.assert_array_equal(prefilled.lengths, [2, 0, 1, 5])
    before, calls = np.asarray(context.logits), []

    def decode(context, lengths, budgets, steps=99, enough=99):
      rows = sampler.idle_rows(4)
      rows.lengths[:] = lengths
      rows.budgets[:] = budgets
      rows.keys[:] = jax.random.key_data(self.keys)
      context, sampled = sampler.decode(self.params, context, rows, steps, enough)
      calls.append(jax.device_get(sampled))
      return context

    context = decode(context, [2, 0, 1, 5], [3, 0, 100, 0])
    self.assertEqual(calls[-1].counts.tolist(), [3, 0, 8, 0])  # a call has 8 steps
    self.assertEqual(calls[-1].alive.tolist(), [False, False, True, False])
    np.testing.assert_array_equal(context.logits[3], before[3])
    self.assertTrue(np.any(np.asarray(context.logits[0]) != before[0]))
    # A row that was not decoded while others were is unaffected by them.
    context = decode(context, [5, 0, 9, 5], [0, 0, 0, 8])
    alone, _, _ = self.play(
        make_sampler(stops=(), eos=()), [[[4, 5, 6, 7, 8]]], budgets=[8], keys=self.keys[3:]
    )
    self.assertEqual(alone[0][5:], calls[-1].tokens[3].tolist())
    # The call ends with the step in which enough rows have stopped.
    context = decode(context, [5, 0, 9, 13], [2, 0, 5, 7], enough=2)
    self.assertEqual(calls[-1].counts.tolist(), [2, 0, 5, 5])
    decode(context, [7, 0, 14, 18], [9, 0, 9, 9], steps=3)
    self.assertEqual(calls[-1].counts.tolist(), [3, 0, 3, 3])

  def test_slots_run_out(self):
    sampler = make_sampler(stops=(), eos=(), max_slots=10, slot_buckets=(8,), prefill_rows=4)
    rows, at, logp = self.play(sampler, [[[1, 2, 3, 4]]], budgets=[6], keys=self.keys[:1])
    self.assertLen(rows[0], 10)  # to the very last slot
    np.testing.assert_allclose(logp[0], teacher_forced(self.params, rows)[0][at[0]], atol=1e-5)
    with self.assertRaisesRegex(ValueError, 'do not fit'):
      self.play(sampler, [[[1, 2, 3, 4]]], budgets=[7], keys=self.keys[:1])
    with self.assertRaisesRegex(ValueError, 'without any context'):
      self.play(sampler, [[[]]], budgets=[1], keys=self.keys[:1])

  def test_rows_taken_out_and_put_elsewhere(self):
    sampler = make_sampler()
    ids = [[5, 6, 7, 8, 9], [1, 2]]
    pair, _ = sampler.prefill(self.params, sampler.empty(2, 64), ids, [0, 0])
    group = sampler.put(sampler.empty(4, 64), pair, targets=[3, 0], sources=[0, 1])
    again = sampler.take(group, [0, 3])
    np.testing.assert_array_equal(again.logits, np.asarray(pair.logits)[::-1])
    np.testing.assert_array_equal(again.k[0][1], pair.k[0][0])
    other = jax.tree.map(lambda x: x + 1, pair)
    group = sampler.put(group, other, targets=[1], sources=[1])
    np.testing.assert_array_equal(group.logits[1], other.logits[1])
    np.testing.assert_array_equal(group.v[0][np.array([0, 3])], again.v[0])
    np.testing.assert_array_equal(group.logits[2], 0)

  def test_chunks_depend_on_row_ids_alone(self):
    """The chunks of a row do not depend on its neighbours'."""
    sampler, calls = make_sampler(chunk_buckets=(3, 8), prefill_rows=2), []
    read = sampler._prefill
    note = lambda params, context, tokens, starts, real: (
        calls.append((tokens.shape[1], starts.tolist(), real.tolist()))
        or read(params, context, tokens, starts, real)
    )
    with mock.patch.object(sampler, '_prefill', side_effect=note):
      sampler.prefill(self.params, sampler.empty(2, 64), [list(range(20)), [1, 2, 3, 4]], [0, 5])
    self.assertEqual(
        calls,
        [(8, [0, 5], [8, 0]), (8, [8, 5], [8, 0]), (3, [16, 5], [3, 3]), (3, [19, 8], [1, 1])],
    )

  def test_no_compile_in_the_second_batch(self):
    sampler = make_sampler()
    self.play(sampler, self.FORCED)
    variants = sampler.compiled_variants()
    self.play(sampler, self.FORCED)
    self.assertEqual(sampler.compiled_variants(), variants)

  def test_default_slot_buckets(self):
    self.assertEqual(sampling.default_slot_buckets(600), (128, 192, 256, 384, 512, 600))
    self.assertEqual(sampling.default_slot_buckets(100), (100,))


if __name__ == '__main__':
  absltest.main()
