"""What a tool turn was worth: by a judge that is shown evidence, by the tools' own scores, or by known target boxes."""

import enum
import inspect
import json
import math
import numbers
import reprlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turnwise.errors import ConfigError, DataError, PluginError, ScoringFailed
from turnwise.errors.nearest_name import unknown
from turnwise.ext.judge.judge import LlmJudge
from turnwise.ext.judge.prompts import full_trace, images_of, question_of
from turnwise.ext.judge.rubrics import Rubric
from turnwise.ext.judge.settings import JudgeSettings
from turnwise.ext.judge.tool_misuse import Box, images_in, read_box
from turnwise.ext.judge.verdict import Verdict
from turnwise.scoring.event_loop_resources import loop_resource
from turnwise.system.concurrency import each
from turnwise.system.plugins import load
from turnwise.types import Image, Role, Sample, Trajectory, Turn

WHOLE, VISIBLE, BARELY = 0.9, 7.0, 4.0
"""Share of a target inside a crop that counts as all of it; its height in shown pixels to be read well, or at all."""
AT_ONCE = 8
"""Turns of one trajectory being judged; the judge bounds its requests over all of them."""
PART = 0.3
"""Share of a target below which the crop misses it."""
EVIDENCE = 0.75
"""The least that a turn is worth which showed evidence."""
VERIFIED = "verified"
"""What the host notes with an image whose origin it has seen for itself."""


class View(enum.Enum):
    """What a judge of tool turns is shown."""

    evidence_only = "evidence_only"
    """The question and what the tools of one turn returned: nothing that the policy wrote can persuade it."""
    full_trace = "full_trace"
    """Everything, once per trajectory."""


class Judge(Protocol):
    """Grades evidence from 0 to 1, as a number or with its words; ScoringFailed when it cannot.

    One whose `verdict` also takes `images`, or `question_images`, is shown what the tools drew, or what the question
    is about.
    """

    async def verdict(self, question: str, evidence: str, rubric: str) -> float | Verdict: ...


TurnScorer = Callable[[Trajectory, list[Turn]], Awaitable[dict[int, Verdict]]]
"""(trajectory, the turns to score) to a verdict from 0 to 1 by turn index."""


def by_evidence(judge: Judge, rubric: Rubric, *, show_images: bool = True) -> TurnScorer:
    """One verdict per turn, from the question and that turn's tool output; nothing the policy wrote is shown."""

    async def turn_scores(trajectory: Trajectory, turns: list[Turn]) -> dict[int, Verdict]:
        question, takes = question_of(trajectory.sample), _takes(judge) if show_images else ()

        async def one(turn: Turn) -> Verdict:
            images = _shown(takes, trajectory.sample, [turn])
            return _graded(await judge.verdict(question, evidence(turn), rubric.evidence, **images))

        verdicts = await each(one, turns, AT_ONCE)
        return {turn.index: verdict for turn, verdict in zip(turns, verdicts, strict=True)}

    return turn_scores


def by_trace(judge: Judge, rubric: Rubric, *, show_images: bool = True) -> TurnScorer:
    """One verdict per trajectory, from all of it, given to each turn: their mean is that verdict."""

    async def turn_scores(trajectory: Trajectory, turns: list[Turn]) -> dict[int, Verdict]:
        if not turns:
            return {}
        images = _shown(_takes(judge) if show_images else (), trajectory.sample, trajectory.turns)
        question = question_of(trajectory.sample)
        verdict = _graded(await judge.verdict(question, trace(trajectory), rubric.trace, **images))
        return {turn.index: verdict for turn in turns}

    return turn_scores


def _takes(judge: Judge) -> tuple[str, ...]:
    """Which images a judge's `verdict` has a parameter for."""
    parameters = inspect.signature(judge.verdict).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return tuple(name for name in ("question_images", "images") if any_name or name in parameters)


def _shown(takes: tuple[str, ...], sample: Sample, turns: list[Turn]) -> dict[str, tuple[Image, ...]]:
    images = {"question_images": images_of(sample)} if "question_images" in takes else {}
    return images | ({"images": tuple(drawn(turns))} if "images" in takes else {})


