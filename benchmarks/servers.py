"""Starts a gateway in a process of its own, for the benchmarks that load it."""

from collections.abc import Iterator
import contextlib
import os
import re
import subprocess
import sys
import threading

from absl import logging

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@contextlib.contextmanager
def gateway(*flags: str) -> Iterator[tuple[int, subprocess.Popen]]:
  """Context manager of (port, process) of a `run.py --mode=serve` that accepts requests."""
  command = [sys.executable, 'run.py', '--mode=serve', '--port=0', *flags]
  with ended(subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.PIPE, text=True)) as server:
    yield _port(server), server


@contextlib.contextmanager
def ended(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
  """Context manager that ends a process at its exit."""
  try:
    yield process
  finally:
    process.terminate()
    process.wait()


def _port(server):
  """Returns the port that the server logs. A thread continues to read the log."""
  for line in server.stderr:
    if match := re.search(r'at http://127\.0\.0\.1:(\d+)/v1', line):
      threading.Thread(target=_pass_on, args=(server.stderr,), daemon=True).start()
      return int(match[1])
  raise SystemExit('the server has not started')


def _pass_on(log):
  for line in log:
    logging.info('%s', line.rstrip())
