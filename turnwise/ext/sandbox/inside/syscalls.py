"""The system calls the sandbox needs and Python does not have, through ctypes; each raises OSError naming the call."""

import ctypes
import os
import platform
import struct

from turnwise.ext.sandbox.inside import syscall_numbers

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38

NUMBERS = syscall_numbers.table(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(name: str, *arguments: object, what: str = "") -> int:
    """A system call by name; `what` says more in the error than the name."""
    return _checked(
        _libc.syscall(ctypes.c_long(NUMBERS[name]), *(_word(argument) for argument in arguments)), what or name
    )


def unshare(flags: int, what: str) -> None:
    call("unshare", flags, what=f"unshare({what})")


def setns(descriptor: int, kind: int) -> None:
    call("setns", descriptor, kind)


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    call(
        "mount",
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        flags,
        data.encode() if data else None,
        what=f"mount({kind or 'bind'} on {target})",
    )


def prctl(option: int, value: int, what: str) -> None:
    call("prctl", option, value, 0, 0, 0, what=f"prctl({what})")


_CAPABILITY_HEADER = struct.pack("Ii", 0x20080522, 0)
_NO_CAPABILITIES = bytes(24)


def drop_capabilities() -> None:
    """No capability in any set of this process, and none to be had again."""
    call("capset", _CAPABILITY_HEADER, _NO_CAPABILITIES)


def drop_bounding_set() -> None:
    """What no later program could get; needs the capability to do so, and is empty without it anyway."""
    for number in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            return  # past the last one the kernel knows, or not permitted


_LAST = 0x7FFFFFFF


def close_from(first: int, keep: tuple[int, ...] = ()) -> None:
    """Close every descriptor from `first` on except `keep`."""
    start = first
    for boundary in (*sorted(descriptor for descriptor in keep if descriptor >= first), _LAST):
        if boundary > start:
            call("close_range", start, boundary - 1, 0)
        start = boundary + 1


_HUGE = 2 << 20
_MADV_COLLAPSE = 25


def use_huge_pages() -> None:
    """Put our memory on large pages: a fork then passes on hundreds of entries instead of tens of thousands.

    Kernels before 6.1 and gVisor do not know how, which costs time and nothing else.
    """
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for region in regions:
        if region[1] != "rw-p" or (len(region) > 5 and region[5] != "[heap]"):
            continue
        start, end = (int(address, 16) for address in region[0].split("-"))
        for address in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE), _MADV_COLLAPSE)


def _word(value: object) -> object:
    return ctypes.c_ulong(value) if isinstance(value, int) else value


def _checked(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result
