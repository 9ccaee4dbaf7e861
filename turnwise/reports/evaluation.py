"""What an evaluation found, as numbers and as a table: accuracy with its error, tool use, stop reasons, tokens."""

import html
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from turnwise.config.training import is_share
from turnwise.errors import ScoringFailed
from turnwise.reports.cannot_follow import cannot_follow
from turnwise.reports.data_sources import Fitted, SourceReport, by_column, by_row, narrowest
from turnwise.reports.pass_at_k import most_repeated, repeated_answers
from turnwise.reports.task_metrics import TASK, TaskMetrics, observe
from turnwise.rollout.toolbox.report import LONGEST_ERROR, tool_reports, warnings
from turnwise.scoring.scorer import Scorer, is_failed, score_answer, turns_before_feedback
from turnwise.storage.transcript import visible
from turnwise.system.concurrency import each
from turnwise.system.metrics import Metric, Reduction, Share, clustered_error, reduce, share
from turnwise.types import CallStatus, Role, StopReason, Trajectory, is_right

AT_ONCE = 256
"""First answers being scored; runners have limits of their own."""
NARROWEST = 100
"""Columns of a report printed as text, where the terminal has fewer or there is none."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One trajectory with its first and its final answer graded; None for a failed episode."""

    trajectory: Trajectory
    first_right: bool | None
    right: bool | None


class Printable:
    """A report that prints as its table: with `print`, with rich and in a notebook."""

    __slots__ = ()

    def __rich__(self) -> RenderableType:
        raise NotImplementedError

    def __str__(self) -> str:
        out = io.StringIO()
        width = max(NARROWEST, Console(force_jupyter=False).width)
        page = Console(file=out, width=width, color_system=None, force_jupyter=False)  # else a notebook gets the text
        page.print(self, soft_wrap=True)
        return out.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True, slots=True, repr=False)
class EvalReport(Printable):
    """One evaluation; it prints as its table, and `report.sources["arithmetic"].accuracy` is one number of it."""

    run: Path
    seconds: float
    tokens_per_second: float
    sources: dict[str, SourceReport]
    trajectories: list[Trajectory]

    @property
    def overall(self) -> Share | None:
        """The accuracy over all data sources with its error; None when no episode was scored."""
        return share(
            (trajectory.sample.id, trajectory.right) for trajectory in self.trajectories if trajectory.right is not None
        )

    @property
    def accuracy(self) -> float | None:
        """The accuracy over all data sources; None when no episode was scored."""
        return None if (overall := self.overall) is None else overall.value

    @property
    def warnings(self) -> list[str]:
        """What a person should look at before believing the numbers."""
        lost = cannot_follow(self.trajectories, self.run)
        problems = [*warnings(tool_reports(self.trajectories)).values(), *_lost(self.trajectories)]
        return [*filter(None, (lost, *problems, agent_errors(self.trajectories), ignored_requests(self.trajectories)))]

    def as_json(self) -> dict[str, Any]:
        """Everything but the trajectories, as plain values."""
        overall = self.overall
        return {
            "run": str(self.run),
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "accuracy": None if overall is None else overall.value,
            "accuracy_stderr": None if overall is None else overall.stderr,
            "n": 0 if overall is None else overall.n,
            "warnings": self.warnings,
            "sources": {name: asdict(source) for name, source in self.sources.items()},
        }

    def as_metrics(self) -> dict[str, int | float]:
        """A line of metrics.jsonl, in the names of an evaluation during training."""
        tokens = sum(source.policy_tokens for source in self.sources.values())
        line: dict[str, int | float] = {"step": 0, "seconds": round(self.seconds, 3), "tokens": tokens}
        overall = measured("accuracy", self.overall) | repeated_numbers(
            most_repeated(repeated_answers(self.trajectories))
        )
        overall |= rewards("reward", self.trajectories)
        line |= {f"val/{name}": value for name, value in overall.items()}
        for name, source in self.sources.items():
            named = {
                "accuracy": source.accuracy,
                "accuracy_stderr": source.accuracy_stderr,
                "first_accuracy": source.first_accuracy,
                "reward": source.reward,
            }
            line |= {f"val/{kind}/{name}": value for kind, value in named.items() if value is not None}
            line |= {f"val/{kind}": value for kind, value in repeated_numbers(source.repeated, name).items()}
            line |= {f"val/{TASK}/{name}/{measure}": value for measure, value in source.task.items()}
        return line

    def arrow(self) -> Any:
        """An Arrow table with a row for each episode: reward, parts, turns, calls, tokens, question and answer."""
        from turnwise.storage.recorded_run import episodes_table

        return episodes_table(self.trajectories, "eval/step_000000.parquet")

    def frame(self) -> Any:
        """`arrow` as a pandas DataFrame."""
        from turnwise.storage.recorded_run import to_pandas

        return to_pandas(self.arrow())

    def table(self, width: int | None = None) -> Table:
        """The result table: one column per data source, or one row where so many columns do not fit this width."""
        sources = list(self.sources.values())
        title = f"evaluation, {self.seconds:.1f} s, {self.tokens_per_second:,.0f} policy tokens/s"
        if width is None or len(sources) < 2 or narrowest(sources) <= width:
            return by_column(sources, title)
        return by_row(sources, self.overall, title, width)

    def __rich__(self) -> RenderableType:
        lines = [*(f"warning: {text}" for text in self.warnings), f"run directory: {self.run}"]
        return Group(Fitted(self.table), *(Text(visible(line)) for line in lines))


