"""The gateway's HTTP server: OpenAI's interface to a model, and to the sessions of a run.

  POST /v1/chat/completions   POST /v1/completions   GET /v1/models
  GET /health                 {"status": "ok"}; 503 while it stops
  GET /metrics                Prometheus format
  /s/SESSION/v1/..            the same within a session; or the header X-Session-Id
  POST /s/SESSION/reward      {"reward": 1.0, "turn": 2, "metrics": {..}}; no turn: of the whole

Log-probs are the model's own; in a session they are those of the distribution that was drawn from.
Errors are OpenAI's: {"error": {"message", "type", "param", "code"}}. Needs the extra `serve`.
"""

import asyncio
from collections.abc import Sequence
import concurrent.futures
import contextlib
import hmac
import json
import re
import threading
import time
from typing import Any
import uuid

import prometheus_client
from prometheus_client import core
from tornado import httpserver
from tornado import iostream
from tornado import netutil
from tornado import web

from stppo_jax.distributed import json_handler
from stppo_jax.serving import api
from stppo_jax.serving import service as service_lib
from stppo_jax.serving import sessions as sessions_lib

_SESSION = r'(?:/s/(?P<session>[^/]{1,128}))?'


class Server:
  """A service that accepts connections, in a thread with an event loop. A context manager."""

  def __init__(
      self,
      service: service_lib.Service,
      host: str = '127.0.0.1',
      port: int = 0,
      hosts: Sequence[str] = (),
  ):
    self.service, self._host, self._port, self._hosts = service, host, port, hosts
    self._bound: concurrent.futures.Future = concurrent.futures.Future()
    self._loop = asyncio.new_event_loop()
    self._stopping = asyncio.Event()
    self._thread = threading.Thread(target=self._run, name='gateway', daemon=True)

  def __enter__(self) -> 'Server':
    self._thread.start()
    self.host, self.port = self._bound.result()  # or the error of binding
    return self

  def __exit__(self, *unused_error) -> None:
    """Rejects new requests and ends those in progress."""
    self.service.stopping = True
    self._loop.call_soon_threadsafe(self._stopping.set)
    self._thread.join()

  @property
  def url(self) -> str:
    """The address without a path, for clients on this machine."""
    host = {'0.0.0.0': '127.0.0.1', '::': '::1'}.get(self.host, self.host)
    host = f'[{host}]' if ':' in host else host
    return f'http://{host}:{self.port}'

  def _run(self):
    with contextlib.closing(self._loop):
      try:
        self._loop.run_until_complete(self._serve())
      except Exception as error:  # whatever binding raises: `__enter__` waits for it
        if self._bound.done():
          raise
        self._bound.set_exception(error)

  async def _serve(self):
    server, address = listen(self.service, self._host, self._port, self._hosts)
    self._bound.set_result(address)
    await self._stopping.wait()
    server.stop()
    await server.close_all_connections()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
      task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def listen(
    service: service_lib.Service, host: str, port: int, hosts: Sequence[str] = ()
) -> tuple[httpserver.HTTPServer, tuple[str, int]]:
  """Returns a server that accepts connections, and its address; port 0 means any free port."""
  limits = service.limits
  sockets = netutil.bind_sockets(port, host, backlog=1024)
  server = httpserver.HTTPServer(
      make_application(service, json_handler.allowed_hosts(sockets, host, hosts)),
      max_body_size=limits.max_body_bytes,
      max_header_size=16 << 10,
      idle_connection_timeout=limits.idle_timeout_s,
      body_timeout=limits.body_timeout_s,
  )
  server.add_sockets(sockets)
  return server, sockets[0].getsockname()[:2]


