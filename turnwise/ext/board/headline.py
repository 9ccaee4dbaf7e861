"""What a run came to, in one look: first and last evaluation or loss, the cost, and its last best and worst episode."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.ext.board.columns import SPLITS, Snapshot
from turnwise.ext.board.run_summary import RunSummary
from turnwise.ext.board.series import Points, Series


@dataclass(frozen=True, slots=True)
class _Measure:
    """A metric worth the headline: `_Measure("accuracy", "val/accuracy", "val/accuracy_stderr")`."""

    title: str
    metric: str
    error: str = ""
    is_share: bool = True


_ACCURACIES = (
    _Measure("accuracy", "val/accuracy", "val/accuracy_stderr"),
    _Measure("greedy accuracy", "val/greedy_accuracy", "val/greedy_accuracy_stderr"),
)
_LOSSES = (
    _Measure("loss", "sft/loss", is_share=False),
    _Measure("loss of held-out conversations", "sft/heldout_loss", is_share=False),
)
_REWARD = _Measure("reward", "critic/score/mean", is_share=False)


def headline(series: Series, snapshot: Snapshot, newest: RunSummary, tokens_per_second: float | None) -> dict[str, Any]:
    """{"measures": [...], "cost": {...}, "episodes": {...} or None}, ready for JSON.

    The reward stands in where nothing was evaluated. `tokens_per_second` is what an evaluation says of itself.
    """
    measures = [entry for measure in (*_ACCURACIES, *_LOSSES) if (entry := _course(series, measure)) is not None]
    if not measures and newest.accuracy is not None:  # a report of an evaluation without metrics
        ends = {"first": None, "first_error": None, "last": newest.accuracy, "last_error": newest.accuracy_error}
        measures = [{"name": "accuracy", "share": True, "steps": None} | ends]
    if not measures and (reward := _course(series, _REWARD)) is not None:
        measures = [reward]
    return {
        "measures": measures,
        "cost": _cost(series, tokens_per_second),
        # the trajectories of a fine-tuning are what it learned from, not its own
        "episodes": None if series.get("sft/loss").step else notable_episodes(snapshot),
    }


def _course(series: Series, measure: _Measure) -> dict[str, Any] | None:
    """The first and the last value of a metric with their steps; only the last where there is one."""
    points = series.get(measure.metric)
    lines = [line for line, value in enumerate(points.value) if math.isfinite(value)]
    if not lines:
        return None
    errors = series.get(measure.error) if measure.error else Points([], [], [], [])
    first, last = lines[0], lines[-1]
    several = points.step[first] != points.step[last]
    return {
        "name": measure.title,
        "share": measure.is_share,
        "first": points.value[first] if several else None,
        "first_error": _at(errors, points.step[first]) if several else None,
        "last": points.value[last],
        "last_error": _at(errors, points.step[last]),
        "steps": [points.step[first], points.step[last]],
    }


def _at(points: Points, step: int) -> float | None:
    """The newest finite value at a step."""
    values = zip(points.step, points.value, strict=True)
    return next((value for at, value in reversed(list(values)) if at == step and math.isfinite(value)), None)


def _cost(series: Series, tokens_per_second: float | None) -> dict[str, Any]:
    """Seconds, the policy's tokens (of a fine-tuning those learned from), and how many a second."""
    clocks = [series.get(measure.metric) for measure in (*_ACCURACIES, *_LOSSES, _REWARD)]
    seconds = max((value for clock in clocks for value in clock.seconds[-1:] if math.isfinite(value)), default=None)
    tokens = max((value for clock in clocks for value in clock.tokens[-1:] if math.isfinite(value)), default=None)
    if tokens_per_second is None and tokens and seconds:
        tokens_per_second = tokens / seconds
    learned = bool(series.get("sft/loss").step)
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens_per_second, "learned": learned}


def notable_episodes(snapshot: Snapshot) -> dict[str, Any] | None:
    """The best and the worst scored episode of the last training step, else of the last evaluation."""
    for split in ("train", "eval"):
        rows = np.flatnonzero((snapshot.split == SPLITS.index(split)) & np.isfinite(snapshot.columns["reward"]))
        if len(rows):
            break
    else:
        return None
    step = int(snapshot.columns["step"][rows].max())
    rows = rows[snapshot.columns["step"][rows] == step]
    rewards = snapshot.columns["reward"][rows]
    best, worst = int(rows[rewards.argmax()]), int(rows[rewards.argmin()])
    return {
        "split": split,
        "step": step,
        "count": len(rows),
        "best": _episode(snapshot, best),
        "worst": None if rewards.min() == rewards.max() else _episode(snapshot, worst),
    }


def _episode(snapshot: Snapshot, row: int) -> dict[str, Any]:
    shard = int(snapshot.shard_index[row])
    wanted = ("sample_id", "reward", "right", "question", "answer")
    place = {"shard": snapshot.infos[shard].shard, "row": row - int(snapshot.starts[shard])}
    return place | {name: snapshot.value(name, row) for name in wanted}
