"""The runs a board shows: found in the places it was given, opened by name, and read as they grow."""

import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise import extensions
from turnwise.errors import ConfigError, StorageError
from turnwise.errors.nearest_name import nearest
from turnwise.ext.board.liveness import Liveness, liveness_of
from turnwise.ext.board.notes import NOTES, Notes, read_notes
from turnwise.ext.board.run_summary import MetricsReader, RunSummary, summarise_run
from turnwise.ext.board.run_warnings import run_warnings
from turnwise.ext.board.series import Series
from turnwise.storage.configs import read_config
from turnwise.storage.run_dir import CONFIG, LOG, METRICS, PLAN, WARNINGS, RunDir
from turnwise.storage.status import STATUS

if TYPE_CHECKING:
    from turnwise.ext.board.table import Table

_CHECKED = (METRICS, "index.jsonl", "trajectories", "eval", WARNINGS)
"""What health is read from."""
_FILES = (*_CHECKED, CONFIG, STATUS, NOTES, LOG, PLAN, "checkpoints", "tokenizer.json")
_SUMMARISED = (METRICS, "eval", STATUS)
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


class BoardRun:
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
        self._watched: tuple[Signature, dict[str, int]] | None = None

    @property
    def table(self) -> "Table":
        """The trajectories; read on first use, refreshed by `refresh`."""
        from turnwise.ext.board.table import Table

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
            cached = self._answers.get(key)
            changes = self._changes
            if cached is None or cached[0] != changes:
                cached = self._answers[key] = (changes, make())
            return cached[1]

    def health(self) -> dict[str, Any]:
        """What the detectors say of what was read so far, and what the run itself warned of."""
        from turnwise.ext.board.health import health

        return health(self.table, self.series, run_warnings(self.dir))

    def watched(self) -> dict[str, int]:
        """How much there is to look at: {"alarm", "watch", "pending"}; counted again only when the files changed.

        Remembered after the trajectories were forgotten, so that a list of many runs asks each of them once.
        """
        from turnwise.ext.board.health import to_look_at

        known = self.known_watched()
        if known is None:
            signature = self._signature(_CHECKED)
            self.refresh()
            known = to_look_at(self.kept("health", self.health))
            if not known["pending"]:
                with self._lock:
                    self._watched = signature, known
        return known

    def known_watched(self) -> dict[str, int] | None:
        """What `watched` said, as long as it holds; None when the trajectories would have to be read."""
        with self._lock:
            fresh = self._watched is not None and self._watched[0] == self._signature(_CHECKED)
            return self._watched[1] if fresh and self._watched is not None else None

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
        """The run's newest numbers, read again only when its files changed."""
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
        """Whether the run is alive, done or dead, and at which step."""
        return liveness_of(self.dir, now, self._step_seconds)

    def _step_seconds(self) -> float:
        try:
            return self.newest().step_seconds
        except StorageError:  # `summary` tells of it
            return 0.0

    def version(self, now: float) -> int:
        """A number that changes when anything about the run did, or more of it was read."""
        state = self._signature(_FILES), str(self.status(now).state), self._changes
        with self._lock:
            if state != self._seen:
                self._version += self._seen is not None
                self._seen = state
            return self._version

    def summary(self, now: float) -> dict[str, Any]:
        """What the list of runs says about it. A damaged file is told in `reason`, beside what the others say."""
        problems: list[str] = []
        newest, values, notes = RunSummary(), dict[str, str](), Notes()
        liveness = self.status(now)
        try:
            newest = self.newest()
            values = self.config()[1]
            notes = read_notes(self.dir)
        except StorageError as error:
            problems.append(str(error))
        problems += self.series.problems()
        return {
            "name": self.name,
            "state": liveness.state.value,
            "reason": "; ".join([liveness.reason, *problems] if liveness.reason else problems),
            "command": liveness.command,
            "step": max(liveness.step, newest.step),
            "steps": liveness.steps,
            "seconds": newest.seconds if newest.seconds is not None else _wall_time(liveness),
            "started": liveness.started,
            "updated": liveness.updated,
            "task": values.get("task"),
            "model": _model(values),
            "reward": newest.reward,
            "loss": newest.loss,
            "accuracy": newest.accuracy,
            "accuracy_error": newest.accuracy_error,
            "accuracy_step": newest.accuracy_step,
            "spark": list(newest.spark),
            "watch": self.known_watched(),
            "problems": problems,
            "note": notes.note,
            "tags": notes.tags,
        }

    def details(self, now: float) -> dict[str, Any]:
        """The summary and what a run's own pages show besides."""
        from turnwise.ext.board.run_details import run_details

        self.refresh()
        version = self.version(now)
        summary, details = self.summary(now), run_details(self)
        return summary | details | {"problems": summary["problems"] + details.pop("damaged"), "version": version}

    def _signature(self, names: Sequence[str]) -> Signature:
        stamps: list[tuple[int, int, int] | None] = []
        for name in names:
            try:
                here = os.stat(self.dir.path / name)
                stamps.append((here.st_mtime_ns, here.st_size, here.st_ino))
            except OSError:  # not there (yet)
                stamps.append(None)
        return tuple(stamps)