async def grade(trajectory: Trajectory, scorer: Scorer) -> EpisodeResult:
    """Grade the answer before the user's first word and the final one."""
    before = turns_before_feedback(trajectory)
    spoke = any(reply.role is Role.USER for turn in trajectory.turns for reply in turn.replies)
    if is_failed(trajectory) or trajectory.reward is None:
        return EpisodeResult(trajectory, None, None)
    final = is_right(trajectory.reward, trajectory.parts)
    if not spoke:
        return EpisodeResult(trajectory, final, final)
    try:
        first = await score_answer(scorer, trajectory, before)
    except ScoringFailed:  # the final answer has its score; of the first nothing is known
        first = None
    return EpisodeResult(trajectory, None if first is None else is_right(first.reward, first.parts), final)


async def grade_all(trajectories: Sequence[Trajectory], scorers: Mapping[str, Scorer]) -> list[EpisodeResult]:
    """`grade` for all of them, many at once: a first answer costs as much scoring as a final one."""
    return await each(
        lambda trajectory: grade(trajectory, scorers[trajectory.sample.data_source]), trajectories, AT_ONCE
    )


def accuracies(results: Iterable[EpisodeResult]) -> tuple[Share | None, Share | None]:
    """(of the final answers, of the first ones)."""
    scored = [(entry.trajectory.sample.id, entry) for entry in results if entry.right is not None]
    first = share((sample, entry.first_right) for sample, entry in scored if entry.first_right is not None)
    return share((sample, bool(entry.right)) for sample, entry in scored), first


def measured(kind: str, measurement: Share | None, source: str | None = None) -> dict[str, float]:
    """A share as numbers by name: accuracy, accuracy_stderr and accuracy_n, with the data source after a slash."""
    if measurement is None:  # the accuracy of nothing is no number
        return {}
    end = "" if source is None else f"/{source}"
    return {
        f"{kind}{end}": measurement.value,
        f"{kind}_stderr{end}": measurement.stderr,
        f"{kind}_n{end}": float(measurement.n),
    }


def repeated_numbers(repeated: Mapping[str, Share], source: str | None = None) -> dict[str, float]:
    """`pass@k` and its like as numbers by name, as `measured` gives them."""
    numbers: dict[str, float] = {}
    for kind, number in repeated.items():
        numbers |= measured(kind, number, source)
    return numbers


def rewards(kind: str, trajectories: Iterable[Trajectory], source: str | None = None) -> dict[str, float]:
    """The mean reward of scored episodes as numbers by name, as `measured` gives them; one sample has no error."""
    scored = [
        (entry.sample.id, entry.reward) for entry in trajectories if not is_failed(entry) and entry.reward is not None
    ]
    if not scored:
        return {}
    end, error = "" if source is None else f"/{source}", clustered_error(scored)
    numbers = {f"{kind}{end}": sum(reward for _, reward in scored) / len(scored), f"{kind}_n{end}": float(len(scored))}
    return numbers if error is None else numbers | {f"{kind}_stderr{end}": error}


