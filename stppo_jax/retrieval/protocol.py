"""The interface of a retriever."""

from collections.abc import Sequence
from typing import Protocol
from typing import runtime_checkable

from stppo_jax import types


@runtime_checkable
class Retriever(Protocol):
  """Finds passages. A failed server or network is part of the result, not an exception."""

  def search(self, queries: Sequence[str], top_k: int) -> list[list[types.Passage] | None]:
    """Returns a list of at most `top_k` passages per query, best first.

    None means that the retriever failed for that query; an empty list, that nothing was found.
    """
    ...
