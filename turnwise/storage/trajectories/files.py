"""Trajectory files: parquet that gives every trajectory back as it was, and JSONL for reading."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from turnwise.errors import StorageError
from turnwise.ledger import TOKEN_TRAINING
from turnwise.storage.images.reader import (
    ALL_INLINE,
    STORED_NAME,
    Rename,
    from_file,
    in_file,
    inlined,
    run_of,
    with_sources,
)
from turnwise.storage.json_values import clean
from turnwise.storage.trajectories.ledger_columns import ledger_array, origin_counts, place_in, read_ledgers
from turnwise.storage.trajectories.made_rows import with_made
from turnwise.storage.trajectories.older_formats import Row, branch_messages, current
from turnwise.storage.trajectories.rows import check_read, from_words_row, words_row
from turnwise.storage.trajectories.schema import SCHEMA, SCHEMAS, SEGMENTS, VERSION_KEY
from turnwise.system.files import cannot, check_regular, replacing
from turnwise.types import CallRecord, Message, Text, ToolCall, Trajectory, Turn

BATCH = 64
_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "write_page_checksum": True,
    # Images: siblings of a group name the same ones, or hold them, megabytes each, where no run keeps them.
    "use_dictionary": [
        "images.list.element",
        "tools_kwargs",
        *(
            f"{name}.list.element.parts.list.element.value"
            for name in ("prompt", "messages", "turns.list.element.replies")
        ),
    ],
    "dictionary_pagesize_limit": 64 << 20,
    # Token ids and logprobs hardly repeat, but their high bytes do: a fifth smaller than dictionaries, and faster.
    "use_byte_stream_split": [
        f"segments.list.element.{name}.list.element"
        for name in ("token_ids", "logprobs", *(f"training.{name}" for name in TOKEN_TRAINING))
    ],
}
# JSON leaves these as they are, but many readers end a line at them.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def write_trajectories(path: Path, trajectories: Iterable[Trajectory], name: Rename = in_file) -> None:
    """Write a file that `read_trajectories` gives back unchanged; the file appears complete or not at all.

    `name` says what stands for an image (`Album.keep`); without it inline ones stay inline. One exception: a lone
    surrogate, which Arrow cannot hold, becomes U+FFFD.
    """
    with replacing(path) as file:
        with parquet.ParquetWriter(file, SCHEMA, **_OPTIONS) as writer:
            for batch in _batches(with_sources(trajectory, name) for trajectory in trajectories):
                writer.write_batch(_record_batch(batch))


def read_trajectories(path: Path, *, unread: bool = False) -> list[Trajectory]:
    """Every trajectory of a file, with inline images from the run's folder `images/`.

    One that is gone there stays unread, and whoever needs it says so; with `unread` none is looked for.
    """
    with _opened(path) as file:
        source = _sources(path, file, unread)
        return [
            trajectory for batch in file.iter_batches(batch_size=BATCH) for trajectory in _trajectories(batch, source)
        ]


def read_rows(path: Path, rows: Sequence[int], *, unread: bool = False) -> list[Trajectory]:
    """The trajectories at these places of a file, in this order; no others are read. IndexError for a place too far."""
    by_row: dict[int, Trajectory] = {}
    with _opened(path) as file:
        source = _sources(path, file, unread)
        if any(not 0 <= row < file.metadata.num_rows for row in rows):
            raise IndexError(f"{path.name} holds {file.metadata.num_rows} trajectories")
        start = 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            here = sorted({row - start for row in rows if start <= row < start + size})
            if here:
                table = file.read_row_group(group, use_threads=False).take(here).combine_chunks()
                read = [trajectory for batch in table.to_batches() for trajectory in _trajectories(batch, source)]
                by_row |= {start + row: trajectory for row, trajectory in zip(here, read, strict=True)}
            start += size
    return [by_row[row] for row in rows]


def read_sources(path: Path) -> set[str]:
    """The data sources of a file's samples; nothing else is read."""
    with _opened(path) as file:
        batches = file.iter_batches(columns=["data_source"])
        return {source for batch in batches for source in batch.column("data_source").to_pylist()}


def read_texts(path: Path) -> list[list[str]]:
    """The texts of every trajectory's messages, its branches' too, for looking something up."""
    texts = ("text", "parts.list.element.value")
    columns = [f"messages.list.element.{name}" for name in texts]
    with _opened(path) as file:
        if "branches" in file.schema_arrow.names:
            columns += [f"branches.list.element.messages.list.element.{name}" for name in texts]
        else:
            columns.append("artifacts")
        rows = file.read(columns=columns, use_threads=False).to_pylist()
        return [
            [text for message in (*row["messages"], *branch_messages(row)) for text in _texts(message)] for row in rows
        ]


def _texts(message: Row) -> list[str]:
    if message["text"] is not None:
        return [message["text"]]
    values = [part["value"] for part in message["parts"] or ()]
    return [value for value in values if not (value.startswith("data:") or STORED_NAME.fullmatch(value))]


@contextmanager
def _opened(path: Path) -> Iterator[parquet.ParquetFile]:
    """A trajectory file of this version; what goes wrong with it is a StorageError that names it."""
    try:
        check_regular(path)
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _check_schema(path, file.schema_arrow)
            yield file
    except OSError as error:
        raise cannot("read", path, error) from error
    except (pa.ArrowException, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"cannot read {path}: it is damaged or cut short: {error}") from error


