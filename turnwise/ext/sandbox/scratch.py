"""Folders that untrusted code filled: what they take is counted, and they are removed, whatever is in them.

Nothing here follows a link, and depth, length of paths and permissions are the code's choice, not ours.
"""

import contextlib
import os
import stat
from pathlib import Path

MAX_DEPTH = 64
"""Folders within folders; more count as excess, because each costs the host a descriptor to look into."""


_PAGE = os.sysconf("SC_PAGE_SIZE")


def excess(folder: Path, pid: int, *, size: int, files: int) -> str | None:
    """What there is too much of: files by name, and those that a process holds open without one."""
    usage = _Usage(files)
    try:
        usage.count(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW), 0)
        usage.count_nameless(pid, os.stat(folder).st_dev)
    except _TooMuch as found:
        return f"the scratch folder holds {found}"
    if usage.size > size:
        return f"the scratch folder holds more than {size} bytes"
    return None


class _TooMuch(Exception):
    """The limit was passed before everything was counted."""


class _Usage:
    def __init__(self, most: int) -> None:
        self.size = 0
        self._files = 0
        self._most = most

    def count(self, descriptor: int, depth: int) -> None:
        """Everything below an open folder, which is closed."""
        try:
            if depth > MAX_DEPTH:
                raise _TooMuch(f"folders {MAX_DEPTH} deep in each other")
            with os.scandir(descriptor) as entries:
                names = [entry.name for entry in entries]
            for name in names:
                self._files += 1
                if self._files > self._most:
                    raise _TooMuch(f"more than {self._most} files")
                self._count_one(name, descriptor, depth)
        finally:
            os.close(descriptor)

    def _count_one(self, name: str, folder: int, depth: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            facts = os.lstat(name, dir_fd=folder)
            self.size += facts.st_blocks * 512
            if not stat.S_ISDIR(facts.st_mode):
                return
            try:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            except NotADirectoryError:
                return  # swapped for something else meanwhile, which the next look will count
            except OSError as error:  # a folder nobody may list, or a link in its place
                raise _TooMuch(f"a folder that cannot be looked into ({error.strerror})") from error
            self.count(inner, depth + 1)

    def count_nameless(self, pid: int, device: int) -> None:
        """Files that have no name any more but are open; the kernel frees them with the process."""
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is ending
            for name in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    facts = os.stat(f"{folder}/{name}")
                    if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0 and facts.st_dev == device:
                        self.size += facts.st_blocks * 512


def threads_and_memory(pid: int) -> tuple[int, int]:
    """How many threads the process has, and how many bytes are resident; (0, 0) when it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    fields = text.rpartition(")")[2].split()
    return int(fields[17]), int(fields[21]) * _PAGE


def remove(folder: Path) -> None:
    """Remove the folder of a process that has ended. Inner folders are moved up first, so that no path grows long."""
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    moved = 0
    try:
        while names := os.listdir(top):
            for name in names:
                moved = _remove_one(top, name, moved)
    finally:
        os.close(top)
    os.rmdir(folder)


def _remove_one(top: int, name: str, moved: int) -> int:
    """An entry of the top folder; folders inside it become entries of the top folder, for the next round."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=top).st_mode):
        os.unlink(name, dir_fd=top)
        return moved
    os.chmod(name, 0o700, dir_fd=top)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for entry in os.listdir(inner):
            if stat.S_ISDIR(os.lstat(entry, dir_fd=inner).st_mode):
                moved += 1
                os.chmod(entry, 0o700, dir_fd=inner)  # or it cannot be moved to another parent
                os.rename(entry, f".turnwise-{moved}", src_dir_fd=inner, dst_dir_fd=top)
            else:
                os.unlink(entry, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)
    return moved
