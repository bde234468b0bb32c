"""The command: `main` is what run.py and the installed `stppo` call."""

import sys

from stppo_jax import requirements
from stppo_jax.distributed import huge_pages


def main() -> None:
  """Runs the command."""
  huge_pages.restart()
  try:
    from stppo_jax.cli import entry  # imports JAX, which takes a second: not before the restart
  except ModuleNotFoundError as error:
    if str(error.name).startswith('stppo_jax'):
      raise
    sys.exit(f'{error}: {requirements.install_command("")}')
  entry.main()
