"""A retrieval server: queries over HTTP in, passages of a corpus out.

  python -m stppo_jax.retrieval.server --corpus=FOLDER                       # BM25, 127.0.0.1:8000
  python -m stppo_jax.retrieval.server --corpus=FOLDER --kind=hybrid --encoder=E5_FOLDER \\
      --query_prompt='query: ' --passage_prompt='passage: '

  POST /retrieve   JSON in either dialect of `http.py`, distinguished by `queries` or `query`
  GET /health      {"status": "ok", "passages": 21015324}; 503 while it stops
  GET /metrics     Prometheus format: requests by status, queries, seconds, in flight, memory

A rejected request gets one line of JSON, {"error": ".."}. On SIGTERM the server accepts no new
request, finishes the running ones and exits with 0. It needs the extra `retrieval`.
"""

import argparse
import asyncio
from collections.abc import Sequence
from concurrent import futures
import json
import logging
import signal
import sys
import threading
from typing import Annotated

import jax
import prometheus_client
import pydantic
from starlette import requests
from starlette import responses

from stppo_jax import types
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.net import http_server
from stppo_jax.retrieval import kinds
from stppo_jax.retrieval import protocol

KINDS = ('bm25', 'dense', 'hybrid')
_CHUNK = 32  # queries per search call, so that small requests run between parts of a large one
# Choice: a query that is too long is cut, not rejected. Rejection would fail the searches of all
# agents whose queries are in the same request.
_MAX_QUERY_CHARS = 4096
_MAX_PASSAGES = 32_768  # per request: queries times topk
_MAX_IN_FLIGHT = 64  # complete requests; the server answers further ones with 503
_TopK = Annotated[int, pydantic.Field(ge=1, le=100)]


class SearchR1Body(http_server.Body):
  """A request in the dialect of Search-R1."""

  queries: list[http_server.Text] = pydantic.Field(max_length=4096)
  topk: _TopK = 3
  return_scores: bool = False

  @pydantic.model_validator(mode='after')
  def _check_size(self) -> 'SearchR1Body':
    if len(self.queries) * self.topk > _MAX_PASSAGES:
      raise ValueError(f'queries times topk: ask for at most {_MAX_PASSAGES} passages')
    return self

  def answer(self, results: Sequence[Sequence[types.Passage]]) -> http_server.Json:
    """Returns the answer's fields: `result`, one list per query."""
    return {'result': [[self._entry(passage) for passage in row] for row in results]}

  def _entry(self, passage: types.Passage) -> http_server.Json:
    document = {'id': passage.id, 'contents': tasks_lib.write_contents(passage)}
    if not self.return_scores:
      return document
    return {'document': document, 'score': passage.score}


class RagenBody(http_server.Body):
  """A request in the dialect of RAGEN."""

  query: http_server.Text
  topk: _TopK = pydantic.Field(3, alias='top_k')

  @property
  def queries(self) -> list[str]:
    return [self.query]

  def answer(self, results: Sequence[Sequence[types.Passage]]) -> http_server.Json:
    """Returns the answer's fields: `results`, the passages of the query."""
    rows = []
    for passage in results[0]:
      contents = tasks_lib.write_contents(passage)
      rows.append({'id': passage.id, 'content': contents, 'score': passage.score})
    return {'results': rows}


def parse_body(fields: http_server.Json) -> SearchR1Body | RagenBody:
  """Returns the request in its dialect. Raises ValidationError."""
  kind = RagenBody if 'query' in fields else SearchR1Body
  return kind.model_validate({k: v for k, v in fields.items() if v is not None})


class RetrievalApp(http_server.HttpApp):
  """A retriever as an ASGI application."""

  name = 'retrieval'
  how_to_allow = 'use localhost, or start the server with --hosts=NAME'

  def __init__(
      self,
      retriever: protocol.Retriever,
      num_passages: int,
      limits: http_server.ServerLimits,
      threads: int = 1,
  ):
    super().__init__(limits, [self.post('/retrieve', parse_body, self._retrieve)])
    self.in_flight = 0
    self._num_passages = num_passages
    self._retriever = retriever
    self._pool = futures.ThreadPoolExecutor(threads, 'search')
    self._queries = prometheus_client.Counter(
        'retrieval_queries', 'Queries answered.', registry=self.registry
    )
    gauge = prometheus_client.Gauge(
        'retrieval_in_flight', 'Requests being answered.', registry=self.registry
    )
    gauge.set_function(lambda: self.in_flight)

  def health(self) -> http_server.Json:
    return super().health() | {'passages': self._num_passages}

  async def _retrieve(
      self, request: requests.Request, body: SearchR1Body | RagenBody
  ) -> responses.Response:
    if self.in_flight >= _MAX_IN_FLIGHT:
      raise http_server.RequestError(503, f'busy: {self.in_flight} requests are running; try again')
    self.in_flight += 1  # only complete requests count: half of a body must not keep others out
    # A search in a thread cannot be cancelled, so it counts until its end.
    answer = await asyncio.shield(self._search(body))
    return responses.Response(answer, media_type='application/json')

  async def _search(self, body: SearchR1Body | RagenBody) -> bytes:
    """Returns the body of an answer, made in threads, while the server keeps listening."""
    loop = asyncio.get_running_loop()
    queries = [query[:_MAX_QUERY_CHARS] for query in body.queries]
    results: list[list[types.Passage]] = []
    try:
      for start in range(0, len(queries), _CHUNK):
        chunk = queries[start : start + _CHUNK]
        search = loop.run_in_executor(self._pool, self._retriever.search, chunk, body.topk)
        results += [passages or [] for passages in await search]
      self._queries.inc(len(queries))
      write = lambda: json.dumps(body.answer(results)).encode()
      return await loop.run_in_executor(self._pool, write)
    finally:
      self.in_flight -= 1

  def close(self) -> None:
    """Stops the search threads."""
    self._pool.shutdown(wait=False, cancel_futures=True)