def is_detail(name: str) -> bool:
    """Whether a number of `measured` only says how sure another one is."""
    return name.partition("/")[0].endswith(("_stderr", "_n"))


def is_measure(name: str) -> bool:
    """Whether a number of an evaluation is one that a task measures: `task/SOURCE/NAME`, greedily `greedy_task/...`."""
    return name.partition("/")[0].endswith(TASK)


def shown(metrics: Mapping[str, float], name: str) -> str:
    """One measurement of `measured` for a person; a run of an older version has no error."""
    if name not in metrics:
        return "-"
    kind, slash, source = name.partition("/")
    stderr, n = (metrics.get(f"{kind}_{detail}{slash}{source}") for detail in ("stderr", "n"))
    if not is_share(name):
        return f"{metrics[name]:.3f}" + ("" if stderr is None else f" ± {stderr:.3f}")
    if stderr is None or n is None:
        return f"{metrics[name]:.1%}"
    return str(Share(metrics[name], stderr, int(n), int(n)))


def in_a_line(numbers: Mapping[str, float]) -> str:
    """The accuracies and the reward of an evaluation over all data sources."""
    kinds = [name for name in numbers if "/" not in name and not is_detail(name)]
    return ", ".join(f"{name} {shown(numbers, name)}" for name in kinds) or "no episode was scored"


def summarise(
    data_source: str, results: Sequence[EpisodeResult], declared: Mapping[str, TaskMetrics] | None = None
) -> SourceReport:
    """The numbers of one data source; `declared` are the metrics of a run's own task."""
    good = [entry for entry in results if entry.right is not None]
    trajectories = [entry.trajectory for entry in good]
    calls = [call for trajectory in trajectories for call in trajectory.every_call]
    means = reduce(metric for entry in good for metric in _metrics(entry))
    final, first = accuracies(results)
    return SourceReport(
        data_source=data_source,
        episodes=len(results),
        failed=len(results) - len(good),
        n=len(good),
        samples=len({trajectory.sample.id for trajectory in trajectories}),
        accuracy=None if final is None else final.value,
        accuracy_stderr=None if final is None else final.stderr,
        first_accuracy=None if first is None else first.value,
        first_accuracy_stderr=None if first is None else first.stderr,
        wrong_to_right=sum(entry.first_right is False and bool(entry.right) for entry in good),
        right_to_wrong=sum(bool(entry.first_right) and not entry.right for entry in good),
        reward=means.get("reward"),
        num_turns=means.get("num_turns"),
        tool_calls=len(calls),
        calls_by_status=dict(sorted(Counter(call.status.value for call in calls).items())),
        tools=tool_reports(trajectories),
        episodes_with_valid_call=means.get("valid_call"),
        user_turns=means.get("user_turns"),
        stop_reasons=dict(Counter(entry.trajectory.stop_reason.value for entry in results).most_common()),
        policy_tokens=int(means.get("policy_tokens", 0)),
        prompt_tokens=means.get("prompt_tokens"),
        render_exact=means.get("render_exact"),
        render_same_text=means.get("render_same_text"),
        segments=means.get("segments"),
        repeated=repeated_answers(trajectories),
        task={name.rpartition("/")[2]: value for name, value in reduce(observe(trajectories, declared)).items()},
    )


def _metrics(entry: EpisodeResult) -> list[Metric]:
    trajectory = entry.trajectory
    user_replies = [reply for turn in trajectory.turns for reply in turn.replies if reply.role is Role.USER]
    valid = any(call.status not in (CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL) for call in trajectory.every_call)
    metrics = [
        Metric("reward", trajectory.reward or 0.0),
        Metric("num_turns", len(trajectory.every_turn)),
        Metric("valid_call", float(valid)),
        Metric("user_turns", len(user_replies)),
        Metric("policy_tokens", sum(turn.completion_tokens for turn in trajectory.every_turn), Reduction.SUM),
    ]
    if trajectory.turns:
        metrics.append(Metric("prompt_tokens", trajectory.turns[0].prompt_tokens))
    if trajectory.segments:
        metrics.append(Metric("segments", len(trajectory.segments)))
    if trajectory.render_check is not None:
        check = trajectory.render_check
        metrics.append(Metric("render_exact", float(check.exact)))
        metrics.append(Metric("render_same_text", float(check.same_text and not check.exact)))
    return metrics


