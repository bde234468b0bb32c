"""What SIGTERM, its kin and Ctrl-C do to a running command."""

from collections.abc import Iterator
import contextlib
import signal
import sys

from stppo_jax import types
from stppo_jax.envs import guard
from stppo_jax.stop_signal import StopSignal


@contextlib.contextmanager
def handled() -> Iterator[StopSignal]:
  """Yields the signal that SIGTERM sets, as do SIGHUP and SIGUSR1 unless somebody handles them.

  SIGHUP says that the terminal is closed; `nohup` ignores it. SLURM is often told to send SIGUSR1.

  After a Ctrl-C, Python raises KeyboardInterrupt in the code that is running. The callback of a
  library may swallow the exception, so `is_set` raises it again. Before the first call of `is_set`
  there is nothing to save, so SIGTERM raises Stopped at once. If a callback swallows that, the
  signal is set.

  Between updates `Run.remaining_updates` looks at the signal and ends the loop. Within an update
  whatever may wait looks at it and raises Stopped: `Agent.play` and the calls of environments, also
  in the thread that samples ahead, the teacher, the engines and the retriever.
  `Run.saving_on_error` catches Stopped. In both cases `Run.finish` saves the updates that are done,
  and the command ends with exit code 0. Where the main thread itself runs the code of an
  environment, SIGTERM raises Stopped in it.
  """
  # Events have locks, for which a second signal within a handler would wait forever.
  is_terminated = False
  is_interrupted = False
  is_polled = False

  def on_sigterm(*unused):
    nonlocal is_terminated
    is_terminated = True
    if not is_polled or guard.is_in_main_thread():
      raise types.Stopped

  def on_sigint(*unused):
    nonlocal is_interrupted
    is_interrupted = True
    raise KeyboardInterrupt

  def is_set():
    nonlocal is_polled
    is_polled = True
    if is_interrupted:
      raise KeyboardInterrupt
    return is_terminated

  previous_hook = sys.unraisablehook

  def report_unraisable(unraisable):
    # `is_set` reports these two again.
    if not isinstance(unraisable.exc_value, (KeyboardInterrupt, types.Stopped)):
      previous_hook(unraisable)

  handlers = {signal.SIGTERM: on_sigterm, signal.SIGINT: on_sigint}
  for number in (signal.SIGHUP, signal.SIGUSR1):
    if signal.getsignal(number) is signal.SIG_DFL:
      handlers[number] = on_sigterm
  sys.unraisablehook = report_unraisable
  previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
  try:
    yield StopSignal(is_set)
  finally:
    sys.unraisablehook = previous_hook
    for number, handler in previous.items():
      signal.signal(number, handler)
