"""Fine-tuning from outside: a run like any other, counts of what it learned from, and refusals before it starts."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from turnwise import configure
from turnwise.cli import main
from turnwise.config import Config
from turnwise.demonstrations import choose, find_files
from turnwise.errors import ConfigError, DataError, StorageError
from turnwise.sft import fine_tune
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State, read_status
from turnwise.storage.trajectories import read_trajectories
from turnwise.train import train
from turnwise.web.runs import Runs

QUIET = Console(quiet=True)
SHORT = ("sft.steps=3", "sft.batch_tokens=400", "sft.warmup=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run of one LoRA step, in which every second sibling is right whatever it says."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "plug.py").write_text("async def reward(trajectory):\n    return float(trajectory.sibling % 2 == 0)\n")
    overrides = (
        "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=3", "training.group_size=4",
        "training.samples=8", "eval.samples=2", "training.eval_every=0", "engine.threads=1", "training.steps=1",
        "learner.lora_rank=2", "learner.lr=1e-3", "run=rl",
        f"scoring.scorers={{default: '{folder}/plug.py:reward'}}",
    )  # fmt: skip
    return train(configure(*overrides, f"runs_dir={folder}"), console=QUIET).run


def config(folder: Path, *overrides: str) -> Config:
    return configure(*SHORT, f"runs_dir={folder}", *overrides)


def test_a_lora_checkpoint_has_the_adapter_beside_the_merged_policy(trained: Path) -> None:
    folder = trained / "checkpoints" / "step_000001"
    about = json.loads((folder / "policy_adapter" / "adapter_config.json").read_text())
    base = load_file(Path(about["base_model_name_or_path"]) / "model.safetensors")
    merged = load_file(folder / "policy" / "model.safetensors")
    factors = load_file(folder / "policy_adapter" / "adapter_model.safetensors")
    changed = {name for name, tensor in merged.items() if not tensor.equal(base[name].float())}
    assert changed and changed == {
        name.removeprefix("base_model.model.").replace(".lora_A", "") for name in factors if ".lora_A" in name
    }


def test_a_fine_tuning_is_a_run_with_counts_metrics_and_a_policy(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["sft", *SHORT, f"runs_dir={tmp_path}", "run=tuned", f"sft.recorded=[{trained}]", "sft.min_reward=1"]
    assert main([*asked, "--json"]) == 0
    printed = capsys.readouterr()
    report: dict[str, Any] = json.loads(printed.out.splitlines()[-1])
    assert (report["trajectories"], report["used"], report["dropped"]) == (12, 6, {"with reward < 1": 6})
    assert "12 recorded trajectories, 6 with reward < 1, 6 used" in printed.err
    assert "step 3/3: loss" in printed.err, "there is no bar where there is no terminal"
    run = RunDir.open(tmp_path / "tuned")
    lines = run.read_jsonl("metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3] == list(range(1, report["steps"] + 1))
    assert (lines[0]["sft/loss"], lines[-1]["sft/loss"]) == (report["first_loss"], report["last_loss"])
    assert lines[-1]["tokens"] == report["tokens"] == sum(line["sft/policy_tokens"] for line in lines) > 0
    assert all(line["sft/lr"] > 0 and line["sft/grad_norm"] > 0 for line in lines)
    status = read_status(run)
    assert status is not None and (status.state, status.command, status.step) == (State.FINISHED, "sft", 3)
    policy = Path(report["policy"])
    assert policy == run.path / "policy" and load_file(policy / "model.safetensors")
    details = Runs([tmp_path]).open("tuned").details(time.time())
    assert "sft/loss" in details["metrics"] and details["problems"] == [] and details["has_tokenizer"]

    before = (policy / "model.safetensors").stat().st_mtime_ns
    assert main(asked) == 2 and "'tuned' exists" in capsys.readouterr().err
    assert (policy / "model.safetensors").stat().st_mtime_ns == before


def test_samples_that_are_evaluated_on_are_refused_before_anything_is_written(trained: Path, tmp_path: Path) -> None:
    for place in (trained / "eval" / "step_000001.parquet", f"{trained}/eval/*.parquet"):
        with pytest.raises(DataError, match=r"samples that this config evaluates on \(first: arithmetic/test:0\)"):
            fine_tune(config(tmp_path, f"sft.recorded=['{place}']"), console=QUIET)
    assert not list(tmp_path.iterdir())
    elsewhere = config(tmp_path, f"sft.recorded=[{trained}/eval/step_000001.parquet]", "seed=7", "sft.steps=1")
    said = Console(record=True, quiet=False, file=(tmp_path / "said").open("w"), width=400)
    fine_tune(elsewhere, console=said)  # the task has other samples for another seed
    assert "was recorded by an evaluation" in said.export_text()


def test_a_run_of_another_tokenizer_is_refused(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(trained, other, ignore=shutil.ignore_patterns("checkpoints"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<|another|>"
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match="another tokenizer"):
        fine_tune(config(tmp_path, f"sft.recorded=[{other}]"), console=QUIET)


def test_what_cannot_be_learned_from_is_left_out_and_counted(trained: Path, tmp_path: Path) -> None:
    first, second, third, *rest = read_trajectories(trained / "trajectories" / "step_000001.parquet")
    given = [replace(first, failure="a tool died"), replace(second, segments=[]), replace(third, reward=None), *rest]
    for one in rest:
        one.reward = 1.0
    notes: list[str] = []
    found = choose(given, config(tmp_path, "sft.min_reward=1", f"sft.recorded=[{trained}]"), 768, notes.append)
    assert found.used == rest and notes == []
    assert found.dropped == {"failed": 1, "without tokens (an endpoint records none)": 1, "without a reward": 1}
    with pytest.raises(DataError, match="none of 1 recorded trajectories is left to learn from: 1 failed"):
        choose(given[:1], config(tmp_path), 768, notes.append)
    with pytest.raises(DataError, match="hold token"):
        choose(rest, config(tmp_path), 3, notes.append)
    rest[0].reward = 0.0
    choose(rest, config(tmp_path), 768, notes.append)
    assert "rewards from 0 to 1 are all imitated alike" in notes[-1]
    report = fine_tune(config(tmp_path, "sft.steps=1"), trajectories=rest, console=QUIET)
    assert (report.trajectories, report.used, report.steps) == (len(rest), len(rest), 1)


def test_recorded_places_are_files_patterns_and_runs(trained: Path, tmp_path: Path) -> None:
    file = (trained / "trajectories" / "step_000001.parquet").resolve()
    for place in (trained, file, f"{trained}/trajectories/*.parquet"):
        assert find_files([str(place)]) == [file]
    assert find_files([str(trained), str(file)]) == [file], "none is read twice"
    with pytest.raises(StorageError, match="no run 'rll'.*did you mean 'rl'"):
        find_files([str(trained.parent / "rll")])
    with pytest.raises(DataError, match="no file is called"):
        find_files([str(tmp_path / "*.parquet")])
    shutil.copytree(trained, tmp_path / "evaluated", ignore=shutil.ignore_patterns("checkpoints", "trajectories"))
    with pytest.raises(DataError, match="has no training trajectories; use a training run's"):
        find_files([str(tmp_path / "evaluated")])
    with pytest.raises(ConfigError, match="nothing to learn from"):
        fine_tune(config(tmp_path, "sft.script=null"), console=QUIET)
