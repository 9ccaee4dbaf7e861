"""What two sessions, or a session and the host, could say to each other through files and kernel objects they share."""

import asyncio
import fcntl
import os
import platform
import struct
import textwrap

import pytest

from turnwise.ext.sandbox.inside import seccomp, syscall_numbers
from turnwise.ext.sandbox.results import ExecutionStatus

WHOLE = "struct.pack('hhqqi4x', {kind}, 0, 0, 0, 0)"
TAKE = f"""
held = os.open(os.__file__, os.O_RDONLY)
outcomes = {{}}
def attempt(name, call):
    try:
        outcomes[name] = call() or 'done'
    except OSError as error:
        outcomes[name] = errno.errorcode[error.errno]
attempt('flock', lambda: fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB))
attempt('shared flock', lambda: fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB))
attempt('range', lambda: fcntl.lockf(held, fcntl.LOCK_SH | fcntl.LOCK_NB))
attempt('description', lambda: fcntl.fcntl(held, 37, {WHOLE.format(kind=0)}) and None)
attempt('description, waiting', lambda: fcntl.fcntl(held, 38, {WHOLE.format(kind=0)}) and None)
attempt('lease', lambda: fcntl.fcntl(held, 1024, 0))
attempt('watch', lambda: fcntl.fcntl(os.open(os.path.dirname(os.__file__), os.O_RDONLY), 1026, 2))
attempt('a command nobody knows', lambda: fcntl.fcntl(held, 4711, 0))
attempt('times', lambda: os.utime(os.__file__, (1, 1)))
attempt('attribute', lambda: os.setxattr(os.__file__, 'user.evil', b'x'))
outcomes
"""


