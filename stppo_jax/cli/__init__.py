"""The command: `main` is what run.py and the installed `stppo` call."""

from stppo_jax.cli.entry import main

__all__ = ['main']
