"""The loop of a session: one request, one reply, until the host closes the channel."""

import builtins
import io
import random
import socket
import sys
from _json import encode_basestring_ascii, make_encoder, make_scanner
from array import array
from ctypes import CDLL
from dataclasses import dataclass
from fcntl import F_DUPFD_CLOEXEC, fcntl
from json import JSONDecoder
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ, mmap
from os import _exit, close, fstat, getpid, pread
from os.path import basename
from resource import RUSAGE_SELF, getrusage
from typing import Any, NoReturn

from turnwise.ext.sandbox.inside.capture import HeadTail, RawOutput, TextStream, cut
from turnwise.ext.sandbox.inside.execute import Interpreter, TimeLimit, describe, release, status_of
from turnwise.ext.sandbox.inside.images import Gallery, ImageSource, Inputs
from turnwise.ext.sandbox.inside.packages import Current, change_packages
from turnwise.ext.sandbox.inside.warmup import warm_up
from turnwise.ext.sandbox.wire import PREFIX, REQUESTS, ProtocolError, lengths

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules


def refuse(value: object) -> NoReturn:
    """A reply holds nothing but JSON."""
    raise TypeError(f"{type(value).__name__} in a reply")


# The compiled parts of json, because its Python parts use builtins that the code may have replaced.
encode = make_encoder(None, refuse, encode_basestring_ascii, None, ":", ",", False, False, False)
decode = make_scanner(JSONDecoder())  # type: ignore[arg-type]  # a decoder is what it wants
flush_c_streams = CDLL(None).fflush

FIRST_READ = 65536
DESCRIPTORS = 64
"""Most that one message carries."""
MOST_MAPPED = 16
"""Images that keep a descriptor, of which the code needs some too."""
MOST_NOTICES = 12
RESERVE = 4 * 1024 * 1024
"""Address space that is held while code runs: what is left for reading and compiling calls, and for replies."""
LEAST_RESERVE = 256 * 1024
SCM_RIGHTS = socket.SCM_RIGHTS
SOL_SOCKET = socket.SOL_SOCKET
MSG_CMSG_CLOEXEC = socket.MSG_CMSG_CLOEXEC


@dataclass
class Settings:
    """What a session may give back by one call, and where its files are; sent by the host as JSON."""

    output: int
    images: int
    pixels: int
    scratch: str


