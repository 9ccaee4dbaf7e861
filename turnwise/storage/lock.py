"""One writer per folder: a second process that would write into a run is refused with the name of the first."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from turnwise.errors import StorageError
from turnwise.system.files import cannot

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Holder(BaseModel):
    """Who writes: `Holder(pid=71, host="here", command="train", since=1.8e9)`, as the lock file holds it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    pid: int
    host: str
    command: str
    since: float

    @classmethod
    def me(cls, command: str) -> "Holder":
        """The holder that stands for this process, from now on."""
        return cls(pid=os.getpid(), host=socket.gethostname(), command=command, since=time.time())

    def __str__(self) -> str:
        since = datetime.datetime.fromtimestamp(self.since).isoformat(sep=" ", timespec="seconds")
        return f"process {self.pid} on {self.host} (turnwise {self.command}, since {since})"


@contextlib.contextmanager
def holding(folder: Path, command: str, say: Callable[[str], None]) -> Iterator[None]:
    """Be the only writer of a folder, which is made when it is missing; StorageError names the one who is.

    The kernel frees the lock of a process that ends, however it ends. Where the file system has no locks, `say` is told
    so, and what the file says of the last holder is all there is to go by. Readers need no lock and see none.
    """
    path = folder / LOCK
    descriptor = _locked(path, say)
    try:
        _write(descriptor, Holder.me(command), path)
        yield
    finally:
        with contextlib.suppress(OSError):  # removed while it is held, so that nobody locks a file that is gone
            path.unlink()
            folder.rmdir()  # when nothing came into it
        os.close(descriptor)


def _locked(path: Path, say: Callable[[str], None]) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # a holder that made the folder left it empty and removed it meanwhile
            continue
        except OSError as error:
            raise cannot("lock", path, error) from error
        try:
            if _take(descriptor, path, say):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder ended and removed it meanwhile: another file has the name now


def _take(descriptor: int, path: Path, say: Callable[[str], None]) -> bool:
    """Whether the lock is ours and of the file that has the name."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(_refusal(path, _holder(descriptor))) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise cannot("lock", path, error) from error
        last = _holder(descriptor)
        if last is not None and not _is_over(last):
            raise StorageError(f"{_refusal(path, last)}; if that process has ended, remove {path}") from error
        say(f"{path.parent} is on a file system without locks ({error.strerror}): a second writer may not be noticed")
    try:
        named, mine = os.stat(path), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)


def _refusal(path: Path, holder: Holder | None) -> str:
    return f"{path.parent} is being written by {holder or 'another process'}"


def _holder(descriptor: int) -> Holder | None:
    """What the file says; None before its holder has written it."""
    try:
        return Holder.model_validate_json(os.pread(descriptor, 4096, 0))
    except (OSError, ValidationError):
        return None


def _is_over(holder: Holder) -> bool:
    """Whether the holder is known to have ended; of another machine's processes nothing is known."""
    if holder.host != socket.gethostname() or holder.pid <= 0:
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # somebody else's, so it is there
        return False
    return False


def _write(descriptor: int, holder: Holder, path: Path) -> None:
    text = json.dumps(holder.model_dump()).encode()
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
        os.fsync(descriptor)
    except OSError as error:
        raise cannot("lock", path, error) from error
