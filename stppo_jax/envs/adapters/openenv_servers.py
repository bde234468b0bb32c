"""The addresses of OpenEnv servers, and the sessions of this process at each.

An episode starts at the address with the fewest sessions. An address that does not answer is lost:
other addresses get its episodes, and one episode tries it again after a wait that doubles. While
all addresses are full, an episode waits for a session to end. A session whose call is abandoned
counts on its server until the call returns.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
import threading
import time
from typing import Any

from absl import logging
import requests

from stppo_jax import types
from stppo_jax.envs import guard
from stppo_jax.envs import packages
from stppo_jax.envs import served
from stppo_jax.net import api_keys

_OPEN_S = 10.0  # until a session is open
_DESCRIBE_S = (5.0, 60.0)  # time limits of a GET: until connected, and without a byte
_FIRST_RETRY_S = 1.0  # wait before a lost address is tried again; doubled after each failure
_LONGEST_RETRY_S = 30.0
_POLL_S = 0.25
_FULL = 'CAPACITY_REACHED'  # code of a server without room
_ADVICE = (
    'start the server, with as many sessions (max_concurrent_envs, --sessions) as the episodes of '
    'a batch or the held-out tasks, whichever are more'
)


class ErrorAnswer(Exception):
  """An error message of a server. `data` has its fields."""

  def __init__(self, data: Mapping[str, Any]):
    super().__init__(f'{data.get("code")}: {data.get("message")}')
    self.data = data
    self.code = data.get('code')


class ServerAddress:
  """One address. `ServerAddresses` guards its state."""

  def __init__(self, url: str, connect: Callable[..., Any]):
    self.url = url  # http://HOST:PORT/PATH without a slash at the end
    self.connect = connect  # opens a WebSocket
    self.num_sessions = 0
    self.retry_s = 0.0  # wait before it is tried again; 0: it is not lost
    self.retry_at = 0.0  # monotonic time

  def get(self, path: str, **params: str) -> requests.Response:
    """Returns the answer to a GET. Raises requests.RequestException."""
    with requests.Session() as session:
      session.trust_env = False  # no proxy, and no key of ~/.netrc
      url = self.url + path
      return session.get(
          url, params=params, headers=key_header(), timeout=_DESCRIBE_S, allow_redirects=False
      )


class ClientSession:
  """An open WebSocket. It counts for its server until it is closed."""

  def __init__(
      self,
      connection: contextlib.AbstractContextManager[Any],
      release: Callable[[], None],
      timeout_s: float,
  ):
    self._stack = contextlib.ExitStack()
    self._socket = self._stack.enter_context(connection)
    self.digest = self._socket.response.headers.get(served.HEADER, '')  # '': not env-server
    self._release = release
    self._timeout_s = timeout_s

  def request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data of the answer. Raises ErrorAnswer, and errors of the network."""
    message = json.dumps({'type': kind, 'data': data})
    error = None
    try:
      self._socket.send(message)
    except Exception as caught:  # a full server has sent its error and closed
      error = caught
    try:
      answer = json.loads(self._socket.recv(timeout=self._timeout_s))
    except Exception as caught:
      raise caught from error
    fields = answer.get('data') or {}
    if answer.get('type') == 'observation':
      return fields
    raise ErrorAnswer(fields)

  def close(self) -> None:
    """Ends the session. Further calls do nothing."""
    release, self._release = self._release, _do_nothing
    with contextlib.suppress(Exception), self._stack:  # the session is over in any case
      self._socket.send(json.dumps({'type': 'close'}))
    release()