class Channel:
    """Frames over a stream socket; descriptors come along with a frame's bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self._receive = connection.recvmsg_into
        self._send = connection.sendall
        self._first = bytearray(FIRST_READ)
        self._room = socket.CMSG_SPACE(DESCRIPTORS * 4)
        self.descriptors: list[int] = []

    def _fill(self, buffer: memoryview) -> int:
        count, ancillary, _, _ = self._receive([buffer], self._room, MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == SOL_SOCKET and kind == SCM_RIGHTS:
                numbers = array("i")
                numbers.frombytes(data[: len(data) - len(data) % 4])
                self.descriptors += numbers
        return count

    def read(self) -> tuple[dict[str, Any], memoryview] | None:
        """The next request and its blobs; None when the host is gone."""
        first = memoryview(self._first)
        have = 0
        while have < PREFIX.size:
            count = self._fill(first[have:])
            if not count:
                return None
            have += count
        total, header_size = lengths(bytes(first[: PREFIX.size]), REQUESTS)
        end = PREFIX.size + total
        frame = first
        if end > FIRST_READ:
            frame = memoryview(bytearray(end))
            frame[:have] = first[:have]
        while have < end:
            count = self._fill(frame[have:end])
            if not count:
                return None
            have += count
        start = PREFIX.size + header_size
        return decode(str(frame[PREFIX.size : start], "utf-8"), 0)[0], frame[start:end]

    def write(self, reply: dict[str, Any], blobs: list[bytes]) -> None:
        """Sends a reply with its blobs to the host."""
        header = "".join(encode(reply, 0)).encode("ascii")
        prefix = PREFIX.pack(len(header) + sum(map(len, blobs)), len(header))
        self._send(prefix + header)
        for blob in blobs:
            self._send(blob)

    def close_descriptors(self) -> None:
        """They were read, or nobody asked for them."""
        for descriptor in self.descriptors:
            close(descriptor)
        self.descriptors = []


class WorkerSession:
    """What stays between the calls: the namespace, the streams, the images."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.interpreter = Interpreter()
        self.gallery = Gallery(settings.images, settings.pixels, settings.scratch)
        self.inputs = Inputs(self.gallery, settings.scratch)
        self.out = HeadTail(settings.output)
        self.err = HeadTail(settings.output)
        self.streams = (TextStream("<stdout>", self.out, 1), TextStream("<stderr>", self.err, 2))
        self.raw = RawOutput(fcntl(1, F_DUPFD_CLOEXEC, 10))
        self.reserve: mmap | None = None
        self.pid = getpid()
        self.value: str | None = None
        self.notices: list[str] = []
        sys.__stdout__, sys.__stderr__ = self.streams  # type: ignore[misc, assignment]
        self.interpreter.namespace["show"] = self.gallery.show
        Current.gallery = self.gallery

    def answer(self, request: dict[str, Any], blobs: memoryview, descriptors: list[int]) -> dict[str, Any]:
        """Run the code of a request; the reply, whose images are with the gallery."""
        alarm = self.interpreter.alarm
        alarm.begin()
        self.begin(request)
        if request.get("images"):
            self.notices += self.install(request, blobs, descriptors)
        code = request["code"]
        self.interpreter.begin(code)
        error = alarm.guard(lambda: self.work(code))
        stopped = alarm.stopped
        if getpid() != self.pid:  # a process that the code forked, and that came back here
            _exit(0)
        self.give_up_reserve()
        try:
            reply = self.finish(error, stopped)
        except MemoryError:
            self.gallery.begin()
            reply = self.reply("memory", None)
        alarm.end()
        if reply["status"] == "memory" and not self.take_reserve():
            reply["notices"].append("the memory is still full: variables that are not needed should be deleted")
        self.give_up_reserve()
        reply["id"] = request["id"]
        return reply

    def install(self, request: dict[str, Any], blobs: memoryview, descriptors: list[int]) -> list[str]:
        """The images of a request; notices about what cannot be used."""
        sources = sources_of(request, blobs, descriptors, MOST_MAPPED - self.inputs.mapped)
        return self.inputs.install(sources, self.interpreter.namespace)

    def begin(self, request: dict[str, Any]) -> None:
        """Fresh streams and no images; the seed comes with the first call."""
        self.out.clear()
        self.err.clear()
        self.value = None
        self.notices = []
        sys.stdout, sys.stderr = self.streams
        sys.stdin = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        self.gallery.begin()
        if "seed" in request:
            seed_all(request["seed"])

    def work(self, code: str) -> None:
        """The part that runs code of the session, the repr of its value included."""
        cell = self.interpreter.compiled(code)
        self.take_reserve()
        value = self.interpreter.run(cell)
        if value is not None and not self.gallery.offer(value):
            self.value = cut(str(repr(value)), self.settings.output)

    def finish(self, error: BaseException | None, stopped: bool) -> dict[str, Any]:
        """Everything that is left to do when the code has ended."""
        alarm = self.interpreter.alarm
        status, failure = ("ok", None) if error is None else self.classify(error)
        if error is not None and status == "ok":
            self.notices.append("the code asked to exit; the session goes on")
            failure = None
        if error is not None and status == "memory":
            alarm.guard(lambda: release(error), late=True)
        if stopped or alarm.stopped:
            return self.reply("timeout", failure)
        fault = alarm.guard(self.gallery.collect)
        if isinstance(fault, TimeLimit):
            status = "timeout"
            self.notices.append("stopped while reading the image files that the code saved")
        elif fault is not None:
            self.notices.append(f"image files that the code saved could not be read ({type(fault).__name__})")
        return self.reply(status, failure)

    def classify(self, error: BaseException) -> tuple[str, dict[str, Any] | None]:
        """Status and failure, found under guard because the exception's class may be the code's own."""
        results: list[tuple[str, dict[str, Any]]] = []

        def work() -> None:
            results.append((status_of(error), describe(error, self.interpreter)))

        fault = self.interpreter.alarm.guard(work, late=True)
        if fault is None:
            return results[0]
        text = f"<describing the exception raised {type(fault).__name__[:200]}>"
        return "error", {"kind": "BaseException", "message": text, "line": None, "source": None, "traceback": text}

    def reply(self, status: str, failure: dict[str, Any] | None) -> dict[str, Any]:
        """The header of the reply, without its id."""
        flush_c_streams(None)
        if self.raw.drain(self.out):
            self.notices.append("output of compiled code was lost: it is kept up to a fixed size")
        pictures, notices = self.gallery.summary()
        return {
            "status": status,
            "stdout": self.out.text(),
            "stderr": self.err.text(),
            "value": self.value,
            "failure": failure,
            "images": pictures,
            "notices": self.notices[:MOST_NOTICES] + notices,
            "peak": getrusage(RUSAGE_SELF).ru_maxrss * 1024,
        }

    def give_up_reserve(self) -> None:
        """Room for our own work."""
        if self.reserve is not None:
            self.reserve.close()
            self.reserve = None

    def take_reserve(self) -> bool:
        """Hold the address space; False where variables fill so much that there is not room for all of it."""
        size = RESERVE
        while size >= LEAST_RESERVE:
            try:
                self.reserve = reserve(size)
                return size == RESERVE
            except OSError:
                size //= 2
        return False


