"""Runs the command line of the package from a clone; an installed `stppo` is the same function."""

from stppo_jax.cli import main

if __name__ == '__main__':
  main()
