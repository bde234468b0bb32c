"""The gateway over HTTP: OpenAI's interface to a model, and to the sessions of a run.

  POST /v1/chat/completions   POST /v1/completions   GET /v1/models
  GET /health                 {"status": "ok"}; 503 while it stops
  GET /metrics                Prometheus format
  /s/SESSION/v1/..            the same within a session; or the header X-Session-Id
  POST /s/SESSION/reward      {"reward": 1.0, "turn": 2, "metrics": {..}}; no turn: of the episode

With `serve.weights_folder` a trainer controls the server as it controls vLLM:
  POST /pause?mode=keep       stops sampling; with mode=wait the requests in progress end first
  POST /collective_rpc        {"method": "reload_weights", "kwargs": {"weights_path": FOLDER}}
  POST /reset_prefix_cache    computes all contexts again, as a reload does
  POST /resume                ends a pause

Log-probs are the model's own, see `serve.logprobs_mode`. In a session they are those of the
distribution that was drawn from.
Errors are OpenAI's: {"error": {"message", "type", "param", "code"}}. It needs the extra `serve`.
"""

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Iterator
from concurrent import futures
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
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import service as service_lib
from stppo_jax.serving import sessions
from stppo_jax.types import UserError

_ERROR_TYPES = {401: 'authentication_error', 429: 'rate_limit_error'}
_MetricName = Annotated[str, pydantic.Field(pattern=r'^\w{1,40}$')]


class RewardBody(http_server.Body):
  """A reward of a turn or of the episode."""

  reward: float
  turn: int | None = None
  metrics: dict[_MetricName, float] | None = pydantic.Field(None, max_length=64)


class ReloadArguments(http_server.Body):
  """The arguments of vLLM's `reload_weights` that the gateway supports."""

  weights_path: http_server.Text


class CollectiveRpcBody(http_server.Body):
  """A call of vLLM's workers, of which the gateway supports one."""

  method: Literal['reload_weights']
  kwargs: ReloadArguments


