"""Several retrievers as one: their rankings in, one ranking out."""

import collections
import dataclasses
from collections.abc import Sequence

from stppo_jax import types
from stppo_jax.retrieval import protocol


class HybridRetriever:
  """Reciprocal rank fusion: score(d) = sum over rankings of 1 / (60 + rank of d, from 1).

  Source: Cormack, Clarke and Buettcher, SIGIR 2009. A ranking that failed is left out; the query
  has failed when all of them have. Ties go to what the earlier retriever found.
  """

  def __init__(self, retrievers: Sequence[protocol.Retriever], depth: int = 50,
               constant: float = 60.0):
    if not retrievers or depth < 1:
      raise types.UserError(f'retriever: got {len(retrievers)} rankings to fuse, depth={depth}; '
                            'both need 1 or more')
    self._retrievers = list(retrievers)
    self._depth = depth
    self._constant = constant

  def search(self, queries: Sequence[str], top_k: int) -> list[list[types.Passage] | None]:
    depth = max(self._depth, top_k)
    rankings = [retriever.search(queries, depth) for retriever in self._retrievers]
    return [self._fuse(found, top_k) for found in zip(*rankings)]

  def _fuse(self, rankings, top_k):
    if all(ranking is None for ranking in rankings):
      return None
    scores, passages = collections.defaultdict(float), {}
    for ranking in rankings:
      for rank, passage in enumerate(ranking or (), start=1):
        scores[passage.id] += 1 / (self._constant + rank)
        passages.setdefault(passage.id, passage)
    best = sorted(scores, key=lambda key: -scores[key])[:top_k]  # stable
    return [dataclasses.replace(passages[key], score=scores[key]) for key in best]
