"""The mode that trains on conversations."""

from stppo_jax.cli.command import Command
from stppo_jax.training import sft as sft_lib


def sft(command: Command) -> None:
  """Trains the model on conversations, and writes WORKDIR/model, from which a run may start."""
  print(sft_lib.start(command.config, command.workdir, command.stop_signal))
