"""What a resumed run will do again is put aside under abandoned/, so that no step is there twice and none is lost."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.errors import StorageError
from turnwise.files import cannot
from turnwise.storage.index import INDEX, parse_line
from turnwise.storage.json_text import parse
from turnwise.storage.run_dir import ABANDONED, METRICS, RunDir

_STEP = re.compile(r"step_(\d+)\.(?:parquet|json)$")


@dataclass(slots=True)
class _Metrics:
    """The lines of metrics.jsonl by what becomes of them."""

    kept: list[bytes] = field(default_factory=list)
    later: list[bytes] = field(default_factory=list)
    unreadable: list[bytes] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def abandon_after(run: RunDir, step: int) -> list[str]:
    """Put aside what was recorded after this step; returns what a person should know.

    Everything is read before anything is moved. Broken off at any point, it can be done again.
    """
    metrics = _sorted(run, step)
    files = [
        path
        for pattern in ("trajectories/*.parquet", "reused/*.parquet", "eval/*.parquet", "eval/*.json")
        for path in sorted(run.path.glob(pattern))
        if (found := _STEP.search(path.name)) and int(found[1]) > step
    ]
    for name, lines in (("metrics", metrics.later), ("unreadable_metrics", metrics.unreadable)):
        if lines:
            _append(run.file(f"{ABANDONED}/{name}.jsonl"), lines)
    for path in files:
        try:
            os.replace(path, run.file(f"{ABANDONED}/{path.relative_to(run.path)}"))
        except OSError as error:
            raise cannot("move", path, error) from error
    if (run.path / METRICS).is_file():
        run.write_bytes(METRICS, b"".join(metrics.kept))
    if (run.path / INDEX).is_file():
        lines = [line for line in run.read_bytes(INDEX).split(b"\n") if _is_of_a_file(run, line)]
        run.write_bytes(INDEX, b"".join(line + b"\n" for line in lines))
    return metrics.notes


def _sorted(run: RunDir, step: int) -> _Metrics:
    found = _Metrics()
    if not (run.path / METRICS).is_file():
        return found
    *lines, torn = run.read_bytes(METRICS).split(b"\n")
    for number, line in enumerate(lines, start=1):
        of = _step_of(line)
        if of is not None:
            (found.kept if of <= step else found.later).append(line + b"\n")
        elif line.strip():
            found.unreadable.append(line + b"\n")
            found.notes.append(f"{METRICS}, line {number} cannot be read: kept in {ABANDONED}/unreadable_metrics.jsonl")
    if torn.strip():
        of = _step_of(torn)
        if of is None:
            found.notes.append(f"{METRICS}: its last line is torn and left out ({len(torn)} bytes)")
        else:  # whole but for its end
            (found.kept if of <= step else found.later).append(torn + b"\n")
    return found


def _step_of(line: bytes) -> int | None:
    """The step of a line of metrics; None for one that this code did not write."""
    try:
        step = parse(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if type(step) is int else None


def _append(path: Path, lines: list[bytes]) -> None:
    try:
        with path.open("ab") as file:
            file.writelines(lines)
    except OSError as error:
        raise cannot("append to", path, error) from error


def _is_of_a_file(run: RunDir, line: bytes) -> bool:
    try:
        return (run.path / parse_line(line).file).is_file()
    except StorageError:  # a damaged line says nothing; readers go by the file itself
        return False
