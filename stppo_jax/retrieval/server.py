"""A retrieval server: queries over HTTP in, passages of a corpus out.

  python -m stppo_jax.retrieval.server --corpus=FOLDER                       # BM25, 127.0.0.1:8000
  python -m stppo_jax.retrieval.server --corpus=FOLDER --kind=hybrid --encoder=E5_FOLDER

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
import dataclasses
import json
import logging
import signal
import sys
import threading
from typing import Annotated
from typing import Any

import jax
import prometheus_client
import pydantic
from starlette import requests
from starlette import responses
from starlette import routing

from stppo_jax import tasks as tasks_lib
from stppo_jax import types
from stppo_jax.distributed import http_server
from stppo_jax.retrieval import kinds
from stppo_jax.retrieval import protocol

KINDS = ('bm25', 'dense', 'hybrid')
_CHUNK = 32  # queries per search call, so that small requests run between parts of a large one
_DEFAULT_TOP_K = 3


@dataclasses.dataclass(frozen=True)
class SearchServerLimits(http_server.ServerLimits):
  """Limits per client.

  Choice: a query that is too long is cut, not rejected. Rejection would fail the searches of all
  agents whose queries are in the same request.
  """

  max_queries: int = 4096  # per request
  max_query_chars: int = 4096
  max_top_k: int = 100
  max_passages: int = 32_768  # per request: queries times topk
  max_in_flight: int = 64  # complete requests; the server answers further ones with 503


class SearchR1Body(http_server.Body):
  """A request in the dialect of Search-R1."""

  queries: Annotated[list[http_server.Text], pydantic.FailFast()]
  topk: int = pydantic.Field(_DEFAULT_TOP_K, ge=1)
  return_scores: bool = False

  def answer(self, results: Sequence[Sequence[types.Passage]]) -> dict[str, Any]:
    """Returns the answer's fields: `result`, one list per query."""
    return {'result': [[self._entry(passage) for passage in row] for row in results]}

  def _entry(self, passage: types.Passage) -> dict[str, Any]:
    document = {'id': passage.id, 'contents': tasks_lib.write_contents(passage)}
    if not self.return_scores:
      return document
    return {'document': document, 'score': passage.score}


class RagenBody(http_server.Body):
  """A request in the dialect of RAGEN."""

  query: http_server.Text
  top_k: int = pydantic.Field(_DEFAULT_TOP_K, ge=1)

  @property
  def queries(self) -> list[str]:
    return [self.query]

  @property
  def topk(self) -> int:
    return self.top_k

  def answer(self, results: Sequence[Sequence[types.Passage]]) -> dict[str, Any]:
    """Returns the answer's fields: `results`, the passages of the query."""
    rows = []
    for passage in results[0]:
      contents = tasks_lib.write_contents(passage)
      rows.append({'id': passage.id, 'content': contents, 'score': passage.score})
    return {'results': rows}


def parse_body(fields: dict[str, Any], limits: SearchServerLimits) -> SearchR1Body | RagenBody:
  """Returns the request in its dialect. Raises ValidationError and RequestError."""
  kind = RagenBody if 'query' in fields else SearchR1Body
  body = kind.model_validate({k: v for k, v in fields.items() if v is not None})
  num_queries = len(body.queries)
  num_passages = num_queries * body.topk
  for count, most, unit in (
      (body.topk, limits.max_top_k, 'passages per query'),
      (num_queries, limits.max_queries, 'queries per request'),
      (num_passages, limits.max_passages, 'passages per request'),
  ):
    if count > most:
      raise http_server.RequestError(400, f'{count} {unit}: ask for at most {most}')
  return body