class Runs:
    """The runs of some places, each a folder of runs or a run itself: `Runs([Path("runs")]).open("first")`."""

    def __init__(self, places: Sequence[Path]) -> None:
        for folder in places:
            if not folder.is_dir():
                raise ConfigError(f"there is no folder {str(folder)!r} to show runs of")
        self._places = [folder.resolve() for folder in places]
        self._lock = threading.Lock()
        self._folders: dict[str, Path] = {}
        self._open: dict[str, BoardRun] = {}

    def names(self) -> list[str]:
        """All runs there are now, by name. Of two with one name the later place's says where it is."""
        folders: dict[str, Path] = {}
        visited: set[Path] = set()
        for root in self._places:
            for folder in [root] if (root / CONFIG).is_file() else self._runs_in(root):
                if folder not in visited:
                    visited.add(folder)
                    folders[_free(folder, folders)] = folder
        with self._lock:
            self._folders = folders
            for name in [name for name, run in self._open.items() if folders.get(name) != run.dir.path]:
                del self._open[name]
        return sorted(folders)

    def open(self, name: str) -> BoardRun:
        """A run by its name; NotFound for any other."""
        with self._lock:
            listed = self._folders.get(name)
        if (listed is None or not (listed / CONFIG).is_file()) and name not in (names := self.names()):
            raise NoSuchRun(name, names)
        with self._lock:
            folder = self._folders.get(name)
            if folder is None:  # it went away this moment
                raise NoSuchRun(name, list(self._folders))
            run = self._open.get(name)
            if run is None:
                run = self._open[name] = BoardRun(name, folder, self._places)
            held = sorted(
                (other for other in self._open.values() if other.has_table), key=lambda other: other.table_used
            )
        for old in held[:-_TABLES]:
            if old is not run:
                old.forget_table()
        return run

    def summaries(self, now: float) -> list[dict[str, Any]]:
        """What the list shows, newest first."""
        entries = []
        for name in self.names():
            try:
                entries.append(self.open(name).summary(now))
            except NotFound:  # it was removed meanwhile
                continue
        return sorted(entries, key=lambda entry: (-entry["started"], entry["name"]))

    def _runs_in(self, root: Path) -> list[Path]:
        try:
            entries = sorted(os.scandir(root), key=lambda entry: entry.name)
        except OSError as error:
            raise StorageError(f"cannot read {root}: {error.strerror or error}") from error
        folders = []
        for entry in entries:
            folder = root / entry.name
            if entry.name.startswith(".") or not (folder / CONFIG).is_file():
                continue
            if not entry.is_symlink():
                folders.append(folder)
            elif _inside(folder, self._places):
                folders.append(folder.resolve())
        return folders


def _inside(path: Path, roots: Sequence[Path]) -> bool:
    """Whether a path, its links followed, lies in one of the (resolved) folders."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # a link to nothing, or to itself
        return False
    return any(real.is_relative_to(root) for root in roots)


def _free(folder: Path, names: dict[str, Path]) -> str:
    """The folder's name, told apart from those that are taken."""
    name = folder.name
    if name in names:
        name = f"{folder.name} ({folder.parent.name})"
    number = 2
    while name in names:
        name = f"{folder.name} ({folder.parent.name} {number})"
        number += 1
    return name


def _model(values: Mapping[str, str]) -> str | None:
    """Who answered: an endpoint's model where one was used, else the weights that were loaded."""
    if extensions.engine(values.get("engine.name", "")).renders:
        return values.get("model.path")
    name, url = values.get("engine.model", "null"), values.get("engine.base_url", "null")
    return f"the model of {url}" if name == "null" else name


def _wall_time(liveness: Liveness) -> float:
    """How long a run has taken so far; an import's own time says nothing about the run it shows."""
    return 0.0 if liveness.command == "import-jsonl" else max(liveness.updated - liveness.started, 0.0)
