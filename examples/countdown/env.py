"""Countdown: write an expression of three given numbers, in their order, that equals a target."""

import ast
import operator
import random
import re
import zlib

from stppo_jax.types import Task

NUM_TASKS = {'train': 2000, 'dev': 128}
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub}


def load(split: str) -> list[Task]:
  """Makes the tasks of a split: the seed of a task is its question."""
  return [make_task(split, seed) for seed in range(NUM_TASKS[split])]


def make_task(split: str, seed: int) -> Task:
  """Draws three numbers and two operators: '3 7 2=8' has the solution 3+7-2.

  There are few questions. An eighth of them is in `dev` only.
  """
  rng = random.Random(f'{split} {seed}')
  while True:
    numbers = [rng.randint(1, 9) for _ in range(3)]
    signs = [1, rng.choice((1, -1)), rng.choice((1, -1))]
    target = sum(sign * number for sign, number in zip(signs, numbers))
    question = f'{" ".join(map(str, numbers))}={target}'
    if (zlib.crc32(question.encode()) % 8 == 0) == (split == 'dev'):
      return Task(id=f'{split}-{seed}', question=question, dataset='countdown', split=split)


class Countdown:
  """One turn: the question, then the agent's expression."""

  stop_strings = (';',)
  core_metrics = ('right',)
  uses_global_random = False

  def __init__(self, task, reward):
    self._task = task
    self._reward = reward

  def reset(self, seed=None):
    """Returns the question."""
    del seed  # the question does not depend on it
    return f'{self._task.question}:', {}

  def step(self, action):
    """Ends the episode with the reward of the expression."""
    answer = action.removesuffix(';')
    score = self._reward(self._task, answer, action)
    is_legal = value(answer, numbers(self._task)) is not None
    metrics = {'right': score, 'legal': float(is_legal)}
    return '', score, True, False, {'action': 'answer', 'metrics': metrics}


def check(task: Task, answer: str, transcript: str) -> float:
  """The reward: 1 for an expression of the numbers with the target as its value."""
  del transcript
  return float(value(answer, numbers(task)) == int(task.question.partition('=')[2]))


def numbers(task: Task) -> list[int]:
  """Returns the numbers that a task gives."""
  return [int(number) for number in task.question.partition('=')[0].split()]


def value(text: str, given: list[int]) -> int | None:
  """Returns the value of a sum of exactly the given numbers in their order, or None.

  The text comes from a model, so Python never evaluates it.
  """
  if len(text) > 40 or not re.fullmatch(r'[0-9]+(?:[+-][0-9]+)*', text):
    return None
  if [int(number) for number in re.findall(r'[0-9]+', text)] != given:
    return None
  return _walk(ast.parse(re.sub(r'\b0+(?=[0-9])', '', text), mode='eval').body)


def _walk(node):
  if isinstance(node, ast.Constant):
    return node.value
  return _OPERATORS[type(node.op)](_walk(node.left), _walk(node.right))
