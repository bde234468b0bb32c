"""Engines on the devices of the trainer: one of them uses the memory at a time.

  engines   asleep       |  wake, load weights, sample  |  asleep
  trainer   update       |  all arrays on the host      |  update

A run with config.rollout.engine imports this module, and uses it with
config.rollout.engine_shares_devices=True.
"""

from collections.abc import Iterator
import contextlib
from typing import Protocol

from absl import logging

from stppo_jax import types
from stppo_jax.rollout import remote
from stppo_jax.rollout import sequences


class Offloadable(Protocol):
  """What the trainer keeps on the devices, see `training.offload.DeviceArrays`."""

  def policy(self) -> sequences.PolicyParams:
    """Returns the parameters of the policy, in the buffers that they have now."""

  def to_host(self) -> None:
    """Moves all arrays to the host's memory."""

  def to_devices(self) -> None:
    """Moves them back."""


class Sharing:
  """Gives the devices to the engines and back."""

  def __init__(self, fleet: remote.Fleet, trainer: Offloadable):
    self._fleet = fleet
    self._trainer = trainer
    self._are_awake = False

  @contextlib.contextmanager
  def engines_awake(self) -> Iterator[None]:
    """Context manager in which the engines may sample. It may be entered within itself.

    Raises a RunError if an engine does not free its memory. Then the arrays stay on the host, from
    which the run can save them. After another error, that one is raised.
    """
    if self._are_awake:
      yield
      return
    before = self._trainer.policy()
    self._trainer.to_host()
    self._fleet.wake()
    self._are_awake = True
    try:
      yield
    except BaseException:
      try:
        self._take_back(before)
      except types.RunError as error:
        logging.error('%s', error)
      raise
    self._take_back(before)

  def _take_back(self, before):
    """Puts the engines to sleep, and moves the arrays back to the devices."""
    self._are_awake = False
    self._fleet.sleep()
    self._trainer.to_devices()
    self._fleet.folders.move(before, self._trainer.policy())
