"""Values of the standard library that are copied from process to process, as a name and what JSON can say."""

import base64
import re
import sys
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath
from types import TracebackType
from typing import Any
from zoneinfo import ZoneInfo

BASES = frozenset({int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset})
"""What an object whose class is made of one of these passes for."""
_ARRAYS = "biufcSUmM"


def _write_zone(zone: Any) -> Any:
    if zone is None:
        return None
    return zone.key if type(zone) is ZoneInfo else zone.utcoffset(None).total_seconds()


def _read_zone(text: Any) -> Any:
    if text is None:
        return None
    return ZoneInfo(text) if isinstance(text, str) else timezone(timedelta(seconds=text))


def _write_moment(moment: datetime) -> list[Any]:
    return [moment.replace(tzinfo=None).isoformat(), _write_zone(moment.tzinfo), moment.fold]


def _read_moment(text: list[Any]) -> datetime:
    return datetime.fromisoformat(text[0]).replace(tzinfo=_read_zone(text[1]), fold=text[2])


KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, lambda one: one.decode("latin-1"), lambda text: text.encode("latin-1")),
    "complex": (complex, lambda one: [one.real, one.imag], lambda text: complex(*text)),
    "range": (range, lambda one: [one.start, one.stop, one.step], lambda text: range(*text)),
    "slice": (slice, lambda one: [one.start, one.stop, one.step], lambda text: slice(*text)),
    "Ellipsis": (type(...), lambda _: 0, lambda _: ...),
    "NotImplemented": (type(NotImplemented), lambda _: 0, lambda _: NotImplemented),
    "traceback": (TracebackType, lambda _: 0, lambda _: None),  # of frames that are not over there
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "UUID": (uuid.UUID, str, uuid.UUID),
    "PosixPath": (PosixPath, str, PosixPath),
    "PurePosixPath": (PurePosixPath, str, PurePosixPath),
    "Pattern": (re.Pattern, lambda one: [one.pattern, one.flags], lambda text: re.compile(*text)),
    "timedelta": (timedelta, lambda one: [one.days, one.seconds, one.microseconds], lambda text: timedelta(*text)),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timezone": (timezone, _write_zone, _read_zone),
    "ZoneInfo": (ZoneInfo, _write_zone, _read_zone),
    "datetime": (datetime, _write_moment, _read_moment),
}
_NAMES = {kind: name for name, (kind, _, _) in KINDS.items()}


def write(value: Any) -> tuple[str, Any] | None:
    """Its name and text, or None where it cannot be copied."""
    kind = type(value)
    name = _NAMES.get(kind)
    if name is None:
        return _write_array(value) if kind.__module__ == "numpy" else None
    if kind is slice and not all(type(bound) in (int, type(None)) for bound in (value.start, value.stop, value.step)):
        return None
    if kind is re.Pattern and isinstance(value.pattern, bytes):
        return None
    if kind in (datetime, time) and type(value.tzinfo) not in (type(None), timezone, ZoneInfo):
        return None
    return name, KINDS[name][1](value)


def read(name: str, text: Any) -> Any:
    if name == "numpy":
        return _read_array(*text)
    return KINDS[name][2](text)


def _write_array(value: Any) -> tuple[str, Any] | None:
    numpy = sys.modules["numpy"]
    if not isinstance(value, numpy.ndarray | numpy.generic) or value.dtype.kind not in _ARRAYS or value.dtype.names:
        return None
    is_array = type(value) is numpy.ndarray
    data = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
    return "numpy", [value.dtype.str, list(value.shape) if is_array else None, data]


def _read_array(dtype: str, shape: list[int] | None, data: str) -> Any:
    import numpy

    kind = numpy.dtype(dtype)
    if kind.kind not in _ARRAYS:
        raise ValueError("an array of what cannot be copied")
    flat = numpy.frombuffer(base64.b64decode(data), kind).copy()
    return flat.reshape(shape) if shape is not None else flat[0]
