"""A group of siblings side by side: what each said, what it got, and how often k tries would hold a right one."""

import statistics
from typing import Any

from turnwise.ext.board.conversation import message_json, read_all
from turnwise.ext.board.images import Pictures
from turnwise.ext.board.json_values import clean_text, plain
from turnwise.ext.board.table import NotThere, Table
from turnwise.reports.pass_at_k import pass_at_k
from turnwise.storage.run_dir import RunDir
from turnwise.types import Trajectory

MOST_SIBLINGS = 128
"""Read for one page; the numbers above them are over all."""


def group(run: RunDir, table: Table, shard: str, sample: str, *, name: str | None = None) -> dict[str, Any]:
    """The JSON of a group's page; NotThere when the shard has no such sample."""
    rows = table.siblings(shard, sample)
    if not rows:
        raise NotThere(f"{shard} has no sample {sample[:120]!r}", "No such group")
    entries = [table.entry(shard, row) for row in rows]
    trajectories = read_all(table, shard, rows[:MOST_SIBLINGS])
    pictures = Pictures(run, name)
    rewards = [entry["reward"] for entry in entries if entry["reward"] is not None]
    scored = [entry["right"] for entry in entries if entry["right"] is not None]
    first = trajectories[0].sample
    questions = [message.text for message in first.prompt if message.role.value == "user"]
    return {
        "sample_id": clean_text(first.id),
        "data_source": clean_text(first.data_source),
        "question": clean_text(questions[-1]) if questions else "",
        "ground_truth": plain(first.ground_truth),
        "prompt": [message_json(message, pictures) for message in first.prompt],
        "pass_at_k": {str(k): pass_at_k(len(scored), sum(scored), k) for k in _powers(len(scored))},
        "size": len(rows),
        "mean": statistics.fmean(rewards) if rewards else None,
        "std": statistics.pstdev(rewards) if rewards else None,
        "zero_variance": len(rewards) > 1 and len(set(rewards)) == 1,
        "siblings": [
            {**entry, "row": row, "messages": _messages(trajectory, pictures)}
            for entry, row, trajectory in zip(entries, rows, trajectories, strict=False)
        ],
    }


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _messages(trajectory: Trajectory, pictures: Pictures) -> list[dict[str, Any]]:
    """From the policy's first word on; the prompt is the same for all."""
    messages = [message for turn in trajectory.turns for message in (turn.message, *turn.replies)]
    return [message_json(message, pictures) for message in messages]
