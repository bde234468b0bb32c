"""Reinforcement learning of language-model agents over several turns, in JAX."""


def __getattr__(name: str) -> str:
  if name == '__version__':  # pyproject.toml has it
    from stppo_jax import requirements

    return requirements.own_version()
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
