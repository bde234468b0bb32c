"""What the rollout needs of an environment, and one round of many environments at once.

The interface is GEM's, so that a GEM environment plugs in as it is, without an adapter.
"""

from collections.abc import Sequence
import random
from typing import Any
from typing import Protocol
from typing import runtime_checkable

import numpy as np

Step = tuple[str, float, bool, bool, dict[str, Any]]


@runtime_checkable
class Env(Protocol):
  """One episode at a time. Terminated and truncated may both be true: the episode is over, and a
  limit ended it."""

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Starts an episode: (first observation, info)."""
    ...

  def step(self, action: str) -> Step:
    """Takes the agent's text: (observation, reward, terminated, truncated, info)."""
    ...


def step_all(envs: Sequence[Env], actions: Sequence[str]) -> list[Step]:
  """Steps every environment once, in order, with one search a (retriever, top_k) for all of them.

  An environment takes part in the shared search if it has `query(action) -> str | None`,
  `retriever`, `top_k`, and a `step` that accepts `passages`; the others are stepped one by one.
  """
  if len(envs) != len(actions):
    raise AssertionError(f'{len(envs)} environments but {len(actions)} actions')
  rounds: dict[tuple[int, int], list[tuple[int, str]]] = {}
  for row, (env, action) in enumerate(zip(envs, actions)):
    shares = hasattr(env, 'query') and hasattr(env, 'retriever')
    query = env.query(action) if shares else None
    if query is not None:
      rounds.setdefault((id(env.retriever), env.top_k), []).append((row, query))
  fetched = {}
  for (_, top_k), wanted in rounds.items():
    rows, queries = zip(*wanted)
    found = envs[rows[0]].retriever.search(list(queries), top_k)
    if len(found) != len(rows):
      raise AssertionError(f'{len(rows)} queries but {len(found)} results')
    fetched.update(zip(rows, found))
  return [
      env.step(action, passages=fetched[row]) if row in fetched else env.step(action)
      for row, (env, action) in enumerate(zip(envs, actions))
  ]


def isolated_reset(env: Env, seed: int | None = None) -> tuple[str, dict[str, Any]]:
  """`env.reset(seed)`, with Python's and NumPy's process-global random states put back after.

  GEM's reset seeds both; without this, each episode that starts would rewind the process.
  """
  python_state, numpy_state = random.getstate(), np.random.get_state()
  try:
    return env.reset(seed=seed)
  finally:
    random.setstate(python_state)
    np.random.set_state(numpy_state)


def with_suffix(observation: str, info: dict[str, Any]) -> str:
  """The observation as the agent should read it: GEM keeps its last part in `info['suffix']`."""
  return observation + (info.get('suffix') or '')
