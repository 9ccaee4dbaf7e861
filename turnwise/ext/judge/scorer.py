"""The `judge` scorer: a rule decides when it can, a language model only when the rule finds no match."""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnwise.errors import ConfigError, DataError
from turnwise.ext.judge.budget import refuse_budget
from turnwise.ext.judge.judge import LlmJudge
from turnwise.ext.judge.prompts import Inquiry, equivalence, graded, images_of, question_of
from turnwise.ext.judge.settings import JudgeSettings
from turnwise.ext.judge.verdict import QUARTERS, VerdictScale
from turnwise.scoring.client_options import client_options
from turnwise.scoring.scorer import Score, ScorerSpec, evaluate
from turnwise.types import Remark, Sample, Trajectory

ACCURACY = "acc"


@client_options("tag", "max_chars", "rubric", "grid", "show_images", contacts=True, one_process=refuse_budget)
async def judge(
    trajectory: Trajectory,
    *,
    rule: str | None = "exact_match",
    rule_options: Mapping[str, Any] | None = None,
    tag: str | None = None,
    max_chars: int = 1000,
    rubric: str | None = None,
    grid: Sequence[float] | None = None,
    show_images: bool = False,
    **settings: Any,
) -> Score:
    """Whether the last answer means the same as the ground truth, or how good it is by a rubric; the part is `acc`.

    rule: a scorer asked first; when it says 1 (its part `acc`, or else the reward) the judge is not asked. null: none.
    tag: only the text in the last <tag>...</tag> of the answer counts; without one the answer is wrong.
    max_chars: an answer of this many characters or more is wrong and never sent; long ones are written to persuade.
    rubric, grid: grade by this text, with these values (default 0, 0.25, 0.5, 0.75, 1).
    All other options are those of JudgeSettings.
    """
    service = LlmJudge.shared(JudgeSettings.of(settings))
    answer = answer_of(trajectory, tag)
    inquiry = _inquiry(trajectory.sample, answer or "", rubric, grid, show_images)  # bad data shows on every answer
    has_truth = trajectory.sample.ground_truth is not None
    if rule is not None and has_truth and await _is_right(ScorerSpec(rule, dict(rule_options or {})), trajectory):
        service.stats.rule_hits += 1
        return _score(max(inquiry.grid.values), f"rule {rule}", "right; the judge was not asked")
    if answer is None or len(answer) >= max_chars:
        service.stats.unasked += 1
        why = "no answer" if answer is None else f"an answer of {len(answer)} characters, max_chars={max_chars}"
        return _score(min(inquiry.grid.values), "rule", f"{why}; the judge was not asked")
    verdict = await service.decide(inquiry)
    return _score(verdict.value, "judge", verdict.words)


def _with_judge_settings(function: Any) -> inspect.Signature:
    """The scorer's signature with the judge's settings spelt out, so that a misspelt option is found at the start."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    settings = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for field in dataclasses.fields(JudgeSettings)
    ]
    return inspect.Signature([*own, *settings])


judge.__signature__ = _with_judge_settings(judge)  # type: ignore[attr-defined]


def answer_of(trajectory: Trajectory, tag: str | None = None) -> str | None:
    """The policy's last answer, without reasoning and calls; with a tag, what its last pair holds. None for none."""
    text = trajectory.answers[-1].visible.strip() if trajectory.answers else ""
    if tag is not None:
        pairs = re.findall(f"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", text, re.DOTALL)
        text = pairs[-1].strip() if pairs else ""
    return text or None


async def _is_right(spec: ScorerSpec, trajectory: Trajectory) -> bool:
    score = await evaluate(spec.make(), trajectory)
    return score.parts.get(ACCURACY, score.reward) >= 1.0


def _inquiry(
    sample: Sample, answer: str, rubric: str | None, grid: Sequence[float] | None, show_images: bool
) -> Inquiry:
    question = question_of(sample)
    images = images_of(sample) if show_images else ()
    if rubric is None:
        if grid is not None:
            raise ConfigError(
                "scoring.options, scorer judge: a grid is for a rubric; without one the verdict is 0 or 1"
            )
        return equivalence(question, reference_of(sample), answer, images)
    reference = None if sample.ground_truth is None else reference_of(sample)
    values = QUARTERS if grid is None else VerdictScale(tuple(float(value) for value in grid))
    return graded(question, answer, rubric, reference=reference, images=images, grid=values)


def truth_reader(options: Mapping[str, Any]) -> Callable[[Sample], str] | None:
    """What reads the ground truth; with a rubric none is needed."""
    return reference_of if options.get("rubric") is None else None


def reference_of(sample: Sample) -> str:
    """The ground truth, a text or a number."""
    truth = sample.ground_truth
    is_number = isinstance(truth, int | float) and not isinstance(truth, bool) and math.isfinite(truth)
    if not (is_number or isinstance(truth, str)) or not str(truth).strip():
        raise DataError(f"sample {sample.id!r}: a judge needs a text or number as ground truth, not {truth!r:.80}")
    return str(truth).strip()


def _score(value: float, by: str, words: str) -> Score:
    return Score(value, {ACCURACY: value}, remarks=(Remark(by, words, value),))
