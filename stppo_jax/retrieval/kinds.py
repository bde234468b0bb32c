"""Retrievers by name: settings and a corpus in, a retriever out.

RETRIEVERS lists the short names of `config.retriever.kind`. A user's retriever is a function
make(settings, load_corpus) that returns search(queries, top_k), or an object with that method.
`settings` is the run's config.retriever; `load_corpus()` returns the passages.
"""

from collections.abc import Callable
from collections.abc import Sequence
import types as types_lib
from typing import Any

from absl import logging

from stppo_jax import types
from stppo_jax.retrieval import bm25
from stppo_jax.retrieval import http
from stppo_jax.retrieval import protocol

LoadCorpus = Callable[[], Sequence[types.Passage]]


def make(maker: Callable, settings: Any, load_corpus: LoadCorpus) -> protocol.Retriever | None:
  """Calls one of RETRIEVERS or a function of the user's; None for 'none'."""
  made = maker(settings, load_corpus)
  if made is None or hasattr(made, 'search'):
    return made
  if not callable(made):
    raise types.UserError(
        f'config.retriever.kind={settings.kind!r} made {made!r}: return search(queries, top_k), '
        'or an object with that method'
    )
  return types_lib.SimpleNamespace(search=made)


def make_dense(
    passages: Sequence[types.Passage], encoder: str, cache: str, with_words: bool = False
) -> protocol.Retriever:
  """Returns search by the vectors of a BERT-class model; fused with BM25 for `with_words`."""
  from stppo_jax.retrieval import dense  # imported only if needed: it compiles a model

  by_meaning = dense.DenseRetriever(passages, encoder, cache)
  if not with_words:
    return by_meaning
  return dense.HybridRetriever([bm25.Bm25Retriever(passages), by_meaning])


def _none(settings, load_corpus):
  del settings, load_corpus


def _http(settings, load_corpus):
  del load_corpus  # the server has it
  http_settings = http.HttpSettings(
      settings.dialect,
      settings.timeout_s,
      settings.retries,
      settings.backoff_s,
      concurrency=settings.concurrency or http.CONCURRENCY[settings.dialect],
      max_queries=settings.max_queries,
  )
  return http.HttpRetriever(settings.url, http_settings)


def _bm25(settings, load_corpus):
  del settings
  passages = load_corpus()
  logging.info('BM25 over %d passages', len(passages))
  return bm25.Bm25Retriever(passages)


def _dense(settings, load_corpus):
  return make_dense(load_corpus(), settings.encoder, settings.embeddings)


def _hybrid(settings, load_corpus):
  return make_dense(load_corpus(), settings.encoder, settings.embeddings, with_words=True)


RETRIEVERS = {'bm25': _bm25, 'http': _http, 'dense': _dense, 'hybrid': _hybrid, 'none': _none}
