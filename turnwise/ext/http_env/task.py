"""Conversations with an environment over HTTP: rows name a sample of a server, which does the rest.

`examples/http_env/server.py` serves two small ones: `guess`, a number to find, and `shop`, with tools.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from turnwise.data.task import Task
from turnwise.data.write import write_rows
from turnwise.errors import ConfigError, DataError
from turnwise.errors.nearest_name import unknown
from turnwise.system.metrics import Reduction
from turnwise.types import Trajectory

NAME = "chat_env"
SPLITS = {"train": (0, 1000), "test": (1000, 1200)}
"""The first index of each, and the one after the last."""
MOST_ROWS = 10_000_000


def row(name: str, index: int, split: str) -> dict[str, Any]:
    """A row that stands for one sample of the server's, whose prompt is shown instead of this one."""
    return {
        "data_source": NAME,
        "prompt": [{"role": "user", "content": f"The environment {name} opens the conversation."}],
        "extra_info": {"split": split, "name": name, "index": index},
    }


def rows(split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The number game of the small server."""
    if split not in SPLITS:
        raise DataError(unknown("split of chat_env", split, SPLITS))
    yield from (row("guess", index, split) for index in range(*SPLITS[split]))


def prepare(
    out: Path,
    *,
    name: Annotated[str, "of the environment, as its server knows it"] = "guess",
    index_start: Annotated[int, "the first sample"] = 0,
    index_end: Annotated[int, "the one after the last"] = 1200,
    test: Annotated[int, "how many of them, from the end, are for testing"] = 200,
) -> dict[Path, int]:
    """Write train.parquet and test.parquet for the samples of any environment server."""
    if not 0 <= index_start < index_end <= index_start + MOST_ROWS or not 0 < test < index_end - index_start:
        raise ConfigError(
            f"chat_env: --index-start {index_start}, --index-end {index_end} and --test {test} must leave rows for "
            f"training and for testing, {MOST_ROWS:,} at most"
        )
    first_test = index_end - test
    parts = {"train": range(index_start, first_test), "test": range(first_test, index_end)}
    return {
        out / f"{split}.parquet": write_rows([row(name, index, split) for index in part], out / f"{split}.parquet")
        for split, part in parts.items()
    }


def metrics(trajectory: Trajectory) -> dict[str, float]:
    """Whether the environment finished the episode, how many messages it answered, and sessions it was left with."""
    record = trajectory.facts.environment
    if record is None:
        return {}
    answered = sum(bool(turn.replies) for turn in trajectory.turns)
    left_open = float(record.left_open is not None)
    return {"finished": float(record.finished), "observations": float(answered), "left_open": left_open}


TASK = Task(
    name=NAME,
    rows=rows,
    prepare=prepare,
    scorer="environment",
    reductions={"finished": Reduction.MEAN, "observations": Reduction.MEAN, "left_open": Reduction.SUM},
    metrics=metrics,
    defaults={
        "rollout.agent": "http_env",
        "rollout.agent_options": {"url": "http://127.0.0.1:18950"},
        "scoring.options": {"environment": {"right": 0.4}},
        "sampling.max_tokens": 64,
    },
)
