"""Runs named tests of a repository and says how each went, as a script inside a shell session that nobody used before.

The tests run here; the code under test, which is untrusted, runs in a process of its own (`code_process.py`). Tests
come with the order and not from files, and no other file of the repository is run here, so nothing that the policy
wrote decides about a test: it gives values and raises errors, and both are judged where it cannot reach.
"""

import importlib.machinery
import inspect
import json
import os
import random
import socket
import subprocess
import sys
import unittest
import unittest.mock
from collections.abc import Sequence
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

from turnwise.ext.swe.inside import proxies
from turnwise.ext.swe.inside.comparison_checks import doubt
from turnwise.ext.swe.inside.held_files import HeldFiles
from turnwise.ext.swe.inside.marshalling import Guard
from turnwise.ext.swe.inside.outcomes import with_pytest, with_unittest
from turnwise.ext.swe.inside.proxies import FarModule, is_far
from turnwise.ext.swe.inside.rpc import Link
from turnwise.ext.swe.inside.suppressed_errors import may_swallow

_DECIDERS = frozenset({"unittest", "pytest", "_pytest", "pluggy", "doctest", "turnwise"})
_CLOSED = (ModuleType, CodeType, FrameType, TracebackType, unittest.TestCase, unittest.TestResult)
_FRAMES = frozenset({"gi_frame", "cr_frame", "ag_frame", "tb_frame", "gi_code", "cr_code", "ag_code"})
_ASKED_OF_US = frozenset({"call", "get", "set", "special", "await"})


class _Guard(Guard):
    """What the code under test may do to what tests gave it: use it, as the tests' own public things."""

    link: Link

    def check(self, what: str, thing: Any, args: tuple[Any, ...]) -> None:
        if what not in _ASKED_OF_US:
            raise PermissionError(f"the code under test asked the tests for {what!r}")
        if what == "await":
            return
        is_test_class = isinstance(thing, type) and issubclass(thing, unittest.TestCase | unittest.TestResult)
        if isinstance(thing, _CLOSED) or is_test_class:
            raise PermissionError("a test's own machinery is not for the code under test")
        if what == "special" and args[0] not in proxies.SPECIALS:
            raise PermissionError(f"not to be asked: {args[0]!r}")
        if what in ("get", "set"):
            self._check_name(what, thing, str(args[0]))

    def _check_name(self, what: str, thing: Any, name: str) -> None:
        private = name.startswith("_") or name in _FRAMES or isinstance(thing, FunctionType | MethodType)
        is_own = isinstance(thing, unittest.mock.NonCallableMock) and name in dir(type(thing))
        if private or (what == "set" and (is_own or name.startswith("assert") or isinstance(thing, type))):
            raise PermissionError(f"the code under test may not {what} {name!r} of what a test gave it")

    def local_class(self, module: str, name: str) -> type | None:
        top = module.partition(".")[0]
        if top in _DECIDERS or not (module in sys.modules or top in sys.stdlib_module_names):
            return None
        importlib.import_module(module)
        resolved = proxies.local_class(module, name)
        return None if resolved is None or (resolved is not object and issubclass(resolved, type)) else resolved

    def module(self, name: str) -> ModuleType:
        return self.link.modules.setdefault(name, FarModule(name, self.link))


class _Link(Link):
    """The tests' end of the channel to the code under test."""

    def _do_await(self, number: int) -> Any:
        waiting = self._ours[number]
        if not inspect.isawaitable(waiting):
            raise PermissionError("not to be waited for")
        steps = waiting.__await__()
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        raise RuntimeError("a test's coroutine waits, which it cannot for code in another process")


class World:
    """What belongs to a process and tests set in theirs: said to the other one when it has changed."""

    def __init__(self) -> None:
        self._known = self._current()

    def _current(self) -> dict[str, Any]:
        return {
            "environ": dict(os.environ), "argv": list(sys.argv), "folder": os.getcwd(), "random": random.getstate(),
        }  # fmt: skip

    def news(self) -> dict[str, Any] | None:
        now = self._current()
        changed = {key: value for key, value in now.items() if value != self._known[key]}
        self._known = now
        return changed or None


def hear(pieces: Sequence[Sequence[Any]]) -> None:
    """Print here what the code under test printed: tests may look at it."""
    for stream, text in pieces:
        (sys.stderr if stream == 2 else sys.stdout).write(str(text))


def pass_on_patches(link: Link) -> None:
    """What `mock.patch` replaces in a module that both processes have is replaced in both."""
    kind: Any = unittest.mock._patch
    enter, leave = kind.__enter__, kind.__exit__
    active: set[int] = set()

    def far_enter(self: Any) -> Any:
        value = enter(self)
        target = self.target
        name = target.__name__ if type(target) is ModuleType else ".".join(link.named(target) or ())
        if name and name.partition(".")[0] not in _DECIDERS and not is_far(target):
            link.request("patch", name, self.attribute, getattr(target, self.attribute))
            active.add(id(self))
        return value

    def far_leave(self: Any, *error: Any) -> Any:
        if id(self) in active:
            active.discard(id(self))
            link.request("unpatch", None)
        return leave(self, *error)

    kind.__enter__, kind.__exit__ = far_enter, far_leave


def doubt_differences() -> None:
    """What is nearly equal is numbers, what has differences is sets: an object of the code's says which it is."""

    def changed(real: Any, kind: type) -> Any:
        def compare(self: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
            return real(self, *(kind(value) if is_far(value) else value for value in (first, second)), *args, **kwargs)

        return compare

    for name, kind in (("assertAlmostEqual", float), ("assertNotAlmostEqual", float), ("assertSetEqual", set)):
        setattr(unittest.TestCase, name, changed(getattr(unittest.TestCase, name), kind))


def start_code(sources: list[list[str]], stub: str, scratch: str) -> socket.socket:
    """The process of the code under test; it has nothing of ours but its end of the line."""
    ours, theirs = socket.socketpair()
    run = f"{stub}\nsys.modules['turnwise.ext.swe.inside.code_process'].main({theirs.fileno()}, {scratch!r})"
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", run], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
    )  # fmt: skip
    theirs.close()
    assert child.stdin is not None
    with child.stdin as stream:
        stream.write(json.dumps(sources).encode() + b"\n")
    return ours


def main(sources: list[list[str]], stub: str) -> None:
    order = json.loads(sys.stdin.buffer.readline())
    secret = sys.stdin.buffer.readline().strip()
    say = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.set_int_max_str_digits(0)
    scratch = order["scratch"]
    guard = _Guard()
    guard.link = link = _Link(start_code(sources, stub, scratch), 0, scratch, guard)
    link.doubt, link.may_swallow, link.heard, link.before = doubt, may_swallow, hear, World().news
    for name, _ in sources:
        del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")
    sys.path.insert(0, os.getcwd())
    HeldFiles(link, os.getcwd(), scratch, order["held"], order["code"]).install()
    pass_on_patches(link)
    doubt_differences()
    names = order["tests"]
    passed = (with_pytest if order["runner"] == "pytest" else with_unittest)(names)
    data = secret + b"".join(b"p" if name in passed else b"f" for name in names) + b"\n"
    while data:
        data = data[os.write(say, data) :]
    os._exit(0)
