"""The signal that ends work early, and a Ctrl-C that waits."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import signal
import threading
import time

from stppo_jax import types

_POLL_S = 0.25  # between two looks at the conditions


class StopSignal:
  """Says whether work in progress is to end. Threads may share it.

  Args:
    *conditions: the signal is set while one of them is true, or once `set` was called. A part of
      a run has `StopSignal(signal_of_the_run.is_set)`, so that it ends with the run or alone.
  """

  def __init__(self, *conditions: Callable[[], bool]):
    self._conditions = conditions
    self._event = threading.Event()

  def set(self) -> None:
    """Sets the signal, for good."""
    self._event.set()

  def is_set(self) -> bool:
    """Returns whether work is to end. A condition may raise KeyboardInterrupt, see cli/signals."""
    return self._event.is_set() or any(condition() for condition in self._conditions)

  def raise_if_set(self) -> None:
    """Raises Stopped if work is to end."""
    if self.is_set():
      raise types.Stopped

  def wait(self, seconds: float) -> bool:
    """Waits until the signal is set, for at most `seconds`. Returns whether it is set."""
    end = time.monotonic() + seconds
    while not self.is_set():
      left_s = end - time.monotonic()
      if left_s <= 0:
        return False
      self._event.wait(min(left_s, _POLL_S))
    return True


NEVER = StopSignal()  # for work that nothing ends


@contextlib.contextmanager
def interrupt_afterwards() -> Iterator[None]:
  """Lets a Ctrl-C wait for the end of the block, for libraries that do not survive one.

  A second Ctrl-C does not wait. Threads other than the main one are never interrupted.
  """
  handler = signal.getsignal(signal.SIGINT)
  if threading.current_thread() is not threading.main_thread() or not callable(handler):
    yield
    return
  is_pending = False

  def postpone(number, frame):
    nonlocal is_pending
    if is_pending:
      is_pending = False
      handler(number, frame)
    is_pending = True

  signal.signal(signal.SIGINT, postpone)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, handler)
    if is_pending:
      signal.raise_signal(signal.SIGINT)
