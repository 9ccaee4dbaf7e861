"""Shell sessions: programs in the sandbox, in a kind of session of their own that is proven by attacks of its own.

They need namespaces (L3): only there do signals stay inside, is every process of a command found and ended, and are
processes and files counted by the kernel. Python sessions are not touched by it: they still start no program.
"""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from turnwise.ext.sandbox import probe, wire
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.inside import isolate
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.limits import MIB, Limits
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.shell.attacks import attack_shell
from turnwise.ext.sandbox.shell.session import PLACES, ShellSession
from turnwise.ext.sandbox.zygote_process import Refusal, SandboxLost, SandboxUnavailable, environment, python_paths

PROCESSES = 128
"""Processes and threads of one session."""
FILES = 16384
CAPS = wire.Caps(32 * MIB, 32 * MIB)
"""Of what a command prints, escaped; callers say how much of it is kept."""
_SYSTEM = ("/bin", "/usr/bin", "/etc/alternatives", "/etc/ld.so.cache", "/usr/share/git-core")


class ShellPool(SandboxPool):
    """Shell sessions on this machine. Use it as an async context manager, in one event loop."""

    def __init__(self, settings: PoolSettings | None = None) -> None:
        chosen = settings or PoolSettings()
        limits = replace(chosen.limits, files=max(chosen.limits.files, FILES))
        if chosen.level not in (SandboxLevel.auto, SandboxLevel.L3) or chosen.min_level is SandboxLevel.L4:
            raise SandboxUnavailable(
                "shell sessions (the tools bash, edit and finish) have one level, L3: set sandbox.level=auto and "
                "sandbox.min_level to L3 or lower, or name a server with swe.url"
            )
        level = SandboxLevel.L3
        super().__init__(replace(chosen, level=level, preload=(), limits=limits, warm=min(chosen.warm, 2)))

    def shell(self) -> ShellSession:
        """A new session; its process is taken from the pool at the first command."""
        variables = {**environment(), "PATH": search_path()}
        places = {name: variables[name] for name in PLACES if name in variables}
        return ShellSession(self._acquire, self._slots, self.settings.limits, places)

    async def _start(self) -> None:
        try:
            await super()._start()
        except (SandboxUnavailable, SandboxLost) as error:
            raise SandboxUnavailable(f"shell sessions need L3: {error}") from error

    async def _prove(self, level: SandboxLevel, refusals: tuple[Refusal, ...]) -> probe.SandboxReport:
        limits = self.settings.limits
        async with self.shell() as session:
            proofs = await attack_shell(session, limits, PROCESSES)
        report = probe.SandboxReport(level, self._layers(), tuple(proofs), refusals, self._warnings())
        return probe.reached_by(report)

    def _caps(self) -> wire.Caps:
        return CAPS

    def _plan(self, root: Path) -> isolate.IsolationPlan:
        readable = isolate.readable_paths((*python_paths(), *program_paths()))
        return replace(super()._plan(root), programs=PROCESSES, readable=tuple(readable))


def shell_settings(config: SandboxConfig) -> PoolSettings:
    """What a config's sandbox section says of shell sessions."""
    limits = Limits(seconds=config.seconds, memory=config.memory_mb * MIB, scratch=config.scratch_mb * MIB)
    return PoolSettings(config.level, config.min_level, limits)


def program_paths() -> tuple[str, ...]:
    """Where programs lie: the system's, Python itself with what its installation brings, and git."""
    paths = [*_SYSTEM, *_folders_of(sys.executable), str(Path(sys.prefix, "pyvenv.cfg"))]
    if (git := shutil.which("git")) is not None:
        paths += _folders_of(git)
    return tuple(dict.fromkeys(path for path in paths if os.path.exists(path)))


def search_path() -> str:
    """PATH of the commands: Python's own folder first, so that `python` is the one whose packages are there."""
    folders = [*_folders_of(sys.executable)[:1], "/usr/local/bin", "/usr/bin", "/bin"]
    return ":".join(dict.fromkeys(folders))


def _folders_of(program: str) -> list[str]:
    """The folder of a program, and those of what it is a link to."""
    folders, path = [], os.path.abspath(program)
    for _ in range(16):
        folders.append(os.path.dirname(path))
        if not os.path.islink(path):
            break
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    return list(dict.fromkeys([*folders, os.path.dirname(os.path.realpath(program))]))
