"""Every number of the Python sandbox, with its target: latency, throughput, memory, deadlines, leaks.

Ratios are against ipykernel (left out where it is not installed) and a fresh `python -c` with the same imports. `busy`
is what others took of the cores right before. Rates are over several rounds: the median, and the worst for the p99.

    python benchmarks/sandbox.py [--level L2] [--quick]
"""

import argparse
import asyncio
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from turnwise.ext.sandbox.config import PRELOADED
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.limits import Limits
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.results import ExecutionStatus, InputImage, Result
from turnwise.ext.sandbox.session import LocalSession, SandboxProcess

PANDAS = "import pandas as pd\npd.DataFrame({'a': [1, 1, 2], 'b': [3, 4, 5]}).groupby('a').sum()"
SYMPY = "import sympy\nx = sympy.symbols('x')\nsympy.solve(x**2 - 5*x + 6, x)"
CODES = ("1", "print('x' * 20000)", "1 / 0", "open('a.txt', 'w').write('a')", "show(img0)")
MEMORY = (("untouched", "", 2), ("after 1 call", "1", math.inf), ("after pandas", PANDAS, 8), ("after sympy", SYMPY, 8))
SPIN, SLEEP = "while True: pass", "import time\ntime.sleep(60)"
IN_C = "sum(iter(int, 1))"  # never lets Python see a signal, so that the process has to be killed
RAW = InputImage("photo", os.urandom(1024 * 1024 * 3), "RGB", (1024, 1024))
ON_DEMAND, WARM = "on demand: session + first call", "warm pool: session + first call"
MS, MB = 1e3, 1e-6


@dataclass(slots=True)
class Run:
    """What to measure, what was found, and the table of it, printed line by line."""

    level: SandboxLevel
    quick: bool
    most: int | None
    """Repetitions of anything; None for as many as its figure needs."""
    busy: float = 0.0
    judged: int = 0
    missed: list[str] = field(default_factory=list)
    found: dict[str, float] = field(default_factory=dict)

    def count(self, usual: int, quick: int) -> int:
        needed = quick if self.quick else usual
        return needed if self.most is None else min(self.most, needed)

    def head(self, title: str) -> None:
        """A new section, after a look at what others are doing."""
        self.busy = others_busy()
        print(f"\n{title:<50} {'p50':>9} {'p99':>9} {'':6} {'target':>9}  met   busy", flush=True)

    def line(self, name: str, middle: float, worst: float, unit: str, target: float = math.inf, note: str = "") -> None:
        """A number, held against its target if it has one. Rates are better when larger."""
        met = wanted = ""
        self.found[name] = middle
        if math.isfinite(target):
            larger = unit == "/s"
            good = middle >= target if larger else middle <= target
            met, wanted = "yes" if good else "NO", f"{'>=' if larger else '<='} {target:g}"
            self.judged += 1
            self.missed += [] if good else [name]
        numbers = f"{middle:9.4g} {worst:9.4g} {unit:6} {wanted:>9}"
        print(f"{name:<50} {numbers}  {met:<4} {self.busy:4.0%}  {note}".rstrip(), flush=True)

    def times(self, name: str, seconds: list[float], target: float = math.inf, note: str = "") -> None:
        self.line(name, median(seconds) * MS, p99(seconds) * MS, "ms", target, note)

    def ratio(self, *ours: str) -> None:
        """Of the last line to lines before."""
        last = list(self.found.values())[-1]
        times = {name: f"{last / self.found[name]:.0f}" if self.found[name] else "?" for name in ours}
        print("  " + "; ".join(f"{number} times `{name}`" for name, number in times.items()))


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def others_busy() -> float:
    """The part of all cores that was taken while we slept."""
    before = Path("/proc/stat").read_text().split()[1:9]
    time.sleep(0.3)
    after = Path("/proc/stat").read_text().split()[1:9]
    ticks = [int(now) - int(was) for was, now in zip(before, after, strict=True)]
    return 1 - (ticks[3] + ticks[4]) / max(1, sum(ticks))  # idle, or waiting for a disk


