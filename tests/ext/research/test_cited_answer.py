"""`cited_answer`: words by F1, citations by what is evidence and was shown, and nothing without an answer."""

import asyncio
from typing import Any

import pytest

from turnwise.errors import ConfigError, DataError
from turnwise.ext.research.scoring import cited_answer
from turnwise.scoring.scorer import Score
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Message,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)

TRUTH = {"target": "River Gesaes", "evidence": ["P1", "T2"]}


def episode(
    said: str, shown: tuple[str, ...] = ("P1", "T2", "X9"), truth: Any = TRUTH, status=CallStatus.OK
) -> Trajectory:
    sample = Sample("test:0", (Message(Role.USER, "?"),), "deep_research", ground_truth=truth)
    call = CallRecord(ToolCall("c", "search", {}), status, 0.0, info={"ids": list(shown)})
    turns = [
        Turn(0, Message(Role.ASSISTANT, "I search."), FinishReason.STOP, 0, 1, 1, calls=[call]),
        Turn(1, Message(Role.ASSISTANT, said), FinishReason.STOP, 0, 1, 1),
    ]
    return Trajectory(sample, 0, 0, [], turns, [], StopReason.ANSWERED, 0.0)


def score(trajectory: Trajectory, **options: Any) -> Score:
    return asyncio.run(cited_answer(trajectory, **options))


@pytest.mark.parametrize(
    ("said", "f1", "precision", "recall"),
    [
        ("<answer>River Gesaes</answer> [P1] [T2]", 1.0, 1.0, 1.0),
        ("<answer>the river Gesaes [P1][T2]</answer>", 1.0, 1.0, 1.0),
        ("<answer>River Gesaes</answer>", 1.0, 0.0, 0.0),
        ("<answer>Gesaes</answer> [P1] [P1]", 2 / 3, 1.0, 0.5),
        ("<answer>River Gesaes</answer> [P1] [T2] [X9] [Q7]", 1.0, 0.5, 1.0),
        ("<answer>Lake Modrund</answer> [P1] [T2]", 0.0, 1.0, 1.0),
        ("<answer>x</answer> then <answer>River Gesaes</answer> [T2]", 1.0, 1.0, 0.5),
    ],
)
def test_words_and_citations_are_measured(said, f1, precision, recall):
    found = score(episode(said))
    both = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    assert found.parts["f1"] == pytest.approx(f1)
    assert found.parts["acc"] == float(f1 == 1.0)
    assert (found.parts["citation_precision"], found.parts["citation_recall"]) == (precision, recall)
    assert found.reward == pytest.approx(0.8 * f1 + 0.2 * both)
    assert score(episode(said), citation_weight=0.0).reward == pytest.approx(f1)


def test_what_no_tool_has_shown_cannot_be_cited():
    said = "<answer>River Gesaes</answer> [P1] [T2]"
    assert score(episode(said, shown=("P1",))).parts["citation_recall"] == 0.5
    assert score(episode(said, status=CallStatus.ERROR)).parts["citation_precision"] == 0.0


@pytest.mark.parametrize(
    "said", ["River Gesaes [P1] [T2]", "<answer></answer>", "<answer>" + "River Gesaes " * 500 + "</answer>", ""]
)
def test_without_an_answer_there_is_nothing(said):
    found = score(episode(said))
    assert found.reward == 0.0
    assert set(found.parts.values()) == {0.0}


def test_bad_truths_and_options_are_said():
    for truth in ("River Gesaes", {"target": "x"}, {"target": "x", "evidence": []}, {"target": "x", "evidence": [1]}):
        with pytest.raises(DataError, match="evidence"):
            score(episode("<answer>x</answer>", truth=truth))
    with pytest.raises(ConfigError, match="from 0 to 1"):
        score(episode("<answer>x</answer>"), citation_weight=1.5)
