"""Values of files, tasks and command lines laid over the defaults, and turned into what the config's fields take."""

import copy
import dataclasses
import enum
import functools
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from turnwise.config.knobs import kind_of, knobs_of, without_null
from turnwise.config.trees import over
from turnwise.errors import ConfigError

S = TypeVar("S")
_YES, _NO = ("yes", "y", "on", "true"), ("no", "n", "off", "false")


class _Unfit(ValueError):
    """A value that is no such thing; it says where in a list or dict it stands."""

    def __init__(self, hint: Any, value: Any, place: str = "") -> None:
        super().__init__()
        self.hint, self.value, self.place = hint, value, place


def fitted(section: S, tree: Mapping[str, Any], where: str = "", prefix: str = "") -> S:
    """The section of a config with what the tree says of its fields; dicts are merged, all else is replaced.

    ConfigError for a value that its field cannot take; `where` says in front of it who gave it.
    """
    kind: Any = type(section)
    hints = _hints(kind)
    changed: dict[str, Any] = {}
    for name, value in tree.items():
        key = prefix + name
        if name not in hints:
            outer, _, inner = name.partition(".")
            raise ConfigError(f"{where}{key!r}: a key stands inside its section: {outer}: {{{inner}: ...}}")
        hint, old = hints[name], getattr(section, name)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}{key} is a section, not {_shown(value)}")
            changed[name] = fitted(old, value, where, f"{key}.")
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            value = over(old, value)
        try:
            changed[name] = _fit(value, hint)
        except _Unfit as misfit:
            choices = [] if misfit.place else knobs_of(kind)[name].choices
            wanted = f"one of {', '.join(map(repr, choices))}" if choices else kind_of(without_null(misfit.hint))
            raise ConfigError(f"{where}{key}{misfit.place} must be {wanted}, not {_shown(misfit.value)}") from None
    return dataclasses.replace(section, **changed)  # type: ignore[type-var]


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fit(value: Any, hint: Any, place: str = "") -> Any:
    """The value as its type: digits in quotes are a number, `yes` is true."""
    bare = without_null(hint)
    if value is None and (bare is not hint or hint is Any):
        return None
    kind = typing.get_origin(bare) or bare
    if kind is Any:
        if _has_nameless(value):
            raise _Unfit(dict, value, place)
        return copy.deepcopy(value)
    if kind is list and isinstance(value, list):
        (inner,) = typing.get_args(bare)
        return [_fit(entry, inner, f"[{at}]") for at, entry in enumerate(value)]
    if kind is dict and isinstance(value, dict) and all(isinstance(name, str) for name in value):
        inner = typing.get_args(bare)[1]
        return {name: _fit(entry, inner, f".{name}") for name, entry in value.items()}
    if isinstance(kind, type) and not isinstance(value, list | dict | None):
        try:
            return _plain(value, kind)
        except (ValueError, KeyError, OverflowError):
            pass
    raise _Unfit(hint, value, place)


def _has_nameless(value: Any) -> bool:
    """Whether a dict somewhere inside has null for a name."""
    if isinstance(value, dict):
        return None in value or any(map(_has_nameless, value.values()))
    return isinstance(value, list) and any(map(_has_nameless, value))


def _plain(value: Any, kind: type) -> Any:
    if kind is str:
        return str(value)
    if issubclass(kind, enum.Enum):
        return value if isinstance(value, kind) else kind[str(value)]
    if kind is bool:
        word = str(value).lower()
        if word in _YES or word in _NO:
            return word in _YES
        return bool(int(value))
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise ValueError(value)
    if kind in (int, float):
        return kind(value)
    raise ValueError(value)


def _shown(value: Any) -> str:
    return "null" if value is None else f"'{value}'"
