#!/usr/bin/env bash
set -euo pipefail
# Expected: A tool's parameter without an annotation receives the value that the client sent. The
#   text '42' stays a text.
# Happens: Texts that are JSON other than a number are parsed before the call: 'null' arrives as
#   None and '[1]' as a list, while '42' and 'hello' stay texts. With the annotation str nothing
#   is parsed.
# Versions: mcp 2.3.0
# Output seen:
#   'hello': untyped str 'hello', typed str 'hello'
#   '42': untyped str '42', typed str '42'
#   'null': untyped NoneType None, typed str 'null'
#   '[1]': untyped list [1], typed str '[1]'
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'mcp==2.3.0'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio

from mcp import Client
from mcp.server import MCPServer

server = MCPServer('echo')


@server.tool()
def untyped(value) -> str:
  """Returns the value and its type."""
  return f'{type(value).__name__} {value!r}'


@server.tool()
def typed(value: str) -> str:
  """Returns the value and its type."""
  return f'{type(value).__name__} {value!r}'


async def main():
  received = {}
  async with Client(server) as client:
    for text in ('hello', '42', 'null', '[1]'):
      for tool in ('untyped', 'typed'):
        result = await client.call_tool(tool, {'value': text})
        received[tool, text] = result.structured_content['result']
      print(f'{text!r}: untyped {received["untyped", text]}, typed {received["typed", text]}')
  assert received['typed', 'null'] == "str 'null'"
  assert received['untyped', 'null'] == 'NoneType None', 'texts stay texts now'
  assert received['untyped', '[1]'] == 'list [1]'
  assert received['untyped', '42'] == "str '42'"


asyncio.run(main())
PYTHON
