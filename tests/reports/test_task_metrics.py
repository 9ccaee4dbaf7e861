"""Metrics of tasks: declared with their reductions, counted by data source, never mixed up in one batch."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnwise.errors import PluginError
from turnwise.reports.evaluation import EpisodeResult, EvalReport, step_metrics, summarise
from turnwise.reports.task_metrics import ANY, TaskMetrics, declared_by, observe
from turnwise.system.metrics import Reduction
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn


def trajectory(source: str, words: str, failure: str | None = None) -> Trajectory:
    turn = Turn(0, Message(Role.ASSISTANT, words), FinishReason.STOP, 0, 3, 2)
    made = Trajectory(Sample("s", (), source), 0, 0, [], [turn], [], StopReason.ANSWERED, 0.0, failure)
    made.reward = None if failure else 1.0
    return made


def words(trajectory: Trajectory) -> dict[str, float]:
    count = len(trajectory.answers[-1].text.split())
    return {"words": count, "longest": count} if count else {}


ZOOM = TaskMetrics("zoom", {"words": Reduction.MEAN, "longest": Reduction.MAX}, words)
CHAT = TaskMetrics("chat", {"words": Reduction.SUM, "longest": Reduction.MIN}, words)
BATCH = [trajectory("lab/zoom", "a b"), trajectory("chat", "a"), trajectory("lab/zoom", "a b c d"),
         trajectory("chat", "a b c"), trajectory("chat", ""), trajectory("lab/zoom", "x", "broken")]  # fmt: skip


def test_two_tasks_in_one_batch_are_kept_apart_and_counted() -> None:
    found = step_metrics(BATCH, {"lab/zoom": ZOOM, "chat": CHAT})
    assert {name: value for name, value in found.items() if name.startswith("task/")} == {
        "task/lab/zoom/episodes": 2, "task/lab/zoom/words": 3.0, "task/lab/zoom/longest": 4.0,
        "task/chat/episodes": 3, "task/chat/words": 4.0, "task/chat/longest": 1.0,
    }  # fmt: skip


def test_sources_without_declared_metrics_have_none() -> None:
    found = step_metrics(BATCH, {"chat": CHAT})
    assert not any(name.startswith("task/lab") for name in found) and found["task/chat/words"] == 4.0
    default = step_metrics(BATCH, {ANY: ZOOM, "chat": CHAT})
    assert default["task/lab/zoom/words"] == 3.0 and default["task/chat/words"] == 4.0


def test_the_console_and_the_file_of_an_evaluation_show_them() -> None:
    declared = {"lab/zoom": ZOOM, "chat": CHAT}
    sources = {
        source: summarise(source, [EpisodeResult(t, True, True) for t in BATCH if t.sample.data_source == source and not t.failure], declared)
        for source in declared
    }  # fmt: skip
    report = EvalReport(Path("r"), 1.0, 1.0, sources, [])
    assert report.as_json()["sources"]["lab/zoom"]["task"] == {"episodes": 2, "words": 3.0, "longest": 4.0}
    assert report.as_metrics().items() >= {"val/task/lab/zoom/words": 3.0, "val/task/chat/episodes": 3}.items()
    out = Console(file=io.StringIO(), width=200)
    out.print(report.table())
    text = out.file.getvalue()  # type: ignore[attr-defined]
    (line,) = [line for line in text.splitlines() if "task: longest" in line]
    assert [cell.strip() for cell in line.split("│")[2:4]] == ["4", "1"]


@pytest.mark.parametrize(
    ("metrics", "complaint"),
    [
        ({"word": 1.0}, "unknown metric 'word': did you mean 'words'"),
        ({"words": float("nan")}, "metric 'words' is nan; it must be a finite number"),
        ({"words": "many"}, "metric 'words' is 'many'"),
    ],
)
def test_what_was_not_declared_or_is_no_number_is_refused(metrics: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PluginError, match=complaint):
        list(observe(BATCH[:1], {ANY: TaskMetrics("mine", ZOOM.reductions, lambda trajectory: metrics)}))


TASK = """
from turnwise import Reduction, Task
def rows(split, seed):
    yield {{}}
def metrics(trajectory):
    return {{"turns": len(trajectory.turns)}}
TASK = Task(name="mine", rows=rows, metrics=metrics, reductions={declared}, data_source={source!r})
"""


def test_a_runs_own_task_brings_its_metrics(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(TASK.format(declared='{"turns": Reduction.SUM}', source="chat"))
    found = declared_by(str(path))
    assert list(found) == ["chat"]
    assert step_metrics(BATCH, found)["task/chat/turns"] == 3.0
    assert declared_by("arithmetic") == declared_by(None) == {}


@pytest.mark.parametrize(
    ("declared", "complaint"),
    [
        ('["turns"]', "reductions cannot be"),
        ('{"a/b": Reduction.SUM}', "the metric name 'a/b' is empty, has a slash or is 'episodes'"),
        ('{"episodes": Reduction.SUM}', "the metric name 'episodes'"),
        ('{"turns": "sum of all"}', r"reductions\['turns'\] must be a Reduction"),
        ("{}", "needs both its entry in reductions and the function metrics"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(tmp_path: Path, declared: str, complaint: str) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(TASK.format(declared=declared, source=""))
    with pytest.raises(PluginError, match=complaint):
        declared_by(str(path))


def test_metrics_beside_a_bare_function_of_rows_are_not_overlooked(tmp_path: Path) -> None:
    path = tmp_path / "old.py"
    path.write_text("METRICS = {}\ndef rows(split, seed):\n    yield {}\n")
    with pytest.raises(PluginError, match="name reductions and metrics in a Task"):
        declared_by(f"{path}:rows")
