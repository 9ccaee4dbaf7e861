"""The newest trajectories of a run as one table in memory, kept up to date, and a page of it."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.errors.nearest_name import unknown
from turnwise.ext.board.columns import (
    GROUPED,
    KINDS,
    NULLABLE,
    SPLITS,
    Array,
    Block,
    ColumnKind,
    Pools,
    ShardInfo,
    Snapshot,
    info_of,
    shard_name,
)
from turnwise.ext.board.feed import Feed
from turnwise.ext.board.filters import BadFilter, compile
from turnwise.storage.index import COLUMNS, Shard, ToolUse
from turnwise.storage.run_dir import RunDir

__all__ = ["SPLITS", "NotThere", "ShardInfo", "Table", "listing"]

MOST = 250_000
"""Trajectories held in memory, some 1 kB each; of a longer run the oldest are left out, which its pages say."""
TIME_SLICE = 0.15
"""Seconds one refresh may take for reading; what is left is read by the next."""
_SEARCHED = ("question", "answer", "sample_id")
_LONGEST_SEARCH = 500
PART = "parts."


class NotThere(LookupError):
    """A trajectory, group or image that the run does not have; `title` is what a page says above the reason."""

    def __init__(self, reason: str, title: str = "No such trajectory") -> None:
        super().__init__(reason)
        self.title = title

    def __str__(self) -> str:
        return str(self.args[0])


class Table:
    """The entries of a run's newest trajectories. Reading works on a snapshot: other threads may refresh meanwhile."""

    def __init__(self, run: RunDir, most: int = MOST) -> None:
        self.run = run
        self._most = most
        self._left_out: dict[str, ShardInfo] = {}
        self._apart = Snapshot(Pools())
        """The one file that was left out and last asked for."""
        self._feed = Feed(run)
        self._lock = threading.Lock()
        self._snapshot = Snapshot(Pools())
        self._left: tuple[int, list[dict[str, str]]] = (0, [])

    # --- reading ----------------------------------------------------------------------------------------------------

    def refresh(self, seconds: float | None = TIME_SLICE) -> bool:
        """Take in what is new, for so many seconds at most (None: all of it); True when anything changed."""
        with self._lock:
            void = self._poll()
            changed = self._take(self._feed.shards(seconds))
            return self._publish_progress() or changed or void

    def _publish_progress(self) -> bool:
        """Publish what is left to read and what could not be read; True when that changed."""
        before, self._left = self._left, (self._feed.pending, self._feed.damaged)
        return before != self._left

    def _poll(self) -> bool:
        void = self._feed.poll()
        if void:
            self._snapshot, self._left_out, self._apart = Snapshot(Pools()), {}, Snapshot(Pools())
        return void

    def _take(self, shards: Iterator[Shard]) -> bool:
        blocks: dict[str, Block] = {}
        before, left_out, rows = self._snapshot, len(self._left_out), 0
        for shard in shards:
            if self._is_too_old(shard):
                continue
            try:
                block = self._snapshot.pools.block(shard)
            except (ValueError, TypeError, OverflowError, AttributeError) as error:  # a line nobody of us wrote
                self._feed.forget(shard.file, f"its line of the index cannot be read: {error}")
                continue
            blocks[block.info.shard] = block
            rows += block.info.size
            if rows > self._most // 10:  # never much more than the bound, however much there is to read at once
                self._snapshot = self._trimmed(self._snapshot.with_blocks(blocks))
                blocks, rows = {}, 0
        if blocks:
            self._snapshot = self._trimmed(self._snapshot.with_blocks(blocks))
        return self._snapshot is not before or len(self._left_out) > left_out

    def _is_too_old(self, shard: Shard) -> bool:
        """Whether a file is older than all that are held while no more can be; it is then counted and passed over."""
        name, infos = shard_name(shard.file), self._snapshot.infos
        if name is None or not self._left_out or name in self._snapshot.places:
            return False
        info = info_of(name, shard.size, shard.columns["step"])
        if infos and (info.step, name) >= (infos[0].step, infos[0].shard):
            return False
        self._left_out[name] = info
        return True

    def _trimmed(self, snapshot: Snapshot) -> Snapshot:
        """Within the bound, by leaving out the oldest files; a tenth more than needed, since trimming copies it all."""
        if snapshot.size <= self._most:
            return snapshot
        over = snapshot.size - self._most * 9 // 10
        first = min(int(np.searchsorted(snapshot.starts, over)), len(snapshot.infos) - 1)
        self._left_out |= {info.shard: info for info in snapshot.infos[:first]}
        return snapshot.without_first(first)

    def _find(self, shard: str) -> tuple[Snapshot, int]:
        """The snapshot with a shard, and its number there; one not read yet is read now: links open at once."""
        if shard not in self._snapshot.places and self.pending:
            with self._lock:
                self._poll()
                self._take(self._feed.from_lines())
                file = f"{shard}.parquet"
                if shard not in self._snapshot.places and self._feed.is_waiting(file):
                    rows = self._feed.shard_from_file(file)
                    self._take(iter([rows] if rows is not None else []))
                self._publish_progress()
        snapshot = self._snapshot
        if shard in self._left_out:
            snapshot = self._read_apart(shard)
        number = snapshot.places.get(shard)
        if number is None:
            raise NotThere(f"This run has no trajectory file {shard[:120]!r}.")
        return snapshot, number

    def _read_apart(self, shard: str) -> Snapshot:
        """A file that was left out, by itself: its links still open."""
        with self._lock:
            if shard not in self._apart.places:
                rows = self._feed.shard_from_file(f"{shard}.parquet")
                blocks = {} if rows is None else {shard: (pools := Pools()).block(rows)}
                self._apart = Snapshot(pools).with_blocks(blocks) if blocks else Snapshot(Pools())
            return self._apart

    # --- what there is ----------------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """All rows as they are now; a caller that reads several columns takes one and keeps to it."""
        return self._snapshot

    @property
    def pending(self) -> int:
        """How many files are still to be read."""
        return self._left[0]

    @property
    def damaged(self) -> list[dict[str, str]]:
        """Files that could not be read: {"file", "reason"}."""
        return self._left[1]

    @property
    def size(self) -> int:
        """How many trajectories the table has."""
        return self._snapshot.size

    @property
    def left_out(self) -> dict[str, int] | None:
        """What does not fit: {"trajectories", "files", "step"}, `step` being the last; None when all is here."""
        infos = list(self._left_out.values())
        if not infos:
            return None
        count = sum(info.size for info in infos)
        return {"trajectories": count, "files": len(infos), "step": max(info.step for info in infos)}

    def shards(self) -> list[ShardInfo]:
        """The files by step; `shard_index` counts in this order."""
        return list(self._snapshot.infos)

    def path(self, shard: str) -> Path:
        """Where a known shard lies; NotThere for any other name, and for a file that leads out of the run."""
        self._find(shard)
        path = self.run.path / f"{shard}.parquet"
        if not path.resolve().is_relative_to(self.run.path.resolve()):
            raise NotThere(f"{shard[:120]!r} lies outside the run")
        return path

    def entry(self, shard: str, row: int) -> dict[str, Any]:
        """One trajectory as a list shows it; NotThere for a row the shard does not have."""
        snapshot, number = self._find(shard)
        size = snapshot.infos[number].size
        if not 0 <= row < size:
            raise NotThere(f"{shard} holds {size} trajectories, rows 0 to {size - 1}; there is no row {row}.")
        return row_json(snapshot, int(snapshot.starts[number]) + row)

    def shard_size(self, shard: str) -> int:
        """How many trajectories a shard holds."""
        snapshot, number = self._find(shard)
        return snapshot.infos[number].size

    def siblings(self, shard: str, sample: str) -> list[int]:
        """The rows of a shard with this sample."""
        snapshot, number = self._find(shard)
        low, high = (int(start) for start in snapshot.starts[number : number + 2])
        values = snapshot.pools.by_column["sample_id"].values
        codes = snapshot.columns["sample_id"][low:high]
        return [row for row, code in enumerate(codes.tolist()) if code >= 0 and values[code] == sample]

    # --- columns for the analytics ----------------------------------------------------------------------------------

    def column(self, name: str) -> Array:
        """A column by row: an Entry field, `parts.<name>`, or one of GROUPED.

        Numbers are float64 with nan for null, counts integers, yes-or-no bool; one that may be null (`right`,
        `first_right`, `exact`) is float64 1, 0 or nan. Texts are objects, tools tuples.
        """
        return _column(self._snapshot, name)

    def codes(self, name: str) -> tuple[Array, list[Any]]:
        """A text column as (code of each row, values by code); -1 is null. The quick way to group by a text."""
        snapshot = self._snapshot
        return snapshot.columns[name], snapshot.pools.by_column[name].values

    @property
    def split(self) -> Array:
        """The index in SPLITS of each row's split."""
        return self._snapshot.split

    @property
    def shard_index(self) -> Array:
        """Each row's place in `shards()`."""
        return self._snapshot.shard_index

    @property
    def part_names(self) -> list[str]:
        """The reward parts that any row has."""
        return self._snapshot.part_names

    def tool_uses(self) -> Iterator[tuple[ShardInfo, Mapping[str, ToolUse]]]:
        """Every file with what was called in it."""
        snapshot = self._snapshot
        yield from zip(snapshot.infos, snapshot.uses, strict=True)


