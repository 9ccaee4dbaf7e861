"""Reading replies strictly, and votes."""

import itertools

import pytest

from turnwise.errors import ConfigError
from turnwise.ext.judge.verdict import BINARY, QUARTERS, Verdict, VerdictScale, majority

THIRDS = VerdictScale((0.0, 1 / 3, 2 / 3, 1.0))


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("0.75", 0.75), (".75", 0.75), ("0.750", 0.75), ("1", 1.0), ("1.0", 1.0), ("1.", 1.0), ("0", 0.0), ("-0", 0.0),
        (" 0.5\n", 0.5), ("**0.5**", 0.5), ("`0.25`", 0.25), ('"1"', 1.0), ("0.5.", 0.5), ("Score: 0.5", 0.5),
        ("**Score:** 0.5", 0.5), ("Final score = 0.25", 0.25), ("Score (0-1): 0.5", 0.5), ("Verdict: 1.", 1.0),
        ("<think>0 or 1? hmm</think>\n0.75", 0.75), ("0.751", 0.75),
        ("0.8", None), ("2", None), ("-1", None), ("10", None), ("75%", None), ("3/4", None), ("0,5", None),
        ("", None), ("...", None), ("1...", None), (".", None), ("TRUE", None), ("I would say 0.5", None),
        ("0.5 because it helps", None), ("0.5\n\n1", None), ("0 or 1", None), ("<think>0.75", None), ("nan", None),
        ("inf", None), ("1e0", None), ("Score:", None), ("١", None), ("9" * 500, None),
    ],
)  # fmt: skip
def test_a_graded_verdict_is_the_whole_reply(reply: str, value: float | None) -> None:
    assert QUARTERS.parse(reply) == value


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("TRUE", 1.0), ("false", 0.0), ("True.", 1.0), ("**FALSE**", 0.0), ("Verdict: TRUE", 1.0), ("yes", 1.0),
        ("No.", 0.0), ("1", 1.0), ("0", 0.0), ("0.5", None), ("TRUE or FALSE", None), ("NOT TRUE", None),
        ("It is TRUE", None), ("untrue", None),
    ],
)  # fmt: skip
def test_a_word_verdict_is_the_whole_reply(reply: str, value: float | None) -> None:
    assert BINARY.parse(reply) == value


def test_numbers_snap_to_the_grid_and_no_further() -> None:
    assert THIRDS.parse("0.33") == 1 / 3 and THIRDS.parse("0.667") == 2 / 3
    assert THIRDS.parse("0.3") is None
    assert QUARTERS.allowed == "0, 0.25, 0.5, 0.75, 1" and BINARY.allowed == "TRUE, FALSE"


def test_grids_that_cannot_be_told_apart_are_refused() -> None:
    for values in ((), (1.0,), (0.0, 0.01, 1.0), (0.0, 0.0, 1.0)):
        with pytest.raises(ConfigError, match="grid"):
            VerdictScale(values)
    with pytest.raises(ConfigError, match="words"):
        VerdictScale((0.0, 0.5, 1.0), words=True)


def test_the_majority_counts_else_the_middle() -> None:
    assert majority([1.0, 0.0, 1.0]) == 1.0
    assert majority([0.0, 0.25, 1.0]) == 0.25
    for votes in itertools.product(QUARTERS.values, repeat=3):
        assert majority(votes) in votes
        assert majority(votes) == majority(votes[::-1])
    with pytest.raises(ValueError, match="middle"):
        majority([0.0, 1.0])


def test_agreement_is_the_share_of_equal_votes() -> None:
    assert Verdict(1.0, (1.0, 0.0, 1.0), ("1", "0", "1")).agreement == pytest.approx(2 / 3)
