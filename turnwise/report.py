"""What an evaluation found, by data source: accuracy before and after feedback, tool use, stop reasons, tokens."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from turnwise.concurrency import each
from turnwise.errors import ScoringFailed
from turnwise.metrics import Metric, Reduction, reduce
from turnwise.scoring.scorer import Scorer, is_failed, score_answer, turns_before_feedback
from turnwise.task_metrics import TaskMetrics, observe
from turnwise.types import CallStatus, Role, StopReason, Trajectory, is_right

AT_ONCE = 256
"""First answers being scored; runners have limits of their own."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One trajectory with its first and its final answer judged; None for a failed episode."""

    trajectory: Trajectory
    first_right: bool | None
    right: bool | None
    had_feedback: bool


@dataclass(frozen=True, slots=True)
class SourceReport:
    """The numbers of one data source. Failed episodes are counted and left out of every average."""

    data_source: str
    episodes: int
    failed: int
    accuracy: float | None
    first_accuracy: float | None
    wrong_to_right: int
    right_to_wrong: int
    reward: float | None
    num_turns: float | None
    tool_calls: int
    calls_by_status: dict[str, int]
    episodes_with_valid_call: float | None
    user_turns: float | None
    stop_reasons: dict[str, int]
    policy_tokens: int
    prompt_tokens: float | None
    render_exact: float | None
    task: dict[str, float] = field(default_factory=dict)
    """What the task itself measures, by its own names."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """One evaluation."""

    run: Path
    seconds: float
    tokens_per_second: float
    sources: list[SourceReport]
    trajectories: list[Trajectory]

    def as_json(self) -> dict[str, Any]:
        """Everything but the trajectories, as plain values."""
        return {
            "run": str(self.run),
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "sources": {source.data_source: asdict(source) for source in self.sources},
        }

    def as_metrics(self) -> dict[str, int | float]:
        """A line of metrics.jsonl, in the names of an evaluation during training."""
        tokens = sum(source.policy_tokens for source in self.sources)
        line: dict[str, int | float] = {"step": 0, "seconds": round(self.seconds, 3), "tokens": tokens}
        right = [trajectory.right for trajectory in self.trajectories if trajectory.right is not None]
        if right:
            line["val/accuracy"] = sum(right) / len(right)
        for source in self.sources:
            named = {"accuracy": source.accuracy, "first_accuracy": source.first_accuracy, "reward": source.reward}
            found = {f"val/{name}/{source.data_source}": value for name, value in named.items() if value is not None}
            line |= found
        return line

    def table(self) -> Table:
        """The result table: one column per data source."""
        table = Table(title=f"evaluation, {self.seconds:.1f} s, {self.tokens_per_second:,.0f} policy tokens/s")
        table.add_column("")
        for source in self.sources:
            table.add_column(source.data_source, justify="right")
        cells = [_cells(source) for source in self.sources]
        for label in dict.fromkeys(label for column in cells for label in column):
            table.add_row(label, *(column.get(label, "-") for column in cells))
        return table


async def judge(trajectory: Trajectory, scorer: Scorer) -> EpisodeResult:
    """Judge the answer before the user's first word and the final one."""
    before = turns_before_feedback(trajectory)
    spoke = any(reply.role is Role.USER for turn in trajectory.turns for reply in turn.replies)
    if is_failed(trajectory) or trajectory.reward is None:
        return EpisodeResult(trajectory, None, None, spoke)
    final = is_right(trajectory.reward, trajectory.parts)
    if not spoke:
        return EpisodeResult(trajectory, final, final, spoke)
    try:
        first = await score_answer(scorer, trajectory, before)
    except ScoringFailed:  # the final answer has its score; of the first nothing is known
        first = None
    return EpisodeResult(trajectory, None if first is None else is_right(first.reward, first.parts), final, spoke)


async def grade_all(trajectories: Sequence[Trajectory], scorers: Mapping[str, Scorer]) -> list[EpisodeResult]:
    """`judge` for all of them, many at once: a first answer costs as much scoring as a final one."""
    return await each(lambda one: judge(one, scorers[one.sample.data_source]), trajectories, AT_ONCE)


def summarise(
    data_source: str, judged: Sequence[EpisodeResult], declared: Mapping[str, TaskMetrics] | None = None
) -> SourceReport:
    """The numbers of one data source; `declared` are the metrics of a run's own task."""
    good = [entry for entry in judged if entry.right is not None]
    trajectories = [entry.trajectory for entry in good]
    calls = [call for trajectory in trajectories for call in trajectory.calls]
    means = reduce(metric for entry in good for metric in _metrics(entry))
    return SourceReport(
        data_source=data_source,
        episodes=len(judged),
        failed=len(judged) - len(good),
        accuracy=means.get("accuracy"),
        first_accuracy=means.get("first_accuracy"),
        wrong_to_right=sum(entry.first_right is False and bool(entry.right) for entry in good),
        right_to_wrong=sum(bool(entry.first_right) and not entry.right for entry in good),
        reward=means.get("reward"),
        num_turns=means.get("num_turns"),
        tool_calls=len(calls),
        calls_by_status=dict(sorted(Counter(call.status.value for call in calls).items())),
        episodes_with_valid_call=means.get("valid_call"),
        user_turns=means.get("user_turns"),
        stop_reasons=dict(Counter(entry.trajectory.stop_reason.value for entry in judged).most_common()),
        policy_tokens=int(means.get("policy_tokens", 0)),
        prompt_tokens=means.get("prompt_tokens"),
        render_exact=means.get("render_exact"),
        task={name.rpartition("/")[2]: value for name, value in reduce(observe(trajectories, declared)).items()},
    )


