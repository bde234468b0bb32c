"""Tasks of environments that draw everything from a seed."""

from collections.abc import Callable

from stppo_jax.types import Task

NUM_TASKS = {'train': 4000, 'dev': 128}


def seeded(name: str) -> Callable[[str], list[Task]]:
  """Returns a loader (split) -> tasks. A task is its seed, and no seed is in two splits."""

  def load(split: str) -> list[Task]:
    start = 0 if split == 'train' else NUM_TASKS['train']
    seeds = range(start, start + NUM_TASKS[split])
    return [Task(f'{split}-{seed}', dataset=name, split=split, seed=seed) for seed in seeds]

  return load
