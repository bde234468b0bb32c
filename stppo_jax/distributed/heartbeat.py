"""Ends all processes of a run, with one line each, when one of them dies.

Each process holds a TCP connection to process 0. When a process dies, its connections close and the
other end notices immediately. When a machine or its network fails, the other end notices after
SILENCE_S. JAX notices as well, but later and by abort() with a stack trace, and its callback cannot
be set from Python (jaxlib 0.10.2: std::bad_cast).
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any

from absl import logging

CONNECT_S = 10.0  # time limit for a connection to process 0
SILENCE_S = 20  # an unreachable machine counts as dead after this time
KEEPALIVE_S = 5  # between two signs of life on an idle connection
GRACE_S = 2.0  # this process may report its own error after another one failed
CLOSING_S = 5.0  # process 0 exits last, because JAX aborts the others when it exits


class Heartbeat:
  """One end of the connections: `listen` on process 0, `join` on others, then `finish` or `end`."""

  def __init__(self) -> None:
    self._connections: dict[int, socket.socket] = {}
    self._ending = threading.Lock()  # acquired once, by the first call that ends this process

  def listen(self, num_processes: int) -> dict[str, Any]:
    """Accepts the other processes in the background; returns the port and the token to `join`."""
    server = socket.create_server(('', 0), backlog=num_processes)
    token = secrets.token_hex(16)
    _start_thread(self._accept, server, token, num_processes)
    return {'port': server.getsockname()[1], 'token': token}

  def join(self, host: str, port: int, token: str, process: int) -> None:
    """Connects this process to process 0."""
    try:
      connection = socket.create_connection((host, port), timeout=CONNECT_S)
      _send(connection, [token, process])
      lines = connection.makefile('r', encoding='utf-8')
      if lines.readline():  # process 0 answers; a stranger at this address would not
        self._watch_in_background(connection, lines, peer=0)
        return
    except OSError as error:
      logging.info('%s', error)
    logging.warning(
        'no connection to process 0 (%s, port %d): if a process dies, the others end later and '
        'with a stack trace',
        host,
        port,
    )

  def finish(self) -> None:
    """Tells the other processes that this one ends without an error."""
    self._send_to_all(None)

  def end(self, line: str, code: int, reason: str) -> None:
    """Prints `line`, sends the reason to the others and ends this process; only the first call."""
    self._ending.acquire()
    print(line, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    self._send_to_all(reason)
    is_process_0 = 0 not in self._connections
    deadline = time.monotonic() + CLOSING_S
    while is_process_0 and self._connections and time.monotonic() < deadline:
      time.sleep(0.02)
    os._exit(code)  # not sys.exit: JAX would wait for the dead processes

  def _accept(self, server, token, num_processes):
    while len(self._connections) < num_processes - 1:
      connection, _ = server.accept()
      connection.settimeout(CONNECT_S)
      lines = connection.makefile('r', encoding='utf-8')
      try:
        sent_token, peer = json.loads(lines.readline())
        if sent_token == token:
          _send(connection, 'welcome')
          self._watch_in_background(connection, lines, peer)
          continue
      except (OSError, ValueError, TypeError):
        pass  # a port scanner closes, is silent, or sends something else
      connection.close()
    server.close()

  def _watch_in_background(self, connection, lines, peer):
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, 'TCP_KEEPIDLE'):  # Linux
      tries = SILENCE_S // KEEPALIVE_S - 1
      connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
      connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
      connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, tries)
      connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
    self._connections[peer] = connection
    _start_thread(self._watch, lines, peer)

  def _watch(self, lines, peer):
    """Waits for the peer's last message, or for its connection to close without one."""
    reason = f'process {peer} died'
    try:
      if line := lines.readline():
        reason = json.loads(line)
        if reason is None:  # the peer ended without an error
          return
        time.sleep(GRACE_S)
    except (OSError, ValueError):
      pass  # the connection broke in the middle of a line: the peer died without a reason
    self._connections.pop(peer)
    program = os.path.basename(sys.argv[0])
    self.end(
        f'{program}: another process of this run is gone ({reason}): restart all of them with the '
        'same command, training resumes from its last checkpoint',
        code=1,
        reason=reason,
    )

  def _send_to_all(self, message):
    for connection in list(self._connections.values()):
      try:
        _send(connection, message)
      except OSError:
        pass  # this peer is gone as well, and the next ones still need the message


def _send(connection, message):
  connection.sendall((json.dumps(message) + '\n').encode('utf-8'))


def _start_thread(function, *args):
  threading.Thread(target=function, args=args, daemon=True, name='heartbeat').start()
