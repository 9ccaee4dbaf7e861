"""From what a person names to the files that hold rows: paths, globs, folders, saved datasets, datasets of the hub."""

import enum
import fnmatch
import glob
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.data.rows import expand, is_data
from turnwise.errors import DataError
from turnwise.errors.nearest_name import nearest
from turnwise.system.image_sources import is_file_name

MOST_FILES = 100_000
_DICT, _STATE = "dataset_dict.json", "state.json"
"""What `save_to_disk` of the datasets package writes beside the splits, and beside the files of one."""
_GLOB = re.compile(r"[*?[]")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class Split(enum.Enum):
    """What rows are for, and the names of splits that are taken for it, the first that is there."""

    TRAIN = ("train", "training")
    EVAL = ("test", "validation", "valid", "val", "dev", "eval")


_EVERY_WORD = "|".join(word for split in Split for word in split.value)
_SPLIT_IN_NAME = re.compile(rf"(?:^|[/._-])({_EVERY_WORD})(?=[/._-]|$)", re.IGNORECASE)


def data_files(names: Iterable[str | Path], split: Split | None = None) -> list[Path]:
    """The files, in order. A folder or a dataset of the hub that has splits gives those of `split`."""
    return [path for name in names for path in _files_of(str(name), split)]


def is_on_the_hub(name: str) -> bool:
    """Whether reading it would ask the hub: hf://datasets/OWNER/NAME, or OWNER/NAME that leads nowhere here."""
    return HubDataset.of(name) is not None and not _is_here(name)


def _files_of(name: str, split: Split | None) -> list[Path]:
    dataset = HubDataset.of(name)
    if dataset is not None and not _is_here(name):
        files = dataset.files()
        if dataset.is_whole:
            files = _chosen(files, split, name)
            folders = sorted({str(Path(entry).parent) for entry in files})
            if len(folders) > 1:  # configurations, each of them the whole dataset in another form
                raise DataError(f"{name}: has {', '.join(folders[:8])}: name one, as {dataset}/{folders[0]}/*")
        return dataset.fetch(files)
    if _ADDRESS.match(name):
        raise DataError(f"{name}: addresses are not read: download it, or name hf://datasets/OWNER/NAME/FILE")
    path = expand(name)
    try:
        if path.is_dir():
            return _in_folder(path, split)
        if not _GLOB.search(name) or path.exists():
            return [path]  # whoever reads it says what is wrong with it
        matches = sorted(Path(entry) for entry in glob.glob(str(path), recursive=True))
    except (OSError, ValueError, re.error) as error:
        raise DataError(f"{name[:200]}: cannot be read: {error}") from error
    paths = [entry for entry in matches if is_data(entry) and not entry.is_dir()]
    if not paths:
        raise DataError(f"{name}: no data file matches (from {Path.cwd()})")
    return paths


def _in_folder(folder: Path, split: Split | None) -> list[Path]:
    if (folder / _DICT).is_file():
        return _in_folder(folder / _split_of(_saved(folder / _DICT).get("splits"), split, folder), None)
    if (folder / _STATE).is_file():
        return _of_dataset(folder)
    names = []
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        if is_data(path) and path.is_file() and not any(part.startswith((".", "_")) for part in inside.parts):
            names.append(inside.as_posix())
            if len(names) > MOST_FILES:
                raise DataError(f"{folder}: more than {MOST_FILES} data files")
    if not names:
        raise DataError(f"{folder}: a folder without data files: {nearest(folder.name, _neighbours(folder))}")
    return [folder / name for name in _chosen(sorted(names), split, str(folder))]


def _chosen(files: Sequence[str], split: Split | None, where: str) -> list[str]:
    """All of them, or those of the split where names tell of splits: nobody trains on test.parquet by accident."""
    by_word: dict[str, list[str]] = {}
    for name in files:
        if (match := _SPLIT_IN_NAME.search(name)) is not None:
            by_word.setdefault(match[1].lower(), []).append(name)
    if not by_word:
        return list(files)
    return by_word[_split_of(sorted(by_word), split, where)]


def _split_of(names: Any, split: Split | None, where: object) -> str:
    plain: list[str] = [name for name in names if is_file_name(name)] if isinstance(names, list) else []
    words: tuple[str, ...] = () if split is None else split.value
    for word in words:
        if word in plain:
            return word
    wanted = f", none of them {' or '.join(words)}" if words else ""
    raise DataError(f"{where}: has the splits {', '.join(plain) or '(none)'}{wanted}: name the files of one")


