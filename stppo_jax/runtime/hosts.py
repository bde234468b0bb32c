"""The processes of one run: who is here, who writes, and how host data reaches all of them.

JAX is multi-controller: every process runs the same program, dispatches the same computations in
the same order, and holds its part of each global array. What the host computes (order of
questions, keys, episodes) every process computes alike. Split is the stepping of environments
(`split_steps`); files are written by process 0 alone (`is_writer`, `by_writer`).

With one process, all of this is free.
"""

import hashlib
import json
import re
import time

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.runtime import lifeline

HEARTBEAT_S = 40  # JAX ends the others when a process hangs for so long
START_S = 300  # within which all processes must have started
NEWS_S = 3.0  # from a failed collective to the news of the process that died

_FLAGS = (
    'give --coordinator=HOST:PORT (of process 0), --num_processes=N and --process_id=0..N-1 '
    'together; or --distributed alone, on a TPU pod or under SLURM'
)
_lifeline = None  # of this process, once there are several


def initialize(coordinator='', num_processes=None, process_id=None, cluster=False):
  """Joins the other processes; before JAX computes anything. Without arguments: nothing to join.

  `cluster`: the environment (TPU pod, SLURM, Open MPI, Kubernetes) tells the rest.
  """
  global _lifeline
  _check_flags(coordinator, num_processes, process_id, cluster)
  if not (coordinator or cluster):
    return
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_enable_preemption_service', False)  # it would swallow SIGTERM
  places = (
      {}
      if cluster
      else dict(
          coordinator_address=coordinator,
          num_processes=num_processes,
          process_id=process_id,
          cluster_detection_method='deactivate',
      )
  )
  try:
    jax.distributed.initialize(
        **places, heartbeat_timeout_seconds=HEARTBEAT_S, initialization_timeout=START_S
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
  line = lifeline.Lifeline()
  address = share(line.listen(jax.process_count()) if is_writer() else None)[0]
  if not is_writer():
    line.join(address, jax.process_index(), coordinator.rpartition(':')[0])
  _lifeline = line


def is_writer() -> bool:
  """Whether this process writes the run's files: process 0."""
  return jax.process_index() == 0


def by_writer(function, *args):
  """function(*args), called by process 0 while the others wait; what it returns (JSON) or refuses
  (UserError) is everybody's."""
  result = refusal = None
  if is_writer():
    try:
      result = function(*args)
    except types.UserError as error:
      refusal = str(error)
  result, refusal = share([result, refusal])[0]
  if refusal is not None:
    raise types.UserError(refusal)
  return result


def require_same(what, value, advice='start all processes with the same command and files'):
  """UserError on all processes unless each calls this with the same value (JSON)."""
  text = json.dumps(value, sort_keys=True)
  digests = share(hashlib.sha256(text.encode('utf-8')).hexdigest())
  different = [i for i, digest in enumerate(digests) if digest != digests[0]]
  if different:
    raise types.UserError(
        f'{what}: not the same on process 0 and on process {different[0]} (here, '
        f'on process {jax.process_index()}: {text[:60]}); {advice}'
    )


def share(value) -> list:
  """The JSON values that the processes call this with, by process."""
  if jax.process_count() == 1:
    return [json.loads(json.dumps(value, default=_plain))]
  text = json.dumps([jax.process_index(), value], default=_plain)
  mine = np.frombuffer(text.encode('ascii'), np.uint8)
  sizes = _gather(np.array([mine.size]))[:, 0]
  padded = max(1024, 1 << int(sizes.max() - 1).bit_length())  # few sizes: each is compiled for
  rows = _gather(np.pad(mine, (0, padded - mine.size)))
  values = dict(json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes))
  return [values[i] for i in range(len(values))]


def end_if(asked):
  """Raises Stopped on all processes if `asked()` on any of them; all call it."""
  if any(share(asked())):
    raise types.Stopped


def split_steps(envs):
  """A `protocol.step_all` for these environments of which each process steps its own share.

  Environment i, and so its state, belongs to process i modulo their number; the outcomes come to
  all as JSON.
  """
  count = jax.process_count()
  if count == 1:
    return protocol.step_all
  owners = {id(env): i % count for i, env in enumerate(envs)}

  def step_all(stepped, actions):
    owned = [owners[id(env)] for env in stepped]
    mine = [i for i, owner in enumerate(owned) if owner == jax.process_index()]
    shares = share(protocol.step_all([stepped[i] for i in mine], [actions[i] for i in mine]))
    shares = [iter(outcomes) for outcomes in shares]
    return [tuple(next(shares[owner])) for owner in owned]

  return step_all


def fetch(tree):
  """The arrays whole, as NumPy, on every process; all call it, in the same order."""

  def whole(x):
    here = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
    return x if here else _multihost().process_allgather(x, tiled=True)

  return jax.device_get(jax.tree.map(whole, tree))


def put(tree, sharding=None):
  """Host arrays, the same on every process, laid out as `sharding` says (None: default device)."""
  if sharding is None or sharding.is_fully_addressable:
    return jax.device_put(tree, sharding)
  # Not device_put: it would first compare the arrays of all processes.
  make = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
  return jax.tree.map(make, tree)


def finish():
  """Tells the other processes that this one ends well."""
  if _lifeline is not None:
    _lifeline.finish()


def leave(line, code):
  """Where there are other processes: prints the line, tells them why, and ends this process."""
  if _lifeline is not None:
    _lifeline.end(line, code, reason=f'process {jax.process_index()}: {line}')


def await_news() -> bool:
  """After an error that another process's death may have caused: lets the lifeline say so, which
  ends this process. Returns whether there are other processes, and none of them was it."""
  if _lifeline is not None:
    time.sleep(NEWS_S)
  return _lifeline is not None


def _check_flags(coordinator, num_processes, process_id, cluster):
  given = [
      f'--{name}={value}'
      for name, value in (
          ('coordinator', coordinator or None),
          ('num_processes', num_processes),
          ('process_id', process_id),
      )
      if value is not None
  ]
  if cluster and given:
    raise types.UserError(f'--distributed with {" ".join(given)}: {_FLAGS}')
  if 0 < len(given) < 3:
    raise types.UserError(f'{" ".join(given)} alone: {_FLAGS}')
  if coordinator and not re.fullmatch(r'.+:\d+', coordinator):
    raise types.UserError(f'--coordinator={coordinator}: has no port; {_FLAGS}')
  if coordinator and not 0 <= process_id < num_processes:
    raise types.UserError(f'--process_id={process_id} of --num_processes={num_processes}: {_FLAGS}')


def _gather(array):
  """[n] on each process -> [processes, n] on all."""
  return np.asarray(_multihost().process_allgather(array))


def _multihost():
  from jax.experimental import multihost_utils  # slow to import, and mostly not needed

  return multihost_utils


def _plain(value):
  """NumPy's numbers and arrays, which environments like to return, for JSON."""
  if isinstance(value, (np.generic, np.ndarray)):
    return value.tolist()
  raise TypeError(
      f'{value!r} of {type(value).__name__} cannot be sent to the other processes: an '
      "environment's outcome must be JSON"
  )