def _metrics(entry: EpisodeResult) -> list[Metric]:
    trajectory = entry.trajectory
    said = [reply for turn in trajectory.turns for reply in turn.replies if reply.role is Role.USER]
    valid = any(call.status not in (CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL) for call in trajectory.calls)
    metrics = [
        Metric("accuracy", float(bool(entry.right))),
        Metric("reward", trajectory.reward or 0.0),
        Metric("num_turns", len(trajectory.turns)),
        Metric("valid_call", float(valid)),
        Metric("user_turns", len(said)),
        Metric("policy_tokens", sum(turn.completion_tokens for turn in trajectory.turns), Reduction.SUM),
    ]
    if entry.first_right is not None:
        metrics.append(Metric("first_accuracy", float(entry.first_right)))
    if trajectory.turns:
        metrics.append(Metric("prompt_tokens", trajectory.turns[0].prompt_tokens))
    if trajectory.render_check is not None:
        metrics.append(Metric("render_exact", float(trajectory.render_check.exact)))
    return metrics


def _cells(source: SourceReport) -> dict[str, str]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}%"

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    failures = sum(count for status, count in source.calls_by_status.items() if status != CallStatus.OK.value)
    statuses = [
        f"{count} {status}" for status, count in source.calls_by_status.items() if status != CallStatus.OK.value
    ]
    return {
        "episodes": str(source.episodes),
        "failed episodes": str(source.failed),
        "accuracy, first answer": share(source.first_accuracy),
        "accuracy, final answer": share(source.accuracy),
        "flipped wrong -> right": str(source.wrong_to_right),
        "flipped right -> wrong": str(source.right_to_wrong),
        "reward": number(source.reward),
        "assistant turns": number(source.num_turns),
        "user turns": number(source.user_turns),
        "tool calls": str(source.tool_calls),
        "failed tool calls": str(failures) + (f" ({', '.join(statuses)})" if statuses else ""),
        "episodes with a valid call": share(source.episodes_with_valid_call),
        "stop reasons": ", ".join(f"{count} {reason}" for reason, count in source.stop_reasons.items()),
        "policy tokens": f"{source.policy_tokens:,}",
        "ledger equals full render": share(source.render_exact),
    } | {f"task: {name}": f"{value:.3g}" for name, value in source.task.items()}


@dataclass(frozen=True, slots=True)
class TrainReport:
    """A training run: what ended it, and accuracy on held-out samples before and after."""

    run: Path
    reason: str
    steps: int
    seconds: float
    before: dict[str, float]
    after: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"run": str(self.run), "seconds": round(self.seconds, 3)}

    def table(self) -> Table:
        """Before and after, one row per measurement."""
        table = Table(title=f"training, {self.steps} steps, {self.seconds:.0f} s: {self.reason}")
        for column in ("held-out samples", "before", "after"):
            table.add_column(column, justify="left" if column[0] == "h" else "right")
        for name in dict.fromkeys((*self.before, *self.after)):
            cells = [f"{side[name]:.1%}" if name in side else "-" for side in (self.before, self.after)]
            table.add_row(name, *cells)
        return table


SPREAD = (Reduction.MEAN, Reduction.MAX, Reduction.MIN)


def step_metrics(
    trajectories: Sequence[Trajectory], declared: Mapping[str, TaskMetrics] | None = None
) -> dict[str, float]:
    """A training step's episodes in verl's names: lengths, turns, tool use, stop reasons, accuracy by source.

    What tasks measure themselves comes under `task/SOURCE/NAME`.
    """
    metrics: list[Metric] = []
    for trajectory in trajectories:
        source = trajectory.sample.data_source
        written = sum(turn.completion_tokens for turn in trajectory.turns)
        for name, value in (
            ("response_length", written),
            ("num_turns", len(trajectory.turns)),
            ("tool_call_counts", len(trajectory.calls)),
            ("prompt_length", trajectory.turns[0].prompt_tokens if trajectory.turns else 0),
            ("timing_s/agent_loop/generate_sequences", sum(turn.generate_seconds for turn in trajectory.turns)),
            ("timing_s/agent_loop/tool_calls", sum(turn.reply_seconds for turn in trajectory.turns)),
        ):
            metrics += [
                Metric(f"{name}/{how.value}", value, how) for how in (Reduction.MEAN, Reduction.MAX, Reduction.MIN)
            ]
        cut = trajectory.stop_reason in (StopReason.TURN_TRUNCATED, StopReason.TOKEN_BUDGET, StopReason.CONTEXT_FULL)
        metrics.append(Metric("response_length/clip_ratio", float(cut)))
        metrics.append(Metric(f"stop_reasons/{trajectory.stop_reason.value}", 1, Reduction.SUM))
        metrics += [Metric(f"tool_calls/{call.status.value}", 1, Reduction.SUM) for call in trajectory.calls]
        if trajectory.reward is not None:
            right = is_right(trajectory.reward, trajectory.parts)
            metrics.append(Metric(f"train/accuracy/{source}", float(right)))
            metrics += [Metric(f"reward_parts/{source}/{part}", value) for part, value in trajectory.parts.items()]
    return reduce([*metrics, *observe(trajectories, declared)])
