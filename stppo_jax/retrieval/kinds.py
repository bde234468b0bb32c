"""Retrievers by name: settings and a corpus in, a retriever out.

RETRIEVERS lists the short names of `config.retriever.kind`. A user's retriever is a function
make(settings, load_corpus) that returns search(queries, top_k), or an object with that method.
`settings` is the run's config.retriever; `load_corpus()` returns the passages.
"""

from collections.abc import Callable
from collections.abc import Sequence
import types as types_lib
from typing import Protocol

from absl import logging

from stppo_jax import types
from stppo_jax.retrieval import bm25
from stppo_jax.retrieval import protocol

LoadCorpus = Callable[[], Sequence[types.Passage]]


class KindSettings(Protocol):
  """The settings that retrievers read: those of config.retriever, or flags with these names."""

  kind: str
  url: str
  dialect: str
  timeout_s: float
  retries: int
  backoff_s: float
  concurrency: int
  max_queries: int
  encoder: str
  embeddings: str
  device: str
  query_prompt: str | None
  passage_prompt: str | None


def make(
    maker: Callable, settings: KindSettings, load_corpus: LoadCorpus
) -> protocol.Retriever | None:
  """Calls one of RETRIEVERS or a function of the user's; None for 'none'."""
  retriever = maker(settings, load_corpus)
  is_off = retriever is None and settings.kind in RETRIEVERS
  if is_off or hasattr(retriever, 'search'):
    return retriever
  if not callable(retriever):
    raise types.UserError(
        f'config.retriever.kind={settings.kind!r} made {retriever!r}: return '
        'search(queries, top_k), or an object with that method'
    )
  return types_lib.SimpleNamespace(search=retriever)


def make_dense(
    passages: Sequence[types.Passage], settings: KindSettings, with_words: bool = False
) -> protocol.Retriever:
  """Returns a search by the vectors of an encoder, with BM25 if `with_words`."""
  from stppo_jax.retrieval import dense  # imported only if needed: it loads torch
  from stppo_jax.retrieval import encoder as encoder_lib

  encoder = encoder_lib.Encoder(
      settings.encoder, settings.device, settings.query_prompt, settings.passage_prompt
  )
  dense_retriever = dense.DenseRetriever(passages, encoder, settings.embeddings)
  if not with_words:
    return dense_retriever
  return dense.HybridRetriever([bm25.Bm25Retriever(passages), dense_retriever])


def _http(settings: KindSettings, load_corpus: LoadCorpus) -> protocol.Retriever:
  from stppo_jax.retrieval import http

  del load_corpus  # the server has the corpus
  http_settings = http.HttpSettings(
      settings.dialect,
      settings.timeout_s,
      settings.retries,
      settings.backoff_s,
      concurrency=settings.concurrency or http.CONCURRENCY[settings.dialect],
      max_queries=settings.max_queries,
  )
  return http.HttpRetriever(settings.url, http_settings)


def _bm25(settings: KindSettings, load_corpus: LoadCorpus) -> protocol.Retriever:
  del settings
  passages = load_corpus()
  logging.info('BM25 over %d passages', len(passages))
  return bm25.Bm25Retriever(passages)


RETRIEVERS: dict[str, Callable] = {
    'bm25': _bm25,
    'http': _http,
    'dense': lambda settings, load_corpus: make_dense(load_corpus(), settings),
    'hybrid': lambda settings, load_corpus: make_dense(load_corpus(), settings, with_words=True),
    'none': lambda settings, load_corpus: None,
}
