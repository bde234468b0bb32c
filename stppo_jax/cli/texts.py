"""Modes that print texts, or write a first folder."""

from stppo_jax.cli import help as help_lib
from stppo_jax.cli import new as new_lib
from stppo_jax.cli.command import Command
from stppo_jax.cli.command import show


def new(command: Command) -> None:
  """Makes a folder NAME with an environment, a config, a test and a README."""
  (name,) = command.operands
  print(new_lib.make(name))


def list_all(command: Command) -> None:
  """Lists experiments and algorithms."""
  del command
  show(help_lib.catalogue())


def completion(command: Command) -> None:
  """Prints the completion for a SHELL: bash or zsh."""
  (shell,) = command.operands
  show(help_lib.completion(shell, command.modes))
