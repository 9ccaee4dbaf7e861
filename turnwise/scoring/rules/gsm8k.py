"""GSM8K scoring: the two rules that are common for it, to the letter, and `gsm8k`, which compares numbers."""

import functools
import math
import re
from fractions import Fraction
from typing import Any

from turnwise.data.number_answers import extract_answer, extract_loose, read_number
from turnwise.errors import DataError
from turnwise.scoring.client_options import client_options
from turnwise.scoring.scorer import Score
from turnwise.types import Sample, Trajectory

TAIL = 300
"""The common rules look at this many last characters only."""

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(\-?[0-9\.\,]+)")


def extract_strict(text: str) -> str | None:
    """The strict rule: the last `#### number` of the last 300 characters, commas removed."""
    numbers = _STRICT.findall(text[-TAIL:])
    return numbers[-1].replace(",", "").replace("$", "") if numbers else None


def extract_flexible(text: str) -> str | None:
    """The flexible rule: the last number-like run of the last 300 characters, commas kept."""
    runs: list[str] = _FLEXIBLE.findall(text[-TAIL:])
    # As published, the rule ends on the first run when all of them are single dots.
    return next((run for run in reversed(runs) if run != "."), runs[0]) if runs else None


async def gsm8k_strict(trajectory: Trajectory) -> float:
    """1 when the strict rule finds the ground truth in the last assistant message, character by character."""
    return float(extract_strict(_last_text(trajectory)) == truth_text(trajectory.sample))


async def gsm8k_flexible(trajectory: Trajectory) -> float:
    """1 when the flexible rule finds the ground truth in the last assistant message, character by character."""
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
    answer = extract_answer(text)
    if answer is not None:
        right = answer == truth
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
    """The number of a ground truth, cached, so that it is read once for all siblings of a group."""
    return read_number(truth)


def _bad_truth(sample: Sample, wanted: str) -> DataError:
    return DataError(
        f"sample {sample.id!r}: the ground truth of {sample.data_source!r} must be {wanted}, "
        f"not {repr(sample.ground_truth)[:80]}"
    )
