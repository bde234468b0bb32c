#!/usr/bin/env bash
set -euo pipefail
# Expected: Client.list_tools() returns the tools of the server.
# Happens: It returns the first page. If the server pages its list, the rest is only available
#   with the cursor of the result, and nothing warns of it. A client that does not loop offers the
#   model a part of the tools.
# Versions: mcp 2.3.0
# Output seen:
#   list_tools(): ['add', 'divide'] next_cursor 2
#   all pages: ['add', 'divide', 'multiply', 'subtract', 'round']
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'mcp==2.3.0'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio

from mcp import Client, types
from mcp.server import Server

NAMES = ['add', 'divide', 'multiply', 'subtract', 'round']


async def list_tools(context, params):
  """Returns two tools a page."""
  start = int(params.cursor) if params and params.cursor else 0
  end = start + 2
  tools = [types.Tool(name=name, input_schema={'type': 'object'}) for name in NAMES[start:end]]
  return types.ListToolsResult(tools=tools, next_cursor=str(end) if end < len(NAMES) else None)


async def main():
  async with Client(Server('calculator', on_list_tools=list_tools)) as client:
    first = await client.list_tools()
    print('list_tools():', [tool.name for tool in first.tools], 'next_cursor', first.next_cursor)
    tools = list(first.tools)
    cursor = first.next_cursor
    while cursor:
      page = await client.list_tools(cursor=cursor)
      tools += page.tools
      cursor = page.next_cursor
    print('all pages:', [tool.name for tool in tools])
  assert len(first.tools) == 2, 'list_tools reads all pages now'
  assert len(tools) == 5


asyncio.run(main())
PYTHON
