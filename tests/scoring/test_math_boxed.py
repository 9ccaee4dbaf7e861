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
from turnwise.scoring.rules.boxes_and_tags import boxes, tagged
from turnwise.scoring.rules.math_boxed import MathCheckers, find_answer, is_same, math_boxed, tidy
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
def checker() -> Iterator[MathCheckers]:
    checkers = MathCheckers(processes=1)
    yield checkers
    checkers.close()


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


ROWS = r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"
COLUMN = r"\begin{pmatrix}1\\2\end{pmatrix}"


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", ROWS, True),
        ("\\begin{pmatrix}\n1 & 2 \\\\\n3 & 4 \\\\\n\\end{pmatrix}", ROWS, True),
        ("\\begin{bmatrix} 1 & 2 \\\\\t3 & 4 \\end{bmatrix}", ROWS, True),
        (r"\begin{pmatrix} 1 & 2 \\[2pt] 3 & 4 \end{pmatrix}", ROWS, True),
        (r"\begin{pmatrix} 1 & 2 \\* [ 0.3em ] 3 & 4 \end{pmatrix}", ROWS, True),
        (r"\begin{pmatrix} 1 & 2 \\ \, 3 & 4 \end{pmatrix}", ROWS, True),
        (r"\begin{pmatrix} 1 & 2 \\\ 3 & 4 \end{pmatrix}", ROWS, True),
        (r"\begin{pmatrix} 1 & 2 \cr 3 & 4 \cr \end{pmatrix}", ROWS, True),
        (r"\begin{pmatrix} 1 & 2 \cr 3 & 5 \end{pmatrix}", ROWS, False),
        (r"\left(\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right)", ROWS, True),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}", ROWS, False),
        (r"\begin{pmatrix} 1 & 2 & 3 & 4 \end{pmatrix}", ROWS, False),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", COLUMN, True),
        (r"\begin{pmatrix} 12 \end{pmatrix}", COLUMN, False),
        (r"\begin{pmatrix} 1 2 \end{pmatrix}", COLUMN, False),
        (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", COLUMN, False),
        (r"\begin{cases} x=1 \\ y=2 \end{cases}", r"\begin{cases}x=1\\y=2\end{cases}", True),
        (r"\begin{cases} x=1 \\ y=3 \end{cases}", r"\begin{cases}x=1\\y=2\end{cases}", False),
    ],
)
def test_rows_are_broken_whatever_follows_the_break(answer: str, gold: str, same: bool) -> None:
    assert asyncio.run(is_same((gold,), answer, 20.0)) is same
    assert asyncio.run(is_same((answer,), gold, 20.0)) is same


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        (r"1\,000\,000", "1000000", True),
        (r"10,\!000", "10000", True),
        (r"1~000", "1,000", True),
        (r"1{,}000.5", "1000.5", True),
        (r"0.123\,456", "0.123456", True),
        (r"(1,\,200)", "(1,200)", True),
        (r"1\,00", "100", False),
        (r"\$1{,}000.50", "1000.5", True),
        (r"2\ \frac{1}{2}", "2.5", True),
        (r"-2\,\frac12", r"-\frac{5}{2}", True),
        (r"2\sqrt{3}\,\text{m}", r"2\sqrt3", True),
        (r"5\,\text{cm}^2", "5", True),
        (r"90\degree", "90", True),
        ("90\u00b0", r"90^{\circ}", True),
        (r"50\%", "50", True),
        (r"\left( -\infty,\, 3 \right]", r"(-\infty,3]", True),
        (r"(1, 2]", "(1,2)", False),
        (r"\left\{1,\;2\right\}", r"\{2,1\}", True),
        (r"\varnothing", r"\emptyset", True),
        ("\u22125", "-5", True),
        ("-5", "5", False),
        (r"\dfrac{-1}{2}", r"-\tfrac12", True),
    ],
)
def test_what_is_tidied_away_means_nothing(answer: str, gold: str, same: bool) -> None:
    assert asyncio.run(is_same((gold,), answer, 20.0)) is same
    assert asyncio.run(is_same((answer,), gold, 20.0)) is same


def test_tidy_keeps_what_it_does_not_know() -> None:
    for text in (r"\{1, 2\}", r"\frac{1}{2}", r"a \\ b", r"\text{a b}", r"\degreesymbol x"):
        assert tidy(text) == text
    assert tidy(r"a\\b") == tidy("a \\\\\n b".replace(" ", "")) == r"a\\ b"


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


def test_an_answer_that_is_too_much_is_wrong_and_the_next_is_compared(checker: MathCheckers) -> None:
    for bomb in ("10^{10^{10}}", "9^{9^{9^{9}}}", "100000000!"):
        assert not checker.compare(("18",), bomb, 0.2)
    assert checker.compare(HALF, "0.5", 5.0)


def test_a_process_that_dies_between_questions_is_replaced(checker: MathCheckers) -> None:
    assert checker.compare(HALF, "0.5", 5.0)
    (clocked,) = checker._all
    assert clocked._process is not None
    os.kill(clocked._process.pid, signal.SIGKILL)
    clocked._process.wait()
    assert checker.compare(HALF, "0.5", 5.0)


def test_a_machinery_that_fails_twice_is_no_verdict(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import sys; sys.stdin.readline(); sys.exit(7)")
    with pytest.raises(ScoringFailed, match="the math checker: its process ended twice, at last with exit status 7"):
        MathCheckers(broken).compare(HALF, "0.5", 5.0)


def test_a_silent_process_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("import time; time.sleep(600)")
    monkeypatch.setattr("turnwise.system.children.SPARE_SECONDS", 0.1)
    checkers = MathCheckers(silent, processes=1)
    with pytest.raises(ScoringFailed, match="did not answer within 0.2 s"):
        checkers.compare(HALF, "0.5", 0.1)
    assert checkers._all[0]._process is None


def test_what_was_compared_is_not_compared_again() -> None:
    many = MathCheckers()
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
from turnwise.scoring.rules.math_boxed import checkers
asyncio.run(checkers.equal(("\\\\frac{1}{2}",), "0.5", 5.0))
print(*(one._process.pid for one in checkers._all), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr
    pids = [int(text) for text in run.stdout.split()]
    assert pids
    for pid in pids:
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
