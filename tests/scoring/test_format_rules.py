"""Format rules: each alone, all together, over one message and over all."""

import asyncio
from typing import Any

import pytest

from turnwise.errors import ConfigError
from turnwise.scoring.rules.format_rules import MAX_READ, format_rules
from turnwise.scoring.scorer import Score
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn


def score(*texts: str, reply: str = "", **options: Any) -> Score:
    messages = [Message(Role.ASSISTANT, text) for text in texts]
    replies = [Message(Role.TOOL, reply)] if reply else []
    turns = [Turn(index, one, FinishReason.STOP, 0, 1, 1, replies=replies) for index, one in enumerate(messages)]
    sample = Sample("s", (), "x")
    return asyncio.run(format_rules(Trajectory(sample, 0, 0, messages, turns, [], StopReason.ANSWERED, 0.0), **options))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("<think>a</think><answer>b</answer>", True),
        ("<think>a</think> c <think>d</think><answer>b</answer>", True),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a<answer>b</answer></think>", False),
        ("<think>a<think>a</think></think><answer>b</answer>", False),
        ("<think>a</think><answer>b", False),
        ("a</think><answer>b</answer>", False),
        ("<think>a</think>", False),
        ("<answer>b</answer>", False),
        ("<think>a</answer><answer>b</think>", False),
        ("<think>a</think><answer>b</answer></answer>", False),
        ("", False),
    ],
)
def test_tags_are_closed_and_in_order(text: str, kept: bool) -> None:
    assert score(text, tags=["think", "answer"]).parts == {"tags": float(kept)}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("<answer>b</answer>", True),
        ("so <answer>b</answer> it is", True),
        ("<answer>b</answer><answer>b</answer>", False),
        ("<answer></answer>", False),
        ("<answer>b", False),
        ("b</answer>", False),
        ("<answer><answer>b</answer>", False),
        ("b", False),
    ],
)
def test_one_answer(text: str, kept: bool) -> None:
    assert score(text, answer_tag="answer").parts == {"one_answer": float(kept)}


def test_each_rule_is_a_part_and_the_reward_their_share() -> None:
    rules: dict[str, Any] = {
        "required": {"mark": r"^#### -?\d+$"},
        "forbidden": {"apology": r"(?i)\bsorry\b"},
        "max_chars": 20,
    }
    assert score("so\n#### 18", **rules) == Score(1.0, {"mark": 1.0, "apology": 1.0, "length": 1.0})
    assert score("Sorry.\n#### 18", **rules).parts == {"mark": 1.0, "apology": 0.0, "length": 1.0}
    broken = score("Sorry, I really do not know", **rules, total="all")
    assert broken == Score(0.0, {"mark": 0.0, "apology": 0.0, "length": 0.0})
    assert score("so\n#### 18", **rules, total="all").reward == 1.0
    assert score("x", required=["x", "y"], forbidden=["z"]).parts == {
        "required_0": 1.0,
        "required_1": 0.0,
        "forbidden_0": 1.0,
    }


def test_the_answer_ends_the_message() -> None:
    rules: dict[str, Any] = {"answer_tag": "answer", "answer_last": True}
    assert score("so <answer>b</answer>\n", **rules).reward == 1.0
    assert score("<answer>b</answer> or c", **rules).parts == {"one_answer": 1.0, "answer_last": 0.0}


def test_every_message_has_its_own_score() -> None:
    found = score("ok fine", "ok", "no", required={"ok": "ok"}, max_chars=5, messages="every")
    assert found.parts == {"ok": 2 / 3, "length": 2 / 3}
    assert found.turns == {0: {"format": 0.5}, 1: {"format": 1.0}, 2: {"format": 0.5}}
    assert score("ok", "no", required={"ok": "ok"}).parts == {"ok": 0.0}, "the last message counts"


def test_only_the_policys_words_count() -> None:
    assert score("no", reply="<answer>b</answer>", answer_tag="answer").reward == 0.0
    assert score("<answer>b</answer>", reply="<answer>c</answer>", answer_tag="answer").reward == 1.0


def test_silence_and_endless_talk_keep_no_rule() -> None:
    rules: dict[str, Any] = {"required": ["x"], "forbidden": ["y"], "tags": ["a"], "answer_tag": "b", "min_chars": 1}
    assert score(**rules).reward == score("", **rules).reward == 0.0
    long = score("x<a></a><b>1</b>" + "x" * MAX_READ, **rules)
    assert long.parts == {"required_0": 0.0, "forbidden_0": 0.0, "tags": 0.0, "one_answer": 0.0, "length": 1.0}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "there is no rule"),
        ({"required": ["("]}, "not a regular expression"),
        ({"required": "x"}, "list of patterns"),
        ({"max_chars": 3, "messages": "first"}, "messages must be"),
        ({"max_chars": 3, "total": "sum"}, "messages must be"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        score("x", **options)