async def by_tool(trajectory: Trajectory, turns: list[Turn]) -> dict[int, Verdict]:
    """The tools' own scores: the mean over a turn's calls."""
    verdicts: dict[int, Verdict] = {}
    for turn in turns:
        scores = [record.score for record in turn.calls if record.score is not None]
        if not scores:
            names = ", ".join(sorted({record.call.name for record in turn.calls}))
            raise ConfigError(f"judge=tool: the calls of {names} carry no score; name a judge that reads their output")
        verdicts[turn.index] = Verdict(min(1.0, max(0.0, sum(scores) / len(scores))))
    return verdicts


async def by_boxes(trajectory: Trajectory, turns: list[Turn]) -> dict[int, Verdict]:
    """Crops against the sample's `target_boxes`: see `box_grades`."""
    return {index: Verdict(grade) for index, grade in box_grades(trajectory.sample, turns).items()}


def box_grades(sample: Sample, turns: Iterable[Turn]) -> dict[int, float]:
    """What each turn showed of `target_boxes`, in pixels of the image that tools read; a target is paid for once.

    1 when a target is all there and large enough to be read, 0.75 when part of it is or it is small, 0.25 for a crop
    that misses all that has not been seen yet, 0 without an image of the source. The boxes stand in the ground truth if
    that is a mapping, else in extra_info. Only records are read: which part of the source an image shows is what the
    host made, or has compared with the pixels.
    """
    unseen = _targets(sample)
    by_turn: dict[int, float] = {}
    for turn in turns:
        best = 0.0
        for image in [image for record in turn.calls for image in images_in(record)]:
            box, scale = read_box(image.get("box")), _scale(image)
            if box is None or scale is None or image.get("provenance", VERIFIED) != VERIFIED:
                continue
            grades = {target: _seen(target, box, scale) for target in unseen}
            best = max(best, 0.25, *grades.values())
            unseen = [target for target, grade in grades.items() if grade < 1.0]
        by_turn[turn.index] = best
    return by_turn


def _targets(sample: Sample) -> list[Box]:
    truth = sample.ground_truth
    holder = truth if isinstance(truth, Mapping) and "target_boxes" in truth else sample.info.get("extra_info", {})
    entries = holder.get("target_boxes")
    boxes = [read_box(entry) for entry in entries] if isinstance(entries, list) else [None]
    targets = [box for box in boxes if box is not None and box[0] < box[2] and box[1] < box[3]]
    if len(targets) < len(boxes):
        raise DataError(f"sample {sample.id!r}: judge=boxes needs target_boxes, each [left, upper, right, lower]")
    return targets


def _scale(image: Mapping[str, Any]) -> tuple[float, float] | None:
    """(per pixel of width, per pixel of height): how high a thing of the source is shown. An image that was turned by a
    quarter shows widths upright. None where the image does not say how it lies in its source."""
    box, size, matrix = read_box(image.get("box")), image.get("size"), image.get("matrix")
    if (
        isinstance(matrix, list | tuple)
        and len(matrix) == 6
        and all(isinstance(number, int | float) for number in matrix)
    ):
        a, b, _, d, e, _ = map(float, matrix)
        area = a * e - b * d
        return (abs(d / area), abs(a / area)) if area and math.isfinite(area) else None
    if box is None or box[3] <= box[1] or not isinstance(size, list) or len(size) != 2:
        return None
    return 0.0, float(size[1]) / (box[3] - box[1])


def _seen(target: Box, box: Box, scale: tuple[float, float]) -> float:
    across = min(target[2], box[2]) - max(target[0], box[0])
    down = min(target[3], box[3]) - max(target[1], box[1])
    share = max(across, 0.0) * max(down, 0.0) / ((target[2] - target[0]) * (target[3] - target[1]))
    height = (target[2] - target[0]) * scale[0] + (target[3] - target[1]) * scale[1]
    if share < PART or height < BARELY:
        return 0.25
    return 1.0 if share >= WHOLE and height >= VISIBLE - 1e-6 else 0.75


LLM = "llm"
RULES: dict[str, TurnScorer] = {"tool": by_tool, "boxes": by_boxes}
"""Those that look at the record and need no view."""


def evidence(turn: Turn) -> str:
    """What the tools of a turn returned, and what the sandbox measured of their images."""
    pieces = [reply.text for reply in turn.replies if reply.role is Role.TOOL]
    for record in turn.calls:
        for number, image in enumerate(images_in(record), start=1):
            facts = {key: image.get(key) for key in ("source", "box", "size")}
            pieces.append(f"[image {number}: {json.dumps(facts)}]")
    return "\n".join(pieces)


