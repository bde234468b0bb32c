"""OpenEnv's environments: `env.kind='openenv:http://HOST:PORT'`, a server that plays the game.

This is a client of the server's WebSocket /ws, with one session per episode. The server answers
{"type": "reset" | "step", "data": ..} by {"type": "observation", "data": {"observation", "reward",
"done"}} or {"type": "error", ..}. Several addresses are separated by commas.

  OpenEnvEnv   any OpenEnv server. Actions and observations are JSON objects there and texts here.
  ServedEnv    `stppo env-server`: the episodes equal those of its class in this process

All servers together must allow as many sessions (max_concurrent_envs, --sessions) as a batch has
episodes, and as there are held-out tasks, because an evaluation starts all of them together.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import json
from typing import Any
import urllib.parse
import weakref

from absl import logging

from stppo_jax import types
from stppo_jax.envs import packages
from stppo_jax.envs import protocol
from stppo_jax.envs.adapters import openenv_servers

_SCHEMES = {'http': 'ws', 'https': 'wss', 'ws': 'ws', 'wss': 'wss'}
_MAX_MESSAGE_BYTES = 1 << 24
_CLOSE_S = 2.0  # limit of the end of a session
_NOT_UNDERSTOOD = ('INVALID_JSON', 'UNKNOWN_TYPE', 'VALIDATION_ERROR')  # codes for any reset
_ENDS = {'UserError': types.UserError, 'RunError': types.RunError}  # errors that end the run


def make(urls: str) -> Callable[..., object]:
  """Returns a function that makes environments on servers. UserError: a URL is no address."""
  kind = f'openenv:{urls}'
  given = f'config.env.kind={kind!r}'
  client = packages.import_package(given, 'websockets.sync.client', 'openenv')
  addresses = [url.strip() for url in urls.split(',')]
  if len(set(addresses)) < len(addresses):
    raise types.UserError(f'{given}: an address is there twice: give each one once')
  servers = openenv_servers.ServerAddresses(
      kind, [_server(client, given, url) for url in addresses]
  )
  description = servers.describe()
  if description is None:
    return packages.adapt(OpenEnvEnv, servers.start, kind, 'openenv')
  attributes = {'construct': staticmethod(servers.start), 'kind': kind, **description.attributes}
  if description.has_tasks:
    attributes['load_tasks'] = staticmethod(servers.load_tasks)
  return type('ServedEnv', (ServedEnv,), attributes)


def _server(client, given: str, url: str) -> openenv_servers.ServerAddress:
  try:
    parts = urllib.parse.urlsplit(url)
    is_address = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
  except ValueError:  # the port is none
    is_address = False
  if not is_address:
    raise types.UserError(
        f'{given}: an address is needed, as in openenv:http://127.0.0.1:8000, or several with '
        'commas between them'
    )
  path = parts.path.rstrip('/')
  scheme = _SCHEMES[parts.scheme]
  socket_url = parts._replace(scheme=scheme, path=f'{path}/ws').geturl()
  connect = functools.partial(
      client.connect, socket_url, max_size=_MAX_MESSAGE_BYTES, close_timeout=_CLOSE_S, proxy=None
  )
  page_url = parts._replace(scheme=scheme.replace('ws', 'http'), path=path, query='').geturl()
  return openenv_servers.ServerAddress(page_url, connect)


@dataclasses.dataclass(eq=False)
class SessionEnv(packages.PackageEnv):
  """An environment that plays in a session of a server."""

  uses_global_random = False

  task: types.Task
  timeout_s: float = 60.0  # the server's time for an answer
  _session: openenv_servers.ClientSession | None = dataclasses.field(default=None, init=False)

  def _start(self, data: Mapping[str, Any]) -> dict[str, Any]:
    """Opens a session and resets it. Raises errors as `ServerAddresses.start` does."""
    self._close()
    session, first = self.construct(data, self.timeout_s)
    self._session = session
    # A limit may have ended the episode. When the process ends, the operating system closes the
    # socket, because its thread no longer runs and `close` would wait for it.
    finalizer = weakref.finalize(self, session.close)
    finalizer.atexit = False
    return first

  def _request(self, data: Mapping[str, Any]) -> dict[str, Any]:
    """Sends an action. Raises ErrorAnswer, and any error if the session is lost."""
    if self._session is None:
      raise RuntimeError('step() needs reset() first: no episode is running')
    return self._session.request('step', data)

  def _lose(self, error: Exception) -> protocol.Step:
    """Ends a session whose server failed. Its episode counts as one with a failed search.

    So it is masked, and the batch is played again later if there are many.
    """
    self._close()
    logging.log_first_n(logging.WARNING, '%s raised %r in a step', 3, self.kind, error)
    info: protocol.StepInfo = {
        'action': 'error',
        'retrieval_failed': True,
        'metrics': {'environment_failed': 1.0},
    }
    return '', 0.0, True, True, info

  def _close(self) -> None:
    """Ends the session, if there is one."""
    session, self._session = self._session, None
    if session is not None:
      session.close()


@dataclasses.dataclass(eq=False)
class OpenEnvEnv(SessionEnv):
  """One session of any OpenEnv server. Metrics: the numbers of an observation."""

  attributes = staticmethod(packages.turn_attributes)

  action_field: str = ''  # takes the agent's text; '': the text is the whole action as JSON
  observation_field: str = ''  # the agent reads it; '': the only text, else all as JSON
  instructions: str = ''  # before the first observation
  frame: str = 'user'
  stop_strings: Sequence[str] = ()

  def reset(self, seed: int | None = None) -> tuple[str, protocol.ResetInfo]:
    """Starts a session and its episode.

    Raises ErrorAnswer if the environment's code fails, and RuntimeError if the episode is over
    before its first turn. Both mask this episode. UserError: no server answers, none has room, or
    the server does not understand a reset.
    """
    try:
      data = self._start({} if seed is None else {'seed': seed})
    except openenv_servers.ErrorAnswer as error:
      if error.code not in _NOT_UNDERSTOOD:
        raise
      raise types.UserError(
          f'config.env.kind={self.kind!r} starts no episode ({packages.describe(error)}): '
          'see the log of the server'
      ) from error
    if data.get('done'):
      self._close()
      raise RuntimeError('the episode is over at its reset')
    return self.instructions + self._text(data.get('observation')), {}

  def step(self, action: str) -> protocol.Step:
    """Sends an action. If the server rejects it, it is invalid, and the agent reads the reason."""
    message = self._message(action)
    if message is None:
      return _rejected('a JSON object is needed')
    try:
      data = self._request(message)
    except openenv_servers.ErrorAnswer as error:
      if error.code != 'VALIDATION_ERROR':
        return self._lose(error)
      return _rejected(f'{error} {json.dumps(error.data.get("errors"), default=str)}')
    except Exception as error:  # the network, the client or the server may raise anything
      return self._lose(error)
    observation = data.get('observation')
    is_over = bool(data.get('done'))
    metrics = packages.numbers(observation) if isinstance(observation, dict) else {}
    if is_over:
      self._close()
    reward = float(data.get('reward') or 0.0)
    info: protocol.StepInfo = {'action': 'move', 'metrics': metrics}
    return self._text(observation), reward, is_over, False, info

  def _message(self, action):
    """Returns the action as a JSON object, or None if its text is none."""
    if self.action_field:
      for stop_string in self.stop_strings:
        action = action.removesuffix(stop_string)
      return {self.action_field: action}
    try:
      message = json.loads(action)
    except (ValueError, RecursionError):
      return None
    return message if isinstance(message, dict) else None

  def _text(self, observation):
    if not isinstance(observation, dict):
      return '' if observation is None else str(observation)
    shown: Any = observation
    if self.observation_field:
      shown = observation.get(self.observation_field, '')
    else:
      texts = [value for value in observation.values() if isinstance(value, str)]
      others = [value for value in observation.values() if isinstance(value, list | dict) and value]
      if len(texts) == 1 and not others:  # otherwise the text may be a heading of the others
        shown = texts[0]
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


@dataclasses.dataclass(eq=False)
class ServedEnv(SessionEnv):
  """One session of `stppo env-server`, which gets the task and the seed."""

  def reset(self, seed: int | None = None) -> tuple[str, protocol.ResetInfo]:
    """Returns what the class's `reset` returns. Raises its UserError and RunError."""
    try:
      data = self._start({'seed': seed, 'task': dataclasses.asdict(self.task)})
    except openenv_servers.ErrorAnswer as error:
      return '', _info_of_error(error)
    observation = data['observation']
    return observation['text'], observation['info']

  def step(self, action: str) -> protocol.Step:
    """Returns what the class's `step` returns. Raises its UserError and RunError."""
    try:
      data = self._request({'text': action})
      observation = data['observation']
    except openenv_servers.ErrorAnswer as error:
      if 'info' not in error.data and 'ends' not in error.data:
        return self._lose(error)
      self._close()
      return '', 0.0, True, False, _info_of_error(error)
    except Exception as error:  # the network, the client or the server may raise anything
      return self._lose(error)
    if data['done']:
      self._close()
    return (
        observation['text'],
        data['reward'],
        observation['terminated'],
        observation['truncated'],
        observation['info'],
    )


def _info_of_error(error: openenv_servers.ErrorAnswer) -> Any:
  """Returns the `info` of stepping.py for an error in the code of a served class.

  Raises the error if it ends the run.
  """
  if 'info' in error.data:
    return error.data['info']
  if 'ends' in error.data:
    raise _ENDS[error.data['ends']](error.data['message']) from error
  details = json.dumps(error.data.get('errors', []), default=str)
  raise types.RunError(
      f'the environment server rejects a reset ({error} {details:.300})'
  ) from error


def _rejected(reason) -> protocol.Step:
  text = f'Error: the action is not accepted, {reason[:300]}.'
  return text, 0.0, False, False, {'action': 'invalid', 'metrics': {}}
