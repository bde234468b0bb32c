"""A retrieval server: queries over HTTP in, passages of a corpus out.

  python -m stppo_jax.retrieval.server --corpus=FOLDER                       # BM25, 127.0.0.1:8000
  python -m stppo_jax.retrieval.server --corpus=FOLDER --kind=hybrid --encoder=E5_FOLDER

  POST /retrieve   JSON in either dialect of `http.py`, distinguished by `queries` or `query`
  GET /health      {"status": "ok", "passages": 21015324}; 503 while it stops
  GET /metrics     Prometheus format: requests by status, queries, seconds, in flight, memory

A rejected request gets one line of JSON, {"error": ".."}. On SIGTERM the server accepts no new
request, finishes the running ones and exits with 0. Needs the extra `retrieval`.
"""

import argparse
import asyncio
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import json
import logging
import signal
import sys
import time
from typing import Any

import prometheus_client
from tornado import httpserver
from tornado import iostream
from tornado import netutil
from tornado import web

from stppo_jax import tasks as task_files
from stppo_jax import types
from stppo_jax.distributed import json_handler
from stppo_jax.retrieval import bm25
from stppo_jax.retrieval import kinds
from stppo_jax.retrieval import protocol

KINDS = ('bm25', 'dense', 'hybrid')
_CHUNK = 32  # queries per search call, so that small requests run between parts of a large one
_DEFAULT_TOP_K = 3


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits per client.

  Choice: a query that is too long is cut, not rejected. Rejection would fail the searches of all
  agents whose queries are in the same request.
  """

  max_body_bytes: int = 8 << 20
  max_queries: int = 4096  # per request
  max_query_chars: int = 4096
  max_top_k: int = 100
  max_passages: int = 32_768  # per request: queries times topk
  max_in_flight: int = 64  # whole requests; further ones get 503 and Retry-After
  max_receiving_bytes: int = 512 << 20  # of all bodies that are not whole yet; then clients are cut
  idle_timeout_s: float = 75.0  # for a complete header, and between requests of a connection
  body_timeout_s: float = 10.0  # for a complete body
  write_timeout_s: float = 30.0  # for the client to read the answer
  grace_s: float = 30.0  # for running requests after SIGTERM


@dataclasses.dataclass(frozen=True)
class Question:
  """A valid request."""

  dialect: str  # 'search_r1' | 'ragen'
  queries: tuple[str, ...]
  top_k: int
  with_scores: bool


class BadRequest(ValueError):
  """An invalid request; the message is one line for the client."""


def parse_question(body: bytes, limits: Limits) -> Question:
  """Parses the body of POST /retrieve in either dialect; ignores unknown fields."""
  try:
    fields = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise BadRequest(f'the body is not JSON ({type(error).__name__})') from None
  if not isinstance(fields, dict) or ('queries' in fields) == ('query' in fields):
    raise BadRequest(
        'send {"queries": [..], "topk": 3, "return_scores": true}, or '
        '{"query": "..", "top_k": 3}'
    )
  if 'queries' in fields:
    dialect, queries, name = 'search_r1', fields['queries'], 'topk'
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
      raise BadRequest('"queries" must be a list of texts')
    if len(queries) > limits.max_queries:
      raise BadRequest(f'{len(queries)} queries: send at most {limits.max_queries} in a request')
  else:
    dialect, queries, name = 'ragen', [fields['query']], 'top_k'
    if not isinstance(queries[0], str):
      raise BadRequest('"query" must be a text')
  top_k = _DEFAULT_TOP_K if fields.get(name) is None else fields[name]
  if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= limits.max_top_k:
    raise BadRequest(f'"{name}" must be a whole number from 1 to {limits.max_top_k}')
  if len(queries) * top_k > limits.max_passages:
    raise BadRequest(
        f'{len(queries)} queries with "{name}" {top_k} are {len(queries) * top_k} passages: ask '
        f'for at most {limits.max_passages} in a request'
    )
  with_scores = fields.get('return_scores', False)
  if not isinstance(with_scores, bool):
    raise BadRequest('"return_scores" must be true or false')
  cut = tuple(query[: limits.max_query_chars] for query in queries)
  return Question(dialect, cut, top_k, with_scores)


def write_answer(question: Question, results: Sequence[Sequence[types.Passage]]) -> bytes:
  """Returns the answer's JSON: Search-R1's `result`, one list per query, or RAGEN's `results`."""
  rows: Iterable[Any] = ([_document(p) for p in passages] for passages in results)
  if question.dialect == 'ragen':
    rows = (_document(p, 'content') | {'score': p.score} for p in results[0])
  elif question.with_scores:
    scored = lambda p: {'document': _document(p), 'score': p.score}
    rows = ([scored(p) for p in passages] for passages in results)
  name = b'results' if question.dialect == 'ragen' else b'result'
  # Row by row, because no other thread runs during one json.dumps. During a join others run.
  lines = [json.dumps(row).encode() for row in rows]
  return b''.join([b'{"%b": [' % name, b', '.join(lines), b']}\n'])


