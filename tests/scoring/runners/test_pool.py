"""The pool: workers side by side, hangs and crashes that stay where they are, nothing left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError, DataError, PluginError, ScoringFailed
from turnwise.scoring.runners import pool
from turnwise.scoring.scorer import ScorerSpec, evaluate

PATIENCE = 60.0
"""Seconds after which a test gives up; none depends on how fast something is."""


@contextlib.asynccontextmanager
async def running(*specs, workers=2, timeout=PATIENCE, retries=0):
    runner = pool.make(ScoringConfig(workers=workers, timeout=timeout, retries=retries))
    scorers = [runner.scorer(spec) for spec in specs]
    try:
        await runner.start()
        yield runner, *scorers
    finally:
        await runner.stop()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids) -> bool:
    """Whether all end, waiting for it."""
    deadline = time.monotonic() + PATIENCE
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def test_workers_run_side_by_side_and_order_is_kept_with_a_hang_and_a_crash_among_them(plugin, trajectory, tmp_path):
    """The first eight wait for each other: with fewer than eight at a time none would ever end."""
    path = plugin("""
        import os, time

        def score(trajectory, *, folder):
            index = int(trajectory.sample.ground_truth)
            if index == 20:
                os.abort()
            if index == 40:
                time.sleep(3600)
            if index < 8:
                open(os.path.join(folder, str(index)), "w").close()
                while len(os.listdir(folder)) < 8:
                    time.sleep(0.005)
            time.sleep(0.01)
            return {"score": index, "pid": os.getpid()}
        """)
    meeting = tmp_path / "meeting"
    meeting.mkdir()

    async def main():
        spec = ScorerSpec(f"{path}:score", {"folder": str(meeting)})
        async with running(spec, workers=8, timeout=5.0) as (runner, scorer):
            calls = (evaluate(scorer, trajectory(index)) for index in range(64))
            return await asyncio.gather(*calls, return_exceptions=True), runner.stats.take()

    results, metrics = asyncio.run(main())
    bad = {index: str(result) for index, result in enumerate(results) if isinstance(result, Exception)}
    assert set(bad) == {20, 40}
    assert "ended its process: SIGABRT (attempt 1 of 1)" in bad[20]
    assert "did not answer within 5 s" in bad[40]
    assert all(isinstance(results[index], ScoringFailed) for index in bad)
    good = [(index, result) for index, result in enumerate(results) if index not in bad]
    assert all(result.reward == index for index, result in good)
    pids = {int(result.parts["pid"]) for _, result in good}
    assert len(pids) >= 8
    assert gone(pids)
    assert (metrics["scoring/calls"], metrics["scoring/failures"]) == (64, 2)


def test_a_crash_is_tried_again_in_a_new_worker(plugin, trajectory, tmp_path):
    path = plugin("""
        import os, pathlib

        def score(trajectory, *, counter):
            with open(counter, "a") as file:
                file.write("x")
            if len(pathlib.Path(counter).read_text()) < 3:
                os._exit(7)
            return 0.5
        """)
    counter = tmp_path / "counter"

    async def main():
        spec = ScorerSpec(f"{path}:score", {"counter": str(counter)})
        async with running(spec, workers=1, retries=3) as (runner, scorer):
            score = await evaluate(scorer, trajectory(1))
            return score, runner.stats.take()

    score, metrics = asyncio.run(main())
    assert score.reward == 0.5
    assert counter.read_text() == "xxx"
    assert (metrics["scoring/attempts"], metrics["scoring/retries"], metrics["scoring/failures"]) == (3, 2, 0)


@pytest.mark.parametrize(
    "hang",
    ["while True: pass", "re.match('(a+)+$', 'a' * 64 + 'b')", "ignoring()"],
    ids=["a loop", "inside C, with the lock held", "ignoring signals"],
)
def test_every_hang_ends_and_so_does_what_it_started(plugin, trajectory, tmp_path, hang):
    path = plugin(f"""
        import os, re, signal, subprocess, time

        def ignoring():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
                signal.signal(number, signal.SIG_IGN)
            while True:
                try:
                    time.sleep(3600)
                except BaseException:
                    pass

        def score(trajectory, *, pids):
            if trajectory.sample.ground_truth == "1":
                other = subprocess.Popen(["sleep", "3600"])
                with open(pids, "w") as file:
                    file.write(f"{{os.getpid()}} {{other.pid}}")
                {hang}
            return 2.0
        """)
    pids = tmp_path / "pids"

    async def main():
        spec = ScorerSpec(f"{path}:score", {"pids": str(pids)})
        async with running(spec, workers=1, timeout=1.0) as (_, scorer):
            with pytest.raises(ScoringFailed, match="did not answer within 1 s"):
                await evaluate(scorer, trajectory(1))
            assert gone(map(int, pids.read_text().split()))
            return await evaluate(scorer, trajectory(2))

    assert asyncio.run(main()).reward == 2.0


def test_a_cancelled_call_never_answers_another(plugin, trajectory):
    path = plugin("""
        import time

        def score(trajectory):
            index = int(trajectory.sample.ground_truth)
            time.sleep(0.2 if index == 0 else 0)
            return index
        """)

    async def main():
        async with running(ScorerSpec(f"{path}:score"), workers=1) as (_, scorer):
            slow = asyncio.ensure_future(evaluate(scorer, trajectory(0)))
            await asyncio.sleep(0.05)
            slow.cancel()
            return [(await evaluate(scorer, trajectory(index))).reward for index in (5, 6)]

    assert asyncio.run(main()) == [5.0, 6.0]


def test_a_worker_that_died_while_idle_costs_no_attempt(plugin, trajectory):
    path = plugin("""
        import os

        def score(trajectory):
            return os.getpid()
        """)

    async def main():
        async with running(ScorerSpec(f"{path}:score"), workers=1) as (_, scorer):
            first = await evaluate(scorer, trajectory(0))
            os.kill(int(first.reward), signal.SIGKILL)
            await asyncio.to_thread(gone, [int(first.reward)])
            await asyncio.sleep(0.05)  # for the event loop to see it
            return first, await evaluate(scorer, trajectory(0))

    first, second = asyncio.run(main())
    assert first.reward != second.reward


def test_workers_are_clean(plugin, trajectory, capfd):
    """No torch, one thread for arithmetic, nothing on our standard output, no open files of ours."""
    path = plugin("""
        import os, sys, threading

        def score(trajectory):
            print("what a scorer prints")
            return {
                "torch": "torch" in sys.modules,
                "blas": int(os.environ["OMP_NUM_THREADS"]),
                "threads": threading.active_count(),
                "files": len(os.listdir("/proc/self/fd")),
            }
        """)

    async def main():
        with open(path):
            async with running(ScorerSpec(f"{path}:score"), workers=1) as (_, scorer):
                return (await evaluate(scorer, trajectory(0))).parts

    parts = asyncio.run(main())
    # standard input and outputs, the socket, the lifeline, three of the event loop, and the folder being listed
    assert (parts["torch"], parts["blas"], parts["threads"], parts["files"]) == (0, 1, 1, 9)
    assert capfd.readouterr().out == ""


HOST = """
    import asyncio, sys
    from turnwise.config import ScoringConfig
    from turnwise.scoring.runners import pool
    from turnwise.scoring.scorer import ScorerSpec
    from tests.scoring.runners.conftest import make_trajectory

    async def main():
        runner = pool.make(ScoringConfig(workers=2, timeout=3600))
        scorer = runner.scorer(ScorerSpec(sys.argv[1] + ":score"))
        await runner.start()
        await asyncio.gather(*(scorer(make_trajectory(index)) for index in range(2)))

    asyncio.run(main())
    """


def test_workers_end_with_a_host_that_is_killed(plugin, tmp_path):
    """One hangs with the interpreter's lock held, the other has a child of its own."""
    path = plugin(f"""
        import os, re, subprocess, time

        def score(trajectory):
            index = trajectory.sample.ground_truth
            child = subprocess.Popen(["sleep", "3600"])
            with open({str(tmp_path)!r} + f"/part{{index}}", "w") as file:
                file.write(f"{{os.getpid()}} {{child.pid}}")
            os.rename({str(tmp_path)!r} + f"/part{{index}}", {str(tmp_path)!r} + f"/pids{{index}}")
            if index == "0":
                re.match("(a+)+$", "a" * 64 + "b")
            time.sleep(3600)
        """)
    root = Path(__file__).parents[3]
    host = subprocess.Popen([sys.executable, "-c", textwrap.dedent(HOST), path], cwd=root, stderr=subprocess.PIPE)
    try:
        files = [tmp_path / "pids0", tmp_path / "pids1"]
        deadline = time.monotonic() + PATIENCE
        while not all(file.exists() for file in files):
            assert host.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert all(map(alive, pids))
    finally:
        host.kill()
        host.wait()
        host.stderr.close()
    assert gone(pids)


