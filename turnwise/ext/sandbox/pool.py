"""The pool: one zygote, sessions forked ahead of need, and the level of isolation that was proven."""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Self

from turnwise.ext.sandbox import probe, resources, scratch, wire
from turnwise.ext.sandbox.config import PRELOADED, VISION
from turnwise.ext.sandbox.gvisor import GvisorZygote
from turnwise.ext.sandbox.inside import isolate
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.limits import Limits
from turnwise.ext.sandbox.replies import caps_of
from turnwise.ext.sandbox.results import InputImage
from turnwise.ext.sandbox.session import LocalSession
from turnwise.ext.sandbox.session_process import Child
from turnwise.ext.sandbox.zygote_process import (
    INSTALL,
    LayerRefused,
    Refusal,
    SandboxLost,
    SandboxUnavailable,
    Zygote,
    python_paths,
)
from turnwise.system.folders import OwnFolder

FOLDERS = "turnwise-sandbox-"
"""How folders for sockets and scratch begin."""
WATCH_SECONDS = 0.05
"""Between looks at a running call: a session can make a thousand threads meanwhile."""
QUICK_SECONDS = 0.002
"""A shorter call cannot have made too many threads."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How a pool is made: `PoolSettings(min_level=SandboxLevel.L3)`.

    `opening.py` makes it from a config; it says more than a config does, in bytes, and serves who has no config.
    """

    level: SandboxLevel = SandboxLevel.auto
    """The highest that can be proven, or exactly this one."""
    min_level: SandboxLevel = SandboxLevel.L2
    limits: Limits = field(default_factory=Limits)
    preload: tuple[str, ...] = PRELOADED
    """Of PRELOADED what is installed; any other choice as it is."""
    warm: int = 8
    """Sessions forked ahead of need."""
    running: int = 0
    """Calls that run at once; 0 takes two for each core."""


