"""Calls in threads that the process does not wait for."""

import threading
from unittest import mock

from absl.testing import absltest

from stppo_jax.net import calls


class ThreadedCallTest(absltest.TestCase):

  def test_error_just_after_a_wait_is_raised(self):
    """The call fails when the wait is over, and before the caller looks whether it has ended."""
    goes_on = threading.Event()

    def fail():
      goes_on.wait(60)
      raise ValueError('late')

    def is_alive(call):
      goes_on.set()
      call.join()
      return False

    call = calls.ThreadedCall(fail)
    with mock.patch.object(calls.ThreadedCall, 'is_alive', is_alive):
      with self.assertRaisesRegex(ValueError, '^late$'):
        call.wait(0.0)


if __name__ == '__main__':
  absltest.main()
