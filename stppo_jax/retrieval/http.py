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

# Requests in flight at once. Search-R1's server searches in a thread per request, without a lock,
# and an index of FAISS on GPUs does not bear that.
CONCURRENCY = {'search_r1': 1, 'ragen': 8}
DIALECTS = tuple(CONCURRENCY)

_AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))  # HTTP statuses worth another attempt
_CHUNK_BYTES = 1024  # small, because the deadline is checked between chunks
_MAX_BACKOFF_S = 30.0
_LOOK_S = 1.0  # between two questions whether to give up


@dataclasses.dataclass(frozen=True)
class Requests:
  """How a retriever asks: the form of its requests, time limits and retries."""

  dialect: str = 'search_r1'
  timeout_s: float = 30.0  # per request, up to the last byte of the answer
  retries: int = 3
  backoff_s: float = 0.5
  cache_size: int = 10_000  # queries; 0 = no cache
  connect_timeout_s: float = 5.0
  max_response_bytes: int = 64 << 20
  concurrency: int = 8  # requests in flight at once, of all threads
  max_queries: int = 32  # per request, which has a time limit of its own

  def __post_init__(self):
    if self.dialect not in DIALECTS:
      raise types.UserError(f'retriever: got dialect={self.dialect!r}; use one of {DIALECTS}')
    for name in ('retries', 'backoff_s', 'cache_size', 'concurrency', 'max_queries'):
      lowest = int(name in ('concurrency', 'max_queries'))
      if (value := getattr(self, name)) < lowest:
        raise types.UserError(f'retriever: got {name}={value}; it needs {lowest} or more')
    for name in ('timeout_s', 'connect_timeout_s', 'max_response_bytes'):
      if not (value := getattr(self, name)) > 0:
        raise types.UserError(f'retriever: got {name}={value}; it needs more than 0')


