"""The run's scorers: whose options are whose, and what is refused."""

import asyncio
from pathlib import Path

import pytest

from turnwise.compose import compose
from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError
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
