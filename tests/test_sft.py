"""Fine-tuning from outside: a run like any other, counts of what it learned from, and refusals before it starts."""

import io
import json
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from turnwise import configure
from turnwise.commands.cli import main
from turnwise.config import Config
from turnwise.engines.model.sources import find_model
from turnwise.engines.rendering import make_renderer
from turnwise.errors import ConfigError, DataError, StorageError
from turnwise.ext.board.health import findings
from turnwise.ext.board.runs import Runs
from turnwise.sft import SftReport, fine_tune
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State, read_status
from turnwise.storage.trajectories.files import read_trajectories, write_trajectories
from turnwise.train import train
from turnwise.training.demonstrations import choose, find_files
from turnwise.training.endpoint_episodes import Student

QUIET = Console(quiet=True)
TINY = find_model("tiny", False).folder
SHORT = ("sft.steps=3", "sft.batch_tokens=400", "sft.warmup=1", "engine.threads=1")


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
    opened = Runs([tmp_path]).open("tuned")
    details = opened.details(time.time())
    assert "sft/loss" in details["metrics"] and details["problems"] == [] and details["has_tokenizer"]
    said = [one.text for one in findings(opened.table, opened.series)]
    assert any("no step of reinforcement learning" in text for text in said), said
    learned = read_trajectories(run.path / "trajectories" / "step_000000.parquet")
    assert len(learned) == 6 and {one.reward for one in learned} == {1.0}, "the board shows what was learned from"
    assert len(run.read_jsonl("index.jsonl")) == 1

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
    given = [replace(first, failure="a tool died"), replace(second, turns=[]), replace(third, reward=None), *rest]
    for one in rest:
        one.reward = 1.0
    notes: list[str] = []
    student = Student(make_renderer(config(tmp_path)), 768, 4096)
    found = choose(given, config(tmp_path, "sft.min_reward=1", f"sft.recorded=[{trained}]"), student, notes.append)
    assert found.used == rest and notes == []
    assert found.dropped == {"failed": 1, "without a turn of the model's": 1, "without a reward": 1}
    with pytest.raises(DataError, match="none of 1 recorded trajectories is left to learn from: 1 failed"):
        choose(given[:1], config(tmp_path), student, notes.append)
    with pytest.raises(DataError, match="hold token"):
        choose(rest, config(tmp_path), replace(student, vocabulary=3), notes.append)
    rest[0].reward = 0.0
    choose(rest, config(tmp_path), student, notes.append)
    assert "rewards from 0 to 1 are all imitated alike" in notes[-1]
    report = fine_tune(config(tmp_path, "sft.steps=1", "task=null"), trajectories=rest, console=QUIET)
    assert (report.trajectories, report.used, report.steps) == (len(rest), len(rest), 1)
    assert f"with: turnwise train task=null model.path={report.policy}" in (report.run / "log.txt").read_text()


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


# --- the learner's knobs ------------------------------------------------------------------------------------------


def weights(policy: Path) -> dict[str, Any]:
    return load_file(policy / "model.safetensors")


def test_lora_trains_an_adapter_and_leaves_the_rest_alone(trained: Path, tmp_path: Path) -> None:
    asked = config(tmp_path, f"sft.recorded=[{trained}]", "learner.lora_rank=2", "learner.token_budget=200")
    report = fine_tune(asked, console=QUIET)
    assert report.adapter == report.run / "policy_adapter" and report.adapter.is_dir()
    factors = load_file(report.adapter / "adapter_model.safetensors")
    base, merged = weights(TINY), weights(report.policy)
    changed = {name for name, tensor in merged.items() if not tensor.equal(base[name].float())}
    assert changed and changed == {
        name.removeprefix("base_model.model.").replace(".lora_A", "") for name in factors if ".lora_A" in name
    }


