"""What became of tool calls, of answers after feedback, and of episodes: by tool, by data source, over the steps."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from turnwise.ext.board.steps import Bools, Buckets, Floats, Ints, Rows, jsonable, totals
from turnwise.ext.board.table import Table
from turnwise.storage.index import ToolUse
from turnwise.types import CallStatus

STAGES = ("called", "ran", "evidence", "used", "correct")
UNREADABLE = "(unreadable call)"
"""Calls whose tool cannot be told; `turnwise eval` calls them so, too."""
MOST_FAILURES = 50
"""Different texts; a list of more is not read."""
_LONGEST_QUOTE = 300
"""A failure may hold a whole traceback; its beginning tells it apart."""


def tools(table: Table) -> dict[str, Any]:
    """Everything the page of tools and users shows.

    In a run of more than 400 steps neighbouring steps are taken together (`bucket` says how many are one point):
    counts are then added up, shares and seconds averaged. Training only, except `flips` (evaluations) and `failures`.
    """
    rows = Rows.of(table, "train")
    split = "train" if len(rows) else "eval"
    if not len(rows):
        rows = Rows.of(table, "eval")
    buckets = Buckets.over(rows.steps)
    at = buckets.of_step[rows.at]
    return {
        "bucket": buckets.size,
        "tools": _tools(table, rows.steps, buckets, split),
        **_funnel(rows, at, buckets, split),
        "stop_reasons": _stop_reasons(rows, at, buckets),
        "flips": _flips(Rows.of(table, "eval")),
        "failures": _failures(table),
    }


def _tools(table: Table, steps: Ints, buckets: Buckets, split: str) -> dict[str, Any]:
    places = dict(zip(steps.tolist(), buckets.of_step.tolist(), strict=True))
    uses: dict[str, list[tuple[int, ToolUse]]] = defaultdict(list)
    for info, used in table.tool_uses():
        if info.split == split and info.step in places:
            for name, use in used.items():
                uses[name].append((places[info.step], use))
    return {
        name or UNREADABLE: _tool(entries, buckets) | {"nameless": not name} for name, entries in sorted(uses.items())
    }


def _tool(uses: list[tuple[int, ToolUse]], buckets: Buckets) -> dict[str, Any]:
    at = np.array([bucket for bucket, _ in uses], dtype=np.int64)
    calls = np.array([use.calls for _, use in uses], dtype=np.float64)
    counts = totals(at, calls, len(buckets))
    names = sorted({status for _, use in uses for status in use.statuses}, key=_order)
    statuses = {
        name: totals(at, np.array([float(use.statuses.get(name, 0)) for _, use in uses]), len(buckets))
        for name in names
    }
    with np.errstate(invalid="ignore", divide="ignore"):  # a bucket without a call has no seconds: null
        p50, p90 = (
            totals(at, np.array([getattr(use, name) for _, use in uses]) * calls, len(buckets)) / counts
            for name in ("p50", "p90")
        )
    failed = counts - sum(
        (by_bucket for status, by_bucket in statuses.items() if not CallStatus(status).failed), np.zeros(len(buckets))
    )
    return {
        "step": buckets.steps,
        "calls": _whole(counts),
        "failed": _whole(failed),
        "p50": jsonable(p50),
        "p90": jsonable(p90),
        "statuses": {name: _whole(by_bucket) for name, by_bucket in statuses.items()},
    }


def _order(status: str) -> tuple[int, str]:
    """The order of the enum; what it does not know comes last."""
    order = [member.value for member in CallStatus]
    return (order.index(status) if status in order else len(order)), status


def _whole(values: Floats) -> list[int]:
    counts: list[int] = values.astype(np.int64).tolist()
    return counts


def _funnel(rows: Rows, at: Ints, buckets: Buckets, split: str) -> dict[str, Any]:
    """Of the episodes that did not fail for want of infrastructure: how many came how far, in all and by step.

    Each stage counts only episodes that passed the one before, so that no stage is wider than the last.
    """
    sound = rows.codes("failure") < 0
    source = rows.codes("data_source")
    stages: dict[str, Bools] = {}
    reached = sound
    for stage in STAGES:
        reached = reached & (rows.number("right" if stage == "correct" else stage) == 1)
        stages[stage] = reached
    sources: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    named = sorted((rows.text("data_source", code), code) for code in rows.different("data_source", sound))
    for name, code in named:
        here = sound & (source == code)
        places = at[here]
        episodes = totals(places, np.ones(len(places)), len(buckets))
        filled = episodes > 0
        sources[name] = {"episodes": int(here.sum())} | {
            stage: int((passed & here).sum()) for stage, passed in stages.items()
        }
        steps[name] = {"step": np.array(buckets.steps)[filled].tolist()} | {
            stage: jsonable(totals(places, passed[here], len(buckets))[filled] / episodes[filled])
            for stage, passed in stages.items()
        }
    return {"funnel": {"split": split, "sources": sources}, "funnel_steps": steps}


def _stop_reasons(rows: Rows, at: Ints, buckets: Buckets) -> dict[str, Any]:
    codes = rows.codes("stop_reason")
    reasons = {
        rows.text("stop_reason", code): _whole(totals(at, codes == code, len(buckets)))
        for code in rows.different("stop_reason", np.ones(len(rows), dtype=bool))
    }
    return {"step": buckets.steps, "reasons": reasons}


def _flips(rows: Rows) -> dict[str, list[int]]:
    """Answers that changed sides after the user's first word, by evaluation."""
    first, final = rows.number("first_right"), rows.number("right")
    both = np.isfinite(first) & np.isfinite(final)
    count = len(rows.steps)
    episodes = totals(rows.at[both], np.ones(int(both.sum())), count)
    counts = {
        "wrong_to_right": totals(rows.at, both & (first == 0) & (final == 1), count),
        "right_to_wrong": totals(rows.at, both & (first == 1) & (final == 0), count),
        "episodes": episodes,
    }
    filled = episodes > 0
    return {"step": rows.steps[filled].tolist()} | {name: _whole(values[filled]) for name, values in counts.items()}


