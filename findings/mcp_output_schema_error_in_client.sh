#!/usr/bin/env bash
set -euo pipefail
# Expected: A tool whose result does not fit its output schema answers with is_error, as a tool
#   that raises does. The model reads the error and continues.
# Happens: The server sends NaN as null, and call_tool raises RuntimeError in the client. The
#   exception looks like a lost connection, but the session and the state of the server are sound:
#   the next call works.
# Versions: mcp 2.3.0
# Output seen:
#   add 5: {'result': 5}
#   mean of []: RuntimeError: Invalid structured content returned by tool mean: None is not of type 'number'
#   add 1: {'result': 6}
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'mcp==2.3.0'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import math

from mcp import Client
from mcp.server import MCPServer

server = MCPServer('numbers')
total = 0


@server.tool()
def add(x: int) -> int:
  """Adds to a total."""
  global total
  total += x
  return total


@server.tool()
def mean(values: list[float]) -> float:
  """Returns the mean, which is NaN for no values."""
  return sum(values) / len(values) if values else math.nan


async def main():
  async with Client(server) as client:
    print('add 5:', (await client.call_tool('add', {'x': 5})).structured_content)
    try:
      await client.call_tool('mean', {'values': []})
      raised = None
    except RuntimeError as error:
      raised = str(error).splitlines()[0]
    print('mean of []: RuntimeError:', raised)
    last = (await client.call_tool('add', {'x': 1})).structured_content
    print('add 1:', last)
  assert raised is not None, 'the client gets a result now'
  assert last == {'result': 6}


asyncio.run(main())
PYTHON
