"""An environment server: a class of envs/protocol.py for clients of OpenEnv, over WebSocket.

  GET /ws            one session per connection, with OpenEnv's messages reset, step, state, close
  GET /environment   the attributes of the class, see envs/served.py
  GET /tasks         the tasks of a split, if the class has its own
  GET /health        {"status": "ok", "sessions": 3}; 503 while it stops
  GET /metrics       Prometheus format

                event loop                      threads
  message  ->  parsed and checked  ->  reset or step, under a guard
  answer   <-  sent                <-  JSON text

A session plays one call at a time. If its client leaves during a call, the session ends with the
call. So there are never more calls than sessions, apart from calls that a time limit abandoned.
"""

import asyncio
from collections.abc import Callable
from concurrent import futures
import dataclasses
import json
import logging
import secrets
from typing import Annotated
from typing import Any

import prometheus_client
import pydantic
from starlette import requests
from starlette import responses
from starlette import routing
from starlette import websockets

from stppo_jax import types
from stppo_jax.envs import factory as factory_lib
from stppo_jax.envs import guard as guard_lib
from stppo_jax.envs import served
from stppo_jax.envs import stepping
from stppo_jax.net import http_server
from stppo_jax.stop_signal import StopSignal

_MAX_SEED = 2**31  # bound of the seed that the server draws for a reset without one
_GOING_AWAY = 1001  # WebSocket's status of a server that ends a session
_TRY_AGAIN = 1013  # its status of a server that is full
Json = http_server.Json


@dataclasses.dataclass(frozen=True)
class SessionLimits(http_server.ServerLimits):
  """Limits of a server with sessions. `max_body_bytes` also is the limit of a message."""

  max_sessions: int = 2048
  idle_s: float = 3600.0  # between two messages of a client; also for sending an answer
  call_s: float = 600.0  # time limit of a call of the environment; 0: none


class _Message(http_server.Body):
  type: str
  data: Json = {}


class _ResetData(http_server.Body):
  seed: int | None = pydantic.Field(None, ge=0)
  episode_id: str | None = pydantic.Field(None, max_length=255)
  task: Annotated[Any, pydantic.PlainValidator(served.read_task)] = None


class _StepData(http_server.Body):
  text: http_server.Text
  metadata: Json = {}  # typed actions of OpenEnv have it; it is not used


class _ErrorAnswer(Exception):
  """An error message of OpenEnv."""

  def __init__(self, code: str, message: str, **fields: Any):
    super().__init__(message)
    self.data = {'message': message, 'code': code, **fields}


