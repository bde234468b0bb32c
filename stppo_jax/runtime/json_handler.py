"""What the HTTP servers of the package share: a Tornado handler that answers in JSON."""

import json
from typing import Any

from tornado import web


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
