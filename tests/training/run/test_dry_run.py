"""`turnwise train --dry-run`: the plan, the memory and an estimate from what was measured or recorded; no file is made."""

import contextlib
import http.server
import io
import json
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from turnwise.commands.cli import main
from turnwise.data.task_config import configure
from turnwise.reports.dry_run import Rates, forecast, recorded_rates

SMALL = (
    "training.groups=2", "training.group_size=2", "training.steps=4", "training.eval_every=2", "eval.samples=2",
    "training.samples=8", "engine.threads=1",
)  # fmt: skip


def command(*args: str, cwd: Path) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(args))
    return code, out.getvalue() + (err.getvalue() if code else "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dry")


@pytest.fixture(scope="module")
def tried(folder: Path) -> dict[str, Any]:
    """Where nothing was recorded: a part of a step is tried out."""
    code, said = command("train", "--dry-run", "--json", *SMALL, cwd=folder)
    assert code == 0 and "nothing was written" in said, said
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found | {"said": said, "left": list(folder.iterdir())}


def test_a_dry_run_prints_plan_memory_and_an_estimate_and_writes_nothing(tried: dict[str, Any]) -> None:
    assert tried["left"] == []
    said, estimate = tried["said"], tried["estimate"]
    for line in (
        "engine       torch",
        "algorithm    advantage grpo",
        "CPU memory, sampler: weights",
        "learner: weights",
    ):
        assert line in said
    assert "an estimate, measured just now with 2 groups of 2" in said
    assert estimate["seconds"] > 0 and estimate["steps"] == 4 and estimate["episodes"] == 4
    assert estimate["seconds"] == pytest.approx(
        4 * estimate["step_seconds"] + estimate["passes"] * estimate["pass_seconds"]
    )


def test_a_recorded_run_of_the_same_work_is_what_the_next_estimate_is_from(tried: dict[str, Any], folder: Path) -> None:
    assert command("train", "run=first", *SMALL, cwd=folder)[0] == 0
    before = sorted(folder.rglob("*"))
    code, said = command("train", "--dry-run", *SMALL, "training.groups=3", "training.max_minutes=0.0001", cwd=folder)
    assert code == 0 and "an estimate, from the rates of 3 steps of the run first" in said, said
    assert "(training.max_minutes; " in said and "4 steps of 6 episodes" in said
    left = command("train", "--dry-run", "run=first", "resume=auto", "training.steps=9", cwd=folder)[1]
    assert "5 steps of 4 episodes" in left
    assert sorted(folder.rglob("*")) == before
    with contextlib.chdir(folder):
        plan = (folder / "runs/first/plan.txt").read_text()
        assert recorded_rates(configure(*SMALL), 2, plan) is not None
        assert recorded_rates(configure(*SMALL, "sampling.max_tokens=7"), 2, plan) is None  # another work
        assert recorded_rates(configure(*SMALL), 2, plan.replace("engine       torch", "engine       cuda")) is None
        metrics = folder / "runs/first/metrics.jsonl"
        for damage in ("[1]\n" + "{}\n" * 9, '{"seconds": null}\n', "{"):
            metrics.write_text(damage)
            assert recorded_rates(configure(*SMALL), 2, plan) is None


def test_a_dry_run_refuses_what_training_would(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    code, said = command("train", "--dry-run", "training.group=4", cwd=folder)
    assert code == 2 and "did you mean 'training.groups'" in said
    code, said = command("train", "--dry-run", "engine=cuda", cwd=folder)
    assert code == 2 and "PyTorch sees no GPU" in said and len(said.strip().splitlines()) == 1
    assert sorted(folder.rglob("*")) == before


class Healthy(http.server.BaseHTTPRequestHandler):
    """A server that says it is well and what it is, and keeps what it is asked."""

    asked: ClassVar[list[str]] = []
    answers: ClassVar[dict[str, Any]] = {
        "/v1/models": {"data": [{"id": "policy", "max_model_len": 64}]},
        "/server_info": {"vllm_config": {
            "model_config": {"logprobs_mode": "processed_logprobs"}, "device_config": {"device": "cuda"},
            "parallel_config": {"worker_extension_cls": ""},
        }},
    }  # fmt: skip

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.answers.get(path)).encode())

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        pass


def test_a_dry_run_gives_running_servers_no_other_weights(folder: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        attached = ("engine=vllm_server", f"servers.addresses=['http://127.0.0.1:{server.server_port}']", "seed=77")
        code, said = command("train", "--dry-run", *attached, *SMALL[:-1], cwd=folder)
        server.shutdown()
    assert code == 2 and "would load other weights into servers that stay running" in said, said
    assert {asked.split()[0] for asked in Healthy.asked} == {"GET"} and "GET /health" in Healthy.asked


def test_an_estimate_counts_what_is_left_and_says_what_it_does_not_know() -> None:
    config = configure("training.steps=10", "training.groups=5", "training.group_size=2", "training.eval_every=4")
    found = forecast(config, 6, Rates(0.5, 0.2, 0.25, "from here"))
    assert (found.steps, found.step_seconds, found.learning_seconds) == (10, 5.0, 2.0)
    assert (found.passes, found.pass_seconds, found.seconds) == (2 + 4, 1.5, 59.0)
    assert forecast(config, 6, Rates(0.5, 0.2, 0.25, ""), done=8).seconds == 2 * 5 + 2 * 1.5
    unknown = forecast(config, 6, Rates(0.5, None, None, "from here"))
    assert unknown.seconds == 50.0
    assert "no learning" in next(unknown.lines()) and "not counted, none was timed" in next(unknown.lines())
