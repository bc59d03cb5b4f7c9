"""A program that speaks MCP, with two tools."""

from __future__ import annotations

import os

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(first: int, second: int) -> str:
    """Add two numbers."""
    return str(first + second)


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
