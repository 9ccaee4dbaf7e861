"""`turnwise export-jsonl`: what RL logging board reads of a run, and the same numbers read back by `import-jsonl`."""

import json
import math

import numpy as np
import pytest

import turnwise as tw
from turnwise.commands.cli import main
from turnwise.errors import ConfigError, DataError
from turnwise.ext.verl.dumps.read import import_dumps
from turnwise.ext.verl.dumps.write import export_dumps
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import read_trajectories, write_trajectories

KEYS = {"prompt", "response", "response_tokens", "logprobs", "ref_logprobs", "token_rewards", "reward", "step"}
"""What the board's page of its format asks for, where there is no critic."""
SMALL = (
    "training.steps=2", "training.groups=2", "training.group_size=2", "training.eval_every=1", "eval.samples=2",
    "algorithm.kl_loss=0.01", "engine.threads=1", "run=mine", "runs_dir=runs", "tracking.to=[]",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of the bundled model with tools and a user, a reference model beside it."""
    folder = tmp_path_factory.mktemp("export")
    tw.train(tw.configure(*SMALL, f"runs_dir={folder}"))
    return RunDir(folder / "mine")


def lines_of(folder):
    return [json.loads(line) for line in (folder / "rollout_data_rank0.jsonl").read_text().splitlines()]


def test_a_line_has_what_the_board_asks_for(run, tmp_path):
    done = export_dumps(run, tmp_path / "logs")
    lines = lines_of(tmp_path / "logs")
    assert (done.steps, done.lines, done.notes) == (2, 8, {}) and [line["step"] for line in lines] == [1] * 4 + [2] * 4
    recorded = [
        one for step in (1, 2) for one in read_trajectories(run.path / f"trajectories/step_00000{step}.parquet")
    ]
    for line, trajectory in zip(lines, recorded, strict=True):
        assert line.keys() >= KEYS and "values" not in line
        (ledger,) = trajectory.segments
        start = int(np.argmax(ledger.loss_mask))
        mask = ledger.loss_mask[start:]
        columns = {name: np.array(line[name]) for name in ("logprobs", "ref_logprobs", "token_rewards")}
        assert all(np.isnan(column[~mask]).all() and np.isfinite(column[mask]).all() for column in columns.values())
        assert len(line["response_tokens"]) == len(mask) and "".join(line["response_tokens"]) == line["response"]
        assert (columns["logprobs"][mask] == ledger.logprobs[start:][mask]).all()
        assert math.isclose(np.nansum(columns["token_rewards"]), line["reward"]) and line["reward"] == trajectory.reward
        assert line["prompt"].startswith("<|im_start|>system") and line["prompt"].endswith("<|im_start|>assistant\n")
        assert line["acc"] == float(trajectory.right) and line["data_source"] == "arithmetic"


def test_what_is_written_is_read_again_to_the_same_numbers(run, tmp_path, capsys):
    logs, held_out = tmp_path / "logs", tmp_path / "held_out"
    assert main(["export-jsonl", str(run.path), "--out", str(logs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["lines"] == 8
    assert main(["export-jsonl", str(run.path), "--out", str(held_out), "--eval"]) == 0
    again = tmp_path / "runs" / "again"
    done = import_dumps([logs, held_out], again)
    assert (done.train_steps, done.eval_steps, done.bad, done.notes) == (2, 3, 0, {})
    for file in ("trajectories/step_000002.parquet", "eval/step_000002.parquet"):
        for ours, theirs in zip(read_trajectories(run.path / file), read_trajectories(again / file), strict=True):
            assert theirs.sample.id == ours.sample.id and theirs.reward == ours.reward and theirs.right == ours.right
            assert [turn.message.visible for turn in theirs.turns] == [turn.message.visible for turn in ours.turns]
            policy, read = ours.segments[0].loss_mask, theirs.segments[0].loss_mask
            assert (ours.segments[0].logprobs[policy] == theirs.segments[0].logprobs[read]).all()
    known = [line for line in run.read_jsonl("metrics.jsonl") if "critic/score/mean" in line]
    found = [line for line in RunDir(again).read_jsonl("metrics.jsonl") if "critic/score/mean" in line]
    for name in ("critic/score/mean", "critic/rewards/mean", "train/accuracy/arithmetic"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in known]), name


def test_what_cannot_be_shown_is_counted(run, tmp_path):
    trajectories = read_trajectories(run.path / "trajectories/step_000001.parquet")
    trajectories[0].reward = None
    trajectories[1].segments = []
    ledger = trajectories[2].segments[0]
    trajectories[2].segments = [ledger, ledger]
    trajectories[3].parts = {"step": 0.5, "acc": 0.0}
    other = RunDir(tmp_path / "other")
    (other.path / "trajectories").mkdir(parents=True)
    write_trajectories(other.path / "trajectories/step_000001.parquet", trajectories)
    done = export_dumps(other, tmp_path / "logs")
    assert (done.lines, sorted(done.notes.values())) == (2, [1, 1, 1])
    assert lines_of(tmp_path / "logs")[1] | {"step": 1, "part_step": 0.5, "acc": 0.0} == lines_of(tmp_path / "logs")[1]
    with pytest.raises(ConfigError, match=r"logs exists; nothing is overwritten"):
        export_dumps(other, tmp_path / "logs")
    with pytest.raises(DataError, match=r"other: has no episodes in eval/"):
        export_dumps(other, tmp_path / "more", evaluations=True)
    assert not (tmp_path / "more").exists()