def make_application(
    service: service_lib.Service, allowed_hosts: frozenset[str] | None = None
) -> web.Application:
  """Returns the application: each path with its handler. No path names a file."""
  given = {'service': service, 'measures': Measures(service)}
  return web.Application(
      [
          (_SESSION + '/v1/chat/completions', _Chat, given),
          (_SESSION + '/v1/completions', _Completions, given),
          (_SESSION + '/v1/models', _Models, given),
          (r'/s/(?P<session>[^/]{1,128})/reward', _Reward, given),
          ('/health', _Health, given),
          ('/metrics', _Metrics, given),
      ],
      default_handler_class=_Elsewhere,
      default_handler_args=given,
      log_function=lambda handler: None,
      allowed_hosts=allowed_hosts,
      how_to_allow='use localhost, or allow the name with --config.serve.hosts',
  )


class Measures:
  """What /metrics shows."""

  def __init__(self, service: service_lib.Service):
    self.registry = prometheus_client.CollectorRegistry()
    self.receiving_bytes = 0  # of bodies that are not whole yet
    self._service = service
    prometheus_client.ProcessCollector(registry=self.registry)
    self.registry.register(self)
    self.requests = prometheus_client.Counter(
        'gateway_requests', 'Requests by HTTP status.', ['status'], registry=self.registry
    )
    self.seconds = prometheus_client.Histogram(
        'gateway_request_seconds',
        'From the header of a request to the end of its answer.',
        buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
        registry=self.registry,
    )

  def collect(self):
    """Yields what the scheduler counts."""
    scheduler = self._service.scheduler
    for name in ('waiting', 'running'):
      text = f'Requests {name}.'
      yield core.GaugeMetricFamily(f'gateway_{name}', text, getattr(scheduler, name))
    for name, value in vars(scheduler.counts).items():
      text = f'{name.replace("_", " ").capitalize()} since the start.'
      yield core.CounterMetricFamily(f'gateway_{name}', text, value)


@web.stream_request_body  # so that `prepare` can reject a body before it is received
class _Handler(json_handler.JsonHandler):
  quiet = (web.HTTPError, api.ApiError)

  def initialize(self, service: service_lib.Service, measures: Measures):
    self.service, self.measures = service, measures
    self._answer: service_lib.Answer | None = None
    self._is_gone = False  # the client has disconnected
    self._started, self._body, self._counted = time.perf_counter(), bytearray(), 0
    self.is_unread = True

  def prepare(self):
    self._check_header()
    self.is_unread = False

  def _check_header(self):
    self.check_source()
    length, most = self.content_length(), self.service.limits.max_body_bytes
    if length > most:
      raise api.ApiError(413, f'a body of {length} bytes: send at most {most}')
    session = self.path_kwargs.get('session')
    if session:  # its id is a key of its own, as long as it is open
      self.service.session(session)
    elif self.service.api_key and not isinstance(self, _Health):
      given = self.request.headers.get('Authorization', '').removeprefix('Bearer ').strip()
      if not hmac.compare_digest(given.encode(), self.service.api_key.encode()):
        raise api.ApiError(401, 'a wrong API key, or none', 'invalid_api_key')

  def data_received(self, chunk):
    self._body += chunk
    self._counted += len(chunk)
    self.measures.receiving_bytes += len(chunk)
    if self.measures.receiving_bytes > self.service.limits.max_receiving_bytes:
      self.request.connection.stream.close()  # type: ignore[union-attr]  # HTTP/1 has a stream

  def body(self) -> bytes:
    """Returns the whole body."""
    self._received()
    return bytes(self._body)

  def error_body(self, status, error):
    if not isinstance(error, api.ApiError):
      error = api.ApiError(status, getattr(error, 'log_message', None) or self._reason)
    self.set_status(error.status)
    if error.status in (429, 503):
      self.set_header('Retry-After', '1')
    return error.body()

  def on_connection_close(self):
    super().on_connection_close()
    self._is_gone = True
    self._received()
    if self._answer is not None:
      self._answer.cancel()

  def on_finish(self):
    self._received()
    self.measures.requests.labels(str(self.get_status())).inc()
    self.measures.seconds.observe(time.perf_counter() - self._started)

  def _received(self):
    self.measures.receiving_bytes -= self._counted
    self._counted = 0


