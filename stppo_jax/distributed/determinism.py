"""Deterministic operations on GPUs, by a flag of XLA.

On a CPU the programs of a run give the same bits each time. On a GPU, scatter-adds sum in the order
in which threads arrive, and each process measures anew which kernel of a matrix product is the
fastest. The flag forbids both. It costs speed, and TPUs and CPUs ignore it.
"""

import os

import jax
from jax._src import xla_bridge  # `backends_are_initialized` has no public name

from stppo_jax import types

FLAG = '--xla_gpu_deterministic_ops'


def enable() -> None:
  """Adds the flag to XLA_FLAGS, which XLA reads when it starts.

  A flag that XLA_FLAGS already has stays as it is. UserError: the flag is false, or JAX has started
  a GPU without it.
  """
  xla_flags = os.environ.get('XLA_FLAGS', '')
  for word in xla_flags.split():
    if word.lower() in (f'{FLAG}=false', f'{FLAG}=0'):
      raise types.UserError(
          f'config.train.deterministic=True, and XLA_FLAGS has {word}: take it out of XLA_FLAGS, '
          'or set --config.train.deterministic=False'
      )
  if FLAG in xla_flags:
    return
  if not xla_bridge.backends_are_initialized():
    os.environ['XLA_FLAGS'] = f'{xla_flags} {FLAG}=true'.strip()
  elif jax.default_backend() == 'gpu':
    raise types.UserError(
        'config.train.deterministic=True, and JAX has started the GPU without the flag: start '
        f'this program with XLA_FLAGS={FLAG}=true in its environment'
    )
