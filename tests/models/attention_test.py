"""Attention: masks written out, sums in float64, and every backend against the plain one."""

import functools
import os
import subprocess
import sys
import types
from unittest import mock

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import attention
from stppo_jax.models import attention_kernels
from stppo_jax.models import sharding
from stppo_jax.types import UserError


def make_inputs(rows=2, length=6, heads=4, kv_heads=2, width=8, seed=0):
  """q [B,T,N,H], k and v [B,T,M,H]."""
  keys = jax.random.split(jax.random.key(seed), 3)
  return tuple(
      jax.random.normal(key, (rows, length, n, width))
      for key, n in zip(keys, (heads, kv_heads, kv_heads))
  )


class MaskTest(absltest.TestCase):

  def test_masks_written_out(self):
    drawn = lambda *args: np.asarray(attention.causal_mask(*args))[:, 0, 0].astype(int).tolist()
    self.assertEqual(drawn(3), [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]])
    segments = jnp.array([[5, 5, 7], [1, 2, 2]])
    rows = [[[1, 0, 0], [1, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 1, 1]]]
    self.assertEqual(drawn(3, segments), rows)
    self.assertEqual(drawn(3, segments, 1, 2), [row[1:] for row in rows])
    self.assertEqual(drawn(3, None, 0, 3, 2), [[[1, 0, 0], [1, 1, 0], [0, 1, 1]]])

  def test_a_cache_mask_written_out(self):
    slots = jnp.array([[1, 2], [0, 1]])  # two rows of lengths 1 and 0 read two tokens each
    np.testing.assert_array_equal(
        attention.cache_mask(slots, 4)[:, 0, 0],
        [[[1, 1, 0, 0], [1, 1, 1, 0]], [[1, 0, 0, 0], [1, 1, 0, 0]]],
    )
    np.testing.assert_array_equal(
        attention.cache_mask(slots, 4, window=2)[:, 0, 0],
        [[[1, 1, 0, 0], [0, 1, 1, 0]], [[1, 0, 0, 0], [1, 1, 0, 0]]],
    )


