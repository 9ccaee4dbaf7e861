"""The index of a run: one line of index.jsonl per trajectory file, so that 100,000 trajectories are listed at once."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import StorageError
from turnwise.storage.images.copies import Album
from turnwise.storage.json_text import parse
from turnwise.storage.run_dir import RunDir
from turnwise.storage.tool_behaviour import tool_behaviour
from turnwise.storage.trajectories import made_rows
from turnwise.storage.trajectories.files import write_trajectories
from turnwise.types import CallStatus, Ledger, Role, StopReason, Trajectory

INDEX = "index.jsonl"
_CUT = (StopReason.TURN_TRUNCATED, StopReason.TOKEN_BUDGET, StopReason.CONTEXT_FULL)
_EXCERPT = 160
_STEP = re.compile(r"step_(\d+)\.parquet$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One trajectory as a list shows it."""

    sample_id: str
    data_source: str
    step: int
    sibling: int
    stop_reason: str
    failure: str | None
    reward: float | None
    parts: dict[str, float]
    advantage: float | None
    right: bool | None
    first_right: bool | None
    seconds: float
    turns: int
    user_turns: int
    policy_tokens: int
    tokens: int
    prompt_tokens: int
    calls: int
    failed_calls: int
    malformed: int
    tools: list[str]
    call_seconds: float
    called: bool
    ran: bool
    evidence: bool
    used: bool
    duplicate_calls: int
    print_only: int
    truncated: bool
    exact: bool | None
    policy_version: int
    gap: float | None
    entropy: float | None
    question: str
    answer: str


COLUMNS = tuple(field.name for field in fields(Entry))


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The calls of one tool in one file; seconds of the median, the ninth tenth and the longest call, and of all."""

    calls: int
    statuses: dict[str, int]
    p50: float
    p90: float
    longest: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Shard:
    """What the index says about one file: its trajectories' entries by column, and its tools."""

    file: str
    columns: dict[str, list[Any]]
    tools: dict[str, ToolUse]

    @property
    def size(self) -> int:
        """The number of trajectories in the shard."""
        return len(self.columns["sample_id"])


def record(run: RunDir, file: str, trajectories: Sequence[Trajectory], album: Album | None = None) -> None:
    """Write a run's trajectory file, the images it speaks of, and its line of the index.

    Who writes many files gives the same album each time.
    """
    name = (album or Album(run)).keep(trajectories)
    write_trajectories(run.file(file), trajectories, name)
    shard = shard_of(file, trajectories)
    tools = {name: asdict(use) for name, use in shard.tools.items()}
    run.append_jsonl(INDEX, {"file": shard.file, "columns": shard.columns, "tools": tools})  # no deep copy of all


def shard_of(file: str, trajectories: Sequence[Trajectory]) -> Shard:
    """What the index says about a file with these trajectories."""
    name = _STEP.search(file)
    entries = [entry_of(trajectory, int(name[1]) if name else trajectory.step) for trajectory in trajectories]
    columns = {name: [getattr(entry, name) for entry in entries] for name in COLUMNS}
    return Shard(file, columns, _tools(trajectories))


def parse_line(line: str | bytes) -> Shard:
    """A line of the index; StorageError for one that this code did not write."""
    try:
        record = parse(line)
        columns = {name: record["columns"][name] for name in COLUMNS}
        tools = {name: ToolUse(**use) for name, use in record["tools"].items()}
        shard = Shard(str(record["file"]), columns, tools)
        sizes = {name: len(values) for name, values in columns.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"a line of {INDEX} is damaged: {error}") from error
    if len(set(sizes.values())) != 1:
        raise StorageError(f"a line of {INDEX} is damaged: its columns have {sizes}")
    return shard


def entry_of(trajectory: Trajectory, step: int) -> Entry:
    """A trajectory as a list shows it; `step` is that of its file, as in metrics.jsonl (its own keys its noise)."""
    return Entry(
        step=step,
        failure=trajectory.failure,
        reward=_finite(trajectory.reward),
        parts={name: value for name, value in trajectory.parts.items() if math.isfinite(value)},
        advantage=_finite(trajectory.advantage),
        right=trajectory.right,
        first_right=trajectory.first_right,
        gap=_gap(trajectory.segments),
        entropy=_mean_entropy(trajectory.segments),
        **(made_rows.entry_of(trajectory) or lasting_entry(trajectory)),
    )


