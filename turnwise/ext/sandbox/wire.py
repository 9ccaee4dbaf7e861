"""Frames between the host and a session: two lengths, a JSON header, raw blobs. Never pickle.

Both sides use it; the host treats everything it reads as written by an attacker.
"""

import json
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

PREFIX = struct.Struct("!II")
"""Bytes after the prefix, and how many of them are the header."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Bytes that one frame may have: its header, and all of it after the prefix."""

    header: int
    frame: int


REQUESTS = Caps(16 * 1024 * 1024, 128 * 1024 * 1024)
"""From the host: code, and images where they cannot be handed over open."""


@dataclass(frozen=True, slots=True)
class WireFrame:
    """A header that nobody has looked into, and its blobs."""

    header: memoryview
    blobs: memoryview


class ProtocolError(Exception):
    """Bytes that are not a frame, or a frame that breaks the rules."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_refuse)


def pack(header: dict[str, Any], *blobs: bytes) -> bytes:
    """The bytes of one frame: its header, then the blobs."""
    encoded = _ENCODER.encode(header).encode()
    return b"".join((PREFIX.pack(len(encoded) + sum(map(len, blobs)), len(encoded)), encoded, *blobs))


def lengths(prefix: bytes | bytearray, caps: Caps) -> tuple[int, int]:
    """(bytes after the prefix, bytes of the header)."""
    total, header = PREFIX.unpack(prefix)
    if header > total or header > caps.header or total > caps.frame:
        raise ProtocolError(f"a frame of {total} bytes with a header of {header}")
    return total, header


def read_header(encoded: bytes | memoryview) -> dict[str, Any]:
    """The header, which must be a JSON object."""
    try:
        header = _DECODER.decode(str(encoded, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a header that is not JSON: {type(error).__name__}") from error
    if not isinstance(header, dict):
        raise ProtocolError("a header that is not a JSON object")
    return header