def serve(app: RetrievalApp, host: str, port: int, hosts: Sequence[str] = ()) -> None:
  """Serves until SIGTERM or SIGINT; prints the address when it accepts connections."""
  stopping = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *unused: stopping.set())
  with http_server.Server(app, host, port, hosts) as server:
    print(f'ready: {server.url}/retrieve', flush=True)
    stopping.wait()
  app.close()


def make_retriever(
    flags: argparse.Namespace, passages: Sequence[types.Passage]
) -> protocol.Retriever:
  """Makes the retriever of --kind, --encoder and --embeddings."""
  jax.config.update('jax_platforms', 'cpu')  # bm25s would take an accelerator
  if flags.kind != 'bm25' and not flags.encoder:
    raise types.UserError(
        f'--kind={flags.kind} needs --encoder=FOLDER, a model such as e5-base-v2 in Hugging Face '
        'format'
    )
  retriever = kinds.make(kinds.RETRIEVERS[flags.kind], flags, lambda: passages)
  assert retriever is not None  # as for each of KINDS
  return retriever


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  flags = _parse(arguments)
  logging.basicConfig(level=logging.INFO, format='%(asctime)s  %(message)s', datefmt='%H:%M:%S')
  try:
    passages = tasks_lib.load_corpus(flags.corpus)
    logging.info('%s over %d passages', flags.kind, len(passages))
    retriever = make_retriever(flags, passages)
  except types.UserError as error:
    print('server:', *str(error).split(), file=sys.stderr)
    return 2
  except OSError as error:
    given = f'--embeddings={flags.embeddings}' if flags.embeddings else f'--corpus={flags.corpus}'
    print(f'server: {given}: {error}: give another folder', file=sys.stderr)
    return 1
  app = RetrievalApp(retriever, len(passages), http_server.ServerLimits(), flags.threads)
  try:
    serve(app, flags.host, flags.port, flags.hosts)
  except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
    print(
        f'server: cannot listen on {flags.host}:{flags.port} ({error}): give another --host or '
        '--port',
        file=sys.stderr,
    )
    return 1
  return 0


def _parse(arguments):
  parser = argparse.ArgumentParser(
      prog='python -m stppo_jax.retrieval.server',
      description='Serves searches over the passages of a corpus.',
      formatter_class=argparse.ArgumentDefaultsHelpFormatter,
      allow_abbrev=False,
  )
  parser.add_argument('--corpus', required=True, help='folder with corpus.jsonl, or a .jsonl')
  parser.add_argument('--kind', default='bm25', choices=KINDS, help='how passages are found')
  parser.add_argument('--encoder', default='', help='dense, hybrid: its Hugging Face folder')
  for name in ('query', 'passage'):
    parser.add_argument(f'--{name}_prompt', help=f"text before each {name}; none: the encoder's")
  parser.add_argument('--embeddings', default='', help='folder that keeps them between starts')
  parser.add_argument('--device', default='cpu', help="the encoder's, such as cuda")
  parser.add_argument('--host', default='127.0.0.1', help='0.0.0.0 lets other machines in')
  parser.add_argument(
      '--hosts', nargs='+', default=(), help='names of a proxy before a server on 127.0.0.1'
  )
  parser.add_argument('--port', type=int, default=8000, help='0: any free one')
  parser.add_argument('--threads', type=int, default=1, help='searches at once')
  flags = parser.parse_args(arguments)
  if not 0 <= flags.port <= 65535:
    parser.error(f'--port={flags.port}: give 0 to 65535')
  if flags.threads < 1:
    parser.error(f'--threads={flags.threads}: give at least 1')
  return flags


if __name__ == '__main__':
  sys.exit(main())
