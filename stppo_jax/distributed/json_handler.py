"""What the HTTP servers of the package share: a Tornado handler that answers in JSON."""

from collections.abc import Sequence
import ipaddress
import json
import socket
from typing import Any

from tornado import web

_MAX_DIGITS = 18  # of a Content-Length; Python refuses to read thousands
_LOOPBACK = ('localhost', '127.0.0.1', '::1')


def allowed_hosts(
    sockets: Sequence[socket.socket], host: str, names: Sequence[str]
) -> frozenset[str] | None:
  """Returns the hosts that a request may be addressed to; None: any.

  A page of another site can have its name resolved to 127.0.0.1 and then read the answers of a
  server on loopback (DNS rebinding). Such a server answers to loopback's own names only, to the
  `host` that it was bound to, and to further `names`, such as that of a proxy before it. A server
  that other machines reach has names that it cannot know.
  """
  addresses = [sock.getsockname()[0].partition('%')[0] for sock in sockets]
  if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
    return None
  return frozenset(name.lower() for name in (*_LOOPBACK, *addresses, host, *names))


class JsonHandler(web.RequestHandler):
  """Answers in JSON, errors included, and says when the connection closes."""

  quiet: tuple[type[Exception], ...] = (web.HTTPError,)  # a client's errors, which are not logged
  # Whether the body may be unread: an answer then ends the connection, since Tornado reads no more.
  # Under `web.stream_request_body` it is, until `prepare` is over.
  is_unread = False

  def error_body(self, status: int, error: Any) -> dict[str, Any]:
    """Returns the JSON of an error; `error` is an exception or None."""
    del status
    return {'error': getattr(error, 'log_message', None) or self._reason}

  def check_source(self) -> None:
    """Raises HTTPError for a request that a page of another site may have sent.

    Such a page can send a form or a text without being asked, but no JSON.
    """
    hosts = self.settings['allowed_hosts']
    name = self.request.host_name.strip('[]').rstrip('.')
    if hosts is not None and name not in hosts:
      raise web.HTTPError(
          403, f'the host {name[:80]!r} is not allowed: {self.settings["how_to_allow"]}'
      )
    kind = self.request.headers.get('Content-Type', '').partition(';')[0].strip().lower()
    if self.request.method == 'POST' and kind != 'application/json':
      raise web.HTTPError(415, 'send the header Content-Type: application/json')

  def content_length(self) -> int:
    """Returns the length of the body that the header promises; 0: it promises none."""
    text = self.request.headers.get('Content-Length', '0')
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
      raise web.HTTPError(400, 'Content-Length is no number of bytes')
    return int(text)

  def set_default_headers(self):
    self.clear_header('Server')
    self.set_header('Content-Type', 'application/json')

  def compute_etag(self):
    return None  # answers are not cached; the hash would cost time

  def write_error(self, status_code, **kwargs):
    body = self.error_body(status_code, kwargs.get('exc_info', (None, None, None))[1])
    if self.is_unread:
      self.set_header('Connection', 'close')
    self.finish(json.dumps(body) + '\n')

  def log_exception(self, kind, value, traceback):
    if not isinstance(value, self.quiet):
      super().log_exception(kind, value, traceback)
