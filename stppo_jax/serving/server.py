"""The gateway over HTTP: OpenAI's interface to a model, and to the sessions of a run.

  POST /v1/chat/completions   POST /v1/completions   GET /v1/models
  POST /v1/messages           POST /v1/messages/count_tokens (Anthropic's, see messages.py)
  GET /health                 {"status": "ok"}; 503 while it stops
  GET /metrics                Prometheus format
  /s/SESSION/v1/..            the same within a session; or the header X-Session-Id
  POST /s/SESSION/reward      {"reward": 1.0, "turn": 2, "metrics": {..}}; no turn: of the episode

With `serve.weights_folder` a trainer controls the server as it controls vLLM:
  POST /pause?mode=keep       stops sampling; with mode=wait the requests in progress end first
  POST /collective_rpc        {"method": "reload_weights", "kwargs": {"weights_path": FOLDER}}
  POST /reset_prefix_cache    computes all contexts again, as a reload does
  POST /resume                ends a pause
  POST /update_weight_version {"new_version": NAME}; GET /weight_info tells the name

Log-probs are the model's own, see `serve.logprobs_mode`. In a session they are those of the
distribution that was drawn from.
Errors are OpenAI's: {"error": {"message", "type", "param", "code"}}. It needs the extra `serve`.
"""

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import AsyncIterator
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import functools
import hmac
import json
import re
import time
from typing import Annotated
from typing import Any
from typing import Literal
import uuid

from prometheus_client import core
import pydantic
from starlette import exceptions
from starlette import requests
from starlette import responses
from starlette import routing

from stppo_jax.distributed import http_server
from stppo_jax.envs import tool_calls
from stppo_jax.serving import api
from stppo_jax.serving import messages
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import service as service_lib
from stppo_jax.serving import sessions
from stppo_jax.types import UserError

_ERROR_TYPES = {401: 'authentication_error', 429: 'rate_limit_error'}
_CONTROLS: dict[str, dict[str, Any]] = {  # vLLM's answers
    '/pause': {'status': 'paused'},
    '/resume': {'status': 'resumed'},
    '/reset_prefix_cache': {'success': True},
    '/collective_rpc': {'results': [None]},
    '/update_weight_version': {'success': True},
}
_POLL_S = 0.01
_MetricName = Annotated[str, pydantic.Field(pattern=r'^\w{1,40}$')]


class RewardBody(http_server.Body):
  """A reward of a turn or of the episode."""

  reward: float
  turn: int | None = None
  metrics: dict[_MetricName, float] | None = pydantic.Field(None, max_length=64)


class ReloadArguments(http_server.Body):
  """The arguments of vLLM's `reload_weights` that the gateway supports."""

  weights_path: http_server.Text


class WeightVersionBody(http_server.Body):
  """The client's name for the weights, which the server only remembers."""

  new_version: http_server.Text


class CollectiveRpcBody(http_server.Body):
  """A call of vLLM's workers, of which the gateway supports one."""

  method: Literal['reload_weights']
  kwargs: ReloadArguments


class _Writer:
  """Writes the parts of an answer as OpenAI's JSON."""

  def __init__(self, service: service_lib.Service, answer: service_lib.Answer):
    self.is_chat = isinstance(answer.body, api.ChatBody)
    self._token_bytes = service.tokenizer.token_bytes
    self._answer = answer
    self._begun: set[int] = set()  # choices that have sent a chunk
    prefix = 'chatcmpl' if self.is_chat else 'cmpl'
    self._head = {
        'id': f'{prefix}-{uuid.uuid4().hex}',
        'object': 'chat.completion' if self.is_chat else 'text_completion',
        'created': int(time.time()),
        'model': service.name,
    }

  def whole(self, chunks: Sequence[service_lib.Chunk]) -> dict[str, Any]:
    """Returns a whole answer, whose choices have one chunk each."""
    fields = self._envelope([self._choice(chunk) for chunk in chunks])
    fields['usage'] = self._answer.usage()
    if self._answer.body.return_token_ids and self.is_chat:
      fields['prompt_token_ids'] = self._answer.prompts[0]
    return fields

  async def events(self, chunks: AsyncIterator[service_lib.Chunk]) -> AsyncGenerator[str, None]:
    """Yields the answer's server-sent events."""
    try:
      async for chunk in chunks:
        yield _event(self._envelope([self._choice(chunk, is_chunk=True)], is_chunk=True))
      if self._answer.body.stream_options.get('include_usage'):
        yield _event(self._envelope([], is_chunk=True) | {'usage': self._answer.usage()})
      yield 'data: [DONE]\n\n'
    except http_server.RequestError as error:  # the status is sent already
      yield _event(_error_body(error))

  def _envelope(self, choices: list[dict], is_chunk: bool = False) -> dict[str, Any]:
    """Returns the fields around the choices."""
    fields = self._head | {'choices': choices}
    if is_chunk and self.is_chat:
      fields['object'] = 'chat.completion.chunk'
    return fields

  def _choice(self, chunk: service_lib.Chunk, is_chunk: bool = False) -> dict[str, Any]:
    """Returns a choice of a whole answer, or of a chunk."""
    body = self._answer.body
    fields: dict[str, Any] = {
        'index': chunk.index,
        'finish_reason': chunk.finish,
        'stop_reason': chunk.stop,  # vLLM's
        'logprobs': self._logprobs(chunk) if body.wants_logprobs else None,
    }
    if body.return_token_ids:
      fields['token_ids'] = chunk.tokens
    if chunk.turn is not None:
      fields['turn'] = chunk.turn
    if self.is_chat:
      fields['delta' if is_chunk else 'message'] = self._message(chunk, is_chunk)
      return fields
    fields['text'] = chunk.text
    if body.return_token_ids and not is_chunk:
      fields['prompt_token_ids'] = self._answer.prompt(chunk.index)
    return fields

  def _message(self, chunk: service_lib.Chunk, is_chunk: bool) -> dict[str, Any]:
    """Returns a chat's message, or the part of it that is in a chunk."""
    message: dict[str, Any] = {}
    if chunk.index not in self._begun:
      message = {'role': 'assistant', 'content': ''}
      self._begun.add(chunk.index)
    if chunk.text:
      message['content'] = chunk.text
    if chunk.calls:
      calls = [_call(call) for call in chunk.calls]
      message['tool_calls'] = calls
      if is_chunk:
        message['tool_calls'] = [{'index': i} | call for i, call in enumerate(calls)]
      else:
        message['content'] = chunk.text or None
    return message

  def _logprobs(self, chunk: service_lib.Chunk) -> dict[str, Any]:
    known = len(self._token_bytes)
    spelled = [self._token_bytes[token] if token < known else b'' for token in chunk.tokens]
    if self.is_chat:
      return api.chat_logprobs(spelled, chunk.logp)
    return api.text_logprobs(spelled, chunk.logp, chunk.starts)


