"""Training says when there is nothing to learn from, why, and not at every step."""

from pathlib import Path

import pytest
from rich.console import Console

from turnwise import configure
from turnwise.reports.alerts import Alerts
from turnwise.reports.training import StepReward, TrainReport, has_signal
from turnwise.storage.run_dir import WARNINGS
from turnwise.training.runs.run import new_run


def line(most: float, least: float, advantage: float = 0.0, grad: float = 0.0, **more: float) -> dict[str, float]:
    return {
        "critic/score/max": most, "critic/score/min": least, "critic/advantages/max": advantage,
        "critic/advantages/min": -advantage, "actor/grad_norm": grad, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "overrides", "said"),
    [
        (line(0, 0), (), "every episode has the reward 0. Likely the scorer never gives credit, or the task is too hard"),
        (line(0, 0, **{"response_length/clip_ratio": 1.0}), (), "Likely 100% of the answers are cut off"),
        (line(1, 1), (), "every episode has the reward 1; if that is the best there is, nothing is left to learn"),
        (line(1, 0), (), "the siblings of every group have the same reward"),
        (line(1, 0, advantage=1.0), (), "advantages differ and the gradient is still 0"),
        ({}, ("training.drop_constant_groups=true",), "training.drop_constant_groups left none"),
        (line(0.5, 0.5, advantage=1.0, grad=0.2), (), "every episode has the reward 0.5"),
    ],
)  # fmt: skip
def test_the_likely_reason_is_named(metrics: dict[str, float], overrides: tuple[str, ...], said: str) -> None:
    alerts = Alerts(configure(*overrides), Path("runs/a"))
    found = [alerts.after_step(metrics, []) for _ in range(12)]
    spoken = [number for number, texts in enumerate(found, start=1) if texts]
    assert spoken == [3, 10] and found[2][0].startswith("no learning signal for 3 steps: ")
    assert said in found[2][0]


def test_a_warning_of_a_run_is_kept_apart_from_its_log() -> None:
    with new_run(configure("run=first", "board.live=false"), "eval", Console(quiet=True)) as run:
        run.warn("nothing to learn from", 3)
    assert run.dir.read_jsonl(WARNINGS) == [{"step": 3, "text": "nothing to learn from"}]
    assert "warning: nothing to learn from" in run.dir.log_path.read_text()


def test_a_step_with_a_signal_starts_the_count_anew() -> None:
    alerts = Alerts(configure(), Path("runs/a"))
    for _ in range(3):
        assert alerts.after_step(line(0, 0), []) == [] == alerts.after_step(line(0, 0), [])
        assert alerts.after_step(line(1, 0, advantage=1.0, grad=0.5), []) == []
    assert not has_signal(line(0, 0, advantage=1.0, grad=0.5)), "gae whitens noise, and an entropy bonus moves weights"
    assert has_signal(line(0, 0, grad=0.5, **{"turn_credit/scored_turns": 3.0})), "turns have scores of their own"


def test_the_summary_has_the_reward_the_error_bars_and_what_to_do_next() -> None:
    rewards = [StepReward(step, 0.1 * step, step > 2) for step in range(1, 9)]
    before = {"accuracy": 0.25, "accuracy_stderr": 0.04, "accuracy_n": 128.0}
    report = TrainReport(Path("runs/a"), "all 8 steps done", 8, 61.0, 1234, before, {}, rewards, "turnwise train run=a")
    said = str(report)
    assert "25.0% ± 4.0 (n=128)" in said and report.accuracy is None and "accuracy_stderr" not in said
    assert "reward: 0.100 at step 1, 0.600 in the last 5 steps, best 0.800 at step 8" in said
    assert "warning: 2 of 8 steps had no learning signal" in said and "1,234" in said
    assert said.endswith("resume with: turnwise train run=a")
    stopped = str(TrainReport(Path("runs/a"), "stopped by a signal", 0, 3.0, 0, {}, {}, [], "turnwise train run=a"))
    assert stopped.startswith("training, 0 steps, 3 s: stopped by a signal; nothing was evaluated yet")
    assert report.as_json()["warnings"] == report.warnings and report._repr_html_().startswith("<pre>")


@pytest.mark.parametrize(
    ("age", "told"), [({}, ""), ({"staleness/mean": 1.25}, "; tokens are 1.2 step(s) old on average")]
)
def test_a_gap_between_sampler_and_learner_says_how_old_the_tokens_are(age: dict[str, float], told: str) -> None:
    metrics = line(1, 0, advantage=1.0, grad=0.2, **{"rollout_corr/abs_diff_mean": 0.2}, **age)
    (found,) = Alerts(configure(), Path("runs/a")).after_step(metrics, [])
    assert found == f"sampler and learner log-probs differ by 0.2 on average (training.warn_logprob_gap{told})"


def test_a_first_answer_that_was_every_answer_is_not_told_twice() -> None:
    sides = [{f"{kind}accuracy/{source}": value for kind in ("", "first_") for source in "ab"} for value in (0.25, 0.5)]
    sides[1]["first_accuracy/b"] = 0.75
    told = str(TrainReport(Path("runs/a"), "all steps done", 8, 61.0, 1234, *sides, [], "turnwise train run=a"))
    assert "b: accuracy of first answers" in told and "a: accuracy of first answers" not in told
    assert "a: accuracy" in told and "_" not in told.split("reward:")[0]