def _lost(trajectories: Sequence[Trajectory]) -> list[str]:
    tries = [text for trajectory in trajectories for text in trajectory.facts.engine_lost]
    if not tries:
        return []
    episodes = sum(bool(trajectory.facts.engine_lost) for trajectory in trajectories)
    return [f"the engine was lost {len(tries)} time(s) in {episodes} episode(s), such as in {visible(tries[0])}"]


def agent_errors(trajectories: Sequence[Trajectory]) -> str | None:
    """A sentence on the episodes whose agent raised: they count, so that a mistake of the agent's must be seen here."""
    raised = Counter(
        str(trajectory.facts.agent_error)
        for trajectory in trajectories
        if trajectory.stop_reason is StopReason.AGENT_ERROR
    )
    if not raised:
        return None
    why = f"most often {visible(raised.most_common(1)[0][0][:LONGEST_ERROR])}"
    return f"what the policy wrote made the agent fail, {why}, in {raised.total()} of {len(trajectories)} episodes"


def ignored_requests(trajectories: Sequence[Trajectory]) -> str | None:
    """A sentence on what the agent's requests asked for and did not get."""
    names = dict.fromkeys(text for trajectory in trajectories for text in trajectory.facts.ignored_requests)
    if not names:
        return None
    return f"the agent sets options that are ignored here (docs/ext/sdk_agents.md): {visible(', '.join(names))}"


_SPREAD = [(how.value, how) for how in (Reduction.MEAN, Reduction.MAX, Reduction.MIN)]


def step_metrics(
    trajectories: Sequence[Trajectory], declared: Mapping[str, TaskMetrics] | None = None
) -> dict[str, float]:
    """A training step's episodes: lengths, turns, tool use, stop reasons, accuracy by source.

    What tasks measure themselves comes under `task/SOURCE/NAME`.
    """
    metrics: list[Metric] = []
    for trajectory in trajectories:
        source = trajectory.sample.data_source
        written = sum(turn.completion_tokens for turn in trajectory.every_turn)
        for name, value in (
            ("response_length", written),
            ("num_turns", len(trajectory.every_turn)),
            ("tool_call_counts", len(trajectory.every_call)),
            ("segments", len(trajectory.segments)),
            ("prompt_length", trajectory.turns[0].prompt_tokens if trajectory.turns else 0),
            ("timing_s/agent_loop/generate_sequences", sum(turn.generate_seconds for turn in trajectory.every_turn)),
            ("timing_s/agent_loop/tool_calls", sum(turn.reply_seconds for turn in trajectory.every_turn)),
        ):
            metrics += [Metric(f"{name}/{ending}", value, how) for ending, how in _SPREAD]
        cut = trajectory.stop_reason in (StopReason.TURN_TRUNCATED, StopReason.TOKEN_BUDGET, StopReason.CONTEXT_FULL)
        metrics.append(Metric("response_length/clip_ratio", float(cut)))
        metrics.append(Metric(f"stop_reasons/{trajectory.stop_reason.value}", 1, Reduction.SUM))
        metrics += [Metric(f"tool_calls/{call.status.value}", 1, Reduction.SUM) for call in trajectory.every_call]
        if lost := trajectory.facts.engine_lost:
            metrics.append(Metric("rollout/engine_lost", len(lost), Reduction.SUM))
        if trajectory.reward is not None:
            right = is_right(trajectory.reward, trajectory.parts)
            metrics.append(Metric(f"train/accuracy/{source}", float(right)))
            metrics += [Metric(f"reward_parts/{source}/{part}", value) for part, value in trajectory.parts.items()]
    return reduce([*metrics, *observe(trajectories, declared)])
