"""The result table of an evaluation, as `turnwise eval` prints it, with error bars; and two evaluations in pairs."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.ext.board.columns import Snapshot
from turnwise.ext.board.json_values import clean_text
from turnwise.ext.board.run_summary import number, read_report
from turnwise.storage.run_dir import RunDir

MOST_FLIPS = 200
"""Listed of each kind; the counts are of all."""
SHARE, PART, NUMBER, COUNT, TEXT = "share", "part", "number", "count", "text"
"""Kinds of row; a part is a share that is said as so many of all."""
_ROWS: tuple[tuple[str, str, str], ...] = (
    ("episodes", "episodes", COUNT),
    ("failed episodes", "failed", COUNT),
    ("accuracy, first answer", "first_accuracy", SHARE),
    ("accuracy, final answer", "accuracy", SHARE),
    ("flipped wrong -> right", "wrong_to_right", COUNT),
    ("flipped right -> wrong", "right_to_wrong", COUNT),
    ("reward", "reward", NUMBER),
    ("assistant turns", "num_turns", NUMBER),
    ("user turns", "user_turns", NUMBER),
    ("tool calls", "tool_calls", COUNT),
    ("", "tools", TEXT),
    ("episodes with a valid call", "episodes_with_valid_call", PART),
    ("stop reasons", "stop_reasons", TEXT),
    ("policy tokens", "policy_tokens", COUNT),
    ("sequences an episode", "segments", NUMBER),
    ("ledger equals full render", "render_exact", PART),
)
_FEW_TOOLS = 40
"""Rows of tools; a model may make names up without end."""
_FEW_MEASURES = 60
"""Rows of pass@k and its like; an evaluation of ours has a few."""

Key = tuple[str, str, int, int]
"""Data source, sample, sibling, and which one of several such."""


def results(run: RunDir) -> dict[str, Any] | None:
    """{"sources": [...], "n": [...], "rows": [{label, kind, values, errors}], ...}; None for a training."""
    report = read_report(run)
    by_source = report.get("sources") if report else None
    if report is None or not isinstance(by_source, dict):
        return None
    sources = {clean_text(str(name)): entry for name, entry in by_source.items() if isinstance(entry, dict)}
    rows: list[dict[str, Any]] = []
    for label, key, kind in _ROWS:
        if key == "tools":
            rows += _tool_rows(list(sources.values()))
            continue
        if key == "wrong_to_right":  # the accuracies end here
            rows += _repeated_rows(list(sources.values()))
        values = [_value(key, kind, entry) for entry in sources.values()]
        if key == "render_exact" and any(number(entry, "render_same_text") for entry in sources.values()):
            kind, values = TEXT, [_rendered(entry) for entry in sources.values()]
        rows.append(_row(label, kind, values, [number(entry, f"{key}_stderr") for entry in sources.values()]))
    rows += _task_rows(list(sources.values()))
    return {
        "sources": list(sources),
        "n": [number(entry, "n") for entry in sources.values()],
        "samples": [number(entry, "samples") for entry in sources.values()],
        "rows": rows,
        "warnings": _texts(report.get("warnings")),
        "seconds": number(report, "seconds"),
        "tokens_per_second": number(report, "tokens_per_second"),
    }


def _texts(values: Any) -> list[str]:
    return [clean_text(text) for text in values if isinstance(text, str)] if isinstance(values, list) else []


def _row(label: str, kind: str, values: Sequence[Any], errors: Sequence[float | None]) -> dict[str, Any]:
    return {"label": label, "kind": kind, "values": list(values), "errors": list(errors)}


def _value(key: str, kind: str, source: Mapping[str, Any]) -> float | str | None:
    if kind != TEXT:
        return number(dict(source), key)
    counts = source.get(key)
    return _counts(counts) if isinstance(counts, dict) else None


def _rendered(source: Mapping[str, Any]) -> str | None:
    """How many ledgers equal a full render, and how many more have its text in other tokens, as the command says it."""
    exact, other, episodes = (number(dict(source), name) for name in ("render_exact", "render_same_text", "n"))
    if exact is None or episodes is None:
        return None
    same_text = f", {round(other * episodes)} more in text" if other else ""
    return f"{round(exact * episodes)} of {episodes:.0f}{same_text}"


def _counts(counts: Mapping[Any, Any]) -> str:
    pairs = [(clean_text(str(name)), count) for name, count in counts.items() if type(count) is int]
    return ", ".join(f"{count} {name}" for name, count in pairs)


def _tool_rows(sources: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each tool: its calls, and how many of them failed and why."""
    own = [source["tools"] if isinstance(source.get("tools"), dict) else {} for source in sources]
    names = list(dict.fromkeys(str(name) for tools in own for name in tools))[:_FEW_TOOLS]
    return [
        _row(f"  {clean_text(name)}", TEXT, [_tool(tools.get(name)) for tools in own], [None] * len(own))
        for name in names
    ]


