"""What the user has asked for, as a mode reads it."""

from collections.abc import Sequence
import os
import sys
from typing import NamedTuple

from stppo_jax.cli.flags import Flags
from stppo_jax.config import Config
from stppo_jax.stop_signal import StopSignal


class Command(NamedTuple):
  """What the user has asked for."""

  config: Config  # the defaults, for modes without a config
  workdir: str
  flags: Flags
  operands: Sequence[str]  # words after the mode
  stop_signal: StopSignal  # see signals.handled
  modes: Sequence[str]  # the names of all modes

  @property
  def names_run(self) -> bool:
    """Whether the user asks for the policy of a run: with --workdir, and without --config."""
    return bool(self.flags.workdir and not self.flags.config)


def show(text: str) -> None:
  """Prints a long text, of which `| head` may read a part."""
  try:
    print(text, flush=True)
  except BrokenPipeError:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())  # the flush at exit writes there
