"""What a person sees: a table and a bar on a terminal, one line a step elsewhere, the same lines in log.txt."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State
from turnwise.storage.trackers.choose import Trackers
from turnwise.storage.trackers.console import ROWS, SHOWN, ConsoleTracker
from turnwise.storage.trackers.tracker import Point


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "a", "train")


def step(number: int, **more: float) -> Point:
    metrics = {"critic/score/mean": number / 100, "perf/throughput": 3999.6, "timing_s/step": 30.0, "hidden": 7.0}
    return Point(number, 0.0, 0, metrics | more)


def shown(run: RunDir, points: list[Point], *, terminal: bool, width: int = 200, resumed_at: int = 0) -> str:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=width, height=50, color_system=None, legacy_windows=False
    )
    tracker = ConsoleTracker(console, steps=40)
    trackers = Trackers([tracker], lambda text: console.print(text, markup=False, highlight=False))
    trackers.start(run, {}, resumed_at=resumed_at)
    for point in points:
        trackers.log(point)
    trackers.finish(State.FINISHED, "")
    assert trackers.metrics()["tracking/console/lost"] == 0
    return out.getvalue()


def last_picture(text: str) -> list[list[str]]:
    """The cells of the last table drawn."""
    lines = text[text.rindex("    step") :].splitlines()
    table = [line.split() for line in lines]
    return [row for row in table if row and (row[0] == "step" or row[0].isdigit())]


def test_without_a_terminal_a_step_is_one_line_however_long(run: RunDir) -> None:
    points = [step(1), step(2, **{name: 1.0 for name in SHOWN if name != "val/accuracy"})]
    text = shown(run, points, terminal=False, width=40)
    first, second = text.splitlines()
    assert first == "step 1/40: reward 0.01, tokens/s 4,000, seconds 30"
    assert second.startswith("step 2/40: reward 1, entropy 1, kl 1, ") and second.endswith("learn s 1, GPU idle 100.0%")
    assert "\x1b" not in text
    assert [line.split(" ", 1)[1] for line in run.log_path.read_text().splitlines()] == [first, second]


def test_an_evaluation_alone_is_not_a_line(run: RunDir) -> None:
    assert shown(run, [Point(0, 0.0, 0, {"val/accuracy": 0.5})], terminal=False) == ""


def test_on_a_terminal_the_last_steps_are_rows(run: RunDir) -> None:
    points = [step(number) for number in range(1, 31)] + [Point(30, 0.0, 0, {"val/accuracy": 0.891})]
    text = shown(run, points, terminal=True)
    header, *rows = last_picture(text)
    assert header == ["step", "reward", "accuracy", "tokens/s", "seconds"]
    assert [int(row[0]) for row in rows] == list(range(31 - ROWS, 31))
    assert rows[-1] == ["30", "0.3", "89.1%", "4,000", "30"] and rows[0] == ["19", "0.19", "4,000", "30"]
    assert "30/40" in text and "hidden" not in text
    assert text.endswith("\x1b[?25h")  # the cursor is back
    log = run.log_path.read_text()
    assert log.count("step ") == 30 and "forecast: about 18.0 minutes for the remaining 36 steps" in log


def test_a_narrow_terminal_shows_the_first_columns(run: RunDir) -> None:
    text = shown(run, [step(1, **dict.fromkeys(SHOWN, 1.0))], terminal=True, width=50)
    assert last_picture(text)[0] == ["step", *list(SHOWN.values())[:4]]
    assert all(len(line) <= 50 for line in text[text.rindex("    step") :].splitlines()[:2])


def test_a_resumed_run_starts_its_bar_where_it_was(run: RunDir) -> None:
    assert "17/40" in shown(run, [], terminal=True, resumed_at=17)


def test_what_others_say_is_printed_above_the_picture(run: RunDir) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=50, color_system=None, legacy_windows=False)
    tracker = ConsoleTracker(console, steps=3)
    tracker.start(run, {}, resumed_at=0)
    tracker.log(step(1))
    console.print("[checkpoint] kept", markup=False)
    tracker.finish(State.FINISHED, "")
    text = out.getvalue()
    assert text.index("[checkpoint] kept") < text.rindex("    step")
