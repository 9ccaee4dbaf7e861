"""Ledgers as Arrow columns and back, array by array: no number of a token becomes a Python object."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from turnwise.errors import StorageError
from turnwise.ledger import NO_VERSION, TOKEN_TRAINING, Ledger, MediaSpan, Origin, TokenTrainingData
from turnwise.system.image_bytes import recorded
from turnwise.types import Turn

_TRAINING = pa.struct([(name, pa.list_(pa.float32())) for name in TOKEN_TRAINING])
LEDGER = pa.struct(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("origins", pa.list_(pa.int8())),
        ("turns", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("training", _TRAINING),
    ]
)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_COLUMNS = ("token_ids", "origins", "turns", "logprobs", "versions")


def _older(training: str) -> Any:
    """Without versions, which were those of the turns, with log-probs in doubles, and what training found out last."""
    columns = [LEDGER.field(name) for name in ("token_ids", "origins", "turns")]
    return pa.struct([*columns, ("logprobs", pa.list_(pa.float64())), (training, _TRAINING)])


LEDGERS = {"7": LEDGER, "6": LEDGER, "5": LEDGER, "4": _older("training"), "3": _older("learned")}
"""A ledger of every format that is read."""

Lists = tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]
"""Offsets, the values of all lists in a row, and which lists are there."""


def ledger_array(segments: Sequence[Sequence[Ledger]]) -> Any:
    """The ledgers of several trajectories as one column."""
    ledgers = [ledger for several in segments for ledger in several]
    lengths = [len(ledger) for ledger in ledgers]
    parts = [
        _list_array(lengths, [getattr(ledger, name) for ledger in ledgers], LEDGER.field(name).type.value_type)
        for name in _COLUMNS
    ]
    struct = pa.StructArray.from_arrays([*parts, _training_array(ledgers)], fields=list(LEDGER))
    return pa.ListArray.from_arrays(_offsets([len(several) for several in segments]), struct)


def _training_array(ledgers: Sequence[Ledger]) -> Any:
    columns = []
    for name in TOKEN_TRAINING:
        arrays = [None if ledger.training is None else getattr(ledger.training, name) for ledger in ledgers]
        lengths = [0 if array is None else len(array) for array in arrays]
        missing = np.array([array is None for array in arrays], dtype=bool)
        columns.append(_list_array(lengths, [values for values in arrays if values is not None], pa.float32(), missing))
    without = pa.array([ledger.training is None for ledger in ledgers], type=pa.bool_())
    return pa.StructArray.from_arrays(columns, fields=list(_TRAINING), mask=without)


def _list_array(
    lengths: Sequence[int], arrays: Sequence[NDArray[Any]], kind: Any, missing: NDArray[np.bool_] | None = None
) -> Any:
    values = pa.array(np.concatenate(arrays)) if arrays else pa.array([], type=kind)
    # The cast refuses what does not fit.
    return pa.ListArray.from_arrays(
        _offsets(lengths), values.cast(kind), mask=None if missing is None else pa.array(missing)
    )


def _offsets(lengths: Sequence[int]) -> Any:
    return pa.array(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int32))


def read_ledgers(column: Any, turns: Sequence[Sequence[Turn]]) -> list[list[Ledger]]:
    """The ledgers of each row of such a column; `turns` are the rows' own, for versions that an older format lacks."""
    struct = column.flatten()
    *parts, training = struct.flatten()
    lists = {field.name: _lists(part) for field, part in zip(struct.type, parts, strict=False)}
    training_lists = dict(zip(TOKEN_TRAINING, (_lists(part) for part in training.flatten()), strict=True))
    trained = training.is_valid().to_numpy(zero_copy_only=False)
    if column.null_count or struct.null_count:
        raise ValueError("a trajectory whose ledgers are missing")
    ends = (column.offsets.to_numpy() - column.offsets[0].as_py()).tolist()
    return [
        [
            Ledger.of(
                **_versioned({name: _one(part, number) for name, part in lists.items()}, row_turns),
                training=TokenTrainingData(**{name: _one(part, number) for name, part in training_lists.items()})
                if trained[number]
                else None,
            )
            for number in range(start, end)
        ]
        for (start, end), row_turns in zip(pairwise(ends), turns, strict=True)
    ]