def _column(snapshot: Snapshot, name: str) -> Array:
    if name.startswith(PART):
        return snapshot.part(name.removeprefix(PART))
    if name in GROUPED:
        return snapshot.groups[name]
    column = snapshot.columns[name]
    match KINDS[name]:
        case ColumnKind.TEXT | ColumnKind.NAMES:
            values = np.empty(len(snapshot.pools.by_column[name].values) + 1, dtype=object)
            values[:-1] = snapshot.pools.by_column[name].values[: len(values) - 1]
            return values[column]
        case ColumnKind.TRUTH if name in NULLABLE:
            return np.where(column < 0, np.nan, column)
        case ColumnKind.TRUTH:
            return column > 0
        case _:
            return column


# --- a page of the table --------------------------------------------------------------------------------------------


def listing(
    table: Table,
    *,
    split: str = "all",
    filter: str = "",
    search: str = "",
    sort: str = "",
    order: str = "desc",
    offset: int = 0,
    limit: int = 50,
) -> dict[str, Any]:
    """A page of trajectories: those of a split that pass a filter and hold a text, sorted (without `sort`: newest)."""
    snapshot = table.snapshot
    rows = chosen(snapshot, split=split, filter=filter, search=search, sort=sort, order=order)
    total = snapshot.size if split == "all" else int((snapshot.split == SPLITS.index(split)).sum())
    page = rows[max(offset, 0) : max(offset, 0) + max(limit, 0)]
    return {
        "total": total,
        "matched": len(rows),
        "offset": offset,
        "rows": [row_json(snapshot, int(row)) for row in page],
        "error": None,
        "pending": table.pending,
        "damaged": table.damaged,
        "left_out": table.left_out,
    }


