"""What this machine still has for us: memory, and descriptors of files."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from turnwise.errors import TurnwiseError

MOST_DESCRIPTORS = 1 << 18
"""Raised to this at most: some systems allow a thousand million, and programs walk through all of them."""

_processes = 1


def share_among(processes: int) -> None:
    """Say that so many processes of one run, this one among them, divide the machine's free memory."""
    global _processes
    _processes = processes


def processes() -> int:
    """How many processes of a run divide its limits."""
    return _processes


def part_of(limit: int) -> int:
    """This process's part of a limit of the whole run."""
    return max(1, limit // _processes)


def raise_descriptors() -> int:
    """Allow ourselves as many descriptors as we may; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that we may take on this machine and in the control groups we are in; caches of files give way for it.

    `root` holds proc and sys.
    """
    free = [_kilobytes(root, "MemAvailable")]
    for group, limit, usage in _group_limits(root):
        with contextlib.suppress(OSError, ValueError):  # "max", or not there: no limit
            held = int((group / usage).read_text()) - _file_cache(group)
            free.append(max(int((group / limit).read_text()) - held, 0))
    return min(free) // _processes


def _kilobytes(root: Path, name: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise TurnwiseError(f"/proc/meminfo has no {name}")


def _file_cache(group: Path) -> int:
    """Of what a group holds, what is a copy of files and goes when memory is needed."""
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    prefix = "total_" if "total_inactive_file" in counts else ""
    return sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))


def _group_limits(root: Path) -> Iterator[tuple[Path, str, str]]:
    """(group, file of its limit, file of its usage) of our control group and those around it, of either version."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        own = top / path.lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(top):
                yield group, *names
