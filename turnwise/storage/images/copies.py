"""Images a run speaks of, kept with it: copies under images/ by content, and what its tools' sessions call them."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from turnwise.errors import DataError, StorageError
from turnwise.ledger import Media
from turnwise.storage.images.reader import (
    FOLDER,
    LARGEST,
    STORED_NAME,
    Rename,
    in_file,
    inlined,
    kept_content,
    stored_name,
    with_sources,
)
from turnwise.storage.json_text import parse
from turnwise.storage.run_dir import RunDir
from turnwise.system.files import replacing
from turnwise.system.image_bytes import ENDINGS, data_url, digest_of
from turnwise.system.image_sources import is_file_name, kept_name, read_image
from turnwise.types import Image, Sample, Trajectory

IMAGES = f"{FOLDER}/index.jsonl"
NOT_KEPT = "/dev/null/an image that the run did not keep"


class Album:
    """The images of a run that is being written. Its one writer keeps it, so that the index is read once, not at
    every step."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._known: dict[str, str] | None = None

    def keep(self, trajectories: Sequence[Trajectory]) -> Rename:
        """Copy the images that trajectories name or hold, and give what stands for each in their file.

        An inline one is the name of its copy there; the trajectories keep it. Only what tools left in the calls' info,
        a data URL as `info["images"][i]["data"]`, is moved out of them: in its place comes `file`, its name in the run.
        A file that is gone or is no image is left as it is: a name without a picture.
        """
        inline: dict[str, str] = {}
        same: dict[str, str] = {}
        drawn = list(_drawn(trajectories))
        for source in dict.fromkeys((*_sources(trajectories), *(picture["data"] for picture in drawn))):
            if source.startswith("data:"):
                content = _content(source)
                if content is not None and (file := _keep(self._run, content)) is not None:
                    inline[source] = file
                    if data_url(content) == source:  # as whoever reads the copy writes it
                        same[source] = file
            elif not source.startswith(("http:", "https:")):
                self._keep_source(source)
        for media in _shown(trajectories):
            _keep(self._run, media.content)
        for picture in drawn:
            if picture["data"] in inline:
                picture["file"] = inline[picture.pop("data")]
        return lambda source: same.get(source) or in_file(source)

    def _keep_source(self, source: str) -> None:
        if self._known is None:
            self._known = _known(self._run)
        if source in self._known:
            return
        content = _content(source)
        if content is not None and (file := _keep(self._run, content)) is not None:
            self._run.append_jsonl(IMAGES, {"source": source, "file": file})
            self._known[source] = file