def trace(trajectory: Trajectory) -> str:
    """All messages from the policy's first on, with their roles."""
    messages = [message for turn in trajectory.turns for message in (turn.message, *turn.replies)]
    return "\n".join(f"{message.role.value}: {message.text}" for message in messages)


def drawn(turns: Iterable[Turn]) -> Iterator[Image]:
    """The images that the calls of these turns gave: those noted with the call, else those in its reply."""
    for turn in turns:
        replies = {reply.tool_call_id: reply for reply in turn.replies if reply.role is Role.TOOL}
        for record in turn.calls:
            noted = [image for image in images_in(record) if isinstance(image.get("data"), str)]
            moved = [image["file"] for image in images_in(record) if isinstance(image.get("file"), str)]
            reply = replies.get(record.call.id)
            if any(not image["data"].startswith("data:") for image in noted):  # a path here came with the trajectory
                raise ScoringFailed(
                    f"an image noted with turn {turn.index} is not a data URL, and no file is opened for it"
                )
            if noted:
                yield from (Image(image["data"]) for image in noted)
            elif reply is not None and not isinstance(reply.content, str):
                yield from (part for part in reply.content if isinstance(part, Image))
            elif moved:
                raise ScoringFailed(f"the image {moved[0]} of turn {turn.index} is with its run and cannot be shown")


def _graded(answer: object) -> Verdict:
    value = answer.value if isinstance(answer, Verdict) else answer
    if not isinstance(value, numbers.Real):
        raise PluginError(f"the judge returned {reprlib.repr(answer)}, which is not a grade from 0 to 1")
    grade = float(value)
    if not 0.0 <= grade <= 1.0:  # nan too
        raise ScoringFailed(f"the judge gave {grade!r}, which is not a grade from 0 to 1")
    return replace(answer, value=grade) if isinstance(answer, Verdict) else Verdict(grade)


# --- judges by name -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PluginJudge:
    """A judge that somebody brought, kept for the run."""

    judge: Judge

    async def close(self) -> None:
        close = getattr(self.judge, "close", None)
        if close is not None:
            await close()


@dataclass(frozen=True, slots=True)
class _TraceJudge:
    """The LLM judge with the question it is asked about a whole trace."""

    judge: LlmJudge

    async def verdict(
        self,
        question: str,
        evidence: str,
        rubric: str,
        *,
        question_images: tuple[Image, ...] = (),
        images: tuple[Image, ...] = (),
    ) -> Verdict:
        return await self.judge.decide(
            full_trace(question, evidence, rubric, images=question_images, output_images=images)
        )


def turn_scorer(
    name: str, view: View, options: Mapping[str, Any], rubric: Rubric, *, show_images: bool = True
) -> TurnScorer:
    """`llm`, `tool`, `boxes`, or module:name of a Judge or of what makes one; call it inside the event loop."""
    if name in RULES:
        if options:
            raise ConfigError(f"judge={name} is a rule and takes no judge_options")
        return RULES[name]
    if name == LLM:
        shared = LlmJudge.shared(JudgeSettings.of(options))
        if view is View.evidence_only:
            return by_evidence(shared, rubric, show_images=show_images)
        return by_trace(_TraceJudge(shared), rubric, show_images=show_images)
    if not {":", "."} & set(name):
        raise ConfigError(unknown("judge", name, [LLM, *RULES]) + " Your own is written as file.py:name.")
    key = name, json.dumps(dict(options), sort_keys=True, default=str)
    own = loop_resource(_PluginJudge, key, lambda: _PluginJudge(_as_judge(load(name, "judge"), name, options))).judge
    chosen = by_evidence if view is View.evidence_only else by_trace
    return chosen(own, rubric, show_images=show_images)


def _as_judge(candidate: Any, spec: str, options: Mapping[str, Any]) -> Judge:
    if isinstance(candidate, type) or not hasattr(candidate, "verdict"):
        if not callable(candidate):
            raise PluginError(f"judge {spec}: {type(candidate).__name__} has no verdict(question, evidence, rubric)")
        try:
            candidate = candidate(**options)
        except TypeError as error:
            raise ConfigError(f"judge {spec} cannot be made with {dict(options)}: {error}") from error
    elif options:
        raise ConfigError(f"judge {spec} is ready made and takes no judge_options")
    if not hasattr(candidate, "verdict"):
        raise PluginError(f"judge {spec}: {type(candidate).__name__} has no verdict(question, evidence, rubric)")
    judge: Judge = candidate
    return judge
