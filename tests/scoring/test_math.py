"""The math scorer's processes: any thread, any event loop, answers that are too much, processes that die."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnwise.errors import ConfigError, DataError, ScoringFailed
from turnwise.scoring.boxed import boxes, tagged
from turnwise.scoring.math import find_answer, is_same, math_boxed, tidy
from turnwise.scoring.math_process import Checker, Checkers
from turnwise.scoring.scorer import Score
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn

ROOT = Path(__file__).parents[2]
HALF = ("\\frac{1}{2}",)


def trajectory(text: str, truth: Any) -> Trajectory:
    message = Message(Role.ASSISTANT, text)
    sample = Sample("s", (), "HuggingFaceH4/MATH-500", truth)
    return Trajectory(
        sample, 0, 0, [message], [Turn(0, message, FinishReason.STOP, 0, 1, 1)], [], StopReason.ANSWERED, 0.0
    )


@pytest.fixture
def checker() -> Iterator[Checker]:
    one = Checker()
    yield one
    one.close()


def test_outcomes_and_parts() -> None:
    def score(text: str, **options: Any) -> Score:
        return asyncio.run(math_boxed(trajectory(text, "18"), **options))

    assert score("\\boxed{18}", correct=2.0) == Score(2.0, {"acc": 1.0, "format": 1.0})
    assert score("\\boxed{17}", wrong=-1.0) == Score(-1.0, {"acc": 0.0, "format": 1.0})
    assert score("18", no_answer=-2.0) == Score(-2.0, {"acc": 0.0, "format": 0.0})
    assert score("\\boxed{17} \\boxed{18}", several="refuse").parts["format"] == 0.0
    assert score("\\boxed{18} or \\boxed{ 18 }", several="refuse").reward == 1.0
    with pytest.raises(ConfigError, match="several"):
        score("", several="first")


@pytest.mark.parametrize("truth", [None, True, [], [None], "", float("nan"), {"answer": "18"}])
def test_a_truth_that_is_no_latex_is_an_error(truth: Any) -> None:
    with pytest.raises(DataError, match="sample 's'"):
        asyncio.run(math_boxed(trajectory("\\boxed{18}", truth)))


def test_many_threads_with_event_loops_of_their_own() -> None:
    """math-verify's alarms would raise in every thread but the main one."""
    found: dict[int, bool] = {}

    def ask(number: int) -> None:
        found[number] = asyncio.run(
            is_same((f"\\frac{{{number}}}{{{number + 1}}}",), f"{2 * number}/{2 * number + 2}", 5.0)
        )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(1, 7), True)


def test_many_at_once_in_one_loop() -> None:
    async def ask() -> list[bool]:
        return await asyncio.gather(*(is_same(HALF, f"\\frac{{{n}}}{{20}}", 5.0) for n in range(8, 12)))

    assert asyncio.run(ask()) == [False, False, True, False]


def test_an_answer_that_is_too_much_is_wrong_and_the_next_is_compared(checker: Checker) -> None:
    for bomb in ("10^{10^{10}}", "9^{9^{9^{9}}}", "100000000!"):
        assert not checker.equal(("18",), bomb, 0.2)
    assert checker.equal(HALF, "0.5", 5.0)


def test_a_process_that_dies_between_questions_is_replaced(checker: Checker) -> None:
    assert checker.equal(HALF, "0.5", 5.0)
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGKILL)
    checker._process.wait()
    assert checker.equal(HALF, "0.5", 5.0)


def test_a_machinery_that_fails_twice_is_no_verdict(
    checker: Checker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import sys; sys.stdin.readline(); sys.exit(7)")
    monkeypatch.setattr("turnwise.scoring.math_process._SCRIPT", broken)
    with pytest.raises(ScoringFailed, match="status 7"):
        checker.equal(HALF, "0.5", 5.0)


def test_a_silent_process_is_no_verdict(checker: Checker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("import time; time.sleep(600)")
    monkeypatch.setattr("turnwise.scoring.math_process._SCRIPT", silent)
    monkeypatch.setattr("turnwise.scoring.math_process.SPARE_SECONDS", 0.1)
    with pytest.raises(ScoringFailed, match="did not answer"):
        checker.equal(HALF, "0.5", 0.1)
    assert checker._process is None


def test_what_was_compared_is_not_compared_again() -> None:
    many = Checkers()
    try:
        assert asyncio.run(many.equal(HALF, "0.5", 5.0))
        many.close()
        assert asyncio.run(many.equal(HALF, "0.5", 5.0))
        assert many._threads is None, "no process was needed"
    finally:
        many.close()


def test_nothing_is_left_when_the_host_is_killed(tmp_path: Path) -> None:
    """The checkers' standard input ends with the host, kill -9 included."""
    code = """
import asyncio, os, signal
from turnwise.scoring.math_process import checkers
asyncio.run(checkers.equal(("\\\\frac{1}{2}",), "0.5", 5.0))
print(*(one._process.pid for one in checkers._all), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr
    for pid in map(int, run.stdout.split()):
        deadline = time.monotonic() + 20
        while _alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_boxes_and_tags() -> None:
    assert boxes("\\boxed{a{b}c} \\boxed {d} \\boxed{} \\boxed{\\}}") == ["a{b}c", "d", "\\}"]
    assert boxes("\\boxed{1 and \\boxed{2}}") == ["2"]
    assert tagged("<a>1</a> </a> <a>2 <a>3</a> <a>4", "a") == ["1", "3"]
    assert find_answer("no box") is None
    assert tidy(" $ 50 \\% $ ") == "50"
    assert boxes("\\boxed{" * 100_000 + "1" + "}" * 100_000) == ["1"]
    assert boxes("\\boxed{" * 100_000) == []
    assert boxes("}" * 100_000 + "{" * 100_000) == []