class _Complete(_Handler):
  """What the two kinds of completions share."""

  is_chat = True
  kind = chunk_kind = ''

  async def post(self, session: str | None = None):
    if self.service.stopping:
      raise api.ApiError(503, 'the server stops')
    session = session or self.request.headers.get('X-Session-Id', '')
    service = self.service
    ask = api.parse(self.body(), self.is_chat, service.limits, service.template_kwargs)
    self._id = ('chatcmpl-' if self.is_chat else 'cmpl-') + uuid.uuid4().hex
    self._created = int(time.time())
    try:
      self._answer = await self.service.begin(ask, session, lambda: self._is_gone)
      if self._is_gone:
        self._answer.cancel()
      await (self._stream if ask.stream else self._whole)(self._answer)
    except TimeoutError:
      self.request.connection.stream.close()  # type: ignore[union-attr]  # HTTP/1 has a stream
    except (iostream.StreamClosedError, service_lib.Gone):
      pass  # the client has disconnected

  async def _whole(self, answer: service_lib.Answer):
    choices: list[list[service_lib.Piece]] = [[] for _ in answer.choices]
    async with contextlib.aclosing(self.service.pieces(answer)) as pieces:
      async for piece in pieces:
        choices[piece.index].append(piece)
    body = self._envelope(self.kind, [self._choice(answer, x) for x in choices])
    body['usage'] = self._usage(answer)
    if answer.ask.token_ids and self.is_chat:
      body['prompt_token_ids'] = answer.prompts[0]
    write = self.finish(json.dumps(body) + '\n')
    await asyncio.wait_for(write, self.service.limits.write_timeout_s)

  async def _stream(self, answer: service_lib.Answer):
    self.set_header('Content-Type', 'text/event-stream; charset=utf-8')
    self.set_header('Cache-Control', 'no-cache')
    begun: set[int] = set()
    try:
      async with contextlib.aclosing(self.service.pieces(answer)) as pieces:
        async for piece in pieces:
          await self._send(self._envelope(self.chunk_kind, [self._delta(answer, piece, begun)]))
      if answer.ask.with_usage:
        await self._send(self._envelope(self.chunk_kind, []) | {'usage': self._usage(answer)})
      self.write('data: [DONE]\n\n')
    except api.ApiError as error:  # the status is sent already
      await self._send(error.body())
    await asyncio.wait_for(self.finish(), self.service.limits.write_timeout_s)

  async def _send(self, event: dict[str, Any]):
    self.write(f'data: {json.dumps(event)}\n\n')
    await asyncio.wait_for(self.flush(), self.service.limits.write_timeout_s)

  def _envelope(self, kind: str, choices: list) -> dict[str, Any]:
    model = self.service.name
    head = {'id': self._id, 'object': kind, 'created': self._created, 'model': model}
    return head | {'choices': choices}

  def _usage(self, answer):
    read = sum(map(len, answer.prompts))
    return api.usage(read, sum(len(choice.tokens) for choice in answer.choices))

  def _details(self, answer, pieces: Sequence[service_lib.Piece]):
    """Returns the fields of a choice that both kinds have."""
    tokens = [token for piece in pieces for token in piece.tokens]
    logp = [x for piece in pieces for x in piece.logp]
    fields: dict[str, Any] = {'index': pieces[-1].index, 'finish_reason': pieces[-1].finish}
    fields |= {'stop_reason': pieces[-1].stop, 'logprobs': None}  # the former is vLLM's
    if answer.ask.logprobs:
      known = self.service.tokenizer.token_bytes
      spelled = [known[token] if token < len(known) else b'' for token in tokens]
      starts = [start for piece in pieces for start in piece.starts]
      fields['logprobs'] = self._logprobs(spelled, logp, starts)
    if answer.ask.token_ids:
      fields |= {'token_ids': tokens}
    if pieces[-1].turn is not None:
      fields['turn'] = pieces[-1].turn
    return fields

  def _logprobs(self, spelled: list[bytes], logp: list[float], starts: list[int]) -> dict[str, Any]:
    raise NotImplementedError

  def _choice(self, answer: service_lib.Answer, pieces: list[service_lib.Piece]) -> dict[str, Any]:
    raise NotImplementedError

  def _delta(self, answer: service_lib.Answer, piece: service_lib.Piece, begun: set[int]) -> dict:
    raise NotImplementedError


