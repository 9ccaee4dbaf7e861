"""Training end to end with real weight updates: exact resume, signals, every algorithm, every bad input."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer

from turnwise import configure
from turnwise.chat.tokenizer import load_template
from turnwise.config import Config
from turnwise.errors import ConfigError, DataError, TurnwiseError
from turnwise.reports.training import TrainReport
from turnwise.sft import fine_tune
from turnwise.storage import checkpoints, index
from turnwise.storage.index import parse_line
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State, read_status
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.train import train
from turnwise.types import Trajectory

QUIET = Console(quiet=True)
SMALL = (
    "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=3", "training.group_size=4",
    "training.samples=24", "eval.samples=3", "training.eval_every=0", "training.save_every=1", "engine.threads=1",
    "training.steps=2", "sampling.max_tokens=40", "training.max_lag=0",
)  # fmt: skip


def config(folder: Path, *overrides: str) -> Config:
    return configure(*SMALL, f"runs_dir={folder}", *overrides)


def run(folder: Path, *overrides: str) -> TrainReport:
    return train(config(folder, *overrides), console=QUIET)


def weights(report: TrainReport, step: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(
        report.run / "checkpoints" / f"step_{step:06d}" / "learner.safetensors"
    )
    return tensors


def lines(report: TrainReport) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (report.run / "metrics.jsonl").read_text().splitlines()]


def test_weights_change_and_everything_is_recorded(tmp_path: Path, engine_is_exact: bool) -> None:
    report = run(tmp_path, "run=a", "algorithm.old_logprobs=learner")
    first, second = weights(report, 1), weights(report, 2)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    trajectories = read_trajectories(report.run / "trajectories" / "step_000001.parquet")
    assert len(trajectories) == 12 and all(t.reward is not None and t.advantage is not None for t in trajectories)
    by_group: dict[str, list[float]] = {}
    for trajectory in trajectories:
        by_group.setdefault(trajectory.sample.id, []).append(trajectory.advantage or 0.0)
    assert all(abs(sum(values)) < 1e-4 for values in by_group.values()), "grpo: a group's advantages cancel"
    check_what_training_knew(trajectories)
    status = read_status(RunDir.open(report.run))
    assert status is not None and (status.state, status.step, status.steps) == (State.FINISHED, 2, 2)
    assert status.reason == "all 2 steps done"
    shards = [parse_line(line) for line in (report.run / "index.jsonl").read_text().splitlines()]
    assert {shard.file for shard in shards} == {
        f"{name}.parquet"
        for name in ("trajectories/step_000001", "trajectories/step_000002", "eval/step_000000", "eval/step_000002",
                     "eval/greedy_step_000000", "eval/greedy_step_000002")
    }  # fmt: skip
    assert all(shard.size == len(read_trajectories(report.run / shard.file)) for shard in shards)
    assert Tokenizer.from_file(str(report.run / "tokenizer.json")).decode(
        trajectories[0].segments[0].token_ids.tolist()
    )
    steps = [line for line in lines(report) if "critic/score/mean" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/lr", "response_length/mean", "num_turns/mean",
                 "timing_s/gen", "timing_s/update_actor", "timing_s/loop_lag_max", "perf/throughput", "tool_calls/ok", "train/accuracy/arithmetic"):  # fmt: skip
        assert name in steps[0], name
    verdict = "are bitwise equal, " if engine_is_exact else "differ by "
    assert f"sampler and learner log-probs {verdict}" in (report.run / "log.txt").read_text()
    assert set(report.before) == set(report.after) and "greedy_accuracy" in report.after
    evaluated = [line for line in lines(report) if "val/accuracy" in line]
    assert len(evaluated) == 2 and all(line["val/accuracy_stderr"] > 0 for line in evaluated)
    assert report.after["accuracy_n"] == 3 and report.accuracy == report.after["accuracy"]
    assert [one.reward for one in report.rewards] == [line["critic/score/mean"] for line in steps]
    assert report.tokens == steps[-1]["tokens"] and "train longer: turnwise train run=a" in str(report)


OWN_TASK = """
from turnwise import Reduction, Task
def rows(split, seed):
    for n in range(24):
        question = {"role": "user", "content": f"What is {n} + 2?"}
        yield {"prompt": [question], "data_source": "sums/easy", "reward_model": {"ground_truth": str(n + 2)}}
