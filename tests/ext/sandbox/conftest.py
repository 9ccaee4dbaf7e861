"""A pool to attack, an honest neighbour beside it, and the host's look at what an attack left behind."""

import asyncio
import contextlib
import os
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from turnwise.ext.sandbox.inside import syscall_numbers
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.limits import MIB, Limits
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.results import ExecutionStatus, Result

LIMITS = Limits(
    seconds=5, grace=0.4, memory=256 * MIB, scratch=8 * MIB, files=200, output=2000, images=4, pixels=250_000
)
MARK = "XDG_CACHE_HOME"
"""Goes to a zygote and its sessions as part of MPLCONFIGDIR, so that their processes can be told from all others."""
PRELUDE = """
import ctypes, errno, fcntl, json, mmap, os, resource, select, signal, socket, struct, subprocess, sys, threading, time
HERE = os.getcwd()
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def syscall(name, *arguments):
    words = [ctypes.c_ulong(one % 2**64) if isinstance(one, int) else one for one in arguments]
    found = libc.syscall(ctypes.c_long(NUMBERS[name] if isinstance(name, str) else name), *words)
    if found == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
def forge(header, blobs=b"", total=None, length=None):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    total = len(encoded) + len(blobs) if total is None else total
    data = struct.pack("!II", total, len(encoded) if length is None else length) + encoded + blobs
    while data:
        data = data[os.write(3, data):]
"""
PRELOAD = ("ctypes", "fcntl", "json", "mmap", "resource", "select", "socket", "struct", "subprocess", "threading")
CAME_THROUGH = "came through: "
REFUSALS = {"PermissionError", "FileNotFoundError", "OSError", "NotADirectoryError", "BlockingIOError", "gaierror"}
"""How the kernel says no. Any other exception is a mistake in the attack, and no proof."""


@dataclass(frozen=True)
class Attempt:
    """How far an attack came: what it returned, or how it was refused."""

    found: str | None
    result: Result

    @property
    def refused(self) -> bool:
        failure = self.result.failure
        return self.found is None and failure is not None and failure.kind in REFUSALS

    def __str__(self) -> str:
        return f"{self.found!r} {self.result.status} {self.result.text()}"


class Arena:
    """A pool at one level, with a loop to run it and a session that does nothing wrong."""

    def __init__(self, level: SandboxLevel, mark: str, limits: Limits = LIMITS) -> None:
        self.level, self.mark, self.limits = level, mark, limits
        self.loop = asyncio.new_event_loop()
        self.accidents: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.accidents.append(context))
        settings = PoolSettings(level=level, min_level=level, limits=limits, preload=PRELOAD, warm=0, running=8)
        self.pool = SandboxPool(settings)
        self.do(self.pool.__aenter__())
        self.neighbour = self.pool.session(seed=11)
        began = self.do(self.neighbour.run("import os; total = 0; place = os.getcwd(); place, os.getuid()"))
        self.place, self.uid = eval(began.value or "")
        self.total = self.checks = 0
        self.zygote = min(self.processes())
        self.quiet = self.processes()

    @property
    def namespaces(self) -> bool:
        return self.level.reaches(SandboxLevel.L3)

    def do(self, work: Coroutine[Any, Any, Any], limit: float = 30) -> Any:
        """Run it to its end; a host that hangs fails the test."""
        return self.loop.run_until_complete(asyncio.wait_for(work, limit))

    def run(
        self, *cells: str, seconds: float | None = None, names: dict[str, Any] | None = None, **options: Any
    ) -> Result:
        """The last result of cells in a session of their own, with the prelude before them."""

        async def work() -> Result:
            async with self.pool.session(**options) as session:
                result = await session.run(self.prelude(names or {}))
                assert result.status is ExecutionStatus.OK, result
                for cell in cells:
                    result = await session.run(textwrap.dedent(cell), seconds)
                return result

        return self.do(work())

    def prelude(self, names: dict[str, Any]) -> str:
        known = {"NUMBERS": syscall_numbers.table(platform.machine()), "SCRATCH": self.limits.scratch, **names}
        return PRELUDE + "\n".join(f"{name} = {value!r}" for name, value in known.items())

    def attack(self, body: str, **names: Any) -> Attempt:
        """Run the body of a function, which returns something if the attack worked."""
        return self.attacks({"": body}, **names)[""]

    def attacks(self, bodies: dict[str, str], **names: Any) -> dict[str, Attempt]:
        """Each of them in one session after the other, from its first folder; another session where one ended it."""

        async def work() -> dict[str, Attempt]:
            found: dict[str, Attempt] = {}
            async with self.pool.session() as session:
                ready = False
                for name, body in bodies.items():
                    if not ready:
                        assert (await session.run(self.prelude(names))).status is ExecutionStatus.OK
                    result = await session.run(as_cell(body))
                    ready = result.kept
                    found[name] = attempt_of(result)
            return found

        return self.do(work(), limit=120)

    def processes(self) -> set[int]:
        """Every process of this pool, wherever it went."""
        found = set()
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and self.mark.encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    found.add(int(entry))
        return found - {os.getpid()}

    def check(self) -> None:
        """The neighbour and a newcomer get right results, and nothing of the attack is left."""
        self.total += 7
        assert self.do(self.neighbour.run("total += 7; sum([total] * 3)")).value == str(3 * self.total)
        self.checks += 1
        if self.checks % 10 == 1:  # a fork each time would take longer than the attacks
            assert self.run("sum(range(10))").value == "45"
        assert eventually(lambda: self.processes() == self.quiet), f"left over: {self.processes() - self.quiet}"
        assert not self.accidents
        if not self.namespaces:
            folders = Path(self.place).parent
            assert eventually(lambda: os.listdir(folders) == [Path(self.place).name]), os.listdir(folders)

    def close(self) -> None:
        self.do(self.pool.close())
        assert eventually(lambda: not self.processes())
        self.loop.close()


