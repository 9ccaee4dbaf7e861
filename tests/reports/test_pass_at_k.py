"""pass@k, pass^k, maj@k and avg@k: what all draws of k episodes would say, and where they are printed."""

import io
import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
from rich.console import Console

import turnwise as tw
from turnwise.reports.pass_at_k import (
    DRAWS,
    majority_at_k,
    pass_all_k,
    pass_at_k,
    repeated_answers,
    result_of,
)
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn


@pytest.mark.parametrize(("tries", "right"), [(1, 0), (1, 1), (4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_all_draws_with_a_right_answer(tries: int, right: int) -> None:
    outcomes = [True] * right + [False] * (tries - right)
    for k in range(1, tries + 1):
        draws = list(itertools.combinations(outcomes, k))
        assert pass_at_k(tries, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))
        assert pass_all_k(tries, right, k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_pass_at_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


def test_a_majority_is_of_answers_and_ties_are_drawn_by_lot() -> None:
    answers = [("42", True), ("42", True), ("41", False), ("40", False)]
    assert majority_at_k(answers, 4) == 1.0, "42 was given most often"
    assert majority_at_k(answers, 1) == 0.5
    assert majority_at_k(answers[1:], 3) == pytest.approx(1 / 3), "three answers once each"
    assert majority_at_k([("41", False)] * 3 + [("42", True)] * 2, 5) == 0.0
    assert majority_at_k([("42", True), ("42", False)], 2) == 0.5, "an answer may be right for its way, not its words"


def test_a_majority_of_many_is_drawn_and_always_the_same() -> None:
    answers = [("42", True)] * 12 + [("41", False)] * 12
    assert math.comb(24, 9) > DRAWS
    assert majority_at_k(answers, 9) == majority_at_k(answers, 9) == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("so\n#### 1,200 ", "1,200"),
        ("#### 3 then #### 4", "4"),
        (r"thus \boxed{X + 1}.", "x + 1"),
        ("First line\n The  Answer", "the answer"),
        ("", ""),
    ],
)
def test_what_an_answer_comes_to(text: str, result: str) -> None:
    assert result_of(episode("a", text, 1.0)) == result


def episode(sample: str, text: str, reward: float | None) -> Trajectory:
    question, answer = Message(Role.USER, "?"), Message(Role.ASSISTANT, text)
    turn = Turn(0, answer, FinishReason.STOP, 0, 1, 1)
    row = Sample(sample, (question,), "sums")
    return Trajectory(row, 0, 0, [question, answer], [turn], [], StopReason.ANSWERED, 0.1, reward=reward)


def test_each_number_is_over_the_samples_that_have_enough_scored_episodes() -> None:
    rows = [("a", [1, 1, 0, 0, 0]), ("b", [0, 0, 0, 0, 0]), ("c", [1, None, None, 1, None]), ("d", [None])]
    trajectories = [episode(sample, f"#### {right}", right) for sample, rights in rows for right in rights]
    numbers = repeated_answers(trajectories)
    assert list(numbers) == [f"{name}{k}" for k in (2, 4, 5) for name in ("pass@", "pass^", "maj@", "avg@")]
    assert numbers["pass@2"].value == pytest.approx(statistics.fmean([0.7, 0.0, 1.0]))
    assert (numbers["pass@2"].n, numbers["pass@5"].n) == (3, 2)
    assert numbers["pass^2"].value == pytest.approx(statistics.fmean([0.1, 0.0, 1.0]))
    assert numbers["pass@5"].value == 0.5 and numbers["maj@5"].value == 0.0
    assert numbers["avg@5"].value == pytest.approx(0.2) and numbers["avg@5"].n == 2
    assert all(0 < number.stderr < 0.5 for number in numbers.values()), "two samples are no certainty"
    assert repeated_answers(trajectories[-1:]) == repeated_answers([]) == {}
    assert repeated_answers([episode("a", "1", 1.0), episode("b", "1", 1.0)]) == {}


def test_an_evaluation_prints_them_and_writes_them(tmp_path: Path) -> None:
    config = tw.configure(
        "engine=scripted", "engine.script=['#### 7']", "eval.samples=3", "eval.group_size=4", f"runs_dir='{tmp_path}'"
    )
    report = tw.evaluate(config, console=Console(file=io.StringIO()))
    assert "pass@4" in str(report) and "maj@2" in str(report) and "avg@4" in str(report)
    (source,) = report.as_json()["sources"].values()
    assert source["repeated"]["pass@4"]["samples"] == 3
    line = json.loads((report.run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {
        "val/pass@4",
        "val/pass@4_stderr",
        "val/maj@2/arithmetic",
        "val/pass^4/arithmetic",
        "val/avg@4",
        "val/reward",
    } <= line.keys()
