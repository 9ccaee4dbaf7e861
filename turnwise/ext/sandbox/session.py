"""A session: Python that remembers, in a process of its own, with a deadline for each call."""

import asyncio
import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from turnwise.ext.sandbox import wire
from turnwise.ext.sandbox.limits import Limits
from turnwise.ext.sandbox.replies import read_reply
from turnwise.ext.sandbox.results import CHANNELS, ExecutionStatus, InputImage, Result
from turnwise.ext.sandbox.session_process import CLOSED, ENDED, Child
from turnwise.ext.sandbox.zygote_process import SandboxLost
from turnwise.system import time_budget

MAX_CODE = 1024 * 1024
MAX_IMAGES_IN = 64
MAX_IMAGE_BYTES = 64 * 1024 * 1024
NO_ANSWER = "it did not answer in time"
END_SECONDS = 0.2
LOST = "the variables and files of this session were lost; later calls start afresh"
SMALL = 64 * 1024
"""Bytes of a reply that are read at once; a longer one would keep the event loop, and is read in a thread."""


class Session(Protocol):
    """What callers see, whether the code runs here or elsewhere."""

    async def run(self, code: str, seconds: float | None = None) -> Result:
        """Run once; SandboxLost when the machinery failed, which says nothing about the code."""
        ...

    async def close(self) -> None:
        """End it; nothing of it is left."""
        ...


class LocalSession:
    """A session on this machine.

    One call at a time; state survives between calls unless `stateless`. A process that had to be killed is replaced at
    the next call, and the result says that variables were lost. So does the first result after a call that raised,
    because the machinery failed or the caller stopped waiting.
    """

    def __init__(
        self,
        acquire: Callable[[], Awaitable["SandboxProcess"]],
        slots: asyncio.Semaphore,
        limits: Limits,
        seed: int,
        images: Sequence[InputImage] = (),
        stateless: bool = False,
    ) -> None:
        for image in images:
            check_image(image)
        if len(images) > MAX_IMAGES_IN:
            raise ValueError(f"{len(images)} images; a session takes at most {MAX_IMAGES_IN}")
        self.limits = limits
        self._acquire = acquire
        self._slots = slots
        self._seed = seed
        self._images = list(images)
        self._stateless = stateless
        self._place: SandboxProcess | None = None
        self._calls = 0
        self._remembers = False
        """Whether there may be variables or files of earlier calls."""
        self._gone: str | None = None
        """Why they are gone, while the caller has not been told."""
        self._turn = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> "LocalSession":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, code: str, seconds: float | None = None) -> Result:
        if len(code) > MAX_CODE:
            return Result(ExecutionStatus.ERROR, notices=(f"not run: more than {MAX_CODE} characters of code",))
        async with self._turn:
            if self._closed:
                raise SandboxLost("the session was closed")
            first = self._place is None
            if self._place is None:
                self._place = await self._acquire()
            try:
                async with time_budget.slot(self._slots):  # waiting for a slot is not the code's time
                    result = await self._call(self._place, code, seconds or self.limits.seconds, first)
            except BaseException as error:  # half a call, cancelled or lost: nobody can use the process any more
                if self._remembers:
                    self._gone, self._remembers = str(error) or "a call was cancelled", False
                await self._leave()
                if isinstance(error, OSError):  # of ours: the code's own end there
                    raise SandboxLost(f"the session could not be used: {error}") from error
                raise
            if self._stateless or not result.kept:
                await self._leave()
            self._remembers = result.kept and not self._stateless
            if self._gone is not None:
                notice = (
                    f"this session was lost ({self._gone}), and its variables and files with it; this call began afresh"
                )
                self._gone, result = None, replace(result, notices=(notice, *result.notices))
            return result

    async def close(self) -> None:
        self._closed = True
        await self._leave()

    async def _leave(self) -> None:
        slot, self._place = self._place, None
        if slot is not None:
            await slot.leave()

    async def _call(self, slot: "SandboxProcess", code: str, seconds: float, first: bool) -> Result:
        child = slot.child
        self._calls += 1
        header: dict[str, object] = {"id": self._calls, "code": code}
        if first:
            header["seed"] = self._seed
            header["images"] = [
                {"name": image.name, "mode": image.mode, "size": image.size, "length": len(image.data)}
                for image in self._images
            ]
        with contextlib.ExitStack() as stack:
            images = self._images if first else []
            sealed: list[int] = []
            if child.takes_descriptors:
                sealed = [stack.enter_context(_sealed(image.data)) for image in images]
                frame = wire.pack(header)
            else:
                frame = wire.pack({**header, "inband": True}, *(image.data for image in images))
            start = time.monotonic()
            reply = child.expect()
            child.send(frame, sealed)
        result = await self._settle(slot, reply, start, seconds)
        if result.kept:
            child.rest()
        return result

    async def _settle(
        self, slot: "SandboxProcess", reply: "asyncio.Future[wire.WireFrame]", start: float, seconds: float
    ) -> Result:
        """The result, whether the code answers, has to be interrupted, or has to be killed."""
        child = slot.child
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(seconds, self._interrupt, child, reply)
        watch = slot.watch()
        try:
            frame = await reply
        except wire.ProtocolError as error:
            return await self._ended(child, str(error), start, seconds)
        finally:
            deadline.cancel()
            watch.cancel()
        elapsed = time.monotonic() - start
        try:
            result = await self._read(frame, elapsed)
        except wire.ProtocolError as error:
            return await self._ended(child, str(error), start, seconds)
        if (excess := await slot.excess(elapsed)) is not None:
            return replace(
                result, status=ExecutionStatus.KILLED, kept=False, notices=(*result.notices, f"{excess}; {LOST}")
            )
        if result.status is ExecutionStatus.TIMEOUT:
            note = f"stopped after {seconds:g} s; variables keep the values they had at that point"
            result = replace(result, notices=(*result.notices, note))
        return result

    async def _read(self, frame: wire.WireFrame, elapsed: float) -> Result:
        if len(frame.header) + len(frame.blobs) <= SMALL:
            return read_reply(frame, self._calls, self.limits, elapsed)
        return await asyncio.to_thread(read_reply, frame, self._calls, self.limits, elapsed)

    async def _ended(self, child: Child, reason: str, start: float, seconds: float) -> Result:
        elapsed = time.monotonic() - start
        return replace(await _killed(child, reason, seconds if elapsed >= seconds else None), seconds=elapsed)

    def _interrupt(self, child: Child, reply: "asyncio.Future[wire.WireFrame]") -> None:
        """Time is up: the code may answer with what it has, and is then killed."""
        child.signal(signal.SIGINT)
        asyncio.get_running_loop().call_later(self.limits.grace, child.give_up_on, reply, NO_ANSWER)


