"""The process of the code under test: it imports and runs it for the tests, which are in another process.

Nothing of the tests is here: neither what they expect nor how they went.
"""

import asyncio
import copy
import importlib
import os
import pkgutil
import random
import socket
import sys
from types import ModuleType
from typing import Any

from turnwise.ext.swe.inside.marshalling import Guard
from turnwise.ext.swe.inside.proxies import FarObject
from turnwise.ext.swe.inside.rpc import Link


class CodeLink(Link):
    """What the tests may ask of the code."""

    def __init__(self, channel: socket.socket, scratch: str) -> None:
        super().__init__(channel, 1, scratch, Guard())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._patched: list[tuple[Any, str, Any]] = []

    def _do_import(self, name: str, places: list[str]) -> Any:
        sys.path[:0] = [folder for folder in places if folder not in sys.path]
        module = importlib.import_module(name)
        return list(module.__path__) if hasattr(module, "__path__") else None

    def _do_set(self, thing: Any, name: str, value: Any) -> None:
        setattr(thing, name, _method(value) if isinstance(thing, type) else value)

    def _do_public(self, module: ModuleType) -> list[str]:
        return [
            str(name) for name in getattr(module, "__all__", [name for name in dir(module) if not name.startswith("_")])
        ]

    def _do_vars(self, thing: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(thing).items() if not name.startswith("__")}

    def _do_copy(self, thing: Any) -> Any:
        return copy.copy(thing)

    def _do_deepcopy(self, thing: Any) -> Any:
        return copy.deepcopy(thing)

    def _do_functions(self, kind: type) -> list[str]:
        bases = [base for base in kind.__mro__ if base is not object]
        skipped = {
            f"__{name}__" for name in ("new", "class", "init_subclass", "subclasshook", "getattribute", "class_getitem")
        }
        return sorted({name for base in bases for name, value in vars(base).items() if callable(value)} - skipped)

    def _do_subclass(self, name: str, base: type, space: dict[str, Any]) -> type:
        return type(base)(name, (base,), {key: _method(value) for key, value in space.items()})

    def _do_await(self, number: int) -> Any:
        async def waited() -> Any:
            return await self._ours[number]

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(waited())

    def _do_patch(self, target: str, name: str, value: Any) -> None:
        """A test replaced something of a module that both processes have."""
        thing = pkgutil.resolve_name(target)
        self._patched.append((thing, name, getattr(thing, name, None)))
        setattr(thing, name, value)

    def _do_unpatch(self, _: None) -> None:
        setattr(*self._patched.pop())


def _method(value: Any) -> Any:
    """A function of the tests, as one that becomes a method of its class."""
    if not (isinstance(value, FarObject) and type(value).__name__ == "function"):
        return value
    function: Any = value
    return lambda *args, **kwargs: function(*args, **kwargs)


class _Printed:
    """sys.stdout and sys.stderr: what is printed goes to the tests with the next message."""

    encoding, errors, closed = "utf-8", "strict", False

    def __init__(self, link: Link, stream: int) -> None:
        self._link, self._stream = link, stream

    def write(self, text: str) -> int:
        self._link.said.append((self._stream, str(text)))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def _world(news: Any) -> None:
    """What belongs to a process, as the tests have set it in theirs."""
    if news is None:
        return
    if "environ" in news:
        os.environ.clear()
        os.environ.update(news["environ"])
    if "argv" in news:
        sys.argv[:] = news["argv"]
    if "folder" in news:
        os.chdir(news["folder"])
    if "random" in news:
        random.setstate(news["random"])


def main(descriptor: int, scratch: str) -> None:
    sys.set_int_max_str_digits(0)
    link = CodeLink(socket.socket(fileno=descriptor), scratch)
    link.told = _world
    sys.stdout, sys.stderr = _Printed(link, 1), _Printed(link, 2)
    sys.modules["__main__"] = ModuleType("__main__")
    link.serve()
    os._exit(0)
