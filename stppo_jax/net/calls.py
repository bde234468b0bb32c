"""Calls that may never end, made in a thread that the process does not wait for."""

from collections.abc import Callable
import threading

COMPILER = 'compiler'  # name of the threads that compile programs


class ThreadedCall(threading.Thread):
  """Calls a function in a thread that ends with the process.

  An error that is no Exception, such as SystemExit or asyncio.CancelledError, becomes a
  RuntimeError, because it concerns the thread and not its caller.
  """

  def __init__(self, function: Callable[[], object], name: str | None = None):
    super().__init__(name=name, daemon=True)
    self._function = function
    self._error: Exception | None = None
    self.start()

  def run(self) -> None:
    """Calls the function. Only the thread calls this method."""
    try:
      self._function()
    except Exception as error:  # raised by `wait`
      self._error = error
    except BaseException as error:
      self._error = RuntimeError(f'{type(error).__name__}: {error}')
      self._error.__cause__ = error

  def wait(self, timeout_s: float) -> bool:
    """Waits up to `timeout_s`; returns whether the call has ended, or raises its error."""
    self.join(timeout_s)
    has_ended = not self.is_alive()  # first, because a call that ends now may set its error
    if self._error is not None:
      raise self._error
    return has_ended


def is_running(name: str) -> bool:
  """Returns whether any thread of this name is running."""
  return any(thread.name == name for thread in threading.enumerate())
