"""How each tool fared in a set of episodes: calls, failures by status, and what it most often said when it failed."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from turnwise.types import CallRecord, CallStatus, Trajectory

UNREADABLE, NO_SUCH_TOOL = "(unreadable call)", "(no such tool)"
"""Calls that reached no tool; what the model called them is free text, so they are counted together."""
_REACHED_NONE = {CallStatus.MALFORMED: UNREADABLE, CallStatus.UNKNOWN_TOOL: NO_SUCH_TOOL}
LONGEST_ERROR = 160
FEWEST_CALLS = 4
"""Calls from which on a failing majority is worth a warning; a tool that never worked is at once."""


@dataclass(frozen=True, slots=True)
class ToolReport:
    """The calls of one tool: `ToolReport(37, 37, {"error": 37}, "Error: no sandbox", 35)`."""

    calls: int
    failed: int
    by_status: dict[str, int]
    commonest_error: str | None
    """On one line, cut; None when nothing failed or no failed call was answered."""
    commonest_count: int
    commonest_crash: str | None = None
    """What its code most often raised, kind first: `ValueError: no such page`. A ToolError is no crash."""

    def __str__(self) -> str:
        if not self.failed:
            return f"{self.calls} calls"
        statuses = ", ".join(f"{n} {status}" for status, n in self.by_status.items() if CallStatus(status).failed)
        return f"{self.calls} calls, {self.failed / self.calls:.0%} failed ({statuses})"

    @property
    def crashed(self) -> int:
        """Calls in which its code raised something that it did not mean for the model."""
        return self.by_status.get(CallStatus.CRASHED.value, 0)

    @property
    def is_broken(self) -> bool:
        """Whether most of its calls failed, which a table of averages hides."""
        return self.failed == self.calls or (self.calls >= FEWEST_CALLS and self.failed > self.calls / 2)


def tool_reports(trajectories: Iterable[Trajectory]) -> dict[str, ToolReport]:
    """By the tool's name, those that were called; calls that reached no tool come last."""
    statuses: dict[str, Counter[str]] = defaultdict(Counter)
    errors: dict[str, Counter[str]] = defaultdict(Counter)
    crashes: dict[str, Counter[str]] = defaultdict(Counter)
    for trajectory in trajectories:
        for turn in trajectory.every_turn:
            answers = {reply.tool_call_id: reply.text for reply in turn.replies}
            for record in turn.calls:
                name = _name(record)
                statuses[name][record.status.value] += 1
                if record.status.failed and record.call.id in answers:
                    answer = " ".join(answers[record.call.id].split())[:LONGEST_ERROR]
                    errors[name][answer] += 1
                    if record.status is CallStatus.CRASHED:
                        crashes[name][answer.removeprefix("Error: ")] += 1
    names = sorted(statuses, key=lambda name: (name in _REACHED_NONE.values(), name))
    return {name: _report(statuses[name], errors[name], crashes[name]) for name in names}


def warnings(reports: Mapping[str, ToolReport]) -> dict[str, str]:
    """One sentence for each tool whose calls mostly failed, and for each whose code has raised, by a key of its own."""
    everything = sum(report.calls for report in reports.values())
    sentences = {}
    for name, report in reports.items():
        often = "" if report.commonest_error is None else f", most often: {report.commonest_error}"
        if name in _REACHED_NONE.values():
            if report.calls >= FEWEST_CALLS and report.calls > everything / 2:
                sentences[name] = f"{report.calls} of {everything} tool calls reached no tool {name}{often}"
        elif report.is_broken:
            sentences[name] = f"tool {name} failed in {report.failed} of {report.calls} calls{often}"
        if report.commonest_crash is not None and report.commonest_crash not in sentences.get(name, ""):
            where = f"{report.crashed} of {report.calls} calls"
            sentences[f"{name} crashed"] = (
                f"the code of tool {name} raised in {where}, most often {report.commonest_crash}"
            )
    return sentences


def _name(record: CallRecord) -> str:
    return _REACHED_NONE.get(record.status, record.call.name)


def _report(statuses: Counter[str], errors: Counter[str], crashes: Counter[str]) -> ToolReport:
    commonest, count = errors.most_common(1)[0] if errors else (None, 0)
    failed = sum(n for status, n in statuses.items() if CallStatus(status).failed)
    crash = crashes.most_common(1)[0][0] if crashes else None
    return ToolReport(statuses.total(), failed, dict(sorted(statuses.items())), commonest, count, crash)
