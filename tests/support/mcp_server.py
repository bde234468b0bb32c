"""An MCP server over stdio, for tests; made with the real package."""

import time

import mcp

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


counter = [0]


@server.tool()
def add(x: int) -> int:
  """Adds to a counter, and returns it."""
  counter[0] += x
  return counter[0]


@server.tool()
def mean(values: list[float]) -> float:
  """Returns a mean. That of no values does not fit the schema of the result."""
  return sum(values) / len(values) if values else float('nan')


@server.tool()
def refuse() -> str:
  """Raises the protocol's error."""
  raise mcp.MCPError(code=-32000, message='quota used up')


if __name__ == '__main__':
  server.run()
