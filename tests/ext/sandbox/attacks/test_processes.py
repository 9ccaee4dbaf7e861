"""Attacks 28-42: starting processes, signalling, tracing and disturbing those of others, and staying behind."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise.ext.sandbox.results import ExecutionStatus

STARTING = {
    "28 fork": "n = os.fork()\nif n == 0: os._exit(0)\nreturn n",
    "28 subprocess": "return subprocess.run(['/bin/true'])",
    "28 shell": "n = os.system('true')\nif n: raise OSError(n, 'system')\nreturn n",
    "28 exec": "os.execv('/bin/true', ['true'])",
    "28 spawn": "return os.posix_spawn('/bin/true', ['true'], {})",
    "28 vfork": "return syscall('vfork') if os.uname().machine == 'x86_64' else syscall('clone', 0x4111, 0, 0, 0, 0)",
    "28 clone": "n = syscall('clone', 17, 0, 0, 0, 0)\nif n == 0: os._exit(0)\nreturn n",
    "28 clone3": """
        n = syscall('clone3', ctypes.create_string_buffer(struct.pack('8Q', 0, 0, 0, 0, 17, 0, 0, 0)), 64)
        if n == 0: os._exit(0)
        return n""",
    "28 clone that looks like a thread": """
        n = syscall('clone', 0x10000000 | 17, 0, 0, 0, 0)
        if n == 0: os._exit(0)
        return n""",
    "31 daemon": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        return 'forked'""",
    "40 multiprocessing": """
        import multiprocessing
        p = multiprocessing.get_context('fork').Process(target=print)
        p.start()
        return p""",
    "40 process pool": """
        import concurrent.futures
        with concurrent.futures.ProcessPoolExecutor(1) as pool:
            return pool.submit(int).result()""",
    "41 program from memory": """
        n = os.memfd_create('evil')
        os.write(n, open(libc._name or '/bin/true', 'rb').read())
        return syscall('execveat', n, b'', 0, 0, 0x1000)""",
    "41 execveat": "return syscall('execveat', -100, b'/bin/true', 0, 0, 0)",
}
REACHING = {
    "32 kill": "os.kill(VICTIM, 9); return 'killed'",
    "32 probe": "os.kill(VICTIM, 0); return 'there'",
    "32 kill the parent": "os.kill(PARENT, 9); return 'killed'",
    "32 stop the host": "os.kill(HOST, 19); return 'stopped'",
    "32 everybody": "os.kill(-1, 0); return 'reached'",
    "33 pidfd": "n = os.pidfd_open(VICTIM); signal.pidfd_send_signal(n, 9); return 'killed'",
    "33 tgkill": "return 1 + syscall('tgkill', VICTIM, VICTIM, 9)",
    "33 tkill": "return 1 + syscall('tkill', VICTIM, 9)",
    "33 queued": "return 1 + syscall('rt_sigqueueinfo', VICTIM, 9, struct.pack('iii', 9, 0, -1) + bytes(116))",
    "34 group of the victim": "os.killpg(VICTIM, 9); return 'killed'",
    "34 own group": "os.kill(0, 0); return 'reached'",
    "34 kill own group": "os.kill(0, 9); time.sleep(0.1); return 'killed'",
    "35 owner of a pipe": """
        r, w = os.pipe()
        fcntl.fcntl(r, 8, VICTIM)
        fcntl.fcntl(r, 10, 9)
        fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(w, b'x')
        return 'sent'""",
    "35 owner, the longer way": "r, w = os.pipe(); fcntl.fcntl(r, 15, struct.pack('ii', 1, VICTIM)); return 'owned'",
    "35 owner, by ioctl": "a, b = socket.socketpair(); fcntl.ioctl(a, 0x8901, struct.pack('i', VICTIM)); return 'owned'",
    "35 signal of a pipe": "r, w = os.pipe(); fcntl.fcntl(r, 10, 9); return 'set'",
    "36 attach": "syscall('ptrace', 16, VICTIM, 0, 0); return 'attached'",
    "36 seize": "syscall('ptrace', 0x4206, VICTIM, 0, 0); return 'seized'",
    "36 be traced": "syscall('ptrace', 0, 0, 0, 0); return 'traced'",
    "37 read memory": """
        room = ctypes.create_string_buffer(8)
        here = (ctypes.c_void_p * 2)(ctypes.addressof(room), 8)
        return syscall('process_vm_readv', os.getpid(), here, 1, here, 1, 0)""",
    "37 write memory": """
        room = ctypes.create_string_buffer(8)
        here = (ctypes.c_void_p * 2)(ctypes.addressof(room), 8)
        return syscall('process_vm_writev', os.getpid(), here, 1, here, 1, 0)""",
    "37 take a descriptor": "return syscall('pidfd_getfd', os.pidfd_open(VICTIM), 0, 0)",
    "38 environment": "return open(f'/proc/{VICTIM}/environ').read()",
    "38 memory": "return open(f'/proc/{VICTIM}/mem', 'rb')",
    "38 descriptors": "return os.listdir(f'/proc/{VICTIM}/fd')",
    "38 working folder": "return os.listdir(f'/proc/{VICTIM}/cwd')",
    "38 command line": "return open(f'/proc/{VICTIM}/cmdline').read()",
    "38 own memory": "return open('/proc/self/mem', 'r+b')",
    "39 affinity": "os.sched_setaffinity(VICTIM, {0}); return 'pinned'",
    "39 priority": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19); return 'slowed'",
    "39 scheduler": "os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0)); return 'slowed'",
    "39 limits": "resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (0, 0)); return 'limited'",
    "39 io priority": "return 1 + syscall('ioprio_set', 1, VICTIM, 3 << 13)",
    "42 terminal input": "import termios; fcntl.ioctl(0, termios.TIOCSTI, b'x'); return 'typed'",
    "42 controlling terminal": "import termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); return 'taken'",
}


