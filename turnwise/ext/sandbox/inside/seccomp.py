"""The system call filter: a list of what is allowed, checks of some arguments, and refusal of everything else.

The program is a decision tree over runs of equal verdicts, because the kernel compiles it anew for every session and
its length is what that costs.
"""

import ctypes
import errno
from collections.abc import Callable
from dataclasses import dataclass, field

from turnwise.ext.sandbox.inside import syscalls


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ALLOWED = _words("""
read write close open openat stat fstat lstat newfstatat statx poll ppoll lseek mmap mprotect munmap brk mremap
msync rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend
sigaltstack restart_syscall pread64 pwrite64 readv writev preadv pwritev access faccessat
faccessat2 pipe pipe2 select pselect6 sched_yield dup dup2 dup3 pause nanosleep clock_nanosleep getitimer setitimer
alarm getpid gettid getppid getpgrp getpgid getsid sendfile recvfrom recvmsg shutdown
getsockname getpeername exit exit_group wait4 waitid uname fsync fdatasync sync_file_range ftruncate getdents
getdents64 getcwd chdir fchdir rename renameat renameat2 mkdir mkdirat rmdir link linkat unlink unlinkat symlink
symlinkat readlink readlinkat umask creat copy_file_range fallocate readahead statfs fstatfs gettimeofday
time times getrlimit getrusage sysinfo getuid geteuid getgid getegid getgroups getresuid getresgid getpriority
capget arch_prctl set_robust_list get_robust_list rseq membarrier getcpu
sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval clock_gettime
clock_getres getrandom epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
timerfd_create timerfd_settime timerfd_gettime close_range getxattr lgetxattr fgetxattr listxattr llistxattr
flistxattr mlock munlock mlockall munlockall get_mempolicy
""")
FAKED = _words("""
chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat setxattr lsetxattr
fsetxattr removexattr lremovexattr fremovexattr fadvise64
""")
"""Answered with success and not done: Landlock does not cover them, and harmless programs use them when they copy.

The last is advice, and would drop files that all share from the page cache.
"""
ABSENT = _words("""
clone3 openat2 flock futex_waitv preadv2 pwritev2 mincore
""")
"""Answered as by a kernel without them, so that libraries take the older call, whose arguments a filter can see.

`flock` works on any open file, those of Python's installation too, which all sessions and the host share: it would be a
signal between sessions and could make the host wait. Libraries that lock know systems without it. `preadv2` and
`mincore` tell whether a page of such a file is in memory.
"""

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_LOAD, _JUMP, _JEQ, _JGE, _JSET, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

OWN_PID = 0x7FFFFFF1
"""Stands in the program for the pid of the session, which is known after its fork."""

Instruction = tuple[int, int, int, int]
Block = list[Instruction]


def _give(verdict: int) -> Block:
    return [(_RETURN, 0, 0, verdict)]


_DENY = _give(_ERRNO | errno.EPERM)


def _load(argument: int, high: bool = False) -> Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument + (4 if high else 0))


def _one_of(argument: int, values: tuple[int, ...], match: Block, other: Block) -> Block:
    """`match` when the argument's low word is one of the values, else `other`."""
    block: Block = [_load(argument)]
    for index, value in enumerate(values):
        block.append((_JEQ, len(values) - 1 - index + len(other), 0, value))
    return [*block, *other, *match]


def _zero(argument: int) -> Block:
    """Allowed when the argument, a pointer, is null."""
    return [
        _load(argument),
        (_JEQ, 0, 2, 0),
        _load(argument, high=True),
        (_JEQ, 1, 0, 0),
        *_DENY,
        *_give(_ALLOW),
    ]


def _thread_only() -> Block:
    """clone: a thread, in no new namespace."""
    return [_load(0), (_JSET, 2, 0, 0x7E020080), (_JSET, 0, 1, 0x00010000), *_give(_ALLOW), *_DENY]