def _document(passage, field='contents'):
  return {'id': passage.id, field: task_files.write_contents(passage)}


class Service:
  """A retriever with its limits and counters."""

  def __init__(
      self,
      retriever: protocol.Retriever,
      num_passages: int,
      limits: Limits = Limits(),
      threads: int = 1,
  ):
    self.limits = limits
    self.num_passages = num_passages
    self.in_flight = 0
    self.receiving_bytes = 0
    self.stopping = False
    self._retriever = retriever
    self._pool = futures.ThreadPoolExecutor(threads, 'search')
    self.registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=self.registry)
    self.requests = prometheus_client.Counter(
        'retrieval_requests',
        'Requests to /retrieve by HTTP status; 499: the client disconnected.',
        ['status'],
        registry=self.registry,
    )
    self.queries = prometheus_client.Counter(
        'retrieval_queries', 'Queries answered.', registry=self.registry
    )
    self.seconds = prometheus_client.Histogram(
        'retrieval_request_seconds',
        'From the header of a request to its answer.',
        buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
        registry=self.registry,
    )
    gauge = prometheus_client.Gauge(
        'retrieval_in_flight', 'Requests being answered.', registry=self.registry
    )
    gauge.set_function(lambda: self.in_flight)

  async def answer(self, question: Question) -> bytes:
    """Returns the body of an answer, made in threads, while the server keeps listening."""
    loop, queries = asyncio.get_running_loop(), question.queries
    results: list[list[types.Passage]] = []
    for start in range(0, len(queries), _CHUNK):
      chunk = list(queries[start : start + _CHUNK])
      found = await loop.run_in_executor(self._pool, self._retriever.search, chunk, question.top_k)
      results += [passages or [] for passages in found]
    self.queries.inc(len(queries))
    return await loop.run_in_executor(self._pool, write_answer, question, results)

  def close(self) -> None:
    """Stops the search threads."""
    self._pool.shutdown(wait=False, cancel_futures=True)


async def serve(
    service: Service,
    host: str,
    port: int,
    ready: Callable[[str, int], None],
    hosts: Sequence[str] = (),
) -> None:
  """Serves until SIGTERM or SIGINT; calls `ready` with the address when it accepts connections."""
  stopping = asyncio.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    asyncio.get_running_loop().add_signal_handler(number, stopping.set)
  server, address = listen(service, host, port, hosts)
  ready(*address)
  await stopping.wait()
  await stop(server, service)


def listen(
    service: Service, host: str, port: int, hosts: Sequence[str] = ()
) -> tuple[httpserver.HTTPServer, tuple[str, int]]:
  """Returns a server that accepts connections, and its address; port 0 means any free port."""
  limits = service.limits
  sockets = netutil.bind_sockets(port, host)
  server = httpserver.HTTPServer(
      make_application(service, json_handler.allowed_hosts(sockets, host, hosts)),
      max_body_size=limits.max_body_bytes,
      max_header_size=16 << 10,
      idle_connection_timeout=limits.idle_timeout_s,
      body_timeout=limits.body_timeout_s,
  )
  server.add_sockets(sockets)
  return server, sockets[0].getsockname()[:2]


