"""One session's process as the host sees it: frames to it and from it, signals, and how it ended."""

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from turnwise.ext.sandbox import wire

CLOSED, ENDED = "the process closed its socket", "the process ended"
"""Why nothing more comes from a process, when it was not we who gave it up."""
REST_SECONDS = 0.005
REAP_SECONDS = 10.0
"""In which the zygote tells of a process that was killed."""


class Child:
    """One session's process: frames to it and from it, signals, and how it ended."""

    takes_descriptors = True
    """Whether files can be handed over open; else their content goes with the frame."""

    def __init__(self, number: int, channel: socket.socket, caps: wire.Caps) -> None:
        self.number = number
        self.pidfd = -1
        self.pid = 0
        """As we see it; 0 when we do not."""
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        """The exit status (negative: the signal), or None when the zygote was lost with it."""
        self.peak = 0
        self.broken: str | None = None
        """Why nothing from this process is believed any more."""
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._caps = caps
        self._buffer = bytearray()
        self._waiting: asyncio.Future[wire.WireFrame] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._stopped = False
        self._loop.add_reader(channel.fileno(), self._readable)

    def expect(self) -> "asyncio.Future[wire.WireFrame]":
        """The next frame, to be awaited; wire.ProtocolError when none will come. Anything unexpected is a breach."""
        self._waiting = self._loop.create_future()
        if self.broken is not None:
            self._waiting.set_exception(wire.ProtocolError(self.broken))
        return self._waiting

    def known_by(self, pidfd: int) -> None:
        """The zygote handed us a descriptor of the process."""
        self.pidfd = pidfd
        match = re.search(r"^Pid:\s*(-?\d+)", Path(f"/proc/self/fdinfo/{pidfd}").read_text(), re.MULTILINE)
        assert match is not None
        self.pid = int(match[1])

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send, in the background where the socket does not take it at once: a process that does not read must not
        keep us. Whoever waits for the answer has a deadline."""
        try:
            if descriptors:
                sent = socket.send_fds(self._channel, [frame], list(descriptors))
            else:
                sent = self._channel.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it has ended; whoever waits for the answer learns that
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        if self._stopped:
            self._stopped = False
            self.signal(signal.SIGCONT)  # after the frame, so that it wakes only once
        if sent < len(frame):
            self._sending = self._loop.create_task(self._send_rest(memoryview(frame)[sent:]))

    async def _send_rest(self, rest: memoryview) -> None:
        with contextlib.suppress(OSError):
            await self._loop.sock_sendall(self._channel, rest)

    def rest(self) -> None:
        """Threads that a call left behind get no time until the next one. Soon, not now: it may come at once."""
        self._resting = self._loop.call_later(REST_SECONDS, self._stop)

    def _stop(self) -> None:
        self._stopped = True
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Kill it; the zygote buries it."""
        self.signal(signal.SIGKILL)
        self._hang_up()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    async def wait_ended(self) -> int | None:
        """How it ended after it was killed; None when the zygote was lost with it, or does not say."""
        await asyncio.wait((self.ended,), timeout=REAP_SECONDS)
        return self.ended.result() if self.ended.done() else None

    def has_ended(self, status: int | None, peak: int) -> None:
        """The zygote's word, which comes after everything the process wrote."""
        self.peak = peak
        if not self.ended.done():
            self.ended.set_result(status)
        if self._waiting is not None and not self._waiting.done():
            self._readable()
        self.give_up(ENDED)

    def _readable(self) -> None:
        try:
            data = self._channel.recv(1 << 20 if self._buffer else 1 << 16)  # a large buffer is slow to make
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self.give_up(CLOSED)
        self._buffer += data
        if self._waiting is None or self._waiting.done():
            return self.give_up("it wrote without being asked")
        try:
            frame = self._frame()
        except wire.ProtocolError as error:
            return self.give_up(str(error))
        if frame is not None:
            self._waiting.set_result(frame)

    def _frame(self) -> wire.WireFrame | None:
        """A whole frame, and nothing after it. It is not looked into here, because that may take long."""
        if len(self._buffer) < wire.PREFIX.size:
            return None
        total, header = wire.lengths(self._buffer[: wire.PREFIX.size], self._caps)
        if len(self._buffer) < wire.PREFIX.size + total:
            return None
        if len(self._buffer) > wire.PREFIX.size + total:
            raise wire.ProtocolError("more than one answer")
        data, self._buffer = self._buffer, bytearray()
        body = memoryview(data)[wire.PREFIX.size :]
        return wire.WireFrame(body[:header], body[header:])

    def give_up(self, reason: str) -> None:
        """Believe nothing more from it."""
        if self.broken is not None:
            return
        self.broken = reason
        self._hang_up()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(wire.ProtocolError(reason))
            self._waiting.exception()  # whoever waited may have stopped

    def give_up_on(self, reply: "asyncio.Future[wire.WireFrame]", reason: str) -> None:
        """Gives the process up, unless this reply has come."""
        if not reply.done():
            self.give_up(reason)

    def _hang_up(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
        if self._sending is not None:
            self._sending.cancel()
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()
