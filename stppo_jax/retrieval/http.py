"""Client of a retrieval server: queries in, passages out; failures are returned as data.

It supports two dialects, those of the servers of Search-R1 and of RAGEN (also rLLM):

  search_r1  {'queries': [..], 'topk': 3, 'return_scores': true}
             -> {'result': [[{'document': {'id', 'contents'}, 'score'}, ..], ..]}, per query
  ragen      {'query': .., 'top_k': 3} -> {'results': [{'id', 'content', 'score'}, ..]}
"""

from collections.abc import Sequence
from concurrent import futures
import dataclasses
import functools
import itertools
import math
import re
import threading
import time
from typing import Any

from absl import logging

from stppo_jax import types
from stppo_jax.data import tasks
from stppo_jax.net import http_client
from stppo_jax.retrieval import protocol
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal

# Requests in flight at once. Search-R1's server searches in a thread per request, without a lock,
# and an index of FAISS on GPUs does not support that.
CONCURRENCY = {'search_r1': 1, 'ragen': 8}
_TEXT_LENGTH = 300  # characters of a failure in the log


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

  `stop_signal` ends a search in progress within seconds, without an answer. If all attempts of a
  request end in a refused connection or a time-out, the search does not send its remaining requests
  and they fail at once, because the server is most likely gone.
  """

  def __init__(
      self,
      url: str,  # http://host:port, or with the path of the end point
      settings: HttpSettings = HttpSettings(),
  ):
    self.address = _endpoint(url)
    self.stop_signal = NEVER  # a run gives its own
    self.last_failure = ''
    self._settings = settings
    self._cache: dict[tuple[str, int], list[types.Passage]] = {}
    self._lock = threading.Lock()  # guards the cache: callers use threads
    self._in_flight = threading.BoundedSemaphore(settings.concurrency)
    limits = http_client.ClientLimits(
        settings.connect_timeout_s, settings.timeout_s, settings.max_response_bytes
    )
    self._server = http_client.Connection(self.address, limits, settings.concurrency)

  def search(self, queries: Sequence[str], top_k: int) -> protocol.Results:
    """Searches as in `protocol.Retriever`. Equal queries are sent once, cached ones not at all."""
    with self._lock:
      known = {query: self._cache.get((query, top_k)) for query in queries}
    missing = [query for query, passages in known.items() if passages is None]
    if missing:
      known.update(zip(missing, self._fetch(missing, top_k)))
    results = [known[query] for query in queries]
    with self._lock:
      for query in missing:
        passages = known[query]
        if passages is not None:
          self._cache[query, top_k] = passages
      while len(self._cache) > self._settings.cache_size:
        del self._cache[next(iter(self._cache))]  # the oldest
    return [None if passages is None else list(passages) for passages in results]

  def check_server(self, top_k: int) -> None:
    """Sends one query; raises a UserError with address and reason if it has no usable answer."""
    self.last_failure = ''
    if self.search([f'probe {time.time_ns()}'], top_k)[0] is None:
      raise types.UserError(
          f'config.retriever.url={self.address!r} gave no usable answer to a first query in the '
          f'dialect {self._settings.dialect!r} ({self.last_failure}): start the retriever, or '
          'correct --config.retriever.url or --config.retriever.dialect'
      )

  def _fetch(self, queries: list[str], top_k: int) -> protocol.Results:
    """Sends requests of bounded size side by side. A failed one does not affect the others."""
    size = self._settings.max_queries if self._settings.dialect == 'search_r1' else 1
    parts = [queries[i : i + size] for i in range(0, len(queries), size)]
    fetch = functools.partial(self._fetch_part, top_k=top_k, is_gone=StopSignal())
    with futures.ThreadPoolExecutor(min(self._settings.concurrency, len(parts))) as pool:
      return list(itertools.chain.from_iterable(pool.map(fetch, parts)))

  def _fetch_part(self, queries: list[str], top_k: int, is_gone: StopSignal) -> protocol.Results:
    """Sends one request: one query in RAGEN's dialect, up to `max_queries` in Search-R1's."""
    is_ragen = self._settings.dialect == 'ragen'
    body: dict[str, Any] = {'queries': queries, 'topk': top_k, 'return_scores': True}
    if is_ragen:
      body = {'query': queries[0], 'top_k': top_k}
    try:
      answer = types.parse_json(self._send(body, is_gone))
      rows = [answer['results']] if is_ragen else answer['result']
      if not isinstance(rows, list) or len(rows) != len(queries):
        raise ValueError(f'no list of {len(queries)} results')
    except (types.Stopped, http_client.Temporary):
      pass  # `_send` has reported it
    except http_client.Rejected as error:
      self._report(_describe(error))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
      self._report(f'an unreadable answer ({type(error).__name__}: {error})')
    else:
      return [self._read_passages(row, top_k) for row in rows]
    return [None] * len(queries)

  def _send(self, body: dict[str, object], is_gone: StopSignal) -> bytes:
    """Returns the server's answer, after retries. Sets `is_gone` if no attempt had an answer."""
    settings = self._settings
    is_silent = True
    stop_signal = StopSignal(self.stop_signal.is_set, is_gone.is_set)

    def attempt(number: int) -> bytes:
      nonlocal is_silent
      with self._in_flight:
        stop_signal.raise_if_set()
        try:
          return self._server.ask('', body, self.stop_signal)
        except http_client.Temporary as error:
          is_silent &= error.is_silent
          self._report(_describe(error))
          raise

    retries = settings.retries
    try:
      return http_client.with_retries(attempt, retries, settings.backoff_s, stop_signal.wait)
    except http_client.Temporary:
      if is_silent:
        is_gone.set()
      raise

  def _read_passages(self, rows: object, top_k: int) -> list[types.Passage] | None:
    """Returns the passages of a query; None if one of them is malformed."""
    try:
      if not isinstance(rows, list):
        raise TypeError('no list')
      return [_read_passage(row) for row in rows[:top_k]]
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
      self._report(f'a malformed document ({type(error).__name__}: {error})')
      return None

  def _report(self, failure: str) -> None:
    self.last_failure = failure
    logging.log_every_n_seconds(logging.WARNING, 'retriever %s: %s', 60, self.address, failure)


def _describe(error: http_client.Rejected | http_client.Temporary) -> str:
  """Returns a failure as one line, with the beginning of what the server says."""
  return ' '.join(f'{error} {error.text}'.split())[:_TEXT_LENGTH]


def _endpoint(url: str) -> str:
  """Returns the address of the end point, by default /retrieve."""
  host = r'(?:[^\s/@]+@)?(?:[^\s/?#:@]+|\[[^\s/]+\])(?::\d+)?'
  match = re.fullmatch(rf'(https?://{host})(/\S*)?', str(url))
  if not match:
    raise types.UserError(
        f'retriever: got url={url!r}; use http://host:port or https://host:port, with a path or '
        'without'
    )
  path = match[2] or '/'
  return match[1] + ('/retrieve' if path == '/' else path)


def _read_passage(row: dict[str, Any]) -> types.Passage:
  # RAGEN's documents, and Search-R1's without scores, have no wrapper.
  document = row.get('document', row)
  contents = document['content'] if 'content' in document else document['contents']
  score = float(row.get('score') or 0.0)
  if not isinstance(contents, str) or not math.isfinite(score):
    raise TypeError('contents are not a string, or the score is not finite')
  title, text = tasks.read_contents(contents, document.get('title'))
  return types.Passage(str(document.get('id', '')), title, text, score)
