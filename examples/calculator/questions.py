"""Small sums in words, and the expression that answers each: '(12+3)*40'."""

import random

from stppo_jax.envs import calculator
from stppo_jax.types import Task

NUM_TASKS = {'train': 4000, 'dev': 256}
KINDS = (
    (
        '{a} boxes hold {b} pens each, and {c} pens are taken out. How many pens are left',
        '{a}*{b}-{c}',
    ),
    (
        '{a} books have {b} pages each, and a letter has {c}. How many pages are there',
        '{a}*{b}+{c}',
    ),
    ('{a} seats are taken, {b} get free, {c} are taken. How many seats are taken', '{a}-{b}+{c}'),
    ('{a} coins are earned, {b} are found, {c} are spent. How many coins are left', '{a}+{b}-{c}'),
)


def load(split: str) -> list[Task]:
  """Makes the tasks of a split."""
  return [make_task(split, seed) for seed in range(NUM_TASKS[split])]


def make_task(split: str, seed: int) -> Task:
  """Draws a kind and three numbers."""
  rng = random.Random(f'{split} {seed}')
  text, expression = rng.choice(KINDS)
  numbers = _numbers(rng, split)
  answer = calculator.calculator(expression.format(**numbers))
  return Task(f'{split}-{seed}', text.format(**numbers), (answer,), dataset='sums', split=split)


def _numbers(rng, split):
  """Draws three numbers. Those with a sum that eight divides are held out."""
  while True:
    numbers = {name: rng.randint(10, 99) for name in 'abc'}
    if (sum(numbers.values()) % 8 == 0) == (split == 'dev'):
      return numbers