class PlainTest(parameterized.TestCase):

  @parameterized.parameters(0, 3)
  def test_equals_sums_in_float64(self, chunk):
    q, k, v = make_inputs()
    segments = np.array([[1, 1, 1, 2, 2, 3], [4, 4, 0, 0, 4, 4]])  # 4 comes back: one segment still
    actual = attention.causal(q, k, v, jnp.asarray(segments), chunk=chunk)
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    for b, t, n in np.ndindex(2, 6, 4):
      seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
      weights = np.exp([q[b, t, n] @ k[b, s, n // 2] / np.sqrt(8) for s in seen])
      expected = sum(w * v[b, s, n // 2] for w, s in zip(weights / weights.sum(), seen))
      np.testing.assert_allclose(actual[b, t, n], expected, atol=1e-6)

  def by_definition(self, q, k, v, segments):
    """A softmax over all keys, whose derivative JAX finds."""
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
    scores = jnp.einsum('btnh,bsnh->bnts', q, k) / np.sqrt(q.shape[-1])
    seen = np.tril(np.ones((length, length), bool)) & (segments[:, :, None] == segments[:, None])
    return jnp.einsum('bnts,bsnh->btnh', jax.nn.softmax(scores, where=seen[:, None]), v)

  @parameterized.parameters((63, 0), (200, 50), (300, 0))
  @pytest.mark.slow_after(1)
  def test_blocks_and_their_written_out_derivative(self, length, chunk):
    """In float64: one block, 4 of which the last is short, 4 of more than 64; 200 and 300 in chunks
    of 50."""
    with jax.enable_x64(True):
      inputs = [np.asarray(a, np.float64) for a in make_inputs(length=length)]
      weights, segments = np.cos(np.arange(inputs[0].size)).reshape(inputs[0].shape), np.zeros(
          (2, length), int
      )
      segments[0, 20:], segments[0, 50:] = 1, 2
      loss = lambda attend: jax.value_and_grad(
          lambda inputs: jnp.sum(weights * jnp.sin(attend(*inputs, segments)))
      )(inputs)
      actual = loss(functools.partial(attention.causal, chunk=chunk))
      # Scores are kept in float32, as in training; NumPy's weights make its error 1e-7 of the
      # largest.
      chex.assert_trees_all_close(actual, loss(self.by_definition), atol=5e-6)

  @parameterized.parameters(
      (1024, 128, 128), (1000, 128, 125), (1500, 512, 500), (100, 128, 128), (100, 0, 0)
  )
  def test_a_chunk_is_a_divisor_of_the_length(self, length, chunk, expected):
    self.assertEqual(attention._divisor(length, chunk), expected)

  def test_length_without_a_near_divisor_is_logged(self):
    with self.assertLogs(level='WARNING') as logged:
      self.assertEqual(attention._divisor(1009, 128), 0)
    self.assertIn('length_buckets', logged.output[0])

  def test_bfloat16_comes_close(self):
    inputs = make_inputs(length=128, width=32)
    segments = np.zeros((2, 128), int)
    exact = output_and_gradients(inputs, segments)
    rounded = output_and_gradients([a.astype(jnp.bfloat16) for a in inputs], segments)
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(rounded)):
      self.assertEqual(b.dtype, jnp.bfloat16)
      error = np.linalg.norm(np.asarray(a - b.astype(jnp.float32))) / np.linalg.norm(np.asarray(a))
      self.assertBetween(error, 1e-4, 0.015)


SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 1, 1, 2]], [40, 88, 64, 64], axis=1)  # [2,256]


def paths(*chains):
  """Paths [1,T] of chains (number of tokens, parent of the first one, or None), one by one."""
  parents = []
  depths = []
  for number, parent in chains:
    for i in range(number):
      own = len(parents)
      before = parent if i == 0 else own - 1
      parents.append(own if before is None else before)
      depths.append(0 if before is None else depths[before] + 1)
  ends = list(range(1, len(parents) + 1))
  for column in reversed(range(len(parents))):
    parent = parents[column]
    ends[parent] = max(ends[parent], ends[column])
  return attention.Paths(*(np.array([x], np.int32) for x in (parents, ends, depths)))


FOREST = jax.tree.map(
    lambda *x: np.concatenate(x),
    paths((100, None), (40, 99), (60, 99), (16, 199), (24, 199), (16, None)),
    paths((30, None), (2, 29), (1, 29), (223, 29)),
)
SHORT_FOREST = jax.tree.map(
    lambda *x: np.concatenate(x),
    paths((50, None), (40, 49), (38, 49)),
    paths((10, None), (60, 9), (28, 69), (30, None)),
)


def output_and_gradients(inputs, segments, **options):
  """Of a loss that weighs every output differently."""
  weights = jax.random.normal(jax.random.key(9), inputs[0].shape)

  def loss(q, k, v, segments):
    y = attention.causal(q, k, v, segments, **options)
    return jnp.sum(weights * jnp.sin(y)), y

  grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
  (_, y), gradients = grad(*inputs, segments)
  return y, gradients


class SkippingTest(absltest.TestCase):

  def test_chunks_attend_up_to_their_block_end(self):
    """8 chunks of 32 queries in 4 blocks: keys 64, 128, 192, 256 instead of 256 each time."""
    q, k, v = make_inputs(length=256)
    text = str(jax.make_jaxpr(functools.partial(attention.causal, chunk=32))(q, k, v))
    for keys in (64, 128, 192, 256):
      self.assertIn(f'f32[2,2,64,{keys}]', text)  # scores [B,M,g chunk,keys]


class BackendsTest(parameterized.TestCase):
  """Without an accelerator: the TPU kernel is interpreted, and jax.nn's own replaces cuDNN."""

  @parameterized.parameters(
      ('splash', None, 128),
      ('splash', SEGMENTS, 64),
      ('splash', SEGMENTS, 64, 70, 2.0),
      ('splash', FOREST, 64),
      ('splash', FOREST, 64, 70, 2.0),
      ('cudnn', None, 8),
      ('cudnn', None, 8, 70),
  )
  def test_equals_plain_with_gradients(self, backend, segments, width, window=0, softcap=0.0):
    inputs = make_inputs(length=256, heads=6, kv_heads=2, width=width)
    options = {'window': window, 'softcap': softcap}
    expected = output_and_gradients(inputs, segments, **options)
    actual = output_and_gradients(inputs, segments, backend=backend, chunk=64, **options)
    chex.assert_trees_all_close(actual, expected, atol=1e-5)

  def test_the_tpu_kernel_is_not_imported_elsewhere(self):
    program = 'import sys; from stppo_jax.models import attention; print(*sys.modules)'
    ran = subprocess.run(
        [sys.executable, '-c', program],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    self.assertIn('stppo_jax.models.attention', ran.stdout)
    self.assertNotIn('splash_attention', ran.stdout)

  @parameterized.parameters(
      ('splash', 2, SEGMENTS[:, 20:148]),
      ('splash', 1, SEGMENTS[:, 20:148]),
      ('splash', 2, SHORT_FOREST),
      ('cudnn', 2, None),
  )
  def test_over_eight_devices(self, backend, kv_heads, segments):
    """Rows over data and fsdp, heads over tensor where the key heads divide; 28 / 4 in small."""
    mesh = sharding.make_mesh(2, 2, 2, jax.devices()[:8])
    rows = sharding.rows(mesh)
    inputs = make_inputs(rows=4, length=128, heads=6, kv_heads=kv_heads, width=64)
    segments = jax.tree.map(lambda x: np.tile(x, (2, 1)), segments)
    expected = output_and_gradients(inputs, segments)
    placed = jax.device_put(inputs, rows)
    actual = output_and_gradients(placed, segments, backend=backend, row_sharding=rows)
    chex.assert_trees_all_close(actual, expected, atol=1e-5)

  def test_each_device_computes_its_part_alone(self):
    mesh = sharding.make_mesh(2, 2, 2, jax.devices()[:8])
    q, k, v = make_inputs(rows=8, length=128, heads=12, kv_heads=4, width=64)
    with mock.patch.object(attention_kernels, '_splash', wraps=attention_kernels._splash) as splash:
      attend = functools.partial(
          attention.causal, backend='splash', row_sharding=sharding.rows(mesh)
      )
      jax.eval_shape(attend, q, k, v)
    q, k = splash.call_args.args[:2]
    self.assertEqual(q.shape, (2, 128, 6, 64))
    self.assertEqual(k.shape, (2, 128, 2, 64))


class ChooseTest(parameterized.TestCase):

  def device(self, platform, capability=''):
    return types.SimpleNamespace(
        platform=platform, device_kind=f'{platform} kind', compute_capability=capability
    )

  @parameterized.parameters(
      ('tpu', '', 'bfloat16', 128, (1024, 4096), 'splash'),
      ('tpu', '', 'float32', 64, (128,), 'splash'),
      ('tpu', '', 'bfloat16', 96, (1024,), 'plain'),
      ('tpu', '', 'bfloat16', 128, (1024, 1000), 'plain'),
      ('gpu', '9.0', 'bfloat16', 128, (1000,), 'cudnn'),
      ('gpu', '7.5', 'bfloat16', 128, (1024,), 'plain'),
      ('gpu', 'gfx942', 'bfloat16', 128, (1024,), 'plain'),
      ('gpu', '10.0', 'float32', 128, (1024,), 'plain'),
      ('gpu', '8.0', 'bfloat16', 256, (1024,), 'plain'),
      ('gpu', '9.0', 'bfloat16', 256, (1024,), 'cudnn'),
      ('gpu', '10.0', 'bfloat16', 264, (1024,), 'plain'),
      ('gpu', '12.0', 'bfloat16', 132, (1024,), 'plain'),
      ('cpu', '', 'bfloat16', 128, (1024,), 'plain'),
  )
  def test_auto_takes_what_can_run(self, platform, capability, dtype, width, lengths, expected):
    device = self.device(platform, capability)
    self.assertEqual(attention.choose('auto', device, dtype, width, lengths), expected)
    for backend in ('splash', 'cudnn', 'plain'):
      if backend in (expected, 'plain'):
        self.assertEqual(attention.choose(backend, device, dtype, width, lengths), backend)
      else:
        with self.assertRaisesRegex(UserError, f"attention='{backend}' (needs|computes) .*plain"):
          attention.choose(backend, device, dtype, width, lengths)

  def test_fallback_of_auto_is_logged_once(self):
    logging._log_counter_per_token.clear()
    device = self.device('gpu', '9.0')
    with self.assertLogs(level='WARNING') as logs:
      for _ in range(2):
        chosen = attention.choose('auto', device, 'bfloat16', 64, (1024,), softcap=50.0)
        self.assertEqual(chosen, 'plain')
    (message,) = logs.output
    self.assertIn('plain attention in training, because cudnn needs scores without a cap', message)


if __name__ == '__main__':
  absltest.main()
