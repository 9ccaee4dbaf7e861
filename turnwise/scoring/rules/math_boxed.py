"""The `math` scorer: the boxed answer means the same as the ground truth, as math-verify sees it."""

import asyncio
import math
import os
import re
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import ConfigError, DataError, PluginError, ScoringFailed
from turnwise.scoring.client_options import client_options
from turnwise.scoring.rules.boxes_and_tags import boxes, tagged
from turnwise.scoring.scorer import Score
from turnwise.system.children import ClockedProcesses, NoAnswer
from turnwise.types import Sample, Trajectory

PROCESSES = min(4, os.cpu_count() or 1)
QUESTIONS = 5000
"""Comparisons after which a process is replaced, because sympy's caches only grow."""
KEPT = 16384
"""Comparisons remembered: siblings of a group often say the same."""
MAX_ANSWER = 1000
"""Characters; no answer is longer, and what is compared stays small."""
_INTEGER = re.compile(r"[-+]?(?:[0-9]{1,40}|[0-9]{1,3}(?:,[0-9]{3}){1,12})")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\[,;: ]|~|\{,\})(?=[0-9]{3}(?![0-9]))")
# Token by token, so that the second backslash of a row break is never taken for the first of a space behind it.
_TOKEN = re.compile(r"\\\\\*?(?:\s*\[\s*-?[0-9.]+\s*[a-z]{2}\s*\])?|\\[a-zA-Z]+|\\.|[\s~\u2212\u00b0]", re.DOTALL)
_MEANT = {
    **dict.fromkeys((r"\,", r"\;", r"\:", "\\ ", "\\\n", "~", r"\quad", r"\qquad"), " "),
    **dict.fromkeys((r"\!", r"\$"), ""),
    **dict.fromkeys((r"\degree", "\u00b0"), r"^\circ"),
    **dict.fromkeys((r"\cr", r"\tabularnewline"), "\\\\ "),
    r"\varnothing": r"\emptyset",
    "\u2212": "-",
}
_EDGES = re.compile(r"^\$+|\$+$|\\?%$|(?<=\d)\.$")
_SCRIPT = Path(__file__).with_name("math_checker.py")


class MathCheckers(ClockedProcesses):
    """All processes of this one that compare answers."""

    def __init__(self, script: Path = _SCRIPT, processes: int = PROCESSES) -> None:
        super().__init__(script, processes, QUESTIONS)
        self._verdicts: OrderedDict[tuple[tuple[str, ...], str, float], bool] = OrderedDict()

    async def equal(self, golds: tuple[str, ...], answer: str, seconds: float) -> bool:
        """Whether the answer means one of the golds; from any thread and event loop."""
        key = (golds, answer, seconds)
        with self._lock:
            if key in self._verdicts:
                return self._verdicts[key]
        result = await asyncio.wrap_future(self.submit(self.compare, *key))
        with self._lock:
            self._verdicts[key] = result
            if len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)
        return result

    def compare(self, golds: tuple[str, ...], answer: str, seconds: float) -> bool:
        """The same from a thread that may wait, without the memory. What takes more than `seconds` of CPU time is not
        equal; ScoringFailed when the process failed for another reason, twice."""
        try:
            return bool(self.ask({"golds": golds, "answer": answer}, seconds)["equal"])
        except NoAnswer as error:
            if error.too_much:
                return False
            raise ScoringFailed(f"the math checker: {error}") from error


checkers = MathCheckers()


if find_spec("math_verify") is None:  # it is imported in another process, which is too late to say so
    raise PluginError("the scorer math needs math-verify: pip install 'turnwise[math]'")


@client_options("correct", "wrong", "no_answer", "several", "tag")
async def math_boxed(
    trajectory: Trajectory,
    *,
    correct: float = 1.0,
    wrong: float = 0.0,
    no_answer: float = 0.0,
    several: Literal["last", "refuse"] = "last",
    tag: str = "answer",
    seconds: float = 5.0,
) -> Score:
    """Compares the last box of the last assistant message, reasoning and calls left out, with the ground truth.

    The options are the rewards of the three outcomes; what counts when several boxes differ; the tag that ends the
    answer, after which nothing is read; and the CPU seconds of one comparison, beyond which an answer is wrong. Parts:
    `acc`, and `format`, which is 1 when there is an answer in a box.
    """
    if several not in ("last", "refuse"):
        raise ConfigError(f"scoring.options, scorer math: several must be 'last' or 'refuse', not {several!r}")
    golds = golds_of(trajectory.sample)
    answer = find_answer(trajectory.turns[-1].message.visible if trajectory.turns else "", tag, several)
    if answer is None:
        return Score(no_answer, {"acc": 0.0, "format": 0.0})
    right = await is_same(golds, answer, seconds)
    return Score(correct if right else wrong, {"acc": float(right), "format": 1.0})


def find_answer(text: str, tag: str = "answer", several: str = "last") -> str | None:
    """The boxed answer. Where the text has an answer in tags, only the last of those is read."""
    inside = tagged(text, tag)
    answers = boxes(inside[-1] if inside else text)
    if not answers or (several == "refuse" and len({tidy(answer) for answer in answers}) > 1):
        return None
    return answers[-1] if len(answers[-1]) <= MAX_ANSWER else None


async def is_same(golds: tuple[str, ...], answer: str, seconds: float) -> bool:
    """Whether the answer means one of the golds. The easy cases are decided here, the rest in a process of its own."""
    answer = tidy(answer)
    wanted = tuple(tidy(gold) for gold in golds)
    if not answer:
        return False
    if answer in wanted:
        return True
    if all(_INTEGER.fullmatch(number) for number in (answer, *wanted)):
        return _integer(answer) in map(_integer, wanted)
    return await checkers.equal(wanted, answer, seconds)


def _integer(text: str) -> int:
    return int(text.replace(",", ""))


def tidy(text: str) -> str:
    """Without dollar signs around, a percent sign or full stop at the end, and spaces that mean nothing."""
    text = " ".join(_TOKEN.sub(_plain, _THOUSANDS.sub("", text)).split()).replace("\\\\ \\end{", "\\end{")
    while (shorter := _EDGES.sub("", text).strip()) != text:
        text = shorter
    return text


def _plain(token: re.Match[str]) -> str:
    """A row break without the distance to the next row; anything else as math-verify knows it."""
    return "\\\\ " if token.group().startswith("\\\\") else _MEANT.get(token.group(), token.group())


def golds_of(sample: Sample) -> tuple[str, ...]:
    """The ground truth as LaTeX: a text (with or without a box), a number, or a list of these."""
    truth: Any = sample.ground_truth
    golds = []
    for entry in truth if isinstance(truth, list | tuple) else [truth]:
        number = isinstance(entry, int | float) and not isinstance(entry, bool) and math.isfinite(entry)
        if not number and not isinstance(entry, str):
            break
        text = str(entry)
        golds.append((boxes(text) or [text])[-1])
    else:
        if golds and all(tidy(gold) for gold in golds):
            return tuple(golds)
    excerpt = repr(truth)[:80]
    raise DataError(f"sample {sample.id!r}: the ground truth of {sample.data_source!r} must be LaTeX, not {excerpt}")
