"""Misuse of tools that is plain from the record, so that no judge need be asked."""

import enum
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import ConfigError, DataError, ScoringFailed
from turnwise.errors.nearest_name import unknown
from turnwise.storage.images.copies import images_for
from turnwise.storage.tool_behaviour import prints_only, repeated
from turnwise.system.image_sources import read_source
from turnwise.types import CallRecord, CallStatus, Sample, Trajectory, Turn

Box = tuple[float, float, float, float]
LEAST_TEXT = 16
"""Two sums may well both give 5; from this many characters on, the same text again is no coincidence."""
EXECUTED = (CallStatus.OK, CallStatus.ERROR, CallStatus.CRASHED, CallStatus.TIMEOUT)
"""The tool was run."""
FAULTY = (*EXECUTED[1:], CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL, CallStatus.BAD_ARGUMENTS)
"""The call did not do what it was made for, and that is the policy's affair."""

# What Pillow says of a box whose sides are swapped, the sandbox of an image without pixels, and our tools of either.
_BAD_BOX = re.compile(
    r"Coordinate '(?:right|lower)' is less than '(?:left|upper)'|an image of (?:0 x \d+|\d+ x 0) pixels"
    r"|is no region of the image"
)


class ToolMisuse(enum.StrEnum):
    """What a turn may have done wrong."""

    INVALID_CROP = "invalid_crop"
    """A box outside the image, or with nothing in it."""
    DUPLICATE_CALL = "duplicate_call"
    """A call that asks the same as one before."""
    DUPLICATE_OUTPUT = "duplicate_output"
    """Another call that gave the same images or the same text as one before."""
    UNREPAIRED_ERROR = "unrepaired_error"
    """A call that failed, and none of that tool after it that did not."""
    PRINT_ONLY = "print_only"
    """On a task that needs looking: code that only says what is written in it."""
    LARGE_CROP = "large_crop"
    """A crop of nearly the whole image."""


DEFAULTS = dict.fromkeys(ToolMisuse, -0.5)


