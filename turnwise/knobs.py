"""How a field of the config says what it takes: its default, the range of its number, and when it is read."""

import dataclasses
import enum
import math
import types
import typing
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.addresses import without_userinfo

MOST_WHOLE = 2**53
"""No whole number is larger: beyond it JSON and floats lose digits."""
PLUGIN = "module:name"
"""Among the values of `only`: anything of the user's."""
MOST_SECONDS = 1e9
"""Timers of the operating system take no longer waits."""


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers a knob takes; infinities and NaN are never among them."""

    least: float | None = None
    most: float | None = None
    above: bool = False
    """`least` itself is left out."""

    def holds(self, value: float) -> bool:
        """Whether the knob takes this number."""
        if not math.isfinite(value) or (self.most is not None and value > self.most):
            return False
        return self.least is None or value > self.least or (value == self.least and not self.above)

    def __str__(self) -> str:
        over = "more than" if self.above else "at least"
        bounds = [] if self.least is None else [f"{over} {_plain(self.least)}"]
        bounds += [] if self.most in (None, MOST_WHOLE, MOST_SECONDS) else [f"at most {_plain(self.most)}"]
        return " and ".join(bounds) or "a finite number"


@dataclass(frozen=True, slots=True)
class Knob:
    """What the schema knows of one key."""

    hint: Any
    """Its type without null."""
    takes_null: bool
    default: Any
    limits: Range | None
    only: tuple[str, tuple[str, ...]] | None
    """(another key, its values with which this one is read)."""
    offered: type[enum.Enum] | None = None
    """The names that a knob offers which takes a plug-in too."""
    also: tuple[str, tuple[str, ...]] | None = None
    """A second condition: with either of the two it is read."""

    def why_unread(self, values: Mapping[str, Any]) -> str | None:
        """Why it is not read with these values of all keys; None where it is."""
        ways = [way for way in (self.only, self.also) if way is not None]
        if not ways or any(is_wanted(values[key], wanted) for key, wanted in ways):
            return None
        (key, wanted), *others = ways
        value = values[key]
        when = ["set" if wanted == ("*",) else " or ".join(wanted)]
        when += [f"{other} is {'set' if more == ('*',) else ' or '.join(more)}" for other, more in others]
        shown = value.value if isinstance(value, enum.Enum) else value
        return f"{key} is {shown}; it is read when that is {', or '.join(when)}"

    @property
    def is_dict(self) -> bool:
        return typing.get_origin(self.hint) is dict

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.hint) is list

    @property
    def choices(self) -> list[str]:
        """The names to choose from, where there are any."""
        kind = self.choice_type
        return [] if kind is None else [choice.value for choice in kind]

    @property
    def choice_type(self) -> type[enum.Enum] | None:
        """The enum that has them."""
        return self.hint if isinstance(self.hint, type) and issubclass(self.hint, enum.Enum) else self.offered


def knobs_of(section: type, prefix: str = "") -> dict[str, Knob]:
    """Every knob of a config class by its key, sections and their knobs in order."""
    hints = typing.get_type_hints(section)
    found: dict[str, Knob] = {}
    for field in dataclasses.fields(section):
        key, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found |= knobs_of(hint, f"{key}.")
            continue
        bare = without_null(hint)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found[key] = Knob(
            bare,
            bare is not hint,
            default,
            range_of(field, bare),
            field.metadata.get("only"),
            field.metadata.get("choices"),
            field.metadata.get("also"),
        )
    return found


def knob(default: Any, *marks: dict[str, Any]) -> Any:
    """A field with its default and what else is known of it: `knob(8, at_least(1), only("engine.name", "torch"))`."""
    return dataclasses.field(default=default, metadata={name: what for mark in marks for name, what in mark.items()})


def only(key: str, *values: str) -> dict[str, Any]:
    """This knob is read only when another has one of these values ("*": when it is set, PLUGIN: the user's, "null")."""
    return {"only": (key, values)}


def also(key: str, *values: str) -> dict[str, Any]:
    """Beside `only`: this knob is read with these values of another key too."""
    return {"also": (key, values)}


def at_least(least: float, at_most: float | None = None) -> dict[str, Any]:
    """The knob takes numbers from here on."""
    return {"range": Range(least, at_most)}


def more_than(least: float, at_most: float | None = None) -> dict[str, Any]:
    """The knob takes numbers beyond this one."""
    return {"range": Range(least, at_most, above=True)}


def any_number() -> dict[str, Any]:
    """The knob takes every finite number."""
    return {"range": Range()}


def share() -> dict[str, Any]:
    """The knob takes a part of a whole: 0 to 1."""
    return at_least(0, 1)


def duration() -> dict[str, Any]:
    """The knob takes a time to wait."""
    return more_than(0, MOST_SECONDS)


def choice_or_plugin(choices: type[enum.Enum]) -> dict[str, Any]:
    """The knob takes one of these names, or `module:name` of the user's."""
    return {"choices": choices}


def is_wanted(value: object, wanted: tuple[str, ...]) -> bool:
    """Whether a knob marked `only(key, *wanted)` is read when that key has this value."""
    if wanted == ("*",):
        return bool(value)
    text = "null" if value is None else str(value.value if isinstance(value, enum.Enum) else value)
    return text in wanted or (PLUGIN in wanted and is_plugin(text))


def is_plugin(name: str) -> bool:
    """Whether a name means something of the user's: module:name, file.py:name or package.module.Class."""
    return ":" in name or "." in name


def url() -> dict[str, Any]:
    """The knob takes the address of a server."""
    return {"url": True}


def range_of(field: "dataclasses.Field[Any]", hint: Any) -> Range | None:
    """The declared range of a numeric field; whole numbers always have an end."""
    declared: Range | None = field.metadata.get("range")
    if declared is not None and declared.most is None and hint is int:
        return dataclasses.replace(declared, most=MOST_WHOLE)
    return declared


def without_null(hint: Any) -> Any:
    """`int` of `int | None`."""
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def kind_of(hint: Any) -> str:
    """What a knob of this type takes, in words."""
    outer = typing.get_origin(hint) or hint
    if isinstance(outer, type) and issubclass(outer, enum.Enum):
        return f"one of {', '.join(repr(choice.value) for choice in outer)}"
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return (kinds | {list: "a list of texts", dict: "a mapping of names to values"}).get(outer, "a value")


def problems(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, what is wrong with its value) of every knob of a config, wherever the value came from."""
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        key, hint, value = prefix + field.name, hints[field.name], getattr(section, field.name)
        if dataclasses.is_dataclass(hint) and isinstance(value, typing.cast(type, hint)):
            yield from problems(value, f"{key}.")
            continue
        bare = without_null(hint)
        if value is None and bare is not hint:
            continue
        wanted = _wanted(value, bare, range_of(field, bare))
        offered = [choice.value for choice in field.metadata.get("choices", ())]
        if wanted is None and offered and value not in offered and not is_plugin(value):
            wanted = f"one of {', '.join(offered)}, or {PLUGIN} of your own"
        if wanted is None and "url" in field.metadata and not _is_url(value):
            wanted = "an address such as http://127.0.0.1:8000"
        if wanted is not None:
            yield key, f"must be {wanted}, not {_shown(value)}"


def _wanted(value: Any, hint: Any, limits: Range | None) -> str | None:
    """What the value should have been; None when it is that."""
    inner = typing.get_args(hint)
    if hint in (int, float):
        return _wanted_number(value, hint, limits)
    if hint is str:
        return _wanted_text(value) or (None if value.strip() else "text that is not empty")
    if typing.get_origin(hint) is list:
        return None if isinstance(value, list) and not any(map(_wanted_text, value)) else kind_of(hint)
    if typing.get_origin(hint) is dict:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            return kind_of(hint)
        found = (_wanted(entry, inner[1], Range()) for entry in value.values() if inner[1] is not Any)
        return next((f"a mapping whose values are each {wanted}" for wanted in found if wanted), None)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return None if isinstance(value, hint) else kind_of(hint)
    return None if isinstance(value, hint) else kind_of(hint) if hint is bool else f"a {hint.__name__}"


def _wanted_number(value: Any, hint: type, limits: Range | None) -> str | None:
    kinds = (int,) if hint is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        return kind_of(hint)
    if limits is None or limits.holds(value):
        return None
    technical = limits.most in (MOST_WHOLE, MOST_SECONDS) and value > (limits.most or 0)
    return f"{limits} and at most {limits.most:.3g}" if technical else str(limits)


def _wanted_text(value: Any) -> str | None:
    if not isinstance(value, str):
        return "text"
    return "text without null characters" if "\0" in value else None


def _is_url(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and text.isprintable()
    except ValueError:  # a port beyond 65535, a bracket without its other half
        return False


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _shown(value: Any) -> str:
    text = without_userinfo(repr(value), alone=True)
    return text if len(text) <= 80 else f"{text[:80]}..."
