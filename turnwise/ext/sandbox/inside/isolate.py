"""The layers of isolation, in the order in which they must be put on: first the zygote's, then each session's."""

import fcntl
import os
import platform
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from turnwise.ext.sandbox.inside import landlock, seccomp, syscalls

PRIVATE_ID = 61235
"""The uid and gid that root gives up its own for; no account has it."""
SCRATCH = "/scratch"
"""Where a session's folder is when it has a mount namespace of its own."""
HOST_NAME = b"sandbox"
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo", "/usr/share/fonts")


class LayerError(Exception):
    """A layer the kernel refused: which, by which call, and with which error number."""

    def __init__(self, layer: str, call: str, number: int) -> None:
        super().__init__(f"{layer}: {call}: {os.strerror(number)}")
        self.layer, self.call, self.number = layer, call, number


@contextmanager
def layer(name: str) -> Iterator[None]:
    """Whatever the kernel refuses inside is a failure of this layer."""
    try:
        yield
    except OSError as error:
        raise LayerError(name, str(error.filename or error.strerror), error.errno or 0) from error


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    """What a zygote puts on, and what its sessions may use."""

    namespaces: bool
    lsm: bool
    """Landlock and the system call filter."""
    gvisor: bool
    """We are inside gVisor already, which has namespaces for mounts and processes but no Landlock."""
    readable: tuple[str, ...]
    """Paths of Python and its packages."""
    root: str
    """An empty folder to build the new root on, or to hold the sessions' folders without namespaces."""
    memory: int
    file_size: int
    files: int
    cpu_seconds: int
    programs: int = 0
    """How many processes and threads a session may have that runs programs; 0 for Python sessions, which run none."""


@dataclass(slots=True)
class Ground:
    """What the zygote holds for its sessions after its own layers are on."""

    plan: IsolationPlan
    base_memory: int
    landlock: int
    readable: list[int]
    writable: list[int]
    filter: seccomp.SeccompFilter | None


def readable_paths(python: tuple[str, ...]) -> list[str]:
    """System libraries, time zones and fonts, and Python's own folders, without those inside others."""
    wanted = [path for path in (*_SYSTEM, *python) if os.path.exists(path)]
    return [path for path in wanted if not any(path.startswith(other + "/") for other in wanted)]


# ---- the zygote


def enter_namespaces(plan: IsolationPlan) -> None:
    """Leave the host's namespaces; the next fork is the first process of the new ones.

    Root builds the new root first, while it can still read everything, and then gives up its uid; others get the right
    to mount with the user namespace.
    """
    proc = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    others = (
        syscalls.CLONE_NEWPID
        | syscalls.CLONE_NEWNET
        | syscalls.CLONE_NEWIPC
        | syscalls.CLONE_NEWUTS
        | syscalls.CLONE_NEWCGROUP
        | syscalls.CLONE_NEWNS
    )
    with layer("namespaces"):
        if os.geteuid() == 0:
            syscalls.unshare(syscalls.CLONE_NEWNS, "NEWNS")
            _build_root(plan)
            become_private()
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1, "DUMPABLE")  # or /proc/self/uid_map would be root's
            _new_user(proc, others)
        else:
            _new_user(proc, others)
            _build_root(plan)
        _take_name()
        syscalls.call("setdomainname", b"", 0)
    os.close(proc)


def enter_gvisor(plan: IsolationPlan) -> None:
    """Inside gVisor we are root of a machine that is not there; sessions are locked into a folder of it."""
    with layer("gvisor"):
        syscalls.unshare(syscalls.CLONE_NEWNS, "NEWNS")
        _fill_root(plan)
        _take_name()


def _take_name() -> None:
    """Instead of the host's, which the new namespace was made with, and which `platform` may have kept."""
    syscalls.call("sethostname", HOST_NAME, len(HOST_NAME))
    vars(platform)["_uname_cache"] = None


def become_private() -> None:
    """From root to a uid that nobody else has."""
    os.setgroups([])
    os.setresgid(PRIVATE_ID, PRIVATE_ID, PRIVATE_ID)
    os.setresuid(PRIVATE_ID, PRIVATE_ID, PRIVATE_ID)


def _new_user(proc: int, others: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.CLONE_NEWUSER | others, "NEWUSER|NEWPID|NEWNET|NEWIPC|NEWUTS|NEWCGROUP|NEWNS")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        descriptor = os.open(name, os.O_WRONLY, dir_fd=proc)
        os.write(descriptor, text.encode())
        os.close(descriptor)


