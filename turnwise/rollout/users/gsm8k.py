"""A user who knows the answer and never tells it: says only whether the last answer is right."""

import re
from fractions import Fraction

from turnwise.data.number_answers import extract_answer, read_number
from turnwise.errors import EpisodeError
from turnwise.rollout.users.user import Reply, UserTurn
from turnwise.scoring.rules.gsm8k import extract_strict

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."
NO_ANSWER = "I see no final answer. Give it on a last line of its own, as #### and one number."
WRONG_STEP = "Your response is incorrect! The step {step} is not right. Go through it again."
LAST_TRY = " This is your last try."
READS = ()
"""Of a row's interaction_kwargs."""
PLAIN_OPTIONS = ("hints", "tries")
"""Options that name no code, file or address: a run that somebody sent may set them."""
LONGEST_READ = 10_000
"""Characters of an answer in which steps are looked for, from its end."""
_NUMBER = r"-?[0-9]{1,12}(?:\.[0-9]{1,6})?"
_STEP = re.compile(rf"(?<![0-9.+*/=-])({_NUMBER})\s?([-+*/×÷])\s?({_NUMBER})\s?=\s?\$?({_NUMBER})(?![0-9.])")


async def gsm8k(turn: UserTurn, *, hints: bool = False, tries: int = 3) -> Reply:
    """Ends the episode on a right answer, asks to try again on a wrong one. Nothing leaks: texts are fixed, and a step
    that is quoted is the policy's own, without what it should be.

    `hints` tells a missing answer from a wrong one, quotes the first step of an answer that does not add up, compares
    numbers instead of texts, and gives at most `tries` answers a reply; without it a right answer is the exact text.
    """
    if turn.kwargs.get("ground_truth") is None:
        raise EpisodeError("interaction 'gsm8k' needs interaction_kwargs.ground_truth")
    truth = str(turn.kwargs["ground_truth"])
    if hints:
        return _hint(turn, truth, tries)
    is_right = extract_strict(turn.answers[-1].text) == truth
    return Reply(RIGHT if is_right else WRONG, float(is_right), is_right)


def _hint(turn: UserTurn, truth: str, tries: int) -> Reply:
    answer = extract_answer(turn.answer)
    is_right = answer is not None and answer == read_number(truth)
    attempt = sum(not message.tool_calls for message in turn.answers)
    note = {"try": attempt, "answered": answer is not None}
    if is_right or attempt >= tries:
        return Reply(RIGHT if is_right else WRONG, float(is_right), True, note)
    step = wrong_step(turn.answer)
    text = NO_ANSWER if answer is None else WRONG if step is None else WRONG_STEP.format(step=step)
    return Reply(text + (LAST_TRY if attempt + 1 >= tries else ""), 0.0, False, note)


def wrong_step(answer: str) -> str | None:
    """The first `a*b=c` of an answer whose c is wrong, as it is written; a rounded one is right."""
    for step in _STEP.finditer(answer[-LONGEST_READ:]):
        left, right, written = (Fraction(step[group]) for group in (1, 3, 4))
        if step[2] in "/÷" and not right:
            return step[0]
        results = {"+": left + right, "-": left - right, "*": left * right, "×": left * right}
        result = results[step[2]] if step[2] in results else left / right
        if abs(result - written) > Fraction(1, 2) / 10 ** len(step[4].partition(".")[2]):
            return step[0]
    return None
