"""Doubt about comparisons that the code under test makes: what it says of one value, it must not say of others.

An object whose `==` says yes to everything would pass every test. So it is asked about several values in an order
that it cannot know, of which one is the test's; an answer that others get too is no answer.
"""

import random
import string
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any

from turnwise.ext.swe.inside.proxies import is_far

DECOYS = 31
_FAR_AWAY = 10**30
_LONG = 6
"""A text of so many letters is in no other by chance, once three of them are changed."""
_ALPHABETS = ("aeiou", "bcdfghjklmnpqrstvwxyz", "AEIOU", "BCDFGHJKLMNPQRSTVWXYZ", string.digits, string.punctuation)
_CONTRARY = {
    "__lt__": ("__gt__", "__ge__"), "__le__": ("__gt__",), "__gt__": ("__lt__", "__le__"), "__ge__": ("__lt__",),
}  # fmt: skip
_SMALL: tuple[Any, ...] = ([], (), {}, set(), "", b"", 0, [0], (0,), {0: 0}, {0}, "a", b"a")
_random = random.SystemRandom()
Ask = Callable[[str, Any], Any]


def doubt(ask: Ask, name: str, other: Any) -> Any:
    """What an object says about `other`, unless it says so about anything."""
    match name:
        case "__eq__" | "__ne__":
            others = [object()] if is_far(other) else decoys(other)
            # An object of the tests' own judges by itself, and nothing is None but None.
            return _alone(ask, name, other, [object(), *others]) if others else NotImplemented
        case "__contains__":
            return _alone(ask, name, other, [object(), *_elsewhere(other)])
        case "__lt__" | "__le__" | "__gt__" | "__ge__" if type(other) in (int, float):
            return _ordered(ask, name, other)
        case "__sub__" | "__rsub__" if type(other) in (int, float):
            return _difference(ask, name, other)
    return ask(name, other)


def _asked(ask: Ask, row: list[tuple[str, Any]]) -> list[Any]:
    """The answers to the first question and to the others, which it may refuse; all in an order of chance."""
    answers: list[Any] = [NotImplemented] * len(row)
    for at in _random.sample(range(len(row)), len(row)):
        try:
            answers[at] = ask(*row[at])
        except Exception:
            if at == 0:
                raise
    return answers


def _alone(ask: Ask, name: str, other: Any, others: list[Any]) -> Any:
    """The answer about `other`; the contrary where one of the others is called equal, or contained, too."""
    yes = name != "__ne__"
    answer, *rest = _asked(ask, [(name, value) for value in (other, *others)])
    if answer is NotImplemented or bool(answer) is not yes:
        return answer
    too_often = any(reply is not NotImplemented and bool(reply) is yes for reply in rest)
    return not yes if too_often else answer


def _ordered(ask: Ask, name: str, other: float) -> Any:
    """Nothing is before and after a number at once, nor before or after every number."""
    distant = -_FAR_AWAY if name in ("__lt__", "__le__") else _FAR_AWAY
    row = [(name, other), (name, distant), *((contrary, other) for contrary in _CONTRARY[name])]
    answer, *rest = _asked(ask, row)
    return False if any(reply is not NotImplemented and bool(reply) for reply in rest) else answer


def _difference(ask: Ask, name: str, other: float) -> Any:
    """Two differences from two numbers are not the same."""
    row = [other, other + _random.randint(1, 9)]
    _random.shuffle(row)
    replies = {number: ask(name, number) for number in row}
    first, second = (replies[number] for number in row)
    if first is not NotImplemented and not is_far(first) and not is_far(second) and first == second:
        raise TypeError("the same difference from every number")
    return replies[other]


def _elsewhere(value: Any) -> list[Any]:
    """What is hardly contained where a value is."""
    if type(value) in (int, float):
        return [sign * (_FAR_AWAY + _random.randrange(_FAR_AWAY)) for sign in (1, -1)]
    if type(value) in (str, bytes):
        return decoys(value if len(value) >= _LONG else value * _LONG) if value else []
    return []


def decoys(value: Any) -> list[Any]:
    """Values like one, and not equal to it; none where it is None or no plain value."""
    kind = type(value)
    candidates: list[Any]
    if kind is bool:
        candidates = [not value]
    elif kind in (list, tuple, dict, set, frozenset, str, bytes) and not value:
        candidates = list(_SMALL)
    elif kind in (str, bytes):
        texts = _texts(value if kind is str else value.decode("latin-1"))
        candidates = [text if kind is str else text.encode("latin-1") for text in texts]
    elif kind in (list, tuple, set, frozenset):
        candidates = [kind(candidate) for candidate in _rows(list(value))]
    elif isinstance(value, dict):
        candidates = [dict(zip(value, candidate, strict=True)) for candidate in _rows(list(value.values()))]
        candidates += [dict(zip(candidate, value.values(), strict=True)) for candidate in _rows(list(value))]
    elif isinstance(value, PurePath):
        candidates = [kind(text) for text in _texts(str(value)) if "\0" not in text]
    else:
        candidates = _shifted(value)
    return [candidate for candidate in candidates if not (type(candidate) is kind and candidate == value)]


def _shifted(value: Any) -> list[Any]:
    """Other numbers and times around one, to as many digits."""
    kind = type(value)
    if kind is complex:
        return [complex(number, value.imag) for number in _shifted(value.real)]
    if kind in (float, Decimal) and value == value and abs(value) < _FAR_AWAY:
        digits = min(12, len(format(Decimal(str(value)), "f").partition(".")[2]))
        return [kind(Decimal(number).scaleb(-digits)) for number in _shifted(int(Decimal(str(value)).scaleb(digits)))]
    if kind in (int, float, Fraction):
        low, high = (_random.randint(3, 9 + int(min(abs(value), _FAR_AWAY) if value == value else 0)) for _ in range(2))
        return [value + step for step in (_random.randint(-low, high) for _ in range(DECOYS)) if step]
    if isinstance(value, date):
        return [value + timedelta(days=step) for step in _random.sample(range(1, 99), DECOYS)]
    if kind is timedelta:
        return [value + timedelta(seconds=step) for step in _random.sample(range(1, 99), DECOYS)]
    return []


def _rows(values: list[Any]) -> list[list[Any]]:
    """One of the values replaced by others like it, the same one in all rows: no row stands out."""
    for at in _random.sample(range(len(values)), len(values)):
        if not is_far(values[at]) and (others := decoys(values[at])):
            return [[*values[:at], decoy, *values[at + 1 :]] for decoy in others]
    return [[*values[1:], object()]]


def _texts(text: str) -> list[str]:
    """Up to three letters replaced, by letters of their sort, at the same places in all."""
    places = [at for at, letter in enumerate(text) if letter.isascii() and letter.isalnum()] or list(range(len(text)))
    places = _random.sample(places, min(3, len(places)))
    texts = []
    for _ in range(DECOYS):
        letters = list(text)
        for at in places:
            letters[at] = _random.choice(
                next((alphabet for alphabet in _ALPHABETS if text[at] in alphabet), _ALPHABETS[-1])
            )
        texts.append("".join(letters))
    return texts
