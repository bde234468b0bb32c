"""Flags that would end the process are left out."""

import os
from unittest import mock

from absl.testing import absltest

from stppo_jax.distributed import xla_flags


class XlaFlagsTest(absltest.TestCase):

  def test_unknown_flags_are_left_out(self):
    given = ['--xla_no_such_flag=1', '--xla_backend_optimization_level=0', '--xla_cpu_nor_this=a']
    self.assertEqual(xla_flags.known(given), ['--xla_backend_optimization_level=0'])

  def test_another_failure_is_not_hidden(self):
    with mock.patch.object(xla_flags, '_PROGRAM', 'raise OSError("no memory")'):
      with self.assertRaisesRegex(RuntimeError, '(?s)does not start.*no memory'):
        xla_flags.known(['--xla_backend_optimization_level=0'])

  def test_tests_use_only_known_flags(self):
    added = os.environ['STPPO_TESTS_XLA_FLAGS'].split()
    self.assertIn('--xla_force_host_platform_device_count=8', added)
    self.assertEqual(xla_flags.known(added), added)


if __name__ == '__main__':
  absltest.main()
