"""Tells errors of a network or a busy server from other errors, for all client libraries.

Statuses and names of classes decide, so that no library is imported.
"""

import errno
import re
import socket

_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        'ECONNREFUSED ECONNRESET ECONNABORTED EPIPE ETIMEDOUT ENETUNREACH EHOSTUNREACH ENETDOWN '
        'EHOSTDOWN ENETRESET EADDRNOTAVAIL'
    ).split()
    if hasattr(errno, name)
)
_STATUSES = frozenset((408, 425, 429))  # and all from 500 on
_WORD = re.compile(r'[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+')
# Whole words of the name of a class. `Connect`, `Network` and `Transport` stand at its end, because
# they also begin names of graphs and games, such as those of NetworkX.
_NAMES = re.compile(
    r'\b(Connection|Connector|Time ?out|Timed out|(Host|Network|Server|Service) Unreachable|'
    r'Unavailable|Rate ?limit(ed)?|Overloaded|Internal Server|Server Error|Throttl(ed|er|ing)|'
    r'Remote Protocol|Bad Status Line|Incomplete Read|Max Retr(y|ies)|Chunked Encoding|'
    r'Deadline Exceeded|Auto Reconnect|Server Disconnected|'
    r'(Connect|Network|Transport)( (Error|Exception|Failure))?$)\b',
    re.IGNORECASE,
)
# Mistakes of the caller, whose base class has another name.
_MISTAKES = frozenset(('UnsupportedProtocol', 'LocalProtocolError', 'SSLCertVerificationError'))
_LOCAL_MODULES = frozenset(('subprocess', 'queue', 'sqlite3'))
_GRPC_CODES = frozenset(('UNAVAILABLE', 'DEADLINE_EXCEEDED', 'RESOURCE_EXHAUSTED', 'ABORTED'))


def is_outage(error: BaseException) -> bool:
  """Returns whether the same call may succeed later: no connection, a time-out, a busy server.

  Looks at the error, then at the errors that it was raised from. The first one that is known
  decides: HTTP status 503 is an outage, and 401 is none.
  """
  errors: list[BaseException | None] = [error]
  seen: set[int] = set()
  while errors:
    current = errors.pop(0)
    if current is None or id(current) in seen:
      continue
    seen.add(id(current))
    known = _known(current)
    if known is not None:
      return known
    errors += getattr(current, 'exceptions', ())  # those of a group
    errors += [getattr(current, 'reason', None), current.__cause__]
    if not current.__suppress_context__:
      errors.append(current.__context__)
    errors = [e for e in errors if isinstance(e, BaseException)]
  return False


def _known(error: BaseException) -> bool | None:
  """Returns whether one error is an outage; None if it does not tell."""
  status = _status(error)
  if status is not None:
    return status in _STATUSES or status >= 500
  kinds = type(error).__mro__
  names = [kind.__name__ for kind in kinds]
  if _MISTAKES.intersection(names):
    return False
  if _LOCAL_MODULES.intersection(kind.__module__ for kind in kinds):
    return None
  if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
    return True
  if isinstance(error, OSError) and error.errno in _ERRNOS:
    return True
  phrases = [' '.join(_WORD.findall(name)) for name in names]
  return True if any(map(_NAMES.search, phrases)) else None


def _status(error: object) -> int | None:
  """Returns the HTTP status of an error of any client library; None without one."""
  response = getattr(error, 'response', None)
  if isinstance(response, dict):  # botocore
    response_status = response.get('ResponseMetadata', {}).get('HTTPStatusCode')
  else:
    response_status = getattr(response, 'status_code', getattr(response, 'status', None))
  values = [getattr(error, name, None) for name in ('status_code', 'status', 'code', 'http_status')]
  for value in (response_status, *values):
    if type(value) is int and 100 <= value < 600:
      return value
  code = values[2]
  if callable(code) and hasattr(error, 'details'):  # gRPC
    name = getattr(code(), 'name', '')
    return 503 if name in _GRPC_CODES else 400
  return None