class EnvApp(http_server.HttpApp):
  """An environment class as an ASGI application. An empty `api_key` allows every client."""

  name = 'env'
  how_to_allow = 'use localhost, or allow the name with --config.serve.hosts'
  websocket_protocol = 'websockets-sansio'
  statuses = {types.UserError: 400}

  def __init__(
      self,
      factory: factory_lib.EnvFactory,
      description: served.Description,
      limits: SessionLimits,
      api_key: str = '',
  ):
    routes = [
        routing.Route(served.ENVIRONMENT_PATH, self._describe),
        routing.Route(served.TASKS_PATH, self._tasks),
    ]
    super().__init__(limits, routes)
    self.num_sessions = 0
    self._factory = factory
    self._description = description
    self._session_limits = limits
    self._api_key = api_key
    self._pool = futures.ThreadPoolExecutor(limits.max_sessions, 'env')
    self._guard = guard_lib.Guard(limits.call_s, StopSignal(lambda: self.stopping))
    self._messages = prometheus_client.Counter(
        'env_messages', 'Messages of clients by their type.', ['type'], registry=self.registry
    )
    gauge = prometheus_client.Gauge('env_sessions', 'Open sessions.', registry=self.registry)
    gauge.set_function(lambda: self.num_sessions)

  def check(self, request: requests.HTTPConnection) -> None:
    if request.scope['path'] != '/health':
      http_server.check_key(request.headers, self._api_key)

  def health(self) -> Json:
    return super().health() | {'sessions': self.num_sessions}

  async def __call__(self, scope, receive, send) -> None:
    if scope['type'] != 'websocket':
      await super().__call__(scope, receive, send)
      return
    socket = websockets.WebSocket(scope, receive, send)
    try:
      self._check_socket(socket)
    except http_server.RequestError as error:
      body = self.error_body(error, scope['path'])
      response = responses.JSONResponse(body, error.status_code, error.headers)
      await socket.send_denial_response(response)
      return
    try:
      await self._serve(socket)
    except websockets.WebSocketDisconnect:
      pass  # the client has left
    except Exception:
      logging.exception('a session failed')

  def _check_socket(self, socket: websockets.WebSocket) -> None:
    """Raises RequestError for a connection that gets no session."""
    self.check_host(socket)
    # Browsers let a page of any site open a WebSocket, and name the site.
    if 'origin' in socket.headers:
      raise http_server.RequestError(403, 'pages of a browser are not served: leave out Origin')
    self.check(socket)
    if socket.scope['path'] != '/ws':
      raise http_server.RequestError(404, 'there is no such WebSocket: use /ws')
    if self.stopping:
      raise http_server.RequestError(503, 'busy: the server stops; try again')

  async def _serve(self, socket: websockets.WebSocket) -> None:
    """Plays a session, unless there are too many."""
    digest = self._description.digest.encode()
    await socket.accept(headers=[(served.HEADER.encode(), digest)])
    most = self._session_limits.max_sessions
    if self.num_sessions >= most:
      error = _ErrorAnswer(
          'CAPACITY_REACHED',
          f'the server has {most} sessions, which is its limit: try again later, or start it with '
          'a larger --sessions',
          active_sessions=self.num_sessions,
          max_sessions=most,
      )
      await socket.send_text(_write_error(error))
      await socket.close(_TRY_AGAIN)
      return
    self.num_sessions += 1
    session = _Session(self._factory, self._guard)
    try:
      await self._converse(socket, session)
    finally:
      try:
        await self._in_thread(session.close)
      finally:
        self.num_sessions -= 1

  async def _converse(self, socket: websockets.WebSocket, session: '_Session') -> None:
    """Answers messages until the client leaves, or sends none for too long."""
    idle_s = self._session_limits.idle_s
    while True:
      try:
        async with asyncio.timeout(idle_s):
          event = await socket.receive()
      except TimeoutError:
        error = _ErrorAnswer('SESSION_ERROR', f'no message within {idle_s:g} s: the session ends')
        await self._send(socket, _write_error(error))
        await socket.close(_GOING_AWAY)
        return
      if event['type'] == 'websocket.disconnect':
        return
      try:
        answer = await self._answer(session, event.get('text'))
      except _ErrorAnswer as error:
        answer = _write_error(error)
      except types.Stopped:
        answer = None
      if answer is None:
        await socket.close()
        return
      await self._send(socket, answer)

  async def _send(self, socket: websockets.WebSocket, text: str) -> None:
    """Sends a text. Raises WebSocketDisconnect, also for a client that does not read."""
    try:
      async with asyncio.timeout(self._session_limits.idle_s):
        await socket.send_text(text)
    except TimeoutError:
      raise websockets.WebSocketDisconnect from None

  async def _answer(self, session: '_Session', text: str | None) -> str | None:
    """Returns the answer to a message; None for the last one. Raises _ErrorAnswer, Stopped."""
    kinds: dict[str, Callable[[_Message], Any]] = {
        'reset': lambda message: session.reset(_ResetData.model_validate(message.data)),
        'step': lambda message: session.step(_StepData.model_validate(message.data)),
        'state': lambda message: session.state(),
    }
    try:
      message = _Message.model_validate(_parse(text))
      if message.type == 'close':
        return None
      if message.type not in kinds:
        raise _ErrorAnswer(
            'UNKNOWN_TYPE', f'there is no type {message.type[:80]!r}: use {", ".join(kinds)}, close'
        )
      self._messages.labels(message.type).inc()
      return await self._in_thread(kinds[message.type], message)
    except pydantic.ValidationError as error:
      errors = error.errors(include_url=False, include_context=False, include_input=False)
      raise _ErrorAnswer('VALIDATION_ERROR', 'Invalid message', errors=errors) from None
    except types.UserError as error:
      raise _ErrorAnswer('EXECUTION_ERROR', str(error), ends='UserError') from None
    except types.RunError as error:
      raise _ErrorAnswer('EXECUTION_ERROR', str(error), ends='RunError') from None

  async def _in_thread(self, function: Callable[..., types.T], *args: Any) -> types.T:
    return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

  async def _describe(self, request: requests.Request) -> responses.Response:
    return responses.JSONResponse(dataclasses.asdict(self._description))

  async def _tasks(self, request: requests.Request) -> responses.Response:
    load = self._factory.load_tasks
    if load is None:
      raise http_server.RequestError(404, f'{self._description.name} has no tasks of its own')
    split = request.query_params.get('split', 'train')
    text = await self._in_thread(lambda: _write_tasks(load(split)))
    return responses.Response(text, media_type='application/json')


