"""Where tools run: Python functions in processes of their own, and MCP servers over stdio.

Arguments go in and a text comes out, by value, with a time limit and a limit of length. A process
that does not answer in time is killed, with its children, and replaced. `python -m` this module is
such a process; it imports nothing heavy. The calculator is an example of a tool.
"""

import ast
import asyncio
from collections.abc import Mapping
from collections.abc import Sequence
import concurrent.futures
import contextlib
import dataclasses
import importlib
import inspect
import json
import operator
import os
import queue
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from typing import Any

OK, FAILED, TIMED_OUT = 'ok', 'failed', 'timed_out'
_START_S = 60.0  # for a process to start; an MCP server may have to be fetched first


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a call gave: its text, and whether it worked."""

  text: str
  status: str = OK


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of one call."""

  timeout_s: float = 10.0
  max_chars: int = 2000  # of the result; a longer one is cut
  memory_mb: int = 4096  # of a process's address space; 0: none


class Processes:
  """Processes that call Python functions by name, started when needed; any thread may call."""

  def __init__(self, limits: Limits):
    self._limits = limits
    self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()

  def call(self, function: str, arguments: Mapping[str, Any]) -> Outcome:
    """Calls `module:function` with these keyword arguments, and waits for its result."""
    try:
      process = self._idle.get_nowait()
    except queue.Empty:
      process = _Process(self._limits)
    outcome = process.call(function, arguments)
    if outcome is None:  # it ended between two calls
      process.end()
      process = _Process(self._limits)
      outcome = process.call(function, arguments) or Outcome('the process of the tool died', FAILED)
    if process.is_alive:
      self._idle.put(process)
    return outcome

  def close(self) -> None:
    """Ends the idle processes."""
    with contextlib.suppress(queue.Empty):
      while True:
        self._idle.get_nowait().end()


class _Process:
  """One process that runs one call at a time, spoken to in JSON lines."""

  def __init__(self, limits: Limits):
    self._limits = limits
    self.is_alive, self._is_ready = True, False
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [os.getcwd(), folder, os.environ.get('PYTHONPATH', '')]
    self._process = subprocess.Popen(
        [sys.executable, '-m', 'stppo_jax.envs.tool_runners', str(limits.memory_mb)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that its children end with it
        env=os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, paths))},
    )
    os.set_blocking(self._process.stdout.fileno(), False)  # type: ignore[union-attr]

  def call(self, function, arguments) -> Outcome | None:
    """Returns the outcome; None if the process was dead already."""
    request = {'function': function, 'arguments': arguments, 'max_chars': self._limits.max_chars}
    if not self._is_ready:  # its start is no part of the call
      self._is_ready = self._read_line(time.monotonic() + _START_S) == b'\n'
    started = self._is_ready and self._process.poll() is None
    try:
      assert self._process.stdin is not None
      self._process.stdin.write(json.dumps(request).encode() + b'\n')
      self._process.stdin.flush()
    except OSError:
      started = False
    if not started:
      self.is_alive = False
      return None
    line = self._read_line(time.monotonic() + self._limits.timeout_s)
    if line is None:
      self.end()
      return Outcome(f'no result within {self._limits.timeout_s:g} seconds', TIMED_OUT)
    if not line.endswith(b'\n'):
      self.end()
      return Outcome('the process of the tool died', FAILED)
    found = json.loads(line)
    return Outcome(found['text'], found['status'])

  def _read_line(self, end) -> bytes | None:
    """Returns a line, or what there was when the process died; None: it took too long."""
    assert self._process.stdout is not None
    pieces = []
    poll = select.poll()  # select.select takes no file from the 1,024th on
    poll.register(self._process.stdout, select.POLLIN)
    while True:
      left = end - time.monotonic()
      if left <= 0 or not poll.poll(1000 * left):
        return None
      piece = os.read(self._process.stdout.fileno(), 1 << 16)
      pieces.append(piece)
      if not piece or piece.endswith(b'\n'):
        return b''.join(pieces)

  def end(self):
    """Kills the process and its children."""
    self.is_alive = False
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    for pipe in (self._process.stdin, self._process.stdout):
      with contextlib.suppress(OSError):
        pipe.close()  # type: ignore[union-attr]


