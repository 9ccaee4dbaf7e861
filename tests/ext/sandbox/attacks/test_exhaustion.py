"""Attacks 105-110: what the host, the zygote and all sessions together have only so much of, and a zygote that hangs."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise.ext.sandbox import pool as pools
from turnwise.ext.sandbox import resources, zygote_process
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.limits import MIB
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.results import ExecutionStatus, InputImage
from turnwise.ext.sandbox.zygote_process import SandboxLost
from turnwise.system.resources import free_memory

ROOT = str(Path(__file__).parents[4])
LEVELS = pytest.mark.parametrize("level", [SandboxLevel.L2, SandboxLevel.L3], ids=lambda level: level.name)


@contextlib.contextmanager
def descriptors(spare: int) -> Iterator[None]:
    """This process, and what it starts, has room for only so many more descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    free = [number for number in range(max(taken) + spare + 2) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def forkers(arena) -> set[int]:
    """The zygote, and its parent where it has namespaces; not the sessions, whose limit is their own."""
    limits = {pid: Path(f"/proc/{pid}/limits").read_text() for pid in arena.quiet}
    return {pid for pid, text in limits.items() if text.partition("Max open files")[2].split()[1] != "128"}


async def outcome(arena) -> str:
    """Of a whole session with an image, which takes descriptors too."""
    try:
        async with arena.pool.session(images=[InputImage("a", b"x", "L", (1, 1))]) as session:
            return (await session.run("img0.size")).value or ""
    except SandboxLost as error:
        return f"lost: {error}"


def test_no_descriptor_left_in_the_host_fails_one_session_and_no_other(arena):
    """105: EMFILE in every place it can come up."""
    found = []
    for spare in range(10):
        with descriptors(spare):
            found.append(arena.do(outcome(arena)))
        assert arena.do(arena.neighbour.run("total")).value == str(arena.total)
    assert found[0].startswith("lost: a new session could not be made"), found
    assert found[-1] == "(1, 1)" and all(one == "(1, 1)" or one.startswith("lost: ") for one in found), found
    assert arena.do(outcome(arena)) == "(1, 1)"


@LEVELS
def test_no_descriptor_left_in_the_zygote_fails_one_session_and_no_other(level, monkeypatch):
    """105: it has fewer than the host, as it would if others opened files in it."""
    monkeypatch.setattr(resources, "most_sessions", lambda: 1000)

    async def work():
        with descriptors(40):
            pool = await SandboxPool(PoolSettings(level=level, preload=(), warm=0)).__aenter__()
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
        sessions, told = [], []
        try:
            while len(told) < 5 and len(sessions) < 200:
                session = pool.session()
                try:
                    await session.run(f"x = {len(sessions)}")
                    sessions.append(session)
                except SandboxLost as error:
                    told.append(str(error))
            values = [(await one.run("x")).value for one in sessions]
            for one in sessions[:5]:
                await one.close()
            return told, values, (await session.run("6 * 7")).value
        finally:
            await pool.close()

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        told, values, later = asyncio.run(work())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(told) == 5 and all("Too many open files" in one or "in the zygote" in one for one in told), told
    assert values == [str(number) for number in range(len(values))] and len(values) > 10 and later == "42"


FEW = """
import asyncio, resource, sys
sys.path.insert(0, {root!r})
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.zygote_process import SandboxLost, SandboxUnavailable
async def main():
    async with SandboxPool(PoolSettings(level=SandboxLevel.{level}, preload=(), warm=2)) as pool:
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        sessions, told = [], None
        while told is None and len(sessions) < 200:
            session = pool.session()
            try:
                await session.run("import resource; x = resource.getrlimit(resource.RLIMIT_NOFILE)")
                sessions.append(session)
            except SandboxLost as error:
                told = str(error)
        print(len(sessions), told)
        print({{(await one.run("x")).value for one in sessions}})
        await sessions.pop().close()
        print((await session.run("6 * 7")).value)
try:
    asyncio.run(main())
except SandboxUnavailable as error:
    print("unavailable:", error)
"""


def run_with(level: SandboxLevel, soft: int, hard: int) -> list[str]:
    script = FEW.format(root=ROOT, level=level.name, soft=soft, hard=hard)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return done.stdout.splitlines()


@LEVELS
def test_sessions_are_bounded_by_descriptors_of_which_all_are_taken(level):
    """106: the soft limit is raised, inside a session there are few, and one session too many is refused in words."""
    limit, sessions, inside, later = run_with(level, 64, 240)
    assert limit == "240"
    count, _, told = sessions.partition(" ")
    assert 10 < int(count) < 60 and "raise the hard limit (ulimit -Hn)" in told
    assert inside == "{'(128, 128)'}" and later == "42"


def test_too_few_descriptors_for_any_session_are_named():
    assert run_with(SandboxLevel.L2, 64, 100)[0].startswith("unavailable: the sandbox needs more than the 100 desc")


@LEVELS
def test_a_zygote_that_hangs_is_replaced(open_arena, tmp_path, monkeypatch, level):
    """107: nobody waits for it forever, neither for a new session, nor for the end of one, nor of the pool."""
    monkeypatch.setattr(zygote_process, "FORK_SECONDS", 0.3)
    monkeypatch.setattr("turnwise.ext.sandbox.session_process.REAP_SECONDS", 0.3)
    with open_arena(level, tmp_path) as own:
        for pid in forkers(own):
            os.kill(pid, signal.SIGSTOP)

        async def work():
            killed = own.pool.session()
            with pytest.raises(SandboxLost, match="nothing was heard of it for 0.3 s"):
                await killed.run("1")
            with pytest.raises(SandboxLost):
                await own.neighbour.run("total")
            monkeypatch.setattr(zygote_process, "FORK_SECONDS", 30)
            return await killed.run("6 * 7"), await own.neighbour.run("'total' in globals()")

        fresh, again = own.do(work())
        assert fresh.value == "42" and fresh.notices == ()
        assert again.value == "False" and "this session was lost" in again.text()
        for pid in own.processes():
            os.kill(pid, signal.SIGSTOP)
        own.do(own.pool.close(), limit=20)


class Child:
    """A zygote that has just said something, or never does."""

    def __init__(self, silent: bool) -> None:
        self._silent = silent

    @property
    def heard(self) -> float:
        return 0.0 if self._silent else asyncio.get_running_loop().time()


def test_only_silence_is_not_waited_for(monkeypatch):
    """107: one of many who ask at once waits longer than that, and gets a session."""
    monkeypatch.setattr(zygote_process, "FORK_SECONDS", 0.1)

    async def work(silent: bool) -> tuple[str, bool]:
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()
        loop.call_later(0.5, lambda: waiting.done() or waiting.set_result("a session"))
        try:
            return await zygote_process.answered(waiting, Child(silent)), waiting.cancelled()
        except TimeoutError as error:
            return str(error), waiting.cancelled()

    assert asyncio.run(work(False)) == ("a session", False)
    assert asyncio.run(work(True)) == ("nothing was heard of it for 0.1 s", True)


def test_a_session_that_was_lost_says_so_once(arena):
    """108: after a cancelled call, or one that the machinery lost, the next one runs without what was there."""

    async def work():
        async with arena.pool.session() as session, arena.pool.session(stateless=True) as stateless:
            await session.run("x = 1")
            await stateless.run("x = 1")
            found = []
            for one in (session, stateless):
                call = asyncio.ensure_future(one.run("import time; time.sleep(30)"))
                await asyncio.sleep(0.1)
                call.cancel()
                await asyncio.wait((call,))
                found += [await one.run("'x' in globals()"), await one.run("1")]
            return found

    told, then, nothing_lost, _ = arena.do(work())
    assert told.value == "False" and "this session was lost (a call was cancelled)" in told.text()
    assert then.notices == nothing_lost.notices == ()


def test_the_kernel_ends_sandboxes_first(arena):
    """109: every process of the pool, and none can make itself less likely."""
    assert {Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in arena.processes()} == {"1000"}
    attempt = arena.attack("open('/proc/self/oom_score_adj', 'w').write('0'); return 'safe'")
    assert attempt.refused, attempt


@LEVELS
def test_all_sessions_together_hold_only_so_much_memory(level, monkeypatch):
    """110: each stays below its own limit; the largest is ended, also when it does nothing, and says why."""
    monkeypatch.setattr(resources, "memory_for_sessions", lambda: 150 * MIB)

    async def work():
        async with SandboxPool(PoolSettings(level=level, preload=(), warm=0)) as pool:
            async with pool.session() as small, pool.session() as large, pool.session() as last:
                held = "import time; x = bytearray(b'x') * ({} << 20); time.sleep(0.1); len(x)"
                for one, size in ((small, 40), (large, 80)):
                    assert (await one.run(held.format(size))).status is ExecutionStatus.OK
                other = await last.run(held.format(60))
                ended = await large.run("len(x)")
                kept = await small.run("len(x)")
                huge = await last.run("y = bytearray(b'x') * (200 << 20); time.sleep(5); len(y)")
                return other, ended, kept, huge, await large.run("'x' in globals()")

    other, ended, kept, huge, again = asyncio.run(work())
    assert other.status is kept.status is ExecutionStatus.OK
    assert ended.status is huge.status is ExecutionStatus.KILLED and not ended.kept
    assert all("all sandboxes together held more than" in one.text() and "lost" in one.text() for one in (ended, huge))
    assert again.value == "False"


def test_memory_for_sessions_is_a_part_of_what_is_free():
    assert 0 < resources.memory_for_sessions() <= free_memory()


@LEVELS
def test_sessions_of_root_s_are_told_loudly(level):
    """111: where Python lies in a closed folder, L2 cannot give up root's uid; the report says so and how to mend it."""

    async def work():
        async with SandboxPool(PoolSettings(level=level, preload=(), warm=0)) as pool:
            async with pool.session() as session:
                return pool.report, int((await session.run("import os; os.getuid()")).value or -1)

    report, uid = asyncio.run(work())
    warned = [line for line in report.summary().splitlines() if line.startswith("warning: sessions run as root")]
    assert bool(warned) == (uid == 0) and warned == [one for one in report.text().splitlines() if one in warned]


def test_a_closed_folder_on_the_way_is_found(tmp_path):
    inner = tmp_path / "closed" / "inner"
    inner.mkdir(parents=True)
    inner.parent.chmod(0o711)
    found = pools._closed_part(str(inner))
    assert found is not None and inner.is_relative_to(found) and found != str(inner)
    assert pools._closed_part("/usr") is None
