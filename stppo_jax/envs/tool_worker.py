"""A process that calls Python functions: `python -m stppo_jax.envs.tool_worker SOCKET MEMORY_MB`.

tool_runners.py starts it. Requests and answers are JSON. It imports nothing heavy.
"""

import asyncio
from collections.abc import Sequence
import importlib
import inspect
import json
from multiprocessing import connection as connections
import os
import queue
import resource
import sys
import threading
from typing import Any

OK = 'ok'
FAILED = 'failed'


def main(argv: Sequence[str]) -> None:
  """Answers requests until the other side closes the connection."""
  connection = connections.Connection(int(argv[1]))
  if memory_bytes := int(argv[2]) << 20:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
  answer = {'text': 'ready', 'status': OK}
  requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
  threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
  while True:
    connection.send_bytes(json.dumps(answer).encode())
    answer = _call(json.loads(requests.get()))


def _receive(connection, requests):
  """Receives requests. Ends the process, even during a call, when nobody waits for its answer."""
  try:
    while True:
      requests.put(connection.recv_bytes())
  except (EOFError, OSError):
    os._exit(0)


def _call(request):
  try:
    module, _, path = request['function'].partition(':')
    function: Any = importlib.import_module(module)
    for name in path.split('.'):
      function = getattr(function, name)
    value = function(**request['arguments'])
    if inspect.isawaitable(value):
      value = asyncio.run(_wait(value))
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    status = OK
  except (Exception, SystemExit) as error:  # a user's function on a model's arguments
    text = f'{type(error).__name__}: {error}'
    status = FAILED
  return {'text': cut(text, request['max_chars']), 'status': status}


async def _wait(awaitable):
  return await awaitable


def cut(text: str, max_chars: int) -> str:
  """Returns a text of at most `max_chars`, with a mark where it was cut."""
  return text if len(text) <= max_chars else text[: max(0, max_chars - 2)] + '..'


if __name__ == '__main__':
  main(sys.argv)