class SandboxPool:
    """Sessions for untrusted Python. Use it as an async context manager, in one event loop."""

    def __init__(self, settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        self._absent = not_installed() if self.settings.preload == PRELOADED else []
        self._preload = [name for name in self.settings.preload if name not in self._absent]
        self._report: probe.SandboxReport | None = None
        self._proven = False
        self._zygote: Zygote | GvisorZygote | None = None
        self._level = self.settings.level
        self._folder: OwnFolder | None = None
        self._warm: deque[_Place] = deque()
        self._places: set[_Place] = set()
        self._filling: asyncio.Task[None] | None = None
        self._reviving = asyncio.Lock()
        self._slots = asyncio.Semaphore(self.settings.running or 2 * (os.cpu_count() or 1))
        self._next_folder = 0
        self._most_sessions = 0
        self._opening = 0
        self._memory = resources.Memory(0)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def report(self) -> probe.SandboxReport:
        """What was proven at the start."""
        if self._report is None:
            raise SandboxLost("the sandbox pool was not started")
        return self._report

    def session(self, *, seed: int = 0, images: Sequence[InputImage] = (), stateless: bool = False) -> LocalSession:
        """A new session; its process is taken from the pool at the first call."""
        return LocalSession(self._acquire, self._slots, self.settings.limits, seed, images, stateless)

    async def close(self) -> None:
        """End every process and remove every file."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait((self._filling,))
        for slot in self._places:
            slot.child.close()
        if self._zygote is not None:
            await self._zygote.close()  # also one that answers no more, so that nobody waits for it
            self._zygote = None
        for slot in list(self._places):
            await slot.leave()
        if self._folder is not None:
            await asyncio.to_thread(self._folder.remove)
            self._folder = None

    async def _start(self) -> None:
        """The highest level whose layers the kernel grants and whose attacks all fail."""
        settings = self.settings
        if sys.platform != "linux":
            raise SandboxUnavailable("the sandbox needs Linux; elsewhere name a server with sandbox.url")
        self._folder = OwnFolder(FOLDERS)
        self._most_sessions = resources.most_sessions()
        self._memory = resources.Memory(resources.memory_for_sessions())
        refusals: list[Refusal] = []
        for level in probe.candidates(settings.level, settings.min_level):
            self._level = level
            try:
                self._zygote = await self._start_zygote()
                self._report = await self._prove(level, tuple(refusals))
            except LayerRefused as error:
                refusals.append(error.refusal)
            else:
                if self._report.level.reaches(level):
                    self._proven = True
                    return self._fill()
            if self._zygote is not None:
                await self._zygote.close()
                self._zygote = None
        raise SandboxUnavailable(probe.explain(settings.level, settings.min_level, tuple(refusals), self._report))

    async def _prove(self, level: SandboxLevel, refusals: tuple[Refusal, ...]) -> probe.SandboxReport:
        async with self.session() as session:
            report = await probe.prove(session, level, self._layers(), refusals, self._warnings(), self.settings.limits)
        return replace(report, absent=_tops(name for name in self._absent if name in VISION))

    def _plan(self, root: Path) -> isolate.IsolationPlan:
        """What the zygote puts on at this level."""
        limits = self.settings.limits
        return isolate.IsolationPlan(
            namespaces=self._level is SandboxLevel.L3,
            gvisor=self._level is SandboxLevel.L4,
            lsm=self._level.reaches(SandboxLevel.L2),
            readable=tuple(isolate.readable_paths(python_paths())),
            root=str(root),
            memory=limits.memory,
            file_size=limits.scratch,
            files=limits.files,
            cpu_seconds=limits.cpu_seconds,
        )

    def _caps(self) -> wire.Caps:
        """The limits of what a session may answer."""
        return caps_of(self.settings.limits)

    async def _start_zygote(self) -> Zygote | GvisorZygote:
        limits, gvisor = self.settings.limits, self._level is SandboxLevel.L4
        assert self._folder is not None
        folder = self._folder.path
        root = folder / "root"
        root.mkdir(exist_ok=True)
        private = self._level in (SandboxLevel.L0, SandboxLevel.L2) and os.geteuid() == 0
        private = private and not any(map(_closed_part, python_paths()))
        if private:
            folder.chmod(0o711)
            os.chown(root, isolate.PRIVATE_ID, isolate.PRIVATE_ID)
        settings = {"output": limits.output, "images": limits.images, "pixels": limits.pixels, "scratch": ""}
        orders = {
            "plan": asdict(self._plan(root)),
            "preload": self._preload,
            "settings": settings,
            "private": private,
        }
        caps = self._caps()
        return await (GvisorZygote.start(orders, caps, folder) if gvisor else Zygote.start(orders, caps))

    def _layers(self) -> tuple[str, ...]:
        assert self._zygote is not None
        layers = ["rlimits", "no_new_privs", "no capabilities"]
        if self._level.reaches(SandboxLevel.L2):
            layers += [f"landlock (ABI {self._zygote.landlock})", "seccomp"]
        if self._level.reaches(SandboxLevel.L3):
            layers.append("namespaces (user, pid, mount, net, ipc, uts, cgroup)")
        if self._level is SandboxLevel.L4:
            layers = ["gVisor", *layers[:3], "seccomp", "namespaces (pid, mount), no network, locked into a folder"]
        if self._zygote.uid != os.geteuid():
            layers.append(f"uid {self._zygote.uid}")
        return tuple(layers)

    def _warnings(self) -> tuple[str, ...]:
        """What is less than the level leads one to expect, and why."""
        assert self._zygote is not None
        warnings = [] if self._zygote.ends_last is None else [self._zygote.ends_last]
        if absent := _tops(name for name in self._absent if name not in VISION):
            warnings.append(f"code in the sandbox cannot import {', '.join(absent)}: {INSTALL}")
        if self._zygote.uid == 0:
            closed = next(
                (path for python_path in python_paths() if (path := _closed_part(python_path)) is not None), None
            )
            warnings.append(
                f"sessions run as root (uid 0), though without its capabilities: Python lies below {closed}, "
                "which other users cannot enter; open that folder (chmod o+rx) or move Python"
            )
        return tuple(warnings)

    async def _acquire(self) -> "_Place":
        """A ready process: a warm one where there is one."""
        while self._warm:
            slot = self._warm.popleft()
            if slot.child.broken is None:
                self._fill()
                return slot
            await slot.leave()
        self._fill()
        try:
            return await self._fork(rehearse=False)
        except LayerRefused as error:
            if not self._proven:
                raise
            raise SandboxLost(f"a session could not be isolated: {error}") from error

    def _fill(self) -> None:
        if self.settings.warm and self._proven and (self._filling is None or self._filling.done()):
            self._filling = asyncio.ensure_future(self._keep_warm())

    async def _keep_warm(self) -> None:
        with contextlib.suppress(SandboxLost, LayerRefused):  # whoever needs a session next will see it
            while len(self._warm) < self.settings.warm:
                self._warm.append(await self._fork(rehearse=True))

    async def _fork(self, *, rehearse: bool) -> "_Place":
        if len(self._places) + self._opening >= self._most_sessions:
            raise SandboxLost(
                f"{len(self._places)} sandbox sessions are open, and this process may open no more descriptors: "
                "raise the hard limit (ulimit -Hn), or run fewer episodes at once"
            )
        self._opening += 1
        try:
            zygote = await self._living_zygote()
            folder = None if self._level.reaches(SandboxLevel.L3) else self._new_folder(zygote.uid)
            try:
                child = await zygote.fork(isolate.SCRATCH if folder is None else str(folder), rehearse=rehearse)
            except BaseException:
                if folder is not None:
                    folder.rmdir()
                raise
        finally:
            self._opening -= 1
        begun = scratch.threads_and_memory(child.pid)[1] if child.pid else 0
        slot = _Place(child, folder, self.settings.limits, self._places, self._memory, begun)
        self._places.add(slot)
        return slot

    async def _living_zygote(self) -> Zygote | GvisorZygote:
        """The zygote, started again if it was lost; its sessions are not."""
        async with self._reviving:
            if self._zygote is None:
                raise SandboxLost("the sandbox pool is closed")
            if self._zygote.lost.done():
                await self._zygote.close()
                self._zygote = await self._start_zygote()
            return self._zygote

    def _new_folder(self, uid: int) -> Path:
        assert self._folder is not None
        self._next_folder += 1
        folder = self._folder.path / "root" / str(self._next_folder)
        folder.mkdir(mode=0o700)
        if uid != os.geteuid():
            os.chown(folder, uid, uid)
        return folder


def not_installed() -> list[str]:
    """Those of PRELOADED that the sandbox's Python cannot find."""
    return [name for name in PRELOADED if PathFinder.find_spec(name.partition(".")[0], python_paths()) is None]


def _tops(names: Iterable[str]) -> tuple[str, ...]:
    """The packages of modules, each once."""
    return tuple(dict.fromkeys(name.partition(".")[0] for name in names))


def _closed_part(path: str) -> str | None:
    """The first folder on the way that not every user can enter."""
    steps = [*map(str, reversed(Path(path).parents)), path]
    return next((step for step in steps if os.stat(step).st_mode & 0o005 != 0o005), None)


class CallWatch:
    """Looks at a running call again and again until it is cancelled."""

    def __init__(self, slot: "_Place") -> None:
        self._place = slot
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(WATCH_SECONDS, self._begin)
        self._watching: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        self._next.cancel()
        if self._watching is not None:
            self._watching.cancel()

    def _begin(self) -> None:
        """Most calls have ended by now, and never cost a task."""
        self._watching = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # no descriptor is left to look with; the look after the call says so
                excess = await self._place.excess(WATCH_SECONDS)
                if excess is not None:
                    return self._place.child.give_up(excess)
            await asyncio.sleep(WATCH_SECONDS)


@dataclass(eq=False, slots=True)
class _Place:
    """A session's process and, where it has no file system of its own, its folder and the quota on it."""

    child: Child
    folder: Path | None
    limits: Limits
    among: set["_Place"]
    memory: resources.Memory
    begun: int
    """Bytes resident when it was forked, which are mostly the zygote's own."""

    async def excess(self, seconds: float) -> str | None:
        if self.child.pid == 0:  # inside gVisor, whose own memory and processes these are
            return None
        if seconds > QUICK_SECONDS:
            threads, resident = scratch.threads_and_memory(self.child.pid)
            if threads > self.limits.threads:
                return f"it has more than {self.limits.threads} threads"
            self.memory.note(self, max(resident - self.begun, 0))
            if (largest := self.memory.largest()) is self:
                return self.too_much
            if isinstance(largest, _Place):
                largest.end()
        if self.folder is None:
            return None
        limits = self.limits
        return await asyncio.to_thread(
            scratch.excess, self.folder, self.child.pid, size=limits.scratch, files=limits.files
        )

    @property
    def too_much(self) -> str:
        return f"all sandboxes together held more than {self.memory.most} bytes, and this one the most"

    def end(self) -> None:
        """Whether it runs or not; its next result says why."""
        self.memory.note(self, 0)
        self.child.give_up(self.too_much)
        self.child.signal(signal.SIGKILL)

    def watch(self) -> "CallWatch":
        return CallWatch(self)

    async def leave(self) -> None:
        self.among.discard(self)
        self.memory.note(self, 0)
        self.child.close()
        await self.child.wait_ended()
        if self.folder is not None:
            await asyncio.to_thread(scratch.remove, self.folder)
