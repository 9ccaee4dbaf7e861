"""Landlock: which files a process may touch, no TCP, no signals and no abstract sockets beyond its own sandbox."""

import ctypes
import os
import stat

from turnwise.ext.sandbox.inside import syscalls

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = (1 << bit for bit in range(13, 16))

_RIGHTS_BY_ABI = ((1, (1 << 13) - 1), (2, REFER), (3, TRUNCATE), (5, IOCTL_DEV))
_READ = READ_FILE | READ_DIR
_SCRATCH = _READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM | REFER | TRUNCATE
_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""Rights that make sense for a file; others on its rule are an error."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """The kernel's version of Landlock; OSError where it has none."""
    return syscalls.call("landlock_create_ruleset", None, 0, 1)


def restrict(version: int, readable: list[int], writable: list[int], scratch: str, *, programs: bool = False) -> None:
    """From here on: read `readable`, also write to `writable` (descriptors of paths), do anything below `scratch`.

    Programs can be run from nowhere, or with `programs` from what can be read. Cannot be undone.
    """
    run = EXECUTE if programs else 0
    handled = 0
    for since, rights in _RIGHTS_BY_ABI:
        if version >= since:
            handled |= rights
    ruleset = _Ruleset(handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    descriptor = syscalls.call("landlock_create_ruleset", ctypes.byref(ruleset), size, 0)
    folder = os.open(scratch, os.O_PATH | os.O_CLOEXEC)
    try:
        for path in readable:
            _allow(descriptor, path, (_READ | run) & handled)
        for path in writable:
            _allow(descriptor, path, (READ_FILE | WRITE_FILE | TRUNCATE) & handled)
        _allow(descriptor, folder, (_SCRATCH | run) & handled)
        syscalls.call("landlock_restrict_self", descriptor, 0)
    finally:
        os.close(folder)
        os.close(descriptor)


def _allow(ruleset: int, path: int, rights: int) -> None:
    if not stat.S_ISDIR(os.fstat(path).st_mode):
        rights &= _FILE
    syscalls.call("landlock_add_rule", ruleset, 1, ctypes.byref(_Beneath(rights, path)), 0)