def _fill_root(plan: IsolationPlan) -> None:
    base = plan.root
    syscalls.mount("turnwise", base, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755,size=1m")
    for path in (*plan.readable, *DEVICES):
        _bind(path, base + path, read_only=not plan.gvisor and path not in DEVICES)
    os.makedirs(base + SCRATCH)
    if not os.path.exists(base + "/tmp"):  # Python itself may lie there
        os.symlink(SCRATCH, base + "/tmp")  # where programs expect to be able to write


def _build_root(plan: IsolationPlan) -> None:
    """A root with nothing but what Python needs, read-only, and no /proc."""
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    _fill_root(plan)
    os.chdir(plan.root)
    syscalls.call("pivot_root", b".", b".")
    syscalls.call("umount2", b".", syscalls.MNT_DETACH, what="umount2(the old root)")
    os.chdir("/")
    syscalls.mount("none", "/", None, _REMOUNT_READ_ONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV)


_REMOUNT_READ_ONLY = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY


def _bind(path: str, target: str, *, read_only: bool) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):  # /lib -> usr/lib
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    syscalls.mount(path, target, None, syscalls.MS_BIND)
    if not read_only:  # a device, or a file that gVisor only shows and never writes
        return
    # What the mount was without, the copy must stay without, or the kernel refuses.
    have = os.statvfs(target).f_flag
    keep = have & (syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC | 1024 | 2048)
    if have & 4096:
        keep |= syscalls.MS_RELATIME
    syscalls.mount("none", target, None, _REMOUNT_READ_ONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | keep)


def prepare_ground(plan: IsolationPlan, base_memory: int, machine: str) -> Ground:
    """In the zygote, once: open what the sessions need. In it no_new_privs and an empty bounding set hold already."""
    with layer("no_new_privs"):
        syscalls.drop_bounding_set()
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1, "NO_NEW_PRIVS")
    version, rules = 0, None
    if plan.lsm:
        if not plan.gvisor:
            with layer("landlock"):
                version = landlock.abi()
        if not syscalls.NUMBERS:
            raise LayerError("seccomp", f"no table of system calls for {machine}", 0)
        rules = seccomp.build(machine, landlock_truncates=version >= 3, programs=plan.programs > 0)
    opened = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in plan.readable if not os.path.islink(path)]
    devices = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in DEVICES if os.path.exists(path)]
    return Ground(plan, base_memory, version, opened, devices, rules)


# ---- a session


CHANNEL = 3
"""The descriptor of a session's socket to the host."""


def isolate(ground: Ground, scratch: str) -> None:
    """In the forked child, before any untrusted code: every layer, the system call filter last.

    Four descriptors stay: 0 is empty, 1 and 2 go to a memory file that cannot grow, and CHANNEL.
    """
    plan = ground.plan
    os.setsid()  # kill(0) reaches the process group, which no namespace bounds
    if plan.namespaces:
        with layer("namespaces"):
            syscalls.unshare(syscalls.CLONE_NEWNS, "NEWNS")
            options = f"size={plan.file_size},nr_inodes={plan.files + 1},mode=700"
            flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | (0 if plan.programs else syscalls.MS_NOEXEC)
            syscalls.mount("scratch", scratch, "tmpfs", flags, options)
        if plan.programs:
            _count_alone(plan.programs)
    elif plan.gvisor:
        with layer("gvisor"):
            _lock_in(plan, scratch)
    os.chdir(scratch)
    os.umask(0o077)
    _set_descriptors(keep=(*ground.readable, *ground.writable) if ground.landlock else ())
    _set_limits(ground)
    with layer("capabilities"):
        syscalls.drop_capabilities()
    if ground.landlock:
        with layer("landlock"):
            landlock.restrict(ground.landlock, ground.readable, ground.writable, scratch, programs=plan.programs > 0)
        syscalls.close_from(CHANNEL + 1)
    with layer("parent death signal"):
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL, "PDEATHSIG")
    if ground.filter is not None:
        with layer("seccomp"):
            ground.filter.install(os.getpid())


def _count_alone(programs: int) -> None:
    """Processes are counted by user namespace, so a session has one of its own: no map is needed, our uid stays known
    to the file system. Rights come with it, and are dropped again with those of the zygote."""
    syscalls.unshare(syscalls.CLONE_NEWUSER, "NEWUSER of a session")
    syscalls.drop_bounding_set()
    resource.setrlimit(resource.RLIMIT_NPROC, (programs, programs))


def _lock_in(plan: IsolationPlan, scratch: str) -> None:
    """gVisor knows no pivot_root and no limit on inodes; its own memory limit bounds those."""
    syscalls.unshare(syscalls.CLONE_NEWNS, "NEWNS")
    owner = f"size={plan.file_size},mode=700,uid={PRIVATE_ID},gid={PRIVATE_ID}"
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("scratch", plan.root + scratch, "tmpfs", flags, owner)
    os.chroot(plan.root)
    become_private()


STDOUT_BYTES = 64 * 1024


def _set_descriptors(keep: tuple[int, ...]) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    output = os.memfd_create("output", os.MFD_ALLOW_SEALING)
    os.ftruncate(output, STDOUT_BYTES)
    _seal(output)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target, inheritable=False)
    syscalls.close_from(CHANNEL + 1, keep)


def _seal(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)


def _set_limits(ground: Ground) -> None:
    plan = ground.plan
    limits = [
        (resource.RLIMIT_AS, ground.base_memory + plan.memory),
        (resource.RLIMIT_FSIZE, plan.file_size),
        (resource.RLIMIT_NOFILE, 128),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, plan.cpu_seconds),
    ]
    if not plan.gvisor:  # which counts none of these
        limits += [(resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0), (resource.RLIMIT_SIGPENDING, 64)]
    for kind, wanted in limits:
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, value))
