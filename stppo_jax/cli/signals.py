"""What SIGTERM and Ctrl-C do to a running command."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import signal
import sys
import threading

from stppo_jax import types
from stppo_jax.envs import guard


@contextlib.contextmanager
def handled() -> Iterator[Callable[[], bool]]:
  """Yields a function `stop_requested`, which returns whether SIGTERM was received.

  After a Ctrl-C, Python raises KeyboardInterrupt in whatever code is running. A library's callback
  may ignore it there, so the function raises it again. Until the function is called for the first
  time there is nothing to save, so SIGTERM raises Stopped at once. If a callback ignores that, the
  function returns true.

  Training calls the function in two places. Between updates `Run.remaining_updates` calls it and
  ends the loop. While episodes are played or the run waits for a retriever,
  `hosts.raise_if_stopped` and the guard of environments call it and raise Stopped, which
  `Run.guard` catches. In both cases `Run.finish` saves the updates that are done, and the command
  ends with exit code 0. Where the main thread itself runs the code of an environment, SIGTERM
  raises Stopped in it.
  """
  terminated = threading.Event()
  interrupted = threading.Event()
  polled = threading.Event()

  def on_sigterm(*unused):
    terminated.set()
    if not polled.is_set() or guard.is_in_main_thread():
      raise types.Stopped

  def on_sigint(*unused):
    interrupted.set()
    raise KeyboardInterrupt

  def stop_requested():
    polled.set()
    if interrupted.is_set():
      raise KeyboardInterrupt
    return terminated.is_set()

  previous_hook = sys.unraisablehook

  def report_unraisable(unraisable):
    # `stop_requested` reports these two again.
    if not isinstance(unraisable.exc_value, (KeyboardInterrupt, types.Stopped)):
      previous_hook(unraisable)

  handlers = {signal.SIGTERM: on_sigterm, signal.SIGINT: on_sigint}
  sys.unraisablehook = report_unraisable
  previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
  try:
    yield stop_requested
  finally:
    sys.unraisablehook = previous_hook
    for number, handler in previous.items():
      signal.signal(number, handler)
