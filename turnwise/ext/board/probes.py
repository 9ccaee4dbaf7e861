"""Probes on the board: accuracy with the tools' images as they are and spoilt, and which episodes belong together."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from turnwise.errors import StorageError
from turnwise.ext.board.columns import shard_name
from turnwise.ext.board.json_values import clean_text
from turnwise.ext.board.run_summary import number
from turnwise.ext.board.table import NotThere, Table
from turnwise.storage.run_dir import RunDir

FILE = "probe.json"
LARGEST = 16 << 20
MOST_PAIRS = 200
"""Listed, those with another outcome first; the numbers are of all."""
AS_IT_IS = "none"
_NUMBERS = ("n", "samples", "looked", "before", "before_stderr", "after", "after_stderr", "change", "change_stderr")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """What a probe wrote of itself: `ProbeRecord({"none": "eval/step_000000", "blank": "probes/blank"}, [...])`."""

    shards: dict[str, str]
    """By probe, the episodes as they are first."""
    results: list[Json]


def is_probe(run: RunDir) -> bool:
    """Whether a probe is what this run is."""
    path = run.path / FILE
    return path.is_file() and not path.is_symlink()


def read_probe(run: RunDir) -> ProbeRecord | None:
    """None for any other run, and before a probe is done."""
    if not is_probe(run):
        return None
    path = run.path / FILE
    if path.stat().st_size > LARGEST:
        raise StorageError(f"{path} is larger than any probe's")
    try:
        content = json.loads(run.read_text(FILE))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not JSON: {error}") from error
    match content:
        case {"baseline": str() as baseline, "probes": dict() as probes, "results": list() as results}:
            files = {AS_IT_IS: baseline} | {clean_text(str(name)): file for name, file in probes.items()}
            shards = {name: shard_name(file) for name, file in files.items() if isinstance(file, str)}
            return ProbeRecord(
                {name: shard for name, shard in shards.items() if shard is not None},
                [_result(result) for result in results if isinstance(result, dict)],
            )
    raise StorageError(f"{path} is not a probe's")


def _result(result: Json) -> Json:
    names = {name: clean_text(str(result.get(name) or "")) for name in ("data_source", "probe")}
    return names | {name: number(result, name) for name in (*_NUMBERS, "answers_changed")}


def probe(run: RunDir, table: Table) -> Json:
    """The JSON of a probe's page; NotThere for a run that is none."""
    record = read_probe(run)
    if record is None:
        raise NotThere("this run is not a probe, or not finished yet", "No such probe")
    pairs = _pairs(table, record)
    pairs.sort(key=lambda pair: not pair["differs"])
    return {"probes": record.shards, "results": record.results, "total": len(pairs), "pairs": pairs[:MOST_PAIRS]}


def _pairs(table: Table, record: ProbeRecord) -> list[Json]:
    """Every episode with what became of it under each probe."""
    by_key: dict[tuple[str, int], Json] = {}
    sizes = {info.shard: info.size for info in table.shards()}
    for name, shard in record.shards.items():
        for row in range(sizes.get(shard, 0)):
            entry = table.entry(shard, row)
            key = entry["sample_id"], entry["sibling"]
            if name == AS_IT_IS:
                pair = {part: entry[part] for part in ("sample_id", "sibling", "data_source", "question")}
                by_key.setdefault(key, pair | {"differs": False, "played": {}})
            if key in by_key and name not in by_key[key]["played"]:
                by_key[key]["played"][name] = _place(entry, shard, row)
                by_key[key]["differs"] |= entry["right"] != by_key[key]["played"][AS_IT_IS]["right"]
    return list(by_key.values())


def counterparts(run: RunDir, table: Table, shard: str, row: int) -> dict[str, Json]:
    """An episode of a probe under every probe, itself included, by the probe's name; {} in any other run."""
    record = read_probe(run)
    if record is None or shard not in record.shards.values():
        return {}
    entry = table.entry(shard, row)
    here = {info.shard for info in table.shards()}
    places: dict[str, Json] = {}
    for name, other in record.shards.items():
        for at in table.siblings(other, entry["sample_id"]) if other in here else []:
            candidate = table.entry(other, at)
            if candidate["sibling"] == entry["sibling"]:
                places.setdefault(name, _place(candidate, other, at))
    return places


def with_counterparts(run: RunDir, table: Table, wanted: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Episodes by shard and row, each with what it is compared with."""
    episodes: dict[tuple[str, int], None] = {}
    for episode in wanted:
        others = counterparts(run, table, *episode).values()
        episodes |= dict.fromkeys([episode, *((other["shard"], other["row"]) for other in others)])
    return list(episodes)


def _place(entry: Json, shard: str, row: int) -> Json:
    return {"shard": shard, "row": row, "right": entry["right"], "answer": entry["answer"]}
