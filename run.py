"""Trains, evaluates, exports, plans or reports: `python run.py --help`, or stppo_jax/cli.py."""

from stppo_jax.cli import main

if __name__ == '__main__':
  main()
