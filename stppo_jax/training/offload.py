"""Moves what training keeps on the devices to the host's memory and back.

Only a run with config.rollout.engine_shares_devices imports this module.
"""

import os

import jax

from stppo_jax.models import sharding
from stppo_jax.rollout import sequences
from stppo_jax.training import learner as learner_lib
from stppo_jax.types import UserError


class DeviceArrays:
  """The states and the frozen parameters of a run."""

  def __init__(self, learners: learner_lib.Learners):
    self._learners = learners
    arrays = (learners.states, learners.frozen)
    self._on_devices = jax.tree.map(lambda x: x.sharding, arrays)

  def policy(self) -> sequences.PolicyParams:
    """Returns the parameters of the policy, in the buffers that they have now."""
    return self._learners.policy(self._learners.actor)

  def to_host(self) -> None:
    """Moves the arrays to the host's memory. Scalars stay."""

    def on_host(x):
      return x.sharding.with_memory_kind(sharding.HOST) if x.ndim else x.sharding

    self._move(jax.tree.map(on_host, (self._learners.states, self._learners.frozen)))

  def to_devices(self) -> None:
    """Moves the arrays to where they were when the run began."""
    self._move(self._on_devices)

  def _move(self, places):
    """Moves the arrays, and frees the buffers that they had, which others may refer to."""
    learners = self._learners
    old = (learners.states, learners.frozen)

    def move(x, place):
      return x if x.sharding == place else jax.device_put(x, place, may_alias=False)

    new = jax.tree.map(move, old, places)
    jax.block_until_ready(new)
    learners.states, learners.frozen = new
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new)):
      if before is not after:
        before.delete()


def check(mesh: jax.sharding.Mesh) -> None:
  """Raises UserError where the trainer could not give its devices to engines."""
  given = 'config.rollout.engine_shares_devices=True'
  if jax.process_count() > 1:
    raise UserError(
        f'{given} works with one process, and there are {jax.process_count()}: train on one node, '
        'or give the engines devices of their own'
    )
  platform = mesh.devices.flat[0].platform
  if platform == 'tpu':
    raise UserError(f'{given}: vLLM has no sleep mode on TPUs: give the engines other devices')
  if platform != 'cpu' and os.environ.get('XLA_PYTHON_CLIENT_ALLOCATOR') != 'platform':
    raise UserError(
        f'{given}: JAX keeps the memory that it frees on a {platform}, so the engines could not '
        'use it: set XLA_PYTHON_CLIENT_ALLOCATOR=platform in the environment of the run'
    )
  sharding.check_host_memory(mesh)