class GatewayApp(http_server.HttpApp):
  """A service as an ASGI application."""

  name = 'gateway'
  how_to_allow = 'use localhost, or allow the name with --config.serve.hosts'

  def __init__(
      self, service: service_lib.Service, limits: http_server.ServerLimits, api_key: str = ''
  ):
    """Without an `api_key` the server accepts any client."""
    chat = functools.partial(self._complete, api.ChatBody)
    text = functools.partial(self._complete, api.TextBody)
    routes = [routing.Route('/s/{session}/reward', self._reward, methods=['POST'])]
    for prefix in ('', '/s/{session}'):
      routes += [
          routing.Route(f'{prefix}/v1/chat/completions', chat, methods=['POST']),
          routing.Route(f'{prefix}/v1/completions', text, methods=['POST']),
          routing.Route(f'{prefix}/v1/models', self._models),
      ]
    if service.scheduler.can_reload:
      controls = {
          'pause': self._pause,
          'resume': self._resume,
          'reset_prefix_cache': self._reset_prefix_cache,
          'collective_rpc': self._collective_rpc,
      }
      for name, answer in controls.items():
        routes.append(routing.Route(f'/{name}', answer, methods=['POST']))
    super().__init__(limits, routes)
    self.service = service
    self._api_key = api_key
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
      key = request.headers.get('authorization', '').removeprefix('Bearer ').strip()
      if not hmac.compare_digest(key.encode(), self._api_key.encode()):
        raise http_server.RequestError(401, 'a wrong API key, or none', 'invalid_api_key')

  def health(self) -> dict[str, Any]:
    return super().health() if self.service.scheduler.is_alive else {'status': 'failed'}

  def error_body(self, error: exceptions.HTTPException) -> dict[str, Any]:
    other = 'invalid_request_error' if error.status_code < 500 else 'server_error'
    fields = {
        'message': error.detail,
        'type': _ERROR_TYPES.get(error.status_code, other),
        'param': getattr(error, 'param', None),
        'code': getattr(error, 'code', None),
    }
    return {'error': fields}

  async def _complete(
      self, kind: type[api.CompletionBody], request: requests.Request
  ) -> responses.Response:
    body: Any = kind.model_validate(await self.read_json(request))
    if self.stopping:
      raise http_server.RequestError(503, 'the server stops')
    session = request.path_params.get('session') or request.headers.get('x-session-id', '')
    begin = self.service.begin(body, session)
    answer = await http_server.cancel_on_disconnect(request, begin)
    writer = _Writer(self.service, answer)
    if body.stream:
      return _EventStream(answer, self._events(answer, writer))
    try:
      whole = self._whole(answer, writer)
      fields = await http_server.cancel_on_disconnect(request, whole)
      # JSONResponse would fail on half a character, which arguments of a call may hold.
      return responses.Response(json.dumps(fields), media_type='application/json')
    finally:
      answer.close()

  async def _whole(self, answer: service_lib.Answer, writer: '_Writer') -> dict[str, Any]:
    """Returns the answer's JSON."""
    chunks = [chunk async for chunk in self.service.chunks(answer)]
    chunks.sort(key=lambda chunk: chunk.index)
    fields = writer.envelope([writer.choice(chunk) for chunk in chunks])
    fields['usage'] = answer.usage()
    if answer.body.return_token_ids and writer.is_chat:
      fields['prompt_token_ids'] = answer.prompts[0]
    return fields

  async def _events(
      self, answer: service_lib.Answer, writer: '_Writer'
  ) -> AsyncGenerator[str, None]:
    """Yields the answer's server-sent events."""
    try:
      async for chunk in self.service.chunks(answer):
        yield _event(writer.envelope([writer.choice(chunk, is_chunk=True)], is_chunk=True))
      if answer.body.stream_options.get('include_usage'):
        yield _event(writer.envelope([], is_chunk=True) | {'usage': answer.usage()})
      yield 'data: [DONE]\n\n'
    except http_server.RequestError as error:  # the status is sent already
      yield _event(self.error_body(error))

  async def _models(self, request: requests.Request) -> responses.Response:
    model = {'id': self.service.name, 'object': 'model', 'created': 0, 'owned_by': 'stppo-jax'}
    model['max_model_len'] = self.service.scheduler.max_total
    return responses.JSONResponse({'object': 'list', 'data': [model]})

  async def _pause(self, request: requests.Request) -> responses.Response:
    await self.read_json(request)
    mode = request.query_params.get('mode')
    if mode not in ('keep', 'wait'):
      raise http_server.RequestError(400, f'mode={mode!r}: use keep or wait', param='mode')
    await _result(self.service.scheduler.pause(drains=mode == 'wait'))
    return responses.JSONResponse({'status': 'paused'})

  async def _resume(self, request: requests.Request) -> responses.Response:
    await self.read_json(request)
    await _result(self.service.scheduler.resume())
    return responses.JSONResponse({'status': 'resumed'})

  async def _reset_prefix_cache(self, request: requests.Request) -> responses.Response:
    await self.read_json(request)
    await _result(self.service.scheduler.forget_contexts())
    return responses.JSONResponse({'success': True})

  async def _collective_rpc(self, request: requests.Request) -> responses.Response:
    body = CollectiveRpcBody.model_validate(await self.read_json(request))
    await _result(self.service.scheduler.reload(body.kwargs.weights_path))
    return responses.JSONResponse({'results': [None]})

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

  def envelope(self, choices: list[dict], is_chunk: bool = False) -> dict[str, Any]:
    """Returns the fields around the choices."""
    fields = self._head | {'choices': choices}
    if is_chunk and self.is_chat:
      fields['object'] = 'chat.completion.chunk'
    return fields

  def choice(self, chunk: service_lib.Chunk, is_chunk: bool = False) -> dict[str, Any]:
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


async def _result(call: futures.Future[None]) -> None:
  """Waits for a call of the scheduler."""
  try:
    await asyncio.wrap_future(call)
  except UserError as error:
    raise http_server.RequestError(400, str(error)) from None
  except scheduler_lib.Busy as error:
    raise http_server.RequestError(503, str(error)) from None


def _event(fields: dict[str, Any]) -> str:
  return f'data: {json.dumps(fields)}\n\n'


def _call(call: tool_calls.Call) -> dict[str, Any]:
  function = {'name': call.name, 'arguments': json.dumps(call.arguments, ensure_ascii=False)}
  return {'id': f'call_{uuid.uuid4().hex[:24]}', 'type': 'function', 'function': function}