def _versioned(columns: dict[str, NDArray[Any] | None], turns: Sequence[Turn]) -> dict[str, Any]:
    if "versions" not in columns:
        columns["versions"] = _versions_of_turns(columns["origins"], columns["turns"], turns)
    return columns


def _versions_of_turns(origins: Any, places: Any, turns: Sequence[Turn]) -> NDArray[np.int32]:
    """Each policy token under the version of its turn; NO_VERSION where no turn tells."""
    versions = np.full(len(places), NO_VERSION, dtype=np.int64)
    for turn in turns:
        versions[(places == turn.index) & (origins == Origin.POLICY.value)] = turn.policy_version
    return versions.astype(np.int32)


def _lists(array: Any) -> Lists:
    offsets, values = array.offsets.to_numpy(), array.values.to_numpy(zero_copy_only=True)
    return offsets, values, array.is_valid().to_numpy(zero_copy_only=False)


def _one(lists: Lists, number: int) -> NDArray[Any] | None:
    offsets, values, there = lists
    return values[offsets[number] : offsets[number + 1]] if there[number] else None


# --- as plain JSON values, for other processes ------------------------------------------------------------------------


def ledger_row(ledger: Ledger) -> dict[str, Any]:
    """A ledger as a row of plain lists, for JSON."""
    row: dict[str, Any] = {name: getattr(ledger, name).tolist() for name in _COLUMNS}
    return row | {"training": None if ledger.training is None else dict(_training_lists(ledger.training))}


def _training_lists(training: TokenTrainingData) -> Iterator[tuple[str, list[float] | None]]:
    for name in TOKEN_TRAINING:
        values = getattr(training, name)
        yield name, None if values is None else values.tolist()


def ledger_of(row: dict[str, Any]) -> Ledger:
    """The ledger of such a row; ValueError for one this code did not write."""
    training = row["training"] and TokenTrainingData(**row["training"])
    return Ledger.of(**{name: row[name] for name in _COLUMNS}, training=training)


MEDIA = pa.struct([("digest", pa.string()), ("start", pa.int32()), ("tokens", pa.int32())])
"""An image among the tokens of a ledger: its digest, its first token and how many it has."""


def media_rows(ledgers: Sequence[Ledger]) -> list[list[dict[str, Any]]]:
    """The images of each ledger; nothing where no ledger has any."""
    if not any(ledger.media for ledger in ledgers):
        return []
    return [
        [{"digest": span.media.digest, "start": span.start, "tokens": len(span.media.token_ids)} for span in one.media]
        for one in ledgers
    ]


def place_in(ledgers: Sequence[Ledger], rows: Any) -> None:
    """Put images at their places; ValueError for rows this code did not write."""
    if not isinstance(rows, list | tuple) or len(rows) not in (0, len(ledgers)):
        raise ValueError("images of other ledgers")
    for ledger, entries in zip(ledgers, rows, strict=False):
        placed = []
        for entry in entries:
            match entry:
                case {"digest": str(digest), "start": int(start), "tokens": int(length)} if _DIGEST.fullmatch(
                    digest
                ) and 0 <= start < start + length <= len(ledger):
                    block = ledger.token_ids[start : start + length]
                    placed.append(MediaSpan(recorded(digest, block), start))
                case _:
                    raise ValueError("an image without a name or a place among the tokens")
        ledger.place_at(placed)


def check_training(ledger: Ledger) -> None:
    """StorageError for training data that are not as long as the ledger."""
    for name in TOKEN_TRAINING if ledger.training else ():
        values = getattr(ledger.training, name)
        if values is not None and len(values) != len(ledger):
            raise StorageError(f"{len(values)} training {name} for {len(ledger)} tokens")


def origin_counts(segments: Sequence[Ledger]) -> dict[Origin, int]:
    """Tokens of several ledgers by who wrote them, every origin named."""
    counts = (np.bincount(ledger.origins, minlength=len(Origin)) for ledger in segments)
    totals = sum(counts, start=np.zeros(len(Origin), dtype=np.int64))
    return dict(zip(Origin, totals.tolist(), strict=True))