class Cancellable(Protocol):
    """Something that goes on until it is cancelled."""

    def cancel(self) -> object: ...


class SandboxProcess(Protocol):
    """A process with a scratch folder."""

    child: Child

    async def excess(self, seconds: float) -> str | None:
        """What there is too much of after so many seconds, where the kernel does not see to that: threads, files."""
        ...

    def watch(self) -> "Cancellable":
        """Look at that while code runs."""
        ...

    async def leave(self) -> None:
        """Kill the process and remove its folder."""
        ...


def check_image(image: InputImage) -> None:
    """ValueError for an image that no session can be given."""
    if os.path.basename(image.name) != image.name or image.name in ("", ".", "..") or "\0" in image.name:
        raise ValueError(f"an image's name is a plain file name, not {image.name!r}")
    if len(image.name.encode()) > 200 or not 0 < len(image.data) <= MAX_IMAGE_BYTES:
        raise ValueError(f"image {image.name[:80]!r}: its name or content is empty or too long")
    if (image.mode is None) != (image.size is None):
        raise ValueError(f"image {image.name!r}: raw pixels need a mode and a size")
    if image.mode is not None and image.size is not None:
        wanted = image.size[0] * image.size[1] * CHANNELS.get(image.mode, 0)
        if wanted != len(image.data):
            raise ValueError(f"image {image.name!r}: {len(image.data)} bytes are not {image.size} in mode {image.mode}")


@contextlib.contextmanager
def _sealed(data: bytes) -> Iterator[int]:
    """A memory file with these bytes that nobody can change any more."""
    descriptor = os.memfd_create("image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one without a name
        return f"signal {number}"


async def _killed(child: Child, reason: str, seconds: float | None) -> Result:
    """Why the process is gone, from those who know: the zygote for its death, we for what we ended.

    `seconds` is the limit when the call ran into it.
    """
    by_itself = False
    if reason in (CLOSED, ENDED):
        await asyncio.wait((child.ended,), timeout=END_SECONDS)  # it may be about to end
        by_itself = child.ended.done()
    child.signal(signal.SIGKILL)
    status = await child.wait_ended()
    if status is None:
        raise SandboxLost("the sandbox's parent process ended in the middle of a call")
    if seconds is not None:
        what = f"stopped after {seconds:g} s"
    elif not by_itself:
        what = f"stopped: {reason}"
    elif status >= 0:
        what = f"the process ended with exit status {status}"
    else:
        what = f"the process was killed by {_signal_name(-status)}"
    kind = ExecutionStatus.KILLED if seconds is None else ExecutionStatus.TIMEOUT
    return Result(kind, kept=False, notices=(f"{what}; {LOST}",), peak_memory=child.peak)