async def right(trajectory):
    return float(trajectory.sample.ground_truth in trajectory.answers[-1].text)
def metrics(trajectory):
    return {"turns": len(trajectory.turns)}
TASK = Task(name="sums", rows=rows, scorer=right, metrics=metrics, reductions={"turns": Reduction.SUM},
            data_source="sums/easy")
"""


def test_what_a_task_measures_is_written_of_evaluations_too(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(OWN_TASK)
    report = run(tmp_path, f"task={tmp_path / 'sums.py'}", "training.steps=1", "rollout.tools=[]")
    before, step, after = lines(report)
    assert step["task/sums/easy/episodes"] == 12 and not any(name.startswith("val/") for name in step)
    for line in (before, after):
        for way in ("", "greedy_"):
            assert line[f"val/{way}task/sums/easy/episodes"] == 3 == line[f"val/{way}task/sums/easy/turns"]
    assert report.after["task/sums/easy/turns"] == 3 and report.as_json()["before"]["greedy_task/sums/easy/turns"] == 3
    assert json.loads((report.run / "eval/step_000001.json").read_text()) == report.after
    assert "accuracy" in str(report) and "task/" not in str(report), "a share is no sum"


def check_what_training_knew(trajectories: list[Trajectory]) -> None:
    """Every array is as long as its ledger; the learner's first log-probs are the sampler's; credit is where it acts."""
    trained = 0
    for ledger in (ledger for trajectory in trajectories for ledger in trajectory.segments):
        learned = ledger.training
        assert learned is not None and learned.logprobs is not None and learned.advantages is not None
        for ours, theirs, advantage, flag in zip(
            learned.logprobs, ledger.logprobs, learned.advantages, ledger.loss_mask, strict=True
        ):
            assert abs(ours - theirs) < 1e-5 and (flag or advantage == 0.0)
        if learned.new_logprobs is not None and learned.entropies is not None:  # else its group was flat
            trained += 1
            assert len(learned.new_logprobs) == len(learned.entropies) == len(ledger)
            assert all(e >= -1e-6 for e in learned.entropies) and any(e > 0 for e in learned.entropies)
    assert trained


def test_a_run_that_fails_says_why_in_its_directory(tmp_path: Path) -> None:
    with pytest.raises(TurnwiseError):
        run(tmp_path, "run=a", "training.max_logprob_gap=0", "learner.precision=bfloat16")
    status = read_status(RunDir.open(tmp_path / "a"))
    assert status is not None and status.state is State.FAILED and "disagree" in status.reason


def test_bfloat16_passes_the_logprob_gate_out_of_the_box_and_every_step_measures_the_gap(tmp_path: Path) -> None:
    """The largest difference of bfloat16 is far above what the mean may be; no knob is needed, and no extra pass."""
    report = run(
        tmp_path, "run=a", "learner.precision=bfloat16", "training.minibatches=2", "training.warn_logprob_gap=1e-9"
    )
    assert report.steps == 2
    log = (report.run / "log.txt").read_text()
    assert "sampler and learner log-probs differ by" in log and log.count("(training.warn_logprob_gap)") == 2
    steps = [line for line in lines(report) if "critic/score/mean" in line]
    for line in steps:
        mean, tail, most = (line[f"rollout_corr/abs_diff_{name}"] for name in ("mean", "p99", "max"))
        assert 0 < mean < tail <= most and mean < 0.02 and "rollout_corr/kl" in line
    ledgers = [
        ledger
        for trajectory in read_trajectories(report.run / "trajectories" / "step_000001.parquet")
        for ledger in trajectory.segments
    ]
    firsts = [ledger.training is not None and ledger.training.logprobs is not None for ledger in ledgers]
    assert any(firsts) and not all(firsts), "the first minibatch's, and of no later one"


def test_files_are_written_and_checkpoints_saved_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fsync and every hash of a step: by one other thread."""
    loop, seen = threading.get_ident(), dict[str, set[int]]()

    def spied(module: Any, name: str) -> None:
        real = getattr(module, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident())
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)

    spied(index, "write_trajectories")
    spied(checkpoints, "_digest")
    spied(RunDir, "append_jsonl")
    run(tmp_path, "training.eval_every=1")
    assert set(seen) == {"write_trajectories", "_digest", "append_jsonl"}
    assert len(set.union(*seen.values())) == 1 and loop not in set.union(*seen.values())


