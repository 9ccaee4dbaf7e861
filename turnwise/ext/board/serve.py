"""Running the board: bind first, so that a taken port is a clear answer, then serve until stopped."""

import asyncio
import contextlib
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from turnwise.ext.board.access import TOKEN_ENV, BoardAddress
from turnwise.ext.board.app import make_app
from turnwise.ext.board.replays import Replays
from turnwise.ext.board.runs import Runs
from turnwise.ext.board.static_files import plotly, plotly_path
from turnwise.system.addresses import bind, check_binding
from turnwise.system.children import when_parent_ends

WARMED = ("table", "search", "conversation", "tokens", "groups", "tools", "health", "headline", "reward_spread")
"""The modules that answer the pages of a run."""
_WARM_SECONDS = 1.0


class _Server(uvicorn.Server):
    """A server whose open streams end when it does; it would wait for them otherwise."""

    def __init__(self, config: uvicorn.Config, closing: asyncio.Event) -> None:
        super().__init__(config)
        self._closing = closing

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._closing.set()
        await super().shutdown(sockets)


def serve(
    places: Sequence[Path],
    host: str,
    port: int,
    token: str | None,
    *,
    ready: Callable[[str], None],
    child: bool = False,
    replays: Replays | None = None,
) -> None:
    """Show the runs of these places until stopped; `ready` is told the URL as soon as requests are taken.

    The child of a training takes another port when its own is taken, and ends when its parent does.
    """
    check_binding(host, token, "a board", "shows runs", f" in {TOKEN_ENV}")
    runs = Runs(places)
    plotly_path()  # its absence is better told now than by an empty page
    listening = bind(host, port, any_port=child)
    address = BoardAddress(host, listening.getsockname()[1], token)
    with listening:
        asyncio.run(_serve(runs, address, listening, ready, child, replays))


async def _serve(
    runs: Runs,
    address: BoardAddress,
    listening: socket.socket,
    ready: Callable[[str], None],
    child: bool,
    replays: Replays | None,
) -> None:
    closing = asyncio.Event()
    config = uvicorn.Config(
        make_app(runs, address, closing, replays),
        log_level="error",
        access_log=False,
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config, closing)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    if server.started:
        ready(address.url)
        threading.Thread(target=_warm, daemon=True).start()
    if child:
        when_parent_ends(lambda: setattr(server, "should_exit", True))
    await serving


def _warm() -> None:
    """While the first page is looked at: zip plotly, and import what the pages of a run need."""
    plotly(True)
    time.sleep(_WARM_SECONDS)  # importing would be in the first page's way
    for name in WARMED:
        importlib.import_module(f"turnwise.ext.board.{name}")


def detach_terminal() -> None:
    """Let go of the parent's terminal: what it has said by now is all that is read."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
