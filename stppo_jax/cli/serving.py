"""The mode that serves a checkpoint."""

from stppo_jax.cli.command import Command
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.serving import gateway


def serve(command: Command) -> None:
  """Serves a checkpoint with an OpenAI-compatible interface."""
  config = command.config

  def load():
    return policy_lib.policy(config, command.workdir, is_run=command.names_run)

  gateway.serve(config, load, command.flags.port, command.stop_signal)