class _Session:
  """The environment of one connection. Its methods are called one at a time, in any thread."""

  def __init__(self, factory: factory_lib.EnvFactory, guard: guard_lib.Guard):
    self._factory = factory
    self._guard = guard
    self._env: Any = None  # None: no episode is running
    self._episode_id: str | None = None
    self._num_steps = 0

  def close(self) -> None:
    """Drops the environment, whose destructor may take long."""
    self._env = None

  def reset(self, data: _ResetData) -> str:
    """Starts an episode and returns its observation."""
    seed = secrets.randbelow(_MAX_SEED) if data.seed is None else data.seed
    task = data.task or types.Task('', seed=seed)
    self._env = None
    self._num_steps = 0
    self._episode_id = data.episode_id
    env = self._factory(task, seed, self._guard)
    text, info = stepping.reset(env, seed)
    _raise_if_failed(info)
    answer = _write_observation('reset', text, info)
    self._env = env
    return answer

  def step(self, data: _StepData) -> str:
    """Plays a step and returns its observation."""
    if self._env is None:
      raise _ErrorAnswer('EXECUTION_ERROR', 'no episode is running: send reset first')
    env = self._env
    self._env = None
    (outcome,) = stepping.step_all([env], [data.text])
    text, reward, terminated, truncated, info = outcome
    _raise_if_failed(info)
    answer = _write_observation('step', text, info, reward, bool(terminated), bool(truncated))
    self._num_steps += 1
    if not (terminated or truncated):
      self._env = env
    return answer

  def state(self) -> str:
    """Returns the episode's id and its number of steps."""
    data = {'episode_id': self._episode_id, 'step_count': self._num_steps}
    return json.dumps({'type': 'state', 'data': data})


def _parse(text: str | None) -> Json:
  """Returns a JSON object; `text` is None for a message in bytes. Raises _ErrorAnswer."""
  try:
    fields = None if text is None else types.parse_json(text)
  except (ValueError, RecursionError) as error:
    reason = f'the message is not JSON ({type(error).__name__})'
    raise _ErrorAnswer('INVALID_JSON', reason) from None
  if not isinstance(fields, dict):
    raise _ErrorAnswer('INVALID_JSON', 'send a JSON object as text')
  return fields


def _raise_if_failed(info: Any) -> None:
  """Raises _ErrorAnswer for an error of the environment's code."""
  if 'environment_error' not in info:
    return
  if info.get('given_up'):
    raise types.Stopped
  logging.warning('%s\n%s', info['environment_error'], info['traceback'])
  raise _ErrorAnswer('EXECUTION_ERROR', info['environment_error'], info=info)


def _write_observation(
    method: str,
    text: str,
    info: Any,
    reward: Any = None,
    terminated: bool = False,
    truncated: bool = False,
) -> str:
  """Returns an observation message. UserError: JSON cannot hold it."""
  observation = {'text': text, 'terminated': terminated, 'truncated': truncated, 'info': info}
  is_over = terminated or truncated
  try:
    fields = {
        'observation': served.to_json(observation, 'observation'),
        'reward': served.to_json(reward, 'the reward'),
        'done': is_over,
    }
    return json.dumps({'type': 'observation', 'data': fields})
  except (ValueError, RecursionError) as error:
    raise types.UserError(
        f'{method} returned a value that an environment server cannot send: {error}: return texts, '
        'finite numbers, lists, and dicts with texts as keys'
    ) from error


def _write_error(error: _ErrorAnswer) -> str:
  return json.dumps({'type': 'error', 'data': error.data})


def _write_tasks(tasks: list[types.Task]) -> str:
  return json.dumps([dataclasses.asdict(types.without_surrogates(task)) for task in tasks])