def with_copies(run: RunDir, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories with the run's own copies in the place of images that lay elsewhere, and inline ones inline.

    No other file is named any more: the run may have been sent, and what it names is then a file of the reader's.
    """
    files = {source: str(run.path / file) for source, file in _known(run).items() if _is_copy(run.path, file)}
    inline = inlined(run.path)

    def kept(source: str) -> str:
        if source.startswith(("data:", "http:", "https:")):
            return inline(source)
        return files.get(source, f"{NOT_KEPT}/{Path(source).name}")

    return [with_sources(trajectory, kept) for trajectory in trajectories]


def check_kept(folder: Path, trajectory: Trajectory) -> None:
    """StorageError for an image that the run in this folder should have a copy of and has not: it is needed now."""
    gone = next((name for name in map(kept_name, _sources([trajectory])) if name is not None), None)
    if gone is not None:
        raise StorageError(f"{folder}: the image {gone} of an episode of {trajectory.sample.id} is gone or damaged")


@contextmanager
def recalled(run: RunDir, trajectories: Sequence[Trajectory]) -> Iterator[None]:
    """Meanwhile what tools drew stands in the calls' info again, as `data`, for a scorer that looks at it.

    A file that is gone, or is no image, stays a name.
    """
    moved: list[tuple[dict[str, Any], str]] = []
    for picture in _noted(trajectories):
        name = picture.get("file")
        content = kept_content(run.path, name) if isinstance(name, str) else None
        url = None if content is None else data_url(content)
        if url is not None:
            moved.append((picture, picture.pop("file")))
            picture["data"] = url
    try:
        yield
    finally:
        for picture, name in moved:
            del picture["data"]
            picture["file"] = name


def prepare_again(folder: Path, trajectories: Iterable[Trajectory], prepare: Callable[[bytes], Media] | None) -> None:
    """Have the images of trajectories that were read from this run's folder prepared for a model, by its processor.

    StorageError for one whose file is gone or damaged, or that the processor shows with other tokens than it had.
    """

    def again(media: Media) -> Media:
        if media.content:
            return media
        if prepare is None:
            raise StorageError(f"{folder} has episodes with images, and the model reads text only")
        copies = (kept_content(folder, f"{FOLDER}/{media.digest}.{ending}") for ending in ENDINGS)
        content = next((content for content in copies if content is not None), None)
        if content is None or digest_of(content) != media.digest:
            raise StorageError(f"{folder}: the image images/{media.digest} of an episode is gone or damaged")
        prepared = prepare(content)
        if prepared.digest != media.digest:
            raise ValueError("it is scaled differently, because chat.max_pixels has changed")
        return prepared

    for ledger in [ledger for trajectory in trajectories for ledger in trajectory.segments if ledger.media]:
        try:
            ledger.renew(again)
        except (ValueError, DataError) as error:
            raise StorageError(
                f"{folder}: the model's image processor does not show an image as it was shown then: {error}"
            ) from error


def _shown(trajectories: Iterable[Trajectory]) -> Iterator[Media]:
    """Images that the model was shown, whose bytes are here; those that were read back are kept already."""
    for trajectory in trajectories:
        for ledger in trajectory.segments:
            yield from (span.media for span in ledger.media if span.media.content)


def is_kept(run: RunDir, source: str) -> bool:
    """Whether the file of this name here has the bytes of the copy that the run keeps of it."""
    copy = kept_content(run.path, _known(run).get(source, ""))
    return copy is not None and copy == _content(source)


def _known(run: RunDir) -> dict[str, str]:
    """The copy of each source; a line that makes no sense only means that a picture is kept again."""
    if not (run.path / IMAGES).is_file():
        return {}
    copies = {}
    for line in run.read_text(IMAGES).split("\n"):
        try:
            entry = parse(line) if line else None
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("source"), str) and isinstance(entry.get("file"), str):
            copies[entry["source"]] = entry["file"]
    return copies


_KIND = re.compile(r"data:image/([a-z0-9.+-]{1,20})[;,]", re.ASCII | re.IGNORECASE)
NAMES = "image_names"
"""In `Sample.info`, where data/samples.py puts them."""


def images_for(sample: Sample, kwargs: Mapping[str, Any]) -> dict[str, Image]:
    """What a tool's session looks at, by the name that it has there.

    Those are the sample's images, or, where the row shows the model a smaller view of it, what it gives this tool as
    `create_kwargs.image` (one, or a list). `kwargs` are the row's `tools_kwargs` for it.
    """
    own = _under(_under(kwargs, "create_kwargs"), "image")
    named = _under(sample.info.get("extra_info"), "image_file_name")
    names = [named] if isinstance(named, str) else named
    if own is None:
        images = list(sample.images)
        names = sample.info.get(NAMES) or names
    else:
        images = [Image(_source(value)) for value in (own if isinstance(own, list) else [own])]
    images_by_name: dict[str, Image] = {}
    for number, image in enumerate(images):
        name = session_name(image, number, "image" if own is None else "canvas")
        if image.source.startswith("data:") and isinstance(names, list) and number < len(names):
            name = names[number] if is_file_name(names[number]) else name
        images_by_name[f"{number}_{name}" if name in images_by_name else name] = image
    return images_by_name


def _under(value: Any, key: str) -> Any:
    """What an object has under a key; nothing where it is none, as in a run that somebody else wrote."""
    return value.get(key) if isinstance(value, Mapping) else None


def session_name(image: Image, number: int, stem: str = "image") -> str:
    """What a tool's session calls an image: its file's name, or `image_0.png` by number for an inline one."""
    if not image.source.startswith("data:"):
        return Path(image.source).name
    kind = _KIND.match(image.source)
    return f"{stem}_{number}.{kind[1] if kind else 'png'}"


def _source(own: Any) -> str:
    """A path, a data URL, bytes, or one of them as {"image": ...}."""
    if isinstance(own, dict):
        own = own.get("bytes") or own.get("image", own.get("path"))
    source = data_url(own) if isinstance(own, bytes) else own
    if not isinstance(source, str):
        raise DataError("create_kwargs.image is a path, a data URL or the bytes of an image, or a list of them")
    return source.removeprefix("file://")


def _sources(trajectories: Iterable[Trajectory]) -> Iterator[str]:
    for trajectory in trajectories:
        yield from (image.source for image in trajectory.sample.images)
        for kwargs in trajectory.sample.tools_kwargs.values():
            with suppress(DataError):  # another tool's word for something else
                yield from [image.source for image in images_for(trajectory.sample, kwargs).values()]
        beside = (message for branch in trajectory.branches for message in branch.messages)
        replies = (reply for turn in trajectory.every_turn for reply in turn.replies)  # a loop may drop what it heard
        for message in (*trajectory.sample.prompt, *trajectory.messages, *beside, *replies):
            if not isinstance(message.content, str):
                yield from (part.source for part in message.content if isinstance(part, Image))


def _drawn(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    return (image for image in _noted(trajectories) if str(image.get("data", "")).startswith("data:image/"))


def _noted(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    for trajectory in trajectories:
        for call in trajectory.every_call:
            pictures = call.info.get("images")
            yield from (image for image in pictures if isinstance(image, dict)) if isinstance(pictures, list) else ()


def _content(source: str) -> bytes | None:
    try:
        return read_image(source, LARGEST)
    except DataError:
        return None


def _is_copy(folder: Path, name: str) -> bool:
    """Whether a copy of this name lies in a run's folder, and no link that leads elsewhere."""
    if not STORED_NAME.fullmatch(name) or (folder / FOLDER).is_symlink():
        return False
    return (folder / name).is_file() and not (folder / name).is_symlink()


def _keep(run: RunDir, content: bytes) -> str | None:
    name = stored_name(content)
    if name is not None and not (run.path / name).is_file():
        with replacing(run.file(name)) as file:
            file.write(content)
    return name
