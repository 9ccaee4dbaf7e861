"""Real runs whose weights change while episodes are written, and that train on recorded groups again."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from turnwise import configure
from turnwise.errors import StorageError
from turnwise.reports.training import TrainReport
from turnwise.rollout.collector import leave_out_stale
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.train import train
from turnwise.training.runs.state import RunState
from turnwise.types import Group, Ledger, Origin, Sample, StopReason, Trajectory

SMALL = (
    "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=3", "training.group_size=4",
    "training.samples=24", "eval.samples=2", "training.eval_every=0", "training.save_every=0", "training.keep=9",
    "engine.threads=1", "sampling.max_tokens=24", "algorithm.old_logprobs=null", "training.shuffle=false",
)  # fmt: skip
REPLAY = (
    "training.max_lag=0", "training.replay_groups=4", "training.replay_share=0.4", "training.replay_age=2",
    "training.replay_uses=2", "training.save_every=1",
)  # fmt: skip


PLUG = """
def score(trajectory):
    return float(trajectory.sibling % 2)

def score_thirds(trajectory):
    return score(trajectory) if int(trajectory.sample.id.rpartition(":")[2]) % 3 == 0 else 0.0
"""


def run(folder: Path, *overrides: str) -> TrainReport:
    """Siblings always get different rewards, so that every group teaches something."""
    (folder / "plug.py").write_text(PLUG)
    scorer = f"scoring.scorers={{default: '{folder}/plug.py:score'}}"
    return train(configure(*SMALL, scorer, f"runs_dir={folder}", *overrides), console=Console(quiet=True))


def steps(report: TrainReport) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (report.run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "groups/total" in line]


def recorded(report: TrainReport, step: int, folder: str = "trajectories") -> list[Trajectory]:
    path = report.run / folder / f"step_{step:06d}.parquet"
    return read_trajectories(path) if path.is_file() else []


def ages(trajectories: list[Trajectory], step: int) -> np.ndarray:
    """Of every policy token that this step trained on."""
    rows = [ledger.versions[ledger.loss_mask] for one in trajectories for ledger in one.segments]
    return step - 1 - np.concatenate(rows)


def check_metrics(report: TrainReport, allowed: int) -> list[float]:
    """What the metrics say of staleness is what the recorded tokens say; the largest age of each step."""
    found = []
    for line in steps(report):
        here = ages([*recorded(report, line["step"]), *recorded(report, line["step"], "reused")], line["step"])
        assert line["staleness/mean"] == pytest.approx(here.mean()) and line["staleness/max"] == here.max() <= allowed
        for age in range(allowed + 1 if allowed else 0):
            assert line[f"staleness/age_{age}"] == pytest.approx((here == age).mean())
        assert line["staleness/left_out"] == line["groups/left_out"] == 0 and here.min() >= 0
        found.append(float(here.max()))
    return found


def sample_ids(report: TrainReport) -> list[str]:
    every = (one.sample.id for step in range(1, report.steps + 1) for one in recorded(report, step))
    return list(dict.fromkeys(every))


def test_tokens_are_as_old_as_max_lag_allows_and_weighed_from_there_on(tmp_path: Path) -> None:
    used, own = [], "algorithm.old_logprobs=learner"  # beside the sampler's, ppo_clip's own ratio is the weight
    for lag in (0, 2):
        report = run(tmp_path, f"run=lag{lag}", f"training.max_lag={lag}", "training.steps=3", own)
        oldest = check_metrics(report, lag)
        assert oldest[: lag + 1] == list(range(lag + 1)), "what was collected at the start is of the first weights"
        weighed = ["rollout_corr/rollout_is_mean" in line for line in steps(report)]
        assert weighed == [lag > 0] * 3, "on by itself exactly where tokens may be stale"
        plan = (report.run / "plan.txt").read_text()
        assert ("importance weights: token, truncate" in plan) is (lag > 0) and f"staleness    max_lag {lag}\n" in plan
        used.append(sample_ids(report))
    assert used[0] == used[1] and len(used[0]) == 9, "lag changes when, never what"


def test_what_dynamic_sampling_leaves_out_is_counted_and_makes_nothing_older(tmp_path: Path) -> None:
    thirds = f"scoring.scorers={{default: '{tmp_path}/plug.py:score_thirds'}}"
    drop = ("training.drop_constant_groups=true", thirds)
    report = run(tmp_path, "run=drop", "training.max_lag=1", "training.steps=2", *drop)
    for line in steps(report):
        found = recorded(report, line["step"])
        assert line["groups/drawn"] == 9 and line["groups/left_out"] == 6 and line["groups/total"] == 3
        assert len(found) == 12 and ages(found, line["step"]).max() <= 1 and line["staleness/left_out"] == 0
    assert sample_ids(report) == [f"arithmetic/train:{number}" for number in range(0, 18, 3)], "in their order"


SLOW = """
import asyncio
from pathlib import Path

from turnwise.types import Message, Role

async def loop(chat):
    await chat.generate()
    number = int(chat.sample.id.rpartition(":")[2])
    if "train" in chat.sample.id and number > 3 and number % 3 == 1:  # goes on when newer weights are out
        while not Path({run!r}, "trajectories", f"step_{{number // 3:06d}}.parquet").exists():
            await asyncio.sleep(0.01)
    chat.add([Message(Role.USER, "And?")])
    await chat.generate()
