"""The processes of one run: initialisation, the process that writes files, exchange of host data.

JAX is multi-controller: every process runs the same program, dispatches the same computations in
the same order, and holds its part of each global array. Host computations (order of tasks, keys,
episodes) are repeated on every process. Only environment steps are divided (rollout/split_envs.py),
and only process 0 writes files (`is_writer`, `by_writer`).

With one process all of this costs nothing.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import contextvars
import functools
import hashlib
import json
import os
import re
import sys
import threading
import time
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils
import numpy as np

from stppo_jax import types
from stppo_jax.stop_signal import StopSignal

SILENCE_S = 20  # JAX ends the others when a process is killed or unreachable for this long
START_S = 300  # time limit for all processes to start
POLL_S = 1.0  # between two looks for a failure of another process
CLOSING_S = 3.0  # a failure reaches the others within this time, before process 0 may exit

_FLAGS = (
    'give --coordinator=HOST:PORT (of process 0), --num_processes=N and --process_id=0..N-1 '
    'together; or --distributed alone, on a TPU pod or under SLURM'
)
_has_peers = False
_has_finished = threading.Event()
_is_alone = contextvars.ContextVar('is_alone', default=False)


def initialize(
    coordinator: str = '',
    num_processes: int | None = None,
    process_id: int | None = None,
    cluster: bool = False,
) -> None:
  """Joins the other processes, before JAX computes anything. Without arguments it does nothing.

  With `cluster` the environment (TPU pod, SLURM, Open MPI, Kubernetes) provides the rest.
  """
  global _has_peers
  _check_flags(coordinator, num_processes, process_id, cluster)
  if not (coordinator or cluster):
    return
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_enable_preemption_service', False)  # it would swallow SIGTERM
  place = f'at {coordinator}' if coordinator else 'of the cluster'
  logging.info('waiting up to %d s for all processes %s', START_S, place)
  try:
    jax.distributed.initialize(
        coordinator_address=coordinator or None,
        num_processes=num_processes,
        process_id=process_id,
        cluster_detection_method=None if cluster else 'deactivate',
        heartbeat_timeout_seconds=SILENCE_S,
        initialization_timeout=START_S,
    )
  except ValueError as error:
    raise types.UserError(
        f'--distributed: no cluster was recognised here ({error}); {_FLAGS}'
    ) from error
  except jax.errors.JaxRuntimeError as error:
    raise types.RunError(
        f'the processes did not find each other within {START_S} s ({error}); '
        f'start all of them; {_FLAGS}'
    ) from error
  if jax.process_count() == 1:
    return
  _has_peers = True
  threading.Thread(target=_watch, daemon=True, name='failures').start()


def is_writer() -> bool:
  """Whether this process writes the run's files: process 0."""
  return jax.process_index() == 0


def num_processes() -> int:
  """Returns the number of processes that exchange data with this thread, see `alone`."""
  return 1 if _is_alone.get() else jax.process_count()


@contextlib.contextmanager
def alone() -> Iterator[None]:
  """Context manager in which this thread exchanges nothing with the other processes.

  Threads that run in a copy of the context do not either.
  """
  token = _is_alone.set(True)
  try:
    yield
  finally:
    _is_alone.reset(token)


_SHARED_ERRORS = {kind.__name__: kind for kind in (types.UserError, types.RunError, types.Stopped)}


def by_writer(function: Callable[..., object], *args: object) -> Any:
  """Calls function(*args) on process 0. All processes get its result (JSON).

  If it raises a UserError, RunError or Stopped, all processes raise it.
  """
  result = None
  error = None
  if is_writer():
    try:
      result = function(*args)
    except tuple(_SHARED_ERRORS.values()) as raised:
      error = [type(raised).__name__, str(raised)]
  result, error = share([result, error])[0]
  if error is not None:
    name, message = error
    raise _SHARED_ERRORS[name](message)
  return result


def require_same(
    name: str, value: object, advice: str = 'start all processes with the same command and files'
) -> None:
  """Raises UserError on all processes unless all call this with the same value (JSON)."""
  text = json.dumps(value, sort_keys=True)
  digests = share(hashlib.sha256(text.encode('utf-8')).hexdigest())
  different = [i for i, digest in enumerate(digests) if digest != digests[0]]
  if different:
    raise types.UserError(
        f'{name}: not the same on process 0 and on process {different[0]} (here, '
        f'on process {jax.process_index()}: {text[:60]}); {advice}'
    )


def share(value: object) -> list:
  """Returns the JSON values of all processes, in process order; they do not pass a device."""
  text = json.dumps(value, default=_plain)
  if num_processes() == 1:
    return [json.loads(text)]
  return [json.loads(message) for message in _exchange().gather(text.encode('ascii'))]


