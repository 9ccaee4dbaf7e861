"""Doubt about comparisons that the code under test makes: what it says of one value, it must not say of others.

An object whose `==` says yes to everything would pass every test. So it is asked about several values in an order
that it cannot know, of which one is the test's; an answer that others get too is no answer.
"""

import random
import string
from collections.abc import Callable
from typing import Any

from turnwise.sandbox.inside.far import is_far

DECOYS = 15
_LETTERS = string.ascii_letters + string.digits
_FAR_AWAY = 10**30
_random = random.SystemRandom()


def doubt(ask: Callable[..., Any], name: str, other: Any) -> Any:
    """What an object says about `other`, unless it says so about anything."""
    match name:
        case "__eq__":
            return _alone(ask, other, [object()] if is_far(other) else decoys(other))
        case "__contains__":
            return _alone(ask, other, [object()])
        case "__lt__" | "__le__" | "__gt__" | "__ge__" if type(other) in (int, float):
            return _alone(ask, other, [-_FAR_AWAY if name in ("__lt__", "__le__") else _FAR_AWAY])
        case "__sub__" | "__rsub__" if type(other) in (int, float):
            return _difference(ask, other)
    return ask(other)


def _alone(ask: Callable[..., Any], other: Any, others: list[Any]) -> Any:
    """The answer about `other`; False where one of the others gets the same yes."""
    row = [(one, False) for one in others] + [(other, True)]
    _random.shuffle(row)
    answer, too_often = None, False
    for one, is_other in row:
        if is_other:
            answer = ask(one)
        else:
            try:
                said = ask(one)
            except Exception:  # it may refuse what the test never asked about
                continue
            too_often = too_often or (said is not NotImplemented and bool(said))
    return False if too_often and answer is not NotImplemented and bool(answer) else answer


def _difference(ask: Callable[..., Any], other: float) -> Any:
    """Two differences from two numbers are not the same."""
    row = [other, other + _random.randint(1, 9)]
    _random.shuffle(row)
    said = {one: ask(one) for one in row}
    first, second = (said[one] for one in row)
    if first is not NotImplemented and not is_far(first) and not is_far(second) and first == second:
        raise TypeError("the same difference from every number")
    return said[other]


def decoys(value: Any) -> list[Any]:
    """Values like one, and not equal to it."""
    made: list[Any] = [object()]
    kind = type(value)
    if kind is bool:
        made.append(not value)
    elif kind in (int, float):
        low, high = (_random.randint(3, 9 + int(min(abs(value), _FAR_AWAY) if value == value else 0)) for _ in range(2))
        made += [value + step for step in (_random.randint(-low, high) for _ in range(DECOYS)) if step]
    elif kind in (str, bytes):
        for _ in range(DECOYS):
            text = "".join(_random.choice(_LETTERS) for _ in range(max(1, len(value))))
            made.append(text if kind is str else text.encode())
    elif kind in (list, tuple) and value:
        at = _random.randrange(len(value))
        made += [kind((*value[:at], one, *value[at + 1 :])) for one in decoys(value[at])[1:] or [object()]]
        made.append(kind((*value, value[at])))
    elif kind is dict and value:
        key = _random.choice(list(value))
        made += [{**value, key: one} for one in decoys(value[key])[1:]] + [{**value, object(): 0}]
    elif kind in (list, tuple):
        made.append(kind((0,)))
    else:
        made += [0, "", None]
    return [one for one in made if not (type(one) is kind and one == value)]