def lasting_entry(trajectory: Trajectory) -> dict[str, Any]:
    """What `entry_of` says and no scoring, evaluation or training changes, by the name of its field."""
    sample, turns, calls = trajectory.sample, trajectory.turns, trajectory.calls
    behaviour = tool_behaviour(trajectory)
    failed = sum(call.status.failed for call in calls)
    questions = [message.text for message in sample.prompt if message.role is Role.USER]
    check = trajectory.render_check
    return {
        "sample_id": sample.id,
        "data_source": sample.data_source,
        "sibling": trajectory.sibling,
        "stop_reason": trajectory.stop_reason.value,
        "seconds": _finite(trajectory.seconds) or 0.0,
        "turns": len(turns),
        "user_turns": sum(reply.role is Role.USER for turn in turns for reply in turn.replies),
        "policy_tokens": sum(turn.completion_tokens for turn in trajectory.every_turn),
        "tokens": sum(len(ledger) for ledger in trajectory.segments),
        "prompt_tokens": turns[0].prompt_tokens if turns else 0,
        "calls": len(calls),
        "failed_calls": failed,
        "malformed": sum(call.status is CallStatus.MALFORMED for call in calls),
        "tools": sorted({call.call.name for call in calls if call.call.name}),
        "call_seconds": _finite(sum(call.seconds for call in calls)) or 0.0,
        "called": bool(calls),
        "ran": failed < len(calls),
        "evidence": behaviour.evidence,
        "used": behaviour.used,
        "duplicate_calls": behaviour.duplicate_calls,
        "print_only": behaviour.print_only,
        "truncated": trajectory.stop_reason in _CUT,
        "exact": None if check is None else check.exact,
        "policy_version": min((turn.policy_version for turn in trajectory.every_turn), default=0),
        "question": _excerpt(questions[-1] if questions else ""),
        "answer": _excerpt(turns[-1].message.visible if turns else ""),
    }


def _tools(trajectories: Iterable[Trajectory]) -> dict[str, ToolUse]:
    by_name: dict[str, list[tuple[CallStatus, float]]] = defaultdict(list)
    for trajectory in trajectories:
        for call in trajectory.every_call:
            by_name[call.call.name].append((call.status, call.seconds))
    return {name: _tool_use(calls) for name, calls in sorted(by_name.items())}


def _tool_use(calls: list[tuple[CallStatus, float]]) -> ToolUse:
    durations = sorted(seconds for _, seconds in calls)
    statuses = Counter(status.value for status, _ in calls)
    median, ninth = (durations[math.ceil(share * len(durations)) - 1] for share in (0.5, 0.9))
    return ToolUse(len(calls), dict(sorted(statuses.items())), median, ninth, durations[-1], sum(durations))


def _mean_entropy(segments: Iterable[Ledger]) -> float | None:
    return _mean(
        [
            ledger.training.entropies[ledger.loss_mask]
            for ledger in segments
            if ledger.training is not None and ledger.training.entropies is not None
        ]
    )


def _gap(segments: Iterable[Ledger]) -> float | None:
    """How far the learner's log-probs lay from the sampler's, on average."""
    return _mean(
        [
            np.abs(ledger.training.logprobs.astype(np.float64) - ledger.logprobs)[ledger.loss_mask]
            for ledger in segments
            if ledger.training is not None and ledger.training.logprobs is not None
        ]
    )


def _mean(arrays: Sequence[NDArray[Any]]) -> float | None:
    """Of the finite numbers; None when there is none."""
    values = np.concatenate(arrays) if arrays else np.empty(0)
    finite = values[np.isfinite(values)]
    return float(finite.mean(dtype=np.float64)) if len(finite) else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _excerpt(text: str) -> str:
    flat = " ".join(text[: 4 * _EXCERPT].split())
    return flat if len(flat) <= _EXCERPT else flat[: _EXCERPT - 1] + "…"
