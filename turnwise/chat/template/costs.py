"""What a chat template may spend in one render: steps, characters and seconds, counted before anything is made."""

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.utils import Namespace

MOST_STEPS = 2_000_000
"""Rounds of loops, calls and filters."""
MOST_CHARACTERS = 128 << 20
"""Of all texts that are made on the way, lists counted too."""
MOST_SECONDS = 5.0
"""Of this thread's processor time: a busy machine makes no difference."""
WIDEST = 100_000
"""A number that is given to a function or filter of texts: a width, a count, a base."""
_ELEMENT = 32
"""What an element of a list counts."""
_LONGEST_SEPARATORS = 1000
_SET_SPEED = 100
"""Characters of a set that are looked through in the time that one of a text takes otherwise."""
_MOST_BITS = 4096
_SLOWNESS = 64
"""How much more a character costs where Python's own library looks at every one."""
_CODECS = ("utf-8", "utf8", "ascii", "latin-1", "strict", "ignore", "replace")
_WIDTH = r"[-+ #0]*(?:\d{6,}|\*|\d*\.(?:\d{6,}|\*))"
_LONG_WIDTHS = {"%": re.compile("%" + _WIDTH), "%(": re.compile(r"[%)]" + _WIDTH), "{": re.compile(r"\{[^{}]*\d{6}")}
"""By the mark of a place: widths of six digits, or that are handed in beside the values."""


class TooCostly(jinja2.TemplateError):
    """A render that would go on for ever or fill memory."""


class TakesTooLong(TooCostly):
    """The template has spent the steps or seconds that one render may take."""


class Costs:
    """The steps, characters and seconds that one render of a template has spent."""

    def __init__(self, share: float = 1.0) -> None:
        """`share`: the share of the steps and seconds that it may take."""
        self._steps = self._characters = 0
        self._most_steps, self._most_seconds = MOST_STEPS * share, MOST_SECONDS * share
        self._start = time.thread_time()

    def step(self) -> None:
        """Counts one more round of a loop or one more call."""
        self._steps += 1
        if self._steps > self._most_steps:
            raise TakesTooLong(f"it takes more than {self._most_steps:,.0f} steps")
        if not self._steps & 63:
            self.check_time()

    def make(self, characters: int) -> None:
        """A text of this length is about to be made, or a list that counts as much."""
        self._characters += characters
        if self._characters > MOST_CHARACTERS:
            raise TooCostly(f"it makes texts of more than {MOST_CHARACTERS:,} characters")
        if characters > 4096:
            self.check_time()

    def check_time(self) -> None:
        """TakesTooLong when the time is spent."""
        if time.thread_time() - self._start > self._most_seconds:
            raise TakesTooLong(f"it takes more than {self._most_seconds:g} seconds")


class _Renders(threading.local):
    costs: Costs | None = None


_renders = _Renders()


def costs() -> Costs:
    """Those of the render that this thread is at; outside of one, as when a template is compiled, of the operation."""
    return _renders.costs or Costs()


class counted:
    """While a template renders in this thread."""

    def __init__(self, share: float) -> None:
        self._patience = share

    def __enter__(self) -> None:
        self._before, _renders.costs = _renders.costs, Costs(self._patience)

    def __exit__(self, *_: object) -> None:
        _renders.costs = self._before


_MANY: Any = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


def weigh(*values: Any) -> int:
    """The characters of values written out; TooCostly beyond the limit, however often a list holds the same one."""
    total, waiting, is_inside = 0, list(values), False
    while waiting:
        outer = len(waiting)
        value = waiting.pop()
        if isinstance(value, str | bytes):
            total += len(value)
        elif isinstance(value, int):
            total += 8 + value.bit_length() // 3
        elif isinstance(value, dict | Namespace):
            held = value if isinstance(value, dict) else object.__getattribute__(value, "_Namespace__attrs")
            total += _ELEMENT * (len(held) + 1)
            if total <= MOST_CHARACTERS:
                waiting += [*held.keys(), *held.values()]
        elif isinstance(value, _MANY):
            total += _ELEMENT * len(value)
            if total <= MOST_CHARACTERS:
                waiting += value
        elif isinstance(value, Iterator) and is_inside:
            raise TooCostly("it hands on a list of generators, of which nobody knows what they hold")
        elif isinstance(value, Mapping):
            waiting.append(dict(value))
        else:
            total += 8
        if total > MOST_CHARACTERS:
            raise TooCostly(f"it makes texts of more than {MOST_CHARACTERS:,} characters")
        is_inside = is_inside or len(waiting) >= outer
    if total > 4096:
        costs().check_time()
    return total


