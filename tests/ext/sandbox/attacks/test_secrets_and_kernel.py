"""Attacks 43-56 and 100: secrets of the host, privileges, kernel surface, limits, and accounts shared by a user's processes."""

import os
import platform
import resource
import sys
import textwrap
from collections.abc import Iterator

import pytest

from turnwise.ext.sandbox.results import ExecutionStatus

SECRET = "hunter2-" + os.urandom(8).hex()


@pytest.fixture(scope="module", autouse=True)
def secret() -> Iterator[None]:
    """In the host's environment and memory before any pool is started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_TEST_KEY", SECRET)
        yield


SEARCHES = {
    "43 environ": "found = dict(os.environ)",
    "43 environ of the C library": """
        found, pointer = [], ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')
        while pointer[len(found)]: found.append(pointer[len(found)])""",
    "43 stack above environ": "found = ctypes.string_at(ctypes.c_void_p.in_dll(libc, 'environ').value, 2048)",
    "44 objects": "import gc; found = [repr(one) for one in gc.get_objects() if type(one) in (dict, list, tuple)]",
    "44 modules": "found = [repr(vars(one)) for one in list(sys.modules.values()) if hasattr(one, '__dict__')]",
    "44 frames": """
        frame, found = sys._getframe(), []
        while frame: found.append(repr(frame.f_locals) + repr(frame.f_globals)); frame = frame.f_back""",
}


def test_the_host_s_secrets_are_not_there(arena):
    """43, 44."""
    look = "\nimport re; return re.findall('hunter2-[0-9a-f]{16}', str(found)) or (None if len(str(found)) > 100 else 'nothing read')"
    bodies = {name: textwrap.dedent(body).strip() + look for name, body in SEARCHES.items()}
    for name, attempt in arena.attacks(bodies).items():
        assert attempt.found is None and attempt.result.status is ExecutionStatus.OK, (name, attempt)


SECRET_PLACES = {
    "listdir": ("~/.ssh", "~/.aws", "~/.netrc", "~/.cache", "/run/secrets", "/var/run/secrets", "/sys/class/net"),
    "open": ("/proc/1/environ", "/proc/self/environ", "/proc/self/maps", "/proc/sys/kernel/random/boot_id"),
}


def test_no_folder_of_secrets_is_there(arena):
    """45."""
    ways = {"listdir": "return os.listdir({!r})", "open": "return open({!r}).read()"}
    bodies = {
        path: ways[way].format(os.path.expanduser(path)) for way, paths in SECRET_PLACES.items() for path in paths
    }
    for path, attempt in arena.attacks(bodies).items():
        assert attempt.refused, (path, attempt)


PRIVILEGES = {
    "46 unshare": "return 1 + syscall('unshare', 0x10000000)",
    "46 unshare files": "return 1 + syscall('unshare', 0x400)",
    "46 setns": "return 1 + syscall('setns', 3, 0)",
    "46 mount": "return 1 + syscall('mount', b'none', b'.', b'tmpfs', 0, 0)",
    "46 umount": "return 1 + syscall('umount2', b'.', 0)",
    "46 fsopen": "return syscall('fsopen', b'tmpfs', 0)",
    "46 open_tree": "return syscall('open_tree', -100, b'/', 0)",
    "46 move_mount": "return 1 + syscall('move_mount', -100, b'/', -100, b'/', 0)",
    "46 pivot_root": "return 1 + syscall('pivot_root', b'/', b'/')",
    "47 setuid": "os.setuid(os.getuid()); return 'set'",
    "47 setgid": "os.setgid(os.getgid()); return 'set'",
    "47 setresuid": "os.setresuid(-1, -1, -1); return 'set'",
    "47 setgroups": "os.setgroups([]); return 'set'",
    "47 chroot": "os.chroot('.'); return 'moved'",
    "47 capset": "return 1 + syscall('capset', struct.pack('Ii', 0x20080522, 0), bytes(24))",
    "48 io_uring": "return syscall('io_uring_setup', 1, ctypes.create_string_buffer(120))",
    "48 bpf": "return syscall('bpf', 5, bytes(120), 120)",
    "48 userfaultfd": "return syscall('userfaultfd', 1)",
    "48 perf": "return syscall('perf_event_open', struct.pack('II', 1, 112) + bytes(104), 0, -1, -1, 0)",
    "48 keyctl": "return syscall('keyctl', 0, -3, 1)",
    "48 add_key": "return syscall('add_key', b'user', b'x', b'y', 1, -3)",
    "48 fanotify": "return syscall('fanotify_init', 0x200, 0)",
    "48 seccomp": "return 1 + syscall('seccomp', 0, 0, 0)",
    "48 aio": "return 1 + syscall('io_setup', 1, ctypes.byref(ctypes.c_ulong()))",
    "48 modules": "return syscall('finit_module', 1, b'', 0)",
    "48 syslog": "return syscall('syslog', 10, 0, 0)",
    "48 kcmp": "return 1 + syscall('kcmp', os.getpid(), os.getpid(), 0, 0, 0)",
    "48 clock": "return 1 + syscall('clock_settime', 0, struct.pack('qq', 1, 1))",
    "48 host name": "socket.sethostname('evil'); return 'renamed'",
    "48 a call nobody knows": "return 1 + syscall(600)",
    "48 splice": "r, w = os.pipe(); return syscall('vmsplice', w, struct.pack('QQ', id(SCRATCH), 8), 1, 0)",
    "48 pkey": "return syscall('pkey_alloc', 0, 0)",
    "48 memory of no one": "return os.memfd_create('x')",
    "48 secret memory": "return syscall('memfd_secret', 0)",
    "50 rlimit": "return 1 + syscall('setrlimit', 9, struct.pack('QQ', *resource.getrlimit(9)))",
    "50 prlimit": "resource.prlimit(0, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)); return 'set'",
    "51 death signal": "return 1 + syscall('prctl', 1, 0, 0, 0, 0)",
    "51 dumpable": "return 1 + syscall('prctl', 4, 1, 0, 0, 0)",
    "51 subreaper": "return 1 + syscall('prctl', 36, 1, 0, 0, 0)",
    "51 session": "os.setsid(); return 'left'",
    "51 group": "os.setpgid(0, 0); return 'left'",
    "52 personality": "return 1 + syscall('personality', 0xffffffff)",
    "53 shared memory": "return 1 + syscall('shmget', 0, 4096, 0o1600)",
    "53 semaphores": "return 1 + syscall('semget', 0, 1, 0o1600)",
    "53 messages": "return 1 + syscall('msgget', 0, 0o1600)",
    "53 POSIX messages": "return 1 + syscall('mq_open', b'evil', 0o102, 0o600, 0)",
    "55 timers": "t = ctypes.c_int(); return 1 + syscall('timer_create', 1, 0, ctypes.byref(t))",
    "55 inotify": "return syscall('inotify_init1', 0)",
    "55 signal descriptor": "return syscall('signalfd4', -1, bytes(8), 8, 0)",
    "55 lease": "f = open('a', 'w'); fcntl.fcntl(f, 1024, 1); return 'leased'",
    "55 watch a folder": "n = os.open('.', os.O_RDONLY); fcntl.fcntl(n, 1026, 2); return 'watched'",
    "56 pipe size": "r, w = os.pipe(); return fcntl.fcntl(w, 1031, 1 << 20)",
}


def test_the_kernel_is_out_of_reach(arena):
    """46-56. Answered by the filter: EPERM, or ENOSYS for what it does not know."""
    for name, attempt in arena.attacks(PRIVILEGES).items():
        assert attempt.refused, (name, attempt)
        assert attempt.result.failure.message.startswith(("[Errno 1]", "[Errno 38]")), (name, attempt)


WORKING = [
    name
    for name in PRIVILEGES
    if name.startswith(("47 setuid", "47 setres", "48 aio", "48 kcmp", "48 key", "48 memory", "50", "51 d", "51 sub"))
    or name.startswith(("46 unshare files", "52", "53 sh", "53 sem", "53 mess", "55", "56"))
]


def works(attempt) -> bool:
    """Whether the kernel did it, or looked at the arguments before it said no."""
    message = attempt.result.failure.message if attempt.result.failure else ""
    return attempt.found is not None or message.startswith(("[Errno 14]", "[Errno 22]", "[Errno 95]"))


def test_a_call_that_the_filter_refuses_works_without_it(defenceless):
    attempt = defenceless.attack(PRIVILEGES["48 memory of no one"])
    assert works(attempt), attempt


@pytest.mark.long
@pytest.mark.parametrize("name", WORKING)
def test_these_calls_work_without_the_filter(defenceless, name):
    attempt = defenceless.attack(PRIVILEGES[name])
    assert works(attempt), attempt


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other system call tables are those of x86")
@pytest.mark.parametrize(
    "bytes_of_code",
    [
        "b8 14 00 00 00 cd 80 c3",  # getpid by int 80
        "b8 27 00 00 40 0f 05 c3",  # getpid by the x32 table
    ],
    ids=["49 int80", "49 x32"],
)
def test_other_system_call_tables_end_the_session(arena, bytes_of_code):
    result = arena.run(
        f"""
        room = mmap.mmap(-1, 4096, prot=7)
        room.write(bytes.fromhex({bytes_of_code!r}))
        ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(room)))()
        """
    )
    assert result.status is ExecutionStatus.KILLED and "SIGSYS" in result.text(), result


def test_capabilities_are_gone(arena):
    data = "room = ctypes.create_string_buffer(24); syscall('capget', struct.pack('Ii', 0x20080522, 0), room); any(room.raw)"
    assert arena.run(data).value == "False"
    assert arena.run("libc.prctl(39, 0, 0, 0, 0), ctypes.get_errno()").value == "(-1, 1)"  # not even asking


LIMITED = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 128, "RLIMIT_MEMLOCK": 0, "RLIMIT_MSGQUEUE": 0, "RLIMIT_SIGPENDING": 64}


def test_limits_are_hard(arena):
    """50, 55, 56, 100."""
    found = arena.run(f"{{name: resource.getrlimit(getattr(resource, name)) for name in {tuple(LIMITED)!r}}}").value
    assert eval(found) == {name: (limit, limit) for name, limit in LIMITED.items()}


def test_limits_of_size_and_time_are_hard(arena):
    found = eval(
        arena.run(
            "[resource.getrlimit(n) for n in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU)]"
        ).value
    )
    assert all(soft == hard != resource.RLIM_INFINITY for soft, hard in found)
    assert found[1][0] == arena.limits.scratch and found[2][0] == arena.limits.cpu_seconds


def test_a_library_of_its_own_is_bound_by_the_same_rules(arena):
    """54: with namespaces the folder holds no programs; without, the code still cannot do more than Python can."""
    load = "import _ctypes, shutil; shutil.copyfile(_ctypes.__file__, 'mine.so'); ctypes.CDLL('./mine.so'); 'loaded'"
    result = arena.run(load)
    if arena.namespaces:
        assert result.failure and "failed to map" in result.failure.message, result
    attempt = arena.attack("n = ctypes.CDLL(None).fork()\nif n == -1: raise PermissionError()\nreturn n")
    assert attempt.refused, attempt


def test_pipes_and_sockets_cannot_hold_much(arena):
    """56, 100: memory of the kernel which no limit of address space counts."""
    fill = """
        held, total = [], 0
        try:
            while True:
                for pair in (os.pipe()[::-1], [one.detach() for one in socket.socketpair()]):
                    held.append(pair)
                    os.set_blocking(pair[0], False)
                    try:
                        while True: total += os.write(pair[0], bytes(65536))
                    except BlockingIOError: pass
        except OSError as error:
            reason = error.errno
        (reason == errno.EMFILE, total < 32 << 20)
    """
    assert arena.run(fill).value == "(True, True)"


def test_locks_cannot_be_pinned_in_memory(arena):
    attempt = arena.attack("return 1 + syscall('mlock', id(SCRATCH), 4096)")
    assert attempt.refused or attempt.result.failure.kind == "MemoryError", attempt


def test_python_in_the_session_is_ours(arena):
    """The session runs the interpreter that the host has."""
    assert arena.run("sys.version_info[:2]").value == str(sys.version_info[:2])