"""


def test_long_episodes_are_waited_for_in_their_turn_and_go_on_with_newer_weights(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW.format(run=str(tmp_path / "slow")))
    loop = f"rollout.agent={tmp_path}/slow.py:loop"
    report = run(tmp_path, "run=slow", loop, "training.max_lag=2", "training.steps=4")
    check_metrics(report, 2)
    for step in range(1, 5):
        found = recorded(report, step)
        numbers = [int(one.sample.id.rpartition(":")[2]) for one in found]
        assert numbers == [3 * (step - 1) + n // 4 for n in range(12)], "none is overtaken, none left out"
        for number, one in zip(numbers, found, strict=True):
            versions = [turn.policy_version for turn in one.turns]
            if step > 1 and number % 3 == 1:
                assert len(versions) == 2 and versions[0] < versions[1] == step - 1, "it went on with newer weights"
                (ledger,) = one.segments
                wrote = ledger.versions[ledger.loss_mask]
                assert wrote[0] == versions[0] and wrote[-1] == step - 1 and (np.diff(wrote) >= 0).all()
    assert all({"groups/waited_for", "groups/ahead"} <= line.keys() for line in steps(report))


def weights(report: TrainReport, step: int) -> dict[str, torch.Tensor]:
    return load_file(report.run / "checkpoints" / f"step_{step:06d}" / "learner.safetensors")


def test_recorded_groups_are_trained_on_again_and_a_resumed_run_goes_on_the_same(
    tmp_path: Path, exact_engine: None
) -> None:
    whole = run(tmp_path, "run=whole", "training.steps=4", *REPLAY)
    check_metrics(whole, 2)
    times: dict[tuple[int, str], int] = {}
    for line in steps(whole):
        step, again = line["step"], recorded(whole, line["step"], "reused")
        assert line["replay/groups"] == (0 if step == 1 else 2) and line["replay/trajectories"] == len(again)
        assert line["replay/kept"] <= 4 and line["critic/score/mean"] == 0.5 and line["groups/total"] == 3
        for sample, first in {one.sample.id: one.reused_from for one in again}.items():
            times[first, sample] = times.get((first, sample), 0) + 1
            origin = [one for one in recorded(whole, first) if one.sample.id == sample]
            here = [one for one in again if one.sample.id == sample]
            assert 1 <= step - first <= 2 and len(here) == len(origin) == 4
            assert [one.segments[0].token_ids.tolist() for one in here] == [
                one.segments[0].token_ids.tolist() for one in origin
            ]
            assert np.array_equal(here[0].segments[0].logprobs, origin[0].segments[0].logprobs), "their writer's"
            assert here[0].segments[0].training != origin[0].segments[0].training, "what this step computed"
    assert times and max(times.values()) <= 2
    written = sum(turn.completion_tokens for step in range(1, 5) for one in recorded(whole, step) for turn in one.turns)
    assert whole.tokens == written, "an episode is counted once"

    run(tmp_path, "run=parts", "training.steps=2", *REPLAY)
    parts = run(tmp_path, "run=parts", "training.steps=4", "resume=auto", *REPLAY)
    a, b = weights(whole, 4), weights(parts, 4)
    assert all(torch.equal(a[name], b[name]) for name in a)
    for step in (3, 4):
        one, two = (recorded(report, step, "reused") for report in (whole, parts))
        assert [(t.reused_from, t.sample.id, t.sibling) for t in one] == [
            (t.reused_from, t.sample.id, t.sibling) for t in two
        ]
        assert [t.segments for t in one] == [t.segments for t in two]

    shutil.rmtree(parts.run / "checkpoints" / "step_000004")
    (parts.run / "trajectories" / "step_000003.parquet").unlink()
    with pytest.raises(StorageError, match=r"trajectories/step_000003\.parquet"):
        run(tmp_path, "run=parts", "training.steps=5", "resume=auto", *REPLAY)


def test_a_checkpoint_from_before_the_buffer_is_read_and_a_wrong_buffer_is_not() -> None:
    state: dict[str, Any] = {
        "format": 4, "kl": {"kind": "fixed", "value": 0.0}, "progress": {"step": 3, "prompt_batches": 3},
        "loader": {"epoch": 0, "position": 9, "fingerprint": "x", "seed": 0, "batch_size": 3, "shuffle": False},
    }  # fmt: skip
    assert RunState.model_validate_json(json.dumps(state)).progress.replay == []
    good = {"step": 2, "first": 0, "rows": 4, "spread": 0.5}
    for kept, fits in (
        (good, True),
        (good | {"rows": 0}, False),
        (good | {"x": 1}, False),
        (good | {"step": "2"}, False),
    ):
        state["progress"]["replay"] = [kept]
        try:
            found = RunState.model_validate_json(json.dumps(state)).progress.replay
        except ValueError:
            assert not fits
        else:
            assert fits and found[0].rows == 4


def test_an_engine_that_kept_its_old_weights_is_found_out() -> None:
    def episode(version: int, failure: str | None = None) -> Trajectory:
        ledger = Ledger()
        ledger.append([1], Origin.PROMPT, 0)
        ledger.append([2, 3], Origin.POLICY, 0, [-0.1, -0.2], version)
        return Trajectory(Sample("s", (), "t"), 0, 0, [], [], [ledger], StopReason.ANSWERED, 0.0, failure, reward=1.0)

    group = Group(Sample("s", (), "t"), [episode(5), episode(4), episode(3), episode(3, "lost")])
    assert leave_out_stale([group], 5, 1) == 1
    kept, also, old, lost = group.trajectories
    assert kept.failure is also.failure is None and kept.reward == also.reward == 1.0
    assert old.failure == "stale: its weights are 2 step(s) old, more than training.max_lag=1" and old.reward is None
    assert lost.failure == "lost"
