"""The runs a board shows: found in the places it was given, opened by name, and read as they grow."""

import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.errors import ConfigError, StorageError, nearest
from turnwise.files import cannot
from turnwise.storage.file_tail import end_of_text
from turnwise.storage.run_dir import CONFIG, LOG, METRICS, PLAN, RunDir
from turnwise.storage.status import STATUS
from turnwise.web.configs import read_config
from turnwise.web.liveness import Liveness, liveness_of
from turnwise.web.run_summary import MetricsReader, RunSummary, summarise_run
from turnwise.web.series import Series

if TYPE_CHECKING:
    from turnwise.web.table import Table

_FILES = (CONFIG, METRICS, STATUS, "index.jsonl", "trajectories", "eval", LOG, PLAN, "checkpoints", "tokenizer.json")
_SUMMARISED = (METRICS, "eval", STATUS)
_LOG_BYTES, _LOG_LINES, _PLAN_CHARS = 100_000, 200, 200_000
_TABLES = 3
"""Runs whose trajectories are held in memory at once."""

Signature = tuple[tuple[int, int, int] | None, ...]


class NotFound(LookupError):
    """A run or a file that is not among those of the board; its text is for the reader, under its title."""

    title = "Not found"


class NoSuchRun(NotFound):
    """An address names a run that is not there: mistyped, removed, or of another folder."""

    title = "No such run"

    def __init__(self, name: str, names: Sequence[str]) -> None:
        super().__init__(f"there is no run {name[:200]!r} here; {nearest(name[:200], names)}")