class McpServer:
  """A server of the Model Context Protocol, started as a command, spoken to by its own client.

  One that does not answer in time is ended, and started again at the next call. The client runs in
  a thread with an event loop.
  """

  def __init__(self, command: str, limits: Limits):
    self._command, self._limits = shlex.split(command), limits
    self._lock = threading.Lock()
    self._loop = asyncio.new_event_loop()
    threading.Thread(target=self._loop.run_forever, daemon=True).start()
    self._session: Any = None
    self._stop: Any = None
    self._server: Any = None

  def list_tools(self) -> list[Any]:
    """Returns the server's tools: objects with name, description and input_schema."""
    with self._lock:
      return self._run(self._list_tools(), _START_S)

  def call(self, name: str, arguments: Mapping[str, Any]) -> Outcome:
    """Calls a tool; its text parts are the result."""
    with self._lock:
      limit_s = _START_S
      try:
        self._run(self._start(), limit_s)  # at once where it runs
        limit_s = self._limits.timeout_s
        found = self._run(self._session.call_tool(name, dict(arguments)), limit_s)
      except (TimeoutError, concurrent.futures.TimeoutError):
        self._end()
        return Outcome(f'no result within {limit_s:g} seconds', TIMED_OUT)
      except Exception as error:  # whatever another program's server makes its client raise
        self._end()
        return Outcome(f'{type(error).__name__}: {error}'[: self._limits.max_chars], FAILED)
    texts = [part.text for part in found.content if getattr(part, 'text', None)]
    status = FAILED if getattr(found, 'is_error', getattr(found, 'isError', False)) else OK
    return Outcome(cut('\n'.join(texts), self._limits.max_chars), status)

  def close(self) -> None:
    """Ends the server."""
    with self._lock:
      self._end()

  async def _list_tools(self):
    await self._start()
    return (await self._session.list_tools()).tools

  def _run(self, job, timeout_s):
    future = asyncio.run_coroutine_threadsafe(job, self._loop)
    try:
      return future.result(timeout_s)
    finally:
      future.cancel()

  async def _start(self):
    if self._session is not None:
      return
    ready, self._stop = self._loop.create_future(), asyncio.Event()
    self._server = asyncio.create_task(self._serve(ready, self._stop))
    self._session = await ready

  async def _serve(self, ready, stop):
    """Holds the connection open; entered and left in one task, as the client's scopes ask."""
    import mcp
    from mcp.client import stdio

    command, *args = self._command
    try:
      parameters = mcp.StdioServerParameters(command=command, args=args, env=dict(os.environ))
      async with stdio.stdio_client(parameters) as (read, write):
        async with mcp.ClientSession(read, write) as session:
          await session.initialize()
          ready.set_result(session)
          await stop.wait()
    except Exception as error:  # also a server that ends in the middle
      if not ready.done():
        ready.set_exception(error)

  def _end(self):
    if self._session is None and self._server is None:
      return
    server, stop, self._session, self._server = self._server, self._stop, None, None
    self._loop.call_soon_threadsafe(stop.set)
    with contextlib.suppress(Exception):  # it is given up in any case
      self._run(asyncio.wait_for(asyncio.shield(server), 5), 6)


def cut(text: str, max_chars: int) -> str:
  """Returns a text of at most `max_chars`, with a mark where it was cut."""
  return text if len(text) <= max_chars else text[: max(0, max_chars - 2)] + '..'


_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LONGEST_EXPRESSION, _MOST_BITS = 500, 4096


def calculator(expression: str) -> str:
  """Computes an arithmetic expression of numbers, + - * / // % ** and brackets.

  Args:
    expression: for example (3 + 4) * 2
  """
  if len(expression) > _LONGEST_EXPRESSION:
    raise ValueError(f'at most {_LONGEST_EXPRESSION} characters are allowed')
  value = _value(ast.parse(expression.strip().replace('^', '**'), mode='eval').body)
  return f'{value:.12g}' if isinstance(value, float) else str(value)


def _value(node):
  """Walks over the syntax tree; nothing is evaluated by Python itself."""
  if isinstance(node, ast.Constant) and type(node.value) in (int, float):
    return node.value
  if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
    return _OPERATORS[type(node.op)](_value(node.operand))
  if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
      if abs(left).bit_length() * abs(right) > _MOST_BITS:
        raise ValueError('the power is too large')
    return _OPERATORS[type(node.op)](left, right)
  raise ValueError('numbers, + - * / // % ** and brackets are allowed')


def _work(argv: Sequence[str]) -> None:
  """Runs in the process: answers requests until the other side is gone."""
  answers = os.fdopen(os.dup(1), 'wb')
  nowhere = os.open(os.devnull, os.O_RDWR)
  os.dup2(nowhere, 1)  # a tool may print
  if memory_mb := int(argv[1]):
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
  answers.write(b'\n')  # ready
  answers.flush()
  requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
  threading.Thread(target=_listen, args=(requests,), daemon=True).start()
  while True:
    answers.write(json.dumps(_answer(json.loads(requests.get()))).encode() + b'\n')
    answers.flush()


def _listen(requests):
  for line in sys.stdin.buffer:
    requests.put(line)
  os._exit(0)  # also in the middle of a call: nobody waits for its result


async def _awaited(found):
  return await found


def _answer(request):
  try:
    module, _, name = request['function'].partition(':')
    function: Any = importlib.import_module(module)
    for part in name.split('.'):
      function = getattr(function, part)
    found = function(**request['arguments'])
    if inspect.isawaitable(found):
      found = asyncio.run(_awaited(found))
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    status = OK
  except (Exception, SystemExit) as error:  # a user's function, on arguments of a model
    text, status = f'{type(error).__name__}: {error}', FAILED
  return {'text': cut(text, request['max_chars']), 'status': status}


if __name__ == '__main__':
  _work(sys.argv)
