"""The figures of benchmarks/gpu.py, as far as a CPU can compute them."""

import contextlib
import functools
import io
import json
from unittest import mock

from absl import flags
from absl.testing import absltest
from absl.testing import flagsaver
from absl.testing import parameterized
from jax._src.cudnn import fused_attention_stablehlo as fused_attention
import numpy as np

from benchmarks import gpu
from stppo_jax.models import attention
from stppo_jax.models import attention_kernels
from stppo_jax.models import presets

HEADS = (2, 1, 16)


def setUpModule():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


def printed(function, *args):
  """Returns the lines of JSON that a function prints, and what it raises."""
  raised = None
  with contextlib.redirect_stdout(io.StringIO()) as out:
    try:
      function(*args)
    except RuntimeError as error:
      raised = error
  return [json.loads(line) for line in out.getvalue().splitlines()], raised


class KernelTest(parameterized.TestCase):

  @flagsaver.flagsaver(quick=True, repeats=1)
  def test_auto_is_close_to_plain_attention(self):
    lines, raised = printed(gpu.check_kernel)
    self.assertIsNone(raised)
    self.assertEqual([line['heads'] for line in lines], ['135M', '1.5B'])
    for line in lines:
      self.assertEqual(line['backend'], 'plain')
      self.assertBetween(max(line['gaps'].values()), 1e-4, gpu.KERNEL_TOLERANCE)  # bfloat16

  @flagsaver.flagsaver(quick=True)
  def test_another_kernel_than_expected_is_an_error(self):
    with mock.patch.object(attention, 'choose', lambda *args: 'cudnn'):
      lines, raised = printed(gpu.check_kernel)
    self.assertRegex(str(raised), 'cudnn on cpu: plain was expected')
    self.assertLen(lines, 1)

  @flagsaver.flagsaver(quick=True)
  def test_wrong_result_is_an_error(self):
    gaps = iter([0.0, 0.0, 0.03, 0.0])  # result, then three gradients
    with mock.patch.object(gpu, 'relative_gap', lambda x, y: next(gaps)):
      _, raised = printed(gpu.check_kernel)
    self.assertRegex(str(raised), '0.03')

  @parameterized.parameters((9, 3, 64), (12, 2, 128))
  def test_cudnn_lowers_for_cuda(self, *heads):
    """JAX asks the GPU for two numbers, which an H100 would answer like this."""
    self.enterContext(mock.patch.object(fused_attention, 'check_cudnn_version', lambda: 91500))
    self.enterContext(mock.patch.object(fused_attention, 'check_compute_capability', bool))
    attend = functools.partial(attention_kernels._cudnn, segments=None, mask=None, platform='gpu')
    inputs = gpu.attention_inputs(heads, 2, 1536, 'bfloat16')
    traced = gpu.attend_with(attend).trace(*inputs)
    text = traced.lower(lowering_platforms=('cuda',)).as_text()
    for name in ('Softmax', 'SoftmaxBackward'):
      self.assertIn(f'__cudnn$fmha{name}(', text)

  @parameterized.parameters('plain', 'cudnn', 'jax.nn with a mask', 'pallas')
  @flagsaver.flagsaver(quick=True, repeats=1)
  def test_kernels_equal_plain_attention(self, name):
    """Packed rows see nothing of their neighbours, and a row per bin needs no mask."""
    attend, is_packed = gpu.kernels(HEADS[-1])[name]
    lengths = np.array([40, 30, 20, 64, 7, 12])
    _, gap, computed = gpu.time_kernel(attend, is_packed, HEADS, 'float32', lengths, [32, 64], 2)
    self.assertLess(gap, 1e-5)
    self.assertEqual(computed, 256 if is_packed else 2 * (64 + 32 + 32))

  @flagsaver.flagsaver(quick=True, repeats=1)
  def test_kernel_that_cannot_run_says_why(self):
    def fails(*args):
      raise NotImplementedError('no kernel\nfor this device')

    with mock.patch.object(gpu, 'kernels', lambda width: {'theirs': (fails, True)}):
      lines, _ = printed(gpu.compare_kernels, 'quick', '135M', np.array([5, 4]), [64], 1)
    (line,) = lines
    self.assertEqual(line['cannot'], 'NotImplementedError: no kernel')


class FirstUpdatesTest(absltest.TestCase):

  def compare(self, **changes):
    """Compares the expected losses with the same ones after changes {name: factor}."""
    expected = json.loads(gpu.EXPECTED.read_text(encoding='utf-8'))
    rows = [
        {name: x * changes.get(name, 1) for name, x in update.items()} | {'step': step}
        for step, update in enumerate(expected, start=1)
    ]
    with (
        mock.patch.object(gpu.loop, 'start'),
        mock.patch.object(gpu.metrics_lib, 'read_metrics', lambda workdir: [{'step': 0}, *rows]),
        mock.patch.object(gpu.jax.config, 'update'),
    ):
      return printed(gpu.compare_first_updates)

  def test_equal_losses_pass(self):
    lines, raised = self.compare()
    self.assertIsNone(raised)
    self.assertEqual([line['update'] for line in lines], [1, 2])

  def test_losses_within_one_percent_pass(self):
    self.assertIsNone(self.compare(**{'actor/pg_loss': 1.009, 'critic/vf_loss': 0.991})[1])
    _, raised = self.compare(**{'actor/pg_loss': 1.011})
    self.assertRegex(str(raised), 'actor/pg_loss')
    self.assertNotRegex(str(raised), 'vf_loss')

  def test_other_batch_or_no_number_is_an_error(self):
    self.assertRegex(str(self.compare(**{'critic/rewards/mean': 1.001})[1]), 'rewards')
    self.assertRegex(str(self.compare(**{'critic/vf_loss': float('nan')})[1]), 'vf_loss')


class SizesTest(absltest.TestCase):

  def test_flops_by_hand(self):
    config = presets.PRESETS['smollm2-135m']
    layer = 576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536 + 2 * 576  # with its norms
    params = 30 * layer + 576 + 49152 * 576
    expected = 2 * params + 2 * 30 * 9 * 64 * 2048
    self.assertEqual(gpu.forward_flops(config, 2048), expected)

  def test_lengths_fit_their_bins(self):
    forms = json.loads(gpu.LENGTHS.read_text(encoding='utf-8'))
    self.assertEqual(list(forms), ['full', 'cpu'])
    for fields in forms.values():
      self.assertLen(fields['lengths'], 256)
      self.assertBetween(min(fields['lengths']), 32, max(fields['lengths']))
      self.assertLessEqual(max(fields['lengths']), max(fields['capacities']))


if __name__ == '__main__':
  absltest.main()
