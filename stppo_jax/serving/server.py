"""The gateway over HTTP: OpenAI's interface to a model, and to the sessions of a run.

  POST /v1/chat/completions   POST /v1/completions   GET /v1/models
  POST /v1/responses          (OpenAI's newer interface, see responses.py)
  POST /v1/messages           POST /v1/messages/count_tokens (Anthropic's, see messages.py)
  GET /health                 {"status": "ok"}; 503 while it stops
  GET /metrics                Prometheus format
  /s/SESSION/v1/..            the same within a session
  POST /s/SESSION/reward      {"reward": 1.0, "turn": 2, "metrics": {..}}; no turn: of the episode
                              {"reward": 1.0, "session": ID}: of an agent, see `_client_agent`

With `serve.weights_folder` a trainer controls the server as it controls vLLM:
  POST /pause?mode=keep       stops sampling; with mode=wait the requests in progress end first
  POST /collective_rpc        {"method": "reload_weights", "kwargs": {"weights_path": FOLDER}}
  POST /reset_prefix_cache    computes all contexts again, as a reload does
  POST /resume                ends a pause
  POST /update_weight_version {"new_version": NAME}; GET /weight_info tells the name

A request without `stop` and `max_tokens` ends as a turn of the run, see `stop_strings.TurnEnd`.
In a session it ends at the eos token or at the limit of the session.
Log-probs are the model's own, see `serve.logprobs_mode`. In a session they are those of the
distribution that was drawn from.
Errors are OpenAI's: {"error": {"message", "type", "param", "code"}}. It needs the extra `serve`.
"""

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import functools
import re
from typing import Annotated
from typing import Any
from typing import Literal

from prometheus_client import core
import pydantic
from starlette import exceptions
from starlette import requests
from starlette import responses
from starlette import routing

from stppo_jax.net import http_server
from stppo_jax.net.http_server import Json
from stppo_jax.serving import answers
from stppo_jax.serving import api
from stppo_jax.serving import messages
from stppo_jax.serving import responses as responses_lib
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import service as service_lib
from stppo_jax.serving import sessions
from stppo_jax.types import UserError

_POLL_S = 0.01
_Writer = api.TextWriter | messages.MessagesWriter | responses_lib.ResponsesWriter
_MAX_AGENT_ID = 256  # characters
_MetricName = Annotated[str, pydantic.Field(pattern=r'^\w{1,40}$')]


class RewardBody(http_server.Body):
  """A reward of a turn, of an agent or of the episode."""

  reward: float
  turn: int | None = None
  session: http_server.Text | None = None  # the agent's X-Session-Id
  metrics: Annotated[dict[_MetricName, float], pydantic.Field(max_length=64)] | None = None


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


