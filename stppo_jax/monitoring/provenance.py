"""The provenance of a folder: the code, packages, devices and command that wrote it."""

import contextlib
import datetime
import json
import os
import platform
import socket
import subprocess
import sys
from typing import Any

import jax

from stppo_jax import requirements

FILE_NAME = 'provenance.jsonl'
_GIT_S = 10.0  # time limit of a git command


def record(folder: str) -> None:
  """Appends a line to provenance.jsonl in a folder that a command starts to write to."""
  with open(os.path.join(folder, FILE_NAME), 'ab+') as file:
    file.seek(0)
    is_torn = not (b'\n' + file.read()).endswith(b'\n')  # by a start that was killed
    file.write(b'\n' * is_torn + json.dumps(collect()).encode() + b'\n')


def newest(folder: str) -> dict[str, Any]:
  """Returns code, packages and devices of the last start that a whole line describes, or {}."""
  path = os.path.join(folder, FILE_NAME)
  if not os.path.exists(path):
    return {}
  with open(path, 'rb') as file:
    lines = file.readlines()
  for line in reversed(lines):
    with contextlib.suppress(ValueError, KeyError, TypeError):
      start = json.loads(line)
      return {name: start[name] for name in ('git', 'python', 'packages', 'devices')}
  return {}


def collect() -> dict[str, object]:
  """Returns the provenance of this process as JSON values."""
  devices = jax.devices()
  return {
      'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
      'command': sys.argv,
      'folder': os.getcwd(),
      'git': commits([os.path.dirname(requirements.__file__), os.getcwd()]),
      'python': platform.python_version(),
      'packages': requirements.versions(),
      'devices': {'kind': devices[0].device_kind, 'number': len(devices)},
      'processes': jax.process_count(),
      'host': socket.gethostname(),
  }


def commits(folders: list[str]) -> dict[str, dict[str, str | bool | None]]:
  """Returns {root of a repository: its commit, and whether files differ from it}.

  Leaves out folders outside a repository. Without git the result is empty.
  """
  states: dict[str, dict[str, str | bool | None]] = {}
  for folder in folders:
    if root := _git(folder, 'rev-parse', '--show-toplevel'):
      is_dirty = _git(folder, 'status', '--porcelain') != ''
      states[root] = {'commit': _git(folder, 'rev-parse', 'HEAD'), 'dirty': is_dirty}
  return states


def _git(folder: str, *arguments: str) -> str | None:
  """Returns the output of a git command; None if it fails."""
  command = ['git', '-C', folder, *arguments]
  try:
    result = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
  except (OSError, subprocess.SubprocessError):
    return None
  return result.stdout.strip()