class GatewayApp(http_server.HttpApp):
  """A service as an ASGI application."""

  name = 'gateway'
  how_to_allow = 'use localhost, or allow the name with --config.serve.hosts'

  def __init__(
      self, service: service_lib.Service, limits: http_server.ServerLimits, api_key: str = ''
  ):
    """Without an `api_key` the server accepts any client."""
    chat = functools.partial(self._complete, api.ChatBody.model_validate, _Writer)
    text = functools.partial(self._complete, api.TextBody.model_validate, _Writer)
    anthropic = functools.partial(self._complete, messages.read, messages.MessagesWriter)
    routes = [routing.Route('/s/{session}/reward', self._reward, methods=['POST'])]
    for prefix in ('', '/s/{session}'):
      routes += [
          routing.Route(f'{prefix}/v1/chat/completions', chat, methods=['POST']),
          routing.Route(f'{prefix}/v1/completions', text, methods=['POST']),
          routing.Route(f'{prefix}/v1/models', self._models),
          routing.Route(f'{prefix}/v1/messages', anthropic, methods=['POST']),
          routing.Route(f'{prefix}/v1/messages/count_tokens', self._count_tokens, methods=['POST']),
      ]
    if service.scheduler.can_reload:
      routes.append(routing.Route('/weight_info', self._weight_info))
      for path in _CONTROLS:
        routes.append(routing.Route(path, self._control, methods=['POST']))
    super().__init__(limits, routes)
    self.service = service
    self._api_key = api_key
    self._weight_version = ''
    self.registry.register(self)

  def collect(self) -> Iterator[core.Metric]:
    """Yields the scheduler's counters."""
    scheduler = self.service.scheduler
    for name in ('waiting', 'running'):
      value = getattr(scheduler, name)
      yield core.GaugeMetricFamily(f'gateway_{name}', f'Requests {name}.', value)
    for name, value in vars(scheduler.counts).items():
      text = f'{name.replace("_", " ").capitalize()} since the start.'
      yield core.CounterMetricFamily(f'gateway_{name}', text, value)

  def check(self, request: requests.Request) -> None:
    path = request.scope['path']
    session = re.match('/s/([^/]+)/', path)
    if session:  # the id of a session is a key, as long as the session is open
      self.service.session(session[1])
    elif self._api_key and path != '/health':
      key = request.headers.get('x-api-key') or request.headers.get('authorization', '')
      key = key.removeprefix('Bearer ').strip()
      if not hmac.compare_digest(key.encode(), self._api_key.encode()):
        raise http_server.RequestError(401, 'a wrong API key, or none', 'invalid_api_key')

  def health(self) -> dict[str, Any]:
    return super().health() if self.service.scheduler.is_alive else {'status': 'failed'}

  def error_body(self, error: exceptions.HTTPException, path: str) -> dict[str, Any]:
    return messages.error_body(error) if '/v1/messages' in path else _error_body(error)

  async def _complete(
      self,
      read: Callable[[dict[str, Any]], service_lib.Body],
      writer_class: type[_Writer] | type[messages.MessagesWriter],
      request: requests.Request,
  ) -> responses.Response:
    body = read(await self.read_json(request))
    if self.stopping:
      raise http_server.RequestError(503, 'the server stops')
    begin = self.service.begin(body, _session_name(request))
    answer = await http_server.cancel_on_disconnect(request, begin)
    writer = writer_class(self.service, answer)
    chunks = self.service.chunks(answer)
    if body.stream:
      return _EventStream(answer, writer.events(chunks))
    try:
      collected = await http_server.cancel_on_disconnect(request, _collect(chunks))
      # JSONResponse would fail on half a character, which arguments of a call may hold.
      text = json.dumps(writer.whole(collected))
      return responses.Response(text, media_type='application/json')
    finally:
      answer.close()

  async def _count_tokens(self, request: requests.Request) -> responses.Response:
    body = messages.read(await self.read_json(request))
    count = self.service.count_tokens(body, _session_name(request))
    num_tokens = await http_server.cancel_on_disconnect(request, count)
    return responses.JSONResponse({'input_tokens': num_tokens})

  async def _models(self, request: requests.Request) -> responses.Response:
    model = {'id': self.service.name, 'object': 'model', 'created': 0, 'owned_by': 'stppo-jax'}
    model['max_model_len'] = self.service.scheduler.max_total
    return responses.JSONResponse({'object': 'list', 'data': [model]})

  async def _control(self, request: requests.Request) -> responses.Response:
    fields = await self.read_json(request)
    path = request.scope['path']
    if path == '/pause':
      mode = request.query_params.get('mode')
      if mode not in ('keep', 'wait'):
        raise http_server.RequestError(400, f'mode={mode!r}: use keep or wait', param='mode')
      await self._call('pause', mode == 'wait')
      if mode == 'wait':
        await http_server.cancel_on_disconnect(request, self._wait_for_running())
    elif path == '/collective_rpc':
      body = CollectiveRpcBody.model_validate(fields)
      await self._call('reload', body.kwargs.weights_path)
    elif path == '/update_weight_version':
      self._weight_version = WeightVersionBody.model_validate(fields).new_version
    else:
      await self._call('resume' if path == '/resume' else 'forget')
    return responses.JSONResponse(_CONTROLS[path])

  async def _call(self, name: str, *arguments: Any) -> None:
    """Waits until the scheduler has done something."""
    try:
      await asyncio.wrap_future(self.service.scheduler.control(name, *arguments))
    except UserError as error:
      raise http_server.RequestError(400, str(error)) from None
    except scheduler_lib.Busy as error:
      raise http_server.RequestError(503, str(error)) from None

  async def _wait_for_running(self) -> None:
    """Waits until no request is in progress."""
    scheduler = self.service.scheduler
    while scheduler.running:
      if not scheduler.drains:
        raise http_server.RequestError(409, 'another client has ended this pause')
      await asyncio.sleep(_POLL_S)

  async def _weight_info(self, request: requests.Request) -> responses.Response:
    return responses.JSONResponse({'weight_version': self._weight_version})

  async def _reward(self, request: requests.Request) -> responses.Response:
    body = RewardBody.model_validate(await self.read_json(request))
    session = self.service.session(request.path_params['session'])
    try:
      session.reward(body.reward, body.turn, body.metrics)
    except ValueError as error:
      raise http_server.RequestError(400, str(error), param='turn') from None
    except sessions.Closed as error:
      raise http_server.RequestError(404, str(error), 'session_not_found') from None
    return responses.JSONResponse({})


