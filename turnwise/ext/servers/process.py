"""A server that we start: a process with its log, watched until it answers, and ended with us even when we are
killed."""

import asyncio
import os
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from turnwise.errors import EngineError, EngineLost
from turnwise.system import children

START_SECONDS = 1800.0
"""A large model is read and compiled for many minutes."""
SAY_SECONDS = 15.0
POLL_SECONDS = 0.25
END_SECONDS = 2 * children.KIND_SECONDS + 5.0
SHOWN_LINES = 3
PORT_TRIES = 5
_ERRORS = ("Error", "error:", "CRITICAL", "Killed")
_TAKEN = re.compile(r"address (is )?already in use", re.IGNORECASE)


def reserve_port() -> socket.socket:
    """A port, ours while this is open: nobody is given it by chance, and our server may listen on it all the same, as
    we do not listen and both allow the address to be used again, which servers do."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class ServerProcess:
    """One server on this machine; `start` may be called again after it died."""

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        *,
        log: Path,
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """`command` makes the command line for a port; `environment` is added to ours."""
        self.name, self.log, self.port = name, log, 0
        self._command, self._environment, self._say = command, environment, say
        self._guard: children.Process | None = None
        self._began = 0
        """Bytes of the log that earlier starts wrote."""

    @property
    def url(self) -> str:
        """The address where the server serves, or will when it has started."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the process is there; it may hang all the same."""
        return self._guard is not None and self._guard.poll() is None

    async def start(self, healthy: Callable[[], Awaitable[bool]], seconds: float = START_SECONDS) -> None:
        """On a new port, until it is well: EngineLost with the end of its log when it is not."""
        for tries in range(1, PORT_TRIES + 1):
            await self.stop()
            self._began = self.log.stat().st_size if self.log.is_file() else 0
            with reserve_port() as held:
                self.port = int(held.getsockname()[1])
                try:
                    return await self._start(healthy, seconds)
                except EngineLost:
                    if tries == PORT_TRIES or not _TAKEN.search(self._tail()):
                        raise
                    self._say(f"{self.name}: port {self.port} was taken meanwhile; it is started on another one")

    async def _start(self, healthy: Callable[[], Awaitable[bool]], seconds: float) -> None:
        self._guard = self._spawn()
        began = last_note = time.monotonic()
        try:
            while not await healthy():
                now = time.monotonic()
                if not self.alive:
                    raise EngineLost(
                        f"{self.name} ended while it started: {self._last_words()} (all of it: {self.log})"
                    )
                if now - began > seconds:
                    raise EngineLost(f"{self.name} does not answer after {seconds:g} s; its log is {self.log}")
                if now - last_note > SAY_SECONDS:
                    last_note = now
                    self._say(f"{self.name}: starting for {now - began:.0f} s; {self._last_words(1)}")
                await asyncio.sleep(POLL_SECONDS)
        except BaseException:
            await self.stop()
            raise
        self._say(f"{self.name}: serves at {self.url} after {time.monotonic() - began:.0f} s; its log is {self.log}")

    async def stop(self) -> None:
        """End it and whatever it started; returns when all of that is gone."""
        guard, self._guard = self._guard, None
        if guard is not None:
            await asyncio.to_thread(children.end, guard, END_SECONDS)

    def _spawn(self) -> children.Process:
        command = [str(part) for part in self._command(self.port)]
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                log.write(f"--- {' '.join(command)}\n".encode())
                log.flush()
                return children.start(
                    [sys.executable, "-I", children.__file__, *command],  # see children.guard
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._environment},
                )
        except OSError as error:
            raise EngineError(f"{self.name} cannot be started: {error.strerror or error}") from error

    def _last_words(self, count: int = SHOWN_LINES) -> str:
        """Of its log: what sounds like an error, else the end."""
        lines = [line.strip()[:300] for line in self._tail().splitlines() if line.strip()]
        if count > 1:
            lines = [line for line in lines if any(mark in line for mark in _ERRORS)] or lines
        return " | ".join(lines[-count:]) or "it said nothing"

    def _tail(self) -> str:
        """The end of its log, as far as it is of this start."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._began, self.log.stat().st_size - 65536))
                return file.read().decode("utf-8", "replace")
        except OSError as error:
            return f"its log cannot be read: {error.strerror or error}"
