"""Ends all processes of a run, with one line each, when one of them dies.

Each process holds a TCP connection to process 0. When a process dies, its connections close and the
other end notices immediately; when a machine or its network fails, it notices after SILENCE_S.
JAX notices as well, but later and by abort() with a stack trace. Its callback cannot be set from
Python (jaxlib 0.10.2: std::bad_cast). It remains as a second line of defence.
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

CONNECT_S = 10.0  # to connect to process 0 by one of its names
SILENCE_S = 20  # after which an unreachable machine counts as dead
GRACE_S = 2.0  # for this process to report its own error after another one failed
CLOSING_S = 5.0  # process 0 exits last, because JAX aborts the others when it exits


class Lifeline:
  """One end of the connections: `listen` on process 0, `join` on others, then `finish` or `end`."""

  def __init__(self):
    self._connections: dict[int, socket.socket] = {}
    self._ending = threading.Lock()  # acquired once, by the first call that ends this process

  def listen(self, num_processes: int) -> dict[str, Any]:
    """Accepts the other processes in the background; returns the address to `join`."""
    server, token = socket.create_server(('', 0), backlog=num_processes), secrets.token_hex(16)
    _start_thread(self._accept, server, token, num_processes)
    return {'hosts': _own_names(), 'port': server.getsockname()[1], 'token': token}

  def join(self, address: dict[str, Any], process: int, coordinator: str = '') -> None:
    """Connects to process 0, at `coordinator` or at the names that its address lists."""
    for host in [coordinator] * bool(coordinator) + address['hosts']:
      try:
        connection = socket.create_connection((host, address['port']), timeout=CONNECT_S)
        _send(connection, [address['token'], process])
        lines = connection.makefile('r', encoding='utf-8')
        if lines.readline():  # the welcome, which another machine of that name would not send
          self._keep(connection, lines, peer=0)
          return
      except OSError:  # not reachable by this name: the next one may be
        continue
    logging.warning(
        'no connection to process 0 (%s, port %d): a process that dies will be noticed by its '
        'heartbeat alone, and with a stack trace',
        ', '.join(address['hosts']),
        address['port'],
    )

  def finish(self) -> None:
    """Tells the others that this process ends without an error."""
    self._tell(None)

  def end(self, line: str, code: int, reason: str) -> None:
    """Prints `line`, sends the reason to the others and ends this process; only the first call."""
    self._ending.acquire()
    print(line, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    self._tell(reason)
    last = time.monotonic() + CLOSING_S
    while self._connections and 0 not in self._connections and time.monotonic() < last:
      time.sleep(0.02)
    os._exit(code)  # not sys.exit: JAX would wait for the dead processes

  def _accept(self, server, token, num_processes):
    while len(self._connections) < num_processes - 1:
      connection, _ = server.accept()
      connection.settimeout(CONNECT_S)
      lines = connection.makefile('r', encoding='utf-8')
      try:
        given, peer = json.loads(lines.readline())
        if given == token:
          _send(connection, 'welcome')
          self._keep(connection, lines, peer)
          continue
      except (OSError, ValueError, TypeError):
        pass  # a port scanner, say: it closed, was silent, or sent no JSON pair
      connection.close()  # not a process of this run
    server.close()

  def _keep(self, connection, lines, peer):
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, 'TCP_KEEPIDLE'):  # Linux
      for option, seconds in (
          (socket.TCP_KEEPIDLE, 5),
          (socket.TCP_KEEPINTVL, 5),
          (socket.TCP_KEEPCNT, (SILENCE_S - 5) // 5),
          (socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
      ):
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
    self._connections[peer] = connection
    _start_thread(self._watch, lines, peer)

  def _watch(self, lines, peer):
    """Waits for the peer's last message, or for its connection to close without one."""
    reason = f'process {peer} died'
    try:
      if line := lines.readline():
        reason = json.loads(line)
        if reason is None:  # it ended without an error
          return
        time.sleep(GRACE_S)
    except (OSError, ValueError):
      pass  # the connection broke, or the line did: the peer died without a reason
    self._connections.pop(peer)
    self.end(
        f'{os.path.basename(sys.argv[0])}: another process of this run is gone ({reason}): '
        'restart all of them with the same command, training resumes from its last checkpoint',
        code=1,
        reason=reason,
    )

  def _tell(self, message):
    for connection in list(self._connections.values()):
      try:
        _send(connection, message)
      except OSError:
        pass  # this peer is gone as well, and the others are still to be told


def _send(connection, message):
  connection.sendall((json.dumps(message) + '\n').encode('utf-8'))


def _own_names():
  """Returns names and addresses by which other machines may reach this one."""
  names = [socket.gethostname()]
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    try:
      probe.connect(('10.255.255.255', 1))  # sends nothing, only selects the interface
      names.append(probe.getsockname()[0])
    except OSError:
      pass  # no route: only the name is left
  return names


def _start_thread(function, *args):
  threading.Thread(target=function, args=args, daemon=True, name='lifeline').start()