@dataclass(frozen=True, slots=True)
class Penalties:
    """What each kind costs, from -1 to 0, and from which share of the image on a crop is large."""

    values: Mapping[ToolMisuse, float] = field(default_factory=lambda: dict(DEFAULTS))
    max_crop: float = 0.9

    @classmethod
    def of(cls, values: Mapping[str, float], max_crop: float) -> "Penalties":
        """The defaults with some of them replaced; a name or number that cannot be is an error."""
        for name, value in values.items():
            if name not in list(ToolMisuse):
                raise ConfigError(f"tool_misuse: {unknown('misuse', name, [misuse.value for misuse in ToolMisuse])}")
            if not -1 <= value <= 0:
                raise ConfigError(f"tool_misuse.{name} must lie between -1 and 0, not {value:g}")
        if not 0 < max_crop <= 1:
            raise ConfigError(f"max_crop is a share of the image, above 0 and at most 1, not {max_crop:g}")
        return cls(DEFAULTS | {ToolMisuse(name): float(value) for name, value in values.items()}, max_crop)

    def total(self, kinds: set[ToolMisuse]) -> float:
        """What a turn with these is worth, -1 at worst."""
        return max(-1.0, sum(self.values[kind] for kind in kinds))


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, what was answered, and the calls before and after it."""

    turn: Turn
    record: CallRecord
    reply: str


def misuse_by_turn(trajectory: Trajectory, *, search: bool, max_crop: float = 0.9) -> dict[int, set[ToolMisuse]]:
    """What each turn did wrong, by turn index; turns that did nothing wrong are not there.

    `search` says that the task needs looking. Only records and replies are read, never what the policy said of them.
    """
    calls = list(_calls(trajectory))
    sizes = _Sizes(trajectory.sample)
    by_turn: dict[int, set[ToolMisuse]] = {}
    seen_outputs: set[str] = set()
    repeats = repeated(call.record for call in calls)
    for number, call in enumerate(calls):
        misuse = set(_crops(call, sizes, max_crop))
        output = _output_key(call)
        if repeats[number]:
            misuse.add(ToolMisuse.DUPLICATE_CALL)
        elif output is not None and output in seen_outputs:
            misuse.add(ToolMisuse.DUPLICATE_OUTPUT)
        if call.record.status in FAULTY and not any(_repairs(later, call) for later in calls[number + 1 :]):
            misuse.add(ToolMisuse.UNREPAIRED_ERROR)
        if search and prints_only(call.record):
            misuse.add(ToolMisuse.PRINT_ONLY)
        seen_outputs |= {output} if output is not None else set()
        if misuse:
            by_turn.setdefault(call.turn.index, set()).update(misuse)
    return by_turn


def _calls(trajectory: Trajectory) -> Iterator[_Call]:
    for turn in trajectory.turns:
        replies = {reply.tool_call_id: reply.text for reply in turn.replies if reply.tool_call_id is not None}
        for record in turn.calls:
            if record.status is not CallStatus.REFUSED:  # not run for a limit of ours
                yield _Call(turn, record, replies.get(record.call.id, ""))


def _repairs(later: _Call, failed: _Call) -> bool:
    """A call that could not be read may have meant any tool."""
    unread = failed.record.status in (CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL)
    same = unread or later.record.call.name == failed.record.call.name
    return later.record.status is CallStatus.OK and same


def _output_key(call: _Call) -> str | None:
    """What a call gave, when that can be told: None for an error, a short text, or an image of unknown origin."""
    images = images_in(call.record)
    if call.record.status is not CallStatus.OK or any(image.get("source") is None for image in images):
        return None
    if images:
        return json.dumps([[image.get(key) for key in ("source", "box", "steps", "size")] for image in images])
    return call.reply if len(call.reply) >= LEAST_TEXT else None


def images_in(record: CallRecord) -> list[dict[str, Any]]:
    """The facts of the images that a call gave, as the python tool records them."""
    images = record.info.get("images")
    return [image for image in images if isinstance(image, dict)] if isinstance(images, list) else []


# --- crops --------------------------------------------------------------------------------------------------------


class _Sizes:
    """Sizes of the images that tools looked at; a file of the sample's is looked at when it is asked for."""

    def __init__(self, sample: Sample) -> None:
        self._sources = {name: image.source for name, image in images_for(sample, {}).items()}
        self._known: dict[str, tuple[int, int]] = {}

    def of(self, image: dict[str, Any]) -> tuple[int, int] | None:
        """The size of an image's source, as the host noted it or by name; None for one that nobody knows."""
        name, noted = image.get("source"), image.get("source_size")
        if name is not None and isinstance(noted, list) and len(noted) == 2:
            return noted[0], noted[1]
        if name is None or name not in self._sources:
            return None
        if name not in self._known:
            self._known[name] = _size(self._sources[name])
        return self._known[name]


def _size(source: str) -> tuple[int, int]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ConfigError("misuse of crops needs Pillow, which is not installed") from error
    try:
        with Image.open(io.BytesIO(read_source(source))) as image:
            return image.size
    except (DataError, OSError, UnidentifiedImageError) as error:
        raise ScoringFailed(f"the size of image {source[:80]} cannot be read: {error}") from error


def _crops(call: _Call, sizes: _Sizes, max_crop: float) -> Iterator[ToolMisuse]:
    if _BAD_BOX.search(call.reply):
        yield ToolMisuse.INVALID_CROP
    for image in images_in(call.record):
        boxes = [
            (number, read_box((step.get("arguments") or {}).get("box")))
            for number, step in enumerate(image.get("steps") or ())
            if step.get("name") == "crop"
        ]
        size = sizes.of(image) if boxes else None
        visible_box = read_box(image.get("box"))
        # Only a first step is known to be in pixels of the source; later boxes are checked for what needs no size.
        if any(box is not None and _is_outside(box, size if number == 0 else None) for number, box in boxes):
            yield ToolMisuse.INVALID_CROP
        elif boxes and size and visible_box and _area(visible_box) > max_crop * size[0] * size[1]:
            yield ToolMisuse.LARGE_CROP


def read_box(value: Any) -> Box | None:
    """Four finite numbers, or None: boxes are what code gave, as its session reports it, and may be anything."""
    if not isinstance(value, list | tuple) or len(value) != 4:
        return None
    if not all(isinstance(side, int | float) and math.isfinite(side) for side in value):
        return None
    left, upper, right, lower = map(float, value)
    return left, upper, right, lower


def _is_outside(box: Box, size: tuple[int, int] | None) -> bool:
    left, upper, right, lower = box
    empty = right <= left or lower <= upper
    return empty or left < 0 or upper < 0 or (size is not None and (right > size[0] or lower > size[1]))


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
