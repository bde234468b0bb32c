"""An HTTP client with retries: a JSON body in, the bytes of the answer out."""

from collections.abc import Callable
import contextlib
import dataclasses
import email.utils
import math
import random
import time
from typing import Any
from typing import TypeVar

import requests

from stppo_jax.net import calls
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal

Result = TypeVar('Result')
# Statuses worth another attempt.
_AGAIN = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))
_MAX_WAIT_S = 60.0
_MAX_ASKED_S = 600.0  # by a server
_JITTER = random.Random()  # not the global one, from which environments may draw
_CHUNK_BYTES = 1024  # small, because the deadline is checked between chunks
_TEXT_LENGTH = 300  # characters of an error's answer
_POLL_S = 1.0  # between two looks at the signal
_MARGIN_S = 0.1  # the time limit of the socket comes first


class Temporary(Exception):
  """A failure that another attempt may not have. `wait_s` is the wait that the server asks for."""

  def __init__(
      self,
      message: str,
      wait_s: float = 0.0,
      is_silent: bool = False,
      is_busy: bool = False,
      text: str = '',
  ):
    super().__init__(message)
    self.text = text  # the beginning of the answer
    self.wait_s = wait_s
    self.is_busy = is_busy  # the server has too many requests, and works
    self.is_silent = is_silent  # there was no answer at all


class Rejected(Exception):
  """An answer with a status that another attempt would have too."""

  def __init__(self, status: int, text: str):
    super().__init__(f'HTTP status {status}')
    self.status = status
    self.text = text


@dataclasses.dataclass(frozen=True)
class ClientLimits:
  """Limits of one attempt."""

  connect_s: float
  total_s: float  # up to the last byte of the answer
  max_bytes: int = 64 << 20  # size of an answer


def send(session: requests.Session, url: str, body: Any, limits: ClientLimits) -> bytes:
  """Sends one request, a GET if `body` is None. Returns the answer; raises Temporary, Rejected."""
  method = 'GET' if body is None else 'POST'
  deadline = time.monotonic() + limits.total_s
  timeout = (min(limits.connect_s, limits.total_s), limits.total_s)
  try:
    with session.request(
        method, url, json=body, stream=True, allow_redirects=False, timeout=timeout
    ) as response:
      if response.status_code in _AGAIN:
        wait_s = _parse_seconds(response.headers.get('Retry-After'))
        is_busy = response.status_code == 429
        text = _read_beginning(response)
        raise Temporary(f'HTTP status {response.status_code}', wait_s, is_busy=is_busy, text=text)
      answer = bytearray()
      for chunk in response.iter_content(_CHUNK_BYTES):
        answer += chunk
        if len(answer) > limits.max_bytes:
          raise Rejected(response.status_code, f'over {limits.max_bytes} bytes')
        if time.monotonic() > deadline:
          raise Temporary(f'no complete answer within {limits.total_s} s', is_silent=True)
      if response.status_code != 200:
        raise Rejected(response.status_code, answer.decode('utf-8', 'replace'))
      return bytes(answer)
  except (requests.RequestException, OSError) as error:
    raise Temporary(type(error).__name__, is_silent=True) from error


class Connection:
  """A server that takes and returns JSON: its address, its key, and sockets that stay open.

  Threads may share it.

  Args:
    address: the beginning of each URL.
    limits: of each attempt.
    max_sockets: that stay open.
    api_key: is sent as a bearer token. Empty: the server needs none.
    is_outside: whether the proxy settings of the environment apply. A server inside the cluster is
      not reached through a proxy.
  """

  def __init__(
      self,
      address: str,
      limits: ClientLimits,
      max_sockets: int,
      api_key: str = '',
      is_outside: bool = False,
  ):
    self.address = address
    self._limits = limits
    self._api_key = api_key
    self._session = requests.Session()
    self._session.trust_env = is_outside
    if api_key or is_outside:  # else that of the URL, if it has any
      self._session.auth = self._authorize
    # Otherwise a small body could decompress to a huge one.
    self._session.headers['Accept-Encoding'] = 'identity'
    adapter = requests.adapters.HTTPAdapter(pool_maxsize=max_sockets)
    self._session.mount('http://', adapter)
    self._session.mount('https://', adapter)

  def ask(
      self, path: str, body: object, stop_signal: StopSignal = NEVER, total_s: float | None = None
  ) -> bytes:
    """Sends one request, a GET if `body` is None, and returns the answer.

    Raises Temporary, also for an answer that takes longer than `total_s` (None: that of the
    limits), Rejected, and Stopped at the signal.
    """
    limits = self._limits
    if total_s is not None:
      limits = dataclasses.replace(limits, total_s=total_s)
    url = self.address + path
    call = lambda: send(self._session, url, body, limits)
    return call_within(call, limits.total_s + _MARGIN_S, stop_signal)

  def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Sets the key. As a function, because requests replaces a header by an entry of ~/.netrc."""
    if self._api_key:
      request.headers['Authorization'] = f'Bearer {self._api_key}'
    return request


def call_within(call: Callable[[], Result], total_s: float, stop_signal: StopSignal) -> Result:
  """Returns the result of `call`. Raises Temporary after `total_s`, and Stopped.

  A socket's time-out restarts with every byte, so a slow server could hold a plain call forever.
  """
  results: list[Result] = []
  thread = calls.ThreadedCall(lambda: results.append(call()))
  deadline = time.monotonic() + total_s
  while not thread.wait(max(0.0, min(deadline - time.monotonic(), _POLL_S))):
    stop_signal.raise_if_set()
    if time.monotonic() > deadline:
      raise Temporary(f'no complete answer within {total_s} s', is_silent=True)
  return results[0]


def with_retries(
    attempt: Callable[[int], Result],
    retries: int,
    backoff_s: float,
    sleep: Callable[[float], object] = time.sleep,
) -> Result:
  """Calls attempt(number), number = 0, 1, .., until it does not raise Temporary.

  The wait before the next attempt is backoff_s * 2**number * jitter, jitter in [0.5, 1.5), at most
  a minute, or what the server asks for, at most ten. Raises the last Temporary.
  """
  for number in range(retries + 1):
    try:
      return attempt(number)
    except Temporary as error:
      if number == retries:
        raise
      wait_s = min(backoff_s * 2**number * _JITTER.uniform(0.5, 1.5), _MAX_WAIT_S)
      if error.wait_s:
        wait_s = min(error.wait_s, _MAX_ASKED_S)
      sleep(wait_s)
  raise AssertionError('unreachable')


def _read_beginning(response: requests.Response) -> str:
  """Returns the beginning of an answer as one line; an empty text if it cannot be read."""
  try:
    beginning = next(response.iter_content(_CHUNK_BYTES), b'')
  except (requests.RequestException, OSError):
    return ''
  return ' '.join(beginning.decode('utf-8', 'replace').split())[:_TEXT_LENGTH]


def _parse_seconds(header: str | None) -> float:
  """Returns the seconds of a Retry-After header, a number or a date; 0 without one."""
  header = header or ''
  with contextlib.suppress(ValueError):
    seconds = float(header or 0)
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
  with contextlib.suppress(ValueError):
    date = email.utils.parsedate_to_datetime(header)
    return max(0.0, date.timestamp() - time.time())
  return 0.0
