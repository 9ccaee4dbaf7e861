"""The run's scorers: whose options are whose, and what is refused."""

import asyncio
from pathlib import Path

import pytest

from turnwise.config import ScoringConfig
from turnwise.data.task_config import compose
from turnwise.errors import ConfigError, DataError
from turnwise.scoring.scorer import evaluate
from turnwise.scoring.service import Scoring
from turnwise.types import Sample, StopReason, Trajectory


@pytest.mark.parametrize("key", ["bonus", "mine.py:bonus", "{folder}/mine.py:bonus"])
def test_options_find_their_scorer_by_function_file_or_path(tmp_path: Path, key: str) -> None:
    (tmp_path / "mine.py").write_text("async def bonus(trajectory, *, share=0.1):\n    return share\n")
    name = f"{tmp_path}/mine.py:bonus"
    config = ScoringConfig({"default": name}, {key.format(folder=tmp_path): {"share": 0.25}})
    scoring = Scoring.of(config, ["x"])
    trajectory = Trajectory(Sample("s", (), "x"), 0, 0, [], [], [], StopReason.ANSWERED, 0.0)
    assert asyncio.run(evaluate(scoring.scorers["x"], trajectory)).reward == 0.25


def test_options_of_a_scorer_that_nobody_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        Scoring.of(ScoringConfig({"default": "gsm8k"}, {"gsm8": {}}), ["x"])


def test_the_least_level_of_the_sandbox_is_a_level() -> None:
    with pytest.raises(ConfigError, match="auto is for sandbox.level"):
        compose(["sandbox.min_level=auto"])


NEEDING = ["gsm8k", "gsm8k_strict", "gsm8k_flexible", "exact_match", "text_match", "search_qa", "math", "code_tests"]


@pytest.mark.parametrize("name", [*NEEDING, "judge", "tapo"])
def test_a_missing_ground_truth_is_found_before_anything_is_rolled_out(name: str) -> None:
    config = ScoringConfig(scorers={"default": name})
    good = [
        Sample(f"g{n}", (), "x", '{"inputs": ["1"], "outputs": ["1"]}' if name == "code_tests" else "42")
        for n in range(3)
    ]
    Scoring.check(config, good)
    with pytest.raises(DataError, match=r"scorer \w+: sample 's7'") as caught:
        Scoring.check(config, [*good, Sample("s7", (), "x")])
    assert "None" in str(caught.value) or "tests" in str(caught.value)


def test_scorers_that_compare_with_nothing_need_no_ground_truth(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("async def bonus(trajectory):\n    return 1.0\n")
    none = [Sample("s", (), "x")]
    own = f"{tmp_path}/mine.py:bonus"
    graded = {"judge": {"rubric": "1: polite. 0: not."}}
    Scoring.check(ScoringConfig(scorers={"default": own}), none)
    Scoring.check(ScoringConfig(scorers={"default": "format_rules"}), none)
    Scoring.check(ScoringConfig(scorers={"default": "judge"}, options=graded), none)
    Scoring.check(ScoringConfig(scorers={"default": "tapo"}, options={"tapo": {"accuracy": own}}), none)
    with pytest.raises(DataError, match="scorer tapo: sample 's'"):
        Scoring.check(ScoringConfig(scorers={"default": "tapo"}, options={"tapo": {"accuracy": "gsm8k"}}), none)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_found_at_once(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"scoring.weights.acc must be a finite number, not (nan|inf)"):
        Scoring.of(ScoringConfig(scorers={"default": "gsm8k"}, weights={"acc": weight}), ["x"])
