"""Which flags the installed jaxlib takes. XLA ends a process whose XLA_FLAGS has another one."""

from collections.abc import Iterable
import os
import subprocess
import sys

_PROGRAM = "import jax; jax.devices('cpu')"
_PATIENCE_S = 120


def known(flags: Iterable[str]) -> list[str]:
  """Returns those of the flags, as in '--xla_flag=value', that the installed jaxlib takes.

  A child process starts JAX with all of them. XLA names those that it does not take, and ends the
  process. RuntimeError: JAX does not start, for another reason.
  """
  flags = list(flags)
  environment = os.environ | {'XLA_FLAGS': ' '.join(flags), 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(
      [sys.executable, '-c', _PROGRAM],
      env=environment,
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      timeout=_PATIENCE_S,
      check=False,
  )
  if done.returncode == 0:
    return flags
  refused = set(done.stderr.split()) & set(flags)
  if not refused:
    raise RuntimeError(f'JAX does not start with XLA_FLAGS={" ".join(flags)}: {done.stderr[-400:]}')
  return [flag for flag in flags if flag not in refused]
