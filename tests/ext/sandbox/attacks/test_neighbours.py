"""Attacks 92-95, 98 and 99: other sessions, deaths of the host and the zygote, what leaks over time, failing closed."""

import asyncio
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.results import ExecutionStatus, InputImage
from turnwise.ext.sandbox.zygote_process import SandboxLost

ROOT = str(Path(__file__).parents[4])


def test_other_sessions_cannot_be_reached(arena):
    """92: neither their files nor their processes, wherever they are."""

    async def work():
        async with arena.pool.session() as owner:
            await owner.run("import os; open('mine', 'w').write('private'); secret = 'private'")
            place = (await owner.run("os.getcwd()")).value.strip("'")
            (other,) = arena.processes() - arena.quiet
            async with arena.pool.session() as thief:
                await thief.run(arena.prelude({"PLACE": place, "OTHER": other}))
                attempts = [
                    await thief.run(code)
                    for code in (
                        "open(PLACE + '/mine').read()" if not arena.namespaces else "open('/scratch/mine').read()",
                        "os.listdir(os.path.dirname(PLACE) + '/.')" if not arena.namespaces else "os.listdir('/proc')",
                        "open(PLACE + '/evil', 'w')" if not arena.namespaces else "open('/evil', 'w')",
                        "os.rename(PLACE, PLACE + 'x')" if not arena.namespaces else "os.rename('/scratch', '/x')",
                        "os.kill(OTHER, 9)",
                        "syscall('ptrace', 16, OTHER, 0, 0)",
                        "os.pidfd_open(OTHER)",
                        "open(f'/proc/{OTHER}/mem', 'rb')",
                        "[os.kill(n, 0) for n in range(2, 99)]",
                    )
                ]
            return attempts, await owner.run("secret, os.listdir('.')")

    attempts, owner = arena.do(work())
    assert all(
        one.status in (ExecutionStatus.DENIED, ExecutionStatus.ERROR)
        and one.failure.kind in ("PermissionError", "FileNotFoundError", "OSError")
        for one in attempts
    ), attempts
    assert owner.value == "('private', ['mine'])"


def test_nothing_goes_from_one_session_to_the_next(arena):
    """92: a process serves one session only."""
    arena.run(
        "import builtins; builtins.evil = 1; open('evil', 'w').write('x'); sys.modules['evil'] = os; os.environ['EVIL'] = '1'"
    )
    found = arena.run(
        "hasattr(__builtins__, 'evil'), os.listdir('.'), 'evil' in sys.modules, 'EVIL' in os.environ, 'evil' in globals()"
    )
    assert found.value == "(False, [], False, False, False)"


def test_input_images_are_copies(arena):
    """The second session sees what the host gave, whatever the first did to its own."""
    given = InputImage("a.raw", b"\x07" * 4, "L", (2, 2))

    async def work():
        async with arena.pool.session(images=[given]) as first, arena.pool.session(images=[given]) as second:
            await first.run("img0.putpixel((0, 0), 99); images['a.raw'].putpixel((0, 0), 99)")
            return [(await one.run("list(images['a.raw'].getdata())")).value for one in (first, second)]

    assert arena.do(work()) == ["[7, 7, 7, 7]"] * 2


def test_random_numbers(arena):
    """98: of two sessions differ, with one seed are the same again; what the kernel gives is new each time."""
    code = "import random, numpy; (random.random(), numpy.random.rand())"
    one, again, other = (arena.run(code, seed=seed).value for seed in (1, 1, 2))
    assert one == again != other
    first, second = (eval(value) for value in (one, other))
    assert first[0] != second[0] and first[1] != second[1]
    fresh = "import uuid, numpy; (os.urandom(8), uuid.uuid4().hex, numpy.random.default_rng().random())"
    assert all(
        a != b
        for a, b in zip(*(eval(arena.run(fresh, seed=1).value) for _ in range(2)), strict=True)
        for a, b in [(a, b)]
    )