def test_no_lock_is_seen_by_another_session_or_the_host(arena):
    """101: all locks there are, on a file of Python's installation that everybody can read."""

    async def work():
        async with arena.pool.session() as one, arena.pool.session() as other:
            for session in (one, other):
                await session.run(arena.prelude({}))
            taken = eval((await one.run(TAKE)).value)
            before = os.stat(os.__file__)
            again = eval((await other.run(TAKE)).value)
            asked = await other.run(f"struct.unpack('hhqqi4x', fcntl.fcntl(held, 5, {WHOLE.format(kind=1)}))[0]")
            with open(os.__file__, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the host does not wait
                told = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
            return taken, again, asked.value, struct.unpack("hhqqi4x", told)[0], before

    taken, again, asked, seen, before = arena.do(work())
    assert (
        taken
        == again
        == {
            "flock": "ENOSYS",
            "shared flock": "ENOSYS",
            "range": "done",
            "description": "EPERM",
            "description, waiting": "EPERM",
            "lease": "EPERM",
            "watch": "EPERM",
            "a command nobody knows": "EPERM",
            "times": "done",
            "attribute": "done",
        }
    )
    assert int(asked) == seen == fcntl.F_UNLCK
    assert os.stat(os.__file__).st_mtime == before.st_mtime and not os.listxattr(os.__file__)


LOCKING = {
    "sqlite3": """
        import sqlite3
        first, second = sqlite3.connect('a.db'), sqlite3.connect('a.db')
        with first: first.execute('create table t (n)'); first.execute('insert into t values (7)')
        second.execute('pragma journal_mode=wal')
        with second: second.execute('insert into t values (35)')
        found = first.execute('select sum(n) from t').fetchone()[0]""",
    "lockf": """
        with open('a.lock', 'w') as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_UN)
        found = 42""",
    "mailbox": """
        import mailbox
        box = mailbox.mbox('box'); box.lock(); box.add('Subject: x\\n\\ny'); box.flush(); box.unlock()
        found = 41 + len(box)""",
    "tempfile": """
        import tempfile
        with tempfile.TemporaryFile() as file, tempfile.NamedTemporaryFile() as named:
            file.write(b'42'); file.seek(0); named.write(b'x')
            found = int(file.read())""",
    "shelve": """
        import shelve
        with shelve.open('kept') as kept: kept['a'] = 42
        with shelve.open('kept') as kept: found = kept['a']""",
    "a pair of sockets": """
        a, b = socket.socketpair()
        a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        a.settimeout(1); a.sendall(b'x'); b.recv(1)
        found = 42 + a.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)""",
    "asyncio": """
        import asyncio
        async def main():
            reader, writer = await asyncio.open_connection(sock=a)
            b.sendall(b'42\\n')
            return int(await reader.readline())
        found = asyncio.run(main())""",
}


def test_code_that_locks_its_own_files_works(arena):
    cells = [textwrap.dedent(code).strip() + "\nassert found == 42, found" for code in LOCKING.values()]

    async def work():
        async with arena.pool.session() as session:
            await session.run(arena.prelude({}))
            return [await session.run(cell) for cell in cells]

    for name, result in zip(LOCKING, arena.do(work()), strict=True):
        assert result.status is ExecutionStatus.OK, (name, result)


PEER = {
    "102 SO_PEERCRED": "return s.getsockopt(1, 17, 12)",
    "102 SO_PEERSEC": "return s.getsockopt(1, 31, 64)",
    "102 SO_PEERGROUPS": "return s.getsockopt(1, 59, 64)",
    "102 SO_PEERPIDFD": "return s.getsockopt(1, 77)",
    "102 SO_COOKIE": "return s.getsockopt(1, 57, 8)",
    "102 SO_NETNS_COOKIE": "return s.getsockopt(1, 71, 8)",
    "102 SO_PASSCRED": "s.setsockopt(1, 16, 1); return 'set'",
    "102 SO_PASSPIDFD": "s.setsockopt(1, 76, 1); return 'set'",
    "102 SO_PASSSEC": "s.setsockopt(1, 34, 1); return 'set'",
    "102 SO_ATTACH_BPF": "s.setsockopt(1, 50, 1); return 'set'",
    "102 SO_PEEK_OFF": "s.setsockopt(1, 42, 1); return 'set'",
    "102 SO_BUSY_POLL": "s.setsockopt(1, 46, 1); return 'set'",
    "102 SO_MARK": "s.setsockopt(1, 36, 1); return 'set'",
}
"""Of the socket to the host, which a session may reach by its number."""


def test_a_socket_tells_nothing_of_its_peer(arena):
    body = "s = socket.socket(fileno=os.dup(3))\nouts = {}\n"
    for name, code in PEER.items():
        call = code.replace("return ", "outs[NAME] = ")
        body += f"NAME = {name!r}\ntry:\n    {call}\nexcept OSError as error:\n    outs[NAME] = error.errno\n"
    found = eval(arena.run(body + "outs").value)
    assert found == dict.fromkeys(PEER, 1), found


def test_these_options_work_without_the_filter(defenceless):
    for name in ("102 SO_PEERCRED", "102 SO_PASSCRED", "102 SO_COOKIE"):
        attempt = defenceless.attack("s = socket.socket(fileno=os.dup(3))\n" + PEER[name])
        assert attempt.found is not None, (name, attempt)


SHARED = {
    "103 POSIX shared memory": "return os.open('/dev/shm/evil', os.O_CREAT | os.O_RDWR)",
    "103 named semaphore": "return open('/dev/shm/sem.evil', 'w')",
    "103 memory of Python's own": "from multiprocessing import shared_memory; return shared_memory.SharedMemory('evil', True, 64)",
    "103 a queue by name": "return os.open('/dev/mqueue/evil', os.O_CREAT | os.O_RDWR)",
    "103 a file made in a folder of Python's": "return open(os.path.dirname(os.__file__) + '/evil', 'w')",
    "103 a name in a folder of Python's": "os.symlink('x', os.path.dirname(os.__file__) + '/evil'); return 'made'",
    "103 inotify": "return syscall('inotify_init1', 0)",
    "103 fanotify": "return syscall('fanotify_init', 0, 0)",
    "103 keyring": "return syscall('add_key', b'user', b'evil', b'x', 1, -4)",
    "103 request_key": "return syscall('request_key', b'user', b'evil', 0, -4)",
    "103 process_madvise": "return syscall('process_madvise', 0, 0, 0, 0, 0)",
    "103 cachestat": "return 1 + syscall('cachestat', 0, bytes(16), bytes(40), 0)",
    "103 priority of others": "os.setpriority(os.PRIO_USER, 0, 5); return 'set'",
    "103 ioprio": "return 1 + syscall('ioprio_set', 1, 0, 0)",
    "103 which pages are in memory": "return syscall('preadv2', os.open(os.__file__, os.O_RDONLY), 0, 0, 0, 0, 8)",
    "103 which pages of a mapping are in memory": "return 1 + syscall('mincore', 0, 0, bytes(1))",
    "103 name_to_handle_at": "return syscall('name_to_handle_at', -100, b'/', ctypes.create_string_buffer(136), ctypes.create_string_buffer(8), 0)",
}


def test_no_session_evicts_pages_that_all_share(arena):
    """103: the advice is taken and not followed, or it would fail where nothing is mapped."""
    body = "libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int\n"
    found = arena.run(body + "[libc.madvise(4096, 4096, advice) for advice in (20, 21, 4)]")  # COLD, PAGEOUT, DONTNEED
    assert found.value == "[0, 0, -1]", found


FUTEX = """
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(ctypes.c_void_p(0), ctypes.c_size_t(4096), 1, KIND, os.open(os.__file__, os.O_RDONLY), ctypes.c_long(0))
word = ctypes.c_int.from_address(page).value
def futex(operation, number):
    try:
        return syscall('futex', page, operation, number, struct.pack('qq', 1, 0), 0, -1)
    except OSError as error:
        return errno.errorcode[error.errno]
"""


@pytest.mark.parametrize("kind", [1, 2], ids=["shared", "private"])
def test_no_session_is_woken_by_another(arena, kind):
    """103: a futex on a page of a file that both can read, however it is mapped."""

    async def work():
        async with arena.pool.session() as one, arena.pool.session() as other:
            for session in (one, other):
                await session.run(arena.prelude({"KIND": kind}) + FUTEX)
            waiting = asyncio.ensure_future(one.run("futex(0, word)"))
            await asyncio.sleep(0.2)
            tries = [f"futex({operation}, 9)" for operation in (1, 3, 4, 5, 10, 129)]
            woken = [(await other.run(code)).value for code in tries]
            vector = await other.run("syscall('futex_waitv', 0, 0, 0, 0, 0)")
            return (await waiting).value, woken, vector.failure.kind

    waited, woken, vector = arena.do(work())
    assert waited == "'ETIMEDOUT'" and woken[:-1] == ["'EPERM'"] * 5 and woken[-1] in ("0", "'EFAULT'"), woken
    assert vector == "OSError"


def test_threads_locks_and_their_ends_work(arena):
    """What stands on futexes: locks, conditions, events, queues, pools, joins."""
    code = """
        import concurrent.futures, queue
        lock, ready, full, done = threading.Lock(), threading.Condition(), threading.Semaphore(2), queue.Queue()
        total = 0
        def work(number):
            global total
            with full, lock: total += number
            done.put(number)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(200)))
        others = [threading.Thread(target=work, args=(1,)) for _ in range(20)]
        for one in others: one.start()
        for one in others: one.join()
        found = sum(done.get(timeout=1) for _ in range(220))
        (total, found)
    """
    assert arena.run(code).value == "(19920, 19920)"


def test_nothing_that_sessions_share_can_be_written(arena):
    """103: all in one session, because nothing of a refusal stays."""
    body = "outs = {}\n"
    for number, (name, code) in enumerate(SHARED.items()):
        body += f"def attack{number}():\n    {code}\n"
        body += (
            f"try:\n    outs[{name!r}] = str(attack{number}())\nexcept OSError as error:\n    outs[{name!r}] = None\n"
        )
    found = eval(arena.run(body + "outs").value)
    assert found == dict.fromkeys(SHARED), found


def test_the_host_s_name_is_not_told(arena):
    """104: at L2 there is no namespace to hold another name, and no filter can change an answer."""
    found = eval(arena.run("import platform; (os.uname().nodename, platform.node(), socket.gethostname())").value)
    if arena.namespaces:
        assert set(found) == {"sandbox"}
    else:
        assert found[0] == os.uname().nodename


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_both_tables_know_the_calls_that_are_checked(machine):
    """A name that a table lacks would go unchecked, except where that machine has no such call."""
    known = syscall_numbers.table(machine)
    assert not [name for name in seccomp.CHECKED if name not in known]
    assert platform.machine() != machine or seccomp.build(machine, True).program