async def stop(server: httpserver.HTTPServer, service: Service) -> None:
  """Rejects new requests, waits at most `grace_s` for running ones and closes all connections."""
  server.stop()
  service.stopping = True
  deadline = time.monotonic() + service.limits.grace_s
  while service.in_flight and time.monotonic() < deadline:
    await asyncio.sleep(0.01)
  await server.close_all_connections()
  service.close()


def make_application(
    service: Service, allowed_hosts: frozenset[str] | None = None
) -> web.Application:
  """Returns the application: each path with its handler."""
  given = {'service': service}
  return web.Application(
      [('/retrieve', _Retrieve, given), ('/health', _Health, given), ('/metrics', _Metrics, given)],
      default_handler_class=_Elsewhere,
      default_handler_args=given,
      log_function=lambda handler: None,
      allowed_hosts=allowed_hosts,
      how_to_allow='use localhost, or start the server with --hosts=NAME',
  )


@web.stream_request_body  # so that `prepare` can reject a body before it is received
class _Handler(json_handler.JsonHandler):

  def initialize(self, service: Service):
    self.service, self.is_unread = service, True

  def prepare(self):
    self.check_source()
    self.is_unread = False

  def data_received(self, chunk):
    pass  # a body that no answer depends on takes no memory


class _Retrieve(_Handler):

  def initialize(self, service: Service):
    super().initialize(service)
    self._started, self._body = time.perf_counter(), bytearray()
    self._entered, self._is_received = False, False

  def prepare(self):
    self.check_source()
    length, most = self.content_length(), self.service.limits.max_body_bytes
    if length > most:
      raise web.HTTPError(413, f'a body of {length} bytes: send at most {most}')
    self.is_unread = False
    if self.request.method == 'POST' and self._is_busy():
      self._refuse_busy()

  def _is_busy(self):
    service = self.service
    return service.stopping or service.in_flight >= service.limits.max_in_flight

  def _refuse_busy(self):
    self.set_header('Connection', 'close')
    self.set_header('Retry-After', '1')
    self.set_status(503)
    running = f'{self.service.limits.max_in_flight} requests are running'
    why = 'stopping' if self.service.stopping else running
    self.finish(json.dumps({'error': f'busy: {why}; try again'}) + '\n')

  def data_received(self, chunk):
    self._body += chunk  # the server limits it, with and without Content-Length
    self.service.receiving_bytes += len(chunk)
    if self.service.receiving_bytes > self.service.limits.max_receiving_bytes:
      self.request.connection.stream.close()  # type: ignore[union-attr]  # HTTP/1 has a stream

  async def post(self):
    self._received()
    if self._is_busy():
      self._refuse_busy()
      return
    # Only a whole request counts: half-sent bodies must not keep others out.
    self._entered = True
    self.service.in_flight += 1
    try:
      try:
        question = parse_question(bytes(self._body), self.service.limits)
      except BadRequest as error:
        raise web.HTTPError(400, str(error)) from None
      answer = self.finish(await self.service.answer(question))
      await asyncio.wait_for(answer, self.service.limits.write_timeout_s)
    except TimeoutError:
      self.request.connection.stream.close()  # type: ignore[union-attr]  # HTTP/1 has a stream
    except iostream.StreamClosedError:
      pass  # the client is gone, nobody reads an answer; `on_connection_close` has counted it
    finally:
      self._leave()

  def on_connection_close(self):
    super().on_connection_close()
    if not self._finished:  # a rejected request without its body ends here as well
      self.service.requests.labels('499').inc()
    self._received()

  def on_finish(self):
    self._received()
    self.service.requests.labels(str(self.get_status())).inc()
    self.service.seconds.observe(time.perf_counter() - self._started)

  def _received(self):
    """Takes the body out of the bytes that are not whole yet."""
    if not self._is_received:
      self.service.receiving_bytes -= len(self._body)
    self._is_received = True

  def _leave(self):
    self.service.in_flight -= self._entered
    self._entered = False