def reserve(size: int) -> mmap:
    """Address space that is never touched, so that it takes no memory."""
    return mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)


def sources_of(request: dict[str, Any], blobs: memoryview, descriptors: list[int], room: int) -> list[ImageSource]:
    """The images of a request, from its descriptors or its blobs; `room` of them are mapped instead of read."""
    sources = []
    start = 0
    for index, image in enumerate(request["images"]):
        length = image["length"]
        if request.get("inband"):
            data: bytes | mmap = bytes(blobs[start : start + length])
            start += length
        else:
            if index >= len(descriptors):
                raise ProtocolError(f"{len(request['images'])} images with {len(descriptors)} descriptors")
            data, room = taken(descriptors[index], length, room if image.get("mode") else 0)
        if len(data) != length:
            raise ProtocolError(f"{len(data)} bytes instead of {length} of the image {image['name']!r}")
        size = image.get("size")
        name = basename(image["name"])
        if name in ("", ".", ".."):
            raise ProtocolError(f"{image['name']!r} is not a file name")
        sources.append(ImageSource(name, data, image.get("mode"), tuple(size) if size else None))
    return sources


def taken(descriptor: int, length: int, room: int) -> tuple[bytes | mmap, int]:
    """The content of a descriptor, and how much room is left. Large content is read when it is used."""
    if room > 0 and length >= FIRST_READ and fstat(descriptor).st_size >= length:
        return mmap(descriptor, length, flags=MAP_PRIVATE, prot=PROT_READ), room - 1
    return pread(descriptor, length, 0), room


def seed_all(seed: int) -> None:
    """The generators of `random` and numpy, now or when numpy is imported."""
    random.seed(seed)
    Current.seed = seed % 2**32
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(Current.seed)


def prepare(preload: list[str]) -> None:
    """Once, in the process that the sessions are forked from, after it imported the packages `preload`.

    Patches what is loaded, sees to what will be loaded later, and does once what first use would cost every session.
    """
    change_packages()
    warm_up()
    main = sys.modules["__main__"]
    interpreter = Interpreter()
    interpreter.begin("[0][1]")
    error = interpreter.alarm.guard(lambda: interpreter.run(interpreter.compiled("[0][1]")))
    if error is not None:
        encode(describe(error, interpreter), 0)
    sys.modules["__main__"] = main


def rehearse(settings: Settings) -> None:
    """A first call that nobody sees: it takes copies of the memory pages that every first call needs."""
    session = WorkerSession(settings)
    reply = session.answer({"id": 0, "code": "print(0)\n0", "seed": 0}, memoryview(b""), [])
    "".join(encode(reply, 0)).encode("ascii")
    close(session.raw.descriptor)


def serve(channel: socket.socket, settings: Settings) -> NoReturn:
    """Answer requests until the host closes the channel; the process ends here."""
    frames = Channel(channel)
    session = WorkerSession(settings)
    session.interpreter.alarm.begin()
    session.interpreter.alarm.end()
    while True:
        request = frames.read()
        if request is None:
            _exit(0)
        reply = session.answer(*request, frames.descriptors)
        frames.close_descriptors()
        frames.write(reply, session.gallery.blobs())
        session.gallery.begin()
