"""The result table of an evaluation, as `turnwise eval` prints it, with error bars; and two evaluations in pairs."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.storage.run_dir import RunDir
from turnwise.web.columns import Snapshot, clean_text
from turnwise.web.run_summary import number, read_report

SURE = 1.96
"""Standard errors on each side of a share: an interval that holds the truth 95 times in 100."""
MOST_FLIPS = 200
"""Listed of each kind; the counts are of all."""
SHARE, NUMBER, COUNT, TEXT = "share", "number", "count", "text"
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
    ("failed tool calls", "calls_by_status", TEXT),
    ("episodes with a valid call", "episodes_with_valid_call", SHARE),
    ("stop reasons", "stop_reasons", TEXT),
    ("policy tokens", "policy_tokens", COUNT),
    ("ledger equals full render", "render_exact", SHARE),
)
_JUDGED = {"accuracy": "right", "first_accuracy": "first_right"}
"""Shares whose single answers the trajectories hold."""

Key = tuple[str, str, int, int]
"""Data source, sample, sibling, and which one of several such."""


def results(run: RunDir, snapshot: Snapshot) -> dict[str, Any] | None:
    """{"sources": [...], "rows": [{label, kind, values, errors}], ...}; None for a run that is no evaluation."""
    report = read_report(run)
    found = report.get("sources") if report else None
    if report is None or not isinstance(found, dict):
        return None
    sources = {clean_text(str(name)): one for name, one in found.items() if isinstance(one, dict)}
    answers = _answers(snapshot)
    rows = [
        {
            "label": label,
            "kind": kind,
            "values": [_value(key, kind, one) for one in sources.values()],
            "errors": [_error(key, name, one, answers) if kind == SHARE else None for name, one in sources.items()],
        }
        for label, key, kind in _ROWS
    ]
    rows += _task_rows(list(sources.values()))
    return {
        "sources": list(sources),
        "rows": rows,
        "seconds": number(report, "seconds"),
        "tokens_per_second": number(report, "tokens_per_second"),
    }


def _value(key: str, kind: str, source: Mapping[str, Any]) -> float | str | None:
    if kind != TEXT:
        return number(dict(source), key)
    counts = source.get(key)
    if not isinstance(counts, dict):
        return None
    known = [(clean_text(str(name)), count) for name, count in counts.items() if type(count) is int]
    if key == "stop_reasons":
        return ", ".join(f"{count} {name}" for name, count in known)
    failed = [(name, count) for name, count in known if name != "ok"]
    listed = f" ({', '.join(f'{count} {name}' for name, count in failed)})" if failed else ""
    return f"{sum(count for _, count in failed)}{listed}"


def _task_rows(sources: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    own = [one["task"] if isinstance(one.get("task"), dict) else {} for one in sources]
    names = dict.fromkeys(str(name) for task in own for name in task)
    return [
        {
            "label": f"task: {clean_text(name)}",
            "kind": NUMBER,
            "values": [number(task, name) for task in own],
            "errors": [None] * len(own),
        }
        for name in names
    ]


@dataclass(frozen=True, slots=True)
class _Answer:
    """One judged trajectory of an evaluation, and where it stands."""

    row: int
    right: bool | None
    first_right: bool | None


def _answers(snapshot: Snapshot) -> dict[Key, _Answer]:
    """The trajectories of the newest evaluation."""
    evaluations = [at for at, info in enumerate(snapshot.infos) if info.split == "eval"]
    if not evaluations:
        return {}
    start, end = (int(edge) for edge in snapshot.starts[[evaluations[-1], evaluations[-1] + 1]])
    found: dict[Key, _Answer] = {}
    seen: Counter[tuple[str, str, int]] = Counter()
    for row in range(start, end):
        source, sample, sibling, right, first = (
            snapshot.value(name, row) for name in ("data_source", "sample_id", "sibling", "right", "first_right")
        )
        number_of = seen[source, sample, sibling]
        seen[source, sample, sibling] += 1
        found[source, sample, sibling, number_of] = _Answer(row, right, first)
    return found


def _error(key: str, source: str, one: Mapping[str, Any], answers: Mapping[Key, _Answer]) -> float | None:
    """Half the 95 % interval of a share; none of one that is all or nothing, which this estimate would call certain.

    Siblings of a sample are alike, so samples are counted where the trajectories are known.
    """
    if key in _JUDGED:
        by_sample: dict[str, list[float]] = defaultdict(list)
        for (where, sample, _, _), answer in answers.items():
            right = getattr(answer, _JUDGED[key])
            if where == source and right is not None:
                by_sample[sample].append(float(right))
        if len(by_sample) > 1:
            return half_interval([sum(values) / len(values) for values in by_sample.values()]) or None
    share, episodes, failed = (number(dict(one), name) for name in (key, "episodes", "failed"))
    judged = (episodes or 0) - (failed or 0)
    if share is None or judged < 1 or not 0 <= share <= 1:
        return None
    return SURE * math.sqrt(share * (1 - share) / judged) or None


def half_interval(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean of these."""
    return SURE * float(np.std(values)) / math.sqrt(len(values))


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
    listed = [key for to in (False, True) for key in [one for one in flipped if right[one].right is to][:MOST_FLIPS]]
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
        "error": half_interval(differences) if len(differences) > 1 else None,
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