def test_transformers_computes_the_same_losses(trained: Path, tmp_path: Path) -> None:
    losses = []
    for implementation in ("native", "transformers"):
        asked = config(tmp_path, f"sft.recorded=[{trained}]", f"model.implementation={implementation}")
        report = fine_tune(asked, console=QUIET)
        losses.append([line["sft/loss"] for line in RunDir(report.run).read_jsonl("metrics.jsonl")])
        assert weights(report.policy).keys() == weights(TINY).keys()
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and losses[0][0] != losses[0][-1]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("learner.device=cuda:99", "learner.device=cuda:99: "),
        ("engine=openai", "engine=openai gives none"),
        ("model.precision=bfloat16", "learner.precision"),
    ],
)
def test_what_cannot_be_fine_tuned_is_refused_before_anything_is_written(
    trained: Path, tmp_path: Path, override: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        fine_tune(config(tmp_path, f"sft.recorded=[{trained}]", override), console=QUIET)
    assert not list(tmp_path.iterdir())


def test_knobs_of_reinforcement_learning_are_refused_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, told in {
        "training.steps": "use sft.steps",
        "learner.lr": "use sft.lr",
        "algorithm.entropy": "",
    }.items():
        assert main(["sft", *SHORT, f"runs_dir={tmp_path}", f"{key}=1"]) == 2
        said = capsys.readouterr().err
        assert f"{key} belongs to reinforcement learning" in said and told in said
    assert not list(tmp_path.iterdir())


# --- stopping and resuming ----------------------------------------------------------------------------------------


class Interrupting(Console):
    """A person who presses Ctrl-C on reading a text; SIGTERM, as a parent may have us ignore the other."""

    def __init__(self, text: str) -> None:
        super().__init__(record=True, file=io.StringIO(), width=400)
        self.text: str | None = text

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        if self.text is not None and any(self.text in str(one) for one in objects):
            self.text = None
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def uninterrupted(trained: Path) -> SftReport:
    folder = trained.parent / "whole"
    return fine_tune(config(folder, "sft.steps=6", f"sft.recorded=[{trained}]", "run=whole"), console=QUIET)


def test_a_stopped_fine_tuning_keeps_what_it_learned_and_resumes_to_the_same_bits(
    trained: Path, tmp_path: Path, uninterrupted: SftReport, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(trained, copied, ignore=shutil.ignore_patterns("checkpoints", "eval"))
    console = Interrupting("step 3/6")
    asked = ("sft.steps=6", f"sft.recorded=[{copied}]", "run=r", "training.save_every=2")
    stopped = fine_tune(config(tmp_path, *asked), console=console)
    assert stopped.reason == "stopped by a signal" and 3 <= stopped.steps < 6
    said = console.export_text()
    assert f"stopped by a signal after {stopped.steps} of 6 steps; the policy so far is " in said
    assert f"resume with: {stopped.resume}" in said and "resume=auto" in str(stopped.resume)
    assert not weights(stopped.policy).keys() ^ weights(TINY).keys()
    status = read_status(RunDir(stopped.run))
    assert status is not None and (status.state, status.step, status.steps) == (State.STOPPED, stopped.steps, 6)

    shutil.rmtree(copied)  # the run has its own
    again = [f"runs_dir={tmp_path}", "run=r", "resume=auto"]
    assert main(["sft", *again, "sft.lr=1e-3"]) == 2
    assert "sft.lr was 0.002 and is 0.001" in capsys.readouterr().err
    assert main(["train", *again]) == 2
    assert "run 'r' was made by `turnwise sft`" in capsys.readouterr().err
    assert main(["sft", *again, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["steps"], report["resume"], report["tokens"]) == (6, None, uninterrupted.tokens)
    assert (report["first_loss"], report["last_loss"]) == (uninterrupted.first_loss, uninterrupted.last_loss)
    same = weights(uninterrupted.policy)
    assert all(tensor.equal(same[name]) for name, tensor in weights(stopped.policy).items())
    lines, whole = (RunDir(run).read_jsonl("metrics.jsonl") for run in (stopped.run, uninterrupted.run))
    assert [(line["step"], line["sft/loss"]) for line in lines] == [(line["step"], line["sft/loss"]) for line in whole]

    before = (stopped.policy / "model.safetensors").stat().st_mtime_ns
    assert main(["sft", *again]) == 0
    assert "already finished: all 6 steps done" in " ".join(capsys.readouterr().out.split())
    assert (stopped.policy / "model.safetensors").stat().st_mtime_ns == before


def test_a_run_without_a_checkpoint_begins_anew_with_its_own_trajectories(
    trained: Path, tmp_path: Path, uninterrupted: SftReport
) -> None:
    shutil.copytree(uninterrupted.run, tmp_path / "r", ignore=shutil.ignore_patterns("checkpoints", "policy"))
    own = read_trajectories(tmp_path / "r" / "trajectories" / "step_000000.parquet")
    asked = config(tmp_path, "sft.steps=6", f"sft.recorded=[{trained}]", "run=r", "resume=auto")
    with pytest.raises(ConfigError, match="started with other trajectories"):
        fine_tune(asked, trajectories=own[1:], console=QUIET)
    report = fine_tune(asked, trajectories=own, console=QUIET)
    assert (report.steps, report.last_loss) == (6, uninterrupted.last_loss)
    assert [line["step"] for line in RunDir(report.run).read_jsonl("metrics.jsonl")] == list(range(1, 7))


def test_trajectories_that_were_changed_are_not_resumed_with(
    trained: Path, tmp_path: Path, uninterrupted: SftReport
) -> None:
    shutil.copytree(uninterrupted.run, tmp_path / "r")
    file = tmp_path / "r" / "trajectories" / "step_000000.parquet"
    state = next((tmp_path / "r" / "checkpoints").glob("step_*/state.json"))
    for name in ("manifest.json", "state.json"):  # as of a run that has a step left
        path = state.parent / name
        content = json.loads(path.read_text())
        if name == "state.json":
            content["progress"]["step"] = 5
        else:
            del content["files"]["state.json"]
        path.write_text(json.dumps(content))
    write_trajectories(file, read_trajectories(file)[1:])
    with pytest.raises(StorageError, match="its recorded trajectories have changed"):
        fine_tune(config(tmp_path, "sft.steps=6", f"sft.recorded=[{trained}]", "run=r", "resume=auto"), console=QUIET)


def test_by_default_the_trajectories_are_gone_through_three_times(trained: Path, tmp_path: Path) -> None:
    asked = config(tmp_path, f"sft.recorded=[{trained}]", "sft.steps=null", "sft.batch_tokens=8192")
    console = Console(record=True, file=io.StringIO(), width=400)
    report = fine_tune(asked, console=console)
    assert report.steps == 3 and "3 steps of at most 8192 tokens are 3 passes" in console.export_text()
    status = read_status(RunDir(report.run))
    assert status is not None and status.steps == 3
