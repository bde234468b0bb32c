"""Shared parts of the HTTP servers: checks before a body is read, limits, metrics, a thread.

uvicorn     parses HTTP
HttpApp     checks each request, counts the answers, writes errors as JSON
Starlette   finds the function that answers
"""

import asyncio
from collections.abc import Callable
from collections.abc import Coroutine
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hmac
import ipaddress
import json
import logging
import re
import socket
import threading
import time
from typing import Annotated
from typing import Any
from typing import TypeVar

import prometheus_client
import pydantic
from starlette import exceptions
from starlette import requests
from starlette import responses
from starlette import routing
import uvicorn

from stppo_jax import types

_LOOPBACK = ('localhost', '127.0.0.1', '::1')
_UNCOUNTED = ('/health', '/metrics')  # probes, which the metrics leave out
_KEEP_ALIVE_S = 75  # between requests of a connection
_PONG_S = 60.0  # a WebSocket whose client does not answer a ping for so long is closed
_SHOWN = 80  # characters of a wrong value in an error

Json = dict[str, Any]  # a JSON object
Result = TypeVar('Result')


@dataclasses.dataclass(frozen=True)
class ServerLimits:
  """Limits of a server."""

  max_body_bytes: int = 8 << 20
  body_timeout_s: float = 10.0  # until a complete body
  grace_s: float = 30.0  # time that running requests have when the server stops


class RequestError(exceptions.HTTPException):
  """A rejected request: the HTTP status and one line for the client."""

  def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
    headers = {}
    if status in (429, 503):
      headers['Retry-After'] = '1'
    if status == 408:
      headers['Connection'] = 'close'
    super().__init__(status, message, headers)
    self.code = code
    self.param = param


class Body(pydantic.BaseModel):
  """A request's JSON object. Unknown fields are errors."""

  model_config = pydantic.ConfigDict(extra='forbid', strict=True, allow_inf_nan=False)


def check_key(headers: Mapping[str, str], api_key: str) -> None:
  """Raises RequestError unless a request has the key. An empty key allows every client."""
  key = headers.get('x-api-key') or headers.get('authorization', '')
  key = key.removeprefix('Bearer ').strip()
  if api_key and not hmac.compare_digest(key.encode(), api_key.encode()):
    raise RequestError(401, 'a wrong API key, or none', 'invalid_api_key')


def _replace_surrogates(value: Any) -> Any:
  return value.encode('utf-8', 'replace').decode() if isinstance(value, str) else value


# JSON can hold half a character, which pydantic rejects.
Text = Annotated[str, pydantic.BeforeValidator(_replace_surrogates)]


