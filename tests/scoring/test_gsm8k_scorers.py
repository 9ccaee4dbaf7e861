"""GSM8K extraction and scorers."""

import asyncio
from fractions import Fraction
from typing import Any

import pytest

from turnwise.data.number_answers import extract_answer, extract_loose
from turnwise.errors import DataError
from turnwise.scoring.rules.gsm8k import extract_flexible, extract_strict, gsm8k, gsm8k_flexible, gsm8k_strict
from turnwise.scoring.scorer import Score, evaluate
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn


def trajectory(*answers: str | Message, truth: Any = "18", reply: str = "") -> Trajectory:
    """An episode in which the assistant says these things; after each, a user says `reply`."""
    messages = [answer if isinstance(answer, Message) else Message(Role.ASSISTANT, answer) for answer in answers]
    prompt = (Message(Role.USER, "How many?"),)
    turns = [
        Turn(index, message, FinishReason.STOP, 0, 1, 1, replies=[Message(Role.USER, reply)] if reply else [])
        for index, message in enumerate(messages)
    ]
    flat = [said for turn in turns for said in (turn.message, *turn.replies)]
    sample = Sample("s", prompt, "openai/gsm8k", truth)
    return Trajectory(sample, 0, 0, [*prompt, *flat], turns, [], StopReason.ANSWERED, 0.0)


def reward(scorer: Any, *answers: str | Message, **given: Any) -> float:
    return asyncio.run(evaluate(scorer, trajectory(*answers, **given))).reward


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so #### 18", "18", "18"),
        ("#### 18.", "18.", "18."),  # verl's known defect, kept
        ("####5", None, "5"),
        ("#### $5", None, "5"),
        ("#### 1,234", "1234", "1,234"),
        ("#### 1 then #### -2", "-2", "-2"),
        ("a . ,", None, ","),
        ("a. b.", None, "."),
        ("nothing", None, None),
        ("", None, None),
        ("#### 18" + "x" * 300, None, None),
        ("#### 18" + "x" * 293, "18", "18"),
        ("#### 18" + "x" * 294, None, "18"),
        ("#### 18 and 19 ... .", "18", "..."),
    ],
)
def test_verl_rules(text: str, strict: str | None, flexible: str | None) -> None:
    assert extract_strict(text) == strict
    assert extract_flexible(text) == flexible


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 18", "18"),
        ("####18", "18"),
        ("#### 18.", "18"),
        ("#### 18.00", "18"),
        ("so\n#### $1,234.50 in all.", "1234.5"),
        ("#### 1,00,000", "100000"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### \u22125", "-5"),
        ("#### +5", "5"),
        ("#### 18%", "18"),
        ("#### 18 dollars a day", "18"),
        ("#### 18kg", "18"),
        ("#### 5-pack", "5"),
        ("#### 5/day", "5"),
        ("#### **18**", "18"),
        ("#### \\$18", "18"),
        ("#### $18$", "18"),
        ("#### .5", "1/2"),
        ("#### 3/4", "3/4"),
        ("#### 18 (of 20)", "18"),
        ("#### 7\n#### 18\nthank you 99", "18"),
        ("##### 18", "18"),
        ("#### 0", "0"),
        ("#### 18" + " words" * 1000, "18"),
        ("####" + " " * 1000 + "18", "18"),
    ],
)
def test_reads_answers_people_write(text: str, value: str) -> None:
    assert extract_answer(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "18",
        "the answer is 18",
        "\\boxed{18}",
        "#### \\boxed{18}",
        "#### 18\n####",  # the last mark wins, even an empty one
        "####\n18",
        "#### the answer is 18",
        "#### 2 * 9",
        "#### 2*9 = 18",
        "#### 2x9",
        "#### 2 x 9",
        "#### 18-20",
        "#### 5:30",
        "#### 18 19 20",
        "#### 1e5",
        "#### 3,5",
        "#### 1,2345",
        "#### 1234,567",
        "#### 1.2.3",
        "#### 1/0",
        "#### \u0661\u0668",
        "#### ,",
        "#### $",
    ],
)
def test_refuses_what_is_not_one_number(text: str) -> None:
    assert extract_answer(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "#### " * 100_000,
        "#### " + "1" * 5_000_000,
        "#### " + ",123" * 1_000_000,
        "#### 1" + ",123" * 1_000_000,
        "#### " + "-" * 5_000_000,
        "#### " + "$" * 5_000_000,
        "####" + " " * 5_000_000,
        "#### 1" + " " * 5_000_000 + "2x",
        "1." * 2_000_000,
        "#### 1/" + "7" * 5_000_000,
    ],
)
def test_hostile_text_is_not_a_number_and_takes_no_time(text: str) -> None:
    result = extract_answer(text)
    assert result is None or result == 1
    extract_strict(text)
    extract_flexible(text)
    extract_loose(text)


