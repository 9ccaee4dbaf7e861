"""A run read back in Python: its episodes and steps as tables, its trajectories as they were."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

from turnwise.errors import ConfigError, StorageError, one_line
from turnwise.errors.nearest_name import nearest
from turnwise.storage.configs import read_config
from turnwise.storage.index import COLUMNS, INDEX, Shard, parse_line, shard_of
from turnwise.storage.run_dir import METRICS, TRAINED, RunDir
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.types import Trajectory

EPISODES, STEPS = "episodes", "steps"
_EPISODE = pa.schema(
    [
        ("file", pa.string()), ("sample_id", pa.string()), ("data_source", pa.string()), ("stop_reason", pa.string()),
        ("failure", pa.string()), ("reward", pa.float64()), ("advantage", pa.float64()), ("right", pa.bool_()),
        ("first_right", pa.bool_()), ("exact", pa.bool_()), ("gap", pa.float64()), ("entropy", pa.float64()),
        ("tools", pa.list_(pa.string())),
    ]
)  # fmt: skip
"""Columns whose values may all be missing, which would leave Arrow no type to find."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run's folder: `tw.read("runs/first").frame()` has a row for each episode."""

    path: Path

    @property
    def config(self) -> dict[str, str]:
        """Every key with its value as text."""
        return read_config(RunDir(self.path))[1]

    @property
    def files(self) -> list[str]:
        """The files of trajectories, evaluations first, without their ending: `eval/step_000000`."""
        paths = [path for folder in ("eval", TRAINED) for path in sorted(self.path.glob(f"{folder}/*.parquet"))]
        return [path.relative_to(self.path).with_suffix("").as_posix() for path in paths]

    def file(self, name: str | None = None) -> str:
        """The file of this name, by default the last of `files`."""
        names = self.files
        if not names:
            raise StorageError(f"{self.path} holds no trajectories yet")
        name = names[-1] if name is None else str(name).removesuffix(".parquet")
        if name not in names:
            raise ConfigError(f"{self.path} has no file {name!r}: {nearest(name, names)}")
        return name

    def trajectories(self, file: str | None = None) -> list[Trajectory]:
        """Those of one file, by default the last of `files`."""
        return read_trajectories(self.path / f"{self.file(file)}.parquet")

    def arrow(self, what: str = EPISODES) -> pa.Table:
        """`episodes`: a row for each, with its reward, parts, turns, calls and tokens; `steps`: the metrics of each."""
        if what == STEPS:
            return steps_table(RunDir(self.path))
        if what != EPISODES:
            raise ConfigError(f"a run has tables of {EPISODES} and of {STEPS}, not of {what!r}")
        return _episodes(self._shards())

    def frame(self, what: str = EPISODES) -> Any:
        """`arrow` as a pandas DataFrame."""
        return to_pandas(self.arrow(what))

    def _shards(self) -> Iterable[Shard]:
        """What the index says of each file; of one that it does not know, what the file says."""
        run = RunDir(self.path)
        lines = run.read_bytes(INDEX).split(b"\n") if (self.path / INDEX).is_file() else []
        by_file = {shard.file: shard for shard in map(parse_line, filter(None, lines))}
        for name in (f"{name}.parquet" for name in self.files):
            yield by_file.get(name) or shard_of(name, read_trajectories(self.path / name, unread=True))


def read(path: str | Path) -> RecordedRun:
    """A run by its folder: `read("runs/first")`."""
    if not isinstance(path, str | Path):
        raise ConfigError(f"a run is named by its folder, such as 'runs/first', not by {type(path).__name__}")
    return RecordedRun(RunDir.open(Path(path)).path)


def episodes_table(trajectories: Sequence[Trajectory], file: str) -> pa.Table:
    """A row for each trajectory, as the run that keeps them in this file has it."""
    return _episodes([shard_of(file, trajectories)])


def steps_table(run: RunDir) -> pa.Table:
    """The lines of metrics.jsonl, a column for each metric."""
    lines = run.read_jsonl(METRICS) if (run.path / METRICS).is_file() else []
    return _table({name: None for line in lines for name in line}, lines)


def to_pandas(table: pa.Table) -> Any:
    """The table as a pandas DataFrame."""
    if find_spec("pandas") is None:
        raise ConfigError("a frame needs pandas: pip install pandas (arrow() gives the same table without it)")
    return table.to_pandas()


def _episodes(shards: Iterable[Shard]) -> pa.Table:
    rows: list[dict[str, Any]] = []
    for shard in shards:
        for values in zip(*(shard.columns[name] for name in COLUMNS), strict=True):
            row = {"file": shard.file.removesuffix(".parquet")} | dict(zip(COLUMNS, values, strict=True))
            rows.append(row | {f"parts.{name}": value for name, value in row.pop("parts").items()})
    columns = dict.fromkeys(("file", *(name for name in COLUMNS if name != "parts")))
    return _table(columns | {name: None for row in rows for name in row}, rows)


def _table(names: Mapping[str, None], rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    types = {field.name: field.type for field in _EPISODE}
    try:
        return pa.table({name: pa.array([row.get(name) for row in rows], types.get(name)) for name in names})
    except pa.ArrowException as error:  # of another writer's values
        raise StorageError(f"what the run recorded makes no table: {one_line(error)}") from error