def post(name: str, text: str) -> None:
  """Leaves a text for the other processes under a name; any process may, at any time."""
  if jax.process_count() > 1:
    _exchange().post(name, text)


def posted(name: str) -> str:
  """Returns what a process left under a name; '' without one. Does not wait."""
  return _exchange().posted(name) if jax.process_count() > 1 else ''


def together(stop_signal: StopSignal) -> StopSignal:
  """Returns the signal that is set on all processes if it is on any. All look at it together."""
  return StopSignal(lambda: any(share(stop_signal.is_set())))


def anywhere(stop_signal: StopSignal) -> StopSignal:
  """Returns the signal that is set once it was set on any process. It waits for no process."""
  has_posted = threading.Event()

  def is_set():
    if stop_signal.is_set() and not has_posted.is_set():
      has_posted.set()
      post('stop', 'true')
    return has_posted.is_set() or posted('stop') != ''

  return StopSignal(is_set)


def fetch(tree: object) -> Any:
  """Returns full NumPy arrays on every process. All processes call it, in the same order."""

  def gathered(x):
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
      return x
    return multihost_utils.process_allgather(x, tiled=True)

  return jax.device_get(jax.tree.map(gathered, tree))


def put(tree: object, sharding: jax.sharding.Sharding | None = None) -> Any:
  """Puts host arrays, equal on every process, on devices by `sharding` (None: default device)."""
  if sharding is None or sharding.is_fully_addressable:
    return jax.device_put(tree, sharding)

  def make(x):
    # Not device_put: it would first compare the arrays of all processes.
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

  return jax.tree.map(make, tree)


def random_key(seed: int) -> jax.Array:
  """Returns `jax.random.key(seed)` on the CPU backend, which also computes what is drawn from it.

  Keys and seeds of episodes are host data. On an accelerator their programs would wait behind those
  of training. The bits are the same on all backends.
  """
  try:
    cpu = jax.local_devices(backend='cpu')[0]
  except RuntimeError:  # JAX_PLATFORMS leaves it out
    return jax.random.key(seed)
  with jax.default_device(cpu):
    return jax.device_put(jax.random.key(seed), cpu)


def finish() -> None:
  """Ends the thread that looks for failures of other processes. Called when no error occurred."""
  _has_finished.set()


def leave(line: str, code: int) -> None:
  """With several processes: prints the line, sends it to the others and ends this process.

  A process that is killed sends nothing. JAX notices after SILENCE_S and ends the others.
  """
  if not _has_peers:
    return
  with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0, which keeps it, may be gone
    post('failure', f'process {jax.process_index()}: {line}')
  _end(line, code)


def await_failure() -> bool:
  """Waits for another process's line after an error that its failure may have caused.

  If another process has failed, this one ends with it. Otherwise returns whether the run has
  several processes.
  """
  if _has_peers:
    time.sleep(CLOSING_S)
  return _has_peers


def _watch():
  """Ends this process when another one has failed."""
  while not _has_finished.wait(POLL_S):
    try:
      reason = posted('failure')
    except jax.errors.JaxRuntimeError:
      reason = 'process 0 is gone'
    if reason:
      program = os.path.basename(sys.argv[0])
      line = f'another process of this run has failed ({reason}): restart all of them with the '
      _end(f'{program}: {line}same command, training resumes from its last checkpoint', 1)


def _end(line, code):
  _has_finished.set()
  print(line, file=sys.stderr, flush=True)
  if is_writer():  # JAX aborts the others when process 0 exits
    time.sleep(CLOSING_S)
  os._exit(code)  # not sys.exit: JAX would wait for the dead processes


def _check_flags(coordinator, num_processes, process_id, cluster):
  flags = {
      'coordinator': coordinator or None,
      'num_processes': num_processes,
      'process_id': process_id,
  }
  given = [f'--{name}={value}' for name, value in flags.items() if value is not None]
  is_possible = not given
  if len(given) == len(flags):
    has_port = re.fullmatch(r'.+:\d+', coordinator) is not None
    is_possible = has_port and 0 <= process_id < num_processes and not cluster
  if not is_possible:
    raise types.UserError(f'{" ".join(given)}{" --distributed" * cluster}: {_FLAGS}')


def _distributed_state():
  from jax._src import distributed  # the client has no public name, see messages_test

  return distributed.global_state


@functools.cache
def _exchange():
  """Returns this process's end of the exchange of messages."""
  from stppo_jax.distributed import messages  # one process has none

  client = _distributed_state().client
  return messages.Exchange(client, jax.process_index(), jax.process_count())


def _plain(value):
  """Converts NumPy numbers and arrays, which environments may return, to JSON."""
  if isinstance(value, (np.generic, np.ndarray)):
    return value.tolist()
  raise types.UserError(
      f'{value!r:.200} of {type(value).__name__} cannot be sent to the other processes: with '
      'several processes, what an environment returns has to be JSON'
  )