class HttpRetriever:
  """Searches over HTTP; never raises for errors of a server or network.

  At most `max_queries` go into one request, and at most `concurrency` requests are in flight from
  this process. A server may go on with one that timed out here.

  A query without a usable answer within `timeout_s` per request and `retries` retries gives None.
  Network errors, time-outs and overload are retried after `backoff_s * 2**attempt` times a jitter
  in [0.5, 1.5); an unreadable answer is not.

  Once `give_up()` is true, a search in progress ends within seconds, without an answer. After one
  of its requests has had no answer at all in any attempt (a refused connection or a time-out),
  those that were not sent yet fail at once, because the server is most likely gone.

  Counters since construction: `requests` sent (with retries), `retries`, `failures` (queries that
  gave None), `cache_hits` (queries answered from the cache).

  Choice: proxy settings of the environment are ignored, because a retriever is inside the cluster
  and a proxy for the outside would not reach it.
  """

  def __init__(
      self,
      url: str,  # http://host:port, or with the path of the end point
      how: Requests = Requests(),
      jitter_seed: int | None = None,
      sleep: Callable[[float], None] = time.sleep,
  ):
    self._endpoint, self._how = _endpoint(url), how
    self.requests = self.retries = self.failures = self.cache_hits = 0
    self.give_up: Callable[[], bool] = lambda: False  # a run that stops sets another one
    self.last_failure = ''
    self._max_queries = how.max_queries if how.dialect == 'search_r1' else 1
    self._jitter = random.Random(jitter_seed)
    self._sleep = sleep
    self._cache: collections.OrderedDict[tuple[str, int], list[types.Passage]] = (
        collections.OrderedDict()
    )
    self._lock = threading.Lock()  # for counters, jitter and cache: callers use threads
    self._in_flight = threading.BoundedSemaphore(how.concurrency)
    self._session = requests.Session()
    self._session.trust_env = False
    for scheme in ('http://', 'https://'):
      self._session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=how.concurrency))
    # Otherwise a small body could decompress to a huge one.
    self._session.headers['Accept-Encoding'] = 'identity'

  def search(self, queries: Sequence[str], top_k: int) -> list[list[types.Passage] | None]:
    """Searches as in `protocol.Retriever`. Equal queries are sent once, cached ones not at all."""
    found: dict[str, list[types.Passage] | None] = {}
    with self._lock:
      for query in queries:
        cached = self._cache.get((query, top_k))
        if cached is not None:
          self._cache.move_to_end((query, top_k))
          self.cache_hits += 1
          found[query] = cached
    missing = [query for query in dict.fromkeys(queries) if query not in found]
    if missing:
      fetched = dict(zip(missing, self._fetch(missing, top_k)))
      with self._lock:
        for query, passages in fetched.items():
          if passages is not None:
            self._remember((query, top_k), passages)
      found.update(fetched)
    results = [found[query] for query in queries]
    with self._lock:
      self.failures += sum(passages is None for passages in results)
    return [None if passages is None else list(passages) for passages in results]

  @property
  def address(self) -> str:
    """The URL that is queried."""
    return self._endpoint

  def check(self) -> None:
    """Sends one query; raises a UserError with address and reason if it has no usable answer."""
    self.last_failure = ''
    if self.search([f'probe {time.time_ns()}'], 1)[0] is None:
      raise types.UserError(
          f'config.retriever.url={self._endpoint!r} gave no usable answer to a first query in the '
          f'dialect {self._how.dialect!r} ({self.last_failure}): start the retriever, or correct '
          '--config.retriever.url or --config.retriever.dialect'
      )

  def _remember(self, key: tuple[str, int], passages: list[types.Passage]) -> None:
    if self._how.cache_size:
      self._cache[key] = passages
      while len(self._cache) > self._how.cache_size:
        self._cache.popitem(last=False)

  def _fetch(self, queries: list[str], top_k: int) -> list[list[types.Passage] | None]:
    """Sends requests of bounded size side by side; one that fails does not affect the others."""
    size = self._max_queries
    parts = [queries[i : i + size] for i in range(0, len(queries), size)]
    fetch = functools.partial(self._fetch_part, top_k=top_k, is_gone=threading.Event())
    if len(parts) == 1:
      return fetch(parts[0])
    with futures.ThreadPoolExecutor(min(self._how.concurrency, len(parts))) as pool:
      return [passages for part in pool.map(fetch, parts) for passages in part]

  def _fetch_part(
      self, queries: list[str], top_k: int, is_gone: threading.Event
  ) -> list[list[types.Passage] | None]:
    """Sends one request: one query in RAGEN's dialect, up to `max_queries` in the other."""
    if self._how.dialect == 'ragen':
      answer = self._ask({'query': queries[0], 'top_k': top_k}, is_gone)
      if answer is None:
        return [None]
      rows = answer.get('results') if isinstance(answer, dict) else None
      return [self._passages(rows, _ragen_passage, top_k)]
    answer = self._ask({'queries': queries, 'topk': top_k, 'return_scores': True}, is_gone)
    rows = answer.get('result') if isinstance(answer, dict) else None
    if not isinstance(rows, list) or len(rows) != len(queries):
      if answer is not None:
        self._report(f'no list of {len(queries)} results in the answer')
      return [None] * len(queries)
    return [self._passages(row, _search_r1_passage, top_k) for row in rows]

  def _ask(self, question: dict[str, Any], is_gone: threading.Event) -> Any:
    """Returns the server's JSON, or None after the last attempt, or if the server is gone.

    Sets `is_gone` where no attempt had any answer.
    """
    was_silent = True
    for attempt in range(self._how.retries + 1):
      with self._in_flight:
        if self.give_up() or is_gone.is_set():
          return None
        with self._lock:
          self.requests += 1
          self.retries += attempt > 0
          jitter = 0.5 + self._jitter.random()
        answer, failure, again = self._post_within(question)
      if failure is None:
        return answer
      if self.give_up():
        return None
      self._report(failure)
      if not again:
        return None
      was_silent &= not failure.startswith('HTTP status')
      if attempt < self._how.retries:
        self._sleep(min(self._how.backoff_s * 2**attempt * jitter, _MAX_BACKOFF_S))
    if was_silent:
      is_gone.set()
    return None

  def _passages(
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
    logging.log_every_n_seconds(logging.WARNING, 'retriever %s: %s', 60, self._endpoint, failure)

  def _post_within(self, question: dict[str, Any]) -> tuple[Any, str | None, bool]:
    """Calls `_post` with a limit on its total time.

    The socket's time-out restarts with every byte, so a slow server could hold a plain call
    forever.
    """
    timed_out = (None, f'no complete answer within {self._how.timeout_s} s', True)
    outcome: list[tuple[Any, str | None, bool]] = [timed_out]

    def post():
      outcome[0] = self._post(question)

    worker = threading.Thread(target=post, daemon=True)
    worker.start()
    deadline = time.monotonic() + self._how.timeout_s
    while worker.is_alive() and (left_s := deadline - time.monotonic()) > 0 and not self.give_up():
      worker.join(min(left_s, _LOOK_S))
    return outcome[0]

  def _post(self, question: dict[str, Any]) -> tuple[Any, str | None, bool]:
    """Sends one request; returns (JSON, error or None, whether to retry)."""
    deadline = time.monotonic() + self._how.timeout_s
    try:
      with self._session.post(
          self._endpoint,
          json=question,
          stream=True,
          allow_redirects=False,
          timeout=(min(self._how.connect_timeout_s, self._how.timeout_s), self._how.timeout_s),
      ) as response:
        if response.status_code != 200:
          return None, f'HTTP status {response.status_code}', response.status_code in _AGAIN
        body = bytearray()
        for chunk in response.iter_content(_CHUNK_BYTES):
          body += chunk
          if len(body) > self._how.max_response_bytes:
            return None, f'an answer of over {self._how.max_response_bytes} bytes', False
          if time.monotonic() > deadline:
            return None, f'no complete answer within {self._how.timeout_s} s', True
      return json.loads(body), None, False
    except (requests.RequestException, OSError) as error:
      return None, type(error).__name__, True
    except (ValueError, RecursionError) as error:
      return None, f'no JSON in the answer ({type(error).__name__})', False


def _endpoint(url: str) -> str:
  wanted = 'use http://host:port or https://host:port, with a path or without'
  try:
    parts = parse.urlsplit(url)
    _ = parts.port  # raises for a port that is not a number
  except (ValueError, AttributeError, TypeError):
    raise types.UserError(f'retriever: got url={url!r}, which cannot be read; {wanted}') from None
  if parts.scheme not in ('http', 'https') or not parts.hostname or any(map(str.isspace, url)):
    raise types.UserError(f'retriever: got url={url!r}; {wanted}')
  path = parts.path if parts.path.strip('/') else '/retrieve'
  return parse.urlunsplit((parts.scheme, parts.netloc, path, parts.query, ''))


def _search_r1_passage(row: dict[str, Any]) -> types.Passage:
  document = row.get('document', row)  # without scores servers send the bare document
  return _passage(document.get('id', ''), document['contents'], row.get('score') or 0.0)


def _ragen_passage(row: dict[str, Any]) -> types.Passage:
  return _passage(row.get('id', ''), row['content'], row.get('score') or 0.0)


def _passage(passage_id: Any, contents: Any, score: Any) -> types.Passage:
  if not isinstance(contents, str):
    raise TypeError('contents are not a string')
  if not math.isfinite(score):
    raise ValueError('the score is not finite')
  return types.Passage(str(passage_id), *tasks.read_contents(contents), float(score))
