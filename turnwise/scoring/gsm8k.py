"""GSM8K scoring: verl's two rules to the letter, and `gsm8k`, which compares the final answer as a number."""

import functools
import math
import re
from fractions import Fraction
from typing import Any

from turnwise.errors import DataError
from turnwise.scoring.client_options import client_options
from turnwise.scoring.scorer import Score
from turnwise.types import Sample, Trajectory

VERL_TAIL = 300
"""verl looks at this many last characters only."""
MAX_NUMBER = 64
"""Characters of a number and what surrounds it; no answer to a sum is longer, and parsing stays cheap."""

_VERL_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_VERL_FLEXIBLE = re.compile(r"(\-?[0-9\.\,]+)")
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
"""Where a number in another form than `####` is looked for: as many last characters as verl takes."""
_LOOSE = re.compile(
    rf"""
    (?<![0-9A-Za-z.,/])                      # not inside a word or a number
    (?:(?<![)])[-+])?[$€£]?                  # 10-3 ends with 3, not with -3
    (?=\.?[0-9])(?=(?P<number>(?:{_DIGITS})?(?:\.[0-9]+)?))(?P=number)(?:/[0-9]+)?
    (?![0-9]|\.[0-9]|[eE][-+]?[0-9])
    """,
    re.VERBOSE,
)


def extract_strict(text: str) -> str | None:
    """verl's strict rule: the last `#### number` of the last 300 characters, commas removed."""
    found = _VERL_STRICT.findall(text[-VERL_TAIL:])
    return found[-1].replace(",", "").replace("$", "") if found else None


def extract_flexible(text: str) -> str | None:
    """verl's flexible rule: the last number-like run of the last 300 characters, commas kept."""
    found: list[str] = _VERL_FLEXIBLE.findall(text[-VERL_TAIL:])
    # verl's loop ends on the first run when all of them are single dots.
    return next((run for run in reversed(found) if run != "."), found[0]) if found else None


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
    found = [match.group() for match in _LOOSE.finditer(tail)]
    return read_number(found[-1]) if found else None


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


async def gsm8k_strict(trajectory: Trajectory) -> float:
    """1 when verl's strict rule finds the ground truth in the last assistant message, character by character."""
    return float(extract_strict(_last_text(trajectory)) == truth_text(trajectory.sample))


async def gsm8k_flexible(trajectory: Trajectory) -> float:
    """1 when verl's flexible rule finds the ground truth in the last assistant message, character by character."""
    return float(extract_flexible(_last_text(trajectory)) == truth_text(trajectory.sample))


@client_options("correct", "wrong_form", "wrong", "no_answer")
async def gsm8k(
    trajectory: Trajectory,
    *,
    correct: float = 1.0,
    wrong_form: float = 0.0,
    wrong: float = 0.0,
    no_answer: float = 0.0,
) -> Score:
    """Compares the last `####` of the last assistant message, reasoning and calls left out, with the ground truth.

    The options are the rewards of the four outcomes: the right number; the right number but not after `####`; another
    number after `####`; none of these. Parts: `acc` is 1 for the first, `loose` for the second, `format` whenever a
    number stands after `####`.
    """
    truth = truth_number(trajectory.sample)
    text = trajectory.turns[-1].message.visible if trajectory.turns else ""
    found = extract_answer(text)
    if found is not None:
        right = found == truth
        return Score(correct if right else wrong, {"acc": float(right), "format": 1.0, "loose": 0.0})
    loose = extract_loose(text) == truth
    return Score(wrong_form if loose else no_answer, {"acc": 0.0, "format": 0.0, "loose": float(loose)})


def _last_text(trajectory: Trajectory) -> str:
    return trajectory.answers[-1].text if trajectory.answers else ""


def truth_text(sample: Sample) -> str:
    """The ground truth, which must be a text."""
    if not isinstance(sample.ground_truth, str):
        raise _bad_truth(sample, "text")
    return sample.ground_truth


def truth_number(sample: Sample) -> Fraction:
    """The ground truth, which must be a number or the text of one."""
    truth: Any = sample.ground_truth
    if isinstance(truth, int | float) and not isinstance(truth, bool) and math.isfinite(truth):
        return Fraction(truth if isinstance(truth, int) else repr(truth))  # repr: 0.1 means one tenth
    number = _read_truth(truth) if isinstance(truth, str) else None
    if number is None:
        raise _bad_truth(sample, "a number")
    return number


@functools.lru_cache(maxsize=4096)
def _read_truth(truth: str) -> Fraction | None:
    """Read once for all siblings."""
    return read_number(truth)


def _bad_truth(sample: Sample, wanted: str) -> DataError:
    shown = repr(sample.ground_truth)[:80]
    return DataError(f"sample {sample.id!r}: the ground truth of {sample.data_source!r} must be {wanted}, not {shown}")