class RetrievalApp(http_server.HttpApp):
  """A retriever as an ASGI application."""

  name = 'retrieval'
  how_to_allow = 'use localhost, or start the server with --hosts=NAME'

  def __init__(
      self,
      retriever: protocol.Retriever,
      num_passages: int,
      limits: SearchServerLimits = SearchServerLimits(),
      threads: int = 1,
  ):
    super().__init__(limits, [routing.Route('/retrieve', self._retrieve, methods=['POST'])])
    self.limits: SearchServerLimits = limits
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

  def check(self, request: requests.Request) -> None:
    if request.method == 'POST':
      self._check_load()

  def _check_load(self) -> None:
    if self.stopping:
      raise http_server.RequestError(503, 'busy: stopping; try again')
    if self.in_flight >= self.limits.max_in_flight:
      raise http_server.RequestError(503, f'busy: {self.in_flight} requests are running; try again')

  def health(self) -> dict[str, Any]:
    return super().health() | {'passages': self._num_passages}

  async def _retrieve(self, request: requests.Request) -> responses.Response:
    fields = await self.read_json(request)
    self._check_load()
    body = parse_body(fields, self.limits)
    self.in_flight += 1  # only complete requests count: half of a body must not keep others out
    try:
      answer = await self._search(body)
    finally:
      self.in_flight -= 1
    if await request.is_disconnected():
      raise requests.ClientDisconnect
    return responses.Response(answer, media_type='application/json')

  async def _search(self, body: SearchR1Body | RagenBody) -> bytes:
    """Returns the body of an answer, made in threads, while the server keeps listening."""
    loop = asyncio.get_running_loop()
    most = self.limits.max_query_chars
    queries = [query[:most] for query in body.queries]
    results: list[list[types.Passage]] = []
    for start in range(0, len(queries), _CHUNK):
      chunk = queries[start : start + _CHUNK]
      search = loop.run_in_executor(self._pool, self._retriever.search, chunk, body.topk)
      results += [passages or [] for passages in await search]
    self._queries.inc(len(queries))
    write = lambda: json.dumps(body.answer(results)).encode()
    return await loop.run_in_executor(self._pool, write)

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


def make_retriever(flags: argparse.Namespace, passages: Sequence[types.Passage]) -> Any:
  """Makes the retriever of --kind, --encoder and --embeddings."""
  jax.config.update('jax_platforms', 'cpu')  # bm25s would take an accelerator
  if flags.kind != 'bm25' and not flags.encoder:
    raise types.UserError(
        f'--kind={flags.kind} needs --encoder=FOLDER, a BERT-class encoder such as e5-base-v2 in '
        'Hugging Face format'
    )
  return kinds.make(kinds.RETRIEVERS[flags.kind], flags, lambda: passages)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  flags = _parse(arguments)
  logging.basicConfig(level=logging.INFO, format='%(asctime)s  %(message)s', datefmt='%H:%M:%S')
  limits = SearchServerLimits(
      **{field.name: getattr(flags, field.name) for field in dataclasses.fields(SearchServerLimits)}
  )
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
  app = RetrievalApp(retriever, len(passages), limits, flags.threads)
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
  parser.add_argument('--encoder', default='', help='dense, hybrid: Hugging Face folder of a BERT')
  parser.add_argument('--embeddings', default='', help='folder that keeps them between starts')
  parser.add_argument('--device', default='cpu', help="the encoder's, such as cuda")
  parser.add_argument('--host', default='127.0.0.1', help='0.0.0.0 lets other machines in')
  parser.add_argument(
      '--hosts', nargs='+', default=(), help='names of a proxy before a server on 127.0.0.1'
  )
  parser.add_argument('--port', type=int, default=8000, help='0: any free one')
  parser.add_argument('--threads', type=int, default=1, help='searches at once')
  for field in dataclasses.fields(SearchServerLimits):
    flag = '--' + field.name.replace('_', '-')
    parser.add_argument(flag, default=field.default, type=field.type, help='limit')
  flags = parser.parse_args(arguments)
  if not 0 <= flags.port <= 65535:
    parser.error(f'--port={flags.port}: give 0 to 65535')
  for name, value in vars(flags).items():
    least = 1 if isinstance(value, int) else 0
    if isinstance(value, (int, float)) and name != 'port' and not value >= least:
      parser.error(f'--{name.replace("_", "-")}={value}: give at least {least}')
  return flags


if __name__ == '__main__':
  sys.exit(main())
