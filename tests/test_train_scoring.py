"""Training when scoring fails: the step goes on without the trajectories nobody could score, or the run stops."""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from turnwise import configure
from turnwise.errors import TurnwiseError
from turnwise.scoring.failures import scoring_failed
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.train import train

QUIET = Console(quiet=True)
SMALL = (
    "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=3", "training.group_size=4",
    "training.samples=24", "eval.samples=2", "training.eval_every=0", "training.save_every=0", "engine.threads=1",
    "training.steps=3", "sampling.max_tokens=40", "training.max_lag=0", "scoring.scorers={default: judge}",
)  # fmt: skip


TOLERANT = ("scoring.max_failures=1", "rollout.max_failures=1")


@pytest.fixture
def judge() -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = str(Path(__file__).parent.parent)
    process = subprocess.Popen([sys.executable, "examples/rule_judge/serve.py", "--port", str(port)], cwd=root)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1", process
    finally:
        process.kill()
        process.wait()


def options(url: str) -> str:
    return f"scoring.options={{judge: {{rule: gsm8k, base_urls: ['{url}'], retries: 0, timeout: 5, cache: null}}}}"


def test_a_judge_that_goes_away_leaves_trajectories_unscored_and_the_run_goes_on(judge, tmp_path: Path) -> None:
    url, process = judge
    log = tmp_path / "r" / "log.txt"

    def outage() -> None:
        while not (log.is_file() and "step 1/3" in log.read_text()):
            time.sleep(0.02)
        process.kill()

    killer = threading.Thread(target=outage, daemon=True)
    killer.start()
    config = configure(*SMALL, options(url), f"runs_dir={tmp_path}", "run=r", *TOLERANT)
    report = train(config, console=QUIET)
    killer.join(timeout=10)
    assert report.steps == 3
    first, *_, last = (
        read_trajectories(report.run / "trajectories" / f"step_{step + 1:06d}.parquet") for step in range(3)
    )
    assert not any(scoring_failed(t) for t in first) and all(t.reward is not None for t in first)
    lost = [t for t in last if scoring_failed(t)]
    assert lost and all(t.reward is None and not t.advantage for t in lost)
    assert all(t.reward == 1.0 for t in last if t not in lost), "the rule still says which answers are right"
    metrics = [json.loads(line) for line in (report.run / "metrics.jsonl").read_text().splitlines()]
    rates = [line["scoring/failure_rate"] for line in metrics if "scoring/failure_rate" in line]
    assert rates[-1] > 0


def test_a_judge_that_is_not_there_is_found_before_anything_is_written(tmp_path: Path) -> None:
    config = configure(*SMALL, options("http://127.0.0.1:9/v1"), f"runs_dir={tmp_path}/runs", "run=r")
    with pytest.raises(TurnwiseError, match="the judge gave no reply"):
        train(config, console=QUIET)
    assert not (tmp_path / "runs").exists()
