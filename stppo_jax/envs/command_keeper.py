"""A process that keeps one command: `python command_keeper.py COMMAND..`.

commands.py starts it. Its standard input is a line for the command's standard input, and then stays
open. When it closes, because the episode is over or the trainer has died, the command and all
processes that it has started are killed. It writes one line of JSON, with the end of each stream.
The command may write without limit. It imports nothing of this package.
"""

from collections.abc import Sequence
import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time

KEPT_BYTES = 1 << 16  # the end of each stream
_KILL_S = 5.0  # limit of the time in which all processes are found and killed
_SET_PARENT_DEATH_SIGNAL = 1  # options of Linux's prctl
_SET_CHILD_SUBREAPER = 36


def main(argv: Sequence[str]) -> None:
  """Runs the command to its end, and reports it."""
  line = bytearray()
  while not line.endswith(b'\n'):
    piece = os.read(0, 1 << 16)
    if not piece:
      return  # over before it began
    line += piece
  # Processes whose parent has died become children of this one, even in a group of their own.
  prctl(_SET_CHILD_SUBREAPER, 1)
  with tempfile.TemporaryFile() as task:  # a command need not read it
    task.write(line)
    task.seek(0)
    try:
      process = subprocess.Popen(
          argv[1:],
          stdin=task,
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          start_new_session=True,
          preexec_fn=lambda: prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL),
      )
    except OSError as error:
      report(error=str(error))
      return
  report(**keep(process))


def keep(process):
  """Reads what the command writes until it ends or standard input closes. Returns the report."""
  streams = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
  selector = selectors.DefaultSelector()
  for stream in (0, *streams):
    os.set_blocking(stream, False)
    selector.register(stream, selectors.EVENT_READ)
  is_over = False
  while not is_over and process.poll() is None:
    for key, _ in selector.select(0.05):
      stream = key.fd
      if stream == 0:
        is_over = not os.read(0, 1 << 16)
      elif read(stream, streams[stream]) == 0:
        selector.unregister(stream)  # the command has closed it, and may go on
  status = process.poll()
  end(process)
  deadline = time.monotonic() + _KILL_S
  for stream, kept in streams.items():
    while read(stream, kept) and time.monotonic() < deadline:
      pass
  stdout, stderr = (bytes(kept).decode(errors='replace') for kept in streams.values())
  return {'status': status, 'stdout': stdout, 'stderr': stderr}


def read(stream, kept):
  """Reads a stream and keeps its end. Returns the bytes read, 0 if it is closed, None: nothing."""
  try:
    piece = os.read(stream, KEPT_BYTES)
  except BlockingIOError:
    return None
  kept += piece
  del kept[:-KEPT_BYTES]
  return len(piece)


def end(process):
  """Kills the command's group, and then each process that is left without a parent."""
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()
  deadline = time.monotonic() + _KILL_S
  while time.monotonic() < deadline:
    for child in children():
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)
    try:
      if os.waitpid(-1, os.WNOHANG)[0] == 0:
        time.sleep(0.005)
    except ChildProcessError:
      return


def children():
  """Returns the ids of this process's children, on Linux."""
  ids = []
  for name in os.listdir('/proc') if os.path.isdir('/proc') else ():
    if name.isdigit():
      with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f'/proc/{name}/stat', 'rb') as file:
          parent = int(file.read().rpartition(b')')[2].split()[1])
        if parent == os.getpid():
          ids.append(int(name))
  return ids


def prctl(option, value):
  """Sets an attribute of this process, on Linux."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def report(**fields):
  """Writes the report."""
  print(json.dumps(fields), flush=True)


if __name__ == '__main__':
  main(sys.argv)
