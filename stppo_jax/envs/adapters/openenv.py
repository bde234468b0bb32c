"""OpenEnv's environments: `env.kind='openenv:http://HOST:PORT'`, a server that plays the game.

A client of the server's WebSocket /ws, one session per episode: {"type": "reset" | "step", "data":
..} is answered by {"type": "observation", "data": {"observation", "reward", "done"}} or "error".
Actions and observations are JSON objects there and texts here, see `OpenEnvEnv`. The server must
allow as many sessions as there are episodes in a batch (its max_concurrent_envs).
"""

from collections.abc import Mapping
import contextlib
import functools
import json
from typing import Any
import urllib.parse

from stppo_jax import types
from stppo_jax.envs import protocol


def make(url: str) -> Any:
  """Returns what makes an environment on the server at `url`. UserError: it is no address."""
  kind = f'openenv:{url}'
  parts = urllib.parse.urlsplit(url)
  schemes = {'http': 'ws', 'https': 'wss', 'ws': 'ws', 'wss': 'wss'}
  if parts.scheme not in schemes or not parts.netloc:
    raise types.UserError(
        f'config.env.kind={kind!r}: an address is needed, as in openenv:http://127.0.0.1:8000'
    )
  client = protocol.import_peer(kind, 'websockets.sync.client', 'openenv')
  address = parts._replace(scheme=schemes[parts.scheme], path=parts.path.rstrip('/') + '/ws')
  connect = functools.partial(client.connect, address.geturl(), max_size=1 << 24, proxy=None)
  made: Any = functools.partial(OpenEnvEnv, connect, kind)
  made.uses_global_random = False
  made.attributes = attributes
  made.load_tasks = functools.partial(protocol.seed_tasks, 'openenv')
  return made


def attributes(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the frame and stop strings of these settings: by default turns of the chat template."""
  return {
      'frame': settings.get('frame', 'user'),
      'stop_strings': tuple(settings.get('stop_strings', ())),
  }


class OpenEnvEnv:
  """One session. Numbers of an observation are metrics too."""

  def __init__(
      self,
      connect: Any,
      kind: str,
      task: types.Task,
      action_field: str = '',  # of the action, takes the agent's text; '': the text is the action
      observation_field: str = '',  # is what the agent reads; '': the only text, else all as JSON
      instructions: str = '',  # before the first observation
      timeout_s: float = 60.0,  # of an answer of the server
      frame: str = 'user',
      stop_strings: tuple[str, ...] = (),
  ):
    del task
    self.frame, self.stop_strings = frame, tuple(stop_strings)
    self._connect, self._kind, self._timeout_s = connect, kind, timeout_s
    self._action_field, self._observation_field = action_field, observation_field
    self._instructions = instructions
    self._session: Any = None

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Starts a session and its episode. UserError: the server is not there, or has no room."""
    self._close()
    try:
      self._session = self._connect(open_timeout=self._timeout_s)
      data = self._ask('reset', {} if seed is None else {'seed': seed})
    except Exception as error:  # of the network, the client or the server
      self._close()
      raise types.UserError(
          f'config.env.kind={self._kind!r} starts no episode ({type(error).__name__}: '
          f'{" ".join(str(error).split())[:200]}): start the server, with max_concurrent_envs '
          'of at least the episodes of a batch'
      ) from error
    return self._instructions + self._text(data.get('observation')), {}

  def step(self, action: str) -> protocol.Step:
    """Sends an action. One that the server does not accept is invalid; the agent reads why."""
    message = self._action(action)
    if message is None:
      return self._refused('a JSON object is needed')
    try:
      data = self._ask('step', message)
    except _RefusedError as error:
      return self._refused(str(error))
    except Exception as error:  # of the network, the client or the server
      self._close()
      return protocol.failed_step(error, {})
    observation, done = data.get('observation'), bool(data.get('done'))
    metrics = protocol.numbers(observation) if isinstance(observation, dict) else {}
    if done:
      self._close()
    info = {'action': 'move', 'metrics': metrics}
    return self._text(observation), float(data.get('reward') or 0.0), done, False, info

  def _refused(self, reason):
    text = f'Error: the action is not accepted, {reason[:300]}.'
    return text, 0.0, False, False, {'action': 'invalid', 'metrics': {}}

  def _action(self, text):
    if self._action_field:
      for end in self.stop_strings:
        text = text.removesuffix(end)
      return {self._action_field: text}
    try:
      found = json.loads(text)
    except (ValueError, RecursionError):
      return None
    return found if isinstance(found, dict) else None

  def _ask(self, kind, data) -> dict[str, Any]:
    self._session.send(json.dumps({'type': kind, 'data': data}))
    answer = json.loads(self._session.recv(timeout=self._timeout_s))
    data = answer.get('data') or {}
    if answer.get('type') == 'observation':
      return data
    reason = f'{data.get("code")}: {data.get("message")}'
    if data.get('code') == 'VALIDATION_ERROR':
      raise _RefusedError(f'{reason} {json.dumps(data.get("errors"), default=str)}')
    raise RuntimeError(reason)

  def _text(self, observation):
    if not isinstance(observation, dict):
      return '' if observation is None else str(observation)
    if self._observation_field:
      return str(observation.get(self._observation_field, ''))
    texts = [value for value in observation.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)

  def _close(self):
    session, self._session = self._session, None
    if session is not None:
      with contextlib.suppress(Exception):  # it is over in any case
        session.send(json.dumps({'type': 'close'}))
        session.close()

  def __del__(self):
    if getattr(self, '_session', None) is not None:  # an episode that a limit ended
      self._close()


class _RefusedError(Exception):
  """The server did not accept an action."""