def _stream_pair() -> Block:
    """socketpair: a stream of unix sockets; a datagram one could be made to write to any other by name."""
    return [
        _load(0),
        (_JEQ, 0, 4, 1),
        _load(1),
        (_AND, 0, 0, 0xF),
        (_JEQ, 0, 1, 1),
        *_give(_ALLOW),
        *_DENY,
    ]


def _own_futex() -> Block:
    """futex: of this process only; on a page of a library, which all sessions share, one could wake another.

    Waiting is allowed without that mark, because it is how the C library waits for the end of a thread.
    """
    waits = (0, 9)  # WAIT, WAIT_BITSET
    return [
        _load(1),
        (_JSET, 4, 0, 0x80),  # PRIVATE
        (_AND, 0, 0, 0x7F),
        *((_JEQ, len(waits) - index, 0, wait) for index, wait in enumerate(waits)),
        *_DENY,
        *_give(_ALLOW),
    ]


def _control_file() -> Block:
    """fcntl: descriptors, flags, seals, and asking; not owners, signals, leases, watches or the size of a pipe.

    A lock of a range is granted and not taken: it excludes other processes, of which a session has none, and on files
    that sessions share it would tell them of each other. What a lock of an open file description would exclude is not
    known here, so those are refused.
    """
    asking = (1, 3, 5, 9, 11, 36, 1025, 1032, 1034)  # GET: FD, FL, LK, OWN, SIG, OFD_LK, LEASE, PIPE_SZ, SEALS
    setting = (0, 2, 4, 1030, 1033)  # DUPFD, SETFD, SETFL, DUPFD_CLOEXEC, ADD_SEALS
    locks = (6, 7)  # SETLK, SETLKW
    return _one_of(1, (*asking, *setting), _give(_ALLOW), _one_of(1, locks, _give(_ERRNO | 0), _DENY))


_TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_EVICTIONS = (20, 21)
"""COLD, PAGEOUT: of a file's pages, which all share."""
_NAMES = (15, 16, 0x53564D41)
_PLAIN_OPTIONS = (2, 7, 8, 9, 13, 18, 19, 20, 21)
"""REUSEADDR, SNDBUF, RCVBUF, KEEPALIVE, LINGER, RCVLOWAT, SNDLOWAT, RCVTIMEO, SNDTIMEO. Others give a socket a program
for the kernel to run, or have the host's pid, groups or pidfd come along with what it sends."""
_SOCKET_QUESTIONS = (*_PLAIN_OPTIONS, 3, 4, 30, 38, 39)
"""Also TYPE, ERROR, ACCEPTCONN, PROTOCOL, DOMAIN. Others tell of the peer, which is the host: PEERCRED, PEERPIDFD."""

CHECKED: dict[str, Callable[[], Block]] = {
    "clone": _thread_only,
    "kill": lambda: _one_of(0, (OWN_PID,), _give(_ALLOW), _DENY),
    "tkill": lambda: _one_of(0, (OWN_PID,), _give(_ALLOW), _DENY),
    "tgkill": lambda: _one_of(0, (OWN_PID,), _give(_ALLOW), _DENY),
    "fcntl": _control_file,
    "futex": _own_futex,
    "madvise": lambda: _one_of(2, _EVICTIONS, _give(_ERRNO | 0), _give(_ALLOW)),  # as fadvise64
    "ioctl": lambda: _one_of(1, _TERMINAL_QUESTIONS, _give(_ALLOW), _give(_ERRNO | errno.ENOTTY)),
    "prctl": lambda: _one_of(0, _NAMES, _give(_ALLOW), _DENY),
    "prlimit64": lambda: _zero(2),  # asking, not setting
    "socketpair": _stream_pair,
    "setsockopt": lambda: _one_of(2, _PLAIN_OPTIONS, _give(_ALLOW), _DENY),
    "getsockopt": lambda: _one_of(2, _SOCKET_QUESTIONS, _give(_ALLOW), _DENY),
    "sendto": lambda: _zero(4),  # to the peer, not to an address
    "sched_setaffinity": lambda: _one_of(0, (0,), _give(_ALLOW), _DENY),
    "sched_getaffinity": lambda: _one_of(0, (0,), _give(_ALLOW), _DENY),
}