SLEEPER = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[4])!r})
from turnwise.ext.sandbox.inside import syscalls
syscalls.drop_capabilities()  # or the kernel would protect it
print(1, flush=True)
time.sleep(600)
"""


def start_victim(uid: int) -> "subprocess.Popen[bytes]":
    """A process of that uid, in a group of its own."""
    options = {"user": uid, "group": uid, "extra_groups": []} if uid != os.geteuid() else {}
    program = [sys.executable, "-P", "-c", SLEEPER]
    if options:
        program = ["/bin/sh", "-c", "echo 1; exec sleep 600"]  # Python may lie where that uid cannot go
    process = subprocess.Popen(program, stdout=subprocess.PIPE, start_new_session=True, cwd="/", env={}, **options)  # type: ignore[call-overload]
    assert process.stdout and process.stdout.readline() == b"1\n"
    process.stdout.close()
    return process


@pytest.fixture(scope="module")
def victims() -> Iterator[dict[int, "subprocess.Popen[bytes]"]]:
    found: dict[int, subprocess.Popen[bytes]] = {}
    yield found
    for process in found.values():
        process.kill()
        process.wait()


@pytest.fixture
def victim(request: pytest.FixtureRequest, victims: dict[int, "subprocess.Popen[bytes]"]) -> "subprocess.Popen[bytes]":
    """A process of the attacker's own uid; another one if the last test killed or changed it."""
    uid = request.getfixturevalue("arena" if "arena" in request.fixturenames else "defenceless").uid
    if uid not in victims or "defenceless" in request.fixturenames or victims[uid].poll() is not None:
        if uid in victims:
            victims[uid].kill()
            victims[uid].wait()
        victims[uid] = start_victim(uid)
    return victims[uid]


def look(process: "subprocess.Popen[bytes]") -> tuple[object, ...]:
    """What others could have changed about it."""
    with open(f"/proc/{process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    pid = process.pid
    limits = Path(f"/proc/{pid}/limits").read_text()
    alive = process.poll() is None and fields[0] in "SR"
    return alive, os.sched_getaffinity(pid), os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid), limits


def names(arena, victim) -> dict[str, int]:
    return {"VICTIM": victim.pid, "HOST": os.getpid(), "PARENT": arena.zygote}


