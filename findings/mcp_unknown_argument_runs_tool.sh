#!/usr/bin/env bash
set -euo pipefail
# Expected: A call with an argument that the tool does not have is an error, so that a model can
#   correct the name.
# Happens: The argument is dropped without a word and the tool runs with its default. A misspelt
#   optional argument is a successful call with another meaning.
# Versions: mcp 2.3.0
# Output seen:
#   search(query, max_results=2): {'result': '10 results for tea'} is_error False
#   the schema has additionalProperties: False
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

server = MCPServer('search')


@server.tool()
def search(query: str, limit: int = 10) -> str:
  """Returns what was asked for."""
  return f'{limit} results for {query}'


async def main():
  async with Client(server) as client:
    result = await client.call_tool('search', {'query': 'tea', 'max_results': 2})
    print('search(query, max_results=2):', result.structured_content, 'is_error', result.is_error)
    schema = (await client.list_tools()).tools[0].input_schema
    print('the schema has additionalProperties:', 'additionalProperties' in schema)
  assert not result.is_error, 'unknown arguments are refused now'
  assert result.structured_content == {'result': '10 results for tea'}
  assert 'additionalProperties' not in schema


asyncio.run(main())
PYTHON
