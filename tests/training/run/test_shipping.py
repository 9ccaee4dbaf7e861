"""Which weights a training leaves for use: never those of a dip, and it says which they are."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from turnwise import Message, Role, Sample, configure
from turnwise.errors import ConfigError, StorageError
from turnwise.reports.evaluation_names import evaluation_names
from turnwise.reports.training import TrainReport
from turnwise.rollout.prepare import prepare
from turnwise.storage.final_policy import Evaluated, Shipped, read_best, read_shipped
from turnwise.train import train
from turnwise.types import Trajectory

QUIET = Console(quiet=True)
SMALL = (
    "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=2", "training.group_size=2", "engine.threads=1",
    "training.eval_every=1", "training.save_every=2", "training.keep=1", "training.steps=4", "sampling.max_tokens=8",
    "eval.samples=4", "training.max_lag=0", "run=a",
)  # fmt: skip


def samples(source: str) -> list[Sample]:
    return [
        Sample(f"{source}{n}", (Message(Role.USER, f"What is {n} + 2?"),), source, ground_truth="1") for n in range(4)
    ]


def trained(folder: Path, right_at: dict[int, int], *overrides: str) -> TrainReport:
    """A training whose evaluation after a step finds so many of four right."""

    async def scorer(trajectory: Trajectory) -> float:
        if trajectory.sample.data_source == "train":
            return float(trajectory.sibling % 2)
        return float(
            int(trajectory.sample.id[-1]) < right_at.get(-1 - trajectory.step, 0)
        )  # as evaluations number them

    config = configure(*SMALL, f"runs_dir={folder}", *overrides)
    return train(config, samples=samples("train"), eval_samples=samples("held"), scorer=scorer, console=QUIET)


def policy(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "policy" / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    first, second = policy(one), policy(other)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("best_step", [1, 2], ids=["between checkpoints", "at a checkpoint"])
def test_a_run_that_ends_in_a_dip_ships_what_was_clearly_better(tmp_path: Path, best_step: int) -> None:
    report = trained(tmp_path, {0: 1, best_step: 4, 3: 3, 4: 1})
    assert report.shipped is not None
    assert (report.shipped.policy.step, report.shipped.last.step) == (best_step, 4)
    assert report.accuracy == 1.0 and report.after["accuracy"] == 0.25
    last = report.run / "checkpoints" / "step_000004"
    assert same(report.run, report.run / "best") and not same(report.run, last)
    alone = trained(tmp_path / "again", {}, f"training.steps={best_step}")
    assert same(report.run, alone.run), "the weights are those of that step"
    said = str(report)
    assert f"shipped: step {best_step}" in said and "last: step 4" in said
    assert f"policy: {report.run / 'policy'}" in said.replace("\n", "")
    assert f"policy has the weights of step {best_step}, accuracy 100.0%" in (report.run / "log.txt").read_text()
    assert report.as_json()["shipped"]["policy"]["step"] == best_step
    assert len(list((report.run / "checkpoints").glob("step_*"))) == 1, "no checkpoint more than training.keep"


def test_a_difference_that_chance_makes_ships_the_last_weights(tmp_path: Path) -> None:
    report = trained(tmp_path, {1: 3, 2: 2, 3: 2, 4: 2})
    assert report.shipped is not None and report.shipped.is_last and report.accuracy == report.after["accuracy"]
    assert same(report.run, report.run / "checkpoints" / "step_000004")
    assert "shipped: step" not in str(report) and "policy has the weights of step 4, the last" in str(report)


def test_last_keeps_nothing_else(tmp_path: Path) -> None:
    several = ("eval.group_size=2", "training.target=1.0")
    report = trained(tmp_path, {2: 3}, "training.ship=last", "training.steps=3", *several)
    assert report.shipped is not None and report.shipped.is_last and report.shipped.last.step == 3
    numbers = json.loads((report.run / "eval" / "step_000002.json").read_text())
    assert numbers["accuracy"] == numbers["avg@2"] == numbers["maj@2"] == numbers["reward"] == 0.75
    assert {"pass@2", "pass^2/held", "avg@2_stderr", "reward/held", "reward_stderr"} <= numbers.keys()
    assert "greedy_reward" in json.loads((report.run / "eval" / "step_000003.json").read_text())
    (line,) = [line for line in (report.run / "log.txt").read_text().splitlines() if "step 2: " in line]
    assert "avg@2 75.0% ± " in line and "reward 0.750 ± " in line
    assert not (report.run / "best").exists() and same(report.run, report.run / "checkpoints" / "step_000003")


def test_weights_are_the_best_by_the_number_that_is_named(tmp_path: Path) -> None:
    asked = ("training.ship=greedy_reward/held", "training.target=1", "training.steps=3")
    report = trained(tmp_path, {1: 2, 2: 4}, *asked)
    assert report.steps == 2 and report.reason == "the target of 1 greedy_reward/held is reached"
    best = read_best(report.run)
    assert best is not None and (best.step, best.value, best.metric) == (2, 1.0, "greedy_reward/held")
    with pytest.raises(ConfigError, match="evaluations have it with eval.group_size=4"):
        trained(tmp_path / "b", {}, "training.ship=pass@4")
    with pytest.raises(ConfigError, match="training.ship: unknown number 'greedy_acuracy': did you mean 'greedy_acc"):
        trained(tmp_path / "b", {}, "training.ship=greedy_acuracy")


def test_the_names_of_all_numbers_are_known_before_a_run() -> None:
    prepared = prepare(configure("eval.group_size=3"), "test", limit=2)
    names = evaluation_names(prepared)
    assert {"accuracy", "reward/arithmetic", "pass@3", "avg@2/arithmetic", "task/arithmetic/verified"} <= set(names)
    assert "pass@2" not in names and "greedy_task/arithmetic/verified" in names and "first_accuracy" not in names


def test_a_longer_run_goes_on_from_its_last_weights_and_may_ship_the_old_best(tmp_path: Path) -> None:
    right = {1: 4}
    short = trained(tmp_path, right, "training.steps=2")
    assert short.shipped is not None and short.shipped.policy.step == 1
    longer = trained(tmp_path, right, "training.steps=4", "resume=auto")
    assert longer.shipped is not None and longer.shipped.policy.step == 1
    whole = trained(tmp_path / "whole", right, "training.steps=4")
    names = ("checkpoints/step_000004", "")
    assert all(same(longer.run / name, whole.run / name) for name in names)
    finished = trained(tmp_path, right, "training.steps=4", "resume=auto")
    assert finished.reason.startswith("already finished") and finished.shipped == longer.shipped


def test_a_best_that_is_done_again_after_a_resume_is_forgotten(tmp_path: Path) -> None:
    report = trained(tmp_path, {}, "training.steps=2")
    kept = report.run / "best"
    kept.joinpath("evaluation.json").write_text(json.dumps({"step": 3, "found": {"accuracy": 1.0}}))
    longer = trained(tmp_path, {4: 2}, "training.steps=4", "resume=auto")
    assert longer.shipped is not None and longer.shipped.is_last
    best = read_best(longer.run)
    assert best is not None and best.step == 4


def test_words_about_what_cannot_be_read_are_no_words(tmp_path: Path) -> None:
    assert read_best(tmp_path) is None and read_shipped(tmp_path) is None
    (tmp_path / "shipped.json").write_text('{"policy": 3}')
    assert read_shipped(tmp_path) is None


def test_clearly_better_is_more_than_the_error_of_the_difference() -> None:
    def of(accuracy: float, stderr: float) -> Evaluated:
        return Evaluated(1, {"accuracy": accuracy, "accuracy_stderr": stderr})

    assert of(0.92, 0.02).is_clearly_better(of(0.77, 0.03))
    assert not of(0.92, 0.04).is_clearly_better(of(0.88, 0.03))
    assert not of(0.92, 0.0).is_clearly_better(of(0.92, 0.0))
    assert not Evaluated(1, {}).is_clearly_better(of(0.1, 0.0)) and not of(1, 0.0).is_clearly_better(Evaluated(2, {}))
    verified = [Evaluated(1, {"task/a/b": value, "task/a/b_stderr": 0.5}, "task/a/b") for value in (3.0, 2.0)]
    assert verified[0].is_clearly_better(verified[1]) and str(verified[0]) == "3"
    assert Shipped(Evaluated(1, {}), Evaluated(1, {})).is_last


def test_without_a_last_checkpoint_the_policy_is_there_and_the_run_cannot_be_made_longer(tmp_path: Path) -> None:
    asked = ("training.save_last=false", "training.steps=2", "training.save_every=1", "training.keep=2")
    report = trained(tmp_path, {1: 4}, *asked)
    first, last = (report.run / "checkpoints" / f"step_00000{step}" for step in (1, 2))
    assert (first / "learner.safetensors").exists() and not (last / "learner.safetensors").exists()
    whole = trained(tmp_path / "whole", {1: 4}, "training.steps=2")
    assert same(last, whole.run / "checkpoints" / "step_000002") and same(report.run, whole.run)
    over = trained(tmp_path, {1: 4}, *asked, "resume=auto")
    assert over.reason.startswith("already finished") and over.shipped == report.shipped
    before = (report.run / "status.json").read_bytes()
    with pytest.raises(
        StorageError, match=r"step_000002 holds its policy only .*; start a new run with model.path=.*/p"
    ):
        trained(tmp_path, {1: 4}, *asked, "training.steps=4", "resume=auto")
    assert (report.run / "status.json").read_bytes() == before


def test_a_run_that_is_stopped_early_is_saved_whole(tmp_path: Path) -> None:
    asked = ("training.save_last=false", "training.save_every=0", "training.steps=2")
    report = trained(tmp_path, {}, *asked, "training.max_tokens=1")
    assert report.steps == 1 and (report.run / "checkpoints" / "step_000001" / "learner.safetensors").exists()
    assert trained(tmp_path, {}, *asked, "training.max_tokens=null", "resume=auto").steps == 2
    assert not (report.run / "checkpoints" / "step_000002" / "learner.safetensors").exists()
