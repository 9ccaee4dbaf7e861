"""Training on a GPU from end to end with the bundled model: taken without being told, exact where that is asked for."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from turnwise import configure
from turnwise.eval import evaluate
from turnwise.train import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SMALL = (
    "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=3", "training.group_size=4",
    "training.samples=24", "eval.samples=8", "training.eval_every=0", "training.save_every=0", "training.steps=2",
    "sampling.max_tokens=40",
)  # fmt: skip


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.max_lag=0",),
        ("training.max_lag=0", "engine.batch_invariant=true"),
        ("training.max_lag=0", "engine.sleep=true", "algorithm.kl_loss=0.001"),
        ("training.max_lag=1",),
        ("training.max_lag=1", "engine.batch_invariant=true"),
        ("training.max_lag=1", "learner.place=here"),
        ("training.max_lag=1", "learner.lora_rank=4"),
        ("training.max_lag=1", "model.implementation=transformers"),
    ],
    ids=" ".join,
)
def test_a_run_takes_the_gpu_and_its_log_probs_agree(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    report = train(configure(*SMALL, f"runs_dir={tmp_path}", "run=it", *overrides), console=Console(quiet=True))
    assert report.steps == 2
    lines = [json.loads(line) for line in (tmp_path / "it" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line]
    assert len(steps) == 2
    log = (tmp_path / "it" / "log.txt").read_text()
    gaps = [step["rollout_corr/abs_diff_mean"] for step in steps if "rollout_corr/abs_diff_mean" in step]
    print(overrides, gaps, [(step.get("gpu/idle_share"), step["gpu/memory_gib"]) for step in steps])
    assert all(step["gpu/memory_gib"] > 0 and 0.0 <= step["gpu/idle_share"] <= 1.0 for step in steps)
    apart = "training.max_lag=1" in overrides and "learner.place=here" not in overrides
    assert ("weights are handed over on cuda:0" in log) is apart, log
    if "engine.batch_invariant=true" in overrides:
        assert "sampler and learner log-probs are bitwise equal" in log, log
    else:
        assert all(gap < 0.05 for gap in gaps), gaps


def test_an_evaluation_of_the_gpu_is_as_good_as_the_cpu_s(tmp_path: Path) -> None:
    def accuracy(*overrides: str) -> float:
        config = configure(
            *SMALL,
            "eval.samples=64",
            "sampling.temperature=0",
            f"runs_dir={tmp_path}",
            f"run={len(overrides)}",
            *overrides,
        )
        return evaluate(config, console=Console(quiet=True)).accuracy or 0.0

    assert abs(accuracy() - accuracy("engine=torch", "engine.threads=1")) < 0.2
