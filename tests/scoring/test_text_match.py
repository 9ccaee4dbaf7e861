"""Text match: measures, normalisation, truths; the cases of what counts as an answer are in test_parsing_cases."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import ConfigError, DataError
from turnwise.scoring.rules.text_match import exact, exact_match, f1, inclusion, search_qa, text_match
from turnwise.scoring.scorer import Score
from turnwise.scoring.service import spec_for
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn

WORDS = st.lists(st.sampled_from(["red", "blue", "car", "bus"]), max_size=6)


def trajectory(text: str, truth: Any) -> Trajectory:
    message = Message(Role.ASSISTANT, text)
    turn = Turn(0, message, FinishReason.STOP, 0, 1, 1)
    return Trajectory(Sample("s", (), "searchR1_nq", truth), 0, 0, [message], [turn], [], StopReason.ANSWERED, 0.0)


def test_parts() -> None:
    def score(text: str, **options: Any) -> Score:
        return asyncio.run(text_match(trajectory(text, "red car"), **options))

    assert score("The red car.") == Score(1.0, {"acc": 1.0, "match": 1.0, "format": 1.0})
    assert score("red bus", how="f1") == Score(0.5, {"acc": 0.0, "match": 0.5, "format": 1.0})
    assert score("red car, perhaps", how="inclusion", max_chars=8) == Score(
        0.0, {"acc": 0.0, "match": 0.0, "format": 0.0}
    )
    with pytest.raises(ConfigError, match="how must be one of"):
        score("red", how="fuzzy")


@given(said=WORDS, truth=WORDS)
def test_measures_agree(said: list[str], truth: list[str]) -> None:
    assert 0.0 <= f1(said, truth) <= 1.0
    assert f1(said, truth) == f1(truth, said)
    if exact(said, truth):
        assert f1(said, truth) == 1.0
        assert inclusion(said, truth) == float(bool(truth))
    if truth and inclusion(said, truth):
        assert set(truth) <= set(said) and f1(said, truth) > 0


def test_an_empty_truth_is_in_nothing() -> None:
    assert inclusion(["red"], []) == 0.0
    assert f1([], []) == 1.0 and f1(["red"], []) == 0.0


@pytest.mark.parametrize("truth", [None, True, [], [None], {}, {"other": "x"}, {"target": []}])
def test_truths_without_a_text_are_errors(truth: Any) -> None:
    with pytest.raises(DataError, match="sample 's'"):
        asyncio.run(text_match(trajectory("red", truth)))


def test_search_sources_of_verl_read_the_last_answer_tag() -> None:
    truth = {"target": ["Paris", "City of Light"]}
    assert spec_for("searchR1_nq", {}) == "search_qa"
    assert asyncio.run(search_qa(trajectory("<answer>Rome</answer> <answer>paris.</answer>", truth))).reward == 1.0
    assert asyncio.run(search_qa(trajectory("Paris", truth))).parts == {"acc": 0.0, "match": 0.0, "format": 0.0}


def test_exact_match_is_by_character() -> None:
    assert asyncio.run(exact_match(trajectory(" Paris\n", "Paris"))) == 1.0
    assert asyncio.run(exact_match(trajectory("paris", "Paris"))) == 0.0
    assert asyncio.run(exact_match(trajectory("18", 18))) == 1.0
    with pytest.raises(DataError, match="exact_match needs a text"):
        asyncio.run(exact_match(trajectory("x", ["x"])))
