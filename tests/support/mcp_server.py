"""An MCP server over stdio with three tools, for tests; made with the real package."""

import time

try:
  from mcp.server import MCPServer as Server
except ImportError:
  from mcp.server.fastmcp import FastMCP as Server

server = Server('colours')


@server.tool()
def mix(first: str, second: str) -> str:
  """Mixes two colours."""
  return f'{first} and {second}'


@server.tool()
def wait(seconds: float) -> str:
  """Waits."""
  time.sleep(seconds)
  return 'awake'


@server.tool()
def fail() -> str:
  """Raises."""
  raise ValueError('no paint')


if __name__ == '__main__':
  server.run()
