"""Runs tools outside this process: Python functions in workers, and MCP servers over stdio.

Arguments and results are passed by value. Each call has a time limit, and its result a limit of
length. A process that does not answer in time is killed with its children, and replaced.
"""

import atexit
from collections.abc import Mapping
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from typing import Any

from stppo_jax.envs import guard
from stppo_jax.envs import tool_worker

OK = tool_worker.OK
FAILED = tool_worker.FAILED
TIMED_OUT = 'timed_out'

_MAX_PAGES = 1000  # a server's list of tools has no more
_START_S = 60.0  # limit of a process's start; an MCP server may have to be downloaded first
_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of a call: its text, and whether it worked."""

  text: str
  status: str = OK


@dataclasses.dataclass(frozen=True)
class ToolLimits:
  """Limits of one call."""

  timeout_s: float = 10.0
  max_chars: int = 2000  # a longer result is cut
  memory_mb: int = 4096  # address space of a process; 0: no limit


class Workers:
  """Processes that call Python functions by name, started when needed. Any thread may call."""

  def __init__(self, limits: ToolLimits):
    self._limits = limits
    self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

  def call(self, function: str, arguments: Mapping[str, object]) -> Outcome:
    """Calls `module:function` with these keyword arguments, and waits for its result."""
    request = {'function': function, 'arguments': arguments, 'max_chars': self._limits.max_chars}
    try:
      worker = self._send(json.dumps(request).encode())
    except (EOFError, OSError) as error:
      return Outcome(f'the process of the tool does not start ({error!r})', FAILED)
    outcome = worker.receive(self._limits.timeout_s)
    if worker.is_alive:
      self._idle.put(worker)
    return outcome

  def _send(self, request):
    """Sends a request to an idle worker, or to a new one, and returns the worker."""
    with contextlib.suppress(queue.Empty):
      while True:
        worker = self._idle.get_nowait()
        try:
          worker.connection.send_bytes(request)
          return worker
        except OSError:  # it died between two calls
          worker.end()
    worker = Worker(self._limits.memory_mb)
    worker.connection.send_bytes(request)
    return worker

  def close(self) -> None:
    """Ends the idle workers."""
    with contextlib.suppress(queue.Empty):
      while True:
        self._idle.get_nowait().end()


class Worker:
  """One process of tool_worker.py, which runs one call at a time."""

  def __init__(self, memory_mb: int):
    paths = [os.getcwd(), _PACKAGE_FOLDER, os.environ.get('PYTHONPATH', '')]
    self.connection, other_end = multiprocessing.Pipe()
    with other_end:
      socket = other_end.fileno()
      self._process = subprocess.Popen(
          [sys.executable, '-m', tool_worker.__name__, str(socket), str(memory_mb)],
          stdin=subprocess.DEVNULL,
          stdout=subprocess.DEVNULL,
          stderr=subprocess.DEVNULL,
          pass_fds=[socket],
          start_new_session=True,  # so that its children can be killed with it
          env=os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, paths))},
      )
    self.is_alive = True
    ready = self.receive(_START_S)
    if ready.status != OK:
      raise EOFError(ready.text)

  def receive(self, timeout_s: float) -> Outcome:
    """Waits for the outcome of a call. Ends the process if there is none."""
    outcome = Outcome(f'no result within {timeout_s:g} seconds', TIMED_OUT)
    try:
      if self.connection.poll(timeout_s):
        return Outcome(**json.loads(self.connection.recv_bytes()))
    except (EOFError, OSError):
      outcome = Outcome('the process of the tool died', FAILED)
    self.end()
    return outcome

  def end(self) -> None:
    """Kills the process and its children."""
    self.is_alive = False
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    self.connection.close()


class McpServer:
  """A server of the Model Context Protocol, started as a command and called by its own client.

  A server that does not answer in time, or that answers nothing after a failed call, is ended. The
  next call starts it again.
  """

  def __init__(self, command: str, limits: ToolLimits):
    self._command = shlex.split(command)
    self._limits = limits
    self._lock = threading.Lock()
    self._connection = contextlib.ExitStack()
    self._portal: Any = None  # runs the client's coroutines in a thread
    self._client: Any = None  # None: the server does not run
    atexit.register(self._end)  # the portal's thread is gone when objects are finalized

  def list_tools(self) -> list[Any]:
    """Returns the server's tools: objects with name, description and input_schema."""
    with self._lock:
      try:
        self._start()
        return self._all_pages()
      except BaseException:
        self._end()
        raise

  def call(self, name: str, arguments: Mapping[str, object]) -> Outcome:
    """Calls a tool and returns its answer as a text, see `_answer_text`.

    Raises Stopped, without a call, if the episode ended while other calls were in progress.
    """
    with guard.hold(self._lock):
      try:
        self._start()
        # The client's own limit is longer, so that `_run` is the one that stops a call.
        call_tool = functools.partial(
            self._client.call_tool, read_timeout_seconds=self._limits.timeout_s + _START_S
        )
        answer = self._run(self._limits.timeout_s, call_tool, name, dict(arguments))
      except TimeoutError:
        self._end()
        return Outcome(f'no result within {self._limits.timeout_s:g} seconds', TIMED_OUT)
      except Exception as error:  # the server may make its client raise anything
        if not self._answers():
          self._end()
        text = f'{type(error).__name__}: {error}'
        return Outcome(tool_worker.cut(text, self._limits.max_chars), FAILED)
    text = tool_worker.cut(_answer_text(answer), self._limits.max_chars)
    return Outcome(text, FAILED if answer.is_error else OK)

  def _all_pages(self):
    tools: list[Any] = []
    cursors: set[str] = set()
    cursor = None
    while True:
      ask = functools.partial(self._client.list_tools, cursor=cursor)
      page = self._run(_START_S, ask)
      tools += page.tools
      cursor = page.next_cursor
      if cursor is None:
        return tools
      if cursor in cursors or len(cursors) == _MAX_PAGES:
        raise ValueError(f'its list of tools does not end: {len(cursors)} pages, then {cursor!r}')
      cursors.add(cursor)

  def _answers(self) -> bool:
    """Returns whether the session still works: a call may fail alone."""
    try:
      ask = functools.partial(self._client.list_tools, cache_mode='bypass')
      self._run(self._limits.timeout_s, ask)
    except Exception:  # the connection is over, for whatever reason
      return False
    return True

  def _start(self):
    import anyio.from_thread
    import mcp

    if self._client is not None:
      return
    program, *arguments = self._command
    server = mcp.StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
    client = mcp.Client(server, read_timeout_seconds=_START_S)
    self._portal = self._connection.enter_context(anyio.from_thread.start_blocking_portal())
    connected = self._portal.wrap_async_context_manager(client)
    self._client = self._connection.enter_context(connected)

  def _run(self, timeout_s, function, *arguments):
    """Runs a method of the client. TimeoutError: it takes too long."""
    future = self._portal.start_task_soon(function, *arguments)
    try:
      return future.result(timeout_s)
    finally:
      future.cancel()

  def _end(self):
    self._client = None
    with contextlib.suppress(Exception):  # the connection is over in any case
      self._connection.close()