class HttpApp:
  """An ASGI application. Subclasses give the routes, more checks and the form of errors."""

  name = ''  # first word of the metrics' names
  how_to_allow = ''  # tells how to allow another name of the host
  websocket_protocol = 'none'  # uvicorn's implementation; 'none': there are no WebSockets
  statuses: Mapping[type[Exception], int] = {}  # answers to the application's own errors

  def __init__(self, limits: ServerLimits, routes: Sequence[routing.Route]):
    self.limits = limits
    self.allowed_hosts: frozenset[str] | None = None  # None: any
    self.stopping = False
    self.registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=self.registry)
    self._requests = prometheus_client.Counter(
        f'{self.name}_requests',
        'Requests by HTTP status; 499: the client disconnected.',
        ['status'],
        registry=self.registry,
    )
    self._seconds = prometheus_client.Histogram(
        f'{self.name}_request_seconds',
        'From the header of a request to the end of its answer.',
        registry=self.registry,
    )
    self._routes = _describe(routes)
    self._router = routing.Router(
        [
            *routes,
            routing.Route('/health', self._answer_health),
            routing.Route('/metrics', self._answer_metrics),
        ],
        redirect_slashes=False,
    )

  def check(self, request: requests.Request) -> None:
    """Raises RequestError for a request whose body will not be read."""

  def health(self) -> Json:
    """Returns the fields of GET /health."""
    return {'status': 'stopping' if self.stopping else 'ok'}

  def error_body(self, error: exceptions.HTTPException, path: str) -> Json:
    """Returns the JSON of an error of a path."""
    return {'error': error.detail}

  async def __call__(self, scope, receive, send) -> None:
    started = time.perf_counter()
    request = requests.Request(scope)
    scope['app'] = self  # the router then raises its errors
    is_counted = scope['path'] not in _UNCOUNTED
    has_started = False

    async def send_checked(message):
      nonlocal has_started
      if message['type'] == 'http.response.start':
        has_started = True
        if is_counted:
          self._requests.labels(message['status']).inc()
      await send(message)

    try:
      self._check_header(request)
      await self._router(scope, receive, send_checked)
    except (Exception, asyncio.CancelledError) as error:
      if isinstance(error, asyncio.CancelledError) and not self.stopping:
        raise
      rejection = self._to_http_error(error, scope['path'])
      if has_started:
        raise
      body = self.error_body(rejection, scope['path'])
      response = responses.JSONResponse(body, rejection.status_code, rejection.headers)
      await response(scope, receive, send_checked)
    if is_counted:
      self._seconds.observe(time.perf_counter() - started)

  def _check_header(self, request: requests.Request) -> None:
    """Rejects, among others, a request that a page of another site may have sent.

    Such a page can send a form or a text without asking the server, but no JSON.
    """
    self.check_host(request)
    kind = request.headers.get('content-type', '').partition(';')[0].strip().lower()
    if request.method == 'POST' and kind != 'application/json':
      raise RequestError(415, 'send the header Content-Type: application/json')
    coding = request.headers.get('content-encoding', 'identity').lower()
    if coding not in ('', 'identity'):
      raise RequestError(
          415, f'the body has the Content-Encoding {coding[:80]!r}: send it as it is'
      )
    length = int(request.headers.get('content-length', 0))  # the parser has checked it
    most = self.limits.max_body_bytes
    if length > most:
      raise RequestError(413, f'the body has {length} bytes: send at most {most}')
    self.check(request)

  def check_host(self, connection: requests.HTTPConnection) -> None:
    """Raises RequestError for a name of the host that `allowed_hosts` does not have."""
    host = re.sub(r':\d+$', '', connection.headers.get('host', ''))
    host = host.strip('[]').rstrip('.').lower()
    if self.allowed_hosts is not None and host not in self.allowed_hosts:
      raise RequestError(403, f'the host {host[:80]!r} is not allowed: {self.how_to_allow}')

  def post(
      self,
      path: str,
      read: Callable[[Json], Any],
      answer: Callable[[requests.Request, Any], Coroutine[Any, Any, responses.Response | Json]],
  ) -> routing.Route:
    """Returns the route of a POST: `read` checks its body, `answer` gives JSON or a response.

    The answer is cancelled when the client disconnects.
    """

    async def endpoint(request: requests.Request) -> responses.Response:
      body = read(await self.read_json(request))
      if self.stopping:
        raise RequestError(503, 'busy: the server stops; try again')
      result = await _cancel_on_disconnect(request, answer(request, body))
      if isinstance(result, responses.Response):
        return result
      # JSONResponse would fail on half a character, which a text may hold.
      return responses.Response(json.dumps(result), media_type='application/json')

    return routing.Route(path, endpoint, methods=['POST'])

  async def read_json(self, request: requests.Request) -> Json:
    """Returns the body. RequestError: it is too long, too slow or not a JSON object."""
    body = bytearray()
    limits = self.limits
    try:
      async with asyncio.timeout(limits.body_timeout_s):
        async for chunk in request.stream():
          body += chunk
          if len(body) > limits.max_body_bytes:
            raise RequestError(413, f'send at most {limits.max_body_bytes} bytes')
    except TimeoutError:
      raise RequestError(408, f'no complete body within {limits.body_timeout_s} s') from None
    try:
      fields = types.parse_json(bytes(body))
    except (ValueError, RecursionError) as error:
      raise RequestError(400, f'the body is not JSON ({type(error).__name__})') from None
    if not isinstance(fields, dict):
      raise RequestError(400, 'the body must be a JSON object')
    return fields

  def _to_http_error(self, error: BaseException, path: str) -> exceptions.HTTPException:
    """Returns the answer to a failed request."""
    if isinstance(error, RequestError):
      return error
    if isinstance(error, exceptions.HTTPException):
      if error.status_code == 404:
        return RequestError(404, f'there is no such route: use {self._routes}')
      return error
    if isinstance(error, asyncio.CancelledError):
      return RequestError(503, 'the server has stopped before the request ended')
    for kind, status in self.statuses.items():
      if isinstance(error, kind):
        return RequestError(status, str(error))
    if isinstance(error, requests.ClientDisconnect):
      return RequestError(499, 'the client disconnected')  # counted, not read
    if not isinstance(error, pydantic.ValidationError):
      logging.error('%s failed', path, exc_info=error)
      return RequestError(500, 'Internal Server Error')
    first = error.errors(include_url=False, include_context=False)[0]
    where = '.'.join(map(str, first['loc']))
    message = first['msg'].removeprefix('Value error, ')
    if where:  # else the error is that of the whole body
      message = f'{where}: {message}'
    if first['type'] == 'extra_forbidden':
      message = f'{where} is not supported: leave it out'
    elif isinstance(first['input'], (str, int, float)) and first['input'] != '':
      message += f', got {str(first["input"])[:_SHOWN]!r}'
    return RequestError(400, message, param=where.partition('.')[0] or None)

  async def _answer_health(self, request) -> responses.Response:
    body = self.health()
    return responses.JSONResponse(body, 200 if body['status'] == 'ok' else 503)

  async def _answer_metrics(self, request) -> responses.Response:
    text = prometheus_client.generate_latest(self.registry)
    return responses.Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


