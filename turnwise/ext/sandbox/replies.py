"""A session's reply as a Result. Every field was written by untrusted code: it is checked, bounded and cleaned here."""

from typing import Any

from turnwise.ext.sandbox.limits import Limits
from turnwise.ext.sandbox.results import (
    CHANNELS,
    MAX_NOTICES,
    MAX_STEPS,
    Box,
    ExecutionStatus,
    Failure,
    Picture,
    Provenance,
    Result,
    Step,
    clean,
)
from turnwise.ext.sandbox.wire import Caps, ProtocolError, WireFrame, read_header

_FROM_INSIDE = {
    ExecutionStatus.OK,
    ExecutionStatus.ERROR,
    ExecutionStatus.TIMEOUT,
    ExecutionStatus.MEMORY,
    ExecutionStatus.DENIED,
}
MAX_DEPTH = 16
FAR = 1e9
"""Further away than any pixel of an image."""
MAX_NAME = 200
MAX_FAILURE = 8_000


MAX_NOTICE = 1_000
MAX_SOURCE = 1_000
SLACK = 200
"""Characters of the note that says how much of a text was left out."""
ESCAPED = 12
"""Bytes of JSON that one character takes at most."""
IMAGE_BYTES = 128 * 1024
"""Of JSON that tells of one image; inside, trails are kept shorter than that."""


def caps_of(limits: Limits) -> Caps:
    """What an honest reply cannot be longer than."""
    failure = MAX_NAME + 2 * MAX_FAILURE + MAX_SOURCE
    characters = 3 * (limits.output + SLACK) + failure + MAX_NOTICES * MAX_NOTICE
    header = 1024 + ESCAPED * characters + limits.images * IMAGE_BYTES
    return Caps(header, header + limits.pixels * max(CHANNELS.values()))


def read_reply(frame: WireFrame, number: int, limits: Limits, seconds: float) -> Result:
    """The result a well-formed reply tells after so many seconds; ProtocolError for any other."""
    header, blobs = read_header(frame.header), frame.blobs
    if header.get("id") != number or isinstance(header.get("id"), bool):
        raise ProtocolError("an answer to another question")
    try:
        status = ExecutionStatus(str(header.get("status")))
    except ValueError as error:
        raise ProtocolError("an unknown status") from error
    if status not in _FROM_INSIDE:
        raise ProtocolError(f"a status that only the host can know: {status}")
    peak = header.get("peak", 0)
    if type(peak) is not int or not 0 <= peak < 1 << 50:
        raise ProtocolError("a peak memory that is not a number of bytes")
    value = header.get("value")
    longest = limits.output + SLACK
    return Result(
        status=status,
        stdout=_text(header.get("stdout", ""), longest),
        stderr=_text(header.get("stderr", ""), longest),
        value=None if value is None else _text(value, longest),
        images=_pictures(header.get("images", []), blobs, limits),
        failure=_failure(header.get("failure")),
        notices=tuple(_text(notice, MAX_NOTICE) for notice in _list(header.get("notices", []), MAX_NOTICES)),
        seconds=seconds,
        peak_memory=peak,
    )


def _text(value: Any, limit: int) -> str:
    if not isinstance(value, str):
        raise ProtocolError("a value that is not text")
    return clean(value[:limit])


def _list(value: Any, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise ProtocolError("a value that is not a list, or too long a list")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError("a value that is not an object")
    return value


def _failure(value: Any) -> Failure | None:
    if value is None:
        return None
    fields = _dict(value)
    line, source = fields.get("line"), fields.get("source")
    if line is not None and (type(line) is not int or not 0 <= line < 1 << 31):
        raise ProtocolError("a line that is not a number")
    return Failure(
        kind=_text(fields.get("kind"), MAX_NAME),
        message=_text(fields.get("message"), MAX_FAILURE),
        line=line,
        source=None if source is None else _text(source, MAX_SOURCE),
        traceback=_text(fields.get("traceback"), MAX_FAILURE),
    )


def _pictures(value: Any, blobs: memoryview, limits: Limits) -> tuple[Picture, ...]:
    pictures, start, pixels = [], 0, 0
    for entry in map(_dict, _list(value, limits.images)):
        mode, size, length = entry.get("mode"), entry.get("size"), entry.get("length")
        if not isinstance(mode, str) or mode not in CHANNELS or type(length) is not int:
            raise ProtocolError("an image of an unknown kind")
        if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 0 < n < 1 << 20 for n in size):
            raise ProtocolError("an image of impossible size")
        pixels += size[0] * size[1]
        if length != size[0] * size[1] * CHANNELS[mode] or start + length > len(blobs) or pixels > limits.pixels:
            raise ProtocolError("an image whose size does not fit")
        data = bytes(blobs[start : start + length])
        start += length
        provenance = _provenance(_dict(entry.get("provenance", {})))
        pictures.append(Picture(_text(entry.get("name"), MAX_NAME), mode, (size[0], size[1]), data, provenance))
    if start != len(blobs):
        raise ProtocolError("bytes that belong to no image")
    return tuple(pictures)


def _provenance(value: dict[str, Any]) -> Provenance:
    source = value.get("source")
    steps = tuple(
        Step(_text(step.get("name"), MAX_NAME), _arguments(step.get("arguments", {})))
        for step in map(_dict, _list(value.get("steps", []), MAX_STEPS))
    )
    name = None if source is None else _text(source, MAX_NAME)
    return Provenance(name, _box(value.get("box")), steps, _box(value.get("frame")))


def _box(value: Any) -> Box | None:
    if value is None:
        return None
    if len(_list(value, 4)) != 4 or not all(type(n) in (int, float) and -FAR < n < FAR for n in value):
        raise ProtocolError("a box that is none")
    return (float(value[0]), float(value[1]), float(value[2]), float(value[3]))


def _arguments(value: Any) -> dict[str, Any]:
    arguments = _dict(value)
    try:
        size = len(repr(arguments))
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise ProtocolError("a step with endless arguments") from error
    if size > 2000:
        raise ProtocolError("a step with endless arguments")
    return {_text(key, MAX_NAME): _clean_all(argument, 0) for key, argument in arguments.items()}


def _clean_all(value: Any, depth: int) -> Any:
    """JSON values with clean texts, not nested without end."""
    if depth > MAX_DEPTH:
        raise ProtocolError("a step with endless arguments")
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_clean_all(entry, depth + 1) for entry in value]
    if isinstance(value, dict):
        return {clean(key): _clean_all(entry, depth + 1) for key, entry in value.items()}
    return value