def test_the_policy_folder_loads_in_transformers_and_can_be_evaluated(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from turnwise import evaluate

    template = tmp_path / "other.jinja"
    template.write_text("{#- not the source's -#}" + load_template("chatml_hermes"))
    done = run(tmp_path, "training.steps=1", f"chat.template={template}")
    policy = done.run / "checkpoints" / "step_000001" / "policy"
    AutoModelForCausalLM.from_pretrained(policy)
    assert AutoTokenizer.from_pretrained(policy).chat_template == template.read_text()
    assert GenerationConfig.from_pretrained(policy).eos_token_id is not None
    recorded = done.run / "trajectories" / "step_000001.parquet"
    asked = config(tmp_path, f"sft.recorded=[{recorded}]", "sft.steps=1", f"chat.template={template}")
    tuned = fine_tune(asked, console=QUIET).policy
    assert {path.name: path.read_bytes() for path in tuned.iterdir() if path.name != "model.safetensors"} == {
        path.name: path.read_bytes() for path in policy.iterdir() if path.name != "model.safetensors"
    }
    report = evaluate(configure(f"model.path={policy}", "eval.samples=2", f"runs_dir={tmp_path}"), console=QUIET)
    assert report.sources["arithmetic"].failed == 0


PPO = ("algorithm.advantage=gae", "algorithm.kl_reward=0.01")
EPOCHS = ("training.minibatches=2", "training.epochs=2")


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param((*PPO, *EPOCHS), id="ppo, epochs"),  # every kind of state that a run keeps
        pytest.param((), id="grpo", marks=pytest.mark.long),
        pytest.param(PPO, id="ppo", marks=pytest.mark.long),
        pytest.param(EPOCHS, id="epochs", marks=pytest.mark.long),
    ],
)
def test_four_steps_equal_two_steps_resumed_for_two_more_bit_by_bit(
    tmp_path: Path, extra: tuple[str, ...], exact_engine: None
) -> None:
    whole = run(tmp_path, "run=whole", "training.steps=4", *extra)
    run(tmp_path, "run=parts", "training.steps=2", *extra)
    parts = run(tmp_path, "run=parts", "training.steps=4", "resume=auto", *extra)
    a, b = weights(whole, 4), weights(parts, 4)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    for step in range(4):
        one, two = (read_trajectories(r.run / "trajectories" / f"step_{step + 1:06d}.parquet") for r in (whole, parts))
        assert [t.segments for t in one] == [t.segments for t in two]
        assert [(t.sample.id, t.sibling, t.reward, t.advantage) for t in one] == [
            (t.sample.id, t.sibling, t.reward, t.advantage) for t in two
        ]
    trained = [line["step"] for line in lines(parts) if "critic/score/mean" in line]
    assert trained == [1, 2, 3, 4], "no step is logged twice"


def test_samples_are_used_in_order_none_skipped_none_twice(tmp_path: Path) -> None:
    run(tmp_path, "run=r", "training.steps=3")
    report = run(tmp_path, "run=r", "training.steps=8", "resume=auto")
    used = [
        sample_id
        for step in range(8)
        for sample_id in dict.fromkeys(
            t.sample.id for t in read_trajectories(report.run / "trajectories" / f"step_{step + 1:06d}.parquet")
        )
    ]
    assert len(used) == len(set(used)) == 24, "8 steps of 3 samples are exactly one epoch of 24"


