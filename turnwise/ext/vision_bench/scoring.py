"""The scorer `vision_bench`: an option's letter, a number at its precision, a list or words, by rules alone."""

import json
import re
from fractions import Fraction
from typing import Any

from turnwise.data.number_answers import extract_loose, read_number
from turnwise.errors import DataError
from turnwise.ext.vision_bench.published import LETTERS, AnswerKind
from turnwise.scoring.client_options import client_options
from turnwise.scoring.rules.boxes_and_tags import boxes, tagged
from turnwise.scoring.rules.text_match import MAX_CHARS, words
from turnwise.scoring.scorer import Score
from turnwise.types import Sample, Trajectory

_ONLY_LETTER = re.compile(r"[\s(\[*_]*([A-J])(?:[\s)\].:,*_]*|[).:]\s.{0,300})", re.DOTALL)
"""B, (B), **B.**, and `B. cotton`."""
_SAID = re.compile(
    r"(?i:answer|option|choice)(?i:\s+is|\s*:)?[\s*_:]*(?i:option\s*)?[(\[*_]*(A(?!\s+[a-z])|[B-J])(?![\w'’])"
)
"""`The answer is (B)`; an A before a word is an article."""
_IN_BRACKETS = re.compile(r"\(([A-J])\)")
_LIST = re.compile(r"\[[^\[\]]{0,300}\]")
_LONGEST_TAIL = 2000
"""Characters at the end of an answer without tags that are searched for a letter."""


@client_options("tag")
async def vision_bench(trajectory: Trajectory, *, tag: str = "answer") -> Score:
    """1 when the last assistant message answers as the row says.

    The answer is what stands in the last <tag>, else in the last box, else what the message says at its end. Parts:
    `acc`, and `format`, which is 1 when an answer of the asked kind was found.
    """
    text = trajectory.turns[-1].message.visible if trajectory.turns else ""
    extra = trajectory.sample.info.get("extra_info") or {}
    kind = _kind(trajectory.sample, extra)
    inside = tagged(text, tag) or boxes(text)
    found = _found(inside[-1] if inside else text, kind, extra, is_whole=bool(inside))
    truth = str(trajectory.sample.ground_truth)
    right = found is not None and found == _truth(truth, kind, extra)
    return Score(float(right), {"acc": float(right), "format": float(found is not None)})


def _kind(sample: Sample, extra: dict[str, Any]) -> AnswerKind:
    kinds = [kind.value for kind in AnswerKind]
    if extra.get("answer_kind") not in kinds:
        raise DataError(
            f"sample {sample.id!r}: extra_info.answer_kind must be one of {', '.join(kinds)}, as `turnwise prepare` "
            f"writes it, not {extra.get('answer_kind')!r:.60}"
        )
    return AnswerKind(extra["answer_kind"])


def _found(text: str, kind: AnswerKind, extra: dict[str, Any], *, is_whole: bool) -> Any:
    """What the answer says, comparable with the truth's; None where it says nothing of that kind."""
    match kind:
        case AnswerKind.LETTER:
            return letter_of(text, tuple(extra.get("options") or ()), is_whole=is_whole)
        case AnswerKind.INTEGER | AnswerKind.FLOAT:
            number = read_number(text) if is_whole else None
            number = extract_loose(text) if number is None else number
            return None if number is None else _rounded(number, kind, extra)
        case AnswerKind.LIST:
            return _numbers(text)
        case AnswerKind.TEXT:
            return _words(text) if 0 < len(text.strip()) <= MAX_CHARS else None


def _truth(text: str, kind: AnswerKind, extra: dict[str, Any]) -> Any:
    match kind:
        case AnswerKind.LETTER:
            return text
        case AnswerKind.INTEGER | AnswerKind.FLOAT:
            number = read_number(text)
            return text if number is None else _rounded(number, kind, extra)  # a text, which equals no number
        case AnswerKind.LIST:
            return _numbers(text) or text
        case AnswerKind.TEXT:
            return _words(text)


def letter_of(text: str, options: tuple[str, ...], *, is_whole: bool) -> str | None:
    """The option that an answer names by its letter or in its words; `is_whole` where nothing else stands in it."""
    letters = LETTERS[: len(options)]
    named = {" ".join(_words(option)): letter for letter, option in reversed([*zip(LETTERS, options, strict=False)])}
    if (said := named.get(" ".join(_words(text[:MAX_CHARS])))) is not None:
        return said
    whole = _ONLY_LETTER.fullmatch(text.strip())
    candidates = [whole[1]] if whole else []
    if not candidates and not is_whole:
        tail = text[-_LONGEST_TAIL:]
        candidates = _SAID.findall(tail) or _IN_BRACKETS.findall(tail)
    return candidates[-1] if candidates and candidates[-1] in letters else None


def _rounded(number: Fraction, kind: AnswerKind, extra: dict[str, Any]) -> Fraction:
    """A whole number must be met exactly; others at the precision that was asked for."""
    return number if kind is AnswerKind.INTEGER else round(number, int(extra.get("precision") or 0))


def _numbers(text: str) -> list[float] | None:
    """The last list of numbers in a text."""
    for written in reversed(_LIST.findall(text)):
        try:
            values = json.loads(written)
        except ValueError:
            continue
        if values and all(type(value) in (int, float) for value in values):
            return [float(value) for value in values]
    return None


def _words(text: str) -> list[str]:
    return words(text, ignore_case=True, ignore_punctuation=True, ignore_articles=True)