class _Health(_Handler):

  def get(self):
    status = 'stopping' if self.service.stopping else 'ok'
    self.set_status(503 if self.service.stopping else 200)
    self.finish(json.dumps({'status': status, 'passages': self.service.num_passages}) + '\n')


class _Metrics(_Handler):

  def get(self):
    self.set_header('Content-Type', prometheus_client.CONTENT_TYPE_LATEST)
    self.finish(prometheus_client.generate_latest(self.service.registry))


class _Elsewhere(_Handler):

  def get(self):
    raise web.HTTPError(404, 'there are POST /retrieve, GET /health and GET /metrics')

  head = post = put = patch = delete = options = get


def make_retriever(
    kind: str, passages: Sequence[types.Passage], encoder_folder: str = '', cache_folder: str = ''
) -> protocol.Retriever:
  """Makes the retriever for --kind, --encoder and --embeddings."""
  if kind not in KINDS:
    raise types.UserError(f'--kind={kind}: use one of {", ".join(KINDS)}')
  if kind == 'bm25':
    return bm25.Bm25Retriever(passages)
  if not encoder_folder:
    raise types.UserError(
        f'--kind={kind} needs --encoder=FOLDER, a BERT-class encoder such as '
        'e5-base-v2 in Hugging Face format'
    )
  return kinds.make_dense(passages, encoder_folder, cache_folder, with_words=kind == 'hybrid')


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  flags = _parse(arguments)
  logging.basicConfig(level=logging.INFO, format='%(asctime)s  %(message)s', datefmt='%H:%M:%S')
  limits = Limits(
      **{field.name: getattr(flags, field.name) for field in dataclasses.fields(Limits)}
  )
  try:
    passages = task_files.load_corpus(flags.corpus)
    logging.info('%s over %d passages', flags.kind, len(passages))
    retriever = make_retriever(flags.kind, passages, flags.encoder, flags.embeddings)
  except types.UserError as error:
    print('server:', *str(error).split(), file=sys.stderr)
    return 2
  except OSError as error:
    given = f'--embeddings={flags.embeddings}' if flags.embeddings else f'--corpus={flags.corpus}'
    print(f'server: {given}: {error}: give another folder', file=sys.stderr)
    return 1
  try:
    service = Service(retriever, len(passages), limits, flags.threads)
    ready = lambda host, port: print(f'ready: http://{host}:{port}/retrieve', flush=True)
    asyncio.run(serve(service, flags.host, flags.port, ready, flags.hosts))
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
  parser.add_argument('--host', default='127.0.0.1', help='0.0.0.0 lets other machines in')
  parser.add_argument(
      '--hosts', nargs='+', default=(), help='names of a proxy before a server on 127.0.0.1'
  )
  parser.add_argument('--port', type=_port, default=8000, help='0: any free one')
  parser.add_argument('--threads', type=_at_least(int, 1), default=1, help='searches at once')
  for field in dataclasses.fields(Limits):
    parser.add_argument(
        '--' + field.name.replace('_', '-'),
        default=field.default,
        type=_at_least(field.type, 1 if field.type is int else 0),
        help='limit',
    )
  return parser.parse_args(arguments)


def _port(text):
  if not 0 <= int(text) <= 65535:
    raise argparse.ArgumentTypeError(f'{text} is no port: 0 to 65535 are')
  return int(text)


def _at_least(kind, least):
  def number(text):
    value = kind(text)
    if not value >= least:
      raise argparse.ArgumentTypeError(f'{text} is below {least}')
    return value

  return number


if __name__ == '__main__':
  sys.exit(main())