@pytest.mark.long  # training/run/test_asynchronous.py has samples and ages for max_lag 0 and 2
def test_collection_ahead_of_the_weights_uses_the_same_samples_and_older_weights(tmp_path: Path) -> None:
    lagging = run(tmp_path, "run=lag", "training.max_lag=1", "training.steps=4")
    versions = [
        {
            turn.policy_version
            for t in read_trajectories(lagging.run / "trajectories" / f"step_{step + 1:06d}.parquet")
            for turn in t.turns
        }
        for step in range(4)
    ]
    assert versions[0] == {0}
    assert all(step - 1 <= version <= step for step, found in enumerate(versions) for version in found)
    on_policy = run(tmp_path, "run=on", "training.steps=4")
    for step in range(4):
        found = read_trajectories(on_policy.run / "trajectories" / f"step_{step + 1:06d}.parquet")
        assert {turn.policy_version for t in found for turn in t.turns} == {step}


def run_with_a_gradient(folder: Path, *overrides: str) -> tuple[TrainReport, dict[str, Any]]:
    """A run whose siblings always get different rewards, so that no gradient is zero by chance, and its last step."""
    (folder / "plug.py").write_text("def score(trajectory):\n    return float(trajectory.sibling % 2)\n")
    report = run(folder, f"scoring.scorers={{default: '{folder}/plug.py:score'}}", *overrides)
    line = [line for line in lines(report) if "critic/score/mean" in line][-1]
    assert 0 < line["actor/grad_norm"] < math.inf and math.isfinite(line["actor/pg_loss"]), line
    return report, line