def settled(value: Any) -> Any:
    """What a generator holds is told only by asking for it."""
    return list(value) if isinstance(value, Iterator) else value


def depth(value: Any) -> int:
    """How deep lists and mappings are nested; JSON of more than a thousand cannot be written anyway."""
    deepest, level = 0, [value]
    while level and deepest < 1000:
        inner = [container for container in level if isinstance(container, list | tuple | Mapping)]
        level = [
            child
            for container in inner
            for child in (container.values() if isinstance(container, Mapping) else container)
        ]
        if len(level) > MOST_CHARACTERS // _ELEMENT:
            raise TooCostly("it writes a list that holds itself many times over")
        deepest += 1
    return deepest


def demand_small_numbers(values: Sequence[Any]) -> None:
    """TooCostly for a width or a count that no chat needs."""
    for value in values:
        if isinstance(value, int) and abs(value) > WIDEST:
            raise TooCostly(f"it asks for a width or a count above {WIDEST:,}")


def operate(operator: str, left: Any, right: Any, apply: Callable[[Any, Any], Any]) -> Any:
    """A binary operator, its result counted first."""
    if operator == "+" and type(left) is str and type(right) is str:
        costs().make(len(left) + len(right))
        return left + right
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MOST_BITS:  # dividing two of a million digits takes longer than anybody waits
            raise TooCostly("it computes a huge number")
    elif operator == "*" and isinstance(left if isinstance(right, int) else right, str | bytes | list | tuple):
        repeated, times = (left, right) if isinstance(right, int) else (right, left)
        each = len(repeated) * (1 if isinstance(repeated, str | bytes) else _ELEMENT)
        costs().make(each * max(times, 0))
    elif operator == "+" and isinstance(left, str | list | tuple):
        each = 1 if isinstance(left, str) else _ELEMENT
        costs().make(each * (len(left) + (len(right) if hasattr(right, "__len__") else 0)))
    elif operator == "%" and isinstance(left, str | bytes):
        spelled = left if isinstance(left, str) else left.decode("latin-1")
        _demand_plain_format(spelled, "%", (right,))
    return apply(left, right)


def demand_format(text: str, arguments: Sequence[Any]) -> None:
    """`text.format(*arguments)`, its result counted first."""
    if re.search(r"\{[^{}]*\{", text.replace("{{", "")):
        raise TooCostly("it formats with a width that is itself formatted")
    _demand_plain_format(text, "{", arguments)


def _demand_plain_format(text: str, mark: str, arguments: Sequence[Any]) -> None:
    if _LONG_WIDTHS["%(" if mark == "%" and "%(" in text else mark].search(text):
        raise TooCostly("it formats with a width of six digits or more, or one that is not told")
    places = text.count(mark)
    costs().make(len(text) + places * (weigh(*arguments) + WIDEST if ":" in text or "%" in text else weigh(*arguments)))