PROGRAMS = _words("""
fork vfork execve kill tkill tgkill setpgid setsid chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime
utimes futimesat utimensat set_tid_address timer_create timer_settime timer_gettime timer_getoverrun timer_delete
""")
"""Also allowed where programs are run, which needs namespaces: signals reach only processes of the session there, and
only its own folder can be written to."""


def _no_new_namespace() -> Block:
    """clone: a process or a thread, in no new namespace."""
    return [_load(0), (_JSET, 0, 1, 0x7E020080), *_DENY, *_give(_ALLOW)]


class _Code(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("code", ctypes.POINTER(_Code)))


@dataclass(slots=True)
class SeccompFilter:
    """A program, and where in it the pid goes."""

    program: Block
    pids: list[int]
    codes: "ctypes.Array[_Code]" = field(init=False)
    """The program as the kernel reads it, made once in the zygote."""

    def __post_init__(self) -> None:
        self.codes = (_Code * len(self.program))(*(_Code(*instruction) for instruction in self.program))

    def install(self, pid: int) -> None:
        """From here on, for this process. Needs no_new_privs; cannot be undone."""
        for index in self.pids:
            self.codes[index].k = pid
        program = _Program(len(self.program), self.codes)
        try:  # this flag keeps older kernels from slowing the process down against speculation attacks on itself
            syscalls.call("seccomp", 1, 4, ctypes.byref(program))
        except OSError as error:
            if error.errno != errno.EINVAL:  # gVisor knows no flags
                raise
            syscalls.call("seccomp", 1, 0, ctypes.byref(program))


def build(machine: str, landlock_truncates: bool, programs: bool = False) -> SeccompFilter:
    """The filter for this machine; where Landlock does not guard truncate(2), it is denied."""
    numbers = syscalls.NUMBERS
    verdicts = dict.fromkeys(numbers.values(), _DENY)
    verdicts |= {numbers[name]: _give(_ALLOW) for name in ALLOWED if name in numbers}
    verdicts |= {numbers[name]: _give(_ERRNO | 0) for name in FAKED if name in numbers}
    verdicts |= {numbers[name]: _give(_ERRNO | errno.ENOSYS) for name in ABSENT if name in numbers}
    verdicts |= {numbers[name]: check() for name, check in CHECKED.items() if name in numbers}
    if programs:
        verdicts |= {numbers[name]: _give(_ALLOW) for name in PROGRAMS if name in numbers}
        verdicts[numbers["clone"]] = _no_new_namespace()
    if landlock_truncates:
        verdicts[numbers["truncate"]] = _give(_ALLOW)
    unknown = _give(_ERRNO | errno.ENOSYS)
    runs: list[tuple[int, Block]] = []
    for number in range(max(verdicts) + 2):
        block = verdicts.get(number, unknown)
        if not runs or runs[-1][1] != block:
            runs.append((number, block))
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JGE, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        *_tree(runs),
    ]
    return SeccompFilter(
        program,
        [index for index, instruction in enumerate(program) if instruction[0] == _JEQ and instruction[3] == OWN_PID],
    )


def _tree(runs: list[tuple[int, Block]]) -> Block:
    """Find the run a number belongs to; jumps reach 255 instructions, further ones take a step in between."""
    if len(runs) == 1:
        return runs[0][1]
    middle = len(runs) // 2
    left, right = _tree(runs[:middle]), _tree(runs[middle:])
    if len(left) <= 255:
        return [(_JGE, len(left), 0, runs[middle][0]), *left, *right]
    return [(_JGE, 0, 1, runs[middle][0]), (_JUMP, 0, 0, len(left)), *left, *right]
