"""Deterministic operations on GPUs, by a flag of XLA.

On a CPU the programs of a run give the same bits each time. On a GPU, scatter-adds sum in the order
in which threads arrive, and each process measures anew which kernel of a matrix product is the
fastest. The flag forbids both. It costs speed, and TPUs and CPUs ignore it.
"""

import os

import jax

from stppo_jax import types
from stppo_jax.distributed import xla_flags

FLAG = '--xla_gpu_deterministic_ops'


def enable() -> None:
  """Adds the flag to XLA_FLAGS, which XLA reads when it starts.

  A flag that XLA_FLAGS already has stays as it is. UserError: the flag is false, the installed
  jaxlib does not know it, or JAX has started a GPU without it.
  """
  given = os.environ.get('XLA_FLAGS', '')
  for word in given.split():
    if word.lower() in (f'{FLAG}=false', f'{FLAG}=0'):
      raise types.UserError(
          f'config.train.deterministic=True, and XLA_FLAGS has {word}: take it out of XLA_FLAGS, '
          'or set --config.train.deterministic=False'
      )
  if FLAG in given:
    return
  flag = f'{FLAG}=true'
  has_started = _has_started()
  if has_started and jax.default_backend() != 'gpu':
    return
  if not xla_flags.known([flag]):
    raise types.UserError(
        f'config.train.deterministic=True, and the installed jaxlib has no flag {FLAG}: install '
        'another version of JAX, or set --config.train.deterministic=False'
    )
  if has_started:
    raise types.UserError(
        'config.train.deterministic=True, and JAX has started the GPU without the flag: start '
        f'this program with XLA_FLAGS={flag} in its environment'
    )
  os.environ['XLA_FLAGS'] = f'{given} {flag}'.strip()


def _has_started() -> bool:
  """Returns whether JAX has started devices: from then on it refuses another number of them."""
  name = 'jax_num_cpu_devices'
  value = getattr(jax.config, name)
  try:
    jax.config.update(name, value + 1)
  except RuntimeError:
    return True
  jax.config.update(name, value)
  return False
