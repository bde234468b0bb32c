"""The interface of a retriever, and the order of the passages that it returns."""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
from typing import Protocol
from typing import runtime_checkable

import numpy as np

from stppo_jax import types

# The passages of a query, best first. None: the retriever failed for that query.
Ranking = list[types.Passage] | None
Results = list[Ranking]  # one per query


@runtime_checkable
class Retriever(Protocol):
  """Finds passages. A failed server or network is part of the result, not an exception."""

  def search(self, queries: Sequence[str], top_k: int) -> Results:
    """Returns a list of at most `top_k` passages per query, best first.

    None means that the retriever failed for that query; an empty list, that nothing was found.
    """
    ...


def scored(
    passages: Sequence[types.Passage], rows: Iterable[int], scores: Iterable[float]
) -> list[types.Passage]:
  """Returns the passages of some rows, with their scores."""
  found = []
  for row, score in zip(rows, scores):
    passage = dataclasses.replace(passages[row], score=float(score))
    found.append(passage)
  return found


def best_rows(scores: np.ndarray, top_k: int) -> np.ndarray:
  """Returns the rows of the `top_k` highest scores [N], highest first. The first rows win ties."""
  rows = np.arange(len(scores))
  if len(rows) > top_k:
    threshold = np.partition(scores, -top_k)[-top_k]
    rows = np.flatnonzero(scores >= threshold)  # more than top_k with ties
  order = np.argsort(-scores[rows], kind='stable')
  return rows[order[:top_k]]
