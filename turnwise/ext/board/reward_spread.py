"""How the rewards of a training step are spread: mean, deviation, tenths, in all and by part."""

from typing import Any

import numpy as np

from turnwise.ext.board.steps import Buckets, Floats, Ints, Rows, jsonable, totals
from turnwise.ext.board.table import Table

LOW, HIGH = 0.1, 0.9


def spread(table: Table) -> dict[str, Any]:
    """{"series": {"reward": {step, mean, std, std_low, std_high, p10, p90, n}, ...}} over the training steps.

    Of a long run neighbouring steps are taken together: the numbers are then of all their trajectories. A step where
    nothing was scored is left out.
    """
    rows = Rows.of(table, "train")
    buckets = Buckets.over(rows.steps)
    at = buckets.of_step[rows.at]
    columns = {"reward": rows.number("reward")}
    for name in rows.snapshot.part_names:
        columns[f"part/{name}"] = rows.snapshot.part(name)[rows.rows]
    spreads = {name: _one(values, at, buckets) for name, values in columns.items()}
    return {"series": {name: points for name, points in spreads.items() if points["step"]}}


def _one(values: Floats, at: Ints, buckets: Buckets) -> dict[str, list[Any]]:
    finite = np.isfinite(values)
    values, at = values[finite], at[finite]
    count = totals(at, np.ones(len(at)), len(buckets))
    filled = count > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = totals(at, values, len(buckets)) / count
        std = np.sqrt(totals(at, (values - mean[at]) ** 2, len(buckets)) / count)
    # A deviation may reach beyond what there is: no reward is above the largest.
    least, most = np.full(len(buckets), np.inf), np.full(len(buckets), -np.inf)
    np.minimum.at(least, at, values)
    np.maximum.at(most, at, values)
    ordered = values[np.lexsort((values, at))]
    starts = np.cumsum(count) - count
    return {
        "step": np.array(buckets.steps, dtype=np.int64)[filled].tolist(),
        "mean": jsonable(mean[filled]),
        "std": jsonable(std[filled]),
        "std_low": jsonable(np.maximum(mean - std, least)[filled]),
        "std_high": jsonable(np.minimum(mean + std, most)[filled]),
        "p10": jsonable(_quantile(ordered, starts[filled], count[filled], LOW)),
        "p90": jsonable(_quantile(ordered, starts[filled], count[filled], HIGH)),
        "n": count[filled].astype(np.int64).tolist(),
    }


def _quantile(ordered: Floats, starts: Floats, counts: Floats, share: float) -> Floats:
    """Of each run of `counts` sorted values, between the two nearest in proportion, as numpy's quantile does."""
    position = starts + share * (counts - 1)
    low = np.floor(position).astype(np.int64)
    high = np.minimum(low + 1, (starts + counts - 1).astype(np.int64))
    return np.asarray(ordered[low] + (ordered[high] - ordered[low]) * (position - low))