class _EventStream(responses.StreamingResponse):
  """A stream that cancels its answer when the client leaves."""

  def __init__(self, answer: service_lib.Answer, events: AsyncGenerator[str, None]):
    super().__init__(events, headers={'Cache-Control': 'no-cache'}, media_type='text/event-stream')
    self._answer = answer
    self._events = events

  async def __call__(self, scope, receive, send) -> None:
    try:
      async with contextlib.aclosing(self._events):
        await super().__call__(scope, receive, send)
    finally:
      self._answer.close()


async def _collect(chunks: AsyncIterator[service_lib.Chunk]) -> list[service_lib.Chunk]:
  """Returns the chunks in the order of their choices."""
  collected = [chunk async for chunk in chunks]
  return sorted(collected, key=lambda chunk: chunk.index)


def _session_name(request: requests.Request) -> str:
  return request.path_params.get('session') or request.headers.get('x-session-id', '')


def _error_body(error: exceptions.HTTPException) -> dict[str, Any]:
  """Returns the JSON of an error as OpenAI writes it."""
  other = 'invalid_request_error' if error.status_code < 500 else 'server_error'
  fields = {
      'message': error.detail,
      'type': _ERROR_TYPES.get(error.status_code, other),
      'param': getattr(error, 'param', None),
      'code': getattr(error, 'code', None),
  }
  return {'error': fields}


def _event(fields: dict[str, Any]) -> str:
  return f'data: {json.dumps(fields)}\n\n'


def _call(call: tool_calls.Call) -> dict[str, Any]:
  function = {'name': call.name, 'arguments': json.dumps(call.arguments, ensure_ascii=False)}
  return {'id': f'call_{uuid.uuid4().hex[:24]}', 'type': 'function', 'function': function}
