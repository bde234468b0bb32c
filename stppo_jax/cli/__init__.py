"""The command: `main` is what run.py and the installed `stppo` call."""

from stppo_jax.distributed import huge_pages


def main() -> None:
  """Runs the command."""
  huge_pages.restart()
  from stppo_jax.cli import entry  # imports JAX, which takes two seconds: not before the restart

  entry.main()
