"""Messages between a run and an episode worker: many go with one write, so that a turn costs neither side much."""

import asyncio
import pickle
import socket
import struct
import traceback
from typing import Any

from turnwise.rollout.workers.images import Adopt, IncomingImages, OutgoingImages

_LENGTH = struct.Struct("!Q")
BUFFER = 1 << 22
"""Bytes that wait to be read before the other side has to stop writing."""


class LinkLost(Exception):
    """The other process has ended."""


class WorkerLink:
    """One end of a socket between two processes of ours.

    Objects are pickled: both ends run the same code with the same rights, and nobody else has the socket.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, adopt: Adopt | None = None) -> None:
        self._reader, self._writer = reader, writer
        self._outgoing: list[object] = []
        self._sent, self._received = OutgoingImages(), IncomingImages(adopt)

    @classmethod
    async def open(cls, end: socket.socket, adopt: Adopt | None = None) -> "WorkerLink":
        """The link over this end of a socket pair; `adopt` says how images that come are kept."""
        return cls(*await asyncio.open_unix_connection(sock=end, limit=BUFFER), adopt)

    def send(self, message: object) -> None:
        """Send it with whatever else is sent before the event loop comes round."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._write)
        self._outgoing.append(message)

    def _write(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if self._writer.is_closing():  # whoever waits for an answer hears of it from `receive`
            return
        content = self._sent.packed(messages)
        self._writer.write(_LENGTH.pack(len(content)))
        self._writer.write(content)

    async def receive(self) -> list[Any]:
        """The messages of the next write; LinkLost when there will be none."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            content = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise LinkLost from error
        return self._received.unpacked(content)

    async def drain(self) -> None:
        """Wait until what was sent has been taken."""
        if self._outgoing:
            self._write()
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise LinkLost from error

    def close(self) -> None:
        """Nothing more is sent or received."""
        self._writer.close()


def sendable(error: BaseException) -> BaseException:
    """The error as another process can raise it: of its own class where that can be pickled, and where it came from."""
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
        same = type(copy) is type(error) and str(copy) == str(error)
    except Exception:  # a class of a plug-in, which may be made of anything
        same = False
    if not same:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    trace = "".join(traceback.format_exception(error)).rstrip()
    copy.add_note(f"raised in an episode worker:\n{trace}")
    return copy