def demand_text(name: str, given_text: str | bytes, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """A method or filter of this name on a text, its result counted first."""
    values = [*arguments, *named.values()]
    weight = weigh(*values)
    if name in _SHORTENS:
        if "strip" in name or name == "trim":  # each character is looked for among all that are stripped
            costs().make(len(given_text) * (1 + weight // _SET_SPEED))
        costs().make(len(given_text) + weight)
        return
    if name in ("encode", "decode") and any(isinstance(item, str) and item.lower() not in _CODECS for item in values):
        raise TooCostly("it asks for an encoding that no chat needs")
    text = given_text if isinstance(given_text, str) else given_text.decode("latin-1")
    demand_small_numbers(values)
    numbers = max((value for value in values if isinstance(value, int)), default=0)
    longest = max((len(value) for value in values if isinstance(value, str | bytes)), default=0)
    match name:
        case "indent":
            size = len(text) + (text.count("\n") + 1) * max(numbers or 4, longest)
        case "wordwrap":
            size = len(text) * (_SLOWNESS + longest)
        case "urlize" | "striptags" | "title" | "pprint" | "xmlattr":
            size = len(text) * (_SLOWNESS + weight)
        case "expandtabs":
            size = len(text) + text.count("\t") * (numbers or 8)
        case "replace":
            size = len(text) + _replaced(text, arguments, named)
        case "translate":
            size = len(text) * (1 + weight)
        case "split" | "rsplit" | "splitlines" | "list" | "batch" | "slice" | "unique" | "map":
            separator = next((value for value in values if isinstance(value, str)), None)
            size = len(text) + _ELEMENT * (text.count(separator) if separator else len(text))
        case _:
            size = len(text) * 8 + weight + numbers  # escaping writes up to six for one
    costs().make(size)


def _replaced(text: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    """The characters that come instead; whatever is no text is written out, and was weighed."""
    options = dict(zip(("old", "new", "count"), arguments, strict=False)) | dict(named)
    old, new = options.get("old", ""), options.get("new", "")
    spelled = old.decode("latin-1") if isinstance(old, bytes) else str(old)
    return text.count(spelled) * (len(new) if isinstance(new, str | bytes) else 8 * weigh(new))


_SHORTENS = frozenset(
    (
        "startswith", "endswith", "find", "rfind", "index", "count", "length", "default", "d", "strip", "lstrip",
        "rstrip", "trim", "partition", "rpartition", "removeprefix", "removesuffix", "lower", "safe", "string",
    )
)  # fmt: skip
"""Methods and filters of texts that make none longer than the one they are given."""


def demand_json(value: Any, indent: Any, separators: Any) -> None:
    """A value as JSON, counted first."""
    weight = weigh(value)
    if separators is not None and weigh(separators) > _LONGEST_SEPARATORS:
        raise TooCostly(f"it writes JSON with separators of more than {_LONGEST_SEPARATORS:,} characters")
    demand_small_numbers([indent])
    deep = 0 if indent is None else depth(value) * (len(indent) if isinstance(indent, str) else int(indent))
    costs().make(weight * 2 + weight // _ELEMENT * deep)


def bounded(name: str, filtered: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test whose result is counted first."""
    passed = hasattr(filtered, "jinja_pass_arg")  # the context or the environment comes before the value

    @functools.wraps(filtered)
    def apply(*args: Any, **named: Any) -> Any:
        costs().step()
        first, *rest = args[1:] if passed else args
        if name in _CONSUMES:
            first = settled(first)
            args = (*args[: int(passed)], first, *rest)
        weight = weigh(*rest, *named.values())
        if name == "tojson":
            indent, separators = [*rest[1:3], None, None][:2]
            demand_json(first, named.get("indent", indent), named.get("separators", separators))
        elif name == "format":
            weigh(first)
            _demand_plain_format(str(first), "%", [*rest, *named.values()])
        elif name == "join":
            many = len(first) if hasattr(first, "__len__") else 0
            costs().make(weigh(first) + many * weight)
        elif name == "sum" and not isinstance(rest[1] if len(rest) > 1 else named.get("start", 0), int | float):
            raise TooCostly("it sums up lists")
        elif isinstance(first, str | bytes) and name in _DIVIDES:  # `%` formats a text
            operate("%", first, 0, lambda *_: None)
        elif isinstance(first, str | bytes):
            demand_text(name, first, rest, named)
        elif name in _OF_TEXTS:
            costs().make(weigh(first))
            demand_text(name, str(first), rest, named)
        else:
            is_number = name in ("round", "string", *_DIVIDES)
            demand_small_numbers([*rest, *named.values(), *([first] if is_number else [])])
            costs().make(weigh(first) + weight if name not in _WRITE_NOTHING else 0)
        return filtered(*args, **named)

    return apply


_CONSUMES = ("join", "list", "sum", "unique", "sort", "min", "max", "groupby")
"""Filters that look at all that a generator holds."""
_DIVIDES = ("divisibleby", "odd", "even")
_OF_TEXTS = ("replace", "center", "urlize", "striptags", "wordwrap", "indent", "pprint", "title", "lower", "upper")
"""Filters and tests that write out whatever they are given."""
_WRITE_NOTHING = (
    "first", "last", "length", "count", "default", "d", "items", "attr", "select", "reject", "selectattr", "rejectattr",
    "map", "random", "trim", "reverse",
)  # fmt: skip
"""Filters that write nothing of what a list holds."""
