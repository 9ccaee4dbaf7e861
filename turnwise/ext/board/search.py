"""Full text over all messages of a run, newest first, a slice of time per request."""

import re
import time
from typing import Any

import numpy as np

from turnwise.errors import StorageError
from turnwise.ext.board.columns import Snapshot
from turnwise.ext.board.filters import BadFilter
from turnwise.ext.board.json_values import clean_text
from turnwise.ext.board.table import Table, row_json, selection
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import read_texts

SECONDS = 0.15
MOST_HITS = 100
LONGEST = 500
_AROUND = 70


def search(
    run: RunDir,
    table: Table,
    *,
    text: str,
    filter: str = "",
    split: str = "all",
    cursor: str | None = None,
    seconds: float = SECONDS,
) -> dict[str, Any]:
    """Trajectories with a message that holds a text, in whatever case; `cursor` goes on where the last answer ended."""
    wanted = text.strip()
    if not wanted:
        raise BadFilter("there is nothing to search for")
    if len(wanted) > LONGEST:
        raise BadFilter(f"search for at most {LONGEST} characters")
    snapshot = table.snapshot
    mask = selection(snapshot, split=split, filter=filter)
    chosen = np.bincount(snapshot.shard_index[mask], minlength=len(snapshot.infos))
    order = sorted(range(len(snapshot.infos)), key=lambda number: (-snapshot.infos[number].step, number))
    order = [number for number in order if chosen[number]]
    position, row = _place(snapshot, order, cursor)
    hits: list[dict[str, Any]] = []
    damaged: list[dict[str, str]] = []
    end = time.monotonic() + seconds
    while position < len(order):
        new_hits, row = _in_file(table, snapshot, order[position], mask, wanted, row, MOST_HITS - len(hits), damaged)
        hits += new_hits
        position += row == 0
        if time.monotonic() >= end or len(hits) >= MOST_HITS:
            break
    more = position < len(order)
    return {
        "hits": hits,
        "searched": position,
        "of": len(order),
        "cursor": f"{snapshot.infos[order[position]].shard}@{row}" if more else None,
        "damaged": damaged,
        "pending": table.pending,
    }


def _place(snapshot: Snapshot, order: list[int], cursor: str | None) -> tuple[int, int]:
    """Where to go on: a place in the order and a row of that file."""
    if cursor is None:
        return 0, 0
    shard, _, row = cursor.rpartition("@")
    number = snapshot.places.get(shard)
    if number is None or number not in order or not row.isascii() or not row.isdigit() or len(row) > 12:
        raise BadFilter("the search cannot go on from there; begin again")
    return order.index(number), int(row)


def _in_file(
    table: Table,
    snapshot: Snapshot,
    number: int,
    mask: Any,
    wanted: str,
    row: int,
    most: int,
    damaged: list[dict[str, str]],
) -> tuple[list[dict[str, Any]], int]:
    """Hits in one file from a row on, and the row to go on from; 0 when it is done."""
    info, start = snapshot.infos[number], int(snapshot.starts[number])
    try:
        texts = read_texts(table.path(info.shard))
    except StorageError as error:
        damaged.append({"file": f"{info.shard}.parquet", "reason": str(error)})
        return [], 0
    lowered = wanted.lower()
    hits: list[dict[str, Any]] = []
    for index in range(row, min(len(texts), info.size)):
        if not mask[start + index]:
            continue
        held = next((text for text in texts[index] if lowered in text.lower()), None)
        if held is None:
            continue
        if len(hits) >= most:
            return hits, index
        entry = row_json(snapshot, start + index)
        hits.append({"shard": info.shard, "row": index, "excerpt": excerpt(held, wanted), "entry": entry})
    return hits, 0


def excerpt(text: str, wanted: str) -> str:
    """The words around the first place where a text holds another."""
    match = re.search(re.escape(wanted), text, re.IGNORECASE)
    start, end = match.span() if match else (0, 0)
    low, high = max(0, start - _AROUND), min(len(text), end + _AROUND)
    flat = " ".join(clean_text(text[low:high]).split())
    return ("…" if low > 0 else "") + flat + ("…" if high < len(text) else "")
