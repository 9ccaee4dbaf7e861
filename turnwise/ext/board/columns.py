"""The entries of many trajectories in memory: numbers as arrays, texts as numbers of a pool, one snapshot at a time."""

import enum
import functools
import math
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from turnwise.ext.board.json_values import clean_text
from turnwise.storage.index import COLUMNS, Entry, Shard, ToolUse

Array = npt.NDArray[Any]
SPLITS = ("train", "eval", "greedy", "reused", "probe")
GROUPED = ("group_mean", "group_std", "group_size")
"""Of the rewards of all rows with the same file and sample; computed when first asked for."""
_UNKNOWN = -1
_FILE = re.compile(
    r"(?P<shard>(?P<folder>trajectories|reused|eval|probes)/[A-Za-z0-9][\w.-]{0,150})\.parquet", re.ASCII
)
_STEP = re.compile(r"step_(\d{1,12})", re.ASCII)


class ColumnKind(enum.Enum):
    """What a column of the table holds, and so how it is stored."""

    NUMBER = "number"
    """float64, nan for null."""
    COUNT = "count"
    TRUTH = "truth"
    """int8: 0, 1, -1 for null."""
    TEXT = "text"
    """int32 codes of a pool, -1 for null."""
    NAMES = "names"
    """Like TEXT; a pool of tuples."""
    PARTS = "parts"


def _kind(hint: Any) -> ColumnKind:
    inner = [entry for entry in typing.get_args(hint) if entry is not type(None)]
    plain = typing.get_origin(hint) or hint
    kinds = {
        float: ColumnKind.NUMBER,
        int: ColumnKind.COUNT,
        bool: ColumnKind.TRUTH,
        str: ColumnKind.TEXT,
        list: ColumnKind.NAMES,
        dict: ColumnKind.PARTS,
    }
    return kinds[plain] if plain in kinds else kinds[inner[0]]


_HINTS = typing.get_type_hints(Entry)
KINDS = {name: _kind(_HINTS[name]) for name in COLUMNS}
NULLABLE = {name for name in COLUMNS if type(None) in typing.get_args(_HINTS[name])}
_WIDE = {"step", "policy_version"}
_PLAIN = [name for name in COLUMNS if KINDS[name] is not ColumnKind.PARTS]
POOLED = [name for name in COLUMNS if KINDS[name] in (ColumnKind.TEXT, ColumnKind.NAMES)]


class ValuePool:
    """Different values of a column, each once. It only grows, so a snapshot's codes stay valid while others read."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._codes: dict[Any, int] = {}
        self._lowered: list[str] = []
        self._order: list[int] = []
        self._ranks: Array = np.zeros(0, dtype=np.int64)

    def codes(self, values: Iterable[Any]) -> Array:
        """The codes of values, new ones taken in; -1 for None."""
        by_value, codes = self._codes, []
        for value in values:
            code = _UNKNOWN if value is None else by_value.get(value)
            if code is None:
                code = by_value[value] = len(self.values)
                self.values.append(value)
            codes.append(code)
        return np.array(codes, dtype=np.int32)

    def code(self, value: Any) -> int | None:
        """The code of a value; None for one that no row has."""
        return self._codes.get(value)

    def taking(self, other: "ValuePool", codes: Array) -> Array:
        """Codes of another pool in this one, which takes in the values that they name and no others."""
        named = np.unique(codes[codes != _UNKNOWN])
        renamed = np.full(len(other.values) + 1, _UNKNOWN, dtype=np.int32)  # the last is for null, code -1
        renamed[named] = self.codes([other.values[code] for code in named.tolist()])
        return renamed[codes]

    def lowered(self) -> list[str]:
        """The texts in lower case, for searching."""
        texts = self._lowered
        if len(texts) < len(self.values):  # a new list: another thread may be reading the old one
            texts = texts + [value.lower() for value in self.values[len(texts) :]]
            self._lowered = texts
        return texts

    def ranks(self) -> Array:
        """The place of each value in their order."""
        if len(self._ranks) != len(self.values):
            values, previous = list(self.values), self._order
            # What was in order stays so: Python's sort is quick on a long sorted stretch and a few new values.
            order = sorted([*previous, *range(len(previous), len(values))], key=values.__getitem__)
            ranks = np.empty(len(values), dtype=np.int64)
            ranks[order] = np.arange(len(values))
            self._order, self._ranks = order, ranks
            return ranks
        return self._ranks


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One trajectory file: `ShardInfo("trajectories/step_000012", "train", 12, 64)`."""

    shard: str
    split: str
    step: int
    size: int


def shard_name(file: str) -> str | None:
    """`trajectories/step_000012` of a file a run may hold; None for any other name, whoever wrote it."""
    match = _FILE.fullmatch(file)
    return match["shard"] if match else None


