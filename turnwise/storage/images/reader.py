"""Images that a run keeps by content: what stands for them in its files, and the one reader of the copies.

A trajectory file says `images/DIGEST.png`, a name in the run's folder, where an image was inline. Who reads it gets the
image inline again, or its name alone as an unread one (`image_sources.kept_name`), which no path can be mistaken for.
"""

import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.storage.run_dir import ABANDONED, CONFIG, RESCORED
from turnwise.system.image_bytes import ENDINGS, data_url, digest_of, file_ending, media_type
from turnwise.system.image_sources import kept_name, unread
from turnwise.types import Image, Message, Part, Sample, Trajectory, Turn

FOLDER = "images"
LARGEST = 32 << 20
STORED_NAME = re.compile(rf"{FOLDER}/[0-9a-f]{{8,64}}\.({'|'.join(ENDINGS)}|jpeg)", re.ASCII)
"""What `stored_name` gives; no other file is served or read as an image of a run."""
ALL_INLINE = ("3", "4", "5")
"""Formats of trajectory files in which inline images stand as they are."""
Rename = Callable[[str], str]
_REFERENCE = re.compile(rf"{FOLDER}/[0-9a-f]{{32}}\.({'|'.join(ENDINGS)})", re.ASCII)
_SAME_PATH = re.compile(rf"(\./)*{_REFERENCE.pattern}", re.ASCII)


def stored_name(content: bytes) -> str | None:
    """What a run calls its copy of an image, by what is in it: `images/5d41....png`; None for what is no image."""
    ending = file_ending(content)
    return None if ending is None else f"{FOLDER}/{digest_of(content)}.{ending}"


def kept_content(folder: Path, name: str, most: int = LARGEST) -> bytes | None:
    """The copy of this name in a run's folder; None for one that is gone, too large or no image.

    A run may have been sent: no link is followed, neither a file that is one nor the folder of the images.
    """
    if not STORED_NAME.fullmatch(name) or (folder / FOLDER).is_symlink():
        return None
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would hold us
        with open(os.open(folder / name, flags), "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read() if stat.S_ISREG(status.st_mode) and status.st_size <= most else b""
    except OSError:
        return None
    return None if media_type(content) is None else content


def in_file(source: str) -> str:
    """A source as a trajectory file has it: the name of a copy alone, and a path of that shape with `./` before it."""
    if (name := kept_name(source)) is not None:
        return name
    return f"./{source}" if _SAME_PATH.fullmatch(source) else source


def from_file(value: str) -> str:
    """The source that stands in a trajectory file so; a copy is left unread."""
    if _REFERENCE.fullmatch(value):
        return unread(value)
    return value.removeprefix("./") if _SAME_PATH.fullmatch(value) else value


def inlined(folder: Path) -> Rename:
    """Gives unread copies of the run in this folder as data URLs, each read once; one that is gone or is not what its
    name says stays unread."""
    cache: dict[str, str] = {}

    def source(url: str) -> str:
        name = kept_name(url)
        if name is None:
            return url
        if url not in cache:
            content = kept_content(folder, name)
            whole = content is not None and stored_name(content) == name
            cache[url] = (data_url(content) if content is not None and whole else None) or url
        return cache[url]

    return source


def home_of(folder: Path) -> Path:
    """The folder of the run that keeps the images of this one: itself, or, for a rescoring and for what a resume put
    aside, the run that it lies in."""
    parent = folder.absolute().parent
    run = parent.parent if parent.name == RESCORED else parent if folder.name == ABANDONED else folder
    return run if (run / CONFIG).is_file() and not os.path.lexists(folder / FOLDER) else folder


def run_of(path: Path) -> Path:
    """The folder of the run whose images a trajectory file speaks of: RUN/eval/step_000000.parquet."""
    return home_of(path.absolute().parent.parent)


def with_sources(trajectory: Trajectory, name: Rename) -> Trajectory:
    """The trajectory with other names for the images it speaks of; itself where it speaks of none."""
    sample = trajectory.sample
    conversations = [sample.prompt, trajectory.messages, *(branch.messages for branch in trajectory.branches)]
    conversations += [turn.replies for turn in trajectory.every_turn]
    in_parts = any(not isinstance(message.content, str) for messages in conversations for message in messages)
    if not (in_parts or sample.images or sample.tools_kwargs):
        return trajectory
    branches = [
        replace(branch, messages=_messages(branch.messages, name), turns=_turns(branch.turns, name))
        for branch in trajectory.branches
    ]
    return replace(
        trajectory,
        sample=_sample(sample, name),
        messages=_messages(trajectory.messages, name),
        turns=_turns(trajectory.turns, name),
        branches=branches,
    )


def _sample(sample: Sample, name: Rename) -> Sample:
    info, extra = sample.info, sample.info.get("extra_info")
    if isinstance(extra, dict) and isinstance(extra.get("tools_kwargs"), dict):  # where the row had them
        info = info | {"extra_info": extra | {"tools_kwargs": _kwargs(extra["tools_kwargs"], name)}}
    return replace(
        sample,
        images=tuple(Image(name(image.source)) for image in sample.images),
        prompt=tuple(_messages(sample.prompt, name)),
        tools_kwargs=_kwargs(sample.tools_kwargs, name),
        info=info,
    )


def _kwargs(tools_kwargs: dict[str, Any], name: Rename) -> dict[str, Any]:
    """With other names for what a row gives a tool to look at: `create_kwargs.image`, one or a list of them."""
    result = dict(tools_kwargs)
    for tool, kwargs in tools_kwargs.items():
        created = kwargs.get("create_kwargs") if isinstance(kwargs, dict) else None
        if isinstance(created, dict) and "image" in created:
            image = created["image"]
            renamed = [_given(entry, name) for entry in image] if isinstance(image, list) else _given(image, name)
            result[tool] = kwargs | {"create_kwargs": created | {"image": renamed}}
    return result


def _given(value: Any, name: Rename) -> Any:
    """A path or a data URL, alone or as {"image": ...}; other values are left as they are."""
    if isinstance(value, dict):
        return value | {key: name(value[key]) for key in ("image", "path") if isinstance(value.get(key), str)}
    return name(value) if isinstance(value, str) else value


def _messages(messages: Sequence[Message], name: Rename) -> list[Message]:
    return [
        message if isinstance(message.content, str) else _message(message, message.content, name)
        for message in messages
    ]


def _message(message: Message, parts: Sequence[Part], name: Rename) -> Message:
    return replace(
        message, content=tuple(Image(name(part.source)) if isinstance(part, Image) else part for part in parts)
    )


def _turns(turns: Sequence[Turn], name: Rename) -> list[Turn]:
    return [replace(turn, replies=_messages(turn.replies, name)) for turn in turns]