def _describe(routes: Sequence[routing.Route]) -> str:
  """Returns the routes as a text, without those of a session and those that answer anybody."""
  shown = []
  for route in routes:
    if route.path != '/' and not route.path.startswith('/s/'):
      methods = sorted((route.methods or set()) - {'HEAD'})
      shown.append(f'{"|".join(methods)} {route.path}')
  return ', '.join(shown)


async def _cancel_on_disconnect(
    request: requests.Request, work: Coroutine[Any, Any, Result]
) -> Result:
  """Returns the result of `work`. Cancels it and raises ClientDisconnect if the client leaves."""
  task = asyncio.ensure_future(work)
  watcher = asyncio.ensure_future(_wait_for_disconnect(request))
  try:
    await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
      raise requests.ClientDisconnect
    return task.result()
  finally:
    task.cancel()
    watcher.cancel()


async def _wait_for_disconnect(request: requests.Request) -> None:
  while (await request.receive())['type'] != 'http.disconnect':
    pass


class Server:
  """Runs an application in a thread with an event loop. A context manager."""

  def __init__(
      self, app: HttpApp, host: str = '127.0.0.1', port: int = 0, hosts: Sequence[str] = ()
  ):
    """Binds the address; port 0 means any free port. OSError, UnicodeError: it cannot be used."""
    self.app = app
    self._socket = _bind(host, port)
    self.host, self.port = self._socket.getsockname()[:2]
    app.allowed_hosts = _allowed_hosts(self.host, (host, *hosts))
    self._server = uvicorn.Server(
        uvicorn.Config(
            app,
            http='h11',
            ws=app.websocket_protocol,
            ws_max_size=app.limits.max_body_bytes,
            ws_ping_timeout=_PONG_S,
            ws_per_message_deflate=False,  # its buffers would be most of a session's memory
            lifespan='off',
            loop='asyncio',
            log_config=None,
            log_level='critical',  # `HttpApp` logs errors
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=1024,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(app.limits.grace_s),
        )
    )
    self._thread = threading.Thread(
        target=self._server.run, args=([self._socket],), name='http', daemon=True
    )

  @property
  def url(self) -> str:
    """The address without a path, for clients on this machine."""
    host = {'0.0.0.0': '127.0.0.1', '::': '::1'}.get(self.host, self.host)
    host = f'[{host}]' if ':' in host else host
    return f'http://{host}:{self.port}'

  def __enter__(self) -> 'Server':
    self._thread.start()
    return self

  def __exit__(self, *unused_error) -> None:
    """Rejects new requests, waits at most `grace_s` for the running ones, then ends them."""
    self.app.stopping = True
    self._server.should_exit = True
    self._thread.join()


def _bind(host: str, port: int) -> socket.socket:
  """Returns a socket that listens at an address of the host, IPv4 if it has one."""
  infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
  family, _, _, _, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
  # asyncio turns off Nagle's delay only where the protocol is named.
  listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  listener.bind(address)
  listener.listen(1024)
  return listener


def _allowed_hosts(address: str, names: Sequence[str]) -> frozenset[str] | None:
  """Returns the hosts that a request may be addressed to; None: any.

  A page of another site can have its name resolved to 127.0.0.1 and then read the answers of a
  server on loopback (DNS rebinding). A server on loopback therefore answers to the names of
  loopback, to the host that it was bound to, and to further names, for example of a proxy. A server
  that other machines reach has names that it cannot know.
  """
  if not ipaddress.ip_address(address.partition('%')[0]).is_loopback:
    return None
  return frozenset(name.lower() for name in (*_LOOPBACK, address, *names))