class ServerAddresses:
  """The addresses of a run. Threads share it.

  Args:
    kind: the value of `config.env.kind`.
    servers: one per address.
  """

  def __init__(self, kind: str, servers: Sequence[ServerAddress]):
    self._kind = kind
    self._servers = servers
    # A garbage collection in the thread that holds it may end a session.
    self._lock = threading.RLock()
    self._digest = ''

  def describe(self) -> served.Description | None:
    """Returns the description of the class that `stppo env-server` plays.

    None: the first server that answers is another OpenEnv server, or none answers yet. UserError:
    the key is wrong.
    """
    for server in self._servers:
      try:
        answer = server.get(served.ENVIRONMENT_PATH)
        if answer.status_code == 200:
          description = served.Description.from_dict(answer.json())
          self._digest = description.digest
          return description
      except (requests.RequestException, TypeError, AttributeError):
        continue
      if answer.status_code in (401, 403):
        raise types.UserError(
            f'config.env.kind={self._kind!r}: {server.url} answers with HTTP status '
            f'{answer.status_code}: give its key in the environment variable OPENENV_API_KEY'
        )
      return None
    return None

  def load_tasks(self, split: str) -> list[types.Task]:
    """Returns the tasks of a split that the class of the servers has. UserError: it has none."""
    reasons = []
    for server in self._servers:
      try:
        answer = server.get(served.TASKS_PATH, split=split)
        if answer.status_code != 200:
          raise ValueError(answer.text[:200])
        return [served.read_task(fields) for fields in answer.json()]
      except (requests.RequestException, ValueError) as error:
        reasons.append(packages.describe(error))
    raise types.UserError(
        f'config.env.kind={self._kind!r} gives no tasks of the split {split!r} ({reasons[-1]}): '
        'start the server, or give another split'
    )

  def start(
      self, data: Mapping[str, Any], timeout_s: float
  ) -> tuple[ClientSession, dict[str, Any]]:
    """Opens a session with a reset; returns it with the first observation's message.

    Raises ErrorAnswer, and ConnectionError if the servers that are left have no room. UserError: no
    server answers within `timeout_s`, or none has room by then.
    """
    deadline = time.monotonic() + timeout_s
    reason = 'no address answers'
    while True:
      session_and_data, errors = self._start_once(data, timeout_s)
      if session_and_data is not None:
        return session_and_data
      if errors:
        reason = packages.describe(errors[-1])
      with self._lock:
        num_lost = sum(server.retry_s > 0 for server in self._servers)
      if num_lost < len(self._servers) and num_lost:
        raise ConnectionError(
            f'{num_lost} of {len(self._servers)} addresses do not answer, and the others have no '
            'room'
        )
      if time.monotonic() >= deadline:
        raise types.UserError(
            f'config.env.kind={self._kind!r} starts no episode within env.options.timeout_s='
            f'{timeout_s:g} ({reason}): {_ADVICE}'
        )
      if not num_lost:
        logging.log_every_n_seconds(
            logging.WARNING, 'all environment servers are full (%s): episodes wait', 60, reason
        )
      guard.pause(_POLL_S)

  def _start_once(self, data, timeout_s):
    """Tries each address that may answer. Returns ((session, data) or None, the errors)."""
    errors: list[Exception] = []
    tried: list[ServerAddress] = []
    while (server := self._pick(tried)) is not None:
      tried.append(server)
      try:
        started = self._open(server, data, timeout_s)
      except ErrorAnswer as error:
        self._find(server)
        if error.code != _FULL:
          raise
        errors.append(error)
      except types.UserError:
        raise
      except Exception as error:  # the network, the client or the server may raise anything
        self._lose(server, error)
        errors.append(error)
      else:
        self._find(server)
        return started, errors
    return None, errors

  def _open(self, server, data, timeout_s):
    release = lambda: self._release(server)
    try:
      connection = server.connect(
          open_timeout=min(timeout_s, _OPEN_S), additional_headers=key_header()
      )
      session = ClientSession(connection, release, timeout_s)
    except BaseException:
      release()
      raise
    try:
      if session.digest != self._digest:
        raise types.UserError(
            f'config.env.kind={self._kind!r}: {server.url} plays another environment, or with '
            'other settings, than the first address did when this process started: start the '
            'servers alike, and before the run'
        )
      return session, session.request('reset', data)
    except BaseException:
      session.close()
      raise

  def _pick(self, tried):
    """Returns the address with the fewest sessions and adds one to it; None if there is none."""
    now = time.monotonic()
    with self._lock:
      usable = [x for x in self._servers if x not in tried and x.retry_at <= now]
      if not usable:
        return None
      server = min(usable, key=lambda x: x.num_sessions)
      server.num_sessions += 1
      if server.retry_s:  # no other episode tries it meanwhile
        server.retry_s = min(2 * server.retry_s, _LONGEST_RETRY_S)
        server.retry_at = now + server.retry_s
      return server

  def _release(self, server):
    with self._lock:
      server.num_sessions -= 1

  def _lose(self, server, error):
    with self._lock:
      is_new = not server.retry_s
      if is_new:
        server.retry_s = _FIRST_RETRY_S
        server.retry_at = time.monotonic() + _FIRST_RETRY_S
    if is_new:
      reason = packages.describe(error)
      logging.warning(
          'the environment server %s does not answer (%s). It is tried again', server.url, reason
      )

  def _find(self, server):
    with self._lock:
      was_lost = server.retry_s > 0
      server.retry_s = 0.0
      server.retry_at = 0.0
    if was_lost:
      logging.info('the environment server %s answers again', server.url)


def key_header() -> dict[str, str]:
  """Returns the header with the key of the environment variable OPENENV_API_KEY, if it is set."""
  api_key = api_keys.read('OPENENV_API_KEY')
  return {'Authorization': f'Bearer {api_key}'} if api_key else {}


def _do_nothing() -> None:
  pass