def as_cell(body: str) -> str:
    lines = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    found = f"{CAME_THROUGH!r} + str(found) if found is not None else None"
    return f"os.chdir(HERE)\ndef attack():\n{lines}\nfound = attack()\n{found}"


def attempt_of(result: Result) -> Attempt:
    value = (result.value or "").strip("'\"")
    return Attempt(value.removeprefix(CAME_THROUGH) if value.startswith(CAME_THROUGH) else None, result)


def eventually(condition: Callable[[], bool], limit: float = 5) -> bool:
    """Whether it becomes true; the kernel takes a moment to reap processes."""
    end = time.monotonic() + limit
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.005)
    return found


def missing_layer(level: SandboxLevel) -> str | None:
    """What the kernel lacks for a level, found without the sandbox's help."""
    script = "import ctypes, sys; libc = ctypes.CDLL(None); sys.exit({} == -1)"
    checks = {}
    if level.reaches(SandboxLevel.L2):
        checks["Landlock"] = "libc.syscall(444, None, 0, 1)"
    if level.reaches(SandboxLevel.L3):
        checks["user namespaces"] = "libc.unshare(0x10000000)"
    for name, call in checks.items():
        if subprocess.run([sys.executable, "-c", script.format(call)]).returncode:
            return f"this kernel has no {name}"
    return None


@contextlib.contextmanager
def opened(level: SandboxLevel, mark: Path, limits: Limits = LIMITS) -> Iterator[Arena]:
    if (missing := missing_layer(level)) is not None:
        pytest.skip(missing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(mark))
        arena = Arena(level, str(mark), limits)
        try:
            yield arena
        finally:
            arena.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What no level changes is tried at L2, where nothing but that defence stands; at L3 it belongs to the long tail."""
    for item in items:
        level = getattr(getattr(item, "callspec", None), "params", {}).get("pool_under_attack")
        if level is SandboxLevel.L3 and item.get_closest_marker("any_level") is not None:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module", params=[SandboxLevel.L2, SandboxLevel.L3], ids=lambda level: level.name)
def pool_under_attack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with opened(request.param, tmp_path_factory.mktemp("mark")) as arena:
        yield arena


@pytest.fixture
def arena(pool_under_attack: Arena) -> Iterator[Arena]:
    """The pool, which must be as good after the test as it was before."""
    descriptors = len(os.listdir("/proc/self/fd"))
    yield pool_under_attack
    pool_under_attack.check()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.fixture(scope="module")
def defenceless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A pool with no defence but resource limits: what an attack is tried on to see that it is one."""
    with opened(SandboxLevel.L0, tmp_path_factory.mktemp("mark")) as arena:
        yield arena


@pytest.fixture(scope="session")
def open_arena() -> Callable[..., contextlib.AbstractContextManager[Arena]]:
    """For pools of a test's own."""
    return opened


@pytest.fixture(scope="session")
def soon() -> Callable[..., bool]:
    return eventually
