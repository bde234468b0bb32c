"""Dense retrieval: an exact search for the passage vectors with the largest inner products.

Every passage is compared with every query, block by block, from a memory-mapped file. This is meant
for up to a few million passages. There is no approximate index.
"""

import collections
from collections.abc import Sequence
import dataclasses
import hashlib
import os
import pathlib
import secrets
import tempfile

from absl import logging
import numpy as np

from stppo_jax import types
from stppo_jax.data import tasks
from stppo_jax.retrieval import encoder as encoder_lib
from stppo_jax.retrieval import protocol

_BLOCK = 16_384  # passages compared at a time
_ENCODED = 4096  # passages encoded at a time
_DEPTH = 50  # passages per ranking to fuse
_RANK_CONSTANT = 60


class DenseRetriever:
  """Inner product of an encoder's vectors. Ties go to the passage that comes first in the corpus.

  The passages' vectors are made once and kept in `cache_folder`, under a name that depends on the
  encoder's files, on its prompt and on every passage; without a folder, in a temporary one.
  """

  def __init__(
      self, passages: Sequence[types.Passage], encoder: encoder_lib.Encoder, cache_folder: str = ''
  ):
    self._passages = list(passages)
    if not self._passages:
      raise types.UserError('retriever: got 0 passages; check that the corpus is not empty')
    self._encoder = encoder
    texts = [tasks.write_contents(passage) for passage in self._passages]
    if not cache_folder:
      self._temporary = tempfile.TemporaryDirectory()  # deleted with the retriever
      cache_folder = self._temporary.name
    self._vectors = embed(self._encoder, texts, cache_folder)

  def search(self, queries: Sequence[str], top_k: int) -> protocol.Results:
    if not queries or top_k < 1:
      return [[] for _ in queries]
    vectors = self._encoder.encode_queries(queries)
    nearest_rows, nearest_scores = nearest(vectors, self._vectors, top_k)
    results: protocol.Results = []
    for rows, scores in zip(nearest_rows, nearest_scores):
      passages = protocol.scored(self._passages, rows, scores)
      results.append(passages)
    return results


def embed(encoder: encoder_lib.Encoder, texts: Sequence[str], folder: str) -> np.ndarray:
  """Returns [len(texts), D] float32, mapped from a file in `folder`; makes a missing file."""
  digest = _digest(encoder, texts)
  path = os.path.join(folder, f'embeddings_{digest}.npy')
  if not os.path.exists(path):
    os.makedirs(folder, exist_ok=True)
    # Renamed when complete, so that an interrupted start leaves no incomplete file.
    part = f'{path}.{os.getpid()}-{secrets.token_hex(8)}.part'  # ids of hosts may be equal
    shape = (len(texts), encoder.width)
    vectors = np.lib.format.open_memmap(part, 'w+', np.float32, shape)
    _reserve(part)
    for start in range(0, len(texts), _ENCODED):
      block = slice(start, start + _ENCODED)
      vectors[block] = encoder.encode_passages(texts[block])
      logging.log_every_n_seconds(logging.INFO, 'embedded %d of %d passages', 30, start, len(texts))
    vectors.flush()
    os.replace(part, path)
  return np.load(path, mmap_mode='r', allow_pickle=False)


def _reserve(path: str) -> None:
  """Gives a new file its space on the disk. OSError: there is too little.

  Without it, the first write to a memory map for which the disk has no room ends the process with
  SIGBUS, perhaps after hours. macOS has no such call.
  """
  if not hasattr(os, 'posix_fallocate'):
    return
  try:
    with open(path, 'r+b') as file:
      os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))
  except OSError:
    os.remove(path)
    raise


def nearest(queries: np.ndarray, vectors: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns (rows, scores), [Q, min(top_k, N)] each, of the largest inner products, largest first.

  queries [Q,D], vectors [N,D]; equal scores in the order of rows.
  """
  nothing = (len(queries), 0)
  best_rows = np.zeros(nothing, np.int64)
  best_scores = np.zeros(nothing, np.float32)
  for start in range(0, len(vectors), _BLOCK):
    block = vectors[start : start + _BLOCK]
    scores = queries @ block.T  # [Q, block]
    stop = start + len(block)
    block_rows = np.arange(start, stop)
    rows = np.broadcast_to(block_rows, scores.shape)
    scores = np.concatenate([best_scores, scores], axis=1)
    rows = np.concatenate([best_rows, rows], axis=1)
    best = [protocol.best_rows(row, top_k) for row in scores]
    order = np.array(best)
    best_scores = np.take_along_axis(scores, order, axis=1)
    best_rows = np.take_along_axis(rows, order, axis=1)
  return best_rows, best_scores


def _digest(encoder: encoder_lib.Encoder, texts: Sequence[str]) -> str:
  digest = hashlib.sha256(encoder.passage_prompt.encode('utf-8', 'replace'))
  folder = pathlib.Path(encoder.folder)
  for path in sorted(folder.rglob('*')):
    if path.suffix in ('.json', '.safetensors', '.txt', '.model'):  # pooling has a file, too
      with open(path, 'rb') as file:
        part = hashlib.file_digest(file, 'sha256')
      digest.update(part.digest())
  for text in texts:
    data = text.encode('utf-8', 'replace')
    part = hashlib.sha256(data)
    digest.update(part.digest())
  return digest.hexdigest()[:16]


class HybridRetriever:
  """Reciprocal rank fusion: score(d) = sum over rankings of 1 / (60 + rank of d, from 1).

  Source: Cormack, Clarke and Buettcher, SIGIR 2009. A ranking that failed is left out; the query
  has failed when all of them have. Ties go to the passages of the earlier retriever.
  """

  def __init__(self, retrievers: Sequence[protocol.Retriever]):
    self._retrievers = retrievers

  def search(self, queries: Sequence[str], top_k: int) -> protocol.Results:
    depth = max(_DEPTH, top_k)
    rankings = [retriever.search(queries, depth) for retriever in self._retrievers]
    results: protocol.Results = []
    for rankings_of_query in zip(*rankings):
      fused = _fuse(rankings_of_query, top_k)
      results.append(fused)
    return results


def _fuse(rankings: Sequence[protocol.Ranking], top_k: int) -> protocol.Ranking:
  if all(ranking is None for ranking in rankings):
    return None
  scores: dict[str, float] = collections.defaultdict(float)
  passages: dict[str, types.Passage] = {}
  for ranking in rankings:
    for rank, passage in enumerate(ranking or (), start=1):
      scores[passage.id] += 1 / (_RANK_CONSTANT + rank)
      passages.setdefault(passage.id, passage)
  best = sorted(scores, key=scores.__getitem__, reverse=True)  # stable
  fused = []
  for key in best[:top_k]:
    passage = passages[key]
    score = scores[key]
    fused.append(dataclasses.replace(passage, score=score))
  return fused
