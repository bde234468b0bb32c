"""The mode that trains."""

from stppo_jax.cli.command import Command
from stppo_jax.training import loop


def train(command: Command) -> None:
  """Trains, or resumes the run in the workdir."""
  profile = command.flags.profile
  loop.start(command.config, command.workdir, command.stop_signal, profile)