HOST = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
async def main():
    async with SandboxPool(PoolSettings(level=SandboxLevel.{level}, preload=(), warm=3)) as pool:
        sessions = [pool.session() for _ in range(3)]
        for session in sessions:
            await session.run("import threading, time, signal; signal.signal(2, signal.SIG_IGN)")
        calls = [asyncio.ensure_future(one.run("while True: pass")) for one in sessions[:2]]
        await asyncio.sleep(0.05)
        print("running", flush=True)
        await asyncio.wait(calls)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_host(arena, soon, tmp_path, number):
    """93: killed in the middle of calls, with idle, running and warm sessions."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    script = HOST.format(root=ROOT, level=arena.level.name)
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE) as host:
        assert host.stdout and host.stdout.readline() == b"running\n"

        def found() -> list[int]:
            return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if marked(pid, tmp_path)]

        # the host, the zygote, three warm ones, three sessions; warm ones are forked when there is time
        assert soon(lambda: len(found()) >= 7, 60)
        alive = found()
        host.send_signal(number)
        host.wait()
    assert soon(lambda: not any(marked(pid, tmp_path) for pid in alive), 60)


def marked(pid: int, mark: Path) -> bool:
    try:
        return str(mark).encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def test_the_pool_recovers_from_the_death_of_the_zygote(arena, open_arena, tmp_path):
    """94: open sessions are lost, which is no fault of their code; later ones work."""
    with open_arena(arena.level, tmp_path) as own:

        async def work():
            busy, idle = own.pool.session(), own.pool.session()
            await idle.run("x = 1")
            call = asyncio.ensure_future(busy.run("while True: pass"))
            await asyncio.sleep(0.05)
            os.kill(own.zygote, signal.SIGKILL)
            while own.processes():
                await asyncio.sleep(0.01)
            outcomes = await asyncio.gather(call, idle.run("x"), own.neighbour.run("total"), return_exceptions=True)
            async with own.pool.session() as later:
                value = (await later.run("6 * 7")).value
            again = await idle.run("'x' in globals()")
            for one in (busy, idle):
                await one.close()
            return outcomes, value, again.value

        outcomes, value, again = own.do(work())
        assert [type(one) for one in outcomes] == [SandboxLost] * 3
        assert value == "42" and again == "False"


def test_nothing_leaks_when_calls_are_ended_again_and_again(arena):
    """95: the fixture counts processes, descriptors and folders afterwards. benchmarks/sandbox.py runs a thousand."""

    async def work():
        sessions = [arena.pool.session() for _ in range(4)]
        for code, seconds in (
            ("while True: pass", 0.005),
            ("import os; os._exit(1)", 1),
            ("import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass", 0.005),
        ):
            for _ in range(4):
                results = await asyncio.gather(*(one.run(code, seconds) for one in sessions))
                assert {one.status for one in results} <= {ExecutionStatus.TIMEOUT, ExecutionStatus.KILLED}
        calls = [asyncio.ensure_future(one.run("while True: pass")) for one in sessions]
        await asyncio.sleep(0.05)
        for call in calls:
            call.cancel()
        assert all(
            isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*calls, return_exceptions=True)
        )
        assert (await sessions[0].run("1 + 1")).value == "2"
        for one in sessions:
            await one.close()

    arena.do(work())


WITHOUT = """
import asyncio, ctypes, os, sys
sys.path.insert(0, {root!r})
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.inside import seccomp, syscalls
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.zygote_process import SandboxUnavailable
forbidden = {forbidden!r}
names = [n for n in syscalls.NUMBERS if n not in forbidden]
seccomp.ALLOWED, seccomp.FAKED, seccomp.ABSENT, seccomp.CHECKED = names, [], [], {{}}
program = seccomp.build(os.uname().machine, True)
syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1, "")
program.install(os.getpid())
async def main():
    settings = PoolSettings(level=SandboxLevel.{level}, min_level=SandboxLevel.{floor}, preload=(), warm=0)
    try:
        async with SandboxPool(settings) as pool:
            async with pool.session() as session:
                print("ran at", pool.report.level.name, (await session.run("6 * 7")).value)
    except SandboxUnavailable as error:
        print("refused:", error)
asyncio.run(main())
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no filter for this machine")
@pytest.mark.parametrize(
    ("forbidden", "level", "floor", "expected"),
    [
        (
            ["unshare"],
            "auto",
            "L3",
            "refused: sandbox.min_level=L3 is not available here, so no code was run\n  namespaces: unshare",
        ),
        (["unshare"], "L3", "L2", "refused: sandbox.level=L3 is not available here"),
        (["mount"], "L3", "L3", "refused: sandbox.level=L3"),
        (["setns"], "L3", "L3", "refused: sandbox.level=L3"),
        (["unshare"], "auto", "L2", "ran at L2 42"),
        (
            ["landlock_create_ruleset"],
            "auto",
            "L2",
            "refused: sandbox.min_level=L2 is not available here, so no code was run\n  landlock",
        ),
        (["landlock_restrict_self"], "L2", "L2", "refused: sandbox.level=L2"),
        (["seccomp"], "L2", "L2", "refused: sandbox.level=L2"),
    ],
)
def test_a_layer_that_cannot_be_had_runs_no_code(forbidden, level, floor, expected):
    """99: in a host that may not make the call, as in a container with a profile."""
    script = WITHOUT.format(root=ROOT, forbidden=forbidden, level=level, floor=floor)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(expected), done.stdout + done.stderr