class _Chat(_Complete):
  kind, chunk_kind = 'chat.completion', 'chat.completion.chunk'

  def _logprobs(self, spelled, logp, starts):
    del starts
    return api.chat_logprobs(spelled, logp)

  def _choice(self, answer, pieces):
    calls = [call for piece in pieces for call in piece.calls]
    text = ''.join(piece.text for piece in pieces)
    message: dict[str, Any] = {'role': 'assistant', 'content': text or None if calls else text}
    if calls:
      message['tool_calls'] = [_call(call) for call in calls]
    return {'message': message} | self._details(answer, pieces)

  def _delta(self, answer, piece, begun):
    delta: dict[str, Any] = {} if piece.index in begun else {'role': 'assistant', 'content': ''}
    begun.add(piece.index)
    if piece.text:
      delta['content'] = piece.text
    if piece.calls:
      delta['tool_calls'] = [{'index': i} | _call(call) for i, call in enumerate(piece.calls)]
    return {'delta': delta} | self._details(answer, [piece])


class _Completions(_Complete):
  is_chat = False
  kind = chunk_kind = 'text_completion'

  def _logprobs(self, spelled, logp, starts):
    return api.text_logprobs(spelled, logp, starts)

  def _choice(self, answer, pieces):
    fields = {'text': ''.join(piece.text for piece in pieces)}
    if answer.ask.token_ids:
      fields['prompt_token_ids'] = answer.prompt(pieces[-1].index)
    return fields | self._details(answer, pieces)

  def _delta(self, answer, piece, begun):
    del begun
    return {'text': piece.text} | self._details(answer, [piece])


class _Models(_Handler):

  def get(self, session: str | None = None):
    del session  # `prepare` has looked it up
    model = {'id': self.service.name, 'object': 'model', 'created': 0, 'owned_by': 'stppo-jax'}
    model['max_model_len'] = self.service.scheduler.max_total
    self.finish(json.dumps({'object': 'list', 'data': [model]}) + '\n')


class _Reward(_Handler):

  def post(self, session: str):
    try:
      fields = json.loads(self.body())
    except (ValueError, RecursionError):
      raise api.ApiError(400, 'the body is not JSON') from None
    metrics = fields.get('metrics') or {} if isinstance(fields, dict) else None
    if not isinstance(metrics, dict) or 'reward' not in fields or len(metrics) > 64:
      raise api.ApiError(400, 'send {"reward": 1.0, "turn": 2, "metrics": {"name": 1.0}}')
    if not all(re.fullmatch(r'\w{1,40}', name) for name in metrics):
      raise api.ApiError(400, 'names of metrics are up to 40 letters, digits and _')
    try:
      self.service.session(session).reward(fields['reward'], fields.get('turn'), metrics)
    except ValueError as error:
      raise api.ApiError(400, str(error)) from None
    except sessions_lib.Closed as error:
      raise api.ApiError(404, str(error), 'session_not_found') from None
    self.finish('{}\n')


class _Health(_Handler):

  def get(self):
    ok = not self.service.stopping and self.service.scheduler.is_alive
    self.set_status(200 if ok else 503)
    self.finish(json.dumps({'status': 'ok' if ok else 'stopping'}) + '\n')


class _Metrics(_Handler):

  def get(self):
    self.set_header('Content-Type', prometheus_client.CONTENT_TYPE_LATEST)
    self.finish(prometheus_client.generate_latest(self.measures.registry))


class _Elsewhere(_Handler):

  def _check_header(self):
    super()._check_header()
    raise api.ApiError(404, 'there are /v1/chat/completions, /v1/completions and /v1/models')


def _call(call) -> dict[str, Any]:
  function = {'name': call.name, 'arguments': json.dumps(call.arguments, ensure_ascii=False)}
  return {'id': f'call_{uuid.uuid4().hex[:24]}', 'type': 'function', 'function': function}
