"""Tools for tests; imports nothing heavy, because each process of tools imports it."""

import os
import subprocess
import sys
import time


def add(a: int, b: int) -> int:
  """Adds two numbers.

  Args:
    a: the first
    b: the second
  """
  print('a tool may print')
  return a + b


async def later(a: int) -> int:
  """Adds one, as a coroutine.

  Args:
    a: the number
  """
  return a + 1


def no_json() -> object:
  """Returns what JSON cannot hold."""
  return object()


def sleep(seconds: float) -> str:
  """Waits.

  Args:
    seconds: how long
  """
  time.sleep(seconds)
  return 'awake'


def spin() -> None:
  """Never ends."""
  while True:
    pass


def with_child(path: str) -> None:
  """Starts a child that writes a file after a second, and does not return.

  Args:
    path: of the file
  """
  subprocess.Popen([sys.executable, '-c', f'import time; time.sleep(1); open({path!r}, "w")'])
  time.sleep(60)


def shout(times: int) -> str:
  """Returns a long text.

  Args:
    times: how often
  """
  return 'ä' * times


def leave() -> None:
  """Ends its process."""
  os._exit(3)


def stop() -> None:
  """Raises SystemExit."""
  sys.exit('no')


def hoard() -> str:
  """Asks for much memory."""
  return str(len(bytearray(64 << 30)))


def pid() -> int:
  """Returns the number of its process."""
  return os.getpid()


def undocumented(x):
  return x
