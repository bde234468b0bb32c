"""Checks that all processes of a run see what process 0 writes into the folder of the run."""

from collections.abc import Callable
import contextlib
import os
import secrets
import time

from stppo_jax.distributed import hosts
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.types import UserError

_APPEARS_S = 30.0  # a new file is visible to all clients of a network file system within this time


def check(workdir: str) -> None:
  """Refuses a `workdir` in which the other processes do not see what process 0 writes.

  Such a run would train until its first checkpoint, and then wait for the files of the others.
  """
  nonce = hosts.by_writer(write_nonce, workdir)
  seen = hosts.share(hosts.is_writer() or sees_nonce(workdir, nonce))
  hosts.by_writer(remove_nonce, workdir)
  if not all(seen):
    raise UserError(
        f'--workdir={workdir!r}: process {seen.index(False)} does not see what process 0 writes '
        f'there: give a --workdir that all processes share, such as one on NFS'
    )


def write_nonce(workdir: str) -> str:
  """Writes a new text into `workdir`; returns it."""
  nonce = secrets.token_hex(8)
  workdir_lib.write_whole(os.path.join(workdir, 'nonce'), nonce)
  return nonce


def sees_nonce(
    workdir: str,
    nonce: str,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
  """Returns whether this process reads that text in `workdir`; waits for it to appear."""
  deadline = clock() + _APPEARS_S
  while True:
    with contextlib.suppress(OSError):
      with open(os.path.join(workdir, 'nonce'), encoding='utf-8') as file:
        if file.read() == nonce:
          return True
    if clock() >= deadline:
      return False
    sleep(1.0)


def remove_nonce(workdir: str) -> None:
  """Removes that file."""
  with contextlib.suppress(OSError):
    os.remove(os.path.join(workdir, 'nonce'))