def _answer_text(answer: Any) -> str:
  """Returns an MCP server's answer for the agent: its texts, and the names of its other parts.

  The JSON text of its structured content stands for texts, if there are none. In an error it
  follows a text that says something else.
  """
  texts = []
  others = []
  for part in answer.content or ():
    resource = getattr(part, 'resource', None)
    text = getattr(part, 'text', None) or getattr(resource, 'text', None)
    if text:
      texts.append(text)
    elif part.type != 'text':
      others.append(_name_part(part, resource))
  structured = answer.structured_content
  if structured is not None and (not texts or answer.is_error):
    written = json.dumps(structured, ensure_ascii=False)
    if not any(_is_json_of(text, structured) for text in texts):
      texts.append(written)
  return '\n'.join([*texts, *others])


def _name_part(part: Any, resource: object) -> str:
  """Returns a line about a part that is no text: its type, format and address."""
  source = part if resource is None else resource
  words = [part.type.replace('_', ' ')]
  for name in ('mime_type', 'uri'):
    value = getattr(source, name, None)
    if value:
      words.append(str(value))
  return f'[{" ".join(words)}: not shown]'


def _is_json_of(text: str, value: object) -> bool:
  with contextlib.suppress(ValueError, RecursionError):
    return json.loads(text) == value
  return False
