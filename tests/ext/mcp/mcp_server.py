"""A small MCP server for the tests: `python mcp_server.py` speaks stdio, `python mcp_server.py http` prints its port."""

import asyncio
import io
import os
import socket
import sys
from typing import Any

from mcp.server.mcpserver import Image, MCPServer
from mcp.types import CallToolResult, TextContent
from pydantic import BaseModel

server = MCPServer("corner shop")


class Order(BaseModel):
    """What is bought."""

    item: str
    counts: list[int]


@server.tool()
async def price(item: str) -> str:
    """What an item costs."""
    return {"pen": "3", "hat": "12"}[item]


@server.tool()
async def total(order: Order) -> dict[str, int]:
    """The sum over an order."""
    return {"items": sum(order.counts)}


@server.tool(structured_output=False)
async def picture(width: int) -> list[Any]:
    """A red picture with its caption."""
    import PIL.Image

    held = io.BytesIO()
    PIL.Image.new("RGB", (width, 4), "red").save(held, "png")
    return ["a red one", Image(data=held.getvalue(), format="png")]


@server.tool()
async def refuse() -> CallToolResult:
    """Always says no."""
    return CallToolResult(content=[TextContent(text="the shop is closed")], is_error=True)


@server.tool()
async def secret() -> str:
    """What the environment gave it."""
    return os.environ.get("SHOP_KEY", "nothing") + " " + os.environ.get("SHOP_MODE", "nothing")


@server.tool()
async def pid() -> str:
    """Its process."""
    return str(os.getpid())


@server.tool()
async def die() -> str:
    """The process ends at once."""
    os._exit(3)


@server.tool()
async def wait(seconds: float) -> str:
    """Answers late."""
    await asyncio.sleep(seconds)
    return "waited"


def serve_http() -> None:
    """On a free port, which is printed."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="warning")).run([listening])


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        serve_http()
    else:
        server.run("stdio")
