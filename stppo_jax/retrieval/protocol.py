"""What an environment needs of a retriever."""

from collections.abc import Sequence
from typing import Protocol
from typing import runtime_checkable

from stppo_jax import types


@runtime_checkable
class Retriever(Protocol):
  """Finds passages. The world's failures are part of its answers, not exceptions."""

  def search(self, queries: Sequence[str], top_k: int) -> list[list[types.Passage] | None]:
    """One inner list a query, of at most `top_k` passages, best first; None where the retriever
    failed for that query. An empty list means that nothing was found."""
    ...