def chosen(snapshot: Snapshot, *, split: str, filter: str, search: str, sort: str, order: str) -> Array:
    """The numbers of the rows that a list shows, in its order; BadFilter for what makes no sense."""
    mask = selection(snapshot, split=split, filter=filter)
    if search.strip():
        mask &= _holding(snapshot, search)
    return _sorted(snapshot, mask, sort, order)


def selection(snapshot: Snapshot, *, split: str, filter: str) -> Array:
    """The rows of a split that pass a filter; BadFilter for a split or an expression that makes no sense."""
    if split != "all" and split not in SPLITS:
        raise BadFilter(unknown("split", split[:80], ["all", *SPLITS]))
    mask = compile(filter).mask(snapshot) if filter.strip() else np.ones(snapshot.size, dtype=bool)
    return mask if split == "all" else mask & (snapshot.split == SPLITS.index(split))


def _holding(snapshot: Snapshot, text: str) -> Array:
    """Rows whose question, answer or sample holds a text, in whatever case."""
    wanted = text.strip()[:_LONGEST_SEARCH].lower()
    mask = np.zeros(snapshot.size, dtype=bool)
    for name in _SEARCHED:
        lowered = snapshot.pools.by_column[name].lowered()
        hits = np.array([*(wanted in value for value in lowered), False], dtype=bool)  # the last is for null, code -1
        mask |= hits[snapshot.columns[name]]
    return mask


def _sorted(snapshot: Snapshot, mask: Array, sort: str, order: str) -> Array:
    """The rows of a mask in order; equal ones newest first, null last either way."""
    if order not in ("asc", "desc"):
        raise BadFilter(unknown("order", order[:80], ["asc", "desc"]))
    rows: Array = snapshot.newest[mask[snapshot.newest]]
    if not sort:
        return rows
    key = _sort_key(snapshot, sort)[rows]
    return rows[np.argsort(key if order == "asc" else -key, kind="stable")]


def _sort_key(snapshot: Snapshot, sort: str) -> Array:
    names = [name for name in COLUMNS if KINDS[name] is not ColumnKind.PARTS]
    valid = [*names, *GROUPED, *(PART + name for name in snapshot.part_names)]
    if sort not in valid:
        raise BadFilter(unknown("field to sort by", sort[:80], valid))
    if sort in names and KINDS[sort] in (ColumnKind.TEXT, ColumnKind.NAMES):
        ranks = np.append(snapshot.pools.by_column[sort].ranks().astype(np.float64), np.nan)
        return np.asarray(ranks[snapshot.columns[sort]])
    return np.asarray(_column(snapshot, sort), dtype=np.float64)


def row_json(snapshot: Snapshot, index: int) -> dict[str, Any]:
    """A row as JSON: the fields of Entry, and where it stands."""
    number = int(snapshot.shard_index[index])
    entry = {name: snapshot.value(name, index) for name in COLUMNS}
    return entry | {"shard": snapshot.infos[number].shard, "row": index - int(snapshot.starts[number])}
