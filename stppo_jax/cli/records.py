"""Modes that read what runs have written."""

import contextlib

from stppo_jax.cli import compare as compare_lib
from stppo_jax.cli.command import Command
from stppo_jax.cli.command import show
from stppo_jax.monitoring import report as report_lib
from stppo_jax.monitoring import viewer


def report(command: Command) -> None:
  """Writes report.html again."""
  print(report_lib.build(command.workdir))


def watch(command: Command) -> None:
  """Shows a run, or a folder of runs, in a browser while they train."""
  with contextlib.suppress(KeyboardInterrupt):
    viewer.serve(command.workdir, command.flags.port, command.stop_signal)


def compare(command: Command) -> None:
  """Compares the configs and the held-out scores of two runs, or of two evaluation folders."""
  first, second = command.operands
  show(compare_lib.text(first, second))