@pytest.mark.parametrize("advantage", ["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "remax"])
def test_every_advantage_trains(tmp_path: Path, advantage: str) -> None:
    _, line = run_with_a_gradient(tmp_path, f"algorithm.advantage={advantage}", "training.steps=1")
    assert ("critic/vf_loss" in line) == (advantage == "gae")


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.loss=gspo", "algorithm.aggregation=sequence_mean_token_mean"),
        ("algorithm.loss=cispo",),
        ("algorithm.loss=reinforce", "algorithm.aggregation=sequence_sum_norm"),
        ("algorithm.kl_loss=0.01", "algorithm.entropy=0.001"),
        ("algorithm.kl_reward=0.01", "algorithm.kl_target=0.1"),
        ("algorithm.old_logprobs=learner", "algorithm.correction=token"),
        ("algorithm.old_logprobs=learner", "algorithm.correction=sequence", "algorithm.correction_mode=reject"),
        ("learner.lora_rank=4",),
        ("learner.lora_rank=4", "algorithm.kl_loss=0.01"),
        ("algorithm.advantage=gae", "learner.shared_critic=true"),
        ("training.drop_constant_groups=true",),
        ("rollout.max_tokens=120", "algorithm.overlong_tokens=60"),
        ("learner.gradient_checkpointing=true", "learner.decay=cosine", "learner.warmup=1", "training.steps=2"),
    ],
    ids=lambda overrides: ",".join(overrides),
)
def test_every_choice_trains(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    report, line = run_with_a_gradient(tmp_path, "training.steps=1", *overrides)
    steps = 2 if "training.steps=2" in overrides else 1
    assert report.steps == line["step"] == steps and 0 <= report.after["accuracy"] <= 1


def test_a_run_ends_at_its_target_or_its_budget(tmp_path: Path) -> None:
    assert "target" in run(tmp_path, "training.target=0.0", "training.eval_every=1").reason
    spent = run(tmp_path, "training.max_tokens=1", "training.steps=9")
    assert spent.steps == 1 and "max_tokens" in spent.reason


def test_the_sampler_writes_in_the_models_precision(tmp_path: Path) -> None:
    narrow = ("model.precision=bfloat16", "training.steps=1", "training.max_logprob_gap=1", "run=narrow")
    report = run(tmp_path, *narrow)
    assert {tensor.dtype for tensor in weights(report, 1).values()} == {torch.float32}, "what is trained is wide"
    said = (report.run / "log.txt").read_text()
    assert "log-probs differ by" in said and "differ by at most 0 " not in said, (
        "two formats cannot agree to the last bit"
    )
    with pytest.raises(ConfigError, match=r"model\.precision"):
        fine_tune(config(tmp_path, "model.precision=bfloat16"), console=QUIET)


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        (("training.group_size=1",), ConfigError, "a group of 1"),
        (("training.groups=25",), DataError, "25 samples"),
        (("engine=scripted",), ConfigError, "engine=scripted"),
        (("learner.device=cuda:99",), ConfigError, "learner.device=cuda:99"),
        (("algorithm.overlong_tokens=10",), ConfigError, "rollout.max_tokens"),
        (("training.minibatches=50",), ConfigError, "minibatches=50: a step has 12 episodes"),
        (("learner.lr=1e38", "training.minibatches=2"), TurnwiseError, "the episodes of the step are in"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_one_clear_error(
    tmp_path: Path, overrides: tuple[str, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        run(tmp_path, "training.steps=3", *overrides)
    assert text in str(caught.value)


def test_a_checkpoint_of_another_config_is_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path, "run=r", "training.steps=1")
    with pytest.raises(ConfigError, match=r"learner.lr was .* and is 0.5"):
        run(tmp_path, "run=r", "resume=auto", "learner.lr=0.5")
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"training.group_size was 4 and is 2"):
        run(tmp_path, "run=r", "resume=auto", "training.group_size=2")
    after = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    assert after == before, "a refused resume leaves the run as it was"
    with pytest.raises(ConfigError, match="exists"):
        run(tmp_path, "run=r")


def test_a_damaged_checkpoint_is_passed_over_and_said_so(tmp_path: Path) -> None:
    report = run(tmp_path, "run=r", "training.steps=2")
    os.truncate(report.run / "checkpoints" / "step_000002" / "learner.safetensors", 100)
    again = run(tmp_path, "run=r", "training.steps=2", "resume=auto")
    log = (again.run / "log.txt").read_text()
    assert "step_000002: learner.safetensors is damaged" in log and "resumed from step_000001" in log


MAIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a parent may have us ignore it
    "from turnwise.commands.cli import main; sys.exit(main())"
)


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", MAIN, "train", *SMALL, "training.steps=500", "run=r", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(path: Path, text: str, process: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if path.is_file() and text in path.read_text():
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError(f"{text!r} never appeared in {path}")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT])
def test_a_signal_ends_the_run_cleanly_with_a_checkpoint_and_the_resume_command(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, "training.save_every=0")
    wait_for(tmp_path / "runs" / "r" / "log.txt", "step 2/500", process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert "turnwise train run=r resume=auto" in out
    assert (tmp_path / "runs" / "r" / "checkpoints" / "latest").is_file()


@pytest.mark.long  # files are whole or not there (tests/storage), and a damaged or torn one is passed over (above)
def test_kill_nine_leaves_a_run_that_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    process = start(tmp_path, "training.save_every=2")
    wait_for(tmp_path / "runs" / "r" / "log.txt", "step 5/500", process)
    process.kill()
    process.communicate()
    recorded = list((tmp_path / "runs" / "r" / "trajectories").glob("*.parquet"))
    assert len(recorded) >= 5 and all(map(read_trajectories, recorded))
    runs = tmp_path / "runs"
    done = config(runs, "run=r", "resume=auto", "training.steps=6", "training.save_every=2")
    report = train(done, console=QUIET)
    assert report.steps == 6
    assert (
        "resumed from step_000004" in (report.run / "log.txt").read_text()
        or "resumed from step_000006" in (report.run / "log.txt").read_text()
    )
