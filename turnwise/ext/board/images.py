"""Images a page may load: inline ones as they are, files only as the copies that the run keeps."""

import json
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from turnwise.ext.board.json_values import clean_text
from turnwise.ext.board.table import NotThere
from turnwise.storage.images.copies import IMAGES
from turnwise.storage.images.reader import STORED_NAME, home_of, kept_content
from turnwise.storage.run_dir import RunDir
from turnwise.system.image_bytes import ENDINGS, media_type
from turnwise.system.image_sources import kept_name
from turnwise.types import Image

LARGEST_INLINE = 8 << 20
LARGEST_FILE = 64 << 20
_INLINE = re.compile(r"data:image/(png|jpeg|jpg|gif|webp|bmp);base64,[A-Za-z0-9+/]*={0,2}", re.ASCII | re.IGNORECASE)
_SHOWN = 200
_INDEX_KEPT = 8


class Pictures:
    """The images of one run; `name` is what the run is called in addresses."""

    def __init__(self, run: RunDir, name: str | None = None) -> None:
        self._folder = home_of(run.path)
        self._name = name or run.name
        self._files = _index(self._folder / IMAGES)

    def url(self, source: str) -> str | None:
        """Where a page finds an image by its source; None when it may not be loaded or is not kept."""
        if (name := kept_name(source)) is not None:
            return self.file_url(name) if (self._folder / name).is_file() else None
        if source.startswith("data:"):
            return source if len(source) <= LARGEST_INLINE and _INLINE.fullmatch(source) else None
        return self.file_url(self._files.get(source))

    def file_url(self, file: Any) -> str | None:
        """Where a page finds an image that the run keeps under this name."""
        if not isinstance(file, str) or not STORED_NAME.fullmatch(file):
            return None
        return f"/api/runs/{quote(self._name, safe='')}/image?name={quote(file, safe='')}"

    def shown_url(self, digest: str) -> str | None:
        """Where a page finds an image that the model was shown, by what its ledger calls it."""
        names = [f"images/{digest}.{ending}" for ending in ENDINGS]
        stored = (name for name in names if STORED_NAME.fullmatch(name) and (self._folder / name).is_file())
        return self.file_url(next(stored, None))

    def reference(self, image: Image) -> dict[str, Any]:
        """`{"url", "source"}` of an image; the source of an inline one is cut short."""
        return {"url": self.url(image.source), "source": source_label(image.source)}

    def references(self, images: Iterable[Image]) -> list[dict[str, Any]]:
        return [self.reference(image) for image in images]


def source_label(source: str) -> str:
    """An image's source as short text to show: its stored name where it has one."""
    text = clean_text(kept_name(source) or source)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def image_bytes(run: RunDir, name: str) -> tuple[bytes, str]:
    """(content, media type) of an image that the run keeps; NotThere for anything else."""
    content = kept_content(home_of(run.path), name, LARGEST_FILE)
    kind = None if content is None else media_type(content)
    if content is None or kind is None:
        raise NotThere("no such image", "No such image")
    return content, kind


_lock = threading.Lock()
_indexes: dict[Path, tuple[tuple[int, int], dict[str, str]]] = {}


def _index(path: Path) -> dict[str, str]:
    """File by source; read again when it changed. A line that makes no sense leaves its image without a picture."""
    try:
        status = path.stat()
    except OSError:
        return {}
    stamp = (status.st_mtime_ns, status.st_size)
    with _lock:
        cached = _indexes.get(path)
    if cached is not None and cached[0] == stamp:
        return cached[1]
    index = _read_index(path)
    with _lock:
        _indexes.pop(path, None)
        while len(_indexes) >= _INDEX_KEPT:
            del _indexes[next(iter(_indexes))]
        _indexes[path] = (stamp, index)
        return index


def _read_index(path: Path) -> dict[str, str]:
    files: dict[str, str] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:  # a name without a picture then
        return files
    for line in lines:
        try:
            entry = json.loads(line) if line else None
        except (ValueError, RecursionError):
            continue
        match entry:
            case {"source": str() as source, "file": str() as file} if STORED_NAME.fullmatch(file):
                files[source] = file
    return files