ORDINARY = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from turnwise.ext.sandbox.inside import syscalls
def closed_parent(path):
    parts = path.split("/")
    parents = ("/".join(parts[:end]) for end in range(2, len(parts)))
    return next((parent for parent in parents if os.stat(parent).st_mode & 5 != 5), None)
def open_the_way(paths):
    "They may lie in a folder of root's: put an open one with the same content in its place, for this process only."
    syscalls.unshare(syscalls.CLONE_NEWNS, "NEWNS")
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    kept = [(closed_parent(path), path, os.open(path, os.O_PATH)) for path in paths if closed_parent(path)]
    for parent in dict.fromkeys(parent for parent, _, _ in kept):
        syscalls.mount("open", parent, "tmpfs", 0, "mode=755")
    for _, path, descriptor in kept:
        os.makedirs(path, exist_ok=True)
        syscalls.mount(f"/proc/self/fd/{{descriptor}}", path, None, syscalls.MS_BIND)
        os.close(descriptor)
if os.geteuid() == 0:
    open_the_way([os.path.realpath(path) for path in ({root!r}, sys.prefix, sys.base_prefix)])
    os.setgroups([]); os.setresgid(4242, 4242, 4242); os.setresuid(4242, 4242, 4242)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1, "")
os.environ["HOME"] = "/tmp"
import signal, tempfile
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.limits import Limits
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
def handler(*_): print("SIGNALLED"); os._exit(1)
signal.signal(signal.SIGUSR1, handler)
async def main():
    canary = tempfile.NamedTemporaryFile(dir="/var/tmp")  # inside, /tmp may be the session's own scratch
    canary.write(b"canary"); canary.flush()
    settings = PoolSettings(level=SandboxLevel.{level}, preload=(), warm=0, limits=Limits(scratch=4 << 20, seconds=3))
    async with SandboxPool(settings) as pool:
        print("uid", os.geteuid(), pool.report.level.name)
        async with pool.session() as session:
            await session.run(f"import os, ctypes, fcntl, struct, signal; HOST, CANARY = {{os.getpid()}}, {{canary.name!r}}")
            for code in {attacks!r}:
                result = await session.run(code)
                print(result.status.value, result.failure.kind if result.failure else None, result.value, "<-", code)
        async with pool.session() as session:
            print("honest", (await session.run("6 * 7")).value)
        async with pool.session() as session:
            hidden = "import os; os.mkdir('h', 0o300)\\nfor n in range(4): os.posix_fallocate(os.open(f'h/{{n}}', os.O_CREAT | os.O_WRONLY), 0, 2 << 20)"
            print("hidden", (await session.run(hidden)).status.value)
        async with pool.session() as session:
            folder = os.path.dirname((await session.run("import os; os.getcwd()")).value.strip("'"))
    left = {level!r} == "L2" and os.path.exists(folder)
    print("left", left)
    if left:
        os.system(f"chmod -R u+rwx {{folder}}; rm -rf {{os.path.dirname(folder)}}")
    print("canary", os.stat(canary.name).st_mode & 0o777, open(canary.name).read(), "affinity", len(os.sched_getaffinity(0)) == {cores})
asyncio.run(main())
"""
FROM_SAME_UID = [
    "open(CANARY).read()",
    "open(CANARY, 'w')",
    "os.truncate(CANARY, 0)",
    "os.kill(HOST, signal.SIGUSR1)",
    "os.kill(0, signal.SIGUSR1)",
    "os.pidfd_open(HOST)",
    "r, w = os.pipe(); fcntl.fcntl(r, 8, HOST)",
    "os.sched_setaffinity(HOST, {0})",
    "open(f'/proc/{HOST}/environ').read()",
    "open(f'/proc/{HOST}/mem', 'rb')",
    "os.fork()",
    "import socket; socket.socket()",
]


@pytest.mark.parametrize("level", [SandboxLevel.L2, SandboxLevel.L3], ids=lambda level: level.name)
def test_an_ordinary_user_has_the_same_sandbox(level):
    """The host as a user without rights, whose uid the sessions share: another way into the namespaces."""
    cores = len(os.sched_getaffinity(0))
    script = ORDINARY.format(root=ROOT, level=level.name, attacks=FROM_SAME_UID, cores=cores)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines and lines[0].startswith("uid ") and lines[0].endswith(level.name), done.stdout + done.stderr
    for line in lines[1 : 1 + len(FROM_SAME_UID)]:
        assert line.startswith(
            ("denied PermissionError", "error FileNotFoundError", "denied OSError", "error ProcessLookupError")
        ), line
    rest = dict(line.split(" ", 1) for line in lines[1 + len(FROM_SAME_UID) :])
    assert rest["honest"] == "42" and rest["canary"] == "384 canary affinity True", rest
    assert rest["hidden"] in ("killed", "error") and rest["left"] == "False", rest
