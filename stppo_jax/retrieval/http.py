"""Client of a retrieval server: queries in, passages out; failures are returned as data.

It supports two dialects, those of the servers of Search-R1 and of RAGEN (also rLLM):

  search_r1  {'queries': [..], 'topk': 3, 'return_scores': true}
             -> {'result': [[{'document': {'id', 'contents'}, 'score'}, ..], ..]}, per query
  ragen      {'query': .., 'top_k': 3} -> {'results': [{'id', 'content', 'score'}, ..]}
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import functools
import json
import math
import random
import threading
import time
from typing import Any
from urllib import parse

from absl import logging
import requests

from stppo_jax import tasks
from stppo_jax import types
from stppo_jax.distributed import http_client
from stppo_jax.retrieval import protocol

# Requests in flight at once. Search-R1's server searches in a thread per request, without a lock,
# and an index of FAISS on GPUs does not support that.
CONCURRENCY = {'search_r1': 1, 'ragen': 8}
DIALECTS = tuple(CONCURRENCY)


@dataclasses.dataclass(frozen=True)
class HttpSettings:
  """The form of a retriever's requests, time limits and retries."""

  dialect: str = 'search_r1'
  timeout_s: float = 30.0  # per request, up to the last byte of the answer
  retries: int = 3
  backoff_s: float = 0.5
  cache_size: int = 10_000  # queries; 0 = no cache
  connect_timeout_s: float = 5.0
  max_response_bytes: int = 64 << 20
  concurrency: int = 8  # requests in flight at once, of all threads
  max_queries: int = 32  # per request


