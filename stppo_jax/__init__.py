"""Reinforcement learning of language-model agents over several turns, in JAX.

types.py         the data that all parts exchange, and the letters of array shapes
config.py        every setting
plugins.py       loads objects by name
requirements.py  the packages that this one needs
stop_signal.py   ends work that can be repeated

Each folder lists its files.
"""


def __getattr__(name: str) -> str:
  if name == '__version__':  # pyproject.toml has it
    from stppo_jax import requirements

    return requirements.own_version()
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
