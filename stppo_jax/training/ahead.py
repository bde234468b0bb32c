"""Compiles the functions of an update in threads, while the first episodes are played."""

import atexit
import sys
import threading
import time

from absl import logging

from stppo_jax import types
from stppo_jax.net import calls
from stppo_jax.training import state as state_lib
from stppo_jax.training import update as update_lib
from stppo_jax.training.packing import OptimizerStep

_LOCK = threading.Lock()  # one run compiles at a time: those of a process share their programs


class Compilation:
  """Compiles the functions of an update for one shape of batch, in threads.

  The functions keep the programs. A call with these shapes compiles nothing more. A call with other
  shapes compiles as it does without this class. So does a call after an error in these threads, and
  raises the error again.

  A process must not unload the compiler while it works, so an exit waits for the program that is
  being compiled. The command ends such a wait, see `entry.main`.

  Args:
    functions: the functions, see `update.Functions`.
    state: shapes of the state, with their shardings.
    frozen: shapes of the frozen parameters, with their shardings.
    batch: shapes of a batch as it is moved to the devices, with their shardings.
    first_epoch: shapes of the steps of the first epoch, stacked.
    step: shapes of one of them.
  """

  def __init__(
      self,
      functions: update_lib.Functions,
      state: state_lib.TrainState,
      frozen: state_lib.Frozen,
      batch: types.TurnBatch,
      first_epoch: OptimizerStep,
      step: OptimizerStep,
  ):
    self._functions = functions
    self._arguments = (state, frozen, batch, first_epoch, step)
    self._is_cancelled = threading.Event()
    self._is_done = threading.Event()
    atexit.register(self._exit)
    logging.info(
        'compiling the update while the first episodes are played: once, about 20 s for a small '
        'model on two cores'
    )
    calls.ThreadedCall(self._run, calls.COMPILER)

  def wait(self) -> None:
    """Waits until the programs are compiled."""
    self._is_done.wait()

  def cancel(self) -> None:
    """Does not begin to compile another program."""
    self._is_cancelled.set()

  def _exit(self):
    sys.stdout.flush()
    self.cancel()
    self.wait()

  def _run(self):
    started = time.perf_counter()
    try:
      with _LOCK:
        self._compile_all()
      if not self._is_cancelled.is_set():
        logging.info('compiled the update in %.0f s', time.perf_counter() - started)
    except Exception as error:  # the call raises it again
      logging.debug('nothing is compiled ahead: %s', error)
    finally:
      self._is_done.set()
      atexit.unregister(self._exit)

  def _compile_all(self):
    """Compiles `annotate` in another thread, and the two functions that are called after it."""
    state, frozen, batch, first_epoch, step = self._arguments
    functions = self._functions
    annotate = functions.annotate.trace(state, frozen, batch, first_epoch)
    batch, _ = annotate.out_info
    first = calls.ThreadedCall(lambda: self._compile(annotate), calls.COMPILER)
    try:
      with_advantages = functions.with_advantages.trace(state, batch)
      _, batch, _ = with_advantages.out_info
      update_step = functions.update_step.trace(state, frozen, batch, step)
      self._compile(update_step)
      self._compile(with_advantages)
    finally:
      first.join()

  def _compile(self, traced):
    if not self._is_cancelled.is_set():
      traced.lower().compile()
