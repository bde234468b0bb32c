"""The command: `main` is what run.py and the installed `stppo` call."""


def main() -> None:
  """Runs the command."""
  from stppo_jax.cli import entry  # not above: modules of this package import each other

  entry.main()
