"""Deterministic operations: the flag is set before JAX starts, and refused when it is too late."""

import os
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
import jax

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.distributed import determinism
from stppo_jax.training import loop

PROGRAM = """
import os
from stppo_jax.distributed import determinism
determinism.enable()
determinism.enable()
print(os.environ['XLA_FLAGS'])
import jax
print(jax.jit(lambda x: x + 1)(1))
determinism.enable()
"""


class DeterminismTest(absltest.TestCase):

  def test_flag_is_set_before_the_devices_start(self):
    given = '--xla_cpu_multi_thread_eigen=false'
    environment = os.environ | {'XLA_FLAGS': given, 'JAX_PLATFORMS': 'cpu'}
    program = [sys.executable, '-c', PROGRAM]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    flag = f'{determinism.FLAG}=true'
    self.assertEqual(done.stdout.splitlines(), [f'{given} {flag}'.strip(), '2'])

  def test_running_gpu_without_the_flag_is_refused(self):
    jax.devices()
    self.assertTrue(determinism._has_started())
    with mock.patch.dict(os.environ, {'XLA_FLAGS': ''}):
      determinism.enable()  # a CPU needs no flag
      self.assertEqual(os.environ['XLA_FLAGS'], '')
      with mock.patch.object(jax, 'default_backend', lambda: 'gpu'):
        with self.assertRaisesRegex(types.UserError, f'^[^\n]*XLA_FLAGS={determinism.FLAG}=true'):
          determinism.enable()
        os.environ['XLA_FLAGS'] = f'{determinism.FLAG}=true'
        determinism.enable()

  def test_flag_that_xla_would_die_of_is_refused(self):
    unknown = mock.patch.object(determinism, 'FLAG', '--xla_gpu_no_such_flag')
    with unknown, mock.patch.object(determinism, '_has_started', return_value=False):
      with self.assertRaisesRegex(types.UserError, '^[^\n]*jaxlib has no flag --xla_gpu_no_such'):
        determinism.enable()
    self.assertNotIn('no_such_flag', os.environ['XLA_FLAGS'])

  def test_contradiction_is_refused(self):
    with mock.patch.dict(os.environ, {'XLA_FLAGS': f'{determinism.FLAG}=false'}):
      with self.assertRaisesRegex(types.UserError, 'take it out of XLA_FLAGS'):
        determinism.enable()

  def test_training_sets_it_first(self):
    config = schema.Config()
    config.train.deterministic = True
    with mock.patch.object(determinism, 'enable', side_effect=types.UserError('asked')):
      with self.assertRaisesRegex(types.UserError, 'asked'):
        loop.start(config, 'nowhere')


if __name__ == '__main__':
  absltest.main()
