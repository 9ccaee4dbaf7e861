"""A user who knows the answer and never tells it: says only whether the last answer is right."""

import re
from fractions import Fraction
from typing import Any, ClassVar

from turnwise.errors import EpisodeError
from turnwise.rollout.interactions.base import BaseInteraction, Seen, check_options, last_assistant_text
from turnwise.scoring.gsm8k import extract_answer, extract_strict, read_number

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."
NO_ANSWER = "I see no final answer. Give it on a last line of its own, as #### and one number."
WRONG_STEP = "Your response is incorrect! The step {step} is not right. Go through it again."
LAST_TRY = " This is your last try."
LONGEST_READ = 10_000
"""Characters of an answer in which steps are looked for, from its end."""
_NUMBER = r"-?[0-9]{1,12}(?:\.[0-9]{1,6})?"
_STEP = re.compile(rf"(?<![0-9.+*/=-])({_NUMBER})\s?([-+*/×÷])\s?({_NUMBER})\s?=\s?\$?({_NUMBER})(?![0-9.])")


class Gsm8kInteraction(BaseInteraction):
    """Ends the episode on a right answer, asks to try again on a wrong one. Nothing leaks: texts are fixed, and a step
    that is quoted is the policy's own, without what it should be.

    `hints` tells a missing answer from a wrong one, quotes the first step of an answer that does not add up, compares
    numbers instead of texts, and gives at most `tries` answers a reply; without it the user is verl's.
    """

    sees_episode: ClassVar[bool] = True
    reads_kwargs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        check_options("gsm8k", config, {"hints": bool, "tries": int})
        self._hints: bool = config.get("hints", False)
        self._tries: int = config.get("tries", 3)
        self._truth: dict[str, str] = {}
        self._score: dict[str, float] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        if kwargs.get("ground_truth") is None:
            raise EpisodeError("interaction 'gsm8k' needs interaction_kwargs.ground_truth")
        name = await super().start_interaction(instance_id)
        self._truth[name] = str(kwargs["ground_truth"])
        self._score[name] = 0.0
        return name

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        if self._hints:
            return self._hint(instance_id, kwargs["seen"])
        right = extract_strict(last_assistant_text(messages)) == self._truth[instance_id]
        self._score[instance_id] = float(right)
        return right, RIGHT if right else WRONG, float(right), {}

    def _hint(self, instance_id: str, seen: Seen) -> tuple[bool, str, float | None, dict[str, Any]]:
        found = extract_answer(seen.answer)
        right = found is not None and found == read_number(self._truth[instance_id])
        self._score[instance_id] = float(right)
        asked = sum(not message.tool_calls for message in seen.answers)
        note = {"try": asked, "answered": found is not None}
        if right or asked >= self._tries:
            return True, RIGHT if right else WRONG, float(right), note
        step = wrong_step(seen.answer)
        text = NO_ANSWER if found is None else WRONG if step is None else WRONG_STEP.format(step=step)
        return False, text + (LAST_TRY if asked + 1 >= self._tries else ""), float(right), note

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        return self._score[instance_id]

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        for kept in (self._truth, self._score):
            kept.pop(instance_id, None)  # none when it could not start


def wrong_step(answer: str) -> str | None:
    """The first `a*b=c` of an answer whose c is wrong, as it is written; a rounded one is right."""
    for step in _STEP.finditer(answer[-LONGEST_READ:]):
        left, right, given = (Fraction(step[group]) for group in (1, 3, 4))
        if step[2] in "/÷" and not right:
            return step[0]
        found = {"+": left + right, "-": left - right, "*": left * right, "×": left * right}.get(step[2])
        result = left / right if found is None else found
        if abs(result - given) > Fraction(1, 2) / 10 ** len(step[4].partition(".")[2]):
            return step[0]
    return None


INTERACTION = Gsm8kInteraction