class Run:
    """One run. Everything that is read is kept and read on from there; any thread may ask."""

    def __init__(self, name: str, folder: Path, roots: Sequence[Path]) -> None:
        self.name = name
        self.dir = RunDir(folder)
        self._lock = threading.RLock()
        self._answering = threading.Lock()
        self._refreshing = threading.Lock()
        self._refresh_began = 0.0
        self.series = Series(self.dir)
        self._reader = MetricsReader(self.dir)
        self._roots = roots
        self._table: Table | None = None
        self.table_used = 0.0
        self._seen: tuple[Signature, str, int] | None = None
        self._version = int(time.time())  # a board started anew must not repeat the numbers of the one before
        self._newest: tuple[Signature, RunSummary] | None = None
        self._config: tuple[Signature, tuple[str, dict[str, str]]] | None = None
        self._changes = 0
        self._answers: dict[str, tuple[int, Any]] = {}

    @property
    def table(self) -> "Table":
        """The trajectories; read on first use, refreshed by `refresh`."""
        from turnwise.web.table import Table

        with self._lock:
            self.table_used = time.monotonic()
            if self._table is None:
                self._table = Table(self.dir)
            return self._table

    @property
    def has_table(self) -> bool:
        """Whether the trajectories are in memory."""
        return self._table is not None

    def forget_table(self) -> None:
        """Free the memory of the trajectories; the next use reads them again."""
        with self._lock:
            self._table = None
            self._answers = {}

    def refresh(self) -> bool:
        """Read on in the metrics and the trajectories; True when anything was new.

        A long run's trajectories come in slices: `table.pending` says how much is left for the next call. Those who
        come while one reads wait for it, and then for one of them to read on for all.
        """
        arrived = time.monotonic()
        with self._refreshing:
            if self._refresh_began > arrived:
                return False
            self._refresh_began = time.monotonic()
            self.check()
            series, table = self.series.refresh(), self.table.refresh()
            self._changes += series or table
            return series or table

    def kept(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, made again only after the run has changed; two who ask at once wait for one making."""
        with self._answering:
            found = self._answers.get(key)
            changes = self._changes
            if found is None or found[0] != changes:
                found = self._answers[key] = (changes, make())
            return found[1]

    def check(self) -> None:
        """StorageError for a run with a part that is a link out of the board's places, or no file or folder at all."""
        for name in (*_FILES, "tokens.json", "images", "images/index.jsonl"):
            path = self.dir.path / name
            try:
                mode = os.lstat(path).st_mode
            except OSError:  # not there (yet)
                continue
            if stat.S_ISLNK(mode) and not _inside(path, self._roots):
                raise StorageError(f"{path} is a link that leads out of the runs; it is not followed")
            if not stat.S_ISLNK(mode) and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise StorageError(f"{path} is no file")  # reading a pipe would wait for ever

    def newest(self) -> RunSummary:
        """Its newest numbers."""
        self.check()
        signature = self._signature(_SUMMARISED)
        with self._lock:
            if self._newest is None or self._newest[0] != signature:
                self._newest = signature, summarise_run(self.dir, self._reader)
            return self._newest[1]

    def config(self) -> tuple[str, dict[str, str]]:
        """The text of its config and the values by key."""
        signature = self._signature((CONFIG,))
        with self._lock:
            if self._config is None or self._config[0] != signature:
                self._config = signature, read_config(self.dir)
            return self._config[1]

    def status(self, now: float) -> Liveness:
        """How it is doing."""
        return liveness_of(self.dir, now, self._step_seconds)

    def _step_seconds(self) -> float:
        try:
            return self.newest().step_seconds
        except StorageError:  # `summary` tells of it
            return 0.0

    def version(self, now: float) -> int:
        """A number that changes when anything about the run did, or more of it was read."""
        seen = self._signature(_FILES), str(self.status(now).state), self._changes
        with self._lock:
            if seen != self._seen:
                self._version += self._seen is not None
                self._seen = seen
            return self._version

    def summary(self, now: float) -> dict[str, Any]:
        """What the list of runs says about it. A damaged file is told in `reason`, beside what the others say."""
        problems: list[str] = []
        found, values = RunSummary(), dict[str, str]()
        liveness = self.status(now)
        try:
            found = self.newest()
            values = self.config()[1]
        except StorageError as error:
            problems.append(str(error))
        problems += self.series.problems()
        return {
            "name": self.name,
            "state": liveness.state.value,
            "reason": "; ".join([liveness.reason, *problems] if liveness.reason else problems),
            "command": liveness.command,
            "step": max(liveness.step, found.step),
            "steps": liveness.steps,
            "seconds": found.seconds if found.seconds is not None else _wall_time(liveness),
            "started": liveness.started,
            "updated": liveness.updated,
            "task": values.get("task"),
            "model": _model(values),
            "reward": found.reward,
            "accuracy": found.accuracy,
            "accuracy_error": found.accuracy_error,
            "accuracy_step": found.accuracy_step,
            "spark": list(found.spark),
        }

    def details(self, now: float) -> dict[str, Any]:
        """The summary and what a run's own page shows besides."""
        from turnwise.web.probes import is_probe
        from turnwise.web.results import results

        self.refresh()
        version = self.version(now)
        table, names = self.table, self.series.names()
        shards = table.shards()
        return self.summary(now) | {
            "plan": self._end_of(PLAN, _PLAN_CHARS),
            "log": "".join(self._end_of(LOG, _LOG_BYTES).splitlines(keepends=True)[-_LOG_LINES:]),
            "sources": _sources(names),
            "metrics": names,
            "shards": [{"shard": one.shard, "split": one.split, "step": one.step, "size": one.size} for one in shards],
            "trajectories": sum(one.size for one in shards),
            "checkpoints": self._checkpoints(),
            "results": results(self.dir),
            "probe": is_probe(self.dir),
            "has_tokenizer": (self.dir.path / "tokenizer.json").is_file(),
            "pending": table.pending,
            "left_out": table.left_out,
            "problems": self.series.problems() + [f"{one['file']}: {one['reason']}" for one in table.damaged],
            "version": version,
        }

    def _checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.dir.path / "checkpoints").glob("step_*") if path.is_dir())

    def _end_of(self, name: str, size: int) -> str:
        try:
            return end_of_text(self.dir.path / name, size)
        except OSError as error:
            raise cannot("read", self.dir.path / name, error) from error

    def _signature(self, names: Sequence[str]) -> Signature:
        found: list[tuple[int, int, int] | None] = []
        for name in names:
            try:
                here = os.stat(self.dir.path / name)
                found.append((here.st_mtime_ns, here.st_size, here.st_ino))
            except OSError:  # not there (yet)
                found.append(None)
        return tuple(found)