def write_jsonl(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one readable object a line; token ids and logprobs are left to the parquet file."""
    with replacing(path) as file:
        for trajectory in trajectories:
            line = _json_line(_readable(trajectory))
            file.write((line + "\n").encode("utf-8", "backslashreplace"))


def _batches(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    trajectories = iter(trajectories)
    while batch := list(itertools.islice(trajectories, BATCH)):
        yield batch


def words_batch(trajectories: Sequence[Trajectory]) -> Any:
    """Rows of trajectories, all columns but the tokens."""
    rows, schema = [words_row(trajectory) for trajectory in trajectories], SCHEMA.remove(SEGMENTS)
    try:
        return pa.RecordBatch.from_pylist(rows, schema=schema)
    except UnicodeEncodeError:
        return pa.RecordBatch.from_pylist([clean(row) for row in rows], schema=schema)


def _record_batch(trajectories: list[Trajectory]) -> Any:
    columns = with_made(trajectories, words_batch).columns
    columns.insert(SEGMENTS, ledger_array([trajectory.segments for trajectory in trajectories]))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _sources(path: Path, file: parquet.ParquetFile, unread: bool) -> Rename:
    """What the images that a file speaks of are called in memory."""
    if file.schema_arrow.metadata[VERSION_KEY].decode() in ALL_INLINE:
        return str
    inline = inlined(run_of(path))
    return from_file if unread else lambda value: inline(from_file(value))


def _trajectories(batch: Any, source: Rename) -> Iterator[Trajectory]:
    rows = [current(row) for row in batch.drop_columns(["segments"]).to_pylist()]
    read = [from_words_row(row) for row in rows]
    segments = read_ledgers(batch.column(SEGMENTS), [trajectory.every_turn for trajectory in read])
    for trajectory, ledgers, row in zip(read, segments, rows, strict=True):
        trajectory.segments = ledgers
        place_in(ledgers, row["media"])
        check_read(trajectory)
        yield with_sources(trajectory, source)


def _check_schema(path: Path, schema: Any) -> None:
    value = (schema.metadata or {}).get(VERSION_KEY)
    if value is None:
        raise StorageError(f"{path} is not a trajectory file")
    version = value.decode("utf-8", "replace")
    if version not in SCHEMAS:
        reads = f"this version reads {min(SCHEMAS)} to {max(SCHEMAS)}"
        older = version.isdecimal() and int(version) < int(min(SCHEMAS))
        why = "record the run anew: nothing converts it" if older else "a newer version wrote it: update turnwise"
        raise StorageError(f"{path} has trajectory format {version}; {reads}; {why}")
    if not schema.equals(SCHEMAS[version]):
        raise StorageError(f"{path} says it has trajectory format {version}, but its columns are others")


def _readable(trajectory: Trajectory) -> Row:
    origins = origin_counts(trajectory.segments)
    return {
        "id": trajectory.sample.id,
        "data_source": trajectory.sample.data_source,
        "step": trajectory.step,
        "sibling": trajectory.sibling,
        "stop_reason": trajectory.stop_reason.value,
        "failure": trajectory.failure,
        "reward": trajectory.reward,
        "parts": trajectory.parts,
        "remarks": [asdict(remark) for remark in trajectory.remarks],
        "ground_truth": trajectory.sample.ground_truth,
        "messages": [_readable_message(message) for message in trajectory.messages],
        "turns": [_readable_turn(turn) for turn in trajectory.turns],
        "branches": [
            {
                "name": branch.name,
                "trained": branch.trained,
                "messages": [_readable_message(message) for message in branch.messages],
                "turns": [_readable_turn(turn) for turn in branch.turns],
            }
            for branch in trajectory.branches
        ],
        "tokens": {origin.name.lower(): count for origin, count in origins.items() if count},
        "seconds": trajectory.seconds,
        "facts": asdict(trajectory.facts),
        "artifacts": trajectory.artifacts,
    }


def _readable_message(message: Message) -> Row:
    content = message.content
    if not isinstance(content, str):
        content = [  # type: ignore[assignment]
            {"type": "text", "text": part.text} if isinstance(part, Text) else {"type": "image", "image": part.source}
            for part in content
        ]
    entry: Row = {"role": message.role.value, "content": content}
    if message.tool_calls:
        entry["tool_calls"] = [_readable_call(call) for call in message.tool_calls]
    extra = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning": message.reasoning}
    return entry | {name: value for name, value in extra.items() if value is not None}


def _readable_call(call: ToolCall) -> Row:
    entry: Row = {"id": call.id, "name": call.name, "arguments": call.arguments}
    return entry if call.problem is None else entry | {"problem": call.problem}


def _readable_turn(turn: Turn) -> Row:
    return {
        "index": turn.index,
        "finish_reason": turn.finish_reason.value,
        "policy_version": turn.policy_version,
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "calls": [_readable_record(record) for record in turn.calls],
        "user_score": turn.user_score,
        "scores": turn.scores,
        "generate_seconds": turn.generate_seconds,
        "reply_seconds": turn.reply_seconds,
    }


def _readable_record(record: CallRecord) -> Row:
    entry = _readable_call(record.call) | {"status": record.status.value, "seconds": record.seconds}
    return entry | {"truncated": record.truncated, "score": record.score, "info": record.info}


def _json_line(entry: Row) -> str:
    """One line of strict JSON. NaN and infinities, which JSON lacks, become text; so does what is no JSON value."""
    try:
        line = json.dumps(entry, ensure_ascii=False, default=repr)
        if "NaN" in line or "Infinity" in line:
            line = json.dumps(json.loads(line, parse_constant=str), ensure_ascii=False)
        return line.translate(_LINE_ENDS)
    except RecursionError:
        short = {name: entry[name] for name in ("id", "data_source", "step", "sibling", "reward", "stop_reason")}
        return json.dumps(short | {"lost": "nested too deeply to write"})
    except (TypeError, ValueError) as error:
        raise StorageError(f"sample {entry['id']!r} cannot be written as JSON: {error}") from error