def _of_dataset(folder: Path) -> list[Path]:
    """The files of a saved dataset, as its state names them."""
    state = _saved(folder / _STATE)
    entries = state.get("_data_files")
    listed = entries if isinstance(entries, list) else []
    names: list[Any] = [entry.get("filename") for entry in listed if isinstance(entry, dict)]
    if not names or not all(is_file_name(name) for name in names):
        raise DataError(f"{folder / _STATE}: names no data files")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder}: saved with a row selection (indices): save the result of flatten_indices() instead")
    return [folder / name for name in names]


def _saved(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes()[:10_000_000])
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {str(error)[:200]}") from error
    return content if isinstance(content, dict) else {}


def _neighbours(folder: Path) -> list[str]:
    return [entry.name for entry in folder.parent.iterdir() if entry != folder and is_data(entry)]


def _is_here(name: str) -> bool:
    """Whether a path leads somewhere, or begins here: `data/trian` is a slip in a folder, no dataset of `data`'s."""
    try:
        path = Path(name)
        return not name.startswith("hf:") and (path.exists() or path.parent.is_dir())
    except (OSError, ValueError):
        return True


SCHEME = "hf://datasets/"
_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w.-]+))?(?:/(.+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubDataset:
    """`hf://datasets/OWNER/NAME@REVISION/main/train-*.parquet`, or OWNER/NAME alone."""

    repository: str
    revision: str | None
    pattern: str | None
    """Which of its files; None for all of them."""

    @classmethod
    def of(cls, name: str) -> "HubDataset | None":
        """What a name may mean; None for any other."""
        is_address = name.startswith(SCHEME)
        match = _NAME.fullmatch(name.removeprefix(SCHEME))
        if name.startswith("hf:") and (not is_address or match is None):
            raise DataError(f"{name}: a dataset of the hub is {SCHEME}OWNER/NAME, or {SCHEME}OWNER/NAME/FILE")
        if match is None or (not is_address and (match[3] is not None or is_data(Path(name)))):
            return None
        return cls(match[1], match[2], match[3])

    @property
    def is_whole(self) -> bool:
        """Whether no files of it are named."""
        return self.pattern is None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{SCHEME}{self.repository}{revision}{'' if self.pattern is None else f'/{self.pattern}'}"

    def files(self) -> list[str]:
        """The data files that are meant, by the hub's list, or the cache's where it cannot be asked."""
        listed = [name for name in self._listed() if is_data(Path(name)) and not name.startswith(".")]
        chosen = [name for name in listed if self.pattern is None or _is_like(name, self.pattern)]
        if not chosen:
            listing = f"; it has {', '.join(listed[:6])}" if listed else ""
            raise DataError(f"{self}: no such data file on the hub{listing}")
        return sorted(chosen)

    def fetch(self, names: Sequence[str]) -> list[Path]:
        """Downloads these files; gives their paths in the hub's cache."""
        from huggingface_hub import hf_hub_download

        try:
            return [
                Path(hf_hub_download(self.repository, name, repo_type="dataset", revision=self.revision))
                for name in names
            ]
        except _errors() as error:
            raise DataError(f"{self}: the hub does not give it: {_first_line(error)}") from error

    def _listed(self) -> list[str]:
        from huggingface_hub import HfApi, snapshot_download

        try:
            info = HfApi().dataset_info(self.repository, revision=self.revision)
            return [entry.rfilename for entry in info.siblings or ()]
        except _errors() as error:
            try:
                folder = Path(
                    snapshot_download(
                        self.repository, repo_type="dataset", revision=self.revision, local_files_only=True
                    )
                )
            except _errors():
                raise DataError(
                    f"{self}: is not here, not in the cache, and the hub does not give it: {_first_line(error)}"
                ) from error
            return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _is_like(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern.rstrip('/')}/")


def _errors() -> tuple[type[Exception], ...]:
    """OSError, ValueError for an answer without sense, and what the client's HTTP library raises, whichever it is."""
    from huggingface_hub.errors import HfHubHTTPError

    return (ValueError, OSError, *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
