"""The lines that the benchmarks print."""

import contextlib
import io
import json

from absl.testing import absltest
import numpy as np

from benchmarks import figures
from benchmarks import sizes
from stppo_jax.models import presets


def repeats(*tokens_per_s):
  speeds = np.array(tokens_per_s, float)
  return {'tokens_per_s': speeds, 'tokens_per_cpu_s': speeds, 'first_call_s': 1.0, 'peak_mb': 100.0}


def reported(ours, peer):
  with contextlib.redirect_stdout(io.StringIO()) as out:
    figures.report('update', 'ppo', '2.9M', 2, ours, 'torch', peer)
  return json.loads(out.getvalue())


class ReportTest(absltest.TestCase):

  def test_ratios_by_hand(self):
    line = reported(repeats(20, 30, 24), repeats(10, 10, 12))
    self.assertEqual(line['ratio'], 2.4)  # ratio of the medians
    self.assertEqual(line['spread']['ratio'], [2, 3])  # ratios of adjacent repeats
    self.assertEqual(line['unreliable'], [])

  def test_what_varies_by_more_than_half_is_named(self):
    line = reported(repeats(20, 31, 24), repeats(10, 10, 10))
    self.assertEqual(line['unreliable'], ['ours', 'ratio'])
    line = reported(repeats(20, 400, 24), repeats(1, 20, 1.2))
    self.assertEqual(line['unreliable'], ['ours', 'peer'])


class SizesTest(absltest.TestCase):

  def test_each_size_has_its_published_shape(self):
    for size in sizes.SIZES.values():
      shape, published = sizes.shape_of(size, 'bfloat16', size.layers), presets.PRESETS[size.preset]
      self.assertEqual(shape.num_layers, size.layers or published.num_layers)
      self.assertEqual((shape.d_model, shape.param_dtype), (published.d_model, 'bfloat16'))


if __name__ == '__main__':
  absltest.main()