class Runs:
    """The runs of some places, each a folder of runs or a run itself: `Runs([Path("runs")]).open("first")`."""

    def __init__(self, places: Sequence[Path]) -> None:
        for place in places:
            if not place.is_dir():
                raise ConfigError(f"there is no folder {str(place)!r} to show runs of")
        self._places = [place.resolve() for place in places]
        self._lock = threading.Lock()
        self._folders: dict[str, Path] = {}
        self._open: dict[str, Run] = {}

    def names(self) -> list[str]:
        """All runs there are now, by name. Of two with one name the later place's says where it is."""
        found: dict[str, Path] = {}
        seen: set[Path] = set()
        for place in self._places:
            for folder in [place] if (place / CONFIG).is_file() else self._runs_in(place):
                if folder not in seen:
                    seen.add(folder)
                    found[_free(folder, found)] = folder
        with self._lock:
            self._folders = found
            for name in [name for name, run in self._open.items() if found.get(name) != run.dir.path]:
                del self._open[name]
        return sorted(found)

    def open(self, name: str) -> Run:
        """A run by its name; NotFound for any other."""
        with self._lock:
            known = self._folders.get(name)
        if (known is None or not (known / CONFIG).is_file()) and name not in (names := self.names()):
            raise NoSuchRun(name, names)
        with self._lock:
            folder = self._folders.get(name)
            if folder is None:  # it went away this moment
                raise NoSuchRun(name, list(self._folders))
            run = self._open.get(name)
            if run is None:
                run = self._open[name] = Run(name, folder, self._places)
            held = sorted((one for one in self._open.values() if one.has_table), key=lambda one: one.table_used)
        for old in held[:-_TABLES]:
            if old is not run:
                old.forget_table()
        return run

    def summaries(self, now: float) -> list[dict[str, Any]]:
        """What the list shows, newest first."""
        found = []
        for name in self.names():
            try:
                found.append(self.open(name).summary(now))
            except NotFound:  # it was removed meanwhile
                continue
        return sorted(found, key=lambda one: (-one["started"], one["name"]))

    def _runs_in(self, place: Path) -> list[Path]:
        try:
            entries = sorted(os.scandir(place), key=lambda entry: entry.name)
        except OSError as error:
            raise StorageError(f"cannot read {place}: {error.strerror or error}") from error
        found = []
        for entry in entries:
            folder = place / entry.name
            if entry.name.startswith(".") or not (folder / CONFIG).is_file():
                continue
            if not entry.is_symlink():
                found.append(folder)
            elif _inside(folder, self._places):
                found.append(folder.resolve())
        return found


def _inside(path: Path, roots: Sequence[Path]) -> bool:
    """Whether a path, its links followed, lies in one of the (resolved) folders."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # a link to nothing, or to itself
        return False
    return any(real.is_relative_to(root) for root in roots)


def _free(folder: Path, taken: dict[str, Path]) -> str:
    """The folder's name, told apart from those that are taken."""
    name = folder.name
    if name in taken:
        name = f"{folder.name} ({folder.parent.name})"
    number = 2
    while name in taken:
        name = f"{folder.name} ({folder.parent.name} {number})"
        number += 1
    return name


def _sources(metrics: Sequence[str]) -> list[str]:
    """The data sources that metrics name."""
    heads = ("train/accuracy/", "val/accuracy/")
    return sorted({name.removeprefix(head) for name in metrics for head in heads if name.startswith(head)})


def _model(values: Mapping[str, str]) -> str | None:
    """Who answered: an endpoint's model where one was used, else the weights that were loaded."""
    if values.get("engine.name") != "openai":
        return values.get("model.path")
    name, place = values.get("engine.model", "null"), values.get("engine.base_url", "null")
    return f"the model of {place}" if name == "null" else name


def _wall_time(liveness: Liveness) -> float:
    """How long a run has taken so far; an import's own time says nothing about the run it shows."""
    return 0.0 if liveness.command == "import-jsonl" else max(liveness.updated - liveness.started, 0.0)