def info_of(shard: str, size: int, steps: Sequence[int]) -> ShardInfo:
    """What a file's name says of it; its step is that of its trajectories when the name has none."""
    folder, _, name = shard.partition("/")
    folders = {"trajectories": "train", "reused": "reused", "probes": "probe"}
    split = folders.get(folder, "greedy" if name.startswith("greedy_") else "eval")
    match = _STEP.search(name)
    return ShardInfo(shard, split, int(match[1]) if match else max(steps, default=0), size)


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one shard as arrays, ready to be joined to a snapshot."""

    info: ShardInfo
    columns: dict[str, Array]
    part_rows: Array
    part_codes: Array
    part_values: Array
    tools: dict[str, ToolUse]


class Pools:
    """The pools of all text columns, and of the names of reward parts."""

    def __init__(self) -> None:
        self.by_column = {name: ValuePool() for name in POOLED}
        self.parts = ValuePool()

    def block(self, shard: Shard) -> Block:
        """A shard as arrays; ValueError, TypeError or OverflowError when its values are not what a column holds."""
        name = shard_name(shard.file)
        if name is None:
            raise ValueError(f"{shard.file[:80]!r} is not the name of a trajectory file")
        info = info_of(name, shard.size, shard.columns["step"])
        columns = {column: self._column(column, shard.columns[column]) for column in _PLAIN}
        if any(array.shape != (shard.size,) for array in columns.values()):
            raise ValueError("a column is not a plain list")
        rows, names, values = [], [], []
        for row, parts in enumerate(shard.columns["parts"]):
            for part, value in parts.items():
                if math.isfinite(value):
                    rows.append(row)
                    names.append(_text(part))
                    values.append(value)
        codes = self.parts.codes(names)
        return Block(info, columns, np.array(rows, np.int64), codes, np.array(values, np.float64), shard.tools)

    def _column(self, name: str, values: list[Any]) -> Array:
        match KINDS[name]:
            case ColumnKind.TEXT:
                return self.by_column[name].codes([None if value is None else _text(value) for value in values])
            case ColumnKind.NAMES:
                return self.by_column[name].codes([tuple(_text(text) for text in value) for value in values])
            case ColumnKind.TRUTH:
                return np.array([_UNKNOWN if value is None else int(value) for value in values], dtype=np.int8)
            case ColumnKind.COUNT:
                return np.array(values, dtype=np.int64 if name in _WIDE else np.int32)
            case _:
                return np.array(values, dtype=np.float64)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is not a text")
    return clean_text(value)


@dataclass(frozen=True)
class Snapshot:
    """All rows at one moment, in the order of their step, file and place; never changed once made."""

    pools: Pools
    infos: tuple[ShardInfo, ...] = ()
    uses: tuple[Mapping[str, ToolUse], ...] = ()
    columns: Mapping[str, Array] = field(default_factory=lambda: {name: _empty(name) for name in _PLAIN})
    part_rows: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    part_codes: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    part_values: Array = field(default_factory=lambda: np.zeros(0, dtype=np.float64))

    @property
    def snapshot(self) -> "Snapshot":
        """Itself, so that what reads a table's snapshot reads one as well."""
        return self

    @property
    def size(self) -> int:
        """How many rows the snapshot has."""
        return len(self.columns["step"])

    @functools.cached_property
    def starts(self) -> Array:
        """Where each shard's rows begin, and the end."""
        return np.concatenate([[0], np.cumsum([info.size for info in self.infos], dtype=np.int64)]).astype(np.int64)

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """The index of each shard, by its file name."""
        return {info.shard: number for number, info in enumerate(self.infos)}

    @functools.cached_property
    def shard_index(self) -> Array:
        return np.repeat(np.arange(len(self.infos), dtype=np.int32), np.diff(self.starts))

    @functools.cached_property
    def split(self) -> Array:
        """The index in SPLITS of each row's split."""
        codes = np.array([SPLITS.index(info.split) for info in self.infos], dtype=np.int8)
        return codes[self.shard_index]

    @functools.cached_property
    def newest(self) -> Array:
        """All rows, those of the last step first."""
        return np.argsort(-self.columns["step"], kind="stable")

    @functools.cached_property
    def part_names(self) -> list[str]:
        return [self.pools.parts.values[code] for code in np.unique(self.part_codes)]

    def part(self, name: str) -> Array:
        """A reward part by row, nan where a row has none; KeyError when no row has it."""
        if name not in self.part_names:
            raise KeyError(name)
        values = np.full(self.size, np.nan)
        here = self.part_codes == self.pools.parts.codes([name])[0]
        values[self.part_rows[here]] = self.part_values[here]
        return values

    def parts_of(self, row: int) -> dict[str, float]:
        """The reward parts of one row, in the order they were recorded."""
        low, high = np.searchsorted(self.part_rows, [row, row + 1])
        names = (self.pools.parts.values[code] for code in self.part_codes[low:high])
        return dict(zip(names, self.part_values[low:high].tolist(), strict=True))

    @functools.cached_property
    def groups(self) -> dict[str, Array]:
        """Mean, deviation and size of each row's group; nan where nothing in it has a reward."""
        if not self.size:
            return {name: np.zeros(0) for name in GROUPED}
        key = self.shard_index.astype(np.int64) * (len(self.pools.by_column["sample_id"].values) + 1)
        _, group, sizes = np.unique(key + self.columns["sample_id"], return_inverse=True, return_counts=True)
        reward = self.columns["reward"]
        finite = np.isfinite(reward)
        count = np.bincount(group[finite], minlength=len(sizes))
        low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
        np.minimum.at(low, group[finite], reward[finite])
        np.maximum.at(high, group[finite], reward[finite])
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            mean = np.bincount(group[finite], weights=reward[finite], minlength=len(sizes)) / count
            spread = np.bincount(group[finite], weights=(reward - mean[group])[finite] ** 2, minlength=len(sizes))
            std = np.sqrt(spread / count)
        std[low == high] = 0.0  # exactly, whatever the mean was rounded to
        return {"group_mean": mean[group], "group_std": std[group], "group_size": sizes[group].astype(np.float64)}

    def with_blocks(self, blocks: Mapping[str, Block]) -> "Snapshot":
        """A new snapshot in which these shards stand in place of those of the same name."""
        unchanged = [number for number, info in enumerate(self.infos) if info.shard not in blocks]
        rows = [(self.infos[number], int(self.starts[number]), self.uses[number]) for number in unchanged]
        end = self.size
        for block in blocks.values():
            rows.append((block.info, end, block.tools))
            end += block.info.size
        rows.sort(key=lambda entry: (entry[0].step, entry[0].shard))
        take = np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(s, s + info.size) for info, s, _ in rows)])
        in_order = len(take) == end and bool((take == np.arange(end)).all())
        columns = {}
        for name in _PLAIN:
            joined = np.concatenate([self.columns[name], *(block.columns[name] for block in blocks.values())])
            columns[name] = joined if in_order else joined[take]
        parts = self._merged_parts(list(blocks.values()), take, end)
        return Snapshot(self.pools, tuple(r[0] for r in rows), tuple(r[2] for r in rows), columns, *parts)

    def without_first(self, shards: int) -> "Snapshot":
        """A new snapshot without so many of the oldest shards, and without the texts that only they held."""
        start, pools = int(self.starts[shards]), Pools()
        columns = {
            name: pools.by_column[name].taking(self.pools.by_column[name], values[start:])
            if name in pools.by_column
            else values[start:].copy()
            for name, values in self.columns.items()
        }
        remaining = self.part_rows >= start
        parts = pools.parts.taking(self.pools.parts, self.part_codes[remaining])
        return Snapshot(
            pools, self.infos[shards:], self.uses[shards:], columns,
            self.part_rows[remaining] - start, parts, self.part_values[remaining],
        )  # fmt: skip

    def _merged_parts(self, blocks: list[Block], take: Array, end: int) -> tuple[Array, Array, Array]:
        """Reward parts by their new rows; those of rows that are gone are left out."""
        ends = np.cumsum([self.size, *(block.info.size for block in blocks)])
        rows = np.concatenate(
            [self.part_rows, *(block.part_rows + start for block, start in zip(blocks, ends[:-1], strict=True))]
        )
        codes = np.concatenate([self.part_codes, *(block.part_codes for block in blocks)])
        values = np.concatenate([self.part_values, *(block.part_values for block in blocks)])
        now = np.full(end, _UNKNOWN, dtype=np.int64)
        now[take] = np.arange(len(take))
        rows = now[rows]
        order = np.argsort(rows, kind="stable")
        order = order[np.searchsorted(rows[order], 0) :]
        return rows[order], codes[order], values[order]

    def value(self, name: str, row: int) -> Any:
        """One field of one row as JSON has it."""
        if KINDS[name] is ColumnKind.PARTS:
            return self.parts_of(row)
        cell = self.columns[name][row].item()
        match KINDS[name]:
            case ColumnKind.TEXT | ColumnKind.NAMES:
                value = None if cell == _UNKNOWN else self.pools.by_column[name].values[cell]
                return list(value) if isinstance(value, tuple) else value
            case ColumnKind.TRUTH:
                return None if cell == _UNKNOWN else bool(cell)
            case ColumnKind.NUMBER:
                return cell if math.isfinite(cell) else None
            case _:
                return cell


def _empty(name: str) -> Array:
    kinds = {
        ColumnKind.NUMBER: np.float64,
        ColumnKind.TRUTH: np.int8,
        ColumnKind.COUNT: np.int64 if name in _WIDE else np.int32,
    }
    return np.zeros(0, dtype=kinds.get(KINDS[name], np.int32))