def _tool(report: Any) -> str | None:
    if not isinstance(report, dict):
        return None
    calls, failed, statuses = number(report, "calls"), number(report, "failed"), report.get("by_status")
    if not calls or failed is None or not isinstance(statuses, dict):
        return None
    if not failed:
        return f"{calls:.0f} calls"
    failures = _counts({status: count for status, count in statuses.items() if status != "ok"})
    error = report.get("commonest_error")
    details = f"\n{clean_text(error)}" if isinstance(error, str) else ""
    crash = report.get("commonest_crash")
    if isinstance(crash, str) and error != f"Error: {crash}":
        details += f"\ncrashed: {clean_text(crash)}"
    return f"{calls:.0f} calls, {failed / calls:.0%} failed ({failures}){details}"


def _repeated_rows(sources: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each of pass@k, pass^k, maj@k and avg@k, where samples have several episodes."""
    own = [source["repeated"] if isinstance(source.get("repeated"), dict) else {} for source in sources]
    names = list(dict.fromkeys(str(name) for repeated in own for name in repeated))[:_FEW_MEASURES]
    rows = []
    for name in names:
        shares = [repeated[name] if isinstance(repeated.get(name), dict) else {} for repeated in own]
        values, errors, samples = ([number(share, field) for share in shares] for field in ("value", "stderr", "n"))
        rows.append(_row(clean_text(name), SHARE, values, errors) | {"n": samples})
    return rows


def _task_rows(sources: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    own = [source["task"] if isinstance(source.get("task"), dict) else {} for source in sources]
    names = dict.fromkeys(str(name) for task in own for name in task)
    return [
        _row(f"task: {clean_text(name)}", NUMBER, [number(task, name) for task in own], [None] * len(own))
        for name in names
    ]


@dataclass(frozen=True, slots=True)
class _Answer:
    """One scored trajectory of an evaluation, and where it stands."""

    row: int
    right: bool | None
    first_right: bool | None


def _answers(snapshot: Snapshot) -> dict[Key, _Answer]:
    """The trajectories of the newest evaluation."""
    evaluations = [at for at, info in enumerate(snapshot.infos) if info.split == "eval"]
    if not evaluations:
        return {}
    start, end = (int(edge) for edge in snapshot.starts[[evaluations[-1], evaluations[-1] + 1]])
    answers: dict[Key, _Answer] = {}
    counts: Counter[tuple[str, str, int]] = Counter()
    for row in range(start, end):
        source, sample, sibling, right, first = (
            snapshot.value(name, row) for name in ("data_source", "sample_id", "sibling", "right", "first_right")
        )
        number_of = counts[source, sample, sibling]
        counts[source, sample, sibling] += 1
        answers[source, sample, sibling, number_of] = _Answer(row, right, first)
    return answers


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of these values."""
    return float(np.std(values)) / math.sqrt(len(values))


def paired(first: Snapshot, second: Snapshot) -> dict[str, Any]:
    """The newest evaluations of two runs, answer by answer: what both were asked, and which answers flipped.

    {"sources": [{name, pairs, first, second, difference, error, to_right, to_wrong}], "flips": [...], "alone": [n, m]}
    """
    left, right = _answers(first), _answers(second)
    both = [key for key in left if key in right and None not in (left[key].right, right[key].right)]
    sources = [
        _pair(source, [key for key in both if key[0] == source], left, right)
        for source in dict.fromkeys(key[0] for key in both)
    ]
    flipped = [key for key in both if left[key].right is not right[key].right]
    listed = [key for to in (False, True) for key in [flip for flip in flipped if right[flip].right is to][:MOST_FLIPS]]
    return {
        "sources": sources,
        "flips": [_flip(key, first, second, left[key], right[key]) for key in listed],
        "alone": [len(left.keys() - right.keys()), len(right.keys() - left.keys())],
    }


def _pair(
    source: str, keys: Sequence[Key], left: Mapping[Key, _Answer], right: Mapping[Key, _Answer]
) -> dict[str, Any]:
    by_sample: dict[str, list[float]] = defaultdict(list)
    for key in keys:
        by_sample[key[1]].append(float(bool(right[key].right)) - float(bool(left[key].right)))
    before, after = (sum(bool(side[key].right) for key in keys) / len(keys) for side in (left, right))
    differences = [sum(values) / len(values) for values in by_sample.values()]
    return {
        "name": source,
        "pairs": len(keys),
        "first": before,
        "second": after,
        "difference": after - before,
        "error": standard_error(differences) if len(differences) > 1 else None,
        "to_right": sum(not left[key].right and bool(right[key].right) for key in keys),
        "to_wrong": sum(bool(left[key].right) and not right[key].right for key in keys),
    }


def _flip(key: Key, first: Snapshot, second: Snapshot, before: _Answer, after: _Answer) -> dict[str, Any]:
    def place(snapshot: Snapshot, row: int) -> dict[str, Any]:
        shard = int(snapshot.shard_index[row])
        return {
            "shard": snapshot.infos[shard].shard,
            "row": row - int(snapshot.starts[shard]),
            "answer": snapshot.value("answer", row),
        }

    return {
        "source": key[0],
        "sample": key[1],
        "sibling": key[2],
        "right_now": bool(after.right),
        "question": first.value("question", before.row),
        "first": place(first, before.row),
        "second": place(second, after.row),
    }