def test_a_plugin_that_fails_in_the_worker_only_is_told_at_the_start(plugin):
    path = plugin(f"""
        import os
        from turnwise.errors import DataError

        if os.getpid() != {os.getpid()}:
            raise DataError("not here")

        def score(trajectory):
            return 1.0
        """)

    async def main():
        async with running(ScorerSpec(f"{path}:score")):
            pass

    with pytest.raises(PluginError, match="failed: not here"):
        asyncio.run(main())


def test_a_plugin_that_kills_the_worker_is_told_at_the_start(plugin):
    path = plugin(f"""
        import os

        if os.getpid() != {os.getpid()}:
            os._exit(3)

        def score(trajectory):
            return 1.0
        """)

    async def main():
        async with running(ScorerSpec(f"{path}:score")):
            pass

    with pytest.raises(PluginError, match=r"exit status 3; the scorers are .*own_rewards.py:score"):
        asyncio.run(main())


def test_built_in_scorers_run_and_their_errors_are_ours(trajectory):
    async def main():
        async with running(ScorerSpec("gsm8k"), workers=1) as (_, scorer):
            good = await evaluate(scorer, trajectory(12))
            broken = trajectory(12)
            object.__setattr__(broken.sample, "ground_truth", "twelve")
            with pytest.raises(DataError, match="must be a number") as caught:
                await evaluate(scorer, broken)
            return good, caught.value

    good, error = asyncio.run(main())
    assert good.reward == 1.0
    assert type(error) is DataError
    assert any("in the process that scored" in note for note in error.__notes__)


def test_mistakes_in_the_config_are_found_before_anything_starts(scorers):
    with pytest.raises(ConfigError, match="scoring.timeout"):
        pool.make(ScoringConfig(timeout=0))
    runner = pool.make(ScoringConfig())
    with pytest.raises(ConfigError, match="unknown scorer 'gsm8'"):
        runner.scorer(ScorerSpec("gsm8"))
    with pytest.raises(ConfigError, match="unknown option 'scal'"):
        runner.scorer(ScorerSpec(f"{scorers}:sync_number", {"scal": 2}))
    with pytest.raises(ConfigError, match="cannot be given to another process"):
        runner.scorer(ScorerSpec(f"{scorers}:sync_number", {"scale": object()}))
