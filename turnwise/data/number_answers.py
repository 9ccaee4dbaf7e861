"""The number that a text gives as its answer: after `####`, in a box, or the last one there is."""

import re
from fractions import Fraction

MAX_NUMBER = 64
"""Characters of a number and what surrounds it; no answer to a sum is longer, and parsing stays cheap."""

_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2013\ufe63\uff0d", "-"))
_DIGITS = r"(?=(?P<digits>[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}|[0-9]+))(?P=digits)"
"""Looked at first and then taken whole: what follows cannot make it give digits back."""
_NUMBER = re.compile(
    rf"""
    [\s*_`:=\\$€£]*                          # what people put before a number
    (?P<sign>[-+]?)[\\$€£]*
    (?=(?P<value>{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+))(?P=value)
    (?:\s?/\s?(?P<divisor>[0-9]+))?
    (?![0-9]|\.[0-9])                        # a number that goes on is not this number,
    (?!\s*[-+*/^=×÷:,]\s*[$(]?[0-9])         # nor is the start of a sum, a range, a time or a list,
    (?!\s?(?:[eE][-+]?|[xX]\s?)[0-9]|\s+\$?[0-9])   # nor 1e5, 2x9 or "5 6 7"
    """,
    re.VERBOSE,
)
LOOSE_TAIL = 300
"""How many last characters are searched for a number in another form than `####`, as gsm8k's common rules do."""
_LOOSE = re.compile(
    rf"""
    (?<![0-9A-Za-z.,/])                      # not inside a word or a number
    (?:(?<![)])[-+])?[$€£]?                  # 10-3 ends with 3, not with -3
    (?=\.?[0-9])(?=(?P<number>(?:{_DIGITS})?(?:\.[0-9]+)?))(?P=number)(?:/[0-9]+)?
    (?![0-9]|\.[0-9]|[eE][-+]?[0-9])
    """,
    re.VERBOSE,
)


def extract_answer(text: str) -> Fraction | None:
    """The number after the last `####`, on its line; None when it is not one plain number.

    `#### $1,234.50 in all.` is 1234.5. Units may follow; words may not come first and `\\boxed{}` is not read.
    """
    mark = text.rfind("####")
    if mark < 0:
        return None
    end = text.find("\n", mark)
    return read_number(text[mark + 4 : end if end >= 0 else len(text)])


def extract_loose(text: str) -> Fraction | None:
    """The number an answer without a readable `####` seems to mean: in the last box, or else the last one there is."""
    tail = text[-LOOSE_TAIL:].translate(_MINUS)
    box = tail.rfind("\\boxed{")
    if box >= 0:
        return read_number(tail[box + 7 :])
    numbers = [match.group() for match in _LOOSE.finditer(tail)]
    return read_number(numbers[-1]) if numbers else None


def read_number(text: str) -> Fraction | None:
    """The number a text begins with, exactly; 18, 18.0 and 18.00 are one number."""
    start = text.lstrip()[: 2 * MAX_NUMBER].translate(_MINUS)
    match = _NUMBER.match(start)
    if match is None or match.end() > MAX_NUMBER:
        return None
    digits = match["value"].replace(",", "")
    value = Fraction(digits) if "." in digits else Fraction(int(digits))  # an int is read four times faster
    if match["divisor"] is not None:
        if not int(match["divisor"]):
            return None
        value /= int(match["divisor"])
    return -value if match["sign"] == "-" else value
