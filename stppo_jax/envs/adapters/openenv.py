"""OpenEnv's environments: `env.kind='openenv:http://HOST:PORT'`, a server that plays the game.

This is a client of the server's WebSocket /ws, with one session per episode. The server answers
{"type": "reset" | "step", "data": ..} by {"type": "observation", "data": {"observation", "reward",
"done"}} or {"type": "error", ..}. Actions and observations are JSON objects there and texts here,
see `OpenEnvEnv`. The server must allow as many sessions as a batch has episodes
(max_concurrent_envs).
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import json
from typing import Any
import urllib.parse

from absl import logging

from stppo_jax import types
from stppo_jax.envs import packages
from stppo_jax.envs import protocol

_SCHEMES = {'http': 'ws', 'https': 'wss', 'ws': 'ws', 'wss': 'wss'}
_MAX_MESSAGE_BYTES = 1 << 24


def make(url: str) -> Callable[..., object]:
  """Returns a function that makes environments on a server. UserError: `url` is no address."""
  kind = f'openenv:{url}'
  parts = urllib.parse.urlsplit(url)
  if parts.scheme not in _SCHEMES or not parts.netloc:
    raise types.UserError(
        f'config.env.kind={kind!r}: an address is needed, as in openenv:http://127.0.0.1:8000'
    )
  client = packages.import_package(f'config.env.kind={kind!r}', 'websockets.sync.client', 'openenv')
  path = parts.path.rstrip('/') + '/ws'
  address = parts._replace(scheme=_SCHEMES[parts.scheme], path=path).geturl()
  connect = functools.partial(client.connect, address, max_size=_MAX_MESSAGE_BYTES, proxy=None)
  return packages.adapt(OpenEnvEnv, connect, kind, 'openenv')


@dataclasses.dataclass(eq=False)
class OpenEnvEnv(packages.PackageEnv):
  """One session. Metrics: the numbers of an observation."""

  attributes = staticmethod(packages.turn_attributes)
  uses_global_random = False

  task: types.Task  # `reset` gets its seed
  action_field: str = ''  # takes the agent's text; '': the text is the whole action as JSON
  observation_field: str = ''  # the agent reads it; '': the only string, else all as JSON
  instructions: str = ''  # before the first observation
  timeout_s: float = 60.0  # the server's time for an answer
  frame: str = 'user'
  stop_strings: Sequence[str] = ()
  _session: Any = dataclasses.field(default=None, init=False)

  def reset(self, seed: int | None = None) -> tuple[str, protocol.ResetInfo]:
    """Starts a session and its episode. UserError: the server is missing, or has no room."""
    self._close()
    with packages.explain_errors(
        f'config.env.kind={self.kind!r} starts no episode',
        'start the server, with max_concurrent_envs of at least the episodes of a batch',
    ):
      self._session = self.construct(open_timeout=self.timeout_s)
      data = self._request('reset', {} if seed is None else {'seed': seed})
    return self.instructions + self._text(data.get('observation')), {}

  def step(self, action: str) -> protocol.Step:
    """Sends an action. If the server rejects it, it is invalid, and the agent reads the reason.

    If the server fails, the episode counts as one with a failed search: it is masked, and the batch
    is played again later if there are many.
    """
    message = self._message(action)
    if message is None:
      return _rejected('a JSON object is needed')
    try:
      data = self._request('step', message)
    except RejectedActionError as error:
      return _rejected(str(error))
    except Exception as error:  # the network, the client or the server may raise anything
      self._close()
      logging.log_first_n(logging.WARNING, '%s raised %r in a step', 3, self.kind, error)
      info: protocol.StepInfo = {
          'action': 'error',
          'retrieval_failed': True,
          'metrics': {'environment_failed': 1.0},
      }
      return '', 0.0, True, True, info
    observation = data.get('observation')
    is_over = bool(data.get('done'))
    metrics = packages.numbers(observation) if isinstance(observation, dict) else {}
    if is_over:
      self._close()
    reward = float(data.get('reward') or 0.0)
    info = {'action': 'move', 'metrics': metrics}
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

  def _request(self, kind, data) -> dict[str, Any]:
    self._session.send(json.dumps({'type': kind, 'data': data}))
    answer = json.loads(self._session.recv(timeout=self.timeout_s))
    data = answer.get('data') or {}
    if answer.get('type') == 'observation':
      return data
    reason = f'{data.get("code")}: {data.get("message")}'
    if data.get('code') == 'VALIDATION_ERROR':
      raise RejectedActionError(f'{reason} {json.dumps(data.get("errors"), default=str)}')
    raise RuntimeError(reason)

  def _text(self, observation):
    if not isinstance(observation, dict):
      return '' if observation is None else str(observation)
    if self.observation_field:
      return str(observation.get(self.observation_field, ''))
    texts = [value for value in observation.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)

  def _close(self):
    """Ends the session, if there is one."""
    if self._session is not None:
      with contextlib.suppress(Exception), self._session:  # the session is over in any case
        self._session.send(json.dumps({'type': 'close'}))
    self._session = None

  def __del__(self):
    self._close()  # a limit may have ended the episode


class RejectedActionError(Exception):
  """The server did not accept an action."""


def _rejected(reason) -> protocol.Step:
  text = f'Error: the action is not accepted, {reason[:300]}.'
  return text, 0.0, False, False, {'action': 'invalid', 'metrics': {}}
