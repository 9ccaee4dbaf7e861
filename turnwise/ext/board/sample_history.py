"""One sample over the steps of a run: what became of its episodes each time it was played."""

from typing import Any

import numpy as np

from turnwise.ext.board.columns import Array, Snapshot
from turnwise.ext.board.table import Table

MOST_EPISODES = 2000
"""Told one by one, the newest; a sample that an evaluation plays at every step has more in a long run."""
_EPISODE_FIELDS = ("sibling", "reward", "advantage", "right", "answer", "stop_reason", "turns", "calls")


def sample_history(table: Table, sample: str) -> dict[str, Any]:
    """Its groups by step, the newest first; no groups when the run never played it, which is no error.

    A board asks this of other runs too: `question` and `data_source` tell whether an equal id means the same sample.
    """
    snapshot = table.snapshot
    code = snapshot.pools.by_column["sample_id"].code(sample)
    rows = np.zeros(0, dtype=np.int64) if code is None else np.flatnonzero(snapshot.columns["sample_id"] == code)
    newest = rows[-MOST_EPISODES:]
    last = int(rows[-1]) if len(rows) else None
    return {
        "sample_id": sample,
        "question": None if last is None else snapshot.value("question", last),
        "data_source": None if last is None else snapshot.value("data_source", last),
        "episodes": len(rows),
        "shown": len(newest),
        "groups": _groups(snapshot, newest)[::-1],
        "pending": table.pending,
        "left_out": table.left_out,
    }


def _groups(snapshot: Snapshot, rows: Array) -> list[dict[str, Any]]:
    """Rows by file; a snapshot holds them in the order of their steps."""
    if not len(rows):
        return []
    shards = snapshot.shard_index[rows]
    cuts = np.flatnonzero(np.diff(shards)) + 1
    return [_group(snapshot, part) for part in np.split(rows, cuts)]


def _group(snapshot: Snapshot, rows: Array) -> dict[str, Any]:
    number = int(snapshot.shard_index[rows[0]])
    info, start = snapshot.infos[number], int(snapshot.starts[number])
    rewards = snapshot.columns["reward"][rows]
    rewards = rewards[np.isfinite(rewards)]
    right = snapshot.columns["right"][rows]
    return {
        "shard": info.shard,
        "split": info.split,
        "step": info.step,
        "size": len(rows),
        "mean": float(rewards.mean()) if len(rewards) else None,
        "right": int((right == 1).sum()),
        "scored": int((right >= 0).sum()),
        "episodes": [
            {"row": row - start} | {name: snapshot.value(name, row) for name in _EPISODE_FIELDS}
            for row in rows.tolist()
        ],
    }
