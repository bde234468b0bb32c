"""Time limits and stops for the code of users, which may never return.

The code runs in threads that end with the process and that nobody waits for. The caller waits until
the call returns, takes too long, or the run stops. A call that is blocked stays behind.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import contextvars
import math
import queue
import sys
import threading
import time
import traceback
from typing import Any

from stppo_jax import plugins
from stppo_jax import types
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal

_POLL_S = 0.25  # between two looks at the signal
_LEFT_CALLS = threading.Event()  # set once a call was left that still ran
_IN_MAIN_THREAD = threading.Event()  # set while the main thread itself runs a user's code
_CURRENT: contextvars.ContextVar['_Job | None'] = contextvars.ContextVar('job', default=None)
_IDLE: list['_Worker'] = []  # the last one is taken next, so that calls one by one share a thread
_LOCK = threading.Lock()  # guards _IDLE


class TimedOut(Exception):
  """A call took longer than its limit, and was left running."""

  def __init__(self, what: str, timeout_s: float, stack: traceback.StackSummary):
    place = plugins.user_line(stack)
    self.stack = stack  # where the call stands
    super().__init__(
        f'no result of {what} within {timeout_s:g} s (config.rollout.env_timeout_s); the '
        f'call was abandoned{" at " * bool(place)}{place}'
    )


class StopSeen(Exception):
  """A call was left running because the run stops."""


class Guard:
  """Calls functions of users with a time limit, and leaves them when the run stops.

  Args:
    timeout_s: time limit of a call; 0: none.
    stop_signal: leaves calls in progress, and raises Stopped.
    raises: raise Stopped. Otherwise raise StopSeen, because several processes stop together.
    in_place: without a time limit, calls of the main thread run in it. SIGTERM then raises Stopped
      within them. In another thread a call only runs in place if no signal can stop it.
  """

  def __init__(
      self,
      timeout_s: float = 0.0,
      stop_signal: StopSignal = NEVER,
      in_place: bool = False,
      raises: bool = True,
  ):
    self._timeout_s = timeout_s or math.inf
    self._stop_signal = stop_signal
    self._in_place = in_place and not timeout_s
    self._stopped = types.Stopped if raises else StopSeen

  def unlimited(self) -> 'Guard':
    """Returns a guard with the same signal, without a time limit."""
    return Guard(0.0, self._stop_signal, self._in_place, self._stopped is types.Stopped)

  def call(self, what: str, function: Callable[..., types.T], *args: Any, **kwargs: Any) -> types.T:
    """Returns function(*args, **kwargs), or raises its error.

    Raises TimedOut, which names `what`, and Stopped. SystemExit and KeyboardInterrupt of the
    function become a RuntimeError.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if self._in_place and (is_main or self._stop_signal is NEVER):
      return _call_in_place(function, *args, **kwargs)
    job = _Job(function, args, kwargs, self._timeout_s)
    worker = _start(job)
    try:
      while not job.ended.wait(min(_POLL_S, max(job.deadline - time.monotonic(), 0.0))):
        if self._stop_signal.is_set():
          raise self._stopped
        if time.monotonic() > job.deadline:
          raise TimedOut(what, self._timeout_s, worker.stack())
    except BaseException:
      if not job.ended.is_set():
        job.stop_signal.set()
        _LEFT_CALLS.set()
      raise
    return job.result()

  def acquire(self, lock: threading.Lock) -> None:
    """Acquires a lock that another call may hold for long. Raises Stopped."""
    while not lock.acquire(timeout=_POLL_S):
      if self._stop_signal.is_set():
        raise self._stopped


IN_PLACE = Guard(in_place=True)


def pause(seconds: float) -> None:
  """Sleeps in a guarded call. Its time limit starts again afterwards. Raises Stopped."""
  job = _CURRENT.get()
  if job is None:
    time.sleep(seconds)
    return
  job.deadline = math.inf
  if job.stop_signal.wait(seconds):
    raise types.Stopped
  job.deadline = time.monotonic() + job.timeout_s


@contextlib.contextmanager
def hold(lock: threading.Lock) -> Iterator[None]:
  """Holds a lock in a guarded call. The time limit of the call starts when it has the lock.

  Raises Stopped if nobody waits for the call any more.
  """
  job = _CURRENT.get()
  if job is None:
    with lock:
      yield
    return
  job.deadline = math.inf
  while not lock.acquire(timeout=_POLL_S):
    if job.stop_signal.is_set():
      raise types.Stopped
  try:
    job.deadline = time.monotonic() + job.timeout_s
    if job.stop_signal.is_set():
      raise types.Stopped
    yield
  finally:
    lock.release()


def has_left_calls() -> bool:
  """Whether a call was left running. Its threads may keep the process from exiting."""
  return _LEFT_CALLS.is_set()


def is_in_main_thread() -> bool:
  """Whether the main thread runs the code of a user, so that a signal has to interrupt it."""
  return _IN_MAIN_THREAD.is_set()


class _Job:
  """A call."""

  def __init__(self, function, args, kwargs, timeout_s):
    self.timeout_s = timeout_s
    self.deadline = time.monotonic() + timeout_s
    self.ended = threading.Event()
    self.stop_signal = StopSignal()  # set when nobody waits for the call any more
    self._context = contextvars.copy_context()  # a thread would have another one
    self._call = lambda: function(*args, **kwargs)
    self._value: Any = None
    self._error: Exception | None = None

  def run(self):
    """Makes the call. `ended` is set by the worker, when it is free again."""
    self._context.run(_CURRENT.set, self)
    try:
      self._value = self._context.run(self._call)
    except Exception as error:  # raised by `result`
      self._error = error
    except BaseException as error:  # would end the thread, or silently the run
      self._error = RuntimeError(f'{type(error).__name__}: {error}')
      self._error.__cause__ = error
    # The context refers to the call. Such a cycle would keep the environment of an episode that is
    # over until the next garbage collection.
    self._context.run(_CURRENT.set, None)

  def result(self):
    error, self._error = self._error, None
    if error is None:
      return self._value
    try:
      raise error
    finally:
      del error  # it refers to this frame


class _Worker(threading.Thread):
  """A thread that makes one call at a time, `job` first."""

  def __init__(self, job):
    super().__init__(daemon=True, name='guarded')
    self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    self.jobs.put(job)
    self.start()

  def run(self):
    while True:
      job = self.jobs.get()
      job.run()
      was_left = job.stop_signal.is_set()
      with _LOCK:
        # The next call takes the last thread, which is the same one if calls follow each other.
        _IDLE.insert(0 if was_left else len(_IDLE), self)
      job.ended.set()
      del job

  def stack(self):
    """Returns the frames of the call in progress, from its own code on."""
    frame = sys._current_frames().get(self.ident or 0)
    frames = traceback.extract_stack(frame) if frame else []
    own = [i for i, entry in enumerate(frames) if entry.filename == __file__]
    return traceback.StackSummary.from_list(frames[own[-1] + 1 :] if own else frames)


def _start(job):
  """Starts a call, and returns the thread that makes it."""
  with _LOCK:
    worker = _IDLE.pop() if _IDLE else None
  if worker is None:
    return _Worker(job)
  worker.jobs.put(job)
  return worker


def _call_in_place(function, *args, **kwargs):
  is_main = threading.current_thread() is threading.main_thread()
  if not is_main or _IN_MAIN_THREAD.is_set():
    return function(*args, **kwargs)
  _IN_MAIN_THREAD.set()
  try:
    return function(*args, **kwargs)
  finally:
    _IN_MAIN_THREAD.clear()
