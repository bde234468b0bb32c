"""Calls that may never end: made in a thread that the process does not wait for."""

from collections.abc import Callable
import threading
from typing import Any


class Call(threading.Thread):
  """Calls a function in a thread of its own, which ends with the process.

  Attributes:
    error: what the function raised, once it has ended.
  """

  def __init__(self, function: Callable[[], Any]):
    super().__init__(daemon=True)
    self._function = function
    self.error: Exception | None = None
    self.start()

  def run(self) -> None:
    """Calls the function; for the thread alone."""
    try:
      self._function()
    except Exception as error:  # raised by `has_ended`
      self.error = error

  def has_ended(self, timeout_s: float) -> bool:
    """Waits for so many seconds; returns whether the call has ended, or raises its error."""
    self.join(timeout_s)
    if self.error is not None:
      raise self.error
    return not self.is_alive()