@pytest.mark.parametrize("truth", ["18", "18.0", "18.00", 18, 18.0, "$18", " 18 "])
def test_truth_in_any_spelling(truth: Any) -> None:
    assert reward(gsm8k, "#### 18.0", truth=truth) == 1.0
    assert reward(gsm8k, "#### 18.01", truth=truth) == 0.0


def test_decimals_are_compared_exactly() -> None:
    assert reward(gsm8k, "#### 0.1", truth=0.1) == 1.0
    assert reward(gsm8k, "#### 9007199254740993", truth="9007199254740992") == 0.0


@pytest.mark.parametrize("truth", [None, "eighteen", True, float("nan"), ["18"]])
def test_a_truth_that_is_no_number_is_an_error(truth: Any) -> None:
    with pytest.raises(DataError, match="sample 's'"):
        asyncio.run(gsm8k(trajectory("#### 18", truth=truth)))
    if not isinstance(truth, str):
        with pytest.raises(DataError, match="must be text"):
            asyncio.run(gsm8k_strict(trajectory("#### 18", truth=truth)))


@pytest.mark.parametrize("scorer", [gsm8k, gsm8k_strict, gsm8k_flexible])
def test_the_last_assistant_message_counts_and_nobody_elses(scorer: Any) -> None:
    assert reward(scorer, "#### 7", "#### 18") == 1.0
    assert reward(scorer, "#### 18", "#### 7") == 0.0
    assert reward(scorer, "#### 18", "sorry") == 0.0
    assert reward(scorer, "no idea", reply="#### 18") == 0.0
    assert reward(scorer) == 0.0


def test_reasoning_and_calls_do_not_count() -> None:
    thought = Message(Role.ASSISTANT, "<think>#### 18</think>No.", reasoning="#### 18", answer="No.")
    assert reward(gsm8k, thought) == 0.0
    assert reward(gsm8k_strict, thought) == 1.0  # verl reads the raw text


def test_outcomes_are_parts_and_their_rewards_are_options() -> None:
    options = {"correct": 2.0, "wrong_form": 0.5, "wrong": 0.1, "no_answer": -1.0}

    def score(text: str) -> Score:
        return asyncio.run(gsm8k(trajectory(text), **options))

    assert score("#### 18") == Score(2.0, {"acc": 1.0, "format": 1.0, "loose": 0.0})
    assert score("it is 18") == Score(0.5, {"acc": 0.0, "format": 0.0, "loose": 1.0})
    assert score("#### 17") == Score(0.1, {"acc": 0.0, "format": 1.0, "loose": 0.0})
    assert score("it is 17") == Score(-1.0, {"acc": 0.0, "format": 0.0, "loose": 0.0})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("it is 18", "18"),
        ("$1,234.50.", "1234.5"),
        ("10 - 3", "3"),
        ("10-3", "3"),
        ("about -5", "-5"),
        ("1/2 of it", "1/2"),
        ("\\boxed{7} of 9", "7"),
        ("\\boxed{x}, 9", None),
        ("version 1.2.3", None),
        ("1e5", None),
        ("room A18", None),
        ("", None),
        ("18" + "x" * 1000, None),
    ],
)
def test_numbers_in_other_forms(text: str, value: str | None) -> None:
    assert extract_loose(text) == (None if value is None else Fraction(value))