class HttpRetriever:
  """Searches over HTTP. Failures of a server or network are part of the result.

  At most `max_queries` go into one request, and at most `concurrency` requests are in flight from
  this process. A server may continue a request that timed out here.

  A query without a usable answer within `timeout_s` per request and `retries` retries gives None.
  Network errors, time-outs and overload are retried as in `http_client.with_retries`. An unreadable
  answer is not.

  Once `give_up()` is true, a search in progress ends within seconds, without an answer. After a
  request has had no answer at all in any attempt (a refused connection or a time-out), requests
  that were not sent yet fail at once, because the server is most likely gone.

  Counters since construction: `requests` sent (with retries), `retries`, `failures` (queries that
  gave None), `cache_hits` (queries answered from the cache).

  Choice: proxy settings of the environment are ignored, because a retriever is inside the cluster
  and a proxy for the outside would not reach it.
  """

  def __init__(
      self,
      url: str,  # http://host:port, or with the path of the end point
      settings: HttpSettings = HttpSettings(),
      jitter_seed: int | None = None,
      sleep: Callable[[float], None] = time.sleep,
  ):
    self.address = _endpoint(url)
    self.requests = 0
    self.retries = 0
    self.failures = 0
    self.cache_hits = 0
    self.give_up: Callable[[], bool] = lambda: False  # a run that stops sets another function
    self.last_failure = ''
    self._settings = settings
    self._limits = http_client.ClientLimits(
        settings.connect_timeout_s, settings.timeout_s, settings.max_response_bytes
    )
    self._max_queries = settings.max_queries if settings.dialect == 'search_r1' else 1
    self._jitter = random.Random(jitter_seed)
    self._sleep = sleep
    self._cache: collections.OrderedDict[tuple[str, int], list[types.Passage]] = (
        collections.OrderedDict()
    )
    self._lock = threading.Lock()  # guards counters and cache: callers use threads
    self._in_flight = threading.BoundedSemaphore(settings.concurrency)
    self._session = requests.Session()
    self._session.trust_env = False
    adapter = requests.adapters.HTTPAdapter(pool_maxsize=settings.concurrency)
    self._session.mount('http://', adapter)
    self._session.mount('https://', adapter)
    # Otherwise a small body could decompress to a huge one.
    self._session.headers['Accept-Encoding'] = 'identity'

  def search(self, queries: Sequence[str], top_k: int) -> protocol.Results:
    """Searches as in `protocol.Retriever`. Equal queries are sent once, cached ones not at all."""
    results: dict[str, list[types.Passage] | None] = {}
    with self._lock:
      for query in queries:
        cached = self._cache.get((query, top_k))
        if cached is not None:
          self._cache.move_to_end((query, top_k))
          self.cache_hits += 1
          results[query] = cached
    missing = [query for query in dict.fromkeys(queries) if query not in results]
    if missing:
      results.update(zip(missing, self._fetch(missing, top_k)))
    with self._lock:
      for query in missing:
        passages = results[query]
        if passages is not None:
          self._cache[query, top_k] = passages
      while len(self._cache) > self._settings.cache_size:
        self._cache.popitem(last=False)
      answers = [results[query] for query in queries]
      self.failures += answers.count(None)
    return [None if passages is None else list(passages) for passages in answers]

  def check(self) -> None:
    """Sends one query; raises a UserError with address and reason if it has no usable answer."""
    self.last_failure = ''
    if self.search([f'probe {time.time_ns()}'], 1)[0] is None:
      raise types.UserError(
          f'config.retriever.url={self.address!r} gave no usable answer to a first query in the '
          f'dialect {self._settings.dialect!r} ({self.last_failure}): start the retriever, or '
          'correct --config.retriever.url or --config.retriever.dialect'
      )

  def _fetch(self, queries: list[str], top_k: int) -> protocol.Results:
    """Sends requests of bounded size side by side. A failed one does not affect the others."""
    size = self._max_queries
    starts = range(0, len(queries), size)
    parts = [queries[i : i + size] for i in starts]
    fetch = functools.partial(self._fetch_part, top_k=top_k, is_gone=threading.Event())
    with futures.ThreadPoolExecutor(min(self._settings.concurrency, len(parts))) as pool:
      return [passages for part in pool.map(fetch, parts) for passages in part]

  def _fetch_part(
      self, queries: list[str], top_k: int, is_gone: threading.Event
  ) -> protocol.Results:
    """Sends one request: one query in RAGEN's dialect, up to `max_queries` in Search-R1's."""
    is_ragen = self._settings.dialect == 'ragen'
    question: dict[str, Any] = {'queries': queries, 'topk': top_k, 'return_scores': True}
    if is_ragen:
      question = {'query': queries[0], 'top_k': top_k}
    try:
      answer = json.loads(self._ask(question, is_gone))
      rows = [answer['results']] if is_ragen else answer['result']
      if not isinstance(rows, list) or len(rows) != len(queries):
        raise ValueError(f'no list of {len(queries)} results')
    except (http_client.GivenUp, http_client.Temporary):
      return [None] * len(queries)
    except http_client.Rejected as error:
      self._report(str(error))
      return [None] * len(queries)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
      self._report(f'an unreadable answer ({type(error).__name__}: {error})')
      return [None] * len(queries)
    read = _ragen_passage if is_ragen else _search_r1_passage
    return [self._read_passages(row, read, top_k) for row in rows]

  def _ask(self, question: dict[str, Any], is_gone: threading.Event) -> bytes:
    """Returns the server's answer. Sets `is_gone` where no attempt had any answer."""
    is_silent = True

    def attempt(number: int) -> bytes:
      nonlocal is_silent
      with self._in_flight:
        if self.give_up() or is_gone.is_set():
          raise http_client.GivenUp
        with self._lock:
          self.requests += 1
          self.retries += number > 0
        post = functools.partial(
            http_client.post, self._session, self.address, question, self._limits
        )
        try:
          return http_client.call_within(post, self._settings.timeout_s, lambda: self.give_up())
        except http_client.Temporary as error:
          is_silent &= error.is_silent
          self._report(str(error))
          raise

    settings = self._settings
    try:
      return http_client.with_retries(
          attempt, settings.retries, settings.backoff_s, self._sleep, self._jitter
      )
    except http_client.Temporary:
      if is_silent:
        is_gone.set()
      raise

  def _read_passages(
      self, rows: Any, read: Callable[[Any], types.Passage], top_k: int
  ) -> list[types.Passage] | None:
    if not isinstance(rows, list):
      self._report('no list of documents in the answer')
      return None
    try:
      return [read(row) for row in rows[:top_k]]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
      self._report(f'a malformed document ({type(error).__name__}: {error})')
      return None

  def _report(self, failure: str) -> None:
    self.last_failure = failure
    logging.log_every_n_seconds(logging.WARNING, 'retriever %s: %s', 60, self.address, failure)


def _endpoint(url: str) -> str:
  wanted = 'use http://host:port or https://host:port, with a path or without'
  try:
    parts = parse.urlsplit(url)
    _ = parts.port  # raises for a port that is not a number
  except (ValueError, AttributeError, TypeError):
    raise types.UserError(f'retriever: got url={url!r}, which cannot be read; {wanted}') from None
  has_space = any(map(str.isspace, str(url)))
  if parts.scheme not in ('http', 'https') or not parts.hostname or has_space:
    raise types.UserError(f'retriever: got url={url!r}; {wanted}')
  path = parts.path if parts.path.strip('/') else '/retrieve'
  return parse.urlunsplit((parts.scheme, parts.netloc, path, parts.query, ''))


def _search_r1_passage(row: dict[str, Any]) -> types.Passage:
  document = row.get('document', row)  # without scores servers send the bare document
  score = row.get('score') or 0.0
  return _passage(document.get('id', ''), document['contents'], score)


def _ragen_passage(row: dict[str, Any]) -> types.Passage:
  score = row.get('score') or 0.0
  return _passage(row.get('id', ''), row['content'], score)


def _passage(passage_id: Any, contents: Any, score: Any) -> types.Passage:
  if not isinstance(contents, str):
    raise TypeError('contents are not a string')
  if not math.isfinite(score):
    raise ValueError('the score is not finite')
  title, text = tasks.read_contents(contents)
  return types.Passage(str(passage_id), title, text, float(score))
