"""How a field of the config says what it takes: its default, the range of its number, and when it is read."""

import copy
import dataclasses
import enum
import math
import types
import typing
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise import extensions
from turnwise.errors.address_passwords import without_userinfo

MOST_WHOLE = 2**53
"""No whole number is larger: beyond it JSON and floats lose digits."""
PLUGIN = "module:name"
CONSOLE = ("console",)
"""The tracker that is no extension's."""
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
class Reach:
    """What a run that somebody sent may reach by a knob: `Reach("code", is_plugin)`."""

    what: str
    """code, network, environment, sandbox (out of it) or nothing."""
    by: Callable[[Any], bool] | None = None
    """Whether a value, or an entry of a list, reaches it; None where only its reader can tell."""
    whole: bool = False
    """A list is one thing, whose order means something."""


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
    offered: type[enum.Enum] | Mapping[str, str] | None = None
    """The names of a table with what they mean, or those that a knob offers which takes a plug-in too."""
    also: tuple[str, tuple[str, ...]] | None = None
    """A second condition: with either of the two it is read."""
    is_path: bool = False
    """It names something to read, which may be relative to the config file."""
    reach: "Reach | None" = None
    """What a run that somebody sent may reach by it; None for a knob that nobody has thought about."""
    was: str | None = None
    """The key that it had in earlier versions."""
    marks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else its field, or its section for all of its knobs, says."""
    takes_plugin: bool = False
    """Beside what is offered it takes `module:name` of the user's."""

    def why_unread(self, values: Mapping[str, Any]) -> str | None:
        """Why it is not read with these values of all keys; None where it is."""
        ways = [way for way in (self.only, self.also) if way is not None]
        if not ways or any(is_wanted(values[key], wanted) for key, wanted in ways):
            return None
        (key, wanted), *others = ways
        value = values[key]
        when = ["set" if wanted == ("*",) else " or ".join(wanted)]
        when += [f"{other} is {'set' if more == ('*',) else ' or '.join(more)}" for other, more in others]
        plain = value.value if isinstance(value, enum.Enum) else value
        return f"{key} is {plain}; it is read when that is {', or '.join(when)}"

    @property
    def is_dict(self) -> bool:
        return typing.get_origin(self.hint) is dict

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.hint) is list

    @property
    def choices(self) -> list[str]:
        """The names to choose from, where there are any."""
        return _names(self.choice_type or self.offered)

    @property
    def choice_type(self) -> type[enum.Enum] | None:
        """The enum whose members the knob takes; None where it takes no fixed choices."""
        kind = self.hint if isinstance(self.hint, type) and issubclass(self.hint, enum.Enum) else self.offered
        return kind if isinstance(kind, type) else None


def knobs_of(section: type, prefix: str = "") -> dict[str, Knob]:
    """Every knob of a config class by its key, sections and their knobs in order."""
    hints = typing.get_type_hints(section)
    knobs: dict[str, Knob] = {}
    every = {name: what for mark in getattr(section, "EVERY_KNOB", ()) for name, what in mark.items()}
    for field in dataclasses.fields(section):
        key, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            knobs |= knobs_of(hint, f"{key}.")
            continue
        bare = without_null(hint)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        knobs[key] = Knob(
            bare,
            bare is not hint,
            default,
            range_of(field, bare),
            field.metadata.get("only") or _engines_of(key, field),
            _offered(field),
            field.metadata.get("also"),
            field.metadata.get("path", False),
            field.metadata.get("reach", Reach("code", leads_away) if "choices" in field.metadata else None),
            field.metadata.get("was"),
            every | {**field.metadata},
            "choices" in field.metadata and "closed" not in field.metadata,
        )
    return knobs


def knob(default: Any, *marks: dict[str, Any]) -> Any:
    """A field with its default and what else is known of it: `knob(8, at_least(1), only("engine.name", "torch"))`."""
    metadata = {name: what for mark in marks for name, what in mark.items()}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def only(key: str, *values: str) -> dict[str, Any]:
    """This knob is read only when another has one of these values ("*": when it is set, PLUGIN: the user's, "null")."""
    return {"only": (key, values)}


def also(key: str, *values: str) -> dict[str, Any]:
    """Beside `only`: this knob is read with these values of another key too."""
    return {"also": (key, values)}


def was(key: str) -> dict[str, Any]:
    """The knob had another key: an error names the new one, and runs that recorded it are still read."""
    return {"was": key}


