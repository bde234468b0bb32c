"""Dense retrieval: an exact search for the passage vectors with the largest inner products.

Every passage is compared with every query, block by block, from a memory-mapped file. This is meant
for up to a few million passages. There is no approximate index.
"""

import collections
from collections.abc import Sequence
import dataclasses
import hashlib
import os
import secrets
import tempfile

from absl import logging
import numpy as np

from stppo_jax import tasks
from stppo_jax import types
from stppo_jax.retrieval import encoder as encoders
from stppo_jax.retrieval import protocol

_BLOCK = 16_384  # passages compared at a time


class DenseRetriever:
  """Inner product of E5-like vectors. Ties go to the passage that stands first in the corpus.

  The passages' vectors are made once and kept in `cache_folder`, under a name that depends on the
  encoder's weights and on every passage; without a folder, in a temporary one.
  """

  def __init__(
      self,
      passages: Sequence[types.Passage],
      encoder_folder: str,
      cache_folder: str = '',
      query_prefix: str = 'query: ',
      passage_prefix: str = 'passage: ',
  ):
    self._passages = list(passages)
    if not self._passages:
      raise types.UserError('retriever: got 0 passages; check that the corpus is not empty')
    self._encoder = encoders.Encoder(encoder_folder)
    self._query_prefix = query_prefix
    texts = [passage_prefix + tasks.write_contents(p) for p in self._passages]
    if not cache_folder:
      self._temporary = tempfile.TemporaryDirectory()  # deleted with the retriever
      cache_folder = self._temporary.name
    self._vectors = embed(self._encoder, texts, cache_folder)

  def search(self, queries: Sequence[str], top_k: int) -> list[list[types.Passage] | None]:
    if not queries or top_k < 1:
      return [[] for _ in queries]
    asked = self._encoder.encode([self._query_prefix + query for query in queries])
    rows, scores = nearest(asked, self._vectors, top_k)
    return [
        [dataclasses.replace(self._passages[i], score=float(score)) for i, score in zip(*found)]
        for found in zip(rows, scores)
    ]


def embed(encoder: encoders.Encoder, texts: Sequence[str], folder: str) -> np.ndarray:
  """Returns [len(texts), D] float32, mapped from a file in `folder`; makes a missing file."""
  path = os.path.join(folder, f'embeddings_{_digest(encoder.folder, texts)}.npy')
  if not os.path.exists(path):
    os.makedirs(folder, exist_ok=True)
    # Renamed when complete, so that an interrupted start leaves none.
    part = f'{path}.{os.getpid()}-{secrets.token_hex(8)}.part'  # ids of hosts may be equal
    shape = (len(texts), encoder.width)
    vectors = np.lib.format.open_memmap(part, 'w+', np.float32, shape)
    for start in range(0, len(texts), 4096):
      vectors[start : start + 4096] = encoder.encode(texts[start : start + 4096])
      logging.log_every_n_seconds(logging.INFO, 'embedded %d of %d passages', 30, start, len(texts))
    vectors.flush()
    os.replace(part, path)
  return np.load(path, mmap_mode='r', allow_pickle=False)


def nearest(queries: np.ndarray, vectors: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns (rows, scores), [Q, min(top_k, N)] each, of the largest inner products, largest first.

  queries [Q,D], vectors [N,D]; equal scores in the order of rows.
  """
  best_rows = np.zeros((len(queries), 0), np.int64)
  best_scores = np.zeros((len(queries), 0), np.float32)
  for start in range(0, len(vectors), _BLOCK):
    scores = queries @ vectors[start : start + _BLOCK].T  # [Q, block]
    rows = np.broadcast_to(np.arange(start, start + scores.shape[1]), scores.shape)
    scores = np.concatenate([best_scores, scores], axis=1)
    rows = np.concatenate([best_rows, rows], axis=1)
    order = np.array([_largest(row, top_k) for row in scores])
    best_scores = np.take_along_axis(scores, order, axis=1)
    best_rows = np.take_along_axis(rows, order, axis=1)
  return best_rows, best_scores


def _largest(scores: np.ndarray, top_k: int) -> np.ndarray:
  """Returns the columns of the `top_k` largest, largest first; the first columns win ties."""
  columns = np.arange(len(scores))
  if len(scores) > top_k:
    threshold = np.partition(scores, -top_k)[-top_k]
    columns = np.flatnonzero(scores >= threshold)  # more than top_k of them if they tie
  return columns[np.argsort(-scores[columns], kind='stable')][:top_k]


def _digest(encoder_folder: str, texts: Sequence[str]) -> str:
  digest = hashlib.sha256()
  for name in ('model.safetensors', 'tokenizer.json', 'config.json'):
    with open(os.path.join(encoder_folder, name), 'rb') as file:
      digest.update(hashlib.file_digest(file, 'sha256').digest())
  for text in texts:
    digest.update(hashlib.sha256(text.encode('utf-8', 'replace')).digest())
  return digest.hexdigest()[:16]


class HybridRetriever:
  """Reciprocal rank fusion: score(d) = sum over rankings of 1 / (60 + rank of d, from 1).

  Source: Cormack, Clarke and Buettcher, SIGIR 2009. A ranking that failed is left out; the query
  has failed when all of them have. Ties go to what the earlier retriever found.
  """

  def __init__(
      self, retrievers: Sequence[protocol.Retriever], depth: int = 50, constant: float = 60.0
  ):
    if not retrievers or depth < 1:
      raise types.UserError(
          f'retriever: got {len(retrievers)} rankings to fuse, depth={depth}; '
          'both need 1 or more'
      )
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
