"""What all sessions together may take of this machine: descriptors and memory."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from turnwise.sandbox.process import SandboxUnavailable

MOST_DESCRIPTORS = 1 << 18
"""Raised to this at most: some systems allow a thousand million, and programs walk through all of them."""
SPARE_DESCRIPTORS = 128
"""For the rest of the program, and for images on their way into sessions."""
DESCRIPTORS_OF_A_SESSION = 2
"""Here: its socket and its process. The zygote has one of each session."""
MEMORY_SHARE = 0.75
"""Of the memory that was free at the start, for what sessions take beyond the packages."""


def raise_descriptors() -> int:
    """Allow ourselves as many descriptors as we may; how many sessions that is enough for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    sessions = (limit - len(os.listdir("/proc/self/fd")) - SPARE_DESCRIPTORS) // DESCRIPTORS_OF_A_SESSION
    if sessions < 1:
        raise SandboxUnavailable(f"the sandbox needs more than the {limit} descriptors it may have: raise ulimit -Hn")
    return sessions


class Memory:
    """What sessions hold beyond what they were forked with, in bytes, together and one by one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: dict[object, int] = {}
        self._total = 0

    def note(self, session: object, held: int) -> None:
        """What a session holds now; 0 when it has ended."""
        self._total += held - self._held.pop(session, 0)
        if held:
            self._held[session] = held

    def largest(self) -> object | None:
        """The session that must end, when they hold too much together."""
        return max(self._held, key=self._held.__getitem__) if self._total > self.most else None


def memory_for_sessions() -> int:
    """Of what is free now."""
    return int(free_memory() * MEMORY_SHARE)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that may be taken on this machine and in the control groups we are in; caches of files give way for it.

    `root` holds proc and sys.
    """
    free = [_kilobytes(root, "MemAvailable")]
    for group, limit, usage in _group_limits(root):
        with contextlib.suppress(OSError, ValueError):  # "max", or not there: no limit
            held = int((group / usage).read_text()) - _file_cache(group)
            free.append(max(int((group / limit).read_text()) - held, 0))
    return min(free)


def _kilobytes(root: Path, name: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SandboxUnavailable(f"/proc/meminfo does not tell {name}")


def _file_cache(group: Path) -> int:
    """Of what a group holds, what is a copy of files and goes when memory is needed."""
    told = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    prefix = "total_" if "total_inactive_file" in told else ""
    return sum(int(told.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))


def _group_limits(root: Path) -> Iterator[tuple[Path, str, str]]:
    """(group, file of its limit, file of its usage) of our control group and those around it, of either version."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = top / path.lstrip("/")
        for one in (group, *group.parents):
            if one.is_relative_to(top):
                yield one, *names