def available() -> int:
    """Bytes that the machine could still give."""
    return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024


def private_pages(pids: Iterable[int]) -> float:
    """Mean bytes that a process shares with no other; nan where we may not look."""
    try:
        texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    except OSError:
        return math.nan
    lines = [line for text in texts for line in text.splitlines() if line.startswith("Private_")]
    return sum(int(line.split()[1]) for line in lines) * 1024 / len(texts)


def look(pid: int) -> tuple[int, int] | None:
    """(parent, start) of a living process; the start tells it from a later one with its pid."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def below(root: int) -> dict[int, tuple[int, int]]:
    """The living processes that descend from one."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    every = {pid: found for pid in pids if (found := look(pid)) is not None}
    inside = {root}
    while more := {pid for pid, one in every.items() if one[0] in inside} - inside:
        inside |= more
    return {pid: every[pid] for pid in inside - {root}}


async def holdings() -> dict[str, int]:
    """What could leak, here and below, when nothing changes any more: the pool fills itself in the background."""
    before: dict[str, int] = {}
    while True:
        pids = {os.getpid(), *below(os.getpid())}
        now = {"processes": len(pids), "descriptors": 0}
        for pid in pids:
            with contextlib.suppress(OSError):  # a plain user sees only its own
                now["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
        now["temporary files"] = sum(1 for _ in Path(tempfile.gettempdir()).rglob("*"))
        if now == before:
            return now
        before = now
        await asyncio.sleep(0.3)


async def timed(work: Awaitable[object]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def call(session: LocalSession, code: str = "1", seconds: float = 10, *wanted: ExecutionStatus) -> Result:
    """A number about any other outcome would be a lie."""
    result = await session.run(code, seconds)
    if result.status not in (wanted or (ExecutionStatus.OK,)):
        raise RuntimeError(f"{result.status}: {result.text()}")
    return result


@contextlib.asynccontextmanager
async def opened(run: Run, warm: int = 8, grace: float = 0.5) -> AsyncIterator[SandboxPool]:
    async with SandboxPool(PoolSettings(level=run.level, warm=warm, limits=Limits(grace=grace))) as pool:
        await holdings()
        yield pool


async def first_calls(pool: SandboxPool, count: int) -> list[float]:
    """Session and first call, with a pause after each in which the pool fills itself."""
    opening = []
    for seed in range(count):
        session = pool.session(seed=seed)
        opening.append(await timed(call(session)))
        await session.close()
        await asyncio.sleep(1 / 60)
    return opening


async def latency(run: Run) -> None:
    run.head("latency")
    async with opened(run, warm=0) as pool:
        run.times(ON_DEMAND, await first_calls(pool, run.count(300, 50)), 10)
    async with opened(run) as pool:
        run.times(WARM, await first_calls(pool, run.count(500, 100)), 2, "at most 60 a second")
        async with pool.session() as session:
            await call(session)
            further = [await timed(call(session)) for _ in range(run.count(5000, 1000))]
        run.times("further call", further, 0.5)
        run.line("further call, its p99", p99(further) * MS, max(further) * MS, "ms", 2, "the worst instead of p99")


async def rate(
    run: Run, name: str, each: int, tasks: int, work: Callable[[int], Awaitable[object]], goal: float
) -> None:
    """Per second, when `tasks` at a time do `each` pieces of work together."""

    async def many(task: int) -> None:
        for _ in range(each // tasks):
            await work(task)

    found = [each / await timed(asyncio.gather(*map(many, range(tasks)))) for _ in range(run.count(7, 3))]
    run.line(name, median(found), min(found), "/s", goal)


async def throughput(run: Run) -> None:
    run.head("throughput")
    async with opened(run) as pool:

        async def whole(_: int) -> None:
            async with pool.session() as session:
                await call(session)

        await rate(run, "session + call + kill, 4 at a time", run.count(200, 80), 4, whole, 140)
        sessions = [pool.session() for _ in range(8)]
        await asyncio.gather(*map(call, sessions))
        await rate(run, "trivial calls over 8 sessions", 2000, 8, lambda task: call(sessions[task]), 5000)
        await asyncio.gather(*(session.close() for session in sessions))


async def memory(run: Run) -> None:
    """MemAvailable counts what the kernel needs for a process too, and what others do; private pages neither."""
    run.head("memory of a session (p50: MemAvailable)")
    count = run.count(200, 100)
    for name, code, goal in MEMORY:
        async with opened(run, warm=0) as pool:
            zygote, before = set(below(os.getpid())), available()
            await asyncio.gather(*(call(pool.session(), code) if code else pool._acquire() for _ in range(count)))
            used = (before - available()) / count
            pages = private_pages(set(below(os.getpid())) - zygote)
            run.line(name, used * MB, pages * MB, "MB", goal, f"of {count}; private pages instead of p99")


async def deadlines(run: Run) -> None:
    run.head("deadlines")
    limit, grace = 0.05, 0.1
    async with opened(run, grace=grace) as pool:
        for name, code, after, goal in (("loop", SPIN, 0, 20), ("asleep", SLEEP, 0, 20), ("C", IN_C, grace, math.inf)):
            over = []
            session = pool.session()
            for _ in range(run.count(50, 10)):
                start = time.perf_counter()
                assert (await call(session, code, limit, ExecutionStatus.TIMEOUT)).kept is (after == 0), "soft or hard"
                over.append(time.perf_counter() - start - limit - after)
            run.times(f"{name}: {'killed' if after else 'stopped'}, late by", over, goal)
            await session.close()


async def images(run: Run) -> None:
    """With and without in turn, so that a busy moment hits both."""
    run.head("a 3 MB image in (1024 x 1024 RGB, raw)")
    async with opened(run) as pool:
        place = await pool._acquire()

        async def same() -> SandboxProcess:
            return place

        for name, acquire in (("session + first call", pool._acquire), ("a call of one process", same)):
            times: tuple[list[float], list[float]] = ([], [])
            for number in range(run.count(300, 60)):
                given = [RAW] if number % 2 else []
                session = LocalSession(acquire, asyncio.Semaphore(1), pool.settings.limits, 0, given)
                times[number % 2].append(await timed(call(session, "img0.getpixel((512, 512))" if given else "1")))
                if acquire is not same:
                    await session.close()
                    await asyncio.sleep(1 / 60)
            plain, more = (median(one) * MS for one in times)
            worst = (p99(times[1]) - p99(times[0])) * MS
            run.line(f"added to {name}", more - plain, worst, "ms", 5, f"{more:.2f} - {plain:.2f}; p99 - p99")


async def leaks(run: Run) -> None:
    run.head("leaks (p50: more than before; p99: before)")
    calls, timeouts = run.count(10_000, 1000), run.count(1000, 100)
    outside = await holdings()
    async with opened(run, grace=0.05) as pool:
        await turmoil(pool, calls // 10, timeouts // 50)  # what is made once and kept is no leak
        before = await holdings()
        await turmoil(pool, calls, 0)
        pairs = {f"{calls} calls": (before, await holdings())}
        await turmoil(pool, 0, timeouts)
        pairs[f"{timeouts} timeouts"] = (before, await holdings())
    pairs["the pool"] = (outside, await holdings())
    for when, (was, now) in pairs.items():
        for name in was:
            run.line(f"{name} after {when}", now[name] - was[name], was[name], "", 0)


async def turmoil(pool: SandboxPool, calls: int, timeouts: int) -> None:
    """Calls of many kinds over 8 sessions, each hundredth a crash; then timeouts in a row, each tenth a kill."""
    sessions = [pool.session(images=[InputImage("small", bytes(300), "RGB", (10, 10))]) for _ in range(8)]

    async def many(session: LocalSession) -> None:
        for number in range(calls // 8):
            code = "import os\nos._exit(1)" if number % 100 == 99 else CODES[number % 5]
            await call(session, code, 10, ExecutionStatus.OK, ExecutionStatus.ERROR, ExecutionStatus.KILLED)

    await asyncio.gather(*map(many, sessions))
    for number in range(timeouts):
        await call(sessions[0], IN_C if number % 10 == 9 else SPIN, 0.02, ExecutionStatus.TIMEOUT)
    await asyncio.gather(*(session.close() for session in sessions))


async def be_a_host(level: SandboxLevel) -> None:
    """Hold sessions of every kind until killed: idle, computing, asleep, in C."""
    async with SandboxPool(PoolSettings(level=level, running=16)) as pool:
        await asyncio.gather(call(pool.session()), call(pool.session()))
        running = [asyncio.ensure_future(pool.session().run(code, 60)) for code in (SPIN, SLEEP, IN_C) * 2]
        await holdings()
        print("ready", flush=True)
        await asyncio.gather(*running)


def host_killed(run: Run) -> None:
    """The time from the signal until none of the sandbox's processes is alive."""
    run.head("the host is killed with -9")
    found = []
    for _ in range(run.count(9, 3)):
        with subprocess.Popen([sys.executable, __file__, run.level.name], stdout=subprocess.PIPE) as host:
            assert host.stdout is not None and host.stdout.readline() == b"ready\n", "the host did not come up"
            left = processes = below(host.pid)
            start = time.perf_counter()
            host.kill()
            while left := {pid: was for pid, was in left.items() if (now := look(pid)) and now[1] == was[1]}:
                time.sleep(0.001)
            found.append(time.perf_counter() - start)
    run.times("until nothing is alive", found, 100, f"{len(processes)} processes")


def others(run: Run) -> None:
    run.head("others")
    found = []
    for _ in range(run.count(5, 2)):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {', '.join(PRELOADED)}"], check=True)
        found.append(time.perf_counter() - start)
    run.times("python -c with the same imports", found)
    run.ratio(ON_DEMAND, WARM)
    try:
        from jupyter_client.manager import KernelManager
    except ImportError as error:
        return print(f"ipykernel is not compared: {error}")
    opening, further, pages = list[float](), list[float](), list[float]()
    for _ in range(run.count(3, 1)):
        start = time.perf_counter()
        manager: Any = KernelManager()
        manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = manager.client()
        try:
            client.start_channels()
            client.wait_for_ready(timeout=60)
            for number in range(run.count(100, 20)):
                reply = client.execute_interactive("1", timeout=60, output_hook=lambda _: None)
                assert reply["content"]["status"] == "ok", reply
                now = time.perf_counter()
                (further if number else opening).append(now - start)
                start = now
            pages.append(private_pages([manager.provisioner.pid]))
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    run.times("ipykernel: start + first call", opening, note="without any import")
    run.ratio(ON_DEMAND, WARM)
    run.times("ipykernel: further call", further)
    run.ratio("further call")
    run.line("ipykernel: private pages", mean(pages) * MB, max(pages) * MB, "MB", note="without any import")
    run.ratio("untouched")


async def measure(run: Run) -> None:
    """Everything that needs an event loop."""
    async with SandboxPool(PoolSettings(level=run.level)) as pool:
        run.level = pool.report.level
        print(pool.report.text().split("\n", 1)[0])
    for part in (latency, throughput, memory, deadlines, images, leaks):
        await part(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", choices=[level.name for level in SandboxLevel], default="auto")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions everywhere")
    parser.add_argument("--most", type=int, help="repetitions of anything; 4 only shows that it runs")
    parser.add_argument("host", nargs="?", help=argparse.SUPPRESS)  # the level at which to be a host that is killed
    arguments = parser.parse_args()
    if arguments.host:
        return asyncio.run(be_a_host(SandboxLevel[arguments.host]))
    run = Run(SandboxLevel[arguments.level], arguments.quick, arguments.most)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory(prefix="turnwise-benchmark-") as folder:
        os.chmod(folder, 0o711)  # sessions of another uid have their folders in it
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        asyncio.run(measure(run))
        host_killed(run)
        others(run)
    met = f"{run.judged - len(run.missed)} of {run.judged} targets met; load {os.getloadavg()[0]:.2f}"
    print("\n  missed: ".join([f"\n{met}", *run.missed]))


if __name__ == "__main__":
    main()