def _failures(table: Table) -> list[dict[str, Any]]:
    """Infrastructure failures of all splits by their text, the most frequent first."""
    snapshot = table.snapshot
    codes, steps = snapshot.columns["failure"], snapshot.columns["step"]
    failed = codes >= 0
    kinds, at = np.unique(codes[failed], return_inverse=True)
    first = np.full(len(kinds), np.iinfo(np.int64).max)
    last = np.full(len(kinds), np.iinfo(np.int64).min)
    np.minimum.at(first, at, steps[failed])
    np.maximum.at(last, at, steps[failed])
    texts = [str(snapshot.pools.by_column["failure"].values[code]) for code in kinds.tolist()]
    counts = np.bincount(at, minlength=len(kinds)).tolist()
    rows = zip(texts, counts, first.tolist(), last.tolist(), strict=True)
    return sorted(_listed(sorted(rows)), key=lambda kind: -kind["count"])[:MOST_FAILURES]


def _listed(rows: list[tuple[str, int, int, int]]) -> Iterator[dict[str, Any]]:
    """Long texts that begin alike are one kind of failure, so that a filter can hold what tells each kind apart."""
    kinds: dict[tuple[str, bool], dict[str, Any]] = {}
    for text, count, first, last in rows:
        key, long = text[:_LONGEST_QUOTE], len(text) > _LONGEST_QUOTE
        only = f"{key!a} in failure and len(failure) > {_LONGEST_QUOTE}" if long else f"failure == {key!a}"
        new = {"text": text, "count": 0, "first_step": first, "last_step": last, "filter": only}
        kind = kinds.setdefault((key, long), new)
        kind["count"] += count
        kind["first_step"] = min(kind["first_step"], first)
        kind["last_step"] = max(kind["last_step"], last)
    yield from kinds.values()