def test_no_process_is_started(arena):
    for name, attempt in arena.attacks(STARTING).items():
        assert attempt.refused, (name, attempt)


def test_no_other_process_is_reached(arena, victim):
    before = look(victim)
    for name, attempt in arena.attacks(REACHING, **names(arena, victim)).items():
        assert attempt.refused, (name, attempt)
    assert look(victim) == before


REAL = [*STARTING]
REAL.remove("28 exec")  # ends the session without a word
REAL.remove("41 execveat")
REAL.remove("41 program from memory")
REAL.remove("28 vfork")  # two processes on one stack


def test_a_process_is_started_and_reached_without_a_sandbox(defenceless, victim):
    """That there is something to refuse; the long tail tries every one of the attacks."""
    assert defenceless.attack(STARTING["28 fork"]).found is not None
    assert defenceless.attack(REACHING["32 kill"], **names(defenceless, victim)).found is not None
    assert victim.wait(30) == -signal.SIGKILL


@pytest.mark.long
@pytest.mark.parametrize("name", REAL)
def test_these_start_processes(defenceless, name, soon):
    attempt = defenceless.attack(STARTING[name])
    assert attempt.found is not None or "forked" in attempt.result.text(), attempt

    def tidied() -> bool:
        left = defenceless.processes() - defenceless.quiet
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    assert soon(tidied)


HARMLESS = [
    name for name in REACHING if not name.startswith(("32 kill the", "32 stop", "32 everybody", "34", "36", "42"))
]
HARMLESS.remove("38 own memory")  # a process that gave up root may not open its own


@pytest.mark.long
@pytest.mark.parametrize("name", HARMLESS)
def test_these_reach_processes(defenceless, victim, name):
    attempt = defenceless.attack(REACHING[name], **names(defenceless, victim))
    assert attempt.found is not None, attempt


def test_a_process_of_its_own_group(arena):
    """34: what kill(0) would reach must not be the zygote, should the filter ever allow it."""
    alone = arena.run("(os.getpgrp() in (0, os.getpid()), os.getsid(0) in (0, os.getpid()))")
    assert alone.value == "(True, True)"


def test_signals_to_itself_are_its_own_affair(arena):
    """32."""
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1, signal.SIGPIPE):
        result = arena.run(f"os.kill(os.getpid(), {int(number)}); time.sleep(0.05); 'alive'", seconds=0.3)
        assert result.value == "'alive'" or result.status in (ExecutionStatus.KILLED, ExecutionStatus.TIMEOUT), result


def test_a_signal_without_a_name(arena):
    """32: the kernel has more of them than Python's enum."""
    result = arena.run("os.kill(os.getpid(), 40); time.sleep(0.05); 'alive'")
    assert result.value == "'alive'" or result.status is ExecutionStatus.KILLED


def test_fork_bomb(arena):
    """29."""
    bomb = """
        count = 0
        for _ in range(300):
            try:
                if os.fork() == 0: time.sleep(60)
                count += 1
            except OSError:
                pass
        count
    """
    assert arena.run(bomb).value == "0"


THREADS = """
import _thread
_thread.stack_size(32768)
count = 0
try:
    while count < 3000:
        _thread.start_new_thread(time.sleep, (60,))
        count += 1
except RuntimeError:
    pass
count
"""


def test_thread_bomb(arena):
    """30: 32768 pids are all that many machines have."""
    result = arena.run(THREADS)
    assert result.status is ExecutionStatus.KILLED and "threads" in result.text(), result


def test_threads_stay_and_die_with_the_session(arena):
    """30, 31: the neighbour is served meanwhile."""
    result = arena.run("for _ in range(20): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()")
    assert result.status is ExecutionStatus.OK, result


def test_the_first_thread_may_leave(arena):
    """31: a process whose first thread is gone is still ended as a whole."""
    leave = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); syscall('exit', 0)"
    assert arena.run(leave, seconds=0.3).status in (ExecutionStatus.TIMEOUT, ExecutionStatus.KILLED)
