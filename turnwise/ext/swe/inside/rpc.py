"""A line between two processes: each has the other do what is asked, and may be asked itself while it waits.

Everything is JSON, so that no byte of the other side is run here; what it may do to our objects, `Guard` says.
"""

import contextlib
import json
import socket
import struct
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from turnwise.ext.swe.inside.marshalling import FarFailure, Guard, Lost, Packing
from turnwise.ext.swe.inside.suppressed_errors import is_verdict

_SIZE = struct.Struct(">Q")
_MOST = 64 << 20


class Link(Packing):
    """One end of the channel between the tests and the code under test."""

    def __init__(self, channel: socket.socket, first: int, scratch: str, guard: Guard) -> None:
        super().__init__(first, scratch, guard)
        self.channel = channel
        self.doubt: Callable[[Callable[[str, Any], Any], str, Any], Any] | None = None
        self.may_swallow: Callable[[BaseException, FrameType], bool] = lambda error, frame: True
        self.heard: Callable[[list[list[Any]]], None] = lambda pieces: None
        self.before: Callable[[], Any] = lambda: None
        self.told: Callable[[Any], None] = lambda news: None
        self.said: list[tuple[int, str]] = []
        self._lock = threading.RLock()

    # ---- messages

    def request(self, what: str, *args: Any) -> Any:
        if not self.is_trusted and threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the tests can be called from the main thread only")
        failed: BaseException | None = None
        with self._lock:
            self._send({"do": what, "args": [self.pack(argument) for argument in args]})
            while "do" in (message := self._receive()):
                failed = self._serve(message) or failed
            key = "raised" if "raised" in message else "value"
            answer = self.unpack_all(message, key)
            if failed is not None:  # in a callback: whatever the code under test made of it
                raise failed
            if key == "raised":
                raise _error(answer)
            return answer

    def serve(self) -> None:
        """Do what is asked until the other side is gone."""
        with contextlib.suppress(Lost):
            while True:
                self._serve(self._receive())

    def special(self, thing: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def ask(name: str, *given: Any) -> Any:
            return self.request("special", thing, name, given, kwargs)

        if self.doubt is not None and len(args) == 1:
            return self.doubt(ask, name, args[0])
        answer = ask(name, *args)
        if name not in ("__exit__", "__aexit__") or not isinstance(args[1], BaseException):
            return answer
        leaving = sys._getframe(2)
        if name == "__aexit__":
            return self._left(answer, args[1], leaving)
        return answer and self.may_swallow(args[1], leaving)

    async def _left(self, answer: Any, error: BaseException, leaving: FrameType) -> Any:
        return await answer and self.may_swallow(error, leaving)

    def _serve(self, message: dict[str, Any]) -> BaseException | None:
        """Do what is asked; an assertion of the tests' own that failed is given back."""
        failed = None
        try:
            args = self.unpack_all(message, "args")
            what = message["do"]
            self.guard.check(what, args[0], tuple(args[1:]))
            answer = {"value": self.pack(getattr(self, f"_do_{what}")(*args))}
        except Lost:
            raise
        except BaseException as error:  # whatever our code raises is the answer
            answer = {"raised": self.pack(error)}
            failed = error if self.is_trusted and is_verdict(error) else None
        self._send(answer)
        return failed

    def _send(self, message: dict[str, Any]) -> None:
        message["news"] = self.pack(self.before())
        message["out"], self.said = self.said, []
        message["changed"] = self._changed()
        message["dropped"] = self._drop()
        try:
            data = json.dumps(message).encode()
            self.channel.sendall(_SIZE.pack(len(data)) + data)
        except OSError as error:
            raise Lost from error

    def _receive(self) -> dict[str, Any]:
        size = _SIZE.unpack(self._exactly(_SIZE.size))[0]
        if size > _MOST:
            raise Lost
        try:
            message = json.loads(self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise Lost from error
        if not isinstance(message, dict):
            raise Lost
        self.heard(message["out"] if isinstance(message.get("out"), list) else [])
        return message

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self.channel.recv(min(size - len(data), 1 << 20))
            except OSError as error:
                raise Lost from error
            if not piece:
                raise Lost
            data += piece
        return bytes(data)

    def unpack_all(self, message: dict[str, Any], key: str) -> Any:
        """What a message carries, once what was changed over there is changed here."""
        try:
            value = [self.unpack(packed) for packed in message["args"]] if key == "args" else self.unpack(message[key])
            for number, contents in message["changed"]:
                self._fill(number, contents)
            for gone in message["dropped"]:
                self._forget(gone)
            self.told(self.unpack(message["news"]))
        except (KeyError, IndexError, AttributeError) as error:
            raise Lost from error
        return value

    # ---- what can be asked of us

    def _do_call(self, thing: Any, args: Any, kwargs: Any) -> Any:
        return thing(*args, **kwargs)

    def _do_get(self, thing: Any, name: str) -> Any:
        return getattr(thing, name)

    def _do_set(self, thing: Any, name: str, value: Any) -> None:
        setattr(thing, name, value)

    def _do_del(self, thing: Any, name: str) -> None:
        delattr(thing, name)

    def _do_dir(self, thing: Any) -> list[str]:
        return dir(thing)

    def _do_special(self, thing: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__call__":
            return thing(*args, **kwargs)
        if type(thing).__module__ == "unittest.mock":
            return getattr(thing, name)(*args, **kwargs)
        return getattr(type(thing), name)(thing, *args, **kwargs)


def _error(error: Any) -> BaseException:
    return error if isinstance(error, BaseException) else FarFailure("raised what is no exception")
