"""Tells every process of a run when another one is gone, in one line, and ends it too.

Each process holds a TCP connection to process 0. A process that dies, however it dies, closes its
connections, so the other end knows at once; where a whole machine or its network is gone, it knows
after SILENCE_S. JAX notices as well, but says so by abort() with a stack trace; its callback cannot
be set from Python (jaxlib 0.10.2: std::bad_cast). It stays the net below this one.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time

from absl import logging

CONNECT_S = 10.0  # to reach process 0 by one of its names
SILENCE_S = 20  # an unreachable machine is taken for dead after so long
GRACE_S = 2.0  # for this process's own error, when another one says that it failed
CLOSING_S = 5.0  # process 0 goes last, since JAX aborts the others when it goes


class Lifeline:
  """One process's end of it: `listen` on process 0, `join` on the others, then `finish` or `end`."""

  def __init__(self):
    self._connections: dict[int, socket.socket] = {}
    self._ending = threading.Lock()  # taken by whoever ends this process, and kept

  def listen(self, num_processes):
    """Awaits the other processes in the background; returns the address to `join`."""
    server, token = socket.create_server(('', 0), backlog=num_processes), secrets.token_hex(16)
    _start_thread(self._accept, server, token, num_processes)
    return {'hosts': _own_names(), 'port': server.getsockname()[1], 'token': token}

  def join(self, address, process, coordinator=''):
    """Connects to process 0, at `coordinator` or under the names that its address lists."""
    for host in [coordinator] * bool(coordinator) + address['hosts']:
      try:
        connection = socket.create_connection((host, address['port']), timeout=CONNECT_S)
        _send(connection, [address['token'], process])
        lines = connection.makefile('r', encoding='utf-8')
        if lines.readline():  # its welcome; not there where the name led to another machine
          self._keep(connection, lines, peer=0)
          return
      except OSError:
        continue
    logging.warning(
        'no connection to process 0 (%s, port %d): a process that dies will be noticed by its '
        'heartbeat alone, and with a stack trace',
        ', '.join(address['hosts']),
        address['port'],
    )

  def finish(self):
    """Says that this process ends well."""
    self._tell(None)

  def end(self, line, code, reason):
    """Prints `line`, tells the others the reason, and ends this process; the first call counts."""
    self._ending.acquire()
    print(line, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    self._tell(reason)
    last = time.monotonic() + CLOSING_S
    while self._connections and 0 not in self._connections and time.monotonic() < last:
      time.sleep(0.02)
    os._exit(code)  # not sys.exit: JAX would wait for processes that are gone

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
        pass
      connection.close()  # a stranger
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
    """Waits for the peer's last word, or for its connection to close without one."""
    reason = f'process {peer} died'
    try:
      if line := lines.readline():
        reason = json.loads(line)
        if reason is None:  # it ended well
          return
        time.sleep(GRACE_S)
    except (OSError, ValueError):
      pass
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
        pass  # gone as well


def _send(connection, message):
  connection.sendall((json.dumps(message) + '\n').encode('utf-8'))


def _own_names():
  """Names and addresses under which other machines may find this one."""
  names = [socket.gethostname()]
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    try:
      probe.connect(('10.255.255.255', 1))  # sends nothing; picks the interface
      names.append(probe.getsockname()[0])
    except OSError:
      pass  # no route at all: the name has to do
  return names


def _start_thread(function, *args):
  threading.Thread(target=function, args=args, daemon=True, name='lifeline').start()