def path() -> dict[str, Any]:
    """The knob names something to read; in a config file a path may be relative to that file."""
    return {"path": True}


def reaches(what: str, by: Callable[[Any], bool] | None = bool, *, whole: bool = False) -> dict[str, Any]:
    """What a run that somebody sent may reach by this knob: by any value, by those that `by` says, or (None) by those
    that its reader names (training/runs/trust.py)."""
    return {"reach": Reach(what, by, whole)}


def harmless() -> dict[str, Any]:
    """The knob takes text, and whoever sends a run reaches nothing by it."""
    return reaches("nothing", lambda value: False)


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


def only_engines(ability: str = "") -> dict[str, Any]:
    """This knob is read with engines of the table that have this flag (`renders`, `here`), or that say they read it."""
    return {"engines": ability}


def _engines_of(key: str, field: "dataclasses.Field[Any]") -> tuple[str, tuple[str, ...]] | None:
    if (ability := field.metadata.get("engines")) is None:
        return None
    rows = {**extensions.engines(), PLUGIN: extensions.PLUGIN_ENGINE}
    names = (name for name, row in rows.items() if (getattr(row, ability) if ability else key in row.reads))
    return "engine.name", tuple(names)


def engine_or_plugin() -> dict[str, Any]:
    """The knob takes the name of an engine of the table, or `module:name` of the user's."""
    return {"choices": lambda: {name: row.about for name, row in extensions.engines().items()}}


def name_of(kind: str, own: Mapping[str, str]) -> dict[str, Any]:
    """The knob takes one of `own` (name: what it means) or the name of what an extension brings (a field of it)."""
    return {"choices": lambda: {**own, **{name: row.about for name, row in extensions.rows(kind, own).items()}},
            "closed": True}  # fmt: skip


def sends_away(tracker: str) -> bool:
    """Whether a tracker sends numbers to an account or an address that the environment names."""
    row = extensions.rows("trackers", CONSOLE).get(tracker)
    return tracker not in CONSOLE and (row is None or not row.here)


def choice_or_plugin(choices: type[enum.Enum]) -> dict[str, Any]:
    """The knob takes one of these names, or `module:name` of the user's."""
    return {"choices": choices}


def _offered(field: "dataclasses.Field[Any]") -> type[enum.Enum] | Mapping[str, str] | None:
    """What `choice_or_plugin`, `engine_or_plugin` or `name_of` says; a table is read when it is asked for."""
    mark = field.metadata.get("choices")
    return mark() if callable(mark) and not isinstance(mark, type) else mark


def _names(offered: type[enum.Enum] | Mapping[str, str] | None) -> list[str]:
    return [choice.value if isinstance(choice, enum.Enum) else str(choice) for choice in offered or ()]


def is_wanted(value: object, wanted: tuple[str, ...]) -> bool:
    """Whether a knob marked `only(key, *wanted)` is read when that key has this value."""
    if wanted == ("*",):
        return bool(value)
    text = "null" if value is None else str(value.value if isinstance(value, enum.Enum) else value)
    return text in wanted or (PLUGIN in wanted and is_plugin(text))


def is_plugin(name: str) -> bool:
    """Whether a name means something of the user's: module:name, file.py:name or package.module.Class."""
    return ":" in name or "." in name


def leads_away(name: str) -> bool:
    """Whether a name means something of the user's, or what an extension says leads to code or an address."""
    return is_plugin(name) or name in extensions.reaching()


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
    """The type without its None, such as `int` of `int | None`."""
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
        offered = _names(_offered(field))
        closed = "closed" in field.metadata
        if wanted is None and offered and value not in offered and (closed or not is_plugin(value)):
            wanted = f"one of {', '.join(offered)}" + ("" if closed else f", or {PLUGIN} of your own")
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
        faults = (_wanted(entry, inner[1], Range()) for entry in value.values() if inner[1] is not Any)
        return next((f"a mapping whose values are each {wanted}" for wanted in faults if wanted), None)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return None if isinstance(value, hint) else kind_of(hint)
    return None if isinstance(value, hint) else kind_of(hint) if hint is bool else f"a {hint.__name__}"


def _wanted_number(value: Any, hint: type, limits: Range | None) -> str | None:
    kinds = (int,) if hint is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        return kind_of(hint)
    if limits is None or limits.holds(value):
        return None
    if not math.isfinite(value):
        bounds = str(limits)
        return bounds if bounds == str(Range()) else f"a finite number, {bounds}"
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