class GatewayApp(http_server.HttpApp):
  """A service as an ASGI application."""

  name = 'gateway'
  how_to_allow = 'use localhost, or allow the name with --config.serve.hosts'
  statuses = {
      sessions.Closed: 404,
      scheduler_lib.QueueFull: 429,
      scheduler_lib.Busy: 503,
      UserError: 400,
  }

  def __init__(
      self, service: service_lib.Service, limits: http_server.ServerLimits, api_key: str = ''
  ):
    """Without an `api_key` the server accepts any client."""
    routes = [
        routing.Route('/', self._greet),  # Claude Code sends HEAD before its first request
        routing.Route('/s/{session}', self._greet),
        self.post('/s/{session}/reward', RewardBody.model_validate, self._reward),
    ]
    chat = functools.partial(self._complete, api.ChatWriter)
    text = functools.partial(self._complete, api.TextWriter)
    anthropic = functools.partial(self._complete, messages.MessagesWriter)
    reader = responses_lib.Reader()
    write_response = functools.partial(responses_lib.ResponsesWriter, reader.keep)
    stateless = functools.partial(self._complete, write_response)
    for prefix in ('/v1', '/s/{session}/v1'):
      routes += [
          routing.Route(f'{prefix}/models', self._models),
          routing.Route(f'{prefix}/models/{{name:path}}', self._model),
          self.post(f'{prefix}/chat/completions', api.ChatBody.model_validate, chat),
          self.post(f'{prefix}/completions', api.TextBody.model_validate, text),
          self.post(f'{prefix}/responses', reader.read, stateless),
          self.post(f'{prefix}/messages', messages.read, anthropic),
          self.post(f'{prefix}/messages/count_tokens', messages.read_to_count, self._count_tokens),
      ]
    if service.scheduler.can_reload:
      routes += [
          self.post('/pause', _read_nothing, self._pause),
          self.post('/resume', _read_nothing, self._resume),
          self.post('/reset_prefix_cache', _read_nothing, self._forget),
          self.post('/collective_rpc', CollectiveRpcBody.model_validate, self._reload),
          self.post('/update_weight_version', WeightVersionBody.model_validate, self._name_weights),
          routing.Route('/weight_info', self._weight_info),
      ]
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
    session = re.match('/s/([^/]+)(?:/|$)', path)
    if session:  # the id of a session is a key, as long as the session is open
      self.service.session(session[1])
    elif path != '/health':
      http_server.check_key(request.headers, self._api_key)

  def health(self) -> Json:
    if not self.service.scheduler.is_alive:
      return {'status': 'failed'}
    return super().health()

  def error_body(self, error: exceptions.HTTPException, path: str) -> Json:
    return messages.error_body(error) if '/v1/messages' in path else api.error_body(error)

  async def _complete(
      self,
      make_writer: Callable[..., _Writer],  # (model name, body, answer) ->
      request: requests.Request,
      body: service_lib.Body,
  ) -> responses.Response | Json:
    """Answers a request in the form of a writer."""
    session = self._session(request)
    agent = sessions.NO_AGENT if session is None else _client_agent(request.headers)
    answer = await self.service.begin(body, session, agent)
    writer = make_writer(self.service.settings.name, body, answer)
    if body.stream:
      return _EventStream(answer, writer.events())
    try:
      return await writer.whole()
    finally:
      answer.close()

  async def _count_tokens(self, request: requests.Request, body: api.ChatBody) -> Json:
    num_tokens = await self.service.count_tokens(body, self._session(request))
    return {'input_tokens': num_tokens}

  def _session(self, request: requests.Request) -> sessions.Session | None:
    name = request.path_params.get('session')
    return self.service.session(name) if name else None

  async def _greet(self, request: requests.Request) -> responses.Response:
    return responses.JSONResponse(self.health())

  async def _models(self, request: requests.Request) -> responses.Response:
    return responses.JSONResponse({'object': 'list', 'data': [self._model_fields()]})

  async def _model(self, request: requests.Request) -> responses.Response:
    """Answers for a name: in a session, where any name is accepted, or the model's own."""
    name = request.path_params['name']
    self.service.check_model(name, self._session(request))
    return responses.JSONResponse(self._model_fields() | {'id': name})

  def _model_fields(self) -> Json:
    return {
        'id': self.service.settings.name,
        'object': 'model',
        'created': 0,
        'owned_by': 'stppo-jax',
        'max_model_len': self.service.scheduler.max_total,
    }

  async def _reward(self, request: requests.Request, body: RewardBody) -> Json:
    session = self.service.session(request.path_params['session'])
    session.reward(body.reward, body.turn, body.metrics, body.session)
    return {}

  async def _pause(self, request: requests.Request, unused_body: None) -> Json:
    mode = request.query_params.get('mode')
    if mode not in ('keep', 'wait'):
      raise http_server.RequestError(400, f'mode={mode!r}: use keep or wait', param='mode')
    await self._control('pause', mode == 'wait')
    if mode == 'wait':
      await self._wait_for_running()
    return {'status': 'paused'}

  async def _wait_for_running(self) -> None:
    """Waits until no request is in progress."""
    scheduler = self.service.scheduler
    while scheduler.running:
      if not scheduler.drains:
        raise http_server.RequestError(409, 'another client has ended this pause')
      await asyncio.sleep(_POLL_S)

  async def _resume(self, *unused: Any) -> Json:
    await self._control('resume')
    return {'status': 'resumed'}

  async def _forget(self, *unused: Any) -> Json:
    await self._control('forget')
    return {'success': True}

  async def _reload(self, request: requests.Request, body: CollectiveRpcBody) -> Json:
    await self._control('reload', body.kwargs.weights_path)
    return {'results': [None]}

  async def _control(self, name: str, *arguments: Any) -> None:
    """Waits until the scheduler has done something. It does it even if the client leaves."""
    done = self.service.scheduler.control(name, *arguments)
    await asyncio.shield(asyncio.wrap_future(done))

  async def _name_weights(self, request: requests.Request, body: WeightVersionBody) -> Json:
    self._weight_version = body.new_version
    return {'success': True}

  async def _weight_info(self, request: requests.Request) -> responses.Response:
    return responses.JSONResponse({'weight_version': self._weight_version})


class _EventStream(responses.StreamingResponse):
  """A stream that cancels its answer when the client leaves."""

  def __init__(self, answer: answers.Answer, events: AsyncGenerator[str, None]):
    headers = {'Cache-Control': 'no-cache'}
    super().__init__(events, headers=headers, media_type='text/event-stream')
    self._answer = answer

  async def __call__(self, scope, receive, send) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:
      self._answer.close()


def _client_agent(headers: Mapping[str, str]) -> sessions.ClientAgent:
  """Returns the agent that sends a request. RequestError: its id is too long.

  OpenCode's X-Session-Id and X-Parent-Session-Id count first. Claude Code has one session for all
  agents of a program, and an additional id for each agent but the main one.
  """
  name = headers.get('x-session-id', '')
  parent = headers.get('x-parent-session-id', '')
  if not (name or parent):
    session = headers.get('x-claude-code-session-id', '')
    name = headers.get('x-claude-code-agent-id', '') or session
    if name != session:
      parent = headers.get('x-claude-code-parent-agent-id', '') or session
  for text in (name, parent):
    if len(text) > _MAX_AGENT_ID:
      message = f'an id of an agent has {len(text)} characters: use at most {_MAX_AGENT_ID}'
      raise http_server.RequestError(400, message)
  return sessions.ClientAgent(name, parent)


def _read_nothing(fields: Json) -> None:
  """Reads the body of a route without arguments."""
