"""Datasets of the Hugging Face hub: which files one has, fetched into the local cache; what is there serves offline."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.data.rows import is_data
from turnwise.errors import DataError

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
        found = _NAME.fullmatch(name.removeprefix(SCHEME))
        if name.startswith("hf:") and (not is_address or found is None):
            raise DataError(f"{name}: a dataset of the hub is {SCHEME}OWNER/NAME, or {SCHEME}OWNER/NAME/FILE")
        if found is None or (not is_address and (found[3] is not None or is_data(Path(name)))):
            return None
        return cls(found[1], found[2], found[3])

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
            shown = f"; it has {', '.join(listed[:6])}" if listed else ""
            raise DataError(f"{self}: no such data file on the hub{shown}")
        return sorted(chosen)

    def fetch(self, names: Sequence[str]) -> list[Path]:
        """Their places in the cache."""
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
            return [one.rfilename for one in info.siblings or ()]
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
