"""Rows of trajectory files that another process made where the episodes were played; what came later is put in here.

A row is known by its trajectory, the object itself: a changed copy of it, as one with other names for images, has none.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from turnwise.errors import StorageError
from turnwise.storage.images.reader import with_sources
from turnwise.storage.trajectories.rows import LATER, later_row
from turnwise.storage.trajectories.schema import SCHEMA
from turnwise.types import Trajectory

Build = Callable[[Sequence[Trajectory]], Any]
"""Rows of trajectories, all columns but the tokens."""
_LATER = pa.schema([SCHEMA.field(name) for name in LATER])


@dataclass(frozen=True, slots=True)
class _MadeRow:
    trajectory: "weakref.ref[Trajectory]"
    batch: Any
    number: int
    entry: Mapping[str, Any]
    """What the index says of it, as far as that does not change any more."""


_made: dict[int, _MadeRow] = {}
"""By the id of their trajectory, while it lives."""


def is_plain(trajectory: Trajectory) -> bool:
    """Whether nothing but LATER and the tokens of its row can change: it has no image that would be renamed or kept."""
    return with_sources(trajectory, str) is trajectory and not any(
        "images" in one.info for one in trajectory.every_call
    )


def encoded(trajectories: Sequence[Trajectory], build: Build) -> bytes | None:
    """Their rows for another process; None where that one has to make them, and to say what is wrong with them."""
    try:
        batch = build(trajectories)
    except StorageError:
        return None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def keep(trajectories: Sequence[Trajectory], content: bytes, entries: Sequence[Mapping[str, Any]]) -> None:
    """These trajectories have such rows and entries."""
    batch = pa.ipc.open_stream(content).read_next_batch()
    for number, (trajectory, entry) in enumerate(zip(trajectories, entries, strict=True)):
        name = id(trajectory)
        alive = weakref.ref(trajectory, lambda _, name=name: _made.pop(name, None))  # type: ignore[misc]
        _made[name] = _MadeRow(alive, batch, number, entry)


def entry_of(trajectory: Trajectory) -> Mapping[str, Any] | None:
    """What was said of it for the index, where its row was made."""
    made = _made.get(id(trajectory))
    return None if made is None else made.entry


def with_made(trajectories: Sequence[Trajectory], build: Build) -> Any:
    """One batch for all: rows that were made with what came later in them, the others built."""
    made = [_made.get(id(trajectory)) for trajectory in trajectories]
    others = [trajectory for trajectory, row in zip(trajectories, made, strict=True) if row is None]
    if len(others) == len(trajectories):
        return build(trajectories)
    batches = {id(row.batch): row.batch for row in made if row is not None}
    starts, start = {}, 0
    for name, batch in batches.items():
        starts[name], start = start, start + batch.num_rows
    built = iter(range(start, start + len(others)))
    places = [next(built) if row is None else starts[id(row.batch)] + row.number for row in made]
    table = pa.Table.from_batches([*batches.values(), *([build(others)] if others else [])])
    (rows,) = table.take(places).combine_chunks().to_batches()
    later = pa.RecordBatch.from_pylist([later_row(trajectory) for trajectory in trajectories], schema=_LATER)
    columns = [later.column(name) if name in LATER else rows.column(name) for name in rows.schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)
