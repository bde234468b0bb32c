"""Packing: no token lost or twice, little padding, and the mapping of tokens in both directions."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types
from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import filters
from stppo_jax.algorithms import variants
from stppo_jax.rollout import batching
from stppo_jax.training import minibatches
from stppo_jax.training import packing


class PackTest(parameterized.TestCase):

  def test_by_hand(self):
    """Bins of 8, two per micro-batch: 5 and 2 | 4 and 4; 3 and 2 are left for bins of 4."""
    found = packing.pack([4, 5, 0, 4, 2, 3, 2], 2, (4, 8))
    np.testing.assert_array_equal(found.length, [4, 5, 0, 4, 2, 3, 2])
    # 5 goes first, 4 and 4 share a bin, 3 follows 5, and the two of 2 do not fit any more.
    np.testing.assert_array_equal(found.bin, [1, 0, 0, 1, 2, 0, 2])
    np.testing.assert_array_equal(found.offset, [0, 0, 0, 4, 0, 5, 2])
    self.assertEqual(packing.num_computed(found, 2, (4, 8)), 2 * 8 + 2 * 4)

  @parameterized.product(num_bins=(1, 2, 8), length_buckets=((50,), (20, 50), (10, 20, 35, 50)))
  def test_rows_do_not_overlap_and_micro_batches_suffice(self, num_bins, length_buckets):
    rng = np.random.default_rng(num_bins)
    lengths = np.minimum(rng.geometric(0.07, 40), 50) * (rng.random(40) > 0.1)
    found = packing.pack(lengths, num_bins, length_buckets)
    taken = np.zeros((-(-40 // num_bins) * num_bins, length_buckets[-1]), int)
    for b, offset, length in zip(found.bin, found.offset, found.length):
      taken[b, offset : offset + length] += 1
    np.testing.assert_array_equal(found.length, lengths)
    self.assertEqual(taken.sum(), lengths.sum())
    self.assertLessEqual(taken.max(), 1)
    computed = packing.num_computed(found, num_bins, length_buckets)
    self.assertBetween(computed, lengths.sum(), lengths.sum() + 2.5 * num_bins * length_buckets[-1])
    count = int(packing.num_micro_batches(found, num_bins))
    chosen = [int(packing.which_bucket(found, j, num_bins, length_buckets)) for j in range(count)]
    self.assertEqual(computed, num_bins * sum(length_buckets[k] for k in chosen))

  def test_many_short_rows_leave_little_padding(self):
    lengths = np.random.default_rng(0).integers(10, 120, 64)
    found = packing.pack(lengths, 2, (192, 384))
    self.assertLess(1 - lengths.sum() / packing.num_computed(found, 2, (192, 384)), 0.1)

  def test_unshared_bins_hold_one_row(self):
    """Two bins per micro-batch: 7 and 5 | 3 and 2 | 2; the shorter ones in bins of 4."""
    found = packing.pack([2, 5, 0, 3, 7, 2], 2, (4, 8), shared=False)
    np.testing.assert_array_equal(found.bin[[4, 1, 3, 0, 5]], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(found.offset, 0)
    self.assertEqual(packing.num_computed(found, 2, (4, 8)), 2 * 8 + 2 * 4 + 2 * 4)

  def test_no_rows_at_all(self):
    found = packing.pack(np.zeros(4, int), 2, (8,))
    self.assertEqual(packing.num_computed(found, 2, (8,)), 0)
    self.assertEqual(int(packing.num_micro_batches(found, 2)), 0)


class LayoutTest(absltest.TestCase):

  def test_layout_by_hand(self):
    """Rows a a a, b b, c c c c and nothing, in one micro-batch of two bins of 6."""
    found = packing.pack([3, 2, 4, 0], 2, (6,))
    layout = packing.layout(found, 0, 2, 6)
    tokens = jnp.full((4, 6), 9).at[0, :3].set(jnp.array([1, 2, 3]))
    tokens = tokens.at[1, :2].set(jnp.array([4, 5])).at[2, :4].set(jnp.array([6, 7, 8, 10]))
    np.testing.assert_array_equal(layout.pack(tokens), [[6, 7, 8, 10, 4, 5], [1, 2, 3, 0, 0, 0]])
    np.testing.assert_array_equal(layout.position, [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]])
    np.testing.assert_array_equal(layout.segments, [[2, 2, 2, 2, 1, 1], [0, 0, 0, -1, -1, -1]])

  def test_pack_and_unpack_over_all_micro_batches(self):
    lengths = np.random.default_rng(0).integers(0, 9, 12)
    found = packing.pack(lengths, 2, (8, 10))
    x = jnp.arange(1.0, 12 * 10 + 1).reshape(12, 10)
    total = 0
    for j in range(int(packing.num_micro_batches(found, 2))):
      columns = (8, 10)[int(packing.which_bucket(found, j, 2, (8, 10)))]
      layout = packing.layout(found, j, 2, columns)
      total += layout.unpack(layout.pack(x))
    kept = (np.arange(10) > 0) & (np.arange(10) < lengths[:, None])
    np.testing.assert_array_equal(total, np.where(kept, x, 0))

  def test_sum_traces_once_per_capacity(self):
    found = packing.pack(np.random.default_rng(0).integers(0, 9, 12), 2, (8, 10))
    x = jnp.arange(1.0, 12 * 10 + 1).reshape(12, 10)
    traced = []

    def unpacked(layout):
      traced.append(layout.segments.shape[1])
      return {'x': layout.unpack(layout.pack(x))}

    compute = jax.jit(lambda packed: packing.sum_over(unpacked, packed, 2, (8, 10)))
    kept = (np.arange(10) > 0) & (np.arange(10) < found.length[:, None])
    np.testing.assert_array_equal(compute(found)['x'], np.where(kept, x, 0))
    self.assertEqual(traced, [8, 10])

  def test_only_the_bins_of_some_rows(self):
    """Bins of 8, two per micro-batch: of {0: 8}, {1: 7}, {2: 6, 4: 2}, {3: 5}, those of rows 1 and
    4."""
    found = packing.pack([8, 7, 6, 5, 2], 2, (8,))
    np.testing.assert_array_equal(found.bin, [0, 1, 2, 3, 2])
    kept = jax.jit(packing.only, static_argnums=2)(
        found, jnp.array([False, True, False, False, True]), 2
    )
    np.testing.assert_array_equal(kept.length, [0, 7, 6, 0, 2])
    np.testing.assert_array_equal(kept.bin[jnp.array([1, 2, 4])], [0, 1, 1])
    np.testing.assert_array_equal(kept.offset, found.offset)
    self.assertEqual(int(packing.num_micro_batches(kept, 2)), 1)
    none = packing.only(found, jnp.zeros(5, bool), 2)
    self.assertEqual(int(packing.num_micro_batches(none, 2)), 0)


def make_rows(segments):
  """Returns the rows of agent programs' episodes, each with so many segments and its own score."""
  rows = []
  for number, count in enumerate(segments):
    for k in range(count):
      turn = types.Turn(
          np.full(1 + (number + k) % 3, 5, np.int32),
          np.zeros(1 + (number + k) % 3, np.float32),
          np.zeros(0, np.int32),
          reward=float(number),
      )
      row = types.Episode(types.Task('t', 'q'), number // 4, np.ones(2, np.int32), [turn])
      rows.append(dataclasses.replace(row, number=number, whole_score=float(number)))
  return batching.by_length(rows)


class DealTest(absltest.TestCase):

  def deal(self, segments, epochs=2):
    rows = make_rows(segments)
    bins = minibatches.Bins(4, epochs, 2, (8,), 0, None)
    return rows, *minibatches.to_device(rows, bins, jax.random.key(1))

  def test_demonstrations_are_marked_in_all_batches(self):
    rows = make_rows([1] * 4)
    key = jax.random.key(1)
    batch, _ = minibatches.to_device(rows, minibatches.Bins(4, 1, 2, (8,), 0, None), key)
    self.assertIsNone(batch.demonstrated)
    bins = minibatches.Bins(4, 1, 2, (8,), 0, None, marks_demonstrations=True)
    batch, _ = minibatches.to_device(rows, bins, key)
    np.testing.assert_array_equal(batch.demonstrated, np.zeros(4))

  def test_shapes_are_known_before(self):
    for roles, whole_groups, mini_batch, marked in (
        ((), False, 4, False),
        (('a', 'b'), False, 4, True),
        ((), True, 3, False),  # two steps of two groups and of one
    ):
      bins = minibatches.Bins(
          mini_batch, 2, 2, (8,), 0, None, whole_groups=whole_groups, marks_demonstrations=marked
      )
      rows = []
      for row in make_rows([1] * 6 if whole_groups else [1] * 8):
        for role in roles or ('',):
          number = row.number if roles else None
          changes = dict(number=number, role=role, group=row.number // 2, whole_score=None)
          rows.append(dataclasses.replace(row, **changes))
      batch, steps = minibatches.to_device(rows, bins, jax.random.key(1))
      num_episodes = len(rows) // max(1, len(roles))
      expected = minibatches.shapes(bins, num_episodes, 2, roles)
      for shapes, arrays in zip(expected, (batch, steps[0]), strict=True):
        self.assertEqual(jax.tree.structure(shapes), jax.tree.structure(arrays))
        for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(arrays)):
          self.assertEqual((shape.shape, shape.dtype), (array.shape, array.dtype))

  def test_a_step_has_all_rows_of_its_episodes(self):
    segments = [1, 5, 1, 2, 1, 1, 3, 1]
    rows, batch, steps = self.deal(segments)
    self.assertLen(steps, 2 * 2)  # 2 epochs of 8 episodes in steps of 4, however many the rows
    for step in steps:
      self.assertLen(step.rows, len(batch.tokens) // 2)
      numbers = [rows[row].number for row in step.rows if row < len(rows)]
      self.assertLen(set(numbers), 4)
      self.assertLen(numbers, sum(segments[number] for number in set(numbers)))
    for epoch in (steps[:2], steps[2:]):
      together = np.concatenate([step.rows for step in epoch])
      np.testing.assert_array_equal(np.sort(together), np.arange(len(batch.tokens)))

  def test_rows_of_padding_change_no_number(self):
    rows, batch, steps = self.deal([1, 3, 1, 2, 1, 1, 3, 1])
    variant = dataclasses.replace(variants.VARIANTS['grpo'], advantage='group_centred')
    self.assertGreater(len(batch.tokens), len(rows))
    whole = advantages.estimate(batch, variant)
    real = jax.tree.map(lambda x: x[: len(rows)], batch)
    alone = advantages.estimate(real, variant)
    np.testing.assert_array_equal(whole.advantages[: len(rows)], alone.advantages)
    np.testing.assert_array_equal(whole.advantages[len(rows) :], 0)
    for step in steps:
      weights = lambda rows: filters.weights(jax.tree.map(lambda x: x[rows], whole), variant)
      own = step.rows[step.rows < len(rows)]
      for padded, plain in zip(weights(step.rows)[:4], weights(own)[:4]):
        np.testing.assert_array_equal(padded[: len(own)], plain)
        np.testing.assert_array_equal(padded[len(own) :], 0)
      self.assertEqual(step.packing.length[len(own) :].sum(), 0)  # no bin holds padding rows

  def test_few_programs_for_any_number_of_segments(self):
    compiled = jax.jit(lambda batch, step: batch.tokens[step.rows].sum())
    rng = np.random.default_rng(0)
    for _ in range(20):
      _, batch, steps = self.deal(rng.integers(1, 5, size=8), epochs=1)
      for step in steps:
        compiled(batch, step)
    self.assertLessEqual(compiled._cache_size(), 3)  # 4, 8 or 16 rows per step

  def test_one_row_episodes_need_no_padding(self):
    rows, batch, steps = self.deal([1] * 8)
    self.assertLen(batch.tokens, 8)
    plain = [dataclasses.replace(row, number=None, whole_score=None) for row in rows]
    _, expected = minibatches.to_device(
        plain, minibatches.Bins(4, 2, 2, (8,), 0, None), jax.random.key(1)
    )
    for ours, theirs in zip(steps, expected, strict=True):
      jax.tree.map(np.testing.assert_array_equal, ours, theirs)


if __name__ == '__main__':
  absltest.main()
